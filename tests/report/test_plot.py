"""Plots: SVG that parses, with every point in its place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myna.report.page import (
    BOTTOM,
    LEFT,
    PLOT_HEIGHT,
    PLOT_WIDTH,
    RIGHT,
    TOP,
    Curve,
    axis_ticks,
    page_asset,
    render_page,
    smooth_curve,
)
from myna.report.page import line_plot as plot_section


def line_plot(curves: Sequence[Curve], **labels: str) -> str:
    """Draw a plot in a page, and return its element."""
    page = render_page("title", [plot_section(curves, **labels)])
    return page[page.index("<main>") + len("<main>") : page.index("</main>")]


def drawn(made: str) -> tuple[ElementTree.Element, list[list[tuple[float, float]]]]:
    tree = ElementTree.fromstring(made)
    found = tree.find("svg")
    assert found is not None
    lines = [
        [(float(x), float(y)) for x, y in (point.split(",") for point in line.attrib["points"].split())]
        for line in found.iter("polyline")
    ]
    return found, lines


def test_points_are_drawn_in_their_place() -> None:
    curve = Curve("loss", [(0, 4.0), (5, 2.0), (10, 0.0)])
    image, (line,) = drawn(line_plot([curve], title="Loss", x_label="step", y_label="loss"))
    left, right, top, bottom = float(LEFT), float(PLOT_WIDTH - RIGHT), float(TOP), float(PLOT_HEIGHT - BOTTOM)
    assert line == [(left, top), ((left + right) / 2, (top + bottom) / 2), (right, bottom)]
    labels = [text.text for text in image.iter("text")]
    assert {"0", "2", "4", "10", "step", "loss"} <= set(labels)


def test_the_axis_ends_where_the_curve_does() -> None:
    image, (line,) = drawn(line_plot([Curve("c", [(0, 1.0), (120, 2.0)])], title="t", x_label="x", y_label="y"))
    assert line[-1][0] == PLOT_WIDTH - RIGHT
    assert all(float(text.attrib["x"]) <= PLOT_WIDTH - RIGHT for text in image.iter("text"))


def test_a_plot_is_described_for_screen_readers() -> None:
    image, _ = drawn(line_plot([Curve("a < b", [(0, 4.0), (1, 2.5)])], title="Loss & all", x_label="step", y_label="y"))
    assert image.attrib["role"] == "img"
    assert image.attrib["aria-label"] == "Loss & all. a < b: from 4 to 2.5."
    assert image.find("title") is not None


def test_curves_have_the_colors_they_are_given_and_their_names_the_same() -> None:
    curves = [Curve("a", [(0, 1.0)], "faint", color=2), Curve("b", [(0, 1.0)], color=2), Curve("c", [(0, 2.0)])]
    made = line_plot(curves, title="t", x_label="x", y_label="y")
    assert made.count('class="color2 ') == made.count('class="curve color2 ') == 2
    assert made.count('class="color0 ') == made.count('class="curve color0 ') == 1
    assert all(f".color{number} " in page_asset("page.css") for number in range(6))


def test_dots_are_drawn_where_they_are_asked_for() -> None:
    image, _ = drawn(line_plot([Curve("e", [(0, 1.0), (1, 2.0)], "dots")], title="t", x_label="x", y_label="y"))
    assert len(list(image.iter("circle"))) == 2


@pytest.mark.parametrize("points", [[(1.0, 3.0)], [(0.0, 2.0), (1.0, 2.0)], [(0.0, math.nan), (1.0, 1.0)]])
def test_single_points_flat_lines_and_missing_values_are_drawn(points: list[tuple[float, float]]) -> None:
    _, (line,) = drawn(line_plot([Curve("c", points)], title="t", x_label="x", y_label="y"))
    assert line and all(math.isfinite(x) and math.isfinite(y) for x, y in line)


def test_an_empty_plot_has_a_note() -> None:
    assert "nothing to draw" in line_plot([Curve("c", [])], title="Loss", x_label="x", y_label="y")


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_hold_their_bounds_and_are_few(low: float, size: float) -> None:
    found = axis_ticks(low, low + size)
    slack = 1e-6 * max(1.0, abs(low), size)
    assert found[0] <= low + slack and found[-1] >= low + size - slack
    assert 2 <= len(found) <= 12
    assert found == sorted(found)


def test_a_running_mean_starts_at_the_first_value() -> None:
    assert [y for _, y in smooth_curve([(1, 5.0), (2, 5.0), (3, 5.0)], 0.9)] == pytest.approx([5.0, 5.0, 5.0])
    falling = smooth_curve([(step, 10.0 - step) for step in range(10)], 0.5)
    assert [y for _, y in falling] == sorted((y for _, y in falling), reverse=True)


def test_values_that_differ_by_rounding_alone_are_drawn_as_equal() -> None:
    """The smoothed first loss differs from the loss in the last digit."""
    image, _ = drawn(
        line_plot([Curve("c", [(1, 5.666077613831), (2, 5.666077613831 + 1e-15)])], title="t", x_label="x", y_label="y")
    )
    assert image is not None
