"""k-means of the values of each head and the sort by cluster, on NVIDIA GPUs with INT8 products.

A Lloyd step reads the values, or one token in a few of them, twice: once to find the nearest
centroids, whose distances never leave the registers, and once, sorted by cluster, to sum each
cluster's members. Nothing depends on the order in which programs run. Centroids are float32 means
of the values. Labels come from `_nearest`, the sort from `_counting_sort`.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ._counting_sort import (
    MAX_COUNTS,
    Labels,
    Offsets,
    number_of_counts,
    offsets,
    order_by,
)
from ._launch import Role, launch
from ._nearest import MAX_CLUSTERS, nearest_labels
from ._numbers import ordered_bits
from .layout import BLOCK

Sample = tuple[Int[Array, "b n"], Bool[Array, "b n"]]
"""Tokens of a Lloyd step, and which of them count."""
_FAR = 3.0e38
_NONE = 2**30


def unsupported(batch: int, length: int, heads: int, clusters: int) -> str | None:
    """Why these kernels cannot cluster B x S x K tokens, or `None`. Does not look at the device."""
    if clusters > MAX_CLUSTERS:
        return f"needs at most {MAX_CLUSTERS} clusters, got {clusters}"
    if number_of_counts(batch, length, heads, clusters) > MAX_COUNTS:
        return "needs fewer than 2^31 counts of labels in segments of tokens"
    return None


def nearest(
    values: Float[Array, "b s k h"],
    centroids: Float[Array, "b k c h"],
    valid: Bool[Array, "b s"] | None = None,
    *,
    stride: int = 1,
    interpret: bool = False,
) -> Labels:
    """The centroid of least squared L2 distance for every `stride`-th token; k for an invalid one.

    The distance is between values and centroids quantised to 7 and 8 bits: of centroids that are
    about as near, either may be taken.
    """
    batch, length, heads, _ = values.shape
    reason = unsupported(batch, length, heads, centroids.shape[2])
    if reason is not None:
        raise ValueError(f"centroids: {reason}")
    return nearest_labels(values, centroids, valid, stride=stride, interpret=interpret)


def _update_body(tiles, program, *refs, shape, stride: int):
    values_ref, order_ref, first_ref, count_ref, rows_ref, new_ref = refs
    (length, heads, sampled, k, width), (batch, head, cluster) = shape, program
    by_head = batch * heads + head
    first, count = first_ref[by_head * width + cluster], count_ref[by_head * width + cluster]
    index = tiles.index(BLOCK, "block")

    def add(chunk, total):
        place = chunk * BLOCK + index
        inside = place < count
        # The first position may not be one of the order's: an order that is none reads nothing.
        at = jnp.where(inside, by_head * sampled + jnp.minimum(first + place, sampled - 1), -1)
        token = tiles.entries(order_ref, at, "block") * stride
        row = jnp.where(inside, (batch * length + token) * heads + head, -1)
        return total + jnp.sum(tiles.rows(values_ref, row, "block").astype(jnp.float32), 0)

    total = tiles.zeros((tiles.size,), jnp.float32, "block")
    total = lax.fori_loop(0, lax.div(count + (BLOCK - 1), jnp.int32(BLOCK)), add, total)
    row = tiles.channels(rows_ref, by_head * k + cluster, "block")
    mean = total / jnp.maximum(count, 1).astype(jnp.float32)
    tiles.put_channels(new_ref, by_head * k + cluster, jnp.where(count > 0, mean, row))


def cluster_means(
    values: Float[Array, "b s k h"],
    order: Int[Array, "b k n"],
    where: Offsets,
    rows: Float[Array, "b k c h"],
    *,
    stride: int = 1,
    interpret: bool = False,
) -> Float[Array, "b k c h"]:
    """The float32 mean of each cluster's tokens; an empty one takes its row.

    `order` counts in tokens looked at, one in `stride`.
    """
    batch, heads, k, size = rows.shape
    shape = (values.shape[1], heads, order.shape[2], k, where.first.shape[2])
    role = Role(
        functools.partial(_update_body, shape=shape, stride=stride),
        (batch, heads, k),
        (
            values.reshape(-1, size),
            *(x.reshape(-1) for x in (order, where.first, where.count)),
            rows.reshape(-1, size),
        ),
        [jax.ShapeDtypeStruct((batch * heads * k, size), jnp.float32)],
        size,
    )
    ((new,),) = launch([role], interpret=interpret)
    return new.reshape(rows.shape)


def _chain_body(tiles, program, distance_ref, start_ref, places_ref, *, k: int, width: int):
    (head,) = program
    column = tiles.index(width, "flat")

    def visit(place, carry):
        left, current = carry
        tiles.put_entry(places_ref, head * k + current, place)
        left = jnp.where(column == current, _FAR, left)
        row = tiles.entries(distance_ref, (head * k + current) * width + column, "flat")
        # The distance to a centroid that is not finite is less than to one that has its place.
        row = jnp.where(row < 0.5 * _FAR, row, 0.5 * _FAR)
        distance = ordered_bits(jnp.where(left > 0, _FAR, row))
        least = jnp.min(distance, 0)
        nearest_one = jnp.min(jnp.where(distance <= least, column, _NONE), 0)
        return left, jnp.minimum(nearest_one, k - 1)

    start = jnp.where(column < k, 0.0, _FAR)
    lax.fori_loop(0, k, visit, (start, start_ref[head]))


def chain(centroids: Float[Array, "b k c h"], *, interpret: bool = False) -> Int[Array, "b k c"]:
    """A place for each cluster along a greedy chain: always on to the nearest one that is left.

    It starts at the centroid farthest from their mean.
    """
    batch, heads, k, size = centroids.shape
    width = pl.cdiv(k, BLOCK) * BLOCK
    rows = centroids.reshape(-1, k, size)
    inner = jnp.einsum("bih,bjh->bij", rows, rows, precision=lax.Precision.HIGHEST)
    square = jnp.diagonal(inner, axis1=1, axis2=2)
    distance = square[:, :, None] - 2.0 * inner + square[:, None]
    distance = jnp.pad(distance, ((0, 0), (0, 0), (0, width - k)))
    start = jnp.argmax(jnp.sum((rows - jnp.mean(rows, 1, keepdims=True)) ** 2, -1), -1)
    role = Role(
        functools.partial(_chain_body, k=k, width=width),
        (batch * heads,),
        (distance.reshape(-1), start.astype(jnp.int32)),
        [jax.ShapeDtypeStruct((batch * heads * k,), jnp.int32)],
        BLOCK,
    )
    ((places,),) = launch([role], interpret=interpret)
    return places.reshape(batch, heads, k)


def kmeans(
    values: Float[Array, "b s k h"],
    centroids: Float[Array, "b k c h"],
    rows: Float[Array, "b k c h"],
    steps: int,
    valid: Bool[Array, "b s"] | None = None,
    *,
    stride: int = 1,
    sample: Sample | None = None,
    interpret: bool = False,
) -> tuple[Labels, Float[Array, "b k c h"]]:
    """`steps` Lloyd steps from the given centroids: labels by the last centroids, and those.

    The labels are of all tokens.

    Args:
      centroids: finite.
      rows: of the values; what an empty cluster takes in a Lloyd step.
      stride: a Lloyd step looks at one token in so many.
      sample: the tokens that it looks at instead.
    """
    seen, seen_valid = values, valid
    if sample is not None:
        token, seen_valid = sample
        seen, stride = jnp.take_along_axis(values, token[:, :, None, None], 1), 1
    for _ in range(steps):
        labels = nearest(seen, centroids, seen_valid, stride=stride, interpret=interpret)
        where = offsets(labels, interpret=interpret)
        order = order_by(labels, where, interpret=interpret)
        centroids = cluster_means(seen, order, where, rows, stride=stride, interpret=interpret)
    return nearest(values, centroids, valid, interpret=interpret), centroids


def cluster_order(
    values: Float[Array, "b s k h"],
    centroids: Float[Array, "b k c h"],
    rows: Float[Array, "b k c h"],
    steps: int,
    valid: Bool[Array, "b s"] | None = None,
    *,
    stride: int = 1,
    sample: Sample | None = None,
    interpret: bool = False,
) -> tuple[Int[Array, "b k s"], Float[Array, "b k c h"]]:
    """k-means from the given centroids, and the order of tokens by cluster along the chain.

    Arguments as of `kmeans`.
    """
    labels, centroids = kmeans(
        values, centroids, rows, steps, valid, stride=stride, sample=sample, interpret=interpret
    )
    where = offsets(labels, chain(centroids, interpret=interpret), interpret=interpret)
    return order_by(labels, where, interpret=interpret), centroids
