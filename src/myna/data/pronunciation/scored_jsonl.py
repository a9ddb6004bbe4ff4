"""Importer of recordings with scores: JSONL with `audio`, `text`, `scores`, and as a rule `words` with their phones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from myna.data.importers import tabular
from myna.data.importers.base import (
    ImportContext,
    ImportedUtterance,
    RecordError,
    RejectedRecord,
    SourceRecord,
    build_utterances,
)
from myna.data.importers.reading import json_records
from myna.data.pronunciation.assessment import DEFAULT_QUESTION, read_assessment
from myna.data.utterance import Utterance

DESCRIPTION = "a JSONL file with audio, text, scores (accuracy, fluency, prosodic, total, 0 to 10) and words"


def matches(source: Path) -> bool:
    if source.suffix != ".jsonl" or not source.is_file():
        return False
    with source.open("rb") as file:
        try:
            first = json.loads(file.readline().decode("utf-8-sig"))
        except ValueError:
            return False
    return isinstance(first, dict) and {"audio", "text", "scores"} <= first.keys()


def read(source: Path, context: ImportContext) -> Iterator[ImportedUtterance | RejectedRecord]:
    def build(record: SourceRecord) -> Iterator[Utterance]:
        fields: dict[str, Any] = dict(record.data)
        scores: dict[str, Any] = {key: fields.pop(key) for key in ("scores", "words") if key in fields}
        row = SourceRecord(record.source, record.line, fields)
        utterance = tabular.utterance_from_row(row, context, (source.parent, Path()))
        record.id = utterance.id
        yield add_assessment(utterance, scores)

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
