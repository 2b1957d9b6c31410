"""Rotation, centring, sorting and 8-bit quantisation of queries, keys and values in few passes.

Kernels for Hopper GPUs, which produce the arrays of the prepared layout (`layout.Prepared8`).
Memory traffic in passes over an array of tokens: queries and keys one read (and one for the sizes
of their channels), values two.

Each program looks at one head and tiles of 64 queries or blocks of 128 keys or values (`_tiles`).
Rotation and balance are one product on the tensor core with the Hadamard matrix of +1 and -1, times
a power of two per channel; its products are exact, its factor is applied in float32.
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
    largest,
    largest_magnitude,
    norm,
    power_of_two_at_least,
    round_to_bfloat16,
    round_up_11_bits,
)
from ._tiles import loaded_channels, stored_channels
from .layout import (
    BLOCK,
    COUNT_ROWS,
    E4M3,
    E4M3_NORM,
    LARGEST_SQUARED,
    LARGEST_UNIT,
    STEP,
    SUM_UNIT,
    TINY,
)

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
        batch, length, heads = array.shape[:3]
        # Every batch row and head is padded to whole steps, and tiles look one further.
        if batch * heads * (pl.cdiv(length, STEP) + 1) * STEP >= 2**31:
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


def _matrix(size: int, dtype, rotate: bool, balance: Array | None) -> Array:
    """What takes rows as they are loaded to rotated (or the same) ones as they are stored.

    Args:
      balance: powers of two [B, K, H] that the channels are multiplied with first; `None`: 1.

    Returns:
      [B·K, H, H], or [1, H, H] if all heads share it.
    """
    matrix = _signs(size) if rotate else np.eye(size)
    matrix = matrix[stored_channels(size)][:, loaded_channels(size)][None]
    dtype = jnp.bfloat16 if dtype == jnp.float32 else dtype
    if balance is None:
        return jnp.asarray(matrix, dtype)
    factors = _flat(balance, 2)[:, None, loaded_channels(size)]
    return (jnp.asarray(matrix, jnp.float32) * factors).astype(dtype)


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
    """What the means and scales of the values follow from; either the first two or the others.

    Attributes:
      means: float32 [B, K, n, H], of each block of 128 tokens, exact in bfloat16.
      half_largest: float32 [B, K, H], half of each channel's largest residual.
      total: float32 [B, K, H], the sum of the valid values times `layout.SUM_UNIT`.
      high, low: float32 [B, K, H], the largest and the least valid value.
    """

    means: Float[Array, "b k j h"] | None = None
    half_largest: Float[Array, "b k h"] | None = None
    total: Float[Array, "b k h"] | None = None
    high: Float[Array, "b k h"] | None = None
    low: Float[Array, "b k h"] | None = None


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


def _channel_body(tiles, program, tokens_ref, *refs, shape, share: int, wanted, masked: bool):
    valid_ref = refs[0] if masked else None
    out_refs = refs[1:] if masked else refs
    (length, heads, chunks), (batch, head, chunk) = shape, program
    place = tiles.index(BLOCK, "block")

    def add(tile, carry):
        token = (chunk * share + tile) * BLOCK + place
        inside = token < length
        if valid_ref is not None:
            flag = tiles.entries(valid_ref, jnp.where(inside, batch * length + token, -1), "block")
            inside = flag != 0
        row = jnp.where(inside, (batch * length + token) * heads + head, -1)
        rows = tiles.rows(tokens_ref, row, "block").astype(jnp.float32)
        return tuple(
            _with_rows(tiles, name, so_far, rows, inside)
            for name, so_far in zip(wanted, carry, strict=True)
        )

    nothing = tiles.zeros((tiles.size,), jnp.float32, "block")
    start = tuple(nothing - jnp.inf if name in ("high", "low") else nothing for name in wanted)
    found = lax.fori_loop(0, share, add, start)
    for out_ref, some in zip(out_refs, found, strict=True):
        tiles.put_channels(out_ref, (batch * heads + head) * chunks + chunk, some)


def _with_rows(tiles, name: str, so_far, rows, inside):
    """A statistic with some more rows, which are zero where they are not inside."""
    if name == "sum":
        return so_far + jnp.sum(rows * SUM_UNIT, 0)
    if name == "squares":
        size = jnp.abs(rows)
        bounded = jnp.minimum(size, LARGEST_SQUARED)
        return so_far + jnp.sum(jnp.where(size < jnp.inf, bounded * bounded, 0.0), 0)
    rows = rows if name == "high" else -rows
    nowhere = tiles.over_tokens(jnp.where(inside, 0.0, -jnp.inf), "block")
    return jnp.maximum(so_far, tiles.highest(rows + nowhere, 0))


def _channel_role(tokens, valid, wanted: tuple[str, ...]) -> Role:
    batch, length, heads, size = tokens.shape
    tiles = pl.cdiv(length, BLOCK)
    share = _tiles_of_program(tiles, batch * heads, _STATISTICS_SHARE)
    chunks = pl.cdiv(tiles, share)
    masks = () if valid is None else (_flat(valid.astype(jnp.int32), 2),)
    shape = (length, heads, chunks)
    body = functools.partial(
        _channel_body, shape=shape, share=share, wanted=wanted, masked=valid is not None
    )
    return Role(
        body,
        (batch, heads, chunks),
        (_flat(tokens, 3), *masks),
        [jax.ShapeDtypeStruct((batch * heads * chunks, size), jnp.float32) for _ in wanted],
        size,
    )


def _channel_result(tokens, wanted: tuple[str, ...], found) -> dict[str, Array]:
    batch, _, heads, size = tokens.shape
    results = {}
    for name, parts in zip(wanted, found, strict=True):
        parts = parts.reshape(batch, heads, -1, size)
        results[name] = largest(parts, 2) if name in ("high", "low") else jnp.sum(parts, 2)
    if "low" in results:
        results["low"] = -results["low"]
    return results


def channel_statistics(
    tokens: Float[Array, "b s k h"],
    valid: Bool[Array, "b s"] | None = None,
    wanted: tuple[str, ...] = ("sum",),
    *,
    interpret: bool = False,
) -> dict[str, Float[Array, "b k h"]]:
    """What is known about each channel over the valid tokens, float32, in one pass.

    Sums run in a fixed order: results do not change from run to run.

    Args:
      wanted: of `"sum"` (times `layout.SUM_UNIT`), `"squares"` (their sum; of magnitudes up to
        `layout.LARGEST_SQUARED`, of what is not finite 0), `"high"` and `"low"` (the largest and
        the least value; infinities where no token is valid). A NaN shows in both.
    """
    (found,) = launch([_channel_role(tokens, valid, wanted)], interpret=interpret)
    return _channel_result(tokens, wanted, found)


class Statistics(NamedTuple):
    """What preparation has to know about a call beforehand; results of `channel_statistics`."""

    query: dict[str, Float[Array, "b n h"]]
    key: dict[str, Float[Array, "b k h"]]
    value: ValueStatistics | None


_OF_VALUES = ("sum", "high", "low")


def statistics(
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k h"] | None,
    count: Int[Array, " b"],
    order: Int[Array, "b k s"] | None,
    valid: Bool[Array, "b s"] | None,
    *,
    of_queries: tuple[str, ...],
    of_keys: tuple[str, ...],
    smooth: bool,
    interpret: bool = False,
) -> Statistics:
    """Statistics of all tokens in one launch.

    Args:
      value: `None`: nothing of the values.
      of_queries, of_keys: what is wanted of them, as of `channel_statistics`.
      smooth: whether block means are taken from the values.
    """
    roles = {}
    if of_queries:
        roles["query"] = _channel_role(query, None, of_queries)
    if of_keys:
        roles["key"] = _channel_role(key, valid, of_keys)
    if value is not None and smooth:
        roles["value"] = _value_statistics_role(value, count, order)
    elif value is not None:
        roles["value"] = _channel_role(value, valid, _OF_VALUES)
    if not roles:
        return Statistics({}, {}, None)
    found = dict(zip(roles, launch(list(roles.values()), interpret=interpret), strict=True))
    return Statistics(
        _channel_result(query, of_queries, found.get("query", ())),
        _channel_result(key, of_keys, found.get("key", ())),
        None if value is None else _value_result_of(value, found["value"], smooth),
    )


def values_statistics(
    value: Float[Array, "b s k h"],
    count: Int[Array, " b"],
    order: Int[Array, "b k s"] | None,
    valid: Bool[Array, "b s"] | None,
    *,
    smooth: bool,
    interpret: bool = False,
) -> ValueStatistics:
    """The part of `statistics` that is of the values."""
    wanted: dict[str, Any] = {"of_queries": (), "of_keys": (), "smooth": smooth}
    tokens = (value, value, value)
    found = statistics(*tokens, count, order, valid, **wanted, interpret=interpret).value
    assert found is not None
    return found


def _value_result_of(value, found, smooth: bool) -> ValueStatistics:
    if smooth:
        return _value_statistics_result(value, found)
    totals = _channel_result(value, _OF_VALUES, found)
    return ValueStatistics(total=totals["sum"], high=totals["high"], low=totals["low"])


# --- queries


def _query_body(tiles, program, *refs, shape, share: int, balanced: bool):
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

    own = batch * lax.div(jnp.int32(heads), jnp.int32(groups)) + key_head if balanced else 0
    tiles.with_matrix(matrix_ref, own, through)


def _query_scale(tiles, rows, factor, code_dtype):
    """The positive scale of the codes of each row times a factor of either sign."""
    factor = jnp.abs(factor)
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
    balance: Float[Array, "b k h"] | None = None,
    *,
    scale: Float[Array, ""] | float,
    rotate: bool,
    code_dtype,
    interpret: bool = False,
) -> tuple[Shaped[Array, "b n t h"], Float[Array, "b n t"], Float[Array, "b n t"]]:
    """Queries times `scale`, balanced, rotated, as codes with a scale per token.

    Args:
      unit: what E4M3 queries are multiplied with beforehand: the unit of the key scales.
      limit: the largest query scale.
      balance: powers of two that the channels are multiplied with, exact in the queries' dtype;
        `None`: 1.
      scale: of either sign.

    Returns:
      codes [B, N, T, H]; scales within the limit; what the limit took, as a factor.
    """
    formats = {"scale": scale, "rotate": rotate, "code_dtype": code_dtype}
    (found,) = launch([_query_role(query, unit, limit, balance, **formats)], interpret=interpret)
    return _query_result(query, found)


def _query_role(query, unit, limit, balance, *, scale, rotate: bool, code_dtype) -> Role:
    batch, length, heads, size = query.shape
    tiles = pl.cdiv(length, _TILE)
    share = _tiles_of_program(tiles, batch * heads)
    factor = jnp.asarray(scale, jnp.float32) * (1 / math.sqrt(size) if rotate else 1.0)
    matrix = _matrix(size, query.dtype, rotate, balance)
    row = jax.ShapeDtypeStruct((batch * heads * length,), jnp.float32)
    return Role(
        functools.partial(
            _query_body,
            shape=(length, heads, heads // unit.shape[1]),
            share=share,
            balanced=balance is not None,
        ),
        (batch, heads, pl.cdiv(tiles, share)),
        (_flat(query, 3), factor.reshape(1), unit, limit, matrix),
        [jax.ShapeDtypeStruct((batch * heads * length, size), code_dtype), row, row],
        size,
    )


def _query_result(query, found) -> tuple[Array, Array, Array]:
    batch, length, heads, size = query.shape
    codes, scales, excess = found
    shape = (batch, heads, length)
    return codes.reshape(*shape, size), scales.reshape(shape), excess.reshape(shape)


# --- keys


class _Optional(NamedTuple):
    """What a call of keys has."""

    order: bool
    mean: bool
    balance: bool


def _key_body(tiles, program, key_ref, count_ref, *refs, shape, share, has, rotate):
    refs = list(refs)
    order_ref = refs.pop(0) if has.order else None
    mean_ref = refs.pop(0) if has.mean else None
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
            scale = jnp.where(live, jnp.where(amax <= TINY, 0.0, scale), 0.0)
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

    tiles.with_matrix(matrix_ref, by_head if has.balance else 0, through)


def quantize_keys(
    key: Float[Array, "b s k h"],
    count: Int[Array, " b"],
    order: Int[Array, "b k s"] | None,
    mean: Float[Array, "b k h"] | None,
    balance: Float[Array, "b k h"] | None = None,
    *,
    rotate: bool,
    code_dtype,
    interpret: bool = False,
) -> tuple[Shaped[Array, "b k p h"], Float[Array, "b k j"]]:
    """Keys in their order, less the mean, balanced, rotated, as codes with a scale per block.

    Args:
      count: valid keys of each batch row, the first so many of the order.
      order: position -> token; `None`: as they are.
      mean: subtracted first; `None`: nothing.
      balance: powers of two that the channels are divided by, exact in the keys' dtype; `None`: 1.

    Returns:
      codes [B, K, P, H], P a multiple of 256; scales [B, K, P / 128].
    """
    role = _key_role(key, count, order, mean, balance, rotate=rotate, code_dtype=code_dtype)
    ((codes, scales),) = launch([role], interpret=interpret)
    batch, _, heads, size = key.shape
    return codes.reshape(batch, heads, -1, size), scales.reshape(batch, heads, -1)


def _key_role(key, count, order, mean, balance, *, rotate: bool, code_dtype) -> Role:
    batch, length, heads, size = key.shape
    blocks = 2 * pl.cdiv(length, STEP)
    # Whole steps: their two blocks share what stands in for missing keys.
    share = 2 * pl.cdiv(_tiles_of_program(blocks, batch * heads), 2)
    arguments = [_flat(key, 3), count]
    if order is not None:
        arguments.append(_flat(order, 3))
    inverse = None if balance is None else 1.0 / balance
    if mean is not None:
        if inverse is not None:
            mean = mean * inverse
        if rotate:
            signs = np.asarray(_signs(size), np.float32)
            mean = jnp.matmul(mean, signs, precision=lax.Precision.HIGHEST) / math.sqrt(size)
        arguments.append(_flat(mean, 2)[:, stored_channels(size)])
    body = functools.partial(
        _key_body,
        shape=(length, heads, blocks),
        share=share,
        has=_Optional(order is not None, mean is not None, balance is not None),
        rotate=rotate,
    )
    return Role(
        body,
        (batch, heads, pl.cdiv(blocks, share)),
        (*arguments, _matrix(size, key.dtype, rotate, inverse)),
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
        mean = jnp.sum(rows * SUM_UNIT, 0) * (1.0 / SUM_UNIT / inside.astype(jnp.float32))
        mean = round_to_bfloat16(mean)
        # Half of it, which is finite for all finite values.
        there = tiles.over_tokens(jnp.where(valid, 0.5, 0.0), "block")
        residual = 0.5 * rows - there * tiles.over_channels(mean, BLOCK, "block")
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
    """Mean of each 128-value block, and half of each channel's largest residual, both float32.

    The means are exact in bfloat16: what rounding cuts off is in the residuals.
    """
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


def _value_body(tiles, program, value_ref, count_ref, inverse_ref, mean_ref, *refs, shape, share):
    *orders, codes_ref = refs
    order_ref = orders[0] if orders else None
    (length, heads, blocks, means), (batch, head, first) = shape, program
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
        own = by_head * means + (block if means > 1 else 0)
        taken = tiles.over_channels(tiles.channels(mean_ref, own, "block"), BLOCK, "block")
        rows = rows * tiles.over_channels(inverse, BLOCK, "block")
        rows = rows - tiles.over_tokens(there, "block") * taken
        tiles.put_value_codes(codes_ref, by_head, block, rows, there, blocks * BLOCK)
        return carry

    # Programs of the last blocks may do one of them twice.
    first = jnp.minimum(first * share, max(blocks - share, 0))
    held.over_blocks(first, share, quantise, jnp.int32(0))


def quantize_values(
    value: Float[Array, "b s k h"],
    count: Int[Array, " b"],
    order: Int[Array, "b k s"] | None,
    means: Float[Array, "b k j h"],
    scale: Float[Array, "b k h"],
    *,
    interpret: bool = False,
) -> Float8e4m3fn[Array, "b k h+8 p"]:
    """Values in their order, less a mean, as transposed codes over count rows.

    Args:
      means: of each block, or one of all values (J = 1), in units of `scale`, bfloat16 or float32.
      scale: of each channel, a power of two.
    """
    role = _value_role(value, count, order, means, scale)
    ((codes,),) = launch([role], interpret=interpret)
    return _value_result(value, codes)


def quantize_queries_and_values(
    queries: tuple[Array, Array, Array, Array | None],
    values: tuple[Array, Array, Array | None, Array, Array],
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
    arguments.append(_flat(means.astype(jnp.float32), 3))
    if order is not None:
        arguments.append(_flat(order, 3))
    shape = (length, heads, blocks, means.shape[2])
    body = functools.partial(_value_body, shape=shape, share=share)
    codes = (batch * heads, size + COUNT_ROWS, blocks * BLOCK)
    return Role(
        body,
        (batch, heads, pl.cdiv(blocks, share)),
        arguments,
        [jax.ShapeDtypeStruct(codes, E4M3)],
        size,
    )
