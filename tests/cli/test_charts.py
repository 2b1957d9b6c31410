import re
import xml.etree.ElementTree as ElementTree

import pytest

from vc_jax.models.sample_job.charts import (
    HEIGHT,
    Series,
    bar_chart,
    line_chart,
    linear_axis,
    log_axis,
    tick_label,
)


@pytest.mark.parametrize("highest", [1e-7, 0.013, 0.7, 1.0, 9.99, 55.0, 12345.0])
def test_a_linear_axis_has_a_few_round_ticks_around_the_values(highest):
    ticks = linear_axis(highest).ticks
    assert ticks[0] == 0
    assert 3 <= len(ticks) <= 9
    assert ticks[-2] < highest <= ticks[-1] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("low", "high"), [(1e-9, 1.0), (0.011, 0.012), (0.5, 0.5), (0.001, 0.1), (3.0, 3e4)]
)
def test_a_logarithmic_axis_encloses_the_values(low, high):
    ticks = log_axis(low, high).ticks
    assert len(ticks) >= 2
    assert ticks[0] <= low * (1 + 1e-9)
    assert ticks[-1] >= high * (1 - 1e-9)
    assert list(ticks) == sorted(ticks)


def test_higher_values_are_drawn_higher():
    for axis in (linear_axis(10.0), log_axis(0.1, 10.0)):
        heights = [axis.height(v) for v in (0.2, 1.0, 9.0)]
        assert heights == sorted(heights, reverse=True)
        assert 0 < heights[-1] < heights[0] < HEIGHT


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (0.25, "0.25"), (2e-5, "2e-5")])
def test_tick_labels_are_short(value, text):
    assert tick_label(value) == text


def test_a_line_chart_has_a_mark_for_every_value_it_can_show():
    series = [Series("a<b", "red", [0.0, None, 0.1, 0.2]), Series("c", "blue", [1.0] * 4)]
    picture = line_chart(range(4), series, x_label="x & y", y_label="error", log=True)
    ElementTree.fromstring(picture)
    assert picture.count("<circle") == 2 + 4
    assert "a&lt;b, 3: 0.2" in picture


def test_a_bar_is_as_high_as_its_value():
    picture = bar_chart(["0", "1"], [Series("a", "red", [1.0, 4.0])], x_label="l", y_label="e")
    ElementTree.fromstring(picture)
    heights = [float(h) for h in re.findall(r'<rect[^>]* height="([\d.]+)"', picture)]
    assert heights[1] == pytest.approx(4 * heights[0], rel=0.01)


def test_a_chart_of_one_step_is_drawn():
    picture = line_chart([0], [Series("a", "red", [0.1])], x_label="x", y_label="y", log=True)
    assert "nan" not in picture
    assert picture.count("<circle") == 1
