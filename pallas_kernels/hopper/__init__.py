"""Fused low-bit attention for Hopper GPUs (compute capability 9.0), on prepared arrays.

* `launch`: grid, shared memory and barriers of a call; what fits on the card.
* `_schedule`: what each warpgroup does when: copies, waits, steps.
* `_products`: the products of a step; the rest of its arithmetic is `pallas_kernels._registers`.
* `_interpreted`: the same in plain JAX, for Pallas's interpreter.
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
    with_known_count,
)
from .._registers import ROWS
from ..layout import Prepared8
from ._schedule import Config
from .launch import launch_kernel, shared_memory_bytes, unsupported

__all__ = [
    "HEAD_DIMS",
    "OUTPUT_DTYPES",
    "SOFTMAX",
    "Config",
    "attention",
    "default_config",
    "shared_memory_bytes",
    "unsupported",
]


def default_config(query_length: int, kv_length: int, heads: int, head_dim: int) -> Config:
    """The configuration that ran fastest for such a shape (`benchmarks/results`)."""
    del kv_length, heads, head_dim
    return Config(cluster=2 if query_length > 2 * ROWS else 1)


def attention(
    prepared: Prepared8,
    *,
    softmax: str = "expcast",
    out_dtype=jnp.bfloat16,
    return_residual: bool = False,
    config: Config | None = None,
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
      config: layout on the GPU; `None`: `default_config`.
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
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config must be a Config or None, got {config!r}")
    check_kinds(prepared)
    _, heads, rows, size = prepared.query_codes.shape
    if config is None:
        config = default_config(rows, prepared.key_codes.shape[2], heads, size)
    reason = unsupported(prepared.query_codes.dtype, size, softmax, out_dtype, config)
    if reason is not None:
        raise NotImplementedError(f"the Hopper kernel {reason}")
    check_arrays(prepared)
    prepared = with_known_count(prepared)
    out, *lse = launch_kernel(
        prepared,
        config,
        softmax=softmax,
        out_dtype=out_dtype,
        return_residual=return_residual,
        interpret=interpret,
    )
    out = out[:, :rows]
    return out, jnp.swapaxes(lse[0][:, :, :rows], 1, 2) if return_residual else None
