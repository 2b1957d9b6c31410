"""The model: shapes, the scan, the attention argument, RoPE."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vc_jax.models.video_dit.model import (
    HeadRMSNorm,
    VideoDiT,
    VideoDiTConfig,
    create_video_dit,
    cut_patches,
    default_attention,
    join_patches,
    time_features,
)
from vc_jax.models.video_dit.rope import apply_rope, rope_table

TINY = VideoDiTConfig(
    width=32, num_layers=3, num_heads=2, head_dim=16, mlp_width=64, compute_dtype="float32"
)


@pytest.fixture(scope="module")
def model(random_model) -> VideoDiT:
    return random_model(TINY)


@pytest.fixture(scope="module")
def velocity(model):
    """The jitted model for videos of one size, so that it compiles once for many tests."""
    return jax.jit(lambda video, t: model(video, t))


def some_video(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (*shape, 3))


def test_default_config_has_at_most_eight_million_parameters():
    model = nnx.eval_shape(lambda: VideoDiT(VideoDiTConfig(), rngs=nnx.Rngs(0)))
    parameters = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(array.size for array in parameters) <= 8_000_000
    assert {array.dtype for array in parameters} == {np.dtype("float32")}


@pytest.mark.parametrize("shape", [(2, 4, 8, 12), (1, 1, 4, 4)])
def test_any_size_that_the_patch_divides_gives_a_float32_velocity(model, shape):
    video = some_video(*shape).astype(jnp.bfloat16)
    velocity = model(video, jnp.full(shape[:2], 0.5))
    assert velocity.shape == video.shape
    assert velocity.dtype == jnp.float32
    assert np.all(np.isfinite(velocity))


@pytest.mark.parametrize(
    ("video", "t", "message"),
    [
        ((1, 2, 8, 8, 4), (1, 2), "video must be"),
        ((2, 8, 8, 3), (1, 2), "video must be"),
        ((1, 2, 8, 10, 3), (1, 2), "multiples of the patch"),
        ((1, 2, 2, 8, 3), (1, 2), "at least 1 frame"),
        ((1, 2, 8, 8, 3), (1, 3), "t must be"),
        ((1, 2, 8, 8, 3), (1,), "t must be"),
    ],
)
def test_shapes_that_do_not_fit_are_named(model, video, t, message):
    with pytest.raises(ValueError, match=message):
        model(jnp.zeros(video), jnp.zeros(t))


def test_join_patches_undoes_cut_patches():
    video = some_video(2, 3, 8, 12)
    tokens = cut_patches(video, 4)
    assert tokens.shape == (2, 3, 6, 48)
    np.testing.assert_array_equal(tokens[1, 2, 4].reshape(4, 4, 3), video[1, 2, 4:8, 4:8])
    np.testing.assert_array_equal(join_patches(tokens, 8, 12, 4), video)


def test_scanned_layers_equal_a_plain_loop_over_blocks(model):
    """The scan hands layer i the i-th slice of the stacked parameters, in order."""
    video, t = some_video(1, 2, 8, 8), jnp.full((1, 2), 0.4)
    config = model.config
    rope = rope_table(config.grid(2, 8, 8), config.head_dim, config.rope_theta)
    streams = []
    _, inputs = model.attention_inputs(video, t)
    time = jax.nn.silu(model.time_out(jax.nn.silu(model.time_in(time_features(t)))))
    modulation = model.modulation(time).reshape(1, 2, 6, config.width)
    x = model.embed(cut_patches(video, config.patch))
    definition, parameters = nnx.split(model.blocks)
    for layer in range(config.num_layers):
        block = nnx.merge(definition, jax.tree.map(lambda leaf, i=layer: leaf[i], parameters))
        x, seen = block(x, modulation, rope, lambda i: (default_attention(*i), i))
        streams.append(seen)
    for name in ("query", "key", "value"):
        looped = jnp.stack([getattr(seen, name) for seen in streams])
        np.testing.assert_allclose(getattr(inputs, name), looped, atol=2e-5)


def test_collecting_attention_inputs_does_not_change_the_velocity(model, velocity):
    video, t = some_video(1, 3, 8, 8), jnp.full((1, 3), 0.4)
    collected, inputs = model.attention_inputs(video, t)
    np.testing.assert_allclose(collected, velocity(video, t), atol=1e-5)
    assert inputs.query.shape == inputs.key.shape == inputs.value.shape == (3, 1, 12, 2, 16)


def test_queries_and_keys_have_unit_rms_per_head():
    norm = HeadRMSNorm(16)
    x = 7.0 * jax.random.normal(jax.random.key(0), (2, 3, 2, 16))
    np.testing.assert_allclose(jnp.mean(jnp.square(norm(x)), axis=-1), 1.0, atol=1e-3)


def test_keys_do_not_grow_with_the_video(model):
    video, t = some_video(1, 3, 8, 8), jnp.full((1, 3), 0.4)
    _, inputs = model.attention_inputs(video, t)
    _, larger = model.attention_inputs(100.0 * video, t)
    bound = 4.0 * float(jnp.abs(model.blocks.attention.key_norm.scale[...]).max())
    assert float(jnp.abs(larger.key).max()) <= bound
    assert float(jnp.abs(inputs.key).max()) <= bound


def test_attention_inputs_have_the_compute_dtype(random_model):
    config = VideoDiTConfig(width=32, num_layers=1, num_heads=1, head_dim=16, mlp_width=32)
    model = random_model(config)
    _, inputs = model.attention_inputs(some_video(1, 1, 4, 8), jnp.full((1, 1), 0.4))
    assert inputs.query.dtype == inputs.value.dtype == jnp.bfloat16


def test_the_attention_argument_is_used(model, velocity):
    video, t = some_video(1, 3, 8, 8), jnp.full((1, 3), 0.4)

    def nothing(query, key, value):
        return jnp.zeros_like(query)

    without = model(video, t, attention=nothing)
    assert float(jnp.abs(velocity(video, t) - without).max()) > 1e-3
    explicit = functools.partial(jax.nn.dot_product_attention, implementation="xla")
    np.testing.assert_allclose(velocity(video, t), model(video, t, attention=explicit), atol=1e-5)


def test_stateful_attention_sees_every_layer_once_in_order(model, velocity):
    video, t = some_video(1, 3, 8, 8), jnp.full((1, 3), 0.4)

    def attention(query, key, value, state, layer):
        seen, calls = state
        out = default_attention(query, key, value)
        return out, (seen.at[calls].set(layer), calls + 1)

    start = (jnp.full(5, -1), jnp.int32(0))
    stateful, (seen, calls) = jax.jit(
        lambda state: model.with_state(video, t, state, attention=attention)
    )(start)
    assert calls == 3
    np.testing.assert_array_equal(seen, [0, 1, 2, -1, -1])
    np.testing.assert_allclose(stateful, velocity(video, t), atol=1e-5)


def test_clean_frames_inform_the_noisy_ones(velocity):
    video = some_video(1, 3, 8, 8)
    t = jnp.array([[0.0, 0.8, 0.8]])
    other = video.at[:, 0].add(1.0)
    change = velocity(other, t)[:, 1:] - velocity(video, t)[:, 1:]
    assert float(jnp.abs(change).max()) > 1e-3


def test_a_clean_frame_is_told_apart_from_an_almost_clean_one(velocity):
    video = some_video(1, 3, 8, 8)
    exact = velocity(video, jnp.array([[0.0, 0.8, 0.8]]))
    almost = velocity(video, jnp.array([[1e-6, 0.8, 0.8]]))
    assert float(jnp.abs(exact - almost)[:, 1:].max()) > 1e-4


def test_each_frame_has_its_own_timestep(velocity):
    video = some_video(1, 3, 8, 8)
    first = velocity(video, jnp.array([[0.5, 0.5, 0.5]]))
    second = velocity(video, jnp.array([[0.5, 0.5, 0.9]]))
    assert float(jnp.abs(first - second)[:, 2].max()) > 1e-2


def test_untrained_output_is_the_best_linear_velocity():
    """With a zero output layer the velocity is the least-squares guess from the pixel alone.

    Of pixels of standard deviation s, cov(x_t, noise - x) / var(x_t) of x_t = (1-t)·x + t·noise.
    """
    model = jax.jit(create_video_dit(TINY))
    noisy = some_video(4, 4, 16, 16)
    for t in (0.0, 0.1, 0.5, 0.9, 1.0):
        slope = (t - (1 - t) * 0.5**2) / ((1 - t) ** 2 * 0.5**2 + t**2)
        velocity = model(noisy, jnp.full((4, 4), t))
        np.testing.assert_allclose(velocity, slope * noisy, rtol=1e-5, atol=1e-5)


def test_rope_scores_depend_on_relative_positions_only():
    """q at p and k at p + d score the same for every p, along each axis."""
    grid = (4, 5, 6)
    table = rope_table(grid, 16)
    query, key = jax.random.normal(jax.random.key(0), (2, 16))
    everywhere = jnp.ones((1, 4 * 5 * 6, 1, 1))
    turned_query = apply_rope(everywhere * query, table)[0, :, 0].reshape(*grid, 16)
    turned_key = apply_rope(everywhere * key, table)[0, :, 0].reshape(*grid, 16)
    for d in ((1, 0, 0), (0, 2, 0), (0, 0, 3), (2, 1, 4)):
        inner = tuple(slice(0, n - s) for n, s in zip(grid, d, strict=True))
        moved = tuple(slice(s, n) for n, s in zip(grid, d, strict=True))
        scores = jnp.sum(turned_query[inner] * turned_key[moved], axis=-1)
        np.testing.assert_allclose(scores, scores[0, 0, 0], atol=1e-4)
        assert abs(float(scores[0, 0, 0] - query @ key)) > 1e-3


def test_rope_keeps_norms_and_leaves_the_first_token_alone():
    x = jax.random.normal(jax.random.key(0), (2, 2 * 3 * 4, 2, 12))
    turned = apply_rope(x, rope_table((2, 3, 4), 12))
    np.testing.assert_allclose(turned[:, 0], x[:, 0], atol=1e-6)
    np.testing.assert_allclose(
        jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5
    )


@pytest.mark.parametrize("head_dim", [7, 4])
def test_rope_rejects_a_head_it_cannot_share_out(head_dim):
    with pytest.raises(ValueError, match="head_dim"):
        rope_table((1, 1, 1), head_dim)
