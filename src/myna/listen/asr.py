"""Automatic speech recognition: a Whisper checkpoint, run by faster-whisper or by transformers."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from myna.audio.files import Samples
from myna.audio.mono import as_mono_16khz, is_silent
from myna.core.device import pick_device
from myna.core.errors import ModelError
from myna.core.system_memory import is_out_of_memory
from myna.listen.asr_faster_whisper import ASR_HINT, WEIGHTS_FILE, FasterWhisper, download_faster_whisper
from myna.listen.asr_transformers import TransformersWhisper
from myna.listen.asr_windows import DecodedClip
from myna.listen.pretrained import HUB_FILES, download_snapshot
from myna.models.files import read_json

TRANSFORMERS_PREFIX = "transformers:"
"""Before a name or a folder: use transformers even where faster-whisper could open it."""
MAX_REPEATS = {1: 6, 2: 4, 3: 4, 4: 3, 5: 3, 6: 3, 7: 3, 8: 3}
"""Consecutive repetitions of a phrase from which a transcript is a loop, by the words of the phrase."""
MAX_COMPRESSION_RATIO = 2.4
"""Text that compresses better than this is a loop: Whisper's own rule."""


@dataclass(frozen=True, slots=True)
class Transcript:
    text: str
    looped: bool
    """The decoder repeated itself: the text says little about the audio."""


@dataclass(frozen=True, slots=True)
class TimedWord:
    """A word of a transcript with the blank before it, in seconds of the clip: times off by 0.1 s and more."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class TimedTranscript:
    """A transcript with the times of its words, and what the decoder thought of it."""

    words: tuple[TimedWord, ...] = ()
    language: str = ""
    language_probability: float = math.nan
    """1 where the language was given."""
    avg_log_prob: float = math.nan
    """Of its tokens; the lowest of its segments."""
    compression_ratio: float = math.nan
    """The highest of its segments."""

    @property
    def text(self) -> str:
        return "".join(word.text for word in self.words).strip()


class ASR:
    """Whisper with five beams, no sampling and no context between clips: the same audio gives the same text."""

    def __init__(self, backend: FasterWhisper | TransformersWhisper) -> None:
        self._backend = backend

    @classmethod
    def open(
        cls, name_or_folder: str, device: str = "cpu", *, workers: int = 1, threads: int = 0, float16: bool = False
    ) -> ASR:
        """A folder with a Whisper, of CTranslate2 or of transformers, as its files tell; or a name to download.

        `base` is one of faster-whisper's names, `owner/name` one of the hub's, and `transformers:base` the Whisper of
        that size as it was published. `workers` threads may transcribe concurrently; each computes with `threads`, or
        with its share of up to four cores. With `auto` as the device, faster-whisper takes the CPU where its libraries
        do not run on the GPU. `float16` has transformers compute in half precision on a GPU, as faster-whisper always
        does there.
        """
        by_transformers = name_or_folder.startswith(TRANSFORMERS_PREFIX)
        name = name_or_folder.removeprefix(TRANSFORMERS_PREFIX)
        folder = _folder(name, by_transformers=by_transformers)
        if not by_transformers and not is_transformers_whisper(folder):
            return cls(FasterWhisper.open(folder, name, device, workers, threads))
        return cls(TransformersWhisper.open(folder, name, str(pick_device(device)), float16=float16))

    @property
    def name(self) -> str:
        """Identifies the weights and not their location: a transcript by another model is made again."""
        return self._backend.name

    @property
    def note(self) -> str:
        """For people: why it is not on the device that was asked for; empty where it is."""
        return self._backend.note

    def transcribe(self, samples: Samples, sample_rate: int, language: str | None = "en") -> Transcript:
        """`language` is Whisper's code (en, ar, vi ...); None has it detected."""
        clip = as_mono_16khz(samples, sample_rate)
        # Whisper hallucinates on silence: "I'm sorry" fifty times over, or thanks for watching.
        if is_silent(clip):
            return Transcript("", looped=False)
        text = self._backend.transcribe(clip, language)
        return Transcript(text, is_loop(text))

    @property
    def batch_size(self) -> int:
        """Clips that are best given at once: 1 on a CPU."""
        return self._backend.batch_size

    def transcribe_batch(
        self, clips: Sequence[Samples], sample_rate: int, languages: Sequence[str | None]
    ) -> list[Transcript]:
        """Texts of many clips at once, each with its own language."""
        texts = [" ".join(one.texts) for one in self._decode(clips, sample_rate, languages, words=False)]
        return [Transcript(text, is_loop(text)) for text in texts]

    def transcribe_words(self, samples: Samples, sample_rate: int, language: str | None = None) -> TimedTranscript:
        """The same with the times of words; None has the language detected."""
        [transcript] = self.transcribe_words_batch([samples], sample_rate, [language])
        return transcript

    def transcribe_words_batch(
        self, clips: Sequence[Samples], sample_rate: int, languages: Sequence[str | None]
    ) -> list[TimedTranscript]:
        """Texts of many clips at once with the times of words."""
        return [
            TimedTranscript(
                tuple(TimedWord(*word) for word in one.words),
                one.language,
                one.language_probability,
                min(one.avg_log_probs, default=math.nan),
                max(one.compression_ratios, default=math.nan),
            )
            for one in self._decode(clips, sample_rate, languages, words=True)
        ]

    def _decode(
        self, clips: Sequence[Samples], sample_rate: int, languages: Sequence[str | None], *, words: bool
    ) -> list[DecodedClip]:
        """A batch that does not fit into the memory of the device is halved."""
        waves = [as_mono_16khz(clip, sample_rate) for clip in clips]
        spoken = [index for index, wave in enumerate(waves) if not is_silent(wave)]
        decoded = [DecodedClip("", math.nan) for _ in waves]
        batches = [spoken] if spoken else []
        while batches:
            batch = batches.pop()
            try:
                results = self._backend.decode(
                    [waves[index] for index in batch], [languages[index] for index in batch], words=words
                )
            except RuntimeError as error:
                if len(batch) == 1 or not is_out_of_memory(error):
                    raise
                batches += [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
                continue
            for index, result in zip(batch, results, strict=True):
                decoded[index] = result
        return decoded


def is_transformers_whisper(folder: Path) -> bool:
    """By its files. A folder with both formats is opened by faster-whisper, which is quicker."""
    config = folder / "config.json"
    return not (folder / WEIGHTS_FILE).is_file() and config.is_file() and "model_type" in read_json(config)


def _folder(name: str, *, by_transformers: bool) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")):
        raise ModelError(f"there is no folder {path}", hint=ASR_HINT)
    if "/" not in name and not by_transformers:
        return download_faster_whisper(name)
    repository = name if "/" in name else f"openai/whisper-{name}"
    return download_snapshot(repository, WEIGHTS_FILE, *HUB_FILES)


def is_loop(text: str) -> bool:
    """Whether a transcript repeats the same phrase over and over."""
    tokens = [word.strip(".,;:!?…-'\"").casefold() for word in text.split()]
    for size, limit in MAX_REPEATS.items():
        run = 0
        for token, next_token in zip(tokens, tokens[size:], strict=False):
            run = run + 1 if token == next_token else 0
            if run >= size * (limit - 1):
                return True
    encoded = text.strip().encode()
    return len(encoded) > MAX_COMPRESSION_RATIO * len(zlib.compress(encoded))
