"""V-Smooth: clustering, order, block means."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax import _vsmooth

from . import oracles
from .cases import same_bytes

kmeans = jax.jit(vc_jax.kmeans, static_argnums=1, static_argnames="stride")
"""Compiled once per shape: the number of steps is traced."""


similar_clusters_together = jax.jit(vc_jax.similar_clusters_together)


def clustered(seed, length, size=8, groups=6, spread=20.0):
    rng = np.random.default_rng(seed)
    centres = spread * rng.normal(size=(groups, size))
    labels = rng.integers(groups, size=length)
    return (centres[labels] + rng.normal(size=(length, size))).astype(np.float32), labels


@pytest.mark.parametrize("length", [1, 7, 300, 2048, 2049, 5000])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_kmeans_is_plain_lloyd_with_a_fixed_number_of_steps(length, steps):
    values = np.random.default_rng(length).normal(size=(length, 8)).astype(np.float32)
    start = np.random.default_rng(9).normal(size=(5, 8)).astype(np.float32)
    found = kmeans(jnp.asarray(values), 5, steps=jnp.int32(steps), centroids=jnp.asarray(start))
    labels, centroids = oracles.kmeans(values, start, steps)
    np.testing.assert_allclose(found.centroids, centroids, atol=1e-2 if length > 1000 else 2e-5)
    assert (np.asarray(found.labels) == labels).mean() > 0.998
    assert found.labels.dtype == jnp.int32
    assert found.centroids.dtype == jnp.float32


@pytest.mark.parametrize("offset", [1e3, -1e4])
def test_a_common_offset_changes_no_label(offset):
    rng = np.random.default_rng(3)
    values = (rng.normal(size=(300, 8)) + offset).astype(np.float32)
    start = values[:5]
    found = kmeans(jnp.asarray(values), 5, steps=jnp.int32(4), centroids=jnp.asarray(start))
    np.testing.assert_allclose(found.centroids, oracles.kmeans(values, start, 4)[1], atol=2e-2)
    nearest, _ = oracles.kmeans(values, found.centroids, 0)
    assert (np.asarray(found.labels) == nearest).mean() > 0.99
    # The chain of similar clusters: places on a line, in either direction.
    line = np.float32(rng.permutation(40))[:, None] * np.ones(8, np.float32) + np.float32(offset)
    places = np.asarray(similar_clusters_together(jnp.asarray(line)))
    np.testing.assert_array_equal(np.abs(np.diff(places[np.argsort(line[:, 0])])), 1)


def test_one_value_that_is_not_finite_spoils_no_other_label():
    values, groups = clustered(0, 300)
    first = [np.flatnonzero(groups == g)[1] for g in range(6)]
    start = values[first]
    values[0] = np.inf
    found = kmeans(jnp.asarray(values), 6, steps=jnp.int32(0), centroids=jnp.asarray(start))
    np.testing.assert_array_equal(found.labels[1:], groups[1:])


def test_kmeans_finds_groups_that_are_far_apart():
    values, groups = clustered(0, 300)
    first = [np.flatnonzero(groups == g)[0] for g in range(6)]
    found = kmeans(jnp.asarray(values), 6, centroids=jnp.asarray(values[first]))
    np.testing.assert_array_equal(found.labels, groups)


def test_a_cold_start_takes_rows_spread_evenly_over_the_valid_tokens():
    values = np.arange(100, dtype=np.float32)[:, None]
    valid = np.arange(100) % 2 == 1
    found = kmeans(jnp.asarray(values), 5, steps=0, valid=jnp.asarray(valid))
    np.testing.assert_array_equal(found.centroids[:, 0], [11, 31, 51, 71, 91])


def test_the_default_is_four_lloyd_steps():
    values, _ = clustered(1, 500, spread=1.0)
    start = values[[50, 150, 250, 350, 450]]
    found = kmeans(jnp.asarray(values), 5, centroids=jnp.asarray(start))
    np.testing.assert_allclose(found.centroids, oracles.kmeans(values, start, 4)[1], atol=1e-4)
    assert np.abs(np.asarray(found.centroids) - oracles.kmeans(values, start, 3)[1]).max() > 1e-3


@pytest.mark.parametrize("lost", [1e4, np.nan, np.inf, 1e30, "another"])
def test_an_empty_cluster_takes_a_row_of_the_values(lost):
    values, _ = clustered(2, 200)
    last = values[:1] if lost == "another" else np.full((1, 8), lost, np.float32)
    start = np.concatenate([values[:2], last])
    found = kmeans(jnp.asarray(values), 3, steps=1, centroids=jnp.asarray(start))
    rows = _vsmooth.spread_rows(jnp.asarray(values), jnp.ones(200, bool), 3)
    np.testing.assert_allclose(found.centroids[2], rows[2], rtol=1e-6, atol=1e-6)
    assert (np.asarray(found.labels) == 2).any()


@pytest.mark.parametrize("stride", [2, 3])
def test_a_lloyd_step_looks_at_valid_tokens_wherever_the_others_lie(stride):
    values, _ = clustered(3, 200)
    apart = np.full((600, 8), np.nan, np.float32)
    places = np.sort(np.random.default_rng(0).permutation(600)[:200])
    apart[places] = values
    valid = np.isin(np.arange(600), places)
    want = kmeans(jnp.asarray(values), 5, stride=stride)
    got = kmeans(jnp.asarray(apart), 5, stride=stride, valid=jnp.asarray(valid))
    np.testing.assert_allclose(got.centroids, want.centroids, rtol=1e-5, atol=1e-5)


def test_equal_distances_go_to_the_first_centroid():
    values = jnp.zeros((10, 4))
    centroids = jnp.asarray([[1.0, 0, 0, 0], [-1, 0, 0, 0], [0, 1, 0, 0]])
    found = kmeans(values, 3, steps=0, centroids=centroids)
    assert (found.labels == 0).all()


@pytest.mark.parametrize("length", [1, 3])
def test_fewer_tokens_than_clusters_are_each_their_own(length):
    values = jnp.asarray(np.arange(length * 4).reshape(length, 4) * 10.0, jnp.float32)
    found = kmeans(values, 8)
    assert len(set(np.asarray(found.labels).tolist())) == length
    assert np.isfinite(np.asarray(found.centroids)).all()
    nearest = np.asarray(found.centroids)[np.asarray(found.labels)]
    np.testing.assert_array_equal(nearest, values)


def test_invalid_tokens_are_in_no_cluster_and_move_none_whatever_they_hold():
    values, _ = clustered(3, 300)
    valid = np.random.default_rng(3).random(300) < 0.6
    results = []
    for garbage in (0.0, np.nan, np.inf, -np.inf, 3e38):
        dirty = np.where(valid[:, None], values, np.float32(garbage))
        results.append(kmeans(jnp.asarray(dirty), 6, valid=jnp.asarray(valid)))
        same_bytes(results[0], results[-1])
    labels = np.asarray(results[0].labels)
    assert (labels[~valid] == 6).all()
    assert (labels[valid] < 6).all()
    rank = np.floor((np.arange(6) + 0.5) * valid.sum() / 6).astype(int)
    want = oracles.kmeans(values[valid], values[valid][rank], 4)
    np.testing.assert_array_equal(labels[valid], want[0])
    np.testing.assert_allclose(results[0].centroids, want[1], rtol=1e-4, atol=1e-4)


def test_no_valid_token_at_all_gives_finite_centroids():
    found = kmeans(jnp.full((20, 4), jnp.nan), 3, valid=jnp.zeros(20, bool))
    assert np.isfinite(np.asarray(found.centroids)).all()
    assert (found.labels == 3).all()


def test_leading_indices_are_clustered_independently():
    values = np.stack([clustered(s, 300)[0] for s in range(4)]).reshape(2, 2, 300, 8)
    valid = np.random.default_rng(5).random((2, 2, 300)) < 0.7
    together = kmeans(jnp.asarray(values), 4, valid=jnp.asarray(valid))
    assert together.labels.shape == (2, 2, 300)
    assert together.centroids.shape == (2, 2, 4, 8)
    alone = kmeans(jnp.asarray(values[1:, :1]), 4, valid=jnp.asarray(valid[1:, :1]))
    np.testing.assert_allclose(together.centroids[1:, :1], alone.centroids, atol=1e-5)
    np.testing.assert_array_equal(together.labels[1:, :1], alone.labels)


def test_one_head_of_nan_spoils_no_other():
    values = np.stack([clustered(s, 300)[0] for s in range(4)]).reshape(2, 2, 300, 8)
    spoiled = values.copy()
    spoiled[0, 0, 3] = np.nan
    valid = jnp.ones((2, 2, 300), bool)
    clean = kmeans(jnp.asarray(values), 4, valid=valid)
    dirty = kmeans(jnp.asarray(spoiled), 4, valid=valid)
    same_bytes(*(jax.tree.map(lambda x: x[1], r) for r in (clean, dirty)))
    same_bytes(*(jax.tree.map(lambda x: x[0, 1], r) for r in (clean, dirty)))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_sums_over_many_narrow_values_are_float32(dtype):
    values = jnp.full((4096, 4), 3.0, dtype)
    found = kmeans(values, 1)
    np.testing.assert_array_equal(found.centroids, 3.0)


def test_clustering_is_the_same_from_run_to_run():
    values = jnp.asarray(np.random.default_rng(6).normal(size=(2, 2, 300, 8)), jnp.float32)
    valid = jnp.ones((2, 2, 300), bool)
    same_bytes(kmeans(values, 4, valid=valid), kmeans(values, 4, valid=valid))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"clusters": 0}, "clusters"),
        ({"clusters": 2, "valid": jnp.ones(9, bool)}, "valid"),
        ({"clusters": 2, "centroids": jnp.ones((3, 4))}, "centroids"),
    ],
)
def test_kmeans_names_a_wrong_argument(arguments, name):
    with pytest.raises(ValueError, match=name):
        vc_jax.kmeans(jnp.ones((10, 4)), **arguments)


def test_order_is_a_stable_sort_by_label_with_invalid_tokens_last():
    labels = np.random.default_rng(7).integers(0, 4, (2, 3, 50)).astype(np.int32)  # 3: invalid
    order = np.asarray(vc_jax.cluster_order(jnp.asarray(labels)))
    np.testing.assert_array_equal(order, np.argsort(labels, -1, kind="stable"))
    assert order.dtype == np.int32
    tail = np.take_along_axis(labels, order, -1)
    assert (np.diff(tail, axis=-1) >= 0).all()


@pytest.mark.parametrize("clusters", [1, 3, 17])
def test_similar_clusters_get_neighbouring_places(clusters):
    """A greedy chain from the centroid farthest from the mean to the nearest one left."""
    centroids = np.random.default_rng(12).normal(size=(2, 3, clusters, 8)).astype(np.float32)
    places = np.asarray(similar_clusters_together(jnp.asarray(centroids)))
    assert places.dtype == np.int32
    for b, k in np.ndindex(2, 3):
        rows = centroids[b, k].astype(np.float64)
        current = ((rows - rows.mean(0)) ** 2).sum(-1).argmax()
        left = set(range(clusters))
        for place in range(clusters):
            assert places[b, k, current] == place
            left.remove(current)
            if left:
                current = min(left, key=lambda c: ((rows[c] - rows[current]) ** 2).sum())


def test_tokens_are_sorted_by_the_place_of_their_cluster_and_invalid_ones_stay_last():
    labels = jnp.asarray([[0, 3, 1, 2, 1, 3, 0]], jnp.int32)  # 3: invalid
    places = jnp.asarray([[2, 0, 1]], jnp.int32)
    assert vc_jax.cluster_order(labels, places).tolist() == [[2, 4, 3, 0, 6, 1, 5]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_an_order_is_a_permutation_whatever_the_values_are(bad):
    values = jnp.asarray(clustered(13, 300)[0]).at[5].set(bad)
    found = kmeans(values, 4)
    order = vc_jax.cluster_order(found.labels, similar_clusters_together(found.centroids))
    assert sorted(np.asarray(order).tolist()) == list(range(300))


def test_sequence_order_moves_valid_tokens_to_the_front_in_order():
    valid = jnp.asarray([[False, True, False, True], [True] * 4])
    assert _vsmooth.sequence_order(valid).tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 255, 256])
def test_block_means_count_valid_tokens_only(count):
    values = np.random.default_rng(8).normal(size=(1, 256, 8)).astype(np.float32) + 1
    dirty = values.copy()
    dirty[:, count:] = np.nan
    got = np.asarray(vc_jax.block_means(jnp.asarray(dirty), jnp.asarray([count])))
    assert got.shape == (1, 2, 8)
    for j in range(2):
        block = values[0, 128 * j : min(count, 128 * (j + 1))].astype(np.float64)
        want = block.mean(0) if len(block) else np.zeros(8)
        np.testing.assert_allclose(got[0, j], want, atol=1e-6)


def test_block_means_of_narrow_values_are_float32():
    values = jnp.asarray(np.random.default_rng(9).normal(size=(256, 8)), jnp.bfloat16)
    got = vc_jax.block_means(values)
    assert got.dtype == jnp.float32
    exact = np.asarray(values, np.float64).reshape(2, 128, 8).mean(1)
    np.testing.assert_allclose(got, exact, atol=1e-6)


def test_mean_energy_of_equal_rows_is_all_of_it_and_of_zeros_none():
    assert float(vc_jax.mean_energy(jnp.full((256, 8), 3.0))) == pytest.approx(1.0)
    assert float(vc_jax.mean_energy(jnp.zeros((256, 8)))) == 0.0


def test_mean_energy_leaves_out_tokens_past_the_last_whole_block():
    values = jnp.asarray(np.random.default_rng(10).normal(size=(3, 300, 8)), jnp.float32)
    dirty = values.at[:, 256:].set(jnp.nan)
    np.testing.assert_array_equal(vc_jax.mean_energy(dirty), vc_jax.mean_energy(values[:, :256]))


def test_sorting_raises_the_energy_of_the_block_means():
    values, _ = clustered(11, 1024, size=16, spread=1.0)
    values = jnp.asarray(values)
    order = vc_jax.cluster_order(kmeans(values, 6).labels)
    before, after = vc_jax.mean_energy(values), vc_jax.mean_energy(values[order])
    assert float(after) > float(before) + 0.1


def test_block_means_need_whole_blocks():
    with pytest.raises(ValueError, match="multiple of 128 tokens, got 130"):
        vc_jax.block_means(jnp.ones((130, 4)))


@pytest.mark.parametrize(
    ("name", "value"),
    [("clusters", 2.5), ("stride", 1.5), ("stride", 0), ("steps", -1), ("steps", 0.5)],
)
def test_kmeans_counts_in_integers(name, value):
    arguments = {"clusters": 2} | {name: value}
    with pytest.raises(ValueError, match=f"{name} must be an integer"):
        vc_jax.kmeans(jnp.ones((9, 4)), **arguments)


def test_lloyd_steps_over_every_other_token_move_centroids_by_those_alone():
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.normal(size=(300, 8)), jnp.float32)
    start = values[:5]
    got = kmeans(values, 5, steps=3, stride=2, centroids=start)
    want = kmeans(values[::2], 5, steps=3, centroids=start)
    np.testing.assert_allclose(got.centroids, want.centroids, atol=1e-6)
    np.testing.assert_array_equal(got.labels[::2], want.labels)
    assert got.labels.shape == (300,)


@pytest.mark.parametrize("shape", [(5,), (0, 5), (5, 0)])
def test_kmeans_needs_tokens_and_channels(shape):
    with pytest.raises(ValueError, match="values must be"):
        vc_jax.kmeans(jnp.ones(shape), 2)


def test_kmeans_takes_a_mask_of_booleans_only():
    with pytest.raises(TypeError, match=r"valid must be bool \[\*batch s\] .*, got float32 \[9\]"):
        vc_jax.kmeans(jnp.ones((9, 4)), 2, valid=jnp.ones(9))


@pytest.mark.parametrize("number", [0, -1, 1.5, "a", True])
def test_default_numbers_are_of_whole_positive_sizes(number):
    with pytest.raises(ValueError, match="kv_length must be an integer >= 1"):
        vc_jax.default_clusters(number)
    with pytest.raises(ValueError, match="kv_length must be an integer >= 1"):
        vc_jax.default_lloyd_stride(number, 2)
    with pytest.raises(ValueError, match="clusters must be an integer >= 1"):
        vc_jax.default_lloyd_stride(300, number)


def test_integers_of_numpy_are_integers():
    config = vc_jax.AttentionConfig(clusters=np.int32(4), lloyd_stride=np.int64(3))
    assert config == vc_jax.AttentionConfig(clusters=4, lloyd_stride=3)
    assert type(config.clusters) is int


@pytest.mark.parametrize("state", [None, (1, 2)])
def test_reset_takes_a_state_only(state):
    with pytest.raises(TypeError, match="state must be an AttentionState"):
        vc_jax.reset(state)
