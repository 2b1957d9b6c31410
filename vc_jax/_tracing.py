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


def is_concrete(value) -> bool:
    """Whether a value can be looked at now: not in a trace, no part of it in another process."""
    if isinstance(value, (Tracer, jax.ShapeDtypeStruct)):
        return False
    return getattr(value, "is_fully_addressable", True)


def concrete(value) -> np.ndarray | None:
    """A value as a NumPy array, or `None` where it cannot be looked at."""
    return np.asarray(value) if is_concrete(value) else None
