"""The one gate behind every importer: each recording is decoded once, each utterance is judged by the same rules."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from myna.audio.files import AudioInfo, ClipError, check
from myna.data.importers.base import Bad, Found, Rejected
from myna.data.utterance import Span, Utterance, normalise_text
from myna.io import file_hash

ROUNDING = 0.05
"""Seconds by which a span may outlast its recording: sources round."""


def validate(
    items: Iterable[Found | Rejected], progress: Callable[[int], None] | None = None
) -> tuple[list[Utterance], list[Rejected]]:
    """The utterances that can be used, and what cannot be with the reason; both in the order of the source."""
    verdicts = list(_judged_alone(list(items), progress))
    _judge_references(verdicts)
    kept = [item.utterance for item in verdicts if isinstance(item, Found)]
    named = {id for utterance in kept for id in utterance.references or ()}
    utterances = [utterance for utterance in kept if utterance.is_target or utterance.id in named]
    return utterances, [item for item in verdicts if isinstance(item, Rejected)]


def _judged_alone(items: list[Found | Rejected], progress: Callable[[int], None] | None) -> Iterator[Found | Rejected]:
    paths = list(dict.fromkeys(item.utterance.audio for item in items if isinstance(item, Found)))
    recordings: dict[Path, AudioInfo | ClipError] = {}
    ids: set[str] = set()
    # Decoding leaves Python's lock. Results come in the order in which the items first need them.
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        results = pool.map(_inspect, paths)
        for number, item in enumerate(items, start=1):
            if isinstance(item, Found):
                audio = item.utterance.audio
                if audio not in recordings:
                    recordings[audio] = next(results)
                yield _judged(item, recordings[audio], ids)
            else:
                yield item
            if progress is not None:
                progress(number)
    finally:
        pool.shutdown(cancel_futures=True)


def _inspect(path: Path) -> AudioInfo | ClipError:
    try:
        return check(path)
    except ClipError as error:
        return error


def _judged(item: Found, recording: AudioInfo | ClipError, ids: set[str]) -> Found | Rejected:
    try:
        utterance = _sound(item.utterance, recording)
    except Bad as bad:
        return item.rejected(bad.reason, bad.detail)
    if utterance.id in ids:
        return item.rejected("duplicate id")
    ids.add(utterance.id)
    return replace(item, utterance=utterance)


def _sound(utterance: Utterance, recording: AudioInfo | ClipError) -> Utterance:
    """The utterance, normalised. A reference may come without its text; a target may not."""
    if not utterance.id:
        raise Bad("malformed", "the id is empty")
    text = normalise_text(utterance.text)
    try:
        json.dumps(utterance.to_json(), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Bad("not UTF-8", str(error)) from None
    if not text and utterance.is_target:
        raise Bad("empty text")
    if isinstance(recording, ClipError):
        raise Bad(recording.flaw, f"{utterance.audio}{recording.detail and ': ' + recording.detail}")
    return replace(utterance, text=text, span=_inside(utterance.span, recording))


def _inside(span: Span | None, recording: AudioInfo) -> Span | None:
    """The span as it lies in the recording; None where it is all of it."""
    if span is None:
        return None
    frame, length = 1 / recording.sample_rate, recording.seconds
    end = length if span.end is None else span.end
    if end > length + ROUNDING or span.start + frame > min(end, length):
        raise Bad("bad span", f"{span.start} to {span.end} of {length:.3f} s")
    if end > length - frame:
        return Span(span.start, None) if span.start else None
    return span


def _judge_references(verdicts: list[Found | Rejected]) -> None:
    """Reject, in place, targets that have lost a reference or would hear themselves, until none is left."""
    content = functools.cache(file_hash)
    while True:
        known = {item.utterance.id: item.utterance for item in verdicts if isinstance(item, Found)}
        before = len(known)
        for place, item in enumerate(verdicts):
            if isinstance(item, Found):
                try:
                    _check_references(item.utterance, known, content)
                except Bad as bad:
                    verdicts[place] = item.rejected(bad.reason, bad.detail)
                    known.pop(item.utterance.id)
        if len(known) == before:
            return


def _check_references(target: Utterance, known: dict[str, Utterance], content: Callable[[Path], str]) -> None:
    for id in target.references or ():
        if id not in known:
            raise Bad("missing reference", id)
        reference = known[id]
        if reference.span == target.span and _same_file(reference.audio, target.audio, content):
            raise Bad("reference equals target", id)


def _same_file(one: Path, other: Path, content: Callable[[Path], str]) -> bool:
    return one == other or (one.stat().st_size == other.stat().st_size and content(one) == content(other))
