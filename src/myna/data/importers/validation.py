"""Validation of imported utterances: each recording is decoded once, each utterance passes the same checks."""

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from myna.audio.files import AudioFileError, AudioInfo, check_audio
from myna.core.errors import DataError
from myna.core.io import file_hash
from myna.core.progress import ProgressCallback, silent
from myna.data.importers import records
from myna.data.importers.records import ImportedUtterance, ImportItem, RecordError, RejectedRecord
from myna.data.manifest import Span, Utterance
from myna.text.normalization import normalise_text

SPAN_TOLERANCE_SECONDS = 0.05
"""Seconds by which a span may exceed its recording, since sources round."""
MIN_SAMPLE_RATE = 16_000
"""Samples a second below which recordings lack what makes speech clear; a telephone has 8,000."""
MAX_NESTED_LEVELS = 50
"""Maximum depth of lists and objects in an utterance's extras, so that any code can parse the manifest."""
CONTROL_TOKEN = re.compile(r"<\|[^<>|\s]+\|>")
"""Pattern of control tokens in the vocabularies of language models."""
MAX_CHARACTERS_PER_SECOND = 50
"""Maximum characters per second of speech. Fast speech has 25 to 35: seven syllables a second, of three letters and a
space in Vietnamese, of two letters and two vowel signs in Arabic, of one character in Chinese."""
PACE_GRACE_SECONDS = 1.0
"""Seconds added to a clip before its pace is checked, for tags and for clips that were cut tightly."""

TextCheck = Callable[[Mapping[str, str]], object]
"""Function that raises a `DataError` for a text, given by its id, that a model cannot take."""


def validate_utterances(
    items: Iterable[ImportItem], progress: ProgressCallback = silent, check_text: TextCheck | None = None
) -> tuple[list[Utterance], list[RejectedRecord], tuple[str, ...]]:
    """Return usable utterances and rejected records with their reason, both in the order of the source, and notes on
    doubtful ones.

    A reference whose targets were all rejected is left out with them. One that no target names serves its speaker if it
    has a text.
    """
    imported = list(items)
    found: dict[Path, AudioInfo] = {}
    checked = list(_check_each(imported, progress, check_text, found))
    _check_all_references(checked)
    given, valid = (
        [item.utterance for item in some if isinstance(item, ImportedUtterance)] for some in (imported, checked)
    )
    named_before, named = ({id for one in some for id in one.references or ()} for some in (given, valid))
    utterances = [one for one in valid if one.is_target or one.id in named or (one.text and one.id not in named_before)]
    rejected = [item for item in checked if isinstance(item, RejectedRecord)]
    return utterances, rejected, tuple(_doubts(utterances, found))


def _doubts(utterances: Sequence[Utterance], found: Mapping[Path, AudioInfo]) -> Iterator[str]:
    """Yield notes on recordings and durations that are accepted and may be wrong."""
    count, rates = len(utterances), [found[one.audio].sample_rate for one in utterances]
    if low := [rate for rate in rates if rate < MIN_SAMPLE_RATE]:
        few = f"{len(low)} of {count} utterances have fewer than {MIN_SAMPLE_RATE} samples a second"
        yield f"{few} ({min(low)} at the least): speech that is learned from them sounds like a telephone"
    if wrong := [one.id for one in utterances if _has_other_duration(one, found[one.audio])]:
        off = f"a `duration` more than {records.MAX_DURATION_ERROR_SECONDS:g} s off, {wrong[0]} first"
        yield f"{len(wrong)} of {count} utterances have {off}; the recordings were taken as they are"


def _has_other_duration(utterance: Utterance, recording: AudioInfo) -> bool:
    duration = utterance.extras.get("duration")
    start, end = (utterance.span.start, utterance.span.end) if utterance.span else (0.0, None)
    seconds = (recording.seconds if end is None else end) - start
    return isinstance(duration, int | float) and abs(duration - seconds) > records.MAX_DURATION_ERROR_SECONDS


def _check_each(
    items: list[ImportItem], progress: ProgressCallback, check_text: TextCheck | None, found: dict[Path, AudioInfo]
) -> Iterator[ImportItem]:
    """Yield each item, checked; the recordings of usable ones are added to `found`."""
    paths = dict.fromkeys(item.utterance.audio for item in items if isinstance(item, ImportedUtterance))
    ids: set[str] = set()
    # Decoding releases the GIL. Recordings are checked in the order in which the items first need them.
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        recordings = {path: pool.submit(check_audio, path) for path in paths}
        for number, item in enumerate(items, start=1):
            if isinstance(item, ImportedUtterance):
                try:
                    recording = recordings[item.utterance.audio]
                    item = replace(item, utterance=_check_utterance(item.utterance, recording, ids, check_text))
                    found[item.utterance.audio] = recording.result()
                except RecordError as error:
                    item = item.rejected(error)
            yield item
            progress("importing", number, len(items))
    finally:
        pool.shutdown(cancel_futures=True)


def _check_utterance(
    utterance: Utterance, recording: Future[AudioInfo], ids: set[str], check_text: TextCheck | None
) -> Utterance:
    """Check and normalise an utterance. A reference may lack its text; a target may not."""
    if not utterance.id:
        raise RecordError("malformed", "the id is empty")
    text = normalise_text(utterance.text)
    if _is_nested(utterance.extras, MAX_NESTED_LEVELS):
        raise RecordError("malformed", f"its fields are nested more than {MAX_NESTED_LEVELS} levels deep")
    try:
        json.dumps(utterance.to_json(), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RecordError("not UTF-8", str(error)) from None
    if not text and utterance.is_target:
        raise RecordError("empty text")
    _check_prompt_texts(utterance, check_text)
    if isinstance(defect := recording.exception(), AudioFileError):
        raise RecordError(defect.defect, f"{utterance.audio}{defect.detail and ': ' + defect.detail}")
    utterance = replace(utterance, text=text, span=_fit_span(utterance.span, recording.result()))
    if not utterance.answer:  # a clip that is to be assessed may be anything
        _check_speech(utterance, recording.result())
    if utterance.id in ids:
        raise RecordError("duplicate id")
    ids.add(utterance.id)
    return utterance


def _check_prompt_texts(utterance: Utterance, check_text: TextCheck | None) -> None:
    """Reject control tokens in every text that becomes part of a prompt."""
    extras = utterance.extras
    for text in (utterance.text, utterance.answer, *(str(extras.get(key) or "") for key in ("scene", "question"))):
        if token := CONTROL_TOKEN.search(text):
            raise RecordError("control token", f"{token[0]} in {text if len(text) <= 60 else f'{text[:57]}...'!r}")
        if check_text is not None and text:
            try:
                check_text({utterance.id: text})
            except DataError as error:
                raise RecordError("control token", error.what) from None


def _check_speech(utterance: Utterance, recording: AudioInfo) -> None:
    """Reject a silent clip, and a text that is too long to be spoken in the time."""
    start, end = (utterance.span.start, utterance.span.end) if utterance.span else (0.0, None)
    seconds = (recording.seconds if end is None else end) - start
    if recording.is_silent(start, end):
        raise RecordError("silence", f"{utterance.audio}, from {start:g} s to {start + seconds:g} s")
    if len(utterance.text) > MAX_CHARACTERS_PER_SECOND * (seconds + PACE_GRACE_SECONDS):
        problem = f"{len(utterance.text)} characters in {seconds:.2f} s, and speech has at most"
        raise RecordError("implausible pace", f"{problem} {MAX_CHARACTERS_PER_SECOND} a second")


def _is_nested(value: Any, levels: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_nested(item, levels - 1) for item in items)


def _fit_span(span: Span | None, recording: AudioInfo) -> Span | None:
    """Fit a span into the recording; None if it is all of it."""
    if span is None:
        return None
    frame, length = 1 / recording.sample_rate, recording.seconds
    end = length if span.end is None else span.end
    if end > length + SPAN_TOLERANCE_SECONDS or span.start + frame > min(end, length):
        raise RecordError("bad span", f"{span.start} to {span.end} of {length:.3f} s")
    if end > length - frame:
        return Span(span.start, None) if span.start else None
    return span


def _check_all_references(items: list[ImportItem]) -> None:
    """Reject, in place, targets without a valid reference. Repeats, since a rejected one may be another's reference."""
    content_hash = functools.cache(file_hash)
    while True:
        utterances = {item.utterance.id: item.utterance for item in items if isinstance(item, ImportedUtterance)}
        before = len(utterances)
        for position, item in enumerate(items):
            if isinstance(item, ImportedUtterance):
                try:
                    _check_references(item.utterance, utterances, content_hash)
                except RecordError as error:
                    items[position] = item.rejected(error)
                    utterances.pop(item.utterance.id)
        if len(utterances) == before:
            return


def _check_references(target: Utterance, utterances: dict[str, Utterance], content_hash: Callable[[Path], str]) -> None:
    for id in target.references or ():
        if id not in utterances:
            raise RecordError("missing reference", id)
        reference = utterances[id]
        first, second = reference.audio, target.audio
        may_be_equal = reference.span == target.span and first.stat().st_size == second.stat().st_size
        if may_be_equal and (first == second or content_hash(first) == content_hash(second)):
            raise RecordError("reference equals target", id)
