"""Importer of SpeechOcean762: Kaldi's `wav.scp`, `text` and `utt2spk` of one part, and the `scores.json` of both.

speechocean762/train/{wav.scp,text,utt2spk}  test/...  resource/scores.json  WAVE/SPEAKER0001/000010011.WAV
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from myna.data.importers.base import ImportContext, ImportItem, RecordError, SourceRecord, build_utterances
from myna.data.importers.fields import require_field, require_type
from myna.data.importers.reading import find_file, nonblank_lines, parse_json
from myna.data.pronunciation.assessment import SCORES
from myna.data.pronunciation.metrics import PUBLISHED_CORPUS
from myna.data.pronunciation.scored_jsonl import add_assessment
from myna.data.utterance import Utterance

DESCRIPTION = "a part of SpeechOcean762, train or test: wav.scp, text and utt2spk, with resource/scores.json beside it"

SCORES_FILE = "scores.json"
DELETED_PHONE, UNKNOWN_PHONE = "<DEL>", "<UNK>"


def matches(source: Path) -> bool:
    return (source / "wav.scp").is_file() and _scores_file(source).is_file()


def read(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    path = _scores_file(source)
    scores = parse_json(path.read_bytes())
    line_numbers = _line_numbers(path)
    texts, speakers = (dict(pair for _, pair in _kaldi_lines(source / name)) for name in ("text", "utt2spk"))

    def build(record: SourceRecord) -> Iterator[Utterance]:
        record.id, name = record.data
        if name.endswith("|"):
            raise RecordError("malformed", "wav.scp names a command; only files are read")
        if record.id not in texts:
            raise RecordError("empty text", f"{source / 'text'} has no line for it")
        if not isinstance(scores, dict) or record.id not in scores:
            raise RecordError("bad score", f"{path} has none for it")
        # From here on errors are those of the scores.
        record.source, record.line = path, line_numbers.get(record.id)
        audio = find_file(name, source, source.parent, Path())
        speaker = speakers.get(record.id, context.speaker)
        extras = {"corpus": PUBLISHED_CORPUS}
        utterance = Utterance(record.id, audio, texts[record.id], speaker, context.language or "en", None, extras)
        sentence = require_type(scores[record.id], dict, record.id)
        words = [_word(require_type(word, dict, "words")) for word in require_field(sentence, "words", list)]
        # `completeness` is left out, as in the literature: nearly all are 10.
        given = {name: sentence[name] for name in SCORES if name in sentence}
        yield add_assessment(utterance, {"scores": given, "words": words})

    if isinstance(scores, RecordError):
        return build_utterances([SourceRecord(path, None, scores)], build)
    records = (SourceRecord(source / "wav.scp", number, pair) for number, pair in _kaldi_lines(source / "wav.scp"))
    return build_utterances(records, build)


def _word(stored: dict[str, Any]) -> dict[str, Any]:
    phones = stored.get("phones", [])
    phones = phones.split() if isinstance(phones, str) else list(require_type(phones, list, "phones"))
    pronounced: list[list[str]] = [[phone] for phone in phones]
    for mistake in require_type(stored.get("mispronunciations", []), list, "mispronunciations"):
        mistake = require_type(mistake, dict, "mispronunciations")
        index, instead = require_field(mistake, "index", int), require_field(mistake, "pronounced-phone", str)
        if not 0 <= index < len(phones):
            problem = f"`{stored.get('text')}` has {len(phones)} phones, and a mistake in number {index}"
            raise RecordError("bad score", problem)
        # A star marks an accent on a phone that can still be named.
        named = [phone.strip("*") or phones[index] for phone in instead.split()]
        named = [phone.upper() if phone.upper() in (DELETED_PHONE, UNKNOWN_PHONE) else phone for phone in named]
        pronounced[index] = [phone for phone in named if phone != DELETED_PHONE]
    word: dict[str, Any] = {key: stored[key] for key in ("text", "accuracy", "stress", "total") if key in stored}
    if "phones-accuracy" in stored:
        word["phone_scores"] = stored["phones-accuracy"]
    return word | {"phones": phones, "pronounced": [phone for part in pronounced for phone in part]}


def _scores_file(source: Path) -> Path:
    return find_file(SCORES_FILE, source, source / "resource", source.parent / "resource")


def _kaldi_lines(path: Path) -> Iterator[tuple[int, tuple[str, str]]]:
    """Line number, key and value."""
    for number, line in nonblank_lines(path) if path.is_file() else ():
        key, _, value = line.decode("utf-8", errors="replace").replace("\t", " ").partition(" ")
        yield number, (key, value.strip())


def _line_numbers(path: Path) -> dict[str, int]:
    """The line of the JSON file on which each sentence begins, for error messages."""
    begins = re.compile(rb'"([^"]+)"\s*:\s*\{')
    return {
        key.decode(errors="replace"): number for number, line in nonblank_lines(path) for key in begins.findall(line)
    }
