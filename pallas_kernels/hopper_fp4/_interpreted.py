"""The register-level operations of the kernel in plain JAX, for Pallas's interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from .._interpreted import InterpretedTileOperations, read_operand
from ..layout import BLOCK, E4M3, STEP
from ._registers import UNIT


def _multiply(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def _rounded(values: jax.Array) -> jax.Array:
    """Values >= 0 to E2M1's nearest, to even, clipped to 6."""
    values = jnp.minimum(values, 6.0)
    step = jnp.where(values < 2, 0.5, jnp.where(values < 4, 1.0, 2.0))
    return jnp.round(values / step) * step


def stored_groups(values: jax.Array) -> jax.Array:
    """Columns [..., J] of stored keys as groups of 16 [..., J / 16, 16] in the order of the keys.

    The inverse of the order of `KEY_ORDER`.
    """
    chunks = values.reshape(*values.shape[:-1], -1, 8, 4, 2)
    return jnp.swapaxes(chunks, -3, -2).reshape(*values.shape[:-1], -1, 16)


def _stored_columns(groups: jax.Array) -> jax.Array:
    chunks = groups.reshape(*groups.shape[:-2], -1, 4, 8, 2)
    return jnp.swapaxes(chunks, -3, -2).reshape(*groups.shape[:-2], -1)


@dataclasses.dataclass(frozen=True)
class InterpretedFp4(InterpretedTileOperations):
    """Stand-in for `Fp4Registers`, with its attributes. Row sums are whole ones from the start."""

    means: bool
    size: int

    def scores(self, query_ref, key_refs):
        query = read_operand(query_ref)
        return [_multiply(query, read_operand(key_ref).T) for key_ref in key_refs]

    def probabilities(self, scores, multipliers, largest_before):
        scaled = [s * m[:, None] for s, m in zip(scores, multipliers)]
        largest = jnp.maximum(jnp.max(jnp.concatenate(scaled, 1), 1), largest_before)
        found, sums = [], []
        for block in scaled:
            groups = stored_groups(UNIT * jnp.exp2((block - largest[:, None]) / 8.0))
            scale = jnp.minimum(jnp.max(groups, -1, keepdims=True) / 6.0, 448.0)
            scale = scale.astype(E4M3).astype(jnp.float32)
            codes = _rounded(groups / jnp.where(scale > 0, scale, 1.0))
            values = jnp.where(scale > 0, codes * scale, 0.0)
            found.append(_stored_columns(values).astype(jnp.float16))
            sums.append(jnp.sum(values, (1, 2)))
        return found, sums, largest

    def sums_of_valid(self, probabilities, sums, remaining):
        del sums
        key = _stored_columns(jnp.arange(STEP).reshape(-1, 16))
        valid = key < remaining
        blocks = [(p, valid[i * BLOCK : (i + 1) * BLOCK]) for i, p in enumerate(probabilities)]
        return [jnp.sum(jnp.where(keep, p.astype(jnp.float32), 0.0), 1) for p, keep in blocks]

    def rescale(self, out, largest, before, total):
        factor = jnp.exp2((before - largest) / 8.0)
        return out * factor[:, None], total * factor

    def add_values(self, out, probabilities, sums, value_refs, means_refs):
        for codes, value_ref in zip(probabilities, value_refs):
            out = out + _multiply(codes.astype(jnp.float32), read_operand(value_ref).T)
        for total, means_ref in zip(sums, means_refs):
            rows = read_operand(means_ref)
            out = out + total[:, None] * (rows[0] + rows[8])
        return out

    def sum_of_threads(self, rows):
        return rows
