"""Tensor-core and copy instructions of the `mma` kernel, as inline PTX on 32-bit registers.

Fragments of a product of 16 rows, `g = lane // 4` and `t = lane % 4`: a left operand's words hold
4t.. of rows g and g + 8 and 16 + 4t.. of the same; a right operand's words 4t.. and 16 + 4t.. of
column g; the sums 2t and 2t + 1 of rows g and g + 8. (Two elements a word for 16-bit operands.)
"""

from collections.abc import Sequence

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from .. import _ptx as ptx

Words = list[ir.Value]

WARP = 32


def _numbered(first: int, count: int) -> str:
    return "{" + ", ".join(f"${i}" for i in range(first, first + count)) + "}"


def _several(kind: ir.Type, count: int, text: str, constraints: str, operands, effects) -> Words:
    """An instruction with several results of one type."""
    struct = llvm.StructType.get_literal([kind] * count)
    result = llvm.inline_asm(struct, operands, text, constraints, has_side_effects=effects)
    return [llvm.extractvalue(kind, result, [i]) for i in range(count)]


def product(kind: str, sums: Words, left: Words, right: Words) -> Words:
    """`sums + left · right` of 16 rows and 8 columns; `kind` is the instruction's tail.

    Sums are four float32, four int32 or two half2 values.
    """
    shape = "m16n8k16" if "16.f32" in kind or kind.startswith("f16.f16") else "m16n8k32"
    result = ptx.f32() if kind.startswith("f32") else ptx.i32()
    letter, count = ("f" if kind.startswith("f32") else "r"), len(sums)
    places = [
        _numbered(first, n)
        for first, n in zip((0, count, count + 4, count + 6), (count, 4, 2, count))
    ]
    text = f"mma.sync.aligned.{shape}.row.col.{kind} {', '.join(places)};"
    constraints = ",".join([f"={letter}"] * count + ["r"] * 6 + [letter] * count)
    return _several(result, count, text, constraints, [*left, *right, *sums], effects=False)


def halves_of_e4m3(word: ir.Value) -> Words:
    """Four E4M3 numbers as two half2; exact."""
    text = (
        "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; "
        "cvt.rn.f16x2.e4m3x2 $1, h; }"
    )
    return _several(ptx.i32(), 2, text, "=r,=r,r", [word], effects=False)


def load_matrices(address: ir.Value, offset: int) -> Words:
    """Four matrices of 8 rows of 16 bytes from shared memory; lane `i` has the address of row
    `i % 8` of matrix `i // 8`, and gets bytes 4t.. of row g of each."""
    text = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {_numbered(0, 4)}, [$4+{offset}];"
    return _several(ptx.i32(), 4, text, "=r,=r,=r,=r,r", [address], effects=True)


def store_words(address: ir.Value, offset: int, words: Words) -> None:
    """Four words to shared memory."""
    _effect(f"st.shared.v4.b32 [$0+{offset}], {_numbered(1, 4)};", "r,r,r,r,r", address, *words)


def load_words(address: ir.Value, offset: int) -> Words:
    """Four words from shared memory."""
    text = f"ld.shared.v4.b32 {_numbered(0, 4)}, [$4+{offset}];"
    return _several(ptx.i32(), 4, text, "=r,=r,=r,=r,r", [address], effects=True)


def copy_16_bytes(
    target: ir.Value, source: ir.Value, offsets: tuple[int, int], only: tuple[ir.Value, int] | None
) -> None:
    """Start copying 16 bytes from device to shared memory, past L1.

    Args:
      target, source: addresses, of 32 and 64 bits; `offsets` are added to them.
      only: a thread's number and how many threads copy; `None`: all.
    """
    copy = f"cp.async.cg.shared.global [$0+{offsets[0]}], [$1+{offsets[1]}], 16;"
    if only is None:
        _effect(copy, "r,l", target, source)
    else:
        text = f"{{ .reg .pred p; setp.lt.u32 p, $2, {only[1]}; @p {copy} }}"
        _effect(text, "r,l,r", target, source, only[0])


def commit_copies() -> None:
    """Make one group of the copies that were started since the last."""
    _effect("cp.async.commit_group;", "")


def wait_for_copies(pending: int) -> None:
    """Wait until at most so many groups of this thread's copies are under way."""
    _effect(f"cp.async.wait_group {pending};", "")


def no_earlier_loads() -> None:
    """Keep the assembler from loading what follows early, which takes more registers than it has.

    A barrier of a warp that is together anyway; loads from shared memory do not pass it.
    """
    _effect("bar.warp.sync 0xffffffff;", "")


def _effect(text: str, constraints: str, *operands: ir.Value) -> None:
    void = ir.Type.parse("!llvm.void")
    # Nothing that touches memory may move across it.
    constraints = ",".join([*([constraints] if constraints else []), "~{memory}"])
    llvm.inline_asm(void, list(operands), text, constraints, has_side_effects=True)


def add(a: ir.Value, b: ir.Value | int) -> ir.Value:
    return arith.addi(a, ptx.integer(b) if isinstance(b, int) else b)


def times(a: ir.Value, b: int) -> ir.Value:
    return arith.muli(a, ptx.integer(b))


def divided(a: ir.Value, b: int) -> ir.Value:
    return arith.divui(a, ptx.integer(b))


def rest(a: ir.Value, b: int) -> ir.Value:
    return arith.remui(a, ptx.integer(b))


def xor(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.xori(a, b)


def thread() -> ir.Value:
    """A thread's number in its block."""
    return utils.thread_idx()


def thread_again() -> ir.Value:
    """The same, read anew: what is made of it outside of the loop holds no register there."""
    text = "mov.u32 $0, %tid.x;"
    return llvm.inline_asm(ptx.i32(), [], text, "=r", has_side_effects=True)


def fragment_place(thread: ir.Value) -> tuple[ir.Value, ir.Value]:
    """First of the two rows of a 64-row tile that a thread holds, and its number in the row's quad.

    The other row is 8 below.
    """
    lane = rest(thread, WARP)
    row = add(times(divided(thread, WARP), 16), divided(lane, 4))
    return row, rest(lane, 4)


def shared_address(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(ptx.i32(), utils.memref_ptr(ref))


def device_address(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def moved(address: ir.Value, offset: ir.Value) -> ir.Value:
    """A 64-bit address plus a 32-bit offset."""
    wide = ir.IntegerType.get_signless(64)
    return arith.addi(address, arith.extui(wide, offset))


def pointer(address: ir.Value) -> ir.Value:
    """A pointer into device memory."""
    return llvm.inttoptr(llvm.PointerType.get(address_space=1), address)


def strides(ref: ir.Value) -> Sequence[int]:
    return ir.MemRefType(ref.type).get_strides_and_offset()[0]


def shape(ref: ir.Value) -> Sequence[int]:
    return ir.MemRefType(ref.type).shape
