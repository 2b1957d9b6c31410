"""k-means of the values of each head and the sort by cluster, on any NVIDIA GPU with BF16 products.

A Lloyd step reads the values, or one token in a few of them, twice: once to find the nearest
centroids, whose distances never leave the registers, and once, sorted by cluster, to sum each
cluster's members. The sort is a counting sort: ranks and counts of 128 tokens at a time come with
the labels, offsets from one small product, and one kernel writes the order. Nothing depends on the
order in which programs run.

Distances are those to centroids rounded to the 16 bits of the values (float32 values are rounded
to bfloat16); the centroids themselves are float32 means of the values.
"""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ._launch import launch, rows_of

_TILE = 128
"""Tokens that a program labels; counts of tokens in it are exact in bfloat16."""
_CHUNK = 64
"""Centroids whose distances exist at a time."""
_FAR = 3.0e38
_NONE = 2**30


class Labels(NamedTuple):
    """The nearest centroid of the tokens looked at, and what a counting sort by it needs.

    Attributes:
      label: int32 [B, K, n]; k for an invalid token.
      rank: int32 [B, K, n], tokens before it in its tile of 128 with the same label.
      counts: int32 [B, K, tiles, W], tokens of each label in each tile, W > k.
    """

    label: Int[Array, "b k s"]
    rank: Int[Array, "b k s"]
    counts: Int[Array, "b k t w"]


def _label_body(values_ref, centroids_ref, square_ref, _, *refs, k: int, stride: int, masked: bool):
    valid_ref, outputs = (refs[0] if masked else None), refs[-3:]
    tile, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    sampled = tile * _TILE + jnp.arange(_TILE)
    row = sampled * stride
    inside = row < values_ref.shape[1]
    valid = inside
    if valid_ref is not None:
        valid = inside & (plt.load(valid_ref.at[batch, row], mask=inside, other=0) != 0)
    rows = plt.load(rows_of(values_ref, batch, row, head), mask=valid[:, None], other=0.0)
    rows = rows.astype(centroids_ref.dtype)
    chunks = pl.cdiv(k, _CHUNK)
    low = pl.next_power_of_2(chunks) - 1
    column, channel = jnp.arange(_CHUNK), jnp.arange(values_ref.shape[3])[None, :]

    def nearer(chunk, best):
        some = chunk * _CHUNK + column
        centroids = plt.load(centroids_ref.at[batch, head, some[:, None], channel])
        inner = jnp.dot(rows, centroids.T, preferred_element_type=jnp.float32)
        distance = plt.load(square_ref.at[batch, head, some])[None, :] + inner
        # The low bits of a distance say which chunk of centroids it is of.
        bits = lax.bitcast_convert_type(distance, jnp.int32)
        return jnp.minimum(best, lax.bitcast_convert_type((bits & ~low) | chunk, jnp.float32))

    best = jnp.full((_TILE, _CHUNK), _FAR, jnp.float32)
    best = lax.fori_loop(0, chunks, nearer, best)
    least = jnp.min(best, 1)
    of_chunk = lax.bitcast_convert_type(best, jnp.int32) & low
    candidate = jnp.where(best <= least[:, None], of_chunk * _CHUNK + column[None, :], _NONE)
    label = jnp.where(valid, jnp.minimum(jnp.min(candidate, 1), k - 1), k)
    _store_labels(jnp.where(inside, label, _NONE), inside, outputs, batch, head, tile, sampled)


def _store_labels(label, inside, outputs, batch, head, tile, row):
    label_ref, rank_ref, counts_ref = outputs
    # One sum for two counts: of equal labels, and of those before.
    units = jnp.where(row[None, :] < row[:, None], 65537, 1)
    both = jnp.sum(jnp.where(label[:, None] == label[None, :], units, 0), 1)
    rank, total = both >> 16, both & 0xFFFF
    plt.store(label_ref.at[batch, head, row], label, mask=inside)
    plt.store(rank_ref.at[batch, head, row], rank, mask=inside)
    # The last token of a label in the tile knows how many there are.
    last = inside & (rank == total - 1)
    column = jnp.where(last, label, counts_ref.shape[3])
    plt.store(counts_ref.at[batch, head, tile, column], total, mask=last)


def nearest(
    values: Float[Array, "b s k h"],
    centroids: Float[Array, "b k c h"],
    valid: Bool[Array, "b s"] | None = None,
    *,
    stride: int = 1,
    interpret: bool = False,
) -> Labels:
    """The centroid of least squared L2 distance for every `stride`-th token.

    Of distances that are equal to 18 bits either centroid may be taken.
    """
    batch, length, heads, _ = values.shape
    k = centroids.shape[2]
    width = -(-(k + 1) // _CHUNK) * _CHUNK
    length = pl.cdiv(length, stride)
    tiles = pl.cdiv(length, _TILE)
    dtype = jnp.bfloat16 if values.dtype == jnp.float32 else values.dtype
    rounded = jnp.pad(centroids.astype(dtype), ((0, 0), (0, 0), (0, width - k), (0, 0)))
    square = jnp.sum(rounded.astype(jnp.float32) ** 2, -1)
    square = jnp.where(jnp.arange(width) < k, square, _FAR)
    masks = () if valid is None else (valid.astype(jnp.int8),)
    row = jax.ShapeDtypeStruct((batch, heads, length), jnp.int32)
    counts = jax.ShapeDtypeStruct((batch, heads, tiles, width), jnp.int32)
    found = launch(
        functools.partial(_label_body, k=k, stride=stride, masked=valid is not None),
        (tiles, heads, batch),
        [row, row, counts],
        # Distances less the token's own square: |c|² - 2 v·c.
        (values, -2 * rounded, square, jnp.zeros(counts.shape, jnp.int32), *masks),
        stages=2,
        aliases={3: 2},
        interpret=interpret,
    )
    return Labels(*found)


class Offsets(NamedTuple):
    """Where sorted tokens go.

    Attributes:
      tile: int32 [B, K, tiles, W], position of the first token of a label in a tile.
      first: int32 [B, K, W], position of the first token of a label.
      count: int32 [B, K, W], tokens of a label.
    """

    tile: Int[Array, "b k t w"]
    first: Int[Array, "b k w"]
    count: Int[Array, "b k w"]


def offsets(labels: Labels, places: Int[Array, "b k c"] | None = None) -> Offsets:
    """Positions in the stable order by label, or by the label's place; label k comes last."""
    counts = labels.counts
    tiles, width = counts.shape[2:]
    # Counts up to 128 are exact in bfloat16, their sums in float32.
    earlier = jnp.tril(jnp.ones((tiles, tiles), jnp.bfloat16), -1)
    before = jnp.einsum(
        "ts,bksw->bktw",
        earlier,
        counts.astype(jnp.bfloat16),
        preferred_element_type=jnp.float32,
    ).astype(jnp.int32)
    count = before[:, :, -1] + counts[:, :, -1]
    if places is None:
        first = jnp.cumsum(count, -1) - count
    else:
        k = places.shape[-1]
        rest = jnp.broadcast_to(jnp.arange(k, width), (*places.shape[:2], width - k))
        places = jnp.concatenate([places, rest], -1)
        smaller = places[..., None, :] < places[..., :, None]
        first = jnp.sum(jnp.where(smaller, count[..., None, :], 0), -1)
    return Offsets(before + first[:, :, None], first, count)


def _order_body(label_ref, rank_ref, offset_ref, order_ref):
    tile, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row = tile * _TILE + jnp.arange(_TILE)
    inside = row < label_ref.shape[2]
    label = plt.load(label_ref.at[batch, head, row], mask=inside, other=0)
    rank = plt.load(rank_ref.at[batch, head, row], mask=inside, other=0)
    first = plt.load(offset_ref.at[batch, head, tile, label])
    position = jnp.where(inside, first + rank, label_ref.shape[2])
    plt.store(order_ref.at[batch, head, position], row, mask=inside)


def order_by(labels: Labels, where: Offsets, *, interpret: bool = False) -> Int[Array, "b k s"]:
    """The stable permutation that sorts tokens by label: position -> token."""
    batch, heads, length = labels.label.shape
    (order,) = launch(
        _order_body,
        (pl.cdiv(length, _TILE), heads, batch),
        [jax.ShapeDtypeStruct((batch, heads, length), jnp.int32)],
        (labels.label, labels.rank, where.tile),
        interpret=interpret,
    )
    return order


def _update_body(values_ref, order_ref, first_ref, count_ref, centroids_ref, new_ref, *, stride):
    cluster, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    length, size = order_ref.shape[2], values_ref.shape[3]
    first = plt.load(first_ref.at[batch, head, cluster])
    count = plt.load(count_ref.at[batch, head, cluster])

    def add(chunk, total):
        place = chunk * _TILE + jnp.arange(_TILE)
        inside = place < count
        row = plt.load(
            order_ref.at[batch, head, jnp.minimum(first + place, length - 1)], mask=inside, other=0
        )
        rows = rows_of(values_ref, batch, row * stride, head)
        rows = plt.load(rows, mask=inside[:, None], other=0.0)
        return total + jnp.sum(rows.astype(jnp.float32), 0)

    total = lax.fori_loop(0, (count + (_TILE - 1)) // _TILE, add, jnp.zeros(size, jnp.float32))
    old = plt.load(centroids_ref.at[batch, head, cluster, :])
    mean = total / jnp.maximum(count, 1).astype(jnp.float32)
    plt.store(new_ref.at[batch, head, cluster, :], jnp.where(count > 0, mean, old))


def cluster_means(
    values: Float[Array, "b s k h"],
    order: Int[Array, "b k s"],
    where: Offsets,
    centroids: Float[Array, "b k c h"],
    *,
    stride: int = 1,
    interpret: bool = False,
) -> Float[Array, "b k c h"]:
    """The float32 mean of each cluster's tokens; an empty one keeps its centroid.

    `order` counts in tokens looked at, one in `stride`.
    """
    batch, heads, k, _ = centroids.shape
    (new,) = launch(
        functools.partial(_update_body, stride=stride),
        (k, heads, batch),
        [jax.ShapeDtypeStruct(centroids.shape, jnp.float32)],
        (values, order, where.first, where.count, centroids),
        interpret=interpret,
    )
    return new


def _chain_body(distance_ref, start_ref, places_ref, *, k: int, width: int):
    head = pl.program_id(0)
    column = jnp.arange(width)
    current = plt.load(start_ref.at[head])

    def visit(place, carry):
        left, current = carry
        plt.store(places_ref.at[head, current], place)
        left = jnp.where(column == current, _FAR, left)
        row = plt.load(distance_ref.at[head, current, column], mask=column < k, other=_FAR)
        # The distance to a centroid that is not finite is less than to one that has its place.
        row = jnp.where(row < 0.5 * _FAR, row, 0.5 * _FAR)
        distance = jnp.where(left > 0, _FAR, row)
        least = jnp.min(distance, 0)
        nearest_one = jnp.min(jnp.where(distance <= least, column, _NONE), 0)
        return left, jnp.minimum(nearest_one, k - 1)

    start = jnp.where(column < k, 0.0, _FAR)
    lax.fori_loop(0, k, visit, (start, current))


def chain(centroids: Float[Array, "b k c h"], *, interpret: bool = False) -> Int[Array, "b k c"]:
    """A place for each cluster along a greedy chain: always on to the nearest one that is left.

    It starts at the centroid farthest from their mean.
    """
    batch, heads, k, size = centroids.shape
    rows = centroids.reshape(-1, k, size)
    inner = jnp.einsum("bih,bjh->bij", rows, rows, precision=lax.Precision.HIGHEST)
    square = jnp.diagonal(inner, axis1=1, axis2=2)
    distance = square[:, :, None] - 2.0 * inner + square[:, None]
    start = jnp.argmax(jnp.sum((rows - jnp.mean(rows, 1, keepdims=True)) ** 2, -1), -1)
    (places,) = launch(
        functools.partial(_chain_body, k=k, width=pl.next_power_of_2(k)),
        (batch * heads,),
        [jax.ShapeDtypeStruct((batch * heads, k), jnp.int32)],
        (distance, start.astype(jnp.int32)),
        warps=1,
        interpret=interpret,
    )
    return places.reshape(batch, heads, k)


def kmeans(
    values: Float[Array, "b s k h"],
    centroids: Float[Array, "b k c h"],
    steps: int,
    valid: Bool[Array, "b s"] | None = None,
    *,
    stride: int = 1,
    interpret: bool = False,
) -> tuple[Labels, Float[Array, "b k c h"]]:
    """`steps` Lloyd steps from the given centroids: labels by the last centroids, and those.

    A Lloyd step looks at one token in `stride`; the labels are of all tokens.
    """
    for _ in range(steps):
        labels = nearest(values, centroids, valid, stride=stride, interpret=interpret)
        where = offsets(labels)
        order = order_by(labels, where, interpret=interpret)
        centroids = cluster_means(
            values, order, where, centroids, stride=stride, interpret=interpret
        )
    return nearest(values, centroids, valid, interpret=interpret), centroids


def cluster_order(
    values: Float[Array, "b s k h"],
    centroids: Float[Array, "b k c h"],
    steps: int,
    valid: Bool[Array, "b s"] | None = None,
    *,
    stride: int = 1,
    interpret: bool = False,
) -> tuple[Int[Array, "b k s"], Float[Array, "b k c h"]]:
    """k-means from the given centroids, and the order of tokens by cluster along the chain."""
    labels, centroids = kmeans(values, centroids, steps, valid, stride=stride, interpret=interpret)
    where = offsets(labels, chain(centroids, interpret=interpret))
    return order_by(labels, where, interpret=interpret), centroids
