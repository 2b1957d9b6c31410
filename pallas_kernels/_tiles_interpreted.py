"""`Tiles` in plain JAX, for the interpreter: same operations, arguments, orders of channels.

Arrays that a kernel writes have one row more, which takes what goes nowhere.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._numbers import as_float, largest, magnitude_bits, ordered_bits
from ._tiles import CHUNK
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

    def highest(self, values: jax.Array, axis: int) -> jax.Array:
        return largest(values, axis)

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
        ref[row] = values.astype(ref.dtype)

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

    def put_value_codes(self, ref, head, half, values, counts, length: int) -> None:
        del length
        codes = jnp.clip(values, -448.0, 448.0).astype(ref.dtype)
        row = jnp.arange(COUNT_ROWS)[:, None]
        count = jnp.where((row & 1) == ((half >> 1) & 1), counts[None], 0.0).astype(ref.dtype)
        columns = half * (BLOCK // 2) + jnp.arange(BLOCK // 2)
        channel = jnp.arange(self.size + COUNT_ROWS)[:, None]
        ref[head, channel, columns[None]] = jnp.concatenate([codes.T, count])

    def full(self, tokens: int, value, kind: str) -> jax.Array:
        del kind
        return jnp.full((tokens,), value)

    def token_codes(self, ref, row: jax.Array, scale_ref, shift_ref, head) -> jax.Array:
        rows = jnp.where(row[:, None] < 0, 0, ref[jnp.maximum(row, 0)]).astype(jnp.float32)
        scale, shift = (x[head].astype(jnp.float32) for x in (scale_ref, shift_ref))
        codes = rows * scale + shift
        if ref.dtype == jnp.bfloat16:
            codes = codes.astype(jnp.bfloat16).astype(jnp.float32) - 128.0
        codes = jnp.round(jnp.clip(codes, 0.0, 127.0)).astype(jnp.int8)
        parts = codes.reshape(-1, self.size // 32, 4, 2, 4)
        return parts.transpose(0, 1, 3, 2, 4).reshape(codes.shape)

    def put_token_codes(self, ref, row: jax.Array, values: jax.Array, kind: str) -> None:
        del kind
        codes = lax.bitcast_convert_type(values, jnp.int32).astype(jnp.int8)
        parts = codes.reshape(-1, self.size // 32, 4, 2, 4)
        ref[_or_last(ref, row)] = parts.transpose(0, 1, 3, 2, 4).reshape(codes.shape)

    def loop(self, count: int, body) -> None:
        for index in range(count):
            body(index)

    def with_centroids(self, count: int, width: int, body) -> None:
        body(_Centroids(count, width))

    def load_centroids(self, memory, codes_ref, base_ref, head, first) -> None:
        some = slice(first, first + memory.count // CHUNK)
        memory.codes, memory.base = codes_ref[head, some], base_ref[head, some]

    def distances(self, codes, memory, chunk, factor: int) -> jax.Array:
        inner = jnp.dot(codes, memory.codes[chunk].T, preferred_element_type=jnp.int32)
        return inner * factor + memory.base[chunk]

    def flat(self, values: jax.Array, memory) -> jax.Array:
        del memory
        return values

    def clear_counts(self, memory) -> None:
        memory.found = jnp.zeros(memory.width, jnp.int32)

    def counts(self, memory) -> jax.Array:
        return memory.found

    def ranks(self, label: jax.Array, memory) -> jax.Array:
        same = label[:, None] == label[None]
        earlier = jnp.sum(jnp.tril(same, -1), 1, dtype=jnp.int32)
        before = memory.found[label] + earlier
        memory.found = memory.found.at[label].add(1)
        return before

    def with_members(self, dtype, body) -> None:
        del dtype
        body([None])

    def hold_members(self, memory, rows: jax.Array) -> None:
        memory[0] = jnp.where(jnp.isfinite(rows), rows, 0)

    def membership(self, label: jax.Array, memory) -> jax.Array:
        del memory
        return (label[None] == jnp.arange(CHUNK)[:, None]).astype(jnp.float32)

    def add_members(self, total: jax.Array, member: jax.Array, memory) -> jax.Array:
        rows = memory[0].astype(jnp.float32)
        return total + jnp.dot(member, rows, precision=lax.Precision.HIGHEST)

    def put_sums(self, ref, row: jax.Array, values: jax.Array) -> None:
        parts = values.reshape(-1, self.size // 32, 4, 4, 2)  # `loaded_channels`
        ref[_or_last(ref, row)] = parts.transpose(0, 1, 3, 2, 4).reshape(values.shape)

    def put_rows(self, ref, row: jax.Array, values: jax.Array, kind: str) -> None:
        del kind
        ref[_or_last(ref, row)] = values

    def with_chain(self, body) -> None:
        body(None)

    def inner_products(self, rows: jax.Array, memory) -> jax.Array:
        del memory
        return jnp.dot(rows, rows.T, precision=lax.Precision.HIGHEST)

    def over_both(self, square: jax.Array, memory) -> tuple[jax.Array, jax.Array]:
        del memory
        return square[:, None], square[None]

    def walk(self, distance: jax.Array, memory, k: int, start, places_ref, first) -> None:
        del memory
        far = 1.5e38
        column = jnp.arange(CHUNK)
        distance = ordered_bits(jnp.where(distance < far, distance, far))

        def visit(place, carry):
            left, current = carry
            places_ref[first + current] = place
            left = left & (column != current)
            seen = jnp.where(left, distance[current], ordered_bits(jnp.float32(3e38)))
            return left, jnp.argmin(seen).astype(jnp.int32)

        lax.fori_loop(0, k, visit, (column < k, start))

    def with_matrix(self, ref, index, body) -> None:
        body(ref[index])

    def with_row(self, body) -> None:
        body([])

    def keep_row(self, memory, rows: jax.Array) -> None:
        memory.append(rows[0])

    def kept_row(self, memory, copy) -> jax.Array:
        del copy
        return memory[0]

    def product(self, rows: jax.Array, matrix, start: jax.Array | None = None) -> jax.Array:
        product = jnp.dot(rows, matrix.T, preferred_element_type=jnp.float32)
        return product if start is None else start + product


@dataclasses.dataclass
class _Centroids:
    """What a program has in shared memory."""

    count: int
    width: int
    codes: Any = None
    base: Any = None
    found: Any = None


def _or_last(ref, index: jax.Array) -> jax.Array:
    return jnp.where(index < 0, ref.shape[0] - 1, index)
