"""Public functions refuse arguments that do not fit their own annotations."""

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np

from ._tracing import own_promotion


def public[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """A function that looks at its arrays first, under JAX's usual rules of promotion.

    What its annotations say of arrays (dtype, axes, which of them agree) and of our own classes is
    checked before any work is done, NumPy arrays become JAX ones; numbers, names and ranges are the
    function's own business.

    Raises:
      TypeError: an argument that is no array, of another dtype or of another class.
      ValueError: an array of another shape, or one that does not fit those before it.
    """
    signature = inspect.signature(function)
    wanted = {name: _checked(hint) for name, hint in typing.get_type_hints(function).items()}
    wanted = {name: kinds for name, kinds in wanted.items() if kinds and name != "return"}
    promoted = own_promotion(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        sizes: dict[str, int] = {}
        with jaxtyping.jaxtyped("context"):  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
            for name, kinds in wanted.items():
                if name in given:
                    _check(name, given[name], kinds, sizes)
        for name, value in given.items():
            if name in wanted and isinstance(value, np.ndarray):
                given[name] = jnp.asarray(value)
        return promoted(*bound.args, **bound.kwargs)

    return call


def _is_array(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, jaxtyping.AbstractArray)


def _checked(hint: Any) -> tuple[Any, ...]:
    """The kinds that an annotation admits, where all are arrays, `None` or classes; else ()."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    if not any(_is_array(kind) or _is_ours(kind) for kind in kinds):
        return ()
    # Whatever has a shape and a dtype: a NumPy array too.
    return tuple(kind.dtype[Any, kind.dim_str] if _is_array(kind) else kind for kind in kinds)


def _is_ours(kind: Any) -> bool:
    return getattr(kind, "__module__", "").startswith(__package__ or "")


def _check(name: str, value: Any, kinds: tuple[Any, ...], sizes: dict[str, int]) -> None:
    """Refuses a value; `sizes` are those of the axes of the arrays before it."""
    arrays = [kind for kind in kinds if _is_array(kind)]
    shaped = isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
    if not shaped and any(kind in (int, float, str) for kind in kinds):
        return
    if isinstance(value, kinds):
        for kind in arrays[:1]:
            axes = kind.dim_str.split()
            if shaped and len(axes) == value.ndim:
                sizes |= dict(zip(axes, value.shape))
        return
    wanted = " or ".join(_words(kind, sizes) for kind in kinds)
    problem = f"{name} must be {wanted}, got {_described(value)}"
    if shaped and any(isinstance(value, kind.dtype[Any, "..."]) for kind in arrays):
        raise ValueError(problem)
    raise TypeError(problem)


def _words(kind: Any, sizes: dict[str, int]) -> str:
    if not _is_array(kind):
        return "None" if kind is type(None) else kind.__name__
    dtype, axes = kind.dtype.__name__.lower(), kind.dim_str.split()
    if axes == ["..."]:
        return f"a {dtype} array"
    known = ", ".join(f"{axis} = {sizes[axis]}" for axis in axes if axis in sizes)
    return f"{dtype} [{' '.join(axes)}]" + (f" with {known}" if known else "")


def _described(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__
