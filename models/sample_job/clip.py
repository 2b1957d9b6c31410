"""The real video that a sampling run starts from."""

import dataclasses
import os
import pathlib

import numpy as np
from jaxtyping import UInt8

from ..common.video import read_video

SHIPPED_CLIP_CREDIT = (
    "Real clip: excerpt of “Big Buck Bunny”, © 2008 Blender Foundation, www.bigbuckbunny.org, "
    "Creative Commons Attribution 3.0"
)
_DATA = pathlib.Path(__file__).parents[1] / "data"


class InputError(ValueError):
    """What the user asked for cannot be done; the message is one line for them."""


@dataclasses.dataclass(frozen=True)
class Clip:
    """A real clip.

    Attributes:
      pixels: [F, height, width, 3].
      title: what it is, for people.
      credit: whose work it is, if it is not the user's own.
    """

    pixels: UInt8[np.ndarray, "F height width 3"]
    title: str
    credit: str | None


def shipped_clip_path() -> pathlib.Path:
    """The video that comes with the package.

    Raises:
      InputError: it is missing, as in a broken installation.
    """
    found = sorted(_DATA.glob("*.mp4"))
    if not found:
        raise InputError("the clip that ships with vc-jax is missing; pass --video FILE")
    return found[0]


def load_clip(
    video: pathlib.Path | None, frames: int, height: int, width: int, *, start: int = 0
) -> Clip:
    """Reads `frames` frames, scaled to cover the wanted size and cut out of the middle.

    Args:
      video: a file; `None` for the shipped clip.
      frames, height, width: the clip's size.
      start: frames to skip at the beginning.

    Raises:
      InputError: no such file, no video, too few frames, or OpenCV is not installed.
    """
    try:
        import cv2  # noqa: F401
    except ImportError:
        raise InputError(
            "reading video needs OpenCV: install vc-jax[video] or opencv-python-headless"
        ) from None
    path = shipped_clip_path() if video is None else video
    pixels = _quietly(path, height, width, frames, start)
    if len(pixels) < frames:
        after = f" after the first {start}" if start else ""
        raise InputError(
            f"{path} is too short: it has {len(pixels)} frames{after}, {frames} are needed"
        )
    if video is None:
        return Clip(pixels, "the clip that ships with vc-jax", SHIPPED_CLIP_CREDIT)
    return Clip(pixels, path.name, None)


def _quietly(
    path: pathlib.Path, height: int, width: int, max_frames: int, start: int
) -> UInt8[np.ndarray, "F height width 3"]:
    """Reads without the decoder's own messages, which would come before the one that we give."""
    import cv2

    if not path.is_file():
        raise InputError(f"no video file at {path}")
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    logging = cv2.utils.logging
    level = logging.setLogLevel(logging.LOG_LEVEL_SILENT)
    try:
        return read_video(path, height=height, width=width, max_frames=max_frames, start=start)
    except (OSError, ValueError, cv2.error) as error:
        raise InputError(f"cannot read {path} as a video") from error
    finally:
        logging.setLogLevel(level)


def to_model(pixels: UInt8[np.ndarray, "F height width 3"]) -> np.ndarray:
    """Bytes to float32 in [-1, 1] with a batch axis of one."""
    return (pixels.astype(np.float32) / 127.5 - 1.0)[None]
