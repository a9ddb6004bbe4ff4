"""README.md lists every failure test with its fault."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_is_listed_with_its_fault() -> None:
    lines = re.findall(r"^\| (.+?) \| `(.+?)`.*? \|", (HERE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert all(fault and not fault.isdigit() for fault, _ in lines)
    listed = [test for _, test in lines]
    written = {
        f"{file.name}::{name}"
        for file in HERE.glob("test_*.py")
        if file.name != Path(__file__).name
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert set(listed) == written and len(listed) == len(written)
