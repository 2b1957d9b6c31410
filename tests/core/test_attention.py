"""The public call on XLA; what every implementation promises is in `tests/promises`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax

from . import oracles
from .cases import (
    CONFIGS,
    attend,
    attend_real,
    exact_real,
    jaxpr_equations,
    lse_error,
    ragged,
    relative_l2,
    same_bytes,
    video_like,
)


def test_the_query_decides_the_dtype_and_defaults_are_int8_and_the_scale_of_the_head_size():
    query, key, value = video_like(3, 1, 9, 130, 2, 1, 40)
    narrow = query.astype(jnp.bfloat16)
    inputs = (narrow, key, value.astype(jnp.float16))
    out = vc_jax.dot_product_attention(*inputs)
    want, _ = oracles.attention(narrow, key, value)
    assert out.dtype == jnp.bfloat16
    assert relative_l2(out, want) < 0.02
    same_bytes(out, vc_jax.dot_product_attention(*inputs, config="int8", scale=40**-0.5))


def test_the_bf16_preset_computes_in_the_dtype_of_the_inputs():
    """Probabilities too are rounded to it: about as well as in jax.nn."""
    inputs = video_like(2, 1, 9, 130, 2, 1, 64, jnp.bfloat16)
    want, want_lse = oracles.attention(*inputs)
    out, lse = attend(*inputs, config="bf16", return_residual=True)
    assert out.dtype == jnp.bfloat16
    plain = relative_l2(jax.nn.dot_product_attention(*inputs), want)
    assert relative_l2(out, want) < 1.5 * plain
    assert lse.dtype == jnp.float32
    assert lse_error(lse, want_lse) < 1e-5


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_normaliser_is_that_of_the_uncentred_scores_of_a_real_head(name):
    """Its mean key is 37 long in one channel: the scores are shifted by up to 280 nats."""
    out, lse = attend_real(CONFIGS[name])
    want, want_lse = exact_real()
    assert np.abs(want_lse).max() > 100
    assert np.median(np.abs(np.asarray(lse) - want_lse)) < 0.05
    assert lse_error(lse, want_lse) < (0.3 if name == "int8" else 0.8)
    assert relative_l2(out, want) < (0.1 if name == "int8" else 0.2)


@pytest.mark.parametrize("name", ["bf16", "int8", "fp8", "nvfp4"])
def test_every_matrix_product_runs_at_highest_precision(name):
    """No TF32 in the oracle: floats say so themselves, products of bfloat16 are exact."""
    inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ragged()]

    def loss(*arrays):
        return jnp.sum(vc_jax.dot_product_attention(*arrays, config=name))

    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2)))(*inputs)
    products = [e for e in jaxpr_equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) >= 5
    highest = (jax.lax.Precision.HIGHEST,) * 2

    def is_exact(product):
        halves = all(v.aval.dtype == jnp.bfloat16 for v in product.invars)
        return halves and product.params["preferred_element_type"] == jnp.float32

    assert all(e.params["precision"] == highest or is_exact(e) for e in products)
    assert any(e.params["precision"] == highest for e in products)


@pytest.mark.parametrize("name", ["bf16", "int8", "nvfp4"])
def test_memory_grows_with_the_number_of_tokens_not_with_its_square(name):
    rows, length, size = 4096, 8192, 64
    shape = jax.ShapeDtypeStruct((1, rows, 1, size), jnp.float32)
    keys = jax.ShapeDtypeStruct((1, length, 1, size), jnp.float32)

    def loss(*arrays):
        return jnp.sum(vc_jax.dot_product_attention(*arrays, config=name, implementation="xla"))

    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2)))(shape, keys, keys)
    largest = max(
        int(np.prod(v.aval.shape)) for e in jaxpr_equations(jaxpr.jaxpr) for v in e.outvars
    )
    assert largest <= (rows + length) * 256
