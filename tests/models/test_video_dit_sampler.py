"""Rectified flow and its sampler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vc_jax.models.video_dit import VideoDiT, VideoDiTConfig, default_attention, flow, sampler

TINY = VideoDiTConfig(width=24, num_layers=2, num_heads=1, head_dim=12, mlp_width=32)


@pytest.fixture(scope="module")
def model(random_model) -> VideoDiT:
    return random_model(TINY)


def plain(query, key, value, state, *, layer, step):
    return default_attention(query, key, value), state


class Oracle:
    """Knows the video and gives the exact velocity from any noisy point of the line to it."""

    def __init__(self, video):
        self.video = video

    def with_state(self, noisy, times, state, *, attention):
        t = jnp.maximum(times, 1e-6)[:, :, None, None, None]
        noise = (noisy - (1 - t) * self.video) / t
        return noise - self.video, state


def test_time_grid_runs_from_noise_to_video():
    for shift in (1.0, 3.0):
        times = sampler.time_grid(10, shift)
        assert times[0] == 1.0
        assert times[-1] == 0.0
        assert np.all(np.diff(times) < 0)
    np.testing.assert_allclose(sampler.time_grid(4, 1.0), [1, 0.75, 0.5, 0.25, 0])
    np.testing.assert_allclose(sampler.time_grid(2, 3.0), [1, 0.75, 0])


def test_time_grid_needs_a_step():
    with pytest.raises(ValueError, match="num_steps"):
        sampler.time_grid(0)


@pytest.mark.parametrize("steps", [1, 7])
def test_exact_velocity_is_followed_to_the_video(steps):
    video = jax.random.normal(jax.random.key(0), (2, 3, 4, 4, 3))
    given = sampler.given_first(video[:, :1], 3)
    noise = sampler.draw_noise(1, video.shape)
    sampled, _ = sampler.sample_given(
        Oracle(video), given, noise, sampler.time_grid(steps), None, attention=plain
    )
    np.testing.assert_allclose(sampled, video, atol=1e-4)


@pytest.mark.parametrize("count", [1, 3])
def test_condition_frames_stay_exactly_clean(model, count):
    condition = jax.random.uniform(jax.random.key(0), (2, count, 8, 8, 3), minval=-1)
    noise = sampler.draw_noise(1, (2, 4, 8, 8, 3))
    video = sampler.continue_clip(model, condition, noise, num_steps=3)
    np.testing.assert_array_equal(video[:, :count], condition)
    assert np.all(np.isfinite(video))
    assert float(jnp.abs(video[:, count:] - noise[:, count:]).max()) > 0.1


def test_noise_under_the_condition_frames_is_irrelevant(model):
    condition = jnp.zeros((1, 2, 8, 8, 3))
    noise = sampler.draw_noise(1, (1, 4, 8, 8, 3))
    run = jax.jit(lambda noise: sampler.continue_clip(model, condition, noise, num_steps=2))
    first, second = run(noise), run(noise.at[:, :2].set(9.0))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("count", [0, 4])
def test_condition_must_leave_something_to_sample(model, count):
    with pytest.raises(ValueError, match="condition"):
        sampler.continue_clip(model, jnp.zeros((1, count, 8, 8, 3)), jnp.zeros((1, 4, 8, 8, 3)))


def test_attention_state_sees_every_layer_of_every_step_in_one_compilation(model):
    traces = []

    def attention(query, key, value, state, *, layer, step):
        traces.append(None)
        return default_attention(query, key, value), state.at[step, layer].add(1)

    given = sampler.given_first(jnp.zeros((1, 1, 8, 8, 3)), 3)

    @jax.jit
    def run(noise):
        return sampler.sample_given(
            model, given, noise, sampler.time_grid(5), jnp.zeros((5, 2)), attention=attention
        )

    _, visits = run(sampler.draw_noise(0, (1, 3, 8, 8, 3)))
    np.testing.assert_array_equal(visits, np.ones((5, 2)))
    assert len(traces) <= 2


def test_training_timesteps_cover_the_ends():
    t = flow.sample_timesteps(jax.random.key(0), 20_000)
    assert float(t.min()) > 0.0
    assert float(t.max()) < 1.0
    for low, high in ((0.0, 0.1), (0.9, 1.0), (0.4, 0.6)):
        assert float(jnp.mean((t > low) & (t < high))) > 0.015


def test_condition_counts_follow_their_shares():
    counts = flow.sample_condition_counts(jax.random.key(0), 20_000, 16)
    shares = np.bincount(counts, minlength=5) / 20_000
    assert shares[0] == 0
    np.testing.assert_allclose(shares[1:], flow.CONDITION_SHARES, atol=0.02)


def test_a_frame_is_always_left_to_predict():
    counts = flow.sample_condition_counts(jax.random.key(0), 1000, 3)
    assert set(np.unique(counts)) == {1, 2}


def test_noise_leaves_condition_frames_clean_and_ends_as_noise():
    video = jnp.ones((2, 4, 4, 4, 3))
    noise = jax.random.normal(jax.random.key(0), video.shape)
    times = flow.frame_times(jnp.array([0.5, 1.0]), jnp.array([1, 3]), 4)
    np.testing.assert_array_equal(times, [[0, 0.5, 0.5, 0.5], [0, 0, 0, 1]])
    noisy = flow.add_noise(video, noise, times)
    np.testing.assert_array_equal(noisy[0, 0], video[0, 0])
    np.testing.assert_array_equal(noisy[1, :3], video[1, :3])
    np.testing.assert_array_equal(noisy[1, 3], noise[1, 3])


def test_velocity_error_counts_noisy_frames_only():
    """A model that is off by c in noisy frames only has error c^2, whatever the condition."""
    video = jax.random.normal(jax.random.key(0), (2, 4, 4, 4, 3))
    noise = jax.random.normal(jax.random.key(1), video.shape)

    def wrong(noisy, times):
        off = jnp.where(times > 0, 0.5, 100.0)[:, :, None, None, None]
        return noise - video + off

    errors = flow.velocity_errors(wrong, video, noise, jnp.full(2, 0.5), jnp.array([1, 3]))
    np.testing.assert_allclose(errors, 0.25, rtol=1e-4)


def test_sampling_under_strict_promotion_is_the_same(model):
    condition, noise = jnp.zeros((1, 2, 8, 8, 3)), sampler.draw_noise(1, (1, 4, 8, 8, 3))
    want = sampler.continue_clip(model, condition, noise, num_steps=2)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        video = sampler.continue_clip(model, condition, noise, num_steps=2)
    np.testing.assert_allclose(video, want, atol=1e-6)
