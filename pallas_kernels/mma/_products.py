"""The products of the `mma` kernel: `mma.sync` on fragments in registers.

Four warps have 16 of a tile's 64 rows each. Left operands are fragments: of queries, which each
thread keeps in shared memory, and of probability codes, which leave the softmax as such. Right
operands come by `ldmatrix` from slots of shared memory that hold 64 tokens (`_ring`).

INT8 products, and E4M3 ones on GPUs of compute capability 8.9 and 12.0, are one instruction each.
Compute capability 9.0 multiplies E4M3 by `wgmma` only; there both operands are unpacked to float16,
which is exact, a left fragment once for all columns. Scores of E4M3 codes are summed in float16:
the layout keeps every sum of products within its range.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from .. import _ptx as ptx
from .._registers import (
    BY_ROW,
    INT8_START,
    ROWS,
    WGMMA,
    Registers,
    by_row,
    fragments,
    inline,
    typed,
)
from ..layout import COUNT_ROWS, STEP
from . import _instructions as gpu
from ._ring import CHUNK, PARTS, read_addresses

OPERAND = plgpu.Layout.WGMMA_8BIT
_SCALAR = plgpu.Layout.WG_SPLAT((ROWS,))
_REF: Any = plgpu.RefType


FRAGMENT_BYTES = 16 * 128
"""A fragment of 32 columns of a left operand, four words of each thread."""


LOADS_AT_ONCE = 4
"""Right fragments that may be loaded before the first is used."""


def _own_fragments(own: ir.Value) -> ir.Value:
    """Where a thread keeps its words of the queries."""
    return gpu.add(gpu.shared_address(own), gpu.times(gpu.thread(), 16))


def _scalar(value) -> jax.Array:
    return jnp.full((ROWS,), value, jnp.int32)


def _words(operand: fa.FragmentedArray, group: int) -> gpu.Words:
    """A fragment of 32 columns of an 8-bit left operand, from its groups of 16."""
    places = [ptx.fragment_index(group + i, half) for i in range(2) for half in range(2)]
    return [ptx.bits(operand.registers[place]) for place in places]


def _unpacks() -> bool:
    return utils.get_arch().major == 9


def _e4m3_products(result: str, left: gpu.Words):
    """A function of sums and a right operand's two words, for E4M3 codes summed as `result`."""
    if not _unpacks():
        kind = f"{result}.e4m3.e4m3.{result}"
        return lambda sums, right: gpu.product(kind, sums, left, right)
    # The lower two of every four codes make one product, the upper two another.
    unpacked = list(zip(*(gpu.halves_of_e4m3(word) for word in left)))

    def add(sums, right):
        for rows, columns in zip(unpacked, zip(*(gpu.halves_of_e4m3(word) for word in right))):
            sums = gpu.product(f"{result}.f16.f16.{result}", sums, list(rows), list(columns))
        return sums

    return add


def _int8_products(left: gpu.Words):
    return lambda sums, right: gpu.product("s32.s8.s8.s32", sums, left, right)


def _elements(registers: np.ndarray, group: int) -> gpu.Words:
    """This thread's four sums of 8 columns."""
    pairs = [registers[ptx.fragment_index(group, half)] for half in range(2)]
    return [ptx.element(pair, e) for pair in pairs for e in range(2)]


def _put(registers: np.ndarray, group: int, sums: gpu.Words, kind: ir.Type) -> None:
    pair = ir.VectorType.get((2,), kind)
    for half in range(2):
        if len(sums) == 2:  # two float16 a word
            word = vector.broadcast(ir.VectorType.get((1,), ptx.i32()), sums[half])
            register = vector.bitcast(pair, word)
        else:
            register = vector.from_elements(pair, sums[2 * half : 2 * half + 2])
        registers[ptx.fragment_index(group, half)] = register


def _empty(columns: int) -> np.ndarray:
    return np.empty(fa.WGMMA_LAYOUT.registers_shape((ROWS, columns)), dtype=object)


@dataclasses.dataclass(frozen=True)
class MmaRegisters(Registers):
    """`Registers` with products of fragments."""

    def load_query(self, query_ref, base, own_ref) -> None:
        """64 rows of codes [T, H] from `base` on, the last row past the end, as left operands.

        A thread keeps its fragments in shared memory: registers are scarcer.
        """

        @inline(arg_types=(_REF(), _SCALAR, _REF()))
        def compute(ctx, ref, base, own):
            del ctx
            last = ptx.integer(gpu.shape(ref)[0] - 1)
            first, position = gpu.fragment_place(gpu.thread_again())
            column, rows = gpu.times(position, 4), []
            for half in range(2):
                row = gpu.add(gpu.add(base.registers.item(), first), 8 * half)
                row = arith.minui(row, last)
                offset = gpu.add(gpu.times(row, self.size), column)
                rows.append(gpu.pointer(gpu.moved(gpu.device_address(ref), offset)))
            target = _own_fragments(own)
            for part in range(self.size // 32):
                places = [
                    utils.getelementptr(row, [32 * part + 16 * i], _byte())
                    for i in range(2)
                    for row in rows
                ]
                words = [llvm.load(ptx.i32(), place) for place in places]
                gpu.store_words(target, FRAGMENT_BYTES * part, words)

        compute(query_ref, _scalar(base), own_ref)

    def scores(self, own_ref, keys_ref) -> jax.Array:
        """Products of 64 queries and the 64 keys of a slot."""
        dtype = jnp.int32 if self.integer else jnp.float16

        @inline(arg_types=(_REF(), _REF()), return_type=typed((ROWS, CHUNK), dtype, WGMMA))
        def compute(ctx, own, ref):
            del ctx
            start = [ptx.integer(INT8_START)] * 4 if self.integer else [ptx.integer(0)] * 2
            sums, queries = [start] * (CHUNK // 8), _own_fragments(own)
            for part, address in enumerate(read_addresses(ref, self.size)):
                lefts = [gpu.load_words(queries, FRAGMENT_BYTES * (2 * part + i)) for i in range(2)]
                multiply = [
                    _int8_products(x) if self.integer else _e4m3_products("f16", x) for x in lefts
                ]
                for group in range(CHUNK // 8):
                    if group % LOADS_AT_ONCE == 0:
                        gpu.no_earlier_loads()
                    words = gpu.load_matrices(address, 8 * self.size * group)
                    for i in range(2):
                        sums[group] = multiply[i](sums[group], words[2 * i : 2 * i + 2])
            registers = _empty(CHUNK)
            for group, values in enumerate(sums):
                _put(registers, group, values, ptx.i32() if self.integer else ir.F16Type.get())
            return fa.FragmentedArray(
                _registers=registers,
                _layout=fa.WGMMA_LAYOUT,
                _is_signed=True if self.integer else None,
            )

        return compute(own_ref, keys_ref)

    def keep(self, own_ref, rows) -> None:
        """Put two float32 a row into shared memory, where registers are too scarce for them."""

        @inline(arg_types=(_REF(), BY_ROW, BY_ROW))
        def compute(ctx, own, *rows):
            del ctx
            words = [ptx.bits(ptx.row_value(x, half)) for x in rows for half in range(2)]
            gpu.store_words(_own_fragments(own), 0, words)

        compute(own_ref, *rows)

    def kept(self, own_ref) -> tuple[jax.Array, jax.Array]:
        """What was put there last."""

        @inline(arg_types=(_REF(),), return_type=(by_row(), by_row()))
        def compute(ctx, own):
            del ctx
            words = [ptx.as_f32(x) for x in gpu.load_words(_own_fragments(own), 0)]
            return ptx.row_array(words[:2]), ptx.row_array(words[2:])

        return compute(own_ref)

    def joined(self, chunks) -> jax.Array:
        """The scores of a step from those of its slots."""
        dtype = jnp.int32 if self.integer else jnp.float16

        @inline(
            arg_types=(WGMMA,) * PARTS,
            return_type=typed((ROWS, STEP), dtype, WGMMA),
        )
        def compute(ctx, *chunks):
            del ctx
            registers, each = _empty(STEP), CHUNK // 8
            for group in range(STEP // 8):
                for half in range(2):
                    source = chunks[group // each].registers
                    place = ptx.fragment_index(group % each, half)
                    registers[ptx.fragment_index(group, half)] = source[place]
            return fa.FragmentedArray(
                _registers=registers,
                _layout=fa.WGMMA_LAYOUT,
                _is_signed=True if self.integer else None,
            )

        return compute(*chunks)

    def no_products(self) -> jax.Array:
        return self.full((ROWS, self.size + COUNT_ROWS), 0.0)

    def weighted_values(self, products, codes, values_ref, part: int) -> jax.Array:
        """Add the products of 64 of a step's columns of codes and the 64 values of a slot."""
        columns = self.size + COUNT_ROWS

        @inline(
            arg_types=(WGMMA, OPERAND, _REF()),
            return_type=typed((ROWS, columns), jnp.float32, WGMMA),
        )
        def compute(ctx, products, codes, ref):
            del ctx
            registers, first = products.registers.copy(), part * CHUNK // 16
            for address in read_addresses(ref, CHUNK):
                lefts = [_words(codes, first + 2 * i) for i in range(2)]
                multiply, first = [_e4m3_products("f32", x) for x in lefts], first + 4
                for group in range(columns // 8):
                    if group % LOADS_AT_ONCE == 0:
                        gpu.no_earlier_loads()
                    sums = _elements(registers, group)
                    words = gpu.load_matrices(address, 8 * CHUNK * group)
                    for i in range(2):
                        sums = multiply[i](sums, words[2 * i : 2 * i + 2])
                    _put(registers, group, sums, ptx.f32())
            return fragments(registers)

        return compute(products, codes, values_ref)

    def add_means(self, out, pending, means_ref) -> jax.Array:
        """Add the weighted means of eight blocks, in device memory as [H, 8]."""

        @inline(
            arg_types=(WGMMA, WGMMA, _REF()),
            return_type=typed((ROWS, self.size), jnp.float32, WGMMA),
        )
        def compute(ctx, out, weights, ref):
            del ctx
            places = [ptx.fragment_index(i, half) for i in range(2) for half in range(2)]
            left = [ptx.bits(weights.registers[place]) for place in places]
            # Lane 4g + t: means 2t and 2t + 1 of column g.
            lane = gpu.rest(gpu.thread_again(), gpu.WARP)
            address = gpu.moved(gpu.device_address(ref), gpu.times(lane, 4))
            registers = _empty(self.size)
            for group in range(self.size // 8):
                place = utils.getelementptr(gpu.pointer(address), [128 * group], _byte())
                word = llvm.load(ptx.i32(), place)
                sums = _elements(out.registers, group)
                sums = gpu.product("f32.bf16.bf16.f32", sums, left, [word, word])
                _put(registers, group, sums, ptx.f32())
            return fragments(registers)

        return compute(out, self.mean_weights(pending), means_ref)

    def store(self, target_ref, values, base) -> None:
        """Write 64 rows to [T, H] from `base` on, those before its end."""

        @inline(arg_types=(WGMMA, _REF(), _SCALAR))
        def compute(ctx, values, ref, base):
            del ctx
            for half, row, address in _own_rows(ref, base, 2):
                with _before_the_end(ref, row):
                    for group in range(self.size // 8):
                        place = utils.getelementptr(address, [8 * group], values.mlir_dtype)
                        llvm.store(values.registers[ptx.fragment_index(group, half)], place)

        compute(values, target_ref, _scalar(base))

    def store_rows(self, target_ref, values, base) -> None:
        """Write one float32 a row to [T] from `base` on, those before its end."""

        @inline(arg_types=(WGMMA.reduce(1), _REF(), _SCALAR))
        def compute(ctx, values, ref, base):
            del ctx
            for half, row, address in _own_rows(ref, base, 0):
                with _before_the_end(ref, row):
                    llvm.store(ptx.row_value(values, half), address)

        compute(values, target_ref, _scalar(base))


def _byte() -> ir.Type:
    return ir.IntegerType.get_signless(8)


def _own_rows(ref, base, columns: int):
    """Half, number and address of the rows that this thread holds, so many columns a thread."""
    kind, wide = ir.MemRefType(ref.type).element_type, ir.IntegerType.get_signless(64)
    first, position = gpu.fragment_place(gpu.thread_again())
    for half in range(2):
        row = gpu.add(gpu.add(base.registers.item(), first), 8 * half)
        stride = arith.constant(wide, ir.IntegerAttr.get(wide, gpu.strides(ref)[0]))
        offset = arith.muli(arith.extui(wide, row), stride)
        offset = arith.addi(offset, arith.extui(wide, gpu.times(position, columns)))
        yield half, row, utils.getelementptr(gpu.pointer(gpu.device_address(ref)), [offset], kind)


def _before_the_end(ref, row) -> ir.InsertionPoint:
    """Inside a branch that is taken where a row is one of the array's."""
    inside = arith.cmpi(arith.CmpIPredicate.ult, row, ptx.integer(gpu.shape(ref)[0]))
    block = scf.IfOp(inside).then_block
    assert block is not None
    with ir.InsertionPoint(block):
        end = scf.YieldOp([])
    return ir.InsertionPoint(end)
