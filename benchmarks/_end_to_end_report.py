"""Tables and the figure of `vc-jax bench end-to-end`."""

import pathlib
from typing import Any

from ._amdahl import kind_counts
from ._programs import KINDS, MEMORY_PARTS, SCHEDULE
from ._results import markdown_table, pyplot, write_results
from ._video_models import VideoModel

_STEP_COLUMNS = (
    "step",
    "ms",
    "spread %",
    "speed-up",
    "kernel ×",
    "allowed",
    "of allowed",
    "attention %",
    "error %",
    "SM MHz",
    "W",
)
_CALL_COLUMNS = ("one layer", "ms", "TFLOP/s", "× BF16", "spread %", "SM MHz", "W")
_NOTES = """\
Random weights; batch 1, one conditional evaluation. Measured: every row but `40 steps`, which is
extrapolated: {counts}. `cold` clusters from scratch, `refresh` from the last centroids, `window`
smooths values in the stored order, `after` is past the smoothing window. `kernel ×`: bare BF16
kernel over bare low-bit kernel. `allowed`: Amdahl's law with that ratio and the share of attention
in the BF16 step; `of allowed`: the speed-up over it. `attention %`: attention calls, preparation
included, of the step. `error %`: relative L2 of the step's velocities against BF16. A time without
a spread was taken once; `cold` of a step longer than a round is its program's first execution."""


class EndToEndResults:
    """Collects the models' results and writes them after each: JSON, Markdown, a figure."""

    def __init__(self, folder: pathlib.Path, about: dict[str, Any]):
        self.folder, self.about = folder, about
        self.entries: dict[str, dict[str, Any]] = {}

    def add(self, model: VideoModel, entry: dict[str, Any], full_layers: int) -> str:
        """Take one model's results in, write all, and return this model's Markdown."""
        self.entries[model.name] = {
            "title": model.title,
            "what": model.what,
            "rows": model.rows,
            "heads": model.config.num_heads,
            "layers": model.config.num_layers,
            "full_layers": full_layers,
            **entry,
        }
        texts = [f"# End to end\n\n{self.about}\n\n{_NOTES.format(counts=_counts())}\n"]
        texts += [model_text(entry) for entry in self.entries.values()]
        report = {"environment": self.about, "models": self.entries}
        write_results(self.folder, "end-to-end", report, "\n".join(texts))
        plot(self.entries, self.folder / "end-to-end.png")
        return texts[-1]


def _counts() -> str:
    return ", ".join(f"{count} × {kind}" for kind, count in kind_counts(SCHEDULE).items())


def heading(entry: dict[str, Any]) -> str:
    """Title of a model, which says so when its depth was cut."""
    layers, full = entry["layers"], entry["full_layers"]
    cut = "" if layers == full else f", CUT TO {layers} OF {full} LAYERS"
    return f"{entry['title']}: {entry['rows']:,} rows{cut}"


def model_text(entry: dict[str, Any]) -> str:
    """Markdown of one model."""
    title = f"## {heading(entry)}\n\n{entry['what']}.\n"
    if "error" in entry:
        return f"{title}\nNot measured: {entry['error']}\n"
    parts = [title, step_table(entry), "", _rest_text(entry), "", call_table(entry), ""]
    return "\n".join([*parts, _memory_text(entry), ""])


def step_table(entry: dict[str, Any]) -> str:
    """Steps of every kind and the extrapolated schedule of every preset."""
    rows = {row["name"]: row for row in entry["steps"]}

    def cells(name: str, row: dict[str, Any], ratios: tuple[Any, ...]) -> tuple[Any, ...]:
        measured = (row["milliseconds"], _percent(row["spread"]))
        error = None if name == "bf16" else 100 * row["relative_l2"]
        label = name if row["finite"] else f"{name} (NOT FINITE)"
        return (label, *measured, *ratios, error, row["clock_mhz"], row["power_w"])

    some = next(iter(entry["summary"].values()), None)
    share = None if some is None else 100 * some["bf16_attention_share"]
    lines = [cells("bf16", rows["bf16"], (1.0, None, None, None, share))]
    for preset, found in entry["summary"].items():
        for kind in KINDS:
            name = f"{preset}, {kind}"
            lines.append(cells(name, rows[name], _ratios(found["steps"][kind])))
        mean = found["schedule"]
        label = f"{preset}, 40 steps (extrapolated, per step)"
        lines.append((label, mean["step_ms"], None, *_ratios(mean), None, None, None))
    return markdown_table(_STEP_COLUMNS, lines)


def _ratios(found: dict[str, float]) -> tuple[float, ...]:
    names = ("speedup", "kernel_ratio", "allowed", "of_allowed")
    return (*(found[name] for name in names), 100 * found["attention_share"])


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _rest_text(entry: dict[str, Any]) -> str:
    lines = []
    for preset, found in entry["summary"].items():
        if not lines:
            lines.append(
                f"BF16 step: {found['bf16_schedule_s']:.1f} s in 40 steps; outside of attention "
                f"{found['bf16_rest_ms']:,.0f} ms, of which matrix products would take "
                f"{found['matrix_products_ms']:,.0f} ms at the rate of the one below, everything "
                f"else {found['other_ms']:,.0f} ms (estimated)."
            )
        mean = found["schedule"]
        lines.append(
            f"`{preset}`: {found['schedule_s']:.1f} s in 40 steps (extrapolated), "
            f"{mean['speedup']:.3f}×; mean step: kernels {mean['kernel_ms']:,.0f} ms, attention "
            f"around them {mean['preparation_ms']:,.0f} ms, rest {mean['rest_ms']:,.0f} ms; "
            f"allowed with preparation counted as attention: {mean['allowed_by_call']:.3f}×."
        )
    return "\n\n".join(lines)


def call_table(entry: dict[str, Any]) -> str:
    """The attention call of one layer alone, and the bare kernels."""
    base = next(row["milliseconds"] for row in entry["attention"] if row["name"] == "bf16")

    def cells(row: dict[str, Any]) -> tuple[Any, ...]:
        name, product = row["name"], row["name"] == "matrix product"
        label = f"bf16: {entry['bf16_attention']}" if name == "bf16" else name
        label = "BF16 matrix product of a feed-forward's size" if product else label
        ratio = None if product else base / row["milliseconds"]
        times = (row["milliseconds"], row["teraflops"], ratio, _percent(row["spread"]))
        return (label, *times, row["clock_mhz"], row["power_w"])

    return markdown_table(_CALL_COLUMNS, [cells(row) for row in entry["attention"]])


def _memory_text(entry: dict[str, Any]) -> str:
    lines = [
        (
            name,
            *(entry["memory"][name][part] / 1e9 for part in MEMORY_PARTS),
            entry["compile_s"][name],
        )
        for name in entry["memory"]
        if name.endswith(("step", "weights"))
    ]
    table = markdown_table(
        ("program", "arguments GB", "results GB", "temporaries GB", "compile s"), lines
    )
    peak = entry["peak_bytes_so_far"]
    if peak is None:
        return table
    return f"{table}\n\nPeak of the device's memory in this run so far: {peak / 1e9:.1f} GB."


def plot(entries: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
    """Stacked bars of the mean step of 40: attention kernels, attention around them, the rest.

    `entries` are the `models` of the JSON. Without Matplotlib there is no figure; it can be made
    from the JSON elsewhere.
    """
    plt = pyplot()
    if plt is None:
        return
    measured = {name: entry for name, entry in entries.items() if entry.get("summary")}
    if not measured:
        return
    figure, axes = plt.subplots(
        1,
        len(measured),
        figsize=(2.6 * len(measured) + 1, 4.4),
        layout="constrained",
        squeeze=False,
    )
    labels = ("attention kernels", "attention around them", "rest")
    for axis, entry in zip(axes[0], measured.values(), strict=True):
        bars = bar_parts(entry)
        bottom = [0.0] * len(bars)
        for index, label in enumerate(labels):
            heights = [parts[index] / 1e3 for parts in bars.values()]
            axis.bar(list(bars), heights, bottom=bottom, label=label, width=0.65)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        for place, total in enumerate(bottom):
            axis.annotate(f"{bottom[0] / total:.2f}×", (place, total), ha="center", va="bottom")
        axis.set_title(heading(entry).replace(": ", "\n").replace(", CUT", "\nCUT"), fontsize=8)
        axis.set_ylabel("seconds of a step, mean of 40" if axis is axes[0][0] else "")
        axis.margins(y=0.1)
    axes[0][0].legend(fontsize=7, loc="lower left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def bar_parts(entry: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Milliseconds of (kernels, attention around them, rest) by method."""
    bars: dict[str, tuple[float, float, float]] = {}
    for preset, found in entry["summary"].items():
        rest = found["bf16_rest_ms"]
        total = found["bf16_schedule_s"] * 1e3 / SCHEDULE.num_steps
        bars.setdefault("bf16", (total - rest, 0.0, rest))
        mean = found["schedule"]
        bars[preset] = (mean["kernel_ms"], mean["preparation_ms"], mean["rest_ms"])
    return bars
