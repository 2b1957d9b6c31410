"""What the Hopper kernel checks about its arguments before anything is compiled."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._layout import COUNT_ROWS, E4M3, STEP


def check_options(out_dtype, interpret: Any) -> None:
    """Raise unless options are of their kinds."""
    try:
        known = out_dtype is not None and jnp.dtype(out_dtype) is not None
    except TypeError:
        known = False
    if not known:
        raise TypeError(f"out_dtype must be float32, bfloat16 or float16, got {out_dtype!r}")
    if interpret is not False and not isinstance(interpret, plgpu.InterpretGPUParams):
        raise TypeError(f"interpret must be False or InterpretGPUParams, got {interpret!r}")


def check_kinds(arrays: dict[str, Any]) -> None:
    """Raise unless all are arrays, and queries and keys have four axes, none of them empty."""
    for name, array in arrays.items():
        optional = name == "block_means" and array is None
        if not optional and not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise TypeError(f"{name} must be an array, got {type(array).__name__}")
    for name, axes in (("query_codes", "[B, N, T, H]"), ("key_codes", "[B, K, P, H]")):
        shape = arrays[name].shape
        if len(shape) != 4 or 0 in shape:
            raise ValueError(f"{name} must be {axes}, no axis empty, got {list(shape)}")


def check_arrays(arrays: dict[str, Any]) -> None:
    """Raise unless the arrays have the shapes of one call in the prepared layout."""
    batch, heads, rows, size = arrays["query_codes"].shape
    key_heads, stored = arrays["key_codes"].shape[1:3]
    if stored % STEP:
        raise ValueError(f"key_codes must hold a multiple of {STEP} keys, got {stored}")
    if heads % key_heads:
        raise ValueError(
            f"query_codes must have a multiple of key_codes' {key_heads} heads, got {heads}"
        )
    blocks = 2 * stored // STEP
    code_dtype = arrays["query_codes"].dtype
    expected = {
        "query_scale": ((batch, heads, rows), jnp.float32),
        "key_codes": ((batch, key_heads, stored, size), code_dtype),
        "key_scale": ((batch, key_heads, blocks), jnp.float32),
        "value_codes": ((batch, key_heads, size + COUNT_ROWS, stored), E4M3),
        "value_scale": ((batch, key_heads, size), jnp.float32),
        "block_means": ((batch, key_heads, blocks, size), jnp.bfloat16),
        "kv_count": ((batch,), jnp.int32),
    }
    for name, (shape, dtype) in expected.items():
        array = arrays[name]
        if array is not None and (array.shape != shape or array.dtype != jnp.dtype(dtype)):
            raise ValueError(
                f"{name} must be {jnp.dtype(dtype)} {list(shape)}, "
                f"got {array.dtype} {list(array.shape)}"
            )


def within(kv_count: Any, stored: int) -> Any:
    """`kv_count` as it is if its numbers are known to be in the arrays, else clamped to them.

    The kernel reads as many keys as it is told to.
    """
    traced = isinstance(kv_count, Tracer)
    if traced or not getattr(kv_count, "is_fully_addressable", True):
        return jnp.clip(kv_count, 0, stored)
    known = np.asarray(kv_count)
    outside = known[(known < 0) | (known > stored)]
    if outside.size:
        raise ValueError(f"kv_count must be from 0 to {stored} keys, got {outside[0]}")
    return kv_count
