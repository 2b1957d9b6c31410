"""`dot_product_attention`: the public call, its choice of implementation and its gradient."""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._arguments import Inputs, Validity, check_arguments, refuse_unsupported
from ._config import AttentionConfig, resolve_config
from ._implementations import IMPLEMENTATIONS, NAMES, Request, Static, key_order
from ._plain import attention_gradient
from ._vsmooth import sequence_order
from .pallas_kernels._varying import vary_together

_SLOW_PRODUCT = 8192**2
"""Queries times keys from which a quantised call on XLA warns."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation a call runs on, and why not the others.

    Attributes:
      implementation: the name; `None` if none supports the call.
      reasons: name -> why it does not run, for every other implementation.
      config: the numerics.
      device: what the choice was made for.
    """

    implementation: str | None
    reasons: dict[str, str]
    config: AttentionConfig
    device: str

    def __str__(self) -> str:
        lines = [f"{self.implementation or 'nothing'} runs this call on {self.device}"]
        lines += [f"  {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


def _device() -> tuple[str, tuple[int, int] | None, str]:
    """Platform, compute capability and a readable name of the default device."""
    device = jax.devices()[0]
    platform = "gpu" if device.platform in ("gpu", "cuda", "rocm") else device.platform
    capability = getattr(device, "compute_capability", None)
    try:
        major, minor = (int(part) for part in str(capability).split("."))
    except ValueError:
        return platform, None, device.device_kind
    return platform, (major, minor), device.device_kind


def _request(inputs: Inputs, config: AttentionConfig, residual: bool) -> Request:
    platform, capability, _ = _device()
    query, key = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs.query, inputs.key))
    return Request(config, query, key, inputs.validity.prefix, residual, platform, capability)


def _check_config(config: AttentionConfig, head_dim: int) -> None:
    if config.qk == "nvfp4" and head_dim % 16:
        raise ValueError(
            f"query must have a head dim that is a multiple of 16 for NVFP4, got {head_dim}"
        )


def _choose(request: Request, implementation: str | None) -> tuple[str | None, dict[str, str]]:
    """The implementation that runs, and the reasons against all those that were asked."""
    if implementation is not None and implementation not in NAMES:
        raise ValueError(f"implementation must be None or one of {NAMES}, got {implementation!r}")
    asked = NAMES if implementation is None else (implementation,)
    reasons, chosen = {}, None
    for name in asked:
        reason = IMPLEMENTATIONS[name].unsupported(request)
        if reason is None and chosen is None:
            chosen = name
        elif reason is not None or chosen is not None:
            reasons[name] = reason or f"slower than {chosen}"
    return chosen, reasons


@functools.cache
def _warn_slow() -> None:
    warnings.warn(
        "a long attention call runs on the slow XLA implementation; vc_jax.explain(...) with the "
        "same arguments says why",
        stacklevel=4,
    )


def select_implementation(request: Request, implementation: str | None) -> str:
    """The implementation to run.

    Raises:
      NotImplementedError: the named one, or every one, refuses the call; with the reasons.
    """
    chosen, reasons = _choose(request, implementation)
    if chosen is None:
        text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NotImplementedError(f"no implementation supports this call: {text}")
    long = request.query.shape[1] * request.key.shape[1] >= _SLOW_PRODUCT
    if implementation is None and chosen == "xla" and long:
        _warn_slow()
    return chosen


@functools.partial(jax.jit, static_argnums=0)
def _forward(static: Static, inputs: Inputs, order: Array | None) -> tuple[Array, Array | None]:
    """The whole call: order, kernel, and what rows that do not count return.

    Jitted, so that a call outside of `jax.jit` does not compile its loops each time.
    """
    validity, dtype = inputs.validity, inputs.query.dtype
    if validity.query is not None:
        query = jnp.where(validity.query[:, :, None, None], inputs.query, 0)
        inputs = dataclasses.replace(inputs, query=query)
    if static.config.quantized and order is None:
        if static.smooth:
            order = key_order(inputs, static.config, static.implementation)[0]
        elif not validity.prefix and validity.key is not None:
            order = sequence_order(validity.key)[:, None]
    if order is not None:
        shape = (order.shape[0], inputs.key.shape[2], order.shape[2])
        order = jnp.broadcast_to(order, shape)
    out, lse = IMPLEMENTATIONS[static.implementation].run(static, inputs, order)
    out = out.astype(dtype)
    if validity.query is not None:
        out = jnp.where(validity.query[:, :, None, None], out, 0)
        lse = None if lse is None else jnp.where(validity.query[:, :, None], lse, -jnp.inf)
    if validity.poison is not None:
        out = jnp.where(validity.poison[:, None, None, None], jnp.nan, out)
        lse = None if lse is None else jnp.where(validity.poison[:, None, None], jnp.nan, lse)
    return out, (lse if static.residual else None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, query, key, value, scale, validity: Validity, order):
    return _forward(static, Inputs(query, key, value, scale, validity), order)


def _attend_forward(static: Static, query, key, value, scale, validity: Validity, order):
    result = _attend(static, query, key, value, scale, validity, order)
    return result, (query, key, value, scale, validity)


def _attend_backward(static: Static, saved, cotangents):
    """Straight-through: the gradient of unquantised attention at the same inputs."""
    del static
    query, key, value, scale, validity = saved
    gradients = attention_gradient(
        query,
        key,
        value,
        cotangents[0],
        scale=scale,
        key_valid=validity.key,
        query_valid=validity.query,
    )
    arrays = (query, key, value, scale)
    return (*(g.astype(x.dtype) for g, x in zip(gradients, arrays)), None, None)


_attend.defvjp(_attend_forward, _attend_backward)


def attend(static: Static, inputs: Inputs, order: Int[Array, "b k s"] | None = None):
    """Attention of checked inputs: output in the query's dtype, normaliser or `None`.

    Differentiable in query, key, value and scale; the normaliser is not.
    """
    arrays = (inputs.query, inputs.key, inputs.value, inputs.scale)
    arrays = vary_together(*arrays, along=(inputs.validity, order))
    result: Any = _attend(static, *arrays, inputs.validity, order)
    out, lse = result
    return out, None if lse is None else jax.lax.stop_gradient(lse)


def dot_product_attention(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    value: Float[Array, "*b s k h"],
    bias: None = None,
    mask: Array | None = None,
    *,
    config: AttentionConfig | str = "int8",
    scale: Float[Array, ""] | float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " b"] | Sequence[int] | None = None,
    key_value_seq_lengths: Int[Array, " b"] | Sequence[int] | None = None,
    local_window_size: None = None,
    state=None,
    implementation: str | None = None,
    return_residual: bool = False,
):
    """Low-bit attention with the signature of `jax.nn.dot_product_attention`.

    Lengths and masks may be traced; they never cause a recompilation. Invalid keys change nothing,
    whatever bytes they hold. A row without a valid key and rows past `query_seq_lengths` give
    zeros. The gradient is that of unquantised attention at the same inputs (straight-through).

    Numbers of clusters and of tokens that a Lloyd step looks at follow from S unless the
    configuration fixes them, so padding an array may change a code, as any other order of the keys
    would. In NVFP4 the queries of a head share a scale: one that is NaN makes its head NaN.

    Args:
      query: [B, T, N, H] or [T, N, H]; float32, bfloat16 or float16.
      key, value: [B, S, K, H] or [S, K, H], N a multiple of K.
      bias, is_causal, local_window_size: must be `None` or `False`.
      mask: 1 or True keeps a key: bool, or 0 and 1 of any dtype. [B or 1, 1, 1, S], traced or not;
        a concrete mask with query or head axes if it leaves every query the same keys or none.
        A traced mask that holds anything else than 0 and 1 turns its batch row to NaN.
      config: an `AttentionConfig` or a preset's name: `"bf16"`, `"int8"`, `"fp8"`, `"nvfp4"`.
      scale: of the scores; `None`: 1/sqrt(H).
      query_seq_lengths, key_value_seq_lengths: int [B], valid prefix of each row.
      state: an `AttentionState` whose order of the keys is used if it was made for the same valid
        keys; otherwise, and without a state, the values are clustered in this call.
      implementation: one of `"hopper"`, `"blackwell"`, `"mma"`, `"cudnn"`, `"xla"`; `None`: the
        fastest one that supports the call.
      return_residual: also return the log normaliser.

    Returns:
      The output, in the shape and dtype of `query`; with `return_residual` also the natural-log
      normaliser of the scores, float32 [B, T, N] ([T, N]), -inf for a row without a valid key.
      With ExpCast it is taken from the decoded row sum, which is biased by at most 0.072 nats
      (about +0.009 on flat rows); in merged pieces of the same configuration the bias cancels.
      It passes no gradient on: merge pieces where none is needed, such as in a sampler.

    Raises:
      NotImplementedError: an argument that cannot be honoured, or an implementation that does not
        support the call, by name.
      TypeError, ValueError: a wrong argument, by name.
    """
    refuse_unsupported(bias=bias, is_causal=is_causal, local_window_size=local_window_size)
    config = resolve_config(config)
    inputs = check_arguments(
        query,
        key,
        value,
        mask=mask,
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
    )
    _check_config(config, inputs.query.shape[-1])
    chosen = select_implementation(_request(inputs, config, return_residual), implementation)
    static = Static(config, chosen, config.smooth_values, return_residual)
    order = None
    if state is not None:
        from ._state import order_from_state

        order = order_from_state(state, inputs, config, chosen)
    out, lse = attend(static, inputs, order)
    out = out.reshape(query.shape)
    return (out, lse.reshape(query.shape[:-1])) if lse is not None else out


def explain(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    config: AttentionConfig | str = "int8",
    scale=None,
    is_causal: bool = False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    state=None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Explanation:
    """Which implementation `dot_product_attention` would run with these arguments, and why.

    Arrays may be `jax.ShapeDtypeStruct`s. Raises what the call itself would raise for its
    arguments; an implementation that refuses is in the result's `reasons`.
    """
    refuse_unsupported(bias=bias, is_causal=is_causal, local_window_size=local_window_size)
    config = resolve_config(config)
    inputs = check_arguments(
        query,
        key,
        value,
        mask=mask,
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
    )
    _check_config(config, inputs.query.shape[-1])
    if state is not None:
        from ._state import check_state

        check_state(state, inputs, config, layered=False)
    chosen, reasons = _choose(_request(inputs, config, return_residual), implementation)
    return Explanation(chosen, reasons, config, _device()[2])
