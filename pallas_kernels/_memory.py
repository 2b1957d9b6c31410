"""Words of memory at computed addresses, by inline PTX.

Addresses are 64-bit integers of global memory; a negative index reads zeros and writes nothing.
"""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from . import _ptx as ptx


def i64(value: ir.Value) -> ir.Value:
    return arith.extsi(ir.IntegerType.get_signless(64), value)


def constant64(value: int) -> ir.Value:
    kind = ir.IntegerType.get_signless(64)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def pointer(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def address(base: ir.Value, index: ir.Value, stride: int, offset: Any = None) -> ir.Value:
    """base + index · stride bytes (+ offset, a 32-bit value)."""
    address = arith.addi(base, arith.muli(i64(index), constant64(stride)))
    return address if offset is None else arith.addi(address, i64(offset))


def thread(text: str) -> ir.Value:
    return ptx.instruction(ptx.i32(), text, "=r")


def lane() -> ir.Value:
    return thread("mov.u32 $0, %laneid;")


def warp() -> ir.Value:
    return thread("{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 5; and.b32 $0, t, 3; }")


def times(value: ir.Value, factor: int) -> ir.Value:
    return arith.muli(value, ptx.integer(factor))


def load_words(address: ir.Value, index: ir.Value, words: int) -> list[ir.Value]:
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


def store_words(address: ir.Value, index: ir.Value, words: list[ir.Value]) -> None:
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


def vector_of_words(words: list[ir.Value], kind: ir.Type) -> ir.Value:
    """Words as a vector of 16- or 32-bit elements."""
    packed = vector.from_elements(ir.VectorType.get((len(words),), ptx.i32()), words)
    count = len(words) * 32 // utils.bitwidth(kind)
    return vector.bitcast(ir.VectorType.get((count,), kind), packed)


def low_bytes(values: list[ir.Value]) -> ir.Value:
    """The lowest bytes of four floats' bits."""
    bits = [ptx.bits(x) for x in values]
    low, high = (ptx.permute_bytes(bits[i], bits[i + 1], 0x0040) for i in (0, 2))
    return ptx.permute_bytes(low, high, 0x5410)


def effect(text: str, constraints: str, *operands: ir.Value) -> ir.Value:
    """One inline instruction that must stay where it is."""
    return llvm.inline_asm(
        ptx.i32(), list(operands), text, "=&" + constraints[1:], has_side_effects=True
    )


def narrow(words: list[ir.Value]) -> list[ir.Value]:
    """Words of float32 that are bfloat16, two in a word."""
    pairs = zip(words[::2], words[1::2], strict=True)
    return [ptx.permute_bytes(low, high, 0x7632) for low, high in pairs]


def as_floats(words, kind: ir.Type) -> list[ir.Value]:
    """Words of float32, or of two float16 each, as float32."""
    if utils.bitwidth(kind) == 32:
        return [ptx.as_f32(word) for word in words]
    return [ptx.half_to_f32(word, high) for word in words for high in (False, True)]
