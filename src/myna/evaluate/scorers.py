"""All ears at once: those that are there, and what it would take to have the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Protocol, TypeVar

from myna.audio.files import Samples
from myna.errors import MynaError
from myna.evaluate.mos import DNSMOS, DistillMOS
from myna.evaluate.resemblyzer import Voice
from myna.evaluate.speaker_encoders import RESEMBLYZER, open_voices
from myna.evaluate.wer import ASR, Transcript

NO_RECOGNISER = "no recogniser was named: --recogniser base, or the folder of a Whisper"
Opened = TypeVar("Opened")


class Transcriber(Protocol):
    def transcribe(self, samples: Samples, sample_rate: int, language: str | None) -> Transcript: ...


class VoiceEmbedder(Protocol):
    def embed(self, samples: Samples, sample_rate: int) -> Voice: ...


class QualityPredictor(Protocol):
    def score(self, samples: Samples, sample_rate: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Scorers:
    """Each may be None, and `missing` then says why, by the names below. `names` says which ear it is: what another
    one has heard is heard again."""

    words: Transcriber | None = None
    voice: VoiceEmbedder | None = None
    distillmos: QualityPredictor | None = None
    dnsmos: QualityPredictor | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        there = {ear for ear in ("words", "voice", "distillmos", "dnsmos") if getattr(self, ear) is not None}
        assert there == set(self.names), "every ear has a name"

    @classmethod
    def open(cls, recogniser: str | None, voices: str = RESEMBLYZER, *, at_once: int = 1) -> Scorers:
        """Whatever can be opened. Nothing is downloaded but what is asked for by name."""
        names: dict[str, str] = {}
        missing: dict[str, str] = {}

        def attempt(ear: str, open_it: Callable[[], Opened], name: Callable[[Opened], str]) -> Opened | None:
            try:
                opened = open_it()
            except MynaError as error:
                missing[ear] = f"{error.what}: {error.hint}"
                return None
            names[ear] = name(opened)
            return opened

        words = None
        if recogniser is None:
            missing["words"] = NO_RECOGNISER
        else:
            words = attempt("words", lambda: ASR.open(recogniser, at_once=at_once), lambda ear: ear.name)
        return cls(
            words=words,
            voice=attempt("voice", lambda: open_voices(voices), lambda ear: ear.name),
            distillmos=attempt("distillmos", DistillMOS.open, lambda _: f"distillmos {version('distillmos')}"),
            dnsmos=attempt("dnsmos", DNSMOS.open, lambda _: f"speechmos {version('speechmos')}"),
            names=names,
            missing=missing,
        )
