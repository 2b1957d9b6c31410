"""What a warpgroup does in registers in every attention kernel, as PTX: softmax, promotion, means.

The products are a generation's own (`hopper`, `mma`); their fragments are the same. A thread holds
two rows of a 64-row tile (`half` 0 and 1); four neighbouring threads, a quad, share a row. Scores
come as float16 pairs (E4M3 products) or as integers whose accumulators start at `INT8_START`, so
that their bits, read as float32, are `MAGIC + score` exactly.

`InterpretedRegisters` in `_interpreted.py` does the same in plain JAX, for the interpreter.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

from . import _ptx as ptx
from .layout import E4M3, PROBABILITY_SCALE, STEP, TOP

ROWS = 64
MAGIC = 12582912.0
INT8_START = 0x4B400000
GROWTH = 480.0
"""Codes by which a row's maximum may outgrow its reference before the sums are rescaled."""
GROUP = 4
"""Steps after which the pending means are added."""
UNSEEN = -1e30
"""Reference of a row before its first step: any anchor outgrows it."""
_NATS_PER_CODE = math.log(2.0) / 8.0
WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)
inline: Any = plgpu.inline_mgpu


def typed(shape, dtype, layout) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)


def by_row() -> plgpu.ShapeDtypeStruct:
    return typed((ROWS,), jnp.float32, BY_ROW)


def fragments(registers: np.ndarray, layout=fa.WGMMA_LAYOUT) -> fa.FragmentedArray:
    return fa.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


class _HalfScores:
    """Float16 scores of one row half: maxima and codes of its two blocks."""

    def __init__(self, scores: fa.FragmentedArray, half: int, multipliers):
        self.pairs = [
            ptx.bits(scores.registers[ptx.fragment_index(t, half)]) for t in range(STEP // 8)
        ]
        self.multipliers = multipliers
        self.half2 = [ptx.half2_from_f32(m, m) for m in multipliers]

    def largest(self):
        middle = len(self.pairs) // 2
        first = ptx.reduce_by_threes(self.pairs[:middle], ptx.half2_max)
        second = ptx.reduce_by_threes(self.pairs[middle:], ptx.half2_max)
        # Both blocks in one half2, so that one shuffle reduces both.
        both = ptx.half2_max(
            ptx.permute_bytes(first, second, 0x5410), ptx.permute_bytes(first, second, 0x7632)
        )
        both = ptx.reduce_quad(both, ptx.half2_max)
        tops = [ptx.half_to_f32(both, high) for high in (False, True)]
        return ptx.maximum(*(ptx.multiply(t, m) for t, m in zip(tops, self.multipliers)))

    def anchor(self, largest):
        """Round the bias to float16, never up, and set the code that maps to `TOP` by it."""
        bias = arith.subf(ptx.constant(TOP), largest)
        bias = ptx.fma(ptx.absolute(bias), ptx.constant(-(2.0**-11)), bias)
        self.bias = ptx.half2_from_f32(bias, bias)
        return arith.subf(ptx.constant(TOP), ptx.half_to_f32(self.bias, False))

    def code_pair(self, index: int):
        multiplier = self.half2[index // (STEP // 16)]
        return ptx.half2_fma_relu(self.pairs[index], multiplier, self.bias)

    def in_codes(self, index: int):
        """The two scores of a pair in codes, float32."""
        multiplier = self.multipliers[index // (STEP // 16)]
        halves = [ptx.half_to_f32(self.pairs[index], high) for high in (False, True)]
        return [ptx.multiply(x, multiplier) for x in halves]


class _IntegerScores:
    """INT8 products of one row half, as floats `MAGIC + score`."""

    def __init__(self, scores: fa.FragmentedArray, half: int, multipliers):
        registers = [scores.registers[ptx.fragment_index(t, half)] for t in range(STEP // 8)]
        self.values = [ptx.bits(ptx.element(r, e)) for r in registers for e in range(2)]
        self.multipliers = multipliers

    def largest(self):
        middle, tops = len(self.values) // 2, []
        for part in (self.values[:middle], self.values[middle:]):
            top = ptx.reduce_by_threes(part, ptx.integer_max)
            top = ptx.as_f32(ptx.reduce_quad(top, ptx.integer_max))
            tops.append(arith.subf(top, ptx.constant(MAGIC)))
        return ptx.maximum(*(ptx.multiply(t, m) for t, m in zip(tops, self.multipliers)))

    def anchor(self, largest):
        bias = arith.subf(ptx.constant(TOP), largest)
        self.biases = [ptx.fma(ptx.constant(-MAGIC), m, bias) for m in self.multipliers]
        return largest

    def _affine(self, index: int, biases):
        block = index // (STEP // 16)
        pair = self.values[2 * index : 2 * index + 2]
        return [ptx.fma(ptx.as_f32(x), self.multipliers[block], biases[block]) for x in pair]

    def code_pair(self, index: int):
        low, high = self._affine(index, self.biases)
        return ptx.half2_from_f32(low, high, relu=True)

    def in_codes(self, index: int):
        block = index // (STEP // 16)
        pair = self.values[2 * index : 2 * index + 2]
        scores = [arith.subf(ptx.as_f32(x), ptx.constant(MAGIC)) for x in pair]
        return [ptx.multiply(x, self.multipliers[block]) for x in scores]


def _expcast_bytes(scores, group: int):
    """E4M3 bytes of 16 columns of a row half: four scores of this thread."""
    round_to_integer = ptx.integer(0x64006400)  # half2 of 1024: the code is left in the low byte
    pairs = [ptx.half2_add(scores.code_pair(2 * group + i), round_to_integer) for i in range(2)]
    return ptx.permute_bytes(pairs[0], pairs[1], 0x6420)


def _exp_bytes(scores, group: int, largest):
    """E4M3 bytes of 256·2^((score - largest) / 8)."""
    values = []
    for i in range(2):
        for code in scores.in_codes(2 * group + i):
            octaves = ptx.multiply(arith.subf(code, largest), ptx.constant(0.125))
            values.append(ptx.multiply(ptx.exp2(octaves), ptx.constant(PROBABILITY_SCALE)))
    return ptx.e4m3x4_from_f32(values)


class TileOperations:
    """Loads and broadcasts of a tile of 64 rows by `size` columns."""

    size: int

    def full(self, shape, value, dtype=jnp.float32, layout: Any = WGMMA) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)

    def rows(self, value: float) -> jax.Array:
        """One float32 a row."""
        return self.full((ROWS,), value, layout=BY_ROW)

    def load_rows(self, ref) -> jax.Array:
        return plgpu.load(ref, layout=BY_ROW, optimized=False)

    def load_columns(self, ref) -> jax.Array:
        return plgpu.load(ref, layout=BY_COLUMN, optimized=False)

    def over_rows(self, rows: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(rows, (ROWS, self.size), [0])

    def over_columns(self, columns: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(columns, (ROWS, self.size), [1])

    def rescaled(self, out, anchor, reference, *sums, growth: float):
        """Everything summed so far, in a reference that no anchor outgrows by more than `growth`.

        An anchor that does becomes its row's reference, and what was summed is scaled down.

        Returns:
          `(out, reference, weight, *sums)`, the weight being 2^((anchor - reference) / 8).
        """

        @inline(
            arg_types=(WGMMA, BY_ROW, BY_ROW, *(BY_ROW for _ in sums)),
            return_type=(
                typed((ROWS, self.size), jnp.float32, WGMMA),
                *(by_row() for _ in range(2 + len(sums))),
            ),
        )
        def compute(ctx, out, anchor, reference, *sums):
            del ctx
            outgrown, new = [], []
            for half in range(2):
                code, old = (ptx.row_value(x, half) for x in (anchor, reference))
                limit = arith.addf(old, ptx.constant(growth))
                outgrown.append(arith.cmpf(arith.CmpFPredicate.OGT, code, limit))
                new.append(arith.select(outgrown[half], code, old))
            places = list(np.ndindex(out.registers.shape))
            held = [out.registers[place] for place in places]
            row_sums = [ptx.row_value(x, half) for x in sums for half in range(2)]
            branch = scf.IfOp(
                ptx.any_in_warp(arith.ori(*outgrown)),
                [x.type for x in held + row_sums],
                has_else=True,
            )
            assert branch.then_block is not None
            assert branch.else_block is not None
            with ir.InsertionPoint(branch.then_block):
                factors = [_weight(ptx.row_value(reference, half), new[half]) for half in range(2)]
                scaled = [
                    arith.mulf(x, vector.broadcast(x.type, factors[place[4]]))
                    for place, x in zip(places, held)
                ]
                scaled += [ptx.multiply(x, factors[i % 2]) for i, x in enumerate(row_sums)]
                scf.yield_(scaled)
            with ir.InsertionPoint(branch.else_block):
                scf.yield_(held + row_sums)
            results = list(branch.results)
            registers = np.empty_like(out.registers)
            for place, x in zip(places, results):
                registers[place] = x
            row_sums = results[len(places) :]
            weights = [_weight(ptx.row_value(anchor, half), new[half]) for half in range(2)]
            return (
                fragments(registers),
                ptx.row_array(new),
                ptx.row_array(weights),
                *(ptx.row_array(row_sums[2 * i : 2 * i + 2]) for i in range(len(sums))),
            )

        return compute(out, anchor, reference, *sums)


@dataclasses.dataclass(frozen=True)
class Registers(TileOperations):
    """Operations on a tile of 64 query rows; a generation adds its products.

    Attributes:
      integer: whether scores are INT8 products.
      softmax: `"expcast"`, `"expcast_running"` or `"exp"`.
      means: whether block means are added.
      size: head dim.
    """

    integer: bool
    softmax: str
    means: bool
    size: int

    def codes(self, scores, first_multiplier, second_multiplier, largest_before):
        """Probability codes, the score that maps to `TOP`, and the largest so far (in codes)."""
        kind = _IntegerScores if self.integer else _HalfScores
        running = self.softmax != "expcast"

        @inline(
            arg_types=(WGMMA, BY_ROW, BY_ROW, BY_ROW),
            return_type=(
                typed((ROWS, STEP), E4M3, plgpu.Layout.WGMMA_8BIT),
                by_row(),
                by_row(),
            ),
        )
        def compute(ctx, scores, first, second, before):
            del ctx
            out = np.empty(fa.WGMMA_LAYOUT_8BIT.registers_shape((ROWS, STEP)), dtype=object)
            packed = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
            anchors, maxima = [], []
            for half in range(2):
                multipliers = [ptx.row_value(x, half) for x in (first, second)]
                row = kind(scores, half, multipliers)
                largest = row.largest()
                if running:
                    largest = ptx.maximum(largest, ptx.row_value(before, half))
                maxima.append(largest)
                exact = self.softmax == "exp"
                anchors.append(largest if exact else row.anchor(largest))
                for group in range(STEP // 16):
                    word = _exp_bytes(row, group, largest) if exact else _expcast_bytes(row, group)
                    out[ptx.fragment_index(group, half)] = vector.bitcast(
                        packed, vector.broadcast(ir.VectorType.get((1,), ptx.i32()), word)
                    )
            codes = fragments(out, fa.WGMMA_LAYOUT_8BIT)
            return codes, ptx.row_array(anchors), ptx.row_array(maxima)

        return compute(scores, first_multiplier, second_multiplier, largest_before)

    def weigh(self, out, anchor, reference, *sums):
        """Weight of a step against the row's reference, and the sums so far in that reference.

        The reference is the anchor of the first step. Where an anchor outgrows it by `GROWTH`, it
        becomes the reference and everything summed so far is scaled down.

        Returns:
          `(out, reference, weight, *sums)`.
        """

        return self.rescaled(out, anchor, reference, *sums, growth=GROWTH)

    def promote(self, products, out, weight, total, pending, step):
        """Add a step's products, times its weight, to the float32 sums.

        With means, the weighted row sums of the two blocks of step `step % 4` stay pending in the
        thread of the quad with that number.

        Returns:
          `(out, total, pending)`.
        """
        index_layout = plgpu.Layout.WG_SPLAT((ROWS,))

        @inline(
            arg_types=(WGMMA, WGMMA, BY_ROW, BY_ROW, index_layout, *(BY_ROW for _ in pending)),
            return_type=(
                typed((ROWS, self.size), jnp.float32, WGMMA),
                *(by_row() for _ in range(1 + len(pending))),
            ),
        )
        def compute(ctx, products, out, weight, total, step, *pending):
            del ctx
            registers = np.empty_like(out.registers)
            pair = ir.VectorType.get((2,), ptx.f32())
            totals, kept = [], [[] for _ in pending]
            mine = ptx.in_quad_position(step.registers.item()) if pending else None
            for half in range(2):
                factor = ptx.row_value(weight, half)
                counts = products.registers[ptx.fragment_index(self.size // 8, half)]
                counts = [ptx.element(counts, block) for block in range(2)]
                old_total = ptx.row_value(total, half)
                totals.append(ptx.fma(arith.addf(*counts), factor, old_total))
                for block, old in enumerate(pending):
                    weighted = ptx.multiply(counts[block], factor)
                    kept[block].append(arith.select(mine, weighted, ptx.row_value(old, half)))
                for group in range(self.size // 8):
                    place = ptx.fragment_index(group, half)
                    added = [
                        ptx.fma(
                            ptx.element(products.registers[place], e),
                            factor,
                            ptx.element(out.registers[place], e),
                        )
                        for e in range(2)
                    ]
                    registers[place] = vector.from_elements(pair, added)
            return (
                fragments(registers),
                ptx.row_array(totals),
                *(ptx.row_array(x) for x in kept),
            )

        step = jnp.full((ROWS,), step, jnp.int32)
        out, total, *pending = compute(products, out, weight, total, step, *pending)
        return out, total, tuple(pending)

    def no_pending(self):
        return (self.rows(0.0), self.rows(0.0)) if self.means else ()

    def mean_weights(self, pending) -> jax.Array:
        """Pending row sums as bfloat16 [64, 16], to be multiplied by the means of eight blocks.

        The thread of a quad with number t holds the weights of blocks 2t and 2t + 1, which is where
        the left operand has columns 2t and 2t + 1; what bfloat16 cuts off a weight goes into
        columns 8 + 2t and 9 + 2t, so the right operand has the eight means twice.
        """

        @inline(arg_types=(BY_ROW, BY_ROW), return_type=typed((ROWS, 16), jnp.bfloat16, WGMMA))
        def fragment(ctx, first, second):
            del ctx
            registers = np.empty(fa.WGMMA_LAYOUT.registers_shape((ROWS, 16)), dtype=object)
            one = ir.VectorType.get((1,), ptx.i32())
            pair = ir.VectorType.get((2,), ir.BF16Type.get())
            for half in range(2):
                weights = [ptx.row_value(x, half) for x in (first, second)]
                high = ptx.bfloat2_from_f32(*weights)
                rest = [
                    arith.subf(w, ptx.bfloat_to_f32(high, bool(i))) for i, w in enumerate(weights)
                ]
                for group, word in enumerate((high, ptx.bfloat2_from_f32(*rest))):
                    registers[ptx.fragment_index(group, half)] = vector.bitcast(
                        pair, vector.broadcast(one, word)
                    )
            return fragments(registers)

        return fragment(*pending)


def _weight(code, reference):
    """2^((code - reference) / 8)."""
    return ptx.exp2(ptx.multiply(arith.subf(code, reference), ptx.constant(0.125)))


def normalised(registers: Any, out, total, value_scale_ref, value_mean_ref, dtype) -> jax.Array:
    """The output of a tile: sums over row sums, in the values' scale; zeros where no key was.

    Args:
      registers: `Registers` or its stand-in, which also made the sums.
      value_mean_ref: what is added to rows that saw a key; `None` with block means.
      dtype: of the output, to whose range it is clamped: codes may overshoot the values.
    """
    empty = total == 0.0
    inverse = 1.0 / jnp.where(empty, registers.rows(1.0), total)
    value_scale = registers.load_columns(value_scale_ref)
    out = out * registers.over_rows(inverse) * registers.over_columns(value_scale)
    if value_mean_ref is not None:
        some = registers.over_rows(jnp.where(empty, registers.rows(0.0), registers.rows(1.0)))
        out = out + some * registers.over_columns(registers.load_columns(value_mean_ref))
    most = registers.full((ROWS, registers.size), float(jnp.finfo(dtype).max))
    return jnp.minimum(jnp.maximum(out, -most), most)


def log_sums(registers: Any, total, reference, one: float = PROBABILITY_SCALE) -> jax.Array:
    """The natural logarithm of a tile's sums of exponentials; -inf where no key was.

    `one` is what a probability of 1 is stored as.
    """
    log = jnp.log(total * (1.0 / one)) + reference * _NATS_PER_CODE
    return jnp.where(total == 0.0, registers.rows(-jnp.inf), log)
