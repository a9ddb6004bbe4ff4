"""Importer of recordings with scores: JSONL with `audio`, `text`, `scores`, and as a rule `words` with their phones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from myna.data.importers import tabular
from myna.data.importers.base import ImportContext, ImportItem, RecordError, SourceRecord, build_utterances
from myna.data.importers.reading import json_records, parse_json
from myna.data.pronunciation.assessment import DEFAULT_QUESTION, read_assessment
from myna.data.utterance import Utterance

DESCRIPTION = "a JSONL file with audio, text, scores (accuracy, fluency, prosodic, total, 0 to 10) and words"


def matches(source: Path) -> bool:
    if source.suffix != ".jsonl" or not source.is_file():
        return False
    with source.open("rb") as file:
        first = parse_json(file.readline())
    return isinstance(first, dict) and {"audio", "text", "scores"} <= first.keys()


def read(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    def build(record: SourceRecord) -> Iterator[Utterance]:
        scores = {key: record.data.pop(key) for key in ("scores", "words") if key in record.data}
        yield add_assessment(tabular.utterance_from_row(record, context, (source.parent, Path())), scores)

    return build_utterances(json_records(source), build)


def add_assessment(utterance: Utterance, scores: dict[str, Any]) -> Utterance:
    """Add question, answer and assessment to an utterance's extras."""
    try:
        assessment = read_assessment({"text": utterance.text, **scores})
    except ValueError as error:
        raise RecordError("bad score", str(error)) from None
    utterance.extras.setdefault("question", DEFAULT_QUESTION)
    utterance.extras["answer"] = assessment.answer.to_json()
    utterance.extras["assessment"] = assessment.model_dump(mode="json", exclude_none=True)
    return utterance
