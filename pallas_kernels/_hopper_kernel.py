"""The schedule of the Hopper attention kernel.

A block of threads holds `warpgroups` tiles of 64 queries of one head and one warpgroup that copies.
Keys and transposed values arrive in steps of 256 tokens through two rings of shared-memory slots;
blocks of a cluster work on neighbouring tiles of one head and each fetches half of every slot for
all of them. A compute warpgroup handles a step in one go: scores, maxima, codes, products with the
values, promotion into float32 registers; while it is in the softmax another one has the tensor
core. Means of eight blocks come back in one bfloat16 product every four steps.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ._hopper_registers import ROWS
from ._layout import COUNT_ROWS, STEP

_GROUP = 4
"""Steps after which the pending means are added."""
_MEAN_SLOTS = 2
_UNSEEN = -1e30
"""Reference of a row before its first step: any anchor outgrows it."""


def _index(value) -> jax.Array:
    return jnp.asarray(value, jnp.int32)


def _compute(shape, registers, refs, scratch, position):
    """One compute warpgroup: 64 rows against all keys of their batch row."""
    (query_ref, query_scale_ref, _, key_scale_ref, _, value_scale_ref) = refs.inputs[:6]
    batch, head, key_head, base, group = position
    config = shape.config
    smem, full, free = scratch.smem, scratch.full, scratch.free

    query = (batch, head, pl.ds(base, ROWS))
    loaded = full.query.at[group]
    plgpu.copy_gmem_to_smem(query_ref.at[query], smem.query.at[group], loaded)
    plgpu.copy_gmem_to_smem(query_scale_ref.at[query], smem.query_scale.at[group], loaded)
    plgpu.copy_gmem_to_smem(value_scale_ref.at[batch, key_head], smem.value_scale.at[group], loaded)
    plgpu.barrier_wait(loaded)
    query_scale = registers.load_rows(smem.query_scale.at[group])

    def step(index, carry):
        out, total, reference, largest, pending = carry
        key_slot = lax.rem(index, _index(config.key_slots))
        value_slot = lax.rem(index, _index(config.value_slots))
        scales = [key_scale_ref[batch, key_head, 2 * index + i] for i in range(2)]
        multipliers = [query_scale * scale for scale in scales]
        plgpu.barrier_wait(full.key.at[key_slot])
        scores = registers.scores(smem.query.at[group], smem.key.at[key_slot])
        plgpu.barrier_arrive(free.key.at[key_slot])
        codes, anchor, largest = registers.codes(scores, *multipliers, largest)
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
        first = number * _GROUP
        last = jnp.minimum(first + _GROUP, position_steps)
        carry = (out, total, reference, largest, registers.no_pending())
        out, total, reference, largest, pending = lax.fori_loop(first, last, step, carry)
        if registers.means:
            slot = lax.rem(number, _index(_MEAN_SLOTS))
            plgpu.barrier_wait(full.means.at[slot])
            out = registers.add_means(out, pending, smem.means.at[slot])
            plgpu.barrier_arrive(free.means.at[slot])
        return out, total, reference, largest

    position_steps = shape.steps(refs, batch)
    rows = registers.rows
    start = (registers.full((ROWS, shape.size), 0.0), rows(0.0), rows(_UNSEEN), rows(_UNSEEN))
    groups = lax.div(position_steps + _index(_GROUP - 1), _index(_GROUP))
    out, total, reference, _ = lax.fori_loop(0, groups, steps, start)

    empty = total == 0.0
    inverse = 1.0 / jnp.where(empty, rows(1.0), total)
    value_scale = registers.load_columns(smem.value_scale.at[group])
    out = out * registers.over_rows(inverse) * registers.over_columns(value_scale)
    _store(shape, refs, smem, out, (batch, head, base, group))
    if refs.lse is not None:
        log = jnp.log(total * (1.0 / 256.0)) + reference * shape.nats_per_code
        smem.lse.at[group][...] = jnp.where(empty, rows(-jnp.inf), log)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.lse.at[group], refs.lse.at[query])
    plgpu.wait_smem_to_gmem(0)


def _store(shape, refs, smem, out, position):
    """Write 64 rows of the output through the shared memory that held their queries."""
    batch, head, base, group = position
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


def _copy(shape, registers, refs, scratch, batch, key_head):
    """The copying warpgroup: keys, values and means of one key head, slot after slot."""
    key_ref, value_ref, means_ref = refs.inputs[2], refs.inputs[4], refs.means
    config = shape.config
    smem, full, free = scratch.smem, scratch.full, scratch.free
    shared = "cluster" if config.cluster > 1 else None
    value_rows = [pl.ds(0, shape.size), pl.ds(shape.size, COUNT_ROWS)]

    def reuse(ring, slot, index, slots):
        @pl.when(index >= slots)
        def _():
            plgpu.barrier_wait(ring.at[slot])

    def copy_means(number):
        slot = lax.rem(number, _index(_MEAN_SLOTS))
        reuse(free.means, slot, number, _MEAN_SLOTS)
        source = means_ref.at[batch, key_head, pl.ds(number * 8, 8)]
        for half in range(2):
            target = smem.means.at[slot, pl.ds(half * 8, 8)]
            plgpu.copy_gmem_to_smem(source, target, full.means.at[slot])

    def drain(ring, count, slots):
        """Wait until the last copies have been read: no neighbour signals a block that has left."""

        @pl.loop(jnp.maximum(count - slots, 0), count)
        def _(index):
            plgpu.barrier_wait(ring.at[lax.rem(index, _index(slots))])

    count = shape.steps(refs, batch)

    @pl.loop(0, count)
    def _(index):
        tokens = pl.ds(index * STEP, STEP)
        key_slot = lax.rem(index, _index(config.key_slots))
        value_slot = lax.rem(index, _index(config.value_slots))
        reuse(free.key, key_slot, index, config.key_slots)
        plgpu.copy_gmem_to_smem(
            key_ref.at[batch, key_head, tokens],
            smem.key.at[key_slot],
            full.key.at[key_slot],
            collective_axes=shared,
        )
        reuse(free.value, value_slot, index, config.value_slots)
        for rows in value_rows:
            plgpu.copy_gmem_to_smem(
                value_ref.at[batch, key_head, rows, tokens],
                smem.value.at[value_slot, rows],
                full.value.at[value_slot],
                collective_axes=shared,
            )
        if registers.means:
            pl.when(lax.rem(index, _index(_GROUP)) == 0)(
                functools.partial(copy_means, lax.div(index, _index(_GROUP)))
            )

    drain(free.key, count, config.key_slots)
    drain(free.value, count, config.value_slots)
    if registers.means:
        drain(free.means, lax.div(count + _index(_GROUP - 1), _index(_GROUP)), _MEAN_SLOTS)


def attention_body(shape, registers, refs, scratch):
    """What one block of threads does; see the module's text.

    Args:
      shape: `Shape` of the call.
      registers: `Registers` or their stand-in.
      refs: `Refs`, arrays in device memory.
      scratch: `Scratch`, shared memory and barriers.
    """
    config = shape.config
    batch, head = lax.axis_index("batch"), lax.axis_index("heads")
    key_head = lax.div(head, _index(shape.heads_per_key_head))
    block = lax.axis_index("tiles") * config.cluster
    if config.cluster > 1:
        block = block + lax.axis_index("cluster")
    group = lax.axis_index("warpgroup")

    @pl.when(group < config.warpgroups)
    def _():
        if shape.compiled:
            plgpu.set_max_registers(config.compute_registers, action="increase")
        base = (block * config.warpgroups + group) * ROWS
        _compute(shape, registers, refs, scratch, (batch, head, key_head, base, group))

    @pl.when(group == config.warpgroups)
    def _():
        if shape.compiled:
            plgpu.set_max_registers(config.copy_registers, action="decrease")
        _copy(shape, registers, refs, scratch, batch, key_head)
