"""Folders of a user: keys, the speech log, and stored voices."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal

import platformdirs

HOME_VARIABLE = "MYNA_HOME"
"""Environment variable with one folder for all of it, in place of the system's own places."""


def user_folder(kind: Literal["config", "data", "state"]) -> Path:
    """The folder for keys (`config`), voices (`data`) or the speech log (`state`); it may not exist yet."""
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home).expanduser()
    folders = {
        "config": platformdirs.user_config_path,
        "data": platformdirs.user_data_path,
        "state": platformdirs.user_state_path,
    }
    return folders[kind]("myna", appauthor=False)


def private_file(path: Path, content: bytes) -> bytes:
    """Write a file that only its user may read, unless it is there; what it holds then. Processes or threads
    that make it at the same time have the same content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        try:
            os.link(temporary, path)  # fails where it exists: the first one stays
        except FileExistsError:
            return path.read_bytes()
        return content
    finally:
        temporary.unlink(missing_ok=True)
