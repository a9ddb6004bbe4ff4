"""One name, one meaning: no two public classes or functions of the package share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "myna"
COMMANDS = "commands"
"""Package whose functions may have the names of functions that they call."""


def public_names(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def role(path: Path) -> str:
    """Place of a name. Families share file names and functions, and so do importers, so these count as one place."""
    parts = path.relative_to(PACKAGE).parts
    if parts[0] == "models" and len(parts) > 2:
        return f"models/FAMILY/{'/'.join(parts[2:])}"
    return "/".join(parts)


def test_no_two_public_classes_or_functions_share_a_name() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name != COMMANDS:
            for name in public_names(path):
                places[name].add(role(path))
    importers = {"read", "matches"}
    homonyms = {name: sorted(where) for name, where in places.items() if len(where) > 1 and name not in importers}
    assert not homonyms, "\n".join(f"{name}: {', '.join(where)}" for name, where in homonyms.items())
