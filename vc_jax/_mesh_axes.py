"""How the arrays of a call lie on a mesh: specs for `shard_map`, and bringing arrays there."""

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ._arguments import Inputs, Validity
from ._order import AttentionState

MeshAxes = str | tuple[str, ...] | None
AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class CallAxes:
    """Mesh axes of the batch, the query rows, the keys, and the heads of queries and of keys."""

    batch: MeshAxes = None
    rows: MeshAxes = None
    keys: MeshAxes = None
    heads: MeshAxes = None
    key_heads: MeshAxes = None

    @property
    def of_out(self) -> PartitionSpec:
        """Spec of output and queries; its first three axes are those of the normaliser."""
        return PartitionSpec(self.batch, self.rows, self.heads, None)

    @property
    def of_lse(self) -> PartitionSpec:
        return PartitionSpec(self.batch, self.rows, self.heads)

    @property
    def of_keys(self) -> PartitionSpec:
        return PartitionSpec(self.batch, self.keys, self.key_heads, None)

    @property
    def of_inputs(self) -> tuple[PartitionSpec, ...]:
        """Specs of `arrays_of(inputs)`."""
        return (
            self.of_out,
            self.of_keys,
            self.of_keys,
            PartitionSpec(),
            PartitionSpec(self.batch, self.keys),
            PartitionSpec(self.batch, self.rows),
            PartitionSpec(self.batch),
        )

    @property
    def of_state(self) -> tuple[PartitionSpec, ...]:
        """Specs of an `AttentionState` of one layer."""
        return (
            PartitionSpec(self.batch, self.key_heads, self.keys),
            PartitionSpec(self.batch, self.key_heads, self.keys, None),
            PartitionSpec(self.batch, self.keys),
            PartitionSpec(self.batch),
        )


def arrays_of(inputs: Inputs) -> tuple[Array | None, ...]:
    """The arrays of a call: query, key, value, scale, and its validity's three."""
    validity = inputs.validity
    arrays = (inputs.query, inputs.key, inputs.value, inputs.scale)
    return (*arrays, validity.key, validity.query, validity.poison)


def inputs_of(arrays: tuple[Any, ...], prefix: bool) -> Inputs:
    """The call of `arrays_of`, or of parts of them."""
    query, key, value, scale, key_valid, query_valid, poison = arrays
    return Inputs(query, key, value, scale, Validity(key_valid, query_valid, poison, prefix))


def state_of(arrays: tuple[Any, ...] | None) -> AttentionState | None:
    """The state of these arrays, if there is one."""
    if arrays is None:
        return None
    permutation, centroids, key_valid, made = arrays
    return AttentionState(permutation, centroids, key_valid, made)


def names_of(axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes as a tuple."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def explicit_names(mesh: AnyMesh) -> frozenset[str]:
    """The axes of a mesh that arrays' types know."""
    kinds = zip(mesh.axis_names, mesh.axis_types)
    return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)


def explicit_mesh(*trees: Any) -> AnyMesh | None:
    """The mesh whose explicit axes the arrays' types, or else the context, know; or `None`."""
    for leaf in jax.tree.leaves(trees):
        mesh = jax.typeof(leaf).sharding.mesh
        if explicit_names(mesh):
            return mesh
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if explicit_names(mesh) else None


def spec_of(array: Array) -> PartitionSpec:
    """The explicit mesh axes that each axis of an array is sharded over, one entry an axis."""
    spec = tuple(jax.typeof(array).sharding.spec)
    return PartitionSpec(*spec, *(None,) * (array.ndim - len(spec)))


def reshard(arrays: Any, specs: Any, mesh: AnyMesh) -> Any:
    """The arrays of a pytree by specs, a prefix of it."""
    specs = jax.tree.broadcast(specs, arrays, is_leaf=lambda x: x is None)

    def place(array: Array, spec: PartitionSpec) -> Array:
        return jax.sharding.reshard(array, NamedSharding(mesh, spec))

    return jax.tree.map(place, arrays, specs)


def whole_along(array: Array, axis: int) -> Array:
    """The array, not sharded over explicit mesh axes along one of its axes."""
    mesh = explicit_mesh(array)
    if mesh is None or spec_of(array)[axis] is None:
        return array
    spec = list(spec_of(array))
    spec[axis] = None
    return reshard(array, PartitionSpec(*spec), mesh)
