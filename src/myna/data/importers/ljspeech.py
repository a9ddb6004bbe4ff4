"""Importer for LJSpeech: `metadata.csv` of `id|text|normalised text` without a header, and `wavs/ID.wav`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from myna.core.io import is_file
from myna.data.importers import table
from myna.data.importers.base import ImportContext, ImportItem, RecordError, SourceRecord, build_utterances
from myna.data.importers.reading import AUDIO_SUFFIXES, OTHER_AUDIO_SUFFIXES, index_file, nonblank_lines, read_head
from myna.data.utterance import Utterance

DESCRIPTION = "LJSpeech: metadata.csv of id|text|normalised text, without a header, beside wavs/"


def matches(source: Path) -> bool:
    file = index_file(source, "metadata.csv")
    has_bars = file.name == "metadata.csv" and "|" in read_head(file).partition("\n")[0]
    return has_bars and (file.parent / "wavs").is_dir() and not table.matches(file)


def read(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    index = index_file(source, "metadata.csv")
    speaker = context.speaker or index.parent.resolve().name

    def make(record: SourceRecord) -> Iterator[Utterance]:
        try:
            name, text, *normalised = record.data.decode("utf-8").split("|")
        except UnicodeDecodeError as error:
            raise RecordError("not UTF-8", str(error)) from None
        except ValueError:
            raise RecordError("malformed", "no `|` in the line") from None
        record.id = name
        if len(normalised) > 1:
            raise RecordError("malformed", f"{2 + len(normalised)} columns, not 2 or 3")
        transcript = "".join(normalised).strip() or text
        extras = {"original_text": text} if transcript != text else {}
        candidates = [index.parent / "wavs" / f"{name}{suffix}" for suffix in (*AUDIO_SUFFIXES, *OTHER_AUDIO_SUFFIXES)]
        audio = next((path for path in candidates if is_file(path)), candidates[0])
        yield Utterance(name, audio, transcript, speaker, context.language, extras=extras)

    return build_utterances((SourceRecord(index, number, line) for number, line in nonblank_lines(index)), make)
