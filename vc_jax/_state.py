"""The order of the keys, carried over denoising steps.

Clustering costs time, and values change slowly from one denoising step to the next: an order made
at one step serves the next few. The state is a pytree of fixed structure, shapes and dtypes, so
it goes through `lax.scan` carries, `nnx.split`, Linen collections and checkpoints.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ._arguments import Inputs, check_arguments, refuse_unsupported
from ._attention import _check_config, _request, attend, select_implementation
from ._config import PRESETS, AttentionConfig, default_clusters, resolve_config
from ._implementations import Static, key_order
from ._schedule import DenoisingSchedule
from ._tracing import concrete
from ._vsmooth import sequence_order
from .pallas_kernels._varying import vary_together


class AttentionState(NamedTuple):
    """What one attention layer (or a stack of L layers) remembers between denoising steps.

    4·B·K·S bytes of permutation, 4·B·K·k·H of centroids and B·S of validity a layer: 12.1 MB of
    permutation for 75 600 tokens and 40 heads. A configuration that does not cluster needs
    B bytes.

    Attributes:
      permutation: int32 [(L,) B, K, S], position -> token, valid tokens first.
      centroids: float32 [(L,) B, K, k, H], where the next clustering starts.
      key_valid: bool [(L,) B, S], the keys that were valid when the order was made.
      made: bool [(L,) B], whether the order comes from clustering; alike in all rows.
    """

    permutation: Int[Array, "*l b k s"]
    centroids: Float[Array, "*l b k c h"]
    key_valid: Bool[Array, "*l b s"]
    made: Bool[Array, "*l b"]


def init_state(
    config: AttentionConfig | str,
    batch: int,
    kv_length: int,
    kv_heads: int,
    head_dim: int,
    layers: int | None = None,
) -> AttentionState:
    """A state without an order; its structure does not change afterwards.

    Args:
      config: the configuration of the calls, or a preset's name.
      batch, kv_length, kv_heads, head_dim: B, S, K and H of the calls' keys.
      layers: adds a leading axis of that size, for `attention_step(layer=...)`.

    Raises:
      ValueError: a size that is not an integer >= 1, by name.
    """
    config = resolve_config(config)
    sizes = {"batch": batch, "kv_length": kv_length, "kv_heads": kv_heads, "head_dim": head_dim}
    if layers is not None:
        sizes["layers"] = layers
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
    lead = () if layers is None else (layers,)
    length = kv_length if config.clustered else 0
    clusters = (config.clusters or default_clusters(kv_length)) if config.clustered else 0
    order = jnp.arange(length, dtype=jnp.int32)
    return AttentionState(
        jnp.tile(order, (*lead, batch, kv_heads, 1)),
        jnp.zeros((*lead, batch, kv_heads, clusters, head_dim), jnp.float32),
        jnp.zeros((*lead, batch, length), bool),
        jnp.zeros((*lead, batch), bool),
    )


def reset(state: AttentionState) -> AttentionState:
    """The state without its order: the next call in the window clusters from scratch.

    For a change of the model under the same latents, such as Wan2.2's switch of experts, and after
    a clustering of values that are nothing like those to come (all equal, another scale, not
    finite): a refresh starts from the last centroids, and what fell into one cluster stays there.

    Raises:
      TypeError: `state` is no AttentionState.
    """
    if not isinstance(state, AttentionState):
        raise TypeError(f"state must be an AttentionState, got {type(state).__name__}")
    return state._replace(made=jnp.zeros_like(state.made))


def check_state(state, inputs: Inputs, config: AttentionConfig, layered: bool) -> None:
    if not isinstance(state, AttentionState):
        raise TypeError(f"state must be an AttentionState, got {type(state).__name__}")
    batch, length, heads, size = inputs.key.shape
    made = jax.eval_shape(
        lambda: init_state(config, batch, length, heads, size, layers=1 if layered else None)
    )
    for name, got, want in zip(AttentionState._fields, state, made, strict=True):
        shape = got.shape[1:] if layered and got.ndim else got.shape
        expected = want.shape[1:] if layered else want.shape
        if shape != expected or got.ndim != want.ndim or got.dtype != want.dtype:
            lead = "layers, " if layered else ""
            made_by = "init_state(layers=...)" if layered else "init_state without layers"
            raise ValueError(
                f"state.{name} must be {want.dtype} [{lead}{', '.join(map(str, expected))}] "
                f"for these keys and this configuration, got {got.dtype} {list(got.shape)}; make "
                f"it with {made_by}{'' if layered else ', or pass layer'}"
            )


def _check_index(name: str, index, size: int) -> None:
    if jnp.ndim(index) or not jnp.issubdtype(jnp.result_type(index), jnp.integer):
        raise TypeError(f"{name} must be an integer scalar, got {index!r}")
    known = concrete(index)
    if known is not None and not 0 <= known < size:
        raise ValueError(f"{name} must be in [0, {size - 1}], got {known}")


def _key_valid(inputs: Inputs) -> Bool[Array, "b s"]:
    if inputs.validity.key is not None:
        return inputs.validity.key
    return jnp.ones(inputs.key.shape[:2], bool)


def _same_keys(state: AttentionState, valid: Bool[Array, "b s"]) -> Bool[Array, ""]:
    return jnp.all(state.made) & jnp.all(state.key_valid == valid)


def _like(state: AttentionState, new: AttentionState, inputs: Inputs) -> AttentionState:
    """A new state, varying over the manual mesh axes that any new state here can vary over."""
    valid = _key_valid(inputs)
    arrays = (new.permutation, new.centroids)
    arrays = vary_together(*arrays, along=(inputs.value, valid, state))
    flags = vary_together(new.key_valid, new.made, along=(valid, state.key_valid, state.made))
    return AttentionState(*arrays, *flags)


def order_from_state(
    state: AttentionState, inputs: Inputs, config: AttentionConfig, implementation: str
) -> Int[Array, "b k s"] | None:
    """The state's order if it was made for the same valid keys, else one made here."""
    check_state(state, inputs, config, layered=False)
    if not config.clustered:
        return None
    return _order(state, inputs, config, implementation)


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def _order(
    state: AttentionState, inputs: Inputs, config: AttentionConfig, implementation: str
) -> Array:
    same = _same_keys(state, _key_valid(inputs))

    def vary(order: Array) -> Array:
        return vary_together(order, along=(inputs.value, inputs.validity.key, state))[0]

    return lax.cond(
        same,
        lambda: vary(state.permutation),
        lambda: vary(key_order(inputs, config, implementation)[0]),
    )


def _in_window(
    state: AttentionState,
    inputs: Inputs,
    config: AttentionConfig,
    implementation: str,
    refresh: Bool[Array, ""],
    same: Bool[Array, ""],
) -> AttentionState:
    """The state with an order for these keys: a new one to refresh it or for other keys.

    One scalar decides for the whole batch.
    """
    valid = _key_valid(inputs)

    def cluster() -> AttentionState:
        order, centroids = key_order_warm(inputs, config, implementation, state, same)
        made = AttentionState(order, centroids, valid, jnp.ones_like(state.made))
        return _like(state, made, inputs)

    return lax.cond(refresh | ~same, cluster, lambda: _like(state, state, inputs))


def _after_window(state: AttentionState, inputs: Inputs, same: Bool[Array, ""]) -> AttentionState:
    """The state with the order of the sequence if its own was made for other keys."""
    valid = _key_valid(inputs)
    sequence = jnp.arange(valid.shape[1], dtype=jnp.int32)[None]
    if inputs.validity.key is not None:
        sequence = sequence_order(valid)
    order = jnp.where(same, state.permutation, sequence[:, None])
    # Not `made`: there are no centroids that a later clustering could start from.
    new = AttentionState(order, state.centroids, valid, state.made & same)
    return _like(state, new, inputs)


def key_order_warm(
    inputs: Inputs,
    config: AttentionConfig,
    implementation: str,
    state: AttentionState,
    warm: Bool[Array, ""],
) -> tuple[Array, Array]:
    """Cluster from the state's centroids if there are any for these keys, else from scratch."""
    return lax.cond(
        warm,
        lambda: key_order(inputs, config, implementation, state.centroids),
        lambda: key_order(inputs, config, implementation),
    )


def attention_step(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    value: Float[Array, "*b s k h"],
    state: AttentionState,
    bias: None = None,
    mask: Array | None = None,
    *,
    step: Int[Array, ""] | int,
    schedule: DenoisingSchedule,
    layer: Int[Array, ""] | int | None = None,
    config: AttentionConfig | str = "int8",
    scale: Float[Array, ""] | float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " b"] | Sequence[int] | None = None,
    key_value_seq_lengths: Int[Array, " b"] | Sequence[int] | None = None,
    local_window_size: None = None,
    implementation: str | None = None,
    return_residual: bool = False,
):
    """One attention call of one denoising step: `dot_product_attention` plus its state.

    Within the schedule's window the values are smoothed, in an order that is made anew at the
    refresh steps and whenever the valid keys are others than those it was made for. After the
    window the last order is used without means; a first call there, or one with other keys, runs
    in sequence order. Whether to cluster is one decision for the whole batch: where one row's valid
    keys are others than before, all rows get a new order. Apart from that rows are independent.
    High-precision steps run as `"bf16"` and leave the state alone.

    Args:
      state: from `init_state`, with a leading layer axis if `layer` is given.
      step: index of the denoising step, 0 first; may be traced, one compilation serves all.
      schedule: what each step does.
      layer: index into the state's layer axis; may be traced.
      Others as in `dot_product_attention`.

    Returns:
      `(out, state)`; with `return_residual`, `((out, lse), state)`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `dot_product_attention`, and for a state that
        does not fit the keys or the configuration.
    """
    refuse_unsupported(bias=bias, is_causal=is_causal, local_window_size=local_window_size)
    if not isinstance(schedule, DenoisingSchedule):
        raise TypeError(f"schedule must be a DenoisingSchedule, got {type(schedule).__name__}")
    _check_index("step", step, schedule.num_steps)
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
    check_state(state, inputs, config, layered=layer is not None)
    if layer is not None:
        _check_index("layer", layer, state.made.shape[0])
    step = jnp.asarray(step)
    one = (
        state
        if layer is None
        else jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, 0, keepdims=False), state)
    )
    (out, lse), one = _step(inputs, one, step, schedule, config, implementation, return_residual)
    if layer is not None:
        one = jax.tree.map(
            lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, layer, 0), state, one
        )
    out = out.reshape(query.shape)
    result = (out, lse.reshape(query.shape[:-1])) if lse is not None else out
    return result, one


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _step(inputs, state, step, schedule, config, implementation, residual):
    """Attention and state of one layer, the precision and the window chosen by the step."""

    def choose(numerics: AttentionConfig, name: str | None) -> str:
        return select_implementation(_request(inputs, numerics, residual), name)

    def run(numerics: AttentionConfig, name: str | None, smooth: bool, order: Array | None):
        chosen = choose(numerics, name)
        return attend(Static(numerics, chosen, smooth, residual), inputs, order)

    def low_bit():
        if not config.clustered:
            return run(config, implementation, False, None), _like(state, state, inputs)
        same = _same_keys(state, _key_valid(inputs))
        chosen = choose(config, implementation)

        def window():
            refresh = schedule.refreshes(step)
            new = _in_window(state, inputs, config, chosen, refresh, same)
            return run(config, implementation, True, new.permutation), new

        def after():
            new = _after_window(state, inputs, same)
            return run(config, implementation, False, new.permutation), new

        return lax.cond(schedule.in_window(step), window, after)

    if schedule.high_precision_steps == (0, 0) or not config.quantized:
        return low_bit()
    return lax.cond(
        schedule.high_precision(step),
        lambda: (run(PRESETS["bf16"], None, False, None), _like(state, state, inputs)),
        low_bit,
    )
