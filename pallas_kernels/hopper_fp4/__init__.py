"""NVFP4 attention for Hopper GPUs, which have no FP4 unit: the same numerics in float16 products.

* `operands`: the decoded inputs, exact in float16, and the order of their keys.
* `launch`: grid, shared memory and barriers of a call; what fits on the card.
* `_schedule`: what each warpgroup does when.
* `_registers`: probabilities in NVFP4, and the products.
* `_interpreted`: the same in plain JAX, for Pallas's interpreter.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._checks import check_options
from .._registers import ROWS
from ..hopper import Config
from .launch import launch_kernel, shared_memory_bytes, unsupported
from .operands import KEY_ORDER, MEAN_ROWS, Decoded4, check_operands, with_known_count

__all__ = [
    "KEY_ORDER",
    "MEAN_ROWS",
    "Config",
    "Decoded4",
    "attention",
    "default_config",
    "shared_memory_bytes",
    "unsupported",
]


def default_config(query_length: int, head_dim: int) -> Config:
    """The layout for such a shape. Slots hold 128 keys or values each."""
    cluster = 2 if query_length > 2 * ROWS else 1
    if head_dim == 64:
        return Config(cluster=cluster, key_slots=4, value_slots=4)
    return Config(cluster=cluster, key_slots=3, value_slots=2)


def attention(
    operands: Decoded4,
    *,
    out_dtype=jnp.bfloat16,
    return_residual: bool = False,
    config: Config | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "b t n h"], Float[Array, "b t n"] | None]:
    """Attention over decoded NVFP4 operands, probabilities in NVFP4.

    Args:
      operands: H 64 or 128, N a multiple of K. A traced `kv_count` is clamped to the stored keys.
      out_dtype: float32, bfloat16 or float16.
      return_residual: also return the normaliser.
      config: layout on the GPU, its slots of 128 tokens; `None`: `default_config`.
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
    check_operands(operands)
    rows, size = operands.query.shape[2:]
    config = default_config(rows, size) if config is None else config
    reason = unsupported(size, out_dtype, config)
    if reason is not None:
        raise NotImplementedError(f"the NVFP4 kernel {reason}")
    out, *lse = launch_kernel(
        with_known_count(operands),
        config,
        out_dtype=out_dtype,
        return_residual=return_residual,
        interpret=interpret,
    )
    out = out[:, :rows]
    return out, jnp.swapaxes(lse[0][:, :, :rows], 1, 2) if return_residual else None
