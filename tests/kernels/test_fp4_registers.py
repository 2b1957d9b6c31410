"""NVFP4 probabilities as they ship, as PTX, against the reference: `ptx_model` runs its
instructions."""

from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from vc_jax._quantize import decode_e2m1, encode_e2m1, nvfp4_groups
from vc_jax.pallas_kernels import _ptx
from vc_jax.pallas_kernels.hopper_fp4 import KEY_ORDER, _registers
from vc_jax.pallas_kernels.layout import BLOCK, STEP

from . import ptx_model

registers, ptx = ptx_model.computing(_registers, _ptx)
ROWS = 64
KEYS = (np.arange(STEP // 64)[:, None] * 64 + KEY_ORDER).reshape(-1)
"""The key that each stored slot of a step holds."""


def of_half(rows: np.ndarray, half: int) -> np.ndarray:
    """Rows [64, ...] of a row half as [4, 8, ...]."""
    return rows.reshape(4, 2, 8, *rows.shape[1:])[:, half]


def blocks_of(scores: np.ndarray) -> list[SimpleNamespace]:
    """Two `WGMMA` arrays of 128 columns; `scores` [64, 256] with keys in order."""
    stored, found = scores[:, KEYS], []
    for block in range(STEP // BLOCK):
        held = {}
        for half in range(2):
            columns = of_half(stored[:, block * BLOCK : (block + 1) * BLOCK], half)
            groups = columns.reshape(4, 8, BLOCK // 8, 4, 2)
            held |= {ptx.fragment_index(t, half): groups[:, :, t] for t in range(BLOCK // 8)}
        found.append(SimpleNamespace(registers=held))
    return found


def run(scores, multipliers, before):
    """Probabilities [64, 256] with keys in order, row sums [64, 2] and the largest so far."""
    stored = np.empty((4, 2, 8, STEP // 64, 8, 4, 2), np.float16)
    sums, maxima = np.empty((4, 2, 8, 2), np.float32), np.empty((4, 2, 8), np.float32)
    for half in range(2):
        spread = [np.repeat(of_half(m, half)[..., None], 4, -1) for m in (*multipliers, before)]
        row = registers.RowHalf(blocks_of(scores), half, spread[:2])
        largest = ptx.maximum(row.largest(), spread[2])
        groups, totals = row.probabilities(largest)
        maxima[:, half] = largest[..., 0]
        for chunk, pairs in enumerate(groups):
            for q, pair in enumerate(pairs):
                halves = np.ascontiguousarray(pair)[..., None].view(np.float16)
                stored[:, half, :, chunk, q] = halves
        for block in range(2):
            sums[:, half, :, block] = totals[block].sum(-1)
    plain = np.empty((ROWS, STEP), np.float32)
    plain[:, KEYS] = stored.reshape(ROWS, STEP)
    return plain, sums.reshape(ROWS, 2), maxima.reshape(ROWS)


def inputs(case: str):
    rng = np.random.default_rng(0)
    sigma = {"flat": 2.0, "usual": 30.0, "peaked": 200.0}[case]
    multipliers = (2.0 ** rng.uniform(-12, -8, (2, ROWS))).astype(np.float32)
    by_key = np.repeat(multipliers.T, BLOCK, 1)
    scores = (sigma * rng.normal(size=(ROWS, STEP)) / by_key).astype(np.float32)
    before = rng.choice([-1e30, -5.0, 5.0, 100.0], ROWS).astype(np.float32)
    return scores, multipliers, before


@pytest.mark.parametrize("case", ["flat", "usual", "peaked"])
def test_probabilities_are_the_reference_s(case):
    scores, multipliers, before = inputs(case)
    found, sums, maxima = run(scores, multipliers, before)
    scaled = scores * np.repeat(multipliers.T, BLOCK, 1)
    np.testing.assert_allclose(maxima, np.maximum(scaled.max(1), before), rtol=1e-6)
    exact = 2688.0 * np.exp2((scaled - maxima[:, None]).astype(np.float64) / 8)
    wanted = nvfp4_groups(jnp.asarray(exact.reshape(ROWS, -1, 16), jnp.float32))
    step = np.repeat(np.asarray(wanted.scales, np.float32), 16, -1)
    codes = np.asarray(encode_e2m1(jnp.asarray(found / np.where(step > 0, step, 1))))
    difference = np.abs(codes.astype(int) - np.asarray(wanted.codes).reshape(ROWS, STEP))
    assert difference.max() <= 1
    assert np.mean(difference > 0) < 2e-3
    same = found == np.asarray(wanted.values()).reshape(ROWS, STEP)
    assert np.mean(same) > 0.998
    assert len(np.unique(found)) > 20
    blocks = found.reshape(ROWS, 2, BLOCK).astype(np.float64).sum(-1)
    np.testing.assert_allclose(sums, blocks, rtol=1e-6, atol=1e-3)


def test_a_nan_among_the_scores_shows_in_all_of_its_row():
    scores, multipliers, before = inputs("usual")
    scores[5, 77] = np.nan
    found, sums, _ = run(scores, multipliers, before)
    assert np.isnan(found[5]).all()
    assert np.isnan(sums[5]).all()
    assert np.isfinite(np.delete(found, 5, 0)).all()


def test_rounding_to_e2m1_is_to_nearest_even_of_every_float16():
    values = np.arange(0x7C01, dtype=np.uint16).view(np.float16)  # 0 to infinity
    values = np.resize(values, (-(-values.size // 256), 4, 8, 4, 2))
    wanted = decode_e2m1(encode_e2m1(jnp.asarray(values, jnp.float32)))
    for pair, want in zip(values, np.asarray(wanted)):
        word = np.ascontiguousarray(pair).view(np.uint32)[..., 0]
        found = np.ascontiguousarray(registers._round_to_e2m1(word))[..., None].view(np.float16)
        np.testing.assert_array_equal(found, want)


def test_row_sums_over_valid_keys_only():
    rng = np.random.default_rng(2)
    plain = rng.choice(np.array([0, 0.5, 3, 6], np.float16), (ROWS, STEP)) * np.float16(1.5)
    for remaining in (1, 63, 64, 100, 128, 200, 255):
        total = np.zeros((4, 8))
        for chunk in range(STEP // 64):
            stored = plain[:, KEYS][:, chunk * 64 : (chunk + 1) * 64]
            columns = of_half(stored, 0).reshape(4, 8, 8, 4, 2)
            pairs = [
                np.ascontiguousarray(columns[:, :, q]).view(np.uint32)[..., 0] for q in range(8)
            ]
            total += registers.valid_sum(pairs, 64 * chunk, np.uint32(remaining)).sum(-1)
        np.testing.assert_allclose(total, of_half(plain[:, :remaining].sum(1, dtype=float), 0))


def test_a_row_sum_is_two_bfloat16_to_sixteen_bits():
    sums = np.random.default_rng(1).lognormal(8, 2, size=(4, 8, 4)).astype(np.float32)
    word = np.ascontiguousarray(registers.in_two_bfloat16(sums))[..., None]
    both = word.view(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_allclose(both.sum(-1), sums, rtol=2.0**-16)
    np.testing.assert_array_equal(both[..., 0], sums.astype(ml_dtypes.bfloat16))
