"""The Hopper kernel's schedule in Pallas's interpreter, with race detection."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from vc_jax.pallas_kernels import hopper

from .cases import Case, prepared_and_reference, relative_error

SMALL = hopper.Config(warpgroups=1, cluster=1, key_slots=2, value_slots=2)
CLUSTER = hopper.Config(warpgroups=2, cluster=2, key_slots=2, value_slots=3)


def run(case: Case, config: hopper.Config, capfd=None):
    prepared, expected, expected_lse = prepared_and_reference(case)
    out, lse = hopper.attention(
        jax.tree.map(jnp.asarray, prepared),
        softmax=case.softmax,
        out_dtype=jnp.float32,
        return_residual=True,
        config=config,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    out, lse = np.asarray(out), np.asarray(lse)
    if capfd is not None:
        assert "RACE" not in "".join(capfd.readouterr())
    return out, lse, expected, expected_lse


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(preset="int8", key_heads=2),
        Case(softmax="expcast_running", logit_sigma=3.0, length=600),
        Case(preset="int8", softmax="exp", length=257),
        Case(smooth=False, rows=1, length=1),
        Case(batch=2, counts=(300, 0)),
        Case(batch=2, counts=(129, 256), preset="int8", smooth=False),
    ],
    ids=str,
)
def test_the_schedule_computes_what_the_reference_does_without_a_race(case, capfd):
    out, lse, expected, expected_lse = run(case, SMALL, capfd)
    assert relative_error(out, expected) < 1e-5
    finite = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isfinite(lse), finite)
    np.testing.assert_allclose(lse[finite], expected_lse[finite], atol=2e-5)


@pytest.mark.parametrize("smooth", [True, False])
def test_clusters_that_share_copies_do_not_race(smooth, capfd):
    # Seven steps go round both rings more than twice and leave a group of means half full.
    case = Case(rows=300, length=1700, smooth=smooth)
    out, _, expected, _ = run(case, CLUSTER, capfd)
    assert relative_error(out, expected) < 1e-5


def test_rows_whose_maximum_jumps_are_rescaled(capfd):
    # The largest score grows by hundreds of octaves from one step to the next.
    case = Case(preset="int8", length=900, logit_sigma=400.0, seed=3)
    out, _, expected, _ = run(case, SMALL, capfd)
    assert relative_error(out, expected) < 1e-5
