"""A folder of recordings, each beside a text file of the same name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from myna.data.importers.base import AUDIO_SUFFIXES, Bad, Context, Found, Record, Rejected, build
from myna.data.importers.reading import read_text, visible
from myna.data.utterance import Utterance

DESCRIPTION = "a folder of recordings with a .txt or .lab of the same name beside each; subfolders are speakers"

TEXT_SUFFIXES = (".txt", ".lab")
INDEXES = ("manifest.jsonl", "metadata.json", "metadata.csv")
"""With one of these the folder is another layout."""
ABOUT = ("readme", "license", "licence", "copying", "notice", "changelog")
"""Texts that need no recording."""


def matches(source: Path) -> bool:
    if not source.is_dir() or any((source / index).exists() for index in INDEXES):
        return False
    return any(_text_of(audio) for audio in visible(source, *AUDIO_SUFFIXES))


def read(source: Path, context: Context) -> Iterator[Found | Rejected]:
    def make(record: Record) -> Iterator[Utterance]:
        audio: Path = record.data
        record.id = audio.relative_to(source).with_suffix("").as_posix()
        text = _text_of(audio)
        if text is None:
            raise Bad("missing file", "no .txt or .lab beside it")
        apart = audio.parent != source
        speaker = audio.parent.name if apart else context.speaker or source.resolve().name
        yield Utterance(record.id, audio, read_text(text), speaker, context.language)

    recordings = visible(source, *AUDIO_SUFFIXES)
    yield from build((Record(audio, None, audio) for audio in recordings), make)
    spoken = {audio.with_suffix("") for audio in recordings}
    for text in visible(source, *TEXT_SUFFIXES):
        if text.with_suffix("") not in spoken and text.stem.lower() not in ABOUT:
            yield Rejected(str(text), None, None, "missing file", "no recording beside it")


def _text_of(audio: Path) -> Path | None:
    return next((text for suffix in TEXT_SUFFIXES if (text := audio.with_suffix(suffix)).is_file()), None)
