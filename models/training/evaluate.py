"""Held-out evaluation of a `VideoDiT`: velocity error, samples against real clips, contact sheet.

    python -m vc_jax.models.training.evaluate --video FILM --output DIR --clips 4 --steps 10

evaluates the shipped weights on held-out scenes. With all clips and 40 steps it is work for a GPU.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, UInt8

from ..common.video import read_video
from ..video_dit import flow, sampler, weights
from ..video_dit.model import default_attention
from . import clip_statistics
from . import film as film_module
from .plots import write_comparison_sheet
from .training_step import DATA_AXIS, data_mesh, from_pixels, to_pixels

LOSS_TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)
CONDITION_FRAMES = 4
# Mean squared difference of successive frames, in squared grey levels, below which a clip is still:
# what changes then is the compression, and a ratio to it says nothing.
STILL_ENERGY = 4.0

_EVERYWHERE = PartitionSpec()
_BY_CLIP = PartitionSpec(DATA_AXIS)


def make_held_out_loss(definition: nnx.GraphDef, mesh: Mesh) -> Callable[..., Array]:
    """A jitted function of (parameters, clips, noise, t, count): velocity error of each clip.

    Clips are bytes and, like the noise, are sharded over the mesh; one ``t`` and one number of
    condition frames serve all clips.
    """

    def errors(parameters, clips, noise, t, count):
        model = nnx.merge(definition, parameters)
        batch = (clips.shape[0],)
        return flow.velocity_errors(
            model, from_pixels(clips), noise, jnp.full(batch, t), jnp.full(batch, count)
        )

    return jax.jit(
        jax.shard_map(
            errors,
            mesh=mesh,
            in_specs=(_EVERYWHERE, _BY_CLIP, _BY_CLIP, _EVERYWHERE, _EVERYWHERE),
            out_specs=_BY_CLIP,
            check_vma=False,
        )
    )


def make_sampler(definition: nnx.GraphDef, mesh: Mesh) -> Callable[..., Array]:
    """A jitted function of (parameters, clips, noise, times, count): sampled clips as bytes.

    Sharded like `make_held_out_loss`; the first ``count`` frames of each clip are the condition.
    """

    def run(parameters, clips, noise, times, count):
        model = nnx.merge(definition, parameters)
        batch, frames = clips.shape[:2]
        known = jnp.broadcast_to(jnp.arange(frames) < count, (batch, frames))
        given = sampler.Given(from_pixels(clips), known)
        video, _ = sampler.sample_given(
            model,
            given,
            noise,
            times,
            None,
            attention=lambda q, k, v, state, **_: (default_attention(q, k, v), state),
        )
        return to_pixels(video)

    return jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(_EVERYWHERE, _BY_CLIP, _BY_CLIP, _EVERYWHERE, _EVERYWHERE),
            out_specs=_BY_CLIP,
            check_vma=False,
        )
    )


def moving_clips(
    film: UInt8[np.ndarray, "frames height width 3"],
    starts: Int[np.ndarray, "clips"],
    *,
    window: int = film_module.WINDOW,
    limit: int | None = None,
    multiple: int = 1,
) -> Int[np.ndarray, "some"]:
    """The starts of the clips that move, thinned evenly to ``limit`` and to a multiple.

    Raises:
      ValueError: fewer than ``multiple`` clips move.
    """
    first = min(clip_statistics.FIRST_FRAME, window - 1)
    clips = np.stack([film[s : s + window] for s in starts])
    moving = starts[clip_statistics.frame_difference_energy(clips, first) >= STILL_ENERGY]
    count = min(len(moving), limit or len(moving)) // multiple * multiple
    if not count:
        raise ValueError(f"only {len(moving)} held-out clips move, need {multiple}")
    return moving[np.linspace(0, len(moving) - 1, count).round().astype(int)]


class HeldOut:
    """Held-out clips and their noise, placed on a mesh, with the functions that use them."""

    def __init__(
        self,
        film: UInt8[np.ndarray, "frames height width 3"],
        starts: Int[np.ndarray, "clips"],
        mesh: Mesh,
        definition: nnx.GraphDef,
        *,
        window: int = film_module.WINDOW,
        steps: int = sampler.DEFAULT_STEPS,
    ):
        self.starts = starts
        self.real = np.stack([film[s : s + window] for s in starts])
        self.steps = steps
        self._replicated = NamedSharding(mesh, _EVERYWHERE)
        by_clip = NamedSharding(mesh, _BY_CLIP)
        self.clips = jax.device_put(self.real, by_clip)
        self.noise = jax.device_put(sampler.draw_noise(20, self.real.shape), by_clip)
        self._loss = make_held_out_loss(definition, mesh)
        self._sample = make_sampler(definition, mesh)

    def compile_jobs(self, parameters: Any) -> list[Callable[[], None]]:
        """Lowers both functions here; each returned job compiles one, for use from threads."""
        loss = self._loss.lower(*self._loss_arguments(parameters, 0.5, CONDITION_FRAMES))
        sample = self._sample.lower(*self._sample_arguments(parameters, 1.0, CONDITION_FRAMES))

        def compile_loss():
            self._loss = loss.compile()

        def compile_sample():
            self._sample = sample.compile()

        return [compile_loss, compile_sample]

    def losses(self, parameters: Any, condition_frames: int) -> dict[str, float]:
        """Mean velocity error at each of `LOSS_TIMES`."""
        return {
            str(t): float(
                np.mean(self._loss(*self._loss_arguments(parameters, t, condition_frames)))
            )
            for t in LOSS_TIMES
        }

    def sample(
        self, parameters: Any, condition_frames: int, shift: float = sampler.DEFAULT_SHIFT
    ) -> UInt8[np.ndarray, "clips F height width 3"]:
        """Continuations of the first frames of every clip."""
        return np.asarray(
            self._sample(*self._sample_arguments(parameters, shift, condition_frames))
        )

    def _put(self, value: Any) -> Array:
        return jax.device_put(value, self._replicated)

    def _loss_arguments(self, parameters: Any, t: float, count: int) -> tuple[Any, ...]:
        scalars = self._put(jnp.float32(t)), self._put(jnp.int32(count))
        return parameters, self.clips, self.noise, *scalars

    def _sample_arguments(self, parameters: Any, shift: float, count: int) -> tuple[Any, ...]:
        times = self._put(sampler.time_grid(self.steps, shift))
        return parameters, self.clips, self.noise, times, self._put(jnp.int32(count))


def evaluate(
    held_out: HeldOut,
    parameters: Any,
    output: pathlib.Path,
    *,
    settings: Sequence[tuple[int, float]] = ((CONDITION_FRAMES, sampler.DEFAULT_SHIFT),),
    save_samples: int = 0,
) -> dict[str, Any]:
    """Samples all held-out clips and writes ``evaluation.json`` and ``contact_sheet.png``.

    Args:
      held_out: the clips.
      parameters: the model's parameters, placed on the mesh of ``held_out``.
      output: an existing folder.
      settings: pairs of condition frames and time shift to sample with; the first one is the
        default setting, which the contact sheet shows.
      save_samples: write so many of its clips, spread over all, to ``samples.npz``.

    Returns:
      What ``evaluation.json`` holds.
    """
    counts = sorted({count for count, _ in settings})
    report: dict[str, Any] = {
        "frames": f"{clip_statistics.FIRST_FRAME}-{held_out.real.shape[1] - 1}",
        "steps": held_out.steps,
        "clip_starts": [int(s) for s in held_out.starts],
        "velocity_mse": {str(count): held_out.losses(parameters, count) for count in counts},
        "samples": [],
    }
    for count, shift in settings:
        sampled = held_out.sample(parameters, count, shift)
        if not report["samples"]:
            write_comparison_sheet(output / "contact_sheet.png", held_out.real, sampled)
            if save_samples:
                kept = np.linspace(0, len(sampled) - 1, min(save_samples, len(sampled)))
                kept = kept.round().astype(int)
                np.savez_compressed(
                    output / "samples.npz", starts=held_out.starts[kept], sampled=sampled[kept]
                )
        report["samples"].append(
            {"shift": shift} | clip_statistics.compare_clips(sampled, held_out.real, count)
        )
        (output / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m vc_jax.models.training.evaluate", description=__doc__
    )
    parser.add_argument("--video", required=True, help="the film that the model was trained on")
    parser.add_argument("--output", required=True, type=pathlib.Path, help="folder to write")
    parser.add_argument("--weights", default=weights.SHIPPED_WEIGHTS, help="safetensors file")
    parser.add_argument("--clips", type=int, default=None, help="at most so many clips")
    parser.add_argument("--steps", type=int, default=sampler.DEFAULT_STEPS)
    arguments = parser.parse_args(argv)
    try:
        film = read_video(arguments.video, height=88, width=160)
        model = weights.load_video_dit(arguments.weights)
        arguments.output.mkdir(parents=True, exist_ok=True)
        split = film_module.split_film(film, film_module.BIG_BUCK_BUNNY_RANGES)
        mesh = data_mesh(jax.devices())
        starts = moving_clips(film, split.held_out_clips, limit=arguments.clips, multiple=mesh.size)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    definition, parameters = nnx.split(model, nnx.Param)
    held_out = HeldOut(film, starts, mesh, definition, steps=arguments.steps)
    parameters = jax.device_put(parameters, NamedSharding(mesh, _EVERYWHERE))
    report = evaluate(held_out, parameters, arguments.output)
    print_report(report)
    return 0


def print_report(report: dict[str, Any]) -> None:
    """Prints the main numbers of `evaluate`."""
    for count, losses in report["velocity_mse"].items():
        values = " ".join(f"{t}: {loss:.4f}" for t, loss in losses.items())
        print(f"held-out velocity MSE, {count} condition frame(s): {values}")
    for entry in report["samples"]:
        print(
            f"{entry['clips']} clips, {entry['condition_frames']} condition frame(s), "
            f"shift {entry['shift']}: frame-difference energy "
            f"{entry['frame_difference_energy_ratio']}, Laplacian variance "
            f"{entry['laplacian_variance_ratio']}, PSNR {entry['psnr_db']} dB "
            f"(last frame held: {entry['hold_psnr_db']} dB)",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
