"""How a model lies on a mesh: which axes split clips, tokens, heads and weights.

A model that has a `ModelMesh` computes on all of its devices: rows of tokens are spread over
`sequence_axis` (attention goes through `vc_jax.sharding`), the batch with both guided halves over
`batch_axis`, heads and hidden channels over `tensor_axis`. Weights are stored in parts over
`tensor_axis` and `fsdp_axis`; those of one layer are brought together along `fsdp_axis` while the
layer runs. Everything else is XLA's partitioner's.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from vc_jax.sharding import Method

MeshAxes = str | tuple[str, ...] | None
Roles = tuple[str | None, ...]
"""What each of a parameter's last axes may be split over: `"fsdp"`, `"tensor"` or nothing."""
MATRIX: Roles = ("fsdp", "tensor")
"""Of kernels that no layer says anything about."""
_SMALL = 2**14
"""Elements up to which such a kernel stays whole."""


@dataclasses.dataclass(frozen=True)
class ModelMesh:
    """A mesh, and what a model uses its axes for.

    Attributes:
      mesh: its axes may be of any type; a model's arrays live on automatic ones.
      batch_axis: of clips; the two halves of guidance count as clips.
      sequence_axis: of the rows of tokens; of several, the first is a ring's where the heads ask
        for one (`vc_jax.sharding`).
      tensor_axis: of heads, and of the hidden channels of feed-forward layers.
      fsdp_axis: of stored weights. May name axes that `batch_axis` or `sequence_axis` have.
      method: of attention, see `vc_jax.sharding.sharded_attention`.

    Raises:
      ValueError: an axis that the mesh does not have, or one with two uses that exclude each other.
    """

    NAMES: ClassVar[tuple[str, ...]] = ("batch", "fsdp", "ring", "seq", "tensor")
    """The axes that `of` and `make` know, outermost first."""

    mesh: Mesh
    batch_axis: MeshAxes = None
    sequence_axis: MeshAxes = None
    tensor_axis: MeshAxes = None
    fsdp_axis: MeshAxes = None
    method: Method | None = None

    def __post_init__(self):
        if not isinstance(self.mesh, Mesh):
            raise TypeError(f"mesh: expected a jax.sharding.Mesh, got {type(self.mesh).__name__}")
        kinds = (AxisType.Auto,) * len(self.mesh.axis_names)
        automatic = Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=kinds)
        object.__setattr__(self, "mesh", automatic)
        uses: dict[str, str] = {}
        for field in ("batch_axis", "sequence_axis", "tensor_axis", "fsdp_axis"):
            for name in _names(getattr(self, field)):
                if name not in self.mesh.axis_names:
                    raise ValueError(f"{field}: expected of {self.mesh.axis_names}, got {name!r}")
                # Weights may be stored in parts where clips or tokens are.
                shared = field == "fsdp_axis" and uses.get(name) != "tensor_axis"
                if name in uses and not shared:
                    raise ValueError(f"{field}: {name!r} is {uses[name]} already")
                uses[name] = field

    @classmethod
    def of(cls, mesh: "Mesh | ModelMesh") -> "ModelMesh":
        """A mesh whose axes are named for their use: any of `batch`, `fsdp`, `ring`, `seq` and
        `tensor`; `ring` and `seq` are both of the tokens.

        Raises:
          ValueError: another name.
        """
        if isinstance(mesh, ModelMesh):
            return mesh
        if not isinstance(mesh, Mesh):
            raise TypeError(f"mesh: expected a Mesh or a ModelMesh, got {type(mesh).__name__}")
        unknown = [name for name in mesh.axis_names if name not in cls.NAMES]
        if unknown:
            raise ValueError(
                f"mesh: {unknown[0]!r} is none of {cls.NAMES}; say what its axes are for with a "
                "vc_jax.models.mesh.ModelMesh"
            )

        def named(*names: str) -> tuple[str, ...]:
            return tuple(name for name in names if name in mesh.axis_names)

        return cls(mesh, named("batch"), named("ring", "seq"), named("tensor"), named("fsdp"))

    @classmethod
    def make(cls, **sizes: int) -> "ModelMesh":
        """`of` a mesh of the first devices: `ModelMesh.make(batch=2, seq=4)`.

        Raises:
          ValueError: an unknown name, a size below 1, or more devices than there are.
        """
        for name, size in sizes.items():
            if name not in cls.NAMES:
                raise ValueError(f"{name!r} is none of {', '.join(cls.NAMES)}")
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        needed, devices = math.prod(sizes.values()), jax.devices()
        if needed > len(devices):
            raise ValueError(f"{needed} devices are needed, there are {len(devices)}")
        names = tuple(name for name in cls.NAMES if name in sizes)
        shape = tuple(sizes[name] for name in names)
        kinds = (AxisType.Auto,) * len(names)
        return cls.of(jax.make_mesh(shape, names, devices=devices[:needed], axis_types=kinds))

    def size(self, axes: MeshAxes) -> int:
        """Devices along mesh axes."""
        return math.prod(self.mesh.shape[name] for name in _names(axes))

    @property
    def attention_axes(self) -> dict[str, Any]:
        """Arguments of `vc_jax.sharding`'s calls and states."""
        axes = {"batch_axis": self.batch_axis, "head_axis": self.tensor_axis}
        tokens = {"sequence_axis": self.sequence_axis or None, "method": self.method}
        return {"mesh": self.mesh, **axes, **tokens}

    def sharding(self, *axes: MeshAxes) -> NamedSharding:
        """Of an array whose first axes are split over these."""
        return NamedSharding(self.mesh, PartitionSpec(*(_names(a) or None for a in axes)))

    def whole(self, tree: Any) -> Any:
        """Arrays of a pytree, one copy a device. Those that are on the mesh stay where they are;
        others must be the same in all processes."""
        place = self.sharding()

        def put(array: Any) -> Any:
            if isinstance(array, Tracer):
                return array
            if isinstance(array, jax.Array) and array.sharding.device_set == place.device_set:
                return array
            host = np.asarray(array)
            return jax.make_array_from_callback(host.shape, place, lambda index: host[index])

        return jax.tree.map(put, tree)

    def rows(self, tree: Any) -> Any:
        """Rows of tokens [B, S, ...], spread over batch and sequence."""
        return self.constrained(tree, self.batch_axis, self.sequence_axis)

    def clips(self, tree: Any) -> Any:
        """Arrays [B, ...], spread over the batch."""
        return self.constrained(tree, self.batch_axis)

    def constrained(self, tree: Any, *axes: MeshAxes) -> Any:
        """Arrays of a pytree whose first axes are split over these.

        Outside of a trace an axis that the devices do not divide stays whole: there JAX has no
        arrays in unequal parts.
        """

        def constrain(x: Array) -> Array:
            fitting = axes
            if not isinstance(x, Tracer):
                fitting = (a if n % self.size(a) == 0 else None for n, a in zip(x.shape, axes))
            return jax.lax.with_sharding_constraint(x, self.sharding(*fitting))

        return jax.tree.map(constrain, tree)

    def by_rows(self, attention: Callable[..., Array]) -> Callable[..., Array]:
        """Attention of spread rows to keys that every device has, as those of a text.

        Nothing moves: each device attends with its own clips, rows and heads.
        """

        def attend(
            query: Float[Array, "b t n h"],
            key: Float[Array, "b s n h"],
            value: Float[Array, "b s n h"],
            **options: Any,
        ) -> Float[Array, "b t n h"]:
            batch, length, heads, _ = query.shape
            of_heads = self.tensor_axis if heads % self.size(self.tensor_axis) == 0 else None
            padding = -length % self.size(self.sequence_axis)
            of_rows = self.sharding(self.batch_axis, self.sequence_axis, of_heads).spec
            of_keys = self.sharding(self.batch_axis, None, of_heads).spec
            # Lengths [B] and masks [B or 1, ...].
            of_batch = self.sharding(self.batch_axis).spec
            of_options = {
                name: of_batch if np.shape(value)[0] == batch else PartitionSpec()
                for name, value in options.items()
            }

            def local(query: Array, key: Array, value: Array, options: dict[str, Any]) -> Array:
                return attention(query, key, value, **options)

            rows = jnp.pad(query, ((0, 0), (0, padding), (0, 0), (0, 0)))
            out = jax.shard_map(
                local,
                mesh=self.mesh,
                in_specs=(of_rows, of_keys, of_keys, of_options),
                out_specs=of_rows,
                check_vma=False,  # a caller's own function may know nothing of it
            )(rows, key, value, options)
            return out[:, :length]

        return attend

    def parameter_sharding(
        self, model: nnx.Module
    ) -> Callable[[str, tuple[int, ...]], NamedSharding]:
        """Where each parameter of a (possibly abstract) model is stored, by dotted name and shape.

        What its axes may be split over is said by the layer that it belongs to (`split`); an axis
        that the devices do not divide stays whole.
        """
        roles = roles_of(model)

        def place(name: str, shape: tuple[int, ...]) -> NamedSharding:
            return self._place(shape, _roles(roles, tuple(name.split(".")), shape), stored=True)

        return place

    def gathered(self, parameters: nnx.State, roles: Mapping[tuple[str, ...], Roles]) -> nnx.State:
        """The parameters of one layer, whole along `fsdp_axis`: as they are multiplied with."""
        if not _names(self.fsdp_axis):
            return parameters
        flat = []
        for path, variable in nnx.to_flat_state(parameters):
            value = variable.get_value()
            found = _roles(roles, tuple(map(str, path)), value.shape)
            place = self._place(value.shape, found, stored=False)
            value = jax.lax.with_sharding_constraint(value, place)
            flat.append((path, variable.replace(value)))
        return nnx.from_flat_state(flat)

    def _place(self, shape: tuple[int, ...], roles: Roles, *, stored: bool) -> NamedSharding:
        axes = {"tensor": self.tensor_axis, "fsdp": self.fsdp_axis if stored else None, None: None}
        of_roles = (None,) * (len(shape) - len(roles)) + roles
        split = (axes[role] for role in of_roles)
        fitting = (a if n % self.size(a) == 0 else None for n, a in zip(shape, split, strict=True))
        return self.sharding(*fitting)


def roles_of(model: nnx.Module) -> dict[tuple[str, ...], Roles]:
    """What the layers of a model say about their parameters, by path."""
    roles = {}
    for path, module in nnx.iter_modules(model):
        for name, axes in getattr(module, "split", {}).items():
            roles[(*map(str, path), *name.split("."))] = axes
    return roles


def _roles(
    roles: Mapping[tuple[str, ...], Roles], path: tuple[str, ...], shape: tuple[int, ...]
) -> Roles:
    if path in roles:
        return roles[path]
    large = len(shape) > 1 and math.prod(shape[-2:]) > _SMALL
    return MATRIX if path[-1] == "kernel" and large else ()


def _names(axes: MeshAxes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())
