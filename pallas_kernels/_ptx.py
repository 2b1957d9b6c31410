"""PTX instructions on single registers, for the register-level parts of the kernels.

Each helper emits one instruction (two where the assembler fuses them) on 32-bit MLIR values and
returns its result. `half2` values are two float16 in a 32-bit integer register.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

Value = ir.Value


def f32() -> ir.Type:
    return ir.F32Type.get()


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def instruction(kind: ir.Type, text: str, constraints: str, *operands: Value) -> Value:
    """One inline instruction without side effects; `$0` is the result."""
    return llvm.inline_asm(kind, list(operands), text, constraints, has_side_effects=False)


def constant(value: float) -> Value:
    return arith.constant(f32(), ir.FloatAttr.get(f32(), float(value)))


def integer(value: int) -> Value:
    """A 32-bit integer, signed or unsigned."""
    signed = value - (1 << 32) if value >> 31 == 1 else value
    return arith.constant(i32(), ir.IntegerAttr.get(i32(), signed))


def element(register: Value, index: int) -> Value:
    """Element `index` of a vector register."""
    position = ir.DenseI64ArrayAttr.get([index])
    return vector.extract(register, dynamic_position=[], static_position=position)


def bits(value: Value) -> Value:
    """Any 32-bit value as an integer."""
    return utils.bitcast(value, i32())


def as_f32(value: Value) -> Value:
    return utils.bitcast(value, f32())


def fma(a: Value, b: Value, c: Value) -> Value:
    return instruction(f32(), "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", a, b, c)


def multiply(a: Value, b: Value) -> Value:
    return instruction(f32(), "mul.rn.f32 $0, $1, $2;", "=f,f,f", a, b)


def absolute(a: Value) -> Value:
    return instruction(f32(), "abs.f32 $0, $1;", "=f,f", a)


def maximum(a: Value, b: Value) -> Value:
    """The larger float; a NaN wins."""
    return instruction(f32(), "max.NaN.f32 $0, $1, $2;", "=f,f,f", a, b)


def exp2(a: Value) -> Value:
    return instruction(f32(), "ex2.approx.ftz.f32 $0, $1;", "=f,f", a)


def log2(a: Value) -> Value:
    return instruction(f32(), "lg2.approx.ftz.f32 $0, $1;", "=f,f", a)


def integer_max(*values: Value) -> Value:
    """The largest of two or three signed integers."""
    if len(values) == 2:
        return instruction(i32(), "max.s32 $0, $1, $2;", "=r,r,r", *values)
    text = "{ .reg .s32 t; max.s32 t, $1, $2; max.s32 $0, t, $3; }"
    return instruction(i32(), text, "=r,r,r,r", *values)


def half2_max(*values: Value) -> Value:
    """The larger halves of two or three half2."""
    if len(values) == 2:
        return instruction(i32(), "max.f16x2 $0, $1, $2;", "=r,r,r", *values)
    text = "{ .reg .b32 t; max.f16x2 t, $1, $2; max.f16x2 $0, t, $3; }"
    return instruction(i32(), text, "=r,r,r,r", *values)


def half2_min(a: Value, b: Value) -> Value:
    return instruction(i32(), "min.f16x2 $0, $1, $2;", "=r,r,r", a, b)


def half2_fma(a: Value, b: Value, c: Value) -> Value:
    return instruction(i32(), "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", a, b, c)


def half2_multiply(a: Value, b: Value) -> Value:
    return instruction(i32(), "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", a, b)


def half2_exponents(pair: Value) -> Value:
    """The powers of two at or below two positive float16 (0 below the smallest normal one)."""
    return instruction(i32(), "and.b32 $0, $1, 0x7c007c00;", "=r,r", pair)


def half2_fma_relu(a: Value, b: Value, c: Value) -> Value:
    return instruction(i32(), "fma.rn.relu.f16x2 $0, $1, $2, $3;", "=r,r,r,r", a, b, c)


def half2_add(a: Value, b: Value) -> Value:
    return instruction(i32(), "add.rn.f16x2 $0, $1, $2;", "=r,r,r", a, b)


def half2_from_f32(low: Value, high: Value, relu: bool = False) -> Value:
    kind = ".relu" if relu else ""
    text = f"cvt.rn{kind}.f16x2.f32 $0, $1, $2;"
    return instruction(i32(), text, "=r,f,f", high, low)


def half_to_f32(pair: Value, high: bool) -> Value:
    """One half of a half2 as float32."""
    which = "h" if high else "l"
    text = f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.f32.f16 $0, {which}; }}"
    return instruction(f32(), text, "=f,r", pair)


def bfloat2_from_f32(low: Value, high: Value) -> Value:
    return instruction(i32(), "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", high, low)


def bfloat_to_f32(pair: Value, high: bool) -> Value:
    """One half of two packed bfloat16 as float32."""
    if high:
        return as_f32(instruction(i32(), "and.b32 $0, $1, 0xffff0000;", "=r,r", pair))
    return as_f32(instruction(i32(), "shl.b32 $0, $1, 16;", "=r,r", pair))


def e4m3x4_from_f32(values: Sequence[Value]) -> Value:
    """Four floats as E4M3, nearest even, saturated, the first in the lowest byte."""
    text = (
        "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }"
    )
    return instruction(i32(), text, "=r,f,f,f,f", *values)


def half2_in_e4m3(low: Value, high: Value) -> Value:
    """Two floats rounded to E4M3 (nearest even, saturated), as float16, which is exact."""
    text = "{ .reg .b16 p; cvt.rn.satfinite.e4m3x2.f32 p, $2, $1; cvt.rn.f16x2.e4m3x2 $0, p; }"
    return instruction(i32(), text, "=r,f,f", low, high)


def permute_bytes(low: Value, high: Value, selector: int) -> Value:
    text = f"prmt.b32 $0, $1, $2, {selector};"
    return instruction(i32(), text, "=r,r,r", low, high)


def any_in_warp(flag: Value) -> Value:
    """Whether an i1 is set in any thread of the warp, the same i1 in all of them."""
    text = (
        "{ .reg .pred p, q; setp.ne.b32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff; "
        "selp.b32 $0, 1, 0, q; }"
    )
    vote = instruction(i32(), text, "=r,r", arith.extui(i32(), flag))
    return arith.cmpi(arith.CmpIPredicate.ne, vote, integer(0))


def in_quad_position(index: Value) -> Value:
    """Whether this thread is number `index % 4` of its group of four, as an i1."""
    text = (
        "{ .reg .b32 t; .reg .pred p; mov.u32 t, %laneid; xor.b32 t, t, $1; and.b32 t, t, 3; "
        "setp.eq.u32 p, t, 0; selp.b32 $0, 1, 0, p; }"
    )
    return arith.cmpi(arith.CmpIPredicate.ne, instruction(i32(), text, "=r,r", index), integer(0))


def multiple_of_quad_position(factor: int) -> Value:
    """This thread's number in its group of four times a number."""
    text = "{ .reg .b32 t; mov.u32 t, %laneid; and.b32 t, t, 3; mul.lo.u32 $0, t, $1; }"
    return instruction(i32(), text, "=r,r", integer(factor))


def reduce_quad(value: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Combine a value over the four threads that share a row of a fragment."""
    for distance in (1, 2):
        value = combine(value, utils.shfl_bfly(value, distance))
    return value


def reduce_by_threes(values: Sequence[Value], combine: Callable[..., Value]) -> Value:
    """Reduce with an operation that takes two or three operands, in two independent chains."""
    chains, rest = list(values[:2]), list(values[2:])
    turn = 0
    while rest:
        chains[turn % 2] = combine(chains[turn % 2], *rest[:2])
        rest, turn = rest[2:], turn + 1
    return combine(*chains)


def row_value(rows: fa.FragmentedArray, half: int) -> Value:
    """This thread's value of row `half` (of its two) of a row-wise array."""
    return element(rows.registers[0, 0, half, 0, 0], 0)


def row_array(values: Sequence[Value]) -> fa.FragmentedArray:
    """A row-wise float32 array from this thread's two values."""
    registers = np.empty((1, 1, 2, 1, 1), dtype=object)
    kind = ir.VectorType.get((1,), f32())
    for half in range(2):
        registers[0, 0, half, 0, 0] = vector.broadcast(kind, values[half])
    return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_ROW_LAYOUT, _is_signed=None)


def fragment_index(column_group: int, half: int) -> tuple[int, ...]:
    """Where a `WGMMA` array keeps a group of 8 columns (16 in the 8-bit layout) of a row half."""
    return (0, column_group, 0, 0, half, 0, 0, 0, 0)
