"""All ears at once: those that are there, and what it would take to have the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Protocol, TypeVar

from myna.audio.clip import Samples
from myna.errors import MynaError
from myna.evaluate.quality import CallQualityEar, QualityEar
from myna.evaluate.similarity import Voice
from myna.evaluate.voices import RESEMBLYZER, open_voices
from myna.evaluate.words import Heard, Recogniser

NO_RECOGNISER = "no recogniser was named: --recogniser base, or the folder of a Whisper"
Opened = TypeVar("Opened")


class HearsWords(Protocol):
    def transcribe(self, samples: Samples, sample_rate: int, language: str | None) -> Heard: ...


class HearsVoices(Protocol):
    def embed(self, samples: Samples, sample_rate: int) -> Voice: ...


class HearsQuality(Protocol):
    def score(self, samples: Samples, sample_rate: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Ears:
    """Each may be None, and `missing` then says why, by the names below. `names` says which ear it is: what another
    one has heard is heard again."""

    words: HearsWords | None = None
    voice: HearsVoices | None = None
    distillmos: HearsQuality | None = None
    dnsmos: HearsQuality | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        there = {ear for ear in ("words", "voice", "distillmos", "dnsmos") if getattr(self, ear) is not None}
        assert there == set(self.names), "every ear has a name"

    @classmethod
    def open(cls, recogniser: str | None, voices: str = RESEMBLYZER, *, at_once: int = 1) -> Ears:
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
            words = attempt("words", lambda: Recogniser.open(recogniser, at_once=at_once), lambda ear: ear.name)
        return cls(
            words=words,
            voice=attempt("voice", lambda: open_voices(voices), lambda ear: ear.name),
            distillmos=attempt("distillmos", QualityEar.open, lambda _: f"distillmos {version('distillmos')}"),
            dnsmos=attempt("dnsmos", CallQualityEar.open, lambda _: f"speechmos {version('speechmos')}"),
            names=names,
            missing=missing,
        )
