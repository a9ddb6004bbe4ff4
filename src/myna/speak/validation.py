"""Checks of what is to be spoken, and in whose voice. They need no model, and come before one is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from myna.audio.files import Samples, check_not_silent, probe, read_audio
from myna.audio.reference import CheckedReference, check_reference
from myna.core.errors import SpeakError
from myna.data.manifest import SPEAKER_TAG, Span
from myna.text.normalization import normalise_text

MAX_REFERENCE_SECONDS = 60.0
"""A longer recording is refused as a reference: a few seconds set a voice, and minutes of it only take memory."""


def check_speech_text(text: str, reference_texts: Sequence[str]) -> None:
    """Refuse a text without words, a reference without its transcript, and tags that do not fit the references: several
    references need `[SPEAKER0]`, `[SPEAKER1]`, ... each; tags without any reference leave the voices to the model."""
    if not normalise_text(text):
        raise SpeakError("there is no text to speak", hint='give some words: myna speak "Good morning." ...')
    for number, transcript in enumerate(reference_texts, start=1):
        if not normalise_text(transcript):
            raise SpeakError(
                f"the text of reference {number} is empty", hint='write what is said in it: --reference-text "..."'
            )
    tags = sorted({int(number) for number in SPEAKER_TAG.findall(text)})
    count = len(reference_texts)
    if count > 1 and not tags:
        raise SpeakError(
            f"there are {count} references, and nothing in the text says who speaks",
            hint='put a tag before each part: "[SPEAKER0] Hello. [SPEAKER1] Hi.", or give one reference',
        )
    if tags and tags != list(range(count or len(tags))):
        found = ", ".join(f"[SPEAKER{number}]" for number in tags)
        needed = ", ".join(f"[SPEAKER{number}]" for number in range(count or len(tags)))
        given = f"the {count} references are" if count > 1 else "the one reference is"
        whose = f"{given} {needed}" if count else f"speakers are numbered from 0: {needed}"
        raise SpeakError(
            f"the text has {found}, but {whose}",
            hint="number the tags from [SPEAKER0], in the order of the references, and give one --reference with its "
            "--reference-text for each",
        )


def read_speech_text(file: Path) -> str:
    """The text of a file."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SpeakError(f"{file} cannot be read: {error}", hint="give a UTF-8 text file") from None


def open_reference(recording: Path, sample_rate: int = 24_000, span: Span | None = None) -> CheckedReference:
    """A recording that is to set a voice, cleaned, and its problems. One that is too long, silent or cut short is
    refused."""
    part, rate = (span.start, span.end) if span is not None else None, probe(recording).sample_rate
    samples = read_audio(recording, sample_rate=rate, span=part, max_seconds=MAX_REFERENCE_SECONDS)
    check_not_silent(recording, samples)
    checked = check_reference(samples, rate, sample_rate)
    return replace(checked, problems=tuple(f"{recording}: {problem}" for problem in checked.problems))


def read_reference(recording: Path, sample_rate: int = 24_000, span: Span | None = None) -> Samples:
    """Samples of a recording that is to set a voice, cleaned."""
    return open_reference(recording, sample_rate, span).samples
