"""A counting sort of tokens by label, stable and without atomics.

Each segment, a few tiles of 128 tokens, gets the rank of its tokens among those of the same label
and the number of each label with the labels; sums of these over the segments say where a segment's
tokens of a label go, and one kernel writes the order.
"""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ._launch import Role, launch
from .layout import BLOCK

_PROGRAMS = 2048
"""Programs above which each goes through more tiles."""
_MOST = 8
"""Tiles of a segment, at most."""
_AHEAD = 8
"""Segments whose counts are on their way at a time."""
MAX_COUNTS = 2**31 - 1
"""Of labels in segments: offsets of more would not fit into 32 bits."""


class Labels(NamedTuple):
    """Labels 0 … k of tokens, and what a counting sort by them needs.

    Attributes:
      label: int32 [B, K, n].
      rank: int32 [B, K, n], tokens before it in its segment with the same label.
      counts: int32 [B, K, segments, W], tokens of each label in each segment, W > k + 1.
    """

    label: Int[Array, "b k n"]
    rank: Int[Array, "b k n"]
    counts: Int[Array, "b k t w"]


def segments_of(length: int, heads: int) -> tuple[int, int]:
    """Tiles of a segment, and segments."""
    tiles = pl.cdiv(length, BLOCK)
    share = max(1, min(_MOST, tiles * heads // _PROGRAMS))
    return share, pl.cdiv(tiles, share)


def width_of(k: int) -> int:
    """Counts of a segment: of labels 0 … k, and of what is past the last token."""
    return pl.cdiv(k + 2, BLOCK) * BLOCK


def number_of_counts(batch: int, length: int, heads: int, k: int) -> int:
    """Of labels 0 … k in segments of tokens."""
    return batch * heads * segments_of(length, batch * heads)[1] * width_of(k)


class Offsets(NamedTuple):
    """Where sorted tokens go.

    Attributes:
      before: int32 [B, K, segments, W], tokens of a label in the segments before.
      first: int32 [B, K, W], position of the first token of a label.
      count: int32 [B, K, W], tokens of a label.
    """

    before: Int[Array, "b k t w"]
    first: Int[Array, "b k w"]
    count: Int[Array, "b k w"]


def _before_body(tiles, program, counts_ref, before_ref, count_ref, *, segments: int, width: int):
    batch_head, part = program
    column = part * BLOCK + tiles.index(BLOCK, "flat")
    first = batch_head * segments

    def add(group, total):
        segment = [group * _AHEAD + i for i in range(_AHEAD)]
        at = [
            jnp.where(s < segments, 1, 0) * ((first + s) * width + column + 1) - 1 for s in segment
        ]
        counts = [tiles.entries(counts_ref, place, "flat") for place in at]
        for place, some in zip(at, counts, strict=True):
            tiles.put_entries(before_ref, place, total, "flat")
            total = total + some
        return total

    total = tiles.full(BLOCK, jnp.int32(0), "flat")
    total = lax.fori_loop(0, pl.cdiv(segments, _AHEAD), add, total)
    tiles.put_entries(count_ref, batch_head * width + column, total, "flat")


def offsets(
    labels: Labels, places: Int[Array, "b k c"] | None = None, *, interpret: bool = False
) -> Offsets:
    """Positions in the stable order by label, or by the label's place; label k comes last."""
    counts = labels.counts
    batch, heads, segments, width = counts.shape
    role = Role(
        functools.partial(_before_body, segments=segments, width=width),
        (batch * heads, width // BLOCK),
        (counts.reshape(-1),),
        [
            jax.ShapeDtypeStruct((counts.size,), jnp.int32),
            jax.ShapeDtypeStruct((batch * heads * width,), jnp.int32),
        ],
        BLOCK,
    )
    ((before, count),) = launch([role], interpret=interpret)
    before, count = before.reshape(counts.shape), count.reshape(batch, heads, width)
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


def _order_body(tiles, program, *refs, shape, share: int):
    label_ref, rank_ref, before_ref, first_ref, order_ref = refs
    (length, segments, width), (by_head, tile) = shape, program
    token = tile * BLOCK + tiles.index(BLOCK, "flat")
    inside = token < length
    at = jnp.where(inside, by_head * length + token, -1)
    label = tiles.entries(label_ref, at, "flat")
    rank = tiles.entries(rank_ref, at, "flat")
    segment = by_head * segments + lax.div(tile, jnp.int32(share))
    before = tiles.entries(before_ref, segment * width + label, "flat")
    first = tiles.entries(first_ref, by_head * width + label, "flat")
    to = jnp.where(inside, by_head * length + first + before + rank, -1)
    tiles.put_entries(order_ref, to, token, "flat")


def order_by(labels: Labels, where: Offsets, *, interpret: bool = False) -> Int[Array, "b k s"]:
    """The stable permutation that sorts tokens by label: position -> token."""
    batch, heads, length = labels.label.shape
    segments, width = labels.counts.shape[2:]
    share, _ = segments_of(length, batch * heads)
    role = Role(
        functools.partial(_order_body, shape=(length, segments, width), share=share),
        (batch * heads, pl.cdiv(length, BLOCK)),
        tuple(x.reshape(-1) for x in (labels.label, labels.rank, where.before, where.first)),
        [jax.ShapeDtypeStruct((batch * heads * length,), jnp.int32)],
        BLOCK,
    )
    ((order,),) = launch([role], interpret=interpret)
    return order.reshape(batch, heads, length)
