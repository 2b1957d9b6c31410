"""Tiles of tokens in the registers of a warpgroup, read and written at computed addresses.

Arithmetic on tiles is plain JAX on arrays with a register layout; loads of rows through an index,
and stores of codes, are inline PTX of 16 bytes a thread. `InterpretedTiles` in
`_tiles_interpreted.py` does the same in plain JAX, for Pallas's interpreter.

Two layouts of a tile of n tokens by H channels:

* `ROWS` (queries, keys): the tensor core's fragments. Four neighbouring threads, a quad, share a
  row. A thread loads 8 neighbouring channels at a time, which are four pairs of columns of a
  fragment: column c of a loaded tile holds channel `loaded_channels(H)[c]`. A thread stores 16
  neighbouring channels at a time: column c is stored as channel `stored_channels(H)[c]`. The
  matrix between the two puts channels where they belong.
  Of 8-bit codes of tokens, two words of four hold the eight channels: column c = 32 j + 16 p +
  4 t + e ("coded") is channel 32 j + 8 t + 4 p + e.
* `BLOCK` (values, 128 tokens): a thread holds 8 neighbouring channels of 16 neighbouring tokens (8,
  if H is 64), so that all tokens of a channel are in one warp. `HALF` (64 rows): of half as many.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from . import _memory as mem
from . import _ptx as ptx
from .layout import BLOCK, COUNT_ROWS

inline: Any = plgpu.inline_mgpu
WGMMA = plgpu.Layout.WGMMA
REF = plgpu.RefType()
CHUNK = 64
"""Centroids whose distances exist at a time."""
_TILING: Any = plgpu.TilingTransform
_SWIZZLE: Any = plgpu.SwizzleTransform
SWIZZLED = (_TILING((8, 64)), _SWIZZLE(128))
"""Shared memory of 16-bit operands."""


def loaded_channels(size: int) -> np.ndarray:
    """The channel that each column of a tile of loaded rows holds."""
    column = np.arange(size)
    group, thread, pair = column // 8, column % 8 // 2, column % 2
    return group // 4 * 32 + thread * 8 + group % 4 * 2 + pair


def stored_channels(size: int) -> np.ndarray:
    """The channel as which each column of a tile of codes is stored."""
    column = np.arange(size)
    group, thread, pair = column // 8, column % 8 // 2, column % 2
    return group // 8 * 64 + thread * 16 + group % 8 * 2 + pair


def _block_layout(size: int, rows: int = BLOCK) -> Any:
    tokens = size // 8 * rows // BLOCK
    tiling = fa.Tiling(((rows, size), (tokens, size // 4), (8,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-5, -2), vector_dim=-1)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Operations on tiles of a kernel's tokens.

    Indices of rows and entries count in rows [H] and entries of arrays of that many; negative ones
    read zeros and write nothing.

    Attributes:
      size: H, channels.
    """

    size: int

    # --- layouts

    def index(self, tokens: int, kind: str) -> jax.Array:
        """int32 [tokens] that count up, for tiles in the layout `kind`."""
        return plgpu.layout_cast(lax.iota(jnp.int32, tokens), self._tokens(kind, tokens))

    def _tokens(self, kind: str, tokens: int = BLOCK) -> Any:
        if kind == "flat":
            return plgpu.Layout.WG_STRIDED((tokens,), vec_size=1)
        return self._tile(kind).reduce(1)

    def _channels(self, kind: str) -> Any:
        return self._tile(kind).reduce(0)

    def _tile(self, kind: str) -> Any:
        if kind == "rows":
            return WGMMA
        return _block_layout(self.size, BLOCK // 2 if kind == "half" else BLOCK)

    def over_tokens(self, tokens: jax.Array, kind: str) -> jax.Array:
        """[n] as [n, H]."""
        shape = (tokens.shape[0], self.size)
        return plgpu.layout_cast(lax.broadcast_in_dim(tokens, shape, [0]), self._tile(kind))

    def over_channels(self, channels: jax.Array, tokens: int, kind: str) -> jax.Array:
        """[H] as [tokens, H]."""
        shape = (tokens, self.size)
        return plgpu.layout_cast(lax.broadcast_in_dim(channels, shape, [1]), self._tile(kind))

    def zeros(self, shape, dtype, kind: str) -> jax.Array:
        """[H] or [n, H] zeros."""
        layout = self._tile(kind) if len(shape) == 2 else self._channels(kind)
        return plgpu.layout_cast(jnp.zeros(shape, dtype), layout)

    def full(self, tokens: int, value, kind: str) -> jax.Array:
        """[tokens] of a number."""
        return plgpu.layout_cast(jnp.full((tokens,), value), self._tokens(kind, tokens))

    def largest(self, values: jax.Array, axis: int) -> jax.Array:
        """Largest magnitude along an axis; a NaN wins."""
        return jnp.max(jnp.abs(values), axis)

    def highest(self, values: jax.Array, axis: int) -> jax.Array:
        """Largest along an axis; a NaN wins."""
        return jnp.max(values, axis)

    # --- entries

    def entries(self, ref, index: jax.Array, kind: str) -> jax.Array:
        """Entries of a flat array of 32-bit numbers, one for each token."""
        layout, dtype = self._tokens(kind, index.shape[0]), ref.dtype

        @inline(
            arg_types=(REF, layout),
            return_type=plgpu.ShapeDtypeStruct(index.shape, dtype, layout=layout),
        )
        def load(ctx, ref, index):
            del ctx
            base = mem.pointer(ref)
            kind = utils.dtype_to_ir_type(dtype)
            registers = np.empty_like(index.registers)
            for place, register in np.ndenumerate(index.registers):
                at = ptx.element(register, 0)
                (word,) = mem.load_words(mem.address(base, at, 4), at, 1)
                registers[place] = mem.vector_of_words([word], kind)
            signed = True if dtype == jnp.int32 else None
            return fa.FragmentedArray(_registers=registers, _layout=index.layout, _is_signed=signed)

        return load(ref, index)

    def put_entries(self, ref, index: jax.Array, values: jax.Array, kind: str) -> None:
        """Store a 32-bit number for each token."""
        layout = self._tokens(kind, index.shape[0])

        @inline(arg_types=(REF, layout, layout))
        def store(ctx, ref, index, values):
            del ctx
            base = mem.pointer(ref)
            for place, register in np.ndenumerate(index.registers):
                at = ptx.element(register, 0)
                word = ptx.bits(ptx.element(values.registers[place], 0))
                mem.store_words(mem.address(base, at, 4), at, [word])

        store(ref, index, values)

    def put_entry(self, ref, index, value) -> None:
        """Store a 32-bit number."""
        splat = plgpu.Layout.WG_SPLAT((1,))

        @inline(arg_types=(REF, splat, splat))
        def store(ctx, ref, index, value):
            del ctx
            at = index.registers.item()
            word = ptx.bits(value.registers.item())
            mem.store_words(mem.address(mem.pointer(ref), at, 4), at, [word])

        store(ref, jnp.full((1,), index, jnp.int32), jnp.full((1,), value, ref.dtype))

    def channels(self, ref, row, kind: str) -> jax.Array:
        """Row `row` of float32 [R, H]."""
        return plgpu.load(ref.at[row], layout=self._channels(kind), optimized=False)

    def put_channels(self, ref, row, values: jax.Array) -> None:
        """Store float32 [H], in the layout of a block's channels, as row `row` of [R, H].

        To a bfloat16 array they have to be exact in it.
        """
        layout, width = self._channels("block"), jnp.dtype(ref.dtype).itemsize

        @inline(arg_types=(REF, plgpu.Layout.WG_SPLAT((1,)), layout))
        def store(ctx, ref, row, values):
            del ctx
            at = row.registers.item()
            offset = mem.times(self._first_channel(), width)
            address = mem.address(mem.pointer(ref), at, self.size * width, offset)
            (register,) = values.registers.flat
            words = [ptx.bits(ptx.element(register, i)) for i in range(8)]
            words = words if width == 4 else mem.narrow(words)
            for part in range(len(words) // 4):
                some = words[4 * part : 4 * part + 4]
                mem.store_words(arith.addi(address, mem.constant64(16 * part)), at, some)

        store(ref, jnp.full((1,), row, jnp.int32), values)

    def _first_channel(self) -> ir.Value:
        """The first of this thread's eight channels of a block."""
        lanes = self.size // 32
        chunk = arith.andi(mem.lane(), ptx.integer(lanes - 1))
        return arith.addi(mem.times(mem.warp(), self.size // 4), mem.times(chunk, 8))

    # --- rows of tokens

    def rows(self, ref, row: jax.Array, kind: str) -> jax.Array:
        """Rows [n, H] of tokens [R, H]; of a `"rows"` tile in the columns `loaded_channels`."""
        shape = (row.shape[0], self.size)
        load = inline(
            arg_types=(REF, self._tokens(kind)),
            return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=self._tile(kind)),
        )
        body = self._fragment_rows if kind == "rows" else self._block_rows
        return load(functools.partial(body, ref.dtype))(ref, row)

    def _chunk(self, address: ir.Value, at: ir.Value, kind: ir.Type) -> list[ir.Value]:
        """Words of eight channels."""
        words = []
        for part in range(utils.bitwidth(kind) // 16):
            words += mem.load_words(arith.addi(address, mem.constant64(16 * part)), at, 4)
        return words

    def _fragment_rows(self, dtype, ctx, ref, row):
        del ctx
        kind = utils.dtype_to_ir_type(dtype)
        width = utils.bitwidth(kind) // 8
        base = mem.pointer(ref)
        mine = mem.times(arith.andi(mem.lane(), ptx.integer(3)), 8 * width)
        shape = (row.shape[0], self.size)
        registers = np.empty(fa.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        for tile, half in np.ndindex(shape[0] // 64, 2):
            at = ptx.element(row.registers[tile, 0, half, 0, 0], 0)
            first = mem.address(base, at, self.size * width, mine)
            for chunk in range(self.size // 32):
                address = arith.addi(first, mem.constant64(32 * width * chunk))
                words = self._chunk(address, at, kind)
                per_pair = width // 2
                for pair in range(4):
                    some = words[pair * per_pair : (pair + 1) * per_pair]
                    place = (tile, 4 * chunk + pair, 0, 0, half, 0, 0, 0, 0)
                    registers[place] = mem.vector_of_words(some, kind)
        return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    def _block_rows(self, dtype, ctx, ref, row):
        del ctx
        kind = utils.dtype_to_ir_type(dtype)
        width = utils.bitwidth(kind) // 8
        base, mine = mem.pointer(ref), mem.times(self._first_channel(), width)
        layout = _block_layout(self.size, rows := row.shape[0]).to_mgpu()
        registers = np.empty(layout.registers_shape((rows, self.size)), dtype=object)
        for token, register in enumerate(row.registers.flat):
            at = ptx.element(register, 0)
            address = mem.address(base, at, self.size * width, mine)
            words = self._chunk(address, at, kind)
            registers[0, 0, 0, 0, token, 0, 0] = mem.vector_of_words(words, kind)
        return fa.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    # --- codes

    def put_codes(self, ref, row: jax.Array, values: jax.Array) -> None:
        """Store a tile of rows as codes of [R, H], columns in the order of `stored_channels`.

        int8 codes are the lowest bytes of the values' bits, E4M3 ones the nearest, saturated.
        """
        pack = mem.low_bytes if ref.dtype == jnp.int8 else ptx.e4m3x4_from_f32

        @inline(arg_types=(REF, self._tokens("rows"), WGMMA))
        def store(ctx, ref, row, values):
            del ctx
            base = mem.pointer(ref)
            mine = mem.times(arith.andi(mem.lane(), ptx.integer(3)), 16)
            for tile, half in np.ndindex(row.shape[0] // 64, 2):
                at = ptx.element(row.registers[tile, 0, half, 0, 0], 0)
                first = mem.address(base, at, self.size, mine)

                def pair(group, tile=tile, half=half):
                    register = values.registers[tile, group, 0, 0, half, 0, 0, 0, 0]
                    return [ptx.element(register, i) for i in range(2)]

                for chunk in range(self.size // 64):
                    groups = [8 * chunk + 2 * i for i in range(4)]
                    words = [pack([*pair(g), *pair(g + 1)]) for g in groups]
                    address = arith.addi(first, mem.constant64(64 * chunk))
                    mem.store_words(address, at, words)

        store(ref, row, values)

    def put_value_codes(
        self, ref, head, half, values: jax.Array, counts: jax.Array, length: int
    ) -> None:
        """Store half a block of values as E4M3 [R, H + 8, P] transposed, and its count rows.

        Args:
          head: which of R.
          half: which 64 of the `length` = P tokens.
          values: float32 [64, H] within E4M3's range, in the order in which they are stored.
          counts: float32 [64], 1 at valid tokens, else 0.
        """
        splat, tile = plgpu.Layout.WG_SPLAT((1,)), self._tile("half")

        @inline(arg_types=(REF, splat, splat, tile, self._tokens("half")))
        def store(ctx, ref, head, half, values, counts):
            del ctx
            head, half = head.registers.item(), half.registers.item()
            lanes, tokens = self.size // 32, self.size // 16
            always = ptx.integer(0)
            group = arith.divui(mem.lane(), ptx.integer(lanes))
            column = arith.addi(mem.times(half, BLOCK // 2), mem.times(group, tokens))
            rows = mem.address(mem.pointer(ref), head, (self.size + COUNT_ROWS) * length, column)
            first = mem.address(rows, self._first_channel(), length)
            for channel in range(8):
                column_of = [
                    ptx.element(values.registers[0, 0, 0, 0, t, 0, 0], channel)
                    for t in range(tokens)
                ]
                address = arith.addi(first, mem.constant64(channel * length))
                mem.store_words(address, always, _e4m3_words(column_of))
            # Threads of the first eight columns of chunks have a count row each.
            chunk = arith.andi(mem.lane(), ptx.integer(lanes - 1))
            row = arith.addi(mem.times(mem.warp(), lanes), chunk)
            block = arith.shrui(half, ptx.integer(1))
            other = arith.andi(arith.xori(row, block), ptx.integer(1))
            there = arith.select(_equal(other), ptx.constant(1.0), ptx.constant(0.0))
            held = [ptx.multiply(ptx.element(x, 0), there) for x in counts.registers.flat]
            mine = arith.subi(ptx.integer(COUNT_ROWS - 1), row)
            address = mem.address(rows, arith.addi(row, ptx.integer(self.size)), length)
            mem.store_words(address, mine, _e4m3_words(held))

        one = functools.partial(jnp.full, (1,), dtype=jnp.int32)
        store(ref, one(head), one(half), values, counts)

    # --- products

    def with_matrix(self, ref, index, body) -> None:
        """Call `body` with what `product` takes as matrix `index` of [n, H, H]."""

        def scoped(memory, barrier):
            plgpu.copy_gmem_to_smem(ref.at[index], memory, barrier)
            plgpu.barrier_wait(barrier)
            body(memory)

        shape = (self.size, self.size)
        memory = plgpu.SMEM(shape, ref.dtype, transforms=SWIZZLED)
        pl.run_scoped(scoped, memory, plgpu.Barrier())

    def with_row(self, body) -> None:
        """Call `body` with memory for two copies of a row of a `"rows"` tile."""
        pl.run_scoped(body, plgpu.SMEM((2, self.size), jnp.float32))

    def keep_row(self, memory, rows: jax.Array) -> None:
        """Keep a row of float32 [64, H], which are all alike."""
        layout = self._channels("rows")

        @inline(
            arg_types=(WGMMA,),
            return_type=plgpu.ShapeDtypeStruct((self.size,), jnp.float32, layout=layout),
        )
        def any_row(ctx, rows):
            del ctx
            own = layout.to_mgpu()
            registers = np.empty(own.registers_shape((self.size,)), dtype=object)
            registers[:, 0, 0] = rows.registers[0, :, 0, 0, 0, 0, 0, 0, 0]
            return fa.FragmentedArray(_registers=registers, _layout=own, _is_signed=None)

        row = any_row(rows)
        for copy in range(2):
            memory.at[copy][...] = row
        plgpu.commit_smem()

    def kept_row(self, memory, copy) -> jax.Array:
        """The row, float32 [H]; a copy that varies keeps it in memory, not in registers."""
        return plgpu.load(memory.at[copy], layout=self._channels("rows"), optimized=False)

    def product(self, rows: jax.Array, matrix, start: jax.Array | None = None) -> jax.Array:
        """A start [n, H], or zeros, plus rows [n, H] (16-bit floats) times matrixᵀ, float32."""
        if start is None:
            start = self.zeros(rows.shape, jnp.float32, "rows")
        out: Any = pl.run_state(lambda acc: plgpu.wgmma(acc, rows, matrix.transpose((1, 0))))(
            plgpu.ACC.init(start)
        )
        return out


def _equal(value: ir.Value) -> ir.Value:
    """Whether an integer is zero, as an i1."""
    return arith.cmpi(arith.CmpIPredicate.eq, value, ptx.integer(0))


def _e4m3_words(values: list[ir.Value]) -> list[ir.Value]:
    return [ptx.e4m3x4_from_f32(values[i : i + 4]) for i in range(0, len(values), 4)]
