"""On several devices, and lowered for others. For jit, vmap and scan see `tests/promises`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import vc_jax
from vc_jax import AttentionConfig, DenoisingSchedule, _dispatch

from . import oracles
from .cases import PRESETS, relative_l2, video_like

CONFIG = AttentionConfig(clusters=2, lloyd_steps=1)
INPUTS = video_like(0, 2, 4, 130, 2, 2, 16)
LENGTHS = jnp.array([130, 67])
attention = functools.partial(vc_jax.dot_product_attention, config=CONFIG)
needs_two = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")


@jax.jit
def direct(query, key, value, lengths, scale=0.25):
    return attention(query, key, value, key_value_seq_lengths=lengths, scale=scale)


def loss(call):
    """Gradients through `call(query, key, value)` against fixed weights."""
    weights = jnp.asarray(np.random.default_rng(1).normal(size=INPUTS[0].shape), jnp.float32)

    def total(*tensors):
        out = call(*tensors)
        return jnp.sum(out * weights), out

    return jax.value_and_grad(total, (0, 1, 2), has_aux=True)


def agree(got, want, bound=2e-3):
    for first, second in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_l2(first, second) < bound


@functools.cache
def unsharded():
    return jax.jit(loss(lambda q, k, v: direct(q, k, v, LENGTHS)))(*INPUTS)


def mesh():
    return jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


SPECS = {
    "batch": (PartitionSpec("x"), PartitionSpec("x"), PartitionSpec("x")),
    "heads": (PartitionSpec(None, None, "x"), PartitionSpec(None, None, "x"), PartitionSpec()),
    "rows": (PartitionSpec(None, "x"), PartitionSpec(), PartitionSpec()),
}


@needs_two
@pytest.mark.parametrize(("axis", "check_vma"), [("batch", True), ("heads", False), ("rows", True)])
def test_sharding_by_shard_map_gives_the_unsharded_result_and_gradients(axis, check_vma):
    rows, keys, lengths = SPECS[axis]
    sharded = jax.shard_map(
        direct,
        mesh=mesh(),
        in_specs=(rows, keys, keys, lengths),
        out_specs=rows,
        check_vma=check_vma,
    )
    got, gradients = jax.jit(loss(lambda q, k, v: sharded(q, k, v, LENGTHS)))(*INPUTS)
    want, want_gradients = unsharded()
    agree(got, want)
    agree(gradients, want_gradients)


@needs_two
@pytest.mark.parametrize("name", ["bf16", "nvfp4"])
def test_other_presets_go_through_shard_map_with_their_axes_checked(name):
    rows, keys, _ = SPECS["rows"]
    call = functools.partial(vc_jax.dot_product_attention, config=name, return_residual=True)
    sharded = jax.shard_map(
        call, mesh=mesh(), in_specs=(rows, keys, keys), out_specs=(rows, rows), check_vma=True
    )
    out, lse = jax.jit(sharded)(*INPUTS)
    want, want_lse = oracles.attention(*INPUTS)
    assert relative_l2(out, want) < {"bf16": 1e-6, "nvfp4": 0.08}[name]
    assert np.abs(np.asarray(lse) - want_lse).max() < 0.3


@needs_two
def test_gradients_taken_inside_shard_map_are_summed_over_what_was_replicated():
    rows, keys, _ = SPECS["rows"]

    def inside(query, key, value, weights):
        return jax.grad(lambda k: jnp.sum(attention(query, k, value, scale=0.25) * weights))(key)

    weights = np.random.default_rng(3).normal(size=INPUTS[0].shape).astype(np.float32)
    sharded = jax.shard_map(inside, mesh=mesh(), in_specs=(rows, keys, keys, rows), out_specs=keys)
    _, want, _, _ = oracles.attention_gradient(
        *INPUTS,
        weights,
        scale=0.25,
        key_valid=np.ones((2, 130), bool),
        query_valid=np.ones((2, 4), bool),
    )
    assert relative_l2(jax.jit(sharded)(*INPUTS, weights), want) < 1e-5


STATE_SPECS = {
    "batch": (PartitionSpec("x"),) * 5,
    "heads": (
        PartitionSpec(None, None, "x"),
        *(PartitionSpec(None, "x"),) * 2,
        *(PartitionSpec(),) * 2,
    ),
}


def denoise(query, key, value, state):
    """Four steps of a scan: a clustering, a reuse, one after the window, one in high precision."""
    schedule = DenoisingSchedule(8, high_precision_steps=(0, 1))

    def body(state, step):
        out, state = vc_jax.attention_step(
            query, key, value + step, state, step=step, schedule=schedule, config=CONFIG
        )
        return state, out

    return jax.lax.scan(body, state, jnp.array([0, 1, 5, 7]))


def sharded_denoise(axis, check_vma):
    tokens, *fields = STATE_SPECS[axis]
    specs = vc_jax.AttentionState(*fields)
    return jax.shard_map(
        denoise,
        mesh=mesh(),
        in_specs=(tokens, tokens, tokens, specs),
        out_specs=(specs, PartitionSpec(None, *tokens)),
        check_vma=check_vma,
    )


@functools.cache
def denoised():
    return jax.jit(denoise)(*INPUTS, vc_jax.init_state(CONFIG, 2, 130, 2, 16))


@needs_two
@pytest.mark.parametrize(("axis", "check_vma"), [("batch", True), ("heads", False)])
def test_steps_with_their_state_go_through_shard_map(axis, check_vma):
    state = vc_jax.init_state(CONFIG, 2, 130, 2, 16)
    got, outs = jax.jit(sharded_denoise(axis, check_vma))(*INPUTS, state)
    want, unsharded_outs = denoised()
    assert relative_l2(outs, unsharded_outs) < 2e-3
    np.testing.assert_array_equal(got.permutation, want.permutation)
    np.testing.assert_array_equal(got.made, want.made)


@needs_two
@pytest.mark.parametrize(("axis", "check_vma"), [("batch", False), ("heads", True)])
def test_steps_with_their_state_trace_under_shard_map(axis, check_vma):
    state = vc_jax.init_state(CONFIG, 2, 130, 2, 16)
    new, outs = jax.eval_shape(sharded_denoise(axis, check_vma), *INPUTS, state)
    assert outs.shape == (4, *INPUTS[0].shape)
    assert jax.tree.structure(new) == jax.tree.structure(state)


@needs_two
def test_automatic_partitioning_gives_the_unsharded_result():
    place = NamedSharding(mesh(), PartitionSpec("x"))
    sharded = [jax.device_put(x, place) for x in INPUTS]
    out = direct(*sharded, jax.device_put(LENGTHS, place))
    assert relative_l2(out, unsharded()[0][1]) < 2e-3


@pytest.mark.parametrize("name", PRESETS)
def test_a_call_lowers_for_a_gpu_on_a_machine_without_one(name):
    def call(query, key, value, lengths):
        out = vc_jax.dot_product_attention(
            query, key, value, config=name, key_value_seq_lengths=lengths
        )
        return jnp.sum(out.astype(jnp.float32) ** 2)

    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in INPUTS]
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    traced = jax.jit(jax.value_and_grad(call, (0, 1, 2))).trace(*shapes, lengths)
    assert "stablehlo" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_call_outside_of_jit_compiles_once():
    """Its loops would be compiled anew each time if nothing inside were jitted."""
    attention(*INPUTS, key_value_seq_lengths=LENGTHS)
    before = _dispatch.forward._cache_size()
    for lengths in ([130, 1], [2, 3]):
        attention(*INPUTS, key_value_seq_lengths=jnp.array(lengths))
    assert _dispatch.forward._cache_size() == before
