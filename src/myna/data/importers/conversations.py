"""Importers for JSON of samples with clips: Boson ChatML and ms-swift conversations, and `metadata.json`."""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from myna.audio.files import probe
from myna.core.errors import AudioError
from myna.data.importers import records
from myna.data.importers.records import ImportContext, ImportItem, RecordError, SourceRecord, build_utterances
from myna.data.manifest import SPEAKER_TAG, TASKS, Span, Utterance
from myna.text.normalization import normalise_text

T = TypeVar("T")
INSTRUCTION = "Please generate speech for given text in reference audio's voice:"
"""Prefix of the target's text in the user's turn, in the Arabic data."""


class ImportedClip(NamedTuple):
    audio: Path
    span: Span | None = None


class ImportedTurn(NamedTuple):
    role: str
    parts: Sequence[str | ImportedClip]


@dataclass(frozen=True, slots=True)
class ImportedConversation:
    id: str
    turns: Sequence[ImportedTurn]
    speaker: str
    language: str
    start: int = 0
    """Number of the first turn whose clips are targets."""
    reference_text: str = ""
    target_text: str = ""
    """Transcripts of clips whose turns have no text."""
    extras: dict[str, Any] = field(default_factory=dict)


def read_messages(sample: Mapping[str, Any], content_type: type[T]) -> Iterator[tuple[str, T]]:
    for message in records.require_field(sample, "messages", list):
        message = records.require_type(message, dict, "messages")
        yield records.require_field(message, "role", str), records.require_field(message, "content", content_type)


def _utterances(sample: ImportedConversation, context: ImportContext) -> Iterator[Utterance]:
    """Yield the utterances: the assistant's clips from `start` on are targets, all clips before a target its
    references."""
    clips = list(transcribed_clips(sample))
    target_count, targets_done = sum(is_target for _, _, is_target in clips), 0
    if not target_count:
        raise RecordError("malformed", "no clip in an assistant's turn to learn")
    previous_ids: list[str] = []
    for clip, text, is_target in clips:
        if is_target:
            id = sample.id if target_count == 1 else f"{sample.id}/{targets_done}"
            text = text or (sample.target_text if target_count == 1 else "")
            extras = sample.extras | ({"references": list(dict.fromkeys(previous_ids))} if previous_ids else {})
            yield Utterance(id, clip.audio, text, sample.speaker, sample.language, clip.span, extras)
            targets_done += 1
        else:
            text = text or (sample.reference_text if len(clips) == target_count + 1 else "")
            name = f"{sample.id}/ref{len(previous_ids) - targets_done}"
            id, new = context.register_reference(name, clip.audio, text, sample.speaker, sample.language, clip.span)
            yield from new
        previous_ids.append(id)


def transcribed_clips(sample: ImportedConversation) -> Iterator[tuple[ImportedClip, str, bool]]:
    """Yield each clip, its transcript, and whether it is a target. The transcript is the text of its own turn, or for
    the assistant's clip the last text of the user."""
    user_texts: list[str] = []
    for number, turn in enumerate(sample.turns):
        turn_texts: list[str] = []
        clip_count = sum(isinstance(part, ImportedClip) for part in turn.parts)
        for position, part in enumerate(turn.parts):
            if isinstance(part, str):
                turn_texts.append(part)
                continue
            if turn.role == "assistant":
                after = [text for text in turn.parts[position:] if isinstance(text, str)] if clip_count == 1 else []
                text = _join(turn_texts) or _join(after) or _join(user_texts).removeprefix(INSTRUCTION).strip()
            else:
                text = _join(user_texts + turn_texts) if turn.role == "user" else ""
            yield part, text, turn.role == "assistant" and number >= sample.start
            user_texts, turn_texts = [], []
        if turn.role == "user":
            user_texts = user_texts + turn_texts
        elif turn.role == "assistant":
            user_texts = []


def open_text(sample: ImportedConversation) -> str:
    """Return the user's words after the last clip and the last answer: the text to be spoken."""
    texts: list[str] = []
    for turn in sample.turns:
        for part in turn.parts:
            texts = [*texts, part] if isinstance(part, str) and turn.role == "user" else []
    return _join(texts).removeprefix(INSTRUCTION).strip()


def _join(texts: Sequence[str]) -> str:
    return normalise_text(" ".join(texts))


# Boson ChatML

CHATML_FIELDS = ("id", "messages", "start_index", "speaker", "language", "misc")
SCENE = re.compile(r"<\|scene_desc_start\|>(.*?)<\|scene_desc_end\|>", re.DOTALL)


def matches_chatml(source: Path) -> bool:
    head = records.read_head(source, ".json", ".jsonl")
    return '"messages"' in head and '"audios"' not in head


def read_chatml(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    """Boson ChatML, JSON or JSONL: {messages: [{role, content}], start_index, speaker, misc}."""

    def make(record: SourceRecord) -> Iterator[Utterance]:
        return _utterances(parse_conversation(record, context), context)

    return build_utterances(records.json_records(source), make)


def parse_conversation(record: SourceRecord, context: ImportContext) -> ImportedConversation:
    """Parse one sample; its id is also set in the record."""
    sample = record.data
    misc = records.require_type(sample.get("misc") or {}, dict, "misc")
    record.id = str(misc.get("sample_id") or sample.get("id") or f"{record.source.stem}-{record.line}")
    folder = record.source.parent
    turns = [
        ImportedTurn(role, list(_chatml_parts(content, context, folder)))
        for role, content in read_messages(sample, object)
    ]
    system = "".join(part for turn in turns if turn.role == "system" for part in turn.parts if isinstance(part, str))
    scene = SCENE.search(system)
    extras = records.collect_extras({key: value for key, value in sample.items() if key not in CHATML_FIELDS})
    extras |= records.collect_extras({key: value for key, value in misc.items() if key not in ("sample_id", "speaker")})
    extras |= records.collect_extras(
        {"system": SCENE.sub("", system).strip(), "scene": scene[1].strip() if scene else ""}
    )
    return ImportedConversation(
        id=record.id,
        turns=turns,
        speaker=str(sample.get("speaker") or misc.get("speaker") or context.speaker),
        language=str(sample.get("language") or context.language),
        start=records.require_type(sample.get("start_index") or 0, int, "start_index"),
        reference_text=str(misc.get("ref_transcript") or ""),
        target_text=str(misc.get("target_transcript") or ""),
        extras=extras,
    )


def _chatml_parts(content: Any, context: ImportContext, folder: Path) -> Iterator[str | ImportedClip]:
    match content:
        case str(text) | {"type": "text", "text": str(text)}:
            yield text
        case {"type": "audio"}:
            yield _chatml_clip(content, context, folder)
        case list():
            for part in content:
                yield from _chatml_parts(part, context, folder)
        case _:
            raise RecordError("malformed", "`content` is neither text nor audio nor a list of them")


def _chatml_clip(content: Mapping[str, Any], context: ImportContext, folder: Path) -> ImportedClip:
    span = records.parse_span(content.get("offset"), duration=content.get("duration"))
    url, raw = content.get("audio_url"), content.get("raw_audio")
    if url and url != "placeholder":
        path = records.require_type(url, str, "audio_url").removeprefix("file://")
        return ImportedClip(records.find_file(path, folder, Path()), span)
    if not raw:
        raise RecordError("placeholder without clip", "neither `audio_url` nor `raw_audio`")
    try:
        data = base64.b64decode(records.require_type(raw, str, "raw_audio"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError("unreadable audio", f"`raw_audio` is not base64: {error}") from None
    return ImportedClip(context.save_embedded_audio(data), span)


# ms-swift

MS_SWIFT_FIELDS = ("id", "messages", "audios", "speaker", "speaker_id", "language")
PLACEHOLDER = "<audio>"


def matches_ms_swift(source: Path) -> bool:
    head = records.read_head(source, ".json", ".jsonl")
    return '"messages"' in head and '"audios"' in head


def read_ms_swift(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    """ms-swift JSONL: {messages: [{role, content with <audio>}], audios: [paths]}."""

    def make(record: SourceRecord) -> Iterator[Utterance]:
        sample = record.data
        record.id = str(sample.get("id") or f"{source.stem}-{record.line}")
        messages = list(read_messages(sample, str))
        names = [
            records.require_type(name, str, "audios")
            for name in records.require_type(sample.get("audios") or [], list, "audios")
        ]
        clips = [ImportedClip(records.find_file(name, source.parent, Path())) for name in names]
        extras = {key: value for key, value in sample.items() if key not in MS_SWIFT_FIELDS}
        extras["system"] = " ".join(text for role, text in messages if role == "system").strip()
        conversation = ImportedConversation(
            id=record.id,
            turns=_place_clips(messages, clips),
            speaker=str(sample.get("speaker") or sample.get("speaker_id") or context.speaker),
            language=str(sample.get("language") or context.language),
            extras=records.collect_extras(extras),
        )
        return _utterances(conversation, context)

    return build_utterances(records.json_records(source), make)


def _place_clips(messages: list[tuple[str, str]], clips: list[ImportedClip]) -> list[ImportedTurn]:
    """Return turns with each clip at its placeholder; a single clip without one is in the assistant's only turn."""
    placeholders = sum(text.count(PLACEHOLDER) for _, text in messages)
    answers = [number for number, (role, _) in enumerate(messages) if role == "assistant"]
    is_transcript = len(clips) == len(answers) == 1 and PLACEHOLDER not in messages[answers[0]][1]
    if placeholders != len(clips) and not (is_transcript and placeholders == 0):
        raise RecordError("placeholder without clip", f"{placeholders} {PLACEHOLDER} for {len(clips)} clips")
    if is_transcript:
        return [ImportedTurn("assistant", [messages[answers[0]][1], *clips])]
    remaining, turns = iter(clips), []
    for role, text in messages:
        first, *others = text.split(PLACEHOLDER)
        following = (part for other in others for part in (next(remaining), other))
        turns.append(ImportedTurn(role, [first, *following]))
    return turns


# The Vietnamese fine-tuning folder: recordings, transcripts and a `metadata.json` that names them

REFERENCE_FIELDS = ("ref_audio_file", "ref_transcript", "ref_speakers")
MAPPED_FIELDS = ("id", "audio_file", "transcript_file", "speaker_id", "language", "task_type", *REFERENCE_FIELDS)
"""Fields of a sample that become fields or references of an utterance; the others become extras."""


def matches_samples(source: Path) -> bool:
    file = records.index_file(source, "metadata.json")
    return file.name == "metadata.json" and bool(re.search(r'"(dataset_info|samples)"\s*:', records.read_head(file)))


def read_samples(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    """A folder with metadata.json = {dataset_info, samples: [{audio_file, transcript_file, ...}]}."""
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
        transcript = records.find_file(records.require_field(sample, "transcript_file", str), *folders)
        text = records.read_transcript(transcript)
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
    samples = tree.get("samples") if isinstance(tree, dict) else None
    if isinstance(samples, list):
        return build_utterances(records.json_samples(index, enumerate(samples, start=1)), make)
    error = tree if isinstance(tree, RecordError) else RecordError("malformed", "there is no list `samples`")
    return build_utterances([SourceRecord(index, None, error)], make)


def _references(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the references of a sample in the order of their speaker tags."""
    if str(sample.get("task_type")).endswith("smart_voice"):
        return []
    if sample.get("ref_speakers"):
        speakers = records.require_type(sample["ref_speakers"], list, "ref_speakers")
        references = [records.require_type(speaker, dict, "ref_speakers") for speaker in speakers]
        return sorted(references, key=lambda one: list(map(float, re.findall(r"\d+", str(one.get("speaker_tag"))))))
    if sample.get("ref_audio_file"):
        return [sample]
    if sample.get("ref_speakers") is not None:
        raise RecordError("missing reference", "`ref_speakers` is empty")
    return []


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
    if not abs(duration - seconds) <= records.MAX_DURATION_ERROR_SECONDS:  # written so that NaN fails too
        raise RecordError("wrong duration", f"`duration` is {duration} s, and {audio} has {seconds:.2f} s")
