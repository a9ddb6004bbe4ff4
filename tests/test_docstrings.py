"""Docstrings that are complete statements: the first words name the object, or say what a function does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "myna"
PARTS = [*sorted(PACKAGE.iterdir()), *(ROOT / name for name in ("tests", "tools", "benchmarks", "training"))]
RIDDLE = re.compile(
    r"(Of|That|By|Where|Who|Whom|Whose|What|Whatever|Which|Such|As|The same|Those|Behind|Beside|With|Without|Into|"
    r"Among|If|Nobody|Somebody|Also|Or|So|And|But|For|In|At|From|When|How|On|Once|After|Before|Between|Because|Until)\b"
)
"""First words of a docstring that does not name its object, nor say what a function does."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring of a file, those below fields and constants included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


@pytest.mark.parametrize("place", PARTS, ids=lambda place: place.name)
def test_docstrings_begin_with_their_subject(place: Path) -> None:
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    riddles = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0][:90]}"
        for path in files
        if path.suffix == ".py"
        for line, text in docstrings(path)
        if RIDDLE.match(text)
    ]
    assert not riddles, "\n".join(riddles)


def help_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each help of an option, and of each description of a field of the server."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            is_option = isinstance(node.func, ast.Name) and node.func.id == "option"
            texts = [*(node.args[:1] if is_option else []), *(k.value for k in node.keywords if k.arg == "description")]
            for text in texts:
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield text.lineno, text.value


def test_help_begins_with_its_subject() -> None:
    riddles = [
        f"{path.relative_to(ROOT)}:{line}: {text[:90]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in help_texts(path)
        if RIDDLE.match(text)
    ]
    assert not riddles, "\n".join(riddles)
