"""`Tiles` in plain JAX, for the interpreter: same operations, arguments, orders of channels.

Arrays that a kernel writes have one row more, which takes what goes nowhere.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ._numbers import as_float, magnitude_bits
from .layout import BLOCK, COUNT_ROWS


@dataclasses.dataclass(frozen=True)
class InterpretedTiles:
    """Stand-in for `Tiles`, with its attributes."""

    size: int

    def index(self, tokens: int, kind: str) -> jax.Array:
        del kind
        return jnp.arange(tokens)

    def over_tokens(self, tokens: jax.Array, kind: str) -> jax.Array:
        del kind
        return jnp.broadcast_to(tokens[:, None], (tokens.shape[0], self.size))

    def over_channels(self, channels: jax.Array, tokens: int, kind: str) -> jax.Array:
        del kind
        return jnp.broadcast_to(channels[None], (tokens, self.size))

    def zeros(self, shape, dtype, kind: str) -> jax.Array:
        del kind
        return jnp.zeros(shape, dtype)

    def largest(self, values: jax.Array, axis: int) -> jax.Array:
        # XLA's maximum of floats may drop a NaN on the CPU, that of integers cannot.
        return as_float(jnp.max(magnitude_bits(values), axis))

    def entries(self, ref, index: jax.Array, kind: str) -> jax.Array:
        del kind
        return jnp.where(index < 0, 0, ref[jnp.maximum(index, 0)])

    def put_entries(self, ref, index: jax.Array, values: jax.Array, kind: str) -> None:
        del kind
        ref[_or_last(ref, index)] = values

    def put_entry(self, ref, index, value) -> None:
        ref[_or_last(ref, index)] = value

    def channels(self, ref, row, kind: str) -> jax.Array:
        del kind
        return ref[row]

    def put_channels(self, ref, row, values: jax.Array) -> None:
        ref[row] = values

    def rows(self, ref, row: jax.Array, kind: str) -> jax.Array:
        found = jnp.where(row[:, None] < 0, 0, ref[jnp.maximum(row, 0)])
        if kind != "rows":
            return found
        parts = found.reshape(-1, self.size // 32, 4, 4, 2)  # `loaded_channels`
        return parts.transpose(0, 1, 3, 2, 4).reshape(found.shape)

    def put_codes(self, ref, row: jax.Array, values: jax.Array) -> None:
        if ref.dtype == jnp.int8:
            codes = lax.bitcast_convert_type(values, jnp.int32).astype(jnp.int8)
        else:
            codes = jnp.clip(values, -448.0, 448.0).astype(ref.dtype)
        parts = codes.reshape(-1, self.size // 64, 8, 4, 2)  # `stored_channels`
        ref[_or_last(ref, row)] = parts.transpose(0, 1, 3, 2, 4).reshape(codes.shape)

    def put_value_codes(self, ref, head, block, values, counts, length: int) -> None:
        del length
        codes = jnp.clip(values, -448.0, 448.0).astype(ref.dtype)
        row = jnp.arange(COUNT_ROWS)[:, None]
        count = jnp.where((row & 1) == (block & 1), counts[None], 0.0).astype(ref.dtype)
        columns = block * BLOCK + jnp.arange(BLOCK)
        channel = jnp.arange(self.size + COUNT_ROWS)[:, None]
        ref[head, channel, columns[None]] = jnp.concatenate([codes.T, count])

    def with_matrix(self, ref, index, body) -> None:
        body(ref[index])

    def product(self, rows: jax.Array, matrix) -> jax.Array:
        return jnp.dot(rows, matrix.T, preferred_element_type=jnp.float32)


def _or_last(ref, index: jax.Array) -> jax.Array:
    return jnp.where(index < 0, ref.shape[0] - 1, index)
