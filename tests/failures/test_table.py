"""README.md lists every row and every test."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROWS = 53


def test_every_row_is_listed_and_every_listed_test_exists() -> None:
    lines = re.findall(r"^\| (\d+) \| (.+?) \|", (HERE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted({int(row) for row, _ in lines}) == list(range(1, ROWS + 1))
    listed = {f"{row}: {name}" for row, test in lines for name in re.findall(r"`(.+?)`", test)}
    written = {
        f"{int(row)}: {file.name}::{name}"
        for file in HERE.glob("test_*.py")
        for name, row in re.findall(r"^def (test_row_(\d\d)_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert listed == written
    without = {row for row, test in lines if not test.startswith("`")}
    assert without == {row for row, test in lines if test == "missing"}
