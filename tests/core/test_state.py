"""The state over denoising steps: what is clustered when, and what a step leaves to the next."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax import DenoisingSchedule, _state

from . import oracles
from .cases import jaxpr_equations, relative_l2, same_bytes
from .steps import (
    BATCH,
    CONFIG,
    FORTY,
    FULL,
    LENGTH,
    RAGGED,
    UNSMOOTHED,
    clusterings,
    fresh,
    inputs,
    stateless,
    step_at,
    trajectory,
)
from .test_prepare import prepare

STRIDE = vc_jax.default_lloyd_stride(LENGTH, 3)


def clear_of_edges(first, valid=FULL):
    """Whether no token of the clusterings at drifts `first`, + 4 and + 8 lies between two clusters.

    Rounding takes none across then, and programs that round differently agree on every label.
    """
    edge = np.inf
    for row, length in enumerate(valid):
        centroids = None
        for drift, steps in (
            (0, CONFIG.lloyd_steps),
            *((d, CONFIG.warm_lloyd_steps) for d in (4, 8)),
        ):
            values = np.asarray(inputs(drift=first + drift)[2])[row, :length, 0]
            if centroids is None:
                centroids = values[((np.arange(3) + 0.5) * length / 3).astype(int)]
            for done in range(steps + 1):
                _, after = oracles.kmeans(values[::STRIDE], centroids, done)
                distances = np.sort(((values[:, None] - after) ** 2).sum(-1), axis=1)
                edge = min(edge, np.min(distances[:, 1] - distances[:, 0]))
            centroids = after
    return edge > 1e-3


def test_values_are_clustered_at_steps_0_4_and_8_of_40_and_not_after_the_window():
    _, states = trajectory(range(16))
    assert clusterings(states) == [0, 4, 8]
    orders = [np.asarray(s.permutation) for s in states]
    for i in range(1, 16):
        assert np.array_equal(orders[i], orders[i - 1]) == (i not in (4, 8))
    assert all(s.made.all() for s in states)


def test_the_same_holds_in_scans_over_steps_and_layers_with_one_compilation():
    """Traced step, traced layer, the state of all layers in the carry."""
    traces = []
    query, key, _ = inputs()

    @jax.jit
    def run(state, values):
        traces.append(None)

        def one_layer(carry, item):
            state, step = carry
            layer, value = item
            out, state = vc_jax.attention_step(
                query, key, value, state, step=step, schedule=FORTY, layer=layer, config=CONFIG
            )
            return (state, step), out

        def one_step(state, item):
            step, of_layers = item
            items = (jnp.arange(2), of_layers)
            (state, _), outs = jax.lax.scan(one_layer, (state, step), items)
            return state, (outs, state.centroids, state.permutation)

        return jax.lax.scan(one_step, state, (jnp.arange(12), values))

    drifts = np.arange(12)[:, None] + [0, 50]  # the second layer has other values
    for drift in drifts[0]:
        assert clear_of_edges(drift)
    values = jnp.stack([jnp.stack([inputs(drift=d)[2] for d in row]) for row in drifts])
    state, (outs, centroids, permutations) = run(fresh(layers=2), values)
    for layer in range(2):
        one = fresh()
        for step in range(12):
            (out, _), one = step_at(inputs(drift=drifts[step, layer]), one, step)
            assert relative_l2(outs[step, layer], out) < 3e-3
            np.testing.assert_allclose(centroids[step, layer], one.centroids, atol=1e-4)
            np.testing.assert_array_equal(permutations[step, layer], one.permutation)
        changed = [
            i for i in range(1, 12) if np.any(centroids[i, layer] != centroids[i - 1, layer])
        ]
        assert changed == [4, 8]
    run(state, values + 1)
    assert len(traces) == 1


def test_one_compilation_serves_all_steps_and_lengths():
    step_at(inputs(), fresh(), 0)
    before = _state.run_step._cache_size()
    state = fresh()
    for step, lengths in ((0, FULL), (4, RAGGED), (11, RAGGED), (39, np.array([0, 7], np.int32))):
        _, state = step_at(inputs(), state, step, lengths)
    assert _state.run_step._cache_size() == before


@jax.jit
def cluster(value, steps, centroids=None):
    """Centroids and order of k-means over [B, S, K, H] values."""
    found = vc_jax.kmeans(
        jnp.swapaxes(value, 1, 2), 3, steps=steps, stride=STRIDE, centroids=centroids
    )
    places = vc_jax.similar_clusters_together(found.centroids)
    return found.centroids, vc_jax.cluster_order(found.labels, places)


def test_a_cold_clustering_is_kmeans_and_a_refresh_starts_from_the_last_centroids():
    _, states = trajectory(range(5))
    assert clear_of_edges(0)
    centroids, order = cluster(inputs(drift=0)[2], CONFIG.lloyd_steps)
    np.testing.assert_allclose(states[0].centroids, centroids, atol=1e-5)
    np.testing.assert_array_equal(states[0].permutation, order)
    centroids, order = cluster(inputs(drift=4)[2], CONFIG.warm_lloyd_steps, states[3].centroids)
    np.testing.assert_allclose(states[4].centroids, centroids, atol=1e-5)
    np.testing.assert_array_equal(states[4].permutation, order)


def test_the_first_step_is_the_call_without_a_state():
    for lengths in (FULL, RAGGED):
        plain = stateless(inputs(), lengths)
        read = stateless(inputs(), lengths, state=fresh())
        stepped, _ = step_at(inputs(), fresh(), 0, lengths)
        other = relative_l2(stateless(inputs(), lengths, config=UNSMOOTHED)[0], plain[0])
        for same in (read, stepped):
            assert relative_l2(same[0], plain[0]) < 0.3 * other
            np.testing.assert_allclose(same[1], plain[1], atol=1e-3)


def test_a_call_can_read_a_state_and_uses_its_order():
    _, states = trajectory([0])
    rng = np.random.default_rng(0)
    order = np.stack([rng.permutation(LENGTH) for _ in range(BATCH)])[:, None].astype(np.int32)
    state = states[0]._replace(permutation=jnp.asarray(order))
    read = stateless(inputs(), state=state)
    stepped, _ = step_at(inputs(), state, 1)
    other = relative_l2(read[0], stateless(inputs())[0])
    assert other > 1e-3
    assert relative_l2(read[0], stepped[0]) < 0.3 * other


def test_a_state_of_other_lengths_is_not_read():
    _, states = trajectory([0])
    plain = stateless(inputs(), RAGGED)[0]
    other = relative_l2(stateless(inputs(), RAGGED, config=UNSMOOTHED)[0], plain)
    assert relative_l2(stateless(inputs(), RAGGED, state=states[0])[0], plain) < 0.3 * other


def test_other_lengths_in_the_window_cluster_from_scratch():
    _, states = trajectory([0, 1, 2], lengths=[FULL, RAGGED, RAGGED])
    assert clusterings(states) == [0, 1]
    assert clear_of_edges(1, RAGGED)
    value = jnp.swapaxes(inputs(drift=1)[2], 1, 2)
    valid = jnp.asarray(oracles.prefix(RAGGED, LENGTH))[:, None]
    cold = vc_jax.kmeans(value, 3, steps=CONFIG.lloyd_steps, stride=STRIDE, valid=valid)
    np.testing.assert_allclose(states[1].centroids, cold.centroids, atol=1e-5)
    np.testing.assert_array_equal(states[1].permutation[1, 0, 200:], np.arange(200, 384))
    np.testing.assert_array_equal(states[1].key_valid, oracles.prefix(RAGGED, LENGTH))


def test_one_row_with_other_lengths_refreshes_the_whole_batch():
    _, states = trajectory([0, 1], lengths=[FULL, RAGGED])
    assert not np.array_equal(states[0].centroids[0], states[1].centroids[0])


def test_the_result_is_right_whatever_lengths_the_state_was_made_for():
    for step in (1, 20):
        _, states = trajectory([0], lengths=[np.array([17, 300], np.int32)])
        (out, lse), _ = step_at(inputs(), states[0], step, RAGGED)
        want, want_lse = oracles.attention(*inputs(), key_valid=oracles.prefix(RAGGED, LENGTH))
        assert relative_l2(out, want) < 0.03
        assert np.abs(np.asarray(lse) - want_lse).max() < 0.1


def test_after_the_window_the_last_order_is_used_without_means():
    _, states = trajectory(range(9))
    tensors = inputs(drift=20)
    (out, _), after = step_at(tensors, states[-1], 20)
    same_bytes(after, states[-1])
    order, mean = states[-1].permutation, vc_jax.mean_key(tensors[1])
    layout = prepare(*tensors, CONFIG, order=order, key_mean=mean, smooth=False)
    want, _ = vc_jax.reference_attention(layout, CONFIG)
    assert relative_l2(out, want) < 2e-3
    assert relative_l2(out, stateless(tensors, config=UNSMOOTHED)[0]) > 1e-4


@pytest.mark.parametrize("lengths", [FULL, RAGGED])
def test_a_first_call_after_the_window_runs_in_sequence_order_without_means(lengths):
    (out, lse), state = step_at(inputs(), fresh(), 20, lengths)
    want = stateless(inputs(), lengths, config=UNSMOOTHED)
    assert relative_l2(out, want[0]) < 0.3 * relative_l2(stateless(inputs(), lengths)[0], want[0])
    np.testing.assert_allclose(lse, want[1], atol=1e-3)
    assert clusterings([state]) == []


def test_other_lengths_after_the_window_run_in_sequence_order():
    _, states = trajectory([0])
    (out, _), state = step_at(inputs(), states[0], 30, RAGGED)
    want = stateless(inputs(), RAGGED, config=UNSMOOTHED)[0]
    assert relative_l2(out, want) < 0.3 * relative_l2(stateless(inputs(), RAGGED)[0], want)
    np.testing.assert_array_equal(state.centroids, states[0].centroids)


def test_a_state_first_used_after_the_window_clusters_from_scratch_when_a_new_run_begins():
    """Not from the zeros that it holds, which would put every token in one cluster."""
    _, state = step_at(inputs(), fresh(), 30)
    _, again = step_at(inputs(), state, 0)
    _, first = step_at(inputs(), fresh(), 0)
    same_bytes(again, first)


def test_batch_rows_do_not_reach_each_other():
    """The halves of classifier-free guidance are rows of one batch."""
    tensors = inputs()
    others = tuple(x.at[1].set(jnp.nan) for x in tensors)
    result, state = step_at(tensors, fresh(), 0)
    other, other_state = step_at(others, fresh(), 0)
    same_bytes(*(jax.tree.map(lambda x: x[0], r) for r in (result, other)))
    for field in ("permutation", "centroids", "key_valid"):
        same_bytes(getattr(state, field)[0], getattr(other_state, field)[0])


def test_bytes_of_padded_keys_do_not_reach_the_state():
    query, key, value = inputs()
    invalid = ~oracles.prefix(RAGGED, LENGTH)[:, :, None, None]
    clean = step_at((query, key, value), fresh(), 0, RAGGED)
    for garbage in (np.nan, np.inf, 1e30):
        dirty = (query, *(jnp.where(invalid, garbage, x) for x in (key, value)))
        same_bytes(clean, step_at(dirty, fresh(), 0, RAGGED))


def test_reset_forgets_the_order():
    _, states = trajectory([0])
    state = vc_jax.reset(states[0])
    assert jax.tree.structure(state) == jax.tree.structure(states[0])
    tensors = inputs(drift=1)
    same_bytes(step_at(tensors, state, 1)[0], step_at(tensors, fresh(), 1)[0])
    _, at_20 = step_at(tensors, state, 20)
    np.testing.assert_array_equal(at_20.permutation[0, 0], np.arange(LENGTH))


def test_high_precision_steps_are_the_bf16_preset_and_leave_the_state_alone():
    """Of 8 steps the first and the last two: the window's second step clusters instead."""
    schedule = DenoisingSchedule(8, high_precision_steps=(1, 2))
    plain = stateless(inputs(), config=vc_jax.PRESETS["bf16"])
    state, states = fresh(), []
    for step in range(8):
        result, new = step_at(inputs(), state, step, schedule=schedule)
        if step in (0, 6, 7):
            assert relative_l2(result[0], plain[0]) < 1e-6
            np.testing.assert_allclose(result[1], plain[1], atol=1e-6)
            same_bytes(new, state)
        else:
            assert relative_l2(result[0], plain[0]) > 1e-4
        state = new
        states.append(new)
    assert clusterings(states) == [1]


def test_one_layer_of_a_stack_is_updated_and_the_others_are_not():
    (out, _), one = step_at(inputs(), fresh(), 0)
    arguments = {"step": 0, "schedule": FORTY, "layer": 1, "config": CONFIG}
    got, stack = vc_jax.attention_step(
        *inputs(),
        fresh(layers=3),
        key_value_seq_lengths=FULL,
        return_residual=True,
        **arguments,
    )
    assert clear_of_edges(0)
    assert relative_l2(got[0], out) < 3e-3
    layer = jax.tree.map(lambda x: x[1], stack)
    np.testing.assert_allclose(layer.centroids, one.centroids, atol=1e-4)
    same_bytes(layer._replace(centroids=one.centroids), one)
    for i in (0, 2):
        same_bytes(jax.tree.map(lambda x, i=i: x[i], stack), fresh())


def test_clustering_sits_in_the_branch_of_a_conditional_and_nowhere_else():
    """One scalar decides for the batch; a batched predicate would cluster at every step."""

    def clustering_outside(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "argmin":
                yield equation
            if equation.primitive.name != "cond":
                for inner in jax.extend.core.jaxprs_in_params(equation.params):
                    yield from clustering_outside(inner)

    call = functools.partial(step_at, inputs(), lengths=jnp.asarray(FULL))
    jaxpr = jax.make_jaxpr(lambda state, step: call(state, step))(fresh(), jnp.int32(0)).jaxpr
    conditionals = [e for e in jaxpr_equations(jaxpr) if e.primitive.name == "cond"]
    assert any("argmin" in str(e.params["branches"]) for e in conditionals)
    assert all(e.invars[0].aval.shape == () for e in conditionals)
    assert not list(clustering_outside(jaxpr))


def test_two_sets_of_keys_take_two_states():
    """LongCat attends to the video and to its condition with one set of queries."""
    states = [fresh(), fresh()]
    for step in range(2):
        for i, seed in enumerate((0, 7)):
            _, states[i] = step_at(inputs(seed, drift=step), states[i], step)
    assert not np.array_equal(states[0].permutation, states[1].permutation)
    _, alone = step_at(inputs(7, drift=0), fresh(), 0)
    same_bytes(states[1], alone)
