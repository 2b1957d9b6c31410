"""Launching the Hopper kernel: shared memory, barriers, grid, and what fits on the card."""

import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .. import _checks
from .._registers import ROWS
from ..layout import COUNT_ROWS, E4M3, STEP, Prepared8
from ._interpreted import InterpretedHopper
from ._products import HopperRegisters
from ._schedule import MEAN_SLOTS, Config, Memory, Refs, Rings, Scratch, Shape, attention_body

SHARED_MEMORY = 232448
"""Bytes of shared memory that a block of threads can have."""
TILE_ROWS = 8
"""Rows of a shared-memory tile: lengths of queries are padded to a multiple of it."""


def transforms(columns: int, dtype):
    """Tiles of 8 rows and up to 128 bytes, swizzled: what TMA and the tensor core share."""
    bytewidth = jnp.dtype(dtype).itemsize
    width = min(128, columns * bytewidth)
    return tiled((8, width // bytewidth), width)


def tiled(tile: tuple[int, int], swizzle: int) -> Any:
    # Both classes inherit an abstract method that they do not need.
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    return tiling(tile), swizzling(swizzle)


def output_columns(size: int, dtype) -> int:
    """Columns of the output that fit where a tile of queries was."""
    return size // jnp.dtype(dtype).itemsize


def _scratch(
    config: Config, size: int, code_dtype, out_dtype, means: bool, lse: bool, alias: bool = True
):
    """Shared memory and barriers of a block of threads.

    The output leaves through the memory that held the queries. Both have the same bytes for each
    warpgroup; the interpreter, which takes such memory for one place, gets them apart (`alias`).
    """
    groups, width = config.warpgroups, output_columns(size, out_dtype)

    def tiles(shape, dtype, columns):
        return plgpu.SMEM(shape, dtype, transforms=transforms(columns, dtype))

    query_and_out = (
        tiles((groups, ROWS, size), code_dtype, size),
        tiles((groups, ROWS, width), out_dtype, width),
    )
    mean_tiles = plgpu.SMEM((MEAN_SLOTS, 16, size), jnp.bfloat16, transforms=tiled((8, 16), 32))
    memory = (
        plgpu.RefUnion(*query_and_out) if alias else query_and_out,
        tiles((config.key_slots, STEP, size), code_dtype, size),
        tiles((config.value_slots, size + COUNT_ROWS, STEP), E4M3, 128),
        mean_tiles if means else None,
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
        plgpu.Barrier(num_arrivals=2, num_barriers=config.value_slots),
        plgpu.Barrier(num_arrivals=2, num_barriers=MEAN_SLOTS) if means else None,
        plgpu.Barrier(num_arrivals=3 if means else 4, num_barriers=groups),
    )
    free = Rings(
        released(config.key_slots),
        released(config.value_slots),
        plgpu.Barrier(num_arrivals=groups, num_barriers=MEAN_SLOTS) if means else None,
    )
    return memory, full, free


def shared_memory_bytes(
    config: Config, head_dim: int, code_dtype, out_dtype, *, means: bool = True, lse: bool = False
) -> int:
    """Bytes of shared memory that a block of threads allocates, barriers included."""
    return bytes_of(_scratch(config, head_dim, code_dtype, out_dtype, means, lse))


def bytes_of(scratch: Any) -> int:
    """Bytes of shared memory that a description of memory and barriers comes to."""
    total = 0
    for entry in jax.tree.leaves(scratch):
        if hasattr(entry, "num_barriers"):
            total += 8 * math.prod(entry.num_barriers)
            continue
        aval = entry.get_ref_aval()
        size = math.prod(aval.shape) * jnp.dtype(aval.dtype).itemsize
        total += -(-size // 1024) * 1024
    return total


def unsupported(
    code_dtype, head_dim: int, softmax: str, out_dtype, config: Config | None = None
) -> str | None:
    """Why the kernel cannot take a call, or `None`. Does not look at the device."""
    reason = _checks.unsupported(code_dtype, head_dim, softmax, out_dtype)
    if reason is None and config is not None:
        needed = shared_memory_bytes(config, head_dim, code_dtype, out_dtype, lse=True)
        if needed > SHARED_MEMORY:
            return f"{config} needs {needed} bytes of shared memory, {SHARED_MEMORY} are there"
    return reason


def pad(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    """The array with zeros up to a multiple along an axis."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % multiple)
    return jnp.pad(array, widths) if widths[axis][1] else array


def launch_kernel(
    prepared: Prepared8,
    config: Config,
    *,
    softmax: str,
    out_dtype,
    return_residual: bool,
    interpret: Any,
) -> list[jax.Array]:
    """Run the kernel on checked arrays.

    Returns:
      The output [B, T', N, H] and, if asked for, the normaliser [B, N, T''], T padded to whole
      tiles.
    """
    # Tiled copies are clipped at an array's end but want a multiple of 8 rows; plain ones, and all
    # copies of the interpreter, are not clipped, so their arrays reach to the end of the last tile.
    tile = config.warpgroups * config.cluster * ROWS
    query_codes = pad(prepared.query_codes, 2, tile if interpret else TILE_ROWS)
    query_scale = pad(prepared.query_scale, 2, tile)
    batch, heads, rows, size = query_codes.shape
    inputs = [query_codes, query_scale, prepared.key_codes, prepared.key_scale]
    inputs += [prepared.value_codes, prepared.value_scale]
    means = prepared.block_means is not None
    if prepared.block_means is not None:
        inputs.append(pad(prepared.block_means, 2, TILE_ROWS))
    if prepared.value_mean is not None:
        inputs.append(prepared.value_mean)
    shape = Shape(
        config,
        size,
        heads // prepared.key_codes.shape[1],
        output_columns(size, out_dtype),
        not interpret,
    )
    operations = (InterpretedHopper if interpret else HopperRegisters)(
        query_codes.dtype == jnp.int8, softmax, means, size
    )

    def entry(*refs):
        query, query_scale, key, key_scale, value, value_scale, *refs = refs
        held = Refs(
            query,
            query_scale,
            key,
            key_scale,
            value,
            value_scale,
            means=refs.pop(0) if means else None,
            value_mean=None if means else refs.pop(0),
            kv_count=refs.pop(0),
            out=refs.pop(0),
            lse=refs.pop(0) if return_residual else None,
        )

        def scoped(memory, full, free):
            (query, staged), *rest = memory
            smem = Memory(query, staged, *rest)
            attention_body(shape, operations, held, Scratch(smem, full, free))

        scratch = _scratch(
            config, size, query_codes.dtype, out_dtype, means, return_residual, not interpret
        )
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
    return kernel(*inputs, prepared.kv_count)
