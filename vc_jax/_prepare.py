"""The prepared layout: quantised queries, keys and values as the kernels consume them.

The 8-bit layout is `pallas_kernels.layout`, which says what each array holds; `prepare` is its
definition.

4-bit layout (`Prepared4`): NVFP4 along channels for queries and keys, along tokens for values, with
a global scale per query, per block of keys and per channel of the values, so that an outlier takes
no other query, block or channel with it; the means are not scaled. Kernels that need another
packing say so themselves.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float8e4m3fn, Int

from ._config import AttentionConfig, resolve_config
from ._expcast import CODES_PER_NAT, f16_multiplier
from ._public import public
from ._quantize import (
    E4M3_MAX,
    NVFP4_GROUP,
    Nvfp4,
    dequantize_nvfp4,
    group_scale,
    hadamard_rotate,
    largest_magnitude,
    power_of_two_at_least,
    quantize_int8,
    quantize_nvfp4,
    round_to_bfloat16,
    saturate_e4m3,
)
from ._tracing import jit
from ._vsmooth import block_means
from .pallas_kernels.layout import (
    BLOCK,
    COUNT_ROWS,
    E4M3_NORM,
    LARGEST_UNIT,
    STEP,
    SUM_UNIT,
    TINY,
    Prepared8,
)


class Prepared4(NamedTuple):
    """4-bit prepared inputs; see the module's text.

    Attributes:
      query: Nvfp4 of [B, N, T, H], its global scale [B, N, T, 1] holds the softmax scale and
        8·log2(e), so scores are in codes.
      key: Nvfp4 of [B, K, P, H], global scale [B, K, n, 1, 1] per block of 128.
      value: Nvfp4 of [B, K, H, P] (tokens in plain order), global scale [B, K, H, 1].
      block_means: bfloat16 [B, K, n, H], not scaled; `None` without V-Smooth.
      value_mean: float32 [B, K, H], the mean that is taken from all values without V-Smooth;
        `None` with it.
      kv_count: int32 [B], valid keys.
    """

    query: Nvfp4
    key: Nvfp4
    value: Nvfp4
    block_means: Float[Array, "b k j h"] | None
    value_mean: Float[Array, "b k h"] | None
    kv_count: Int[Array, " b"]


Prepared = Prepared8 | Prepared4


def layout_format(prepared: Prepared) -> str:
    """The `AttentionConfig.qk` that prepared inputs were made for."""
    if isinstance(prepared, Prepared4):
        return "nvfp4"
    return "int8" if prepared.query_codes.dtype == jnp.int8 else "e4m3"


def _block_max(values: Array) -> Array:
    """Largest of each block of 128 non-negative entries along the last axis."""
    return largest_magnitude(values.reshape(*values.shape[:-1], -1, BLOCK), -1)


def _stored_tokens(
    kv_length: int, count: Int[Array, " b"], order: Int[Array, "b k s"] | None
) -> tuple[Int[Array, "b k p"] | Int[Array, "b 1 p"], Bool[Array, "b p"]]:
    """Which token each stored slot takes its key from, and which slots are valid."""
    slots = -(-kv_length // STEP) * STEP
    slot = jnp.arange(slots)
    count = count[:, None]
    first_of_block, first_of_step = slot // BLOCK * BLOCK, slot // STEP * STEP
    stand_in = jnp.where(first_of_block < count, first_of_block, first_of_step)
    valid = slot < count
    source = jnp.where(valid, slot, jnp.where(stand_in < count, stand_in, 0))[:, None]
    if order is not None:
        source = jnp.take_along_axis(order, jnp.broadcast_to(source, (*order.shape[:2], slots)), 2)
    return source, valid


def _gather(tokens: Float[Array, "b s k h"], source: Int[Array, "b k p"]) -> Array:
    """Tokens by slot, head-major [B, K, P, H]."""
    return jnp.take_along_axis(jnp.swapaxes(tokens, 1, 2), source[..., None], axis=2)


def _block_scale(amax: Array, largest: float, live: Array) -> Array:
    """Scales of the blocks [B, K, n]: 0 for keys of zeros; that of its step for a dead block."""
    scale = jnp.where(amax <= TINY, 0.0, group_scale(amax, largest))
    first = jnp.repeat(scale[..., ::2], 2, -1)
    first_live = jnp.repeat(live[..., ::2], 2, -1)
    return jnp.where(live, scale, jnp.where(first_live, first, 0.0))


def _in_units(key: Array, scale: Array) -> Array:
    """Keys [B, K, P, H] over the scale of their block."""
    return key / jnp.repeat(jnp.where(scale == 0, 1.0, scale), BLOCK, -1)[..., None]


def _scale_int8(query: Array, key: Array, live: Array) -> tuple[Array, ...]:
    query_codes, query_scale = quantize_int8(query)
    key_scale = _block_scale(_block_max(largest_magnitude(key, -1)), 127.0, live)
    key_codes = jnp.clip(jnp.round(_in_units(key, key_scale)), -127, 127).astype(jnp.int8)
    return query_codes, query_scale[..., 0], key_codes, key_scale


def _within_range(query_scale: Array, key_scale: Array) -> tuple[Array, Array]:
    """Query scales whose products with a key's are within the limit, and what they lost.

    One that is infinite shows that a token was, and becomes NaN.
    """
    limit = _by_query_head(largest_query_scale(key_scale), query_scale)
    within = jnp.where(jnp.isfinite(query_scale), jnp.minimum(query_scale, limit), jnp.nan)
    return within, query_scale / within


def largest_query_scale(key_scale: Float[Array, "b k j"]) -> Float[Array, "b k 1"]:
    """The query scale whose product with the largest key scale is at the limit."""
    unit = largest_magnitude(key_scale, -1, True)
    return jnp.where(unit == 0, jnp.inf, LARGEST_UNIT / jnp.where(unit == 0, 1.0, unit))


def _by_query_head(of_key_heads: Array, query: Array) -> Array:
    """[B, K, ...] repeated to [B, N, ...]."""
    return jnp.repeat(of_key_heads, query.shape[1] // of_key_heads.shape[1], 1)


def _scale_e4m3(query: Array, key: Array, live: Array) -> tuple[Array, ...]:
    """E4M3 codes of bounded norm, scales whose products are exact in float16."""
    key_scale = _block_scale(_block_max(_norm(key)), E4M3_NORM, live)
    key_scale = jnp.where(key_scale == 0, 0.0, power_of_two_at_least(key_scale))
    key_codes = saturate_e4m3(_in_units(key, key_scale))
    # The largest key scale moves into the query's, which leaves products of the size of a logit.
    unit = largest_magnitude(key_scale, -1, True)
    unit = jnp.where(unit == 0, 1.0, unit)
    query = query * _by_query_head(unit, query)[..., None]
    norm = _norm(query)
    # Codes of queries with next to no effect shrink instead of the multiplier leaving float16.
    query_scale = jnp.where(norm <= 0, LARGEST_UNIT, jnp.maximum(norm / E4M3_NORM, 2.0**-13))
    query_scale = _round_up_11_bits(query_scale)
    query_codes = saturate_e4m3(query / query_scale[..., None])
    return query_codes, query_scale, key_codes, key_scale / unit


def _norm(vectors: Array) -> Array:
    """L2 norm along the last axis that neither overflows nor underflows on the way."""
    largest = largest_magnitude(vectors, -1, True)
    unit = vectors / jnp.where(largest == 0, 1.0, largest)
    return largest[..., 0] * jnp.sqrt(jnp.sum(unit**2, -1))


def _round_up_11_bits(scale: Array) -> Array:
    """At least `scale` and exact in float16 where that is normal."""
    return lax.reduce_precision(scale * (1 + 2.0**-11), exponent_bits=8, mantissa_bits=10)


def value_scale_of(
    largest: Float[Array, "b k h"], means: Float[Array, "b k j h"] | None
) -> Float[Array, "b k h"]:
    """Power-of-two scale per channel, given half of its largest residual.

    Residuals so small against the block means that bfloat16 means are coarser anyway do not shrink
    the scale further: the means stay within a float32 accumulator whatever the values are.
    """
    if means is not None:
        largest = jnp.maximum(largest, largest_magnitude(means, 2) * 2.0**-17)
    return power_of_two_at_least(group_scale(largest, 0.5 * E4M3_MAX))


def scaled_means(means: Float[Array, "b k j h"], scale: Float[Array, "b k h"]) -> Array:
    """Means that are exact in bfloat16 in units of the value scale, as bfloat16."""
    return (means / scale[:, :, None]).astype(jnp.bfloat16)


class _Residuals(NamedTuple):
    """Values [B, K, P, H] and what is taken from them, the rest of which is quantised.

    Attributes:
      value: float32, zero in slots without a valid key.
      taken: of each value's block or channel, broadcastable to `value`.
      valid: [B, 1, P, 1].
      means: float32 [B, K, n, H], exact in bfloat16; `None` without V-Smooth.
      mean: float32 [B, K, H]; `None` with V-Smooth.
    """

    value: Array
    taken: Array
    valid: Array
    means: Array | None
    mean: Array | None

    def in_units(self, scale: Array | float) -> Array:
        """What is left, in units that keep it finite, zero in slots without a valid key."""
        return jnp.where(self.valid, self.value / scale - self.taken / scale, 0.0)


def _residuals(value: Array, valid: Array, count: Array, smooth: bool) -> _Residuals:
    """Means of blocks, or of all values of a channel, over their valid tokens.

    What is subtracted is what a kernel adds back: block means as they are stored, so that the
    residual holds what rounding them cuts off.
    """
    value = jnp.where(valid, value, 0.0).astype(jnp.float32)
    if smooth:
        means = block_means(value, jnp.broadcast_to(count[:, None], value.shape[:2]))
        means = round_to_bfloat16(means)
        return _Residuals(value, jnp.repeat(means, BLOCK, 2), valid, means, None)
    number = jnp.maximum(count, 1).astype(jnp.float32)[:, None, None]
    mean = jnp.sum(value * SUM_UNIT, 2) / number * (1.0 / SUM_UNIT)
    return _Residuals(value, mean[:, :, None], valid, None, mean)


def _order_groups(values: Array, *, restore: bool = False) -> Array:
    """[..., P] with each group of 16 along the last axis in `GROUP_ORDER`, or back from it.

    The order permutes the four bits of a token's index, so it is a transposition.
    """
    bits = values.reshape(*values.shape[:-1], -1, 2, 2, 2, 2)
    order = (2, 0, 1, 3) if restore else (1, 2, 0, 3)
    lead = tuple(range(bits.ndim - 4))
    bits = jnp.transpose(bits, (*lead, *(len(lead) + axis for axis in order)))
    return bits.reshape(values.shape)


@public
def prepare(
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k h"],
    config: AttentionConfig | str,
    *,
    scale: Float[Array, ""] | float | None = None,
    order: Int[Array, "b k s"] | Int[Array, "b 1 s"] | None = None,
    kv_count: Int[Array, " b"] | None = None,
    key_mean: Float[Array, "b k h"] | None = None,
    balance: Float[Array, "b k h"] | None = None,
    smooth: bool | None = None,
) -> Prepared:
    """Centre, balance, rotate, sort and quantise the inputs of an attention call.

    Args:
      query, key, value: float, BTNH. Bytes of invalid keys and values do not matter.
      config: a quantised configuration or its preset's name.
      scale: softmax scale; `None`: 1/sqrt(H).
      order: permutation of the keys, position -> token, valid tokens first; `None`: as they are.
      kv_count: number of valid keys, the first so many of the order; `None`: all.
      key_mean: subtracted from the keys (`mean_key`); `None`: nothing.
      balance: powers of two that the channels of queries are multiplied with and those of keys
        divided by (`channel_balance`); `None`: 1.
      smooth: take block means out of the values; `None`: as the configuration says.

    Raises:
      ValueError: an unquantised configuration, or a head size that NVFP4 cannot group.
    """
    config = resolve_config(config)
    if not config.quantized:
        raise ValueError("config must be quantised to prepare inputs, got qk='none'")
    batch, kv_length, _, size = key.shape
    if config.qk == "nvfp4" and size % NVFP4_GROUP:
        raise ValueError(f"key must have a head dim that is a multiple of 16, got {size}")
    smooth = config.smooth_values if smooth is None else smooth
    scale = 1.0 / math.sqrt(size) if scale is None else scale
    count = jnp.full(batch, kv_length, jnp.int32) if kv_count is None else kv_count
    source, valid = _stored_tokens(kv_length, count, order)
    source = jnp.broadcast_to(source, (batch, key.shape[2], source.shape[-1]))

    query = jnp.swapaxes(query, 1, 2).astype(jnp.float32) * (scale * CODES_PER_NAT)
    key = _gather(key, source).astype(jnp.float32)
    if key_mean is not None:
        key = key - key_mean[:, :, None]
    if balance is not None:
        query = query * _by_query_head(balance, query)[:, :, None]
        key = key * (1.0 / balance)[:, :, None]
    if config.rotate:
        query, key = hadamard_rotate(query), hadamard_rotate(key)
    live = (jnp.arange(source.shape[-1] // BLOCK) * BLOCK < count[:, None])[:, None]
    step_live = jnp.repeat(live[..., ::2], STEP, -1)
    key = jnp.where(step_live[..., None], key, 0.0)

    residuals = _residuals(_gather(value, source), valid[:, None, :, None], count, smooth)
    if config.qk == "nvfp4":
        return _prepared4(query, key, residuals, count)
    quantize_scores = _scale_int8 if config.qk == "int8" else _scale_e4m3
    query_codes, query_scale, key_codes, key_scale = quantize_scores(query, key, live)
    query_scale, score_excess = _within_range(query_scale, key_scale)
    means = residuals.means
    value_scale = value_scale_of(largest_magnitude(residuals.in_units(2.0), 2), means)
    codes = saturate_e4m3(jnp.swapaxes(residuals.in_units(value_scale[:, :, None]), 2, 3))
    codes = jnp.concatenate([codes, _count_rows(valid, codes)], 2)
    return Prepared8(
        query_codes,
        query_scale,
        key_codes,
        key_scale,
        _order_groups(codes),
        value_scale,
        None if means is None else scaled_means(means, value_scale),
        residuals.mean,
        count,
        score_excess,
    )


def _prepared4(query: Array, key: Array, residuals: _Residuals, count: Array) -> Prepared4:
    """NVFP4 of balanced, rotated queries and keys and of residuals."""
    batch, heads, stored, size = key.shape
    by_block = quantize_nvfp4(key.reshape(batch, heads, stored // BLOCK, BLOCK, size), (-1, -2))
    codes, scales = (x.reshape(batch, heads, stored, -1) for x in (by_block.codes, by_block.scales))
    # In half units, in which what is left of finite values is finite.
    value = quantize_nvfp4(jnp.swapaxes(residuals.in_units(2.0), 2, 3), -1)
    return Prepared4(
        quantize_nvfp4(query, -1),
        Nvfp4(codes, scales, by_block.global_scale),
        value._replace(global_scale=2.0 * value.global_scale),
        None if residuals.means is None else residuals.means.astype(jnp.bfloat16),
        residuals.mean,
        count,
    )


def _count_rows(valid: Bool[Array, "b p"], like: Array) -> Float8e4m3fn[Array, "b k 8 p"]:
    """1 at valid keys: of even blocks in even rows, of odd blocks in odd rows."""
    block = jnp.arange(valid.shape[1]) // BLOCK
    own = (block % 2) == (jnp.arange(COUNT_ROWS) % 2)[:, None]
    rows = (valid[:, None, None] & own).astype(like.dtype)
    return jnp.broadcast_to(rows, (*like.shape[:2], *rows.shape[2:]))


def score_multiplier(prepared: Prepared8) -> Float[Array, "b n t j"]:
    """Codes per unit of code product, per query and block, exact in float16 for E4M3."""
    key_scale = _by_query_head(prepared.key_scale, prepared.query_codes)[:, :, None]
    product = prepared.query_scale[..., None] * key_scale
    return product if prepared.query_codes.dtype == jnp.int8 else f16_multiplier(product)


def plain_value_codes(prepared: Prepared8) -> Float8e4m3fn[Array, "b k h p"]:
    """The transposed value codes with the tokens of each group of 16 back in plain order."""
    return _order_groups(prepared.value_codes[:, :, :-COUNT_ROWS], restore=True)


def by_block(key: Nvfp4) -> Nvfp4:
    """Keys of `Prepared4` as [B, K, n, 128, H], which its global scale goes with."""
    shape = (*key.codes.shape[:2], -1, BLOCK)
    codes, scales = (x.reshape(*shape, x.shape[-1]) for x in (key.codes, key.scales))
    return Nvfp4(codes, scales, key.global_scale)


class Restored(NamedTuple):
    """What prepared inputs stand for, float32, in the order of the call.

    Attributes:
      query: [B, N, T, H], times softmax scale and 8·log2(e), rotated.
      key: [B, K, P, H], centred and rotated. In the E4M3 layout a power of two per key head has
        moved from the keys to the queries; only their product is the input's.
      value: [B, K, P, H]; rows of slots without a valid key are zero.
    """

    query: Float[Array, "b n t h"]
    key: Float[Array, "b k p h"]
    value: Float[Array, "b k p h"]


@public
@jit()
def restore(prepared: Prepared) -> Restored:
    """Undo `prepare` up to what quantisation lost: `query · key` are the scores in codes."""
    if isinstance(prepared, Prepared4):
        query, key = dequantize_nvfp4(prepared.query), dequantize_nvfp4(by_block(prepared.key))
        key = key.reshape((*prepared.key.codes.shape[:3], -1))
        residual, scale = dequantize_nvfp4(prepared.value), jnp.float32(1.0)
    else:
        query = prepared.query_codes.astype(jnp.float32) * prepared.query_scale[..., None]
        key_scale = jnp.repeat(prepared.key_scale, BLOCK, -1)[..., None]
        key = prepared.key_codes.astype(jnp.float32) * key_scale
        residual = plain_value_codes(prepared).astype(jnp.float32)
        scale = prepared.value_scale[:, :, None]
    value = jnp.swapaxes(residual, 2, 3)
    if prepared.block_means is not None:
        value = value + jnp.repeat(prepared.block_means.astype(jnp.float32), BLOCK, 2)
    value = value * scale
    if prepared.value_mean is not None:
        value = value + prepared.value_mean[:, :, None]
    valid = jnp.arange(value.shape[2]) < prepared.kv_count[:, None]
    return Restored(query, key, jnp.where(valid[:, None, :, None], value, 0.0))
