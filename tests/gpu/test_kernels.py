"""The attention kernels on the GPU, each held to the reference on identical codes.

What they promise as implementations of a call is tested in `tests/promises`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vc_jax.pallas_kernels import hopper, mma

from ..kernels.cases import Case, gain, prepared_and_reference, relative_error

pytestmark = pytest.mark.gpu

KERNELS = {hopper: ("9.0",), mma: ("8.9", "9.0", "12.0")}
"""Compute capabilities that each kernel is for."""
ULP = {jnp.float32: 0.0, jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-11}
"""Relative spacing of the output's dtype."""
FULL = Case(rows=300, length=1000, head_dim=128, heads=4, key_heads=2)


@pytest.fixture(params=KERNELS, ids=["hopper", "mma"])
def kernel(request):
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    if capability not in KERNELS[request.param]:
        pytest.skip(f"needs a GPU of compute capability {' or '.join(KERNELS[request.param])}")
    return request.param


def reference(kernel, case: Case):
    """`hopper` adds E4M3 products as its tensor core does; those of `mma` differ by card."""
    return prepared_and_reference(case, tensor_core=kernel is hopper)


def run(kernel, case: Case, dtype=jnp.float32):
    prepared, expected, expected_lse = reference(kernel, case)
    out, lse = jax.jit(
        lambda x: kernel.attention(x, softmax=case.softmax, out_dtype=dtype, return_residual=True)
    )(prepared)
    return np.asarray(out.astype(jnp.float32)), np.asarray(lse), expected, expected_lse


def check(kernel, case: Case, dtype=jnp.float32):
    out, lse, expected, expected_lse = run(kernel, case, dtype)
    assert relative_error(out, expected) <= 2e-3 + ULP[dtype]
    assert 0.998 <= gain(out, expected) <= 1.002
    finite = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isfinite(lse), finite)
    error = np.abs(lse[finite] - expected_lse[finite])
    if kernel is mma and case.preset == "fp8":
        # Scores that round otherwise move a row's anchor by some of its steps, ln 2 / 128: that
        # shows in single rows of few keys, never in all.
        assert error.max() <= 3 * np.log(2) / 128
        assert np.sqrt(np.mean(error**2)) <= 2e-3
    else:
        assert error.max() <= 2e-3


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("softmax", hopper.SOFTMAX)
@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_every_softmax_agrees_with_the_reference(kernel, preset, softmax, smooth):
    check(kernel, dataclasses.replace(FULL, preset=preset, softmax=softmax, smooth=smooth))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_output_dtypes_and_head_dims(kernel, preset, head_dim, dtype):
    check(kernel, dataclasses.replace(FULL, preset=preset, head_dim=head_dim), dtype)


@pytest.mark.parametrize("preset", ["fp8", "int8"])
@pytest.mark.parametrize(
    ("rows", "length"), [(1, 1), (9, 9), (1001, 503), (503, 1001), (64, 4096), (129, 2048)]
)
def test_lengths_of_queries_and_keys(kernel, rows, length, preset):
    check(kernel, Case(preset=preset, rows=rows, length=length, head_dim=128))


def test_batch_rows_of_their_own_lengths(kernel):
    check(kernel, Case(batch=4, counts=(0, 1, 300, 129), rows=64, head_dim=128))


@pytest.mark.parametrize("preset", ["fp8", "int8"])
@pytest.mark.parametrize("sigma", [0.1, 3.0, 30.0, 1e3, 1e6])
def test_flat_peaked_and_huge_scores_stay_finite_and_right(kernel, preset, sigma):
    case = Case(preset=preset, rows=200, length=1500, logit_sigma=sigma)
    prepared, expected, _ = prepared_and_reference(case)
    out = np.asarray(
        kernel.attention(jax.tree.map(jnp.asarray, prepared), out_dtype=jnp.float32)[0]
    )
    assert np.all(np.isfinite(out))
    assert relative_error(out, expected) <= (8e-3 if sigma <= 30 else 0.1)


@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_every_length_from_1_to_300_without_recompiling(kernel, preset):
    case = Case(preset=preset, rows=64, length=300, head_dim=128)
    compiled = []

    @jax.jit
    def compute(prepared):
        compiled.append(1)
        return kernel.attention(prepared, out_dtype=jnp.float32)[0]

    # As in `check`: single rows of few keys.
    rounds_otherwise = kernel is mma and preset == "fp8"
    errors = []
    for count in range(1, 301):
        prepared, expected, _ = reference(kernel, dataclasses.replace(case, counts=(count,)))
        out = np.asarray(compute(prepared))
        errors.append(relative_error(out, expected))
        assert errors[-1] <= (1e-2 if rounds_otherwise else 2e-3), count
        assert 0.998 <= gain(out, expected) <= 1.002, count
    assert np.mean(errors) <= (3e-3 if rounds_otherwise else 2e-3)
    assert len(compiled) == 1


@pytest.mark.parametrize(("length", "preset"), [(75600, "int8"), (151000, "fp8"), (218000, "int8")])
def test_long_sequences(kernel, length, preset):
    check(kernel, Case(preset=preset, rows=100, length=length, heads=1, head_dim=128))


def test_memory_full_of_nan_does_not_show(kernel):
    poison = [jnp.full((1 << 28,), jnp.nan) for _ in range(4)]
    jax.block_until_ready(poison)
    del poison
    for rows in (1, 70, 200):
        case = Case(preset="int8", rows=rows, length=301, head_dim=128)
        out, lse, expected, _ = run(kernel, case)
        assert np.all(np.isfinite(out))
        assert np.all(np.isfinite(lse))
        assert relative_error(out, expected) <= 2e-3


def test_repeated_runs_are_bit_identical(kernel):
    prepared, _, _ = prepared_and_reference(Case(rows=1000, length=5000, head_dim=128))
    compute = jax.jit(lambda x: kernel.attention(x, return_residual=True))
    first = jax.tree.map(np.asarray, compute(prepared))
    for _ in range(20):
        for got, want in zip(compute(prepared), first, strict=True):
            np.testing.assert_array_equal(np.asarray(got), want)
