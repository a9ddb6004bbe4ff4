"""Importer for the Vietnamese fine-tuning folder: recordings, transcripts and a `metadata.json` that names them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from myna.data.importers.base import (
    ImportContext,
    ImportItem,
    RejectedRecord,
    SourceRecord,
    build_utterances,
    reference_utterance,
)
from myna.data.importers.fields import collect_extras, require_field, require_type
from myna.data.importers.reading import find_file, json_objects, parse_json_file, read_head, read_transcript
from myna.data.utterance import TASKS, Utterance

DESCRIPTION = "a folder with metadata.json = {dataset_info, samples: [{audio_file, transcript_file, ...}]}"

MAPPED_FIELDS = (
    "id",
    "audio_file",
    "transcript_file",
    "speaker_id",
    "language",
    "task_type",
    "ref_audio_file",
    "ref_transcript",
    "ref_speakers",
)
"""Fields of a sample that become fields or references of an utterance; the others become extras."""


def matches(source: Path) -> bool:
    file = _index(source)
    is_index = file.name == "metadata.json" and file.is_file()
    return is_index and re.search(r'"(dataset_info|samples)"\s*:', read_head(file)) is not None


def read(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    index = _index(source)
    folders = (index.parent, Path())

    def make(record: SourceRecord) -> Iterator[Utterance]:
        sample = record.data
        record.id = str(require_field(sample, "id", object))
        speaker = str(sample.get("speaker_id") or context.speaker)
        language = str(sample.get("language") or context.language)
        extras = collect_extras({key: value for key, value in sample.items() if key not in MAPPED_FIELDS})
        task = sample.get("task_type")
        extras |= {"task" if task in TASKS else "task_type": task} if task else {}
        ids, references = [], _references(sample)
        for number, fields in enumerate(references):
            audio = find_file(require_field(fields, "ref_audio_file", str), *folders)
            text = require_type(fields.get("ref_transcript") or "", str, "ref_transcript")
            owner = str(fields.get("speaker_id") or speaker)
            reference = reference_utterance(f"{record.id}/ref{number}", audio, text, owner, language)
            id, new = context.register_reference(reference)
            ids.append(id)
            yield from new
        if ids or str(task).endswith("smart_voice"):  # a "smart voice" has no reference
            extras["references"] = ids
        if sample.get("ref_speakers"):
            extras["speaker_tags"] = [fields.get("speaker_tag") for fields in references]
        audio = find_file(require_field(sample, "audio_file", str), *folders)
        text = read_transcript(find_file(require_field(sample, "transcript_file", str), *folders))
        yield Utterance(record.id, audio, text, speaker, language, extras=extras)

    return build_utterances(_samples(index), make)


def _references(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """The references of a sample, in the order of their speaker tags."""
    if str(sample.get("task_type")).endswith("smart_voice"):
        return []
    if sample.get("ref_speakers"):
        speakers = require_type(sample["ref_speakers"], list, "ref_speakers")
        references = [require_type(speaker, dict, "ref_speakers") for speaker in speakers]
        return sorted(
            references, key=lambda fields: [int(n) for n in re.findall(r"\d+", str(fields.get("speaker_tag")))]
        )
    return [sample] if sample.get("ref_audio_file") else []


def _tag_numbers(reference: dict[str, Any]) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", str(reference.get("speaker_tag")))]


def _samples(index: Path) -> Iterator[SourceRecord | RejectedRecord]:
    tree = parse_json_file(index)
    if isinstance(tree, RejectedRecord):
        yield tree
    elif isinstance(tree, dict) and isinstance(tree.get("samples"), list):
        yield from json_objects(index, tree["samples"])
    else:
        yield RejectedRecord(str(index), None, None, "malformed", "there is no list `samples`")


def _index(source: Path) -> Path:
    return source / "metadata.json" if source.is_dir() else source
