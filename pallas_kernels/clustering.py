"""k-means of the values of each head and the sort by cluster, on NVIDIA GPUs with INT8 products.

A Lloyd step reads the values, or one token in a few of them, twice: once to find the nearest
centroids, whose distances never leave the registers, and once, sorted by cluster, to sum each
cluster's members. Nothing depends on the order in which programs run. Centroids are float32 means
of the values. Labels come from `_nearest`, the sort from `_counting_sort`.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
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
    ranked,
)
from ._launch import launch, rows_of
from ._nearest import MAX_CLUSTERS, nearest_labels

_TILE = 128
"""Tokens that are added to a centroid at a time."""
_FAR = 3.0e38
_NONE = 2**30


def unsupported(batch: int, length: int, heads: int, clusters: int) -> str | None:
    """Why these kernels cannot cluster B x S x K tokens, or `None`. Does not look at the device."""
    if clusters > MAX_CLUSTERS:
        return f"needs at most {MAX_CLUSTERS} clusters, got {clusters}"
    if number_of_counts(batch, length, heads, clusters) > MAX_COUNTS:
        return "needs fewer than 2^31 counts of labels in tiles of 128 tokens"
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
    k = centroids.shape[2]
    reason = unsupported(batch, length, heads, k)
    if reason is not None:
        raise ValueError(f"centroids: {reason}")
    label = nearest_labels(values, centroids, valid, stride=stride, interpret=interpret)
    return ranked(label, k, interpret=interpret)


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
    order: Int[Array, "b k n"],
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


def _ordered(values):
    """Floats as integers of the same order, whose minimum takes fewer instructions."""
    bits = lax.bitcast_convert_type(values + 0.0, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


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
        distance = _ordered(jnp.where(left > 0, _FAR, row))
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
    start = jnp.argmax(jnp.sum((rows - jnp.mean(rows, 1, keepdims=True)) ** 2, -1), -1).astype(
        jnp.int32
    )
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
        where = offsets(labels, interpret=interpret)
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
    where = offsets(labels, chain(centroids, interpret=interpret), interpret=interpret)
    return order_by(labels, where, interpret=interpret), centroids
