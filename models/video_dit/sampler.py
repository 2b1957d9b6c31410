"""Euler sampler for rectified flow with clean condition frames.

One jitted scan over the steps; whatever state the attention keeps travels in the carry, and the
step's index is traced, so a sampler compiles once for all steps.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ..common.promotion import own_promotion
from .flow import shift_time
from .model import Attention, StatefulAttention, default_attention

DEFAULT_STEPS = 40
DEFAULT_SHIFT = 3.0


@runtime_checkable
class VelocityModel(Protocol):
    """What the sampler needs of a model; `VideoDiT` has it."""

    def with_state(
        self, video: Array, t: Array, state: Any, *, attention: StatefulAttention
    ) -> tuple[Array, Any]:
        """See `VideoDiT.with_state`."""
        ...


@runtime_checkable
class StepAttention(Protocol):
    """Attention with a state that lives over layers and denoising steps."""

    def __call__(
        self, query: Array, key: Array, value: Array, state: Any, /, *, layer: Array, step: Array
    ) -> tuple[Array, Any]:
        """Returns output and new state; ``layer`` and ``step`` are traced int32 scalars."""
        ...


class Given(NamedTuple):
    """Condition frames of a video.

    Attributes:
      video: pixels of the whole clip; only the given frames are read.
      frames: which frames are given.
    """

    video: Float[Array, "B F height width C"]
    frames: Bool[Array, "B F"]


def time_grid(num_steps: int, shift: float | Array = DEFAULT_SHIFT) -> Float[Array, "times"]:
    """Times from 1 (noise) to 0 (video), float32; ``shift`` > 1 spends more steps near 1."""
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    return shift_time(1.0 - jnp.arange(num_steps + 1, dtype=jnp.float32) / num_steps, shift)


def given_first(condition: Float[Array, "B C height width channels"], frames: int) -> Given:
    """Makes the condition the first frames of a clip of ``frames`` frames.

    Raises:
      ValueError: there is no condition frame, or no frame left to sample.
    """
    batch, count = condition.shape[:2]
    if not 1 <= count < frames:
        raise ValueError(f"condition must have 1 to {frames - 1} frames, got {count}")
    rest = jnp.zeros((batch, frames - count, *condition.shape[2:]), condition.dtype)
    known = jnp.broadcast_to(jnp.arange(frames) < count, (batch, frames))
    return Given(jnp.concatenate([condition, rest], axis=1), known)


def clamp(video: Float[Array, "B F height width C"], given: Given) -> Array:
    """The video with its condition frames put in."""
    return jnp.where(given.frames[:, :, None, None, None], given.video, video)


def velocity_times(given: Given, t: Float[Array, ""]) -> Float[Array, "B F"]:
    """``t`` for the frames to be sampled, 0 for the given ones."""
    return jnp.where(given.frames, 0.0, t)


@own_promotion
def continue_clip(
    model: VelocityModel,
    condition: Float[Array, "B C height width channels"],
    noise: Float[Array, "B F height width channels"],
    *,
    num_steps: int = DEFAULT_STEPS,
    shift: float | Array = DEFAULT_SHIFT,
    attention: Attention | None = None,
) -> Float[Array, "B F height width channels"]:
    """Samples the frames that follow a condition.

    Args:
      model: the velocity model.
      condition: first frames of each clip, pixels in [-1, 1].
      noise: unit normal noise; its shape is that of the result.
      num_steps: Euler steps.
      shift: see `time_grid`.
      attention: see `VideoDiT.__call__`.

    Returns:
      float32 videos that begin with the condition; not clipped to [-1, 1].

    Raises:
      ValueError: no condition frame or no frame left to sample.
    """
    attend = attention or default_attention
    given = given_first(condition, noise.shape[1])
    times = time_grid(num_steps, shift)
    return sample_given(
        model, given, noise, times, None, attention=lambda q, k, v, s, **_: (attend(q, k, v), s)
    )[0]


@own_promotion
def sample_given(
    model: VelocityModel,
    given: Given,
    noise: Float[Array, "B F height width C"],
    times: Float[Array, "times"],
    state: Any,
    *,
    attention: StepAttention,
) -> tuple[Float[Array, "B F height width C"], Any]:
    """The general sampler: any given frames, any time grid, attention with a state.

    Args:
      model: the velocity model.
      given: condition frames.
      noise: unit normal noise.
      times: decreasing times, from 1 to 0.
      state: the attention's state before the first step.
      attention: called in every layer of every step.

    Returns:
      The videos, float32, and the attention's state after the last step.
    """

    def step(carry, index):
        video, state = carry

        def attend(query, key, value, state, layer):
            return attention(query, key, value, state, layer=layer, step=index)

        now, after = times[index], times[index + 1]
        video = clamp(video, given)
        velocity, state = model.with_state(
            video, velocity_times(given, now), state, attention=attend
        )
        return (video + (after - now) * velocity, state), None

    steps = jnp.arange(times.shape[0] - 1, dtype=jnp.int32)
    start = noise.astype(jnp.float32)
    (video, state), _ = lax.scan(step, (start, state), steps)
    return clamp(video, given), state


def draw_noise(seed: int, shape: tuple[int, ...]) -> Float[Array, "B F height width C"]:
    """Unit normal noise of a seed."""
    return jax.random.normal(jax.random.key(seed), shape)
