"""What the attention kernels check about their arguments before anything is compiled."""

import dataclasses
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .layout import BLOCK, COUNT_ROWS, E4M3, STEP, Prepared8

HEAD_DIMS = (64, 128)
SOFTMAX = ("expcast", "expcast_running", "exp")
OUTPUT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def unsupported(code_dtype, head_dim: int, softmax: str, out_dtype) -> str | None:
    """Why no kernel can take a call, or `None`. Does not look at the device."""
    if jnp.dtype(code_dtype) not in (jnp.dtype(jnp.int8), jnp.dtype(E4M3)):
        return f"needs int8 or float8_e4m3fn codes, got {jnp.dtype(code_dtype)}"
    if head_dim not in HEAD_DIMS:
        return f"needs a head dim of 64 or 128, got {head_dim}"
    if softmax not in SOFTMAX:
        return f"needs softmax to be one of {SOFTMAX}, got {softmax!r}"
    if jnp.dtype(out_dtype) not in [jnp.dtype(x) for x in OUTPUT_DTYPES]:
        return f"needs a float32, bfloat16 or float16 output, got {jnp.dtype(out_dtype)}"
    return None


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


def _arrays(prepared: Prepared8) -> dict[str, Any]:
    """The arrays that the kernel reads, by name."""
    return {name: x for name, x in vars(prepared).items() if name != "score_excess"}


def check_kinds(prepared: Any) -> None:
    """Raise unless all are arrays, and queries and keys have four axes, none of them empty."""
    if not isinstance(prepared, Prepared8):
        raise TypeError(f"prepared must be a Prepared8, got {type(prepared).__name__}")
    arrays = _arrays(prepared)
    for name, array in arrays.items():
        other = {"block_means": "value_mean", "value_mean": "block_means"}.get(name)
        optional = array is None and other is not None
        if other is not None and (array is None) == (arrays[other] is None):
            raise ValueError("prepared must hold either block_means or value_mean")
        if not optional and not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise TypeError(f"prepared.{name} must be an array, got {type(array).__name__}")
    for name, axes in (("query_codes", "[B, N, T, H]"), ("key_codes", "[B, K, P, H]")):
        shape = arrays[name].shape
        if len(shape) != 4 or 0 in shape:
            raise ValueError(f"prepared.{name} must be {axes}, no axis empty, got {list(shape)}")


def check_arrays(prepared: Prepared8) -> None:
    """Raise unless the arrays have the shapes of one call in the prepared layout."""
    batch, heads, rows, size = prepared.query_codes.shape
    key_heads, stored = prepared.key_codes.shape[1:3]
    if stored % STEP:
        raise ValueError(f"prepared.key_codes must hold a multiple of {STEP} keys, got {stored}")
    if heads % key_heads:
        raise ValueError(
            f"prepared.query_codes must have a multiple of key_codes' {key_heads} heads, "
            f"got {heads}"
        )
    blocks = stored // BLOCK
    expected = {
        "query_scale": ((batch, heads, rows), jnp.float32),
        "key_codes": ((batch, key_heads, stored, size), prepared.query_codes.dtype),
        "key_scale": ((batch, key_heads, blocks), jnp.float32),
        "value_codes": ((batch, key_heads, size + COUNT_ROWS, stored), E4M3),
        "value_scale": ((batch, key_heads, size), jnp.float32),
        "block_means": ((batch, key_heads, blocks, size), jnp.bfloat16),
        "value_mean": ((batch, key_heads, size), jnp.float32),
        "kv_count": ((batch,), jnp.int32),
    }
    for name, (shape, dtype) in expected.items():
        array = getattr(prepared, name)
        if array is not None and (array.shape != shape or array.dtype != jnp.dtype(dtype)):
            raise ValueError(
                f"prepared.{name} must be {jnp.dtype(dtype)} {list(shape)}, "
                f"got {array.dtype} {list(array.shape)}"
            )


def with_known_count(prepared: Prepared8) -> Prepared8:
    """The arrays with a `kv_count` within the stored keys."""
    count = known_count(prepared.kv_count, prepared.key_codes.shape[2], "prepared")
    return dataclasses.replace(prepared, kv_count=count)


def known_count(count: Any, stored: int, name: str) -> Any:
    """Numbers of keys within the stored ones: the kernel reads as many as they say.

    Those that are known must be; others are clamped.
    """
    if isinstance(count, Tracer) or not getattr(count, "is_fully_addressable", True):
        return jnp.clip(count, 0, stored)
    known = np.asarray(count)
    outside = known[(known < 0) | (known > stored)]
    if outside.size:
        raise ValueError(f"{name}.kv_count must be from 0 to {stored} keys, got {outside[0]}")
    return count
