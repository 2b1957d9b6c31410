"""`sample`: noise to latents with a ported model, as one jitted `lax.scan` an expert.

Latents in, latents out: text encoders and VAEs are the caller's own. The scan carries the
latents, the solver's memory and the V-Smooth state; guidance runs both halves as one batch.
"""

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Bool

import vc_jax

from .attention import AttentionControl, ModelState, uses_state
from .common import memory
from .common.base import Latents, VideoTransformer
from .common.checks import check_flags
from .common.promotion import own_promotion
from .common.schedulers import Sampling
from .mesh import ModelMesh

Parts = dict[str, Array]
"""Latents by what they are of, also where there is only video."""


@own_promotion
def sample(
    model: VideoTransformer,
    latents: Latents,
    conditioning: dict[str, Any],
    *,
    negative: dict[str, Any] | None = None,
    sampling: Sampling | None = None,
    low_noise_model: VideoTransformer | None = None,
    schedule: vc_jax.DenoisingSchedule | None = None,
    high_precision_layers: ArrayLike | None = None,
    bf16_steps_mask: ArrayLike | None = None,
    progress: bool = True,
) -> Latents:
    """Runs a model from noise to latents.

    Args:
      model: a ported model; of Wan2.2-A14B, the high-noise expert.
      latents: noise of the shape of the result.
      conditioning: what the model's `denoise` names: `text` and so on; None is as if left out.
      negative: entries of `conditioning` for the unconditional half, of the same shapes; those
        left out are shared. Only with guidance.
      sampling: steps, solver, shift, guidance; default `model.sampling`, the release's own.
      low_noise_model: the low-noise expert of Wan2.2-A14B; needed if `sampling.boundary` is set.
        It begins with a V-Smooth state of its own.
      schedule: `vc_jax.DenoisingSchedule` of a low-bit attention; default one for the steps.
      high_precision_layers: bool [layers], True where a layer's attention runs as `"bf16"`.
      bf16_steps_mask: bool [steps], likewise.
      progress: a bar on stderr.

    A model whose parameters wait in host memory (`from_pretrained(..., memory_kind=)`) is copied to
    its devices for its own steps only: of two such experts one is there at a time.

    A model with a mesh is sampled on all of its devices. Arrays that are not on the mesh must then
    be the same in all processes, and every process gets the whole result.

    Returns:
      Latents in float32.

    Raises:
      ValueError: arguments that do not fit or would be ignored, and unknown or missing entries of
        the conditioning, by name.
    """
    sampling = model.sampling if sampling is None else sampling
    _check_modes(latents, negative, sampling, low_noise_model)
    latents = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), latents)
    model.check_sampling(latents, conditioning)
    conditioning = {name: value for name, value in conditioning.items() if value is not None}
    _check_negative(negative, conditioning)
    if low_noise_model is not None:
        _check_low_noise_model(low_noise_model, model)
    experts = [model] if low_noise_model is None else [model, low_noise_model]
    clusters = [uses_state(expert.attention) for expert in experts]
    if schedule is None and any(clusters):
        schedule = vc_jax.DenoisingSchedule(sampling.num_steps)
    if schedule is not None and schedule.num_steps != sampling.num_steps:
        raise ValueError(f"schedule: has {schedule.num_steps} steps, sampling {sampling.num_steps}")
    if bf16_steps_mask is not None and np.shape(bf16_steps_mask) != (sampling.num_steps,):
        raise ValueError(
            f"bf16_steps_mask: expected [{sampling.num_steps}], got {np.shape(bf16_steps_mask)}"
        )
    for name, mask in (
        ("high_precision_layers", high_precision_layers),
        ("bf16_steps_mask", bf16_steps_mask),
    ):
        if mask is not None:
            check_flags(name, mask)
    parts = latents if isinstance(latents, dict) else {"video": latents}
    policies = tuple(
        None if mask is None else jnp.asarray(mask, bool)
        for mask in (high_precision_layers, bf16_steps_mask)
    )
    if model.mesh is not None:
        _check_batch(parts, negative, model.mesh)
        parts, conditioning, negative, policies = model.mesh.whole(
            (parts, conditioning, negative, policies)
        )
    if progress:
        _bar.start(sampling.num_steps)
    memories = None
    for which, steps in _turns(sampling, len(experts)):
        # With a schedule of the caller's even one without clusters has a state: or is told why not.
        keeps = schedule is not None and (clusters[which] or not any(clusters))
        graph, parameters = nnx.split(experts[which])
        if model.mesh is not None:
            parameters = model.mesh.whole(parameters)
        if any(map(memory.waits, jax.tree.leaves(parameters))):
            # When the last expert's steps are done, nothing holds its copy on the device any more.
            jax.block_until_ready(parts)
        parts, memories = _run(
            (graph, sampling, schedule if keeps else None, steps, progress),
            memory.on_device(parameters),
            parts,
            memories,
            conditioning,
            negative,
            policies,
        )
    if progress:
        jax.block_until_ready(parts)
        jax.effects_barrier()
    return parts if isinstance(latents, dict) else parts["video"]


def _turns(sampling: Sampling, experts: int) -> list[tuple[int, tuple[int, int]]]:
    """Which expert makes which steps, [first, end)."""
    high = int(np.sum(sampling.high_noise())) if experts > 1 else sampling.num_steps
    turns = [(0, (0, high)), (1, (high, sampling.num_steps))]
    return [(which, steps) for which, steps in turns if steps[0] < steps[1]]


@functools.partial(jax.jit, static_argnums=0)
def _run(
    settings: tuple[nnx.GraphDef, Sampling, Any, tuple[int, int], bool],
    parameters: nnx.State,
    parts: Parts,
    memories: dict[str, Any] | None,
    conditioning: dict[str, Any],
    negative: dict[str, Any] | None,
    policies: tuple[Bool[Array, "layers"] | None, Bool[Array, "steps"] | None],
) -> tuple[Parts, dict[str, Any]]:
    """The steps of one expert, which begins with a fresh state: values of another one's are none of
    its own.

    Args:
      settings: graph definition, sampling, schedule of a model with a state, steps, progress.
      memories: of the solvers; None before the first step.

    Returns:
      The latents, those that the conditioning gives put in after the last step, and the memories.
    """
    graph, sampling, schedule, (first, end), progress = settings
    model = nnx.merge(graph, parameters)
    batch = jax.tree.leaves(parts)[0].shape[0]
    both = conditioning if negative is None else _both(model, negative, conditioning, batch)
    single = sampling.audio_shift is None
    shifts = {"video": sampling.shift, "audio": sampling.audio_shift}
    solvers = {name: sampling.make_solver(shifts[name]) for name in parts}
    times = {name: jnp.asarray(sampling.timesteps(shifts[name]), jnp.float32) for name in parts}
    following = jnp.asarray(sampling.next_timesteps(), jnp.float32)
    scales = jnp.asarray(sampling.guidance_scales(), jnp.float32)

    def evaluate(
        parts: Parts, index: Array, state: ModelState | None
    ) -> tuple[Parts, ModelState | None]:
        model = nnx.merge(graph, parameters).in_use()
        given: Any = parts["video"] if single else parts
        now: Any = {name: table[index] for name, table in times.items()}
        if single:
            now = now["video"]
        given = model.impose(given, conditioning)
        if negative is not None:
            given = jnp.concatenate([given, given])
        if model.mesh is not None:
            given = model.mesh.clips(given)
        control = AttentionControl(state, index, *policies, schedule=schedule)
        extra: Any = {"next_time": following[index]} if model.needs_next_time else {}
        velocity, state = model.denoise(given, now, both, control, **extra)
        if model.mesh is not None:
            velocity = model.mesh.clips(velocity)
        velocities = velocity if isinstance(velocity, dict) else {"video": velocity}
        if negative is not None:
            form = sampling.guidance_form
            velocities["video"] = _guide(velocities["video"], scales[index], form)
        return velocities, state

    def step(carry: Any, index: Array) -> tuple[Any, None]:
        parts, memories, state = carry
        velocities, state = evaluate(parts, index, state)
        moved = {
            name: solvers[name].step(index, parts[name], velocities[name], memories[name])
            for name in parts
        }
        if progress:
            jax.debug.callback(_bar.show, index)
        parts = {name: pair[0] for name, pair in moved.items()}
        return (parts, {name: pair[1] for name, pair in moved.items()}, state), None

    state = None
    if schedule is not None:
        copies = 1 if negative is None else 2
        doubled = {name: jnp.concatenate([x] * copies) for name, x in parts.items()}
        state = model.sampling_state(doubled["video"] if single else doubled, both)
    begun = memories or {name: solvers[name].init(parts[name]) for name in parts}
    steps = jnp.arange(first, end, dtype=jnp.int32)
    (parts, begun, _), _ = jax.lax.scan(step, (parts, begun, state), steps)
    if end == sampling.num_steps:
        imposed = model.impose(parts["video"] if single else parts, conditioning)
        parts = imposed if isinstance(imposed, dict) else {"video": imposed}
    result = parts, begun
    return result if model.mesh is None else model.mesh.constrained(result)


def _check_modes(
    latents: Latents,
    negative: dict[str, Any] | None,
    sampling: Sampling,
    low_noise_model: VideoTransformer | None,
) -> None:
    """Arguments that go only with some settings of the sampling."""
    guided = bool(np.any(sampling.guidance_scales() != 1.0))
    if guided and isinstance(latents, dict):
        raise ValueError("sampling.guidance: this model takes none")
    if guided and negative is None:
        raise ValueError("negative: guidance needs it; or pass sampling with guidance=1.0")
    if not guided and negative is not None:
        raise ValueError("negative: without guidance (sampling.guidance is 1) it would be ignored")
    if (sampling.boundary is not None) != (low_noise_model is not None):
        raise ValueError("low_noise_model: needed with sampling.boundary, and only then")
    if isinstance(latents, dict) != (sampling.audio_shift is not None):
        raise ValueError("latents: a dict of `video` and `audio` goes with sampling.audio_shift")


def _check_batch(latents: Latents, negative: dict[str, Any] | None, mesh: ModelMesh) -> None:
    """The guided halves are clips of the batch."""
    clips = jax.tree.leaves(latents)[0].shape[0] * (1 if negative is None else 2)
    parts = mesh.size(mesh.batch_axis)
    if clips % parts:
        halves = "" if negative is None else ", guided halves included"
        raise ValueError(
            f"latents: {clips} clips{halves}, are not divided by the {parts} devices of batch_axis"
        )


def _check_low_noise_model(expert: VideoTransformer, model: VideoTransformer) -> None:
    """The experts share latents, conditioning and masks over layers."""
    if type(expert) is not type(model):
        raise TypeError(
            f"low_noise_model: expected a {type(model).__name__}, got {type(expert).__name__}"
        )
    if expert.mesh != model.mesh:
        raise ValueError(f"low_noise_model: expected model's mesh {model.mesh}, got {expert.mesh}")
    differences = [
        f"{field.name} {getattr(expert.config, field.name)} in place of "
        f"{getattr(model.config, field.name)}"
        for field in dataclasses.fields(model.config)
        if getattr(expert.config, field.name) != getattr(model.config, field.name)
    ]
    if differences:
        raise ValueError(f"low_noise_model: expected model's sizes, got {', '.join(differences)}")


def _check_negative(negative: dict[str, Any] | None, positive: dict[str, Any]) -> None:
    """Both halves run as one batch: each entry has to have the shape of the conditioning's own."""
    unknown = sorted(set(negative or ()) - set(positive))
    if unknown:
        raise ValueError(
            f"negative: {unknown} is not in conditioning, which has {sorted(positive)}"
        )
    for name, value in (negative or {}).items():
        got, wanted = (jax.tree.map(np.shape, entry) for entry in (value, positive[name]))
        if got != wanted:
            raise ValueError(
                f"negative[{name!r}]: expected the shape of conditioning[{name!r}], {wanted}, "
                f"got {got}"
            )


def _both(
    model: VideoTransformer, negative: dict[str, Any], positive: dict[str, Any], batch: int
) -> dict[str, Any]:
    """Conditioning of the doubled batch: the unconditional half first."""

    def join(axis: int, first: Array, second: Array) -> Array:
        # One entry for the whole batch (a cache) is left to broadcast.
        if first is second and first.shape[axis] == 1 < batch:
            return first
        return jnp.concatenate([first, second], axis=axis)

    return {
        name: jax.tree.map(
            functools.partial(join, model.batch_axes.get(name, 0)), negative.get(name, value), value
        )
        for name, value in positive.items()
    }


def _guide(velocity: Array, scale: Array, form: str) -> Array:
    """Classifier-free guidance of a doubled batch, unconditional half first."""
    without, with_text = jnp.split(velocity, 2)
    if form == "cfg_zero":
        axes = tuple(range(1, without.ndim))
        dot = jnp.sum(without * with_text, axis=axes, keepdims=True)
        without = without * (dot / (jnp.sum(without**2, axis=axes, keepdims=True) + 1e-8))
    return without + scale * (with_text - without)


class _Bar:
    """A bar on stderr. One object for all runs, so that a compiled run stays valid."""

    def __init__(self):
        self._bar = None

    def start(self, total: int) -> None:
        if self._bar is not None:  # of a run that failed
            self._bar.close()
        self._bar = tqdm.tqdm(total=total, file=sys.stderr, unit="step", mininterval=0.0)

    def show(self, _: np.ndarray) -> None:
        """One more step is done; the argument makes the callback wait for it."""
        if self._bar is not None:
            self._bar.update()
            if self._bar.n == self._bar.total:
                self._bar.close()


_bar = _Bar()
