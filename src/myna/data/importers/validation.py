"""Validation of imported utterances: each recording is decoded once, each utterance passes the same checks."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from myna.audio.files import AudioFileError, AudioInfo, check_audio
from myna.data.importers.base import ImportedUtterance, ImportItem, RecordError, RejectedRecord
from myna.data.utterance import Span, Utterance, normalise_text
from myna.io import file_hash
from myna.progress import ProgressCallback, silent

SPAN_TOLERANCE_SECONDS = 0.05
"""By which a span may exceed its recording: sources round."""


def validate_utterances(
    items: Iterable[ImportItem], progress: ProgressCallback = silent
) -> tuple[list[Utterance], list[RejectedRecord]]:
    """Usable utterances, and rejected records with their reason; both in the order of the source."""
    checked = list(_check_each(list(items), progress))
    _check_all_references(checked)
    valid = [item.utterance for item in checked if isinstance(item, ImportedUtterance)]
    named = {id for utterance in valid for id in utterance.references or ()}
    utterances = [utterance for utterance in valid if utterance.is_target or utterance.id in named]
    return utterances, [item for item in checked if isinstance(item, RejectedRecord)]


def _check_each(items: list[ImportItem], progress: ProgressCallback) -> Iterator[ImportItem]:
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
                    item = replace(item, utterance=_check_utterance(item.utterance, recording, ids))
                except RecordError as error:
                    item = item.rejected(error)
            yield item
            progress("importing", number, len(items))
    finally:
        pool.shutdown(cancel_futures=True)


def _check_utterance(utterance: Utterance, recording: Future[AudioInfo], ids: set[str]) -> Utterance:
    """The utterance, normalised. A reference may come without its text; a target may not."""
    if not utterance.id:
        raise RecordError("malformed", "the id is empty")
    text = normalise_text(utterance.text)
    try:
        json.dumps(utterance.to_json(), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RecordError("not UTF-8", str(error)) from None
    if not text and utterance.is_target:
        raise RecordError("empty text")
    if isinstance(defect := recording.exception(), AudioFileError):
        raise RecordError(defect.defect, f"{utterance.audio}{defect.detail and ': ' + defect.detail}")
    span = _fit_span(utterance.span, recording.result())
    if utterance.id in ids:
        raise RecordError("duplicate id")
    ids.add(utterance.id)
    return replace(utterance, text=text, span=span)


def _fit_span(span: Span | None, recording: AudioInfo) -> Span | None:
    """The span within the recording; None where it is all of it."""
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
    """Reject, in place, targets without a valid reference; a rejected one may be another's reference, so repeat."""
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
        if reference.span == target.span and _same_file(reference.audio, target.audio, content_hash):
            raise RecordError("reference equals target", id)


def _same_file(first: Path, second: Path, content_hash: Callable[[Path], str]) -> bool:
    return first == second or (
        first.stat().st_size == second.stat().st_size and content_hash(first) == content_hash(second)
    )
