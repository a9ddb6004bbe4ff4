"""Evaluation plan: speakers and sentences by hash of seed and names, so that every model gets the same."""

from __future__ import annotations

import gzip
import io
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import soundfile

from codec_training.recordings import Recording, recordings
from corpus_making.held_out import is_held_out, is_held_out_line
from myna.core.errors import DataError
from myna.core.io import string_hash

REFERENCE_SECONDS = (3.0, 8.0)
REAL_REFERENCE_SECONDS, PREFERRED_SECONDS = (3.0, 16.5), 6.0
"""Bounds and preferred length of a real person's reference: some have one recording, and it is long."""
MIN_ORIGINAL_SECONDS, MAX_REAL_ORIGINALS = 2.0, 1
"""Length and number of other recordings of a real person, which shows how similar one voice is to itself."""
LIST_READERS = "audiomnist-"
"""Speakers who read digits one by one, which is no reference for sentences."""
MIN_SCORED_WORDS = 4
"""Minimum number of words of a sentence with all scores. Shorter ones say little about a voice; only their stop rate
counts."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TargetSpeaker:
    """A held-out speaker: the reference clip, and other recordings."""

    name: str
    reference: Recording
    originals: tuple[Recording, ...]


@dataclass(frozen=True, slots=True)
class SynthesisTask:
    """A sentence to be synthesized in the voice of a speaker."""

    id: str
    speaker: int
    """Index in the plan."""
    text: str
    is_scored: bool
    """Whether words, voice and quality are scored; of the others only the stop rate counts."""

    @property
    def is_one_word(self) -> bool:
        return len(self.text.split()) == 1


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """Speakers and the sentences they say."""

    speakers: tuple[TargetSpeaker, ...]
    tasks: tuple[SynthesisTask, ...]


def make_plan(
    source: Path, lines: Sequence[str], seed: int, speakers: int, per_speaker: int, words: int, more: int
) -> EvaluationPlan:
    """Held-out speakers of a corpus, and the sentences that each says."""
    return _plan(_speakers(source, seed, speakers, per_speaker), lines, seed, per_speaker, words, more)


def make_real_plan(
    source: Path,
    others: Sequence[Path],
    lines: Sequence[str],
    seed: int,
    speakers: int,
    per_speaker: int,
    words: int,
    more: int,
) -> EvaluationPlan:
    """Plan an evaluation with real people, who may have one recording each: held-out ones of `source`, and all of
    `others`."""
    chosen = _shuffled(_real_speakers(source, seed), f"{seed}/speakers", lambda speaker: speaker.name)[:speakers]
    if len(chosen) < speakers:
        raise DataError(
            f"{source} has {len(chosen)} held-out people with a recording of {REAL_REFERENCE_SECONDS[0]:g} to "
            f"{REAL_REFERENCE_SECONDS[1]:g} s",
            hint=f"use --speakers {len(chosen)}",
        )
    chosen += [speaker for other in others for speaker in _real_speakers(other, seed, only_held_out=False)]
    return _plan(chosen, lines, seed, per_speaker, words, more)


def _plan(
    chosen: Sequence[TargetSpeaker], lines: Sequence[str], seed: int, per_speaker: int, words: int, more: int
) -> EvaluationPlan:
    """`per_speaker` scored sentences of each speaker; then single words and `more` of any length, for the stop rate."""
    speakers = len(chosen)
    drawn = _shuffled(lines, f"{seed}/lines", str)
    long = [line for line in drawn if len(line.split()) >= MIN_SCORED_WORDS]
    scored = long[: speakers * per_speaker]
    rest = [line for line in drawn if line not in set(scored)]
    single = _shuffled(_single_words(lines), f"{seed}/words", str)
    if len(scored) < speakers * per_speaker or len(rest) < more or len(single) < words:
        raise DataError(
            f"{len(lines)} held-out sentences are not enough", hint="use fewer, or extract more with extract_texts.py"
        )
    tasks = [
        SynthesisTask(
            f"{chosen[number % speakers].name}-{kind}-{number // speakers:02d}", number % speakers, text, kind == "line"
        )
        for kind, texts in (("line", scored), ("word", single[:words]), ("more", rest[:more]))
        for number, text in enumerate(texts)
    ]
    return EvaluationPlan(tuple(chosen), tuple(tasks))


def read_lines(file: Path) -> list[str]:
    if not file.is_file():
        raise DataError(f"there is no {file}", hint=f"python training/fledgling/extract_texts.py --out {file.parent}")
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        return [line.strip() for line in opened if line.strip()]


def _speakers(source: Path, seed: int, count: int, originals: int) -> list[TargetSpeaker]:
    of: defaultdict[str, list[Recording]] = defaultdict(list)
    for recording in recordings(source):
        if is_held_out(recording.speaker):
            of[recording.speaker].append(recording)
    found: list[TargetSpeaker] = []
    for speaker in _shuffled(list(of), f"{seed}/speakers", str):
        clips = _shuffled(of[speaker], f"{seed}/clips", lambda clip: clip.id)
        # A reference that says a held-out sentence would give the words away.
        fit = [
            clip
            for clip in clips
            if REFERENCE_SECONDS[0] <= seconds(clip) <= REFERENCE_SECONDS[1] and not is_held_out_line(clip.text)
        ]
        if fit and len(clips) > originals:
            others = [clip for clip in clips if clip.id != fit[0].id and clip.text != fit[0].text]
            found.append(TargetSpeaker(speaker, fit[0], tuple(others[:originals])))
        if len(found) == count:
            return found
    raise DataError(
        f"{source} has {len(found)} held-out speakers with a clip of 3 to 8 s and {originals} others",
        hint=f"make more natural speech, or use --speakers {len(found)}",
    )


def _real_speakers(source: Path, seed: int, *, only_held_out: bool = True) -> list[TargetSpeaker]:
    of: defaultdict[str, list[Recording]] = defaultdict(list)
    for recording in recordings(source):
        if (not only_held_out or is_held_out(recording.speaker)) and not recording.speaker.startswith(LIST_READERS):
            of[recording.speaker].append(recording)
    found = []
    for speaker, clips in of.items():
        shuffled = _shuffled(clips, f"{seed}/clips", lambda clip: clip.id)
        fit = [clip for clip in shuffled if REAL_REFERENCE_SECONDS[0] <= seconds(clip) <= REAL_REFERENCE_SECONDS[1]]
        if fit:
            reference = min(fit, key=lambda clip: abs(seconds(clip) - PREFERRED_SECONDS))
            originals = [clip for clip in shuffled if clip.id != reference.id and seconds(clip) >= MIN_ORIGINAL_SECONDS]
            found.append(TargetSpeaker(speaker, reference, tuple(originals[:MAX_REAL_ORIGINALS])))
    return found


def seconds(recording: Recording) -> float:
    info = soundfile.info(io.BytesIO(recording.data))
    return float(info.frames / info.samplerate)


def _single_words(lines: Sequence[str]) -> list[str]:
    """Words of the held-out sentences, each as a sentence of its own."""
    found = {word.strip(".,;:!?").capitalize() for line in lines for word in line.split()}
    return sorted(f"{word}." for word in found if word.isascii() and word.isalpha() and len(word) > 2)


def _shuffled(items: Sequence[T], salt: str, name: Callable[[T], str]) -> list[T]:
    return sorted(items, key=lambda item: string_hash(f"{salt}/{name(item)}"))
