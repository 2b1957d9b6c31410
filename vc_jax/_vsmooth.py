"""V-Smooth: cluster the values, sort by cluster, take the mean of each block (paper, section 3).

Attention does not depend on the order of its keys, so keys and values may be sorted. Sorted by
cluster, the 128 values of a block resemble each other, their mean holds much of their energy, and
only the rest has to be quantised. Everything here is a pure function with static shapes; sums run
in a fixed order, so results do not change from run to run.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ._config import shown
from ._public import public
from ._tracing import concrete, filled
from .pallas_kernels.layout import BLOCK, SUM_UNIT

_CHUNK = 2048
"""Tokens whose distances to the centroids exist at one time."""


class Clusters(NamedTuple):
    """Result of `kmeans`.

    Attributes:
      labels: int32 [..., S], the nearest of `centroids`; k for an invalid token, which belongs to
        no cluster.
      centroids: float32 [..., k, H].
    """

    labels: Int[Array, "... s"]
    centroids: Float[Array, "... k h"]


def every_nth_valid(
    valid: Bool[Array, "*b s"], stride: int
) -> tuple[Int[Array, "*b n"], Bool[Array, "*b n"]]:
    """The token of every `stride`-th valid one, int32 [..., ceil(S / stride)], and whether it is.

    Which tokens those are does not depend on where invalid ones lie between them.
    """
    length = valid.shape[-1]
    so_far = jnp.cumsum(valid, -1, dtype=jnp.int32)
    wanted = jnp.arange(0, length, stride, dtype=jnp.int32)

    def tokens(row: Array) -> Array:
        return jnp.searchsorted(row, wanted + 1).astype(jnp.int32)

    token = jax.vmap(tokens)(so_far.reshape(-1, length)).reshape(*valid.shape[:-1], wanted.size)
    return jnp.minimum(token, length - 1), wanted < so_far[..., -1:]


def spread_rows(
    values: Float[Array, "s h"], valid: Bool[Array, " s"], clusters: int
) -> Float[Array, "k h"]:
    """`clusters` rows spread evenly over the valid tokens: the start of a cold k-means.

    With fewer valid tokens than clusters rows repeat; the repeats stay empty clusters.
    """
    order = jnp.argsort(~valid, stable=True)
    count = jnp.sum(valid)
    rank = jnp.floor((jnp.arange(clusters) + 0.5) * (count / clusters)).astype(jnp.int32)
    rows = values[order[jnp.clip(rank, 0, values.shape[0] - 1)]]
    return jnp.where(count > 0, rows.astype(jnp.float32), 0.0)


def nearest_centroid(
    values: Float[Array, "s h"], centroids: Float[Array, "k h"]
) -> Int[Array, " s"]:
    """The centroid of least squared L2 distance, the first of equals, int32.

    A centroid that is not finite, or too far to be squared, is nearest to none.
    """
    inner = jnp.matmul(values, centroids.T, precision=lax.Precision.HIGHEST)
    distance = jnp.sum(centroids**2, -1) - 2.0 * inner
    distance = jnp.where(jnp.isfinite(distance), distance, jnp.inf)
    return jnp.argmin(distance, -1).astype(jnp.int32)


def still_apart(rows: Float[Array, "*b k h"], centroids: Float[Array, "*b k h"]) -> Bool[Array, ""]:
    """Whether centroids still tell the rows of a cold start apart, in every head.

    After a clustering of values that were nothing like these (all equal, not finite, of another
    scale or place) few centroids are nearest to any of them; more than a quarter usually are.
    """
    k, size = centroids.shape[-2:]
    if k == 1:
        return jnp.array(True)
    flat = (x.reshape(-1, k, size) for x in (rows, centroids))
    label = jax.vmap(nearest_centroid)(*flat)
    used = jnp.sum(jnp.any(jax.nn.one_hot(label, k, dtype=bool), 1), -1)
    return jnp.all(used > max(1, k // 4))


def _centre(points: Float[Array, "n h"], counted: Bool[Array, " n"]) -> Float[Array, " h"]:
    """The mean of each channel over what is counted and finite: distances from it lose nothing.

    The squares of a large common offset would leave no bits for what tells points apart.
    """
    counted = counted[:, None] & jnp.isfinite(points)
    share = 1.0 / jnp.maximum(jnp.sum(counted, 0), 1).astype(jnp.float32)
    return jnp.sum(jnp.where(counted, points * share, 0.0), 0)


def _chunks(array: Array, length: int) -> Array:
    """The leading axis, padded with zeros, in chunks of `length`."""
    pad = -array.shape[0] % length
    array = jnp.pad(array, [(0, pad)] + [(0, 0)] * (array.ndim - 1))
    return array.reshape(-1, length, *array.shape[1:])


def _lloyd_step(chunks: Array, valid: Array, centroids: Array, rows: Array) -> Array:
    """One Lloyd step over [n, chunk, H] values: new centroids; an empty cluster takes its row."""
    k = centroids.shape[0]

    def add(carry, chunk):
        values, is_valid = chunk
        label = jnp.where(is_valid, nearest_centroid(values, centroids), k)
        member = jax.nn.one_hot(label, k, dtype=jnp.float32)
        total = jnp.matmul(member.T, values, precision=lax.Precision.HIGHEST)
        return (carry[0] + total, carry[1] + jnp.sum(member, 0)), None

    start = (filled(centroids.shape, 0, chunks, valid), filled((k,), 0, chunks, valid))
    (total, count), _ = lax.scan(add, start, (chunks, valid))
    return jnp.where(count[:, None] > 0, total / jnp.maximum(count, 1.0)[:, None], rows)


def _kmeans_head(
    values: Array,
    valid: Array,
    centroids: Array | None,
    clusters: int,
    steps: Array | int,
    stride: int,
) -> Clusters:
    values = values.astype(jnp.float32)
    centre = _centre(values, valid)
    values = jnp.where(valid[:, None], values - centre, 0.0)
    length = min(_CHUNK, values.shape[0])
    token, sampled = every_nth_valid(valid, stride)
    sample, sampled = _chunks(values[token], length), _chunks(sampled, length)
    rows = spread_rows(values, valid, clusters)
    start = rows if centroids is None else centroids.astype(jnp.float32) - centre
    start = filled((), 0, values, valid) + start
    found: Array = lax.fori_loop(
        0, steps, lambda _, c: _lloyd_step(sample, sampled, c, rows), start
    )
    labels = lax.map(lambda chunk: nearest_centroid(chunk, found), _chunks(values, length))
    labels = labels.reshape(-1)[: values.shape[0]]
    return Clusters(jnp.where(valid, labels, clusters), found + centre)


@public
def kmeans(
    values: Float[Array, "*batch s h"],
    clusters: int,
    *,
    steps: int | Int[Array, ""] = 4,
    stride: int = 1,
    valid: Bool[Array, "*batch s"] | None = None,
    centroids: Float[Array, "*batch k h"] | None = None,
) -> Clusters:
    """Plain k-means (squared L2) over the tokens of each leading index, independently.

    Deterministic: a cold start takes rows spread evenly over the valid tokens, the number of Lloyd
    steps is fixed, equal distances go to the first centroid. In a Lloyd step an empty cluster,
    which one of two equal centroids and one that is not finite are, takes the row of a cold start:
    clusters heal whatever the centroids came from.
    Distances exist for 2 048 tokens at a time.

    Args:
      values: [..., S, H], float. Bytes of invalid tokens do not matter.
      clusters: k >= 1; may exceed the number of tokens.
      steps: Lloyd steps, >= 0; may be traced.
      stride: a Lloyd step looks at every `stride`-th valid token; all tokens get a label.
      valid: [..., S]; `None`: all tokens.
      centroids: [..., k, H] to start from (warm start) instead of rows of the values.

    Raises:
      TypeError: an array of another dtype.
      ValueError: no tokens or channels; `clusters`, `stride` or `steps` out of range; `valid` or
        `centroids` of another shape.
    """
    if 0 in values.shape[-2:]:
        raise ValueError(f"values must be [..., S, H], S and H >= 1, got {list(values.shape)}")
    *batch, length, size = values.shape
    for name, number, low in (
        ("clusters", clusters, 1),
        ("stride", stride, 1),
        ("steps", steps, 0),
    ):
        known = concrete(number)
        if known is None and name == "steps":
            continue
        if known is None or known.ndim or known.dtype.kind not in "iu" or known < low:
            raise ValueError(f"{name} must be an integer >= {low}, got {shown(number)}")
    if valid is None:
        valid = jnp.ones((*batch, length), bool)
    values, valid = values.reshape(-1, length, size), valid.reshape(-1, length)
    expected = (*batch, clusters, size)
    if centroids is not None and centroids.shape != expected:
        raise ValueError(f"centroids must have shape {expected}, got {centroids.shape}")
    if centroids is not None:
        centroids = centroids.reshape(-1, clusters, size)
    head = functools.partial(_kmeans_head, clusters=clusters, steps=steps, stride=stride)
    result = jax.vmap(head)(values, valid, centroids)
    return Clusters(*(x.reshape(*batch, *x.shape[1:]) for x in result))


@public
def similar_clusters_together(centroids: Float[Array, "*batch k h"]) -> Int[Array, "*batch k"]:
    """A place for each cluster, so that neighbours in the order are near each other.

    Blocks of 128 tokens rarely end where a cluster does; the mean of a block that holds the end of
    one cluster and the start of the next keeps more of its energy if the two are alike. A greedy
    chain: it starts at the centroid farthest from their mean and goes on to the nearest one that is
    left (the first of equals).

    Returns:
      int32 [..., k]: cluster -> place.
    """
    *batch, clusters, size = centroids.shape
    centroids = centroids.reshape(-1, clusters, size)
    every = jnp.ones(clusters, bool)
    centroids = centroids - jax.vmap(lambda points: _centre(points, every))(centroids)[:, None]
    inner = jnp.einsum("bih,bjh->bij", centroids, centroids, precision=lax.Precision.HIGHEST)
    square = jnp.diagonal(inner, axis1=1, axis2=2)
    distance = square[:, :, None] - 2.0 * inner + square[:, None]
    start = jnp.argmax(square, -1)
    rows = jnp.arange(centroids.shape[0])

    def visit(place, carry):
        places, left, current = carry
        places = places.at[rows, current].set(place)
        left = left.at[rows, current].set(jnp.inf)
        return places, left, jnp.argmin(distance[rows, current] + left, -1)

    places = filled((rows.shape[0], clusters), 0, centroids, dtype=jnp.int32)
    left = filled((rows.shape[0], clusters), 0, centroids)
    places, _, _ = lax.fori_loop(0, clusters, visit, (places, left, start))
    return places.reshape(*batch, clusters)


@public
def cluster_order(
    labels: Int[Array, "*batch s"], places: Int[Array, "*batch k"] | None = None
) -> Int[Array, "*batch s"]:
    """The stable permutation that sorts tokens by cluster, int32: position -> token.

    Invalid tokens, whose label is k, come last.

    Args:
      labels: int32 [..., S] from `kmeans`.
      places: int32 [..., k] from `similar_clusters_together`; `None`: clusters in their own order.
    """
    if places is not None:
        last = jnp.full((*places.shape[:-1], 1), places.shape[-1], jnp.int32)
        labels = jnp.take_along_axis(jnp.concatenate([places, last], -1), labels, -1)
    return jnp.argsort(labels, axis=-1, stable=True).astype(jnp.int32)


def sequence_order(key_valid: Bool[Array, "b s"]) -> Int[Array, "b s"]:
    """The stable permutation that puts valid tokens first, int32: position -> token."""
    earlier = jnp.cumsum(key_valid, -1, dtype=jnp.int32)
    token = jnp.arange(key_valid.shape[-1], dtype=jnp.int32)
    position = jnp.where(key_valid, earlier - 1, earlier[..., -1:] + token - earlier)
    row = jnp.arange(key_valid.shape[0])[:, None]
    order = jnp.zeros_like(position)
    return order.at[row, position].set(token, unique_indices=True)


@public
def block_means(
    values: Float[Array, "... s h"], count: Int[Array, "..."] | None = None
) -> Float[Array, "... n h"]:
    """The float32 mean of each 128-token block over its valid tokens, 0 for a block of none.

    Args:
      values: [..., S, H], S a multiple of 128, valid tokens first.
      count: number of valid tokens [...]; `None`: all.

    Raises:
      ValueError: S is not a multiple of 128.
    """
    *batch, length, size = values.shape
    if length % BLOCK:
        raise ValueError(f"values must have a multiple of {BLOCK} tokens, got {length}")
    blocks = values.astype(jnp.float32).reshape(*batch, length // BLOCK, BLOCK, size)
    blocks = blocks * SUM_UNIT
    if count is None:
        return jnp.sum(blocks, -2) * (1.0 / (BLOCK * SUM_UNIT))
    first = jnp.arange(length // BLOCK) * BLOCK
    inside = jnp.clip(count[..., None] - first, 0, BLOCK)
    member = (jnp.arange(BLOCK) < inside[..., None])[..., None]
    total = jnp.sum(jnp.where(member, blocks, 0.0), -2)
    return total / jnp.maximum(inside, 1)[..., None].astype(jnp.float32) * (1.0 / SUM_UNIT)


@public
def mean_energy(values: Float[Array, "... s h"]) -> Float[Array, "..."]:
    """Share of the energy of whole 128-token blocks that their means hold: B·|mu|² / |V|².

    Tokens past the last whole block are left out. In [0, 1], float32; 0 where there is no energy.
    """
    whole = values[..., : values.shape[-2] // BLOCK * BLOCK, :].astype(jnp.float32)
    means = block_means(whole)
    energy = jnp.sum(whole**2, (-1, -2))
    return BLOCK * jnp.sum(means**2, (-1, -2)) / jnp.where(energy == 0, 1.0, energy)
