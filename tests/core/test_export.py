"""`jax.export` with a symbolic batch and a symbolic number of queries, serialised and called."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import vc_jax
from tests.core import oracles

S, HEADS, SIZE = 200, 2, 64
TOLERANCE = {"bf16": 1e-5, "int8": 0.05, "fp8": 0.1, "nvfp4": 0.3}


def abstract(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def tensors(batch, rows, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(batch, n, HEADS, SIZE) for n in (rows, S, S)]
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]


def reloaded(function, *arguments):
    return export.deserialize(export.export(jax.jit(function))(*arguments).serialize())


def error(out, q, k, v):
    exact, _ = oracles.attention(q, k, v)
    return np.linalg.norm(out - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("config", vc_jax.PRESETS)
def test_attention_for_any_batch_and_number_of_queries(config):
    b, t = export.symbolic_shape("b, t")
    keys = abstract(b, S, HEADS, SIZE)
    mask, lengths = abstract(b, 1, 1, S, dtype=bool), abstract(b, dtype=jnp.int32)

    def attention(q, k, v, mask, lengths):
        return vc_jax.dot_product_attention(
            q, k, v, None, mask, config=config, key_value_seq_lengths=lengths
        )

    function = reloaded(attention, abstract(b, t, HEADS, SIZE), keys, keys, mask, lengths)
    for batch, rows in ((1, 5), (2, 130)) if config in ("bf16", "int8") else ((2, 130),):
        q, k, v = tensors(batch, rows)
        out = function.call(q, k, v, jnp.ones((batch, 1, 1, S), bool), jnp.full(batch, S))
        assert error(out, q, k, v) < TOLERANCE[config]


def test_a_gradient_for_any_batch_and_number_of_queries():
    b, t = export.symbolic_shape("b, t")
    keys = abstract(b, S, HEADS, SIZE)
    gradient = jax.grad(lambda *x: vc_jax.dot_product_attention(*x, config="bf16").sum())
    function = reloaded(gradient, abstract(b, t, HEADS, SIZE), keys, keys)
    arrays = tensors(2, 7)
    want = jax.grad(lambda q, k, v: vc_jax.plain_attention(q, k, v)[0].sum())(*arrays)
    np.testing.assert_allclose(function.call(*arrays), want, atol=1e-5)


@pytest.mark.parametrize("config", ["bf16", "int8"])
def test_steps_with_their_state(config):
    b, t = export.symbolic_shape("b, t")
    keys = abstract(b, S, HEADS, SIZE)
    schedule = vc_jax.DenoisingSchedule(8, high_precision_steps=(0, 1))
    state = jax.eval_shape(lambda q: vc_jax.init_state(config, q.shape[0], S, HEADS, SIZE), keys)

    def run(q, k, v, state, step):
        return vc_jax.attention_step(q, k, v, state, step=step, schedule=schedule, config=config)

    arguments = (abstract(b, t, HEADS, SIZE), keys, keys, state, abstract(dtype=jnp.int32))
    function = reloaded(run, *arguments)
    arrays = tensors(2, 130)
    state = vc_jax.init_state(config, 2, S, HEADS, SIZE)
    for step in (0, 3, 7):
        out, state = function.call(*arrays, state, jnp.int32(step))
        assert isinstance(state, vc_jax.AttentionState)
        assert error(out, *arrays) < (1e-5 if step == 7 else TOLERANCE[config])
    assert state.made.all() == (config == "int8")


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_a_symbol_that_cannot_be_one_is_named(axis):
    (n,) = export.symbolic_shape("n")
    shape = [2, S, HEADS, SIZE]
    shape[axis] = n
    with pytest.raises(ValueError, match=r"^(query|key) must have fixed"):
        vc_jax.explain(abstract(2, 8, *shape[2:]), abstract(*shape), abstract(*shape))


@jax.jit
def examples():
    """One of each kind."""
    q, k, v = tensors(1, 8)
    prepared = vc_jax.prepare(q, k, v, "fp8")
    return (
        vc_jax.init_state("int8", 1, S, HEADS, SIZE),
        vc_jax.kmeans(v, 2, steps=0),
        vc_jax.quantize_int8(q),
        vc_jax.quantize_nvfp4(q),
        prepared,
        vc_jax.prepare(q, k, v, "nvfp4"),
        vc_jax.restore(prepared),
    )


def test_public_pytrees_are_serialised():
    kinds = {
        name
        for name in vc_jax.__all__
        if inspect.isclass(kind := getattr(vc_jax, name))
        and (hasattr(kind, "_fields") or kind is vc_jax.Prepared8)
    }
    trees = examples()
    assert {type(tree).__name__ for tree in trees} == kinds
    function = reloaded(lambda *trees: trees, *jax.tree.map(jax.typeof, trees))
    got = function.call(*trees)
    assert jax.tree.structure(got) == jax.tree.structure(trees)
    jax.tree.map(np.testing.assert_array_equal, got, trees)
