"""Whole calls by the Hopper kernel on the GPU; `test_kernels.py` holds the kernel alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax

from ..kernels.cases import Case, gain, inputs, relative_error

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _on_hopper():
    if str(getattr(jax.devices()[0], "compute_capability", "")) != "9.0":
        pytest.skip("needs a GPU of compute capability 9.0")


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
