"""What clustering does with tiles: codes and nearest centroids, sums of clusters.

Memory that a program shares between its threads comes from the functions `with_...`.
"""

import dataclasses
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

from . import _memory as mem
from . import _ptx as ptx
from ._chain_tiles import ChainTiles
from ._numbers import MAGIC
from ._tiles import CHUNK, REF, SWIZZLED, WGMMA, inline
from .layout import BLOCK


@dataclasses.dataclass(frozen=True)
class _Centroids:
    """Shared memory of a program that labels tokens."""

    codes: Any
    base: Any
    there: Any
    counts: Any
    labels: Any


@dataclasses.dataclass(frozen=True)
class ClusterTiles(ChainTiles):
    """`Tiles` with the operations of clustering, the chain's (`_chain_tiles`) among them."""

    # --- nearest centroids

    def token_codes(self, ref, row: jax.Array, scale_ref, shift_ref, head) -> jax.Array:
        """Codes int8 [n, H] of rows of tokens, in coded columns.

        A code is value · scale + shift of row `head` of float32 [R, H], rounded, from 0 to 127;
        with bfloat16 values both are bfloat16 and codes are those of the sum less 128.
        """
        packed = ref.dtype == jnp.bfloat16
        splat, layout = plgpu.Layout.WG_SPLAT((1,)), plgpu.Layout.WGMMA_8BIT
        shape, dtype = (row.shape[0], self.size), ref.dtype

        @inline(
            arg_types=(REF, self._tokens("rows"), REF, REF, splat),
            return_type=plgpu.ShapeDtypeStruct(shape, jnp.int8, layout=layout),
        )
        def load(ctx, ref, row, scale_ref, shift_ref, head):
            del ctx
            kind = utils.dtype_to_ir_type(dtype)
            width = utils.bitwidth(kind) // 8
            own = 4
            quad = arith.andi(mem.lane(), ptx.integer(3))
            at = head.registers.item()
            scales, shifts = (
                mem.address(mem.pointer(x), at, self.size * own, mem.times(quad, 8 * own))
                for x in (scale_ref, shift_ref)
            )
            kind_of_scale = ptx.f32()
            narrow = mem.narrow if packed else (lambda words: words)
            scale = narrow(self._chunk(scales, at, kind_of_scale))
            registers = np.empty(fa.WGMMA_LAYOUT_8BIT.registers_shape(shape), dtype=object)
            base = mem.pointer(ref)
            byte4 = ir.VectorType.get((4,), ir.IntegerType.get_signless(8))
            for chunk in range(self.size // 32):
                offset = mem.constant64(32 * own * chunk)
                shift = narrow(self._chunk(arith.addi(shifts, offset), at, kind_of_scale))
                for tile, half in np.ndindex(shape[0] // 64, 2):
                    token = ptx.element(row.registers[tile, 0, half, 0, 0], 0)
                    address = mem.address(
                        base, token, self.size * width, mem.times(quad, 8 * width)
                    )
                    address = arith.addi(address, mem.constant64(32 * width * chunk))
                    words = self._chunk(address, token, kind)
                    if not packed:
                        words = mem.as_floats(words, kind)
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

        @inline(arg_types=(REF, self._tokens(kind), self._tile(kind)))
        def store(ctx, ref, row, values):
            del ctx
            base, channel = mem.pointer(ref), self._first_channel()
            thread = arith.andi(arith.shrui(channel, ptx.integer(3)), ptx.integer(3))
            column = arith.addi(arith.andi(channel, ptx.integer(-32)), mem.times(thread, 4))
            for token, register in enumerate(row.registers.flat):
                at = ptx.element(register, 0)
                held = values.registers[0, 0, 0, 0, token, 0, 0]
                eight = [ptx.element(held, i) for i in range(8)]
                address = mem.address(base, at, self.size, column)
                for part in range(2):
                    word = mem.low_bytes(eight[4 * part : 4 * part + 4])
                    mem.store_words(arith.addi(address, mem.constant64(16 * part)), at, [word])

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
        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.int32), WGMMA)
        inner: Any = pl.run_state(
            lambda acc: plgpu.wgmma(acc, codes, memory.codes.at[chunk].transpose((1, 0)))
        )(plgpu.ACC.init(zeros))
        base = plgpu.load(memory.base.at[chunk], layout=WGMMA.reduce(0), optimized=False)
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

        @inline(
            arg_types=(layout, REF),
            return_type=plgpu.ShapeDtypeStruct((BLOCK,), jnp.int32, layout=layout),
        )
        def rank(ctx, label, counts):
            del ctx
            label = ptx.element(label.registers.item(), 0)
            pointer = llvm.ptrtoint(ptx.i32(), utils.memref_ptr(counts))
            address = arith.addi(pointer, mem.times(label, 4))
            same = mem.effect("match.any.sync.b32 $0, $1, 0xffffffff;", "=r,r", label)
            text = "{ .reg .b32 t; mov.u32 t, %lanemask_lt; and.b32 t, t, $1; popc.b32 $0, t; }"
            before = ptx.instruction(ptx.i32(), text, "=r,r", same)
            found, warp = ptx.integer(0), mem.warp()
            for turn in range(4):
                found = mem.effect(
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
        pl.run_scoped(body, plgpu.SMEM((BLOCK, self.size), dtype, transforms=SWIZZLED))

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
        label = plgpu.load(memory.labels, layout=WGMMA.reduce(0), optimized=False)
        label = plgpu.layout_cast(lax.broadcast_in_dim(label, shape, [1]), WGMMA)
        number = lax.broadcast_in_dim(self.index(CHUNK, "rows"), shape, [0])
        same = label == plgpu.layout_cast(number, WGMMA)
        return jnp.where(same, 1.0, 0.0)

    def add_members(self, total: jax.Array, member: jax.Array, memory) -> jax.Array:
        """float32 [64, H] plus the sums of the kept tokens of each label."""
        member = member.astype(memory.dtype)
        out: Any = pl.run_state(lambda acc: plgpu.wgmma(acc, member, memory))(plgpu.ACC.init(total))
        return out

    def put_sums(self, ref, row: jax.Array, values: jax.Array) -> None:
        """Store a tile of rows, in the columns `loaded_channels`, as float32 [R, H]."""

        @inline(arg_types=(REF, self._tokens("rows"), WGMMA))
        def store(ctx, ref, row, values):
            del ctx
            mine = mem.times(arith.andi(mem.lane(), ptx.integer(3)), 32)
            for tile, half in np.ndindex(row.shape[0] // 64, 2):
                at = ptx.element(row.registers[tile, 0, half, 0, 0], 0)
                first = mem.address(mem.pointer(ref), at, self.size * 4, mine)
                for part in range(self.size // 16):
                    pairs = [
                        values.registers[tile, 2 * part + i, 0, 0, half, 0, 0, 0, 0]
                        for i in range(2)
                    ]
                    words = [ptx.bits(ptx.element(x, i)) for x in pairs for i in range(2)]
                    offset = 128 * (part // 2) + 16 * (part % 2)
                    mem.store_words(arith.addi(first, mem.constant64(offset)), at, words)

        store(ref, row, values)

    def put_rows(self, ref, row: jax.Array, values: jax.Array, kind: str) -> None:
        """Store a block's rows as float32 [R, H]."""

        @inline(arg_types=(REF, self._tokens(kind), self._tile(kind)))
        def store(ctx, ref, row, values):
            del ctx
            base, mine = mem.pointer(ref), mem.times(self._first_channel(), 4)
            for token, register in enumerate(row.registers.flat):
                at = ptx.element(register, 0)
                held = values.registers[0, 0, 0, 0, token, 0, 0]
                words = [ptx.bits(ptx.element(held, i)) for i in range(8)]
                address = mem.address(base, at, self.size * 4, mine)
                for part in range(2):
                    some = words[4 * part : 4 * part + 4]
                    mem.store_words(arith.addi(address, mem.constant64(16 * part)), at, some)

        store(ref, row, values)


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
    return mem.low_bytes(found)
