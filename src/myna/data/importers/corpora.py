"""Importers for published corpora: a list of ids and texts beside recordings, and WebDataset shards."""

import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from myna.data.importers import records
from myna.data.importers.records import ImportContext, ImportItem, RecordError, SourceRecord, build_utterances
from myna.data.importers.tables import utterance_from_row
from myna.data.manifest import Utterance

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
    """Read lists of ids and texts. A speaker is a folder of recordings; Buckwalter and capitals become plain text."""
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
        try:
            fields = LINE.fullmatch(record.data.decode("utf-8").strip())
        except UnicodeDecodeError as error:
            raise RecordError("not UTF-8", str(error)) from None
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


# WebDataset


def matches_webdataset(source: Path) -> bool:
    return bool(_shards(source))


def read_webdataset(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    """Read tar files in which the members of a sample share a name up to its first dot: audio, text and fields."""
    return build_utterances(_samples(source), lambda record: [utterance_from_row(record, context, ())])


def _shards(source: Path) -> list[Path]:
    return sorted(source.glob("[!.]*.tar")) if source.is_dir() else [source] if source.suffix == ".tar" else []


def _samples(source: Path) -> Iterator[SourceRecord]:
    for shard in _shards(source):
        try:
            with tarfile.open(shard) as tar:
                files = (member for member in tar if member.isfile() and not Path(member.name).name.startswith("."))
                for number, (key, members) in enumerate(groupby(files, key=_sample_key), start=1):
                    yield SourceRecord(shard, number, _read_sample(tar, members, key), key)
                file = tar.fileobj
                assert file is not None
                file.seek(tar.offset)
                if (end := file.read(512)).strip(
                    b"\0"
                ) or not end:  # tarfile stops at a damaged header without an error
                    raise tarfile.ReadError("it does not end as a tar file does")
        except (tarfile.TarError, EOFError) as error:
            yield SourceRecord(shard, None, RecordError("malformed", f"the shard is damaged: {error}"))


def _sample_key(member: tarfile.TarInfo) -> str:
    path = Path(member.name)
    return (path.parent / path.name.partition(".")[0]).as_posix()


def _read_sample(tar: tarfile.TarFile, members: Iterable[tarfile.TarInfo], key: str) -> dict[str, Any] | RecordError:
    fields: dict[str, Any] = {}
    own: dict[str, Any] = {"id": key}
    for member in members:
        file, suffix = tar.extractfile(member), Path(member.name).suffix.lower()
        data = file.read() if file is not None else b""
        try:
            if suffix in (*records.AUDIO_SUFFIXES, *records.OTHER_AUDIO_SUFFIXES):
                own["audio"] = {"bytes": data, "path": member.name}
            elif suffix == ".txt":
                own["text"] = data.decode("utf-8-sig").strip()
            elif suffix == ".json":
                tree = records.parse_json(data)
                if isinstance(tree, RecordError):
                    return tree
                fields = records.require_type(tree, dict, member.name)
        except UnicodeDecodeError as error:
            return RecordError("not UTF-8", f"{member.name}: {error}")
        except RecordError as error:
            return error
    return fields | own
