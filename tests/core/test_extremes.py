"""Inputs that a strange layer or dtype brings: offsets, large channels, the ends of a dtype."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax

NAMES = ("int8", "fp8", "nvfp4")
ERROR = {"int8": 0.055, "fp8": 0.075, "nvfp4": 0.25}
"""Relative L2 on flat rows, where an output is small against a value."""
ROWS, LENGTH, HEADS, SIZE = 64, 600, 2, 32


def tensors() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normal queries, keys and values."""
    random = np.random.default_rng(0)
    query, key, value = (
        random.normal(size=(1, n, HEADS, SIZE)).astype(np.float32) for n in (ROWS, LENGTH, LENGTH)
    )
    return query, key, value


def balanced(name: str) -> vc_jax.AttentionConfig:
    return dataclasses.replace(vc_jax.PRESETS[name], balance_channels=True)


def config_of(name: str, smooth: bool) -> vc_jax.AttentionConfig:
    if smooth:
        return vc_jax.PRESETS[name]
    return dataclasses.replace(vc_jax.PRESETS[name], smooth_values=False)


@functools.partial(jax.jit, static_argnames="config")
def attend(query, key, value, config):
    return vc_jax.dot_product_attention(query, key, value, config=config)


def exact(query, key, value) -> np.ndarray:
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    scores = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(SIZE)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", weights, value)


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_an_offset_of_the_values_costs_nothing(name, smooth):
    query, key, value = tensors()
    for offset in (8.0, 100.0):
        moved = value + np.float32(offset)
        want = exact(query, key, moved)
        error = np.asarray(attend(query, key, moved, config_of(name, smooth))) - want
        spread = want - moved.mean(1, keepdims=True, dtype=np.float64)
        assert np.linalg.norm(error) < 1.3 * ERROR[name] * np.linalg.norm(spread)


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_constant_values_come_back(name, smooth):
    query, key, value = tensors()
    out = attend(query, key, np.full_like(value, 3.7), config_of(name, smooth))
    np.testing.assert_allclose(out, 3.7, rtol=2e-4)


@pytest.mark.parametrize("channels", [2, SIZE // 2])
@pytest.mark.parametrize("name", NAMES)
def test_large_channels_of_the_keys_where_queries_are_small_cost_nothing(name, channels):
    query, key, value = tensors()
    want = exact(query, key, value)
    plain = np.linalg.norm(np.asarray(attend(query, key, value, balanced(name))) - want)
    for factor in (50.0, 1000.0):
        scale = np.where(np.arange(SIZE) < channels, factor, 1.0).astype(np.float32)
        out = attend(query / scale, key * scale, value, balanced(name))
        assert np.linalg.norm(np.asarray(out) - want) < 1.15 * plain


def test_balances_are_powers_of_two_of_a_key_head():
    query, key, _ = tensors()
    scale = np.geomspace(1e-3, 1e3, SIZE).astype(np.float32)
    balance = np.asarray(vc_jax.channel_balance(*map(jnp.asarray, (query, key * scale)))[0])
    assert balance.shape == (HEADS, SIZE)
    assert (np.frexp(balance)[0] == 0.5).all()
    assert (np.diff(np.log2(balance), axis=-1) >= -1).all()
    assert balance.max() > 16 * balance.min()


def test_one_token_that_is_not_finite_does_not_reach_other_rows_through_the_balance():
    query, key, value = tensors()
    bad = query.copy()
    bad[0, 3, 1, 5] = np.nan
    out = np.array(attend(bad, key, value, balanced("int8")))
    assert np.isnan(out[0, 3, 1]).any()
    out[0, 3, 1] = 0
    assert np.isfinite(out).all()


ENDS = [(jnp.float16, 62000.0), (jnp.bfloat16, 3.3e38), (jnp.float32, 1e37), (jnp.float32, 3.4e38)]


@pytest.mark.parametrize(("dtype", "size"), ENDS)
@pytest.mark.parametrize("name", [*NAMES, "bf16"])
def test_outputs_of_finite_values_are_finite(name, dtype, size):
    query, key, value = tensors()
    arrays = [jnp.asarray(x, dtype) for x in (query, key, np.sign(value) * np.float32(size))]
    # Without block means the values' range is the same question: once, in float32.
    kinds = (False, True) if dtype == jnp.float32 and name != "bf16" else (True,)
    for smooth in kinds:
        out = attend(*arrays, config_of(name, smooth))
        assert jnp.isfinite(out).all()
    unit = np.asarray(arrays[2], np.float64) / size
    want = exact(*arrays[:2], unit)
    got = np.asarray(out, np.float64) / size
    # Values of two magnitudes only are all rounded the same way, so their errors add up.
    assert np.linalg.norm(got - want) < 3 * ERROR.get(name, 0.02) * np.linalg.norm(want)


def test_gradients_of_large_values_are_numbers():
    query, key, value = tensors()

    def loss(query, key, value):
        return jnp.sum(vc_jax.dot_product_attention(query, key, value) * 1e-3)

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(query, key, np.sign(value) * np.float32(1e37))
    assert all(jnp.isfinite(x).all() for x in gradients)


def test_one_huge_value_spoils_its_own_channel_only():
    query, key, value = tensors()
    value[0, 100, 0, 3] = 1e6
    want = exact(query, key, value)
    error = np.asarray(attend(query, key, value, vc_jax.PRESETS["nvfp4"])) - want
    others = np.arange(SIZE) != 3
    for head in range(HEADS):
        rest = want[:, :, head, others]
        assert np.linalg.norm(error[:, :, head, others]) < ERROR["nvfp4"] * np.linalg.norm(rest)


@pytest.mark.parametrize("name", ["int8", "nvfp4"])
def test_far_clusters_are_no_worse_with_block_means_than_without(name):
    query, key, value = tensors()
    random = np.random.default_rng(1)
    centres = random.choice([-1e3, 1e3], size=(5, SIZE)).astype(np.float32)
    value = value + centres[random.integers(5, size=(1, LENGTH, HEADS))]
    want = exact(query, key, value)
    smooth, bare = (
        np.linalg.norm(np.asarray(attend(query, key, value, config_of(name, on))) - want)
        for on in (True, False)
    )
    assert smooth < bare


BAD_FIRST = {
    "constant": lambda value: np.full_like(value, 2.0),
    "not finite": lambda value: np.full_like(value, np.nan),
    "another scale": lambda value: 100 * value,
    "an offset": lambda value: value + 300,
}


@functools.partial(jax.jit, static_argnames="schedule")
def step_of(tensors, state, step, schedule):
    return vc_jax.attention_step(*tensors, state, step=step, schedule=schedule)[1]


@pytest.mark.parametrize("first", BAD_FIRST)
def test_a_state_heals_within_two_refreshes(first):
    random = np.random.default_rng(0)
    walk = random.normal(size=(24, 16))[random.integers(24, size=1536)]
    value = (walk + 0.3 * random.normal(size=(1536, 16))).astype(np.float32)[None, :, None]
    query = key = jnp.zeros((1, 1536, 1, 16))
    schedule = vc_jax.DenoisingSchedule(12, 1.0, 4)

    def energy(first_value):
        state = vc_jax.init_state("int8", 1, 1536, 1, 16)
        for step, values in ((0, first_value), (4, value), (8, value)):
            tensors = (query[:, :1], key, jnp.asarray(values))
            state = step_of(tensors, state, jnp.int32(step), schedule)
        return vc_jax.mean_energy(jnp.asarray(value[0, state.permutation[0, 0], 0]))

    assert energy(BAD_FIRST[first](value)) > 0.95 * energy(value)


def test_a_traced_step_that_is_not_in_the_schedule_gives_nan():
    query, key, value = tensors()
    schedule = vc_jax.DenoisingSchedule(10, high_precision_steps=(1, 1))
    state = vc_jax.init_state("fp8", 1, LENGTH, HEADS, SIZE)
    run = jax.jit(
        lambda step: vc_jax.attention_step(
            query, key, value, state, step=step, schedule=schedule, config="fp8"
        )[0]
    )
    for step in (-1, 10, 25):
        assert jnp.isnan(run(step)).all()
    assert jnp.isfinite(run(9)).all()
