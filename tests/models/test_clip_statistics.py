"""Motion and sharpness of samples in relation to real clips."""

import numpy as np
import pytest

from vc_jax.models.training import clip_statistics as stats


@pytest.fixture
def clips() -> np.ndarray:
    rng = np.random.default_rng(0)
    texture = rng.integers(0, 256, (3, 20, 60, 3))
    frames = [texture[:, :, i : i + 30] for i in range(16)]
    return np.stack(frames, axis=1).astype(np.uint8)


def test_clips_equal_to_the_real_ones_have_ratio_one(clips):
    report = stats.compare_clips(clips, clips, 4)
    for name in ("frame_difference_energy_ratio", "laplacian_variance_ratio"):
        assert set(report[name].values()) == {1.0}
    assert report["psnr_db"] == 100.0
    assert report["hold_psnr_db"] < 20.0


def test_frozen_clips_have_no_motion_energy(clips):
    frozen = np.repeat(clips[:, :1], 16, axis=1)
    np.testing.assert_array_equal(stats.frame_difference_energy(frozen), 0)


def test_energy_is_the_mean_square_of_the_differences():
    clip = np.zeros((1, 16, 4, 4, 3), np.uint8)
    clip[:, 8::2] = 3
    np.testing.assert_allclose(stats.frame_difference_energy(clip), 9.0)


def test_blur_lowers_the_laplacian_variance(clips):
    blurred = clips.astype(np.float32)
    blurred[:, :, :, 1:] = 0.5 * (blurred[:, :, :, 1:] + blurred[:, :, :, :-1])
    ratio = stats.laplacian_variance(blurred.astype(np.uint8)) / stats.laplacian_variance(clips)
    assert np.all(ratio < 0.7)


def test_laplacian_of_a_known_image():
    """One bright pixel c on black: responses -4c once and c at its four neighbours."""
    clip = np.zeros((1, 16, 12, 12, 3), np.uint8)
    clip[:, :, 6, 6] = 100
    responses = np.zeros(100)
    responses[:5] = [-400, 100, 100, 100, 100]
    np.testing.assert_allclose(stats.laplacian_variance(clip), responses.var(), rtol=1e-5)


def test_frames_before_the_ninth_do_not_count(clips):
    changed = clips.copy()
    changed[:, :8] = 0
    np.testing.assert_array_equal(
        stats.frame_difference_energy(changed), stats.frame_difference_energy(clips)
    )
    np.testing.assert_array_equal(
        stats.laplacian_variance(changed), stats.laplacian_variance(clips)
    )


def test_summary_gives_mean_median_and_ratio_of_means():
    summary = stats.ratios(np.array([1.0, 2.0, 30.0]), np.array([1.0, 1.0, 10.0]))
    assert summary == {
        "mean_over_clips": 2.0,
        "median_over_clips": 2.0,
        "ratio_of_means": 2.75,
    }
