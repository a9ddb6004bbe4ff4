"""LJSpeech: `metadata.csv` of `id|text|normalised text` without a header, and `wavs/ID.wav`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from myna.data.importers import table
from myna.data.importers.base import AUDIO_SUFFIXES, Bad, Context, Found, Record, Rejected, build
from myna.data.importers.reading import head, lines
from myna.data.utterance import Utterance
from myna.io import is_file

DESCRIPTION = "LJSpeech: metadata.csv of id|text|normalised text, without a header, beside wavs/"


def matches(source: Path) -> bool:
    file = _index(source)
    if file.name != "metadata.csv" or not file.is_file() or table.matches(file):
        return False
    return "|" in head(file).partition("\n")[0] and (file.parent / "wavs").is_dir()


def read(source: Path, context: Context) -> Iterator[Found | Rejected]:
    index = _index(source)
    speaker = context.speaker or index.parent.resolve().name

    def make(record: Record) -> Iterator[Utterance]:
        try:
            name, text, *normalised = record.data.decode("utf-8").split("|")
        except UnicodeDecodeError as error:
            raise Bad("not UTF-8", str(error)) from None
        except ValueError:
            raise Bad("malformed", "no `|` in the line") from None
        record.id = name
        if len(normalised) > 1:
            raise Bad("malformed", f"{2 + len(normalised)} columns, not 2 or 3")
        spoken = "".join(normalised).strip() or text
        written = {"original_text": text} if spoken != text else {}
        wavs = index.parent / "wavs"
        choices = [wavs / f"{name}{suffix}" for suffix in AUDIO_SUFFIXES]
        audio = next((path for path in choices if is_file(path)), choices[0])
        yield Utterance(name, audio, spoken, speaker, context.language, extras=written)

    return build((Record(index, number, line) for number, line in lines(index)), make)


def _index(source: Path) -> Path:
    return source / "metadata.csv" if source.is_dir() else source
