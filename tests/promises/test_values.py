"""What a call returns and what reaches it: one compiled program a case, lengths traced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax import _dispatch

from ..core import oracles
from ..core.cases import CONFIGS, PRESETS, lse_error, relative_l2, same_bytes, video_like
from .implementations import LSE_ERROR, UNDER_TEST, UNIT, Case, clean, every


def spoil(inputs, keep_query, keep_key, garbage):
    """Queries and keys with values replaced by `garbage` where they are not kept."""
    query, key, value = inputs
    rows, keys = (jnp.asarray(x)[:, :, None, None] for x in (keep_query, keep_key))
    garbage = jnp.asarray(garbage, query.dtype)
    return jnp.where(rows, query, garbage), *(jnp.where(keys, x, garbage) for x in (key, value))


@every()
def test_the_output_is_that_of_attention_over_valid_keys_in_shape_and_dtype_of_the_query(case):
    out, _ = clean(case)
    want, _ = case.exact()
    assert out.dtype == case.under_test.dtype
    assert out.shape == case.inputs[0].shape
    assert relative_l2(out, want) < case.error


@every(normaliser=True)
def test_the_normaliser_is_that_of_the_input_scores_in_nats(case):
    _, lse = clean(case)
    _, want = case.exact()
    assert lse.dtype == jnp.float32
    assert lse.shape == case.inputs[0].shape[:3]
    assert lse_error(lse, want) < case.lse_error


@every()
def test_bytes_that_do_not_count_change_nothing(case):
    """Of padded keys, padded queries, and the queries of a row without a key."""
    live = case.query_valid & case.key_valid[:, :1]
    for garbage in case.few(np.nan, np.inf, 0.0, -3e38, 1e-42):
        same_bytes(clean(case), case(spoil(case.inputs, live, case.key_valid, garbage)))


@every()
def test_rows_past_the_query_lengths_and_rows_without_a_key_are_zero(case):
    out, lse = clean(case)
    dead = ~(case.query_valid & case.key_valid[:, :1])
    assert dead[0].all()
    assert (np.asarray(out, np.float32)[dead] == 0).all()
    if case.under_test.normaliser:
        np.testing.assert_array_equal(np.isneginf(np.asarray(lse)).all(-1), dead)


@every()
def test_batch_rows_do_not_reach_each_other(case):
    """Not even a NaN in a valid token of another row."""
    query, key, value = case.inputs
    other = query.at[-1].set(jnp.nan), key.at[-1].set(1e4), value.at[-1, 3].set(jnp.inf)
    same_bytes(*(jax.tree.map(lambda x: x[:-1], r) for r in (clean(case), case(other))))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@every(normaliser=True, quick=True)
def test_a_nan_in_a_valid_token_is_not_hidden(case, bad):
    query, key, value = case.inputs
    out, lse = case((query.at[-2, 2, 1, 7].set(bad), key, value))
    assert np.isnan(np.asarray(out)[-2, 2, 1]).all()
    assert np.isnan(np.asarray(lse)[-2, 2, 1])
    if not case.config.startswith("nvfp4"):  # its queries share a scale
        assert np.isfinite(np.asarray(out)[-2, 3]).all()
    out, _ = case((query, key, value.at[-2, 128, 1, 7].set(bad)))
    assert not np.isfinite(np.asarray(out)[-2, :, 2:, 7]).any()
    assert np.isfinite(np.asarray(out)[-2, :, :2]).all()
    if np.isnan(bad):  # an infinite key may rightly have a score of -inf
        out, lse = case((query, key.at[-2, 128, 1, 7].set(bad), value))
        assert np.isnan(np.asarray(out)[-2, :, 2:]).all()
        assert np.isnan(np.asarray(lse)[-2, :, 2:]).all()
        assert np.isfinite(np.asarray(out)[-2, :, :2]).all()


def one_key_inputs(case):
    """Queries that are one valid key each, keys of norm 1, values, and the key of each query."""
    rng = np.random.default_rng(5)
    batch = len(case.lengths)
    key = rng.normal(size=(batch, 300, 2, 64))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    target = rng.integers(np.maximum(case.lengths, 1)[:, None, None], size=(batch, 9, 4))
    query = key[np.arange(batch)[:, None, None], target, np.arange(4) // 2]
    query, key = (jnp.asarray(x, case.under_test.dtype) for x in (query, key))
    return query, key, case.inputs[2], target


@functools.cache
def one_key_each(logit, case):
    """Output and normaliser of `one_key_inputs`, every other score far below, and the value."""
    query, key, value, target = one_key_inputs(case)
    out, lse = case((query, key, value), scale=logit)
    counts = (case.key_valid[:, :1] & case.query_valid)[..., None, None]
    value = value[np.arange(len(target))[:, None, None], target, np.arange(4) // 2]
    return out, lse, np.where(counts, value, 0)


LOGITS = [1e3, 1e4, 1e5, 1e6]


@pytest.mark.parametrize("logit", LOGITS)
@every(quick=True)
def test_logits_in_the_thousands_and_millions_pick_the_right_key(case, logit):
    out, lse, want = one_key_each(logit, case)
    assert relative_l2(out, want) < (0.1 if case.config.startswith("nvfp4") else 0.04)
    assert lse is None or not np.isnan(np.asarray(lse)).any()


@pytest.mark.parametrize("logit", LOGITS)
@every(normaliser=True, quick=True)
def test_pieces_merge_at_logits_in_the_thousands_and_millions(case, logit):
    """By their normalisers: a row whose key lies in one piece takes nothing from the other."""
    _, lse, want = one_key_each(logit, case)
    query, key, value, target = one_key_inputs(case)
    cut = case.lengths // 2
    front = case((query, key, value), cut, scale=logit)
    # The rest of the keys, brought to the front.
    turned = (np.arange(300) + cut[:, None]) % 300
    rest = [jnp.take_along_axis(x, jnp.asarray(turned)[..., None, None], 1) for x in (key, value)]
    back = case((query, *rest), case.lengths - cut, scale=logit)
    front_lse, back_lse = (np.asarray(x[1], np.float64) for x in (front, back))
    with np.errstate(invalid="ignore"):
        share = np.where(
            np.isneginf(front_lse), 0, 1 / (1 + np.exp(np.minimum(back_lse - front_lse, 700)))
        )
    merged = share[..., None] * np.asarray(front[0]) + (1 - share[..., None]) * np.asarray(back[0])
    assert relative_l2(merged, want) < (0.1 if case.config.startswith("nvfp4") else 0.04)
    live = np.isfinite(np.asarray(lse))
    np.testing.assert_array_equal((share > 0.5)[live], (target < cut[:, None, None])[live])


@every(quick=True)
def test_no_scale_of_the_scores_gives_a_nan_or_leaves_the_range_of_the_values(case):
    query, key, value = case.inputs
    largest = np.abs(np.asarray(value, np.float32)).max()
    for factor in (1.0, 30.0, 1e3, 1e5):
        out, lse = case((query, 10 * key + 2, value), scale=factor)
        # False of a NaN as well.
        assert np.abs(np.asarray(out, np.float32)).max() < 1.15 * largest, factor
        assert lse is None or (np.asarray(lse) < np.inf).all(), factor


@every(quick=True)
def test_huge_and_tiny_values_are_as_accurate_as_others(case):
    query, key, value = case.inputs
    want, _ = case.exact()
    for factor in (1e-28, 1e-20, 1e20, 1e30):
        out, _ = case((query, key, value * factor))
        error = relative_l2(np.asarray(out, np.float64) / factor, want)
        assert error < 1.5 * case.error, factor


@every(quick=True)
def test_huge_queries_on_tiny_keys_are_as_accurate_as_others(case):
    query, key, value = case.inputs
    want, want_lse = case.exact()
    for factor in (1e-30, 1e-15, 1e15, 1e30):
        out, lse = case((query * factor, key / factor, value))
        assert relative_l2(out, want) < 1.5 * case.error, factor
        if case.under_test.normaliser:
            assert lse_error(lse, want_lse) < 1.5 * case.lse_error + 1e-5, factor


@every(quick=True)
def test_zeros_are_answered_with_the_plain_mean(case):
    query, key, value = case.inputs
    mean = np.where(case.key_valid[:, :, None, None], np.asarray(value, np.float64), 0).sum(1)
    mean = np.repeat(mean / np.maximum(case.lengths, 1)[:, None, None], 2, 1)[:, None]
    want = np.where(case.query_valid[:, :, None, None], mean, 0)
    with np.errstate(divide="ignore"):
        want_lse = np.log(np.where(case.query_valid, case.lengths[:, None], 0))[..., None]
    for zeros in ((0 * query, key, value), (query, 0 * key, value), (0 * query, 0 * key, value)):
        out, lse = case(zeros)
        assert relative_l2(out, want) < case.error
        if case.under_test.normaliser:
            assert lse_error(lse, np.broadcast_to(want_lse, lse.shape)) < 0.01


@every()
def test_a_constant_value_comes_back(case):
    """Weights sum to one: no quantisation of the probabilities may show."""
    query, key, value = case.inputs
    constant = jnp.broadcast_to(value[:, :1], value.shape)
    live = (case.query_valid & case.key_valid[:, :1])[:, :, None, None]
    want = np.where(live, np.repeat(np.asarray(constant[:, :1], np.float64), 2, 2), 0)
    for factor in case.few(1.0, 0.0):
        out, _ = case((query, key, constant * factor))
        # As exact as the codes of the value: without block means E4M3 or E2M1 itself.
        bound = case.error if CONFIGS[case.config].smooth_values else 0.1
        assert (
            np.abs(np.asarray(out, np.float64) - factor * want).max() <= bound * np.abs(want).max()
        )


@every()
def test_a_scale_of_zero_or_below_is_taken_as_it_is(case):
    for scale in case.few(-0.125, 0.0):
        out, _ = case(scale=scale)
        want, _ = case.exact(scale=scale)
        assert relative_l2(out, want) < 2 * case.error


@every()
def test_a_second_run_gives_the_same_bytes(case):
    same_bytes(clean(case), case())


@every()
def test_every_length_is_taken_and_none_compiles_again(case):
    """Around the blocks of 128 keys and steps of 256, each with other queries that count."""
    batch, rng = len(case.lengths), np.random.default_rng(7)
    edges = np.array([255, 129, 256, 1, 2, 257, 127, 64, 128, 3, 299, 192])
    clean(case)
    programs = _dispatch.forward._cache_size()
    for lengths in case.few(*edges.reshape(-1, 6)):
        lengths, rows = lengths[:batch], rng.integers(1, 10, batch)
        out, lse = case(lengths=lengths, query_lengths=rows)
        valid = {
            "key_valid": oracles.prefix(lengths, 300),
            "query_valid": oracles.prefix(rows, 9),
        }
        want, want_lse = case.exact(**valid)
        assert relative_l2(out, want) < 1.5 * case.error
        if case.under_test.normaliser:
            assert lse_error(lse, want_lse) < 1.5 * case.lse_error
    assert _dispatch.forward._cache_size() == programs


@every(*PRESETS, any_pattern=True)
def test_the_gradient_is_that_of_unquantised_attention(case):
    """Straight-through: whatever the forward pass quantises, and zero where nothing counts."""
    cotangent = np.random.default_rng(0).normal(size=case.inputs[0].shape).astype(np.float32)
    live = case.query_valid & case.key_valid[:, :1]
    dirty = spoil(case.inputs, live, case.key_valid, np.nan)
    arguments = case.ragged() | {"return_residual": True}  # as in `clean`, whose program this is
    (_, lse), pull = jax.vjp(lambda *x: case.attend(*x, **arguments), *dirty)
    got = pull((jnp.asarray(cotangent), jnp.zeros_like(lse)))
    want = oracles.attention_gradient(
        *case.inputs,
        cotangent,
        scale=0.125,
        key_valid=case.key_valid,
        query_valid=case.query_valid,
    )
    for gradient, expected, counts in zip(got, want, (live, case.key_valid, case.key_valid)):
        assert relative_l2(gradient, expected) < 1e-5
        assert (np.asarray(gradient)[~counts] == 0).all()


def test_every_configuration_has_numerics_of_its_own():
    xla = UNDER_TEST[0]
    numbers = {np.asarray(clean(Case(xla, name))[0]).tobytes() for name in xla.configs}
    assert len(numbers) == len(CONFIGS)


@every("bf16", "int8")
def test_what_an_implementation_does_not_support_it_refuses_with_a_reason(case):
    name = case.under_test.name
    refused = [x for x in CONFIGS if x not in case.under_test.configs and " " not in x]
    for config in refused:
        with pytest.raises(NotImplementedError, match=rf"{name}: \w+"):
            vc_jax.dot_product_attention(*case.inputs, config=CONFIGS[config], implementation=name)


SHAPES = {
    "one token": ((1, 1), 1, (1, 1), 64, "float16"),
    "one query of all heads": ((2, 1), 257, (4, 1), 128, "bfloat16"),
    "one key": ((1, 130), 1, (2, 2), 64, "float32"),
    "short of a block": ((2, 7), 127, (6, 2), 128, "float16"),
    "no batch": ((9,), 130, (2, 1), 64, "float32"),
}
"""Batch and queries, keys, heads of queries and keys, head size, dtype."""


@pytest.mark.parametrize("shape", SHAPES)
@every("int8", quick=True)
def test_any_length_group_and_dtype_is_taken(case, shape):
    (*batch, rows), length, heads, size, dtype = SHAPES[shape]
    inputs = video_like(1, *(batch or [1]), rows, length, *heads, size, dtype)
    given = inputs if batch else tuple(x[0] for x in inputs)
    out, lse = case.attend(*given, return_residual=True)
    want, want_lse = oracles.attention(*inputs)
    assert out.shape == (*batch, rows, heads[0], size)
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    assert lse.shape == out.shape[:-1]
    want, want_lse = (x.reshape(y.shape) for x, y in ((want, out), (want_lse, lse)))
    assert relative_l2(out, want) < 0.02 + UNIT[dtype]
    assert lse_error(lse, want_lse) < 3 * LSE_ERROR["int8"]
