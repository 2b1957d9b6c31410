"""Rectified flow on videos with clean condition frames: noise, timesteps, loss.

The path from data x to noise e is the straight line ``x_t = (1 - t) x + t e`` (Liu et al., "Flow
Straight and Fast", 2022), its velocity ``e - x``. The first frames of a clip are given: they stay
clean, have t = 0, and count in no loss.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

# Share of the training clips with 1, 2, 3 and 4 condition frames. One frame says nothing of the
# motion, so a single-frame model has to average over all motions; four frames (the default when
# sampling) also give acceleration.
CONDITION_SHARES = (0.2, 0.15, 0.15, 0.5)

# Training timesteps are drawn in equal parts from a logit-normal, which favours the middle, and
# from the distribution of the timesteps that the sampler visits with this shift: where things move
# to is decided at t > 0.9, where a logit-normal puts 3 % of its mass.
LOGIT_NORMAL_MEAN = 0.3
SAMPLER_SHIFT = 3.0


def shift_time(u: Float[Array, "..."], shift: float | Array) -> Float[Array, "..."]:
    """Moves times in [0, 1] towards 1: ``s u / (1 + (s - 1) u)`` (Esser et al., 2024, eq. 23)."""
    return shift * u / (1.0 + (shift - 1.0) * u)


def sample_timesteps(key: PRNGKeyArray, batch: int) -> Float[Array, "B"]:
    """Training timesteps in (0, 1), float32."""
    pick, normal, uniform = jax.random.split(key, 3)
    logit_normal = jax.nn.sigmoid(jax.random.normal(normal, (batch,)) + LOGIT_NORMAL_MEAN)
    visited = shift_time(jax.random.uniform(uniform, (batch,)), SAMPLER_SHIFT)
    t = jnp.where(jax.random.bernoulli(pick, 0.5, (batch,)), logit_normal, visited)
    return jnp.clip(t, 1e-3, 1.0 - 1e-4)


def sample_condition_counts(key: PRNGKeyArray, batch: int, frames: int) -> Int[Array, "B"]:
    """How many leading frames of each clip are given: 1 to 4, and always fewer than all."""
    shares = jnp.asarray(CONDITION_SHARES)
    counts = 1 + jax.random.choice(key, len(CONDITION_SHARES), (batch,), p=shares)
    return jnp.minimum(counts, frames - 1)


def frame_times(
    t: Float[Array, "B"], condition_count: Int[Array, "B"], frames: int
) -> Float[Array, "B F"]:
    """t for every frame of each clip, 0 for its condition frames."""
    given = jnp.arange(frames)[None] < condition_count[:, None]
    return jnp.where(given, 0.0, t[:, None])


def add_noise(
    video: Float[Array, "B F height width C"],
    noise: Float[Array, "B F height width C"],
    times: Float[Array, "B F"],
) -> Float[Array, "B F height width C"]:
    """The point at each frame's time on the line from video to noise."""
    t = times[:, :, None, None, None]
    return (1.0 - t) * video + t * noise


def velocity_errors(
    model: Callable[[Array, Array], Array],
    video: Float[Array, "B F height width C"],
    noise: Float[Array, "B F height width C"],
    t: Float[Array, "B"],
    condition_count: Int[Array, "B"],
) -> Float[Array, "B"]:
    """Mean squared velocity error of each clip over the frames that are not given, float32."""
    times = frame_times(t, condition_count, video.shape[1])
    velocity = model(add_noise(video, noise, times), times)
    per_frame = jnp.mean(jnp.square(velocity - (noise - video)), axis=(2, 3, 4))
    noisy = (times > 0.0).astype(jnp.float32)
    return jnp.sum(per_frame * noisy, axis=1) / jnp.sum(noisy, axis=1)
