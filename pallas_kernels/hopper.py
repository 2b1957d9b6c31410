"""Fused low-bit attention for Hopper GPUs (compute capability 9.0), on prepared arrays.

The arrays are those of the prepared layout (`vc_jax.Prepared8`): 8-bit codes, scales that turn code
products into scores measured in eighths of an octave, values transposed and less their block means.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from ._hopper_checks import check_arrays, check_kinds, check_options, within
from ._hopper_interpreted import InterpretedRegisters
from ._hopper_kernel import _MEAN_SLOTS, attention_body
from ._hopper_registers import ROWS, Registers
from ._layout import COUNT_ROWS, E4M3, STEP

SHARED_MEMORY = 232448
"""Bytes of shared memory that a block of threads can have."""
HEAD_DIMS = (64, 128)
SOFTMAX = ("expcast", "expcast_running", "exp")
OUTPUT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_TILE_ROWS = 8
"""Rows of a shared-memory tile: lengths of queries are padded to a multiple of it."""


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


def default_config(query_length: int, kv_length: int, heads: int, head_dim: int) -> Config:
    """The configuration that ran fastest for such a shape (`benchmarks/results`)."""
    del kv_length, heads, head_dim
    return Config(cluster=2 if query_length > 2 * ROWS else 1)


class _Rings(NamedTuple):
    key: Any
    value: Any
    means: Any
    query: Any = None


class _Memory(NamedTuple):
    query: Any
    out: Any
    key: Any
    value: Any
    means: Any
    query_scale: Any
    value_scale: Any
    lse: Any


class _Scratch(NamedTuple):
    smem: _Memory
    full: _Rings
    free: _Rings


class _Refs(NamedTuple):
    inputs: tuple
    means: Any
    kv_count: Any
    out: Any
    lse: Any


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Static facts of one call."""

    config: Config
    size: int
    heads_per_key_head: int
    output_columns: int
    nats_per_code: float
    compiled: bool

    def steps(self, refs: _Refs, batch) -> jax.Array:
        """Steps of 256 keys that hold a valid one."""
        return jax.lax.div(refs.kv_count[batch] + jnp.int32(STEP - 1), jnp.int32(STEP))


def _transforms(columns: int, dtype):
    """Tiles of 8 rows and up to 128 bytes, swizzled: what TMA and the tensor core share."""
    bytewidth = jnp.dtype(dtype).itemsize
    width = min(128, columns * bytewidth)
    return _tiled((8, width // bytewidth), width)


def _tiled(tile: tuple[int, int], swizzle: int) -> Any:
    # Both classes inherit an abstract method that they do not need.
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    return tiling(tile), swizzling(swizzle)


def _output_columns(size: int, dtype) -> int:
    """Columns of the output that fit where a tile of queries was."""
    return size // jnp.dtype(dtype).itemsize


def _scratch(
    config: Config, size: int, code_dtype, out_dtype, means: bool, lse: bool, alias: bool = True
):
    """Shared memory and barriers of a block of threads.

    The output leaves through the memory that held the queries. Both have the same bytes for each
    warpgroup; the interpreter, which takes such memory for one place, gets them apart (`alias`).
    """
    groups, width = config.warpgroups, _output_columns(size, out_dtype)

    def tiles(shape, dtype, columns):
        return plgpu.SMEM(shape, dtype, transforms=_transforms(columns, dtype))

    query_and_out = (
        tiles((groups, ROWS, size), code_dtype, size),
        tiles((groups, ROWS, width), out_dtype, width),
    )
    mean_tiles = plgpu.SMEM((_MEAN_SLOTS, 16, size), jnp.bfloat16, transforms=_tiled((8, 16), 32))
    memory = (
        plgpu.RefUnion(*query_and_out) if alias else query_and_out,
        tiles((config.key_slots, STEP, size), code_dtype, size),
        tiles((config.value_slots, size + COUNT_ROWS, STEP), E4M3, 128),
        mean_tiles if means else None,
        plgpu.SMEM((groups, ROWS), jnp.float32),
        plgpu.SMEM((groups, size), jnp.float32),
        plgpu.SMEM((groups, ROWS), jnp.float32) if lse else None,
    )

    def released(slots):
        if config.cluster == 1:
            return plgpu.Barrier(num_arrivals=groups, num_barriers=slots)
        return plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=groups, num_barriers=slots
        )

    full = _Rings(
        plgpu.Barrier(num_barriers=config.key_slots),
        plgpu.Barrier(num_arrivals=2, num_barriers=config.value_slots),
        plgpu.Barrier(num_arrivals=2, num_barriers=_MEAN_SLOTS) if means else None,
        plgpu.Barrier(num_arrivals=3, num_barriers=groups),
    )
    free = _Rings(
        released(config.key_slots),
        released(config.value_slots),
        plgpu.Barrier(num_arrivals=groups, num_barriers=_MEAN_SLOTS) if means else None,
    )
    return memory, full, free


def shared_memory_bytes(
    config: Config, head_dim: int, code_dtype, out_dtype, *, means: bool = True, lse: bool = False
) -> int:
    """Bytes of shared memory that a block of threads allocates, barriers included."""
    scratch = _scratch(config, head_dim, code_dtype, out_dtype, means, lse)
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
    if jnp.dtype(code_dtype) not in (jnp.dtype(jnp.int8), jnp.dtype(E4M3)):
        return f"needs int8 or float8_e4m3fn codes, got {jnp.dtype(code_dtype)}"
    if head_dim not in HEAD_DIMS:
        return f"needs a head dim of 64 or 128, got {head_dim}"
    if softmax not in SOFTMAX:
        return f"needs softmax to be one of {SOFTMAX}, got {softmax!r}"
    if jnp.dtype(out_dtype) not in [jnp.dtype(x) for x in OUTPUT_DTYPES]:
        return f"needs a float32, bfloat16 or float16 output, got {jnp.dtype(out_dtype)}"
    if config is not None:
        needed = shared_memory_bytes(config, head_dim, code_dtype, out_dtype, lse=True)
        if needed > SHARED_MEMORY:
            return f"{config} needs {needed} bytes of shared memory, {SHARED_MEMORY} are there"
    return None


def attention(
    query_codes: Shaped[Array, "b n t h"],
    query_scale: Float[Array, "b n t"],
    key_codes: Shaped[Array, "b k p h"],
    key_scale: Float[Array, "b k j"],
    value_codes: Shaped[Array, "b k h+8 p"],
    value_scale: Float[Array, "b k h"],
    block_means: Float[Array, "b k j h"] | None,
    kv_count: Int[Array, " b"],
    *,
    softmax: str = "expcast",
    out_dtype=jnp.bfloat16,
    return_residual: bool = False,
    config: Config | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "b t n h"], Float[Array, "b t n"] | None]:
    """Attention over arrays in the prepared layout.

    Args:
      query_codes: int8 or float8_e4m3fn [B, N, T, H], H 64 or 128.
      query_scale: float32 [B, N, T]; times `key_scale` and the code product: a score in codes,
        eighths of an octave. Products with E4M3 codes must fit float16, and so must the scales'.
      key_codes: as the queries', [B, K, P, H], P a multiple of 256, N a multiple of K.
      key_scale: float32 [B, K, P / 128].
      value_codes: float8_e4m3fn [B, K, H + 8, P].
      value_scale: float32 [B, K, H].
      block_means: bfloat16 [B, K, P / 128, H] in units of the value scale; `None`: no means, which
        is faster.
      kv_count: int32 [B], valid keys of each batch row, 0 to P; the first ones. What is traced is
        clamped to that.
      softmax: `"expcast"`, `"expcast_running"` or `"exp"`.
      out_dtype: float32, bfloat16 or float16.
      return_residual: also return the normaliser.
      config: layout on the GPU; `None`: `default_config`.
      interpret: `False`, or parameters of Pallas's GPU interpreter.

    Returns:
      The output [B, T, N, H] and, if asked for, the natural-log normaliser, float32 [B, T, N].
      Zeros and -inf in batch rows without a valid key.

    Raises:
      NotImplementedError: what `unsupported` says.
      TypeError: an argument of another kind, by name.
      ValueError: an array of another shape or dtype, or a `kv_count` out of range, by name.
    """
    names = ("query_codes", "query_scale", "key_codes", "key_scale", "value_codes", "value_scale")
    arrays = (query_codes, query_scale, key_codes, key_scale, value_codes, value_scale)
    named = dict(zip(names, arrays)) | {"block_means": block_means, "kv_count": kv_count}
    check_options(out_dtype, interpret)
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config must be a Config or None, got {config!r}")
    check_kinds(named)
    _, heads, rows, size = query_codes.shape
    if config is None:
        config = default_config(rows, key_codes.shape[2], heads, size)
    reason = unsupported(query_codes.dtype, size, softmax, out_dtype, config)
    if reason is not None:
        raise NotImplementedError(f"the Hopper kernel {reason}")
    check_arrays(named)
    kv_count = within(kv_count, key_codes.shape[2])

    # Tiled copies are clipped at an array's end but want a multiple of 8 rows; plain ones, and all
    # copies of the interpreter, are not clipped, so their arrays reach to the end of the last tile.
    whole = config.warpgroups * config.cluster * ROWS
    query_codes = _pad(query_codes, 2, whole if interpret else _TILE_ROWS)
    query_scale = _pad(query_scale, 2, whole)
    if block_means is not None:
        block_means = _pad(block_means, 2, _TILE_ROWS)
    shape = _Shape(
        config,
        size,
        heads // key_codes.shape[1],
        _output_columns(size, out_dtype),
        math.log(2.0) / 8.0,
        not interpret,
    )
    operations = (InterpretedRegisters if interpret else Registers)(
        query_codes.dtype == jnp.int8, softmax, block_means is not None, size
    )
    inputs = (query_codes, query_scale, *arrays[2:])
    means = () if block_means is None else (block_means,)
    out, *lse = _kernel(shape, operations, inputs, out_dtype, return_residual, interpret)(
        *inputs, *means, kv_count
    )
    out = out[:, :rows]
    return out, jnp.swapaxes(lse[0][:, :, :rows], 1, 2) if return_residual else None


def _pad(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    """The array with zeros up to a multiple along an axis."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % multiple)
    return jnp.pad(array, widths) if widths[axis][1] else array


def _kernel(shape: _Shape, operations, inputs, out_dtype, return_residual: bool, interpret):
    batch, heads, rows, size = inputs[0].shape
    config, means = shape.config, operations.means

    def entry(*refs):
        arrays, refs = refs[:6], list(refs[6:])
        means_ref = refs.pop(0) if means else None
        kv_count, out, *lse = refs
        held = _Refs(arrays, means_ref, kv_count, out, lse[0] if lse else None)

        def scoped(memory, full, free):
            (query, staged), *rest = memory
            smem = _Memory(query, staged, *rest)
            attention_body(shape, operations, held, _Scratch(smem, full, free))

        scratch = _scratch(
            config, size, inputs[0].dtype, out_dtype, means, return_residual, not interpret
        )
        pl.run_scoped(scoped, *scratch, collective_axes="warpgroup")

    results = [jax.ShapeDtypeStruct((batch, rows, heads, size), out_dtype)]
    if return_residual:
        results.append(jax.ShapeDtypeStruct(inputs[1].shape, jnp.float32))
    cluster: dict[str, Any] = {}
    if config.cluster > 1:
        cluster = {"cluster": (config.cluster,), "cluster_names": ("cluster",)}
    tile = config.warpgroups * config.cluster * ROWS
    return plgpu.kernel(
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
