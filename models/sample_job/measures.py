"""How close two videos are: PSNR, SSIM and relative L2, of pixels.

Videos are [F, height, width, C]; `psnr` and `ssim` take pixels in [0, 1].
"""

import numpy as np
from jaxtyping import Float
from skimage.metrics import structural_similarity

Video = Float[np.ndarray, "F height width C"]

PSNR_LIMIT = 100.0
"""In dB; what `psnr` returns for equal videos."""

_SSIM_WINDOW = 11


def unit_pixels(video: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Pixels in [-1, 1] to [0, 1], float64, clipped as a screen clips them."""
    return np.clip((np.asarray(video, np.float64) + 1.0) / 2.0, 0.0, 1.0)


def relative_l2(got: Float[np.ndarray, "..."], want: Float[np.ndarray, "..."]) -> float:
    """|got - want| / |want|; 0 where both are zero, infinite where only `want` is."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error, size = np.linalg.norm(got - want), np.linalg.norm(want)
    if error == 0.0:
        return 0.0
    return float(error / size) if size else float("inf")


def psnr(got: Video, want: Video) -> float:
    """Peak signal-to-noise ratio over all frames in dB, at most `PSNR_LIMIT`."""
    _check(got, want)
    error = np.mean(np.square(np.asarray(got, np.float64) - np.asarray(want, np.float64)))
    return float(min(PSNR_LIMIT, -10.0 * np.log10(max(error, 1e-300))))


def ssim(got: Video, want: Video) -> float:
    """Structural similarity (Wang et al., 2004), mean over windows, channels and frames.

    Windows are 11x11 Gaussians of standard deviation 1.5 that lie wholly inside the frame, with
    population moments, K1 = 0.01 and K2 = 0.03. Frames of fewer than 11 pixels are mirrored at
    their edges.
    """
    _check(got, want)
    smallest = min(got.shape[1:3])
    similarities = [
        structural_similarity(
            np.asarray(a, np.float64),
            np.asarray(b, np.float64),
            win_size=min(_SSIM_WINDOW, smallest - 1 + smallest % 2),
            data_range=1.0,
            channel_axis=-1,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
        )
        for a, b in zip(got, want, strict=True)
    ]
    return float(np.mean(similarities))


def _check(got: np.ndarray, want: np.ndarray) -> None:
    if got.shape != want.shape or got.ndim != 4 or 0 in got.shape:
        raise ValueError(
            f"videos must be [F, height, width, C] of one shape, got {got.shape} and {want.shape}"
        )
