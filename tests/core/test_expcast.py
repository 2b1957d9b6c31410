"""ExpCast: bytes against exact arithmetic, and anchors of rows of any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax import _expcast

from . import oracles

expcast = jax.jit(vc_jax.expcast)
exp_then_cast = jax.jit(vc_jax.exp_then_cast)


def test_every_byte_is_right_around_every_rounding_boundary():
    """One ulp is the coarser of float32's at the score and at the code."""
    boundary = np.arange(0.5, 120, 1.0)
    exact = (boundary - 119.65) / 8
    ulp = np.maximum(np.spacing(boundary.astype(np.float32)) / 8.0, -np.spacing(np.float32(exact)))
    for steps in (-3, -2, -1, 1, 2, 3):
        u = (exact + steps * ulp).astype(np.float32)
        got = np.asarray(expcast(jnp.asarray(u))).tolist()
        assert got == [oracles.expcast_byte(x) for x in u]
        assert got == [int(code) + (steps > 0) for code in boundary]


def test_a_byte_differs_from_exact_arithmetic_within_half_an_ulp_of_a_boundary_only():
    """The map is one float32 addition (8·u is exact) and one rounding to nearest even."""
    codes = np.arange(0.5, 120, 1.0)
    u = ((codes - 119.65) / 8).astype(np.float32)
    for _ in range(4):
        u = np.nextafter(u, np.float32(0))
    for _ in range(9):
        got = np.asarray(expcast(jnp.asarray(u)))
        for value, byte in zip(u, got):
            exact = oracles.expcast_code(value)
            distance = abs(float(exact - round(exact - oracles.Fraction(1, 2)))) - 0.5
            near = abs(distance) <= 0.51 * np.spacing(np.float32(float(exact))) + 2e-6
            assert int(byte) == oracles.expcast_byte(value) or near
        u = np.nextafter(u, np.float32(-np.inf))


def test_random_scores_give_the_bytes_of_the_formula():
    u = -np.random.default_rng(0).exponential(6, 200_000).astype(np.float32)
    got = np.asarray(expcast(jnp.asarray(u)))
    assert got.dtype == np.uint8
    want = oracles.expcast_bytes(u)
    code = 8.0 * u.astype(np.float64) + 119.65
    clear = np.abs(np.abs(code - np.floor(code)) - 0.5) > 1e-5
    assert clear.mean() > 0.999
    np.testing.assert_array_equal(got[clear], want[clear])


def test_bytes_rise_with_the_score_and_never_leave_the_finite_range():
    u = np.sort(np.random.default_rng(1).uniform(-20, 3, 50_000).astype(np.float32))
    bytes_ = np.asarray(expcast(jnp.asarray(u))).astype(int)
    assert (np.diff(bytes_) >= 0).all()
    assert bytes_.max() == 120
    assert np.isfinite(np.asarray(vc_jax.decode_codes(jnp.asarray(bytes_, jnp.uint8)))).all()


def test_a_compiled_call_gives_the_bytes_of_one_that_is_not():
    u = jnp.asarray(np.random.default_rng(2).uniform(-16, 0, 4096), jnp.float32)
    assert (expcast(u) == vc_jax.expcast(u)).all()


def test_scores_above_a_stale_maximum_clip_at_256():
    assert vc_jax.expcast(jnp.array([0.01, 0.2, 50.0, jnp.inf])).tolist() == [120] * 4


def test_a_score_that_is_nan_stays_one():
    for cast in (vc_jax.expcast, expcast, exp_then_cast):
        assert np.isnan(vc_jax.decode_codes(cast(jnp.array([jnp.nan]))))[0]
    row = _expcast.anchor(jnp.float32(3.0), half=False)
    codes = _expcast.anchored_codes(jnp.array([1.0, jnp.nan]), jnp.float32(1.0), row)
    assert np.isnan(vc_jax.decode_codes(codes)).tolist() == [False, True]


def test_a_multiplier_beyond_float16_saturates():
    """It may stand before codes that are all zero: an infinity would turn them to NaN."""
    assert _expcast.f16_multiplier(jnp.array([1e9, 65504.0, 65520.0])).tolist() == [65504.0] * 3
    assert np.isnan(_expcast.f16_multiplier(jnp.array(jnp.nan)))


def test_decoding_is_the_table_of_e4m3():
    codes = jnp.arange(127, dtype=jnp.uint8)
    np.testing.assert_array_equal(vc_jax.decode_codes(codes), oracles.E4M3_VALUES[:127])
    assert vc_jax.decode_codes(codes).dtype == jnp.float32


def test_exp_then_cast_rounds_the_exponential_to_nearest_even():
    u = -np.random.default_rng(3).uniform(0, 22, 100_000).astype(np.float32)
    got, want = np.asarray(exp_then_cast(jnp.asarray(u))), oracles.cast_bytes(u)
    probability = 256 * np.exp2(u.astype(np.float64))
    table = oracles.E4M3_VALUES[:127]
    middles = (table[:-1] + table[1:]) / 2
    near = np.abs(probability[:, None] / middles - 1).min(1) < 1e-6
    assert near.mean() < 0.01
    np.testing.assert_array_equal(got[~near], want[~near])
    points = vc_jax.exp_then_cast(jnp.array([0.0, -1.0, -8.0, -17.9, -18.1, -jnp.inf]))
    assert points.tolist() == [120, 112, 56, 1, 0, 0]


def largest_scores(half):
    """Row maxima of both signs, up to what `prepare` lets through."""
    limit = 16_256 if half else 500_000
    size = np.geomspace(1e-3, limit / 1.02, 500) * np.random.default_rng(4).uniform(1, 1.02, 500)
    return np.concatenate([size, -size, [0.0]]).astype(np.float32)[:, None]


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
def test_the_largest_score_of_a_row_never_passes_code_120(half):
    """At logits in the thousands a float16 chain can pass 126, which is NaN."""
    below = -np.geomspace(1e-3, 200, 300, dtype=np.float32)
    largest = largest_scores(half)
    scores = jnp.asarray(np.concatenate([largest, largest + below], 1))
    row = _expcast.anchor(jnp.asarray(largest), half=half)
    codes = np.asarray(_expcast.anchored_codes(scores, jnp.float32(1.0), row)).astype(int)
    assert codes.max() <= 120
    assert (codes[:, :1] >= codes).all()
    if not half:
        assert (codes[:, 0] == 120).all()
    else:
        # The float16 bias is below its value by at most two steps of float16.
        step = np.maximum(np.abs(119.65 - largest[:, 0]), 128) * 2.0**-10
        assert (codes[:, 0] >= 119.5 - 2 * step).all()


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
def test_a_decoded_code_times_its_anchor_is_the_exponential_of_the_score(half):
    """Whatever the rounding of the bias, the weight that a code stands for is right to ExpCast."""
    largest = largest_scores(half)
    scores = largest - np.linspace(0, 80, 161, dtype=np.float32)
    row = _expcast.anchor(jnp.asarray(largest), half=half)
    codes = np.asarray(_expcast.anchored_codes(jnp.asarray(scores), jnp.float32(1.0), row))
    meant = (scores.astype(np.float64) - np.asarray(row.code, np.float64)) / 8
    ratio = oracles.E4M3_VALUES[codes] / 256 / np.exp2(meant)
    normal = codes >= 8
    slack = 1.006  # float16 holds codes up to 128 to 1/16: half of that is 0.5 % of a weight
    assert normal.mean() > 0.5
    assert ratio[normal].min() > 0.9290 / slack
    assert ratio[normal].max() < 1.0746 * slack


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
def test_the_anchor_of_a_row_without_a_score_is_finite(half):
    """Infinities there would turn weights between two such steps to NaN."""
    row = _expcast.anchor(jnp.float32(jnp.finfo(jnp.float32).min), half=half)
    assert np.isfinite([row.code, row.bias]).all()
    assert float(row.code) < -60_000


def test_float16_rounding_is_that_of_the_format():
    values = np.random.default_rng(5).normal(size=10_000) * 10.0 ** np.arange(10_000).clip(0, 4)
    values = np.concatenate([values, [65504, 65519, 65520, 1e9, 0.0, 3e-6, 2.0**-24]])
    values = values.astype(np.float32)
    with np.errstate(over="ignore"):
        want = values.astype(np.float16).astype(np.float32)
    normal = np.abs(values) >= 2.0**-14
    got = np.asarray(jax.jit(_expcast.round_to_f16)(jnp.asarray(values)))
    np.testing.assert_array_equal(got[normal], want[normal])
    positive = (values > 0) & np.isfinite(want)
    got = np.asarray(jax.jit(_expcast.f16_multiplier)(jnp.asarray(values)))
    np.testing.assert_array_equal(got[positive], want[positive])
