"""The Hopper kernel on the GPU, held to the reference on identical codes.

What it promises as the implementation of a call is tested in `tests/promises`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax.pallas_kernels import hopper

from ..kernels.cases import (
    Case,
    gain,
    inputs,
    prepared_and_reference,
    relative_error,
)

pytestmark = pytest.mark.gpu

ULP = {jnp.float32: 0.0, jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-11}
"""Relative spacing of the output's dtype."""
FULL = Case(rows=300, length=1000, head_dim=128, heads=4, key_heads=2)


@pytest.fixture(scope="module", autouse=True)
def _on_hopper():
    if str(getattr(jax.devices()[0], "compute_capability", "")) != "9.0":
        pytest.skip("needs a GPU of compute capability 9.0")


def run(case: Case, dtype=jnp.float32, config=None, **arguments):
    prepared, expected, expected_lse = prepared_and_reference(case, tensor_core=True)
    out, lse = jax.jit(
        lambda x: hopper.attention(
            x,
            softmax=case.softmax,
            out_dtype=dtype,
            return_residual=True,
            config=config,
            **arguments,
        )
    )(prepared)
    return np.asarray(out.astype(jnp.float32)), np.asarray(lse), expected, expected_lse


def check(case: Case, dtype=jnp.float32, config=None):
    out, lse, expected, expected_lse = run(case, dtype, config)
    error = relative_error(out, expected)
    assert error <= 2e-3 + ULP[dtype], (case, error)
    assert 0.998 <= gain(out, expected) <= 1.002
    finite = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isfinite(lse), finite)
    np.testing.assert_allclose(lse[finite], expected_lse[finite], atol=2e-3)


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("softmax", hopper.SOFTMAX)
@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_every_softmax_agrees_with_the_reference(preset, softmax, smooth):
    check(dataclasses.replace(FULL, preset=preset, softmax=softmax, smooth=smooth))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_output_dtypes_and_head_dims(preset, head_dim, dtype):
    check(dataclasses.replace(FULL, preset=preset, head_dim=head_dim), dtype)


@pytest.mark.parametrize("preset", ["fp8", "int8"])
@pytest.mark.parametrize(
    ("rows", "length"), [(1, 1), (9, 9), (1001, 503), (503, 1001), (64, 4096), (129, 2048)]
)
def test_lengths_of_queries_and_keys(rows, length, preset):
    check(Case(preset=preset, rows=rows, length=length, head_dim=128))


@pytest.mark.parametrize("preset", ["fp8", "int8"])
@pytest.mark.parametrize("sigma", [0.1, 3.0, 30.0])
def test_flat_and_peaked_rows(preset, sigma):
    out, _, expected, _ = run(Case(preset=preset, rows=256, length=2048, logit_sigma=sigma))
    assert np.all(np.isfinite(out))
    assert relative_error(out, expected) <= 8e-3


@pytest.mark.parametrize("preset", ["fp8", "int8"])
@pytest.mark.parametrize("sigma", [1e3, 1e6])
def test_huge_logits_stay_finite_and_right(preset, sigma):
    out, _, expected, _ = run(Case(preset=preset, rows=128, length=1500, logit_sigma=sigma))
    assert np.all(np.isfinite(out))
    assert relative_error(out, expected) <= 0.1


def test_every_length_from_1_to_300_without_recompiling():
    case = Case(rows=64, length=300, head_dim=128)
    compiled = []

    @jax.jit
    def kernel(prepared):
        compiled.append(1)
        return hopper.attention(prepared, out_dtype=jnp.float32)[0]

    for count in range(1, 301):
        prepared, expected, _ = prepared_and_reference(
            dataclasses.replace(case, counts=(count,)), tensor_core=True
        )
        out = np.asarray(kernel(prepared))
        assert relative_error(out, expected) <= 2e-3, count
        assert 0.998 <= gain(out, expected) <= 1.002, count
    assert len(compiled) == 1


def test_memory_full_of_nan_does_not_show():
    poison = [jnp.full((1 << 28,), jnp.nan) for _ in range(4)]
    jax.block_until_ready(poison)
    del poison
    for rows in (1, 70, 200):
        out, lse, expected, _ = run(Case(rows=rows, length=301, head_dim=128))
        assert np.all(np.isfinite(out))
        assert np.all(np.isfinite(lse))
        assert relative_error(out, expected) <= 2e-3


def test_repeated_runs_are_bit_identical():
    prepared, _, _ = prepared_and_reference(Case(rows=1000, length=5000, head_dim=128))
    kernel = jax.jit(lambda x: hopper.attention(x, return_residual=True))
    first = jax.tree.map(np.asarray, kernel(prepared))
    for _ in range(20):
        for got, want in zip(kernel(prepared), first, strict=True):
            np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("config", ["fp8", "int8"])
@pytest.mark.parametrize("length", [4096, 37710, 37837])
def test_the_whole_call_is_as_close_to_exact_as_the_reference(config, length):
    case = Case(rows=256, length=length, heads=1, head_dim=128)
    tensors = [x.astype(jnp.bfloat16) for x in inputs(case)]
    errors, gains = {}, {}
    exact = exact_attention(*tensors)
    for implementation in ("hopper", "xla"):
        out = vc_jax.dot_product_attention(*tensors, config=config, implementation=implementation)
        errors[implementation] = relative_error(out.astype(jnp.float32), exact)
        gains[implementation] = gain(out.astype(jnp.float32), exact)
    assert errors["hopper"] <= 1.1 * errors["xla"]
    assert 0.998 <= gains["hopper"] <= 1.002


def exact_attention(query, key, value) -> np.ndarray:
    """Attention in float64 on the CPU."""
    query, key, value = (np.asarray(x.astype(jnp.float32), np.float64) for x in (query, key, value))
    out = np.empty_like(query)
    for b, n in np.ndindex(query.shape[0], query.shape[2]):
        k = n // (query.shape[2] // key.shape[2])
        scores = query[b, :, n] @ key[b, :, k].T / np.sqrt(query.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[b, :, n] = weights @ value[b, :, k] / weights.sum(-1, keepdims=True)
    return out


@pytest.mark.parametrize(("length", "preset"), [(75600, "int8"), (151000, "fp8"), (218000, "int8")])
def test_long_sequences(length, preset):
    check(Case(preset=preset, rows=100, length=length, heads=1, head_dim=128))


def test_indices_past_two_to_the_31():
    heads, length = 56, 218_000
    rows = 192
    shape = (1, length, heads, 128)
    keys = jax.random.split(jax.random.key(0), 3)
    draw = jax.jit(lambda k: jax.random.normal(k, shape, jnp.bfloat16))
    query, key, value = (draw(k) for k in keys)
    config = dataclasses.replace(vc_jax.PRESETS["fp8"], smooth_values=False)
    call = jax.jit(
        lambda *x: vc_jax.dot_product_attention(*x, config=config, implementation="hopper")
    )
    out = call(query, key, value)
    tail = np.asarray(out[:, -rows:, -1:].astype(jnp.float32))
    del out
    expected = call(query[:, -rows:, -1:], key[:, :, -1:], value[:, :, -1:])
    assert relative_error(tail, np.asarray(expected.astype(jnp.float32))) <= 4e-3


def test_the_dispatcher_takes_the_kernel():
    shape = jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.bfloat16)
    assert vc_jax.explain(shape, shape, shape, config="int8").implementation == "hopper"
    assert vc_jax.explain(shape, shape, shape, config="bf16").implementation == "cudnn"
    odd = jax.ShapeDtypeStruct((1, 512, 2, 96), jnp.bfloat16)
    assert "head dim" in vc_jax.explain(odd, odd, odd).reasons["hopper"]
