"""Launching the `mma` kernel: grid, shared memory, and what it takes."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .._registers import ROWS
from ..layout import COUNT_ROWS, E4M3, Prepared8
from ._interpreted import InterpretedMma, InterpretedRing
from ._products import MmaRegisters
from ._ring import CHUNK, SLOTS, Ring, slot_bytes
from ._schedule import Refs, attend, tile_of_block

_MEANS = 8
"""Block means that one product adds."""


def _padded(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % multiple)
    return jnp.pad(array, widths) if widths[axis][1] else array


def _shared_memory(size: int, code_dtype, interpret: Any):
    """For queries, and for the ring (`Ring`, `InterpretedRing`)."""
    if not interpret:
        slots = (plgpu.SMEM((SLOTS, slot_bytes(size)), jnp.int8),)
    else:
        slots = (
            plgpu.SMEM((SLOTS, CHUNK, size), code_dtype),
            plgpu.SMEM((SLOTS, size + COUNT_ROWS, CHUNK), E4M3),
            plgpu.Barrier(num_barriers=SLOTS),
        )
    sums = plgpu.SMEM((8, ROWS), jnp.float32)
    return plgpu.SMEM((ROWS, size), code_dtype), sums, *slots


def launch_kernel(
    prepared: Prepared8, *, softmax: str, out_dtype, return_residual: bool, interpret: Any
) -> list[jax.Array]:
    """Run the kernel on checked arrays.

    Returns:
      The output [B, T', N, H] and, if asked for, the normaliser [B, N, T'], T padded to whole
      tiles in the interpreter, which knows no predicated loads and stores.
    """
    batch, heads, rows, size = prepared.query_codes.shape
    query_codes = _padded(prepared.query_codes, 2, ROWS) if interpret else prepared.query_codes
    scale = _padded(prepared.query_scale, 2, ROWS).reshape(batch, heads, -1, ROWS)
    inputs = [query_codes, scale, prepared.key_codes, prepared.key_scale]
    inputs += [prepared.value_codes, prepared.value_scale]
    means = prepared.block_means is not None
    if prepared.block_means is not None:
        grouped = _padded(prepared.block_means, 2, _MEANS)
        grouped = grouped.reshape(*grouped.shape[:2], -1, _MEANS, size)
        inputs.append(jnp.swapaxes(grouped, 3, 4))
    if prepared.value_mean is not None:
        inputs.append(prepared.value_mean)
    operations = (InterpretedMma if interpret else MmaRegisters)(
        query_codes.dtype == jnp.int8, softmax, means, size
    )

    def entry(*refs):
        *first, count = refs[: len(inputs) + 1]
        first[6:] = (first[6], None) if means else (None, first[6])
        out, *lse = refs[len(inputs) + 1 :]
        held = Refs(*first, kv_count=count, out=out, lse=lse[0] if lse else None)
        tile = tile_of_block(operations, held, heads // prepared.key_codes.shape[1])

        def scoped(query, sums, *slots):
            kind, slots = (InterpretedRing, slots) if interpret else (Ring, slots[0])
            kv_head = tile.batch, tile.key_head
            attend(
                tile,
                query,
                sums,
                kind(held.key.at[*kv_head], held.value.at[*kv_head], slots, tile.steps),
            )

        pl.run_scoped(scoped, *_shared_memory(size, query_codes.dtype, interpret))

    length = query_codes.shape[2]
    results = [jax.ShapeDtypeStruct((batch, length, heads, size), out_dtype)]
    if return_residual:
        results.append(jax.ShapeDtypeStruct((batch, heads, length), jnp.float32))
    kernel = plgpu.kernel(
        entry,
        out_type=results,
        grid=(batch, heads, pl.cdiv(rows, ROWS)),
        grid_names=("batch", "heads", "tiles"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    return kernel(*inputs, prepared.kv_count)
