"""Files as bytes: written whole or not at all, named by what they hold."""

from __future__ import annotations

import hashlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from myna.errors import ModelError


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary name to write to; the file then appears under `path` complete, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex[:12]}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_text(path: Path, text: str) -> None:
    """Write a UTF-8 file whole or not at all."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder to write to; it then appears under its name complete, or not at all.

    A folder of that name that is not empty is refused, or with `replace` gives way to the new one.
    """
    if not replace and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} exists and is not empty", hint="name a new folder, or remove that one first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        written = Path(scratch, "new")
        written.mkdir()
        yield written
        if folder.exists():
            folder.rename(Path(scratch, "old")) if replace else folder.rmdir()
        written.rename(folder)


def fsync(path: Path) -> None:
    """Flush a file or folder to the disk: a file's name is safe from a power cut once its folder is flushed."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def bytes_hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def file_hash(path: Path) -> str:
    """blake2b-128 of the file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def is_file(path: Path) -> bool:
    """Like `path.is_file()`, and false for what cannot even be a name (a path of ten thousand characters)."""
    try:
        return path.is_file()
    except OSError:
        return False


def sniff_suffix(data: bytes) -> str:
    """The suffix that belongs to encoded audio, by its first bytes; `.bin` for what we do not know."""
    head = data[:64]
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return ".wav"
    if head[:4] == b"fLaC":
        return ".flac"
    if head[:4] == b"OggS":
        return ".opus" if b"OpusHead" in head else ".ogg"
    if head[:3] == b"ID3" or (len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0):
        return ".mp3"
    if head[4:8] == b"ftyp":
        return ".m4a"
    if head[:4] == b"FORM":
        return ".aiff"
    return ".bin"
