"""The compiled part of the training: many optimiser steps in one call, on all devices of a host."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt8

from ..video_dit import flow

DATA_AXIS = "data"


class TrainState(NamedTuple):
    """What a training step reads and writes; the same on every device.

    Attributes:
      parameters: the model's parameters, float32.
      optimiser: the optimiser's state.
      average: exponential moving average of the parameters, which is what ships.
      step: number of steps done, int32.
    """

    parameters: Any
    optimiser: Any
    average: Any
    step: Int[Array, ""]


class Film(NamedTuple):
    """The training data on a device.

    Attributes:
      frames: the whole film.
      starts: first frames of the training windows, int32.
      cumulative: cumulative probability of the windows, float32, ends at 1.
    """

    frames: UInt8[Array, "frames height width 3"]
    starts: Int[Array, "windows"]
    cumulative: Float[Array, "windows"]


class StageShape(NamedTuple):
    """Static sizes of a stage: clips per device and step, frames and pixels of a crop."""

    batch: int
    frames: int
    height: int
    width: int


def initial_state(parameters: Any, optimiser: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(
        parameters, optimiser.init(parameters), jax.tree.map(jnp.copy, parameters), jnp.int32(0)
    )


def to_pixels(video: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """[-1, 1] to bytes, saturating."""
    return jnp.clip(jnp.round((video + 1.0) * 127.5), 0, 255).astype(jnp.uint8)


def from_pixels(video: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Bytes to [-1, 1], float32."""
    return video.astype(jnp.float32) / 127.5 - 1.0


def draw_clips(
    film: Film, key: PRNGKeyArray, shape: StageShape
) -> Float[Array, "B F height width 3"]:
    """Random windows, random crops, mirrored half of the time, in [-1, 1]."""
    pick, rows, columns, mirror = jax.random.split(key, 4)
    batch = (shape.batch,)
    _, height, width, _ = film.frames.shape
    index = jnp.searchsorted(film.cumulative, jax.random.uniform(pick, batch))
    start = film.starts[jnp.minimum(index, film.starts.size - 1)]
    top = jax.random.randint(rows, batch, 0, height - shape.height + 1)
    left = jax.random.randint(columns, batch, 0, width - shape.width + 1)
    mirrored = jax.random.bernoulli(mirror, 0.5, batch)

    def cut(start, top, left, mirrored):
        size = (shape.frames, shape.height, shape.width, 3)
        clip = lax.dynamic_slice(film.frames, (start, top, left, 0), size)
        return jnp.where(mirrored, clip[:, :, ::-1], clip)

    return from_pixels(jax.vmap(cut)(start, top, left, mirrored))


def batch_loss(
    definition: nnx.GraphDef, parameters: Any, clips: Array, key: PRNGKeyArray
) -> Float[Array, ""]:
    """Mean velocity error of clips at random timesteps and condition counts."""
    time_key, count_key, noise_key = jax.random.split(key, 3)
    t = flow.sample_timesteps(time_key, clips.shape[0])
    count = flow.sample_condition_counts(count_key, *clips.shape[:2])
    noise = jax.random.normal(noise_key, clips.shape)
    model = nnx.merge(definition, parameters)
    return jnp.mean(flow.velocity_errors(model, clips, noise, t, count))


def make_train_steps(
    definition: nnx.GraphDef,
    optimiser: optax.GradientTransformation,
    mesh: Mesh,
    shape: StageShape,
    *,
    steps: int,
    average_decay: float = 0.998,
) -> Callable[..., tuple[TrainState, Float[Array, "steps"], Float[Array, "steps"]]]:
    """A jitted function of (state, film, key, rate) that does ``steps`` optimiser steps.

    Every device draws its own clips; gradients are averaged over the mesh, so all devices make the
    same update. Returns the new state (the old one is donated), and the loss and the gradient norm
    of every step.
    """

    def one_step(film, rate, state, key):
        clip_key, loss_key = jax.random.split(key)
        clips = draw_clips(film, clip_key, shape)
        loss, gradients = jax.value_and_grad(
            lambda parameters: batch_loss(definition, parameters, clips, loss_key)
        )(state.parameters)
        loss, gradients = lax.pmean((loss, gradients), DATA_AXIS)
        updates, optimiser_state = optimiser.update(gradients, state.optimiser, state.parameters)
        updates = jax.tree.map(lambda update: rate * update, updates)
        parameters = optax.apply_updates(state.parameters, updates)
        # Early on the average follows the parameters closely, or it would remember the start.
        count = state.step.astype(jnp.float32)
        decay = jnp.minimum(average_decay, (1.0 + count) / (10.0 + count))
        average = jax.tree.map(
            lambda old, new: decay * old + (1.0 - decay) * new, state.average, parameters
        )
        new_state = TrainState(parameters, optimiser_state, average, state.step + 1)
        return new_state, (loss, optax.tree.norm(gradients))

    def run(state, film, key, rate):
        key = jax.random.fold_in(key, lax.axis_index(DATA_AXIS))
        keys = jax.random.split(key, steps)
        state, (losses, norms) = lax.scan(
            lambda state, key: one_step(film, rate, state, key), state, keys
        )
        return state, losses, norms

    everywhere = PartitionSpec()
    sharded = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(everywhere,) * 4,
        out_specs=(everywhere,) * 3,
        # The replicas stay equal because the averaged gradients are; this is not inferred.
        check_vma=False,
    )
    return jax.jit(sharded, donate_argnums=0)


def data_mesh(devices: Sequence[Any]) -> Mesh:
    """A one-axis mesh over the given devices (of `jax.devices()`)."""
    return Mesh(np.array(list(devices)), (DATA_AXIS,))
