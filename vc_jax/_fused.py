"""Clustering and the prepared layout by fused GPU kernels, in fewer passes over the tokens.

`_prepare` and `_vsmooth` are the definitions and the oracles. Here the arithmetic is the same up to
the order of float32 sums, the last bits of quotients and, in the search for the nearest centroid,
codes of 8 bits: a code may differ by one where a value lies on the edge between two, and a token
that is about as far from two centroids may fall to the other.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ._balance import balance_of
from ._config import AttentionConfig
from ._expcast import CODES_PER_NAT
from ._quantize import E4M3, count_of
from ._vsmooth import every_nth_valid
from .pallas_kernels.layout import Prepared8


def preparation_unsupported(*tokens: Array | jax.ShapeDtypeStruct) -> str | None:
    """Why fused kernels cannot prepare these queries, keys and values, or `None`."""
    from .pallas_kernels import preparation  # Pallas takes a while to import.

    return preparation.unsupported(tokens[0].shape[-1], *tokens)


def clustering_unsupported(key: Array | jax.ShapeDtypeStruct, clusters: int) -> str | None:
    """Why fused kernels cannot cluster values with the shape of these keys, or `None`."""
    from .pallas_kernels import clustering

    batch, length, heads, _ = key.shape
    return clustering.unsupported(batch, length, heads, clusters)


class Statistics(NamedTuple):
    """What `prepare_fused` takes of a call's tokens.

    Attributes:
      key_mean, balance: float32 [B, K, H], each `None` if the configuration does not want it.
      of_values: what their means and scales follow from; `None` without values.
    """

    key_mean: Float[Array, "b k h"] | None
    balance: Float[Array, "b k h"] | None
    of_values: Any


def statistics_fused(
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k h"] | None,
    config: AttentionConfig,
    *,
    order: Int[Array, "b k s"] | None = None,
    key_valid: Bool[Array, "b s"] | None = None,
    kv_count: Int[Array, " b"] | None = None,
    smooth: bool | None = None,
    interpret: bool = False,
) -> Statistics:
    """`mean_key` and `channel_balance`, if the configuration wants them, and the values': one pass.

    Arguments as of `prepare_fused`; without `value` there is nothing of the values.
    """
    from .pallas_kernels import statistics

    smooth = config.smooth_values if smooth is None else smooth
    found = statistics.statistics(
        query,
        key,
        value,
        _count(key, key_valid, kv_count),
        order,
        key_valid,
        key_mean=config.center_keys,
        squares=config.balance_channels,
        smooth=smooth,
        interpret=interpret,
    )
    balance = None
    if found.squares is not None:
        of_queries, of_keys = found.squares
        squares = of_queries / query.shape[1], of_keys / count_of(key, key_valid)
        balance = balance_of(*squares, found.key_mean)
    return Statistics(found.key_mean, balance, found.value)


def channel_sizes_fused(
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    config: AttentionConfig,
    key_valid: Bool[Array, "b s"] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "b k h"] | None, Float[Array, "b k h"] | None]:
    """`mean_key` and `channel_balance`, each if the configuration wants it."""
    found = statistics_fused(query, key, None, config, key_valid=key_valid, interpret=interpret)
    return found.key_mean, found.balance


def _count(
    key: Float[Array, "b s k h"],
    valid: Bool[Array, "b s"] | None,
    kv_count: Int[Array, " b"] | None,
) -> Int[Array, " b"]:
    """Valid keys of each batch row."""
    if kv_count is not None:
        return kv_count
    if valid is not None:
        return jnp.sum(valid, 1, dtype=jnp.int32)
    return jnp.full(key.shape[0], key.shape[1], jnp.int32)


def prepare_fused(
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k h"],
    config: AttentionConfig,
    *,
    scale: Float[Array, ""] | float | None = None,
    order: Int[Array, "b k s"] | None = None,
    key_valid: Bool[Array, "b s"] | None = None,
    kv_count: Int[Array, " b"] | None = None,
    key_mean: Float[Array, "b k h"] | None = None,
    balance: Float[Array, "b k h"] | None = None,
    smooth: bool | None = None,
    of_values: Any = None,
    interpret: bool = False,
) -> Prepared8:
    """As `prepare`, for 8-bit configurations and what `preparation.unsupported` allows.

    Args:
      key_valid: the tokens that `kv_count` counts.
      of_values: from `statistics_fused`; `None`: in a launch of their own.
      Others as of `prepare`.
    """
    from .pallas_kernels import preparation, statistics

    smooth = config.smooth_values if smooth is None else smooth
    scale = 1.0 / math.sqrt(key.shape[-1]) if scale is None else scale
    count = _count(key, key_valid, kv_count)
    formats = {
        "rotate": config.rotate,
        "code_dtype": jnp.int8 if config.qk == "int8" else E4M3,
        "interpret": interpret,
    }
    key_codes, key_scale = preparation.quantize_keys(
        key, count, order, key_mean, balance, **formats
    )
    if of_values is None:
        of_values = statistics.value_statistics(
            value, count, order, key_valid, smooth=smooth, interpret=interpret
        )
    queries, values = preparation.quantize_queries_and_values(
        (query, key_scale, balance),
        (value, count, order, of_values),
        scale=scale * CODES_PER_NAT,
        **formats,
    )
    return Prepared8(
        queries.codes,
        queries.scale,
        key_codes,
        queries.key_scale,
        values.codes,
        of_values.scale,
        values.block_means,
        of_values.mean,
        count,
        queries.excess,
    )


def starting_rows(
    value: Float[Array, "b s k h"], valid: Bool[Array, "b s"] | None, clusters: int
) -> Float[Array, "b k c h"]:
    """`spread_rows` of every head: rows spread evenly over the valid tokens, float32."""
    length = value.shape[1]
    place = jnp.arange(clusters) + 0.5
    if valid is None:
        token = jnp.floor(place * (length / clusters)).astype(jnp.int32)
        rows = value[:, jnp.minimum(token, length - 1)]
    else:
        so_far = jnp.cumsum(valid, 1, dtype=jnp.int32)
        count = so_far[:, -1:]
        rank = jnp.floor(place * (count / clusters)).astype(jnp.int32)
        token = jax.vmap(jnp.searchsorted)(so_far, rank + 1)
        token = jnp.minimum(token, length - 1)[..., None, None]
        rows = jnp.take_along_axis(value, token, axis=1)
        rows = jnp.where(count[..., None, None] > 0, rows, 0)
    return jnp.swapaxes(rows, 1, 2).astype(jnp.float32)


def cluster_order_fused(
    value: Float[Array, "b s k h"],
    valid: Bool[Array, "b s"] | None,
    clusters: int,
    steps: int,
    *,
    stride: int = 1,
    centroids: Float[Array, "b k c h"] | None = None,
    interpret: bool = False,
) -> tuple[Int[Array, "b k s"], Float[Array, "b k c h"]]:
    """The order of the keys by k-means of the values, and the centroids."""
    from .pallas_kernels import clustering

    value = lax.stop_gradient(value)
    rows = starting_rows(value, valid, clusters)
    if centroids is None:
        centroids = rows
    else:
        # One that is not finite would make codes of nothing of all others.
        finite = jnp.all(jnp.isfinite(centroids), -1, keepdims=True)
        centroids = jnp.where(finite, centroids, rows)
    sample = None
    if valid is not None and stride > 1:
        sample = every_nth_valid(valid, stride)
    return clustering.cluster_order(
        value, centroids, rows, steps, valid, stride=stride, sample=sample, interpret=interpret
    )
