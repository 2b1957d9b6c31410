"""The method's own claims (arXiv 2609.15810), as numbers that can be wrong."""

import functools
import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax import AttentionConfig, _expcast

from . import oracles
from .cases import (
    EIGHT_BIT,
    LENGTHS,
    QUERY_LENGTHS,
    SMOOTHED,
    attend,
    attend_ragged,
    attend_real,
    exact_real,
    ragged,
    real_heads,
    relative_l2,
    video_like,
)

expcast, exp_then_cast = jax.jit(vc_jax.expcast), jax.jit(vc_jax.exp_then_cast)
decode = oracles.E4M3_VALUES
LIVE = (oracles.prefix(QUERY_LENGTHS, 9) & (LENGTHS > 0)[:, None])[:, :, None, None]


def octave(first=-4.0, points=2**16):
    """One doubling interval of the probability, dense."""
    return jnp.asarray(first + (np.arange(points) + 0.5) / points, jnp.float32)


def test_codes_at_the_points_of_the_paper():
    points = jnp.array([0.0, -1.0, -1.6, -8.0, -14.0, -100.0, -jnp.inf])
    assert expcast(points).tolist() == [120, 112, 107, 56, 8, 0, 0]
    assert float(vc_jax.decode_codes(expcast(points))[0]) == 256.0


def test_the_map_in_nats_is_the_same():
    """RNE(11.541560327·(s - m) + 119.65)."""
    assert pytest.approx(11.541560327, rel=1e-9) == _expcast.CODES_PER_NAT
    assert pytest.approx(119.65) == _expcast.TOP


@pytest.mark.parametrize("first", [-1.0, -4.0, -9.0])
def test_the_byte_is_that_of_exp_then_cast_on_four_fifths_of_an_octave_and_one_off_elsewhere(first):
    difference = np.asarray(expcast(octave(first))).astype(int) - exp_then_cast(octave(first))
    assert np.abs(difference).max() == 1
    # 79.6 % as the paper counts it; the rounding boundaries of both maps are exact.
    assert (difference == 0).mean() == pytest.approx(0.796, abs=5e-4)


def test_a_decoded_weight_is_within_seven_and_a_half_percent_of_the_exponential():
    u = octave()
    ratio = decode[np.asarray(expcast(u))] / (256 * np.exp2(np.asarray(u, np.float64)))
    assert ratio.min() == pytest.approx(0.9290, abs=2e-4)
    assert ratio.max() == pytest.approx(1.0746, abs=2e-4)


def test_the_total_variation_bound_follows_from_the_extremes():
    low, high = np.sqrt([0.9290, 1.0746])
    assert (high - low) / (high + low) == pytest.approx(0.03638, abs=1e-5)
    assert pytest.approx(0.03638, abs=1e-5) == _expcast.TOTAL_VARIATION_BOUND


def total_variation(scores):
    """TV of ExpCast rows of scores (nats), and their mass below u = -14."""
    u = (scores - scores.max(-1, keepdims=True)) * np.log2(np.e)
    exact = np.exp2(u)
    weights = decode[np.asarray(expcast(jnp.asarray(u, jnp.float32)))]
    mass = np.where(u < -14, exact, 0).sum(-1) / exact.sum(-1)
    return oracles.total_variation(weights, exact), mass


@pytest.mark.parametrize("spread", [0.02, 0.3, 1.0, 3.0, 8.0])
def test_no_random_row_passes_the_bound_by_more_than_its_underflow(spread):
    rng = np.random.default_rng(0)
    rows = [rng.normal(scale=spread, size=(50, 4096)), rng.uniform(-spread, 0, size=(50, 4096))]
    for scores in rows:
        variation, mass = total_variation(scores)
        assert (variation <= 0.03638 + mass + 1e-6).all()


def test_no_adversarial_row_passes_the_bound_but_one_comes_near_it():
    """Half the mass at the worst ratio below, half at the worst above."""
    u = np.asarray(octave(), np.float64)
    ratio = decode[np.asarray(expcast(octave()))] / (256 * np.exp2(u))
    worst = [u[ratio.argmin()], u[ratio.argmax()]]
    counts = [2000, round(2000 * np.exp2(worst[0] - worst[1]) * np.sqrt(0.9290 / 1.0746))]
    row = np.concatenate([[worst[0] * 0], np.repeat(worst, counts)]) * np.log(2)
    variation, _ = total_variation(row[None])
    assert 0.034 < variation[0] <= 0.03638 + 1e-6


def test_no_row_of_a_real_head_passes_the_bound_by_more_than_its_underflow():
    query, key, _ = (np.asarray(x, np.float64) for x in real_heads(128))
    for head in range(2):
        scores = query[0, :, head] @ key[0, :, head].T / 8
        variation, mass = total_variation(scores)
        assert (variation <= 0.03638 + mass + 1e-6).all()
        assert variation.mean() < 0.03


def test_subnormal_codes_decode_low_and_the_rest_flushes():
    meant = 256 * np.exp2((np.arange(1, 8) - 119.65) / 8)
    ratios = decode[1:8] / meant
    np.testing.assert_allclose(ratios, [0.22, 0.41, 0.56, 0.69, 0.79, 0.87, 0.93], atol=0.008)
    assert expcast(jnp.array([-14.88, -14.90])).tolist() == [1, 0]


@pytest.mark.parametrize(("cast", "cut"), [(expcast, -14.89375), (exp_then_cast, -18.0)])
def test_what_is_flushed_of_a_wide_tail_is_what_lies_below_the_smallest_code(cast, cut):
    """Half of code 1 in ExpCast's map; half of E4M3's smallest number by exp and cast.

    75.6K quantiles of Gaussian logits of sigma 3, among which these are one to two percent and two
    to three per mille of the mass.
    """
    quantiles = (np.arange(75_600) + 0.5) / 75_600
    scores = 3 * np.array([statistics.NormalDist().inv_cdf(q) for q in quantiles])
    u = (scores - scores.max()) / math.log(2)
    exact = np.exp2(u) / np.exp2(u).sum()
    assert np.abs(u - cut).min() > 1e-6  # no float32 rounding takes a score across
    flushed = exact[np.asarray(cast(jnp.asarray(u, jnp.float32))) == 0].sum()
    assert flushed == pytest.approx(exact[u < cut].sum(), rel=1e-4)
    assert 0.001 < flushed < 0.03


def test_the_bias_of_the_normaliser_on_flat_rows_is_as_documented():
    """About +0.009 nat: the mean of the decoded ratio over a flat row."""
    query, key, value = ragged()
    flat = (0.3 * query, key, value)
    _, lse = attend_ragged("int8", flat, query_lengths=np.full(6, 9))
    _, want = oracles.attention(*flat, scale=0.125, key_valid=oracles.prefix(LENGTHS, 300))
    error = np.asarray(lse)[5] - want[5]
    assert error.mean() == pytest.approx(0.009, abs=0.006)
    assert np.abs(error).max() < 0.0746


def test_exact_attention_does_not_depend_on_the_order_of_the_keys():
    query, key, value = (x[3:] for x in ragged())
    shuffle = np.random.default_rng(2).permutation(300)
    call = jax.jit(vc_jax.plain_attention)
    valid = jnp.asarray(np.random.default_rng(3).random((3, 300)) < 0.7)
    first = call(query, key, value, key_valid=valid)
    second = call(query, key[:, shuffle], value[:, shuffle], key_valid=valid[:, shuffle])
    assert relative_l2(second[0], first[0]) < 1e-6
    np.testing.assert_allclose(second[1], first[1], atol=1e-5)


def constant_values(largest):
    """One BF16 number per batch row, head and channel, of magnitudes up to 10^largest."""
    rng = np.random.default_rng(4)
    number = rng.normal(size=(6, 1, 2, 64)) * 10.0 ** rng.integers(
        -30, largest + 1, size=(6, 1, 2, 64)
    )
    number = jnp.asarray(number, jnp.bfloat16).astype(jnp.float32)
    return jnp.broadcast_to(number, (6, 300, 2, 64)), np.repeat(np.asarray(number), 2, 2)


@pytest.mark.parametrize("name", SMOOTHED)
def test_constant_bf16_values_are_returned_exactly_at_every_length(name):
    query, key, _ = ragged()
    # NVFP4 adds its means unscaled: sums of 256 times as many of them have to fit float32.
    value, number = constant_values(30 if name == "nvfp4" else 35)
    out, _ = attend_ragged(name, (query, key, value))
    want = np.where(LIVE, number, 0)
    got = np.asarray(jnp.asarray(out, jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(out, want, rtol=5e-7)


@pytest.mark.parametrize(("name", "dtype"), [("int8", jnp.float16), ("fp8", jnp.bfloat16)])
def test_constant_values_of_narrow_dtypes_are_returned_exactly(name, dtype):
    query, key, value = video_like(2, 1, 9, 130, 2, 1, 64, dtype)
    number = jnp.asarray(np.random.default_rng(5).normal(size=64), jnp.bfloat16).astype(dtype)
    value = jnp.broadcast_to(number, value.shape)
    lengths = {"key_value_seq_lengths": jnp.array([129])}
    out, _ = attend(query, key, value, config=name, return_residual=True, **lengths)
    np.testing.assert_array_equal(out, jnp.broadcast_to(number, out.shape))


@pytest.mark.parametrize("constant", [1.0, 16.0, -1000.0])
@pytest.mark.parametrize("name", [n for n in SMOOTHED if n in EIGHT_BIT])
def test_adding_a_constant_to_the_values_adds_it_to_the_output(name, constant):
    """Up to the rounding of the stored means to bfloat16."""
    query, key, value = ragged()
    channel = np.linspace(0.5, 1, 64).astype(np.float32) * constant
    before, _ = attend_ragged(name, ragged())
    after, _ = attend_ragged(name, (query, key, value + channel))
    difference = np.asarray(after, np.float64) - before - np.where(LIVE, channel, 0)
    slack = (np.abs(channel) + 2 * np.abs(np.asarray(value)).max()) * 2.0**-8
    assert (np.abs(difference) <= slack).all()


def test_without_v_smooth_a_constant_goes_through_the_mean_of_each_channel():
    """Which is float32: what is left of a large one is its own rounding, not a code's."""
    query, key, value = ragged()
    before, after = (
        np.asarray(attend_ragged("fp8 unsmoothed", (query, key, v))[0], np.float64)
        for v in (value, value + 1000.0)
    )
    difference = np.where(LIVE, after - before - 1000.0, 0)
    assert 0 < np.abs(difference).max() < 0.02


@pytest.mark.parametrize("length", [128, 1024])
def test_the_mean_of_a_block_takes_its_share_of_the_energy_away(length):
    """|V|² = |R|² + B·|mu|², block by block."""
    values = np.random.default_rng(6).normal(size=(3, length, 16)) + 0.7
    blocks = values.reshape(3, -1, 128, 16)
    means = np.asarray(vc_jax.block_means(jnp.asarray(values, jnp.float32)), np.float64)
    residual = ((blocks - means[:, :, None]) ** 2).sum((2, 3))
    removed = 128 * (means**2).sum(-1)
    np.testing.assert_allclose(residual + removed, (blocks**2).sum((2, 3)), rtol=1e-6)
    share = vc_jax.mean_energy(jnp.asarray(values, jnp.float32))
    np.testing.assert_allclose(share, removed.sum(1) / (blocks**2).sum((1, 2, 3)), rtol=1e-5)


@functools.cache
def real_errors():
    """Mean relative L2 of the rows of two real heads, by what is done to them."""
    want, _ = exact_real()
    errors = {}
    for name, changes in {
        "expcast": {},
        "exp": {"softmax": "exp"},
        "expcast_running": {"softmax": "expcast_running"},
        "unsmoothed": {"smooth_values": False},
    }.items():
        out, _ = attend_real(AttentionConfig(**changes))
        error = np.linalg.norm(np.asarray(out) - want, axis=-1) / np.linalg.norm(want, axis=-1)
        errors[name] = error.mean()
    return errors


def test_block_anchored_expcast_costs_a_tenth_of_the_error_at_most_on_these_rows():
    errors = real_errors()
    assert errors["expcast"] <= 1.12 * errors["exp"]


def test_block_anchoring_helps_where_scores_spread():
    errors = real_errors()
    assert errors["expcast"] <= errors["expcast_running"]


def test_v_smooth_lowers_the_error_of_real_heads():
    errors = real_errors()
    assert errors["expcast"] < errors["unsmoothed"]


def test_kmeans_lets_means_take_more_energy_from_real_values():
    @jax.jit
    def energies(value):
        order = vc_jax.cluster_order(vc_jax.kmeans(value, 8).labels)
        sorted_value = jnp.take_along_axis(value, order[..., None], 1)
        return vc_jax.mean_energy(value), vc_jax.mean_energy(sorted_value)

    before, after = energies(jnp.swapaxes(real_heads()[2], 1, 2)[0])
    assert (np.asarray(after) > np.asarray(before) + 0.05).all()
