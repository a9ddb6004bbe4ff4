"""What every importer is made of: records with a place, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from myna.data.utterance import Span, Utterance, normalise_text
from myna.io import bytes_hash, replacing, sniff_suffix

Reason = Literal[
    "missing file",
    "unreadable audio",
    "empty text",
    "zero length",
    "placeholder without clip",
    "reference equals target",
    "not UTF-8",
    "NaN samples",
    "duplicate id",
    "bad span",
    "malformed",
    "missing reference",
    "bad score",
]
AUDIO_SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus")


@dataclass(frozen=True, slots=True)
class Rejected:
    """An item that cannot be used. `line` counts lines, samples or rows of `source` from 1."""

    source: str
    line: int | None
    id: str | None
    reason: Reason
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        line = {"source": self.source, "line": self.line, "id": self.id, "reason": self.reason}
        return line | ({"detail": self.detail} if self.detail else {})

    def __str__(self) -> str:
        line = "" if self.line is None else f":{self.line}"
        id = f" ({self.id})" if self.id else ""
        return f"{self.source}{line}{id} {self.reason}{self.detail and ': ' + self.detail}"


@dataclass(frozen=True, slots=True)
class Found:
    """An utterance and where it stood."""

    utterance: Utterance
    source: str
    line: int | None

    def rejected(self, reason: Reason, detail: str = "") -> Rejected:
        return Rejected(self.source, self.line, self.utterance.id, reason, detail)


class Bad(Exception):  # noqa: N818 - a verdict on one record, never seen outside the importers
    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(slots=True)
class Record:
    """A raw item of a source and where it stood; `id` is filled in as soon as the format knows it."""

    source: Path
    line: int | None
    data: Any
    id: str | None = None

    def rejected(self, bad: Bad) -> Rejected:
        return Rejected(str(self.source), self.line, self.id, bad.reason, bad.detail)


@dataclass(slots=True)
class Context:
    """What an import knows beside its source."""

    media: Path
    """Folder for audio that the source carries inside itself."""
    language: str = ""
    speaker: str = ""
    _shared: dict[tuple[Path, Span | None, str], str] = field(default_factory=dict)

    def keep(self, data: bytes) -> Path:
        """Write embedded audio once, under its hash."""
        path = self.media / f"{bytes_hash(data)}{sniff_suffix(data)}"
        if not path.exists():
            with replacing(path) as temporary:
                temporary.write_bytes(data)
        return path

    def share(self, reference: Utterance) -> tuple[str, list[Utterance]]:
        """The id under which targets name this reference, and the utterance itself where it is new."""
        key = (reference.audio, reference.span, normalise_text(reference.text))
        if key in self._shared:
            return self._shared[key], []
        self._shared[key] = reference.id
        return reference.id, [reference]


class Importer(Protocol):
    """A module of this folder: one layout."""

    @property
    def DESCRIPTION(self) -> str: ...  # noqa: N802 - a module's constant

    def matches(self, source: Path) -> bool:
        """Whether the source looks like this layout, by its names and first bytes."""

    def read(self, source: Path, context: Context) -> Iterator[Found | Rejected]: ...


def build(
    records: Iterable[Record | Rejected], make: Callable[[Record], Iterable[Utterance]]
) -> Iterator[Found | Rejected]:
    """Turn each record into utterances; one that proves `Bad` is rejected where it stood, and the others go on."""
    for record in records:
        if isinstance(record, Rejected):
            yield record
            continue
        try:
            for utterance in make(record):
                yield Found(utterance, str(record.source), record.line)
        except Bad as bad:
            yield record.rejected(bad)


def reference(id: str, audio: Path, text: str, speaker: str, language: str, span: Span | None = None) -> Utterance:
    return Utterance(id, audio, text, speaker, language, span, {"reference_only": True})
