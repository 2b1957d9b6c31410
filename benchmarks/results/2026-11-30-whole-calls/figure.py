"""Draws `speed.png` from `whole_calls.json`: speed over sequence length against BF16 kernels.

python benchmarks/results/2026-11-30-whole-calls/figure.py
"""

import json
import pathlib

import matplotlib.pyplot as plt

FOLDER = pathlib.Path(__file__).parent
LINES = {
    "fp8_40_steps": ("fp8, mean of 40 denoising steps", "C3", "-"),
    "fp8_call": ("fp8, one call", "C3", "--"),
    "int8_call": ("int8, one call", "C0", "--"),
}


def main() -> None:
    """Writes the figure beside the data."""
    run = json.loads((FOLDER / "whole_calls.json").read_text())
    rows = run["rows"]
    tokens = [row["tokens"] for row in rows]
    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    axes.axhspan(0, 1, color="0.5", alpha=0.15, lw=0)
    axes.axhline(1, color="0.3", lw=1)
    axes.text(75_600, 0.93, "slower than BF16", ha="right", va="top", color="0.3")
    for key, (label, colour, style) in LINES.items():
        axes.plot(tokens, [row[key] for row in rows], style, color=colour, marker="o", label=label)
    axes.set_xscale("log")
    axes.set_xticks(tokens, [f"{row['tokens']:,}\n× {row['heads']}" for row in rows])
    axes.minorticks_off()
    axes.set(xlabel="tokens × heads", ylabel="speed, × BF16", ylim=(0, 2.1))
    axes.set_title(
        f"{run['device']}, {run['date']}, JAX {run['jax']}; BF16 = {run['bf16']}", fontsize=8
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(FOLDER / "speed.png", dpi=110)


if __name__ == "__main__":
    main()
