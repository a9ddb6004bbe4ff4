"""Models of the first pass: a recogniser and the networks of `listen/`, opened once in each process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from myna.audio.files import Samples
from myna.core.device import pick_device
from myna.core.io import curation_models_folder
from myna.curate.settings import ListenSettings
from myna.listen.asr import ASR, TimedTranscript, Transcript
from myna.listen.diarization import find_local_speakers, label_speakers
from myna.listen.fingerprints import fingerprint
from myna.listen.models import (
    AnalysisModels,
    batches,
    capabilities,
    load_models,
    map_batches,
    measure,
)
from myna.listen.speaker_encoders import embed_speakers
from myna.listen.voice_activity import voice_activity
from myna.text.spoken_forms import normalise_spoken_text

NO_ASR = "none"
FIRST_PASS_FORMAT = 5
"""Version of the first pass. Raise it if equal models give other rows: parts are then listened to again."""
EMBEDDED_STEP_SECONDS = 0.5
"""Step in seconds of embedded lengths: each new length costs the convolutions a new plan."""
MAX_EMBEDDED_SECONDS = 8.0
"""Maximum seconds of a clip that are embedded, from its middle."""


class WordRecogniser(Protocol):
    """ASR that gives the times of words."""

    @property
    def name(self) -> str:
        """Identity of the weights."""

    @property
    def batch_size(self) -> int:
        """Best number of clips per batch."""

    def transcribe_batch(
        self, clips: Sequence[Samples], sample_rate: int, languages: Sequence[str | None]
    ) -> list[Transcript]: ...

    def transcribe_words_batch(
        self, clips: Sequence[Samples], sample_rate: int, languages: Sequence[str | None]
    ) -> list[TimedTranscript]: ...


class SpeakerActivity(Protocol):
    """Speakers of a part by time in seconds; they are numbered from 0."""

    @property
    def embeddings(self) -> npt.NDArray[np.float32]:
        """Mean embedding of each speaker (speakers, size)."""

    def speaker_shares(self, start: float, end: float) -> dict[int, float]: ...

    def overlap_share(self, start: float, end: float) -> float: ...


FindSpeechSpans = Callable[[Samples, int], list[tuple[float, float]]]
"""Function that returns voice activity in seconds from mono samples and their rate."""


@dataclass(frozen=True)
class CurationModels:
    """Models that listen to a part. A missing one gives NaN, an empty text or one speaker."""

    find_speech: FindSpeechSpans
    asr: WordRecogniser | None
    check_asr: WordRecogniser | None
    networks: AnalysisModels
    device: str = "cpu"

    @classmethod
    def open(cls, settings: ListenSettings, threads: int = 0) -> CurationModels:
        def open_asr(name: str) -> ASR:
            return ASR.open(name, settings.device, threads=threads, float16=True)

        asr = None if settings.asr == NO_ASR else open_asr(settings.asr)
        check = open_asr(settings.check_asr) if settings.check_asr and settings.check_asr != settings.asr else asr
        networks = load_models(models_folder(settings), str(pick_device(settings.device)), threads)
        return cls(voice_activity, asr, check, networks, str(pick_device(settings.device).type))

    @property
    def names(self) -> list[str]:
        """Names of all models with versions, and of the procedure: rows of parts are comparable if these are equal."""
        recognisers = [one.name if one is not None else NO_ASR for one in (self.asr, self.check_asr)]
        networks = (f"{name} {version}" for name, version in sorted(self.networks.versions.items()))
        return [f"first pass {FIRST_PASS_FORMAT} on {self.device}", *recognisers, *networks]

    def transcribe(self, clips: Iterable[Samples], sample_rate: int, language: str | None) -> Iterator[TimedTranscript]:
        """Yield the first transcription of each clip, with the times of words."""
        if self.asr is None:
            yield from (TimedTranscript() for _ in clips)
            return
        for batch in batches(clips, self.asr.batch_size):
            yield from self.asr.transcribe_words_batch(batch, sample_rate, [language] * len(batch))

    def check(self, clips: Iterable[tuple[Samples, str | None]], sample_rate: int) -> Iterator[str]:
        """Yield the text of the second transcription of each clip, given with its language."""
        if self.check_asr is None:
            yield from ("" for _ in clips)
            return
        asr = self.check_asr

        def transcribe(batch: list[tuple[Samples, str | None]]) -> list[str]:
            samples, languages = zip(*batch, strict=True)
            return [one.text for one in asr.transcribe_batch(samples, sample_rate, languages)]

        yield from map_batches(transcribe, clips, asr.batch_size, lambda clip: len(clip[0]))

    def find_speakers(self, samples: Samples, sample_rate: int) -> SpeakerActivity | None:
        """Return the speaker turns; None without the models for them."""
        if self.networks.segmentation is None or self.networks.speaker_encoder is None:
            return None
        return label_speakers(find_local_speakers(samples, sample_rate, self.networks))

    def embed(self, samples: Samples, sample_rate: int) -> npt.NDArray[np.float32]:
        """Return the speaker embedding of the middle of a clip; empty without an encoder."""
        [embedding] = self.embed_all([samples], sample_rate)
        return embedding

    def embed_all(self, clips: Iterable[Samples], sample_rate: int) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the speaker embeddings of many clips."""
        if self.networks.speaker_encoder is None:
            return (np.empty(0, np.float32) for _ in clips)
        return embed_speakers(
            (_middle(clip, sample_rate) for clip in clips), sample_rate, self.networks.speaker_encoder
        )

    def measure(self, samples: Samples, sample_rate: int) -> dict[str, float]:
        return measure(samples, sample_rate, self.networks)

    def music_share(self, samples: Samples, sample_rate: int) -> float:
        return self.networks.music.music_share(samples, sample_rate) if self.networks.music else math.nan

    def normalise_text(self, text: str, language: str) -> str:
        """Return the spoken form of a text."""
        return normalise_spoken_text(text, language) if text else ""

    def fingerprint(self, samples: Samples, sample_rate: int) -> bytes:
        return fingerprint(samples, sample_rate)


def _middle(samples: Samples, sample_rate: int) -> Samples:
    step = round(EMBEDDED_STEP_SECONDS * sample_rate)
    size = min(len(samples) // step * step, round(MAX_EMBEDDED_SECONDS * sample_rate))
    first = (len(samples) - size) // 2
    return samples[first : first + size] if size else np.resize(samples, step)


def models_folder(settings: ListenSettings) -> Path:
    return Path(settings.models).expanduser() if settings.models else curation_models_folder()


def missing_models(settings: ListenSettings) -> list[str]:
    """Say what cannot be done on this machine, why that matters, and what to type."""
    missing = [one for one in capabilities(models_folder(settings)) if not one.available]
    notes = [f"{one.name}: {one.what_is_lost} ({one.what_to_install})" for one in missing]
    if settings.asr == NO_ASR:
        notes.append("recogniser: without text no clip is kept (--asr base, or the folder of a Whisper)")
    return notes
