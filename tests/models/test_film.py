"""Cutting a film into training windows and held-out scenes."""

import numpy as np
import pytest

from vc_jax.models.common.video import read_video
from vc_jax.models.training import film


def made_up_film(shots: int = 40, frames: int = 60, seed: int = 0) -> np.ndarray:
    """Shots of a drifting random texture; neighbouring shots differ strongly."""
    rng = np.random.default_rng(seed)
    parts = []
    for shot in range(shots):
        texture = rng.integers(0, 120, (24, 140, 3)) + (shot % 2) * 120
        parts += [texture[:, i : i + 40] for i in range(frames)]
    return np.stack(parts).astype(np.uint8)


@pytest.fixture(scope="module")
def movie() -> np.ndarray:
    return made_up_film()


@pytest.fixture(scope="module")
def split(movie) -> film.FilmSplit:
    return film.split_film(movie, [(0, len(movie))])


def smooth_drift(frames: int) -> np.ndarray:
    """Stripes of a sine that drift by half a pixel a frame."""
    phase = (np.arange(40)[None] + 0.5 * np.arange(frames)[:, None]) * (2 * np.pi / 40)
    stripes = 120 + 60 * np.sin(phase)
    return (stripes[:, None, :, None] * np.ones((24, 1, 3))).astype(np.uint8)


def test_cuts_are_found_where_shots_meet():
    one, other = smooth_drift(50), 255 - smooth_drift(50)
    changes = film.frame_changes(np.concatenate([one, other, one]))
    np.testing.assert_array_equal(film.find_cuts(changes), [50, 100])


def test_steady_fast_motion_is_no_cut():
    assert len(film.find_cuts(np.full(100, 30.0))) == 0


def test_training_windows_share_no_frame_with_held_out_scenes(movie, split):
    used = np.zeros(len(movie), bool)
    for start in split.train_starts:
        used[start : start + film.WINDOW] = True
    assert len(split.held_out) >= 2
    for start, stop in split.held_out:
        assert not used[start:stop].any()


def test_held_out_scenes_are_spread_and_a_small_part(movie, split):
    frames = sum(stop - start for start, stop in split.held_out)
    assert 0.05 < frames / len(movie) < 0.25
    gaps = np.diff([start for start, _ in split.held_out])
    assert gaps.min() > 300


def test_no_window_or_clip_contains_a_cut(movie, split):
    cuts = film.find_cuts(film.frame_changes(movie))
    for start in (*split.train_starts, *split.held_out_clips):
        assert not np.any((cuts > start) & (cuts < start + film.WINDOW))


def test_held_out_clips_lie_in_held_out_scenes_and_do_not_overlap(split):
    assert np.diff(split.held_out_clips).min() >= film.WINDOW
    for start in split.held_out_clips:
        assert any(a <= start and start + film.WINDOW <= b for a, b in split.held_out)


def test_frames_outside_the_ranges_are_never_used(movie):
    split = film.split_film(movie, [(100, 900), (1000, 2300)])
    for start in (*split.train_starts, *split.held_out_clips):
        stop = start + film.WINDOW
        assert (start >= 100 and stop <= 900) or (start >= 1000 and stop <= 2300)


def test_moving_windows_are_drawn_more_often():
    still = np.repeat(made_up_film(1, 1, seed=3), 600, axis=0)
    moving = np.concatenate(
        [smooth_drift(100) if i % 2 else 255 - smooth_drift(100) for i in range(10)]
    )
    split = film.split_film(np.concatenate([still, moving]), [(0, 1600)])
    in_still = split.train_starts < 580
    assert split.train_weights[~in_still].mean() > 1.5 * split.train_weights[in_still].mean()
    assert split.train_weights.sum() == pytest.approx(1.0)


def test_a_film_that_is_too_short_is_an_error():
    with pytest.raises(ValueError, match="too short"):
        film.split_film(made_up_film(4), [(0, 240)])


def test_unreadable_videos_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.mp4"):
        read_video(tmp_path / "none.mp4", height=8, width=8)


@pytest.mark.filterwarnings("ignore")
def test_a_file_that_is_no_video_is_an_error(tmp_path):
    path = tmp_path / "text.mp4"
    path.write_text("no video")
    with pytest.raises(ValueError, match="cannot decode"):
        read_video(path, height=8, width=8)


def write_video(path, frames) -> None:
    cv2 = pytest.importorskip("cv2")
    height, width = frames.shape[1:3]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 24, (width, height))
    for frame in frames:
        writer.write(np.ascontiguousarray(frame[:, :, ::-1]))
    writer.release()


def test_videos_come_back_as_rgb_of_the_size_asked_for(tmp_path):
    frames = np.zeros((6, 90, 160, 3), np.uint8)
    frames[..., 0] = 200
    write_video(tmp_path / "red.avi", frames)
    read = read_video(tmp_path / "red.avi", height=88, width=160)
    assert read.shape == (6, 88, 160, 3)
    assert read[..., 0].mean() > 150 > 60 > read[..., 2].mean()
    small = read_video(tmp_path / "red.avi", height=32, width=32, max_frames=2)
    assert small.shape == (2, 32, 32, 3)
