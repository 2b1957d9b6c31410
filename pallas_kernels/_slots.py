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

    def over_blocks(self, first, share, body, start):
        """`body(block, rows, carry)` of blocks in turn, the next one's rows looked up meanwhile."""

        def step(index, carry):
            rows, carry = carry
            following = self.rows(first + index + 1)
            return following, body(first + index, rows, carry)

        return lax.fori_loop(0, share, step, (self.rows(first), start))[1]
