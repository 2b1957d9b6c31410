"""The fused clustering and preparation on the GPU, held to XLA's on the same order."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax import _fused, _preprocessing, _vsmooth
from vc_jax.pallas_kernels import clustering, preparation, statistics

from ..kernels.cases import relative_error
from ..kernels.preparation_cases import Call, assert_same, both

pytestmark = pytest.mark.gpu

LARGE = Call(length=5000, rows=3000, heads=4, key_heads=2, head_dim=128)
RAGGED = dataclasses.replace(LARGE, batch=3, counts=(0, 2001, 5000))
SCHEDULE = vc_jax.DenoisingSchedule(8, smoothing_fraction=0.5, refresh_every=2)


@pytest.fixture(scope="module", autouse=True)
def _on_hopper():
    if str(getattr(jax.devices()[0], "compute_capability", "")) != "9.0":
        pytest.skip("needs a GPU of compute capability 9.0")


@pytest.mark.parametrize(
    "call",
    [
        LARGE,
        dataclasses.replace(LARGE, format="fp8"),
        RAGGED,
        dataclasses.replace(RAGGED, format="fp8", prefix=True),
        dataclasses.replace(RAGGED, dtype=jnp.float32, head_dim=64),
        dataclasses.replace(LARGE, format="fp8", dtype=jnp.float16, smooth=False, ordered=False),
        Call("fp8 bare", jnp.float32, length=257, rows=1),
        Call(length=1, rows=1, dtype=jnp.float32, ordered=False, format="int8 bare"),
    ],
    ids=str,
)
def test_codes_and_scales_are_those_of_the_definition(call):
    assert_same(*both(call, interpret=False))


@pytest.mark.parametrize("scale", [1e25, 1e-25])
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_huge_and_tiny_tensors(format, scale):
    call = Call(format, jnp.float32, length=1000, rows=300)
    query, key, value = call.tensors()
    for tensors in ((query * scale, key, value), (query, key * scale, value * scale)):
        assert_same(*both(call, tensors, interpret=False))


def test_memory_full_of_nan_does_not_show():
    want = both(RAGGED, interpret=False)[1]
    poison = [jnp.full((1 << 28,), jnp.nan) for _ in range(4)]
    jax.block_until_ready(poison)
    del poison
    again = both(RAGGED, interpret=False)[1]
    for one, other in zip(jax.tree.leaves(want), jax.tree.leaves(again), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("masked", [False, True])
def test_the_mean_key_is_that_of_the_valid_tokens(masked):
    call = dataclasses.replace(RAGGED, counts=RAGGED.counts if masked else None)
    key, valid = call.tensors()[1], None if call.valid is None else jnp.asarray(call.valid)
    sizes = jax.jit(_fused.channel_sizes_fused, static_argnums=2)
    got, _ = sizes(key, key, vc_jax.PRESETS["int8"], valid)
    np.testing.assert_allclose(got, vc_jax.mean_key(key, valid), rtol=1e-5, atol=1e-5)


@functools.cache
def clustered():
    """Values [2, 6000, 3, 128] in 40 groups, which are valid, and 50 centroids."""
    random = np.random.default_rng(0)
    centres = 1.5 * random.normal(size=(40, 128))
    values = centres[random.integers(40, size=(2, 6000, 3))] + random.normal(size=(2, 6000, 3, 128))
    valid = random.random((2, 6000)) < 0.8
    values = jnp.asarray(np.where(valid[:, :, None, None], values, np.nan), jnp.bfloat16)
    return values, jnp.asarray(valid), _fused.starting_rows(values, jnp.asarray(valid), 50)


def test_labels_order_and_means_are_those_of_the_definition():
    values, valid, start = clustered()
    by_head = jnp.swapaxes(values, 1, 2)
    mask = jnp.broadcast_to(valid[:, None], by_head.shape[:3])

    @jax.jit
    def kernels(values, start):
        labels, centroids = clustering.kmeans(values, start, start, 1, valid)
        own = clustering.order_by(labels, clustering.offsets(labels))
        return (
            clustering.kmeans(values, start, start, 0, valid)[0].label,
            labels.label,
            centroids,
            own,
        )

    first, label, centroids, own = map(np.asarray, kernels(values, start))
    want = _vsmooth.kmeans(by_head, 50, steps=0, valid=mask, centroids=start)
    # Distances between codes decide a near tie differently.
    assert np.mean(first != np.asarray(want.labels)) <= 0.03
    np.testing.assert_array_equal(own, _vsmooth.cluster_order(jnp.asarray(label)))
    tokens = np.asarray(by_head.astype(jnp.float32), np.float64)
    for b, h, c in ((0, 0, 0), (0, 2, 17), (1, 1, 49)):
        members = tokens[b, h, first[b, h] == c]
        expected = members.mean(0) if len(members) else np.asarray(start)[b, h, c]
        np.testing.assert_allclose(centroids[b, h, c], expected, rtol=1e-5, atol=1e-5)
    order, again = jax.jit(lambda v, s: _fused.cluster_order_fused(v, valid, 50, 1, centroids=s))(
        values, start
    )
    np.testing.assert_array_equal(again, centroids)
    places = _vsmooth.similar_clusters_together(again)
    np.testing.assert_array_equal(order, _vsmooth.cluster_order(jnp.asarray(label), places))


def test_the_order_lets_block_means_hold_what_that_of_the_definition_does():
    values, valid, start = clustered()
    by_head = jnp.swapaxes(values, 1, 2)
    mask = jnp.broadcast_to(valid[:, None], by_head.shape[:3])
    found = _vsmooth.kmeans(by_head, 50, steps=3, valid=mask, centroids=start)
    want = _vsmooth.cluster_order(found.labels, _vsmooth.similar_clusters_together(found.centroids))
    got, _ = _fused.cluster_order_fused(values, valid, 50, 3, centroids=start)
    count = int(valid.sum(1).min())
    energy = [
        vc_jax.mean_energy(jnp.take_along_axis(by_head, o[..., :count, None], 2))
        for o in (got, want)
    ]
    # A tie that falls the other way can lead a head to another local minimum, not all of them.
    np.testing.assert_allclose(energy[0], energy[1], atol=0.03)
    np.testing.assert_allclose(np.mean(energy[0]), np.mean(energy[1]), atol=5e-3)


def test_repeated_runs_are_bit_identical():
    query, key, value = RAGGED.tensors()
    valid = jnp.asarray(RAGGED.valid)
    count = jnp.sum(valid, 1, dtype=jnp.int32)

    @jax.jit
    def whole(query, key, value):
        order, centroids = _fused.cluster_order_fused(value, valid, 40, 3)
        mean, balance = _fused.channel_sizes_fused(query, key, RAGGED.config, valid)
        prepared = _fused.prepare_fused(
            *(query, key, value, RAGGED.config),
            order=order,
            key_valid=valid,
            kv_count=count,
            key_mean=mean,
            balance=balance,
        )
        return order, centroids, mean, prepared

    first = [
        x.tobytes() for x in jax.tree.leaves(jax.tree.map(np.asarray, whole(query, key, value)))
    ]
    for _ in range(20):
        again = jax.tree.leaves(jax.tree.map(np.asarray, whole(query, key, value)))
        assert [x.tobytes() for x in again] == first


def test_vmap_equals_a_loop():
    query, key, value = dataclasses.replace(LARGE, rows=300, length=1000).tensors()
    queries, values = jnp.stack([query, 2 * query]), jnp.stack([value, -value + 1])

    def one(query, value):
        order, _ = _fused.cluster_order_fused(value, None, 8, 2)
        mean, balance = _fused.channel_sizes_fused(query, key, LARGE.config)
        common = {"order": order, "key_mean": mean, "balance": balance}
        return order, _fused.prepare_fused(query, key, value, LARGE.config, **common)

    mapped = jax.tree.leaves(jax.jit(jax.vmap(one))(queries, values))
    single = jax.jit(one)
    for i in range(2):
        for got, want in zip(mapped, jax.tree.leaves(single(queries[i], values[i])), strict=True):
            assert np.asarray(got[i]).tobytes() == np.asarray(want).tobytes()


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("counts", [None, (3000, 4999)])
def test_the_call_is_as_close_to_exact_as_with_preparation_by_xla(format, counts, monkeypatch):
    call = Call(format, length=5000, rows=256, heads=2, head_dim=128, batch=2, counts=counts)
    query, key, value = (jnp.nan_to_num(x) for x in call.tensors())
    mask = None if call.valid is None else jnp.asarray(call.valid)[:, None, None]
    with jax.default_matmul_precision("highest"):
        exact = jax.nn.dot_product_attention(
            *(x.astype(jnp.float32) for x in (query, key, value)), mask=mask
        )

    def error():
        run = jax.jit(
            lambda q, k, v: vc_jax.dot_product_attention(
                q, k, v, mask=mask, config=format, implementation="hopper"
            )
        )
        return relative_error(run(query, key, value).astype(jnp.float32), exact)

    by_kernels = error()
    jax.clear_caches()
    monkeypatch.setattr(_preprocessing, "fuses", lambda *_: False)
    by_xla = error()
    jax.clear_caches()
    assert by_kernels <= 1.05 * by_xla + 1e-4


def steps_of(implementation: str, inputs, lengths):
    """Output and whether there is an order, at every step of the schedule."""
    query, key, value = inputs
    batch, length, heads, size = key.shape
    config = vc_jax.AttentionConfig(clusters=16)
    state = vc_jax.init_state(config, batch, length, heads, size)
    call = jax.jit(
        lambda state, step, lengths: vc_jax.attention_step(
            *(query, key, value, state),
            step=step,
            schedule=SCHEDULE,
            config=config,
            key_value_seq_lengths=lengths,
            implementation=implementation,
        )
    )
    found = []
    for step in range(SCHEDULE.num_steps):
        out, state = call(state, jnp.int32(step), jnp.asarray(lengths[step], jnp.int32))
        found.append((np.asarray(out.astype(jnp.float32)), bool(state.made.all())))
    return found


def test_steps_in_the_window_and_after_it_agree_with_xla():
    inputs = Call(length=2000, rows=200, heads=2, head_dim=128, batch=2).tensors()
    # Other keys from step 3 on, in the window, and from step 6 on, after it.
    lengths = [(2000, 700)] * 3 + [(1999, 700)] * 3 + [(2000, 1)] * 2
    got, want = (steps_of(name, inputs, lengths) for name in ("hopper", "xla"))
    for step, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one[1] == other[1], step
        assert np.isfinite(one[0]).all(), step
        assert relative_error(one[0], other[0]) <= 1.5e-2, step


def test_a_call_is_one_program_without_the_host():
    inputs = Call(length=2000, rows=200, heads=2, head_dim=128).tensors()
    state = vc_jax.init_state("int8", 1, 2000, 1, 128)
    lowered = jax.jit(
        lambda *x: vc_jax.attention_step(*x, step=jnp.int32(0), schedule=SCHEDULE, config="int8")
    ).lower(*inputs, state)
    text = str(lowered.compile().as_text())
    assert "mosaic_gpu" in text
    for word in ("callback", "outfeed", "infeed", "SendToHost", "send("):
        assert word not in text, word


def test_more_tokens_than_32_bits_of_bytes_can_count():
    """218 000 tokens of 56 heads of INT8 codes: 1.6 GB of codes, 3.1 GB of keys."""
    length, heads, size = 218_000, 56, 128
    shape = (1, length, heads, size)
    key = jax.jit(lambda k: jax.random.normal(k, shape, jnp.bfloat16))(jax.random.key(0))
    order = jax.jit(
        lambda k: jax.vmap(lambda k: jax.random.permutation(k, length))(jax.random.split(k, heads))
    )(jax.random.key(1))[None].astype(jnp.int32)
    assert preparation.unsupported(size, key) is None
    chosen, count = jnp.asarray([0, 27, 55]), jnp.asarray([length], jnp.int32)
    sizes = jax.jit(_fused.channel_sizes_fused, static_argnums=2)
    mean, _ = sizes(key[:, :1], key, vc_jax.PRESETS["int8"])

    def quantise(key, order, mean):
        return preparation.quantize_keys(key, count, order, mean, rotate=True, code_dtype=jnp.int8)

    quantise = jax.jit(quantise)
    codes, scales = quantise(key, order, mean)
    few = (key[:, :, chosen], order[:, chosen], mean[:, chosen])
    want_codes, want_scales = quantise(*few)
    np.testing.assert_allclose(scales[:, chosen], want_scales, rtol=1e-6)
    apart = jnp.abs(codes[:, chosen].astype(jnp.int32) - want_codes)
    assert jnp.max(apart) <= 1
    assert jnp.mean(apart) < 1e-6
    del codes, scales, apart, want_codes
    found = jax.jit(statistics.value_statistics)(key, count, order)
    quantise_values = jax.jit(preparation.quantize_values)
    codes = quantise_values(key, count, order, found).codes
    few_found = jax.tree.map(lambda x: x[:, chosen], found)
    want = quantise_values(few[0], count, few[1], few_found).codes
    np.testing.assert_array_equal(
        np.asarray(codes[:, chosen]).view(np.uint8), np.asarray(want).view(np.uint8)
    )
    del codes
    start = _fused.starting_rows(key, None, 64)
    label = jax.jit(clustering.nearest)(key, start).label
    few_labels = jax.jit(clustering.nearest)(few[0], start[:, chosen]).label
    np.testing.assert_array_equal(label[:, chosen], few_labels)


def test_the_large_keys_are_right_at_their_ends():
    """Against the definition: the last head's first and last blocks of 218 000 x 56 keys."""
    length, heads, size = 218_000, 56, 128
    key = jax.jit(lambda k: jax.random.normal(k, (1, length, heads, size), jnp.bfloat16))(
        jax.random.key(2)
    )
    count = jnp.asarray([length], jnp.int32)
    codes, scales = jax.jit(
        lambda key: preparation.quantize_keys(
            key, count, None, None, rotate=True, code_dtype=jnp.int8
        )
    )(key)
    query = jnp.zeros((1, 1, 1, size), jnp.bfloat16)
    config = dataclasses.replace(vc_jax.PRESETS["int8"], center_keys=False)
    for head in (0, heads - 1):
        for first, tokens in ((0, 256), (length // 256 * 256, length % 256)):
            part = key[:, first : first + tokens, head : head + 1]
            want = vc_jax.prepare(query, part, part, config)
            got = codes[:, head : head + 1, first : first + 256]
            distance = np.abs(np.asarray(got, np.int32) - np.asarray(want.key_codes, np.int32))
            assert distance.max() <= 1
            assert np.mean(distance > 0) <= 1e-3
            np.testing.assert_allclose(
                scales[:, head, first // 128 : first // 128 + 2],
                want.key_scale[:, 0],
                rtol=1e-5,
            )
