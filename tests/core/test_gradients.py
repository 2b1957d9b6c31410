"""The backward pass: that of unquantised attention, and nothing from what does not count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax

from . import oracles
from .cases import CONFIGS, LENGTHS, QUERY_LENGTHS, ragged, relative_l2, same_bytes

KEY_VALID = oracles.prefix(LENGTHS, 300)
QUERY_VALID = oracles.prefix(QUERY_LENGTHS, 9)
COTANGENT = np.random.default_rng(0).normal(size=(6, 9, 4, 64)).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("config", "through_lse"))
def gradients(query, key, value, scale, cotangent, config, through_lse=False):
    """Gradients of query, key, value and scale on the ragged batch."""

    def call(query, key, value, scale):
        return vc_jax.dot_product_attention(
            query,
            key,
            value,
            config=config,
            scale=scale,
            key_value_seq_lengths=jnp.asarray(LENGTHS),
            query_seq_lengths=jnp.asarray(QUERY_LENGTHS),
            return_residual=True,
        )

    (out, lse), pull = jax.vjp(call, query, key, value, scale)
    toward_lse = jnp.where(jnp.isfinite(lse), 1.0, 0.0) if through_lse else jnp.zeros_like(lse)
    return pull((cotangent.astype(out.dtype), toward_lse))


def exact(inputs, scale=0.125):
    return oracles.attention_gradient(
        *inputs, COTANGENT, scale=scale, key_valid=KEY_VALID, query_valid=QUERY_VALID
    )


@pytest.mark.parametrize("factor", [30.0, 1000.0])
def test_gradients_stay_right_at_logits_in_the_hundreds_and_thousands(factor):
    query, key, value = ragged()
    inputs = (factor * query, key, value)
    got = gradients(*inputs, jnp.float32(0.125), COTANGENT, CONFIGS["int8"])
    for gradient, want in zip(got[:3], exact(inputs)):
        assert relative_l2(gradient, want) < 2e-3


def test_gradients_match_those_of_jax_nn():
    query, key, value = (x[4:] for x in ragged())
    mask = jnp.asarray(KEY_VALID)[4:, None, None, :]

    def loss(attention):
        def total(*arrays):
            return jnp.sum(attention(*arrays, mask=mask) * COTANGENT[4:])

        return jax.jit(jax.grad(total, (0, 1, 2)))(query, key, value)

    ours = loss(functools.partial(vc_jax.dot_product_attention, config="fp8"))
    for got, want in zip(ours, loss(jax.nn.dot_product_attention)):
        assert relative_l2(got, want) < 1e-5


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_what_does_not_count_gets_zero_gradients_and_passes_none_on(name, garbage):
    """Padded keys and queries and rows without a key, whatever they and their cotangents hold."""
    query, key, value = ragged()
    live = (QUERY_VALID & KEY_VALID[:, :1])[:, :, None, None]
    keep = KEY_VALID[:, :, None, None]
    dirty = (
        jnp.where(live, query, garbage),
        jnp.where(keep, key, garbage),
        jnp.where(keep, value, garbage),
    )
    cotangent = np.where(live, COTANGENT, np.float32(garbage))
    clean = gradients(*ragged(), jnp.float32(0.125), COTANGENT, CONFIGS[name])
    got = gradients(*dirty, jnp.float32(0.125), cotangent, CONFIGS[name])
    for first, second in zip(clean, got):
        np.testing.assert_array_equal(first, second)
    for gradient, counts in zip(got, (live, keep, keep)):
        assert (np.asarray(gradient)[~np.broadcast_to(counts, gradient.shape)] == 0).all()


def test_a_nan_that_arrives_at_a_valid_query_does_not_reach_a_padded_key():
    cotangent = np.where(np.arange(9)[:, None, None] == 3, np.float32(np.nan), COTANGENT)
    got = gradients(*ragged(), jnp.float32(0.125), cotangent, CONFIGS["int8"])
    for gradient in got[1:3]:
        assert (np.asarray(gradient)[~KEY_VALID] == 0).all()
        assert np.isnan(np.asarray(gradient)[5]).all()


@pytest.mark.parametrize("scale", [0.0, -0.125, 0.125, 2.0])
def test_the_scale_has_a_gradient(scale):
    got = gradients(*ragged(), jnp.float32(scale), COTANGENT, CONFIGS["int8"])[3]
    assert float(got) == pytest.approx(exact(ragged(), scale)[3], rel=1e-3)


def test_the_normaliser_is_not_differentiable():
    without = gradients(*ragged(), jnp.float32(0.125), COTANGENT, CONFIGS["int8"])
    with_lse = gradients(
        *ragged(), jnp.float32(0.125), COTANGENT, CONFIGS["int8"], through_lse=True
    )
    same_bytes(without, with_lse)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_gradients_have_the_dtypes_of_their_inputs(dtype):
    query, key, value = ragged()
    inputs = (query.astype(dtype), key, value.astype(dtype))
    got = gradients(*inputs, jnp.float32(0.125), COTANGENT, CONFIGS["int8"])
    assert [x.dtype for x in got] == [dtype, jnp.float32, dtype, jnp.float32]
    rounded = COTANGENT.astype(dtype)
    want = oracles.attention_gradient(
        *inputs, rounded, scale=0.125, key_valid=KEY_VALID, query_valid=QUERY_VALID
    )
    for gradient, expected in zip(got, want):
        assert relative_l2(gradient, expected) < 2.0**-8


def test_a_nan_that_counts_reaches_the_gradients():
    query, key, value = ragged()
    dirty = (query, key, value.at[4, 100, 1, 3].set(jnp.nan))
    got = gradients(*dirty, jnp.float32(0.125), COTANGENT, CONFIGS["int8"])
    assert np.isnan(np.asarray(got[0])[4, :, 2:]).all()
    assert np.isfinite(np.asarray(got[0])[4, :, :2]).all()
    assert all(np.isfinite(np.asarray(x)[5]).all() for x in got[:3])


def test_second_derivatives_are_those_of_unquantised_attention():
    rng = np.random.default_rng(1)
    query, key, value, g, h = (
        jnp.asarray(rng.normal(size=(1, n, 1, 16)), jnp.float32) for n in (5, 140, 140, 5, 5)
    )

    def product(attention):
        def gradient(q):
            return jax.grad(lambda q: jnp.sum(attention(q, key, value) * g))(q)

        return jax.jit(jax.grad(lambda q: jnp.sum(gradient(q) * h)))(query)

    got = product(functools.partial(vc_jax.dot_product_attention, config="int8"))
    assert relative_l2(got, product(jax.nn.dot_product_attention)) < 1e-4


def test_forward_mode_is_refused_not_wrong():
    query, key, value = (x[:1, :5] for x in ragged())
    with pytest.raises(TypeError, match="no forward-mode derivative"):
        jax.jvp(lambda q: vc_jax.dot_product_attention(q, key, value), (query,), (query,))
