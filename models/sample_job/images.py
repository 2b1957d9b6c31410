"""Pictures of a sampling run: animation, contact sheet, and frames for the page.

Clips are bytes [F, height, width, 3], RGB.
"""

import base64
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import UInt8

Clip = UInt8[np.ndarray, "F height width 3"]
Image = UInt8[np.ndarray, "height width 3"]

FRAMES_PER_SECOND = 8
DIFFERENCE_GAIN = 8
"""Factor by which the pictures of differences are brightened."""

_PANEL_WIDTH = 240
_MARGIN = 8
_LABEL_HEIGHT = 26
_PAPER, _INK = 255, 40


def to_bytes(video: np.ndarray) -> np.ndarray:
    """Pixels in [-1, 1] to bytes, rounded and clipped; NaN is black."""
    levels = np.rint((np.nan_to_num(video, nan=-1.0) + 1.0) * 127.5)
    return np.clip(levels, 0, 255).astype(np.uint8)


def difference(clip: Clip, reference: Clip) -> Clip:
    """|clip - reference|, brightened by `DIFFERENCE_GAIN`."""
    distance = np.abs(clip.astype(np.int16) - reference.astype(np.int16)) * DIFFERENCE_GAIN
    return np.minimum(distance, 255).astype(np.uint8)


def frames_uri(clip: Clip) -> str:
    """All frames, one below the other, as a lossless data URI."""
    data = _encode(clip.reshape(-1, *clip.shape[2:]))
    return "data:image/png;base64," + base64.b64encode(data).decode()


def write_animation(path: pathlib.Path, clips: Mapping[str, Clip]) -> None:
    """Writes the labelled clips side by side as an endless GIF."""
    import cv2

    names, videos = list(clips), [enlarge(clip) for clip in clips.values()]
    head = _row([_label(name, videos[0].shape[2]) for name in names])
    animation = cv2.Animation()
    animation.frames = [
        _bgr(np.concatenate([head, _row(list(frames)), _blank(_MARGIN, head.shape[1])]))
        for frames in zip(*videos)
    ]
    animation.durations = [1000 // FRAMES_PER_SECOND] * len(videos[0])
    # A palette of its own for every frame and no dithering, which would bury small differences.
    options = [cv2.IMWRITE_GIF_QUALITY, 8, cv2.IMWRITE_GIF_DITHER, 3, cv2.IMWRITE_GIF_COLORTABLE, 1]
    if not cv2.imwriteanimation(str(path), animation, options):
        raise OSError(f"cannot write {path}")


def write_contact_sheet(path: pathlib.Path, clips: Mapping[str, Clip], *, columns: int = 8) -> None:
    """Writes a PNG with a row a clip and a column a frame, frames spread over the clip."""
    count = len(next(iter(clips.values())))
    shown = np.unique(np.linspace(0, count - 1, min(columns, count)).round().astype(int))
    rows = []
    for name, clip in clips.items():
        frames = enlarge(clip[shown])
        label = _label(name, 150, height=frames.shape[1])
        rows += [_row([label, *frames]), _blank(_MARGIN, _row([label, *frames]).shape[1])]
    frames = enlarge(next(iter(clips.values()))[:1])
    head = _row([_label("", 150), *(_label(f"frame {i}", frames.shape[2]) for i in shown)])
    path.write_bytes(_encode(np.concatenate([head, *rows])))


def enlarge(clip: Clip) -> Clip:
    """The clip with every pixel repeated, so that frames are about 240 pixels wide."""
    factor = max(1, round(_PANEL_WIDTH / clip.shape[2]))
    return clip.repeat(factor, 1).repeat(factor, 2)


def _blank(height: int, width: int) -> Image:
    return np.full((height, width, 3), _PAPER, np.uint8)


def _row(panels: Sequence[Image]) -> Image:
    gap = _blank(panels[0].shape[0], _MARGIN)
    return np.concatenate([gap, *(part for panel in panels for part in (panel, gap))], 1)


def _label(text: str, width: int, *, height: int = _LABEL_HEIGHT) -> Image:
    import cv2

    # OpenCV draws ASCII only.
    text = text.replace("×", "x").replace("−", "-")
    image, scale = _blank(height, width), 0.5
    font, thickness = cv2.FONT_HERSHEY_SIMPLEX, 1
    (text_width, text_height), _ = cv2.getTextSize(text, font, scale, thickness)
    if text_width > width - 4:
        scale *= (width - 4) / text_width
    place = (2, (height + text_height) // 2)
    cv2.putText(image, text, place, font, scale, (_INK,) * 3, thickness, cv2.LINE_AA)
    return image


def _bgr(image: Image) -> Image:
    return np.ascontiguousarray(image[..., ::-1])


def _encode(image: Image) -> bytes:
    import cv2

    # Level 9 makes files 2 % smaller and takes eight times as long.
    done, data = cv2.imencode(".png", _bgr(image), [cv2.IMWRITE_PNG_COMPRESSION, 6])
    if not done:
        raise OSError("cannot encode a PNG")
    return data.tobytes()
