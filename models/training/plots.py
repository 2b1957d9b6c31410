"""Pictures of a training: contact sheet and loss curve."""

import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

Clips = UInt8[np.ndarray, "N F height width 3"]

SHEET_BYTES = 600_000
_SHEET_FRAMES = (3, 5, 7, 9, 12, 15)


def comparison_sheet(
    real: Clips, sampled: Clips, frames: Sequence[int] = _SHEET_FRAMES
) -> UInt8[np.ndarray, "height width 3"]:
    """Two rows of frames a clip: real above, sampled below, with a gap after each pair."""
    rows = []
    for pair in zip(real, sampled, strict=True):
        for clip in pair:
            rows.append(np.concatenate([clip[f] for f in frames if f < len(clip)], axis=1))
        rows.append(np.full((4, *rows[-1].shape[1:]), 255, np.uint8))
    return np.concatenate(rows[:-1], axis=0)


def write_comparison_sheet(
    path: str | pathlib.Path, real: Clips, sampled: Clips, *, clips: int = 6
) -> int:
    """Writes a sheet of clips spread over the set as a PNG of 256 colours.

    Takes fewer clips if the file would be larger than `SHEET_BYTES`.

    Returns:
      How many clips the sheet shows.
    """
    from PIL import Image

    for count in range(min(clips, len(real)), 0, -1):
        shown = np.linspace(0, len(real) - 1, count + 2).round().astype(int)[1:-1]
        if count >= len(real):
            shown = np.arange(len(real))
        image = Image.fromarray(comparison_sheet(real[shown], sampled[shown]))
        palette = image.quantize(256, method=Image.Quantize.MEDIANCUT, kmeans=2)
        image = image.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG)
        image.save(path, optimize=True)
        if pathlib.Path(path).stat().st_size <= SHEET_BYTES:
            return count
    return 1


def write_loss_curve(
    path: str | pathlib.Path,
    steps: Sequence[int],
    losses: Sequence[float],
    held_out: Sequence[tuple[int, float]],
    stage_change: int | None = None,
) -> None:
    """Training loss (mean of each logged stretch) and held-out loss over steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(steps, losses, linewidth=0.8, label="training, mean over the steps of one call")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", markersize=3, label="held-out scenes")
    if stage_change is not None:
        axes.axvline(stage_change, color="grey", linestyle=":", label="from crops to full frames")
    axes.set_yscale("log")
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("velocity error (mean square)")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
