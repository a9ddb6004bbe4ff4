"""Which ear tells voices apart: by name, or by what a folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from myna.audio.files import Samples
from myna.errors import ModelError
from myna.evaluate.dependencies import HUB_FILES, fetched
from myna.evaluate.ecapa import CONVERT, EcapaEncoder
from myna.evaluate.resemblyzer import ResemblyzerEncoder, Voice
from myna.evaluate.wavlm import WavLMEncoder

RESEMBLYZER, ECAPA, WAVLM = "resemblyzer", "ecapa", "wavlm"
WAVLM_NAME = "microsoft/wavlm-base-plus-sv"
HINT = (
    f"{RESEMBLYZER}; {ECAPA}:FILE.safetensors; {WAVLM} with network; or the folder or hub name of a checkpoint of "
    "WavLMForXVector"
)


class NamedVoices(Protocol):
    @property
    def name(self) -> str:
        """What it is and not where it lies: what another one has heard is heard again."""

    def embed(self, samples: Samples, sample_rate: int) -> Voice: ...


def open_voices(which: str = RESEMBLYZER) -> NamedVoices:
    """An ear for voices. Figures by different ears cannot be compared."""
    if which == RESEMBLYZER:
        return ResemblyzerEncoder.open()
    kind, separator, place = which.partition(":")
    if kind not in (ECAPA, WAVLM):
        kind, place = "", which
    elif not separator and kind == WAVLM:
        place = WAVLM_NAME
    elif not separator:
        raise ModelError("ecapa is published as a pickle, which Myna does not open", hint=CONVERT)
    found = _found(place, ("*.safetensors",) if kind == ECAPA else HUB_FILES)
    is_ecapa = kind == ECAPA or (not kind and not (found / "config.json").is_file())
    return EcapaEncoder.open(found) if is_ecapa else WavLMEncoder.open(found, place)


def _found(place: str, files: tuple[str, ...]) -> Path:
    path = Path(place).expanduser()
    if path.exists():
        return path
    if path.is_absolute() or place.startswith((".", "~")) or place.count("/") != 1:
        raise ModelError(f"there is no ear for voices at {place}", hint=f"name one of these: {HINT}")
    return fetched(place, *files)
