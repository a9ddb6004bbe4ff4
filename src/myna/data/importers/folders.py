"""Importers for folders of recordings: Myna's own manifest, a text file beside each recording, and lists of texts."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

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
    """Myna's own manifest.jsonl."""

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
    """A folder of recordings with a .txt or .lab of the same name beside each; subfolders are speakers."""

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
    """LJSpeech: metadata.csv of id|text|normalised text, without a header, beside wavs/."""
    index = records.index_file(source, "metadata.csv")
    speaker = context.speaker or index.parent.resolve().name

    def make(record: SourceRecord) -> Iterator[Utterance]:
        name, *texts = record.data.decode().split("|")
        if not texts:
            raise RecordError("malformed", "no `|` in the line")
        record.id = name
        if len(texts) > 2:
            raise RecordError("malformed", f"{1 + len(texts)} columns, not 2 or 3")
        transcript = "".join(texts[1:]).strip() or texts[0]
        extras = {"original_text": texts[0]} if transcript != texts[0] else {}
        names = [f"{name}{suffix}" for suffix in records.RECORDING_SUFFIXES]
        audio = records.find_file(names, index.parent / "wavs")
        yield Utterance(name, audio, transcript, speaker, context.language, extras=extras)

    return build_utterances((SourceRecord(index, number, line) for number, line in records.nonblank_lines(index)), make)


# Lists of ids and texts, as published corpora have them

LISTS = ("prompts.txt", "txt/text", "orthographic-transcript.txt", "etc/txt.done.data", "txt.done.data")
"""Names of the list in VIVOS, VAIS1000, the Arabic Speech Corpus, CMU Arctic and Festvox. LibriSpeech has many."""
CHAPTER_LISTS = ("*.trans.txt", "*/*.trans.txt", "*/*/*.trans.txt")
"""Patterns of LibriSpeech's lists below a chapter, a speaker and a subset. Below the root all subsets would join."""
AUDIO_FOLDERS = ("wav", "wavs", "wave", "waves", "audio", "clips")
LINE = re.compile(
    r"""\(\s*(?P<festvox>\S+)\s+"(?P<festvox_text>.*)"\s*\)  # ( arctic_a0001 "Author of the danger trail." )
    | "(?P<quoted>[^"]+)"\s+"(?P<quoted_text>.*)"            # "ARA NORM  0002.wav" "waraj~aHa"
    | (?P<id>[^|\s]+)(?:\||\s+)(?P<text>.*)                  # 84-121123-0001 TEXT, or 12|text
    """,
    re.VERBOSE,
)
BUCKWALTER = str.maketrans(
    "'|>&<}AbptvjHxd*rzs$SDTZEg_fqklmnhwYyFNKaui~o`{PJVG^",
    "ءآأؤإئابةتثجحخدذرزسشصضطظعغـفقكلمنهوىيًٌٍَُِّْٰٱپچڤگث",
)
"""Arabic letters and vowel signs by their Buckwalter letters; the Arabic Speech Corpus writes `^` for `v`."""


def matches_transcripts(source: Path) -> bool:
    first = next((line for file in _lists(source)[:1] for line in records.read_head(file).splitlines()), "")
    return LINE.fullmatch(first.strip()) is not None


def read_transcripts(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    """Ids and texts in prompts.txt, txt/text, *.trans.txt or txt.done.data: VIVOS, LibriSpeech, CMU Arctic.

    A speaker is a folder of recordings; Buckwalter and capitals become plain text.
    """
    for file in _lists(source):
        yield from _read_list(file, source if source.is_dir() else file.parent, context)


def _lists(source: Path) -> list[Path]:
    if source.is_file():
        return [source] if source.name in (Path(name).name for name in LISTS) or _is_chapter(source) else []
    named = [source / name for name in LISTS if (source / name).is_file()]
    return named[:1] or next((found for pattern in CHAPTER_LISTS if (found := sorted(source.glob(pattern)))), [])


def _is_chapter(file: Path) -> bool:
    return file.name.endswith(".trans.txt")


def _read_list(file: Path, folder: Path, context: ImportContext) -> Iterator[ImportItem]:
    if _is_chapter(file) or (file.name == "prompts.txt" and folder == file.parent):
        folder = file.parent
    elif not any((folder / name).is_dir() for name in AUDIO_FOLDERS):  # the list itself was given: txt/text, etc/...
        folder = file.parent.parent
    others = {other.parent for other in folder.rglob(file.name) if other != file}  # "test set" within the corpus
    found = [path for path in records.list_recordings(folder) if not others.intersection(path.parents)]
    recordings = {path.stem: path for path in found}
    common = Path(os.path.commonpath([path.parent for path in found])) if found else folder
    named = common.name if common.name not in AUDIO_FOLDERS else common.parent.resolve().name
    is_arabic = context.language.startswith("ar") or file.name == "orthographic-transcript.txt"

    def make(record: SourceRecord) -> Iterator[Utterance]:
        fields = LINE.fullmatch(record.data.decode().strip())
        if fields is None:
            raise RecordError("malformed", "the line is not an id and a text")
        id, text = (value for value in fields.groups() if value is not None)
        record.id = id = id.removesuffix(".wav")
        if id not in recordings:
            raise RecordError("missing file", f"there is no recording {id} in {folder}")
        audio = recordings[id]
        below = audio.relative_to(common).parts[:-1]
        speaker = id.partition("-")[0] if _is_chapter(file) else below[0] if below else context.speaker or named
        spoken = _plain_text(text, is_arabic=is_arabic)
        extras = {"original_text": text} if spoken != text else {}
        language = context.language or ("ar" if is_arabic else "")
        yield Utterance(id, audio, spoken, speaker, language, extras=extras)

    yield from build_utterances((SourceRecord(file, *line) for line in records.nonblank_lines(file)), make)


def _plain_text(text: str, *, is_arabic: bool) -> str:
    """Write Buckwalter in Arabic letters, capitals as a sentence, and stops without a space before them."""
    if is_arabic and text.isascii():
        return re.sub(r"\s+[-–]\s+", "، ", text).translate(BUCKWALTER)
    if text.isupper():
        return f"{text.capitalize()}."
    return re.sub(r"\s+([,.;:!?])(?=\s|$)", r"\1", text)
