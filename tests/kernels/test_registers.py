"""The arithmetic that ships, as PTX, against the reference: `ptx_model` runs its instructions."""

import inspect
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from vc_jax import _expcast
from vc_jax.pallas_kernels import _ptx, _registers
from vc_jax.pallas_kernels._interpreted import InterpretedRegisters
from vc_jax.pallas_kernels.layout import BLOCK, STEP

from . import ptx_model

registers, ptx = ptx_model.computing(_registers, _ptx)
ROWS = 64
OPCODE = r"(?<![\w.%])[a-z][a-z0-9]*(?:\.[A-Za-z0-9]+)+(?= )"
KINDS = ["half", "integer"]


def of_half(rows: np.ndarray, half: int) -> np.ndarray:
    """Rows [64, ...] of a row half as [4, 8, ...]: of each warp's 16 rows the first or last 8."""
    return rows.reshape(4, 2, 8, *rows.shape[1:])[:, half]


def fragments(scores: np.ndarray) -> SimpleNamespace:
    """A `WGMMA` array: in each register of a thread two neighbouring columns of a group of 8."""
    held = {}
    for half in range(2):
        groups = of_half(scores, half).reshape(4, 8, STEP // 8, 4, 2)
        held |= {ptx.fragment_index(t, half): groups[:, :, t] for t in range(STEP // 8)}
    return SimpleNamespace(registers=held)


def codes(kind: str, softmax: str, scores, multipliers, before):
    """`Registers.codes` of scores [64, 256]: codes as stored, anchors and maxima."""
    if kind == "integer":
        scores = (scores.astype(np.int64) + registers.INT8_START).astype(np.uint32)
    cls = registers._IntegerScores if kind == "integer" else registers._HalfScores
    out = np.empty((4, 2, 8, STEP // 16, 4, 4), np.uint8)
    anchors, maxima = np.empty((2, 4, 2, 8), np.float32)
    for half in range(2):
        spread = [np.repeat(of_half(m, half)[..., None], 4, -1) for m in (*multipliers, before)]
        row = cls(fragments(scores), half, spread[:2])
        largest = row.largest()
        if softmax != "expcast":
            largest = ptx.maximum(largest, spread[2])
        anchor = largest if softmax == "exp" else row.anchor(largest)
        for rows, found in ((maxima, largest), (anchors, anchor)):
            np.testing.assert_array_equal(found, found[..., :1].repeat(4, -1))  # one for all four
            rows[:, half] = found[..., 0]
        for group in range(STEP // 16):
            word = (
                registers._exp_bytes(row, group, largest)
                if softmax == "exp"
                else registers._expcast_bytes(row, group)
            )
            out[:, half, :, group] = np.ascontiguousarray(word)[..., None].view(np.uint8)
    return out.reshape(ROWS, STEP), anchors.reshape(ROWS), maxima.reshape(ROWS)


def inputs(kind: str, case: str):
    """Scores, the two blocks' multipliers and the maxima so far, as the layout's ranges allow."""
    rng = np.random.default_rng(0)
    limit = 127 * 127 * 128 if kind == "integer" else 60_000
    scores = rng.normal(size=(ROWS, STEP)) * limit / 8
    codes_at_limit = 2.0 ** rng.uniform(3, 11, (2, ROWS))
    if case == "wide":  # up to 32 000 codes, where float16 has steps of 16
        codes_at_limit = np.full((2, ROWS), 32_000.0)
    if case == "edges":
        scores = rng.choice([-limit, -1, 0, 1, limit], (ROWS, STEP))
        scores[0], scores[1], scores[2] = 0, limit, -limit
    scores = np.clip(np.round(scores), -limit, limit)
    multipliers = (codes_at_limit / limit).astype(np.float32)
    before = rng.choice([-1e30, -5.0, 5.0, 300.0], ROWS).astype(np.float32)
    return scores.astype(np.int64 if kind == "integer" else np.float16), multipliers, before


@pytest.mark.parametrize("case", ["random", "wide", "edges"])
@pytest.mark.parametrize("softmax", ["expcast", "expcast_running", "exp"])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_those_of_the_stand_in_for_the_interpreter(kind, softmax, case):
    scores, multipliers, before = inputs(kind, case)
    found, anchors, maxima = codes(kind, softmax, scores, multipliers, before)
    plain = InterpretedRegisters(kind == "integer", softmax, means=False, size=64)
    want = plain.codes(jnp.asarray(scores, jnp.float32), *multipliers, before)
    want_codes = np.asarray(want[0]).view(np.uint8)
    np.testing.assert_allclose(maxima, want[2], rtol=1e-6)
    np.testing.assert_allclose(anchors, want[1], rtol=1e-6, atol=1e-3)
    # The stand-in rounds products and sums apart, exp2 is an approximation: edges may differ.
    difference = np.abs(found.astype(int) - want_codes)
    assert difference.max() <= 1
    assert np.mean(difference > 0) < 0.01
    assert len(np.unique(found)) > (50 if case == "random" else 1)


@pytest.mark.parametrize("case", ["random", "wide", "edges"])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_those_of_the_reference(kind, case):
    scores, multipliers, before = inputs(kind, case)
    found, anchors, maxima = codes(kind, "expcast", scores, multipliers, before)
    half = kind == "half"
    row = _expcast.anchor(jnp.asarray(maxima), half=half)
    np.testing.assert_allclose(anchors, row.code, rtol=1e-6, atol=1e-3)
    by_column = jnp.repeat(jnp.asarray(multipliers).T, BLOCK, axis=1)
    by_column = _expcast.f16_multiplier(by_column) if half else by_column
    row = jax.tree.map(lambda x: x[:, None], row)
    want = _expcast.anchored_codes(jnp.asarray(scores, jnp.float32), by_column, row)
    # The order of the values' tokens: 4 in a row for a thread, where scores are 2 and 2.
    want = np.asarray(want).reshape(ROWS, -1, 2, 4, 2).swapaxes(2, 3).reshape(ROWS, STEP)
    difference = np.abs(found.astype(int) - want)
    assert difference.max() <= 1
    assert np.mean(difference > 0) < 0.01
    assert found.max() <= 120


def test_the_weight_of_a_step_is_a_power_of_two_of_eighths():
    code = np.linspace(-900, 470, 128, dtype=np.float32).reshape(4, 8, 4)
    got = registers._weight(code, np.float32(-10))
    np.testing.assert_allclose(got, np.exp2((code.astype(np.float64) + 10) / 8), rtol=1e-5)


def test_a_weight_is_two_bfloat16_to_sixteen_bits():
    weights = np.random.default_rng(1).lognormal(size=(2, 4, 8, 4)).astype(np.float32)
    pair = ptx.bfloat2_from_f32(*weights)
    for high, weight in zip((False, True), weights):
        got = ptx.bfloat_to_f32(pair, high)
        np.testing.assert_array_equal(got, weight.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_every_instruction_has_a_model_and_every_model_an_instruction():
    source = inspect.getsource(_ptx)
    source = "".join(source.replace("{kind}", kind) for kind in ("", ".relu"))
    texts = " ".join(re.findall(r'"([^"]*;[^"]*)"', source))
    assert set(re.findall(OPCODE, texts)) == set(ptx_model.OPCODES)
