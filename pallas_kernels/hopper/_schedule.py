"""The schedule of the Hopper attention kernel.

A block of threads holds `warpgroups` tiles of 64 queries of one head and one warpgroup that copies.
Keys and transposed values arrive in steps of 256 tokens through two rings of shared-memory slots;
blocks of a cluster work on neighbouring tiles of one head and each fetches half of every slot for
all of them. A compute warpgroup handles a step in one go: scores, maxima, codes, products with the
values, promotion into float32 registers; while it is in the softmax another one has the tensor
core. Means of eight blocks come back in one bfloat16 product every four steps.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .._registers import GROUP, ROWS, UNSEEN, log_sums, normalised
from ..layout import COUNT_ROWS, STEP
from ._interpreted import InterpretedHopper
from ._products import HopperRegisters

MEAN_SLOTS = 2
"""Groups of eight block means that are held or on their way."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is laid out on the GPU; changes the speed only.

    Attributes:
      warpgroups: compute warpgroups of a block of threads, 64 queries each.
      cluster: blocks of threads that share their copies of keys and values.
      key_slots, value_slots: steps of 256 tokens that are held or on their way.
      compute_registers, copy_registers: registers of a thread of either kind. They come out of what
        the hardware gives a block at its start; a block that asks for more would wait forever.

    Raises:
      TypeError: a number that is no `int`.
      ValueError: one that the kernel or the hardware does not take.
    """

    warpgroups: int = 2
    cluster: int = 2
    key_slots: int = 3
    value_slots: int = 2
    compute_registers: int = 240
    copy_registers: int = 24

    def __post_init__(self):
        for name, number in vars(self).items():
            if not isinstance(number, int) or isinstance(number, bool):
                raise TypeError(f"{name} must be an int, got {number!r}")
        if self.warpgroups not in (1, 2, 3):
            raise ValueError(f"warpgroups must be 1, 2 or 3, got {self.warpgroups}")
        if self.cluster not in (1, 2, 4):
            raise ValueError(f"cluster must be 1, 2 or 4, got {self.cluster}")
        for name in ("key_slots", "value_slots"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2, got {getattr(self, name)}")
        for name in ("compute_registers", "copy_registers"):
            number = getattr(self, name)
            if not 24 <= number <= 256 or number % 8:
                raise ValueError(f"{name} must be a multiple of 8 from 24 to 256, got {number}")
        # A thread starts with an equal share of 64K registers, rounded down to a multiple of 8.
        threads = self.warpgroups + 1
        there = threads * (512 // threads // 8 * 8)
        if self.warpgroups * self.compute_registers + self.copy_registers > there:
            raise ValueError(
                f"compute_registers must be at most "
                f"{(there - self.copy_registers) // self.warpgroups // 8 * 8} with "
                f"warpgroups={self.warpgroups} and copy_registers={self.copy_registers}, "
                f"got {self.compute_registers}"
            )


Operations = HopperRegisters | InterpretedHopper


class Position(NamedTuple):
    """Where a compute warpgroup works: batch row, heads, first query, its number in the block."""

    batch: Any
    head: Any
    key_head: Any
    base: Any
    group: Any


class Rings(NamedTuple):
    """Barriers of the slots of each ring; `means` is `None` without them.

    `query` has one for each compute warpgroup, and none that gives it back.
    """

    key: Any
    value: Any
    means: Any
    query: Any = None


class Memory(NamedTuple):
    """Shared memory of a block of threads; what a call does not have is `None`."""

    query: Any
    out: Any
    key: Any
    value: Any
    means: Any
    query_scale: Any
    value_scale: Any
    value_mean: Any
    lse: Any


class Scratch(NamedTuple):
    """Shared memory, the barriers that say that a slot is filled, and those that it is free."""

    smem: Memory
    full: Rings
    free: Rings


class Refs(NamedTuple):
    """The call's arrays in device memory, as in `Prepared8` (NVFP4: as in `Decoded4`).

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
class Shape:
    """Static facts of one call.

    Attributes:
      config: the layout on the GPU.
      size: head dim.
      heads_per_key_head: query heads that share a key head.
      output_columns: columns of the output that one tile of shared memory takes.
      compiled: whether this is for the GPU and not for the interpreter.
    """

    config: Config
    size: int
    heads_per_key_head: int
    output_columns: int
    compiled: bool

    def steps(self, refs: Refs, batch) -> jax.Array:
        """Steps of 256 keys that hold a valid one."""
        return jax.lax.div(refs.kv_count[batch] + jnp.int32(STEP - 1), jnp.int32(STEP))


def index_of(value) -> jax.Array:
    return jnp.asarray(value, jnp.int32)


def _compute(
    shape: Shape, registers: Operations, refs: Refs, scratch: Scratch, position: Position
) -> None:
    """One compute warpgroup: 64 rows against all keys of their batch row."""
    batch, head, key_head, base, group = position
    config = shape.config
    smem, full, free = scratch.smem, scratch.full, scratch.free

    query = (batch, head, pl.ds(base, ROWS))
    loaded = full.query.at[group]
    plgpu.copy_gmem_to_smem(refs.query.at[query], smem.query.at[group], loaded)
    plgpu.copy_gmem_to_smem(refs.query_scale.at[query], smem.query_scale.at[group], loaded)
    plgpu.copy_gmem_to_smem(
        refs.value_scale.at[batch, key_head], smem.value_scale.at[group], loaded
    )
    if refs.value_mean is not None:
        plgpu.copy_gmem_to_smem(
            refs.value_mean.at[batch, key_head], smem.value_mean.at[group], loaded
        )
    plgpu.barrier_wait(loaded)
    query_scale = registers.load_rows(smem.query_scale.at[group])

    def step(index, carry):
        out, total, reference, largest, pending = carry
        key_slot = lax.rem(index, index_of(config.key_slots))
        value_slot = lax.rem(index, index_of(config.value_slots))
        scales = [refs.key_scale[batch, key_head, 2 * index + i] for i in range(2)]
        first, second = (query_scale * scale for scale in scales)
        plgpu.barrier_wait(full.key.at[key_slot])
        scores = registers.scores(smem.query.at[group], smem.key.at[key_slot])
        plgpu.barrier_arrive(free.key.at[key_slot])
        codes, anchor, largest = registers.codes(scores, first, second, largest)
        out, reference, weight, total, *pending = registers.weigh(
            out, anchor, reference, total, *pending
        )
        plgpu.barrier_wait(full.value.at[value_slot])
        products = registers.weighted_values(codes, smem.value.at[value_slot])
        plgpu.barrier_arrive(free.value.at[value_slot])
        out, total, pending = registers.promote(products, out, weight, total, tuple(pending), index)
        return out, total, reference, largest, pending

    def steps(number, carry):
        """Up to four steps, then their means. (Nested loops also keep `out` where it is.)"""
        out, total, reference, largest = carry
        first = number * GROUP
        last = jnp.minimum(first + GROUP, position_steps)
        carry = (out, total, reference, largest, registers.no_pending())
        out, total, reference, largest, pending = lax.fori_loop(first, last, step, carry)
        if registers.means:
            slot = lax.rem(number, index_of(MEAN_SLOTS))
            plgpu.barrier_wait(full.means.at[slot])
            out = registers.add_means(out, pending, smem.means.at[slot])
            plgpu.barrier_arrive(free.means.at[slot])
        return out, total, reference, largest

    position_steps = shape.steps(refs, batch)
    rows = registers.rows
    start = (registers.full((ROWS, shape.size), 0.0), rows(0.0), rows(UNSEEN), rows(UNSEEN))
    groups = lax.div(position_steps + index_of(GROUP - 1), index_of(GROUP))
    out, total, reference, _ = lax.fori_loop(0, groups, steps, start)

    value_mean = None if smem.value_mean is None else smem.value_mean.at[group]
    value_scale = smem.value_scale.at[group]
    out = normalised(registers, out, total, value_scale, value_mean, refs.out.dtype)
    store(shape, refs, smem, out, position)
    if refs.lse is not None:
        smem.lse.at[group][...] = log_sums(registers, total, reference)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.lse.at[group], refs.lse.at[query])
    plgpu.wait_smem_to_gmem(0)


def store(shape: Shape, refs: Refs, smem: Memory, out, position: Position) -> None:
    """Write 64 rows of the output through the shared memory that held their queries."""
    batch, head, _, base, group = position
    width = shape.output_columns
    out = out.astype(refs.out.dtype)
    for part in range(shape.size // width):
        columns = slice(part * width, (part + 1) * width)
        if part:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.out.at[group][...] = out[:, columns]
        plgpu.commit_smem()
        target = refs.out.at[batch, pl.ds(base, ROWS), head, pl.ds(part * width, width)]
        plgpu.copy_smem_to_gmem(smem.out.at[group], target)


def _copy(
    shape: Shape, registers: Operations, refs: Refs, scratch: Scratch, batch, key_head
) -> None:
    """The copying warpgroup: keys, values and means of one key head, slot after slot."""
    config = shape.config
    smem, full, free = scratch.smem, scratch.full, scratch.free
    shared = "cluster" if config.cluster > 1 else None
    value_rows = [pl.ds(0, shape.size), pl.ds(shape.size, COUNT_ROWS)]

    def reuse(ring, slot, index, slots):
        @pl.when(index >= slots)
        def _():
            plgpu.barrier_wait(ring.at[slot])

    def copy_means(number):
        slot = lax.rem(number, index_of(MEAN_SLOTS))
        reuse(free.means, slot, number, MEAN_SLOTS)
        source = refs.means.at[batch, key_head, pl.ds(number * 8, 8)]
        for half in range(2):
            target = smem.means.at[slot, pl.ds(half * 8, 8)]
            plgpu.copy_gmem_to_smem(source, target, full.means.at[slot])

    def drain(ring, count, slots):
        """Wait until the last copies have been read: no neighbour signals a block that has left."""

        @pl.loop(jnp.maximum(count - slots, 0), count)
        def _(index):
            plgpu.barrier_wait(ring.at[lax.rem(index, index_of(slots))])

    count = shape.steps(refs, batch)

    @pl.loop(0, count)
    def _(index):
        tokens = pl.ds(index * STEP, STEP)
        key_slot = lax.rem(index, index_of(config.key_slots))
        value_slot = lax.rem(index, index_of(config.value_slots))
        reuse(free.key, key_slot, index, config.key_slots)
        plgpu.copy_gmem_to_smem(
            refs.key.at[batch, key_head, tokens],
            smem.key.at[key_slot],
            full.key.at[key_slot],
            collective_axes=shared,
        )
        reuse(free.value, value_slot, index, config.value_slots)
        for rows in value_rows:
            plgpu.copy_gmem_to_smem(
                refs.value.at[batch, key_head, rows, tokens],
                smem.value.at[value_slot, rows],
                full.value.at[value_slot],
                collective_axes=shared,
            )
        if registers.means:
            pl.when(lax.rem(index, index_of(GROUP)) == 0)(
                functools.partial(copy_means, lax.div(index, index_of(GROUP)))
            )

    drain(free.key, count, config.key_slots)
    drain(free.value, count, config.value_slots)
    if registers.means:
        drain(free.means, lax.div(count + index_of(GROUP - 1), index_of(GROUP)), MEAN_SLOTS)


def attention_body(shape: Shape, registers: Operations, refs: Refs, scratch: Scratch) -> None:
    """What one block of threads does; see the module's text."""
    config = shape.config
    batch, head = lax.axis_index("batch"), lax.axis_index("heads")
    key_head = lax.div(head, index_of(shape.heads_per_key_head))
    block = lax.axis_index("tiles") * config.cluster
    if config.cluster > 1:
        block = block + lax.axis_index("cluster")
    group = lax.axis_index("warpgroup")

    @pl.when(group < config.warpgroups)
    def _():
        if shape.compiled:
            plgpu.set_max_registers(config.compute_registers, action="increase")
        base = (block * config.warpgroups + group) * ROWS
        _compute(shape, registers, refs, scratch, Position(batch, head, key_head, base, group))

    @pl.when(group == config.warpgroups)
    def _():
        if shape.compiled:
            plgpu.set_max_registers(config.copy_registers, action="decrease")
        _copy(shape, registers, refs, scratch, batch, key_head)
