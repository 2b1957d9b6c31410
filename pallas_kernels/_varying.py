"""Arrays that differ from device to device of a mesh, under `shard_map(check_vma=True)`."""

import jax
from jax import lax
from jaxtyping import Array


def varying_axes(array: Array) -> frozenset:
    """The manual mesh axes over which an array differs from device to device."""
    kind = jax.typeof(array)
    manual = getattr(kind, "manual_axis_type", None)
    return manual.varying if manual is not None else getattr(kind, "vma", frozenset())


def vary_together(*arrays: Array, along=()) -> tuple[Array, ...]:
    """The arrays, each marked as varying over every manual mesh axis that any of them varies over.

    So do the arrays of the pytree `along`, which are not returned.

    Under `shard_map(check_vma=True)` a `custom_vjp` has to return cotangents of its inputs' types.
    Where an input was replicated, the transpose of this mark is the sum over the axis.
    """
    others = jax.tree.leaves(along)
    axes = frozenset().union(*map(varying_axes, (*arrays, *others)))

    def mark(array: Array) -> Array:
        missing = tuple(sorted(axes - varying_axes(array)))
        return lax.pcast(array, missing, to="varying") if missing else array

    return tuple(map(mark, arrays))
