"""Importer interface: source records in, utterances or rejected records out, both with file and line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from myna.audio.files import AudioDefect
from myna.core.io import atomic_write, bytes_hash, sniff_suffix
from myna.data.utterance import Span, Utterance
from myna.text.normalization import normalise_text

RecordDefect = Literal[
    "malformed",
    "not UTF-8",
    "empty text",
    "control token",
    "implausible pace",
    "wrong duration",
    "duplicate id",
    "placeholder without clip",
    "bad score",
]
ReferenceDefect = Literal["missing reference", "reference equals target"]
RejectionReason = Literal[AudioDefect, RecordDefect, ReferenceDefect]


@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """An item that cannot be used. `line` counts lines, samples or rows of `source` from 1."""

    source: str
    line: int | None
    id: str | None
    reason: RejectionReason
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        line = {"source": self.source, "line": self.line, "id": self.id, "reason": self.reason}
        return line | ({"detail": self.detail} if self.detail else {})

    def __str__(self) -> str:
        line = "" if self.line is None else f":{self.line}"
        id = f" ({self.id})" if self.id else ""
        return f"{self.source}{line}{id} {self.reason}{self.detail and ': ' + self.detail}"


@dataclass(frozen=True, slots=True)
class ImportedUtterance:
    """An utterance and the source line it comes from."""

    utterance: Utterance
    source: str
    line: int | None

    def rejected(self, error: RecordError) -> RejectedRecord:
        return RejectedRecord(self.source, self.line, self.utterance.id, error.reason, error.detail)


ImportItem = ImportedUtterance | RejectedRecord


class RecordError(Exception):
    """One record cannot be used. Raised and caught within the importers; `line` is for a file that is one record."""

    def __init__(self, reason: RejectionReason, detail: str = "", line: int | None = None) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail, self.line = reason, detail, line


@dataclass(slots=True)
class SourceRecord:
    """A raw item of a source with its file and line; `id` is filled in as soon as the format knows it."""

    source: Path
    line: int | None
    data: Any
    """A `RecordError` where the item cannot be read."""
    id: str | None = None

    def rejected(self, error: RecordError) -> RejectedRecord:
        return RejectedRecord(str(self.source), self.line or error.line, self.id, error.reason, error.detail)


@dataclass(slots=True)
class ImportContext:
    """Settings of an import, and the references its records share."""

    media: Path
    """Folder for audio embedded in the source."""
    language: str = ""
    speaker: str = ""
    _reference_ids: dict[tuple[Path, Span | None, str], str] = field(default_factory=dict)

    def save_embedded_audio(self, data: bytes) -> Path:
        """Write embedded audio once, under its hash."""
        path = self.media / f"{bytes_hash(data)}{sniff_suffix(data)}"
        if not path.exists():
            with atomic_write(path) as temporary:
                temporary.write_bytes(data)
        return path

    def register_reference(
        self, id: str, audio: Path, text: str, speaker: str, language: str, span: Span | None = None
    ) -> tuple[str, list[Utterance]]:
        """The id under which targets name this reference, and its utterance where it is new."""
        key = (audio, span, normalise_text(text))
        if key in self._reference_ids:
            return self._reference_ids[key], []
        self._reference_ids[key] = id
        return id, [Utterance(id, audio, text, speaker, language, span, {"reference_only": True})]


class Importer(Protocol):
    """The interface of a module that reads one layout."""

    @property
    def DESCRIPTION(self) -> str: ...  # noqa: N802 - a module's constant

    def matches(self, source: Path) -> bool:
        """Whether the source looks like this layout, by its names and first bytes."""

    def read(self, source: Path, context: ImportContext) -> Iterator[ImportItem]: ...


def build_utterances(
    records: Iterable[SourceRecord], make: Callable[[SourceRecord], Iterable[Utterance]]
) -> Iterator[ImportItem]:
    """The utterances of each record; a `RecordError` rejects that record alone."""
    for record in records:
        try:
            if isinstance(record.data, RecordError):
                raise record.data
            for utterance in make(record):
                yield ImportedUtterance(utterance, str(record.source), record.line)
        except RecordError as error:
            yield record.rejected(error)
        except RecursionError:
            yield record.rejected(RecordError("malformed", "its fields are nested too deeply"))
