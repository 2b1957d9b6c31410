"""Rotation, centring, sorting and 8-bit quantisation of queries, keys and values in few passes.

Kernels for Hopper GPUs, which produce the arrays of the prepared layout (`layout.Prepared8`).
Memory traffic in passes over an array of tokens: queries one read, keys one read (and one for their
mean), values two.

Each program looks at one head and tiles of 64 queries or blocks of 128 keys or values (`_tiles`).
The rotation is a product with the Hadamard matrix of +1 and -1 on the tensor core, whose products
are exact; its factor is applied in float32.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float8e4m3fn, Int, Shaped

from ._launch import Role, launch
from ._numbers import (
    MAGIC,
    group_scale,
    is_finite,
    largest_magnitude,
    norm,
    power_of_two_at_least,
    round_up_11_bits,
)
from ._tiles import loaded_channels, stored_channels
from .layout import BLOCK, COUNT_ROWS, E4M3, E4M3_NORM, LARGEST_UNIT, STEP

HEAD_DIMS = (64, 128)
TOKEN_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_TILE = 64
"""Queries of a tile."""
_PROGRAMS = 1024
"""Programs above which each goes through more tiles."""
_SHARE, _STATISTICS_SHARE = 4, 2
"""Tiles that a program goes through at most; of channel statistics."""


def unsupported(head_dim: int, *token_arrays: jax.ShapeDtypeStruct | Array) -> str | None:
    """Why these kernels cannot take a call, or `None`. Does not look at the device."""
    if head_dim not in HEAD_DIMS:
        return f"needs a head dim of 64 or 128, got {head_dim}"
    for array in token_arrays:
        if array.dtype not in [jnp.dtype(x) for x in TOKEN_DTYPES]:
            return f"needs float32, bfloat16 or float16 tokens, got {array.dtype}"
        if math.prod(array.shape[:3]) + 2 * STEP * math.prod(array.shape[2:3]) >= 2**31:
            return "needs fewer than 2^31 tokens of all heads and batch rows"
    return None


def _tiles_of_program(tiles: int, heads: int, most: int = _SHARE) -> int:
    """Tiles that a program goes through: one while there are few programs."""
    return max(1, min(most, tiles, tiles * heads // _PROGRAMS))


def _flat(array: Array, axes: int) -> Array:
    """The array with its first axes in one."""
    return array.reshape(-1, *array.shape[axes:])


def _signs(size: int) -> np.ndarray:
    """The symmetric matrix of +1 and -1 [H, H] whose product with sqrt(1/H) is a rotation."""
    index = np.arange(size)
    return 1.0 - 2.0 * (np.bitwise_count(index[:, None] & index) % 2)


def _matrix(size: int, dtype, rotate: bool) -> Array:
    """What takes rows as they are loaded to rotated (or the same) ones as they are stored."""
    matrix = _signs(size) if rotate else np.eye(size)
    matrix = matrix[stored_channels(size)][:, loaded_channels(size)]
    return jnp.asarray(matrix[None], jnp.bfloat16 if dtype == jnp.float32 else dtype)


def _through(tiles, rows, matrix):
    """Rows times the matrix, float32; float32 rows in three exact pieces of 8 bits."""
    if rows.dtype != jnp.float32:
        return tiles.product(rows, matrix)
    parts, rest = [], rows
    for _ in range(3):
        piece = rest.astype(jnp.bfloat16)
        rest = rest - piece.astype(jnp.float32)
        parts.append(tiles.product(piece, matrix))
    return parts[0] + parts[1] + parts[2]


class ValueStatistics(NamedTuple):
    """What the scales of the values follow from.

    Attributes:
      means: float32 [B, K, n, H], of each block of 128 tokens; `None`: none are taken.
      largest: float32 [B, K, H], largest magnitude of each channel, of residuals with means.
    """

    means: Float[Array, "b k j h"] | None
    largest: Float[Array, "b k h"]


# --- which tokens


@dataclasses.dataclass(frozen=True)
class _Slots:
    """Which tokens the slots of a head's blocks hold, stand-ins for missing ones included.

    Attributes:
      kind: layout of the tile.
      shape: (S, K) of the tokens.
      order_ref, count_ref: the flat order or `None`, valid tokens of each batch row.
      place: batch row and head.
      slots: int32 [128], which of a block's slots.
    """

    tiles: Any
    kind: str
    shape: tuple[int, int]
    order_ref: Any
    count_ref: Any
    place: tuple[Any, Any]
    slots: Any

    def valid(self, block):
        """Whether slots of a block hold valid tokens [128]."""
        return block * BLOCK + self.slots < self.count_ref[self.place[0]]

    def rows(self, block):
        """Rows of the block's tokens in [B·S·K, H], int32 [128]."""
        (length, heads), (batch, head) = self.shape, self.place
        count = self.count_ref[batch]
        first_of_block, first_of_step = block * BLOCK, lax.div(block, jnp.int32(2)) * STEP
        slot = first_of_block + self.slots
        stand_in = jnp.where(first_of_block < count, first_of_block, first_of_step)
        stand_in = jnp.where(stand_in < count, stand_in, 0)
        source = jnp.where(slot < count, slot, stand_in)
        if self.order_ref is not None:
            at = (batch * heads + head) * length + source
            source = self.tiles.entries(self.order_ref, at, self.kind)
        # An order that is none must not make the GPU read elsewhere.
        source = jnp.minimum(jnp.maximum(source, 0), length - 1)
        return (batch * length + source) * heads + head

    def over_blocks(self, first, share: int, body, start):
        """`body(block, rows, carry)` of blocks in turn, the next one's rows looked up meanwhile."""

        def step(index, carry):
            rows, carry = carry
            following = self.rows(first + index + 1)
            return following, body(first + index, rows, carry)

        return lax.fori_loop(0, share, step, (self.rows(first), start))[1]


# --- statistics over all tokens


def _channel_body(tiles, program, tokens_ref, *refs, shape, share: int, maximum: bool):
    *masks, out_ref = refs
    (length, heads, chunks), (batch, head, chunk) = shape, program
    place = tiles.index(BLOCK, "block")

    def add(tile, carry):
        token = (chunk * share + tile) * BLOCK + place
        inside = token < length
        for valid_ref in masks:
            flag = tiles.entries(valid_ref, jnp.where(inside, batch * length + token, -1), "block")
            inside = flag != 0
        row = jnp.where(inside, (batch * length + token) * heads + head, -1)
        rows = tiles.rows(tokens_ref, row, "block").astype(jnp.float32)
        if maximum:
            return jnp.maximum(carry, tiles.largest(rows, 0))
        return carry + jnp.sum(rows, 0)

    total = tiles.zeros((tiles.size,), jnp.float32, "block")
    total = lax.fori_loop(0, share, add, total)
    tiles.put_channels(out_ref, (batch * heads + head) * chunks + chunk, total)


def _channel_role(tokens, valid, maximum: bool) -> Role:
    batch, length, heads, size = tokens.shape
    tiles = pl.cdiv(length, BLOCK)
    share = _tiles_of_program(tiles, batch * heads, _STATISTICS_SHARE)
    chunks = pl.cdiv(tiles, share)
    masks = () if valid is None else (_flat(valid.astype(jnp.int32), 2),)
    shape = (length, heads, chunks)
    return Role(
        functools.partial(_channel_body, shape=shape, share=share, maximum=maximum),
        (batch, heads, chunks),
        (_flat(tokens, 3), *masks),
        [jax.ShapeDtypeStruct((batch * heads * chunks, size), jnp.float32)],
        size,
    )


def _channel_result(tokens, parts, maximum: bool) -> Array:
    batch, _, heads, size = tokens.shape
    parts = parts.reshape(batch, heads, -1, size)
    return largest_magnitude(parts, 2) if maximum else jnp.sum(parts, 2)


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
    ((parts,),) = launch([_channel_role(tokens, valid, maximum)], interpret=interpret)
    return _channel_result(tokens, parts, maximum)


def statistics(
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k h"],
    count: Int[Array, " b"],
    order: Int[Array, "b k s"] | None,
    valid: Bool[Array, "b s"] | None,
    *,
    smooth: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "b k h"], ValueStatistics]:
    """The sum of the valid keys, and what the values' scales follow from, in one launch.

    Args:
      smooth: whether block means are taken from the values.
    """
    if smooth:
        role = _value_statistics_role(value, count, order)
    else:
        role = _channel_role(value, valid, maximum=True)
    (total,), found = launch([_channel_role(key, valid, maximum=False), role], interpret=interpret)
    total = _channel_result(key, total, maximum=False)
    if smooth:
        return total, _value_statistics_result(value, found)
    return total, ValueStatistics(None, _channel_result(value, *found, maximum=True))


# --- queries


def _query_body(tiles, program, *refs, shape, share: int):
    query_ref, factor_ref, unit_ref, limit_ref, matrix_ref, codes_ref, scale_ref, excess_ref = refs
    (length, heads, groups), (batch, head, first) = shape, program
    key_head = lax.div(head, jnp.int32(groups))
    limit = limit_ref[batch, key_head]
    factor = factor_ref[0]
    if codes_ref.dtype != jnp.int8:
        factor = factor * unit_ref[batch, key_head]
    place = tiles.index(_TILE, "rows")

    def through(matrix):
        def quantise(tile, carry):
            token = (first * share + tile) * _TILE + place
            inside = token < length
            row = jnp.where(inside, (batch * length + token) * heads + head, -1)
            rows = _through(tiles, tiles.rows(query_ref, row, "rows"), matrix)
            scale = _query_scale(tiles, rows, factor, codes_ref.dtype)
            rows = rows * tiles.over_tokens(factor / scale, "rows")
            if codes_ref.dtype == jnp.int8:
                rows = rows + MAGIC
            to = jnp.where(inside, (batch * heads + head) * length + token, -1)
            tiles.put_codes(codes_ref, to, rows)
            within = jnp.where(is_finite(scale), jnp.minimum(scale, limit), jnp.nan)
            tiles.put_entries(scale_ref, to, within, "rows")
            tiles.put_entries(excess_ref, to, scale / within, "rows")
            return carry

        lax.fori_loop(0, share, quantise, 0)

    tiles.with_matrix(matrix_ref, 0, through)


def _query_scale(tiles, rows, factor, code_dtype):
    """The scale of the codes of each row times a positive factor."""
    if code_dtype == jnp.int8:
        return group_scale(tiles.largest(rows, 1) * factor, 127.0)
    length = norm(tiles, rows) * factor
    # Codes of queries with next to no effect shrink instead of leaving float16.
    scale = jnp.maximum(length * (1 / E4M3_NORM), 2.0**-13)
    scale = jnp.where(length <= 0, LARGEST_UNIT, jnp.where(length == length, scale, length))
    return round_up_11_bits(scale)


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
    formats = {"scale": scale, "rotate": rotate, "code_dtype": code_dtype}
    (found,) = launch([_query_role(query, unit, limit, **formats)], interpret=interpret)
    return _query_result(query, found)


def _query_role(query, unit, limit, *, scale, rotate: bool, code_dtype) -> Role:
    batch, length, heads, size = query.shape
    tiles = pl.cdiv(length, _TILE)
    share = _tiles_of_program(tiles, batch * heads)
    factor = jnp.asarray(scale, jnp.float32) * (1 / math.sqrt(size) if rotate else 1.0)
    row = jax.ShapeDtypeStruct((batch * heads * length,), jnp.float32)
    return Role(
        functools.partial(_query_body, shape=(length, heads, heads // unit.shape[1]), share=share),
        (batch, heads, pl.cdiv(tiles, share)),
        (_flat(query, 3), factor.reshape(1), unit, limit, _matrix(size, query.dtype, rotate)),
        [jax.ShapeDtypeStruct((batch * heads * length, size), code_dtype), row, row],
        size,
    )


def _query_result(query, found) -> tuple[Array, Array, Array]:
    batch, length, heads, size = query.shape
    codes, scales, excess = found
    shape = (batch, heads, length)
    return codes.reshape(*shape, size), scales.reshape(shape), excess.reshape(shape)


# --- keys


def _key_body(tiles, program, key_ref, count_ref, *refs, shape, share, ordered, centred, rotate):
    refs = list(refs)
    order_ref = refs.pop(0) if ordered else None
    mean_ref = refs.pop(0) if centred else None
    matrix_ref, codes_ref, scale_ref = refs
    (length, heads, blocks), (batch, head, first) = shape, program
    integer = codes_ref.dtype == jnp.int8
    count = count_ref[batch]
    slots = tiles.index(BLOCK, "rows")
    held = _Slots(tiles, "rows", (length, heads), order_ref, count_ref, (batch, head), slots)
    by_head = batch * heads + head

    def through(matrix):
        def quantise(block, row, first_scale):
            live = lax.div(block, jnp.int32(2)) * STEP < count
            # Nothing may get into codes of nothing.
            row = jnp.where(live, row, -1)
            rows = _through(tiles, tiles.rows(key_ref, row, "rows"), matrix)
            if rotate:
                rows = rows * (1 / math.sqrt(tiles.size))
            if mean_ref is not None:
                mean = tiles.channels(mean_ref, by_head, "rows")
                mean = mean * jnp.where(live, 1.0, 0.0)
                rows = rows - tiles.over_channels(mean, BLOCK, "rows")
            if integer:
                amax = tiles.largest(tiles.largest(rows, 1), 0)
                scale = group_scale(amax, 127.0)
            else:
                amax = tiles.largest(norm(tiles, rows), 0)
                scale = power_of_two_at_least(group_scale(amax, E4M3_NORM))
            scale = jnp.where(live & (amax != 0), scale, 0.0)
            # A second block without a valid key holds codes of the step's first key.
            dead = (lax.rem(block, jnp.int32(2)) == 1) & (block * BLOCK >= count)
            scale = jnp.where(dead, first_scale, scale)
            inverse = jnp.where(scale == 0, 0.0, 1.0 / jnp.where(scale == 0, 1.0, scale))
            rows = rows * inverse
            to = jnp.where(block < blocks, (by_head * blocks + block) * BLOCK + slots, -1)
            tiles.put_codes(codes_ref, to, rows + MAGIC if integer else rows)
            tiles.put_entry(
                scale_ref, jnp.where(block < blocks, by_head * blocks + block, -1), scale
            )
            return scale

        held.over_blocks(first * share, share, quantise, jnp.float32(0))

    tiles.with_matrix(matrix_ref, 0, through)


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
    role = _key_role(key, count, order, mean, rotate=rotate, code_dtype=code_dtype)
    ((codes, scales),) = launch([role], interpret=interpret)
    batch, _, heads, size = key.shape
    return codes.reshape(batch, heads, -1, size), scales.reshape(batch, heads, -1)


def _key_role(key, count, order, mean, *, rotate: bool, code_dtype) -> Role:
    batch, length, heads, size = key.shape
    blocks = 2 * pl.cdiv(length, STEP)
    # Whole steps: their two blocks share what stands in for missing keys.
    share = 2 * pl.cdiv(_tiles_of_program(blocks, batch * heads), 2)
    arguments = [_flat(key, 3), count]
    if order is not None:
        arguments.append(_flat(order, 3))
    if mean is not None:
        if rotate:
            signs = np.asarray(_signs(size), np.float32)
            mean = jnp.matmul(mean, signs, precision=lax.Precision.HIGHEST) / math.sqrt(size)
        arguments.append(_flat(mean, 2)[:, stored_channels(size)])
    body = functools.partial(
        _key_body,
        shape=(length, heads, blocks),
        share=share,
        ordered=order is not None,
        centred=mean is not None,
        rotate=rotate,
    )
    return Role(
        body,
        (batch, heads, pl.cdiv(blocks, share)),
        (*arguments, _matrix(size, key.dtype, rotate)),
        [
            jax.ShapeDtypeStruct((batch * heads * blocks * BLOCK, size), code_dtype),
            jax.ShapeDtypeStruct((batch * heads * blocks,), jnp.float32),
        ],
        size,
    )


# --- values


def _value_statistics_body(tiles, program, value_ref, count_ref, *refs, shape, share):
    *orders, mean_ref, largest_ref = refs
    (length, heads, blocks), (batch, head, first) = shape, program
    order_ref = orders[0] if orders else None
    slots = tiles.index(BLOCK, "block")
    held = _Slots(tiles, "block", (length, heads), order_ref, count_ref, (batch, head), slots)
    by_head = batch * heads + head
    chunks = pl.cdiv(blocks, share)

    def look(block, row, largest):
        valid = held.valid(block)
        rows = tiles.rows(value_ref, jnp.where(valid, row, -1), "block").astype(jnp.float32)
        inside = jnp.minimum(jnp.maximum(count_ref[batch] - block * BLOCK, 1), BLOCK)
        mean = jnp.sum(rows, 0) * (1.0 / inside.astype(jnp.float32))
        there = tiles.over_tokens(jnp.where(valid, 1.0, 0.0), "block")
        residual = rows - there * tiles.over_channels(mean, BLOCK, "block")
        at = jnp.where(block < blocks, by_head * blocks + block, -1)
        tiles.put_channels(mean_ref, at, mean)
        return jnp.maximum(largest, tiles.largest(residual, 0))

    largest = tiles.zeros((tiles.size,), jnp.float32, "block")
    largest = held.over_blocks(first * share, share, look, largest)
    tiles.put_channels(largest_ref, by_head * chunks + first, largest)


def value_statistics(
    value: Float[Array, "b s k h"],
    count: Int[Array, " b"],
    order: Int[Array, "b k s"] | None,
    *,
    interpret: bool = False,
) -> ValueStatistics:
    """Mean of each 128-value block, and each channel's largest residual, both float32."""
    (found,) = launch([_value_statistics_role(value, count, order)], interpret=interpret)
    return _value_statistics_result(value, found)


def _value_statistics_role(value, count, order) -> Role:
    batch, length, heads, size = value.shape
    blocks = pl.cdiv(length, STEP) * 2
    share = _tiles_of_program(blocks, batch * heads)
    chunks = pl.cdiv(blocks, share)
    return Role(
        functools.partial(_value_statistics_body, shape=(length, heads, blocks), share=share),
        (batch, heads, chunks),
        (_flat(value, 3), count, *(() if order is None else (_flat(order, 3),))),
        [jax.ShapeDtypeStruct((batch * heads * n, size), jnp.float32) for n in (blocks, chunks)],
        size,
    )


def _value_statistics_result(value, found) -> ValueStatistics:
    batch, _, heads, size = value.shape
    means, largest = (x.reshape(batch, heads, -1, size) for x in found)
    return ValueStatistics(means, largest_magnitude(largest, 2))


def _value_body(tiles, program, value_ref, count_ref, inverse_ref, *refs, shape, share, ordered):
    refs = list(refs)
    order_ref = refs.pop(0) if ordered else None
    *means, codes_ref = refs
    (length, heads, blocks), (batch, head, first) = shape, program
    # Tokens are read in the order in which a group of 16 is stored.
    place = tiles.index(BLOCK, "block")
    slots = (place & ~14) | ((place & 2) << 2) | ((place & 12) >> 1)
    held = _Slots(tiles, "block", (length, heads), order_ref, count_ref, (batch, head), slots)
    by_head = batch * heads + head
    inverse = tiles.channels(inverse_ref, by_head, "block")

    def quantise(block, row, carry):
        valid = held.valid(block)
        rows = tiles.rows(value_ref, jnp.where(valid, row, -1), "block").astype(jnp.float32)
        there = jnp.where(valid, 1.0, 0.0)
        for mean_ref in means:
            mean = tiles.channels(mean_ref, by_head * blocks + block, "block")
            taken = tiles.over_channels(mean, BLOCK, "block")
            rows = rows - tiles.over_tokens(there, "block") * taken
        rows = rows * tiles.over_channels(inverse, BLOCK, "block")
        tiles.put_value_codes(codes_ref, by_head, block, rows, there, blocks * BLOCK)
        return carry

    # Programs of the last blocks may do one of them twice.
    first = jnp.minimum(first * share, max(blocks - share, 0))
    held.over_blocks(first, share, quantise, jnp.int32(0))


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
    role = _value_role(value, count, order, means, scale)
    ((codes,),) = launch([role], interpret=interpret)
    return _value_result(value, codes)


def quantize_queries_and_values(
    queries: tuple[Array, Array, Array],
    values: tuple[Array, Array, Array | None, Array | None, Array],
    *,
    interpret: bool = False,
    **formats: Any,
) -> tuple[tuple[Array, Array, Array], Array]:
    """`quantize_queries` and `quantize_values`, of their arguments in order, in one launch."""
    roles = [_query_role(*queries, **formats), _value_role(*values)]
    found, (codes,) = launch(roles, interpret=interpret)
    return _query_result(queries[0], found), _value_result(values[0], codes)


def _value_result(value, codes) -> Array:
    return codes.reshape(value.shape[0], value.shape[2], *codes.shape[1:])


def _value_role(value, count, order, means, scale) -> Role:
    batch, length, heads, size = value.shape
    blocks = pl.cdiv(length, STEP) * 2
    share = _tiles_of_program(blocks, batch * heads)
    arguments = [_flat(value, 3), count, _flat(1.0 / scale, 2)]
    if order is not None:
        arguments.append(_flat(order, 3))
    if means is not None:
        arguments.append(_flat(means, 3))
    body = functools.partial(
        _value_body, shape=(length, heads, blocks), share=share, ordered=order is not None
    )
    codes = (batch * heads, size + COUNT_ROWS, blocks * BLOCK)
    return Role(
        body,
        (batch, heads, pl.cdiv(blocks, share)),
        arguments,
        [jax.ShapeDtypeStruct(codes, E4M3)],
        size,
    )
