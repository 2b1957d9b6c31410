"""The state as a pytree: its structure, where it can be kept, and what is refused."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from flax import linen, nnx, serialization

import vc_jax
from vc_jax import AttentionConfig

from . import oracles
from .cases import relative_l2, same_bytes
from .steps import (
    BATCH,
    CONFIG,
    FORTY,
    KV_HEADS,
    LENGTH,
    RAGGED,
    ROWS,
    SIZE,
    UNSMOOTHED,
    fresh,
    inputs,
    stateless,
    step_at,
    trajectory,
)


def test_the_state_has_a_fixed_structure_without_none_and_the_documented_size():
    for layers in (None, 3):
        state = fresh(layers=layers)
        lead = () if layers is None else (3,)
        assert state.permutation.shape == (*lead, BATCH, KV_HEADS, LENGTH)
        assert state.permutation.dtype == jnp.int32
        assert state.permutation.nbytes == 4 * BATCH * KV_HEADS * LENGTH * (layers or 1)
        assert len(jax.tree.leaves(state)) == len(
            jax.tree.leaves(state, is_leaf=lambda x: x is None)
        )
    abstract = jax.eval_shape(lambda: fresh())
    for step in (0, 4, 20):
        _, new = step_at(inputs(), fresh(), step, RAGGED)
        assert jax.tree.structure(new) == jax.tree.structure(abstract)
        for got, want in zip(jax.tree.leaves(new), jax.tree.leaves(abstract)):
            assert (got.shape, got.dtype, got.weak_type) == (want.shape, want.dtype, want.weak_type)


@pytest.mark.parametrize("config", ["bf16", UNSMOOTHED])
def test_a_configuration_that_does_not_cluster_has_a_small_state_and_runs(config):
    state = vc_jax.init_state(config, BATCH, LENGTH, KV_HEADS, SIZE)
    assert sum(x.nbytes for x in jax.tree.leaves(state)) <= BATCH * (4 * KV_HEADS * (SIZE + 1) + 2)
    resolved = vc_jax.PRESETS["bf16"] if config == "bf16" else config
    result, new = step_at(inputs(), state, 0, config=resolved)
    same_bytes(new, state)
    want = stateless(inputs(), config=resolved)
    assert relative_l2(result[0], want[0]) < 3e-3
    np.testing.assert_allclose(result[1], want[1], atol=1e-3)


def test_a_state_goes_through_donation_and_gradients():
    tensors = inputs()

    def loss(query, key, value, state):
        out, state = vc_jax.attention_step(
            query, key, value, state, step=0, schedule=FORTY, config=CONFIG
        )
        return jnp.sum(jnp.square(out)), state

    run = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True), donate_argnums=3)
    state = fresh()
    gradients, new = run(*tensors, state)
    assert state.permutation.is_deleted()
    assert new.made.all()
    (out, _), _ = step_at(tensors, fresh(), 0)
    want = oracles.attention_gradient(
        *tensors,
        2 * np.asarray(out),
        scale=0.25,
        key_valid=np.ones((BATCH, LENGTH), bool),
        query_valid=np.ones((BATCH, ROWS), bool),
    )
    for got, expected in zip(gradients, want):
        assert relative_l2(got, expected) < 1e-3


@pytest.mark.parametrize(
    "state",
    [
        vc_jax.init_state(CONFIG, 1, LENGTH, KV_HEADS, SIZE),
        vc_jax.init_state(CONFIG, BATCH, LENGTH + 1, KV_HEADS, SIZE),
        vc_jax.init_state(CONFIG, BATCH, LENGTH, 2, SIZE),
        vc_jax.init_state(CONFIG, BATCH, LENGTH, KV_HEADS, 32),
        vc_jax.init_state(AttentionConfig(clusters=4), BATCH, LENGTH, KV_HEADS, SIZE),
        vc_jax.init_state("bf16", BATCH, LENGTH, KV_HEADS, SIZE),
        vc_jax.init_state(CONFIG, BATCH, LENGTH, KV_HEADS, SIZE, layers=2),
    ],
    ids=["batch", "length", "heads", "size", "clusters", "config", "layers"],
)
def test_a_state_made_for_other_shapes_is_refused(state):
    with pytest.raises(ValueError, match="state"):
        vc_jax.attention_step(*inputs(), state, step=0, schedule=FORTY, config=CONFIG)
    with pytest.raises(ValueError, match="state"):
        vc_jax.dot_product_attention(*inputs(), config=CONFIG, state=state)
    with pytest.raises(ValueError, match="state"):
        vc_jax.explain(*inputs(), config=CONFIG, state=state)


def test_wrong_arguments_of_a_step_are_named():
    call = functools.partial(vc_jax.attention_step, *inputs(), config=CONFIG)
    wrong = [
        (TypeError, "step", {"step": 1.0, "schedule": FORTY}),
        (TypeError, "step", {"step": jnp.arange(2), "schedule": FORTY}),
        (ValueError, "step", {"step": 40, "schedule": FORTY}),
        (ValueError, "step", {"step": -1, "schedule": FORTY}),
        (TypeError, "schedule", {"step": 0, "schedule": 40}),
        (NotImplementedError, "bias", {"step": 0, "schedule": FORTY, "bias": jnp.zeros(1)}),
        (NotImplementedError, "is_causal", {"step": 0, "schedule": FORTY, "is_causal": True}),
        (ValueError, "state", {"step": 0, "schedule": FORTY, "layer": 0}),
    ]
    for error, name, arguments in wrong:
        with pytest.raises(error, match=name):
            call(fresh(), **arguments)
    with pytest.raises(TypeError, match="state"):
        call({"permutation": 0}, step=0, schedule=FORTY)
    for layer in (3, -1):
        with pytest.raises(ValueError, match="layer"):
            call(fresh(layers=3), step=0, schedule=FORTY, layer=layer)
    for name in ("batch", "kv_length", "kv_heads", "head_dim", "layers"):
        sizes = {"batch": 1, "kv_length": 1, "kv_heads": 1, "head_dim": 1, "layers": 1}
        with pytest.raises(ValueError, match=name):
            vc_jax.init_state(CONFIG, **(sizes | {name: 0}))


def step_of(cache):
    (out, _), cache = step_at(inputs(), cache, 0)
    return out, cache


def test_a_state_is_a_variable_of_an_nnx_module():
    class Layer(nnx.Module):
        def __init__(self):
            self.cache = nnx.data(nnx.Variable(fresh()))

        def __call__(self):
            out, new = step_of(self.cache.get_value())
            self.cache.set_value(new)
            return out

    graph, variables = nnx.split(Layer())
    layer = nnx.merge(graph, variables)
    layer()
    _, want = step_of(fresh())
    same_bytes(layer.cache.get_value(), want)
    graph, variables = nnx.split(layer)
    jitted = jax.jit(lambda v: nnx.split(nnx.merge(graph, v))[1])
    same_bytes(jitted(variables), variables)


def test_a_state_lies_in_a_linen_collection():
    class Layer(linen.Module):
        @linen.compact
        def __call__(self):
            cache = self.variable("vc_cache", "state", fresh)
            out, cache.value = step_of(cache.value)
            return out

    _, updated = Layer().apply({"vc_cache": {"state": fresh()}}, mutable=["vc_cache"])
    same_bytes(updated["vc_cache"]["state"], step_of(fresh())[1])


def test_a_state_goes_through_a_checkpoint(tmp_path):
    _, states = trajectory([0])
    same_bytes(states[0], saved_and_restored(tmp_path, states[0]))


def saved_and_restored(path, state, sharding=None):
    def place(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding)

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "state", jax.tree.map(place, state))


@pytest.mark.parametrize("config", vc_jax.PRESETS)
def test_a_state_of_any_preset_is_saved_and_restored_on_another_mesh(config, tmp_path):
    state = vc_jax.init_state(config, 2, LENGTH, KV_HEADS, SIZE)
    assert all(x.size for x in jax.tree.leaves(state))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    restored = saved_and_restored(tmp_path, state, sharding)
    same_bytes(state, restored)
    assert {x.sharding for x in jax.tree.leaves(restored)} == {sharding}
    same_bytes(state, pickle.loads(pickle.dumps(state)))
    same_bytes(state, copy.deepcopy(state))


def test_a_state_in_a_linen_collection_can_be_serialised_by_flax():
    _, states = trajectory([0])
    data = serialization.to_bytes({"vc_cache": {"state": states[0]}})
    restored = serialization.from_bytes({"vc_cache": {"state": fresh()}}, data)
    same_bytes(states[0], restored["vc_cache"]["state"])
