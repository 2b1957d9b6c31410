"""The report as one self-contained page: no script, picture or font comes from elsewhere."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

from .charts import Series, bar_chart, line_chart
from .images import DIFFERENCE_GAIN, FRAMES_PER_SECOND, frames_uri

COLOURS = {"int8": "#3b74d1", "fp8": "#d9822b", "nvfp4": "#17977f"}
_OTHER_COLOUR = "#8a63c9"
_FORMATS = {"none": "unquantised", "int8": "INT8", "e4m3": "E4M3", "nvfp4": "NVFP4"}
_SOFTMAX = {
    "expcast": "ExpCast per 128-key block",
    "expcast_running": "ExpCast, running maximum",
    "exp": "exponential",
}


def make_page(
    record: Mapping[str, Any],
    clips: Mapping[str, np.ndarray],
    differences: Mapping[str, np.ndarray],
) -> str:
    """The page of a record.

    Args:
      record: from `make_record`.
      clips: bytes [F, height, width, 3] by the title that is shown, in order.
      differences: brightened differences to the reference by the same titles.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    frames, height, width, _ = next(iter(clips.values())).shape
    energy_legend, energy_chart, energy_table = _energy(record)
    return environment.get_template("template.html").render(
        summary=_summary(record),
        clips={name: frames_uri(clip) for name, clip in clips.items()},
        differences={name: frames_uri(clip) for name, clip in differences.items()},
        frames=frames,
        ratio=f"{width}/{height}",
        seconds=f"{frames / FRAMES_PER_SECOND:.3f}",
        given=record["clip"]["condition_frames"],
        fps=FRAMES_PER_SECOND,
        gain=DIFFERENCE_GAIN,
        comparison=_comparison(record),
        methods_legend=[(name.upper(), _colour(name)) for name in _others(record)],
        velocity_chart=_step_chart(record, "velocity_error", "velocity, relative L2"),
        path_chart=_step_chart(record, "path_error", "video, relative L2"),
        velocity_table=_velocity_table(record),
        energy_legend=energy_legend,
        energy_chart=energy_chart,
        energy_table=energy_table,
        setup=_setup(record),
        methods=record["methods"],
        credit=record["clip"]["credit"],
        made=record["made"].replace("T", " ").replace("+00:00", " UTC"),
        version=record["versions"]["vc_jax"],
    )


class Table(NamedTuple):
    """A table whose first column is headings.

    Attributes:
      groups: headings above the head, each with the number of columns that it spans.
      head: headings of the columns.
      rows: cells; what is no `Markup` is escaped.
    """

    groups: Sequence[tuple[str, int]]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def number(value: float | None, digits: int, *, scale: float = 1.0, unit: str = "") -> str:
    """A number for a table; a dash where there is none, or none that is finite."""
    return "–" if value is None or not math.isfinite(value) else f"{value * scale:.{digits}f}{unit}"


def _finite_or_none(values: np.ndarray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _others(record: Mapping[str, Any]) -> dict[str, Any]:
    """The methods that are compared with the reference."""
    return {n: m for n, m in record["methods"].items() if n != record["reference"]}


def _colour(name: str) -> str:
    return COLOURS.get(name, _OTHER_COLOUR)


def _numerics(config: Mapping[str, Any]) -> str:
    if config["qk"] == "none":
        return "16-bit inputs, FP32 softmax"
    qk, pv, softmax = _FORMATS[config["qk"]], _FORMATS[config["pv"]], _SOFTMAX[config["softmax"]]
    return f"{qk} QK, {pv} PV, {softmax}" + (", V-Smooth" if config["smooth_values"] else "")


def _summary(record: Mapping[str, Any]) -> str:
    clip, model, sampling = record["clip"], record["model"], record["sampling"]
    return (
        f"A video diffusion transformer continues {clip['title']} from its first "
        f"{_count(clip['condition_frames'], 'frame')} to {clip['frames']} frames of "
        f"{clip['width']}×{clip['height']} pixels ({model['tokens']:,} tokens, all attending to "
        f"all) in {_count(sampling['steps'], 'step')}. Model, condition and noise are the same; "
        "only the arithmetic of the attention differs."
    )


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _name(record: Mapping[str, Any], name: str) -> Markup:
    colour = "var(--ink)" if name == record["reference"] else _colour(name)
    cell = Markup('<span class="dot" style="background:{}"></span>{}<small>{}</small>')
    return cell.format(colour, name.upper(), _numerics(record["methods"][name]["config"]))


def _comparison(record: Mapping[str, Any]) -> Table:
    groups = [("", 1), ("sample, against BF16", 3), ("velocity error", 2)]
    groups += [("sample, against the real clip", 2), ("seconds", 2)]
    head = ["attention", "PSNR dB", "SSIM", "rel. L2 %", "mean %", "largest %"]
    head += ["PSNR dB", "SSIM", "compile", "run"]
    rows = []
    for name, method in record["methods"].items():
        near = method["to_reference"] or {"psnr_db": None, "ssim": None, "relative_l2": None}
        errors = [e for e in method["velocity_error"] or [] if e is not None]
        mean = float(np.mean(errors)) if errors else None
        real, seconds = method["to_real_clip"], method["seconds"]
        rows.append(
            [
                _name(record, name),
                number(near["psnr_db"], 2),
                number(near["ssim"], 4),
                number(near["relative_l2"], 2, scale=100),
                number(mean, 2, scale=100),
                number(max(errors, default=None), 2, scale=100),
                number(real["psnr_db"], 2),
                number(real["ssim"], 4),
                number(seconds["compile"], 1),
                number(seconds["sample"], 1),
            ]
        )
    return Table(groups, head, rows)


def _step_chart(record: Mapping[str, Any], field: str, label: str) -> Markup | None:
    series = [
        Series(name.upper(), _colour(name), method[field])
        for name, method in _others(record).items()
    ]
    if not series:
        return None
    steps = list(range(record["sampling"]["steps"]))
    chart = line_chart(steps, series, x_label="denoising step", y_label=label, log=True)
    return Markup(chart)


def _velocity_table(record: Mapping[str, Any]) -> Table | None:
    others = _others(record)
    if not others:
        return None
    refresh = set(record["sampling"]["refresh_steps"])
    rows = [
        [
            Markup(f"{step} <small>clusters</small>") if step in refresh else str(step),
            f"{record['sampling']['times'][step]:.3f}",
            *(number(m["velocity_error"][step], 3, scale=100) for m in others.values()),
            *(number(m["path_error"][step], 3, scale=100) for m in others.values()),
        ]
        for step in range(record["sampling"]["steps"])
    ]
    span = len(others)
    groups = [("", 2), ("velocity error %", span), ("distance of the paths %", span)]
    names = [name.upper() for name in others]
    return Table(groups, ["step", "t", *names, *names], rows)


def _energy(record: Mapping[str, Any]) -> tuple[list[tuple[str, str]], Markup, Table]:
    """Legend, chart of the mean over the points, and the table of all of them."""
    points = record["block_mean_energy"]["points"]
    # What is not finite is None in the record.
    before, after = (
        np.array([p[order] for p in points], np.float64).mean(-1)
        for order in ("sequence", "sorted")
    )
    layers = [str(layer) for layer in range(before.shape[1])]
    series = [
        Series("in sequence order", "#9aa7b5", _finite_or_none(100 * before.mean(0))),
        Series("sorted by cluster", "#3b74d1", _finite_or_none(100 * after.mean(0))),
    ]
    chart = bar_chart(layers, series, x_label="layer", y_label="energy in block means, %")
    groups = [("", 1), *((f"step {p['step']}, t = {p['time']:.2f}", 2) for p in points)]
    head = ["layer"] + ["before", "after"] * len(points)
    rows = [
        [layer, *(number(x, 1, scale=100) for pair in zip(b, a) for x in pair)]
        for layer, b, a in zip(layers, before.T, after.T)
    ]
    rows.append(
        ["mean"]
        + [number(x, 1, scale=100) for pair in zip(before.mean(1), after.mean(1)) for x in pair]
    )
    legend = [(one.label, one.colour) for one in series]
    return legend, Markup(chart), Table(groups, head, rows)


def _setup(record: Mapping[str, Any]) -> dict[str, str]:
    device, model, sampling = record["device"], record["model"], record["sampling"]
    place = f"{device['kind']} ({device['platform']}"
    if device["platform"] == "cpu":
        place += f", {_count(device['cpu_cores'], 'core')})"
    else:
        place += f", {device['count']} visible, 1 used)"
    refresh = ", ".join(map(str, sampling["refresh_steps"])) or "never"
    return {
        "device": place,
        "versions": ", ".join(f"{name} {text}" for name, text in record["versions"].items()),
        "model": f"{model['parameters'] / 1e6:.1f} M parameters, {model['num_layers']} layers, "
        f"{model['num_heads']} heads of {model['head_dim']}, {model['compute_dtype']}, "
        f"weights: {model['weights']}",
        "tokens": f"{model['tokens']:,}",
        "steps": f"{sampling['steps']} Euler steps, noise seed {sampling['seed']}",
        **({"mesh": _mesh(sampling["mesh"])} if sampling["mesh"] else {}),
        "V-Smooth": f"on in the first {_count(sampling['smoothing_steps'], 'step')}; values are "
        f"clustered at step {refresh} into {record['block_mean_energy']['clusters']} clusters",
    }


def _mesh(sizes: dict[str, int]) -> str:
    """`{"batch": 1, "seq": 2}` as on the command line."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())
