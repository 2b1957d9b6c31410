"""The `mma` kernel on the GPU, held to the reference on identical codes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vc_jax.pallas_kernels import mma

from ..kernels.cases import Case, gain, prepared_and_reference, relative_error

pytestmark = pytest.mark.gpu

ULP = {jnp.float32: 0.0, jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-11}
FULL = Case(rows=300, length=1000, head_dim=128, heads=4, key_heads=2)


@pytest.fixture(scope="module", autouse=True)
def _on_a_supported_gpu():
    if str(getattr(jax.devices()[0], "compute_capability", "")) not in ("8.9", "9.0", "12.0"):
        pytest.skip("needs a GPU of compute capability 8.9, 9.0 or 12.0")


def run(case: Case, dtype=jnp.float32):
    prepared, expected, expected_lse = prepared_and_reference(case)
    out, lse = jax.jit(
        lambda x: mma.attention(x, softmax=case.softmax, out_dtype=dtype, return_residual=True)
    )(prepared)
    return np.asarray(out.astype(jnp.float32)), np.asarray(lse), expected, expected_lse


def check(case: Case, dtype=jnp.float32):
    out, lse, expected, expected_lse = run(case, dtype)
    assert relative_error(out, expected) <= 2e-3 + ULP[dtype], case
    assert 0.998 <= gain(out, expected) <= 1.002
    finite = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isfinite(lse), finite)
    np.testing.assert_allclose(lse[finite], expected_lse[finite], atol=5e-3)


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("softmax", mma.SOFTMAX)
@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_every_softmax_agrees_with_the_reference(preset, softmax, smooth):
    check(dataclasses.replace(FULL, preset=preset, softmax=softmax, smooth=smooth))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_output_dtypes_and_head_dims(preset, head_dim, dtype):
    check(dataclasses.replace(FULL, preset=preset, head_dim=head_dim), dtype)


@pytest.mark.parametrize("preset", ["fp8", "int8"])
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (9, 9), (1001, 503), (64, 4096)])
def test_lengths_of_queries_and_keys(rows, length, preset):
    check(Case(preset=preset, rows=rows, length=length, head_dim=128))


def test_every_length_from_1_to_300_without_recompiling():
    case = Case(preset="int8", rows=64, length=300, head_dim=128)
    kernel = jax.jit(lambda x: mma.attention(x, out_dtype=jnp.float32)[0])
    for count in range(1, 301):
        prepared, expected, _ = prepared_and_reference(dataclasses.replace(case, counts=(count,)))
        assert relative_error(np.asarray(kernel(prepared)), expected) <= 2e-3, count


def test_batch_rows_of_their_own_lengths():
    check(Case(batch=4, counts=(0, 1, 300, 129), rows=64, head_dim=128))


@pytest.mark.parametrize("sigma", [30.0, 1e6])
def test_peaked_rows(sigma):
    out, _, expected, _ = run(Case(preset="int8", rows=128, length=1500, logit_sigma=sigma))
    assert np.all(np.isfinite(out))
    assert relative_error(out, expected) <= (8e-3 if sigma == 30.0 else 0.1)


@pytest.mark.parametrize("length", [75600, 218000])
def test_long_sequences(length):
    check(Case(preset="int8", rows=100, length=length, heads=1, head_dim=128))


def test_repeated_runs_are_bit_identical():
    prepared, _, _ = prepared_and_reference(Case(rows=1000, length=5000, head_dim=128))
    kernel = jax.jit(lambda x: mma.attention(x, return_residual=True))
    first = jax.tree.map(np.asarray, kernel(prepared))
    for _ in range(20):
        for got, want in zip(kernel(prepared), first, strict=True):
            np.testing.assert_array_equal(np.asarray(got), want)
