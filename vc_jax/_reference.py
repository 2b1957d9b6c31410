"""The reference attention over prepared inputs: what a kernel computes, in plain JAX.

It scans over steps of 256 keys, so a call holds O(T·256) scores at a time. Probabilities are
quantised, row sums add the decoded probabilities, block means come back inside the loop, sums are
float32; matrix products are of codes, every product exact. It is the oracle that kernels are
tested against, and the implementation `"xla"`.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ._config import AttentionConfig
from ._expcast import (
    anchor,
    anchored_codes,
    decode_codes,
    round_to_f16,
)
from ._prepare import (
    Prepared,
    Prepared4,
    layout_format,
    plain_value_codes,
    score_multiplier,
)
from ._public import public
from ._quantize import (
    E2M1_MAX,
    E4M3_MAX,
    NVFP4_GROUP,
    largest_magnitude,
    nvfp4_codes,
    nvfp4_groups,
    power_of_two_at_least,
    saturate_e4m3,
)
from ._tracing import filled, jit
from .pallas_kernels.layout import BLOCK, PROBABILITY_SCALE, STEP

Products = Callable[[Array, Array], Array]
LOWEST = float(jnp.finfo(jnp.float32).min)
_NVFP4_UNIT = E4M3_MAX * E2M1_MAX
"""What a probability of 1 is stored as in NVFP4: its group scales then use their whole range."""
_MOST_PER_UNIT = 2.0**90
"""Codes that a unit of a product of NVFP4 codes, at most 2^30 of them, may stand for."""


class _Block(NamedTuple):
    """One step of 256 keys (two blocks), rows of a key head grouped as [B, K, G, T].

    `unit` is what a residual code of 1 stands for in units of the means, per channel; `None`: 1.
    """

    key: Float[Array, "b k j h"]
    residual: Float[Array, "b k h j"]
    unit: Float[Array, "b k h 1"] | None
    means: Float[Array, "b k 2 h"] | None
    multiplier: Float[Array, "b k g t j"]
    valid: Bool[Array, "b 1 1 1 j"]


class _Sums(NamedTuple):
    """Running sums; `largest` is the row maximum so far in codes, `weighted` relative to it."""

    weighted: Float[Array, "b k g t h"]
    total: Float[Array, "b k g t 1"]
    largest: Float[Array, "b k g t 1"]


def _matmul(equation: str, left: Array, right: Array) -> Array:
    """An einsum of two arrays of codes, float32, with exact products and float32 sums.

    INT8 (up to 127), E4M3 (4 significant bits) and E2M1 times an E4M3 scale (2 + 4 bits, from 2^-10
    to 2688) are all exact in bfloat16 (8 significant bits, float32's exponents), and so are the
    products of two in float32 (24 bits). An NVIDIA GPU therefore multiplies them on its tensor
    cores; elsewhere bfloat16 is no faster.
    """
    return lax.platform_dependent(
        left,
        right,
        cuda=functools.partial(multiply_in_bfloat16, equation),
        default=functools.partial(multiply_in_float32, equation),
    )


def multiply_in_bfloat16(equation: str, left: Array, right: Array) -> Array:
    """An einsum of float32 arrays that are exact in bfloat16, with float32 sums."""
    halves = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)
    return jnp.einsum(equation, *halves, preferred_element_type=jnp.float32)


def multiply_in_float32(equation: str, left: Array, right: Array) -> Array:
    """An einsum at highest precision."""
    return jnp.einsum(equation, left, right, precision=lax.Precision.HIGHEST)


def _exact_products(query: Array, key: Array) -> Array:
    return _matmul("bkgth,bkjh->bkgtj", query, key)


def _half_products(query: Array, key: Array) -> Array:
    return round_to_f16(_exact_products(query, key))


def _scores(query: Array, block: _Block, products: Products) -> tuple[Array, Array, Array]:
    """Code products, the same in codes, and their row maximum in codes over valid keys."""
    scores = products(query, block.key)
    # The barrier keeps this product from being fused with the subtraction of the maximum, so that
    # the largest score minus the maximum is exactly zero.
    scaled = lax.optimization_barrier(block.multiplier * scores)
    largest = jnp.max(jnp.where(block.valid, scaled, LOWEST), -1, keepdims=True)
    return scores, scaled, largest


def _octaves(difference: Array) -> Array:
    """2 to the power of a difference in codes."""
    return jnp.exp2(difference / 8.0)


def _cast_exponential(scaled: Array, largest: Array) -> Array:
    probability = PROBABILITY_SCALE * _octaves(scaled - largest)
    return saturate_e4m3(probability).astype(jnp.float32)


def _nvfp4_exponential(scaled: Array, largest: Array) -> Array:
    """Probabilities in NVFP4 groups of 16 keys."""
    probability = _NVFP4_UNIT * _octaves(scaled - largest)
    groups = probability.reshape(*probability.shape[:-1], -1, NVFP4_GROUP)
    return nvfp4_groups(groups).values().reshape(probability.shape)


def _step(
    sums: _Sums, block: _Block, query: Array, config: AttentionConfig, products: Products
) -> _Sums:
    half = config.qk == "e4m3"
    scores, scaled, largest = _scores(query, block, products)
    if config.softmax == "expcast":
        row = anchor(largest, half=half)
        probability = decode_codes(anchored_codes(scores, block.multiplier, row))
        block_anchor, old_anchor = row.code, sums.largest
        new = jnp.maximum(block_anchor, old_anchor)
        new_anchor = new
    elif config.softmax == "expcast_running":
        new = jnp.maximum(sums.largest, largest)
        row = anchor(new, half=half)
        probability = decode_codes(anchored_codes(scores, block.multiplier, row))
        block_anchor = new_anchor = row.code
        old_anchor = anchor(sums.largest, half=half).code
    else:
        new = jnp.maximum(sums.largest, largest)
        cast = _nvfp4_exponential if config.pv == "nvfp4" else _cast_exponential
        probability = cast(scaled, new)
        block_anchor, new_anchor, old_anchor = new, new, sums.largest
    probability = jnp.where(block.valid, probability, 0.0)
    sums_of_blocks = jnp.sum(probability.reshape(*probability.shape[:-1], 2, BLOCK), -1)
    row_sum = jnp.sum(sums_of_blocks, -1, keepdims=True)
    weighted = _matmul("bkgtj,bkhj->bkgth", probability, block.residual)
    if block.unit is not None:
        weighted *= jnp.swapaxes(block.unit, 2, 3)[:, :, None]
    if block.means is not None:
        for i in range(STEP // BLOCK):
            weighted += sums_of_blocks[..., i : i + 1] * block.means[:, :, None, None, i]
    weight, decay = _octaves(block_anchor - new_anchor), _octaves(old_anchor - new_anchor)
    return _Sums(
        sums.weighted * decay + weighted * weight,
        sums.total * decay + row_sum * weight,
        new,
    )


class _Operands(NamedTuple):
    """Codes [B, K, ...] that `_slice_block` slices, and their scales."""

    query: Float[Array, "b k g t h"]
    key: Array
    residual: Array
    unit: Array | None
    means: Array | None
    multiplier: Float[Array, "b k g t j"]
    value_scale: Float[Array, "b k h"]
    value_mean: Array | None


def _operands(prepared: Prepared) -> _Operands:
    codes = prepared.key.codes if isinstance(prepared, Prepared4) else prepared.key_codes
    batch, heads = codes.shape[:2]
    means = prepared.block_means

    def by_key_head(rows: Array) -> Array:
        return rows.reshape(batch, heads, -1, *rows.shape[2:])

    if isinstance(prepared, Prepared4):
        query, key = nvfp4_codes(prepared.query), nvfp4_codes(prepared.key)
        residual, unit = nvfp4_codes(prepared.value), prepared.value.global_scale
        scale = by_key_head(prepared.query.global_scale)
        scale = scale * prepared.key.global_scale[:, :, None, None, :, 0, 0]
        # Bounded, so that scores are finite whatever the scales are, and zero for codes of zero.
        multiplier = jnp.minimum(scale, _MOST_PER_UNIT)
        # Sums over all keys are in these units, in which they are finite.
        value_scale = unit[..., 0]
        if means is not None:
            value_scale = jnp.maximum(value_scale, largest_magnitude(means, 2) * 2.0**-16)
            means = means.astype(jnp.float32)
        value_scale = power_of_two_at_least(value_scale)
        unit = unit / value_scale[..., None]
        means = None if means is None else means / value_scale[:, :, None]
    else:
        query, key = prepared.query_codes, prepared.key_codes
        residual, unit = plain_value_codes(prepared), None
        multiplier, value_scale = by_key_head(score_multiplier(prepared)), prepared.value_scale
    query = by_key_head(query.astype(jnp.float32))
    return _Operands(
        query,
        key,
        residual,
        unit,
        means,
        multiplier,
        value_scale,
        prepared.value_mean,
    )


def _slice_block(operands: _Operands, kv_count: Array, index: Array) -> _Block:
    def part(array: Array, start: Array, size: int, axis: int) -> Array:
        return lax.dynamic_slice_in_dim(array, start, size, axis).astype(jnp.float32)

    first = index * STEP
    valid = first + jnp.arange(STEP) < kv_count[:, None]
    return _Block(
        part(operands.key, first, STEP, 2),
        part(operands.residual, first, STEP, 3),
        operands.unit,
        None if operands.means is None else part(operands.means, 2 * index, 2, 2),
        jnp.repeat(part(operands.multiplier, 2 * index, 2, 4), BLOCK, -1),
        valid[:, None, None, None],
    )


@public
@jit(static_argnames=("config", "products"))
def reference_attention(
    prepared: Prepared, config: AttentionConfig, *, products: Products | None = None
) -> tuple[Float[Array, "b t n h"], Float[Array, "b t n"]]:
    """Attention over prepared inputs, step by step.

    Args:
      prepared: from `prepare` with the same configuration.
      config: a quantised configuration.
      products: how products of codes are summed over the channels, [B, K, G, T, H] and
        [B, K, 256, H] float32 to [B, K, G, T, 256]; `None`: exactly, for E4M3 then rounded to
        float16. A tensor core's own sums can be put in here.

    Returns:
      The output (float32) and the natural-log normaliser of the centred, rotated scores (float32);
      zeros and -inf where no key is valid. Both from the decoded row sums.

    Raises:
      ValueError: the layout is not that of the configuration.
    """
    held = layout_format(prepared)
    if not config.quantized or held != config.qk:
        raise ValueError(f"prepared must be the layout of qk={config.qk!r}, got {held!r}")
    if products is None:
        products = _half_products if config.qk == "e4m3" else _exact_products
    operands = _operands(prepared)
    rows, like = operands.query.shape[:-1], (operands.query, operands.key, operands.residual)
    start = _Sums(
        filled(operands.query.shape, 0, *like),
        filled((*rows, 1), 0, *like),
        filled((*rows, 1), LOWEST, *like),
    )

    def step(sums: _Sums, index: Array) -> tuple[_Sums, None]:
        block = _slice_block(operands, prepared.kv_count, index)
        return _step(sums, block, operands.query, config, products), None

    sums, _ = lax.scan(step, start, jnp.arange(operands.key.shape[2] // STEP))
    empty = sums.total == 0
    out = sums.weighted / jnp.where(empty, 1.0, sums.total)
    out = out * operands.value_scale[:, :, None, None]
    if operands.value_mean is not None:
        out = jnp.where(empty, out, out + operands.value_mean[:, :, None, None])
    top = (
        anchor(sums.largest, half=config.qk == "e4m3").code
        if (config.softmax == "expcast_running")
        else sums.largest
    )
    one = _NVFP4_UNIT if config.pv == "nvfp4" else PROBABILITY_SCALE
    lse = jnp.log(sums.total / one) + top * (math.log(2.0) / 8.0)
    lse = jnp.where(empty, -jnp.inf, lse)[..., 0]
    batch, heads, groups, length, size = out.shape
    out = out.reshape(batch, heads * groups, length, size)
    return jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse.reshape(out.shape[:3]), 1, 2)
