"""The schedule of the NVFP4 attention kernel without an FP4 unit.

As the 8-bit kernel's (`hopper._schedule`): tiles of 64 queries for each compute warpgroup, one
warpgroup that copies, clusters that share their copies. Slots of the rings hold blocks of 128 keys,
values and their means; a compute warpgroup handles two blocks, a step of 256 keys, in one go.
Sums stay in the tensor core's accumulators: products of float16 are summed in float32.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .._registers import ROWS, UNSEEN, log_sums, normalised
from ..hopper._schedule import Position, Refs, Scratch, Shape, index_of, store
from ..layout import BLOCK, STEP
from ._interpreted import InterpretedFp4
from ._registers import MOST_PER_UNIT, UNIT, Fp4Registers
from .operands import MEAN_ROWS

Operations = Fp4Registers | InterpretedFp4
PER_STEP = STEP // BLOCK


def _load_queries(refs: Refs, scratch: Scratch, position: Position) -> None:
    """Copy a tile of queries and the scales of its rows and columns, and wait for them."""
    batch, head, key_head, base, group = position
    smem, loaded = scratch.smem, scratch.full.query.at[group]
    query = (batch, head, pl.ds(base, ROWS))
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


def _compute(
    shape: Shape, registers: Operations, refs: Refs, scratch: Scratch, position: Position
) -> None:
    """One compute warpgroup: 64 rows against all keys of their batch row."""
    batch, head, key_head, base, group = position
    config = shape.config
    smem, full, free = scratch.smem, scratch.full, scratch.free
    _load_queries(refs, scratch, position)
    query_scale = registers.load_rows(smem.query_scale.at[group])

    def step(index, carry):
        out, total, before = carry
        remaining = refs.kv_count[batch] - index * STEP
        # Descriptors of operands whose place is known are computed ahead of the loop, into
        # registers that are not there. This is zero, and only the kernel's caller knows.
        zero = lax.shift_right_logical(remaining, index_of(30))
        blocks = [PER_STEP * index + i for i in range(PER_STEP)]
        key_slots = [lax.rem(block + zero, index_of(config.key_slots)) for block in blocks]
        value_slots = [lax.rem(block + zero, index_of(config.value_slots)) for block in blocks]
        scales = [refs.key_scale[batch, key_head, block] for block in blocks]
        multipliers = [jnp.minimum(query_scale * x, registers.rows(MOST_PER_UNIT)) for x in scales]
        for slot in key_slots:
            plgpu.barrier_wait(full.key.at[slot])
        scores = registers.scores(smem.query.at[group + zero], [smem.key.at[x] for x in key_slots])
        for slot in key_slots:
            plgpu.barrier_arrive(free.key.at[slot])
        codes, sums, largest = registers.probabilities(scores, multipliers, before)
        sums = registers.sums_of_valid(codes, sums, remaining)
        out, total = registers.rescale(out, largest, before, total)
        total = total + sums[0] + sums[1]
        for slot in value_slots:
            plgpu.barrier_wait(full.value.at[slot])
        means = [smem.means.at[x] for x in value_slots] if registers.means else []
        values = [smem.value.at[x] for x in value_slots]
        out = registers.add_values(out, codes, sums, values, means)
        for slot in value_slots:
            plgpu.barrier_arrive(free.value.at[slot])
        return out, total, largest

    rows = registers.rows
    start = (registers.full((ROWS, shape.size), 0.0), rows(0.0), rows(UNSEEN))
    out, total, largest = lax.fori_loop(0, shape.steps(refs, batch), step, start)
    total = registers.sum_of_threads(total)

    value_mean = None if smem.value_mean is None else smem.value_mean.at[group]
    value_scale = smem.value_scale.at[group]
    out = normalised(registers, out, total, value_scale, value_mean, refs.out.dtype)
    store(shape, refs, smem, out, position)
    if refs.lse is not None:
        smem.lse.at[group][...] = log_sums(registers, total, largest, UNIT)
        plgpu.commit_smem()
        query = (batch, head, pl.ds(base, ROWS))
        plgpu.copy_smem_to_gmem(smem.lse.at[group], refs.lse.at[query])
    plgpu.wait_smem_to_gmem(0)


def _copy(
    shape: Shape, registers: Operations, refs: Refs, scratch: Scratch, batch, key_head
) -> None:
    """The copying warpgroup: two blocks of keys, two of values, step after step."""
    config = shape.config
    smem, full, free = scratch.smem, scratch.full, scratch.free
    shared = "cluster" if config.cluster > 1 else None
    count = PER_STEP * shape.steps(refs, batch)

    def reuse(ring, block, slots):
        slot = lax.rem(block, index_of(slots))

        @pl.when(block >= slots)
        def _():
            plgpu.barrier_wait(ring.at[slot])

        return slot

    def drain(ring, slots):
        """Wait until the last copies have been read: no neighbour signals a block that has left."""

        @pl.loop(jnp.maximum(count - slots, 0), count)
        def _(block):
            plgpu.barrier_wait(ring.at[lax.rem(block, index_of(slots))])

    def copy_keys(block):
        slot = reuse(free.key, block, config.key_slots)
        plgpu.copy_gmem_to_smem(
            refs.key.at[batch, key_head, pl.ds(block * BLOCK, BLOCK)],
            smem.key.at[slot],
            full.key.at[slot],
            collective_axes=shared,
        )

    def copy_values(block):
        slot = reuse(free.value, block, config.value_slots)
        plgpu.copy_gmem_to_smem(
            refs.value.at[batch, key_head, pl.ds(0, shape.size), pl.ds(block * BLOCK, BLOCK)],
            smem.value.at[slot],
            full.value.at[slot],
            collective_axes=shared,
        )
        if registers.means:
            rows = pl.ds(block * MEAN_ROWS, MEAN_ROWS)
            plgpu.copy_gmem_to_smem(
                refs.means.at[batch, key_head, rows], smem.means.at[slot], full.value.at[slot]
            )

    @pl.loop(0, shape.steps(refs, batch))
    def _(index):
        for copy in (copy_keys, copy_values):
            for i in range(PER_STEP):
                copy(PER_STEP * index + i)

    drain(free.key, config.key_slots)
    drain(free.value, config.value_slots)


def attention_body(shape: Shape, registers: Operations, refs: Refs, scratch: Scratch) -> None:
    """What one block of threads does; see the module's text."""
    config = shape.config
    batch, head = lax.axis_index("batch"), lax.axis_index("heads")
    key_head = lax.div(head, index_of(shape.heads_per_key_head))
    block = lax.axis_index("tiles") * config.cluster
    if config.cluster > 1:
        block = block + lax.axis_index("cluster")
    group = lax.axis_index("warpgroup")

    def compute():
        if shape.compiled:
            plgpu.set_max_registers(config.compute_registers, action="increase")
        base = (block * config.warpgroups + group) * ROWS
        _compute(shape, registers, refs, scratch, Position(batch, head, key_head, base, group))

    def copy():
        if shape.compiled:
            plgpu.set_max_registers(config.copy_registers, action="decrease")
        _copy(shape, registers, refs, scratch, batch, key_head)

    # Either or: what one of two conditionals in a row needs would be held during the other.
    lax.cond(group < config.warpgroups, compute, copy)
