"""Which tokens the programs of a preprocessing kernel look at."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .layout import BLOCK, STEP

_PROGRAMS = 1024
"""Programs above which each goes through more tiles."""
SHARE = 4
"""Tiles that a program goes through at most."""


def tiles_of_program(tiles: int, heads: int, most: int = SHARE) -> int:
    """Tiles that a program goes through: one while there are few programs."""
    return max(1, min(most, tiles, tiles * heads // _PROGRAMS))


def flat(array: Array, axes: int) -> Array:
    """The array with its first axes in one."""
    return array.reshape(-1, *array.shape[axes:])


@dataclasses.dataclass(frozen=True)
class Slots:
    """Which tokens the slots of a head's tiles hold, stand-ins for missing ones included.

    Attributes:
      kind: layout of a tile.
      shape: (S, K) of the tokens.
      order_ref, count_ref: the flat order or `None`, valid tokens of each batch row.
      place: batch row and head.
      slots: int32 [unit], which of a tile's slots.
      unit: slots of a tile: a block, or half of one.
    """

    tiles: Any
    kind: str
    shape: tuple[int, int]
    order_ref: Any
    count_ref: Any
    place: tuple[Any, Any]
    slots: Any
    unit: int = BLOCK

    def valid(self, tile):
        """Whether slots of a tile hold valid tokens [unit]."""
        return tile * self.unit + self.slots < self.count_ref[self.place[0]]

    def rows(self, tile):
        """Rows of the tile's tokens in [B·S·K, H], int32 [unit]."""
        (length, heads), (batch, head) = self.shape, self.place
        count = self.count_ref[batch]
        first = tile * self.unit
        first_of_block, first_of_step = first & -BLOCK, first & -STEP
        slot = first + self.slots
        stand_in = jnp.where(first_of_block < count, first_of_block, first_of_step)
        stand_in = jnp.where(stand_in < count, stand_in, 0)
        source = jnp.where(slot < count, slot, stand_in)
        if self.order_ref is not None:
            at = (batch * heads + head) * length + source
            source = self.tiles.entries(self.order_ref, at, self.kind)
        # An order that is none must not make the GPU read elsewhere.
        source = jnp.minimum(jnp.maximum(source, 0), length - 1)
        return (batch * length + source) * heads + head

    def over_tiles(self, first, share, body, start):
        """`body(tile, rows, carry)` of tiles in turn, the next one's rows looked up meanwhile."""

        def step(index, carry):
            rows, carry = carry
            following = self.rows(first + index + 1)
            return following, body(first + index, rows, carry)

        return lax.fori_loop(0, share, step, (self.rows(first), start))[1]
