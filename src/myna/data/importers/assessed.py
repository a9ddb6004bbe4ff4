"""A JSONL file of recordings with scores: `audio`, `text`, `scores`, and as a rule `words` with their phones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from myna.data.importers import rows
from myna.data.importers.base import Bad, Context, Found, Record, Rejected, build
from myna.data.importers.reading import json_records
from myna.data.pronunciation.assessment import QUESTION, read_assessment
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


def read(source: Path, context: Context) -> Iterator[Found | Rejected]:
    def make(record: Record) -> Iterator[Utterance]:
        line: dict[str, Any] = record.data
        plain = {key: value for key, value in line.items() if key not in ("scores", "words")}
        utterance = rows.utterance(Record(record.source, record.line, plain), context, (source.parent, Path()))
        record.id = utterance.id
        yield with_answer(utterance, {key: line[key] for key in ("scores", "words") if key in line})

    return build(json_records(source), make)


def with_answer(utterance: Utterance, known: dict[str, Any]) -> Utterance:
    """The utterance as one that is heard: with what is asked about it, and the answer that its scores make."""
    try:
        assessment = read_assessment({"text": utterance.text, **known})
    except ValueError as error:
        raise Bad("bad score", str(error)) from None
    utterance.extras["question"] = utterance.extras.get("question", QUESTION)
    utterance.extras["answer"] = assessment.answer.to_json()
    utterance.extras["assessment"] = assessment.model_dump(mode="json", exclude_none=True)
    return utterance
