"""PTX in NumPy: runs the text of inline instructions on the registers of a warpgroup.

A 32-bit register is an array [4, 8, 4] of uint32 or float32: warps, the eight rows of one row half
that a warp has, and the four threads that share a row. `computing` puts this in place of MLIR.
"""

import functools
import importlib.util
import re
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

Bits = np.ndarray


def _floats(bits: Bits, dtype: Any = np.float32) -> np.ndarray:
    return np.ascontiguousarray(bits).view(dtype)


def _halves(bits: Bits) -> np.ndarray:
    """[..., 2], the low one first."""
    return np.ascontiguousarray(bits)[..., None].view(np.float16)


def _packed(low: np.ndarray, high: np.ndarray) -> Bits:
    """Two numbers of 8 or of 16 bits as one of 16 or 32."""
    both = np.stack([low, high], -1)
    return both.view({1: np.uint16, 2: np.uint32}[both.itemsize])[..., 0]


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Rounded once: the product of two floats is exact in 64 bits of mantissa."""
    exact = a.astype(np.longdouble) * b + c
    return exact.astype(a.dtype)


def _log2(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log2(values)


def _relu(values: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(values), values, np.maximum(values, values.dtype.type(0)))


def _on_f32(operation: Callable[..., np.ndarray]) -> Callable[..., Bits]:
    return lambda *operands: _floats(
        operation(*map(_floats, operands)).astype(np.float32), np.uint32
    )


def _on_halves(operation: Callable[..., np.ndarray]) -> Callable[..., Bits]:
    return lambda *operands: _floats(
        operation(*map(_halves, operands)).astype(np.float16), np.uint32
    )[..., 0]


def _pair(kind: Any, change: Callable[[np.ndarray], np.ndarray] = lambda x: x) -> Any:
    """A conversion of two floats; the first operand becomes the high half."""

    def convert(high: Bits, low: Bits) -> Bits:
        return _packed(*(change(_floats(x)).astype(kind) for x in (low, high)))

    return convert


def _e4m3_as_halves(pair: Bits) -> Bits:
    numbers = np.ascontiguousarray(pair)[..., None].view(ml_dtypes.float8_e4m3fn)
    return _packed(*(numbers[..., i].astype(np.float16) for i in range(2)))


def _permuted(low: Bits, high: Bits, selector: Bits) -> Bits:
    """Each hex digit of the selector picks one of the eight bytes."""
    bytes_of = np.concatenate([x[..., None].view(np.uint8) for x in (low, high)], -1)
    digits = [int(selector) >> 4 * i & 15 for i in range(4)]
    assert max(digits) < 8, "the mode that replicates signs has no model"
    return np.ascontiguousarray(bytes_of[..., digits]).view(np.uint32)[..., 0]


def _any_in_warp(flag: Bits, members: Bits) -> Bits:
    assert members == 0xFFFFFFFF
    return np.broadcast_to(flag.any(axis=(1, 2), keepdims=True), flag.shape)


OPCODES: dict[str, Callable[..., Any]] = {
    "fma.rn.f32": _on_f32(_fma),
    "mul.rn.f32": _on_f32(np.multiply),
    "abs.f32": _on_f32(np.abs),
    "max.NaN.f32": _on_f32(np.maximum),
    "ex2.approx.ftz.f32": _on_f32(np.exp2),
    "lg2.approx.ftz.f32": _on_f32(_log2),
    "max.s32": lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)).view(np.uint32),
    "max.f16x2": _on_halves(np.fmax),
    "min.f16x2": _on_halves(np.fmin),
    "mul.rn.f16x2": _on_halves(np.multiply),
    "fma.rn.f16x2": _on_halves(_fma),
    "add.rn.f16x2": _on_halves(np.add),
    "fma.rn.relu.f16x2": _on_halves(lambda a, b, c: _relu(_fma(a, b, c))),
    "cvt.rn.f16x2.f32": _pair(np.float16),
    "cvt.rn.relu.f16x2.f32": _pair(np.float16, _relu),
    "cvt.rn.bf16x2.f32": _pair(ml_dtypes.bfloat16),
    "cvt.rn.satfinite.e4m3x2.f32": _pair(
        ml_dtypes.float8_e4m3fn, lambda x: np.clip(x, -448.0, 448.0)
    ),
    "cvt.rn.f16x2.e4m3x2": _e4m3_as_halves,
    "mul.lo.u32": lambda a, b: (a * b).astype(np.uint32),
    "cvt.f32.f16": lambda a: _floats(_floats(a, np.float16).astype(np.float32), np.uint32),
    "prmt.b32": _permuted,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "setp.ne.b32": lambda a, b: a != b,
    "setp.eq.u32": lambda a, b: a == b,
    "selp.b32": lambda a, b, p: np.where(p, a, b).astype(np.uint32),
    "vote.sync.any.pred": _any_in_warp,
}
"""What every instruction does to bits: uint32, uint16 for halves of a register, bool."""


def run(kind: Any, text: str, constraints: str, *operands: np.ndarray) -> np.ndarray:
    """As `ptx.instruction`: the result `$0` of the text, of dtype `kind`."""
    del constraints
    values: dict[str, Any] = {
        f"${i}": np.asarray(x).view(np.uint32) if np.asarray(x).dtype != bool else x
        for i, x in enumerate(operands, 1)
    }
    lanes = np.broadcast_to(np.arange(32, dtype=np.uint32).reshape(8, 4), (4, 8, 4))
    values["%laneid"] = np.ascontiguousarray(lanes)
    for statement in text.strip().removeprefix("{ ").removesuffix(" }").split(";"):
        if statement.strip() and not statement.strip().startswith(".reg"):
            _execute(statement.strip(), values)
    return np.ascontiguousarray(values["$0"]).view(kind)


def _execute(statement: str, values: dict[str, Any]) -> None:
    opcode, arguments = statement.split(None, 1)
    target, *sources = re.findall(r"\{[^}]*\}|[^,\s]+", arguments)
    result = OPCODES[opcode](*(_read(source, values) for source in sources))
    if not target.startswith("{"):
        values[target] = result
        return
    parts = np.ascontiguousarray(result)[..., None].view(np.uint16)
    for i, name in enumerate(_names(target)):
        values[name] = parts[..., i]


def _read(source: str, values: dict[str, Any]) -> Any:
    if source.startswith("{"):
        return _packed(*(values[name] for name in _names(source)))
    return values[source] if source in values else np.uint32(int(source, 0))


def _names(vector: str) -> list[str]:
    return [name.strip() for name in vector.strip("{}").split(",")]


def _bits(value: np.ndarray) -> Bits:
    """A float16 pair [..., 2] or any 32-bit number as uint32."""
    value = np.ascontiguousarray(value)
    return value.view(np.uint32)[..., 0] if value.dtype == np.float16 else value.view(np.uint32)


def unchecked(module: ModuleType) -> Any:
    """A copy of a module, without the checks of types, whose names can be replaced."""
    loader = SourceFileLoader(module.__name__, str(module.__file__))
    spec = importlib.util.spec_from_loader(module.__name__, loader)
    assert spec is not None
    copy = importlib.util.module_from_spec(spec)
    loader.exec_module(copy)
    return copy


def computing(registers: ModuleType, ptx: ModuleType) -> tuple[Any, Any]:
    """Copies of the modules `_registers` and `_ptx` that compute instead of emitting code."""
    registers, ptx = unchecked(registers), unchecked(ptx)
    arith = SimpleNamespace(
        addf=functools.partial(np.add, dtype=np.float32),
        subf=functools.partial(np.subtract, dtype=np.float32),
        subi=lambda a, b: np.subtract(a, b, dtype=np.int32, casting="unsafe"),
        CmpIPredicate=SimpleNamespace(sgt=np.greater),
        cmpi=lambda compare, a, b: compare(a, np.int32(b)),
        select=np.where,
    )
    vars(registers).update(ptx=ptx, arith=arith)
    vars(ptx).update(
        arith=arith,
        instruction=run,
        f32=lambda: np.float32,
        i32=lambda: np.uint32,
        constant=np.float32,
        integer=np.uint32,
        element=lambda register, index: register[..., index],
        bits=_bits,
        as_f32=_floats,
        utils=SimpleNamespace(
            shfl_bfly=lambda value, distance: value[..., np.arange(4) ^ distance]
        ),
    )
    return registers, ptx
