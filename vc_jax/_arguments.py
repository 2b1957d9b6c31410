"""Check the arguments of an attention call and bring them to one form."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool

from ._config import AttentionConfig, check_head_dim, resolve_config
from ._tracing import Size, concrete, is_concrete, is_symbolic

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Validity:
    """Which keys and queries count. `None` stands for all of them.

    Attributes:
      key: bool [B, S].
      query: bool [B, T].
      poison: bool [B], rows to be filled with NaN: their traced mask held something that is
        neither 0 nor 1.
      prefix: whether valid keys come first in every row, so that no order is needed.
    """

    key: Bool[Array, "b s"] | None
    query: Bool[Array, "b t"] | None
    poison: Bool[Array, " b"] | None
    prefix: bool = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arrays of one call, or their `ShapeDtypeStruct`s.

    Attributes:
      query: float [B, T, N, H].
      key, value: float [B, S, K, H].
      scale: of the scores, float32 [].
      validity: which keys and queries count.
    """

    query: Any
    key: Any
    value: Any
    scale: Any
    validity: Validity


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call: its arrays and its numerics."""

    inputs: Inputs
    config: AttentionConfig


def bind(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    config,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
) -> Call:
    """The arguments of `dot_product_attention`, checked and brought to one form.

    Raises:
      NotImplementedError, TypeError, ValueError: naming the argument and what was expected.
    """
    _refuse_unsupported(bias=bias, is_causal=is_causal, local_window_size=local_window_size)
    config = resolve_config(config)
    inputs = check_arguments(
        query,
        key,
        value,
        mask=mask,
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
    )
    check_head_dim("query", inputs.query.shape[-1], config)
    return Call(inputs, config)


def _refuse_unsupported(**arguments) -> None:
    """Raise for arguments of `jax.nn.dot_product_attention` that cannot be honoured.

    Raises:
      NotImplementedError: the first argument that is neither `None` nor `False`, by name.
    """
    hints = {
        "bias": "add it to the scores with jax.nn.dot_product_attention instead",
        "is_causal": "the low-bit attention is non-causal: its keys are sorted",
        "local_window_size": "the low-bit attention is global: its keys are sorted",
    }
    for name, argument in arguments.items():
        off = argument is None or (isinstance(argument, bool | np.bool_) and not argument)
        if not off:
            raise NotImplementedError(f"{name} is not supported: {hints[name]}")


def _array(name: str, array) -> Array | jax.ShapeDtypeStruct:
    if not isinstance(array, jax.ShapeDtypeStruct):
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise TypeError(f"{name} must be an array, got {type(array).__name__}")
        array = jnp.asarray(array)
    if array.dtype not in DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, got {array.dtype}")
    return array


def check_shapes(query, key, value) -> None:
    """Raise `ValueError` unless the shapes are BTNH, BSKH, BSKH (or all without B)."""
    if query.ndim not in (3, 4):
        raise ValueError(f"query must have 3 or 4 axes, [B,] T, N, H; got shape {query.shape}")
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != query.ndim:
            raise ValueError(
                f"{name} must have {query.ndim} axes as query has, got shape {array.shape}"
            )
        fixed = array.shape[-2:] if name == "query" else array.shape[-3:]
        if any(map(is_symbolic, fixed)):
            raise ValueError(
                f"{name} must have fixed {'N and H' if name == 'query' else 'S, K and H'} to be "
                f"exported (B and T may be symbols, and key_value_seq_lengths says how many of S "
                f"keys count), got shape {array.shape}"
            )
        if 0 in array.shape:
            raise ValueError(f"{name} must not be empty, got shape {array.shape}")
    if value.shape != key.shape:
        raise ValueError(f"value must have the shape of key, {key.shape}, got {value.shape}")
    if query.ndim == 4 and key.shape[0] != query.shape[0]:
        raise ValueError(
            f"key must have the batch size of query, {query.shape[0]}, got {key.shape[0]}"
        )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key must have the head dim of query, {query.shape[-1]}, got {key.shape[-1]}"
        )
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"query must have a multiple of key's {key.shape[-2]} heads, got {query.shape[-2]}"
        )


def _array_of_lengths(name: str, lengths) -> Array | np.ndarray:
    """A sequence of numbers, concrete or traced, as an array."""
    if isinstance(lengths, (list, tuple)):
        if not lengths:
            return np.zeros(0, np.int32)
        if any(isinstance(length, Tracer) for length in lengths):
            return jnp.stack([jnp.asarray(length) for length in lengths])
    try:
        return np.asarray(lengths)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be integers, got {lengths!r}") from error


def _lengths(name: str, lengths, batch: Size, limit: Size) -> Array | None:
    """Validity [B, limit] of a prefix of each row."""
    if lengths is None:
        return None
    if not (hasattr(lengths, "dtype") and hasattr(lengths, "shape")):
        lengths = _array_of_lengths(name, lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {lengths.dtype}")
    if lengths.shape not in ((batch,), ()) or (lengths.shape == () and batch != 1):
        raise ValueError(f"{name} must have shape ({batch},), got {lengths.shape}")
    if isinstance(lengths, jax.ShapeDtypeStruct):
        return jnp.ones((batch, limit), bool)
    known = concrete(lengths)
    if known is not None and (np.any(known < 0) or np.any(known > limit)):
        raise ValueError(f"{name} must be in [0, {limit}], got {known.tolist()}")
    return jnp.arange(limit) < jnp.reshape(jnp.asarray(lengths), (batch, 1))


def _mask_shape(mask, batch: Size, heads: Size, rows: Size, length: Size, unbatched: bool) -> Any:
    """The mask with four axes, each 1 or full."""
    if not (hasattr(mask, "dtype") and hasattr(mask, "shape")):
        mask = np.asarray(mask)
    shape = (1, *mask.shape) if unbatched and mask.ndim == 3 else tuple(mask.shape)
    full = (batch, heads, rows, length)
    if len(shape) != 4 or any(n not in (1, m) for n, m in zip(shape, full)):
        raise ValueError(f"mask must be broadcastable to [B, N, T, S] = {full}, got {mask.shape}")
    if not (
        mask.dtype == bool
        or jnp.issubdtype(mask.dtype, jnp.integer)
        or jnp.issubdtype(mask.dtype, jnp.floating)
    ):
        raise TypeError(f"mask must be bool, or 0 and 1 of any dtype, got {mask.dtype}")
    if isinstance(mask, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, mask.dtype)
    return mask.reshape(shape)


def _concrete_mask(mask: np.ndarray) -> tuple[Array, Array | None]:
    """Key and query validity of a known mask [B|1, N|1, T|1, S]."""
    if not np.all((mask == 0) | (mask == 1)):
        raise ValueError("mask must hold only 0 and 1 (or False and True): 1 keeps a key")
    keep = mask.astype(bool)
    key = keep.any((1, 2))
    query = keep.any((1, 3)) if keep.shape[2] > 1 else None
    product = key[:, None, None] if query is None else query[:, None, :, None] & key[:, None, None]
    if not np.array_equal(np.broadcast_to(product, keep.shape), keep):
        raise NotImplementedError(
            "mask is not supported: it must leave every query the same keys (or none); "
            "a per-query or per-head pattern has no low-bit kernel"
        )
    return jnp.asarray(key), None if query is None else jnp.asarray(query)


def _traced_mask(mask) -> tuple[Array, Array | None, Array | None]:
    """Key and query validity of a mask [B|1, 1, T|1, S], and the rows that it makes no sense for.

    Those hold something else than 0 and 1, or leave two queries different keys.
    """
    rows = mask[:, 0] if is_traced(mask) else jnp.ones(mask.shape[:1] + mask.shape[2:], mask.dtype)
    keep = rows != 0
    key = keep.any(1)
    poison = None
    if rows.dtype != bool:
        poison = ~jnp.all((rows == 0) | (rows == 1), (1, 2))
    if rows.shape[1] == 1:
        return key, None, poison
    query = keep.any(2)
    unequal = jnp.any(keep != (query[:, :, None] & key[:, None]), (1, 2))
    return key, query, unequal if poison is None else poison | unequal


def _mask(mask, batch: Size, heads: Size, rows: Size, length: Size, unbatched: bool):
    """Key validity, query validity and poison of a mask."""
    mask = _mask_shape(mask, batch, heads, rows, length, unbatched)
    known = concrete(mask)
    if known is not None:
        key, query = _concrete_mask(known)
        poison = None
    elif mask.shape[1] > 1:
        raise NotImplementedError(
            f"mask of shape {mask.shape} with a head axis is not supported while traced; pass "
            "key_value_seq_lengths (and query_seq_lengths), or a mask [B, 1, 1 or T, S]"
        )
    else:
        key, query, poison = _traced_mask(mask)
    key = jnp.broadcast_to(key, (batch, length))
    query = None if query is None else jnp.broadcast_to(query, (batch, rows))
    return key, query, None if poison is None else jnp.broadcast_to(poison, (batch,))


def is_traced(value) -> bool:
    """Whether a value exists but cannot be looked at (of an abstract shape there is none)."""
    return not is_concrete(value) and not isinstance(value, jax.ShapeDtypeStruct)


def _both(first: Array | None, second: Array | None) -> Array | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second


def check_arguments(
    query,
    key,
    value,
    *,
    mask=None,
    scale=None,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
) -> Inputs:
    """The call's arrays with a batch axis, and which keys and queries count.

    Abstract arrays (`ShapeDtypeStruct`) are accepted and stay abstract.

    Raises:
      TypeError, ValueError, NotImplementedError: naming the argument and what was expected.
    """
    query, key, value = _array("query", query), _array("key", key), _array("value", value)
    check_shapes(query, key, value)
    unbatched = query.ndim == 3
    if unbatched:
        query, key, value = (_with_batch(x) for x in (query, key, value))
    batch, rows, heads, size = query.shape
    length = key.shape[1]
    scale = _scale(scale, size)
    key_valid = _lengths("key_value_seq_lengths", key_value_seq_lengths, batch, length)
    query_valid = _lengths("query_seq_lengths", query_seq_lengths, batch, rows)
    poison, prefix = None, True
    if mask is not None:
        masked_key, masked_query, poison = _mask(mask, batch, heads, rows, length, unbatched)
        key_valid, query_valid = _both(key_valid, masked_key), _both(query_valid, masked_query)
        prefix = False
    validity = Validity(key_valid, query_valid, poison, prefix)
    return Inputs(query, key, value, scale, validity)


def _scale(scale, head_dim: int):
    """The scale of the scores, float32 []."""
    if scale is None:
        return jnp.float32(1.0 / math.sqrt(head_dim))
    if not hasattr(scale, "dtype"):
        scale = np.asarray(scale)
    if not any(jnp.issubdtype(scale.dtype, kind) for kind in (jnp.integer, jnp.floating)):
        raise TypeError(f"scale must be a real number, got {scale.dtype}")
    if scale.shape != ():
        raise ValueError(f"scale must be a scalar, got shape {scale.shape}")
    if isinstance(scale, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((), jnp.float32)
    if is_concrete(scale) and not np.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return jnp.asarray(scale, jnp.float32)


def _with_batch(array):
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((1, *array.shape), array.dtype)
    return array[None]
