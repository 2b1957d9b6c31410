"""Clustering and the prepared layout by fused GPU kernels, in fewer passes over the tokens.

`_prepare` and `_vsmooth` are the definitions and the oracles. Here the arithmetic is the same up to
the order of float32 sums, the last bits of quotients and, in the search for the nearest centroid,
codes of 8 bits: a code may differ by one where a value lies on the edge between two, and a token
that is about as far from two centroids may fall to the other.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ._config import AttentionConfig
from ._expcast import CODES_PER_NAT
from ._prepare import largest_query_scale, scaled_means, value_scale_of
from ._quantize import E4M3, largest_magnitude
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


def key_mean_fused(
    key: Float[Array, "b s k h"],
    key_valid: Bool[Array, "b s"] | None,
    kv_count: Int[Array, " b"] | None,
    *,
    interpret: bool = False,
) -> Float[Array, "b k h"]:
    """`mean_key` in one pass."""
    from .pallas_kernels import preparation

    total = preparation.channel_statistics(key, key_valid, interpret=interpret)
    if kv_count is None:
        return total / key.shape[1]
    return total / jnp.maximum(kv_count, 1).astype(jnp.float32)[:, None, None]


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
    mean: Float[Array, "b k h"] | None = None,
    smooth: bool | None = None,
    interpret: bool = False,
) -> Prepared8:
    """As `prepare`, for 8-bit configurations and what `preparation.unsupported` allows.

    Args:
      key_valid: the tokens that `kv_count` counts.
      Others as of `prepare`.
    """
    from .pallas_kernels import preparation

    batch, length, _, size = key.shape
    smooth = config.smooth_values if smooth is None else smooth
    scale = 1.0 / math.sqrt(size) if scale is None else scale
    count = jnp.full(batch, length, jnp.int32) if kv_count is None else kv_count
    formats = {
        "rotate": config.rotate,
        "code_dtype": jnp.int8 if config.qk == "int8" else E4M3,
        "interpret": interpret,
    }
    key_codes, key_scale = preparation.quantize_keys(key, count, order, mean, **formats)
    unit = jnp.ones(key_scale.shape[:2], jnp.float32)
    if config.qk == "e4m3":
        unit = largest_magnitude(key_scale, -1)
        unit = jnp.where(unit == 0, 1.0, unit)
        key_scale = key_scale / unit[..., None]
    query_codes, query_scale, excess = preparation.quantize_queries(
        query,
        unit,
        largest_query_scale(key_scale)[..., 0],
        scale=scale * CODES_PER_NAT,
        **formats,
    )
    if smooth:
        means, largest = preparation.value_statistics(value, count, order, interpret=interpret)
    else:
        means = None
        largest = preparation.channel_statistics(
            value, key_valid, maximum=True, interpret=interpret
        )
    value_scale = value_scale_of(largest, means)
    value_codes = preparation.quantize_values(
        value, count, order, means, value_scale, interpret=interpret
    )
    return Prepared8(
        query_codes,
        query_scale,
        key_codes,
        key_scale,
        value_codes,
        value_scale,
        None if means is None else scaled_means(means, value_scale),
        count,
        excess,
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
    if centroids is None:
        centroids = starting_rows(value, valid, clusters)
    return clustering.cluster_order(
        value, centroids, steps, valid, stride=stride, interpret=interpret
    )
