"""Small helpers about traced values."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array


def filled(shape: tuple[int, ...], fill: float | int, *like: Array, dtype=jnp.float32) -> Array:
    """A constant array that varies over the same manual mesh axes as all of `like`.

    A scan whose carry starts as a plain constant is refused under `shard_map(check_vma=True)`.
    """
    scalars = [lax.full_like(x, 0, dtype=jnp.float32, shape=()) for x in like]
    return lax.full_like(functools.reduce(operator.add, scalars), fill, dtype=dtype, shape=shape)


def _varying_axes(array: Array) -> frozenset:
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
    axes = frozenset().union(*map(_varying_axes, (*arrays, *others)))

    def mark(array: Array) -> Array:
        missing = tuple(sorted(axes - _varying_axes(array)))
        return lax.pcast(array, missing, to="varying") if missing else array

    return tuple(map(mark, arrays))


def is_concrete(value) -> bool:
    """Whether a value can be looked at now, outside of a trace."""
    return not isinstance(value, (Tracer, jax.ShapeDtypeStruct))


def concrete(value) -> np.ndarray | None:
    """A value as a NumPy array, or `None` while it is traced."""
    return np.asarray(value) if is_concrete(value) else None
