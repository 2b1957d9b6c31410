"""A counting sort of tokens by label, stable and without atomics.

Each tile of 128 tokens gets the rank of its tokens among those of the same label, and the number of
each label; sums of these over the tiles say where a tile's tokens of a label go, and one kernel
writes the order.
"""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ._launch import launch

_TILE = 128
"""Tokens that are ranked among each other."""
_COLUMNS = 64
"""Labels, and tiles, whose counts a program adds at a time."""
_NONE = 2**30
MAX_COUNTS = 2**31 - 1
"""Of labels in tiles: offsets of more would not fit into 32 bits."""


class Labels(NamedTuple):
    """Labels 0 … k of tokens, and what a counting sort by them needs.

    Attributes:
      label: int32 [B, K, n].
      rank: int32 [B, K, n], tokens before it in its tile of 128 with the same label.
      counts: int32 [B, K, tiles, W], tokens of each label in each tile, W > k.
    """

    label: Int[Array, "b k n"]
    rank: Int[Array, "b k n"]
    counts: Int[Array, "b k t w"]


def _rank_body(label_ref, rank_ref, counts_ref, *, interpret: bool):
    tile, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    width = counts_ref.shape[3]
    column = jnp.arange(pl.next_power_of_2(width))
    zeros = jnp.zeros(column.shape, jnp.int32)
    none = jnp.where(column < width, column, width)
    plt.store(counts_ref.at[batch, head, tile, none], zeros, mask=column < width)
    row = tile * _TILE + jnp.arange(_TILE)
    inside = row < label_ref.shape[2]
    label = plt.load(label_ref.at[batch, head, row], mask=inside, other=_NONE)
    # One bit for each token: those of the same label, and of these the ones before.
    place = jnp.arange(_TILE)
    same = jnp.where(label[:, None] == label[None, :], 1 << (place[:, None] & 31), 0)
    same = jnp.sum(same.reshape(_TILE // 32, 32, _TILE), 1)
    until = place[None, :] - 32 * jnp.arange(_TILE // 32)[:, None]
    before = jnp.where(until <= 0, 0, jnp.where(until >= 32, -1, (1 << (until & 31)) - 1))
    total = jnp.sum(lax.population_count(same), 0)
    rank = jnp.sum(lax.population_count(same & before), 0)
    plt.store(rank_ref.at[batch, head, row], rank, mask=inside)
    if not interpret:  # the interpreter stores one after the other
        plt.debug_barrier()
    # The last token of a label in the tile knows how many there are.
    last = inside & (rank == total - 1)
    plt.store(counts_ref.at[batch, head, tile, jnp.where(last, label, width)], total, mask=last)


def number_of_counts(batch: int, length: int, heads: int, k: int) -> int:
    """Of labels 0 … k in tiles of tokens."""
    return batch * heads * pl.cdiv(length, _TILE) * _width(k)


def _width(k: int) -> int:
    return pl.cdiv(k + 1, _COLUMNS) * _COLUMNS


def ranked(label: Int[Array, "b k n"], k: int, *, interpret: bool = False) -> Labels:
    """Labels 0 … k with their ranks and counts."""
    batch, heads, length = label.shape
    tiles = pl.cdiv(length, _TILE)
    rank, counts = launch(
        functools.partial(_rank_body, interpret=interpret),
        (tiles, heads, batch),
        [
            jax.ShapeDtypeStruct(label.shape, jnp.int32),
            jax.ShapeDtypeStruct((batch, heads, tiles, _width(k)), jnp.int32),
        ],
        (label,),
        interpret=interpret,
    )
    return Labels(label, rank, counts)


class Offsets(NamedTuple):
    """Where sorted tokens go.

    Attributes:
      before: int32 [B, K, tiles, W], tokens of a label in the tiles before.
      first: int32 [B, K, W], position of the first token of a label.
      count: int32 [B, K, W], tokens of a label.
    """

    before: Int[Array, "b k t w"]
    first: Int[Array, "b k w"]
    count: Int[Array, "b k w"]


def _before_body(counts_ref, before_ref, count_ref):
    column = pl.program_id(0) * _COLUMNS + jnp.arange(_COLUMNS)
    head, batch = pl.program_id(1), pl.program_id(2)
    tiles = counts_ref.shape[2]

    def add(some, total):
        tile = some * _COLUMNS + jnp.arange(_COLUMNS)
        inside = jnp.broadcast_to(tile[:, None] < tiles, (_COLUMNS, _COLUMNS))
        tile = jnp.minimum(tile, tiles - 1)[:, None]
        counts = counts_ref.at[batch, head, tile, column[None, :]]
        counts = plt.load(counts, mask=inside, other=0)
        until = total[None, :] + jnp.cumsum(counts, 0)
        tile = jnp.where(inside, tile, tiles)
        plt.store(before_ref.at[batch, head, tile, column[None, :]], until - counts, mask=inside)
        return total + jnp.sum(counts, 0)

    total = lax.fori_loop(0, pl.cdiv(tiles, _COLUMNS), add, jnp.zeros(_COLUMNS, jnp.int32))
    plt.store(count_ref.at[batch, head, column], total)


def offsets(
    labels: Labels, places: Int[Array, "b k c"] | None = None, *, interpret: bool = False
) -> Offsets:
    """Positions in the stable order by label, or by the label's place; label k comes last."""
    counts = labels.counts
    batch, heads, _, width = counts.shape
    before, count = launch(
        _before_body,
        (width // _COLUMNS, heads, batch),
        [
            jax.ShapeDtypeStruct(counts.shape, jnp.int32),
            jax.ShapeDtypeStruct((batch, heads, width), jnp.int32),
        ],
        (counts,),
        interpret=interpret,
    )
    if places is None:
        first = jnp.cumsum(count, -1, dtype=jnp.int32) - count
    else:
        k = places.shape[-1]
        rest = jnp.broadcast_to(
            jnp.arange(k, width, dtype=jnp.int32), (*places.shape[:2], width - k)
        )
        places = jnp.concatenate([places, rest], -1)
        smaller = places[..., None, :] < places[..., :, None]
        first = jnp.sum(jnp.where(smaller, count[..., None, :], 0), -1, dtype=jnp.int32)
    return Offsets(before, first, count)


def _order_body(label_ref, rank_ref, before_ref, first_ref, order_ref):
    tile, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row = tile * _TILE + jnp.arange(_TILE)
    inside = row < label_ref.shape[2]
    label = plt.load(label_ref.at[batch, head, row], mask=inside, other=0)
    rank = plt.load(rank_ref.at[batch, head, row], mask=inside, other=0)
    before = plt.load(before_ref.at[batch, head, tile, label])
    first = plt.load(first_ref.at[batch, head, label])
    position = jnp.where(inside, first + before + rank, label_ref.shape[2])
    plt.store(order_ref.at[batch, head, position], row, mask=inside)


def order_by(labels: Labels, where: Offsets, *, interpret: bool = False) -> Int[Array, "b k s"]:
    """The stable permutation that sorts tokens by label: position -> token."""
    batch, heads, length = labels.label.shape
    (order,) = launch(
        _order_body,
        (pl.cdiv(length, _TILE), heads, batch),
        [jax.ShapeDtypeStruct((batch, heads, length), jnp.int32)],
        (labels.label, labels.rank, where.before, where.first),
        interpret=interpret,
    )
    return order
