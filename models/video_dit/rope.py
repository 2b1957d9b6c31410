"""Rotary position embedding over the three axes of a video: frame, row, column.

Su et al., "RoFormer" (2021), equation 34, applied per axis: the channels of a head are shared out
among the axes, and each pair of channels is turned by position * frequency. Scores then depend on
differences of positions only.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


class RopeTable(NamedTuple):
    """Cosine and sine of every token's and channel pair's angle, float32."""

    cosine: Float[Array, "S half"]
    sine: Float[Array, "S half"]


def rope_table(grid: tuple[int, int, int], head_dim: int, theta: float = 100.0) -> RopeTable:
    """Angles of a clip's tokens in (frame, row, column) order.

    Rows and columns get ``2 * (head_dim // 6)`` channels each, frames the rest. The grids are
    small (tens of positions), hence the small default ``theta``.

    Args:
      grid: frames, rows and columns of tokens.
      head_dim: channels of one head; even and at least 6.
      theta: about the ratio of the highest to the lowest frequency of an axis.

    Returns:
      Two tables of [frames * rows * columns, head_dim / 2].

    Raises:
      ValueError: ``head_dim`` is odd or below 6.
    """
    if head_dim % 2 or head_dim < 6:
        raise ValueError(f"head_dim must be even and at least 6, got {head_dim}")
    space = 2 * (head_dim // 6)
    parts = []
    for axis, channels in enumerate((head_dim - 2 * space, space, space)):
        frequencies = theta ** (-np.arange(0, channels, 2) / channels)
        angles = np.outer(np.arange(grid[axis]), frequencies)
        shape = [1, 1, 1, channels // 2]
        shape[axis] = grid[axis]
        parts.append(np.broadcast_to(angles.reshape(shape), (*grid, channels // 2)))
    table = np.concatenate(parts, axis=-1).reshape(-1, head_dim // 2)
    return RopeTable(
        jnp.asarray(np.cos(table), jnp.float32), jnp.asarray(np.sin(table), jnp.float32)
    )


def apply_rope(x: Float[Array, "B S N H"], table: RopeTable) -> Float[Array, "B S N H"]:
    """Turns channel ``i`` of the first half of a head with channel ``i`` of the second half.

    Computes in float32 and returns the dtype of ``x``.
    """
    cosine, sine = table.cosine[:, None], table.sine[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cosine - second * sine, first * sine + second * cosine)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
