"""The sharded calls: pad, exchange heads for tokens, attend, exchange back."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from .._arguments import Inputs, bind
from .._attention import Normaliser, Output
from .._config import AttentionConfig
from .._dispatch import attend, request_of, select_implementation
from .._implementations import Result, Static
from .._mesh_axes import (
    AnyMesh,
    MeshAxes,
    arrays_of,
    explicit_names,
    inputs_of,
    names_of,
    reshard,
    state_of,
    whole_along,
)
from .._order import AttentionState
from .._schedule import DenoisingSchedule
from .._state import (
    StepPlan,
    check_index,
    check_step,
    layer_of,
    run_step,
    step_of,
    with_layer,
)
from ._plan import Method, Plan, make_plan
from ._ring import Ring
from ._state import check_state


def sharded_attention(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    value: Float[Array, "*b s k h"],
    bias: None = None,
    mask: Array | None = None,
    *,
    mesh: AnyMesh | None = None,
    batch_axis: MeshAxes = None,
    head_axis: MeshAxes = None,
    sequence_axis: MeshAxes = None,
    method: Method | None = None,
    config: AttentionConfig | str = "int8",
    scale: Float[Array, ""] | float | None = None,
    query_seq_lengths: Int[Array, " b"] | Sequence[int] | None = None,
    key_value_seq_lengths: Int[Array, " b"] | Sequence[int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Output | tuple[Output, Normaliser]:
    """`vc_jax.dot_product_attention` with its batch, heads and tokens spread over a mesh.

    * `"ulysses"`: an all-to-all exchanges tokens for heads, each device attends with whole
      sequences of its heads, another all-to-all brings the output back. The result is that of one
      device. Needs key heads that the axis divides.
    * `"ring"`: every device keeps its queries; keys and values go round, and the parts merge by
      their float32 normalisers. Every device clusters, centres and scales its own keys, so codes
      differ from those of one device, the error does not (`docs/scaling.md`).
    * `"ulysses+ring"`: `sequence_axis=(ring, ulysses)`, two mesh axes or more: a ring over the
      first, heads exchanged over the others.

    Lengths that the axis does not divide are padded inside; nothing of the padding counts.
    Differentiable as the call itself; a ring's backward pass holds all keys on every device.

    Args:
      mesh: `None`: the one of `jax.set_mesh`.
      batch_axis, head_axis, sequence_axis: mesh axes, a name or several; `None`: not sharded. Both
        T and S are sharded over `sequence_axis`.
      method: `None`: `"ulysses"` where the key heads allow, else `"ulysses+ring"` or `"ring"`.
      Others as of `dot_product_attention`.

    Returns:
      As `dot_product_attention`, sharded over these axes.

    Raises:
      ValueError: axes that do not fit, a method that does not go with the heads; with the reason.
      NotImplementedError: a ring in NVFP4, whose normaliser is too coarse to merge pieces by. Also
        as `dot_product_attention`.
    """
    call = bind(
        *(query, key, value, bias, mask),
        config=config,
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
    )
    plan = plan_of(call.inputs, mesh, batch_axis, head_axis, sequence_axis, method)
    check_rows(plan, call.config)
    static = _CallPlan(call.config, implementation, return_residual or bool(plan.ring), plan)
    (out, lse), _ = _sharded(plan, _run_call, static, call.inputs, None, None)
    out = out.reshape(query.shape)
    return (out, lse.reshape(query.shape[:-1])) if return_residual else out


def sharded_attention_step(
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
    mesh: AnyMesh | None = None,
    batch_axis: MeshAxes = None,
    head_axis: MeshAxes = None,
    sequence_axis: MeshAxes = None,
    method: Method | None = None,
    config: AttentionConfig | str = "int8",
    scale: Float[Array, ""] | float | None = None,
    query_seq_lengths: Int[Array, " b"] | Sequence[int] | None = None,
    key_value_seq_lengths: Int[Array, " b"] | Sequence[int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> tuple[Output | tuple[Output, Normaliser], AttentionState]:
    """`vc_jax.attention_step`, spread over a mesh as in `sharded_attention`.

    Args:
      state: from `vc_jax.sharding.init_state` with the same axes and method. Whether to cluster
        is one decision for each part of the batch, and for each piece of a ring.
      Others as of `attention_step` and `sharded_attention`.

    Returns:
      `(out, state)`; with `return_residual`, `((out, lse), state)`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `attention_step` and `sharded_attention`.
    """
    check_step(step, schedule)
    call = bind(
        *(query, key, value, bias, mask),
        config=config,
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
    )
    plan = plan_of(call.inputs, mesh, batch_axis, head_axis, sequence_axis, method)
    check_rows(plan, call.config)
    check_state(state, plan, call, layer is not None)
    if layer is not None:
        check_index("layer", layer, state.made.shape[0])
    residual = return_residual or bool(plan.ring)
    static = StepPlan(schedule, call.config, implementation, residual, attend_of(plan))
    one = layer_of(state, layer)
    step = step_of(jnp.asarray(step), layer, state)
    (out, lse), one = _sharded(plan, run_step, static, call.inputs, one, step)
    new = with_layer(state, layer, one)
    out = out.reshape(query.shape)
    return ((out, lse.reshape(query.shape[:-1])) if return_residual else out), new


def plan_of(
    inputs: Inputs,
    mesh: AnyMesh | None,
    batch_axis: MeshAxes,
    head_axis: MeshAxes,
    sequence_axis: MeshAxes,
    method: Method | None,
) -> Plan:
    """The plan of a checked call; `mesh=None` takes the context's."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if not mesh.axis_names:
        raise ValueError("mesh must be given, or set by jax.set_mesh")
    shapes = inputs.query.shape, inputs.key.shape
    return make_plan(mesh, batch_axis, head_axis, sequence_axis, method, shapes)


def attend_of(plan: Plan) -> Callable[..., Result]:
    """How a device attends to the keys of its heads."""
    return Ring(plan.ring, plan.size(plan.ring)) if plan.ring else attend


def check_rows(plan: Plan, config: AttentionConfig) -> None:
    if plan.ring and config.qk == "nvfp4":
        raise NotImplementedError(
            f"method {plan.method!r} is not supported in NVFP4: a ring merges pieces by their "
            "normalisers, which are too coarse in 4 bits; 'ulysses' needs none"
        )


@dataclasses.dataclass(frozen=True)
class _CallPlan:
    """What all devices share in a call without a state."""

    config: AttentionConfig
    implementation: str | None
    residual: bool
    plan: Plan


def _run_call(static: _CallPlan, inputs: Inputs, state: None, step: None) -> tuple[Result, None]:
    """One device's part of a call, with the keys of its heads."""
    del step
    config = static.config
    request = request_of(inputs, config, static.residual)
    chosen = select_implementation(request, static.implementation)
    how = Static(config, chosen, config.smooth_values, static.residual)
    return attend_of(static.plan)(how, inputs, None), state


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _sharded(plan: Plan, function, static, inputs: Inputs, state, step):
    """`function(static, inputs, state, step)` on each device, tokens exchanged for heads."""
    rows, length = inputs.query.shape[1], inputs.key.shape[1]
    prefix = inputs.validity.prefix

    def local(arrays, state, step):
        whole = [_heads_for_tokens(x, plan) for x in arrays[:3]]
        if not plan.ring:
            whole = [x[:, :size] for x, size in zip(whole, (rows, length, length))]
        inputs = inputs_of((*whole, *arrays[3:]), prefix)
        result, state = function(static, inputs, state_of(state), step)
        result = jax.tree.map(lambda x: _tokens_for_heads(x, plan), result)
        return result, None if state is None else _one_decision(state, plan)

    arrays = _padded(arrays_of(inputs), plan)
    outside, inside = plan.outside, plan.inside
    of_inputs = (*outside.of_inputs[:4], *inside.of_inputs[4:])
    of_state = None if state is None else inside.of_state
    operands = (arrays, None if state is None else tuple(state), step)
    in_specs = (of_inputs, of_state, PartitionSpec())
    mesh = plan.mesh
    if explicit_names(mesh):
        operands = reshard(operands, _of_explicit_axes(in_specs, mesh), mesh)
    kinds = zip(mesh.axis_names, mesh.axis_types)
    result, new_state = jax.shard_map(
        local,
        mesh=mesh,
        axis_names={name for name, kind in kinds if kind != jax.sharding.AxisType.Manual},
        in_specs=in_specs,
        out_specs=((outside.of_out, outside.of_lse), of_state),
    )(*operands)
    if result[0].shape[1] != rows:
        result = jax.tree.map(lambda x: whole_along(x, 1)[:, :rows], result)
    return result, state_of(new_state)


def _padded(arrays: tuple[Any, ...], plan: Plan) -> tuple[Any, ...]:
    """Tokens in a number that the devices divide; in a ring validity says which are none."""
    query, key, value, scale, key_valid, query_valid, poison = arrays
    parts = plan.size(plan.tokens)
    rows, length = -query.shape[1] % parts, -key.shape[1] % parts
    if plan.ring:
        if length and key_valid is None:
            key_valid = jnp.ones(key.shape[:2], bool)
        key_valid, query_valid = _more(key_valid, length), _more(query_valid, rows)
    tokens = _more(query, rows), _more(key, length), _more(value, length)
    return (*tokens, scale, key_valid, query_valid, poison)


def _more(array: Array | None, count: int) -> Array | None:
    """More tokens of zeros along the second axis."""
    if array is None or not count:
        return array
    return jnp.pad(array, [(0, 0), (0, count)] + [(0, 0)] * (array.ndim - 2))


def _heads_for_tokens(tokens: Array, plan: Plan) -> Array:
    """A device's tokens of all heads -> all tokens (of its piece of the ring) of its heads."""
    if not plan.ulysses:
        return tokens
    return lax.all_to_all(tokens, plan.ulysses, 2, 1, tiled=True)


def _tokens_for_heads(rows: Array, plan: Plan) -> Array:
    """The way back, for [B, T, N, H] and [B, T, N]."""
    if not plan.ulysses:
        return rows
    padded = _more(rows, -rows.shape[1] % plan.size(plan.ulysses))
    return lax.all_to_all(padded, plan.ulysses, 1, 2, tiled=True)


def _one_decision(state: AttentionState, plan: Plan) -> tuple[Array, ...]:
    """The state; it counts as made if each piece of the ring is."""
    if not plan.ring:
        return tuple(state)
    made = lax.pmin(state.made.astype(jnp.int32), plan.ring) > 0
    return tuple(state._replace(made=made))


def _of_explicit_axes(specs: Any, mesh: AnyMesh) -> Any:
    """Specs without the mesh axes that arrays' types do not know."""
    known = explicit_names(mesh)

    def of(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*(tuple(n for n in names_of(axes) if n in known) for axes in spec))

    return jax.tree.map(of, specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
