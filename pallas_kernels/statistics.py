"""Statistics of all tokens that preparation needs beforehand: a pass over them, and its end.

Programs of one launch look at parts of the tokens, those of a second one at a head each: what that
leaves is small, but as separate operations it would cost short calls more than the pass does.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ._launch import Role, launch
from ._numbers import group_scale, largest, power_of_two_at_least, round_to_bfloat16
from ._slots import Slots, flat, tiles_of_program
from .layout import BLOCK, LARGEST_SQUARED, STEP, SUM_UNIT

_SHARE = 2
"""Tiles that a program goes through at most."""
_OF_VALUES = ("sum", "high", "low")
_HALF_OF_LARGEST = 0.5 * float(jnp.finfo(jnp.float8_e4m3fn).max)


class ValueStatistics(NamedTuple):
    """What is taken from the values, and the scales of what is left.

    Attributes:
      means: float32 [B, K, n, H], of each block of 128 tokens, exact in bfloat16; `None` if all
        values have one.
      mean: float32 [B, K, H], of all valid values; `None` if blocks have their own.
      scale: float32 [B, K, H], a power of two for each channel.
    """

    means: Float[Array, "b k j h"] | None
    mean: Float[Array, "b k h"] | None
    scale: Float[Array, "b k h"]


# --- the pass over all tokens


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
    share = tiles_of_program(tiles, batch * heads, _SHARE)
    chunks = pl.cdiv(tiles, share)
    masks = () if valid is None else (flat(valid.astype(jnp.int32), 2),)
    shape = (length, heads, chunks)
    body = functools.partial(
        _channel_body, shape=shape, share=share, wanted=wanted, masked=valid is not None
    )
    return Role(
        body,
        (batch, heads, chunks),
        (flat(tokens, 3), *masks),
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


def _value_statistics_body(tiles, program, value_ref, count_ref, *refs, shape, share):
    *orders, mean_ref, largest_ref = refs
    (length, heads, blocks), (batch, head, first) = shape, program
    order_ref = orders[0] if orders else None
    slots = tiles.index(BLOCK, "block")
    held = Slots(tiles, "block", (length, heads), order_ref, count_ref, (batch, head), slots)
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
    largest = held.over_tiles(first * share, share, look, largest)
    tiles.put_channels(largest_ref, by_head * chunks + first, largest)


def _value_statistics_role(value, count, order) -> Role:
    batch, length, heads, size = value.shape
    blocks = pl.cdiv(length, STEP) * 2
    share = tiles_of_program(blocks, batch * heads)
    chunks = pl.cdiv(blocks, share)
    return Role(
        functools.partial(_value_statistics_body, shape=(length, heads, blocks), share=share),
        (batch, heads, chunks),
        (flat(value, 3), count, *(() if order is None else (flat(order, 3),))),
        [jax.ShapeDtypeStruct((batch * heads * n, size), jnp.float32) for n in (blocks, chunks)],
        size,
    )


# --- its end


def _over_rows(tiles, ref, first, count: int, body: Callable[..., Any], start):
    """`body(rows, inside, carry)` of rows [128, H] of an array in turn, zeros past the last."""
    place = tiles.index(BLOCK, "block")

    def step(tile, carry):
        inside = tile * BLOCK + place < count
        row = jnp.where(inside, first + tile * BLOCK + place, -1)
        return body(tiles.rows(ref, row, "block"), inside, carry)

    return lax.fori_loop(0, pl.cdiv(count, BLOCK), step, start)


def _total(tiles, ref, first, count: int):
    """The sum of `count` rows of an array."""
    zeros = tiles.zeros((tiles.size,), jnp.float32, "block")
    return _over_rows(tiles, ref, first, count, lambda rows, _, sum: sum + jnp.sum(rows, 0), zeros)


def _mean(tiles, ref, first, count: int, tokens):
    total = _total(tiles, ref, first, count)
    return total / jnp.maximum(tokens, 1).astype(jnp.float32) * (1.0 / SUM_UNIT)


def _highest(tiles, ref, first, count: int):
    """The largest of `count` rows of an array in each channel; a NaN wins."""

    def higher(rows, inside, so_far):
        nowhere = tiles.over_tokens(jnp.where(inside, 0.0, -jnp.inf), "block")
        return jnp.maximum(so_far, tiles.highest(rows + nowhere, 0))

    nothing = tiles.zeros((tiles.size,), jnp.float32, "block") - jnp.inf
    return _over_rows(tiles, ref, first, count, higher, nothing)


def _largest(tiles, ref, first, count: int):
    """The largest magnitude of `count` rows of an array in each channel; a NaN wins."""
    nothing = tiles.zeros((tiles.size,), jnp.float32, "block")
    return _over_rows(
        tiles,
        ref,
        first,
        count,
        lambda rows, _, so_far: jnp.maximum(so_far, tiles.largest(rows, 0)),
        nothing,
    )


def _scale_of(half_largest):
    return power_of_two_at_least(group_scale(half_largest, _HALF_OF_LARGEST))


def _key_mean_body(tiles, program, count_ref, total_ref, mean_ref, *, heads: int, chunks: int):
    (by_head,) = program
    tokens = count_ref[lax.div(by_head, jnp.int32(heads))]
    mean = _mean(tiles, total_ref, by_head * chunks, chunks, tokens)
    tiles.put_channels(mean_ref, by_head, mean)


def _value_mean_body(tiles, program, count_ref, *refs, heads: int, chunks: int):
    total_ref, high_ref, low_ref, mean_ref, scale_ref = refs
    (by_head,) = program
    tokens, first = count_ref[lax.div(by_head, jnp.int32(heads))], by_head * chunks
    mean = _mean(tiles, total_ref, first, chunks, tokens)
    high = 0.5 * _highest(tiles, high_ref, first, chunks) - 0.5 * mean
    low = 0.5 * _highest(tiles, low_ref, first, chunks) + 0.5 * mean
    half = jnp.maximum(jnp.abs(high), jnp.abs(low))
    tiles.put_channels(mean_ref, by_head, mean)
    tiles.put_channels(scale_ref, by_head, _scale_of(jnp.where(tokens > 0, half, 0.0)))


def _value_scale_body(tiles, program, mean_ref, largest_ref, scale_ref, *, blocks, chunks):
    (by_head,) = program
    half = _largest(tiles, largest_ref, by_head * chunks, chunks)
    # Residuals so small against the means that bfloat16 means are coarser shrink no scale further.
    means = _largest(tiles, mean_ref, by_head * blocks, blocks)
    tiles.put_channels(scale_ref, by_head, _scale_of(jnp.maximum(half, means * 2.0**-17)))


def _end_role(tokens, body, arguments, results: int) -> Role:
    """A program a head, results [B·K, H]."""
    batch, _, heads, size = tokens.shape
    vector = jax.ShapeDtypeStruct((batch * heads, size), jnp.float32)
    return Role(body, (batch * heads,), arguments, [vector] * results, size)


def _key_mean_role(key, count, total) -> Role:
    heads = key.shape[2]
    chunks = total.shape[0] // (key.shape[0] * heads)
    body = functools.partial(_key_mean_body, heads=heads, chunks=chunks)
    return _end_role(key, body, (count, total), 1)


def _value_end_role(value, count, found, smooth: bool) -> Role:
    heads = value.shape[2]
    programs = value.shape[0] * heads
    if smooth:
        blocks, chunks = (x.shape[0] // programs for x in found)
        body = functools.partial(_value_scale_body, blocks=blocks, chunks=chunks)
        return _end_role(value, body, found, 1)
    chunks = found[0].shape[0] // programs
    body = functools.partial(_value_mean_body, heads=heads, chunks=chunks)
    return _end_role(value, body, (count, *found), 2)


def _value_result(value, found, ends, smooth: bool) -> ValueStatistics:
    batch, _, heads, size = value.shape
    of_heads = [x.reshape(batch, heads, size) for x in ends]
    if smooth:
        return ValueStatistics(found[0].reshape(batch, heads, -1, size), None, *of_heads)
    return ValueStatistics(None, *of_heads)


# --- both


class Statistics(NamedTuple):
    """What preparation has to know about a call beforehand; each `None` if it is not wanted.

    Attributes:
      key_mean: float32 [B, K, H], of the valid keys.
      squares: float32 sums [B, N, H] and [B, K, H] of the squares of queries and valid keys, as of
        `channel_statistics`.
      value: of the values.
    """

    key_mean: Float[Array, "b k h"] | None
    squares: tuple[Float[Array, "b n h"], Float[Array, "b k h"]] | None
    value: ValueStatistics | None


def statistics(
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k h"] | None,
    count: Int[Array, " b"],
    order: Int[Array, "b k s"] | None,
    valid: Bool[Array, "b s"] | None,
    *,
    key_mean: bool,
    squares: bool,
    smooth: bool,
    interpret: bool = False,
) -> Statistics:
    """Statistics of all tokens in two launches.

    Args:
      value: `None`: nothing of the values.
      count: valid keys of each batch row, the first so many of the order.
      valid: which those are; `None`: all.
      key_mean, squares: whether they are wanted.
      smooth: whether block means are taken from the values.
    """
    of_keys = ("sum",) * key_mean + ("squares",) * squares
    passes = {}
    if squares:
        passes["query"] = _channel_role(query, None, ("squares",))
    if of_keys:
        passes["key"] = _channel_role(key, valid, of_keys)
    if value is not None and smooth:
        passes["value"] = _value_statistics_role(value, count, order)
    elif value is not None:
        passes["value"] = _channel_role(value, valid, _OF_VALUES)
    if not passes:
        return Statistics(None, None, None)
    found = dict(zip(passes, launch(list(passes.values()), interpret=interpret), strict=True))
    ends = {}
    if key_mean:
        ends["key"] = _key_mean_role(key, count, found["key"][0])
    if value is not None:
        ends["value"] = _value_end_role(value, count, found["value"], smooth)
    ended = dict(zip(ends, launch(list(ends.values()), interpret=interpret), strict=True))
    mean, sums, of_values = None, None, None
    if key_mean:
        mean = ended["key"][0].reshape(key.shape[0], *key.shape[2:])
    if squares:
        of_query = _channel_result(query, ("squares",), found["query"])
        sums = of_query["squares"], _channel_result(key, of_keys, found["key"])["squares"]
    if value is not None:
        of_values = _value_result(value, found["value"], ended["value"], smooth)
    return Statistics(mean, sums, of_values)


def value_statistics(
    value: Float[Array, "b s k h"],
    count: Int[Array, " b"],
    order: Int[Array, "b k s"] | None,
    valid: Bool[Array, "b s"] | None = None,
    *,
    smooth: bool = True,
    interpret: bool = False,
) -> ValueStatistics:
    """The part of `statistics` that is of the values.

    Block means are exact in bfloat16: what rounding cuts off is in the residuals.
    """
    wanted: dict[str, Any] = {"key_mean": False, "squares": False, "smooth": smooth}
    tokens = (value, value, value)
    found = statistics(*tokens, count, order, valid, **wanted, interpret=interpret).value
    assert found is not None
    return found
