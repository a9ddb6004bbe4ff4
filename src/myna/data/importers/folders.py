"""Importers for folders of recordings: Myna's own manifest, a text file beside each recording, and LJSpeech."""

from collections.abc import Iterator
from pathlib import Path

from myna.core.io import is_file
from myna.data.importers import records
from myna.data.importers.records import ImportContext, ImportItem, RecordError, SourceRecord, build_utterances
from myna.data.importers.scored import matches_scored
from myna.data.importers.tables import matches_table
from myna.data.manifest import SpanError, Utterance, parse_manifest_line


def matches_myna(source: Path) -> bool:
    file = records.index_file(source, "manifest.jsonl")
    first = records.read_head(file, ".jsonl").partition("\n")[0]
    is_manifest = all(f'"{key}"' in first for key in ("id", "audio", "text"))
    return is_manifest and '"messages"' not in first and not matches_scored(file)


def read_myna(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    def make(record: SourceRecord) -> Iterator[Utterance]:
        record.id = str(record.data["id"]) if "id" in record.data else None
        defaults = {"speaker": context.speaker, "language": context.language}
        try:
            yield parse_manifest_line(defaults | record.data, record.source.parent)
        except SpanError as error:
            raise RecordError("bad span", str(error)) from None
        except ValueError as error:
            raise RecordError("malformed", str(error)) from None

    return build_utterances(records.json_records(records.index_file(source, "manifest.jsonl")), make)


TEXT_SUFFIXES = (".txt", ".lab")
INDEX_FILES = ("manifest.jsonl", "metadata.json", "metadata.csv")
"""Index files of other layouts: a folder with one of them is not this layout."""
DOCUMENT_NAMES = ("readme", "license", "licence", "copying", "notice", "changelog")
"""Names of text files that are not transcripts."""


def matches_folder(source: Path) -> bool:
    if not source.is_dir() or any((source / index).exists() for index in INDEX_FILES):
        return False
    return any(_transcript_file(audio) for audio in records.list_recordings(source))


def read_folder(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    def make(record: SourceRecord) -> Iterator[Utterance]:
        audio: Path = record.data
        record.id = audio.relative_to(source).with_suffix("").as_posix()
        text = _transcript_file(audio)
        if text is None:
            raise RecordError("missing file", "no .txt or .lab beside it")
        is_in_subfolder = audio.parent != source
        speaker = audio.parent.name if is_in_subfolder else context.speaker or source.resolve().name
        yield Utterance(record.id, audio, records.read_transcript(text), speaker, context.language)

    recordings = records.list_recordings(source)
    names = {audio.with_suffix("") for audio in recordings}
    no_recording = RecordError("missing file", "no recording beside it")
    items = [SourceRecord(audio, None, audio) for audio in recordings] + [
        SourceRecord(text, None, no_recording)
        for text in records.list_files(source, *TEXT_SUFFIXES)
        if text.with_suffix("") not in names and text.stem.lower() not in DOCUMENT_NAMES
    ]
    return build_utterances(items, make)


def _transcript_file(audio: Path) -> Path | None:
    return next((text for suffix in TEXT_SUFFIXES if (text := audio.with_suffix(suffix)).is_file()), None)


def matches_ljspeech(source: Path) -> bool:
    file = records.index_file(source, "metadata.csv")
    has_bars = file.name == "metadata.csv" and "|" in records.read_head(file).partition("\n")[0]
    return has_bars and (file.parent / "wavs").is_dir() and not matches_table(file)


def read_ljspeech(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    index = records.index_file(source, "metadata.csv")
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
        suffixes = (*records.AUDIO_SUFFIXES, *records.OTHER_AUDIO_SUFFIXES)
        candidates = [index.parent / "wavs" / f"{name}{suffix}" for suffix in suffixes]
        audio = next((path for path in candidates if is_file(path)), candidates[0])
        yield Utterance(name, audio, transcript, speaker, context.language, extras=extras)

    return build_utterances((SourceRecord(index, number, line) for number, line in records.nonblank_lines(index)), make)
