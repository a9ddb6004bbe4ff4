"""Speech for tests: voices that hum on their own pitch and spell letters as tones above it, and ears that hear them.

Everything a real ear could say of real speech can be said of it, always the same and without weights: words, voices,
quality, pitch and silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from myna.audio.files import Samples, write
from myna.data.utterance import Utterance
from myna.evaluate.items import EvalItem, EvalSet
from myna.evaluate.resemblyzer import Voice
from myna.evaluate.scorers import Scorers
from myna.evaluate.systems import SystemOutput
from myna.evaluate.wer import Transcript, is_loop

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
"""Hertz of the letter a, between two letters, and that an ear can tell apart."""


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


class LetterEar:
    """Reads the tones back."""

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


class HumEar:
    """A voice is its spectrum below the letters."""

    def embed(self, samples: Samples, sample_rate: int) -> Voice:
        assert sample_rate == RATE
        if not len(samples):
            return np.zeros(90, np.float32)
        frames = np.pad(samples, (0, -len(samples) % LETTER)).reshape(-1, LETTER)
        spectrum = _spectrum(frames * np.hanning(LETTER)).mean(axis=0)
        bands = spectrum[60 // BIN : 960 // BIN].reshape(90, 10 // BIN).sum(axis=1)
        return np.asarray(bands / (np.linalg.norm(bands) or 1.0), np.float32)


class PurityEar:
    """Five for tones, one for noise: how much of the power lies in the strongest twentieth of the spectrum."""

    def score(self, samples: Samples, sample_rate: int) -> float:  # noqa: ARG002
        assert len(samples), "an ear is not asked about nothing"
        power = np.sort(np.square(np.abs(np.fft.rfft(samples))))[::-1]
        return float(1 + 4 * power[: len(power) // 20].sum() / (power.sum() or 1.0))


def ears(**missing: str) -> Scorers:
    """All of them, less those that are said to be missing, and why."""
    there: dict[str, Any] = {"words": LetterEar(), "voice": HumEar(), "distillmos": PurityEar(), "dnsmos": PurityEar()}
    there = {name: ear for name, ear in there.items() if name not in missing}
    return Scorers(**there, names={name: f"test {name}" for name in there}, missing=missing)


def record(folder: Path, id: str, text: str, speaker: str) -> Utterance:
    path = folder / f"{id}.wav"
    if not path.is_file():
        quiet = np.zeros(RATE // 20, np.float32)
        write(path, np.concatenate([quiet, say(text, SPEAKERS[speaker]), quiet]), RATE)
    return Utterance(id, path, text, speaker, "en")


def plan(folder: Path, speakers: Sequence[str] = tuple(SPEAKERS)) -> EvalSet:
    """Every line by every speaker, with recordings, and a reference that says something else."""
    tasks, clips = [], {}
    for speaker in speakers:
        reference = record(folder, f"{speaker}-reference", REFERENCE, speaker)
        real = [record(folder, f"{speaker}-{number}", text, speaker) for number, text in enumerate(LINES)]
        tasks += [EvalItem(one.id, one.text, speaker, "en", (reference,), one) for one in real]
        clips[speaker] = (reference, *real)
    return EvalSet(tuple(tasks), clips)


@dataclass(slots=True)
class Puppet:
    """A model that says what a test gives it to say."""

    name: str
    voice: Callable[[EvalItem], SystemOutput]
    about: Mapping[str, Any] = field(default_factory=dict)
    sample_rate: int = RATE
    asked: list[str] = field(default_factory=list)
    """Lines that it was made to say, in order."""

    def key(self, task: EvalItem) -> str:  # noqa: ARG002
        return self.name

    def can_say(self, task: EvalItem) -> bool:  # noqa: ARG002
        return True

    def speak(self, tasks: Sequence[EvalItem]) -> list[SystemOutput]:
        assert len({task.cap for task in tasks}) == 1
        self.asked += [task.id for task in tasks]
        return [self.voice(task) for task in tasks]

    def close(self) -> None:
        pass


def well(task: EvalItem) -> SystemOutput:
    """The line, in the right voice, at another pace than the recording has."""
    return SystemOutput(say(task.text, SPEAKERS[task.speaker] * 1.01, rest=2), stopped=True)


def poorly(task: EvalItem) -> SystemOutput:
    """An untuned model: vowels slip, and the voice is only near."""
    slips = task.text.replace("e", "o").replace("a", "u")
    return SystemOutput(say(slips, SPEAKERS[task.speaker] * 1.04, rest=2), stopped=True)
