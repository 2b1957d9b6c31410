"""`vc_jax.compare`: error of configurations on the caller's own tensors."""

import copy
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax import _compare

from . import oracles
from .cases import real_heads, video_like

SMALL = video_like(0, 2, 40, 130, 2, 1, 16)


def measured(out, exact):
    """Relative L2, cosine and gain per head [B, N]."""
    got, want = (
        np.asarray(x, np.float64).transpose(0, 2, 1, 3).reshape(2, 2, -1) for x in (out, exact)
    )
    inner, energy = (got * want).sum(-1), (want**2).sum(-1)
    relative = np.linalg.norm(got - want, axis=-1) / np.sqrt(energy)
    return relative, inner / np.sqrt(energy * (got**2).sum(-1)), inner / energy


def test_errors_are_per_head_and_against_exact_attention():
    found = vc_jax.compare(*SMALL, ["int8", "bf16"])
    assert list(found) == ["int8", "bf16"]
    exact, _ = oracles.attention(*SMALL)
    out = vc_jax.dot_product_attention(*SMALL, config="int8")
    for got, want in zip(
        (found["int8"].relative_l2, found["int8"].cosine, found["int8"].gain), measured(out, exact)
    ):
        assert got.shape == (2, 2)
        np.testing.assert_allclose(got, want, rtol=2e-3)
    assert found["bf16"].relative_l2.max() < 1e-5
    assert (found["int8"].relative_l2 > 1e-3).all()
    assert "relative L2" in str(found["int8"])


def test_exact_attention_is_computed_from_the_same_narrow_tensors():
    narrow = [x.astype(jnp.bfloat16) for x in SMALL]
    found = vc_jax.compare(*narrow, ["bf16"])["bf16"]
    exact, _ = oracles.attention(*narrow)
    out = vc_jax.dot_product_attention(*narrow, config="bf16")
    np.testing.assert_allclose(found.relative_l2, measured(out, exact)[0], rtol=0.02)


def test_configurations_may_be_labelled():
    found = vc_jax.compare(*SMALL, {"mine": vc_jax.AttentionConfig(), "theirs": "bf16"})
    assert list(found) == ["mine", "theirs"]
    assert found["mine"].relative_l2.min() > found["theirs"].relative_l2.max()
    config = vc_jax.PRESETS["bf16"]
    assert list(vc_jax.compare(*SMALL, [config])) == [config]


@pytest.mark.parametrize("configs", ["int8", vc_jax.AttentionConfig()])
def test_one_configuration_need_not_be_in_a_list(configs):
    assert list(vc_jax.compare(*SMALL, configs)) == [configs]


def test_rows_are_spread_over_the_queries():
    query, key, value = SMALL
    spoiled = np.array(query)
    spoiled[:, 1:39] = np.nan
    found = vc_jax.compare(jnp.asarray(spoiled), key, value, "bf16", rows=2)["bf16"]
    assert np.isfinite(found.relative_l2).all()
    found = vc_jax.compare(jnp.asarray(spoiled), key, value, "bf16", rows=3)["bf16"]
    assert np.isnan(found.relative_l2).all()
    vc_jax.compare(*SMALL, "bf16", rows=100_000)


def test_lengths_masks_and_scales_are_those_of_the_call():
    lengths = np.array([130, 20])
    found = vc_jax.compare(*SMALL, ["int8"], key_value_seq_lengths=lengths, scale=0.1)["int8"]
    exact, _ = oracles.attention(*SMALL, scale=0.1, key_valid=oracles.prefix(lengths, 130))
    out = vc_jax.dot_product_attention(
        *SMALL, config="int8", key_value_seq_lengths=lengths, scale=0.1
    )
    np.testing.assert_allclose(found.relative_l2, measured(out, exact)[0], rtol=5e-3)


def test_arrays_without_a_batch_axis_are_taken():
    found = vc_jax.compare(*(x[0] for x in SMALL), "bf16")["bf16"]
    assert found.relative_l2.shape == (1, 2)


def test_an_exact_output_of_zeros_is_no_division_by_zero():
    zeros = np.zeros((1, 4, 2, 8))
    same = _compare.error_measures(zeros, zeros)
    assert (same.relative_l2 == 0).all()
    assert (same.gain == 1).all()
    other = _compare.error_measures(zeros + 1, zeros)
    assert np.isinf(other.relative_l2).all()


def test_it_tells_the_hard_head_from_the_easy_one():
    """Layer 3 head 4 of the DINOv2: keys up to 38, scores up to 290."""
    bare = vc_jax.AttentionConfig(qk="e4m3", center_keys=False, rotate=False, smooth_values=False)
    found = vc_jax.compare(*real_heads(), {"bare": bare, "fp8": "fp8"}, rows=64)
    error = found["bare"].relative_l2[0]
    assert error[0] > 2 * error[1]
    assert found["fp8"].relative_l2[0][0] < error[0] / 5
    assert found["fp8"].relative_l2[0][1] < error[1] * 1.02


@pytest.mark.parametrize(
    ("error", "name", "arguments"),
    [
        (ValueError, "rows", {"rows": 0}),
        (ValueError, "rows", {"rows": 1.5}),
        (ValueError, "query_seq_lengths", {"query_seq_lengths": np.array([1, 2])}),
        (ValueError, "config", {"config": "int8"}),
        (NotImplementedError, "is_causal", {"is_causal": True}),
        (TypeError, "dropout", {"dropout": 0.1}),
    ],
)
def test_wrong_arguments_are_named(error, name, arguments):
    with pytest.raises(error, match=name):
        vc_jax.compare(*SMALL, ["bf16"], **arguments)
    with pytest.raises(ValueError, match="config"):
        vc_jax.compare(*SMALL, ["fp7"])


def test_an_implementation_is_asked_of_the_configurations_only():
    found = vc_jax.compare(*SMALL, "int8", implementation="xla")
    np.testing.assert_array_equal(
        found["int8"].relative_l2, vc_jax.compare(*SMALL, "int8")["int8"].relative_l2
    )
    with pytest.raises(NotImplementedError, match="hopper: needs"):
        vc_jax.compare(*SMALL, "int8", implementation="hopper")


def test_a_mask_with_rows_goes_with_sampled_rows():
    query, key, _ = SMALL
    keep = np.arange(key.shape[1]) < key.shape[1] - 3
    one = keep[None, None, None]
    every = np.broadcast_to(one, (1, 1, query.shape[1], key.shape[1]))
    want = vc_jax.compare(*SMALL, "int8", rows=3, mask=one)["int8"]
    got = vc_jax.compare(*SMALL, "int8", rows=3, mask=every)["int8"]
    np.testing.assert_array_equal(got.relative_l2, want.relative_l2)


def test_arguments_at_their_defaults_may_be_passed():
    vc_jax.compare(*SMALL, "int8", query_seq_lengths=None, return_residual=False, state=None)
    with pytest.raises(TypeError, match="configs must be"):
        vc_jax.compare(*SMALL, 5)


def test_the_worst_row_shows_by_its_place():
    query, key, value = (np.array(x) for x in SMALL)
    exact, _ = oracles.attention(query, key, value)
    out = exact.copy()
    out[1, 17, 0] *= 1.5
    out[1, 18, 0] *= 0.75
    found = _compare.error_measures(out, exact, np.arange(40) * 3)
    np.testing.assert_allclose(found.worst_row_l2, [[0, 0], [0.5, 0]], atol=1e-12)
    assert found.worst_row[1, 0] == 51
    assert "worst row 0.5000: row 51 of head 0 of batch 1" in str(found)
    out[0, 3, 1, 2] = np.nan
    found = _compare.error_measures(out, exact)
    assert np.isnan(found.worst_row_l2[0, 1])
    assert found.worst_row[0, 1] == 3

    sampled = vc_jax.compare(*SMALL, "int8", rows=4)["int8"]
    assert set(sampled.worst_row.flat) <= {0, 13, 26, 39}
    assert (sampled.worst_row_l2 >= sampled.relative_l2 * 0.99).all()


def test_comparisons_compare_pickle_and_copy():
    found = vc_jax.compare(*SMALL, ["int8", "bf16"])
    one, other = found["int8"], found["bf16"]
    assert one == pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == copy.copy(one)
    assert one != other
    assert one != "int8"
    assert [one, other].index(other) == 1
