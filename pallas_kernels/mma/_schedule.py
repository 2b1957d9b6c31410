"""The schedule of the `mma` kernel.

A block of threads is one warpgroup on 64 queries of a head; two blocks share a multiprocessor, and
while one is in its softmax the other has the tensor cores. Keys and values come through one ring of
slots (`_ring`), 64 tokens each. A step of 256 keys is taken in one go: scores, maxima, codes,
products with the values, promotion into float32 registers; means of eight blocks come back in one
bfloat16 product every four steps.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._registers import GROUP, ROWS, UNSEEN, log_sums, normalised
from ..layout import STEP
from ._interpreted import InterpretedMma, InterpretedRing
from ._products import MmaRegisters
from ._ring import PARTS, Ring


class Refs(NamedTuple):
    """The call's arrays in device memory, as in `Prepared8` but for `means` [B, K, n / 8, H, 8].

    Either `means` or `value_mean` is `None`; so is `lse` where nobody asks.
    """

    query: Any
    query_scale: Any
    key: Any
    key_scale: Any
    value: Any
    value_scale: Any
    means: Any
    value_mean: Any
    kv_count: Any
    out: Any
    lse: Any


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one block of threads works on.

    Attributes:
      registers: operations on registers.
      refs: the call's arrays.
      batch, head, key_head: their numbers.
      base: the first query.
      steps: steps of 256 keys that hold a valid one.
    """

    registers: MmaRegisters | InterpretedMma
    refs: Refs
    batch: Any
    head: Any
    key_head: Any
    base: Any
    steps: Any


def tile_of_block(registers, refs: Refs, heads_per_key_head: int) -> Tile:
    batch, head = lax.axis_index("batch"), lax.axis_index("heads")
    key_head = lax.div(head, jnp.int32(heads_per_key_head))
    base = lax.axis_index("tiles") * ROWS
    steps = lax.div(refs.kv_count[batch] + jnp.int32(STEP - 1), jnp.int32(STEP))
    return Tile(registers, refs, batch, head, key_head, base, steps)


def _sums_of_all_keys(tile: Tile, query, sums, ring: Ring | InterpretedRing):
    """Weighted values, row sums and references of 64 rows."""
    registers, refs = tile.registers, tile.refs
    kv_head = tile.batch, tile.key_head
    registers.load_query(refs.query.at[tile.batch, tile.head], tile.base, query)
    # Not a slice of the array: a row-wise load of a slice takes its rows' alignment for granted.
    query_scale = registers.load_rows(
        refs.query_scale.at[tile.batch, tile.head, lax.div(tile.base, jnp.int32(ROWS))]
    )

    def step(index, carry):
        out, largest, pending = carry
        scales = [refs.key_scale[*kv_head, 2 * index + i] for i in range(2)]
        first, second = (query_scale * scale for scale in scales)
        chunks = [registers.scores(query, ring.take(index, part)) for part in range(PARTS)]
        codes, anchor, largest = registers.codes(registers.joined(chunks), first, second, largest)
        total, reference = registers.kept(sums)
        out, reference, weight, total, *pending = registers.weigh(
            out, anchor, reference, total, *pending
        )
        registers.keep(sums, (total, reference))
        products = registers.no_products()
        for part in range(PARTS):
            values = ring.take(index, PARTS + part)
            products = registers.weighted_values(products, codes, values, part)
        total, reference = registers.kept(sums)
        out, total, pending = registers.promote(products, out, weight, total, tuple(pending), index)
        registers.keep(sums, (total, reference))
        return out, largest, pending

    def steps(number, carry):
        """Up to four steps, then their means."""
        out, largest = carry
        first = number * GROUP
        last = jnp.minimum(first + GROUP, tile.steps)
        carry = (out, largest, registers.no_pending())
        out, largest, pending = lax.fori_loop(first, last, step, carry)
        if registers.means:
            out = registers.add_means(out, pending, refs.means.at[*kv_head, number])
        return out, largest

    rows = registers.rows
    registers.keep(sums, (rows(0.0), rows(UNSEEN)))
    start = (registers.full((ROWS, registers.size), 0.0), rows(UNSEEN))
    groups = lax.div(tile.steps + jnp.int32(GROUP - 1), jnp.int32(GROUP))
    out, _ = lax.fori_loop(0, groups, steps, start)
    return out, *registers.kept(sums)


def attend(tile: Tile, query, sums, ring: Ring | InterpretedRing) -> None:
    """What one block of threads does; see the module's text.

    Args:
      query: shared memory [64, H] for the tile's queries.
      sums: float32 shared memory [4, 64] or more, for row sums and references.
    """
    registers, refs = tile.registers, tile.refs
    ring.begin()
    out, total, reference = _sums_of_all_keys(tile, query, sums, ring)
    kv_head = tile.batch, tile.key_head
    value_mean = None if refs.value_mean is None else refs.value_mean.at[*kv_head]
    value_scale = refs.value_scale.at[*kv_head]
    out = normalised(registers, out, total, value_scale, value_mean, refs.out.dtype)
    target: jax.Array = refs.out.at[tile.batch, :, tile.head]
    registers.store(target, out.astype(refs.out.dtype), tile.base)
    if refs.lse is not None:
        target = refs.lse.at[tile.batch, tile.head]
        registers.store_rows(target, log_sums(registers, total, reference), tile.base)
