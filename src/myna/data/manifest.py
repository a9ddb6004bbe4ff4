"""Utterances, and the manifest files that hold them: `manifest.jsonl`, one utterance a line."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from myna.core.errors import DataError
from myna.core.io import atomic_write
from myna.text.normalization import normalise_text

TASKS = (
    "zero_shot_voice_cloning",
    "single_speaker_smart_voice",
    "multi_speaker_smart_voice",
    "multi_speaker_voice_cloning",
)
SPEAKER_TAG = re.compile(r"\[SPEAKER(\d+)\]")
"""Speaker tag in a text of several speakers: says who speaks from there on."""


@dataclass(frozen=True, slots=True)
class Span:
    """Part of a recording in seconds; `end` None means the end of the file."""

    start: float
    end: float | None

    def __post_init__(self) -> None:
        if not 0 <= self.start < (math.inf if self.end is None else self.end):  # written so that NaN fails too
            raise ValueError(f"a span must run forwards from 0 or later, not {self.start} to {self.end}")


@dataclass(frozen=True, slots=True)
class Utterance:
    """A clip with its transcript and speaker.

    `extras` holds the source's other fields. These keys are reserved:

    references      ids of the utterances that set the voice, one per speaker tag in order; [] for no reference;
                    without the key another clip of the same speaker is sampled, but none for a dialogue
    reference_only  true for a clip that only ever serves as a reference
    scene           a sentence about the room or the manner
    task            one of `TASKS`
    answer          the text to be learned of the clip, which is then an input and not a speech target
    question        the text of the prompt beside it
    """

    id: str
    audio: Path
    text: str
    speaker: str
    language: str = ""
    span: Span | None = None
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def references(self) -> tuple[str, ...] | None:
        """Ids of the references that the source names; None if one is to be sampled."""
        if self.answer:
            return ()
        return tuple(self.extras["references"]) if "references" in self.extras else None

    @property
    def answer(self) -> str:
        """Answer to be learned about the clip; empty for a speech target."""
        return str(self.extras.get("answer") or "")

    @property
    def is_target(self) -> bool:
        return not self.extras.get("reference_only", False)

    @property
    def is_dialogue(self) -> bool:
        """Whether several people speak in the clip, according to its task or the speaker tags of its text."""
        is_multi_speaker = str(self.extras.get("task") or "").startswith("multi_speaker")
        return is_multi_speaker or len(set(SPEAKER_TAG.findall(self.text))) > 1

    def to_json(self) -> dict[str, Any]:
        return self.to_line(self.audio.as_posix())

    def to_line(self, audio: str) -> dict[str, Any]:
        """Return the manifest line with `audio` as its path. Not `asdict`, which copies every path and all extras."""
        line: dict[str, Any] = {"id": self.id} if self.id else {}
        line |= {"audio": audio, "text": self.text, "speaker": self.speaker}
        if self.language:
            line["language"] = self.language
        if self.span is not None:
            line["span"] = {"start": self.span.start, "end": self.span.end}
        if self.extras:
            line["extras"] = self.extras
        return line

    @classmethod
    def from_json(cls, line: dict[str, Any], folder: Path) -> Self:
        """Make an utterance from a manifest line; relative audio paths are relative to the manifest's folder."""
        span = line.get("span")
        return cls(
            id=str(line["id"]),
            audio=folder / line["audio"],
            text=normalise_text(line["text"]),
            speaker=str(line["speaker"]),
            language=line.get("language", ""),
            span=Span(**span) if span else None,
            extras=line.get("extras", {}),
        )


# Manifest files

REQUIRED_FIELDS = ("id", "audio", "text", "speaker")
FIELD_TYPES = dict.fromkeys((*REQUIRED_FIELDS, "language"), str) | {"extras": dict}


class SpanError(ValueError):
    """Error of a line whose `span` is not a pair of times."""


def write_manifest(path: Path, utterances: Iterable[Utterance]) -> None:
    """Write the lines whole or not at all. Audio inside the manifest's folder is stored relative to it."""
    folder, encode = path.parent.absolute(), json.JSONEncoder(ensure_ascii=False).encode
    folder_prefix, cwd_prefix = (f"{one.as_posix().rstrip('/')}/" for one in (folder, Path.cwd()))

    def stored_path(audio: Path) -> str:
        path = audio.as_posix()
        if ".." in path or path == "." or audio.drive:
            audio = audio.resolve() if ".." in audio.parts else audio.absolute()
            return (audio.relative_to(folder) if audio.is_relative_to(folder) else audio).as_posix()
        # Strings are faster: `pathlib` would take most of the time of writing a long manifest.
        path = path if audio.is_absolute() else cwd_prefix + path
        return path.removeprefix(folder_prefix) if path + "/" != folder_prefix else "."

    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        for utterance in utterances:
            file.write(encode(utterance.to_line(stored_path(utterance.audio))) + "\n")


def read_manifest(path: Path) -> list[Utterance]:
    """Read all utterances; a `DataError` names the first bad line."""
    return list(iterate_manifest(path))


def iterate_manifest(path: Path, wanted: Callable[[bytes], bool] = bool) -> Iterator[Utterance]:
    """Yield utterances one by one, since a manifest may be larger than memory. Only `wanted` lines are parsed."""
    try:
        file = path.open("rb")
    except (FileNotFoundError, IsADirectoryError):
        raise missing_manifest_error(path) from None
    with file:
        for number, line in enumerate(file, start=1):
            if line.strip() and wanted(line):
                try:
                    yield parse_manifest_line(json.loads(line.decode("utf-8-sig")), path.parent)
                except UnicodeDecodeError as error:
                    raise DataError(f"{path}:{number} is not UTF-8: {error}", hint="save the file as UTF-8") from None
                except ValueError as error:
                    raise DataError(f"{path}:{number}: {error}", hint="mend or drop that line") from None


def missing_manifest_error(path: Path) -> DataError:
    return DataError(f"there is no manifest {path}", hint="myna prepare SOURCE --out FOLDER makes one")


def parse_manifest_line(line: Any, folder: Path) -> Utterance:
    """Check and convert a manifest line; a `ValueError` says what is wrong with it."""
    if not isinstance(line, dict):
        raise ValueError("the line is not a JSON object")
    for key in REQUIRED_FIELDS:
        if key not in line:
            raise ValueError(f"there is no `{key}`")
    for key, kind in FIELD_TYPES.items():
        if key in line and not isinstance(line[key], kind):
            raise ValueError(f"`{key}` is {line[key]!r}, which is no {kind.__name__}")
    if "extras" in line:
        references = line["extras"].get("references", [])
        if not isinstance(references, list) or not all(isinstance(id, str) for id in references):
            raise ValueError(f"`references` is {references!r}, not a list of ids")
    match span := line.get("span"):
        case None:
            pass
        case {"start": int() | float() as start, "end": int() | float() | None as end} if len(span) == 2:
            try:
                Span(float(start), None if end is None else float(end))
            except (ValueError, OverflowError) as error:
                raise SpanError(str(error)) from None
        case _:
            raise SpanError(f"`span` is {span!r}; it wants start and end in seconds")
    return Utterance.from_json(line, folder)
