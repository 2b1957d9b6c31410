"""Where the rows of a MiniMax-H3 sequence stand: order, modality tags, rotary positions.

The order is [text | keyframes | audio | video]. Positions are fractional: text rows count along
the time axis, and audio and video go on from there on one clock of 40 units a second. A latent
frame spans 5/3 units a pixel frame, of which it holds 1, 4, 4, 4, 4 in turn. Space is scaled to
32 units for the side of a square of the same area. Rules as in diffusers' packing for this model.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

MODALITIES = 3
"""Video, text, audio: tags 0, 1, 2."""

_UNITS_PER_FRAME = 5.0 / 3.0
_FRAMES_PER_LATENT = np.array([1, 4, 4, 4, 4], np.float64)
_SPATIAL_UNITS = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """A packed sequence of S rows.

    Attributes:
      positions: (t, h, w) of each row, float [S, 3].
      tags: modality of each row [S]; a keyframe's vision rows inside the text carry 0.
      text_indices, audio_indices, video_indices: places of the rows handed to the model.
      time_indices: for the sampler: 0 rows at the video's time (text too), 1 at the audio's,
        2 keyframe rows [S].
    """

    positions: np.ndarray
    tags: np.ndarray
    text_indices: np.ndarray
    audio_indices: np.ndarray
    video_indices: np.ndarray
    time_indices: np.ndarray


def packed_layout(
    text_tags: Sequence[int] | np.ndarray,
    grid: tuple[int, int, int],
    num_audio_latents: int,
    *,
    patch: tuple[int, int, int] = (1, 2, 2),
    keyframes: Sequence[str] = (),
    audio_channels: int = 2,
) -> PackedLayout:
    """The layout for text (and keyframes) to video and audio.

    Args:
      text_tags: 1 for each text row, 0 for a row of a keyframe's vision block.
      grid: latent frames, height and width, before patches.
      num_audio_latents: per audio channel; channels follow one another.
      patch: the model's patch.
      keyframes: `"first"` or `"last"` for each keyframe block, in order.
      audio_channels: 2 for stereo.

    Raises:
      ValueError: a grid that the patch does not divide, another keyframe name, or no rows of text,
        audio or video.
    """
    counts = {"num_audio_latents": num_audio_latents, "audio_channels": audio_channels}
    counts |= {"text_tags": len(text_tags), "grid": min(grid)}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}: expected at least one row, got {count}")
    if any(size % step for size, step in zip(grid, patch, strict=True)):
        raise ValueError(f"grid: {grid} is not divisible by the patch {patch}")
    unknown = sorted(set(keyframes) - {"first", "last"})
    if unknown:
        raise ValueError(f"keyframes: expected 'first' or 'last', got {unknown}")
    frames, height, width = grid
    text_tags = np.asarray(text_tags, np.int32)
    start = float(len(text_tags))
    spans = _UNITS_PER_FRAME * np.resize(_FRAMES_PER_LATENT, frames)
    area_side = np.sqrt(height * width)
    rows, columns = (
        _spatial_positions(size, step, area_side)
        for size, step in ((height, patch[1]), (width, patch[2]))
    )
    plane = np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)

    def at(times: np.ndarray) -> np.ndarray:
        """Positions of whole frames at the given times."""
        t = np.repeat(times, len(plane))
        return np.column_stack([t, np.tile(plane, (len(times), 1))])

    text = np.column_stack([np.arange(start), np.zeros((len(text_tags), 2))])
    anchors = {"first": start, "last": start + spans.sum() - _UNITS_PER_FRAME}
    key = at(np.array([anchors[name] for name in keyframes]))
    audio = np.zeros((audio_channels * num_audio_latents, 3))
    audio[:, 0] = np.tile(start + np.arange(num_audio_latents), audio_channels)
    # The first channel sits at the left edge of the picture, the others at the right.
    audio[:, 2] = columns[-1]
    audio[:num_audio_latents, 2] = columns[0]
    video = at(start + np.concatenate([[0.0], np.cumsum(spans[:-1])]))
    parts = (text, key, audio, video)
    ends = np.cumsum([len(part) for part in parts])
    indices = [np.arange(end - len(part), end) for part, end in zip(parts, ends, strict=True)]
    kinds = [(1, 0), (0, 2), (2, 1), (0, 0)]
    tags, times = (
        np.concatenate(
            [np.full(len(part), kind[column]) for part, kind in zip(parts, kinds, strict=True)]
        ).astype(np.int32)
        for column in range(2)
    )
    tags[: len(text_tags)] = text_tags
    return PackedLayout(
        positions=np.concatenate(parts),
        tags=tags,
        text_indices=indices[0],
        audio_indices=indices[2],
        video_indices=np.concatenate([indices[1], indices[3]]),
        time_indices=times,
    )


def _spatial_positions(size: int, step: int, area_side: float) -> np.ndarray:
    """`size / step` positions, centred, spaced evenly, without the right end."""
    ratio = size / area_side
    left = (1.0 - ratio) / 2.0
    return np.linspace(left, left + ratio, size // step, endpoint=False) * _SPATIAL_UNITS
