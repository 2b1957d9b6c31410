"""Values in the prepared layout: what their programs do, for `preparation` to launch.

A tile is half a block of 128 tokens: with a whole one a program holds twice as many registers, and
half as many programs run at a time.
"""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float8e4m3fn, Int

from ._launch import Role
from ._slots import SHARE, Slots, flat, tiles_of_program
from .layout import BLOCK, COUNT_ROWS, E4M3, STEP
from .statistics import ValueStatistics

_TILE = BLOCK // 2


class ValueCodes(NamedTuple):
    """Values in the prepared layout.

    Attributes:
      codes: transposed, over count rows.
      block_means: bfloat16 [B, K, n, H] in units of the scale; `None` if all values have one mean.
    """

    codes: Float8e4m3fn[Array, "b k h+8 p"]
    block_means: Float[Array, "b k j h"] | None


def _value_body(tiles, program, value_ref, count_ref, scale_ref, mean_ref, *refs, shape, share):
    refs = list(refs)
    (length, heads, blocks, ordered, smooth), (batch, head, first) = shape, program
    order_ref = refs.pop(0) if ordered else None
    codes_ref = refs.pop(0)
    # Tokens are read in the order in which a group of 16 is stored.
    place = tiles.index(_TILE, "half")
    slots = (place & ~14) | ((place & 2) << 2) | ((place & 12) >> 1)
    tokens, place = (length, heads), (batch, head)
    held = Slots(tiles, "half", tokens, order_ref, count_ref, place, slots, _TILE)
    by_head = batch * heads + head
    inverse = 1.0 / tiles.channels(scale_ref, by_head, "half")

    def quantise(half, row, carry):
        valid = held.valid(half)
        rows = tiles.rows(value_ref, jnp.where(valid, row, -1), "half").astype(jnp.float32)
        there = jnp.where(valid, 1.0, 0.0)
        own = by_head * blocks + lax.div(half, jnp.int32(2)) if smooth else by_head
        taken = tiles.channels(mean_ref, own, "half") * inverse
        if smooth:
            # Both halves of a block write the same.
            tiles.put_channels(refs[0], own, taken)
        taken = tiles.over_channels(taken, _TILE, "half")
        rows = rows * tiles.over_channels(inverse, _TILE, "half")
        rows = rows - tiles.over_tokens(there, "half") * taken
        tiles.put_value_codes(codes_ref, by_head, half, rows, there, blocks * BLOCK)
        return carry

    # Programs of the last halves may do one of them twice.
    first = jnp.minimum(first * share, max(2 * blocks - share, 0))
    held.over_tiles(first, share, quantise, jnp.int32(0))


def value_role(
    value: Float[Array, "b s k h"],
    count: Int[Array, " b"],
    order: Int[Array, "b k s"] | None,
    of_values: ValueStatistics,
) -> Role:
    """Programs that quantise values in their order, less a mean."""
    batch, length, heads, size = value.shape
    blocks = pl.cdiv(length, STEP) * 2
    share = tiles_of_program(2 * blocks, batch * heads, 2 * SHARE)
    smooth = of_values.means is not None
    if of_values.means is not None:
        means = flat(of_values.means, 3)
    else:
        assert of_values.mean is not None
        means = flat(of_values.mean, 2)
    arguments = [flat(value, 3), count, flat(of_values.scale, 2), means]
    if order is not None:
        arguments.append(flat(order, 3))
    shape = (length, heads, blocks, order is not None, smooth)
    codes = (batch * heads, size + COUNT_ROWS, blocks * BLOCK)
    results = [jax.ShapeDtypeStruct(codes, E4M3)]
    if smooth:
        results.append(jax.ShapeDtypeStruct((batch * heads * blocks, size), jnp.bfloat16))
    return Role(
        functools.partial(_value_body, shape=shape, share=share),
        (batch, heads, pl.cdiv(2 * blocks, share)),
        arguments,
        results,
        size,
    )


def value_result(value: Float[Array, "b s k h"], found: list[Array]) -> ValueCodes:
    """The results of `value_role`."""
    lead = (value.shape[0], value.shape[2])
    codes, *means = found
    codes = codes.reshape(*lead, *codes.shape[1:])
    return ValueCodes(codes, means[0].reshape(*lead, -1, value.shape[3]) if means else None)
