"""k-means of the values of each head and the sort by cluster, on NVIDIA GPUs with INT8 products.

A Lloyd step reads the values, or one token in a few of them, twice: once to find the nearest
centroids, whose distances never leave the registers, and once, sorted by cluster, to sum each
cluster's members. Nothing depends on the order in which programs run. Centroids are float32 means
of the values. Labels come from `_nearest`, the sort from `_counting_sort`.
"""

import functools
from typing import Any, NamedTuple

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
from ._nearest import (
    MAX_CLUSTERS,
    Codes,
    codes_of,
    label_role,
    labels_of,
    nearest_labels,
    sum_members,
)
from ._numbers import ordered_bits
from ._tiles import CHUNK
from .layout import BLOCK

Sample = tuple[Int[Array, "b n"], Bool[Array, "b n"]]
"""Tokens of a Lloyd step, and which of them count."""
_FAR = 3.0e38
_NONE = 2**30
_LARGE = 2**31 - 1


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


def _short_chain_body(tiles, program, centroids_ref, places_ref, *, k: int):
    (head,) = program
    number = tiles.index(CHUNK, "rows")
    there = jnp.where(number < k, 1.0, 0.0)

    def run(memory):
        rows = tiles.rows(centroids_ref, jnp.where(number < k, head * k + number, -1), "rows")
        # Relative to one of them: the squares of a large common offset would leave no bits.
        one = tiles.rows(centroids_ref, jnp.where(number < k, head * k, -1), "rows")
        rows = rows - one
        square = jnp.sum(rows * rows, 1)
        inner = tiles.inner_products(rows, memory)
        # The squared distance to the mean, less what is the same for all.
        score = ordered_bits(square - jnp.sum(inner, 1) * (2.0 / k))
        score = jnp.where(there > 0, score, -_LARGE)
        start = jnp.min(jnp.where(score >= jnp.max(score, 0), number, _NONE), 0)
        of_row, of_column = tiles.over_both(square, memory)
        distance = of_row - 2.0 * inner + of_column
        tiles.walk(distance, memory, k, jnp.minimum(start, k - 1), places_ref, head * k)

    tiles.with_chain(run)


def _chain_role(centroids: Float[Array, "b k c h"]) -> Role:
    """Programs that put up to 64 clusters of a head in a chain."""
    batch, heads, k, size = centroids.shape
    return Role(
        functools.partial(_short_chain_body, k=k),
        (batch * heads,),
        (centroids.reshape(-1, size),),
        [jax.ShapeDtypeStruct((batch * heads * k,), jnp.int32)],
        size,
    )


def chain(centroids: Float[Array, "b k c h"], *, interpret: bool = False) -> Int[Array, "b k c"]:
    """A place for each cluster along a greedy chain: always on to the nearest one that is left.

    It starts at the centroid farthest from their mean.
    """
    batch, heads, k, size = centroids.shape
    if k <= CHUNK:
        ((places,),) = launch([_chain_role(centroids)], interpret=interpret)
        return places.reshape(batch, heads, k)
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


def _few(values: Float[Array, "b s k h"], k: int) -> bool:
    """Whether a Lloyd step is two launches, without a sort."""
    return k <= CHUNK and values.dtype in (jnp.bfloat16, jnp.float16)


class _Seen(NamedTuple):
    """What Lloyd steps look at: one in `stride` of values, of those that are valid."""

    values: Array
    valid: Array | None
    stride: int


def _lloyd_steps(seen: _Seen, centroids, rows, steps: int, interpret: bool) -> Array:
    """Centroids after Lloyd steps that sort tokens by their labels."""
    sort: dict[str, Any] = {"interpret": interpret}
    common: dict[str, Any] = {"stride": seen.stride, **sort}
    for _ in range(steps):
        labels = nearest(seen.values, centroids, seen.valid, **common)
        where = offsets(labels, **sort)
        order = order_by(labels, where, **sort)
        centroids = cluster_means(seen.values, order, where, rows, **common)
    return centroids


def _short_lloyd_steps(
    seen: _Seen, centroids, rows, steps: int, interpret: bool
) -> tuple[Codes, Array]:
    """Codes and centroids after Lloyd steps of few clusters."""
    dtype, k = seen.values.dtype, rows.shape[2]
    codes, centroids = codes_of(centroids, dtype, interpret=interpret)
    for _ in range(steps):
        members = sum_members(
            seen.values, codes, k, seen.valid, stride=seen.stride, interpret=interpret
        )
        codes, centroids = codes_of(rows, dtype, members, interpret=interpret)
    return codes, centroids


def _seen(values, valid, stride: int, sample: Sample | None) -> _Seen:
    if sample is None:
        return _Seen(values, valid, stride)
    token, valid = sample
    return _Seen(jnp.take_along_axis(values, token[:, :, None, None], 1), valid, 1)


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
    seen = _seen(values, valid, stride, sample)
    k = centroids.shape[2]
    if not _few(values, k):
        centroids = _lloyd_steps(seen, centroids, rows, steps, interpret)
        return nearest(values, centroids, valid, interpret=interpret), centroids
    codes, centroids = _short_lloyd_steps(seen, centroids, rows, steps, interpret)
    (found,) = launch([label_role(values, codes, k, valid)], interpret=interpret)
    return labels_of(values, found, k), centroids


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
    k = centroids.shape[2]
    if _few(values, k):
        seen = _seen(values, valid, stride, sample)
        codes, centroids = _short_lloyd_steps(seen, centroids, rows, steps, interpret)
        # The chain takes about as long as the labels, and needs one program a head.
        roles = [_chain_role(centroids), label_role(values, codes, k, valid)]
        (places,), found = launch(roles, interpret=interpret)
        labels, places = labels_of(values, found, k), places.reshape(*centroids.shape[:3])
    else:
        labels, centroids = kmeans(
            values, centroids, rows, steps, valid, stride=stride, sample=sample, interpret=interpret
        )
        places = chain(centroids, interpret=interpret)
    where = offsets(labels, places, interpret=interpret)
    return order_by(labels, where, interpret=interpret), centroids
