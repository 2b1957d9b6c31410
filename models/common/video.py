"""Reading a video file."""

import pathlib

import numpy as np
from jaxtyping import UInt8


def read_video(
    path: str | pathlib.Path,
    *,
    height: int,
    width: int,
    max_frames: int | None = None,
    start: int = 0,
) -> UInt8[np.ndarray, "frames height width 3"]:
    """Decodes a video file to RGB, scaled to cover height x width, cut out of the middle.

    Args:
      path: the file.
      height, width: in pixels.
      max_frames: how many frames to read; `None`: all. A shorter video gives fewer.
      start: frames to skip; they are never held in memory.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file cannot be decoded as a video.
    """
    import cv2

    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"no video file at {path}")
    capture = cv2.VideoCapture(str(path))
    frames = []
    try:
        skipped = 0
        while skipped < start and capture.grab():
            skipped += 1
        while skipped == start and (max_frames is None or len(frames) < max_frames):
            decoded, frame = capture.read()
            if not decoded:
                break
            frames.append(_cover(frame[:, :, ::-1], height, width))
    finally:
        capture.release()
    if not frames and not skipped:
        raise ValueError(f"cannot decode a video from {path}")
    return np.stack(frames) if frames else np.zeros((0, height, width, 3), np.uint8)


def _cover(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    import cv2

    scale = max(height / frame.shape[0], width / frame.shape[1])
    # A crop of a row or two, as from 160x90 to 160x88, is better than resampling every pixel.
    if not (frame.shape[0] - height in range(4) and frame.shape[1] - width in range(4)):
        size = (
            max(width, round(frame.shape[1] * scale)),
            max(height, round(frame.shape[0] * scale)),
        )
        frame = cv2.resize(np.ascontiguousarray(frame), size, interpolation=cv2.INTER_AREA)
    top = (frame.shape[0] - height) // 2
    left = (frame.shape[1] - width) // 2
    return frame[top : top + height, left : left + width]
