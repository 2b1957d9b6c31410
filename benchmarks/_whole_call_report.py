"""Tables and the figure of `vc-jax bench attention --whole-calls`."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ._results import markdown_table, pyplot, write_results
from ._whole_calls import DISPATCH, LARGEST_ERROR, SCAN, is_right

TITLES = {SCAN: "In one jitted scan", DISPATCH: "One dispatch a call"}
_NOTES = f"""\
Whole calls, from bfloat16 queries, keys and values to the output, at batch 1; random inputs, values
with an offset in each channel. `steps`: the mean of an `attention_step` over the schedule, from a
state without an order; `after the window`: one past the smoothing window, in the order that the
schedule left. A ratio is the time of the fastest BF16 attention of the same run and place over
that of the column. `error %`: relative L2 of 256 rows of the last call's output against float32; an
output beyond {100 * LARGEST_ERROR:.0f} % is wrong and has no ratio."""
_DETAILS = (
    *("S × H", "place", "call", "µs", "spread %", "× BF16", "error %"),
    *("SM MHz", "W", "compile s"),
)

Row = Mapping[str, Any]


def shape_name(row: Row) -> str:
    """Tokens and heads."""
    return f"{row['length']:,} × {row['heads']}"


def ratio_table(rows: Sequence[Row], where: str) -> str:
    """Markdown: a line a shape, a column a candidate, cells times as fast as BF16."""
    there = [row for row in rows if row["where"] == where]
    names = list(dict.fromkeys(row["name"] for row in there))
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in there):
        own = {row["name"]: row for row in there if row["workload"] == workload}
        some = next(iter(own.values()))
        lines.append(
            (shape_name(some), some["bf16_us"], *(_ratio_cell(own.get(name)) for name in names))
        )
    return markdown_table(("S × H", "BF16, µs", *names), lines)


def _ratio_cell(row: Row | None) -> float | str | None:
    if row is None:
        return None
    if not is_right(row):
        return "wrong"
    return None if row["times_bf16"] is None else round(row["times_bf16"], 3)


def detail_table(rows: Sequence[Row]) -> str:
    """Markdown: a line a candidate."""
    lines = [
        (
            *(shape_name(row), row["where"], row["name"], row["microseconds"]),
            *(100 * row["spread"], _ratio_cell(row), 100 * row["relative_l2"]),
            *(row["clock_mhz"], row["power_w"], row["compile_s"]),
        )
        for row in rows
    ]
    return markdown_table(_DETAILS, lines)


def write_whole_calls(folder: pathlib.Path, about: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """`whole-calls.json`, `.md` and, with Matplotlib, `.png`."""
    parts = [f"# Whole attention calls\n\n{about}\n\n{_NOTES}\n"]
    for where, title in TITLES.items():
        parts.append(f"## {title}: times as fast as BF16\n\n{ratio_table(rows, where)}\n")
    parts.append(f"## Every time\n\n{detail_table(rows)}\n")
    report = {"environment": about, "rows": rows}
    write_results(folder, "whole-calls", report, "\n".join(parts))
    plot(rows, folder / "whole-calls.png")


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Times as fast as BF16 over S, a line a candidate; nothing without Matplotlib."""
    plt = pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
    for axis, (where, title) in zip(axes, TITLES.items(), strict=True):
        there = [row for row in rows if row["where"] == where and row["times_bf16"]]
        for name in dict.fromkeys(row["name"] for row in there):
            points = sorted((r["length"], r["times_bf16"]) for r in there if r["name"] == name)
            style = "--" if "BF16" in name else "-"
            axis.plot(*zip(*points, strict=True), style, marker="o", ms=3, label=name)
        axis.axhline(1.0, color="black", lw=0.8)
        axis.set(title=title, xscale="log", xlabel="tokens", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("times as fast as the fastest BF16 attention")
    axes[1].legend(fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)
