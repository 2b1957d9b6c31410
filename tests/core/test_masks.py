"""Masks and lengths: which forms are taken, and that any pattern of keys is exact."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import vc_jax

from . import oracles
from .cases import (
    CONFIGS,
    ERROR,
    LENGTHS,
    PRESETS,
    attend,
    attend_ragged,
    lse_error,
    ragged,
    relative_l2,
    same_bytes,
    video_like,
)

PATTERN = np.random.default_rng(0).random((6, 300)) < 0.5
PATTERN[0] = False
PATTERN[1] = True
PATTERN[2] = np.arange(300) == 299
PATTERN[3] = np.arange(300) >= 170


MASKED = [*PRESETS, "int8 bare"]
"""One that does not sort its values as well: there the mask alone orders the keys."""


def attend_masked(name, inputs, keep, **changes):
    """The one compiled masked call per configuration: output and lse."""
    mask = jnp.asarray(keep)[:, None, None, :]
    config = dataclasses.replace(CONFIGS[name], **changes)
    return attend(*inputs, config=config, mask=mask, return_residual=True)


@pytest.mark.parametrize("name", MASKED)
def test_any_pattern_of_keys_is_exact(name):
    out, lse = attend_masked(name, ragged(), PATTERN)
    want, want_lse = oracles.attention(*ragged(), key_valid=PATTERN)
    assert relative_l2(out, want) < ERROR[name]
    bounds = {"bf16": 2e-6, "int8": 0.05, "fp8": 0.06, "nvfp4": 0.15, "int8 bare": 0.08}
    assert lse_error(lse, want_lse) < bounds[name]
    assert (np.asarray(out)[0] == 0).all()
    assert np.isneginf(np.asarray(lse)[0]).all()


@pytest.mark.parametrize("name", MASKED)
def test_bytes_of_masked_keys_change_nothing(name):
    query, key, value = ragged()
    clean = attend_masked(name, ragged(), PATTERN)
    for garbage in (np.nan, np.inf, -3e38):
        keep = PATTERN[:, :, None, None]
        dirty = (query, jnp.where(keep, key, garbage), jnp.where(keep, value, garbage))
        same_bytes(clean, attend_masked(name, dirty, PATTERN))


@pytest.mark.parametrize("name", MASKED)
def test_where_the_masked_keys_lie_does_not_matter(name):
    """Valid keys keep their order: scattered among invalid ones or in front of them all.

    Where a Lloyd step looks at a part of the keys, it counts the masked ones too.
    """
    query, key, value = ragged()
    config = CONFIGS[name]
    every = {"lloyd_stride": 1} if config.clustered else {}
    order = np.argsort(~PATTERN, axis=1, kind="stable")
    front = [
        jnp.asarray(np.take_along_axis(np.asarray(x), order[..., None, None], 1))
        for x in (key, value)
    ]
    packed = np.take_along_axis(PATTERN, order, 1)
    scattered = attend_masked(name, ragged(), PATTERN, **every)
    in_front = attend_masked(name, (query, *front), packed, **every)
    # Sums over all tokens run in another order, so a code may flip.
    assert relative_l2(in_front[0], scattered[0]) < 2e-3
    assert lse_error(in_front[1], scattered[1]) < 2e-3


@pytest.mark.parametrize("name", PRESETS)
def test_permuting_keys_together_with_their_mask_leaves_the_attention(name):
    query, key, value = ragged()
    shuffle = np.random.default_rng(1).permutation(300)
    shuffled = (query, key[:, shuffle], value[:, shuffle])
    first, lse = attend_masked(name, ragged(), PATTERN)
    second, shuffled_lse = attend_masked(name, shuffled, PATTERN[:, shuffle])
    assert relative_l2(second, first) < 2 * ERROR[name]
    assert lse_error(shuffled_lse, lse) < {"bf16": 2e-6, "nvfp4": 0.15}.get(name, 0.05)


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_a_mask_that_is_a_prefix_is_the_length(name):
    by_mask = attend_masked(name, ragged(), oracles.prefix(LENGTHS, 300))
    by_length = attend_ragged(name, ragged(), query_lengths=np.full(6, 9))
    assert relative_l2(by_mask[0], by_length[0]) < 1e-3
    assert lse_error(by_mask[1], by_length[1]) < 1e-3


@pytest.mark.parametrize("name", PRESETS)
def test_partial_results_over_two_pieces_of_the_keys_merge(name):
    """By their normalisers; the bias of decoded row sums cancels between them."""
    first = np.broadcast_to(np.arange(300) < 140, (6, 300))
    parts = [attend_masked(name, ragged(), keep) for keep in (first, ~first)]
    _, whole_lse = attend_masked(name, ragged(), np.ones((6, 300), bool))
    lse = np.logaddexp(*(np.asarray(part[1], np.float64) for part in parts))
    merged = sum(np.exp(np.asarray(p[1]) - lse)[..., None] * np.asarray(p[0]) for p in parts)
    want, want_lse = oracles.attention(*ragged())
    assert relative_l2(merged, want) < ERROR[name]
    assert lse_error(lse, want_lse) < {"bf16": 2e-6, "nvfp4": 0.15}.get(name, 0.05)
    assert np.abs(lse - np.asarray(whole_lse)).mean() < {"bf16": 1e-6, "nvfp4": 0.03}.get(
        name, 6e-3
    )


DTYPES = [bool, np.int8, np.uint8, np.int32, np.float32, np.float16, ml_dtypes.bfloat16]
SMALL = video_like(5, 2, 3, 130, 2, 1, 16)
KEEP = np.random.default_rng(2).random((2, 130)) < 0.6
small = functools.partial(vc_jax.dot_product_attention, config="bf16", return_residual=True)
WANT, WANT_LSE = oracles.attention(*SMALL, key_valid=KEEP)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_masks_are_bool_or_zeros_and_ones_of_any_dtype_traced_or_not(dtype):
    mask = KEEP[:, None, None, :].astype(dtype)
    traced = jax.jit(lambda m: small(*SMALL, mask=m))(mask)
    for out, lse in (traced, small(*SMALL, mask=mask), small(*SMALL, mask=jnp.asarray(mask))):
        assert relative_l2(out, WANT) < 1e-6
        assert lse_error(lse, WANT_LSE) < 1e-5


def test_a_mask_may_be_shared_by_the_batch():
    shared = KEEP[:1]
    want, _ = oracles.attention(*SMALL, key_valid=np.concatenate([shared, shared]))
    mask = shared[:, None, None, :]
    for out, _ in (small(*SMALL, mask=mask), jax.jit(lambda m: small(*SMALL, mask=m))(mask)):
        assert relative_l2(out, want) < 1e-6


def test_a_mask_may_turn_whole_batch_rows_off():
    mask = np.array([True, False])[:, None, None, None]
    want, _ = oracles.attention(*SMALL)
    for out, _ in (small(*SMALL, mask=mask), jax.jit(lambda m: small(*SMALL, mask=m))(mask)):
        assert relative_l2(out[0], want[0]) < 1e-6
        assert (np.asarray(out)[1] == 0).all()


LIVE = np.array([[True, False, True], [False, True, True]])


@pytest.mark.parametrize(
    "mask",
    [
        np.broadcast_to(KEEP[:, None, None, :], (2, 1, 3, 130)),
        np.broadcast_to(KEEP[:, None, None, :], (2, 2, 1, 130)),
        np.broadcast_to(KEEP[:, None, None, :], (2, 2, 3, 130)),
        np.broadcast_to(KEEP[:, None, None, :], (2, 2, 3, 130)).astype(np.float32),
    ],
    ids=["rows", "heads", "both", "float"],
)
def test_a_concrete_mask_with_query_or_head_axes_that_reduces_is_taken(mask):
    for given in (mask, jnp.asarray(mask)):
        out, lse = small(*SMALL, mask=given)
        assert relative_l2(out, WANT) < 1e-6
        assert lse_error(lse, WANT_LSE) < 1e-5


@pytest.mark.parametrize("dtype", [bool, np.float32])
def test_an_outer_product_of_valid_queries_and_keys_is_taken(dtype):
    """What `flax.linen.make_attention_mask(query_valid, key_valid)` returns."""
    mask = (LIVE[:, None, :, None] & KEEP[:, None, None, :]).astype(dtype)
    want, want_lse = oracles.attention(*SMALL, key_valid=KEEP, query_valid=LIVE)
    out, lse = small(*SMALL, mask=mask)
    assert relative_l2(out, want) < 1e-6
    assert lse_error(lse, want_lse) < 1e-5


def test_a_concrete_mask_stays_concrete_inside_jit():
    mask = LIVE[:, None, :, None] & KEEP[:, None, None, :]
    out, _ = jax.jit(lambda q: small(q, *SMALL[1:], mask=mask))(SMALL[0])
    want, _ = oracles.attention(*SMALL, key_valid=KEEP, query_valid=LIVE)
    assert relative_l2(out, want) < 1e-6


@pytest.mark.parametrize(
    "mask",
    [
        np.tril(np.ones((3, 130), bool), 50)[None, None],
        np.stack([KEEP, ~KEEP], 1)[:, :, None, :],
    ],
    ids=["causal", "per head"],
)
def test_a_concrete_mask_that_differs_between_queries_or_heads_is_refused(mask):
    with pytest.raises(NotImplementedError, match="mask is not supported"):
        small(*SMALL, mask=mask)


def test_a_traced_mask_with_a_head_axis_is_refused_with_the_way_out():
    with pytest.raises(NotImplementedError, match=r"mask.*key_value_seq_lengths"):
        jax.jit(lambda m: small(*SMALL, mask=m))(jnp.ones((2, 2, 1, 130), bool))


@jax.jit
def traced(mask):
    return small(*SMALL, mask=mask)


@pytest.mark.parametrize("dtype", [bool, np.float32])
def test_a_traced_mask_that_leaves_all_queries_the_same_keys_or_none_is_a_concrete_one(dtype):
    mask = (LIVE[:, None, :, None] & KEEP[:, None, None, :]).astype(dtype)
    for got, want in zip(traced(jnp.asarray(mask)), small(*SMALL, mask=mask), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
        assert (np.asarray(got)[~LIVE] == (0 if got.ndim == 4 else -np.inf)).all()


@pytest.mark.parametrize("bad", ["another key", 0.5, -1e9, np.nan])
def test_a_traced_mask_that_leaves_two_queries_different_keys_poisons_its_batch_row(bad):
    mask = np.broadcast_to(KEEP[:, None, None, :], (2, 1, 3, 130)).astype(np.float32)
    place = (1, 0, 2, int(np.flatnonzero(KEEP[1])[0]))
    mask[place] = 0 if bad == "another key" else bad
    out, lse = traced(jnp.asarray(mask))
    assert np.isnan(np.asarray(out)[1]).all()
    assert np.isnan(np.asarray(lse)[1]).all()
    assert np.isfinite(np.asarray(out)[0]).all()


@pytest.mark.parametrize("bad", [0.5, 2.0, -1.0, np.nan, np.inf, -1e9])
def test_a_concrete_mask_of_anything_but_zeros_and_ones_is_an_error(bad):
    mask = np.ones((2, 1, 1, 130), np.float32)
    mask[1, 0, 0, 7] = bad
    with pytest.raises(ValueError, match="mask must hold only 0 and 1"):
        small(*SMALL, mask=mask)
    with pytest.raises(ValueError, match="mask must hold only 0 and 1"):
        small(*SMALL, mask=np.where(np.isfinite(mask), 2 * mask, 7).astype(np.int32))


@pytest.mark.parametrize("bad", [0.5, -1e9, np.nan])
def test_a_traced_mask_of_anything_but_zeros_and_ones_turns_its_batch_row_to_nan(bad):
    """It cannot raise: an additive mask taken for a boolean one must not go unseen."""
    mask = PATTERN[:, None, None, :].astype(np.float32)
    mask[4, 0, 0, 7] = bad
    arguments = {"config": CONFIGS["int8"], "return_residual": True}
    out, lse = attend(*ragged(), mask=jnp.asarray(mask), **arguments)
    assert np.isnan(np.asarray(out)[4]).all()
    assert np.isnan(np.asarray(lse)[4]).all()
    rest = np.arange(6) != 4
    clean, clean_lse = attend_masked("int8", ragged(), PATTERN)
    same_bytes(np.asarray(out)[rest], np.asarray(clean)[rest])
    same_bytes(np.asarray(lse)[rest], np.asarray(clean_lse)[rest])


def test_mask_and_lengths_hold_together():
    lengths, rows = np.array([130, 60]), np.array([2, 3])
    keep = KEEP & oracles.prefix(lengths, 130)
    live = LIVE & oracles.prefix(rows, 3)
    mask = LIVE[:, None, :, None] & KEEP[:, None, None, :]
    out, lse = small(
        *SMALL, mask=mask, key_value_seq_lengths=lengths, query_seq_lengths=jnp.asarray(rows)
    )
    want, want_lse = oracles.attention(*SMALL, key_valid=keep, query_valid=live)
    assert relative_l2(out, want) < 1e-6
    assert lse_error(lse, want_lse) < 1e-5


@pytest.mark.parametrize("lengths", [[130, 60], (130, 60), np.array([130, 60], np.int64)])
def test_lengths_may_be_any_sequence_of_integers(lengths):
    want, _ = oracles.attention(*SMALL, key_valid=oracles.prefix([130, 60], 130))
    out, _ = small(*SMALL, key_value_seq_lengths=lengths)
    assert relative_l2(out, want) < 1e-6


def test_a_mask_without_a_batch_axis_goes_with_arrays_without_one():
    arrays = [x[0] for x in SMALL]
    for mask in (KEEP[0][None, None, :], KEEP[:1, None, None, :]):
        out, lse = small(*arrays, mask=mask)
        assert relative_l2(out, WANT[0]) < 1e-6
        assert lse_error(lse, WANT_LSE[0]) < 1e-5
