"""Sampling one clip with several attention methods, each compiled once.

A method's whole sampling loop is one compiled function: a `lax.scan` over the steps with the
attention's state in its carry and the step's index traced. The same function also answers what the
method predicts *on another method's path* (teacher forcing): then every step starts from a given
video instead of the one that the step before has left.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float

import vc_jax
import vc_jax.sharding

from ..mesh import ModelMesh
from ..video_dit import sampler
from ..video_dit.model import VideoDiT

REFERENCE = "bf16"
"""The method that the others are compared with."""
_COMPILER_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""On a GPU, trying out matrix products would take longer than the sampling itself.

Untried, XLA's own products get tiles of 16x8 whatever their size; cuBLAS chooses better.
"""

Frames = Float[Array, "1 F height width C"]
Videos = Float[Array, "steps 1 F height width C"]
"""A video, or its velocity, at every step."""
Progress = Callable[[str, str, int], None]
"""Called with a method's name, what it does now and the steps that are done."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What every method has to do: the model, the condition, the noise and the steps.

    Attributes:
      model: the video DiT.
      pixels: the real clip in [-1, 1]; only its condition frames are read.
      condition: number of leading frames that are given.
      noise: what the sampled frames start from.
      steps: denoising steps.
      shift: of the time grid, see `sampler.time_grid`.
      mesh: the devices that tokens are spread over; `None` for one device.
    """

    model: VideoDiT
    pixels: Frames
    condition: int
    noise: Frames
    steps: int
    shift: float = sampler.DEFAULT_SHIFT
    mesh: ModelMesh | None = None

    @property
    def schedule(self) -> vc_jax.DenoisingSchedule:
        """When values are clustered."""
        return vc_jax.DenoisingSchedule(self.steps)

    @property
    def times(self) -> Float[Array, "steps+1"]:
        """The time grid, from 1 (noise) to 0."""
        return sampler.time_grid(self.steps, self.shift)

    @property
    def tokens(self) -> int:
        """Tokens of the clip, all of which attend to all."""
        frames, rows, columns = self.model.config.grid(*self.noise.shape[1:4])
        return frames * rows * columns

    @property
    def given(self) -> Bool[Array, "1 F"]:
        """Which frames are given."""
        return (jnp.arange(self.noise.shape[1]) < self.condition)[None]

    def attention_shape(self) -> jax.ShapeDtypeStruct:
        """Query, key and value of one layer."""
        config = self.model.config
        shape = (1, self.tokens, config.num_heads, config.head_dim)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(config.compute_dtype))


class Path(NamedTuple):
    """Where a sampling run went.

    Attributes:
      videos: the video before each step, its condition frames in place [steps, 1, F, h, w, C].
      velocities: what the model predicted there, of the same shape.
      final: the sample.
    """

    videos: Videos
    velocities: Videos
    final: Frames


class Timed(NamedTuple):
    """A path and the seconds that the compiled function took."""

    path: Path
    seconds: float


class Method:
    """One attention method's sampling loop, compiled when it is made.

    Attributes:
      name: a preset's name.
      explanation: which implementation runs, and why not the others.
      traces: how often the loop was traced; 1, whatever is run afterwards.
      compile_seconds: time to trace and compile, beside whatever else is compiled then.
    """

    def __init__(self, name: str, task: Task, progress: Progress):
        self.name = name
        self.config = vc_jax.PRESETS[name]
        self.task = task
        self.traces = 0
        shape = task.attention_shape()
        self.explanation = vc_jax.explain(shape, shape, shape, config=self.config)
        self._progress = progress
        self._doing = "compiling"
        self._done = 0
        progress(name, self._doing, 0)
        definition, parameters = nnx.split(task.model, nnx.Param)
        self._parameters = self._placed(parameters)
        start = time.perf_counter()
        videos = self._placed(jnp.zeros((task.steps, *task.noise.shape), jnp.float32))
        place = None if task.mesh is None else task.mesh.sharding()
        loop = jax.jit(self._loop(definition), out_shardings=place)
        lowered = loop.lower(self._parameters, videos, False)
        self._compiled = lowered.compile(compiler_options=_COMPILER_OPTIONS)
        self.compile_seconds = time.perf_counter() - start

    @property
    def refresh_steps(self) -> tuple[int, ...]:
        """The steps at which this method clusters its values."""
        return self.task.schedule.refresh_steps if self.config.clustered else ()

    def sample(self) -> Timed:
        """Runs the loop from the noise."""
        videos = jnp.zeros((self.task.steps, *self.task.noise.shape), jnp.float32)
        return self._run("sampling", videos, False)

    def follow(self, videos: Videos) -> Timed:
        """Predicts the velocity at every step of another run's path."""
        return self._run("on the BF16 path", videos, True)

    def _run(self, doing: str, videos: Array, forced: bool) -> Timed:
        self._doing, self._done = doing, 0
        self._progress(self.name, doing, 0)
        videos = self._placed(videos)
        start = time.perf_counter()
        path = jax.block_until_ready(self._compiled(self._parameters, videos, forced))
        seconds = time.perf_counter() - start
        jax.effects_barrier()
        if self.task.mesh is not None:  # every device has all of it
            path = jax.tree.map(lambda x: x.addressable_data(0), path)
        return Timed(path, seconds)

    def _placed[Tree](self, tree: Tree) -> Tree:
        return tree if self.task.mesh is None else self.task.mesh.whole(tree)

    def _step_done(self, _: np.ndarray) -> None:
        self._done += 1
        self._progress(self.name, self._doing, self._done)

    def _loop(self, definition: nnx.GraphDef) -> Callable[..., Path]:
        task, config = self.task, self.config
        dit = task.model.config
        schedule, times = task.schedule, task.times
        given = sampler.Given(task.pixels, task.given)
        step_of, init_state = vc_jax.attention_step, vc_jax.init_state
        if task.mesh is not None:
            axes = task.mesh.attention_axes
            step_of = functools.partial(vc_jax.sharding.sharded_attention_step, **axes)
            init_state = functools.partial(vc_jax.sharding.init_state, **axes)

        def attention(query, key, value, state, *, layer, step):
            return step_of(
                query, key, value, state, step=step, schedule=schedule, layer=layer, config=config
            )

        def run(parameters: Any, videos: Array, forced: Array) -> Path:
            self.traces += 1
            model = nnx.merge(definition, parameters)

            def step(carry, inputs):
                index, prescribed = inputs
                video, state = carry
                video = sampler.clamp(jnp.where(forced, prescribed, video), given)
                now, after = times[index], times[index + 1]
                velocity, state = model.with_state(
                    video,
                    sampler.velocity_times(given, now),
                    state,
                    attention=lambda q, k, v, s, layer: attention(
                        q, k, v, s, layer=layer, step=index
                    ),
                )
                # The value makes the callback wait for the step.
                jax.debug.callback(self._step_done, velocity[0, 0, 0, 0, 0])
                return (video + (after - now) * velocity, state), (video, velocity)

            state = init_state(
                config, 1, task.tokens, dit.num_heads, dit.head_dim, layers=dit.num_layers
            )
            indices = jnp.arange(task.steps, dtype=jnp.int32)
            start = (task.noise.astype(jnp.float32), state)
            (video, _), (before, velocities) = lax.scan(step, start, (indices, videos))
            return Path(before, velocities, sampler.clamp(video, given))

        return run


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one method did.

    Attributes:
      method: its compiled loop.
      path: its own path from the noise.
      sample_seconds: time of that path.
      velocities: what it predicts on the reference's path; `None` for the reference itself.
      follow_seconds: time of that prediction, or `None`.
    """

    method: Method
    path: Path
    sample_seconds: float
    velocities: Videos | None
    follow_seconds: float | None


class BlockMeanEnergy(NamedTuple):
    """Share of the values' energy that the means of 128-token blocks hold, per layer.

    Attributes:
      step: index of the denoising step.
      time: its flow time, 1 for noise.
      sequence: in the order of the clip, [layers, heads].
      sorted: after sorting by cluster, [layers, heads].
    """

    step: int
    time: float
    sequence: np.ndarray
    sorted: np.ndarray


def energy_steps(task: Task) -> tuple[int, ...]:
    """The steps to look at: the first one and those nearest to t = 0.9, 0.6 and 0.3."""
    times = np.asarray(task.times)[:-1]
    return tuple(sorted({0, *(int(np.abs(times - t).argmin()) for t in (0.9, 0.6, 0.3))}))


def measure_block_means(
    task: Task,
) -> Callable[[Videos], list[BlockMeanEnergy]]:
    """Compiles what finds the energy of block means at a few steps of a path.

    The values are looked at before and after sorting by cluster.
    """
    definition, parameters = nnx.split(task.model, nnx.Param)
    clusters = vc_jax.default_clusters(task.tokens)

    def measure(parameters, video, now):
        model = nnx.merge(definition, parameters)
        attention: Any = functools.partial(vc_jax.dot_product_attention, config=REFERENCE)
        _, inputs = model.attention_inputs(
            video, jnp.where(task.given, 0.0, now), attention=attention
        )
        values = jnp.moveaxis(inputs.value[:, 0].astype(jnp.float32), -2, 1)
        found = vc_jax.kmeans(values, clusters, steps=vc_jax.PRESETS["int8"].lloyd_steps)
        places = vc_jax.similar_clusters_together(found.centroids)
        order = vc_jax.cluster_order(found.labels, places)
        ordered = jnp.take_along_axis(values, order[..., None], -2)
        return vc_jax.mean_energy(values), vc_jax.mean_energy(ordered)

    times = np.asarray(task.times)
    video = jax.ShapeDtypeStruct(task.noise.shape, jnp.float32)
    lowered = jax.jit(measure).lower(parameters, video, times[0])
    compiled = lowered.compile(compiler_options=_COMPILER_OPTIONS)

    def run(videos: Videos) -> list[BlockMeanEnergy]:
        return [
            BlockMeanEnergy(
                step,
                float(times[step]),
                *map(np.asarray, compiled(parameters, videos[step], times[step])),
            )
            for step in energy_steps(task)
        ]

    return run
