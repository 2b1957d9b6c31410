"""NVFP4 operands of a GPU without an FP4 unit: decoded to float16, which holds them exactly.

An E2M1 code times its group's E4M3 scale has six significant bits and lies, if it is not zero,
between 2^-10 and 2688: float16 holds it, and float32 the product of two. What the prepared codes
are multiplied with besides (a float32 per query, block of keys, value channel) stays outside.

Lengths as in `pallas_kernels.layout`. Inside each chunk of 64, keys and values are in the order
`KEY_ORDER`: stored key `p` is key `KEY_ORDER[p]`. A thread of a score fragment holds columns
8q + 2t and 8q + 2t + 1 of a row; in this order those of eight q are 16 neighbouring keys, a group
whose probabilities share a scale. So a thread finds a group's scale on its own.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float16, Float32, Int32

from .._checks import known_count
from ..layout import BLOCK, STEP

CHUNK = 64
KEY_ORDER = np.arange(CHUNK).reshape(4, 8, 2).swapaxes(0, 1).reshape(-1)
"""Stored position in a chunk of 64 keys -> key of the chunk."""
MEAN_ROWS = 16
"""Rows of means of a block: eight of the mean as bfloat16, eight of what that cuts off."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Decoded4:
    """Decoded 4-bit inputs of one attention call; see the module's text.

    Attributes:
      query: float16 [B, N, T, H].
      query_scale: float32 [B, N, T]: a product of a query and a key times both scales, the product
        of which counts as at most 2^90, is a score in eighths of an octave.
      key: float16 [B, K, P, H]. A slot without a valid key holds another key of its step.
      key_scale: float32 [B, K, n].
      value: float16 [B, K, H, P], zero in slots without a valid key.
      value_scale: float32 [B, K, H].
      means: bfloat16 [B, K, 16·n, H], in units of `value_scale`; `None` without V-Smooth.
      value_mean: float32 [B, K, H], added to the output without V-Smooth; `None` with it.
      kv_count: int32 [B], valid keys, the first ones before they were put in `KEY_ORDER`.
    """

    query: Float16[Array, "b n t h"]
    query_scale: Float32[Array, "b n t"]
    key: Float16[Array, "b k p h"]
    key_scale: Float32[Array, "b k j"]
    value: Float16[Array, "b k h p"]
    value_scale: Float32[Array, "b k h"]
    means: BFloat16[Array, "b k 16*j h"] | None
    value_mean: Float32[Array, "b k h"] | None
    kv_count: Int32[Array, " b"]


def check_operands(operands: Any) -> None:
    """Raise unless arrays have the shapes and dtypes of one call.

    Raises:
      TypeError: not a `Decoded4` of arrays.
      ValueError: an array of another shape or dtype, by name.
    """
    if not isinstance(operands, Decoded4):
        raise TypeError(f"operands must be a Decoded4, got {type(operands).__name__}")
    if (operands.means is None) == (operands.value_mean is None):
        raise ValueError("operands must hold either means or value_mean")
    arrays = {name: x for name, x in vars(operands).items() if x is not None}
    for name, array in arrays.items():
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise TypeError(f"operands.{name} must be an array, got {type(array).__name__}")
    for name, axes in (("query", "[B, N, T, H]"), ("key", "[B, K, P, H]")):
        shape = arrays[name].shape
        if len(shape) != 4 or 0 in shape:
            raise ValueError(f"operands.{name} must be {axes}, no axis empty, got {list(shape)}")
    batch, heads, rows, size = operands.query.shape
    key_heads, stored = operands.key.shape[1:3]
    if stored % STEP or heads % key_heads:
        raise ValueError(
            f"operands.key must hold a multiple of {STEP} keys and a divisor of query's {heads} "
            f"heads, got {list(operands.key.shape)}"
        )
    blocks = stored // BLOCK
    expected = {
        "query": ((batch, heads, rows, size), jnp.float16),
        "query_scale": ((batch, heads, rows), jnp.float32),
        "key": ((batch, key_heads, stored, size), jnp.float16),
        "key_scale": ((batch, key_heads, blocks), jnp.float32),
        "value": ((batch, key_heads, size, stored), jnp.float16),
        "value_scale": ((batch, key_heads, size), jnp.float32),
        "means": ((batch, key_heads, MEAN_ROWS * blocks, size), jnp.bfloat16),
        "value_mean": ((batch, key_heads, size), jnp.float32),
        "kv_count": ((batch,), jnp.int32),
    }
    for name, (shape, dtype) in expected.items():
        array = arrays.get(name)
        if array is not None and (array.shape != shape or array.dtype != jnp.dtype(dtype)):
            raise ValueError(
                f"operands.{name} must be {jnp.dtype(dtype)} {list(shape)}, "
                f"got {array.dtype} {list(array.shape)}"
            )


def with_known_count(operands: Decoded4) -> Decoded4:
    """As `_checks.with_known_count`."""
    count = known_count(operands.kv_count, operands.key.shape[2], "operands")
    return dataclasses.replace(operands, kv_count=count)
