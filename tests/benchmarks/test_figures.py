"""Result files of benchmarks: what they hold can be read again, in few lines."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.figures import figures_text, save_figures


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
