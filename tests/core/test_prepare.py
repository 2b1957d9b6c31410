"""The prepared layout: what the arrays hold, and what they give back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax import _prepare

from . import oracles
from .cases import CONFIGS, LENGTHS, ragged, relative_l2, same_bytes

prepare = jax.jit(vc_jax.prepare, static_argnames=("config", "smooth"))
CODES_PER_NAT = 8 / np.log(2)
LAYOUTS = ["int8", "fp8", "nvfp4", "int8 bare", "fp8 unsmoothed", "nvfp4 bare"]
BATCH, LENGTH, HEADS, KV_HEADS, SIZE = 6, 300, 4, 2, 64
STORED, BLOCKS = 512, 4  # S rounded up to steps of 256, and its blocks of 128


def order_of(seed=0):
    """A random order per batch row and key head, valid tokens first."""
    rng = np.random.default_rng(seed)
    order = np.empty((BATCH, KV_HEADS, LENGTH), np.int32)
    for b, k in np.ndindex(BATCH, KV_HEADS):
        order[b, k, : LENGTHS[b]] = rng.permutation(LENGTHS[b])
        order[b, k, LENGTHS[b] :] = np.arange(LENGTHS[b], LENGTH)
    return jnp.asarray(order)


def prepared(name, inputs=None, order=None):
    query, key, value = inputs or ragged()
    valid = jnp.asarray(oracles.prefix(LENGTHS, LENGTH))
    config = CONFIGS[name]
    return prepare(
        query,
        key,
        value,
        config,
        scale=0.125,
        order=order_of() if order is None else order,
        kv_count=jnp.asarray(LENGTHS),
        key_mean=vc_jax.mean_key(key, valid) if config.center_keys else jnp.zeros((6, 2, 64)),
    )


def exact_operands(name):
    """Rotated queries in codes, centred and rotated keys, values: float64, in the call's order."""
    query, key, value = (np.asarray(x, np.float64) for x in ragged())
    config, order = CONFIGS[name], np.asarray(order_of())
    if config.center_keys:
        keep = oracles.prefix(LENGTHS, LENGTH)[:, :, None, None]
        mean = np.where(keep, key, 0).sum(1) / np.maximum(LENGTHS, 1)[:, None, None]
        key = key - mean[:, None]
    if config.rotate:
        query, key = query @ oracles.hadamard(SIZE), key @ oracles.hadamard(SIZE)
    query = query.swapaxes(1, 2) * 0.125 * CODES_PER_NAT
    key, value = (
        np.take_along_axis(x.swapaxes(1, 2), order[..., None], 2).astype(np.float64)
        for x in (key, value)
    )
    return query, key, value


SHAPES_8 = {
    "query_codes": (BATCH, HEADS, 9, SIZE),
    "query_scale": (BATCH, HEADS, 9),
    "key_codes": (BATCH, KV_HEADS, STORED, SIZE),
    "key_scale": (BATCH, KV_HEADS, BLOCKS),
    "value_codes": (BATCH, KV_HEADS, SIZE + oracles.COUNT_ROWS, STORED),
    "value_scale": (BATCH, KV_HEADS, SIZE),
    "block_means": (BATCH, KV_HEADS, BLOCKS, SIZE),
    "kv_count": (BATCH,),
    "score_excess": (BATCH, HEADS, 9),
}


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_eight_bit_layout_has_the_documented_shapes_and_dtypes(name):
    got = prepared(name)
    assert isinstance(got, vc_jax.Prepared8)
    assert got.value_mean is None
    held = {name: array for name, array in vars(got).items() if array is not None}
    assert {name: array.shape for name, array in held.items()} == SHAPES_8
    codes = jnp.int8 if name == "int8" else jnp.float8_e4m3fn
    assert got.query_codes.dtype == got.key_codes.dtype == codes
    assert got.value_codes.dtype == jnp.float8_e4m3fn
    assert got.block_means.dtype == jnp.bfloat16
    assert got.query_scale.dtype == got.key_scale.dtype == got.value_scale.dtype == jnp.float32
    assert got.score_excess.dtype == jnp.float32
    np.testing.assert_array_equal(got.score_excess, 1.0)  # ordinary logits
    assert got.kv_count.dtype == jnp.int32


def test_four_bit_layout_has_the_documented_shapes_and_dtypes():
    got = prepared("nvfp4")
    assert isinstance(got, vc_jax.Prepared4)
    assert got.query.codes.shape == (BATCH, HEADS, 9, SIZE // 2)
    assert got.query.scales.shape == (BATCH, HEADS, 9, SIZE // 16)
    assert got.query.global_scale.shape == (BATCH, HEADS, 9, 1)
    assert got.key.codes.shape == (BATCH, KV_HEADS, STORED, SIZE // 2)
    assert got.key.global_scale.shape == (BATCH, KV_HEADS, BLOCKS, 1, 1)
    assert got.value.codes.shape == (BATCH, KV_HEADS, SIZE, STORED // 2)
    assert got.value.scales.shape == (BATCH, KV_HEADS, SIZE, STORED // 16)
    assert got.value.global_scale.shape == (BATCH, KV_HEADS, SIZE, 1)
    assert got.block_means.shape == (BATCH, KV_HEADS, BLOCKS, SIZE)
    assert got.block_means.dtype == jnp.bfloat16


@pytest.mark.parametrize("name", LAYOUTS)
def test_restoring_gives_back_the_rotated_centred_sorted_inputs(name):
    restored = vc_jax.restore(prepared(name))
    query, key, value = exact_operands(name)
    valid = oracles.prefix(LENGTHS, LENGTH)[:, None, :, None]
    bounds = {"int8": (0.012, 0.012, 0.03), "fp8": (0.03, 0.03, 0.03), "nvfp4": (0.12, 0.12, 0.12)}
    bound = bounds[name.split()[0]]
    key = np.where(valid, key, 0)
    got_query, got_key = np.asarray(restored.query), np.asarray(restored.key)[:, :, :LENGTH]
    got_key = np.where(valid, got_key, 0)
    if name.startswith("fp8"):
        # A power of two per key head has moved from the keys to the queries.
        got, want = (np.linalg.norm(x, axis=(2, 3), keepdims=True) for x in (got_key, key))
        unit = np.where(
            want == 0,
            1.0,
            2.0 ** np.round(np.log2(np.where(want == 0, 1, want) / np.where(want == 0, 1, got))),
        )
        got_key, got_query = got_key * unit, got_query / np.repeat(unit, 2, 1)
    assert relative_l2(got_query[1:], query[1:]) < bound[0]
    assert relative_l2(got_key, key) < bound[1]
    got = np.asarray(restored.value)
    assert relative_l2(got[:, :, :LENGTH], np.where(valid, value, 0)) < bound[2]
    assert (got[:, :, LENGTH:] == 0).all()
    np.testing.assert_array_equal(got[:, :, :LENGTH][np.broadcast_to(~valid, value.shape)], 0)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_group_order_says_which_token_each_stored_position_holds(name):
    assert list(vc_jax.GROUP_ORDER) == oracles.GROUP
    got = prepared(name)
    _, _, value = exact_operands(name)
    codes = np.asarray(got.value_codes, np.float32)[:, :, :SIZE]
    means = np.asarray(got.block_means, np.float32)
    scale = np.asarray(got.value_scale)
    b = list(LENGTHS).index(300)
    for position in range(256):
        token = position // 16 * 16 + oracles.GROUP[position % 16]
        back = scale[b, 0] * (codes[b, 0, :, position] + means[b, 0, position // 128])
        # Half a step of E4M3 of the residual, and half a step of the mean in bfloat16.
        residual = np.abs(codes[b, 0, :, position] * scale[b, 0])
        mean = np.abs(means[b, 0, position // 128] * scale[b, 0])
        slack = residual / 15 + mean / 256 + scale[b, 0] * 2.0**-9
        assert (np.abs(back - value[b, 0, token]) <= slack).all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_means_are_those_of_each_block_in_units_of_a_power_of_two_scale(name):
    got = prepared(name)
    _, _, value = exact_operands(name)
    scale = np.asarray(got.value_scale, np.float64)
    assert (np.frexp(scale)[0] == 0.5).all()
    means = np.asarray(got.block_means, np.float64) * scale[:, :, None]
    for b, count in enumerate(LENGTHS):
        for j in range(BLOCKS):
            block = value[b, :, 128 * j : max(128 * j, min(count, 128 * (j + 1)))]
            want = block.mean(1) if block.shape[1] else np.zeros((KV_HEADS, SIZE))
            np.testing.assert_allclose(means[b, :, j], want, rtol=2.0**-8, atol=1e-6)


def offset_values(seed: int = 3) -> jax.Array:
    """One block of values around 1003.25, where bfloat16 has steps of 8."""
    noise = np.random.default_rng(seed).normal(size=(1, 128, 1, 16)).astype(np.float32)
    return jnp.asarray(1003.25 + noise - noise.mean(1, keepdims=True))


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("name", ["int8", "nvfp4"])
def test_what_rounding_a_mean_cuts_off_is_in_the_residuals(name, smooth):
    value = offset_values()
    query = key = jnp.ones((1, 128, 1, 16))
    got = prepare(query, key, value, vc_jax.PRESETS[name], smooth=smooth)
    restored = np.asarray(vc_jax.restore(got).value)[0, 0, :128] - 1003.25
    want = np.asarray(value)[0, :, 0] - 1003.25
    # Residuals are about 4 without their own mean where means are of blocks.
    assert relative_l2(restored, want) < (0.12 if smooth else 0.03) * (4 if name == "nvfp4" else 1)
    assert (got.block_means is None) == (got.value_mean is not None) == (not smooth)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_scales_have_the_documented_granularity(name):
    got = prepared(name)
    query, key, _ = exact_operands(name)
    b = list(LENGTHS).index(300)
    codes = np.asarray(got.key_codes, np.float64)[b]
    if name == "int8":
        want = np.abs(query).max(-1) / 127
        np.testing.assert_allclose(got.query_scale, want, rtol=1e-4)
        blocks = [np.abs(key[b, :, 128 * j : 128 * (j + 1)]).max((1, 2)) for j in range(3)]
        np.testing.assert_allclose(got.key_scale[b, :, :3], np.stack(blocks, 1) / 127, rtol=1e-4)
        assert np.abs(codes).max((1, 2)).tolist() == [127, 127]
    else:
        norm = np.linalg.norm(codes, axis=-1)
        assert norm.max() <= 255
        assert norm.max() > 119
        norm = np.linalg.norm(np.asarray(got.query_codes, np.float64), axis=-1)
        assert norm.max() <= 255
        assert norm.min() > 200


def test_no_product_of_two_e4m3_tokens_leaves_float16_and_multipliers_are_exact_there():
    got = prepared("fp8")
    key, query = (np.asarray(x, np.float64) for x in (got.key_codes, got.query_codes))
    products = np.einsum("bkgth,bkjh->bkgtj", query.reshape(6, 2, 2, 9, 64), key)
    assert np.abs(products).max() < 65504
    scale = np.asarray(got.key_scale, np.float64)
    assert (np.frexp(scale[scale > 0])[0] == 0.5).all()
    product = np.asarray(got.query_scale)[:, :, :, None] * np.repeat(scale, 2, 1)[:, :, None]
    np.testing.assert_array_equal(product.astype(np.float16).astype(np.float64), product)
    np.testing.assert_array_equal(_prepare.score_multiplier(got), product)


@pytest.mark.parametrize("name", ["int8", "fp8", "nvfp4"])
def test_scores_of_the_codes_are_the_attention_scores_in_codes(name):
    restored = vc_jax.restore(prepared(name))
    query, key, _ = exact_operands(name)
    got, want = (
        np.einsum("bkgth,bkjh->bkgtj", np.asarray(q).reshape(6, 2, 2, 9, 64), np.asarray(k))
        for q, k in ((restored.query, restored.key[:, :, :LENGTH]), (query, key))
    )
    valid = oracles.prefix(LENGTHS, LENGTH)[:, None, None, None]
    bound = {"int8": 0.015, "fp8": 0.05, "nvfp4": 0.2}[name]
    assert relative_l2(np.where(valid, got, 0), np.where(valid, want, 0)) < bound


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_slots_without_a_key_repeat_a_valid_key_of_their_step_and_hold_no_value(name):
    """The first of their block, or of their step if the block has none: no maximum can rise."""
    got = prepared(name)
    keys, scales = np.asarray(got.key_codes, np.float32), np.asarray(got.key_scale)
    values = np.asarray(_prepare.plain_value_codes(got), np.float32)
    for b, count in enumerate(LENGTHS):
        np.testing.assert_array_equal(values[b, :, :, count:], 0)
        for slot in range(count, STORED):
            block, step = slot // 128, slot // 256
            if count <= 256 * step:
                np.testing.assert_array_equal(keys[b, :, slot], 0)
                assert (scales[b, :, block] == 0).all()
                continue
            source = 128 * block if 128 * block < count else 256 * step
            np.testing.assert_array_equal(keys[b, :, slot], keys[b, :, source])
            if source < 128 * block:
                np.testing.assert_array_equal(scales[b, :, block], scales[b, :, 2 * step])
                assert (np.asarray(got.block_means, np.float32)[b, :, block] == 0).all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_rows_under_the_values_count_the_valid_keys_of_even_and_of_odd_blocks(name):
    stored = np.asarray(prepared(name).value_codes, np.float32)[:, :, SIZE:]
    slot = np.arange(STORED)
    tokens = slot // 16 * 16 + np.array(oracles.GROUP)[slot % 16]
    for b, count in enumerate(LENGTHS):
        for row in range(oracles.COUNT_ROWS):
            want = (tokens < count) & (tokens // 128 % 2 == row % 2)
            np.testing.assert_array_equal(stored[b, :, row], np.stack([want, want]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_of_invalid_keys_reach_nothing_that_is_prepared(name):
    query, key, value = ragged()
    invalid = ~oracles.prefix(LENGTHS, LENGTH)[:, :, None, None]
    clean = prepared(name)
    for garbage in (np.nan, np.inf, -3e38):
        dirty = (query, *(jnp.where(invalid, garbage, x) for x in (key, value)))
        same_bytes(clean, prepared(name, dirty))


def test_without_an_order_keys_stay_as_they_are():
    identity = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (BATCH, KV_HEADS, LENGTH))
    query, key, value = ragged()
    arguments = (query, key, value, CONFIGS["int8"])
    plain = prepare(*arguments, scale=0.125, kv_count=jnp.asarray(LENGTHS))
    shared = prepare(*arguments, scale=0.125, kv_count=jnp.asarray(LENGTHS), order=identity[:, :1])
    same_bytes(plain, shared)


def test_smoothing_can_be_left_out_and_then_there_are_no_means():
    query, key, value = ragged()
    off = prepare(query, key, value, CONFIGS["int8"], smooth=False)
    assert off.block_means is None
    back = np.asarray(vc_jax.restore(off).value)[:, :, :LENGTH]
    assert relative_l2(back.swapaxes(1, 2), value) < 0.03
    config = vc_jax.AttentionConfig(smooth_values=False)
    same_bytes(off, prepare(query, key, value, config))


def test_a_nearly_constant_block_does_not_overflow_the_means():
    """Means in units of a residual scale grow without bound as the residual vanishes."""
    rng = np.random.default_rng(4)
    query = key = jnp.asarray(rng.normal(size=(1, 128, 1, 16)), jnp.float32)
    for size in (1.0, 1e-20, 1e30):
        for spread in (0.0, 1e-7, 1e-5, 1e-3):
            value = size * (3 + spread * rng.normal(size=(1, 128, 1, 16)))
            got = prepare(query, key, jnp.asarray(value, jnp.float32), CONFIGS["int8"])
            assert np.isfinite(np.asarray(got.block_means, np.float32)).all()
            back = np.asarray(vc_jax.restore(got).value)[0, 0, :128]
            np.testing.assert_allclose(back, value[0, :, 0], rtol=5e-3)


def test_preparing_refuses_what_has_no_layout():
    query, key, value = ragged()
    with pytest.raises(ValueError, match="config must be quantised"):
        vc_jax.prepare(query, key, value, CONFIGS["bf16"])
    narrow = [x[..., :40] for x in (query, key, value)]
    with pytest.raises(ValueError, match="multiple of 16, got 40"):
        vc_jax.prepare(*narrow, CONFIGS["nvfp4"])
