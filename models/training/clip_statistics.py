"""What samples are held to: motion and sharpness in relation to the real clips.

All statistics are of 8-bit clips [N, F, height, width, 3], one number a clip.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

# Frames (counted from 0) in which an undertrained model smears.
FIRST_FRAME = 9

_GREY = np.array([0.299, 0.587, 0.114], np.float32)

Clips = UInt8[np.ndarray, "N F height width 3"]


def frame_difference_energy(clips: Clips, first: int = FIRST_FRAME) -> Float[np.ndarray, "N"]:
    """Mean squared difference of each frame from ``first`` on to the one before it."""
    difference = np.diff(clips[:, first - 1 :].astype(np.float32), axis=1)
    return np.square(difference).mean(axis=(1, 2, 3, 4))


def laplacian_variance(clips: Clips, first: int = FIRST_FRAME) -> Float[np.ndarray, "N"]:
    """Variance of the 4-neighbour Laplacian of the grey frames from ``first`` on, mean over them.

    A usual measure of focus: blur removes the high frequencies that it counts.
    """
    grey = clips[:, first:].astype(np.float32) @ _GREY
    centre = grey[..., 1:-1, 1:-1]
    vertical = grey[..., :-2, 1:-1] + grey[..., 2:, 1:-1]
    horizontal = grey[..., 1:-1, :-2] + grey[..., 1:-1, 2:]
    return (vertical + horizontal - 4.0 * centre).var(axis=(-2, -1)).mean(axis=1)


def psnr_by_clip(
    clips: Clips, reference: Clips, first: int = FIRST_FRAME
) -> Float[np.ndarray, "N"]:
    """Peak signal-to-noise ratio in dB over the frames from ``first`` on, at most 100."""
    error = clips[:, first:].astype(np.float32) - reference[:, first:].astype(np.float32)
    squared = np.square(error).mean(axis=(1, 2, 3, 4))
    return 10.0 * np.log10(255.0**2 / np.maximum(squared, 255.0**2 * 1e-10))


def ratios(sampled: Float[np.ndarray, "N"], real: Float[np.ndarray, "N"]) -> dict[str, float]:
    """Sampled over real: mean and median of the clips' ratios, and the ratio of the means."""
    each = sampled / real
    return {
        "mean_over_clips": round(float(each.mean()), 4),
        "median_over_clips": round(float(np.median(each)), 4),
        "ratio_of_means": round(float(sampled.mean() / real.mean()), 4),
    }


def compare_clips(sampled: Clips, real: Clips, condition_frames: int) -> dict[str, Any]:
    """All numbers of a set of samples against the real clips, ready for JSON.

    ``hold_psnr`` is that of repeating the last condition frame: what a model must beat to have
    predicted any motion.
    """
    last = real[:, condition_frames - 1 : condition_frames]
    held = np.repeat(last, real.shape[1], axis=1)
    energy, real_energy = frame_difference_energy(sampled), frame_difference_energy(real)
    sharp, real_sharp = laplacian_variance(sampled), laplacian_variance(real)
    return {
        "clips": len(real),
        "condition_frames": condition_frames,
        "frame_difference_energy_ratio": ratios(energy, real_energy),
        "laplacian_variance_ratio": ratios(sharp, real_sharp),
        "psnr_db": round(float(psnr_by_clip(sampled, real).mean()), 3),
        "hold_psnr_db": round(float(psnr_by_clip(held, real).mean()), 3),
        "per_clip": {
            "frame_difference_energy": [round(float(x), 2) for x in energy],
            "real_frame_difference_energy": [round(float(x), 2) for x in real_energy],
            "laplacian_variance": [round(float(x), 1) for x in sharp],
            "real_laplacian_variance": [round(float(x), 1) for x in real_sharp],
        },
    }
