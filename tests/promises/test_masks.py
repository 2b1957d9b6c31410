"""Any pattern of keys is exact: one compiled program a case, by a mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ..core import oracles
from ..core.cases import PRESETS, lse_error, relative_l2, same_bytes
from .implementations import every

_RANDOM = np.random.default_rng(0).random((6, 300)) < 0.5
_RANDOM[0] = False
_RANDOM[1] = True
_RANDOM[2] = np.arange(300) == 299
_RANDOM[3] = np.arange(300) >= 170

MASKED = (*PRESETS, "int8 bare")
"""The last does not sort its values as well: there the mask alone orders the keys."""
# A kernel sees keys that are sorted already: one test of an interpreted one is enough.
masked = every(*MASKED, any_pattern=True, quick=True)


def pattern(case):
    """Keys that count, of the batch: nothing, everything, the last, the tail, at random."""
    return _RANDOM[list(case.under_test.batch)]


@functools.cache
def clean(case):
    """Output and normaliser of the batch as it is."""
    return case.masked(pattern(case))


def gathered(case, keep):
    """Every key that counts brought to the front, as it lies, and how many they are."""
    order = np.argsort(~keep, axis=1, kind="stable")[..., None, None]
    query, key, value = case.inputs
    front = (jnp.asarray(np.take_along_axis(np.asarray(x), order, 1)) for x in (key, value))
    return (query, *front), keep.sum(1)


@every(*MASKED, any_pattern=True)
def test_a_mask_is_attention_over_the_keys_it_keeps(case):
    keep = pattern(case)
    out, lse = clean(case)
    want, want_lse = case.exact(key_valid=keep, query_valid=None)
    assert relative_l2(out, want) < case.error
    assert lse_error(lse, want_lse) < case.lse_error
    assert (np.asarray(out)[0] == 0).all()
    assert np.isneginf(np.asarray(lse)[0]).all()


@masked
def test_bytes_of_masked_keys_change_nothing(case):
    keep = pattern(case)
    query, key, value = case.inputs
    for garbage in case.few(np.nan, np.inf, -3e38):
        kept = keep[:, :, None, None]
        dirty = (query, jnp.where(kept, key, garbage), jnp.where(kept, value, garbage))
        same_bytes(clean(case), case.masked(keep, dirty))


@masked
def test_a_mask_is_the_length_of_the_keys_gathered_in_front(case):
    """Where a key lies and by which argument it counts does not matter."""
    keep = pattern(case)
    front, lengths = gathered(case, keep)
    scattered, lse = clean(case)
    in_front, front_lse = case.masked(oracles.prefix(lengths, 300), front)
    # The clustering looks at a part of all keys, so centroids and codes are others.
    assert relative_l2(in_front, scattered) < 2 * case.error
    assert lse_error(front_lse, lse) < case.lse_error


@masked
def test_permuting_keys_together_with_their_mask_leaves_the_attention(case):
    keep = pattern(case)
    query, key, value = case.inputs
    shuffle = np.random.default_rng(1).permutation(300)
    first, lse = clean(case)
    second, shuffled = case.masked(keep[:, shuffle], (query, key[:, shuffle], value[:, shuffle]))
    assert relative_l2(second, first) < 2 * case.error
    assert lse_error(shuffled, lse) < case.lse_error


@masked
def test_partial_results_over_two_pieces_of_the_keys_merge(case):
    """By their normalisers; the bias of decoded row sums cancels between them."""
    first = np.broadcast_to(np.arange(300) < 140, case.key_valid.shape)
    parts = [case.masked(keep) for keep in (first, ~first)]
    lse = np.logaddexp(*(np.asarray(part[1], np.float64) for part in parts))
    merged = sum(np.exp(np.asarray(p[1]) - lse)[..., None] * np.asarray(p[0]) for p in parts)
    want, want_lse = case.exact(key_valid=None, query_valid=None)
    assert relative_l2(merged, want) < case.error
    assert lse_error(lse, want_lse) < case.lse_error
    _, whole = case.masked(np.ones_like(first))
    bound = {"bf16": 1e-6, "nvfp4": 0.03}.get(case.config, 6e-3)
    assert np.abs(lse - np.asarray(whole)).mean() < bound


@every("bf16", "int8", any_pattern=True, quick=True)
def test_a_traced_mask_of_anything_but_zeros_and_ones_turns_its_batch_row_to_nan(case):
    """It cannot raise: an additive mask taken for a boolean one must not go unseen."""
    mask = pattern(case)[:, None, None, :].astype(np.float32)
    program = jax.jit(lambda mask: case.attend(*case.inputs, mask=mask, return_residual=True))
    clean = program(mask)
    for bad in (0.5, -1e9, np.nan):
        spoiled = mask.copy()
        spoiled[-2, 0, 0, 7] = bad
        got = program(spoiled)
        assert all(np.isnan(np.asarray(x)[-2]).all() for x in got)
        same_bytes(*([np.delete(np.asarray(x), -2, 0) for x in r] for r in (clean, got)))
