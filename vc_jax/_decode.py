"""4-bit prepared inputs as GPUs without an FP4 unit multiply them: decoded, in float16.

`pallas_kernels.hopper_fp4.operands` says what the arrays hold.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._prepare import Prepared4
from ._quantize import largest_magnitude, nvfp4_codes, round_to_bfloat16
from ._tracing import jit, own_promotion
from .pallas_kernels.hopper_fp4.operands import CHUNK, MEAN_ROWS, Decoded4

_MOST_OF_UNIT = 2.0**40
"""Values beyond it, in units of a channel's residuals, get a unit of their own: sums over all keys
stay finite, and such a mean is exact to more bits than float32 has left for the residuals."""


def _in_key_order(keys: Float[Array, "... p"]) -> Float[Array, "... p"]:
    """The last axis with each chunk of 64 in `KEY_ORDER`: a transposition of its bits."""
    chunks = keys.reshape(*keys.shape[:-1], -1, 4, CHUNK // 8, 2)
    return jnp.swapaxes(chunks, -3, -2).reshape(keys.shape)


def _mean_rows(means: Float[Array, "b k j h"]) -> Array:
    """Each mean as eight rows of bfloat16 and eight of what that cuts off."""
    high = round_to_bfloat16(means)
    both = jnp.stack([high, means - high], 3).astype(jnp.bfloat16)
    batch, heads, blocks, _, size = both.shape
    rows = jnp.repeat(both, MEAN_ROWS // 2, 3)
    return rows.reshape(batch, heads, blocks * MEAN_ROWS, size)


@own_promotion
@jit()
def decode(prepared: Prepared4) -> Decoded4:
    """The kernel's operands: codes times the scales of their groups, keys in `KEY_ORDER`."""
    key = jnp.swapaxes(_in_key_order(jnp.swapaxes(nvfp4_codes(prepared.key), 2, 3)), 2, 3)
    value, value_scale = nvfp4_codes(prepared.value), prepared.value.global_scale[..., 0]
    means = None
    if prepared.block_means is not None:
        means = prepared.block_means.astype(jnp.float32)
        unit = jnp.maximum(value_scale, largest_magnitude(means, 2) * (1.0 / _MOST_OF_UNIT))
        value = value * (value_scale / unit)[..., None]
        value_scale = unit
        means = _mean_rows(means / unit[:, :, None])
    half = jnp.float16
    return Decoded4(
        nvfp4_codes(prepared.query).astype(half),
        prepared.query.global_scale[..., 0],
        key.astype(half),
        prepared.key.global_scale[..., 0, 0],
        _in_key_order(value).astype(half),
        value_scale,
        means,
        prepared.value_mean,
        prepared.kv_count,
    )
