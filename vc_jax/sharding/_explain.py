"""What a sharded call would do: its method and why, what it sends, what runs on each device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._arguments import bind
from .._attention import Explanation, MaybeAbstract
from .._attention import explain as explain_call
from .._config import AttentionConfig
from .._implementations import check_implementation
from .._mesh_axes import AnyMesh, MeshAxes
from ._attention import plan_of
from ._communication import Communication, communication
from ._plan import Method, Plan


@dataclasses.dataclass(frozen=True)
class ShardedExplanation:
    """What `sharded_attention` would do; its `str` says it for people.

    Attributes:
      communication: the method, why it is this one, and what is sent.
      on_device: which implementation runs on each device, and why not the others.
    """

    communication: Communication
    on_device: Explanation

    def __str__(self) -> str:
        return f"{self.communication}\non each device: {self.on_device}"


def explain(
    query: MaybeAbstract,
    key: MaybeAbstract,
    value: MaybeAbstract,
    *,
    mesh: AnyMesh | None = None,
    batch_axis: MeshAxes = None,
    head_axis: MeshAxes = None,
    sequence_axis: MeshAxes = None,
    method: Method | None = None,
    config: AttentionConfig | str = "int8",
    key_value_seq_lengths=None,
    mask=None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> ShardedExplanation:
    """What `sharded_attention` would do with these arguments, and why.

    Arrays may be `jax.ShapeDtypeStruct`s.

    Raises:
      What the call would raise for its arguments.
    """
    check_implementation(implementation)
    axes: dict[str, Any] = {
        "mesh": mesh,
        "batch_axis": batch_axis,
        "head_axis": head_axis,
        "sequence_axis": sequence_axis,
        "method": method,
    }
    valid = {"key_value_seq_lengths": key_value_seq_lengths, "mask": mask}
    sent = communication(
        *(query, key, value), config=config, return_residual=return_residual, **axes, **valid
    )
    call = bind(query, key, value, None, mask, config=config)
    plan = plan_of(call.inputs, *axes.values())
    inputs = call.inputs
    own_query, own_key = (_on_device(plan, x) for x in (inputs.query, inputs.key))
    batch, length = own_key.shape[:2]
    local: dict[str, Any] = {}
    if mask is not None and not inputs.validity.prefix:
        local["mask"] = jax.ShapeDtypeStruct((batch, 1, 1, length), jnp.bool_)
    elif mask is not None or key_value_seq_lengths is not None:
        local["key_value_seq_lengths"] = jax.ShapeDtypeStruct((batch,), jnp.int32)
    on_device = explain_call(
        *(own_query, own_key, own_key),
        config=config,
        implementation=implementation,
        return_residual=return_residual or bool(plan.ring),
        **local,
    )
    return ShardedExplanation(sent, on_device)


def _on_device(plan: Plan, tokens: MaybeAbstract) -> jax.ShapeDtypeStruct:
    """What of BTNH a device has while the kernel runs."""
    batch, length, heads, size = tokens.shape
    pieces = plan.size(plan.ring)
    if plan.ring:
        parts = plan.size(plan.tokens)
        length = -(-length // parts) * parts
    shape = (
        *(batch // plan.size(plan.batch), length // pieces),
        *(heads // plan.size(plan.heads + plan.ulysses), size),
    )
    return jax.ShapeDtypeStruct(shape, tokens.dtype)
