"""Documentation that names files: every file it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "ARCHITECTURE.md", ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
FAMILY_FILE = re.compile(r"`(\w+\.py)`")


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


def test_messages_name_no_page_that_a_wheel_lacks() -> None:
    """Only docstrings of code may; those of commands are their help."""
    named = []
    for path in sorted((ROOT / "src" / "myna").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and path.parent.name != "commands"
        }
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in docstrings]
        named += [f"{path}:{node.lineno}" for node in texts if isinstance(node.value, str) and "docs/" in node.value]
    assert not named
