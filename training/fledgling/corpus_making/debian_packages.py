"""Debian packages as sources of recordings: downloaded by apt-get, unpacked by dpkg-deb, not installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

from myna.core.errors import DataError


def download(package: str, folder: Path) -> Path:
    """The package's archive in `folder`, of the version that the machine's sources have, unless one is there."""
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()  # commands run inside it
    if not (known := sorted(folder.glob(f"{package}_*.deb"))):
        _run(["apt-get", "download", "-q", package], folder, f"apt-get update, or put {package}_*.deb into {folder}")
        known = sorted(folder.glob(f"{package}_*.deb"))
    if len(known) != 1:
        found = ", ".join(file.name for file in known) or "nothing"
        raise DataError(f"{folder} holds {found} of {package}", hint=f"leave one {package}_*.deb in {folder}")
    return known[0]


def version(archive: Path) -> str:
    return _run(["dpkg-deb", "-f", str(archive), "Version"], archive.parent, f"rm {archive}, and begin again").strip()


def unpack(archive: Path, root: Path) -> None:
    """The package's files below `root`; those of several packages may lie beside one another."""
    root.mkdir(parents=True, exist_ok=True)
    _run(["dpkg-deb", "-x", str(archive), str(root)], archive.parent, f"rm {archive}, and begin again")


def _run(command: list[str], folder: Path, hint: str) -> str:
    try:
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise DataError(f"there is no {command[0]} on this machine", hint="use Debian, Ubuntu or a container") from None
    except subprocess.CalledProcessError as error:
        raise DataError(f"{' '.join(command)}: {error.stderr.strip()}", hint=hint) from None
