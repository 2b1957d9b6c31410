"""The report as one self-contained page: no script, picture or font comes from elsewhere."""

import html
import importlib.resources
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
    template = importlib.resources.files(__package__).joinpath("template.html")
    return string.Template(template.read_text(encoding="utf-8")).substitute(
        summary=_summary(record),
        videos=_videos(record, clips, differences),
        comparison=_comparison(record),
        legend=_legend(record),
        velocity_chart=_step_chart(record, "velocity_error", "velocity, relative L2"),
        path_chart=_step_chart(record, "path_error", "video, relative L2"),
        velocity_table=_velocity_table(record),
        energy=_energy(record),
        setup=_setup(record),
        implementations=_implementations(record),
        credit=_paragraph(record["clip"]["credit"]),
        made=html.escape(record["made"].replace("T", " ").replace("+00:00", " UTC")),
        version=html.escape(record["versions"]["vc_jax"]),
    )


def number(value: float | None, digits: int, *, scale: float = 1.0, unit: str = "") -> str:
    """A number for a table, or a dash."""
    return "–" if value is None else f"{value * scale:.{digits}f}{unit}"


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


def _paragraph(text: str | None) -> str:
    return f"<p>{html.escape(text)}.</p>" if text else ""


def _summary(record: Mapping[str, Any]) -> str:
    clip, model, sampling = record["clip"], record["model"], record["sampling"]
    return html.escape(
        f"A video diffusion transformer continues {clip['title']} from its first "
        f"{_count(clip['condition_frames'], 'frame')} to {clip['frames']} frames of "
        f"{clip['width']}×{clip['height']} pixels ({model['tokens']:,} tokens, all attending to "
        f"all) in {_count(sampling['steps'], 'step')}. Model, condition and noise are the same; "
        "only the arithmetic of the attention differs."
    )


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _videos(
    record: Mapping[str, Any],
    clips: Mapping[str, np.ndarray],
    differences: Mapping[str, np.ndarray],
) -> str:
    """A row of videos and, below it, one of their differences to the reference."""
    frames, height, width, _ = next(iter(clips.values())).shape
    style = (
        f"--columns:{len(clips)};--frames:{frames};--ratio:{width}/{height};"
        f"--seconds:{frames / FRAMES_PER_SECOND:.3f}s"
    )
    above = [
        f"<figure><figcaption>{html.escape(name)}</figcaption>{_player(clip, name)}</figure>"
        for name, clip in clips.items()
    ]
    missing = len(clips) - len(differences)
    below = [
        f'<p class="note" style="grid-column:1/span {missing}">Above: the videos at '
        f"{FRAMES_PER_SECOND} frames a second. Beside this: each method’s difference to BF16, "
        f"brightened {DIFFERENCE_GAIN} times.</p>"
    ]
    below += [_player(clip, f"difference of {name} to BF16") for name, clip in differences.items()]
    given = record["clip"]["condition_frames"]
    return (
        f'<div class="videos" style="{style}" data-frames="{frames}" data-given="{given}" '
        f'data-fps="{FRAMES_PER_SECOND}">{"".join(above)}{"".join(below) if differences else ""}'
        "</div>"
    )


def _player(clip: np.ndarray, name: str) -> str:
    return (
        f'<div class="clip" role="img" aria-label="{html.escape(name)}" '
        f'style="background-image:url({frames_uri(clip)})"></div>'
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, groups: str = "") -> str:
    """A table whose first column is text; cells are HTML."""
    cells = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        "<tr>" + f"<th>{row[0]}</th>" + "".join(f"<td>{c}</td>" for c in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f"<div class='scroll'><table><thead>{groups}<tr>{cells}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _name(record: Mapping[str, Any], name: str) -> str:
    colour = "var(--ink)" if name == record["reference"] else _colour(name)
    numerics = html.escape(_numerics(record["methods"][name]["config"]))
    return (
        f'<span class="dot" style="background:{colour}"></span>{html.escape(name.upper())}'
        f"<small>{numerics}</small>"
    )


def _comparison(record: Mapping[str, Any]) -> str:
    groups = (
        '<tr class="groups"><th></th><th colspan="3">sample, against BF16</th>'
        '<th colspan="2">velocity error</th><th colspan="2">sample, against the real clip</th>'
        '<th colspan="2">seconds</th></tr>'
    )
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
    return _table(head, rows, groups=groups)


def _legend(record: Mapping[str, Any]) -> str:
    return "".join(
        f'<span><span class="dot" style="background:{_colour(name)}"></span>{name.upper()}</span>'
        for name in _others(record)
    )


def _step_chart(record: Mapping[str, Any], field: str, label: str) -> str:
    series = [
        Series(name.upper(), _colour(name), method[field])
        for name, method in _others(record).items()
    ]
    if not series:
        return "<p class='note'>Only BF16 ran: there is nothing to compare.</p>"
    steps = list(range(record["sampling"]["steps"]))
    return line_chart(steps, series, x_label="denoising step", y_label=label, log=True)


def _velocity_table(record: Mapping[str, Any]) -> str:
    others = _others(record)
    refresh = set(record["sampling"]["refresh_steps"])
    rows = [
        [
            f"{step}{' <small>clusters</small>' if step in refresh else ''}",
            f"{record['sampling']['times'][step]:.3f}",
            *(number(m["velocity_error"][step], 3, scale=100) for m in others.values()),
            *(number(m["path_error"][step], 3, scale=100) for m in others.values()),
        ]
        for step in range(record["sampling"]["steps"])
    ]
    span = len(others)
    groups = (
        f'<tr class="groups"><th colspan="2"></th><th colspan="{span}">velocity error %</th>'
        f'<th colspan="{span}">distance of the paths %</th></tr>'
    )
    names = [name.upper() for name in others]
    return _table(["step", "t", *names, *names], rows, groups=groups) if others else ""


def _energy(record: Mapping[str, Any]) -> str:
    """Chart of the mean over the points and the table of all of them."""
    points = record["block_mean_energy"]["points"]
    before = np.array([p["sequence"] for p in points]).mean(-1)
    after = np.array([p["sorted"] for p in points]).mean(-1)
    layers = [str(layer) for layer in range(before.shape[1])]
    series = [
        Series("in sequence order", "#9aa7b5", (100 * before.mean(0)).tolist()),
        Series("sorted by cluster", "#3b74d1", (100 * after.mean(0)).tolist()),
    ]
    chart = bar_chart(layers, series, x_label="layer", y_label="energy in block means, %")
    groups = '<tr class="groups"><th></th>' + "".join(
        f'<th colspan="2">step {p["step"]}, t = {p["time"]:.2f}</th>' for p in points
    )
    head = ["layer"] + ["before", "after"] * len(points)
    rows = [
        [layer, *(number(x, 1, scale=100) for pair in zip(b, a) for x in pair)]
        for layer, b, a in zip(layers, before.T, after.T)
    ]
    rows.append(
        ["mean"]
        + [number(x, 1, scale=100) for pair in zip(before.mean(1), after.mean(1)) for x in pair]
    )
    legend = "".join(
        f'<span><span class="dot" style="background:{s.colour}"></span>{s.label}</span>'
        for s in series
    )
    table = _table(head, rows, groups=groups + "</tr>")
    return (
        f'<div class="pair"><div><div class="legend">{legend}</div>{chart}</div>'
        f'<div class="compact">{table}</div></div>'
    )


def _setup(record: Mapping[str, Any]) -> str:
    device, model, sampling = record["device"], record["model"], record["sampling"]
    place = f"{device['kind']} ({device['platform']}"
    if device["platform"] == "cpu":
        place += f", {_count(device['cpu_cores'], 'core')})"
    else:
        place += f", {device['count']} visible, 1 used)"
    refresh = ", ".join(map(str, sampling["refresh_steps"])) or "never"
    rows = {
        "device": place,
        "versions": ", ".join(f"{name} {text}" for name, text in record["versions"].items()),
        "model": f"{model['parameters'] / 1e6:.1f} M parameters, {model['num_layers']} layers, "
        f"{model['num_heads']} heads of {model['head_dim']}, {model['compute_dtype']}, "
        f"weights: {model['weights']}",
        "tokens": f"{model['tokens']:,}",
        "steps": f"{sampling['steps']} Euler steps, noise seed {sampling['seed']}",
        "V-Smooth": f"on in the first {_count(sampling['smoothing_steps'], 'step')}; values are "
        f"clustered at step {refresh} into {record['block_mean_energy']['clusters']} clusters",
    }
    return "".join(f"<dt>{k}</dt><dd>{html.escape(v)}</dd>" for k, v in rows.items())


def _implementations(record: Mapping[str, Any]) -> str:
    rows = []
    for name, method in record["methods"].items():
        reasons = "; ".join(f"{n}: {r}" for n, r in method["other_implementations"].items())
        rows.append(
            f"<tr><th>{name.upper()}</th>"
            f"<td class='text'><b>{html.escape(method['implementation'])}</b></td>"
            f"<td class='text'>{html.escape(reasons)}</td>"
            f"<td>{method['traces']}</td></tr>"
        )
    return (
        "<div class='scroll'><table><thead><tr><th>attention</th><th class='text'>runs on</th>"
        "<th class='text'>why not the others</th><th>compilations</th></tr></thead><tbody>"
        + "".join(rows)
        + "</tbody></table></div>"
    )
