"""The 4-bit probabilities that a kernel multiplies with, read off its outputs.

Values that are a unit matrix make outputs of probabilities over row sums, and the normaliser gives
the row sums.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import vc_jax
from vc_jax._decode import decode
from vc_jax._quantize import nvfp4_groups
from vc_jax.pallas_kernels.hopper_fp4 import KEY_ORDER, Decoded4

from .cases import Case, inputs

KEYS = 256
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
UNIT = 448.0 * 6.0


class Found(NamedTuple):
    """Indices of E2M1 values [N, T, 256], keys in order, and whether their group's scale agrees."""

    codes: np.ndarray
    wanted: np.ndarray
    same_scale: np.ndarray

    def share(self, most: int) -> float:
        """Of all codes, those that differ by at most so many steps."""
        return float(np.mean(np.abs(self.codes - self.wanted) <= most))


def _operands(case: Case, head_dim: int) -> Decoded4:
    query, key, value = inputs(dataclasses.replace(case, length=KEYS, head_dim=head_dim))
    prepared = vc_jax.prepare(query, key, value, "nvfp4", smooth=False)
    return decode(prepared)


def _scores(operands: Decoded4) -> np.ndarray:
    """Scores in codes, keys as they are stored, in float64."""
    groups = operands.query.shape[1] // operands.key.shape[1]
    key = np.repeat(np.asarray(operands.key, np.float64), groups, 1)
    scores = np.asarray(operands.query, np.float64) @ key.swapaxes(2, 3)
    key_scale = np.repeat(np.asarray(operands.key_scale), 128, -1)
    key_scale = np.repeat(key_scale, groups, 1)[:, :, None]
    return (scores * (np.asarray(operands.query_scale)[..., None] * key_scale))[0]


def _in_order(stored: np.ndarray) -> np.ndarray:
    keys = (np.arange(KEYS // 64)[:, None] * 64 + KEY_ORDER).reshape(-1)
    plain = np.empty_like(stored)
    plain[..., keys] = stored
    return plain


def probabilities(attention: Any, case: Case, head_dim: int = 128) -> Found:
    """Run a kernel on 256 keys for each `head_dim` of them and compare codes with the reference's.

    Args:
      attention: `(operands) -> (out, lse)`, float32.
      case: one batch row.
    """
    operands = _operands(case, head_dim)
    scores = _scores(operands)
    largest = scores.max(-1, keepdims=True)
    ordered = _in_order(UNIT * np.exp2((scores - largest) / 8))
    groups = jnp.asarray(ordered.reshape(*ordered.shape[:-1], -1, 16), jnp.float32)
    wanted = nvfp4_groups(groups)
    step = np.repeat(np.asarray(wanted.scales, np.float64), 16, -1)
    key_heads = operands.key.shape[1]
    found = np.empty_like(ordered)
    for first in range(0, KEYS, head_dim):
        value = np.zeros((1, key_heads, head_dim, KEYS), np.float16)
        stored = np.flatnonzero(_in_order_index() // head_dim == first // head_dim)
        value[:, :, _in_order_index()[stored] - first, stored] = 1
        given = dataclasses.replace(
            operands,
            value=jnp.asarray(value),
            value_scale=jnp.ones((1, key_heads, head_dim)),
            value_mean=jnp.zeros((1, key_heads, head_dim)),
        )
        out, lse = jax.tree.map(
            lambda x: np.asarray(x, np.float64)[0].swapaxes(0, 1), attention(given)
        )
        sums = UNIT * np.exp(lse[..., None] - largest * (np.log(2) / 8))
        found[..., first : first + head_dim] = out * sums
    units = found / np.where(step > 0, step, 1)
    codes = np.abs(units[..., None] - E2M1).argmin(-1)
    same = np.abs(units - E2M1[codes]) < 2e-3 * np.maximum(units, 1)
    return Found(codes, np.asarray(wanted.codes).reshape(found.shape), same | (step == 0))


def _in_order_index() -> np.ndarray:
    """The key that each stored slot holds."""
    return (np.arange(KEYS // 64)[:, None] * 64 + KEY_ORDER).reshape(-1)
