"""Result files of benchmarks: what they hold can be read again, in few lines; plots are SVG that parses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.figures import BarColumn, bars_file, figures_text, plot_file, save_figures

from myna.report.page import Curve


def test_figures_are_read_again_with_eight_digits(tmp_path: Path) -> None:
    figures = {"name": "exact, 64 requests", "seconds": 0.123456789, "count": 3, "none": None, "rows": [[1, 2.5]] * 200}
    save_figures(tmp_path / "figures.json", figures)
    text = (tmp_path / "figures.json").read_text(encoding="utf-8")
    assert json.loads(text) == figures | {"seconds": 0.12345679}
    assert max(map(len, text.splitlines())) <= 120 and len(text.splitlines()) < 25


def test_what_fits_into_a_line_stays_in_one() -> None:
    rows = [{"name": f"row {number}", "seconds": number / 7} for number in range(30)]
    text = figures_text({"rows": rows})
    assert json.loads(text)["rows"][1] == {"name": "row 1", "seconds": 0.14285714}
    assert all(line.count("{") == line.count("}") for line in text.splitlines()[1:-1])


def test_a_file_of_its_own_has_colors_and_a_legend() -> None:
    made = plot_file([Curve("a & b", [(0, 1.0), (1, 2.0)], color=1)], title="t", x_label="x", y_label="y")
    tree = ElementTree.fromstring(made)
    svg = "{http://www.w3.org/2000/svg}"
    assert tree.tag == f"{svg}svg" and ".color1" in tree.findtext(f"{svg}style", "")
    assert "a & b" in [text.text for text in tree.iter(f"{svg}text")]
    assert plot_file([], title="t", x_label="x", y_label="y") == ""


def test_bars_are_as_long_as_their_values_and_a_limit_is_a_line() -> None:
    column = BarColumn("speed & more", [1.0, 2.0], ["one", "two"], limit=2.0)
    tree = ElementTree.fromstring(bars_file(["a", "b"], [column], faint=[False, True]))
    svg = "{http://www.w3.org/2000/svg}"
    _, first, second = tree.iter(f"{svg}rect")
    assert float(second.attrib["width"]) == pytest.approx(2 * float(first.attrib["width"]), abs=0.1)
    assert first.attrib["fill"] != second.attrib["fill"]
    line = next(tree.iter(f"{svg}line"))
    assert float(line.attrib["x1"]) == pytest.approx(float(second.attrib["x"]) + float(second.attrib["width"]))
    assert {"a", "b", "one", "two", "speed & more"} <= {text.text for text in tree.iter(f"{svg}text")}
