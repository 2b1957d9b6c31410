"""The numbers of a sampling run as one JSON document; the page shows nothing else."""

import dataclasses
import datetime
import functools
import importlib.metadata
import math
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

import vc_jax

from .clip import Clip
from .measures import psnr, relative_l2, ssim, unit_pixels
from .methods import REFERENCE, BlockMeanEnergy, Outcome, Path, Task, Videos
from .options import Options

FORMAT = 1
"""Version of the document's structure."""


def make_record(
    options: Options,
    task: Task,
    clip: Clip,
    outcomes: Mapping[str, Outcome],
    energy: Sequence[BlockMeanEnergy],
) -> dict[str, Any]:
    """Everything that was measured, ready for `json.dumps`; what is not finite is `None`."""
    config = task.model.config
    reference = outcomes[REFERENCE].path
    record = {
        "format": FORMAT,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device(),
        "versions": versions(),
        "clip": {
            "title": clip.title,
            "credit": clip.credit,
            "start": options.start,
            "frames": clip.pixels.shape[0],
            "height": clip.pixels.shape[1],
            "width": clip.pixels.shape[2],
            "condition_frames": task.condition,
        },
        "model": {
            "weights": options.weights.name if options.weights else "shipped",
            "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(task.model, nnx.Param))),
            **dataclasses.asdict(config),
            "tokens": task.tokens,
        },
        "sampling": {
            "seed": options.seed,
            "mesh": None if options.mesh is None else dict(options.mesh),
            "steps": task.steps,
            "times": [float(t) for t in task.times],
            "smoothing_steps": task.schedule.smoothing_steps,
            "refresh_steps": list(task.schedule.refresh_steps),
        },
        "reference": REFERENCE,
        "methods": {
            name: _method(task, clip, outcome, reference) for name, outcome in outcomes.items()
        },
        "block_mean_energy": {
            "clusters": vc_jax.default_clusters(task.tokens),
            "points": [
                {
                    "step": point.step,
                    "time": point.time,
                    "sequence": point.sequence.tolist(),
                    "sorted": point.sorted.tolist(),
                }
                for point in energy
            ],
        },
    }
    return _finite(record)


def _method(task: Task, clip: Clip, outcome: Outcome, reference: Path) -> dict[str, Any]:
    method, first = outcome.method, task.condition
    sample = np.asarray(outcome.path.final[0])[first:]
    real = np.asarray(task.pixels[0])[first:]
    record: dict[str, Any] = {
        "config": dataclasses.asdict(method.config),
        "implementation": method.explanation.implementation,
        "other_implementations": method.explanation.reasons,
        "finite": bool(np.isfinite(sample).all()),
        "traces": method.traces,
        "refresh_steps": list(method.refresh_steps),
        "seconds": {
            "compile": method.compile_seconds,
            "sample": outcome.sample_seconds,
            "on_reference_path": outcome.follow_seconds,
        },
        "to_real_clip": _closeness(sample, real),
        "to_reference": None,
        "velocity_error": None,
        "path_error": None,
    }
    if outcome.velocities is not None:
        record["to_reference"] = _closeness(sample, np.asarray(reference.final[0])[first:])
        record["velocity_error"] = errors_of_steps(outcome.velocities, reference.velocities, first)
        record["path_error"] = errors_of_steps(outcome.path.videos, reference.videos, first)
    return record


def _closeness(video: np.ndarray, other: np.ndarray) -> dict[str, float]:
    if not (np.isfinite(video).all() and np.isfinite(other).all()):
        # On a screen both are black where they are not finite: equal, as it were.
        return dict.fromkeys(("psnr_db", "ssim", "relative_l2"), math.nan)
    pixels, wanted = unit_pixels(video), unit_pixels(other)
    return {
        "psnr_db": psnr(pixels, wanted),
        "ssim": ssim(pixels, wanted),
        "relative_l2": relative_l2(video, other),
    }


def errors_of_steps(got: Videos, want: Videos, first: int) -> list[float]:
    """Relative L2 at every step over the frames that are sampled."""
    return np.asarray(_relative_l2_of_steps(got, want, first)).tolist()


@functools.partial(jax.jit, static_argnames="first")
def _relative_l2_of_steps(got: Videos, want: Videos, first: int) -> Float[Array, "steps"]:
    """`relative_l2` of the frames from `first` at every step, on the device that holds them."""
    got, want = got[:, 0, first:], want[:, 0, first:]

    def norm(videos):
        return jnp.sqrt(jnp.sum(videos * videos, axis=(1, 2, 3, 4)))

    error = norm(got - want)
    return jnp.where(error == 0, 0.0, error / norm(want))


def device() -> dict[str, Any]:
    """What JAX runs on."""
    kind = jax.devices()[0].device_kind
    return {
        "platform": jax.default_backend(),
        "kind": processor_name() if kind == "cpu" else kind,
        "count": jax.device_count(),
        "cpu_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
    }


def processor_name() -> str:
    """The processor's name as the system tells it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of what computes."""
    return {
        "vc_jax": vc_jax.__version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "flax": flax.__version__,
        "numpy": np.__version__,
    }


def _finite(value: Any) -> Any:
    """The document without infinities and NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
