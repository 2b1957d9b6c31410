"""Masks and lengths: which forms are taken. What they do is in `tests/promises`."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import vc_jax

from . import oracles
from .cases import lse_error, relative_l2, video_like

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
