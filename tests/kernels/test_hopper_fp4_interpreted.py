"""The NVFP4 kernel's schedule in Pallas's interpreter, with race detection."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from vc_jax._decode import decode
from vc_jax.pallas_kernels import hopper_fp4

from .cases import Case, prepared_and_reference, relative_error
from .nvfp4_probabilities import probabilities

SMALL = hopper_fp4.Config(warpgroups=1, cluster=1, key_slots=2, value_slots=2)
CLUSTER = hopper_fp4.Config(warpgroups=2, cluster=2, key_slots=3, value_slots=2)


def attend(operands, config=SMALL):
    return hopper_fp4.attention(
        operands,
        out_dtype=jnp.float32,
        return_residual=True,
        config=config,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )


def check(case: Case, capfd, config=SMALL):
    prepared, expected, expected_lse = prepared_and_reference(case)
    out, lse = map(np.asarray, attend(decode(jax.tree.map(jnp.asarray, prepared)), config))
    assert "RACE" not in "".join(capfd.readouterr())
    # Codes of a few probabilities on an edge fall to the other side.
    assert relative_error(out, expected) < 2e-3
    finite = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isfinite(lse), finite)
    np.testing.assert_allclose(lse[finite], expected_lse[finite], atol=2e-2)


@pytest.mark.parametrize(
    "case",
    [
        Case("nvfp4", "exp"),
        Case("nvfp4", "exp", key_heads=2, smooth=False, length=600, logit_sigma=3.0),
        Case("nvfp4", "exp", rows=1, length=1),
        Case("nvfp4", "exp", batch=2, counts=(129, 0), smooth=False),
        # The largest score grows by hundreds of octaves from one step to the next.
        Case("nvfp4", "exp", length=600, logit_sigma=400.0, seed=3),
    ],
    ids=str,
)
def test_the_schedule_computes_what_the_reference_does_without_a_race(case, capfd):
    check(case, capfd)


def test_clusters_that_share_copies_do_not_race(capfd):
    check(Case("nvfp4", "exp", rows=300, length=1200), capfd, CLUSTER)


def test_codes_of_probabilities_are_the_reference_s():
    found = probabilities(attend, Case(rows=64, heads=1), head_dim=64)
    assert found.share(1) == 1.0
    assert found.share(0) > 0.999
    assert np.mean(found.same_scale) > 0.999
    assert len(np.unique(found.codes)) == 8


def test_means_of_any_size_keep_sums_finite():
    case = Case("nvfp4", "exp")
    prepared, _, _ = prepared_and_reference(case)
    prepared = jax.tree.map(jnp.asarray, prepared)
    huge = prepared._replace(block_means=jnp.full_like(prepared.block_means, 1e38))
    out, _ = attend(decode(huge))
    np.testing.assert_allclose(out, float(jnp.bfloat16(1e38)), rtol=1e-4)
