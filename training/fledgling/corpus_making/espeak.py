"""eSpeak NG from the wheel of `espeakng-loader`: random speakers, synthesis, and phonemes of a text.

A random speaker is a variant file in a copy of eSpeak's data: pitch, formants and breath of a voice that nobody has.
The library keeps its state in global variables, so there is one `Espeak` to a process. Phases and random numbers are
part of that state: the same speaker says the same line alike every time, but not sample by sample.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from myna.core.errors import DataError

Samples = npt.NDArray[np.float32]

SYNCHRONOUS, UTF8, IPA = 2, 1, 0x02
"""Constants of eSpeak: answer within the call, how text is encoded, and what phonemes are written in."""
RATE, VOLUME, PITCH_RANGE, GAP = 1, 2, 4, 7
"""Numbers of parameters."""
VOLUME_LEVEL = 40
"""A volume at which even a voice of strong formants is not clipped; the level is set afterwards."""
ACCENTS = {
    "en": ("en-us", "en-us", "en-us", "en", "en-gb-x-rp", "en-gb-scotland"),
    "ar": ("ar",),
    "vi": ("vi", "vi-vn-x-south"),
    "es": ("es", "es-419"),
    "pt": ("pt", "pt-br"),
    **{language: (language,) for language in ("fr", "it", "hi", "de", "cs", "pl", "sk", "nl", "sv", "da", "ro", "ca")},
    **{language: (language,) for language in ("tr", "hu", "fi", "el")},
}
"""Voices of a language, one as often as it is named. `en` alone is British."""
SHARED_DATA = ("phondata", "phonindex", "phontab", "intonations")
DICTIONARIES = tuple(f"{language}_dict" for language in ACCENTS)
"""All of the data that these languages need: 5 MB of 19."""
LOW_VOICE_FORMANTS, HIGH_VOICE_FORMANTS, FORMANT_JITTER = (94.0, 106.0), (100.0, 116.0), 0.02
"""Formants of deep and of high voices in per cent of eSpeak's own, and by what share each moves alone.

Voices are to differ, but letters and sounds must agree: with formants that moved further, random tones and strong
breath, Whisper misheard 37 % of the words of forty lines; so it mishears 26 %, and 27 % of eSpeak's own voice."""


@dataclass(frozen=True, slots=True)
class EspeakSpeaker:
    """A random eSpeak voice, derived from its name and the seed."""

    name: str
    accent: str
    variant: str
    """The variant file."""
    rate: int
    """Words a minute."""
    gap: int
    """Pause between words, in hundredths of a second."""
    pitch_range: int

    @classmethod
    def draw(cls, name: str, language: str, seed: int) -> EspeakSpeaker:
        rng = random.Random(f"{seed}/{name}")
        deep = rng.random() < 0.5
        pitch = rng.uniform(80, 135) if deep else rng.uniform(150, 230)
        tract = rng.uniform(*LOW_VOICE_FORMANTS) if deep else rng.uniform(*HIGH_VOICE_FORMANTS)
        brightness = rng.uniform(-0.15, 0.15)
        lines = [
            "language variant",
            f"name {name}",
            f"gender {'male' if deep else 'female'}",
            f"pitch {pitch:.0f} {pitch * rng.uniform(1.2, 1.6):.0f}",
            f"flutter {rng.randint(0, 5)}",
            f"roughness {rng.randint(0, 2)}",
            f"voicing {rng.randint(90, 115)}",
            f"consonants {rng.randint(90, 120)} {rng.randint(90, 120)}",
        ]
        for number in range(9):
            # All formants move with the length of the vocal tract, and each a little by itself.
            frequency = tract * rng.uniform(1 - FORMANT_JITTER, 1 + FORMANT_JITTER)
            height = 100 * (1 + brightness * (number - 3) / 3) + rng.uniform(-8, 8)
            lines.append(f"formant {number} {frequency:.0f} {height:.0f} {rng.randint(85, 120)} 0")
        if rng.random() < 0.25:
            lines.append("breath " + " ".join(str(rng.randint(0, 12)) for _ in range(8)))
        return cls(
            name=name,
            accent=rng.choice(ACCENTS[language]),
            variant="\n".join(lines) + "\n",
            rate=rng.randint(140, 180),
            gap=rng.choice((0, 0, 0, 1, 2)),
            pitch_range=rng.randint(35, 65),
        )


class Espeak:
    """The library with a temporary copy of its data."""

    def __init__(self) -> None:
        try:
            import espeakng_loader
        except ImportError:
            raise DataError(
                "espeak-ng is not installed", hint="pip install espeakng-loader, or put its wheel on PYTHONPATH"
            ) from None
        self._home = tempfile.TemporaryDirectory(prefix="espeak-")
        data = Path(self._home.name, "espeak-ng-data")
        _copy_data(Path(espeakng_loader.get_data_path()), data)
        self._variants = data / "voices" / "!v"
        self._library: Any = ctypes.CDLL(espeakng_loader.get_library_path())
        self._library.espeak_TextToPhonemes.restype = ctypes.c_char_p
        # Sizes are as wide as pointers; what ctypes takes numbers for otherwise is half of that.
        self._library.espeak_Synth.argtypes = [
            ctypes.c_char_p,
            ctypes.c_size_t,
            ctypes.c_uint,
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self.sample_rate = int(self._library.espeak_Initialize(SYNCHRONOUS, 0, self._home.name.encode(), 0))
        if self.sample_rate <= 0:
            raise DataError(f"espeak-ng finds no data in {data}", hint="install espeakng-loader again")
        self._chunks: list[npt.NDArray[np.int16]] = []

        callback_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self._callback = callback_type(self._on_audio)  # kept, or Python would throw away what the library calls
        self._library.espeak_SetSynthCallback(self._callback)

    def set_speaker(self, speaker: EspeakSpeaker) -> None:
        """Use this speaker for the following lines."""
        file = self._variants / speaker.name
        file.write_text(speaker.variant, encoding="utf-8")
        self._voice(f"{speaker.accent}+{speaker.name}")
        manner = {RATE: speaker.rate, VOLUME: VOLUME_LEVEL, PITCH_RANGE: speaker.pitch_range, GAP: speaker.gap}
        for parameter, value in manner.items():
            self._library.espeak_SetParameter(parameter, value, 0)

    def say(self, text: str) -> Samples:
        """Samples of a line; empty where there is nothing to say."""
        self._chunks.clear()
        encoded = text.encode() + b"\0"
        code = self._library.espeak_Synth(encoded, len(encoded), 0, 1, 0, UTF8, None, None)
        if code:
            raise DataError(f"espeak-ng did not say {text!r}: error {code}", hint="drop the line")
        if not self._chunks:
            return np.zeros(0, np.float32)
        return np.concatenate(self._chunks).astype(np.float32) / np.float32(32768)

    def phonemes(self, text: str, accent: str) -> str:
        """Return the phonemes in IPA, clause by clause."""
        self._voice(accent)
        encoded = ctypes.create_string_buffer(text.encode() + b"\0")
        rest = ctypes.c_void_p(ctypes.addressof(encoded))
        clauses = []
        while rest.value:
            clauses.append(self._library.espeak_TextToPhonemes(ctypes.byref(rest), UTF8, IPA).decode())
        return " ".join(clause for clause in clauses if clause)

    def _on_audio(self, samples: Any, count: int, _events: Any) -> int:
        """Called by the library with every stretch of sound; 0 asks for more."""
        if samples and count > 0:
            self._chunks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def _voice(self, name: str) -> None:
        if self._library.espeak_SetVoiceByName(name.encode()):
            raise DataError(f"espeak-ng has no voice {name}", hint="install espeakng-loader 0.2.4 or later")


def _copy_data(source: Path, out: Path) -> None:
    for folder in ("lang", "voices"):
        shutil.copytree(source / folder, out / folder)
    for name in (*SHARED_DATA, *DICTIONARIES):
        shutil.copy(source / name, out / name)
