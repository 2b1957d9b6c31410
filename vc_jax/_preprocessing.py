"""What comes before a kernel: the order of the keys and the prepared layout, fused or by XLA.

The fused kernels (`_fused`) serve implementations that ask for them, where they support the call;
XLA's functions (`_vsmooth`, `_prepare`) are the definition and serve all others.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ._arguments import Inputs
from ._balance import channel_balance
from ._config import AttentionConfig, default_clusters, default_lloyd_stride
from ._fused import (
    cluster_order_fused,
    clustering_unsupported,
    preparation_unsupported,
    prepare_fused,
    statistics_fused,
)
from ._implementations import IMPLEMENTATIONS, Static
from ._prepare import Prepared, prepare
from ._quantize import mean_key
from ._vsmooth import cluster_order, kmeans, similar_clusters_together


def fuses(implementation: str, inputs: Inputs, clusters: int | None = None) -> bool:
    """Whether fused kernels prepare a call, or cluster it if a number of clusters is given."""
    if not IMPLEMENTATIONS[implementation].fused_preprocessing:
        return False
    if clusters is not None and clustering_unsupported(inputs.key, clusters) is not None:
        return False
    return preparation_unsupported(inputs.query, inputs.key, inputs.value) is None


def key_order(
    inputs: Inputs,
    config: AttentionConfig,
    implementation: str,
    centroids: Float[Array, "b k c h"] | None = None,
) -> tuple[Int[Array, "b k s"], Float[Array, "b k c h"]]:
    """Cluster the values: the order of the keys, and the centroids.

    Args:
      centroids: where to start; `None`: at rows of the values.
    """
    length, valid = inputs.value.shape[1], inputs.validity.key
    clusters = config.clusters or default_clusters(length)
    steps = config.lloyd_steps if centroids is None else config.warm_lloyd_steps
    stride = config.lloyd_stride or default_lloyd_stride(length, clusters)
    if fuses(implementation, inputs, clusters):
        return cluster_order_fused(
            inputs.value, valid, clusters, steps, stride=stride, centroids=centroids
        )
    value = lax.stop_gradient(jnp.swapaxes(inputs.value, 1, 2))
    batch, heads = value.shape[:2]
    if valid is not None:
        valid = jnp.broadcast_to(valid[:, None], (batch, heads, length))
    found = kmeans(value, clusters, steps=steps, stride=stride, valid=valid, centroids=centroids)
    return cluster_order(found.labels, similar_clusters_together(found.centroids)), found.centroids


def prepare_call(
    static: Static, inputs: Inputs, order: Int[Array, "b k s"] | None
) -> tuple[Prepared, Float[Array, "b k h"] | None]:
    """The prepared inputs of a call, and the mean that was taken from its keys."""
    valid, config = inputs.validity.key, static.config
    count = None if valid is None else jnp.sum(valid, 1, dtype=jnp.int32)
    arrays = (inputs.query, inputs.key, inputs.value, config)
    common: dict[str, Any] = {
        "scale": inputs.scale,
        "order": order,
        "kv_count": count,
        "smooth": static.smooth,
    }
    if config.qk != "nvfp4" and fuses(static.implementation, inputs):
        masked = {"order": order, "key_valid": valid, "kv_count": count, "smooth": static.smooth}
        found = statistics_fused(*arrays, **masked)
        return prepare_fused(*arrays, **common, key_valid=valid, **found._asdict()), found.key_mean
    mean = mean_key(inputs.key, valid) if config.center_keys else None
    balance = None
    if config.balance_channels:
        balance = channel_balance(inputs.query, inputs.key, valid, key_mean=mean)
    return prepare(*arrays, key_mean=mean, balance=balance, **common), mean
