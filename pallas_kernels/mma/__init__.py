"""Fused low-bit attention by `mma.sync`, for GPUs of several generations, on prepared arrays.

* `launch`: grid and shared memory of a call; what is supported.
* `_schedule`: what a warpgroup does when.
* `_ring`: keys and values on their way through shared memory.
* `_products`: the products of a step (`_instructions`); the rest of its arithmetic is
  `pallas_kernels._registers`.
* `_interpreted`: ring and products in plain JAX, for Pallas's interpreter.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._checks import (
    HEAD_DIMS,
    OUTPUT_DTYPES,
    SOFTMAX,
    check_arrays,
    check_kinds,
    check_options,
    unsupported,
    with_known_count,
)
from ..layout import Prepared8
from .launch import launch_kernel

__all__ = [
    "HEAD_DIMS",
    "OUTPUT_DTYPES",
    "SOFTMAX",
    "attention",
    "unsupported",
]


def attention(
    prepared: Prepared8,
    *,
    softmax: str = "expcast",
    out_dtype=jnp.bfloat16,
    return_residual: bool = False,
    interpret: Any = False,
) -> tuple[Float[Array, "b t n h"], Float[Array, "b t n"] | None]:
    """Attention over arrays in the prepared layout.

    Args:
      prepared: H 64 or 128, N a multiple of K. Products of scales with E4M3 codes must fit float16,
        and so must the scales'. Without block means it is faster. A traced `kv_count` is clamped
        to the stored keys. `score_excess` is not looked at: the normaliser is that of the scores
        as they are stored.
      softmax: `"expcast"`, `"expcast_running"` or `"exp"`.
      out_dtype: float32, bfloat16 or float16.
      return_residual: also return the normaliser.
      interpret: `False`, or parameters of Pallas's GPU interpreter.

    Returns:
      The output [B, T, N, H] and, if asked for, the natural-log normaliser, float32 [B, T, N].
      Zeros and -inf in batch rows without a valid key.

    Raises:
      NotImplementedError: what `unsupported` says.
      TypeError: an argument of another kind, by name.
      ValueError: an array of another shape or dtype, or a `kv_count` out of range, by name.
    """
    check_options(out_dtype, interpret)
    check_kinds(prepared)
    rows, size = prepared.query_codes.shape[2:]
    reason = unsupported(prepared.query_codes.dtype, size, softmax, out_dtype)
    if reason is not None:
        raise NotImplementedError(f"the mma kernel {reason}")
    check_arrays(prepared)
    out, *lse = launch_kernel(
        with_known_count(prepared),
        softmax=softmax,
        out_dtype=out_dtype,
        return_residual=return_residual,
        interpret=interpret,
    )
    out = out[:, :rows]
    return out, jnp.swapaxes(lse[0][:, :, :rows], 1, 2) if return_residual else None
