"""All scorers of one evaluation: those that could be opened, and why the others could not."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Protocol

from myna.audio.files import Samples
from myna.core.device import pick_device
from myna.core.errors import MynaError
from myna.listen.asr import ASR, Transcript
from myna.listen.mos import DNSMOS, DistillMOS
from myna.listen.speaker_encoders import RESEMBLYZER, SpeakerEncoder, open_speaker_encoder

NO_ASR = "no ASR model was named: --asr base, or the folder of a Whisper"
SCORING_WORKERS = min(4, os.cpu_count() or 1)
"""Threads that score clips concurrently."""


class Transcriber(Protocol):
    def transcribe(self, samples: Samples, sample_rate: int, language: str | None) -> Transcript: ...


class MOSPredictor(Protocol):
    def score(self, samples: Samples, sample_rate: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Scorers:
    """Each scorer may be None, and `missing` then says why. `names` identifies each model and version: scores of
    another one are computed again."""

    asr: Transcriber | None = None
    speaker_encoder: SpeakerEncoder | None = None
    distillmos: MOSPredictor | None = None
    dnsmos: MOSPredictor | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """For people: a scorer that is not on the device that was asked for."""

    def __post_init__(self) -> None:
        kinds = ("asr", "speaker_encoder", "distillmos", "dnsmos")
        present = {kind for kind in kinds if getattr(self, kind) is not None}
        assert present == set(self.names), "every scorer has a name"

    @classmethod
    def open(
        cls,
        asr: str | None,
        speaker_encoder: str = RESEMBLYZER,
        *,
        device: str = "cpu",
        workers: int = SCORING_WORKERS,
    ) -> Scorers:
        """Every scorer that can be opened, on `device` unless it can only be on the CPU, as DNSMOS. Nothing is
        downloaded unless it is named."""
        target = str(pick_device(device))
        openers: dict[str, Callable[[], tuple[Any, str]]] = {
            "speaker_encoder": lambda: _named(open_speaker_encoder(speaker_encoder, target)),
            "distillmos": lambda: (DistillMOS.open(target), f"distillmos {version('distillmos')}"),
            "dnsmos": lambda: (DNSMOS.open(), f"speechmos {version('speechmos')}"),
        }
        missing = {} if asr is not None else {"asr": NO_ASR}
        if asr is not None:
            openers["asr"] = lambda: _named(ASR.open(asr, device, workers=workers))
        scorers, names = {}, {}
        for scorer, opener in openers.items():
            try:
                scorers[scorer], names[scorer] = opener()
            except MynaError as error:
                missing[scorer] = f"{error.what}: {error.hint}"
        notes = (scorers["asr"].note,) if "asr" in scorers and scorers["asr"].note else ()
        return cls(**scorers, names=names, missing=missing, notes=notes)


def _named(scorer: Any) -> tuple[Any, str]:
    return scorer, scorer.name
