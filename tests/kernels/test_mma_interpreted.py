"""The schedule of the `mma` kernel in Pallas's interpreter, with race detection."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from vc_jax.pallas_kernels import mma

from .cases import Case, prepared_and_reference, relative_error


def run(case: Case, capfd=None):
    prepared, expected, expected_lse = prepared_and_reference(case)
    out, lse = mma.attention(
        jax.tree.map(jnp.asarray, prepared),
        softmax=case.softmax,
        out_dtype=jnp.float32,
        return_residual=True,
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
        Case(preset="int8", softmax="exp", key_heads=2, length=257),
        Case(softmax="expcast_running", logit_sigma=3.0, length=600),
        Case(batch=2, counts=(129, 256), preset="int8", smooth=False),
        # Six steps leave a group of means half full.
        Case(rows=1, length=1300),
    ],
    ids=str,
)
def test_the_schedule_computes_what_the_reference_does_without_a_race(case, capfd):
    out, lse, expected, expected_lse = run(case, capfd)
    assert relative_error(out, expected) < 1e-5
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5)


def test_a_row_without_keys_is_zero_and_minus_infinity():
    out, lse, _, _ = run(Case(batch=2, counts=(0, 300)))
    assert not out[0].any()
    assert np.all(np.isneginf(lse[0]))
    assert np.all(np.isfinite(lse[1]))
