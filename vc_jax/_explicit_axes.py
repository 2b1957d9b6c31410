"""Calls on arrays that live on explicit axes of a mesh (the default of `jax.make_mesh`).

An array's type says there how it is sharded, and every operation has to say how its result is. A
call goes through `shard_map` instead: each device computes its own part of the batch, the heads
and the query rows, which need nothing of each other. Keys and values are brought to where their
queries are, along the other axes too; nothing moves where only batch and heads are sharded.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ._arguments import Inputs, Validity
from ._config import AttentionConfig

MeshAxes = str | tuple[str, ...] | None


def explicit_mesh(*trees: Any) -> Mesh | AbstractMesh | None:
    """The mesh whose explicit axes the arrays' types, or else the context, know; or `None`."""
    for leaf in jax.tree.leaves(trees):
        mesh = jax.typeof(leaf).sharding.mesh
        if _explicit_names(mesh):
            return mesh
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if _explicit_names(mesh) else None


def _explicit_names(mesh: Mesh | AbstractMesh) -> frozenset[str]:
    kinds = zip(mesh.axis_names, mesh.axis_types)
    return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)


def axes_of(array: Array) -> tuple[MeshAxes, ...]:
    """The explicit mesh axes that each axis of an array is sharded over."""
    spec = tuple(jax.typeof(array).sharding.spec)
    return spec + (None,) * (array.ndim - len(spec))


def whole_along(array: Array, axis: int) -> Array:
    """The array, not sharded along one of its axes."""
    mesh, axes = explicit_mesh(array), list(axes_of(array))
    if mesh is None or axes[axis] is None:
        return array
    axes[axis] = None
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*axes)))


@dataclasses.dataclass(frozen=True)
class _Axes:
    """Mesh axes over which a call runs: of the batch, the query rows and the query heads."""

    batch: MeshAxes
    rows: MeshAxes
    heads: MeshAxes

    def of_inputs(self, inputs: Inputs, copies: int) -> Inputs:
        """Specs of the inputs; key heads that are copied are whole on every device."""
        of_keys = PartitionSpec(self.batch, None, None if copies > 1 else self.heads, None)
        validity = Validity(
            _where(inputs.validity.key, PartitionSpec(self.batch, None)),
            _where(inputs.validity.query, PartitionSpec(self.batch, self.rows)),
            _where(inputs.validity.poison, PartitionSpec(self.batch)),
            inputs.validity.prefix,
        )
        of_query = PartitionSpec(self.batch, self.rows, self.heads, None)
        return Inputs(of_query, of_keys, of_keys, PartitionSpec(), validity)

    def of_state(self, state: Any, copies: int) -> Any:
        """Specs of an `AttentionState` with arrays [B, K, S], [B, K, k, H], [B, S] and [B]."""
        if state is None:
            return None
        heads = None if copies > 1 else self.heads
        return type(state)(
            PartitionSpec(self.batch, heads, None),
            PartitionSpec(self.batch, heads, None, None),
            PartitionSpec(self.batch, None),
            PartitionSpec(self.batch),
        )


def _where(array: Array | None, spec: PartitionSpec) -> PartitionSpec | None:
    return None if array is None else spec


def spread(
    function: Callable[..., Any],
    static: Hashable,
    config: AttentionConfig,
    inputs: Inputs,
    state: Any = None,
    step: Array | None = None,
) -> Any:
    """`function(static, inputs, state, step)`, each device on its part where axes are explicit.

    The output is sharded as the query, the normaliser as its first three axes, the state as the
    one that came in.

    Args:
      function: returns `((out, lse), state)`; a jitted function of the module's level.
      static: hashable.
      config: the numerics; they say whether query rows may be parted.
    """
    mesh = explicit_mesh(inputs, state, step)
    if mesh is None:
        return function(static, inputs, state, step)
    return _spread(function, static, config, mesh, inputs, state, step)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _spread(function, static, config, mesh, inputs: Inputs, state, step):
    own = axes_of(inputs.query)
    # The queries of a head share a scale in NVFP4: every device computes all of its rows.
    axes = _Axes(own[0], None if config.qk == "nvfp4" else own[1], own[2])
    names = () if axes.heads is None else axes.heads
    names = (names,) if isinstance(names, str) else names
    parts = math.prod(mesh.shape[name] for name in names)
    copies = parts // math.gcd(parts, inputs.key.shape[2])

    def local(inputs: Inputs, state, step):
        if copies > 1:
            inputs, state = _own_key_heads(inputs, state, names, parts, copies)
        return function(static, inputs, state, step)

    of_rows = PartitionSpec(axes.batch, axes.rows, axes.heads)
    operands = (inputs, state, step)
    in_specs = (axes.of_inputs(inputs, copies), axes.of_state(state, copies), PartitionSpec())
    (out, lse), new_state = jax.shard_map(
        local,
        mesh=mesh,
        axis_names=_explicit_names(mesh),
        in_specs=in_specs,
        out_specs=((of_rows, of_rows), axes.of_state(state, 1)),
    )(*_reshard(operands, in_specs, mesh))
    if copies > 1 and new_state is not None:
        new_state = _without_copies(new_state, copies)
    state_axes = jax.tree.map(lambda x: PartitionSpec(*axes_of(x)), state)
    of_results = ((PartitionSpec(*own), PartitionSpec(*own[:3])), state_axes)
    return _reshard(((out, lse), new_state), of_results, mesh)


def _reshard(arrays: Any, specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The arrays of a pytree by specs, a prefix of it."""
    specs = jax.tree.broadcast(specs, arrays, is_leaf=lambda x: x is None)
    place = lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec))  # noqa: E731
    return jax.tree.map(place, arrays, specs)


def _own_key_heads(
    inputs: Inputs, state: Any, names: tuple[str, ...], parts: int, copies: int
) -> tuple[Inputs, Any]:
    """On a device that has all key heads: those that its query heads read.

    Every head is taken `copies` times, so that each device has as many.
    """
    size = inputs.key.shape[2] * copies // parts
    head = (lax.axis_index(names) * size + jnp.arange(size)) // copies

    def own(array: Array, axis: int) -> Array:
        return jnp.take(array, head, axis)

    key, value = own(inputs.key, 2), own(inputs.value, 2)
    inputs = dataclasses.replace(inputs, key=key, value=value)
    if state is not None:
        permutation, centroids = own(state.permutation, 1), own(state.centroids, 1)
        state = state._replace(permutation=permutation, centroids=centroids)
    return inputs, state


def _without_copies(state: Any, copies: int) -> Any:
    """A state of copied heads, each of them once."""
    permutation, centroids = (whole_along(x, 1) for x in (state.permutation, state.centroids))
    return state._replace(permutation=permutation[:, ::copies], centroids=centroids[:, ::copies])
