"""From checked arguments to a result: which implementation runs, the pipeline, and its gradient."""

import dataclasses
import functools
import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ._arguments import Inputs, Validity
from ._config import AttentionConfig
from ._implementations import IMPLEMENTATIONS, Request, Result, Static, check_implementation
from ._plain import attention_gradient
from ._prepare import Prepared
from ._preprocessing import key_order, prepare_call
from ._tracing import is_symbolic, own_promotion
from ._vsmooth import sequence_order
from .pallas_kernels._varying import vary_together
from .pallas_kernels.layout import Prepared8

_SLOW_PRODUCT = 8192**2
"""Queries times keys from which a quantised call on XLA warns."""


def default_device() -> tuple[str, tuple[int, int] | None, str]:
    """Platform, compute capability and a readable name of the default device."""
    device = jax.devices()[0]
    platform = "gpu" if device.platform in ("gpu", "cuda", "rocm") else device.platform
    capability = getattr(device, "compute_capability", None)
    try:
        major, minor = (int(part) for part in str(capability).split("."))
    except ValueError:
        return platform, None, device.device_kind
    return platform, (major, minor), device.device_kind


def request_of(inputs: Inputs, config: AttentionConfig, residual: bool) -> Request:
    """What implementations are asked about a call on the default device."""
    platform, capability, _ = default_device()
    query, key = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs.query, inputs.key))
    return Request(config, query, key, inputs.validity.prefix, residual, platform, capability)


def choose(request: Request, implementation: str | None) -> tuple[str | None, dict[str, str]]:
    """The implementation that runs, and the reasons against all others that were asked.

    Raises:
      ValueError: a name that is not one.
    """
    check_implementation(implementation)
    asked = tuple(IMPLEMENTATIONS) if implementation is None else (implementation,)
    reasons, chosen = {}, None
    for name in asked:
        reason = IMPLEMENTATIONS[name].reason_against(request)
        if reason is None and chosen is None:
            chosen = name
        elif reason is not None or chosen is not None:
            reasons[name] = reason or f"slower than {chosen}"
    return chosen, reasons


@functools.cache
def _warn_slow(query: tuple[int, ...], key: tuple[int, ...]) -> None:
    """Warn, once a shape."""
    warnings.warn(
        f"a long attention call, query {list(query)} and key {list(key)}, runs on the slow XLA "
        "implementation; vc_jax.explain(...) with the same arguments says why",
        skip_file_prefixes=(os.path.dirname(__file__),),
    )


def select_implementation(request: Request, implementation: str | None) -> str:
    """The implementation to run.

    Raises:
      ValueError: a name that is not one.
      NotImplementedError: the named one, or every one, refuses the call; with the reasons.
    """
    chosen, reasons = choose(request, implementation)
    if chosen is None:
        text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NotImplementedError(f"no implementation supports this call: {text}")
    product = request.query.shape[1] * request.key.shape[1]
    long = not is_symbolic(product) and product >= _SLOW_PRODUCT
    if implementation is None and chosen == "xla" and long:
        _warn_slow(request.query.shape, request.key.shape)
    return chosen


@functools.partial(jax.jit, static_argnums=(0, 3))
def forward(
    static: Static, inputs: Inputs, order: Array | None, dtype: DTypeLike | None = None
) -> Result:
    """The whole call, top to bottom: order, prepare, kernel, restore.

    Jitted, so that a call outside of `jax.jit` does not compile its loops each time.

    Args:
      dtype: of the output; `None`: the query's.
    """
    implementation = IMPLEMENTATIONS[static.implementation]
    dtype = jnp.dtype(inputs.query.dtype if dtype is None else dtype)
    inputs = _without_padded_queries(inputs)
    if implementation.on_prepared is not None and static.config.quantized:
        order = order_of_keys(static, inputs, order)
        prepared, mean = prepare_call(static, inputs, order)
        out, lse = implementation.on_prepared(static, prepared, dtype)
        lse = _of_input_scores(lse, prepared, inputs, mean)
    else:
        assert implementation.on_inputs is not None
        out, lse = implementation.on_inputs(static, inputs)
    return _mark_rows(out.astype(dtype), lse if static.residual else None, inputs.validity)


def _without_padded_queries(inputs: Inputs) -> Inputs:
    """Zeros in place of queries that do not count, so that nothing of them gets anywhere."""
    valid = inputs.validity.query
    if valid is None:
        return inputs
    return dataclasses.replace(inputs, query=jnp.where(valid[:, :, None, None], inputs.query, 0))


def order_of_keys(
    static: Static, inputs: Inputs, order: Int[Array, "b k s"] | None
) -> Int[Array, "b k s"] | None:
    """Valid keys first; sorted by cluster with V-Smooth unless an order is given."""
    validity = inputs.validity
    if order is None and static.smooth:
        order = key_order(inputs, static.config, static.implementation)[0]
    elif order is None and not validity.prefix and validity.key is not None:
        order = sequence_order(validity.key)[:, None]
    if order is None:
        return None
    return jnp.broadcast_to(order, (order.shape[0], inputs.key.shape[2], order.shape[2]))


def _of_input_scores(
    lse: Float[Array, "b t n"] | None, prepared: Prepared, inputs: Inputs, mean: Array | None
) -> Float[Array, "b t n"] | None:
    """The normaliser of the inputs' scores, given that of the prepared ones.

    Those are within the layout's range and centred; both is undone here.
    """
    if lse is None:
        return None
    scores = lse
    if isinstance(prepared, Prepared8):
        scores = scores * jnp.swapaxes(prepared.score_excess, 1, 2)
    if mean is not None:
        scores = scores + mean_score(inputs, mean)
    return jnp.where(jnp.isneginf(lse), lse, scores)


def mean_score(inputs: Inputs, mean: Float[Array, "b k h"]) -> Float[Array, "b t n"]:
    """`scale · query · mean key`: what centring took out of every score of a row."""
    groups = inputs.query.shape[2] // mean.shape[1]
    mean = jnp.repeat(mean, groups, 1)
    return inputs.scale * jnp.einsum(
        "btnh,bnh->btn",
        inputs.query.astype(jnp.float32),
        mean,
        precision=jax.lax.Precision.HIGHEST,
    )


def _mark_rows(out: Array, lse: Array | None, validity: Validity) -> Result:
    """Zeros and -inf in rows that do not count, NaN where a traced mask was no mask."""
    if validity.query is not None:
        out = jnp.where(validity.query[:, :, None, None], out, 0)
        lse = None if lse is None else jnp.where(validity.query[:, :, None], lse, -jnp.inf)
    if validity.poison is not None:
        out = jnp.where(validity.poison[:, None, None, None], jnp.nan, out)
        lse = None if lse is None else jnp.where(validity.poison[:, None, None], jnp.nan, lse)
    return out, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, query, key, value, scale, validity: Validity, order):
    return forward(static, Inputs(query, key, value, scale, validity), order)


def _attend_forward(static: Static, query, key, value, scale, validity: Validity, order):
    result = _attend(static, query, key, value, scale, validity, order)
    return result, (query, key, value, scale, validity)


@own_promotion
def _attend_backward(static: Static, saved, cotangents):
    """Straight-through: the gradient of unquantised attention at the same inputs."""
    del static
    return (*input_gradients(saved, cotangents[0]), None, None)


def input_gradients(saved: tuple[Any, ...], cotangent: Array) -> tuple[Array, ...]:
    """Gradients of query, key, value and scale, in their dtypes.

    Args:
      saved: query, key, value, scale and validity.
      cotangent: of the output.
    """
    query, key, value, scale, validity = saved
    gradients = attention_gradient(
        query,
        key,
        value,
        cotangent,
        scale=scale,
        key_valid=validity.key,
        query_valid=validity.query,
    )
    arrays = (query, key, value, scale)
    return tuple(g.astype(x.dtype) for g, x in zip(gradients, arrays))


_attend.defvjp(_attend_forward, _attend_backward)


def attend(static: Static, inputs: Inputs, order: Int[Array, "b k s"] | None = None) -> Result:
    """Attention of checked inputs: output in the query's dtype, normaliser or `None`.

    Differentiable in query, key, value and scale; the normaliser is not.
    """
    arrays = (inputs.query, inputs.key, inputs.value, inputs.scale)
    arrays = vary_together(*arrays, along=(inputs.validity, order))
    try:
        result: Any = _attend(static, *arrays, inputs.validity, order)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            "attention of vc_jax has no forward-mode derivative (jax.jvp, jax.jacfwd, "
            "jax.linearize): use reverse mode (jax.grad, jax.vjp, jax.jacrev), which recomputes "
            "scores block by block"
        ) from error
    out, lse = result
    return out, None if lse is None else jax.lax.stop_gradient(lse)
