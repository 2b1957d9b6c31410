"""INT8, E4M3 and NVFP4 quantisers, rotation, centring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax import _quantize

from . import oracles

RNG = np.random.default_rng(1)
VALUES = (RNG.normal(size=(3, 256, 32)) * RNG.lognormal(size=(3, 256, 1), sigma=2)).astype(
    np.float32
)
QUANTISERS = {
    "int8": (vc_jax.quantize_int8, 127.0),
    "e4m3": (vc_jax.quantize_e4m3, 448.0),
}
quantize_nvfp4 = jax.jit(vc_jax.quantize_nvfp4, static_argnums=1)
dequantize_nvfp4 = jax.jit(vc_jax.dequantize_nvfp4)
GROUPS = {"token": -1, "channel": 1, "block": (1, 2), "tensor": (0, 1, 2)}


@pytest.mark.parametrize("axis", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("name", QUANTISERS)
def test_scale_is_the_largest_magnitude_of_its_group_over_the_largest_code(name, axis):
    quantise, largest = QUANTISERS[name]
    codes, scale = quantise(jnp.asarray(VALUES), axis)
    want = np.abs(VALUES).max(axis, keepdims=True) / np.float32(largest)
    assert codes.shape == VALUES.shape
    assert scale.dtype == jnp.float32
    np.testing.assert_allclose(scale, want, rtol=2.5e-7)


@pytest.mark.parametrize("axis", GROUPS.values(), ids=GROUPS)
def test_int8_codes_are_the_nearest_integers(axis):
    codes, scale = vc_jax.quantize_int8(jnp.asarray(VALUES), axis)
    exact = VALUES.astype(np.float64) / np.asarray(scale, np.float64)
    assert codes.dtype == jnp.int8
    assert np.abs(np.asarray(codes, np.float64) - exact).max() <= 0.5 + 1e-5
    assert np.abs(np.asarray(codes, int)).max() == 127


@pytest.mark.parametrize("axis", GROUPS.values(), ids=GROUPS)
def test_e4m3_codes_are_the_nearest_of_the_table(axis):
    codes, scale = vc_jax.quantize_e4m3(jnp.asarray(VALUES), axis)
    quotient = VALUES / np.asarray(scale)
    want = oracles.nearest_even(np.abs(quotient), oracles.E4M3_VALUES[:127])
    got = np.asarray(codes).view(np.uint8)
    np.testing.assert_array_equal(got & 127, want)
    np.testing.assert_array_equal(got >> 7, np.signbit(quotient))


def test_int8_rounds_ties_to_even_and_saturates_symmetrically():
    values = jnp.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]])
    codes, scale = vc_jax.quantize_int8(values)
    assert scale[0, 0] == 1.0
    assert codes[0].tolist() == [127, 0, 2, 2, 0, -2, -2, -127]


def test_e4m3_rounds_every_midpoint_to_the_even_code():
    table = oracles.E4M3_VALUES[:127]
    middles = (table[:-1] + table[1:]) / 2
    values = np.concatenate([middles, -middles, [448.0]]).astype(np.float32)
    codes, scale = vc_jax.quantize_e4m3(jnp.asarray(values))
    assert scale == 1.0
    got = np.asarray(codes).view(np.uint8)[:-1] & 127
    assert (got % 2 == 0).all()
    np.testing.assert_array_equal(got[:126], oracles.nearest_even(middles, table))


def test_e4m3_saturates_instead_of_turning_to_nan():
    got = _quantize.saturate_e4m3(jnp.array([449.0, 1e30, np.inf, -464.0, -np.inf]))
    assert np.asarray(got, np.float32).tolist() == [448, 448, 448, -448, -448]


@pytest.mark.parametrize("name", QUANTISERS)
def test_quantised_values_come_back_within_half_a_step(name):
    quantise, _ = QUANTISERS[name]
    quantised = quantise(jnp.asarray(VALUES), -1)
    error = np.abs(np.asarray(vc_jax.dequantize(quantised)) - VALUES)
    scale = np.asarray(quantised.scale)
    if name == "int8":
        assert (error <= 0.5001 * scale).all()
    else:
        assert (error <= np.maximum(np.abs(VALUES) / 16, scale * 2.0**-10) * 1.0001).all()


@pytest.mark.parametrize("fill", [0.0, -0.0, 1e-45, 1e-40, 1e-38, 1e-33])
@pytest.mark.parametrize("name", ["int8", "e4m3", "nvfp4"])
def test_a_zero_or_denormal_group_gives_no_nan_and_small_values(name, fill):
    values = jnp.full((4, 64), fill, jnp.float32)
    if name == "nvfp4":
        quantised = quantize_nvfp4(values, None)
        back = dequantize_nvfp4(quantised)
        assert np.isfinite(np.asarray(quantised.scales, np.float32)).all()
        assert np.isfinite(quantised.global_scale).all()
    else:
        quantised = QUANTISERS[name][0](values)
        back = vc_jax.dequantize(quantised)
        assert np.isfinite(quantised.scale).all()
    assert (np.abs(np.asarray(back)) <= 2 * abs(fill)).all()


def test_one_zero_group_among_others_stays_zero():
    values = jnp.asarray(RNG.normal(size=(4, 64)), jnp.float32).at[0, 16:32].set(0.0)
    back = dequantize_nvfp4(quantize_nvfp4(values, None))
    assert (np.asarray(back)[0, 16:32] == 0).all()


@pytest.mark.parametrize("exponent", [-30, -20, 0, 20, 30])
@pytest.mark.parametrize("name", ["int8", "e4m3", "nvfp4"])
def test_relative_error_does_not_depend_on_the_magnitude(name, exponent):
    values = RNG.normal(size=(4, 64))
    scaled = jnp.asarray((values * 10.0**exponent).astype(np.float32))
    if name == "nvfp4":
        back = dequantize_nvfp4(quantize_nvfp4(scaled, None))
    else:
        back = vc_jax.dequantize(QUANTISERS[name][0](scaled))
    error = np.asarray(back, np.float64) / np.asarray(scaled, np.float64) - 1
    bound = {"int8": 0.01, "e4m3": 0.03, "nvfp4": 0.13}[name]
    weight = np.asarray(scaled, np.float64) * 10.0**-exponent
    assert np.linalg.norm(error * weight) / np.linalg.norm(weight) < bound


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["int8", "e4m3", "nvfp4"])
def test_a_value_that_is_not_finite_shows(name, bad):
    values = jnp.ones((4, 64), jnp.float32).at[0, 3].set(bad)
    if name == "nvfp4":
        back = dequantize_nvfp4(quantize_nvfp4(values, (-1,)))
    else:
        back = vc_jax.dequantize(QUANTISERS[name][0](values))
    assert not np.isfinite(np.asarray(back)[0, 3])
    np.testing.assert_allclose(np.asarray(back)[1], 1.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_inputs_are_quantised_in_float32(dtype):
    values = jnp.asarray(VALUES[0]).astype(dtype)
    for quantise in (vc_jax.quantize_int8, vc_jax.quantize_e4m3):
        narrow, wide = quantise(values), quantise(values.astype(jnp.float32))
        assert (narrow.scale == wide.scale).all()
        np.testing.assert_array_equal(
            np.asarray(narrow.codes, np.float32), np.asarray(wide.codes, np.float32)
        )


def test_e2m1_codes_are_the_table_of_the_format():
    codes = jnp.arange(16, dtype=jnp.uint8)
    decoded = np.asarray(_quantize.decode_e2m1(codes))
    np.testing.assert_array_equal(decoded, oracles.E2M1_VALUES)
    np.testing.assert_array_equal(np.signbit(decoded), np.signbit(oracles.E2M1_VALUES))
    np.testing.assert_array_equal(_quantize.encode_e2m1(jnp.asarray(decoded)), codes)


def test_e2m1_rounds_to_nearest_even_and_saturates_at_every_boundary():
    table = oracles.E2M1_VALUES[:8]
    middles = ((table[:-1] + table[1:]) / 2).astype(np.float32)
    points = np.concatenate(
        [middles, np.nextafter(middles, 0), np.nextafter(middles, 9), [6.0, 6.5, 100.0, np.inf]]
    ).astype(np.float32)
    want = oracles.nearest_even(np.minimum(points, 6.0), table)
    np.testing.assert_array_equal(_quantize.encode_e2m1(jnp.asarray(points)), want)
    np.testing.assert_array_equal(_quantize.encode_e2m1(jnp.asarray(-points)), want | 8)


def test_nibbles_pack_two_codes_a_byte_and_come_back_bit_for_bit():
    codes = np.arange(256)
    pairs = jnp.asarray(np.stack([codes & 15, codes >> 4], -1).reshape(8, 64).astype(np.uint8))
    packed = _quantize.pack_nibbles(pairs)
    np.testing.assert_array_equal(packed.reshape(-1), codes)
    np.testing.assert_array_equal(_quantize.unpack_nibbles(packed), pairs)


def test_nvfp4_shapes_and_the_meaning_of_its_scales():
    values = VALUES[0]
    quantised = quantize_nvfp4(jnp.asarray(values), None)
    assert quantised.codes.shape == (256, 16)
    assert quantised.codes.dtype == jnp.uint8
    assert quantised.scales.shape == (256, 2)
    assert quantised.scales.dtype == jnp.float8_e4m3fn
    assert quantised.global_scale.shape == (1, 1)
    largest = np.abs(values).max()
    np.testing.assert_allclose(quantised.global_scale, largest / (288 * 6), rtol=1e-6)
    amax = np.abs(values.reshape(256, 2, 16)).max(-1) / np.asarray(quantised.global_scale)
    got = np.asarray(quantised.scales).view(np.uint8)
    six, four = (
        oracles.nearest_even(amax / np.float32(code), oracles.E4M3_VALUES[:127]) for code in (6, 4)
    )
    assert ((got == six) | (got == four)).all()
    assert 0.1 < np.mean(got == four) < 0.9


def test_an_nvfp4_group_is_mapped_to_six_or_to_four_whichever_loses_less():
    values = VALUES[0]
    quantised = quantize_nvfp4(jnp.asarray(values), None)
    groups = values.reshape(256, 2, 16) / np.asarray(quantised.global_scale)

    def lost(code):
        amax = np.abs(groups).max(-1) / np.float32(code)
        scale = oracles.E4M3_VALUES[oracles.nearest_even(amax, oracles.E4M3_VALUES[:127])][
            ..., None
        ]
        step = np.where(scale > 0, scale, 1.0)
        magnitude = np.minimum(np.abs(groups) / step, 6.0)
        back = oracles.E2M1_VALUES[oracles.nearest_even(magnitude, oracles.E2M1_VALUES[:8])] * scale
        return ((np.abs(groups) - back) ** 2).sum(-1)

    back = np.asarray(dequantize_nvfp4(quantised)).reshape(groups.shape)
    got = ((back / np.asarray(quantised.global_scale) - groups) ** 2).sum(-1)
    np.testing.assert_allclose(got, np.minimum(lost(6), lost(4)), rtol=1e-4, atol=1e-6)
    assert got.sum() < 0.9 * lost(6).sum()


def test_nvfp4_codes_are_the_nearest_of_their_group():
    values = VALUES[1]
    quantised = quantize_nvfp4(jnp.asarray(values), (-1,))
    step = np.repeat(np.asarray(quantised.scales, np.float32), 16, -1)
    scaled = values / np.asarray(quantised.global_scale)
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.where(step > 0, scaled / step, 0.0)
    want = oracles.nearest_even(np.minimum(np.abs(quotient), 6.0), oracles.E2M1_VALUES[:8])
    got = np.asarray(_quantize.unpack_nibbles(quantised.codes))
    np.testing.assert_array_equal(got & 7, want)
    back = np.asarray(dequantize_nvfp4(quantised))
    expected = oracles.E2M1_VALUES[got] * step * np.asarray(quantised.global_scale)
    np.testing.assert_allclose(back, expected, rtol=1e-6)


def test_nvfp4_keeps_exactly_what_the_format_holds():
    table = np.resize(oracles.E2M1_VALUES, (4, 64)).astype(np.float32)
    scales = np.array([1.0, 288.0, 0.5, 2.0], np.float32)[:, None]
    values = table * scales
    back = dequantize_nvfp4(quantize_nvfp4(jnp.asarray(values), None))
    np.testing.assert_array_equal(back, values)


def test_nvfp4_refuses_a_length_that_has_no_groups_of_16():
    with pytest.raises(ValueError, match="multiple of 16, got 40"):
        vc_jax.quantize_nvfp4(jnp.ones((2, 40)))


@pytest.mark.parametrize("size", [1, 2, 64, 128])
def test_rotation_of_a_power_of_two_is_the_sylvester_matrix(size):
    np.testing.assert_allclose(vc_jax.hadamard_matrix(size), oracles.hadamard(size), atol=1e-7)


@pytest.mark.parametrize(("size", "order"), [(40, 8), (96, 32), (72, 8), (7, 1)])
def test_other_sizes_rotate_blocks_of_their_largest_power_of_two(size, order):
    matrix = vc_jax.hadamard_matrix(size)
    want = np.kron(np.eye(size // order), oracles.hadamard(order))
    np.testing.assert_allclose(matrix, want, atol=1e-7)


@pytest.mark.parametrize("size", [40, 64, 96, 128])
def test_rotation_changes_no_inner_product(size):
    query, key = (RNG.normal(size=(20, size)).astype(np.float32) for _ in range(2))
    rotated = [np.asarray(vc_jax.hadamard_rotate(jnp.asarray(x)), np.float64) for x in (query, key)]
    exact = query.astype(np.float64) @ key.T.astype(np.float64)
    np.testing.assert_allclose(rotated[0] @ rotated[1].T, exact, atol=2e-5)


def test_rotation_spreads_one_large_channel_evenly():
    spike = jnp.zeros((1, 64)).at[0, 17].set(8.0)
    np.testing.assert_allclose(np.abs(vc_jax.hadamard_rotate(spike)), 1.0, rtol=1e-6)


def test_mean_key_counts_valid_tokens_only():
    key = RNG.normal(size=(3, 50, 2, 8)).astype(np.float32) + 3
    valid = RNG.random((3, 50)) < 0.4
    valid[2] = False
    want = np.stack([k[m].mean(0) if m.any() else np.zeros((2, 8)) for k, m in zip(key, valid)])
    for garbage in (0.0, np.nan, np.inf, 1e38):
        dirty = np.where(valid[:, :, None, None], key, np.float32(garbage))
        got = vc_jax.mean_key(jnp.asarray(dirty), jnp.asarray(valid))
        np.testing.assert_allclose(got, want, atol=1e-6)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(vc_jax.mean_key(jnp.asarray(key)), key.mean(1), atol=1e-6)


def test_mean_key_of_float16_neither_overflows_nor_loses_bits():
    key = jnp.full((1, 4000, 1, 8), 60000.0, jnp.float16)
    np.testing.assert_allclose(vc_jax.mean_key(key), 60000.0, rtol=1e-3)


def test_power_of_two_is_the_smallest_that_is_not_below():
    exponents = np.arange(-100, 100)
    powers = (2.0**exponents).astype(np.float32)
    above = np.nextafter(powers, np.float32(np.inf))
    got = jax.jit(_quantize.power_of_two_at_least)
    np.testing.assert_array_equal(got(jnp.asarray(powers)), powers)
    np.testing.assert_array_equal(got(jnp.asarray(above)), 2 * powers)


@pytest.mark.parametrize("size", [0, -4, 2.0, True])
def test_a_rotation_needs_a_size(size):
    with pytest.raises(ValueError, match="size must be an integer >= 1"):
        vc_jax.hadamard_matrix(size)
