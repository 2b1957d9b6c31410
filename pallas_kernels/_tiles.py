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
from jaxlib.mlir.dialects import arith, llvm, vector

from . import _ptx as ptx
from ._numbers import MAGIC
from .layout import BLOCK, COUNT_ROWS

_inline: Any = plgpu.inline_mgpu
_WGMMA = plgpu.Layout.WGMMA
_REF = plgpu.RefType()
CHUNK = 64
"""Centroids whose distances exist at a time."""
_TILING: Any = plgpu.TilingTransform
_SWIZZLE: Any = plgpu.SwizzleTransform
_SWIZZLED = (_TILING((8, 64)), _SWIZZLE(128))
"""Shared memory of 16-bit operands."""
_PIECES = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))
"""Products of pieces of 8 bits that matter to float32."""


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


def _i64(value: ir.Value) -> ir.Value:
    return arith.extsi(ir.IntegerType.get_signless(64), value)


def _constant64(value: int) -> ir.Value:
    kind = ir.IntegerType.get_signless(64)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def _pointer(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def _address(base: ir.Value, index: ir.Value, stride: int, offset: Any = None) -> ir.Value:
    """base + index · stride bytes (+ offset, a 32-bit value)."""
    address = arith.addi(base, arith.muli(_i64(index), _constant64(stride)))
    return address if offset is None else arith.addi(address, _i64(offset))


def _thread(text: str) -> ir.Value:
    return ptx.instruction(ptx.i32(), text, "=r")


def _lane() -> ir.Value:
    return _thread("mov.u32 $0, %laneid;")


def _warp() -> ir.Value:
    return _thread("{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 5; and.b32 $0, t, 3; }")


def _times(value: ir.Value, factor: int) -> ir.Value:
    return arith.muli(value, ptx.integer(factor))


def _load_words(address: ir.Value, index: ir.Value, words: int) -> list[ir.Value]:
    """`words` (1 or 4) 32-bit words; zeros where the index is negative."""
    # Nothing that a kernel reads is written by it, so loads may move.
    outputs = ", ".join(f"${i}" for i in range(words))
    zero = " ".join(f"mov.b32 ${i}, 0;" for i in range(words))
    kind = ".L1::no_allocate.v4.b32 {" + outputs + "}" if words == 4 else f".b32 {outputs}"
    text = (
        f"{{ .reg .pred p; setp.ge.s32 p, ${words + 1}, 0; {zero} "
        f"@p ld.global.nc{kind}, [${words}]; }}"
    )
    constraints = ",".join(["=&r"] * words + ["l", "r"])
    if words == 1:
        return [ptx.instruction(ptx.i32(), text, constraints, address, index)]
    struct = llvm.StructType.get_literal([ptx.i32()] * words)
    result = ptx.instruction(struct, text, constraints, address, index)
    return [llvm.extractvalue(ptx.i32(), result, [i]) for i in range(words)]


def _store_words(address: ir.Value, index: ir.Value, words: list[ir.Value]) -> None:
    """1, 2 or 4 32-bit words, unless the index is negative."""
    n = len(words)
    names = ", ".join(f"${i + 2}" for i in range(n))
    kind = f".v{n}.b32 [$0], {{{names}}}" if n > 1 else f".b32 [$0], {names}"
    text = f"{{ .reg .pred p; setp.ge.s32 p, $1, 0; @p st.global{kind}; }}"
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [address, index, *words],
        text,
        ",".join(["l", "r", *["r"] * n]),
        has_side_effects=True,
    )


def _vector_of_words(words: list[ir.Value], kind: ir.Type) -> ir.Value:
    """Words as a vector of 16- or 32-bit elements."""
    packed = vector.from_elements(ir.VectorType.get((len(words),), ptx.i32()), words)
    count = len(words) * 32 // utils.bitwidth(kind)
    return vector.bitcast(ir.VectorType.get((count,), kind), packed)


def _low_bytes(values: list[ir.Value]) -> ir.Value:
    """The lowest bytes of four floats' bits."""
    bits = [ptx.bits(x) for x in values]
    low, high = (ptx.permute_bytes(bits[i], bits[i + 1], 0x0040) for i in (0, 2))
    return ptx.permute_bytes(low, high, 0x5410)


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
            return _WGMMA
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

        @_inline(
            arg_types=(_REF, layout),
            return_type=plgpu.ShapeDtypeStruct(index.shape, dtype, layout=layout),
        )
        def load(ctx, ref, index):
            del ctx
            base = _pointer(ref)
            kind = utils.dtype_to_ir_type(dtype)
            registers = np.empty_like(index.registers)
            for place, register in np.ndenumerate(index.registers):
                at = ptx.element(register, 0)
                (word,) = _load_words(_address(base, at, 4), at, 1)
                registers[place] = _vector_of_words([word], kind)
            signed = True if dtype == jnp.int32 else None
            return fa.FragmentedArray(_registers=registers, _layout=index.layout, _is_signed=signed)

        return load(ref, index)

    def put_entries(self, ref, index: jax.Array, values: jax.Array, kind: str) -> None:
        """Store a 32-bit number for each token."""
        layout = self._tokens(kind, index.shape[0])

        @_inline(arg_types=(_REF, layout, layout))
        def store(ctx, ref, index, values):
            del ctx
            base = _pointer(ref)
            for place, register in np.ndenumerate(index.registers):
                at = ptx.element(register, 0)
                word = ptx.bits(ptx.element(values.registers[place], 0))
                _store_words(_address(base, at, 4), at, [word])

        store(ref, index, values)

    def put_entry(self, ref, index, value) -> None:
        """Store a 32-bit number."""
        splat = plgpu.Layout.WG_SPLAT((1,))

        @_inline(arg_types=(_REF, splat, splat))
        def store(ctx, ref, index, value):
            del ctx
            at = index.registers.item()
            word = ptx.bits(value.registers.item())
            _store_words(_address(_pointer(ref), at, 4), at, [word])

        store(ref, jnp.full((1,), index, jnp.int32), jnp.full((1,), value, ref.dtype))

    def channels(self, ref, row, kind: str) -> jax.Array:
        """Row `row` of float32 [R, H]."""
        return plgpu.load(ref.at[row], layout=self._channels(kind), optimized=False)

    def put_channels(self, ref, row, values: jax.Array) -> None:
        """Store float32 [H], in the layout of a block's channels, as row `row` of [R, H].

        To a bfloat16 array they have to be exact in it.
        """
        layout, width = self._channels("block"), jnp.dtype(ref.dtype).itemsize

        @_inline(arg_types=(_REF, plgpu.Layout.WG_SPLAT((1,)), layout))
        def store(ctx, ref, row, values):
            del ctx
            at = row.registers.item()
            offset = _times(self._first_channel(), width)
            address = _address(_pointer(ref), at, self.size * width, offset)
            (register,) = values.registers.flat
            words = [ptx.bits(ptx.element(register, i)) for i in range(8)]
            words = words if width == 4 else _narrow(words)
            for part in range(len(words) // 4):
                some = words[4 * part : 4 * part + 4]
                _store_words(arith.addi(address, _constant64(16 * part)), at, some)

        store(ref, jnp.full((1,), row, jnp.int32), values)

    def _first_channel(self) -> ir.Value:
        """The first of this thread's eight channels of a block."""
        lanes = self.size // 32
        chunk = arith.andi(_lane(), ptx.integer(lanes - 1))
        return arith.addi(_times(_warp(), self.size // 4), _times(chunk, 8))

    # --- rows of tokens

    def rows(self, ref, row: jax.Array, kind: str) -> jax.Array:
        """Rows [n, H] of tokens [R, H]; of a `"rows"` tile in the columns `loaded_channels`."""
        shape = (row.shape[0], self.size)
        load = _inline(
            arg_types=(_REF, self._tokens(kind)),
            return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=self._tile(kind)),
        )
        body = self._fragment_rows if kind == "rows" else self._block_rows
        return load(functools.partial(body, ref.dtype))(ref, row)

    def _chunk(self, address: ir.Value, at: ir.Value, kind: ir.Type) -> list[ir.Value]:
        """Words of eight channels."""
        words = []
        for part in range(utils.bitwidth(kind) // 16):
            words += _load_words(arith.addi(address, _constant64(16 * part)), at, 4)
        return words

    def _fragment_rows(self, dtype, ctx, ref, row):
        del ctx
        kind = utils.dtype_to_ir_type(dtype)
        width = utils.bitwidth(kind) // 8
        base = _pointer(ref)
        mine = _times(arith.andi(_lane(), ptx.integer(3)), 8 * width)
        shape = (row.shape[0], self.size)
        registers = np.empty(fa.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        for tile, half in np.ndindex(shape[0] // 64, 2):
            at = ptx.element(row.registers[tile, 0, half, 0, 0], 0)
            first = _address(base, at, self.size * width, mine)
            for chunk in range(self.size // 32):
                address = arith.addi(first, _constant64(32 * width * chunk))
                words = self._chunk(address, at, kind)
                per_pair = width // 2
                for pair in range(4):
                    some = words[pair * per_pair : (pair + 1) * per_pair]
                    place = (tile, 4 * chunk + pair, 0, 0, half, 0, 0, 0, 0)
                    registers[place] = _vector_of_words(some, kind)
        return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    def _block_rows(self, dtype, ctx, ref, row):
        del ctx
        kind = utils.dtype_to_ir_type(dtype)
        width = utils.bitwidth(kind) // 8
        base, mine = _pointer(ref), _times(self._first_channel(), width)
        layout = _block_layout(self.size, rows := row.shape[0]).to_mgpu()
        registers = np.empty(layout.registers_shape((rows, self.size)), dtype=object)
        for token, register in enumerate(row.registers.flat):
            at = ptx.element(register, 0)
            address = _address(base, at, self.size * width, mine)
            words = self._chunk(address, at, kind)
            registers[0, 0, 0, 0, token, 0, 0] = _vector_of_words(words, kind)
        return fa.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    # --- nearest centroids

    def token_codes(self, ref, row: jax.Array, scale_ref, shift_ref, head) -> jax.Array:
        """Codes int8 [n, H] of rows of tokens, in coded columns.

        A code is value · scale + shift of row `head` of float32 [R, H], rounded, from 0 to 127;
        with bfloat16 values both are bfloat16 and codes are those of the sum less 128.
        """
        packed = ref.dtype == jnp.bfloat16
        splat, layout = plgpu.Layout.WG_SPLAT((1,)), plgpu.Layout.WGMMA_8BIT
        shape, dtype = (row.shape[0], self.size), ref.dtype

        @_inline(
            arg_types=(_REF, self._tokens("rows"), _REF, _REF, splat),
            return_type=plgpu.ShapeDtypeStruct(shape, jnp.int8, layout=layout),
        )
        def load(ctx, ref, row, scale_ref, shift_ref, head):
            del ctx
            kind = utils.dtype_to_ir_type(dtype)
            width = utils.bitwidth(kind) // 8
            own = 4
            quad = arith.andi(_lane(), ptx.integer(3))
            at = head.registers.item()
            scales, shifts = (
                _address(_pointer(x), at, self.size * own, _times(quad, 8 * own))
                for x in (scale_ref, shift_ref)
            )
            kind_of_scale = ptx.f32()
            narrow = _narrow if packed else (lambda words: words)
            scale = narrow(self._chunk(scales, at, kind_of_scale))
            registers = np.empty(fa.WGMMA_LAYOUT_8BIT.registers_shape(shape), dtype=object)
            base = _pointer(ref)
            byte4 = ir.VectorType.get((4,), ir.IntegerType.get_signless(8))
            for chunk in range(self.size // 32):
                offset = _constant64(32 * own * chunk)
                shift = narrow(self._chunk(arith.addi(shifts, offset), at, kind_of_scale))
                for tile, half in np.ndindex(shape[0] // 64, 2):
                    token = ptx.element(row.registers[tile, 0, half, 0, 0], 0)
                    address = _address(base, token, self.size * width, _times(quad, 8 * width))
                    address = arith.addi(address, _constant64(32 * width * chunk))
                    words = self._chunk(address, token, kind)
                    if not packed:
                        words = _as_floats(words, kind)
                    for part in range(2):
                        some = slice(part * len(words) // 2, (part + 1) * len(words) // 2)
                        code = _packed_codes if packed else _codes
                        some_scale = slice(part * len(scale) // 2, (part + 1) * len(scale) // 2)
                        word = code(words[some], scale[some_scale], shift[some_scale])
                        place = (tile, 2 * chunk + part, 0, 0, half, 0, 0, 0, 0)
                        one = vector.broadcast(ir.VectorType.get((1,), ptx.i32()), word)
                        registers[place] = vector.bitcast(byte4, one)
            return fa.FragmentedArray(
                _registers=registers, _layout=fa.WGMMA_LAYOUT_8BIT, _is_signed=True
            )

        return load(ref, row, scale_ref, shift_ref, jnp.full((1,), head, jnp.int32))

    def loop(self, count: int, body) -> None:
        """Call `body` with 0 … count - 1; what it keeps is in memory."""
        lax.fori_loop(0, count, lambda index, _: body(index), None)

    def put_token_codes(self, ref, row: jax.Array, values: jax.Array, kind: str) -> None:
        """Store the lowest bytes of a block's bits as rows of int8 [R, H], in coded columns."""

        @_inline(arg_types=(_REF, self._tokens(kind), self._tile(kind)))
        def store(ctx, ref, row, values):
            del ctx
            base, channel = _pointer(ref), self._first_channel()
            thread = arith.andi(arith.shrui(channel, ptx.integer(3)), ptx.integer(3))
            column = arith.addi(arith.andi(channel, ptx.integer(-32)), _times(thread, 4))
            for token, register in enumerate(row.registers.flat):
                at = ptx.element(register, 0)
                held = values.registers[0, 0, 0, 0, token, 0, 0]
                eight = [ptx.element(held, i) for i in range(8)]
                address = _address(base, at, self.size, column)
                for part in range(2):
                    word = _low_bytes(eight[4 * part : 4 * part + 4])
                    _store_words(arith.addi(address, _constant64(16 * part)), at, [word])

        store(ref, row, values)

    def with_centroids(self, count: int, width: int, body) -> None:
        """Call `body` with memory for codes of `count` centroids and for counts of labels."""
        tiling: Any = plgpu.TilingTransform
        swizzling: Any = plgpu.SwizzleTransform
        transforms = (tiling((8, self.size)), swizzling(self.size))
        chunks = count // CHUNK
        memory = plgpu.SMEM((chunks, CHUNK, self.size), jnp.int8, transforms=transforms)
        pl.run_scoped(
            lambda *held: body(_Centroids(*held)),
            *(memory, plgpu.SMEM((chunks, CHUNK), jnp.int32)),
            plgpu.Barrier(num_arrivals=2 * chunks),
            *(plgpu.SMEM((width,), jnp.int32), plgpu.SMEM((BLOCK,), jnp.int32)),
        )

    def load_centroids(self, memory, codes_ref, base_ref, head, first) -> None:
        """Take the centroids from chunk `first` on."""
        plgpu.commit_smem()  # everyone has read what was there
        for chunk in range(memory.base.shape[0]):
            for source, target in ((codes_ref, memory.codes), (base_ref, memory.base)):
                plgpu.copy_gmem_to_smem(
                    source.at[head, first + chunk], target.at[chunk], memory.there
                )
        plgpu.barrier_wait(memory.there)

    def distances(self, codes: jax.Array, memory, chunk, factor: int) -> jax.Array:
        """factor · products of codes [n, H] and a chunk of centroids, plus their bases, int32."""
        shape = (codes.shape[0], CHUNK)
        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.int32), _WGMMA)
        inner: Any = pl.run_state(
            lambda acc: plgpu.wgmma(acc, codes, memory.codes.at[chunk].transpose((1, 0)))
        )(plgpu.ACC.init(zeros))
        base = plgpu.load(memory.base.at[chunk], layout=_WGMMA.reduce(0), optimized=False)
        return inner * factor + lax.broadcast_in_dim(base, shape, [1])

    def flat(self, values: jax.Array, memory) -> jax.Array:
        """int32 [128] of a tile of rows as one a thread."""
        plgpu.commit_smem()
        memory.labels[...] = values
        plgpu.commit_smem()
        return plgpu.load(memory.labels, layout=self._tokens("flat"), optimized=False)

    def clear_counts(self, memory) -> None:
        width = memory.counts.shape[0]
        memory.counts[...] = self.full(width, jnp.int32(0), "flat")
        plgpu.commit_smem()

    def counts(self, memory) -> jax.Array:
        """Of each label so far, int32 [W]."""
        layout = self._tokens("flat", memory.counts.shape[0])
        return plgpu.load(memory.counts, layout=layout, optimized=False)

    def ranks(self, label: jax.Array, memory) -> jax.Array:
        """How many tokens had the label before each of [128]; the counts then have them too."""
        layout = self._tokens("flat")

        @_inline(
            arg_types=(layout, _REF),
            return_type=plgpu.ShapeDtypeStruct((BLOCK,), jnp.int32, layout=layout),
        )
        def rank(ctx, label, counts):
            del ctx
            label = ptx.element(label.registers.item(), 0)
            pointer = llvm.ptrtoint(ptx.i32(), utils.memref_ptr(counts))
            address = arith.addi(pointer, _times(label, 4))
            same = _effect("match.any.sync.b32 $0, $1, 0xffffffff;", "=r,r", label)
            text = "{ .reg .b32 t; mov.u32 t, %lanemask_lt; and.b32 t, t, $1; popc.b32 $0, t; }"
            before = ptx.instruction(ptx.i32(), text, "=r,r", same)
            found, warp = ptx.integer(0), _warp()
            for turn in range(4):
                found = _effect(
                    _TURN.replace("TURN", str(turn)),
                    "=r,r,r,r,r,r",
                    address,
                    warp,
                    same,
                    before,
                    found,
                )
                utils.warpgroup_barrier()
            register = vector.broadcast(
                ir.VectorType.get((1,), ptx.i32()), arith.addi(found, before)
            )
            registers = np.empty(layout.to_mgpu().registers_shape((BLOCK,)), dtype=object)
            registers[...] = register
            return fa.FragmentedArray(
                _registers=registers, _layout=layout.to_mgpu(), _is_signed=True
            )

        return rank(label, memory.counts)

    # --- sums of clusters

    def with_members(self, dtype, body) -> None:
        """Call `body` with memory for 128 tokens of a 16-bit dtype."""
        pl.run_scoped(body, plgpu.SMEM((BLOCK, self.size), dtype, transforms=_SWIZZLED))

    def hold_members(self, memory, rows: jax.Array) -> None:
        """Keep a tile of rows; what is not finite as zeros, so that it stays in its own cluster."""
        size = jnp.abs(rows.astype(jnp.float32))
        rows = jnp.where(size < jnp.inf, rows, jnp.zeros_like(rows))
        plgpu.commit_smem()
        memory[...] = rows
        plgpu.commit_smem()

    def membership(self, label: jax.Array, memory) -> jax.Array:
        """float32 [64, 128]: 1 where a token of a tile of rows has the label, else 0."""
        shape = (CHUNK, BLOCK)
        plgpu.commit_smem()
        memory.labels[...] = label
        plgpu.commit_smem()
        label = plgpu.load(memory.labels, layout=_WGMMA.reduce(0), optimized=False)
        label = plgpu.layout_cast(lax.broadcast_in_dim(label, shape, [1]), _WGMMA)
        number = lax.broadcast_in_dim(self.index(CHUNK, "rows"), shape, [0])
        same = label == plgpu.layout_cast(number, _WGMMA)
        return jnp.where(same, 1.0, 0.0)

    def add_members(self, total: jax.Array, member: jax.Array, memory) -> jax.Array:
        """float32 [64, H] plus the sums of the kept tokens of each label."""
        member = member.astype(memory.dtype)
        out: Any = pl.run_state(lambda acc: plgpu.wgmma(acc, member, memory))(plgpu.ACC.init(total))
        return out

    def put_sums(self, ref, row: jax.Array, values: jax.Array) -> None:
        """Store a tile of rows, in the columns `loaded_channels`, as float32 [R, H]."""

        @_inline(arg_types=(_REF, self._tokens("rows"), _WGMMA))
        def store(ctx, ref, row, values):
            del ctx
            mine = _times(arith.andi(_lane(), ptx.integer(3)), 32)
            for tile, half in np.ndindex(row.shape[0] // 64, 2):
                at = ptx.element(row.registers[tile, 0, half, 0, 0], 0)
                first = _address(_pointer(ref), at, self.size * 4, mine)
                for part in range(self.size // 16):
                    pairs = [
                        values.registers[tile, 2 * part + i, 0, 0, half, 0, 0, 0, 0]
                        for i in range(2)
                    ]
                    words = [ptx.bits(ptx.element(x, i)) for x in pairs for i in range(2)]
                    offset = 128 * (part // 2) + 16 * (part % 2)
                    _store_words(arith.addi(first, _constant64(offset)), at, words)

        store(ref, row, values)

    def put_rows(self, ref, row: jax.Array, values: jax.Array, kind: str) -> None:
        """Store a block's rows as float32 [R, H]."""

        @_inline(arg_types=(_REF, self._tokens(kind), self._tile(kind)))
        def store(ctx, ref, row, values):
            del ctx
            base, mine = _pointer(ref), _times(self._first_channel(), 4)
            for token, register in enumerate(row.registers.flat):
                at = ptx.element(register, 0)
                held = values.registers[0, 0, 0, 0, token, 0, 0]
                words = [ptx.bits(ptx.element(held, i)) for i in range(8)]
                address = _address(base, at, self.size * 4, mine)
                for part in range(2):
                    some = words[4 * part : 4 * part + 4]
                    _store_words(arith.addi(address, _constant64(16 * part)), at, some)

        store(ref, row, values)

    # --- the chain of clusters

    def with_chain(self, body) -> None:
        """Call `body` with memory for three pieces of 64 rows, their squares and distances."""
        piece = plgpu.SMEM((3, CHUNK, self.size), jnp.bfloat16, transforms=_SWIZZLED)
        pl.run_scoped(
            lambda *held: body(_Chain(*held)),
            *(piece, plgpu.SMEM((CHUNK,), jnp.float32), plgpu.SMEM((CHUNK, BLOCK), jnp.float32)),
        )

    def inner_products(self, rows: jax.Array, memory) -> jax.Array:
        """Of float32 rows [64, H] with one another, in float32's precision."""
        rest = rows
        for number in range(3):
            piece = rest.astype(jnp.bfloat16)
            rest = rest - piece.astype(jnp.float32)
            memory.pieces.at[number][...] = piece
        plgpu.commit_smem()
        total: Any = plgpu.layout_cast(jnp.zeros((CHUNK, CHUNK), jnp.float32), _WGMMA)
        for one, other in _PIECES:
            pair = memory.pieces.at[one], memory.pieces.at[other].transpose((1, 0))
            total = pl.run_state(lambda acc, pair=pair: plgpu.wgmma(acc, *pair))(
                plgpu.ACC.init(total)
            )
        return total

    def over_both(self, square: jax.Array, memory) -> tuple[jax.Array, jax.Array]:
        """[64] of rows as [64, 64], over the columns and over the rows."""
        memory.square[...] = square
        plgpu.commit_smem()
        column = plgpu.load(memory.square, layout=_WGMMA.reduce(0), optimized=False)
        shape = (CHUNK, CHUNK)
        spread = [
            lax.broadcast_in_dim(square, shape, [0]),
            lax.broadcast_in_dim(column, shape, [1]),
        ]
        one, other = (plgpu.layout_cast(x, _WGMMA) for x in spread)
        return one, other

    def walk(self, distance: jax.Array, memory, k: int, start, places_ref, first) -> None:
        """Store places along a greedy chain: always on to the nearest one that is left.

        Args:
          distance: float32 [64, 64], of the first k.
          first: where the places of the head go.
        """
        store = getattr(plgpu, "store", None)
        held = memory.distance.at[:, pl.ds(0, CHUNK)]
        if store is None:
            held[...] = distance
        else:  # JAX 0.12 refuses a store with conflicts of banks that is not asked for.
            store(held, distance, optimized=False)
        plgpu.commit_smem()
        splat = plgpu.Layout.WG_SPLAT((1,))

        @_inline(arg_types=(_REF, _REF, splat, splat))
        def go(ctx, distance, places, start, first):
            del ctx
            shared = llvm.ptrtoint(ptx.i32(), utils.memref_ptr(distance))
            to = _address(_pointer(places), first.registers.item(), 4)
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [shared, ptx.integer(k), start.registers.item(), to],
                _WALK,
                "r,r,r,l",
                has_side_effects=True,
            )

        one = functools.partial(jnp.full, (1,), dtype=jnp.int32)
        go(memory.distance, places_ref, one(start), one(first))

    # --- codes

    def put_codes(self, ref, row: jax.Array, values: jax.Array) -> None:
        """Store a tile of rows as codes of [R, H], columns in the order of `stored_channels`.

        int8 codes are the lowest bytes of the values' bits, E4M3 ones the nearest, saturated.
        """
        pack = _low_bytes if ref.dtype == jnp.int8 else ptx.e4m3x4_from_f32

        @_inline(arg_types=(_REF, self._tokens("rows"), _WGMMA))
        def store(ctx, ref, row, values):
            del ctx
            base = _pointer(ref)
            mine = _times(arith.andi(_lane(), ptx.integer(3)), 16)
            for tile, half in np.ndindex(row.shape[0] // 64, 2):
                at = ptx.element(row.registers[tile, 0, half, 0, 0], 0)
                first = _address(base, at, self.size, mine)

                def pair(group, tile=tile, half=half):
                    register = values.registers[tile, group, 0, 0, half, 0, 0, 0, 0]
                    return [ptx.element(register, i) for i in range(2)]

                for chunk in range(self.size // 64):
                    groups = [8 * chunk + 2 * i for i in range(4)]
                    words = [pack([*pair(g), *pair(g + 1)]) for g in groups]
                    address = arith.addi(first, _constant64(64 * chunk))
                    _store_words(address, at, words)

        store(ref, row, values)

    def put_value_codes(
        self, ref, head, block, values: jax.Array, counts: jax.Array, length: int
    ) -> None:
        """Store a block of values as E4M3 [R, H + 8, P] transposed, and its count rows.

        Args:
          head: which of R.
          block: which 128 of the `length` = P tokens.
          values: float32 [128, H] within E4M3's range, in the order in which they are stored.
          counts: float32 [128], 1 at valid tokens, else 0.
        """
        splat, tile = plgpu.Layout.WG_SPLAT((1,)), self._tile("block")

        @_inline(arg_types=(_REF, splat, splat, tile, self._tokens("block")))
        def store(ctx, ref, head, block, values, counts):
            del ctx
            head, block = head.registers.item(), block.registers.item()
            lanes, tokens = self.size // 32, self.size // 8
            always = ptx.integer(0)
            group = arith.divui(_lane(), ptx.integer(lanes))
            column = arith.addi(_times(block, BLOCK), _times(group, tokens))
            rows = _address(_pointer(ref), head, (self.size + COUNT_ROWS) * length, column)
            first = _address(rows, self._first_channel(), length)
            for channel in range(8):
                column_of = [
                    ptx.element(values.registers[0, 0, 0, 0, t, 0, 0], channel)
                    for t in range(tokens)
                ]
                address = arith.addi(first, _constant64(channel * length))
                _store_words(address, always, _e4m3_words(column_of))
            # Threads of the first eight columns of chunks have a count row each.
            chunk = arith.andi(_lane(), ptx.integer(lanes - 1))
            row = arith.addi(_times(_warp(), lanes), chunk)
            other = arith.andi(arith.xori(row, block), ptx.integer(1))
            there = arith.select(_equal(other), _one(), ptx.constant(0.0))
            held = [ptx.multiply(ptx.element(x, 0), there) for x in counts.registers.flat]
            mine = arith.subi(ptx.integer(COUNT_ROWS - 1), row)
            address = _address(rows, arith.addi(row, ptx.integer(self.size)), length)
            _store_words(address, mine, _e4m3_words(held))

        one = functools.partial(jnp.full, (1,), dtype=jnp.int32)
        store(ref, one(head), one(block), values, counts)

    # --- products

    def with_matrix(self, ref, index, body) -> None:
        """Call `body` with what `product` takes as matrix `index` of [n, H, H]."""

        def scoped(memory, barrier):
            plgpu.copy_gmem_to_smem(ref.at[index], memory, barrier)
            plgpu.barrier_wait(barrier)
            body(memory)

        shape = (self.size, self.size)
        memory = plgpu.SMEM(shape, ref.dtype, transforms=_SWIZZLED)
        pl.run_scoped(scoped, memory, plgpu.Barrier())

    def with_row(self, body) -> None:
        """Call `body` with memory for two copies of a row of a `"rows"` tile."""
        pl.run_scoped(body, plgpu.SMEM((2, self.size), jnp.float32))

    def keep_row(self, memory, rows: jax.Array) -> None:
        """Keep a row of float32 [64, H], which are all alike."""
        layout = self._channels("rows")

        @_inline(
            arg_types=(_WGMMA,),
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


@dataclasses.dataclass(frozen=True)
class _Centroids:
    """Shared memory of a program that labels tokens."""

    codes: Any
    base: Any
    there: Any
    counts: Any
    labels: Any


@dataclasses.dataclass(frozen=True)
class _Chain:
    """Shared memory of a program that puts clusters in a chain."""

    pieces: Any
    square: Any
    distance: Any


_WALK = """{
.reg .pred here, more, writes;
.reg .b32 lane, other, now, place, low, high, most, nearest, at, sign, taken_low, taken_high;
.reg .b64 to;
mov.u32 lane, %laneid;
add.s32 other, lane, 32;
setp.eq.s32 writes, lane, 0;
setp.ge.s32 here, lane, $1;
selp.b32 taken_low, 1, 0, here;
setp.ge.s32 here, other, $1;
selp.b32 taken_high, 1, 0, here;
mov.b32 place, 0;
mov.b32 now, $2;
GO:
mad.wide.s32 to, now, 4, $3;
@writes st.global.b32 [to], place;
setp.eq.s32 here, lane, now;
selp.b32 taken_low, 1, taken_low, here;
setp.eq.s32 here, other, now;
selp.b32 taken_high, 1, taken_high, here;
mad.lo.s32 at, now, 512, $0;
mad.lo.s32 at, lane, 4, at;
ld.shared.b32 low, [at];
ld.shared.b32 high, [at+128];
setp.lt.f32 here, low, 0f7EE1B1E6;
selp.b32 low, low, 0x7EE1B1E6, here;
setp.lt.f32 here, high, 0f7EE1B1E6;
selp.b32 high, high, 0x7EE1B1E6, here;
add.f32 low, low, 0f00000000;
add.f32 high, high, 0f00000000;
shr.s32 sign, low, 31;
and.b32 sign, sign, 0x7FFFFFFF;
xor.b32 low, low, sign;
shr.s32 sign, high, 31;
and.b32 sign, sign, 0x7FFFFFFF;
xor.b32 high, high, sign;
setp.ne.s32 here, taken_low, 0;
selp.b32 low, 0x7F7FFFFF, low, here;
setp.ne.s32 here, taken_high, 0;
selp.b32 high, 0x7F7FFFFF, high, here;
min.s32 most, low, high;
redux.sync.min.s32 most, most, 0xffffffff;
setp.eq.s32 here, high, most;
selp.b32 nearest, other, 64, here;
setp.eq.s32 here, low, most;
selp.b32 nearest, lane, nearest, here;
redux.sync.min.s32 now, nearest, 0xffffffff;
add.s32 place, place, 1;
setp.lt.s32 more, place, $1;
@more bra GO;
}"""
"""Each warp for itself: a lane has two columns, the nearest that is left comes out of two minima.

The distance to a centroid that is not finite is 1.5e38: less than to one that has its place."""

_TURN = """{
.reg .pred mine, first;
.reg .b32 n;
mov.b32 $0, $5;
setp.eq.s32 mine, $2, TURN;
@mine ld.shared.b32 $0, [$1];
bar.warp.sync 0xffffffff;
popc.b32 n, $3;
add.s32 n, n, $0;
setp.eq.and.s32 first, $4, 0, mine;
@first st.shared.b32 [$1], n;
}"""
"""One warp's turn to read the count of each thread's label and add its own tokens to it."""

_TOKEN_CODES = """{
.reg .b32 low, high, least, most;
mov.b32 least, 0x43004300;
mov.b32 most, 0x437F437F;
fma.rn.bf16x2 low, $1, $3, $5;
fma.rn.bf16x2 high, $2, $4, $6;
max.bf16x2 low, low, least;
max.bf16x2 high, high, least;
min.bf16x2 low, low, most;
min.bf16x2 high, high, most;
prmt.b32 $0, low, high, 0x6420;
}"""
"""Four codes: between 128 and 255, a bfloat16 is an integer, and its low byte that less 128."""


def _effect(text: str, constraints: str, *operands: ir.Value) -> ir.Value:
    """One inline instruction that must stay where it is."""
    return llvm.inline_asm(
        ptx.i32(), list(operands), text, "=&" + constraints[1:], has_side_effects=True
    )


def _packed_codes(values, scale, shift) -> ir.Value:
    """Four codes of two words of bfloat16."""
    return ptx.instruction(ptx.i32(), _TOKEN_CODES, "=&r,r,r,r,r,r,r", *values, *scale, *shift)


def _codes(values, scale, shift) -> ir.Value:
    """Four codes of four float32."""
    found = []
    for value, factor, added in zip(values, scale, shift, strict=True):
        code = ptx.fma(value, ptx.as_f32(factor), ptx.as_f32(added))
        code = ptx.instruction(ptx.f32(), "max.f32 $0, $1, 0f00000000;", "=f,f", code)
        code = ptx.instruction(ptx.f32(), "min.f32 $0, $1, 0f42FE0000;", "=f,f", code)
        found.append(arith.addf(code, ptx.constant(MAGIC)))
    return _low_bytes(found)


def _narrow(words: list[ir.Value]) -> list[ir.Value]:
    """Words of float32 that are bfloat16, two in a word."""
    pairs = zip(words[::2], words[1::2], strict=True)
    return [ptx.permute_bytes(low, high, 0x7632) for low, high in pairs]


def _as_floats(words, kind: ir.Type) -> list[ir.Value]:
    """Words of float32, or of two float16 each, as float32."""
    if utils.bitwidth(kind) == 32:
        return [ptx.as_f32(word) for word in words]
    return [ptx.half_to_f32(word, high) for word in words for high in (False, True)]


def _one() -> ir.Value:
    return ptx.constant(1.0)


def _equal(value: ir.Value) -> ir.Value:
    """Whether an integer is zero, as an i1."""
    return arith.cmpi(arith.CmpIPredicate.eq, value, ptx.integer(0))


def _e4m3_words(values: list[ir.Value]) -> list[ir.Value]:
    return [ptx.e4m3x4_from_f32(values[i : i + 4]) for i in range(0, len(values), 4)]
