"""States of sharded steps: where each device's orders lie."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._arguments import Call
from .._config import AttentionConfig
from .._mesh_axes import MeshAxes
from .._order import AttentionState
from .._order import init_state as one_device_state
from ._plan import Method, Plan, make_plan


def init_state(
    config: AttentionConfig | str,
    batch: int,
    kv_length: int,
    kv_heads: int,
    head_dim: int,
    layers: int | None = None,
    *,
    mesh: Mesh,
    batch_axis: MeshAxes = None,
    head_axis: MeshAxes = None,
    sequence_axis: MeshAxes = None,
    method: Method | None = None,
) -> AttentionState:
    """`vc_jax.init_state` for `sharded_attention_step`, on the mesh.

    With `"ulysses"` its heads are sharded over `head_axis` and `sequence_axis`, and its arrays are
    those of a state on one device: it can be saved here and restored on another mesh. In a ring of
    r pieces the order and the centroids of each piece stand one after the other along the axis of
    the keys, padded so that the devices divide it.

    Args:
      kv_length: S, without padding.
      mesh, batch_axis, head_axis, sequence_axis, method: as of `sharded_attention`.
      Others as of `vc_jax.init_state`.

    Raises:
      ValueError: as `vc_jax.init_state` and `sharded_attention`.
    """
    key = (batch, kv_length, kv_heads, head_dim)
    plan = make_plan(mesh, batch_axis, head_axis, sequence_axis, method, (key, key))
    lead = () if layers is None else (None,)
    places = tuple(
        NamedSharding(mesh, PartitionSpec(*lead, *spec)) for spec in plan.inside.of_state
    )
    make = functools.partial(_state, config, key, plan, layers)
    return AttentionState(*jax.jit(lambda: tuple(make()), out_shardings=places)())


def _state(
    config: AttentionConfig | str, key: tuple[int, ...], plan: Plan, layers: int | None
) -> AttentionState:
    """The pieces' states along the axis of the keys."""
    batch, length, heads, size = key
    pieces = plan.size(plan.ring)
    if plan.ring:
        parts = plan.size(plan.tokens)
        length = -(-length // parts) * parts // pieces
    one = one_device_state(config, batch, length, heads, size, layers)
    return AttentionState(
        jnp.concatenate([one.permutation] * pieces, -1),
        jnp.concatenate([one.centroids] * pieces, -2),
        jnp.concatenate([one.key_valid] * pieces, -1),
        one.made,
    )


def check_state(state, plan: Plan, call: Call, layered: bool) -> None:
    """Raise unless a state fits a call and its plan."""
    if not isinstance(state, AttentionState):
        raise TypeError(f"state must be an AttentionState, got {type(state).__name__}")
    layers = state.made.shape[0] if layered and state.made.ndim else None
    key = call.inputs.key.shape
    made = jax.eval_shape(functools.partial(_state, call.config, key, plan, layers))
    for name, got, want in zip(AttentionState._fields, state, made, strict=True):
        if got.shape != want.shape or got.dtype != want.dtype:
            raise ValueError(
                f"state.{name} must be {want.dtype} {list(want.shape)} for these keys, axes and "
                f"configuration, got {got.dtype} {list(got.shape)}; make it with "
                "vc_jax.sharding.init_state" + ("" if layered else ", or pass layer")
            )
