"""Small helpers about traced values."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array

Size = Any
"""A length: an `int`, or a symbolic dimension of `jax.export`, which has no public type."""


def jit[**P, R](**options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`jax.jit` as a decorator that keeps a function's types: JAX's own returns `Any`."""
    return functools.partial(jax.jit, **options)


def own_promotion[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """A function under JAX's usual rules of promotion, whichever a user has set for own code.

    The strict ones (`jax_numpy_rank_promotion="raise"`, `jax_numpy_dtype_promotion="strict"`) find
    oversights in the code that is being written; they are not about the libraries it calls.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return call


def filled(shape: tuple[Size, ...], fill: float | int, *like: Array, dtype=jnp.float32) -> Array:
    """A constant array that varies over the same manual mesh axes as all of `like`.

    A scan whose carry starts as a plain constant is refused under `shard_map(check_vma=True)`.
    """
    scalars = [lax.full_like(x, 0, dtype=jnp.float32, shape=()) for x in like]
    return lax.full_like(functools.reduce(operator.add, scalars), fill, dtype=dtype, shape=shape)


def is_symbolic(size: Any) -> bool:
    """Whether a size is a symbol of `jax.export`, known only when the exported function runs."""
    return jax.export.is_symbolic_dim(size)


def is_concrete(value) -> bool:
    """Whether a value can be looked at now: not in a trace, no part of it in another process."""
    if isinstance(value, (Tracer, jax.ShapeDtypeStruct)):
        return False
    return getattr(value, "is_fully_addressable", True)


def concrete(value) -> np.ndarray | None:
    """A value as a NumPy array, or `None` where it cannot be looked at."""
    return np.asarray(value) if is_concrete(value) else None
