"""Synthetic speech for tests: voices that hum on their own pitch and spell letters as tones above it, and fake scorers.

Everything that scorers measure of real speech can be measured of it, deterministically and without weights: words,
speakers, quality, pitch and silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from myna.audio.files import Samples, write_audio
from myna.data.manifest import Utterance
from myna.evaluate.evaluation import Evaluation
from myna.evaluate.items import EvalItem, EvalSet
from myna.evaluate.metrics import BASE, REAL, ROUND_TRIP, missing_metrics
from myna.evaluate.pipeline import System, SystemOutput, score_systems
from myna.evaluate.scoring import Scorers
from myna.listen.asr import Transcript, is_loop
from myna.listen.speaker_encoders import SpeakerEmbedding

RATE = 16_000
LETTER = 960
"""Samples of a letter: sixteen a second."""
SPEAKERS = {"wren": 205.0, "robin": 150.0, "heron": 110.0}
REFERENCE = "follow me over the quiet hill"
LINES = (
    "good morning to you",
    "what a fine day it is",
    "the river runs under the bridge",
    "nobody knows the way home",
    "yes",
    "she sells sea shells by the shore",
)
LOWEST, APART, BIN = 1500, 150, 5
"""Hertz of the letter a, between two letters, and that the fake ASR can tell apart."""


def say(text: str, pitch: float, *, rest: int = 1) -> Samples:
    """Letters as tones over a hum; a space is a rest of so many letters."""
    time = np.arange(LETTER) / RATE
    edge = np.minimum(1.0, np.minimum(time, time[::-1]) / 0.004)
    hum = sum(np.sin(2 * np.pi * pitch * n * time) / n for n in range(1, int(900 / pitch) + 1))
    notes = []
    for letter in text.lower():
        tone = np.sin(2 * np.pi * (LOWEST + APART * (ord(letter) - ord("a"))) * time)
        notes.append(np.zeros(LETTER * rest) if letter == " " else edge * (0.2 * hum + 0.05 * tone))
    return np.concatenate(notes).astype(np.float32)


def _spectrum(frames: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return np.abs(np.fft.rfft(frames, RATE // BIN))


class FakeASR:
    """Transcribes the tones."""

    def transcribe(self, samples: Samples, sample_rate: int, language: str | None) -> Transcript:  # noqa: ARG002
        assert sample_rate == RATE
        loud = np.flatnonzero(np.abs(samples) > 0.01)
        spelled = ""
        for start in range(int(loud[0]) if len(loud) else len(samples), len(samples) - LETTER // 2, LETTER):
            note = samples[start : start + LETTER]
            spectrum = _spectrum(note)[(LOWEST - APART // 2) // BIN : (LOWEST + 26 * APART) // BIN]
            letter = chr(ord("a") + int(spectrum.argmax()) * BIN // APART)
            spelled += letter if spectrum.max() > 2 else " "
        text = " ".join(spelled.split())
        return Transcript(text, is_loop(text))


class FakeSpeakerEncoder:
    """Embeds a voice as its spectrum below the letters."""

    name = "test speaker encoder"

    def embed(self, samples: Samples, sample_rate: int) -> SpeakerEmbedding:
        assert sample_rate == RATE
        if not len(samples):
            return np.zeros(90, np.float32)
        frames = np.pad(samples, (0, -len(samples) % LETTER)).reshape(-1, LETTER)
        spectrum = _spectrum(frames * np.hanning(LETTER)).mean(axis=0)
        bands = spectrum[60 // BIN : 960 // BIN].reshape(90, 10 // BIN).sum(axis=1)
        return np.asarray(bands / (np.linalg.norm(bands) or 1.0), np.float32)


class FakeMOS:
    """Five for tones, one for noise: how much of the power lies in the strongest twentieth of the spectrum."""

    def score(self, samples: Samples, sample_rate: int) -> float:  # noqa: ARG002
        assert len(samples), "an empty clip is not scored"
        power = np.sort(np.square(np.abs(np.fft.rfft(samples))))[::-1]
        return float(1 + 4 * power[: len(power) // 20].sum() / (power.sum() or 1.0))


def fake_scorers(**missing: str) -> Scorers:
    """All of them, less those that are missing, with the reason."""
    scorers: dict[str, Any] = {
        "asr": FakeASR(),
        "speaker_encoder": FakeSpeakerEncoder(),
        "distillmos": FakeMOS(),
        "dnsmos": FakeMOS(),
    }
    scorers = {name: scorer for name, scorer in scorers.items() if name not in missing}
    return Scorers(**scorers, names={name: f"test {name}" for name in scorers}, missing=missing)


def record(folder: Path, id: str, text: str, speaker: str) -> Utterance:
    path = folder / f"{id}.wav"
    if not path.is_file():
        quiet = np.zeros(RATE // 20, np.float32)
        write_audio(path, np.concatenate([quiet, say(text, SPEAKERS[speaker]), quiet]), RATE)
    return Utterance(id, path, text, speaker, "en")


def make_eval_set(folder: Path, speakers: Sequence[str] = tuple(SPEAKERS)) -> EvalSet:
    """Every line by every speaker, with recordings, and a reference that says something else."""
    items, clips = [], {}
    for speaker in speakers:
        reference = record(folder, f"{speaker}-reference", REFERENCE, speaker)
        recordings = [record(folder, f"{speaker}-{number}", text, speaker) for number, text in enumerate(LINES)]
        items += [EvalItem(clip.id, clip.text, speaker, "en", (reference,), clip) for clip in recordings]
        clips[speaker] = (reference, *recordings)
    return EvalSet(tuple(items), clips)


@dataclass(slots=True)
class FakeSystem:
    """A model that says what a test gives it to say."""

    name: str
    voice: Callable[[EvalItem], SystemOutput]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sample_rate: int = RATE
    spoken: list[str] = field(default_factory=list)
    """Items that it has spoken, in order."""

    def key(self, item: EvalItem) -> str:  # noqa: ARG002
        return self.name

    def supports(self, item: EvalItem) -> bool:  # noqa: ARG002
        return True

    def speak(self, items: Sequence[EvalItem], batch_size: int) -> Iterator[tuple[EvalItem, SystemOutput]]:
        """The last of each batch ends first."""
        assert len({item.max_seconds for item in items}) == 1
        for start in range(0, len(items), batch_size):
            for item in reversed(items[start : start + batch_size]):
                self.spoken.append(item.id)
                yield item, self.voice(item)

    def close(self) -> None:
        pass


def well(item: EvalItem) -> SystemOutput:
    """The line, in the right voice, at another pace than the recording has."""
    return SystemOutput(say(item.text, SPEAKERS[item.speaker] * 1.01, rest=2), stopped=True)


def poorly(item: EvalItem) -> SystemOutput:
    """An untuned model: vowels slip, and the voice is only near."""
    slips = item.text.replace("e", "o").replace("a", "u")
    return SystemOutput(say(slips, SPEAKERS[item.speaker] * 1.04, rest=2), stopped=True)


def evaluate_systems(
    eval_set: EvalSet,
    systems: Sequence[System],
    folder: Path,
    *,
    name: str = "model",
    scorers: Scorers | None = None,
    metadata: Mapping[str, Mapping[str, Any]] | None = None,
) -> Evaluation:
    """Score systems into a folder, as an evaluation of the one that is called `name`."""
    scorers = scorers or fake_scorers()
    return Evaluation(
        folder=folder,
        rows=score_systems(eval_set, systems, scorers, folder),
        base=BASE,
        unpaired=(REAL, ROUND_TRIP),
        unavailable=missing_metrics(scorers.missing),
        notes=eval_set.notes,
        system=name,
        eval_set=eval_set,
        scorer_names=scorers.names,
        metadata=metadata or {},
    )
