"""Importer for a folder of recordings, each beside a text file of the same name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from myna.data.importers.base import ImportContext, ImportItem, RecordError, SourceRecord, build_utterances
from myna.data.importers.reading import list_files, list_recordings, read_transcript
from myna.data.utterance import Utterance

DESCRIPTION = "a folder of recordings with a .txt or .lab of the same name beside each; subfolders are speakers"

TEXT_SUFFIXES = (".txt", ".lab")
INDEX_FILES = ("manifest.jsonl", "metadata.json", "metadata.csv")
"""With one of these the folder is another layout."""
DOCUMENT_NAMES = ("readme", "license", "licence", "copying", "notice", "changelog")
"""Text files that are no transcripts."""


def matches(source: Path) -> bool:
    if not source.is_dir() or any((source / index).exists() for index in INDEX_FILES):
        return False
    return any(_transcript_file(audio) for audio in list_recordings(source))


def read(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    def make(record: SourceRecord) -> Iterator[Utterance]:
        audio: Path = record.data
        record.id = audio.relative_to(source).with_suffix("").as_posix()
        text = _transcript_file(audio)
        if text is None:
            raise RecordError("missing file", "no .txt or .lab beside it")
        is_in_subfolder = audio.parent != source
        speaker = audio.parent.name if is_in_subfolder else context.speaker or source.resolve().name
        yield Utterance(record.id, audio, read_transcript(text), speaker, context.language)

    recordings = list_recordings(source)
    names = {audio.with_suffix("") for audio in recordings}
    no_recording = RecordError("missing file", "no recording beside it")
    records = [SourceRecord(audio, None, audio) for audio in recordings] + [
        SourceRecord(text, None, no_recording)
        for text in list_files(source, *TEXT_SUFFIXES)
        if text.with_suffix("") not in names and text.stem.lower() not in DOCUMENT_NAMES
    ]
    return build_utterances(records, make)


def _transcript_file(audio: Path) -> Path | None:
    return next((text for suffix in TEXT_SUFFIXES if (text := audio.with_suffix(suffix)).is_file()), None)
