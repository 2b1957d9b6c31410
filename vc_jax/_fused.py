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
from ._prepare import largest_query_scale, scaled_means, value_scale_of
from ._quantize import E4M3, count_of, largest_magnitude
from ._vsmooth import every_nth_valid
from .pallas_kernels.layout import SUM_UNIT, Prepared8


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
    from .pallas_kernels import preparation

    smooth = config.smooth_values if smooth is None else smooth
    wanted = {"sum": config.center_keys, "squares": config.balance_channels}
    found = preparation.statistics(
        query,
        key,
        value,
        _count(key, kv_count),
        order,
        key_valid,
        of_queries=("squares",) if config.balance_channels else (),
        of_keys=tuple(name for name, on in wanted.items() if on),
        smooth=smooth,
        interpret=interpret,
    )
    mean, balance, count = None, None, count_of(key, key_valid)
    if config.center_keys:
        mean = found.key["sum"] / count * (1.0 / SUM_UNIT)
    if config.balance_channels:
        squares = found.query["squares"] / query.shape[1], found.key["squares"] / count
        balance = balance_of(*squares, mean)
    return Statistics(mean, balance, found.value)


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


def _count(key: Array, kv_count: Int[Array, " b"] | None) -> Int[Array, " b"]:
    """Valid keys of each batch row."""
    return jnp.full(key.shape[0], key.shape[1], jnp.int32) if kv_count is None else kv_count


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
    from .pallas_kernels import preparation

    smooth = config.smooth_values if smooth is None else smooth
    scale = 1.0 / math.sqrt(key.shape[-1]) if scale is None else scale
    count = _count(key, kv_count)
    formats = {
        "rotate": config.rotate,
        "code_dtype": jnp.int8 if config.qk == "int8" else E4M3,
        "interpret": interpret,
    }
    key_codes, key_scale = preparation.quantize_keys(
        key, count, order, key_mean, balance, **formats
    )
    unit = jnp.ones(key_scale.shape[:2], jnp.float32)
    if config.qk == "e4m3":
        unit = largest_magnitude(key_scale, -1)
        unit = jnp.where(unit == 0, 1.0, unit)
        key_scale = key_scale / unit[..., None]
    if of_values is None:
        of_values = preparation.values_statistics(
            value, count, order, key_valid, smooth=smooth, interpret=interpret
        )
    mean = None
    if smooth:
        value_scale = value_scale_of(of_values.half_largest, of_values.means)
        taken = scaled_means(of_values.means, value_scale)
    else:
        mean, half_largest = _mean_value(of_values, count)
        value_scale = value_scale_of(half_largest, None)
        taken = (mean / value_scale)[:, :, None]
    (query_codes, query_scale, excess), value_codes = preparation.quantize_queries_and_values(
        (query, unit, largest_query_scale(key_scale)[..., 0], balance),
        (value, count, order, taken, value_scale),
        scale=scale * CODES_PER_NAT,
        **formats,
    )
    return Prepared8(
        query_codes,
        query_scale,
        key_codes,
        key_scale,
        value_codes,
        value_scale,
        taken if smooth else None,
        mean,
        count,
        excess,
    )


def _mean_value(
    of_values: Any, count: Int[Array, " b"]
) -> tuple[Float[Array, "b k h"], Float[Array, "b k h"]]:
    """The mean of each channel over the valid tokens, and half of what is farthest from it."""
    number = jnp.maximum(count, 1).astype(jnp.float32)[:, None, None]
    mean = of_values.total / number * (1.0 / SUM_UNIT)
    ends = jnp.stack([0.5 * of_values.high - 0.5 * mean, 0.5 * of_values.low - 0.5 * mean])
    return mean, jnp.where(count[:, None, None] > 0, largest_magnitude(ends, 0), 0.0)


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
