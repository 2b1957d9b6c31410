"""Unquantised attention, block by block, and its gradient.

The forward pass is the preset `"bf16"`; the backward pass is that of every configuration
(straight-through: the gradient of unquantised attention at the same inputs). Both hold O(T·128)
scores at a time. Invalid keys are replaced by zeros before anything is computed, so whatever bytes
they hold, NaN included, reaches neither a result nor a gradient.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ._arguments import check_shapes
from ._public import public
from ._quantize import largest_magnitude
from ._tracing import filled, jit
from .pallas_kernels.layout import BLOCK


class _Rows(NamedTuple):
    """Keys and values in blocks [n, B, K, 128, H] and their validity [n, B, 128]."""

    key: Array
    value: Array
    valid: Array


def _group(tokens: Float[Array, "b t n h"], heads: int) -> Float[Array, "b k g t h"]:
    batch, length, _, size = tokens.shape
    return jnp.swapaxes(tokens, 1, 2).reshape(batch, heads, -1, length, size)


def _ungroup(rows: Float[Array, "b k g t h"]) -> Float[Array, "b t n h"]:
    batch, _, _, length, size = rows.shape
    return jnp.swapaxes(rows.reshape(batch, -1, length, size), 1, 2)


def _blocks(tokens: Float[Array, "b s k h"]) -> Float[Array, "n b k 128 h"]:
    pad = -tokens.shape[1] % BLOCK
    tokens = jnp.pad(tokens, ((0, 0), (0, pad), (0, 0), (0, 0)))
    batch, length, heads, size = tokens.shape
    tokens = tokens.reshape(batch, length // BLOCK, BLOCK, heads, size)
    return tokens.transpose(1, 0, 3, 2, 4)


def _unblock(blocks: Float[Array, "n b k 128 h"], length: int) -> Float[Array, "b s k h"]:
    count, batch, heads, _, size = blocks.shape
    tokens = blocks.transpose(1, 0, 3, 2, 4).reshape(batch, count * BLOCK, heads, size)
    return tokens[:, :length]


def _rows(key: Array, value: Array, key_valid: Array | None) -> _Rows:
    batch, length = key.shape[:2]
    if key_valid is None:
        key_valid = jnp.ones((batch, length), bool)
    mask = key_valid[:, :, None, None]
    valid = jnp.pad(key_valid, ((0, 0), (0, -length % BLOCK)))
    valid = valid.reshape(batch, -1, BLOCK).transpose(1, 0, 2)
    return _Rows(_blocks(jnp.where(mask, key, 0)), _blocks(jnp.where(mask, value, 0)), valid)


def _value_unit(rows: _Rows) -> Float[Array, "b k 1 1 1"]:
    """A power of two by which sums of the values of a head, however large, stay finite."""
    if rows.value.dtype == jnp.float16:
        return jnp.ones((*rows.value.shape[1:3], 1, 1, 1), jnp.float32)
    largest = largest_magnitude(rows.value, (0, 3, 4))[..., None, None, None]
    return jnp.where(largest > 2.0**64, 2.0**-32, 1.0)


def _in_unit(rows: _Rows, unit: Array) -> _Rows:
    return rows._replace(value=rows.value * unit[..., 0].astype(rows.value.dtype))


def _product(equation: str, left: Array, right: Array) -> Array:
    """A matrix product at highest precision, summed in float32."""
    return jnp.einsum(
        equation,
        left,
        right,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _masked_scores(query: Array, key: Array, valid: Array, scale: Array | float) -> Array:
    scores = _product("bkgth,bkjh->bkgtj", query, key) * scale
    return jnp.where(valid[:, None, None, None], scores, -jnp.inf)


def _softmax_pass(query: Array, rows: _Rows, scale: Array | float) -> tuple[Array, Array]:
    """Unnormalised online softmax over the blocks: output (float32) and natural-log lse."""

    def step(carry, block: _Rows):
        acc, total, largest = carry
        scores = _masked_scores(query, block.key, block.valid, scale)
        new = jnp.maximum(largest, jnp.max(scores, -1, keepdims=True))
        # A row that has seen no valid key yet has a maximum of -inf; subtract 0 there.
        shift = jnp.where(jnp.isneginf(new), 0.0, new)
        decay, probability = jnp.exp(largest - shift), jnp.exp(scores - shift)
        weighted = _product("bkgtj,bkjh->bkgth", probability.astype(block.value.dtype), block.value)
        total = total * decay + jnp.sum(probability, -1, keepdims=True)
        return (acc * decay + weighted, total, new), None

    like = (query, *rows)
    start = (
        filled(query.shape, 0, *like),
        filled((*query.shape[:-1], 1), 0, *like),
        filled((*query.shape[:-1], 1), -math.inf, *like),
    )
    (acc, total, largest), _ = lax.scan(step, start, rows)
    out = acc / jnp.where(total == 0, 1.0, total)
    return out, (largest + jnp.log(total))[..., 0]


@public
@jit()
def plain_attention(
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k h"],
    *,
    scale: Float[Array, ""] | float | None = None,
    key_valid: Bool[Array, "b s"] | None = None,
) -> tuple[Float[Array, "b t n h"], Float[Array, "b t n"]]:
    """Unquantised attention: products of the inputs' dtype summed in float32, float32 softmax.

    Returns:
      The output (float32) and the natural-log normaliser (float32); zeros and -inf in a batch row
      without a valid key.

    Raises:
      ValueError: shapes that do not go together, by name.
    """
    check_shapes(query, key, value)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    heads = key.shape[2]
    rows = _rows(key, value, key_valid)
    unit = _value_unit(rows)
    out, lse = _softmax_pass(_group(query, heads), _in_unit(rows, unit), scale)
    return _ungroup(out / unit), _ungroup(lse[..., None])[..., 0]


@jit()
def attention_gradient(
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k h"],
    cotangent: Float[Array, "b t n h"],
    *,
    scale: Float[Array, ""] | float,
    key_valid: Bool[Array, "b s"] | None,
    query_valid: Bool[Array, "b t"] | None,
) -> tuple[Array, Array, Array, Array]:
    """Gradients of `plain_attention`'s output, recomputed block by block in float32.

    Invalid keys, invalid queries and rows without a valid key get exactly zero and pass none on.

    Returns:
      Gradients of query, key, value and scale, float32.
    """
    heads, length = key.shape[2], key.shape[1]
    if key_valid is not None:
        some = jnp.any(key_valid, 1, keepdims=True)
        query_valid = some if query_valid is None else query_valid & some
    if query_valid is not None:
        query = jnp.where(query_valid[:, :, None, None], query, 0)
        cotangent = jnp.where(query_valid[:, :, None, None], cotangent, 0)
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    query = _group(query, heads)
    cotangent = _group(cotangent.astype(jnp.float32), heads)
    rows = _rows(key, value, key_valid)
    unit = _value_unit(rows)
    # Gradients of scores are in this unit, in which differences of large values are finite.
    rows = _in_unit(rows, unit)
    out, lse = _softmax_pass(query, rows, scale)
    delta = jnp.sum(out * cotangent, -1, keepdims=True)
    lse = jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None]

    def step(query_gradient: Array, block: _Rows):
        scores = _masked_scores(query, block.key, block.valid, scale)
        probability = jnp.exp(scores - lse)
        value_gradient = _product("bkgtj,bkgth->bkjh", probability, cotangent)
        inner = _product("bkgth,bkjh->bkgtj", cotangent, block.value)
        score_gradient = probability * (inner - delta)
        query_gradient += _product("bkgtj,bkjh->bkgth", score_gradient, block.key)
        key_gradient = _product("bkgtj,bkgth->bkjh", score_gradient, query)
        return query_gradient, (key_gradient, value_gradient)

    start = filled(query.shape, 0, query, cotangent, *rows)
    query_gradient, blocks = lax.scan(step, start, rows)
    query_gradient = query_gradient / unit
    scale_gradient = jnp.sum(query_gradient * query)
    key_gradient, value_gradient = (_unblock(x, length) for x in blocks)
    key_gradient = key_gradient / unit[:, None, :, :, 0, 0]
    if key_valid is not None:
        keep = key_valid[:, :, None, None]
        key_gradient = jnp.where(keep, key_gradient, 0)
        value_gradient = jnp.where(keep, value_gradient, 0)
    return _ungroup(query_gradient) * scale, key_gradient * scale, value_gradient, scale_gradient
