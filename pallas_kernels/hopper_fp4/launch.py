"""Launching the NVFP4 kernel: shared memory, barriers, grid, and what fits on the card."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .. import _checks
from .._registers import ROWS
from ..hopper._schedule import Config, Memory, Refs, Rings, Scratch, Shape
from ..hopper.launch import SHARED_MEMORY, TILE_ROWS, bytes_of, pad, tiled, transforms
from ..layout import BLOCK, E4M3
from ._interpreted import InterpretedFp4
from ._registers import Fp4Registers
from ._schedule import attention_body
from .operands import MEAN_ROWS, Decoded4

HALF = jnp.float16


def _output_columns(size: int, dtype) -> int:
    """Columns of the output that fit where a tile of queries was."""
    return min(size, 2 * size // jnp.dtype(dtype).itemsize)


def _scratch(config: Config, size: int, out_dtype, means: bool, lse: bool, alias: bool = True):
    """Shared memory and barriers of a block of threads.

    The output leaves through the memory that held the queries; the interpreter, which takes such
    memory for one place, gets them apart (`alias`).
    """
    groups, width = config.warpgroups, _output_columns(size, out_dtype)

    def tiles(shape, dtype, columns):
        return plgpu.SMEM(shape, dtype, transforms=transforms(columns, dtype))

    query_and_out = (
        tiles((groups, ROWS, size), HALF, size),
        tiles((groups, ROWS, width), out_dtype, width),
    )
    mean_tiles = (config.value_slots, MEAN_ROWS, size)
    memory = (
        plgpu.RefUnion(*query_and_out) if alias else query_and_out,
        tiles((config.key_slots, BLOCK, size), HALF, size),
        tiles((config.value_slots, size, BLOCK), HALF, BLOCK),
        plgpu.SMEM(mean_tiles, jnp.bfloat16, transforms=tiled((8, 16), 32)) if means else None,
        plgpu.SMEM((groups, ROWS), jnp.float32),
        plgpu.SMEM((groups, size), jnp.float32),
        None if means else plgpu.SMEM((groups, size), jnp.float32),
        plgpu.SMEM((groups, ROWS), jnp.float32) if lse else None,
    )

    def released(slots):
        if config.cluster == 1:
            return plgpu.Barrier(num_arrivals=groups, num_barriers=slots)
        return plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=groups, num_barriers=slots
        )

    full = Rings(
        plgpu.Barrier(num_barriers=config.key_slots),
        plgpu.Barrier(num_arrivals=2 if means else 1, num_barriers=config.value_slots),
        None,
        plgpu.Barrier(num_arrivals=3 if means else 4, num_barriers=groups),
    )
    free = Rings(released(config.key_slots), released(config.value_slots), None)
    return memory, full, free


def shared_memory_bytes(
    config: Config, head_dim: int, out_dtype, *, means: bool = True, lse: bool = False
) -> int:
    """Bytes of shared memory that a block of threads allocates, barriers included."""
    return bytes_of(_scratch(config, head_dim, out_dtype, means, lse))


def unsupported(head_dim: int, out_dtype, config: Config | None = None) -> str | None:
    """Why the kernel cannot take a call, or `None`. Does not look at the device."""
    reason = _checks.unsupported(E4M3, head_dim, "exp", out_dtype)
    if reason is None and config is not None:
        needed = shared_memory_bytes(config, head_dim, out_dtype, lse=True)
        if needed > SHARED_MEMORY:
            return f"{config} needs {needed} bytes of shared memory, {SHARED_MEMORY} are there"
    return reason


def launch_kernel(
    operands: Decoded4, config: Config, *, out_dtype, return_residual: bool, interpret: Any
) -> list[jax.Array]:
    """Run the kernel on checked arrays.

    Returns:
      The output [B, T', N, H] and, if asked for, the normaliser [B, N, T''], T padded to whole
      tiles.
    """
    tile = config.warpgroups * config.cluster * ROWS
    query = pad(operands.query, 2, tile if interpret else TILE_ROWS)
    query_scale = pad(operands.query_scale, 2, tile)
    batch, heads, rows, size = query.shape
    means = operands.means is not None
    inputs = [query, query_scale, operands.key, operands.key_scale, operands.value]
    inputs += [operands.value_scale, operands.means if means else operands.value_mean]
    shape = Shape(
        config,
        size,
        heads // operands.key.shape[1],
        _output_columns(size, out_dtype),
        not interpret,
    )
    operations = (InterpretedFp4 if interpret else Fp4Registers)(means, size)

    def entry(*refs):
        *arrays, added, kv_count = refs[:8]
        held = Refs(
            *arrays,
            means=added if means else None,
            value_mean=None if means else added,
            kv_count=kv_count,
            out=refs[8],
            lse=refs[9] if return_residual else None,
        )

        def scoped(memory, full, free):
            (query, staged), *rest = memory
            attention_body(
                shape, operations, held, Scratch(Memory(query, staged, *rest), full, free)
            )

        scratch = _scratch(config, size, out_dtype, means, return_residual, not interpret)
        pl.run_scoped(scoped, *scratch, collective_axes="warpgroup")

    results = [jax.ShapeDtypeStruct((batch, rows, heads, size), out_dtype)]
    if return_residual:
        results.append(jax.ShapeDtypeStruct(query_scale.shape, jnp.float32))
    cluster: dict[str, Any] = {}
    if config.cluster > 1:
        cluster = {"cluster": (config.cluster,), "cluster_names": ("cluster",)}
    kernel = plgpu.kernel(
        entry,
        out_type=results,
        grid=(batch, heads, pl.cdiv(rows, tile)),
        grid_names=("batch", "heads", "tiles"),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **cluster,
    )
    return kernel(*inputs, operands.kv_count)
