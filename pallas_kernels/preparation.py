"""Rotation, centring, sorting and 8-bit quantisation of queries, keys and values in few passes.

Kernels for any NVIDIA GPU with FP8 conversions (compute capability 8.9 and up), written for
Pallas's Triton backend: they wait for memory, and this backend reads rows through an index. They
produce the arrays of the prepared layout (`layout.Prepared8`). Memory traffic in passes over an
array of tokens: queries one read, keys one read (and one for their mean), values two.

Each program looks at one head and 128 rows or a step of 256 keys. The rotation is a product with
the Hadamard matrix of +1 and -1 on the tensor core, whose products are exact; its factor is applied
in float32.
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float8e4m3fn, Int, Shaped

from ._launch import launch, rows_of
from ._numbers import (
    as_float,
    group_scale,
    int8_codes,
    is_finite,
    largest_magnitude,
    magnitude_bits,
    norm,
    power_of_two_at_least,
    round_up_11_bits,
)
from ._rotation import hadamard_signs, rotated, signs_dtype
from ._slots import codes_of, tokens_of_block
from .layout import BLOCK, COUNT_ROWS, E4M3, E4M3_NORM, LARGEST_UNIT, STEP

HEAD_DIMS = (64, 128)
TOKEN_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_CHUNK = 16
"""Tiles of 128 tokens that one program of the statistics looks at."""


_QUERY_ROWS, _QUERY_TILES = 64, 16
"""Queries of a tile, and tiles that a program goes through, one on its way while one is used."""
_KEY_STEPS = 4
"""Steps of keys that a program goes through."""
_STAGES = 3


def unsupported(head_dim: int, *token_arrays: jax.ShapeDtypeStruct | Array) -> str | None:
    """Why these kernels cannot take a call, or `None`. Does not look at the device."""
    if head_dim not in HEAD_DIMS:
        return f"needs a head dim of 64 or 128, got {head_dim}"
    for array in token_arrays:
        if array.dtype not in [jnp.dtype(x) for x in TOKEN_DTYPES]:
            return f"needs float32, bfloat16 or float16 tokens, got {array.dtype}"
        # Between these sizes the backend would compute offsets of bytes in 32 bits.
        codes = math.prod(array.shape) + 2 * STEP * math.prod(array.shape[2:])
        if 2**31 <= codes * (head_dim + COUNT_ROWS) // head_dim <= 2**32:
            return "needs arrays of codes below 2 or above 4 GiB"
    return None


def _optional(refs, present: bool):
    refs = list(refs)
    return (refs.pop(0) if present else None), refs


# --- statistics over all tokens


def _statistics_body(tokens_ref, *refs, masked: bool, maximum: bool, length: int):
    valid_ref, (out_ref,) = _optional(refs, masked)
    head, chunk, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    size = tokens_ref.shape[-1]

    def add(tile, carry):
        row = (chunk * _CHUNK + tile) * BLOCK + jnp.arange(BLOCK)
        inside = row < length
        if valid_ref is not None:
            flag = plt.load(valid_ref.at[batch, row], mask=inside, other=0)
            inside = inside & (flag != 0)
        rows = rows_of(tokens_ref, batch, row, head)
        rows = plt.load(rows, mask=inside[:, None], other=0.0).astype(jnp.float32)
        if maximum:
            return jnp.maximum(carry, jnp.max(magnitude_bits(rows), 0))
        return carry + jnp.sum(rows, 0)

    start = jnp.zeros(size, jnp.int32 if maximum else jnp.float32)
    total = lax.fori_loop(0, _CHUNK, add, start)
    plt.store(out_ref.at[batch, head, chunk, :], as_float(total) if maximum else total)


def channel_statistics(
    tokens: Float[Array, "b s k h"],
    valid: Bool[Array, "b s"] | None = None,
    *,
    maximum: bool = False,
    interpret: bool = False,
) -> Float[Array, "b k h"]:
    """Sum, or largest magnitude, of each channel over the valid tokens, float32.

    The sum runs in a fixed order: results do not change from run to run.
    """
    batch, length, heads, size = tokens.shape
    chunks = pl.cdiv(length, BLOCK * _CHUNK)
    masks = () if valid is None else (valid.astype(jnp.int8),)
    (parts,) = launch(
        functools.partial(
            _statistics_body, masked=valid is not None, maximum=maximum, length=length
        ),
        (heads, chunks, batch),
        [jax.ShapeDtypeStruct((batch, heads, chunks, size), jnp.float32)],
        (tokens, *masks),
        interpret=interpret,
    )
    return largest_magnitude(parts, 2) if maximum else jnp.sum(parts, 2)


# --- queries


def _query_body(query_ref, factor_ref, unit_ref, limit_ref, *refs, rotate: bool, groups: int):
    signs_ref, outputs = _optional(refs, rotate)
    codes_ref, scale_ref, excess_ref = outputs
    signs = None if signs_ref is None else plt.load(signs_ref)
    first, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    limit = plt.load(limit_ref.at[batch, head // groups])
    factor = factor_ref[0]
    if codes_ref.dtype != jnp.int8:
        factor = factor * plt.load(unit_ref.at[batch, head // groups])

    def quantise(tile, carry):
        row = (first * _QUERY_TILES + tile) * _QUERY_ROWS
        row = row + jnp.arange(_QUERY_ROWS)
        inside = row < query_ref.shape[1]
        rows = plt.load(rows_of(query_ref, batch, row, head), mask=inside[:, None], other=0.0)
        codes, scale = _query_codes(rotated(rows, signs), factor, codes_ref.dtype)
        within = jnp.where(is_finite(scale), jnp.minimum(scale, limit), jnp.nan)
        plt.store(codes_of(codes_ref, batch, head, row), codes, mask=inside[:, None])
        plt.store(scale_ref.at[batch, head, row], within, mask=inside)
        plt.store(excess_ref.at[batch, head, row], scale / within, mask=inside)
        return carry

    lax.fori_loop(0, _QUERY_TILES, quantise, 0)


def _query_codes(rows, factor, code_dtype):
    """Codes of rows times a positive factor, and the scale of each row."""
    if code_dtype == jnp.int8:
        scale = group_scale(largest_magnitude(rows, 1) * factor, 127.0)
        return int8_codes(rows * (factor / scale)[:, None]), scale
    length = norm(rows) * factor
    # Codes of queries with next to no effect shrink instead of leaving float16.
    scale = jnp.maximum(length * (1 / E4M3_NORM), 2.0**-13)
    scale = jnp.where(length <= 0, LARGEST_UNIT, jnp.where(length == length, scale, length))
    scale = round_up_11_bits(scale)
    return (rows * (factor / scale)[:, None]).astype(E4M3), scale


def quantize_queries(
    query: Float[Array, "b t n h"],
    unit: Float[Array, "b k"],
    limit: Float[Array, "b k"],
    *,
    scale: Float[Array, ""] | float,
    rotate: bool,
    code_dtype,
    interpret: bool = False,
) -> tuple[Shaped[Array, "b n t h"], Float[Array, "b n t"], Float[Array, "b n t"]]:
    """Queries times `scale`, rotated, as codes with a scale per token.

    Args:
      unit: what E4M3 queries are multiplied with beforehand: the unit of the key scales.
      limit: the largest query scale.

    Returns:
      codes [B, N, T, H]; scales within the limit; what the limit took, as a factor.
    """
    batch, length, heads, size = query.shape
    factor = jnp.asarray(scale, jnp.float32) * (1 / math.sqrt(size) if rotate else 1.0)
    signs = (hadamard_signs(size, signs_dtype(query.dtype)),) if rotate else ()
    row = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    body = functools.partial(_query_body, rotate=rotate, groups=heads // unit.shape[1])
    codes, scales, excess = launch(
        body,
        (pl.cdiv(length, _QUERY_ROWS * _QUERY_TILES), heads, batch),
        [jax.ShapeDtypeStruct((batch, heads, length, size), code_dtype), row, row],
        (query, factor.reshape(1), unit, limit, *signs),
        stages=_STAGES,
        interpret=interpret,
    )
    return codes, scales, excess


# --- keys


def _key_body(key_ref, count_ref, *refs, ordered: bool, centred: bool, rotate: bool):
    order_ref, refs = _optional(refs, ordered)
    mean_ref, refs = _optional(refs, centred)
    signs_ref, (codes_ref, scale_ref) = _optional(refs, rotate)
    signs = None if signs_ref is None else plt.load(signs_ref)
    first, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    size = key_ref.shape[3]
    count = plt.load(count_ref.at[batch])
    factor = 1 / math.sqrt(size) if rotate else 1.0
    slots = jnp.arange(BLOCK)

    def quantise(index, first_scale):
        step = first * _KEY_STEPS + (index >> 1)
        block = index & 1
        held = tokens_of_block(
            (order_ref, count_ref), batch, head, step, block, key_ref.shape[1], slots
        )
        rows = plt.load(rows_of(key_ref, batch, held.index, head))
        rows = rotated(rows, signs) * factor
        if mean_ref is not None:
            rows = rows - plt.load(mean_ref.at[batch, head, :])[None, :]
        if codes_ref.dtype == jnp.int8:
            amax = as_float(jnp.max(jnp.max(magnitude_bits(rows), 1), 0))
            scale = group_scale(amax, 127.0)
        else:
            amax = largest_magnitude(norm(rows), 0)
            scale = power_of_two_at_least(group_scale(amax, E4M3_NORM))
        live = step * STEP < count
        scale = jnp.where(live & (amax != 0), scale, 0.0)
        # A second block without a valid key holds codes of the step's first key.
        dead = (block == 1) & (step * STEP + BLOCK >= count)
        scale = jnp.where(dead, first_scale, scale)
        # Nothing of an unknown token may get into codes of nothing.
        inverse = 1.0 / jnp.where(scale == 0, 1.0, scale)
        scaled = jnp.where(scale == 0, 0.0, rows * inverse)
        codes = int8_codes(scaled) if codes_ref.dtype == jnp.int8 else scaled.astype(E4M3)
        slot = step * STEP + block * BLOCK + slots
        stored = step < scale_ref.shape[2] // 2
        plt.store(codes_of(codes_ref, batch, head, slot), codes, mask=stored)
        plt.store(scale_ref.at[batch, head, step * 2 + block], scale, mask=stored)
        return scale

    lax.fori_loop(0, 2 * _KEY_STEPS, quantise, jnp.float32(0))


def quantize_keys(
    key: Float[Array, "b s k h"],
    count: Int[Array, " b"],
    order: Int[Array, "b k s"] | None,
    mean: Float[Array, "b k h"] | None,
    *,
    rotate: bool,
    code_dtype,
    interpret: bool = False,
) -> tuple[Shaped[Array, "b k p h"], Float[Array, "b k j"]]:
    """Keys in their order, less the mean, rotated, as codes with a scale per 128-key block.

    Args:
      count: valid keys of each batch row, the first so many of the order.
      order: position -> token; `None`: as they are.
      mean: subtracted before the rotation, in the keys' own axes; `None`: nothing.

    Returns:
      codes [B, K, P, H], P a multiple of 256; scales [B, K, P / 128].
    """
    batch, length, heads, size = key.shape
    steps = pl.cdiv(length, STEP)
    signs = hadamard_signs(size, jnp.float32)
    if mean is not None and rotate:
        mean = jnp.matmul(mean, signs, precision=lax.Precision.HIGHEST) / math.sqrt(size)
    optional = [x for x in (order, mean) if x is not None]
    if rotate:
        optional.append(signs.astype(signs_dtype(key.dtype)))
    codes, scales = launch(
        functools.partial(
            _key_body, ordered=order is not None, centred=mean is not None, rotate=rotate
        ),
        (pl.cdiv(steps, _KEY_STEPS), heads, batch),
        [
            jax.ShapeDtypeStruct((batch, heads, steps * STEP, size), code_dtype),
            jax.ShapeDtypeStruct((batch, heads, steps * 2), jnp.float32),
        ],
        (key, count, *optional),
        stages=_STAGES,
        interpret=interpret,
    )
    return codes, scales


# --- values


def _value_statistics_body(value_ref, count_ref, *refs, ordered: bool):
    order_ref, (mean_ref, largest_ref) = _optional(refs, ordered)
    block, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    slots = jnp.arange(BLOCK)
    held = tokens_of_block(
        (order_ref, count_ref), batch, head, block // 2, block % 2, value_ref.shape[1], slots
    )
    valid = held.valid[:, None]
    rows = plt.load(rows_of(value_ref, batch, held.index, head), mask=valid, other=0.0)
    rows = rows.astype(jnp.float32)
    inside = jnp.sum(held.valid.astype(jnp.float32), 0)
    mean = jnp.sum(rows, 0) * (1.0 / jnp.maximum(inside, 1.0))
    residual = jnp.where(valid, rows - mean[None, :], 0.0)
    plt.store(mean_ref.at[batch, head, block, :], mean)
    plt.store(largest_ref.at[batch, head, block, :], largest_magnitude(residual, 0))


def value_statistics(
    value: Float[Array, "b s k h"],
    count: Int[Array, " b"],
    order: Int[Array, "b k s"] | None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "b k j h"], Float[Array, "b k h"]]:
    """Mean of each 128-value block, and each channel's largest residual, both float32."""
    batch, length, heads, size = value.shape
    blocks = pl.cdiv(length, STEP) * 2
    shape = jax.ShapeDtypeStruct((batch, heads, blocks, size), jnp.float32)
    means, largest = launch(
        functools.partial(_value_statistics_body, ordered=order is not None),
        (blocks, heads, batch),
        [shape, shape],
        (value, count, *(() if order is None else (order,))),
        interpret=interpret,
    )
    return means, largest_magnitude(largest, 2)


def _value_body(value_ref, count_ref, inverse_ref, *refs, ordered: bool, smooth: bool):
    order_ref, refs = _optional(refs, ordered)
    mean_ref, (codes_ref,) = _optional(refs, smooth)
    block, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    size = value_ref.shape[3]
    # Tokens are read in the order in which a group of 16 is stored.
    place = jnp.arange(BLOCK)
    slots = (place & ~14) | ((place & 2) << 2) | ((place & 12) >> 1)
    held = tokens_of_block(
        (order_ref, count_ref), batch, head, block // 2, block % 2, value_ref.shape[1], slots
    )
    valid = held.valid[:, None]
    rows = plt.load(rows_of(value_ref, batch, held.index, head), mask=valid, other=0.0)
    rows = rows.astype(jnp.float32)
    if mean_ref is not None:
        rows = jnp.where(valid, rows - plt.load(mean_ref.at[batch, head, block, :])[None, :], 0.0)
    scaled = rows * plt.load(inverse_ref.at[batch, head, :])[None, :]
    codes = scaled.astype(E4M3)
    columns = block * BLOCK + place
    channel = jnp.arange(size)[:, None]
    plt.store(codes_ref.at[batch, head, channel, columns[None, :]], codes.T)
    row = jnp.arange(COUNT_ROWS)
    counts = held.valid[None, :] & ((row & 1) == (block & 1))[:, None]
    plt.store(
        codes_ref.at[batch, head, size + row[:, None], columns[None, :]],
        counts.astype(jnp.float32).astype(E4M3),
    )


def quantize_values(
    value: Float[Array, "b s k h"],
    count: Int[Array, " b"],
    order: Int[Array, "b k s"] | None,
    means: Float[Array, "b k j h"] | None,
    scale: Float[Array, "b k h"],
    *,
    interpret: bool = False,
) -> Float8e4m3fn[Array, "b k h+8 p"]:
    """Values in their order, less their block's mean, as transposed codes over count rows.

    Args:
      means: float32; `None`: nothing is subtracted.
      scale: of each channel, a power of two.
    """
    batch, length, heads, size = value.shape
    blocks = pl.cdiv(length, STEP) * 2
    optional = [x for x in (order, means) if x is not None]
    (codes,) = launch(
        functools.partial(_value_body, ordered=order is not None, smooth=means is not None),
        (blocks, heads, batch),
        [jax.ShapeDtypeStruct((batch, heads, size + COUNT_ROWS, blocks * BLOCK), E4M3)],
        (value, count, 1.0 / scale, *optional),
        warps=2,
        interpret=interpret,
    )
    return codes
