"""The register-level operations of the kernels in plain JAX, for Pallas's interpreter.

The interpreter runs the schedule (copies, barriers, slots, clusters) and looks for races in it; it
has no registers, no products with a left operand in registers, and sums E4M3 products exactly.
Same operations and arguments as `Registers`, and the arithmetic of the products; rows are arrays
of 64, pending sums one array [64, 8] with a column for each block of a group.
"""

import dataclasses

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ._registers import GROWTH, ROWS
from .layout import BLOCK, COUNT_ROWS, E4M3, PROBABILITY_SCALE, STEP, TOP


def read_operand(ref) -> jax.Array:
    """What a tensor core product would read of a shared-memory operand, as float32.

    The product reads through the asynchronous proxy, as copies write; a load does not, so it has
    to be fenced before the slot is given back.
    """
    values = ref[...].astype(jnp.float32)
    plgpu.commit_smem()
    return values


def _octaves(codes: jax.Array) -> jax.Array:
    return jnp.exp2(codes / 8.0)


def _half(values: jax.Array) -> jax.Array:
    return lax.reduce_precision(values, 5, 10)


class InterpretedTileOperations:
    """Stand-in for `TileOperations`."""

    size: int

    def full(self, shape, value, dtype=jnp.float32, layout=None) -> jax.Array:
        del layout
        return jnp.full(shape, value, dtype)

    def rows(self, value: float) -> jax.Array:
        return jnp.full((ROWS,), value, jnp.float32)

    def load_rows(self, ref) -> jax.Array:
        return ref[...]

    def load_columns(self, ref) -> jax.Array:
        return ref[...]

    def over_rows(self, rows: jax.Array) -> jax.Array:
        return jnp.broadcast_to(rows[:, None], (ROWS, self.size))

    def over_columns(self, columns: jax.Array) -> jax.Array:
        return jnp.broadcast_to(columns[None], (ROWS, self.size))


@dataclasses.dataclass(frozen=True)
class InterpretedRegisters(InterpretedTileOperations):
    """Stand-in for `Registers`, with its attributes."""

    integer: bool
    softmax: str
    means: bool
    size: int

    def products_of(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Scores of queries [64, H] and keys [J, H]."""
        scores = jnp.matmul(query, key.T, precision=lax.Precision.HIGHEST)
        return scores if self.integer else _half(scores)

    def values_of(self, codes: jax.Array, value: jax.Array) -> jax.Array:
        """Products of codes [64, J] and transposed values [H + 8, J]."""
        return jnp.matmul(codes.astype(jnp.float32), value.T, precision=lax.Precision.HIGHEST)

    def means_of(self, pending, means: jax.Array) -> jax.Array:
        """Weighted means of eight blocks [8, H]."""
        return jnp.matmul(pending[0], means, precision=lax.Precision.HIGHEST)

    def codes(self, scores, first_multiplier, second_multiplier, largest_before):
        multiplier = jnp.stack([first_multiplier, second_multiplier], 1)
        multiplier = jnp.repeat(multiplier, BLOCK, 1)
        scaled = multiplier * scores
        largest = jnp.max(scaled, 1)
        if self.softmax != "expcast":
            largest = jnp.maximum(largest, largest_before)
        if self.softmax == "exp":
            probability = PROBABILITY_SCALE * _octaves(scaled - largest[:, None])
            codes = jnp.minimum(probability, 448.0).astype(E4M3)
            return _stored_order(codes), largest, largest
        bias, anchor = TOP - largest, largest
        if not self.integer:
            multiplier = multiplier.astype(jnp.float16).astype(jnp.float32)
            bias = _half(bias - jnp.abs(bias) * 2.0**-11)
            anchor = TOP - bias
        value = _half(multiplier * scores + bias[:, None])
        codes = jnp.clip(jnp.round(value), 0, 127).astype(jnp.uint8)
        return _stored_order(lax.bitcast_convert_type(codes, E4M3)), anchor, largest

    def weigh(self, out, anchor, reference, *sums):
        new = jnp.where(anchor > reference + GROWTH, anchor, reference)
        factor = _octaves(reference - new)
        scaled = [x * (factor[:, None] if x.ndim == 2 else factor) for x in sums]
        return out * factor[:, None], new, _octaves(anchor - new), *scaled

    def promote(self, products, out, weight, total, pending, step):
        counts = products[:, self.size : self.size + 2]
        total = total + jnp.sum(counts, 1) * weight
        if pending:
            column = jnp.arange(8) // 2 == step % 4
            weighted = jnp.tile(counts * weight[:, None], (1, 4))
            pending = (jnp.where(column, weighted, pending[0]),)
        return out + weight[:, None] * products[:, : self.size], total, pending

    def no_pending(self):
        return (jnp.zeros((ROWS, 8), jnp.float32),) if self.means else ()


def _stored_order(codes: jax.Array) -> jax.Array:
    """Codes in the order in which the groups of 16 value tokens are stored."""
    # A fragment of scores holds columns 8q + 2t, 8q + 2t + 1; one of 8-bit operands 4 in a row.
    groups = codes.reshape(ROWS, STEP // 16, 2, 4, 2)
    return groups.transpose(0, 1, 3, 2, 4).reshape(ROWS, STEP)


assert COUNT_ROWS == 8
