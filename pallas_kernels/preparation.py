"""Rotation, centring, sorting and 8-bit quantisation of queries, keys and values in one pass each.

Kernels for Hopper GPUs, which produce the arrays of the prepared layout (`layout.Prepared8`) from
what `statistics` found out about all tokens.

Each program looks at one head and tiles of 64 queries or blocks of 128 keys (`_tiles`); those for
values are in `_value_codes`.
Rotation and balance are one product on the tensor core with the Hadamard matrix of +1 and -1, times
a power of two per channel; its products are exact, its factor is applied in float32.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from ._launch import Role, launch
from ._numbers import (
    MAGIC,
    as_float,
    group_scale,
    is_finite,
    largest_magnitude,
    magnitude_bits,
    norm,
    power_of_two_at_least,
    round_up_11_bits,
)
from ._slots import Slots, flat, tiles_of_program
from ._tiles import loaded_channels, stored_channels
from ._value_codes import ValueCodes, value_result, value_role
from .layout import BLOCK, E4M3_NORM, LARGEST_UNIT, STEP, TINY
from .statistics import ValueStatistics

HEAD_DIMS = (64, 128)
TOKEN_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_TILE = 64
"""Queries of a tile."""


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
    factors = flat(balance, 2)[:, None, loaded_channels(size)]
    return (jnp.asarray(matrix, jnp.float32) * factors).astype(dtype)


def _through(tiles, rows, matrix, start=None) -> Any:
    """A start, zeros if `None`, plus rows times the matrix, float32.

    Float32 rows go through in three pieces: exact with 8 bits in each.
    """
    if rows.dtype != jnp.float32:
        return tiles.product(rows, matrix, start)
    total, rest = start, rows
    for _ in range(3):
        piece = rest.astype(matrix.dtype)
        rest = rest - piece.astype(jnp.float32)
        total = tiles.product(piece, matrix, total)
    return total


# --- queries


def _query_body(tiles, program, *refs, shape, share: int, balanced: bool):
    query_ref, factor_ref, key_scale_ref, matrix_ref, codes_ref, scale_ref, excess_ref = refs[:7]
    (length, heads, groups, blocks), (batch, head, first) = shape, program
    own = lax.div(batch * heads + head, jnp.int32(groups))
    block = tiles.index(BLOCK, "flat")
    at = jnp.where(block < blocks, own * blocks + block, -1)
    key_scale = tiles.entries(key_scale_ref, at, "flat")
    largest = as_float(jnp.max(magnitude_bits(key_scale), 0))
    factor = factor_ref[0]
    if codes_ref.dtype != jnp.int8:
        # The largest key scale moves into the queries'.
        unit = jnp.where(largest == 0, 1.0, largest)
        factor, largest = factor * unit, largest / unit
        for in_units_ref in refs[7:]:
            once = (first == 0) & (lax.rem(head, jnp.int32(groups)) == 0)
            to = jnp.where(once, at, -1)
            tiles.put_entries(in_units_ref, to, key_scale / unit, "flat")
    limit = jnp.where(largest == 0, jnp.inf, LARGEST_UNIT / jnp.where(largest == 0, 1.0, largest))
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

    tiles.with_matrix(matrix_ref, own if balanced else 0, through)


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


class QueryCodes(NamedTuple):
    """Queries in the prepared layout, and what they make of the keys' scales.

    Attributes:
      codes: [B, N, T, H].
      scale: float32 [B, N, T], within the layout's limit.
      excess: float32 [B, N, T], what the limit took, as a factor.
      key_scale: float32 [B, K, n]; of E4M3 codes less the largest, which is in the queries'.
    """

    codes: Shaped[Array, "b n t h"]
    scale: Float[Array, "b n t"]
    excess: Float[Array, "b n t"]
    key_scale: Float[Array, "b k j"]


def quantize_queries(
    query: Float[Array, "b t n h"],
    key_scale: Float[Array, "b k j"],
    balance: Float[Array, "b k h"] | None = None,
    *,
    scale: Float[Array, ""] | float,
    rotate: bool,
    code_dtype,
    interpret: bool = False,
) -> QueryCodes:
    """Queries times `scale`, balanced, rotated, as codes with a scale per token.

    Args:
      key_scale: of the blocks of keys that they are multiplied with, from `quantize_keys`.
      balance: powers of two that the channels are multiplied with, exact in the queries' dtype;
        `None`: 1.
      scale: of either sign.
    """
    formats = {"scale": scale, "rotate": rotate, "code_dtype": code_dtype}
    (found,) = launch([_query_role(query, key_scale, balance, **formats)], interpret=interpret)
    return _query_result(query, key_scale, found)


def _query_role(query, key_scale, balance, *, scale, rotate: bool, code_dtype) -> Role:
    batch, length, heads, size = query.shape
    tiles = pl.cdiv(length, _TILE)
    share = tiles_of_program(tiles, batch * heads)
    factor = jnp.asarray(scale, jnp.float32) * (1 / math.sqrt(size) if rotate else 1.0)
    matrix = _matrix(size, query.dtype, rotate, balance)
    row = jax.ShapeDtypeStruct((batch * heads * length,), jnp.float32)
    results = [jax.ShapeDtypeStruct((batch * heads * length, size), code_dtype), row, row]
    if key_scale.shape[2] > BLOCK:
        # More than a program should look at.
        key_scale = largest_magnitude(key_scale, 2)[:, :, None]
    elif code_dtype != jnp.int8:
        results.append(jax.ShapeDtypeStruct((key_scale.size,), jnp.float32))
    shape = (length, heads, heads // key_scale.shape[1], key_scale.shape[2])
    return Role(
        functools.partial(_query_body, shape=shape, share=share, balanced=balance is not None),
        (batch, heads, pl.cdiv(tiles, share)),
        (flat(query, 3), factor.reshape(1), flat(key_scale, 3), matrix),
        results,
        size,
    )


def _query_result(query, key_scale, found) -> QueryCodes:
    batch, length, heads, size = query.shape
    codes, scales, excess, *in_units = found
    shape = (batch, heads, length)
    if in_units:
        key_scale = in_units[0].reshape(key_scale.shape)
    elif codes.dtype != jnp.int8:
        unit = largest_magnitude(key_scale, 2)[:, :, None]
        key_scale = key_scale / jnp.where(unit == 0, 1.0, unit)
    codes = codes.reshape(*shape, size)
    return QueryCodes(codes, scales.reshape(shape), excess.reshape(shape), key_scale)


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
    held = Slots(tiles, "rows", (length, heads), order_ref, count_ref, (batch, head), slots)
    by_head = batch * heads + head
    rotation = 1 / math.sqrt(tiles.size) if rotate else 1.0

    def through(matrix, kept):
        if mean_ref is not None:
            # Centring after the rotation, which is linear: rows of 16 bits stay exact before it.
            every = tiles.rows(mean_ref, tiles.full(_TILE, by_head, "rows"), "rows")
            tiles.keep_row(kept, _through(tiles, every, matrix))

        def quantise(block, row, first_scale):
            live = lax.div(block, jnp.int32(2)) * STEP < count
            # Nothing may get into codes of nothing.
            row = jnp.where(live, row, -1)
            start = None
            if mean_ref is not None:
                mean = tiles.kept_row(kept, lax.rem(block, jnp.int32(2)))
                mean = mean * jnp.where(live, -1.0, 0.0)
                start = tiles.over_channels(mean, BLOCK, "rows")
            rows = _through(tiles, tiles.rows(key_ref, row, "rows"), matrix, start) * rotation
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

        begin, number = first * share, share
        if share == 1:
            back = (lax.rem(begin, jnp.int32(2)) == 1) & (begin * BLOCK >= count)
            begin, number = begin - back.astype(jnp.int32), 1 + back.astype(jnp.int32)
        held.over_tiles(begin, number, quantise, jnp.float32(0))

    own = by_head if has.balance else 0
    tiles.with_row(lambda kept: tiles.with_matrix(matrix_ref, own, lambda m: through(m, kept)))


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
    share = tiles_of_program(blocks, batch * heads)
    # Whole steps: their two blocks share what stands in for missing keys.
    share = share if share == 1 else 2 * pl.cdiv(share, 2)
    arguments = [flat(key, 3), count]
    if order is not None:
        arguments.append(flat(order, 3))
    inverse = None if balance is None else 1.0 / balance
    if mean is not None:
        arguments.append(flat(mean, 2))
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


def quantize_values(
    value: Float[Array, "b s k h"],
    count: Int[Array, " b"],
    order: Int[Array, "b k s"] | None,
    of_values: ValueStatistics,
    *,
    interpret: bool = False,
) -> ValueCodes:
    """Values in their order, less a mean, as codes."""
    role = value_role(value, count, order, of_values)
    (found,) = launch([role], interpret=interpret)
    return value_result(value, found)


def quantize_queries_and_values(
    queries: tuple[Array, Array, Array | None],
    values: tuple[Array, Array, Array | None, ValueStatistics],
    *,
    interpret: bool = False,
    **formats: Any,
) -> tuple[QueryCodes, ValueCodes]:
    """`quantize_queries` and `quantize_values`, of their arguments in order, in one launch."""
    roles = [_query_role(*queries, **formats), value_role(*values)]
    of_queries, of_values = launch(roles, interpret=interpret)
    return _query_result(*queries[:2], of_queries), value_result(values[0], of_values)
