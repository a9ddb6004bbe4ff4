"""Documentation that names files: every file it names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "ARCHITECTURE.md", ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
FAMILY_FILE = re.compile(r"`(\w+\.py)`")
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
REPOSITORY_ONLY = re.compile(
    rf"\bmake ({'|'.join(TARGETS)})\b|\b(tests|docs|tools|training|benchmarks|deploy)/|\bdecisions?/\d"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    broken = [link for link in links if not (page.parent / link).exists()]
    assert not broken


def test_the_architecture_names_files_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    package = ROOT / "src" / "myna"
    named = {path for path in re.findall(r"\b(?:[a-z_0-9]+/)+[a-z_0-9]*(?:\.py|/)", text) if path != "data/marta/"}
    modules = {path for path in named if path.split("/")[0] in {entry.name for entry in package.iterdir()}}
    assert len(modules) >= 40
    assert not sorted(path for path in modules if not (package / path).exists())
    for name in FAMILY_FILE.findall(text):
        assert list(package.rglob(name)), name


def test_tests_that_are_named_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8"))}
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) >= 20
    assert not sorted(name for name in named if f"def {name}(" not in sources)


def texts_for_users(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each string of a module, and of docstrings only those that become help of commands."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    is_help = path.parent.name == "commands"
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (is_help or id(node) not in docstrings):
            yield node.lineno, node.value


def test_no_message_or_help_needs_the_repository() -> None:
    """A wheel has no Makefile, tests, docs or tools."""
    package = ROOT / "src" / "myna"
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text[:120]}"
        for path in sorted(package.rglob("*.py"))
        for line, text in texts_for_users(path)
        if REPOSITORY_ONLY.search(text)
    ]
    assert not found, "\n".join(found)
