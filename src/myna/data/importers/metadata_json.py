"""Importer for the Vietnamese fine-tuning folder: recordings, transcripts and a `metadata.json` that names them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from myna.data.importers.base import ImportContext, ImportItem, RecordError, SourceRecord, build_utterances
from myna.data.importers.fields import collect_extras, require_field, require_type
from myna.data.importers.reading import find_file, index_file, json_samples, parse_json, read_head, read_transcript
from myna.data.utterance import TASKS, Utterance

DESCRIPTION = "a folder with metadata.json = {dataset_info, samples: [{audio_file, transcript_file, ...}]}"

REFERENCE_FIELDS = ("ref_audio_file", "ref_transcript", "ref_speakers")
MAPPED_FIELDS = ("id", "audio_file", "transcript_file", "speaker_id", "language", "task_type", *REFERENCE_FIELDS)
"""Fields of a sample that become fields or references of an utterance; the others become extras."""


def matches(source: Path) -> bool:
    file = index_file(source, "metadata.json")
    return file.name == "metadata.json" and bool(re.search(r'"(dataset_info|samples)"\s*:', read_head(file)))


def read(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    index = index_file(source, "metadata.json")
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
            id, new = context.register_reference(f"{record.id}/ref{number}", audio, text, owner, language)
            ids.append(id)
            yield from new
        if ids or str(task).endswith("smart_voice"):  # a "smart voice" has no reference
            extras["references"] = ids
        if sample.get("ref_speakers"):
            extras["speaker_tags"] = [fields.get("speaker_tag") for fields in references]
        audio = find_file(require_field(sample, "audio_file", str), *folders)
        text = read_transcript(find_file(require_field(sample, "transcript_file", str), *folders))
        yield Utterance(record.id, audio, text, speaker, language, extras=extras)

    tree = parse_json(index.read_bytes())
    samples = tree.get("samples") if isinstance(tree, dict) else tree if isinstance(tree, RecordError) else None
    if not isinstance(samples, list | RecordError):
        samples = RecordError("malformed", "there is no list `samples`")
    return build_utterances(json_samples(index, samples), make)


def _references(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """The references of a sample, in the order of their speaker tags."""
    if str(sample.get("task_type")).endswith("smart_voice"):
        return []
    if sample.get("ref_speakers"):
        speakers = require_type(sample["ref_speakers"], list, "ref_speakers")
        references = [require_type(speaker, dict, "ref_speakers") for speaker in speakers]
        return sorted(references, key=_tag_numbers)
    return [sample] if sample.get("ref_audio_file") else []


def _tag_numbers(reference: dict[str, Any]) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", str(reference.get("speaker_tag")))]
