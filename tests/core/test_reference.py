"""The reference attention against rows computed one at a time from the same codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax

from . import oracles
from .cases import CONFIGS, LENGTHS, attend_ragged, lse_error, ragged, real_heads, relative_l2
from .test_prepare import prepare, prepared

reference = jax.jit(vc_jax.reference_attention, static_argnames="config")
EIGHT_BIT_ROWS = ["int8", "fp8", "int8 running", "fp8 running", "fp8 exp"]


def rows_match(got, want, lse, want_lse):
    """Nearly all rows to float32 rounding; a byte that flips at a rounding boundary moves a row."""
    got = np.asarray(got, np.float64)
    norm = np.linalg.norm(want, axis=-1)
    error = np.linalg.norm(got - want, axis=-1) / np.where(norm == 0, 1, norm)
    assert (error < 1e-5).mean() >= 0.9
    assert error.max() < 5e-3
    assert lse_error(lse, want_lse) < 5e-3


def rows_of(layout, softmax, shape):
    oracle = oracles.Prepared8Rows(layout, softmax)
    out, lse = np.zeros(shape), np.zeros(shape[:-1])
    for b, t, n in np.ndindex(*shape[:-1]):
        out[b, t, n], lse[b, t, n] = oracle.row(b, n, t)
    return out, lse


@pytest.mark.parametrize("name", EIGHT_BIT_ROWS)
def test_it_computes_what_a_kernel_computes_row_by_row(name):
    layout = prepared(name.split()[0])  # the softmax is no part of it
    got, lse = reference(layout, config=CONFIGS[name])
    assert got.dtype == lse.dtype == jnp.float32
    want, want_lse = rows_of(layout, CONFIGS[name].softmax, (6, 9, 4, 64))
    rows_match(got, want, lse, want_lse)


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("factor", [10.0, 1e3, 1e5])
def test_rows_with_scores_in_the_thousands_and_millions_match_as_well(name, factor):
    query, key, value = ragged()
    layout = prepared(name, (factor * query, key, value))
    got, lse = reference(layout, config=CONFIGS[name])
    want, want_lse = rows_of(layout, "expcast", (6, 9, 4, 64))
    error = np.linalg.norm(np.asarray(got) - want, axis=-1)
    assert (error < 1e-4 * np.linalg.norm(want, axis=-1).max()).mean() > 0.9
    finite = np.isfinite(want_lse)
    np.testing.assert_allclose(np.asarray(lse)[finite], want_lse[finite], rtol=1e-5, atol=5e-3)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_rows_of_real_heads_match(name):
    query, key, value = real_heads(64)
    layout = prepare(query, key, value, CONFIGS[name], key_mean=vc_jax.mean_key(key))
    got, lse = reference(layout, config=CONFIGS[name])
    want, want_lse = rows_of(layout, "expcast", query.shape)
    rows_match(got, want, lse, want_lse)


@pytest.mark.parametrize(
    ("name", "bound", "lse_bound"),
    [("int8", 0.008, 0.03), ("fp8", 0.008, 0.03), ("fp8 exp", 0.008, 0.02), ("nvfp4", 0.02, 0.08)],
)
def test_it_is_softmax_attention_over_what_the_codes_stand_for(name, bound, lse_bound):
    """Only the rounding of probabilities (and of float16 scores) is left between the two."""
    layout = prepared(name.split()[0])
    restored = vc_jax.restore(layout)
    key, value = (np.swapaxes(np.asarray(x), 1, 2) for x in (restored.key, restored.value))
    query = np.swapaxes(np.asarray(restored.query), 1, 2)
    valid = oracles.prefix(LENGTHS, key.shape[1])
    want, want_lse = oracles.attention(query, key, value, scale=np.log(2) / 8, key_valid=valid)
    got, lse = reference(layout, config=CONFIGS[name])
    assert relative_l2(got, want) < bound
    assert lse_error(lse, want_lse) < lse_bound


def test_the_public_call_is_the_reference_over_the_layout_it_prepares():
    query, key, value = ragged()
    live = np.array([9, 9, 9, 9, 9, 9])
    out, lse = attend_ragged("fp8 unsmoothed", (query, key, value), query_lengths=live)
    identity = jnp.broadcast_to(jnp.arange(300, dtype=jnp.int32), (6, 2, 300))
    layout = prepared("fp8 unsmoothed", order=identity)
    want, want_lse = reference(layout, config=CONFIGS["fp8 unsmoothed"])
    assert relative_l2(out, want) < 1e-3
    shift = np.isfinite(np.asarray(want_lse))
    valid = jnp.asarray(oracles.prefix(LENGTHS, 300))
    mean = np.repeat(np.asarray(vc_jax.mean_key(key, valid)), 2, 1)
    added = 0.125 * np.einsum("btnh,bnh->btn", np.asarray(query), mean)
    np.testing.assert_allclose(
        np.asarray(lse)[shift], (np.asarray(want_lse) + added)[shift], atol=2e-3
    )


@pytest.mark.parametrize(
    ("layout_of", "config"), [("int8", "nvfp4"), ("nvfp4", "int8"), ("int8", "bf16")]
)
def test_a_layout_of_another_configuration_is_refused(layout_of, config):
    with pytest.raises(ValueError, match="prepared must be the layout"):
        vc_jax.reference_attention(prepared(layout_of), CONFIGS[config])


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_an_eight_bit_layout_of_the_other_format_is_refused(name):
    other = {"int8": "fp8", "fp8": "int8"}[name]
    with pytest.raises(ValueError, match="prepared must be the layout"):
        vc_jax.reference_attention(prepared(other), CONFIGS[name])
