"""The folder of weights that curation listens with."""

from __future__ import annotations

from pathlib import Path

FETCH_COMMAND = "make curation-models"
"""It runs tools/fetch_curation_models.py."""


def remake_hint(file: Path) -> str:
    """What to type where a file of weights is damaged."""
    return f"make the folder anew: rm -r {file.parent} && {FETCH_COMMAND}"
