import numpy as np
import pytest

from vc_jax.models.sample_job.measures import PSNR_LIMIT, psnr, relative_l2, ssim, unit_pixels
from vc_jax.models.sample_job.record import errors_of_steps

RANDOM = np.random.default_rng(0)
VIDEO = RANDOM.uniform(0, 1, (2, 24, 30, 3))


def direct_ssim(got, want):
    """SSIM of one channel of one frame from its definition, window by window."""
    offset = np.arange(11) - 5
    weights = np.exp(-(offset[:, None] ** 2 + offset[None] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    values = []
    for row in range(got.shape[0] - 10):
        for column in range(got.shape[1] - 10):
            a = got[row : row + 11, column : column + 11]
            b = want[row : row + 11, column : column + 11]
            mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
            var_a = (weights * (a - mean_a) ** 2).sum()
            var_b = (weights * (b - mean_b) ** 2).sum()
            covariance = (weights * (a - mean_a) * (b - mean_b)).sum()
            values.append(
                (2 * mean_a * mean_b + 1e-4)
                * (2 * covariance + 9e-4)
                / ((mean_a**2 + mean_b**2 + 1e-4) * (var_a + var_b + 9e-4))
            )
    return np.mean(values)


def test_ssim_is_its_definition_averaged_over_frames_and_channels():
    other = np.clip(VIDEO + RANDOM.normal(0, 0.2, VIDEO.shape), 0, 1)
    expected = np.mean(
        [direct_ssim(other[f, ..., c], VIDEO[f, ..., c]) for f in range(2) for c in range(3)]
    )
    assert ssim(other, VIDEO) == pytest.approx(expected, rel=1e-9)


def test_ssim_of_equal_videos_is_one():
    assert ssim(VIDEO, VIDEO) == pytest.approx(1.0)


def test_ssim_of_flat_frames_is_the_luminance_term():
    low, high = np.full((1, 16, 16, 1), 0.2), np.full((1, 16, 16, 1), 0.6)
    expected = (2 * 0.2 * 0.6 + 1e-4) / (0.2**2 + 0.6**2 + 1e-4)
    assert ssim(low, high) == pytest.approx(expected)


def test_ssim_of_a_negative_image_is_negative():
    assert ssim(1.0 - VIDEO, VIDEO) < -0.5


def test_ssim_falls_with_noise():
    noisy = [VIDEO + RANDOM.normal(0, s, VIDEO.shape) for s in (0.02, 0.1, 0.3)]
    values = [ssim(x, VIDEO) for x in noisy]
    assert values == sorted(values, reverse=True)
    assert values[0] > 0.95


@pytest.mark.parametrize("size", [4, 7, 8, 12])
def test_ssim_takes_frames_smaller_than_the_window(size):
    small = VIDEO[:, :size, :size]
    assert ssim(small, small) == pytest.approx(1.0)
    assert ssim(small, small[:, ::-1]) < 1.0


def test_psnr_of_a_constant_offset():
    assert psnr(VIDEO + 0.1, VIDEO) == pytest.approx(20.0)


def test_psnr_of_equal_videos_is_the_limit():
    assert psnr(VIDEO, VIDEO) == PSNR_LIMIT


def test_relative_l2_of_a_scaled_video_is_the_scale():
    assert relative_l2(1.25 * VIDEO, VIDEO) == pytest.approx(0.25)


def test_relative_l2_of_zeros():
    zeros = np.zeros(3)
    assert relative_l2(zeros, zeros) == 0.0
    assert relative_l2(zeros + 1, zeros) == np.inf


def test_pixels_are_clipped_like_on_a_screen():
    assert unit_pixels(np.array([-3.0, -1.0, 0.0, 1.0, 2.0])).tolist() == [0, 0, 0.5, 1, 1]


@pytest.mark.parametrize("measure", [psnr, ssim])
def test_videos_of_other_shapes_are_refused(measure):
    with pytest.raises(ValueError, match="of one shape"):
        measure(VIDEO, VIDEO[:1])


def test_errors_of_steps_are_those_of_the_sampled_frames_alone():
    want = RANDOM.normal(size=(4, 1, 5, 8, 12, 3)).astype(np.float32)
    got = want + RANDOM.normal(size=want.shape).astype(np.float32)
    got[1, :, 2:] = want[1, :, 2:]  # differs in the given frames only
    want[2, :, 2:] = 0.0
    got[3, 0, 4, 0, 0, 0] = np.nan
    errors = errors_of_steps(got, want, 2)
    assert errors[0] == pytest.approx(relative_l2(got[0, 0, 2:], want[0, 0, 2:]), rel=1e-5)
    assert errors[1:3] == [0.0, np.inf]
    assert np.isnan(errors[3])
