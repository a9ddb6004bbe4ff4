"""One sound, and what is made of it: a row of the results."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from myna.audio.files import Samples, read
from myna.data.text_normalization import base_language, letters, words
from myna.data.utterance import Span, Utterance
from myna.evaluate.acoustics import REVISION, STEP, Measures, copied, measure, sounding_moments
from myna.evaluate.dependencies import RATE
from myna.evaluate.items import EvalItem, EvalSet, clip_key, samples_of
from myna.evaluate.resemblyzer import ResemblyzerEncoder, Voice, rank
from myna.evaluate.scorers import Scorers, VoiceEmbedder
from myna.evaluate.wer import Transcript, letter_errors, word_errors

EARLY = 0.4
"""A line that takes less than this share of the time it should take was broken off."""
COPY = 0.75
"""From here on a sound is a copy of its reference. Two sentences of one speaker have at most about 0.5."""
SYLLABLE = 0.1
"""Seconds of sound below which nothing can have been said."""
NEAR_PROMPT = 0.5
"""Share of wrong letters below which what was heard may be the reference's words."""
REPEATED = 3
"""So many words in a row that come again, and not in the text, are a repetition."""


@dataclass(slots=True)
class ItemScores:
    """A line as one system says it. What nobody has heard is None."""

    system: str
    id: str
    key: str
    """Of what was asked: another key, another sound."""
    text: str
    speaker: str
    language: str
    kind: str
    sound: str
    """Its file, inside the folder of results; empty where nothing was said."""
    sound_hash: str
    stopped: bool | None
    """None for recordings."""
    expected_seconds: float
    line: str = ""
    """Of the line, whoever says it: its words, its references and where it is cut. Equal lines can be compared."""

    measured_by: str = ""
    seconds: float = 0.0
    leading: float | None = None
    trailing: float | None = None
    spoken: float | None = None
    pauses: float | None = None
    voiced: float | None = None
    pitch: float | None = None
    pitch_range: float | None = None
    pace: float | None = None
    """Letters a second, from the first sound to the last."""
    silent: bool | None = None
    """It lasts, and there is nothing to hear."""
    early: bool | None = None
    """It ends long before the line could have been said."""
    copied: float | None = None

    words_by: str = ""
    heard: str | None = None
    looped: bool | None = None
    word_errors: int | None = None
    words: int | None = None
    letter_errors: int | None = None
    letters: int | None = None
    repeats: bool | None = None
    says_prompt: bool | None = None
    """The reference's words were heard instead of the line's."""

    voice_by: str = ""
    similarity: float | None = None
    similarity_to_others: float | None = None
    rank: int | None = None
    compared_with: str = ""
    """`clips` of the speaker that are neither the line nor its reference, or the `reference` where there are none."""

    distillmos_by: str = ""
    distillmos: float | None = None
    dnsmos_by: str = ""
    dnsmos: float | None = None


ROW_FIELDS = tuple(one.name for one in fields(ItemScores))


@dataclass(slots=True)
class Voices:
    """Real voices as an ear knows them; each clip is heard once."""

    plan: EvalSet
    ear: VoiceEmbedder
    _known: dict[str, Voice] = field(default_factory=dict)

    def of(self, clip: Utterance) -> Voice:
        key = clip_key(clip)
        if key not in self._known:
            self._known[key] = self.ear.embed(samples_of(clip, RATE), RATE)
        return self._known[key]

    def learn(self, tell: Callable[[int, int], None]) -> None:
        """All of them, before several threads ask; told how many are known, and of how many."""
        clips = [clip for theirs in self.plan.clips.values() for clip in theirs]
        clips += [clip for task in self.plan.tasks for clip in task.references]
        for number, clip in enumerate(clips, start=1):
            self.of(clip)
            tell(number, len(clips))

    def of_speaker(self, speaker: str, without: Sequence[Utterance]) -> Voice | None:
        """The mean over a speaker's clips, some left out. None where none is left."""
        left_out = {clip_key(clip) for clip in without}
        kept = [self.of(clip) for clip in self.plan.clips.get(speaker, ()) if clip_key(clip) not in left_out]
        return np.mean(kept, axis=0) if kept else None

    @property
    def revision(self) -> str:
        """Changes whenever the same sound could be compared with others."""
        return str(sorted((speaker, *map(clip_key, clips)) for speaker, clips in self.plan.clips.items()))


@functools.lru_cache(maxsize=65_536)
def _spoken(audio: Path, span: Span | None) -> float:
    found = sounding_moments(read(audio, sample_rate=RATE, span=(span.start, span.end) if span else None))
    return float(np.ptp(np.flatnonzero(found)) + 1) * STEP / RATE if found.any() else 0.0


def spoken_seconds(clip: Utterance) -> float:
    """From the first sound of a recording to the last."""
    return _spoken(clip.audio, clip.span)


def measure_into(row: ItemScores, task: EvalItem, samples: Samples, sample_rate: int) -> None:
    """What needs no ear."""
    found: Measures = measure(samples, sample_rate)
    row.seconds, row.spoken = found.seconds, found.spoken
    row.leading, row.trailing, row.pauses, row.voiced = found.leading, found.trailing, found.pauses, found.voiced
    row.pitch, row.pitch_range = _number(found.pitch), _number(found.pitch_range)
    said = len(letters(task.text, task.language))
    row.pace = said / found.spoken if found.spoken and said else None
    due = spoken_seconds(task.real) if task.real is not None else task.expected_seconds
    # Who says nothing has ended at once, or has been silent for as long as the line takes: one or the other.
    row.early = row.stopped is not False and (found.spoken or found.seconds) < EARLY * due
    row.silent = found.is_silent and not row.early
    reference = task.references[0] if len(task.references) == 1 else None
    row.copied = copied(samples, samples_of(reference, sample_rate), sample_rate) if reference is not None else None
    row.measured_by = REVISION


def listen_into(
    row: ItemScores, task: EvalItem, samples: Samples, ears: Scorers, voices: Voices | None, by: Mapping[str, str]
) -> None:
    """Every ear that has not heard the row's sound; `by` names the ears."""
    if ears.words is not None and row.words_by != by["words"]:
        # Whisper makes up words for a click, as it does for silence.
        too_short = (row.spoken or 0.0) < SYLLABLE
        language = base_language(task.language) or None
        _words(row, task, Transcript("", looped=False) if too_short else ears.words.transcribe(samples, RATE, language))
        row.words_by = by["words"]
    if ears.voice is not None and voices is not None and row.voice_by != by["voice"]:
        _voice(row, task, ears.voice.embed(samples, RATE), voices)
        row.voice_by = by["voice"]
    for name, ear in (("distillmos", ears.distillmos), ("dnsmos", ears.dnsmos)):
        if ear is not None and getattr(row, f"{name}_by") != by[name]:
            # Nothing at all is no speech of some quality: it is counted as silent or broken off instead.
            setattr(row, name, ear.score(samples, RATE) if row.spoken else None)
            setattr(row, f"{name}_by", by[name])


def _words(row: ItemScores, task: EvalItem, heard: Transcript) -> None:
    language = task.language
    wrong, spelled = word_errors(task.text, heard, language), letter_errors(task.text, heard, language)
    row.heard, row.looped = heard.text, heard.looped
    row.word_errors, row.words = wrong.errors, wrong.words
    row.letter_errors, row.letters = spelled.errors, spelled.words
    row.repeats = row.says_prompt = None
    if heard.looped:
        return  # its text says little about the sound
    row.repeats = repeats(words(task.text, language), words(heard.text, language))
    prompts = [letter_errors(clip.text, heard, language).rate for clip in task.references]
    row.says_prompt = any(rate < min(NEAR_PROMPT, spelled.rate) for rate in prompts) if prompts else None


def _voice(row: ItemScores, task: EvalItem, voice: Voice, voices: Voices) -> None:
    """Lines of several speakers have no voice of their own."""
    row.similarity = row.similarity_to_others = row.rank = None
    row.compared_with = ""
    if len(task.references) > 1:
        return
    # Neither with itself, nor with the clip it was cloned from, which a mere copy would be most like.
    own = voices.of_speaker(task.speaker, [*task.references, *([task.real] if task.real else [])])
    row.compared_with = "clips"
    if own is None and task.references:
        own, row.compared_with = voices.of(task.references[0]), "reference"
    if own is None:
        row.compared_with = ""
        return
    row.similarity = ResemblyzerEncoder.similarity(voice, own)
    others = [
        other
        for speaker in voices.plan.clips
        if task.speaker and speaker not in ("", task.speaker) and (other := voices.of_speaker(speaker, ())) is not None
    ]
    if others:
        row.similarity_to_others = float(np.mean([ResemblyzerEncoder.similarity(voice, other) for other in others]))
        row.rank = rank(voice, 0, [own, *others])


def repeats(due: Sequence[str], heard: Sequence[str]) -> bool:
    """Whether something is said again that is to be said once. A single word may be heard twice by mistake."""
    size = min(REPEATED, max(1, len(due)))

    def runs(said: Sequence[str]) -> Counter[tuple[str, ...]]:
        return Counter(tuple(said[place : place + size]) for place in range(len(said) - size + 1))

    meant, more = runs(due), 2 if size == 1 else 1
    return any(count >= max(1, meant[run]) + more for run, count in runs(heard).items())


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def as_json(row: ItemScores) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ROW_FIELDS}
