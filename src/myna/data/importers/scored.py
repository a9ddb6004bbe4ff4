"""Importers for recordings with pronunciation scores: JSONL, and the parts of SpeechOcean762."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from myna.data.importers import records
from myna.data.importers.records import ImportContext, ImportItem, RecordError, SourceRecord, build_utterances
from myna.data.importers.tables import utterance_from_row
from myna.data.manifest import Utterance
from myna.data.pronunciation import DEFAULT_QUESTION, PUBLISHED_CORPUS, SCORES, read_assessment


def matches_scored(source: Path) -> bool:
    if source.suffix != ".jsonl" or not source.is_file():
        return False
    with source.open("rb") as file:
        first = records.parse_json(file.readline())
    return isinstance(first, dict) and {"audio", "text", "scores"} <= first.keys()


def read_scored(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    """A JSONL file with audio, text, scores (accuracy, fluency, prosodic, total, 0 to 10) and words."""

    def build(record: SourceRecord) -> Iterator[Utterance]:
        scores = {key: record.data.pop(key) for key in ("scores", "words") if key in record.data}
        yield add_assessment(utterance_from_row(record, context, (source.parent, Path())), scores)

    return build_utterances(records.json_records(source), build)


def add_assessment(utterance: Utterance, scores: dict[str, Any]) -> Utterance:
    try:
        assessment = read_assessment({"text": utterance.text, **scores})
    except ValueError as error:
        raise RecordError("bad score", str(error)) from None
    utterance.extras.setdefault("question", DEFAULT_QUESTION)
    utterance.extras["answer"] = assessment.answer.to_json()
    utterance.extras["assessment"] = assessment.model_dump(mode="json", exclude_none=True)
    return utterance


# SpeechOcean762

DELETED_PHONE, UNKNOWN_PHONE = "<DEL>", "<UNK>"


def matches_speechocean(source: Path) -> bool:
    return (source / "wav.scp").is_file() and _scores_file(source).is_file()


def read_speechocean(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    """A part of SpeechOcean762, train or test: wav.scp, text and utt2spk, with resource/scores.json beside it."""
    path = _scores_file(source)
    scores = records.parse_json(path.read_bytes())
    begins = re.compile(rb'"([^"]+)"\s*:\s*\{')
    numbered = [(key, number) for number, line in records.nonblank_lines(path) for key in begins.findall(line)]
    line_numbers = {key.decode(errors="replace"): number for key, number in numbered}
    texts, speakers = (dict(pair for _, pair in _kaldi_lines(source / name)) for name in ("text", "utt2spk"))

    def build(record: SourceRecord) -> Iterator[Utterance]:
        record.id, name = record.data
        if name.endswith("|"):
            raise RecordError("malformed", "wav.scp names a command; only files are read")
        if record.id not in texts:
            raise RecordError("empty text", f"{source / 'text'} has no line for it")
        if not isinstance(scores, dict) or record.id not in scores:
            raise RecordError("bad score", f"{path} has none for it")
        # From here on errors belong to the scores.
        record.source, record.line = path, line_numbers.get(record.id)
        audio = records.find_file(name, source, source.parent, Path())
        speaker = speakers.get(record.id, context.speaker)
        extras = {"corpus": PUBLISHED_CORPUS}
        utterance = Utterance(record.id, audio, texts[record.id], speaker, context.language or "en", None, extras)
        sentence = records.require_type(scores[record.id], dict, record.id)
        words = list(map(_assessed_word, records.require_field(sentence, "words", list)))
        # `completeness` is left out, as in the literature: nearly all are 10.
        given = {name: sentence[name] for name in SCORES if name in sentence}
        yield add_assessment(utterance, {"scores": given, "words": words})

    lines = (SourceRecord(source / "wav.scp", number, pair) for number, pair in _kaldi_lines(source / "wav.scp"))
    is_broken = isinstance(scores, RecordError)
    return build_utterances([SourceRecord(path, None, scores)] if is_broken else lines, build)


def _assessed_word(stored: Any) -> dict[str, Any]:
    stored = records.require_type(stored, dict, "words")
    phones = stored.get("phones", [])
    phones = phones.split() if isinstance(phones, str) else list(records.require_type(phones, list, "phones"))
    pronounced: list[list[str]] = [[phone] for phone in phones]
    for mistake in records.require_type(stored.get("mispronunciations", []), list, "mispronunciations"):
        mistake = records.require_type(mistake, dict, "mispronunciations")
        index = records.require_field(mistake, "index", int)
        instead = records.require_field(mistake, "pronounced-phone", str)
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
    return records.find_file("scores.json", source, source / "resource", source.parent / "resource")


def _kaldi_lines(path: Path) -> Iterator[tuple[int, tuple[str, str]]]:
    for number, line in records.nonblank_lines(path) if path.is_file() else ():
        key, _, value = line.decode("utf-8", errors="replace").replace("\t", " ").partition(" ")
        yield number, (key, value.strip())
