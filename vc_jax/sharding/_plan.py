"""Which mesh axes do what in a sharded call, and why: the choice of the method."""

import dataclasses
import math
from typing import Literal, get_args

from jax.sharding import AxisType

from .._mesh_axes import AnyMesh, CallAxes, MeshAxes, names_of

Method = Literal["ulysses", "ring", "ulysses+ring"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call is spread over a mesh.

    Attributes:
      mesh: its axes that are not named below hold copies.
      batch, heads: mesh axes of the batch and of the heads; nothing moves along them.
      ulysses: mesh axes along which heads are exchanged for tokens.
      ring: mesh axes along which keys and values rotate; the tokens' outer ones.
      method: the name of what `ulysses` and `ring` say; `None` where tokens are not sharded.
      reason: why this method.
    """

    mesh: AnyMesh
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    ulysses: tuple[str, ...]
    ring: tuple[str, ...]
    method: Method | None
    reason: str

    def size(self, names: tuple[str, ...]) -> int:
        """Devices along mesh axes."""
        return math.prod(self.mesh.shape[name] for name in names)

    @property
    def tokens(self) -> tuple[str, ...]:
        """Mesh axes of the tokens as a call gets and returns them."""
        return self.ring + self.ulysses

    @property
    def outside(self) -> CallAxes:
        """Axes of the arrays of a call as they come in; of validity what the kernel needs."""
        return CallAxes(self.batch, self.tokens, self.tokens, self.heads, self.heads)

    @property
    def inside(self) -> CallAxes:
        """Axes while the kernel runs: tokens have moved to the heads' side."""
        heads = self.heads + self.ulysses
        return CallAxes(self.batch, self.ring, self.ring, heads, heads)


def make_plan(
    mesh: AnyMesh,
    batch_axis: MeshAxes,
    head_axis: MeshAxes,
    sequence_axis: MeshAxes,
    method: Method | None,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> Plan:
    """The plan of a call with query and key of these shapes, BTNH and BSKH.

    Raises:
      ValueError: axes that are not the mesh's or named twice, a batch or heads that they do not
        divide, an unknown method, or one that does not go with the heads; with the reason.
    """
    batch, heads, tokens = map(names_of, (batch_axis, head_axis, sequence_axis))
    _check_axes(mesh, batch_axis=batch, head_axis=heads, sequence_axis=tokens)
    if method is not None and method not in get_args(Method):
        raise ValueError(f"method must be None or one of {get_args(Method)}, got {method!r}")
    draft = Plan(mesh, batch, heads, (), (), None, "tokens are not sharded")
    query, key = shapes
    _check_divides("batch_axis", draft.size(batch), "the batch", query[0])
    _check_divides("head_axis", draft.size(heads), "the key heads", key[2])
    if not tokens:
        if method is not None:
            raise ValueError(f"method must be None without sequence_axis, got {method!r}")
        return draft
    left = key[2] // draft.size(heads)
    method, reason = _choose(draft, tokens, left, method)
    if method == "ring":
        return dataclasses.replace(draft, ring=tokens, method=method, reason=reason)
    if method == "ulysses":
        return dataclasses.replace(draft, ulysses=tokens, method=method, reason=reason)
    return dataclasses.replace(
        draft, ring=tokens[:1], ulysses=tokens[1:], method=method, reason=reason
    )


def _choose(
    draft: Plan, tokens: tuple[str, ...], heads: int, method: Method | None
) -> tuple[Method, str]:
    """The method for tokens over these axes and this many key heads a device."""
    whole, inner = draft.size(tokens), draft.size(tokens[1:])
    if method == "ring":
        return "ring", "asked for"
    if method in (None, "ulysses") and heads % whole == 0:
        return "ulysses", f"{whole} devices divide {heads} key heads: it moves fewest bytes"
    if method == "ulysses":
        raise ValueError(
            f"method 'ulysses' needs key heads that the sequence axis divides: {heads} (of each "
            f"part of head_axis) over {whole} devices; use 'ring', or 'ulysses+ring' with two mesh "
            "axes, the second of which divides them"
        )
    mixed = len(tokens) > 1 and heads % inner == 0
    if mixed:
        return "ulysses+ring", f"{whole} devices do not divide {heads} key heads, {inner} do"
    if method == "ulysses+ring":
        raise ValueError(
            "method 'ulysses+ring' needs a sequence_axis of two mesh axes or more, (ring, "
            f"ulysses...), the latter dividing the {heads} key heads, got {tokens}"
        )
    return "ring", f"{whole} devices do not divide {heads} key heads"


def _check_axes(mesh: AnyMesh, **axes: tuple[str, ...]) -> None:
    seen: dict[str, str] = {}
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    for argument, names in axes.items():
        for name in names:
            if name not in kinds:
                raise ValueError(f"{argument} must be of {mesh.axis_names}, got {name!r}")
            if kinds[name] == AxisType.Manual:
                raise ValueError(f"{argument}: a shard_map around the call has {name!r} already")
            if name in seen:
                raise ValueError(f"{argument} and {seen[name]} cannot both have {name!r}")
            seen[name] = argument


def _check_divides(argument: str, devices: int, what: str, length: int) -> None:
    if length % devices:
        raise ValueError(f"{argument} must divide {what}, got {length} over {devices} devices")
