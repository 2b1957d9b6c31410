"""What a sampling run is asked to do, and what of it cannot be done."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping

import jax

import vc_jax

from .clip import InputError

MESH_AXES = ("batch", "seq")
"""Of one clip with heads that are few and weights that are small."""
_PATCH_AND_TIME = "a video needs at least one frame to sample after its condition frames"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to sample; `None` takes the default of the device.

    Attributes:
      output: folder to write.
      video: file to take the clip from; `None`: the shipped clip.
      start: frames of the video to skip.
      attention: names of presets, in the report's order; BF16 runs in any case.
      steps: denoising steps.
      frames: length of the clip.
      condition: leading frames that are given.
      size: height and width in pixels.
      seed: of the noise.
      weights: a file of `save_weights`; `None`: the shipped weights.
      mesh: sizes of the axes `batch` and `seq`, of the clip and of its tokens; `None`: one device.
    """

    output: pathlib.Path
    video: pathlib.Path | None = None
    start: int = 0
    attention: tuple[str, ...] = tuple(vc_jax.PRESETS)
    steps: int | None = None
    frames: int = 16
    condition: int | None = None
    size: tuple[int, int] | None = None
    seed: int = 0
    weights: pathlib.Path | None = None
    mesh: Mapping[str, int] | None = None


def default_size() -> tuple[int, int]:
    """Height and width by device: the trained frame on a GPU, about half of it elsewhere."""
    return (88, 160) if jax.default_backend() == "gpu" else (48, 88)


def default_steps() -> int:
    """Denoising steps by device."""
    return 40 if jax.default_backend() == "gpu" else 8


def check_options(options: Options) -> None:
    """Refuses what can be known to be wrong before a model or a video is loaded.

    Raises:
      InputError: names the option and what it may be.
    """
    if not options.attention:
        raise InputError(f"attention must name at least one of {', '.join(vc_jax.PRESETS)}")
    unknown = [name for name in options.attention if name not in vc_jax.PRESETS]
    if unknown:
        raise InputError(
            f"unknown attention {unknown[0]!r}: choose from {', '.join(vc_jax.PRESETS)}"
        )
    if options.steps is not None and options.steps < 1:
        raise InputError(f"steps must be at least 1, got {options.steps}")
    if options.start < 0:
        raise InputError(f"start must be at least 0, got {options.start}")
    if not 0 <= options.seed < 2**32:
        raise InputError(f"seed must be in [0, 4294967295], got {options.seed}")
    if options.frames < 2:
        raise InputError(f"frames must be at least 2, got {options.frames}: {_PATCH_AND_TIME}")
    condition = options.condition
    if condition is not None and not 1 <= condition < options.frames:
        raise InputError(
            f"condition must be between 1 and {options.frames - 1} frames, got {condition}"
        )
    if options.mesh is not None:
        _check_mesh(options.mesh)


def _check_mesh(sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if name not in MESH_AXES:
            raise InputError(f"mesh must be of {' and '.join(MESH_AXES)}, got {name!r}")
        if size < 1:
            raise InputError(f"mesh {name} must be at least 1, got {size}")
    if sizes.get("batch", 1) != 1:
        raise InputError(f"mesh batch must be 1, as one clip is sampled, got {sizes['batch']}")
    needed, there = math.prod(sizes.values()), jax.device_count()
    if needed > there:
        raise InputError(f"mesh needs {needed} devices, this machine has {there}")
