"""Print the size of the package: lines, files and import lines by package, long files, and import closures.

.venv/bin/python tools/source_figures.py
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "myna"
SHIPPED_FAMILY = ("myna.models.higgs_v2.family", "myna.models.mel_codec")
"""Modules of the shipped model's family and codec. The registry opens them by name, so that no import names them."""
CLOSURES = {
    "text to audio": ("myna.speak.engine", "myna.speak.loading", *SHIPPED_FAMILY),
    "evaluate": ("myna.evaluate.evaluation", *SHIPPED_FAMILY),
    "training": (
        *("myna.curate.curation", "myna.data.importers", "myna.data.encoding", "myna.train.loop"),
        *SHIPPED_FAMILY,
    ),
}
"""Entry modules of each path. A closure counts the modules that importing and running them can reach."""
LONG_FILE = 600


def source_files() -> dict[str, Path]:
    """Return the files of the package by module name."""
    files = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def import_nodes(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports of a module, those inside functions included, those for type checkers left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not _is_type_checking(node):
            yield from import_nodes(node)


def imported_modules(path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules of the package that a file imports, inside functions too, but not those for type checkers."""
    found = set()
    for node in import_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in names}
    return (found & modules.keys()) - {"myna"}


def closure(entries: tuple[str, ...], modules: dict[str, Path]) -> set[str]:
    """Return all modules that the entries reach by imports."""
    reached, waiting = set[str](), [entry for entry in entries if entry in modules]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += imported_modules(modules[name], modules)
    return reached


def import_lines(path: Path) -> int:
    """Count the lines of a file that import statements take."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes)


def main() -> None:
    """Print the table of packages, the long files and the closures."""
    modules = source_files()
    lines = {name: path.read_text(encoding="utf-8").count("\n") for name, path in modules.items()}
    packages: dict[str, list[str]] = defaultdict(list)
    for name, path in modules.items():
        parts = path.relative_to(SOURCE).parts
        packages[parts[0] if len(parts) > 1 else "(top)"].append(name)
    print(f"{'package':<12}{'files':>6}{'lines':>8}")
    for package, names in sorted(packages.items()):
        print(f"{package:<12}{len(names):>6}{sum(lines[name] for name in names):>8}")
    imports = sum(import_lines(path) for path in modules.values())
    total = sum(lines.values())
    print(f"{'total':<12}{len(modules):>6}{total:>8}   import lines {imports / total:.1%}")
    print(f"over {LONG_FILE} lines:", ", ".join(n for n, count in lines.items() if count > LONG_FILE) or "none")
    for title, entries in CLOSURES.items():
        if missing := [entry for entry in entries if entry not in modules]:
            sys.exit(f"{title}: there is no module {', '.join(missing)}")
        print(f"closure of {title}: {len(closure(entries, modules))} modules")


if __name__ == "__main__":
    main()
