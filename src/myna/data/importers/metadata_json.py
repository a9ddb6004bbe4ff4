"""Importer for the Vietnamese fine-tuning folder: recordings, transcripts and a `metadata.json` that names them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from myna.audio.files import probe
from myna.core.errors import AudioError
from myna.data.importers import records
from myna.data.importers.records import ImportContext, Importer, ImportItem, RecordError, SourceRecord, build_utterances
from myna.data.manifest import SPEAKER_TAG, TASKS, Utterance
from myna.text.normalization import normalise_text

REFERENCE_FIELDS = ("ref_audio_file", "ref_transcript", "ref_speakers")
MAPPED_FIELDS = ("id", "audio_file", "transcript_file", "speaker_id", "language", "task_type", *REFERENCE_FIELDS)
"""Fields of a sample that become fields or references of an utterance; the others become extras."""
MAX_DURATION_ERROR_SECONDS = 1.0
"""Seconds by which `duration` may differ from the recording's length, since sources round."""


def _matches(source: Path) -> bool:
    file = records.index_file(source, "metadata.json")
    return file.name == "metadata.json" and bool(re.search(r'"(dataset_info|samples)"\s*:', records.read_head(file)))


def _read(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    index = records.index_file(source, "metadata.json")
    folders = (index.parent, Path())

    def make(record: SourceRecord) -> Iterator[Utterance]:
        sample = record.data
        record.id = str(records.require_field(sample, "id", object))
        speaker = str(sample.get("speaker_id") or context.speaker)
        language = str(sample.get("language") or context.language)
        extras = records.collect_extras({key: value for key, value in sample.items() if key not in MAPPED_FIELDS})
        task = sample.get("task_type")
        if task and task not in TASKS:
            raise RecordError("malformed", f"`task_type` is {task!r}, and not one of {', '.join(TASKS)}")
        extras |= {"task": task} if task else {}
        audio = records.find_file(records.require_field(sample, "audio_file", str), *folders)
        text = records.read_transcript(
            records.find_file(records.require_field(sample, "transcript_file", str), *folders)
        )
        _check_duration(sample.get("duration"), audio)
        ids, references = [], _references(sample)
        _check_references(references, text)
        for number, fields in enumerate(references):
            file = records.find_file(records.require_field(fields, "ref_audio_file", str), *folders)
            owner = str(fields.get("speaker_id") or speaker)
            name = f"{record.id}/ref{number}"
            id, new = context.register_reference(name, file, fields["ref_transcript"], owner, language)
            ids.append(id)
            yield from new
        if ids or str(task).endswith("smart_voice"):  # a "smart voice" has no reference
            extras["references"] = ids
        if sample.get("ref_speakers"):
            extras["speaker_tags"] = [fields.get("speaker_tag") for fields in references]
        yield Utterance(record.id, audio, text, speaker, language, extras=extras)

    tree = records.parse_json(index.read_bytes())
    samples = tree.get("samples") if isinstance(tree, dict) else tree if isinstance(tree, RecordError) else None
    if not isinstance(samples, list | RecordError):
        samples = RecordError("malformed", "there is no list `samples`")
    return build_utterances(records.json_samples(index, samples), make)


def _references(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the references of a sample in the order of their speaker tags."""
    if str(sample.get("task_type")).endswith("smart_voice"):
        return []
    if sample.get("ref_speakers"):
        speakers = records.require_type(sample["ref_speakers"], list, "ref_speakers")
        references = [records.require_type(speaker, dict, "ref_speakers") for speaker in speakers]
        return sorted(references, key=_tag_numbers)
    if sample.get("ref_audio_file"):
        return [sample]
    if sample.get("ref_speakers") is not None:
        raise RecordError("missing reference", "`ref_speakers` is empty")
    return []


def _tag_numbers(reference: dict[str, Any]) -> list[float]:
    return [float(digits) for digits in re.findall(r"\d+", str(reference.get("speaker_tag")))]


def _check_references(references: list[dict[str, Any]], text: str) -> None:
    """Check that each reference has a text, and each speaker of the text their own reference, in order."""
    files = [records.require_field(fields, "ref_audio_file", str) for fields in references]
    for file, fields in zip(files, references, strict=True):
        if not normalise_text(records.require_type(fields.get("ref_transcript") or "", str, "ref_transcript")):
            raise RecordError("empty text", f"there is no `ref_transcript` of {file}")
    if len(set(files)) < len(files):
        raise RecordError("malformed", f"one reference for two speakers: {', '.join(files)}")
    tags = [f"[SPEAKER{number}]" for number in range(len(references))]
    given = [str(fields["speaker_tag"]) for fields in references if fields.get("speaker_tag")]
    if given and given != tags:
        raise RecordError("malformed", f"the references are of {', '.join(given)}, and not of {', '.join(tags)}")
    numbers = sorted(set(SPEAKER_TAG.findall(text)), key=lambda digits: (len(digits), digits))
    spoken = [f"[SPEAKER{digits}]" for digits in numbers]
    if references and spoken != tags and (spoken or len(tags) > 1):
        who = ", ".join(spoken) or "no tagged speaker"
        raise RecordError("malformed", f"the text is spoken by {who}, the references are of {', '.join(tags)}")


def _check_duration(duration: Any, audio: Path) -> None:
    """Raise an error for a wrong length. A recording that cannot be opened is rejected later."""
    if not duration:
        return
    if not isinstance(duration, int | float):
        raise RecordError("malformed", f"`duration` is {duration!r}, and no number of seconds")
    try:
        seconds = probe(audio).seconds
    except AudioError:
        return
    if not abs(duration - seconds) <= MAX_DURATION_ERROR_SECONDS:  # written so that NaN fails too
        raise RecordError("wrong duration", f"`duration` is {duration} s, and {audio} has {seconds:.2f} s")


METADATA_JSON = Importer(
    "a folder with metadata.json = {dataset_info, samples: [{audio_file, transcript_file, ...}]}", _matches, _read
)
