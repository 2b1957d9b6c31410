"""`attention_step`: attention that keeps the order of the keys over denoising steps."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ._arguments import Inputs, bind
from ._attention import Normaliser, Output
from ._config import PRESETS, AttentionConfig, shown
from ._dispatch import attend, request_of, select_implementation
from ._explicit_axes import spread
from ._implementations import Result, Static
from ._order import AttentionState, after_window, check_state, refreshed, same_keys, unchanged
from ._schedule import DenoisingSchedule
from ._tracing import concrete, own_promotion


def check_index(name: str, index, size: int) -> None:
    number = isinstance(index, int | np.integer | np.ndarray | jax.Array)
    if not number or jnp.ndim(index) or not jnp.issubdtype(jnp.result_type(index), jnp.integer):
        raise TypeError(f"{name} must be an integer scalar, got {shown(index)}")
    known = concrete(index)
    if known is not None and not 0 <= known < size:
        raise ValueError(f"{name} must be in [0, {size - 1}], got {known}")


def check_step(step, schedule) -> None:
    """Raise unless a step, traced or not, is one of the schedule's."""
    if not isinstance(schedule, DenoisingSchedule):
        raise TypeError(f"schedule must be a DenoisingSchedule, got {type(schedule).__name__}")
    check_index("step", step, schedule.num_steps)


@overload
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
    return_residual: Literal[False] = False,
) -> tuple[Output, AttentionState]: ...


@overload
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
    return_residual: Literal[True],
) -> tuple[tuple[Output, Normaliser], AttentionState]: ...


@overload
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
) -> tuple[Output | tuple[Output, Normaliser], AttentionState]: ...


@own_promotion
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
) -> tuple[Output | tuple[Output, Normaliser], AttentionState]:
    """One attention call of one denoising step: `dot_product_attention` plus its state.

    Within the schedule's window the values are smoothed, in an order that is made anew at the
    refresh steps and whenever the valid keys are others than those it was made for. After the
    window the last order is used without means; a first call there, or one with other keys, runs
    in sequence order. Whether to cluster is one decision for the whole batch: where one row's valid
    keys are others than before, all rows get a new order. Apart from that rows are independent.
    High-precision steps run as `"bf16"` and leave the state alone.

    Args:
      state: from `init_state`, with a leading layer axis if `layer` is given.
      step: index of the denoising step, 0 first; may be traced, one compilation serves all. A
        traced one that is not in the schedule gives NaN.
      schedule: what each step does.
      layer: index into the state's layer axis; may be traced. A traced one that the state does not
        have gives NaN.
      Others as in `dot_product_attention`.

    Returns:
      `(out, state)`; with `return_residual`, `((out, lse), state)`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `dot_product_attention`, and for a state that
        does not fit the keys or the configuration.
    """
    check_step(step, schedule)
    call = bind(
        query,
        key,
        value,
        bias,
        mask,
        config=config,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
    )
    inputs, config = call.inputs, call.config
    check_state(state, inputs, config, layered=layer is not None)
    if layer is not None:
        check_index("layer", layer, state.made.shape[0])
    plan = StepPlan(schedule, config, implementation, return_residual)
    one = layer_of(state, layer)
    step = step_of(jnp.asarray(step), layer, state)
    (out, lse), one = spread(run_step, plan, config, inputs, one, step)
    new = with_layer(state, layer, one)
    out = out.reshape(query.shape)
    result = (out, lse.reshape(query.shape[:-1])) if lse is not None else out
    return result, new


def step_of(
    step: Int[Array, ""], layer: Array | int | None, state: AttentionState
) -> Int[Array, ""]:
    """The step; -1, which gives NaN, where a traced layer is not one of the state's."""
    if layer is None:
        return step
    there = (layer >= 0) & (layer < state.made.shape[0])
    return jnp.where(there, step, -1)


def layer_of(state: AttentionState, layer: Array | int | None) -> AttentionState:
    """One layer of a stacked state, or the state itself."""
    if layer is None:
        return state
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, 0, keepdims=False), state)


def with_layer(
    state: AttentionState, layer: Array | int | None, one: AttentionState
) -> AttentionState:
    """A stacked state with one layer replaced, or the new state itself."""
    if layer is None:
        return one
    return jax.tree.map(
        lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, layer, 0), state, one
    )


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What all steps share.

    Attributes:
      attend: `(static, inputs, order) -> (out, lse)`; hashable.
    """

    schedule: DenoisingSchedule
    config: AttentionConfig
    implementation: str | None
    residual: bool
    attend: Callable[..., Result] = attend


@functools.partial(jax.jit, static_argnums=0)
def run_step(
    plan: StepPlan, inputs: Inputs, state: AttentionState, step: Array
) -> tuple[Result, AttentionState]:
    """Attention and state of one layer, the precision and the window chosen by the step."""
    schedule, config, implementation = plan.schedule, plan.config, plan.implementation
    known = (step >= 0) & (step < schedule.num_steps)
    # Every score and with it every output of a step that there is not is NaN.
    inputs = dataclasses.replace(inputs, scale=jnp.where(known, inputs.scale, jnp.nan))

    def choose(numerics: AttentionConfig, name: str | None) -> str:
        return select_implementation(request_of(inputs, numerics, plan.residual), name)

    def run(numerics: AttentionConfig, name: str | None, smooth: bool, order: Array | None):
        chosen = choose(numerics, name)
        return plan.attend(Static(numerics, chosen, smooth, plan.residual), inputs, order)

    def low_bit():
        if not config.clustered:
            return run(config, implementation, False, None), unchanged(state, inputs)
        same = same_keys(state, inputs)
        chosen = choose(config, implementation)

        def after():
            new = after_window(state, inputs, same)
            return run(config, implementation, False, new.permutation), new

        def keep():
            new = unchanged(state, inputs)
            return run(config, implementation, True, new.permutation), new

        def refresh():
            new = refreshed(state, inputs, config, chosen, same)
            return run(config, implementation, True, new.permutation), new

        # One conditional and none within it, but where the step clusters: each costs a GPU more
        # than many kernels of a short call.
        renew = jnp.where(schedule.refreshes(step) | ~same, 2, 1)
        kind = jnp.where(schedule.in_window(step), renew, 0)
        return lax.switch(kind, (after, keep, refresh))

    if schedule.high_precision_steps == (0, 0) or not config.quantized:
        return low_bit()
    return lax.cond(
        schedule.high_precision(step),
        lambda: (run(PRESETS["bf16"], None, False, None), unchanged(state, inputs)),
        low_bit,
    )
