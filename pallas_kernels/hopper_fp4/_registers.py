"""What a warpgroup does in registers, as PTX, and its products: NVFP4 probabilities of 256 keys.

A row's probabilities are 2688 · 2^(score - largest so far) (scores in octaves), 2688 = 448 · 6; a
group of 16 has the scale E4M3(its largest / 6), and each is rounded to E2M1 times that. A thread
has whole groups (`operands.KEY_ORDER`), so it works without a word to its neighbours:

* the largest score of a group gives the scale, one exponential;
* the logarithm of the scale goes into the exponent of all 16, so the exponential is in its units;
* E2M1 keeps a bit after the leading one, and halves below 1. Float16 rounds to that by itself if a
  power of two is added that leaves the sum no finer bits: 512 times the value's own power of two,
  at least 1 (ties go to even, as E2M1's do).

`InterpretedFp4` in `_interpreted.py` does the same in plain JAX.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

from .. import _ptx as ptx
from .._registers import BY_ROW, ROWS, WGMMA, TileOperations, by_row, fragments, inline, typed
from ..layout import BLOCK, STEP
from .operands import CHUNK, MEAN_ROWS

UNIT = 448.0 * 6.0
"""What a probability of 1 is stored as: the scales of the groups then use E4M3's whole range."""
MOST_PER_UNIT = 2.0**90
"""Codes that a unit of a product may stand for."""
GROUPS = STEP // CHUNK
"""Groups of 16 of a row that a thread has of a step, one in each chunk of 64 columns."""
_LOG2_448 = float(np.log2(448.0))
_LOG2_UNIT = float(np.log2(UNIT))
_BLOCKS = range(STEP // BLOCK)


def _group_values(scores, group: int, half: int) -> list:
    """The 16 scores of this thread in a chunk of a row half; `scores`: of the two blocks."""
    block, chunk = divmod(group, GROUPS // 2)
    registers = scores[block].registers
    places = [ptx.fragment_index(8 * chunk + q, half) for q in range(8)]
    return [ptx.element(registers[place], e) for place in places for e in range(2)]


def _largest(values: list):
    """The largest of a list in two chains; a NaN wins."""
    chains = [functools.reduce(ptx.maximum, values[i::2]) for i in range(2)]
    return ptx.maximum(*chains)


def _round_to_e2m1(pair):
    """Two float16 >= 0 to E2M1's nearest value, to even, clipped to 6."""
    one, both_512 = ptx.integer(0x3C003C00), ptx.integer(0x60006000)
    pair = ptx.half2_min(pair, ptx.integer(0x46004600))
    unit = ptx.half2_max(ptx.half2_exponents(pair), one)
    rounded = ptx.half2_fma(unit, both_512, pair)
    return ptx.half2_fma(unit, ptx.integer(0xE000E000), rounded)


class RowHalf:
    """One row half of a step: its scores in groups of 16, and what becomes of them."""

    def __init__(self, scores, half: int, multipliers):
        self.values = [_group_values(scores, group, half) for group in range(GROUPS)]
        self.multipliers = multipliers
        self.tops = [_largest(values) for values in self.values]

    def largest(self):
        """The row's largest score in codes."""
        found = []
        for block, multiplier in enumerate(self.multipliers):
            top = ptx.maximum(*self.tops[2 * block : 2 * block + 2])
            found.append(ptx.multiply(ptx.reduce_quad(top, ptx.maximum), multiplier))
        return ptx.maximum(*found)

    def probabilities(self, largest):
        """Pairs of float16 by group, and this thread's row sums of the two blocks.

        Args:
          largest: the row's largest so far in codes.
        """
        octave = ptx.constant(0.125)
        per_unit = [ptx.multiply(x, octave) for x in self.multipliers]
        shift = ptx.multiply(largest, ptx.constant(-0.125))
        out, sums = [], []
        for block, unit in enumerate(per_unit):
            groups = range(2 * block, 2 * block + 2)
            bias = arith.addf(shift, ptx.constant(_LOG2_448))
            scales = ptx.half2_in_e4m3(
                *(ptx.exp2(ptx.fma(self.tops[group], unit, bias)) for group in groups)
            )
            total = ptx.constant(0.0)
            for group, selector in zip(groups, (0x1010, 0x3232)):
                scale = ptx.permute_bytes(scales, scales, selector)
                pairs, total = self._group(group, unit, shift, scale, total)
                out.append(pairs)
            sums.append(total)
        return out, sums

    def _group(self, group: int, unit, shift, scale, total):
        """A group's pairs, and a sum of values with it added."""
        in_f32 = ptx.half_to_f32(scale, False)
        # A scale of zero has the logarithm -inf: all are clipped to 6, and 6 times zero is zero.
        log = arith.subf(ptx.constant(_LOG2_UNIT), ptx.log2(in_f32))
        bias = arith.addf(shift, log)
        codes = []
        for i in range(0, 16, 2):
            low, high = (ptx.exp2(ptx.fma(x, unit, bias)) for x in self.values[group][i : i + 2])
            codes.append(_round_to_e2m1(ptx.half2_from_f32(low, high)))
        # Sums of 16 codes are exact in float16.
        both = functools.reduce(ptx.half2_add, codes)
        count = arith.addf(ptx.half_to_f32(both, False), ptx.half_to_f32(both, True))
        pairs = [ptx.half2_multiply(code, scale) for code in codes]
        return pairs, ptx.fma(count, in_f32, total)


def valid_sum(pairs, first: int, remaining):
    """This thread's sum of a group's pairs over keys that are valid.

    Args:
      pairs: eight pairs of float16, neighbouring keys.
      first: the key of the step that the group's chunk starts with.
      remaining: valid keys of the step.
    """
    own = ptx.multiple_of_quad_position(16)
    left = arith.subi(arith.subi(remaining, ptx.integer(first)), own)
    total = ptx.constant(0.0)
    for i in range(16):
        valid = arith.cmpi(arith.CmpIPredicate.sgt, left, ptx.integer(i))
        value = ptx.half_to_f32(pairs[i // 2], bool(i % 2))
        total = arith.addf(total, arith.select(valid, value, ptx.constant(0.0)))
    return total


@dataclasses.dataclass(frozen=True)
class Fp4Registers(TileOperations):
    """Operations on a tile of 64 query rows.

    Row sums are each thread's own until `sum_of_threads`.

    Attributes:
      means: whether block means are added.
      size: head dim.
    """

    means: bool
    size: int

    def scores(self, query_ref, key_refs) -> Any:
        """Products of 64 queries and two blocks of keys."""

        def multiply(accumulators):
            for accumulator, key_ref in zip(accumulators, key_refs):
                plgpu.wgmma(accumulator, query_ref, key_ref.transpose((1, 0)))

        start = tuple(plgpu.ACC.init(self.full((ROWS, BLOCK), 0.0)) for _ in _BLOCKS)
        return pl.run_state(multiply)(start)

    def probabilities(self, scores, multipliers, largest_before):
        """Two blocks of float16 probabilities, row sums of each, and the largest so far."""
        out_type = typed((ROWS, BLOCK), jnp.float16, WGMMA)

        @inline(
            arg_types=(WGMMA, WGMMA, BY_ROW, BY_ROW, BY_ROW),
            return_type=(out_type, out_type, by_row(), by_row(), by_row()),
        )
        def compute(ctx, first, second, first_multiplier, second_multiplier, before):
            del ctx
            shape = fa.WGMMA_LAYOUT.registers_shape((ROWS, BLOCK))
            out = [np.empty(shape, dtype=object) for _ in _BLOCKS]
            maxima, sums = [], [[], []]
            for half in range(2):
                multipliers = [
                    ptx.row_value(x, half) for x in (first_multiplier, second_multiplier)
                ]
                row = RowHalf((first, second), half, multipliers)
                maxima.append(ptx.maximum(row.largest(), ptx.row_value(before, half)))
                groups, totals = row.probabilities(maxima[half])
                for group, pairs in enumerate(groups):
                    block, chunk = divmod(group, GROUPS // 2)
                    for q, pair in enumerate(pairs):
                        out[block][ptx.fragment_index(8 * chunk + q, half)] = _as_halves(pair)
                for block in _BLOCKS:
                    sums[block].append(totals[block])
            return (*map(fragments, out), *map(ptx.row_array, (*sums, maxima)))

        *found, largest = compute(*scores, *multipliers, largest_before)
        return found[:2], found[2:], largest

    def sums_of_valid(self, probabilities, sums, remaining):
        """Row sums without slots that hold no valid key, of which the last step may have some.

        Args:
          remaining: valid keys from this step on.
        """
        splat = plgpu.Layout.WG_SPLAT((ROWS,))

        @inline(arg_types=(WGMMA, WGMMA, BY_ROW, BY_ROW, splat), return_type=(by_row(), by_row()))
        def compute(ctx, first, second, *rest):
            del ctx
            *sums, remaining = rest
            remaining = remaining.registers.item()
            held = [ptx.row_value(x, half) for x in sums for half in range(2)]
            ragged = arith.cmpi(arith.CmpIPredicate.slt, remaining, ptx.integer(STEP))
            branch = scf.IfOp(ragged, [x.type for x in held], has_else=True)
            assert branch.then_block is not None
            assert branch.else_block is not None
            with ir.InsertionPoint(branch.then_block):
                found = []
                for block, half in np.ndindex(2, 2):
                    registers = (first, second)[block].registers
                    total = ptx.constant(0.0)
                    for chunk in range(2):
                        places = [ptx.fragment_index(8 * chunk + q, half) for q in range(8)]
                        pairs = [ptx.bits(registers[place]) for place in places]
                        start = BLOCK * block + CHUNK * chunk
                        total = arith.addf(total, valid_sum(pairs, start, remaining))
                    found.append(total)
                scf.yield_(found)
            with ir.InsertionPoint(branch.else_block):
                scf.yield_(held)
            results = list(branch.results)
            return ptx.row_array(results[:2]), ptx.row_array(results[2:])

        return compute(*probabilities, *sums, jnp.full((ROWS,), remaining, jnp.int32))

    def rescale(self, out, largest, before, total):
        """The sums so far against the largest score so far."""
        out, _, _, total = self.rescaled(out, largest, before, total, growth=0.0)
        return out, total

    def add_values(self, out, probabilities, sums, value_refs, means_refs) -> Any:
        """Add products with two blocks of values, and the means times the row sums."""
        weights = [self._mean_weights(x) for x in sums] if self.means else []

        def multiply(accumulator):
            for codes, value_ref in zip(probabilities, value_refs):
                plgpu.wgmma(accumulator, codes, value_ref.transpose((1, 0)))
            for weight, means_ref in zip(weights, means_refs):
                plgpu.wgmma(accumulator, weight, means_ref)

        return pl.run_state(multiply)(plgpu.ACC.init(out))

    def _mean_weights(self, sums) -> jax.Array:
        """Row sums as bfloat16 [64, 16], the left operand of a block's mean rows.

        Each thread puts its own there, in even columns as bfloat16 and in odd ones what that cuts
        off, once for the means and once for what bfloat16 cuts off them.
        """

        @inline(arg_types=(BY_ROW,), return_type=typed((ROWS, MEAN_ROWS), jnp.bfloat16, WGMMA))
        def fragment(ctx, sums):
            del ctx
            shape = fa.WGMMA_LAYOUT.registers_shape((ROWS, MEAN_ROWS))
            registers = np.empty(shape, dtype=object)
            pair = ir.VectorType.get((2,), ir.BF16Type.get())
            for half in range(2):
                word = in_two_bfloat16(ptx.row_value(sums, half))
                one = vector.broadcast(ir.VectorType.get((1,), ptx.i32()), word)
                for group in range(2):
                    registers[ptx.fragment_index(group, half)] = vector.bitcast(pair, one)
            return fragments(registers)

        return fragment(sums)

    def sum_of_threads(self, rows) -> jax.Array:
        """Row sums of the four threads that share a row."""

        @inline(arg_types=(BY_ROW,), return_type=by_row())
        def compute(ctx, rows):
            del ctx
            own = [ptx.row_value(rows, half) for half in range(2)]
            return ptx.row_array([ptx.reduce_quad(x, arith.addf) for x in own])

        return compute(rows)


def in_two_bfloat16(value):
    """A float as bfloat16 in the low half, and what that cuts off in the high one."""
    high = ptx.bfloat2_from_f32(value, value)
    return ptx.bfloat2_from_f32(value, arith.subf(value, ptx.bfloat_to_f32(high, False)))


def _as_halves(word):
    """A 32-bit register as the vector of two float16 that a `WGMMA` array holds."""
    one = vector.broadcast(ir.VectorType.get((1,), ptx.i32()), word)
    return vector.bitcast(ir.VectorType.get((2,), ir.F16Type.get()), one)
