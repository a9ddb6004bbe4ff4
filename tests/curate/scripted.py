"""Raw recordings for tests with their sentences, and models that need no weights.

The recogniser finds the samples it is given in the recordings, and answers with the words at these times. Its times are
as wrong as Whisper's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soxr  # type: ignore[import-untyped]

from myna.audio.files import Samples, read_audio, write_audio
from myna.audio.signal_measures import speech_spans
from myna.curate.models import CurationModels, OpenModels
from myna.curate.recordings import CURATION_RATE
from myna.curate.settings import CurateSettings, ListenSettings, load_curate_settings
from myna.data.manifest import read_manifest
from myna.listen.asr import ASR, TimedTranscript, TimedWord, Transcript

RECORDINGS = Path(__file__).parents[2] / "src" / "myna" / "demo" / "recordings"
WORD_START_ERROR, WORD_END_ERROR = -0.053, -0.153
"""Errors of word times in seconds: the medians of whisper-base."""
SECOND_VOICE = 0.75
"""Speed, which also changes the pitch, at which a recording sounds like another speaker: their ECAPA cosine is 0.12."""


@dataclass(frozen=True)
class SpokenSentence:
    text: str
    voice: str
    start: float
    end: float

    @property
    def words(self) -> list[TimedWord]:
        """Words of the sentence; their times follow from the numbers of letters."""
        words = self.text.split()
        ends = np.cumsum([len(word) + 1 for word in words]) / sum(len(word) + 1 for word in words)
        times = self.start + (self.end - self.start) * np.concatenate([[0.0], ends])
        return [TimedWord(f" {word}", *map(float, times[n : n + 2])) for n, word in enumerate(words)]


Truth = dict[Path, list[SpokenSentence]]
"""Sentences of each recording."""


def make_recording(count: int, *, seed: int = 0, first: int = 0) -> tuple[Samples, list[SpokenSentence]]:
    """Make sentences of two voices in turn, with silences between them, at 24 kHz."""
    random = np.random.default_rng(seed)
    pieces: list[Samples] = []
    sentences: list[SpokenSentence] = []

    def silence(seconds: float) -> None:
        pieces.append((1e-4 * random.normal(size=round(seconds * CURATION_RATE))).astype(np.float32))

    silence(0.4)
    for number, clip in enumerate(read_manifest(RECORDINGS / "manifest.jsonl")[first : first + count]):
        voice = "high" if number // 3 % 2 == 0 else "low"
        samples = read_audio(clip.audio, sample_rate=CURATION_RATE)
        if voice == "low":
            samples = soxr.resample(samples, CURATION_RATE, CURATION_RATE / SECOND_VOICE).astype(np.float32)
        loud = np.flatnonzero(np.abs(samples) > 0.02)
        samples = samples[loud[0] : loud[-1]]
        start = sum(map(len, pieces)) / CURATION_RATE
        sentences.append(SpokenSentence(clip.text, voice, start, start + len(samples) / CURATION_RATE))
        pieces.append(samples)
        silence(float(random.uniform(0.5, 1.4)))
    return np.concatenate(pieces), sentences


def write_recording(path: Path, count: int, *, seed: int = 0, first: int = 0) -> list[SpokenSentence]:
    samples, sentences = make_recording(count, seed=seed, first=first)
    write_audio(path, samples, CURATION_RATE)
    return sentences


class ScriptedRecogniser(ASR):
    """Recogniser that knows recordings and their sentences."""

    def __init__(self, recordings: tuple[tuple[Path, tuple[SpokenSentence, ...]], ...]) -> None:
        self._known = [(read_audio(path, sample_rate=CURATION_RATE), sentences) for path, sentences in recordings]
        self.name, self.batch_size = "scripted recogniser", 3

    def transcribe_batch(
        self, clips: Sequence[Samples], sample_rate: int, languages: Sequence[str | None]
    ) -> list[Transcript]:
        return [
            Transcript(one.text, looped=False) for one in self.transcribe_words_batch(clips, sample_rate, languages)
        ]

    def transcribe_words_batch(
        self, clips: Sequence[Samples], sample_rate: int, languages: Sequence[str | None]
    ) -> list[TimedTranscript]:
        assert sample_rate == CURATION_RATE
        assert len(clips) <= self.batch_size
        return [self._transcribe(clip, language) for clip, language in zip(clips, languages, strict=True)]

    def _transcribe(self, samples: Samples, language: str | None) -> TimedTranscript:
        for recording, sentences in self._known:
            start = find_samples(recording, samples)
            if start is not None:
                words = [
                    TimedWord(
                        word.text,
                        max(0.0, word.start - start + WORD_START_ERROR),
                        max(0.0, word.end - start + WORD_END_ERROR),
                    )
                    for sentence in sentences
                    for word in sentence.words
                    if word.start >= start - 0.05 and word.end <= start + len(samples) / CURATION_RATE + 0.05
                ]
                return TimedTranscript(tuple(words), language or "en", 1.0, -0.2, 1.2)
        raise AssertionError("samples of no recording that is known")


def find_samples(recording: Samples, samples: Samples) -> float | None:
    """Return the second of a recording at which samples were cut out; FLAC has rounded them to 16 bits."""
    loudest = int(np.abs(samples).argmax())
    size = min(400, len(samples) - loudest)
    pattern = samples[loudest : loudest + size]
    for place in np.flatnonzero(np.abs(recording - samples[loudest]) < 1e-4):
        window = recording[place : place + size]
        if len(window) == size and np.abs(window - pattern).max() < 1e-3:
            return float(place - loudest) / CURATION_RATE
    return None


def _open(
    recordings: tuple[tuple[Path, tuple[SpokenSentence, ...]], ...], _settings: ListenSettings, _threads: int
) -> CurationModels:
    recogniser = ScriptedRecogniser(recordings)
    return CurationModels(find_speech, recogniser, recogniser)


def find_speech(samples: Samples, sample_rate: int) -> list[tuple[float, float]]:
    return speech_spans(samples, sample_rate)


def scripted_models(recordings: dict[Path, list[SpokenSentence]]) -> OpenModels:
    """Return a function that opens models for these recordings in any process."""
    return functools.partial(_open, tuple((path, tuple(sentences)) for path, sentences in recordings.items()))


def settings(folder: Path) -> CurateSettings:
    return load_curate_settings(folder, ["keep.min_bandwidth_hz=0", "listen.part_minutes=0.3"])


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all result files."""
    files = [folder / "segments.parquet", folder / "manifest.jsonl", *folder.glob("parts/*"), *folder.glob("clips/*/*")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
