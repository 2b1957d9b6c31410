"""The implementations of the attention, fastest first, and what each one supports.

An implementation says in one sentence why it cannot take a call (`unsupported`), or takes it. The
numerics are the configuration's; an implementation only changes the speed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ._arguments import Inputs
from ._config import AttentionConfig, default_clusters, default_lloyd_stride
from ._fused import cluster_order_fused, key_mean_fused, prepare_fused
from ._plain import plain_attention
from ._prepare import Prepared, Prepared8, prepare
from ._quantize import mean_key
from ._reference import reference_attention
from ._vsmooth import cluster_order, kmeans, similar_clusters_together

NAMES = ("hopper", "blackwell", "mma", "cudnn", "xla")
"""Names that `implementation=` takes."""


@dataclasses.dataclass(frozen=True)
class Static:
    """What is fixed when a call is traced.

    Attributes:
      config: the numerics.
      implementation: a name of `NAMES`.
      smooth: whether V-Smooth is on in this call.
      residual: whether the normaliser is wanted.
    """

    config: AttentionConfig
    implementation: str
    smooth: bool
    residual: bool


@dataclasses.dataclass(frozen=True)
class Request:
    """What an implementation needs to know to accept or refuse a call.

    Attributes:
      config: the numerics.
      query, key: abstract arrays, BTNH and BSKH.
      prefix: whether valid keys are the first ones of every row.
      residual: whether the normaliser is wanted.
      platform: `"cpu"`, `"gpu"`, `"tpu"`.
      compute_capability: of an NVIDIA GPU, as `(major, minor)`; `None` elsewhere.
    """

    config: AttentionConfig
    query: jax.ShapeDtypeStruct
    key: jax.ShapeDtypeStruct
    prefix: bool
    residual: bool
    platform: str
    compute_capability: tuple[int, int] | None


Result = tuple[Array, Array | None]
Kernel = Callable[[Static, Prepared, Any], Result]
"""Attention over prepared inputs, with the output's dtype."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A name, a check (`None`: supported, else the reason) and a function."""

    name: str
    unsupported: Callable[[Request], str | None]
    run: Callable[[Static, Inputs, Int[Array, "b k s"] | None], Result]


def fused(implementation: str, inputs: Inputs, clusters: int = 0) -> bool:
    """Whether fused kernels cluster and prepare for an implementation; otherwise XLA does."""
    if implementation != "hopper":
        return False
    from .pallas_kernels import clustering, preparation

    batch, length, heads, _ = inputs.key.shape
    if clusters and clustering.unsupported(batch, length, heads, clusters) is not None:
        return False
    tokens = (inputs.query, inputs.key, inputs.value)
    return preparation.unsupported(inputs.key.shape[-1], *tokens) is None


def key_order(
    inputs: Inputs, config: AttentionConfig, implementation: str, centroids: Array | None = None
) -> tuple[Int[Array, "b k s"], Array]:
    """Cluster the values: the order of the keys and the centroids [B, K, k, H]."""
    length, valid = inputs.value.shape[1], inputs.validity.key
    clusters = config.clusters or default_clusters(length)
    steps = config.lloyd_steps if centroids is None else config.warm_lloyd_steps
    stride = config.lloyd_stride or default_lloyd_stride(length, clusters)
    if fused(implementation, inputs, clusters):
        return cluster_order_fused(
            inputs.value, valid, clusters, steps, stride=stride, centroids=centroids
        )
    value = jax.lax.stop_gradient(jnp.swapaxes(inputs.value, 1, 2))
    batch, heads = value.shape[:2]
    if valid is not None:
        valid = jnp.broadcast_to(valid[:, None], (batch, heads, length))
    found = kmeans(value, clusters, steps=steps, stride=stride, valid=valid, centroids=centroids)
    return cluster_order(found.labels, similar_clusters_together(found.centroids)), found.centroids


def _prepared(
    static: Static, inputs: Inputs, order: Array | None, count: Array | None
) -> tuple[Prepared, Array | None]:
    """The prepared inputs and the mean that was taken from the keys."""
    valid, config = inputs.validity.key, static.config
    arrays = (inputs.query, inputs.key, inputs.value, config)
    common: dict[str, Any] = {
        "scale": inputs.scale,
        "order": order,
        "kv_count": count,
        "smooth": static.smooth,
    }
    if fused(static.implementation, inputs):
        mean = key_mean_fused(inputs.key, valid, count) if config.center_keys else None
        return prepare_fused(*arrays, key_valid=valid, mean=mean, **common), mean
    mean = mean_key(inputs.key, valid) if config.center_keys else None
    return prepare(*arrays, key_mean=mean, **common), mean


def _quantized(static: Static, inputs: Inputs, order: Array | None, kernel: Kernel) -> Result:
    """Prepare the inputs, run a kernel on them, and undo what centring did to the normaliser."""
    valid = inputs.validity.key
    count = None if valid is None else jnp.sum(valid, 1, dtype=jnp.int32)
    prepared, mean = _prepared(static, inputs, order, count)
    out, lse = kernel(static, prepared, inputs.query.dtype)
    if lse is not None:
        scores = lse
        if isinstance(prepared, Prepared8):
            scores = scores * jnp.swapaxes(prepared.score_excess, 1, 2)
        if mean is not None:
            scores = scores + mean_score(inputs, mean)
        lse = jnp.where(jnp.isneginf(lse), lse, scores)
    return out, lse


def _reference_kernel(static: Static, prepared: Prepared, dtype) -> Result:
    del dtype
    out, lse = reference_attention(prepared, static.config)
    return out, (lse if static.residual else None)


def _hopper_kernel(static: Static, prepared: Prepared, dtype) -> Result:
    from .pallas_kernels import hopper  # Pallas takes a while to import; few calls need it.

    assert isinstance(prepared, Prepared8)
    return hopper.attention(
        *prepared[:6],
        prepared.block_means if static.smooth else None,
        prepared.kv_count,
        softmax=static.config.softmax,
        out_dtype=dtype,
        return_residual=static.residual,
    )


def _run_hopper(static: Static, inputs: Inputs, order: Array | None) -> Result:
    return _quantized(static, inputs, order, _hopper_kernel)


def _hopper_unsupported(request: Request) -> str | None:
    config = request.config
    if not config.quantized:
        return "computes quantised attention only"
    if config.qk == "nvfp4":
        return "has 8-bit products only, no NVFP4"
    if request.platform != "gpu" or request.compute_capability is None:
        return f"needs an NVIDIA GPU, this is {request.platform}"
    if request.compute_capability != (9, 0):
        major, minor = request.compute_capability
        return f"needs compute capability 9.0, this GPU has {major}.{minor}"
    from .pallas_kernels import hopper

    code_dtype = jnp.int8 if config.qk == "int8" else jnp.float8_e4m3fn
    return hopper.unsupported(
        code_dtype, request.query.shape[-1], config.softmax, request.query.dtype
    )


def mean_score(inputs: Inputs, mean: Array) -> Array:
    """`scale · query · mean key` [B, T, N]: what centring took out of every score of a row."""
    groups = inputs.query.shape[2] // mean.shape[1]
    mean = jnp.repeat(mean, groups, 1)
    return inputs.scale * jnp.einsum(
        "btnh,bnh->btn",
        inputs.query.astype(jnp.float32),
        mean,
        precision=jax.lax.Precision.HIGHEST,
    )


def _run_xla(static: Static, inputs: Inputs, order: Array | None) -> Result:
    if static.config.quantized:
        return _quantized(static, inputs, order, _reference_kernel)
    query, key, value = inputs.query, inputs.key, inputs.value
    return plain_attention(query, key, value, scale=inputs.scale, key_valid=inputs.validity.key)


def _run_cudnn(static: Static, inputs: Inputs, order: Array | None) -> Result:
    del static, order
    valid, dtype = inputs.validity.key, inputs.query.dtype
    key, value = inputs.key.astype(dtype), inputs.value.astype(dtype)
    query = (inputs.query.astype(jnp.float32) * inputs.scale).astype(dtype)
    if valid is None:
        out = jax.nn.dot_product_attention(query, key, value, scale=1.0, implementation="cudnn")
        return out, None
    count = jnp.sum(valid, 1, dtype=jnp.int32)
    keep = valid[:, :, None, None]
    out = jax.nn.dot_product_attention(
        query,
        jnp.where(keep, key, 0),
        jnp.where(keep, value, 0),
        scale=1.0,
        query_seq_lengths=jnp.full_like(count, query.shape[1]),
        key_value_seq_lengths=jnp.maximum(count, 1),
        implementation="cudnn",
    )
    return jnp.where(count[:, None, None, None] > 0, out, 0), None


def _cudnn_unsupported(request: Request) -> str | None:
    if request.config.quantized:
        return "computes unquantised attention only (config='bf16')"
    if request.platform != "gpu" or request.compute_capability is None:
        return f"needs an NVIDIA GPU, this is {request.platform}"
    if request.query.dtype == jnp.float32 or request.query.dtype != request.key.dtype:
        return "needs bfloat16 or float16 inputs of one dtype"
    if request.residual:
        return "returns its normaliser in 16 bits only"
    if not request.prefix:
        return "needs valid keys to come first"
    size = request.query.shape[-1]
    limit = 256 if request.compute_capability >= (9, 0) else 128
    if size % 8 or size > limit:
        return f"needs a head dim that is a multiple of 8 up to {limit}, got {size}"
    return None


def _not_in_this_version(request: Request) -> str:
    del request
    return "no such kernel in this version"


def _no_kernel(static: Static, inputs: Inputs, order: Array | None) -> Result:
    raise NotImplementedError(f"{static.implementation}: no such kernel in this version")


IMPLEMENTATIONS: dict[str, Implementation] = {
    entry.name: entry
    for entry in (
        Implementation("hopper", _hopper_unsupported, _run_hopper),
        Implementation("blackwell", _not_in_this_version, _no_kernel),
        Implementation("mma", _not_in_this_version, _no_kernel),
        Implementation("cudnn", _cudnn_unsupported, _run_cudnn),
        Implementation("xla", lambda request: None, _run_xla),
    )
}
"""Every implementation by name, fastest first."""
