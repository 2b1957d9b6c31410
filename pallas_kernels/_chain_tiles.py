"""What the chain of clusters does with tiles: distances of centroids, and a walk along them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from . import _memory as mem
from . import _ptx as ptx
from ._tiles import CHUNK, REF, SWIZZLED, WGMMA, Tiles, inline
from .layout import BLOCK

_PIECES = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))
"""Products of pieces of 8 bits that matter to float32."""


@dataclasses.dataclass(frozen=True)
class _Chain:
    """Shared memory of a program that puts clusters in a chain."""

    pieces: Any
    square: Any
    distance: Any


@dataclasses.dataclass(frozen=True)
class ChainTiles(Tiles):
    """`Tiles` with the operations of the chain."""

    def with_chain(self, body) -> None:
        """Call `body` with memory for three pieces of 64 rows, their squares and distances."""
        piece = plgpu.SMEM((3, CHUNK, self.size), jnp.bfloat16, transforms=SWIZZLED)
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
        total: Any = plgpu.layout_cast(jnp.zeros((CHUNK, CHUNK), jnp.float32), WGMMA)
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
        column = plgpu.load(memory.square, layout=WGMMA.reduce(0), optimized=False)
        shape = (CHUNK, CHUNK)
        spread = [
            lax.broadcast_in_dim(square, shape, [0]),
            lax.broadcast_in_dim(column, shape, [1]),
        ]
        one, other = (plgpu.layout_cast(x, WGMMA) for x in spread)
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

        @inline(arg_types=(REF, REF, splat, splat))
        def go(ctx, distance, places, start, first):
            del ctx
            shared = llvm.ptrtoint(ptx.i32(), utils.memref_ptr(distance))
            to = mem.address(mem.pointer(places), first.registers.item(), 4)
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [shared, ptx.integer(k), start.registers.item(), to],
                _WALK,
                "r,r,r,l",
                has_side_effects=True,
            )

        one = functools.partial(jnp.full, (1,), dtype=jnp.int32)
        go(memory.distance, places_ref, one(start), one(first))


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
