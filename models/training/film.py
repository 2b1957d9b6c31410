"""Reading a film and cutting it into training windows and held-out scenes.

A *shot* lies between two cuts; a *scene* is here a run of whole shots of at least 96 frames. Every
eighth scene is held out: no frame of it occurs in any training window.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int, UInt8

WINDOW = 16
_THUMBNAIL_STRIDE = 4
_SCENE_FRAMES = 96
_HELD_OUT_EVERY = 8
_HELD_OUT_FIRST = 6
_MIN_CONTRAST = 12.0

# "Big Buck Bunny" at 24 frames a second: pictures without a title, an opening credit or the closing
# credits lie in these ranges of frames.
BIG_BUCK_BUNNY_RANGES = ((285, 500), (780, 11727))


@dataclasses.dataclass(frozen=True)
class FilmSplit:
    """Where training windows may start and which stretches are held out.

    Attributes:
      train_starts: first frames of the training windows, int32.
      train_weights: probability of each of them, sums to 1.
      held_out: (start, stop) of each held-out scene.
      held_out_clips: first frames of held-out windows that neither overlap each other nor contain
        a cut or a nearly uniform frame.
    """

    train_starts: Int[np.ndarray, "windows"]
    train_weights: Float[np.ndarray, "windows"]
    held_out: tuple[tuple[int, int], ...]
    held_out_clips: Int[np.ndarray, "clips"]


def frame_changes(film: UInt8[np.ndarray, "frames h w 3"]) -> Float[np.ndarray, "frames_minus_1"]:
    """Mean absolute grey difference of each frame to the next, on every 4th pixel and row."""
    grey = _thumbnails(film)
    return np.abs(np.diff(grey, axis=0)).mean(axis=1)


def find_cuts(changes: Float[np.ndarray, "n"]) -> Int[np.ndarray, "cuts"]:
    """First frames of shots: changes that are large and stand out from the twelve around them."""
    padded = np.pad(changes, 6, mode="reflect")
    around = np.lib.stride_tricks.sliding_window_view(padded, 13)
    usual = np.median(np.delete(around, 6, axis=1), axis=1)
    return np.flatnonzero((changes > 12.0) & (changes > 3.0 * usual + 4.0)) + 1


def split_film(
    film: UInt8[np.ndarray, "frames h w 3"],
    ranges: Sequence[tuple[int, int]],
    *,
    window: int = WINDOW,
) -> FilmSplit:
    """Splits the given ranges of a film into training windows and held-out scenes.

    Training windows contain no cut and no nearly uniform frame. Half the frames of a film hardly
    move, so a window is drawn with a probability that grows with the root of its motion.
    """
    changes = frame_changes(film)
    cuts = find_cuts(changes)
    contrast = _thumbnails(film).std(axis=1)
    scenes = [scene for start, stop in ranges for scene in _scenes(cuts, start, stop)]
    held_out = tuple(scenes[_HELD_OUT_FIRST::_HELD_OUT_EVERY])
    kept = [scene for scene in scenes if scene not in held_out]

    none = np.zeros(0, int)
    starts = np.concatenate([none, *(_windows(scene, cuts, window, 1) for scene in kept)])
    clips = np.concatenate([none, *(_windows(scene, cuts, window, window) for scene in held_out)])
    starts, clips = (
        some[np.array([contrast[s : s + window].min() > _MIN_CONTRAST for s in some], bool)]
        for some in (starts, clips)
    )
    if not len(starts) or not len(clips):
        raise ValueError(
            f"the film is too short or too uniform to split: {len(scenes)} scenes, "
            f"{len(starts)} training windows, {len(clips)} held-out clips"
        )
    motion = np.array([changes[s : s + window - 1].mean() for s in starts])
    weights = np.sqrt(np.clip(motion, 0.3, 6.0))
    return FilmSplit(
        starts.astype(np.int32), weights / weights.sum(), held_out, clips.astype(np.int32)
    )


def _thumbnails(film: np.ndarray) -> np.ndarray:
    small = film[:, ::_THUMBNAIL_STRIDE, ::_THUMBNAIL_STRIDE].astype(np.float32)
    return small.mean(axis=-1).reshape(len(film), -1)


def _scenes(cuts: np.ndarray, start: int, stop: int) -> list[tuple[int, int]]:
    """Whole shots of [start, stop), joined until a scene is long enough."""
    edges = [start, *(int(c) for c in cuts if start < c < stop), stop]
    scenes = [start]
    for edge in edges[1:]:
        if edge - scenes[-1] >= _SCENE_FRAMES or edge == stop:
            scenes.append(edge)
    return list(itertools.pairwise(scenes))


def _windows(scene: tuple[int, int], cuts: np.ndarray, window: int, stride: int) -> np.ndarray:
    """Starts of the windows of a scene that lie within one shot, at a stride from its first."""
    start, stop = scene
    edges = [start, *(int(c) for c in cuts if start < c < stop), stop]
    parts = [np.arange(a, b - window + 1, stride) for a, b in itertools.pairwise(edges)]
    return np.concatenate(parts)
