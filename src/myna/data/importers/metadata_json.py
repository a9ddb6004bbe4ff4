"""The Vietnamese fine-tuning folder: recordings, transcripts and a `metadata.json` that names them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from myna.data.importers.base import Context, Found, Record, Rejected, build, reference
from myna.data.importers.fields import extras, required, typed
from myna.data.importers.reading import head, locate, objects, parsed, read_text
from myna.data.utterance import TASKS, Utterance

DESCRIPTION = "a folder with metadata.json = {dataset_info, samples: [{audio_file, transcript_file, ...}]}"

OURS = (
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
"""Fields of a sample that become fields or references of an utterance; the others are kept as extras."""


def matches(source: Path) -> bool:
    file = _index(source)
    return (
        file.name == "metadata.json"
        and file.is_file()
        and re.search(r'"(dataset_info|samples)"\s*:', head(file)) is not None
    )


def read(source: Path, context: Context) -> Iterator[Found | Rejected]:
    index = _index(source)
    folders = (index.parent, Path())

    def make(record: Record) -> Iterator[Utterance]:
        sample = record.data
        record.id = str(required(sample, "id", object))
        speaker = str(sample.get("speaker_id") or context.speaker)
        language = str(sample.get("language") or context.language)
        kept = extras({key: value for key, value in sample.items() if key not in OURS})
        task = sample.get("task_type")
        kept |= {"task" if task in TASKS else "task_type": task} if task else {}
        ids, voices = [], _voices(sample)
        for number, voice in enumerate(voices):
            audio = locate(required(voice, "ref_audio_file", str), *folders)
            text = typed(voice.get("ref_transcript") or "", str, "ref_transcript")
            voice_speaker = str(voice.get("speaker_id") or speaker)
            id, new = context.share(reference(f"{record.id}/ref{number}", audio, text, voice_speaker, language))
            ids.append(id)
            yield from new
        if ids or str(task).endswith("smart_voice"):  # a smart voice is one the model finds without a reference
            kept["references"] = ids
        if sample.get("ref_speakers"):
            kept["speaker_tags"] = [voice.get("speaker_tag") for voice in voices]
        audio = locate(required(sample, "audio_file", str), *folders)
        text = read_text(locate(required(sample, "transcript_file", str), *folders))
        yield Utterance(record.id, audio, text, speaker, language, extras=kept)

    return build(_samples(index), make)


def _voices(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """The voices a sample is to be cloned from, in the order of their tags."""
    if str(sample.get("task_type")).endswith("smart_voice"):
        return []
    if sample.get("ref_speakers"):
        voices = [typed(voice, dict, "ref_speakers") for voice in typed(sample["ref_speakers"], list, "ref_speakers")]
        return sorted(
            voices, key=lambda voice: [int(digits) for digits in re.findall(r"\d+", str(voice.get("speaker_tag")))]
        )
    return [sample] if sample.get("ref_audio_file") else []


def _samples(index: Path) -> Iterator[Record | Rejected]:
    tree = parsed(index)
    if isinstance(tree, Rejected):
        yield tree
    elif isinstance(tree, dict) and isinstance(tree.get("samples"), list):
        yield from objects(index, tree["samples"])
    else:
        yield Rejected(str(index), None, None, "malformed", "there is no list `samples`")


def _index(source: Path) -> Path:
    return source / "metadata.json" if source.is_dir() else source
