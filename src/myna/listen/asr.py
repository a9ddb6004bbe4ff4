"""Automatic speech recognition: a Whisper checkpoint, run by faster-whisper or by transformers.

Batches follow the procedure of faster-whisper with either: windows of all clips are encoded, decoded and aligned
together. A clip whose decoder stopped before its end has another window in the next round. The result of a clip does
not depend on the others beyond rounding.
"""

import math
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from myna.audio.files import LISTENING_RATE, Samples, as_mono_16khz, is_silent
from myna.core.compat import set_beam_reordering
from myna.core.device import is_out_of_memory, pick_device
from myna.core.errors import ModelError, import_optional
from myna.core.io import whisper_folder
from myna.listen.models import HUB_FILES, download_snapshot, load_pretrained
from myna.listen.torch_whisper import open_torch_whisper
from myna.models.files import format_names, read_json

TRANSFORMERS_PREFIX = "transformers:"
"""Prefix of a name or folder: transformers is used even if faster-whisper could open the model."""
MAX_REPEATS = {1: 6, 2: 4, 3: 4, 4: 3, 5: 3, 6: 3, 7: 3, 8: 3}
"""Number of consecutive repetitions from which a transcript counts as a loop, by the number of words in the phrase."""
MAX_COMPRESSION_RATIO = 2.4
"""Compression ratio above which a text counts as a loop, which is Whisper's own. Prose of up to 500 characters in 25
languages (the Universal Declaration of Human Rights) has at most 2.19."""
REPEATED_LETTERS = re.compile(r"(.{4,60}?)\1{5}")
"""Phrase that is said six times in languages without blanks between words."""


@dataclass(frozen=True, slots=True)
class Transcript:
    text: str
    looped: bool
    """True if the decoder repeated itself: the text then says little about the audio."""


@dataclass(frozen=True, slots=True)
class TimedWord:
    """One word of a transcript with the blank before it; times in seconds of the clip, off by 0.1 s and more."""

    text: str
    start: float
    end: float


@dataclass(slots=True)
class TimedTranscript:
    """Transcript with the times of its words and the decoder's confidence."""

    words: tuple[TimedWord, ...] = ()
    language: str = ""
    language_probability: float = math.nan
    """Probability of the detected language; 1 if the language was given."""
    avg_log_prob: float = math.nan
    """Mean log probability of the tokens, of the segment with the lowest."""
    compression_ratio: float = math.nan
    """Compression ratio of the segment with the highest."""
    segments: tuple[str, ...] = ()
    """Texts of the segments, also if the times of words were not asked for."""

    @property
    def text(self) -> str:
        return "".join(word.text for word in self.words).strip()


class ASR:
    """Whisper with five beams, without sampling or context between clips: equal audio gives equal text."""

    name: str
    """Identity of the weights, independent of their location. A transcript by another model is made again."""
    note = ""
    """Reason why the model is not on the requested device; empty if it is."""
    batch_size: int
    """Best number of clips per batch: 1 on a CPU, where two windows take twice the time of one."""
    _model: Any

    @staticmethod
    def open(
        name_or_folder: str, device: str = "cpu", *, workers: int = 1, threads: int = 0, float16: bool = False
    ) -> "ASR":
        """Open a folder with a Whisper of CTranslate2 or of transformers (told by its files), or download one by name.

        `base` is a name of faster-whisper, `owner/name` one of the hub, and `transformers:base` the Whisper of that
        size as it was published. `workers` threads may transcribe concurrently; each computes with `threads` threads,
        or with its share of up to four cores. With the device `auto`, faster-whisper uses the CPU if its libraries do
        not run on the GPU. `float16` makes transformers compute in half precision on a GPU, as faster-whisper always
        does there.
        """
        by_transformers = name_or_folder.startswith(TRANSFORMERS_PREFIX)
        name = name_or_folder.removeprefix(TRANSFORMERS_PREFIX)
        folder = _folder(name, by_transformers=by_transformers)
        if not by_transformers and not is_transformers_whisper(folder):
            return FasterWhisper.load(folder, name, device, workers, threads)
        return TransformersWhisper.load(folder, name, str(pick_device(device)), float16=float16)

    def _read(self, clip: Samples, language: str | None) -> str:
        """Return the text of one clip at 16 kHz."""
        raise NotImplementedError

    def _decode(
        self, clips: Sequence[Samples], languages: Sequence[str | None], *, words: bool
    ) -> list[TimedTranscript]:
        """Transcribe clips at 16 kHz together."""
        raise NotImplementedError

    def transcribe(self, samples: Samples, sample_rate: int, language: str | None = "en") -> Transcript:
        """Transcribe one clip. `language` is Whisper's code (en, ar, vi); None detects the language."""
        clip = as_mono_16khz(samples, sample_rate)
        # Whisper invents text for silence: "I'm sorry" fifty times over, or thanks for watching.
        if is_silent(clip):
            return Transcript("", looped=False)
        text = self._read(clip, language)
        return Transcript(text, is_loop(text))

    def transcribe_batch(
        self, clips: Sequence[Samples], sample_rate: int, languages: Sequence[str | None]
    ) -> list[Transcript]:
        """Transcribe many clips at once, each with its own language."""
        decoded = self._decode_fitting(clips, sample_rate, languages, words=False)
        texts = [" ".join(one.segments) for one in decoded]
        return [Transcript(text, is_loop(text)) for text in texts]

    def transcribe_words(self, samples: Samples, sample_rate: int, language: str | None = None) -> TimedTranscript:
        """Transcribe one clip with the times of its words; None detects the language."""
        [transcript] = self.transcribe_words_batch([samples], sample_rate, [language])
        return transcript

    def transcribe_words_batch(
        self, clips: Sequence[Samples], sample_rate: int, languages: Sequence[str | None]
    ) -> list[TimedTranscript]:
        """Transcribe many clips at once with the times of their words."""
        return self._decode_fitting(clips, sample_rate, languages, words=True)

    def _decode_fitting(
        self, clips: Sequence[Samples], sample_rate: int, languages: Sequence[str | None], *, words: bool
    ) -> list[TimedTranscript]:
        """Decode a batch; halve it if it does not fit into the memory of the device."""
        waves = [as_mono_16khz(clip, sample_rate) for clip in clips]
        spoken = [index for index, wave in enumerate(waves) if not is_silent(wave)]
        decoded = [TimedTranscript() for _ in waves]
        batches = [spoken] if spoken else []
        while batches:
            batch = batches.pop()
            try:
                results = self._decode([waves[at] for at in batch], [languages[at] for at in batch], words=words)
            except RuntimeError as error:
                if len(batch) == 1 or not is_out_of_memory(error):
                    raise
                batches += [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
                continue
            for index, result in zip(batch, results, strict=True):
                decoded[index] = result
        return decoded


def is_transformers_whisper(folder: Path) -> bool:
    """Tell by its files whether transformers opens a folder. With both formats faster-whisper does, which is faster."""
    config = folder / "config.json"
    return not (folder / WEIGHTS_FILE).is_file() and config.is_file() and "model_type" in read_json(config)


def _folder(name: str, *, by_transformers: bool) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")):
        raise ModelError(f"there is no folder {path}", hint=ASR_HINT)
    if "/" not in name and not by_transformers:
        fetched = whisper_folder()
        return fetched if fetched.name == f"whisper-{name}" and fetched.is_dir() else download_faster_whisper(name)
    repository = name if "/" in name else f"openai/whisper-{name}"
    return download_snapshot(repository, WEIGHTS_FILE, *HUB_FILES)


def is_loop(text: str) -> bool:
    """Tell whether a transcript repeats one phrase over and over."""
    tokens = [word.strip(".,;:!?…-'\"").casefold() for word in text.split()]
    for size, limit in MAX_REPEATS.items():
        run = 0
        for token, next_token in zip(tokens, tokens[size:], strict=False):
            run = run + 1 if token == next_token else 0
            if run >= size * (limit - 1):
                return True
    return bool(REPEATED_LETTERS.search(text)) or compression_ratio(text.strip()) > MAX_COMPRESSION_RATIO


def compression_ratio(text: str) -> float:
    """Return the length of a text over that of its compressed form, with a number for each distinct letter.

    Of UTF-8, which Whisper's own rule compresses, ordinary prose with two or three bytes a letter passes for a loop.
    """
    numbers = {letter: number for number, letter in enumerate(dict.fromkeys(text))}
    coded = np.array([numbers[letter] for letter in text], np.uint8 if len(numbers) <= 256 else np.uint16)
    return len(text) / len(zlib.compress(coded.tobytes()))


INSTALL = 'pip install "myna[evaluate]"'
WEIGHTS_FILE = "model.bin"
GPU_BATCH_CLIPS = 32
REQUIRED_FILES = (WEIGHTS_FILE, "tokenizer.json", "config.json")
"""Files without which faster-whisper would use the network, or fail with an unclear error."""
ASR_HINT = (
    "name a folder that holds a Whisper of CTranslate2 (model.bin, tokenizer.json, config.json) or of transformers "
    "(config.json, model.safetensors), or base with network"
)


class FasterWhisper(ASR):
    def __init__(self, model: Any, name: str, note: str = "") -> None:
        self._model, self.name, self.note = model, name, note
        self.batch_size = GPU_BATCH_CLIPS if model.model.device == "cuda" else 1

    @classmethod
    def load(cls, folder: Path, name: str, device: str, workers: int, threads: int = 0) -> Self:
        """Open a folder; the `workers` threads that transcribe concurrently share the CPU cores."""
        faster_whisper = import_optional("faster_whisper", INSTALL)
        if missing := [file for file in REQUIRED_FILES if not (folder / file).is_file()]:
            raise ModelError(f"{folder} has no {', '.join(missing)}", hint=ASR_HINT)
        target = pick_device(device)
        note = "faster-whisper runs on the CPU, for it knows no Apple GPUs" if target.type == "mps" else ""
        on_gpu = target.type == "cuda"

        def load(on_gpu: bool) -> Any:
            return faster_whisper.WhisperModel(
                str(folder),
                device="cuda" if on_gpu else "cpu",
                device_index=target.index or 0,
                compute_type="float16" if on_gpu else "int8",
                cpu_threads=threads or max(1, min(4, os.cpu_count() or 1) // workers),
                num_workers=workers,
            )

        try:
            model = load(on_gpu)
            if on_gpu:
                # Missing CUDA libraries are noticed at the first clip only.
                list(model.transcribe(np.zeros(LISTENING_RATE, np.float32), language="en")[0])
        except (RuntimeError, ValueError) as error:
            if not on_gpu or device != "auto":
                raise ModelError(
                    f"{name} cannot be opened on {target}: {error}",
                    hint="--device cpu; or have transformers run it, --asr transformers:NAME; or give a Whisper "
                    "converted with ct2-transformers-converter",
                ) from error
            note = f"faster-whisper runs on the CPU, since it does not on {target}: {error}"
            on_gpu, model = False, load(False)
        size = (folder / WEIGHTS_FILE).stat().st_size
        precision = " float16" if on_gpu else ""  # another one may give another transcript
        return cls(model, f"faster-whisper {version('faster-whisper')} {Path(name).name} {size}{precision}", note)

    def _read(self, clip: Samples, language: str | None) -> str:
        segments, _ = self._model.transcribe(
            clip,
            language=language,
            beam_size=BEAMS,
            temperature=0.0,
            condition_on_previous_text=False,
            word_timestamps=False,
        )
        return " ".join(segment.text.strip() for segment in segments)

    def _decode(
        self, clips: Sequence[Samples], languages: Sequence[str | None], *, words: bool
    ) -> list[TimedTranscript]:
        short = not words and self._model.model.device == "cpu"
        return decode_clips(self._model, clips, languages, word_times=words, short_windows=short)


def download_faster_whisper(name: str) -> Path:
    """Return the folder of a Whisper by faster-whisper's short name, such as base; download it if needed."""
    faster_whisper = import_optional("faster_whisper", INSTALL)
    try:
        return Path(faster_whisper.download_model(name))
    except Exception as error:
        raise ModelError(f"no ASR model {name} here, and it cannot be downloaded: {error}", hint=ASR_HINT) from error


class TransformersWhisper(ASR):
    """Whisper by transformers, in fp32 unless float16 is asked for; batches use faster-whisper's procedure."""

    def __init__(self, model: Any, features: Any, tokenizer: Any, name: str) -> None:
        self._model, self._features, self._tokenizer, self.name = model, features, tokenizer, name
        self.batch_size = GPU_BATCH_CLIPS if model.device.type == "cuda" else 1

    @classmethod
    def load(cls, folder: Path, name: str, device: str, *, float16: bool = False) -> Self:
        from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer

        kind = read_json(folder / "config.json").get("model_type")
        if kind != "whisper":
            raise ModelError(f"{folder} holds a model of the kind {kind}", hint="give the folder of a Whisper")
        # Without this check transformers would make an empty tokenizer, and transcribe nothing.
        if not any((folder / file).is_file() for file in ("tokenizer.json", "vocab.json")):
            problem = f"{folder} has no tokenizer.json or vocab.json"
            raise ModelError(problem, hint="copy the Whisper's tokenizer into it")
        if not (folder / "generation_config.json").is_file():
            problem = f"{folder} has no generation_config.json, which says how languages are asked for"
            raise ModelError(problem, hint="copy the one of the Whisper that it was tuned from into the folder")
        model, features, tokenizer, weights = load_pretrained(
            folder,
            name,
            (WhisperForConditionalGeneration, WhisperFeatureExtractor, WhisperTokenizer),
            device=device,
            hint="the folder needs config.json, generation_config.json, preprocessor_config.json, tokenizer files "
            "and model.safetensors, as `save_pretrained` of model and processor leave them",
        )
        set_beam_reordering(model, _reorder_self_attention)
        label = f"transformers {version('transformers')} {Path(name).name} {weights}"
        if float16 and device.startswith("cuda"):
            model, label = model.half(), f"{label} float16"
        return cls(model, features, tokenizer, label)

    @cached_property
    def _whisper(self) -> Any:
        return open_torch_whisper(self._model, self._tokenizer.backend_tokenizer, self._features.feature_size)

    def _decode(
        self, clips: Sequence[Samples], languages: Sequence[str | None], *, words: bool
    ) -> list[TimedTranscript]:
        return decode_clips(self._whisper, clips, languages, word_times=words)

    @torch.inference_mode()
    def _read(self, clip: Samples, language: str | None) -> str:
        config = self._model.generation_config
        options: dict[str, Any] = {}
        if getattr(config, "is_multilingual", True):
            languages = getattr(config, "lang_to_id", None) or {}
            if language is not None and f"<|{language}|>" not in languages:
                supported = format_names(sorted(token.strip("<|>") for token in languages)) or "none"
                raise ModelError(
                    f"this Whisper does not know the language {language}, but {supported}",
                    hint="name the language of the sentences as Whisper does (--language en), or use another --asr",
                )
            options = {"language": language, "task": "transcribe"}
        if len(clip) > self._features.n_samples:
            # For audio longer than one window, the next window begins at the end of the last complete sentence.
            options |= {"return_timestamps": True, "condition_on_prev_tokens": False}
        inputs = self._features(
            clip, sampling_rate=LISTENING_RATE, return_tensors="pt", return_attention_mask=True, truncation=False
        ).to(self._model.device)
        inputs["input_features"] = inputs["input_features"].to(self._model.dtype)
        tokens = self._model.generate(**inputs, num_beams=5, do_sample=False, **options)
        return str(self._tokenizer.decode(tokens[0], skip_special_tokens=True)).strip()


def _reorder_self_attention(cache: Any, beams: torch.Tensor) -> Any:
    """Return the cache with its beams in their new order. Cross-attention is equal for all beams of a clip and is not
    copied: that would take longer than everything else."""
    cache.self_attention_cache.reorder_cache(beams)
    return cache


BEAMS = 5
MAX_INITIAL_TIMESTAMP = 50
"""Latest start of the first segment in steps of 20 ms: one second."""
NO_SPEECH_PROBABILITY, MIN_AVG_LOG_PROB = 0.6, -1.0
"""Probability of no speech above which, and log probability up to which, a window has no text: Whisper's own rule."""
SHORT_WINDOW_STEP, MIN_SHORT_WINDOW = 500, 1000
"""Frames of 10 ms: lengths of short windows are multiples of the first, and at least the second; they end with a second
of silence. Of 90 clips of 3 to 12 s, Whisper base made as many errors as with 30 s (natural voices 1.7 against 1.8 % of
the characters, learners 22.0 against 21.8), in a third of the time."""
MIN_WINDOW_FRAMES = 4
"""Frames of 10 ms below which a window is skipped: it holds no word, and text for it could not be aligned."""
TOKENS_PER_SECOND, SPARE_TOKENS = 30, 20
"""Token limit of a clip: TOKENS_PER_SECOND x seconds + SPARE_TOKENS. A longer text is a decoding failure, and a batch
waits for its slowest clip. Both networks write at most half of the requested length (CTranslate2 leaves the rest to the
prompt), so 15 a second. Text of that length always fits into an alignment."""
PREPENDED, APPENDED = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"
"""Punctuation that belongs to the word after it, and to the one before it."""


@dataclass(slots=True)
class _Progress:
    """Progress of the decoding of one clip."""

    features: npt.NDArray[np.float32]
    transcript: TimedTranscript
    frames: int
    tokenizer: Any = None
    position: int = 0
    """Frame at which the next window begins."""
    last_word_end: float = 0.0


@dataclass(frozen=True, slots=True)
class _Alignment:
    """Stand-in for a `WhisperModel` with words that are aligned already. Clips get their times one by one, because they
    would otherwise depend on the clip before in the batch."""

    frames_per_second: int
    words: list[dict[str, Any]]

    def find_alignment(self, *_: object) -> list[list[dict[str, Any]]]:
        return [self.words]


def decode_clips(
    whisper: Any,
    clips: Sequence[Samples],
    languages: Sequence[str | None],
    *,
    word_times: bool,
    short_windows: bool = False,
) -> list[TimedTranscript]:
    """Transcribe clips at 16 kHz by a `faster_whisper.WhisperModel`; None as the language detects it.

    With `short_windows` a clip has a window that is hardly longer than it instead of 30 s, and clips are taken one by
    one. That is for a CPU, where the encoder costs most and a batch gains nothing.
    """
    states = []
    for clip, language in zip(clips, languages, strict=True):
        features, transcript = whisper.feature_extractor(clip), TimedTranscript((), language or "", 1.0)
        states.append(_Progress(features, transcript, features.shape[-1] - 1))
    while pending := [state for state in states if state.frames - state.position >= MIN_WINDOW_FRAMES]:
        for batch in [[state] for state in pending] if short_windows else [pending]:
            _decode_windows(whisper, batch, word_times=word_times, short=short_windows)
    return [state.transcript for state in states]


def _decode_windows(whisper: Any, states: list[_Progress], *, word_times: bool, short: bool) -> None:
    """Decode the next window of each clip."""
    package = import_optional("faster_whisper.transcribe")
    limit = whisper.feature_extractor.nb_max_frames
    sizes = [min(limit, state.frames - state.position) for state in states]
    width = limit
    if short:
        padded = max(sizes) + whisper.frames_per_second
        width = min(limit, max(MIN_SHORT_WINDOW, -(-padded // SHORT_WINDOW_STEP) * SHORT_WINDOW_STEP))
    pieces = (one.features[:, one.position : one.position + size] for one, size in zip(states, sizes, strict=True))
    encoded = whisper.encode(np.stack([package.pad_or_trim(piece, width) for piece in pieces]))
    _set_languages(whisper, states, encoded)
    # A batch has one list of suppressed tokens, which is equal for all languages.
    suppressed = package.get_suppressed_tokens(states[0].tokenizer, [-1])
    prompts = [whisper.get_prompt(state.tokenizer, [], without_timestamps=False) for state in states]
    spoken = TOKENS_PER_SECOND * max(sizes) // whisper.frames_per_second
    results = whisper.model.generate(
        encoded,
        prompts,
        beam_size=BEAMS,
        patience=1,
        length_penalty=1,
        max_length=min(whisper.max_length, len(prompts[0]) + spoken + SPARE_TOKENS),
        suppress_blank=True,
        suppress_tokens=suppressed,
        max_initial_timestamp_index=MAX_INITIAL_TIMESTAMP,
        return_scores=True,
        return_no_speech_prob=True,
    )
    segments: list[list[dict[str, Any]]] = []
    ends: list[tuple[int, bool]] = []
    scores = []
    for state, size, result in zip(states, sizes, results, strict=True):
        tokens = result.sequences_ids[0]
        avg_log_prob = result.scores[0] * len(tokens) / (len(tokens) + 1)
        scores.append(avg_log_prob)
        if result.no_speech_prob > NO_SPEECH_PROBABILITY and avg_log_prob <= MIN_AVG_LOG_PROB:
            segments.append([])
            ends.append((state.position + size, True))
            continue
        found, position, ended = whisper._split_segments_by_timestamps(
            tokenizer=state.tokenizer,
            tokens=tokens,
            time_offset=state.position / whisper.frames_per_second,
            segment_size=size,
            segment_duration=size / whisper.frames_per_second,
            seek=state.position,
        )
        segments.append(found)
        ends.append((position, ended))
    if word_times:
        _add_words(whisper, states, encoded, segments, sizes)
    decoded = zip(states, sizes, segments, ends, results, scores, strict=True)
    for state, size, found, (position, ended), result, score in decoded:
        start, state.position = state.position, position
        if word_times and found:
            state.last_word_end = package.get_end(found)
            if not ended and state.last_word_end > start / whisper.frames_per_second:
                state.position = round(state.last_word_end * whisper.frames_per_second)
        if state.position <= start:  # the decoder wrote only times
            state.position = start + size
        whole = state.tokenizer.decode(result.sequences_ids[0]).strip()
        for segment in found:
            text = state.tokenizer.decode(segment["tokens"])
            if segment["start"] != segment["end"] and text.strip():
                done, words = state.transcript, segment.get("words", ())
                done.segments += (text.strip(),)
                done.words += tuple(TimedWord(word["word"], word["start"], word["end"]) for word in words)
                done.avg_log_prob = float(np.fmin(done.avg_log_prob, score))
                done.compression_ratio = float(np.fmax(done.compression_ratio, compression_ratio(whole)))


def _set_languages(whisper: Any, states: list[_Progress], encoded: Any) -> None:
    package = import_optional("faster_whisper.tokenizer")
    multilingual = whisper.model.is_multilingual
    if multilingual and not all(state.transcript.language for state in states):
        for state, [(token, probability), *_] in zip(states, whisper.model.detect_language(encoded), strict=True):
            if not state.transcript.language:
                state.transcript.language, state.transcript.language_probability = token[2:-2], probability
    for state in states:
        if state.tokenizer is None:
            language = state.transcript.language = state.transcript.language if multilingual else "en"
            state.tokenizer = package.Tokenizer(
                whisper.hf_tokenizer, multilingual, task="transcribe", language=language
            )


def _add_words(
    whisper: Any, states: list[_Progress], encoded: Any, segments: list[list[dict[str, Any]]], sizes: list[int]
) -> None:
    """Add words with their times to each segment, by cross-attention."""
    tokens = [
        [token for segment in found for token in segment["tokens"] if token < state.tokenizer.eot]
        for state, found in zip(states, segments, strict=True)
    ]
    # An alignment begins with the tokens of one language, so a batch of several is aligned once for each.
    for language in dict.fromkeys(state.transcript.language for state in states):
        tokenizer = next(state.tokenizer for state in states if state.transcript.language == language)
        aligned = whisper.find_alignment(tokenizer, tokens, encoded, sizes)
        for state, found, size, words in zip(states, segments, sizes, aligned, strict=True):
            if state.transcript.language == language and found:
                stand_in = _Alignment(whisper.frames_per_second, words)
                type(whisper).add_word_timestamps(
                    stand_in, [found], tokenizer, encoded, size, PREPENDED, APPENDED, state.last_word_end
                )
