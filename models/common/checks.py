"""Checks of arguments that the models share: shapes by name, indices, fields of configurations."""

import dataclasses
import math
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

Dims = Mapping[str, int | None]
"""Names and sizes of an array's axes, in order; None stands for any size from 1."""


def check_shape(name: str, array: Any, *expected: Dims) -> None:
    """Refuses an array whose shape is none of `expected`.

    Args:
      name: the argument, as the message names it.
      array: anything with a shape, traced or not, or a (nested) sequence.
      *expected: the shapes that are taken.

    Raises:
      ValueError: names the argument, its axes with their sizes, and the shape that was given.
    """
    shape = np.shape(array)
    for dims in expected:
        sizes = tuple(dims.values())
        if len(shape) == len(sizes) and all(
            got == want or (want is None and got > 0)
            for got, want in zip(shape, sizes, strict=True)
        ):
            return
    wanted = " or ".join(_described(dims) for dims in expected)
    raise ValueError(f"{name}: expected {wanted}, got {list(shape)}")


def _described(dims: Dims) -> str:
    axes = (name if size is None else f"{name}={size}" for name, size in dims.items())
    return f"[{', '.join(axes)}]"


def _known(array: Any) -> bool:
    """Whether this process can look at the values: not in a trace, nor where others hold a part."""
    if isinstance(array, (Tracer, jax.ShapeDtypeStruct)):
        return False
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def check_flags(name: str, flags: Any) -> None:
    """Refuses what a cast to bool would silently turn into something else, as an additive mask.

    Raises:
      ValueError: known values other than 0 and 1 (or False and True); names the argument.
    """
    if not _known(flags):
        return
    known = np.asarray(flags)
    if known.dtype != bool and not np.all((known == 0) | (known == 1)):
        raise ValueError(f"{name}: expected only 0 and 1 (or False and True); 1 keeps a row")


def keep_mask(
    name: str, mask: Any, rows: Float[Array, "b l d"]
) -> tuple[Bool[Array, "b l"], Float[Array, "b l d"]]:
    """A mask as bool, and the rows that it is of: NaN where a traced mask of an item is no mask.

    Raises:
      ValueError: as `check_flags`.
    """
    check_flags(name, mask)
    mask = jnp.asarray(mask)
    if mask.dtype == bool:
        return mask, rows
    wrong = ~jnp.all((mask == 0) | (mask == 1), axis=1)
    return mask != 0, jnp.where(wrong[:, None, None], jnp.nan, rows)


def check_float_dtype(name: str, dtype: Any) -> None:
    """Refuses a dtype that is not of floating-point numbers.

    Raises:
      ValueError: names the argument.
    """
    try:
        floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise ValueError(f"{name}: expected a float type, got {dtype!r}")


def check_index(name: str, index: Any, size: int | None) -> None:
    """Refuses an index that is no integer scalar, or, where its value is known, out of range.

    Args:
      name: the argument, as the message names it.
      index: an integer, or an array of shape []; a traced one is taken as it is.
      size: one more than the largest index, or None where there is no largest.

    Raises:
      TypeError: not an integer scalar.
      ValueError: a known value out of range.
    """
    number = isinstance(index, int) or hasattr(index, "dtype")
    if not number or np.ndim(index) or not jnp.issubdtype(jnp.result_type(index), jnp.integer):
        got = f"shape {list(np.shape(index))}" if number and np.ndim(index) else repr(index)
        raise TypeError(f"{name} must be an integer scalar, got {got}")
    if not _known(index):
        return
    known = int(index)
    if known < 0 or (size is not None and known >= size):
        allowed = "at least 0" if size is None else f"in [0, {size - 1}]"
        raise ValueError(f"{name} must be {allowed}, got {known}")


def check_indices(name: str, indices: Any, size: int) -> None:
    """Refuses an array of indices that holds one out of range, where the values are known.

    Raises:
      ValueError: names the argument; a gather would clip such an index, a scatter drop it.
    """
    if not _known(indices):
        return
    known = np.asarray(indices)
    if known.size and (known.min() < 0 or known.max() >= size):
        raise ValueError(
            f"{name}: expected values in [0, {size - 1}], got {known.min()} to {known.max()}"
        )


def check_fields(config: Any, *, any_sign: Collection[str] = ()) -> None:
    """Refuses values of a dataclass's fields that do not fit the fields' types.

    An `int` is at least 1, a `float` is finite and positive, a tuple holds such values; `None` is
    taken where the type says so. A list, as JSON has it, becomes a tuple. Fields that take no part
    in comparisons are notes, not values.

    Args:
      config: the dataclass.
      any_sign: names of float fields that may also be 0 or negative.

    Raises:
      ValueError: names the field.
    """
    for field in dataclasses.fields(config):
        if not field.compare:
            continue
        value, kind = getattr(config, field.name), field.type
        if isinstance(value, list) and typing.get_origin(kind) is tuple:
            value = tuple(value)
            object.__setattr__(config, field.name, value)
        positive = field.name not in any_sign
        if not _fits(value, kind, positive):
            wanted = _wanted(kind, positive)
            raise ValueError(f"{field.name}: expected {wanted}, got {value!r}")


def _fits(value: Any, kind: Any, positive: bool) -> bool:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return any(_fits(value, part, positive) for part in parts)
    if origin is tuple:
        return (
            isinstance(value, tuple)
            and len(value) == len(parts)
            and all(_fits(item, part, positive) for item, part in zip(value, parts, strict=True))
        )
    if origin is typing.Literal:
        return value in parts
    if kind is int:
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        return whole and bool(value >= 1)
    if kind is float:
        number = isinstance(value, (int, float, np.integer, np.floating))
        if isinstance(value, bool) or not number:
            return False
        return math.isfinite(value) and bool(value > 0 or not positive)
    return isinstance(value, kind)


def _wanted(kind: Any, positive: bool) -> str:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return " or ".join(_wanted(part, positive) for part in parts)
    if origin is tuple:
        return f"a tuple of {len(parts)}, each {_wanted(parts[0], positive)}"
    if origin is typing.Literal:
        return f"one of {parts}"
    number = "a positive number" if positive else "a finite number"
    words = {int: "an integer >= 1", float: number, bool: "True or False", str: "a string"}
    return "None" if kind is type(None) else words[kind]


def check_head_dim(head_dim: int) -> None:
    """Refuses a head that RoPE cannot share out among three axes in pairs of channels."""
    if head_dim % 2 or head_dim < 6:
        raise ValueError(f"head_dim: expected an even number >= 6, got {head_dim}")


def check_even(config: Any, *names: str) -> None:
    """Refuses odd values of the named fields."""
    for name in names:
        if getattr(config, name) % 2:
            raise ValueError(f"{name}: expected an even number, got {getattr(config, name)}")


def share_of_heads(name: str, width: int, heads: int) -> int:
    """Channels of one of `heads` heads that make up a width.

    Raises:
      ValueError: the width is no multiple of the number of heads; names the width.
    """
    if heads < 1 or width % heads:
        raise ValueError(f"{name}: expected a multiple of the {heads} heads, got {width}")
    return width // heads
