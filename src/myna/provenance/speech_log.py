"""Append-only log of what was spoken: a JSON line for each generation, and for each file it was saved to."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from myna.core.errors import OutputError
from myna.core.io import acquire_lock
from myna.core.user_folders import HOME_VARIABLE, user_folder
from myna.provenance.origin import SpeechOrigin

LOG_FILE = "speech.jsonl"
TEXT_VARIABLE = "MYNA_LOG_TEXT"
"""Environment variable: `0` keeps texts out of the log; their hashes stay."""
LogEvent = Literal["spoken", "streamed", "saved"]


class _Digest(Protocol):
    def hexdigest(self) -> str: ...


def log_file() -> Path:
    return user_folder("state") / LOG_FILE


def check_log() -> None:
    """Refuse to speak where nothing can be logged."""
    with _log_errors():
        _open(log_file()).close()


def log_speech(
    event: LogEvent, origin: SpeechOrigin, audio: bytes | _Digest, *, file: Path | None = None, **details: Any
) -> dict[str, Any]:
    """Append a row. `audio` is what was given out, or its sha256: the file, or raw samples of 16 bits."""
    with_text = os.environ.get(TEXT_VARIABLE) != "0"
    row = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "event": event,
        "id": origin.id,
        "model": origin.model,
        "adapter": origin.adapter,
        "adapter_sha256": origin.adapter_sha256,
        "voice": origin.voice,
        "consent": origin.consent,
        "seed": origin.seed,
        "watermark": origin.watermark or None,
        **({"text": origin.text} if with_text else {}),
        "text_sha256": origin.text_sha256,
        "audio_sha256": (hashlib.sha256(audio) if isinstance(audio, bytes) else audio).hexdigest(),
        **({"file": str(file.absolute())} if file is not None else {}),
        **details,
    }
    append_row(row)
    return row


def append_row(row: dict[str, Any], path: Path | None = None) -> None:
    """Append one line under a lock and sync it. A torn line before it is closed first, so that it stays one line."""
    path = path or log_file()
    line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
    with _log_errors():
        path.parent.mkdir(parents=True, exist_ok=True)
        with acquire_lock(path.with_name(f".{path.name}.lock")), _open(path) as log:
            if log.seek(0, os.SEEK_END):
                log.seek(-1, os.SEEK_END)
                if log.read(1) != b"\n":
                    line = b"\n" + line
            log.write(line)
            log.flush()
            os.fsync(log.fileno())


def read_log(path: Path | None = None) -> Iterator[dict[str, Any]]:
    """Rows, the oldest first; lines that a kill or a power cut has torn are left out."""
    path = path or log_file()
    if not path.is_file():
        return
    with path.open("rb") as log:
        for line in log:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def _open(path: Path) -> Any:
    """For appending, readable by its user alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b")


@contextmanager
def _log_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"the log of what is spoken cannot be written: {log_file()}: {error.strerror or error}",
            hint=f"make room there, or name another folder: export {HOME_VARIABLE}=FOLDER",
        ) from None
