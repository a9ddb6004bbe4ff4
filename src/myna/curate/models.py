"""Models of the first pass: a recogniser and the networks of `curate/analysis`, opened once in each process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from myna.audio.files import Samples
from myna.curate import analysis
from myna.curate.analysis.models import DEFAULT_FOLDER
from myna.curate.settings import ListenSettings
from myna.evaluate.asr import ASR, TimedTranscript

NO_ASR = "none"
EMBEDDED_STEP_SECONDS = 0.5
"""Embedded lengths are multiples of it: each new length costs the convolutions a new plan."""
MAX_EMBEDDED_SECONDS = 8.0
"""Of a clip, from its middle."""


class WordRecogniser(Protocol):
    """An ASR that tells the times of words."""

    @property
    def name(self) -> str:
        """Identifies the weights."""

    def transcribe_words(self, samples: Samples, sample_rate: int, language: str | None = None) -> TimedTranscript: ...


class SpeakerActivity(Protocol):
    """Who speaks in a span of a part, in seconds. Speakers are numbered from 0."""

    @property
    def embeddings(self) -> npt.NDArray[np.float32]:
        """(speakers, size): the mean voice of each."""

    def speaker_shares(self, start: float, end: float) -> dict[int, float]: ...

    def overlap_share(self, start: float, end: float) -> float: ...


FindSpeechSpans = Callable[[Samples, int], list[tuple[float, float]]]
"""Voice activity of mono samples at a sample rate, in seconds."""


@dataclass(frozen=True)
class CurationModels:
    """Everything that a part is listened to with. What is missing gives NaN, an empty text or one speaker."""

    find_speech: FindSpeechSpans
    asr: WordRecogniser | None
    check_asr: WordRecogniser | None
    networks: analysis.AnalysisModels

    @classmethod
    def open(cls, settings: ListenSettings, threads: int = 0) -> CurationModels:
        def open_asr(name: str) -> ASR:
            return ASR.open(name, settings.device, threads=threads)

        asr = None if settings.asr == NO_ASR else open_asr(settings.asr)
        check = open_asr(settings.check_asr) if settings.check_asr and settings.check_asr != settings.asr else asr
        return cls(analysis.voice_activity, asr, check, analysis.load_models(analysis_settings(settings, threads)))

    @property
    def names(self) -> list[str]:
        """Of all models, with their versions: rows of parts are comparable where these are equal."""
        recognisers = [one.name if one is not None else NO_ASR for one in (self.asr, self.check_asr)]
        return [*recognisers, *(f"{name} {version}" for name, version in sorted(self.networks.versions.items()))]

    def transcribe(self, samples: Samples, sample_rate: int, language: str | None) -> TimedTranscript:
        return self.asr.transcribe_words(samples, sample_rate, language) if self.asr else TimedTranscript()

    def check(self, samples: Samples, sample_rate: int, language: str | None) -> TimedTranscript:
        """The second transcription."""
        return self.check_asr.transcribe_words(samples, sample_rate, language) if self.check_asr else TimedTranscript()

    def find_speakers(self, samples: Samples, sample_rate: int) -> SpeakerActivity | None:
        """Speaker turns; None where there is no model for them."""
        if self.networks.segmentation is None or self.networks.speaker_encoder is None:
            return None
        return analysis.speaker_turns(samples, sample_rate, self.networks)

    def embed(self, samples: Samples, sample_rate: int) -> npt.NDArray[np.float32]:
        """Speaker embedding of the middle of a clip; empty without an encoder."""
        if self.networks.speaker_encoder is None:
            return np.empty(0, np.float32)
        step = round(EMBEDDED_STEP_SECONDS * sample_rate)
        size = min(len(samples) // step * step, round(MAX_EMBEDDED_SECONDS * sample_rate))
        first = (len(samples) - size) // 2
        clip = samples[first : first + size] if size else np.resize(samples, step)
        return np.asarray(analysis.embed_speaker(clip, sample_rate, self.networks), np.float32)

    def measure(self, samples: Samples, sample_rate: int) -> dict[str, float]:
        return analysis.measure(samples, sample_rate, self.networks)

    def music_share(self, samples: Samples, sample_rate: int) -> float:
        return self.networks.music.music_share(samples, sample_rate) if self.networks.music else math.nan

    def normalise_text(self, text: str, language: str) -> str:
        """As it is read aloud."""
        return analysis.normalise_spoken_text(text, language) if text else ""

    def fingerprint(self, samples: Samples, sample_rate: int) -> bytes:
        return analysis.fingerprint(samples, sample_rate)


def analysis_settings(settings: ListenSettings, threads: int = 0) -> analysis.AnalysisSettings:
    folder = Path(settings.models).expanduser() if settings.models else DEFAULT_FOLDER
    return analysis.AnalysisSettings(folder=folder, device=settings.device, threads=threads)


def missing_models(settings: ListenSettings) -> list[str]:
    """What cannot be done on this machine, why that matters, and what to type."""
    missing = [one for one in analysis.capabilities(analysis_settings(settings)) if not one.available]
    notes = [f"{one.name}: {one.what_is_lost} ({one.what_to_install})" for one in missing]
    if settings.asr == NO_ASR:
        notes.append("recogniser: without text no clip is kept (--asr base, or the folder of a Whisper)")
    return notes
