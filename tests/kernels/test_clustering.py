"""The clustering kernels in Pallas's interpreter, held to `vc_jax._vsmooth`."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from vc_jax import _arguments, _fused, _preprocessing, _vsmooth
from vc_jax.pallas_kernels import clustering

from .preparation_cases import FAST_COMPILE

compiled = functools.partial(jax.jit, compiler_options=FAST_COMPILE)


@dataclasses.dataclass(frozen=True)
class Values:
    """Values around `groups` centres and a number of clusters; NaN in invalid tokens.

    Attributes:
      share: of the tokens that are valid; `None`: no mask.
    """

    batch: int = 1
    length: int = 700
    heads: int = 2
    size: int = 128
    clusters: int = 10
    dtype: type = jnp.bfloat16
    share: float | None = None
    groups: int = 6

    def make(self) -> tuple[jax.Array, jax.Array | None]:
        """Values [B, S, K, H] and which are valid [B, S]."""
        random = np.random.default_rng(0)
        centres = 2 * random.normal(size=(self.groups, self.size))
        shape = (self.batch, self.length, self.heads)
        value = centres[random.integers(self.groups, size=shape)]
        value = (value + random.normal(size=value.shape)).astype(np.float32)
        if self.share is None:
            return jnp.asarray(value, self.dtype), None
        valid = random.random((self.batch, self.length)) < self.share
        value = np.where(valid[:, :, None, None], value, np.nan)
        return jnp.asarray(value, self.dtype), jnp.asarray(valid)


CASES = [
    Values(),
    Values(batch=2, length=300, heads=1, size=64, clusters=70, dtype=jnp.float32, share=0.7),
    Values(length=9, heads=1, size=64, clusters=20, dtype=jnp.float16, share=0.7),
    Values(length=1000, clusters=130, share=0.7),
]
SMALL = Values(length=257, size=64, clusters=5, share=0.7)


def by_head(values, valid):
    """Values [B, K, S, H] and validity [B, K, S] as `_vsmooth` takes them."""
    values = jnp.swapaxes(values, 1, 2)
    shape = values.shape[:3]
    return values, jnp.ones(shape, bool) if valid is None else jnp.broadcast_to(
        valid[:, None], shape
    )


@functools.cache
def spread(case: Values) -> jax.Array:
    """Where the definition starts a cold k-means."""
    values, valid = by_head(*case.make())
    rows = functools.partial(_vsmooth.spread_rows, clusters=case.clusters)
    return compiled(jax.vmap(jax.vmap(rows)))(values, valid)


class Found(NamedTuple):
    """Labels by the first centroids, centroids after a Lloyd step, labels by them, their order."""

    first: np.ndarray
    centroids: np.ndarray
    label: np.ndarray
    order: np.ndarray


@functools.partial(compiled, static_argnames="stride")
def lloyd(values, centroids, valid=None, stride=1):
    kmeans = functools.partial(clustering.kmeans, stride=stride, interpret=True)
    first, same = kmeans(values, centroids, 0, valid)
    labels, new = kmeans(values, centroids, 1, valid)
    order = clustering.order_by(labels, clustering.offsets(labels, interpret=True), interpret=True)
    return Found(first.label, new, labels.label, order), same


@functools.cache
def found(case: Values, stride: int = 1) -> Found:
    """One step from where the definition starts."""
    values, valid = case.make()
    result, same = lloyd(values, spread(case), valid, stride)
    np.testing.assert_array_equal(same, spread(case))
    return jax.tree.map(np.asarray, result)


@functools.partial(compiled, static_argnames=("clusters", "steps"))
def definition(values, valid, clusters, steps, centroids):
    by_heads, mask = by_head(values, valid)
    return _vsmooth.kmeans(by_heads, clusters, steps=steps, valid=mask, centroids=centroids)


chain = compiled(functools.partial(clustering.chain, interpret=True))


@functools.partial(compiled, static_argnames=("clusters", "steps", "stride"))
def cluster_order(value, valid, clusters, steps, centroids=None, stride=1):
    return _fused.cluster_order_fused(
        value, valid, clusters, steps, stride=stride, centroids=centroids, interpret=True
    )


def distances(case: Values, centroids) -> np.ndarray:
    """Squared distances [B, K, S, k], float64; 0 of invalid tokens."""
    values = np.asarray(by_head(*case.make())[0], np.float64)
    values = np.nan_to_num(values)[:, :, :, None]
    return ((values - np.asarray(centroids, np.float64)[:, :, None]) ** 2).sum(-1)


def tie(case: Values, centroids) -> float:
    """The largest difference of two distances that rounding to codes can turn round.

    A token is off by half a unit in each channel, a centroid by a seventh; a unit is 1/32 of half
    the spread of the centroids in the channel where that is widest.
    """
    centroids = np.asarray(centroids, np.float64)
    unit = np.ptp(centroids, axis=2).max() / 64
    apart = np.linalg.norm(centroids[:, :, :, None] - centroids[:, :, None], axis=-1).max()
    farthest = np.sqrt(distances(case, centroids)[valid_tokens(case)].max())
    return 2 * math.sqrt(case.size) * unit * (0.51 * apart + 2 / 7 * farthest)


def valid_tokens(case: Values) -> np.ndarray:
    return np.asarray(by_head(*case.make())[1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_labels_are_of_the_nearest_centroid_but_for_ties(case):
    label, start, valid = found(case).first, spread(case), valid_tokens(case)
    assert (label[~valid] == case.clusters).all()
    assert (label[valid] < case.clusters).all()
    distance = distances(case, start)
    own = np.take_along_axis(distance, np.minimum(label, case.clusters - 1)[..., None], -1)[..., 0]
    excess = (own - distance.min(-1))[valid]
    assert excess.max() <= tie(case, start)
    assert excess.mean() <= 5e-4 * distance.mean()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("factor", [1e-4, 1e4])
@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_labels_are_those_of_the_same_values_in_other_units(dtype, factor, offset):
    case = dataclasses.replace(SMALL, share=None, clusters=SMALL.groups, dtype=dtype)
    values = case.make()[0].astype(jnp.float32)
    start = jnp.asarray(distinct_start(case))
    want = definition(values, None, case.groups, 0, start).labels
    moved = (factor * (values + offset)).astype(dtype)
    found, _ = lloyd(moved, factor * (start + offset))
    np.testing.assert_array_equal(found.first, want)


def test_an_outlier_does_not_take_the_codes_from_the_others():
    case = dataclasses.replace(CASES[0], clusters=CASES[0].groups + 1)
    start = jnp.asarray(distinct_start(dataclasses.replace(case, clusters=case.groups)))
    outlier = jnp.full_like(start[:, :, :1], 0.0).at[..., 5].set(1e3)
    start = jnp.concatenate([start, outlier], 2)
    values = case.make()[0].at[:, 3, :, 5].set(1e3)
    want = np.asarray(definition(values, None, case.clusters, 0, start).labels)
    found, _ = lloyd(values, start)
    assert (want[:, :, 3] == case.groups).all()
    assert np.mean(found.first != want) <= 0.01


def test_the_largest_codes_and_number_of_clusters_do_not_overflow():
    random = np.random.default_rng(0)
    corners = jnp.asarray(random.choice([-1.0, 1.0], (1, 1, clustering.MAX_CLUSTERS, 128)))
    own = random.permutation(clustering.MAX_CLUSTERS)[:256]
    values = (1.9 * jnp.swapaxes(corners[:, :, own], 1, 2)).astype(jnp.bfloat16)
    label = clustering.nearest(values, corners, interpret=True).label
    np.testing.assert_array_equal(label[0, 0], own)


def test_xla_clusters_where_the_kernels_have_no_room():
    every = _arguments.Validity(None, None, None, prefix=True)
    tokens = jax.ShapeDtypeStruct((1, 9, 1, 128), jnp.bfloat16)
    inputs = _arguments.Inputs(tokens, tokens, tokens, None, every)
    most = clustering.MAX_CLUSTERS
    assert _preprocessing.fuses("hopper", inputs, most)
    assert not _preprocessing.fuses("hopper", inputs, most + 1)
    assert not _preprocessing.fuses("xla", inputs, most)
    many = jax.ShapeDtypeStruct((4, 1_200_000, 40, 128), jnp.bfloat16)
    inputs = _arguments.Inputs(many, many, many, None, every)
    assert _preprocessing.fuses("hopper", inputs, 1000)
    assert not _preprocessing.fuses("hopper", inputs, most)


def test_too_many_clusters_are_refused():
    too_many = jnp.zeros((1, 1, clustering.MAX_CLUSTERS + 1, 64))
    with pytest.raises(ValueError, match="centroids"):
        clustering.nearest(jnp.zeros((1, 9, 1, 64)), too_many, interpret=True)


@pytest.mark.parametrize(("case", "stride"), [*((case, 1) for case in CASES), (CASES[0], 3)])
def test_a_lloyd_step_gives_the_mean_of_the_tokens_of_each_cluster(case, stride):
    old, new = np.asarray(spread(case)), found(case, stride).centroids
    values = np.asarray(by_head(*case.make())[0], np.float64)[:, :, ::stride]
    label = found(case).first[:, :, ::stride]
    for b, h, c in np.ndindex(*new.shape[:3]):
        members = values[b, h, label[b, h] == c]
        want = members.mean(0) if len(members) else old[b, h, c]
        np.testing.assert_allclose(new[b, h, c], want, rtol=1e-5, atol=1e-5)


def test_an_empty_cluster_keeps_its_centroid():
    values, valid = SMALL.make()
    start = spread(SMALL).at[:, :, 3].set(1e3)
    _, centroids = cluster_order(values, valid, SMALL.clusters, 1, start)
    np.testing.assert_array_equal(centroids[:, :, 3], 1e3)
    assert (np.abs(centroids[:, :, :3]) < 100).all()


def test_every_token_is_sorted_even_if_a_step_looks_at_one_only():
    values, valid = SMALL.make()
    order, _ = cluster_order(values, valid, SMALL.clusters, 1, stride=300)
    whole = np.broadcast_to(np.arange(SMALL.length), order.shape)
    np.testing.assert_array_equal(np.sort(order, -1), whole)
    last = np.take_along_axis(~valid_tokens(SMALL), np.asarray(order), -1)
    assert (np.diff(last.astype(int)) >= 0).all()


def test_separate_groups_are_found_as_by_the_definition():
    case = dataclasses.replace(CASES[0], clusters=CASES[0].groups)
    values, valid = case.make()
    centroids = jnp.asarray(distinct_start(case))
    want = definition(values, valid, case.groups, 3, centroids)
    for _ in range(3):
        (_, centroids, label, _), _ = lloyd(values, centroids, valid)
    np.testing.assert_array_equal(label, want.labels)
    np.testing.assert_allclose(centroids, want.centroids, rtol=1e-5, atol=1e-5)


def distinct_start(case: Values) -> np.ndarray:
    """One token of each group: greedily the one farthest from those taken."""
    values = np.asarray(by_head(*case.make())[0], np.float32)
    start = np.empty((*values.shape[:2], case.groups, case.size), np.float32)
    for b, h in np.ndindex(*values.shape[:2]):
        taken = [0]
        while len(taken) < case.groups:
            gaps = values[b, h][:, None] - values[b, h][taken]
            taken.append(int((gaps**2).sum(-1).min(-1).argmax()))
        start[b, h] = values[b, h][taken]
    return start


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_order_is_the_stable_one_with_invalid_tokens_last(case):
    order = found(case).order
    want = _vsmooth.cluster_order(jnp.asarray(found(case).label))
    np.testing.assert_array_equal(order, want)
    last = np.take_along_axis(~valid_tokens(case), order, -1)
    assert (np.diff(last.astype(int)) >= 0).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_chain_is_that_of_the_definition(case):
    centroids = jnp.asarray(found(case).centroids)
    want = _vsmooth.similar_clusters_together(centroids)
    np.testing.assert_array_equal(chain(centroids), want)


def test_a_cold_order_is_by_the_last_centroids_along_their_chain():
    case = CASES[3]
    order, centroids = cluster_order(*case.make(), case.clusters, 1)
    np.testing.assert_array_equal(centroids, found(case).centroids)
    places = _vsmooth.similar_clusters_together(centroids)
    label = jnp.asarray(found(case).label)
    np.testing.assert_array_equal(order, _vsmooth.cluster_order(label, places))


def test_a_warm_start_takes_the_centroids_that_it_is_given():
    values, valid = SMALL.make()
    cold = cluster_order(values, valid, SMALL.clusters, 1)
    warm = cluster_order(values, valid, SMALL.clusters, 1, spread(SMALL))
    for one, other in zip(cold, warm, strict=True):
        np.testing.assert_array_equal(one, other)
    turned = cluster_order(values, valid, SMALL.clusters, 1, spread(SMALL)[:, :, ::-1])
    np.testing.assert_array_equal(turned[1], cold[1][:, :, ::-1])


@pytest.mark.parametrize("case", [*CASES, SMALL], ids=str)
def test_a_cold_start_takes_the_rows_that_the_definition_takes(case):
    values, valid = case.make()
    got = _fused.starting_rows(values, valid, case.clusters)
    np.testing.assert_array_equal(got, spread(case))


def test_a_row_without_a_valid_token_keeps_the_order_of_the_sequence():
    values, valid = SMALL.make()
    none = jnp.zeros_like(valid)
    order, centroids = cluster_order(values, none, SMALL.clusters, 1)
    np.testing.assert_array_equal(
        order, np.broadcast_to(np.arange(SMALL.length), (1, SMALL.heads, SMALL.length))
    )
    assert np.isfinite(centroids).all()


def test_invalid_tokens_move_nothing_whatever_they_hold():
    values, valid = SMALL.make()
    want = cluster_order(values, valid, SMALL.clusters, 1)
    for garbage in (0.0, np.inf, -3e38):
        dirty = jnp.where(jnp.isnan(values), garbage, values).astype(values.dtype)
        for a, b in zip(cluster_order(dirty, valid, SMALL.clusters, 1), want, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 3e38])
def test_whatever_a_valid_token_holds_the_order_is_a_permutation(garbage):
    values, valid = SMALL.make()
    values = jnp.where(jnp.isnan(values), 0, values).at[:, 7].set(garbage)
    valid = valid.at[:, 7].set(True)
    order, _ = cluster_order(values, valid, SMALL.clusters, 1)
    whole = np.broadcast_to(np.arange(SMALL.length), order.shape)
    np.testing.assert_array_equal(np.sort(order, -1), whole)


def test_vmap_equals_a_loop():
    values, valid = SMALL.make()
    stack = jnp.stack([values, values[:, ::-1]])
    masks = jnp.stack([valid, valid[:, ::-1]])
    one = lambda v, m: _fused.cluster_order_fused(  # noqa: E731
        v, m, SMALL.clusters, 1, interpret=True
    )
    mapped = compiled(jax.vmap(one))(stack, masks)
    for i in range(2):
        want = cluster_order(stack[i], masks[i], SMALL.clusters, 1)
        for got, expected in zip(mapped, want, strict=True):
            np.testing.assert_array_equal(got[i], expected)


def test_shard_map_over_heads_equals_the_whole():
    values, valid = SMALL.make()
    arguments = SMALL.clusters, 1

    def cluster(interpret, value, valid):
        return _fused.cluster_order_fused(value, valid, *arguments, interpret=interpret)

    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    heads = PartitionSpec(None, "x")
    shard_map = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(None, None, "x"), PartitionSpec()),
        out_specs=(heads, heads),
    )
    # The interpreter does not know of varying axes; the kernels' own types are checked here.
    checked = shard_map(functools.partial(cluster, False), check_vma=True)
    jax.jit(checked).trace(values, valid)
    sharded = shard_map(functools.partial(cluster, True), check_vma=False)
    want = cluster_order(values, valid, *arguments)
    for a, b in zip(compiled(sharded)(values, valid), want, strict=True):
        np.testing.assert_array_equal(a, b)
