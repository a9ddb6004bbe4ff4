"""Origin of generated speech, and the append-only log of it: a JSON line for each generation and each saved file."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from myna.core.errors import OutputError
from myna.core.io import HOME_VARIABLE, acquire_lock, user_folder
from myna.models.ref import ModelRef, display_name, weights_sha256

LOG_FILE = "speech.jsonl"
TEXT_VARIABLE = "MYNA_LOG_TEXT"
"""Environment variable: `0` keeps texts out of the log, but not their hashes."""
LogEvent = Literal["spoken", "streamed", "saved"]


def new_id() -> str:
    """Return a new id of a generation."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class SpeechOrigin:
    """Model, voice, text and mark of one generation of speech."""

    model: str
    """Name of the model; for a folder, its last part."""
    adapter: str = ""
    """Name of the run or of the adapter."""
    adapter_sha256: str = ""
    """Hash of the adapter's weights."""
    voice: str = ""
    """Name of the stored voice, or of the reference recordings."""
    consent: str = ""
    """Id of the consent of a stored voice."""
    text: str = ""
    seed: int = 0
    watermark: str = ""
    """Name of the watermark; empty for speech without one."""
    id: str = field(default_factory=new_id)

    @property
    def text_sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def model_origin(ref: ModelRef) -> SpeechOrigin:
    """Return the origin of speech of a run, an adapter or a model, without voice and text."""
    if not ref.is_trained:
        return SpeechOrigin(display_name(ref.source))
    # A whole model may have many gigabytes, and is not hashed.
    trained = "" if ref.adapter is None else weights_sha256(ref.adapter)
    return SpeechOrigin(display_name(ref.base_source), display_name(ref.source), trained)


class _Digest(Protocol):
    def hexdigest(self) -> str: ...


def log_file() -> Path:
    return user_folder("state") / LOG_FILE


def check_log() -> None:
    """Refuse to speak if the log cannot be written."""
    with _log_errors():
        _open(log_file()).close()


def log_speech(
    event: LogEvent, origin: SpeechOrigin, audio: bytes | _Digest, *, file: Path | None = None, **details: Any
) -> dict[str, Any]:
    """Append a line to the log and return it. `audio` is the file or the raw 16-bit samples, or their sha256."""
    known = asdict(origin)
    if os.environ.get(TEXT_VARIABLE) == "0":
        del known["text"]
    row = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "event": event,
        **known,
        "watermark": origin.watermark or None,
        "text_sha256": origin.text_sha256,
        "audio_sha256": (hashlib.sha256(audio) if isinstance(audio, bytes) else audio).hexdigest(),
        **({"file": str(file.absolute())} if file is not None else {}),
        **details,
    }
    append_row(row)
    return row


def append_row(row: dict[str, Any], path: Path | None = None) -> None:
    """Append one line under a lock and sync it. A damaged last line is ended first, so that it stays one line."""
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
    """Yield the lines of the log, oldest first; lines damaged by a kill or a power failure are left out."""
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
    """Open a file for appending that only its user may read."""
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
