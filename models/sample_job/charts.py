"""Line and bar charts as inline SVG.

Colours of axes and text are CSS variables of the page (`--ink`, `--muted`, `--line`), so charts
follow its light and dark themes. Every mark carries its value as a tooltip. Matplotlib's SVG has
neither, draws text as paths of tens of kilobytes and would be needed to run `vc-jax sample`.
"""

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 520, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 14, 42


class Series(NamedTuple):
    """Named values; a value that is `None` has no mark.

    Attributes:
      label: name in tooltips.
      colour: any CSS colour.
      values: one a position on the horizontal axis.
    """

    label: str
    colour: str
    values: Sequence[float | None]


class Axis(NamedTuple):
    """A vertical axis: where values lie between the lowest and the highest tick.

    Attributes:
      ticks: rising values.
      log: whether distances are ratios.
    """

    ticks: Sequence[float]
    log: bool

    def height(self, value: float) -> float:
        """Pixels from the top of the picture."""
        low, high, value = (
            math.log10(max(v, 1e-300)) if self.log else v
            for v in (self.ticks[0], self.ticks[-1], value)
        )
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)


def linear_axis(highest: float) -> Axis:
    """Four to eight round ticks from 0 to the highest value or just above."""
    if not (math.isfinite(highest) and highest > 0):
        highest = 1.0
    step = 10.0 ** math.floor(math.log10(highest))
    for part in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0):
        if highest / (step * part) <= 7:
            step *= part
            break
    count = math.ceil(round(highest / step, 9))
    return Axis([step * i for i in range(count + 1)], log=False)


def log_axis(lowest: float, highest: float) -> Axis:
    """Ticks at 1, 2 and 5 (or at powers of ten, if there are many) around positive values."""
    first, last = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    digits = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [d * 10.0**e for e in range(first, last + 1) for d in digits]
    below = [t for t in ticks if t <= lowest * (1 + 1e-9)] or ticks[:1]
    above = [t for t in ticks if t >= highest * (1 - 1e-9)]
    high = above[0] if above and above[0] > below[-1] else ticks[ticks.index(below[-1]) + 1]
    return Axis([t for t in ticks if below[-1] <= t <= high], log=True)


def tick_label(value: float) -> str:
    """A short decimal number; powers of ten where it would be long."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e5):
        exponent = math.floor(math.log10(abs(value)) + 1e-9)
        return f"{value / 10.0**exponent:.3g}e{exponent}"
    return f"{value:.4g}"


def line_chart(
    positions: Sequence[float],
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    log: bool = False,
) -> str:
    """Lines over rising positions, with a dot a value.

    Args:
      positions: at least one.
      series: of the positions' length. On a logarithmic axis values that are not positive have no
        mark.
      x_label, y_label: texts of the axes.
      log: whether the vertical axis is logarithmic.
    """
    shown = [v for s in series for v in s.values if v is not None and (v > 0 or not log)]
    if log and shown:
        axis = log_axis(min(shown), max(shown))
    else:
        axis = linear_axis(max(shown, default=1.0))
    low, high = positions[0], positions[-1]

    def place(position: float) -> float:
        share = (position - low) / (high - low) if high > low else 0.5
        return _LEFT + 8 + share * (WIDTH - _LEFT - _RIGHT - 16)

    parts = [_frame(axis, x_label, y_label)]
    stride = max(1, math.ceil(len(positions) / 10))
    parts += [_x_tick(place(p), f"{p:g}") for p in positions[::stride]]
    for name, colour, values in series:
        points = [
            (place(p), axis.height(v), p, v)
            for p, v in zip(positions, values, strict=True)
            if v is not None and (v > 0 or not axis.log)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}">'
            f"<title>{html.escape(name)}, {p:g}: {v:.4g}</title></circle>"
            for x, y, p, v in points
        ]
    return _picture(parts, y_label)


def bar_chart(
    groups: Sequence[str], series: Sequence[Series], *, x_label: str, y_label: str
) -> str:
    """Bars side by side, one group a label; values are at least 0."""
    axis = linear_axis(max((v for s in series for v in s.values if v is not None), default=1.0))
    parts = [_frame(axis, x_label, y_label)]
    room = (WIDTH - _LEFT - _RIGHT) / len(groups)
    bar = room * 0.7 / len(series)
    for i, group in enumerate(groups):
        start = _LEFT + room * (i + 0.15)
        parts.append(_x_tick(_LEFT + room * (i + 0.5), group))
        for j, (name, colour, values) in enumerate(series):
            value = values[i]
            if value is None:
                continue
            top = axis.height(value)
            parts.append(
                f'<rect x="{start + j * bar:.1f}" y="{top:.1f}" width="{bar - 1:.1f}" '
                f'height="{HEIGHT - _BOTTOM - top:.1f}" rx="1.5" fill="{colour}">'
                f"<title>{html.escape(name)}, {html.escape(group)}: {value:.4g}</title></rect>"
            )
    return _picture(parts, y_label)


def _picture(parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )


def _frame(axis: Axis, x_label: str, y_label: str) -> str:
    """Grid lines with their numbers, and the axes' texts."""
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    lines = []
    for tick in axis.ticks:
        y = axis.height(tick)
        lines.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        lines.append(
            f'<text x="{_LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{tick_label(tick)}</text>'
        )
    middle = (_TOP + bottom) / 2
    return (
        "".join(lines)
        + f'<line x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}" class="axis"/>'
        + f'<text x="{(_LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle" class="name">'
        + f"{html.escape(x_label)}</text>"
        + f'<text transform="translate(13 {middle:.1f}) rotate(-90)" text-anchor="middle" '
        + f'class="name">{html.escape(y_label)}</text>'
    )


def _x_tick(x: float, label: str) -> str:
    y = HEIGHT - _BOTTOM + 15
    return f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{html.escape(label)}</text>'
