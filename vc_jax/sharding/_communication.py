"""What a sharded call sends: bytes of each tensor in each phase."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp

from .._arguments import Inputs, bind
from .._attention import MaybeAbstract
from .._config import AttentionConfig
from .._mesh_axes import AnyMesh, MeshAxes
from ._attention import check_rows, plan_of
from ._plan import Method, Plan


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective of a call.

    Attributes:
      phase: `"before"` the kernel, `"ring"` beside it, `"after"` it.
      tensor: what is sent.
      collective: `"all-to-all"` or `"collective-permute"`.
      payload: bytes that each device puts into the collective, each time.
      times: how often it runs.
      devices: that take part in one.
    """

    phase: Literal["before", "ring", "after"]
    tensor: str
    collective: Literal["all-to-all", "collective-permute"]
    payload: int
    times: int
    devices: int

    @property
    def sent(self) -> float:
        """Bytes that leave a device in a call; an all-to-all keeps its own part."""
        kept = self.payload / self.devices if self.collective == "all-to-all" else 0.0
        return self.times * (self.payload - kept)


@dataclasses.dataclass(frozen=True)
class Communication:
    """What a sharded call sends, forward.

    Attributes:
      method: the one that runs; `None` where tokens are not sharded.
      reason: why this one.
      transfers: every collective.
    """

    method: Method | None
    reason: str
    transfers: tuple[Transfer, ...]

    @property
    def sent(self) -> float:
        """Bytes that leave a device in a call."""
        return sum(transfer.sent for transfer in self.transfers)

    def __str__(self) -> str:
        lines = [
            f"{self.method or 'no exchange'}: {self.reason}; {self.sent / 1e6:.3f} MB a device"
        ]
        lines += [
            f"  {t.phase} {t.tensor}: {t.times} x {t.collective} of {t.payload / 1e6:.3f} MB "
            f"among {t.devices}"
            for t in self.transfers
        ]
        return "\n".join(lines)


def communication(
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
    return_residual: bool = False,
) -> Communication:
    """What `sharded_attention` with these arguments sends, forward, and by which method.

    Arrays may be `jax.ShapeDtypeStruct`s. Arrays that do not lie as the axes say are brought there
    first, which is not counted.

    Raises:
      What the call would raise for its arguments.
    """
    call = bind(
        *(query, key, value, None, mask),
        config=config,
        key_value_seq_lengths=key_value_seq_lengths,
    )
    inputs = call.inputs
    plan = plan_of(inputs, mesh, batch_axis, head_axis, sequence_axis, method)
    check_rows(plan, call.config)
    transfers = _exchanges(plan, inputs, return_residual)
    if plan.ring:
        ordered = call.config.clustered or (
            call.config.quantized and not inputs.validity.prefix and inputs.validity.key is not None
        )
        parts = plan.size(plan.tokens)
        padded = bool(key.shape[-3] % parts)
        valid = padded or inputs.validity.key is not None
        transfers += _rotations(plan, inputs.key, ordered, valid)
    return Communication(plan.method, plan.reason, tuple(transfers))


def _on_device(plan: Plan, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A device's part of BTNH, before the exchange."""
    batch, tokens, heads, size = shape
    parts = plan.size(plan.tokens)
    return batch // plan.size(plan.batch), -(-tokens // parts), heads // plan.size(plan.heads), size


def _exchanges(plan: Plan, inputs: Inputs, residual: bool) -> list[Transfer]:
    """Heads for tokens and back."""
    if not plan.ulysses:
        return []
    devices = plan.size(plan.ulysses)

    def exchange(phase, tensor: str, shape: tuple[int, ...], dtype) -> Transfer:
        payload = math.prod(shape) * jnp.dtype(dtype).itemsize
        return Transfer(phase, tensor, "all-to-all", payload, 1, devices)

    query, keys = (_on_device(plan, x.shape) for x in (inputs.query, inputs.key))
    found = [
        exchange("before", "query", query, inputs.query.dtype),
        exchange("before", "key", keys, inputs.key.dtype),
        exchange("before", "value", keys, inputs.value.dtype),
        exchange("after", "output", query, inputs.query.dtype),
    ]
    if residual:
        found.append(exchange("after", "normaliser", query[:3], jnp.float32))
    return found


def _rotations(plan: Plan, key: MaybeAbstract, ordered: bool, valid: bool) -> list[Transfer]:
    """A piece of keys, once to each other device of the ring."""
    batch, tokens, heads, size = _on_device(plan, key.shape)
    exchanged = plan.size(plan.ulysses)
    tokens, heads = tokens * exchanged, heads // exchanged
    devices = plan.size(plan.ring)

    def rotation(tensor: str, payload: int) -> Transfer:
        return Transfer("ring", tensor, "collective-permute", payload, devices - 1, devices)

    of_tokens = batch * tokens * heads * size * jnp.dtype(key.dtype).itemsize
    found = [rotation("key", of_tokens), rotation("value", of_tokens)]
    if ordered:
        found.append(rotation("order", 4 * batch * heads * tokens))
    if valid:
        found.append(rotation("validity", batch * tokens))
    return found
