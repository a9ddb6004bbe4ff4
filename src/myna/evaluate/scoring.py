"""Scores of one item as a system speaks it, and the scorers: acoustics, word errors, speaker similarity and MOS."""

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from myna.audio.files import LISTENING_RATE, Samples, as_mono_16khz, read_audio
from myna.core.device import pick_device
from myna.core.errors import MynaError
from myna.core.io import DEFAULT_SPEAKER_ENCODER, bytes_hash
from myna.core.progress import ProgressCallback
from myna.data.manifest import Span, Utterance
from myna.evaluate.items import EvalItem, EvalSet, load_clip, recording_key
from myna.listen import speaker_encoders
from myna.listen.asr import ASR, Transcript
from myna.listen.mos import DNSMOS, DistillMOS
from myna.listen.speaker_encoders import SpeakerEmbedding, SpeakerEncoder
from myna.text.normalization import base_language, letters, words
from myna.text.wer import character_errors, word_errors

ACOUSTICS_REVISION = "1"
"""Revision of the measures; those of another revision are computed again."""
HOP = LISTENING_RATE // 100
"""Samples between two frames: ten milliseconds."""
BELOW_PEAK_DB, SILENCE_DB = 40.0, -60.0
"""Levels below which a frame is silent: relative to the loud frames, and absolute."""
MIN_PAUSE_SECONDS = 0.15
"""Minimum length of a pause: shorter silence is part of a consonant."""
MIN_PITCH_HZ, MAX_PITCH_HZ = 60.0, 500.0
MIN_VOICED_CORRELATION = 0.6
"""Autocorrelation at the pitch period from which a frame is voiced."""
BANDS = 24
Array = npt.NDArray[np.float64]
EARLY_SHARE = 0.4
"""Share of the expected time below which an item ended early."""
COPY_THRESHOLD = 0.75
"""Similarity from which a clip is a copy of its reference. Two sentences of one speaker have at most about 0.5."""
MIN_TRANSCRIBED_SECONDS = 0.1
"""Seconds of speech below which nothing is transcribed: no word is that short."""
PROMPT_MAX_CER = 0.5
"""Character error rate against the reference's text below which the transcript may be that text."""
REPEATED_WORDS = 3
"""Number of consecutive words that count as a repetition if they are spoken again, and the text has them once."""


@dataclass(slots=True)
class ItemScores:
    """Item as one system speaks it, with its scores. A score that was not computed is None."""

    system: str
    id: str
    key: str
    """Key of the request to the system: another key means other audio."""
    text: str
    speaker: str
    language: str
    length_class: str
    audio: str
    """Path inside the results folder; empty if nothing was spoken."""
    audio_hash: str
    stopped: bool | None
    """Whether the system found the end; None for recordings."""
    expected_seconds: float
    item_key: str = ""
    """Key of the item for all systems: its text, references and maximum length. Equal items can be compared."""

    trained_on: str | None = None
    """`audio` or `words` if the system was trained on the item's audio, or on its words by the same speaker; empty if
    it was not; None if its training data is not known."""
    chose_checkpoint: bool | None = None
    """Whether the item chose the checkpoint during training: a gain on such items is too high."""

    acoustics_revision: str = ""
    seconds: float = 0.0
    leading_silence: float | None = None
    """Seconds before the first active frame."""
    trailing_silence: float | None = None
    speech_seconds: float | None = None
    """Seconds from the first active frame to the last."""
    pause_share: float | None = None
    """Share of those seconds in pauses."""
    voiced_share: float | None = None
    """Share of the active frames that have a pitch."""
    pitch: float | None = None
    """Median F0 in hertz."""
    pitch_range: float | None = None
    """Semitones between the 10th and the 90th percentile of F0."""
    speaking_rate: float | None = None
    """Characters a second, from the first active frame to the last."""
    silent: bool | None = None
    """Whether nothing can be heard, over the length that the text takes."""
    ended_early: bool | None = None
    """Whether it ended long before the text could have been spoken."""
    copy_similarity: float | None = None
    """Cross-correlation with its reference; 1 is a copy."""

    asr_model: str = ""
    transcript: str | None = None
    looped: bool | None = None
    word_errors: int | None = None
    words: int | None = None
    character_errors: int | None = None
    characters: int | None = None
    repeats: bool | None = None
    speaks_prompt: bool | None = None
    """Whether the transcript is the text of the reference instead of the item's."""

    speaker_encoder_model: str = ""
    similarity: float | None = None
    similarity_to_others: float | None = None
    speaker_rank: int | None = None
    compared_with: str = ""
    """`clips` of the speaker that are neither the item nor its reference, or the `reference` if there are none."""

    distillmos_model: str = ""
    distillmos: float | None = None
    dnsmos_model: str = ""
    dnsmos: float | None = None

    @classmethod
    def unscored(
        cls, system: str, item: EvalItem, samples: Samples, stopped: bool | None, *, key: str = "", audio: str = ""
    ) -> Self:
        """Return the row of an item as a system speaks it, without scores."""
        return cls(
            system=system,
            id=item.id,
            key=key,
            text=item.text,
            speaker=item.speaker,
            language=item.language,
            length_class=item.length_class,
            audio=audio,
            audio_hash=bytes_hash(samples.tobytes()),
            stopped=stopped,
            expected_seconds=item.expected_seconds,
            item_key=item.key,
        )

    def __post_init__(self) -> None:
        # The audio was not understood: every word of a looped transcript is an error, and no word that the loop adds.
        if self.looped:
            self.word_errors, self.character_errors = self.words, self.characters


@dataclass(slots=True)
class SpeakerEmbeddings:
    """Speaker embeddings of real recordings; each clip is embedded once."""

    eval_set: EvalSet
    encoder: SpeakerEncoder
    _embeddings: dict[str, SpeakerEmbedding] = field(default_factory=dict)

    def of_clip(self, clip: Utterance) -> SpeakerEmbedding:
        key = recording_key(clip)
        if key not in self._embeddings:
            self._embeddings[key] = self.encoder.embed(load_clip(clip, LISTENING_RATE), LISTENING_RATE)
        return self._embeddings[key]

    def embed_all(self, progress: ProgressCallback) -> None:
        """Embed every clip, before several threads need it."""
        clips = [clip for speaker in self.eval_set.speaker_clips.values() for clip in speaker]
        clips += [clip for item in self.eval_set.items for clip in item.references]
        for number, clip in enumerate(clips, start=1):
            self.of_clip(clip)
            progress("embedding real recordings", number, len(clips))

    def of_speaker(self, speaker: str, excluded: Sequence[Utterance] = ()) -> SpeakerEmbedding | None:
        """Return the mean over a speaker's clips without the excluded ones; None if none is left."""
        keys = {recording_key(clip) for clip in excluded}
        clips = [clip for clip in self.eval_set.speaker_clips.get(speaker, ()) if recording_key(clip) not in keys]
        return np.mean([self.of_clip(clip) for clip in clips], axis=0) if clips else None

    @property
    def revision(self) -> str:
        """Identifies the clips that audio is compared with."""
        clips = self.eval_set.speaker_clips
        return str(sorted((speaker, *map(recording_key, clips[speaker])) for speaker in clips))


NO_ASR = "no ASR model was named: --asr base, or the folder of a Whisper"
SCORING_WORKERS = min(4, os.cpu_count() or 1)
"""Number of threads that score clips concurrently."""


class Transcriber(Protocol):
    def transcribe(self, samples: Samples, sample_rate: int, language: str | None) -> Transcript: ...


class MOSPredictor(Protocol):
    def score(self, samples: Samples, sample_rate: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Scorers:
    """Scorers of an evaluation. Each may be None, and `missing` then says why. `names` identifies each model and
    version: scores of another one are computed again."""

    asr: Transcriber | None = None
    speaker_encoder: SpeakerEncoder | None = None
    distillmos: MOSPredictor | None = None
    dnsmos: MOSPredictor | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Sentences on scorers that are not on the device that was asked for."""

    def __post_init__(self) -> None:
        kinds = ("asr", "speaker_encoder", "distillmos", "dnsmos")
        present = {kind for kind in kinds if getattr(self, kind) is not None}
        assert present == set(self.names), "every scorer has a name"

    @classmethod
    def open(
        cls,
        asr: str | None,
        speaker_encoder: str = DEFAULT_SPEAKER_ENCODER,
        *,
        device: str = "cpu",
        workers: int = SCORING_WORKERS,
    ) -> Self:
        """Open every scorer that can be opened, on `device` unless it runs on the CPU only, as DNSMOS. A model is
        downloaded only if it is named."""
        target = str(pick_device(device))
        openers: dict[str, Callable[[], Any]] = {
            "speaker_encoder": lambda: speaker_encoders.open_speaker_encoder(speaker_encoder, target),
            "distillmos": lambda: DistillMOS.open(target),
            "dnsmos": DNSMOS.open,
        }
        packages = {"distillmos": "distillmos", "dnsmos": "speechmos"}
        missing = {} if asr is not None else {"asr": NO_ASR}
        if asr is not None:
            openers["asr"] = lambda: ASR.open(asr, device, workers=workers)
        scorers, names = {}, {}
        for scorer, opener in openers.items():
            try:
                opened, package = opener(), packages.get(scorer)
                scorers[scorer], names[scorer] = opened, f"{package} {version(package)}" if package else opened.name
            except MynaError as error:
                missing[scorer] = f"{error.what}: {error.hint}"
        notes = (scorers["asr"].note,) if "asr" in scorers and scorers["asr"].note else ()
        return cls(**scorers, names=names, missing=missing, notes=notes)


@functools.lru_cache(maxsize=65_536)
def _speech_seconds(audio: Path, span: Span | None) -> float:
    """Return the seconds from the first active frame of a recording to the last."""
    active = active_frames(read_audio(audio, sample_rate=LISTENING_RATE, span=(span.start, span.end) if span else None))
    return float(np.ptp(np.flatnonzero(active)) + 1) * HOP / LISTENING_RATE if active.any() else 0.0


def score_acoustics(row: ItemScores, item: EvalItem, samples: Samples) -> None:
    """Fill in the measures that need no model, from audio at 16 kHz."""
    measures = measure_acoustics(samples, LISTENING_RATE)
    for name, value in measures.items():
        setattr(row, name, None if math.isnan(value) else value)
    characters = len(letters(item.text, item.language))
    spoken = measures["speech_seconds"]
    row.speaking_rate = characters / spoken if spoken and characters else None
    recording = item.recording
    expected = _speech_seconds(recording.audio, recording.span) if recording is not None else item.expected_seconds
    # An item without speech either ended at once, or was silent for as long as the text takes.
    seconds = spoken or measures["seconds"]
    row.ended_early = row.stopped is not False and seconds < EARLY_SHARE * expected
    row.silent = not spoken and not row.ended_early
    row.copy_similarity = None
    if len(item.references) == 1:
        row.copy_similarity = copy_similarity(samples, load_clip(item.references[0], LISTENING_RATE), LISTENING_RATE)
    row.acoustics_revision = ACOUSTICS_REVISION


def score_item(
    row: ItemScores,
    item: EvalItem,
    samples: Samples,
    scorers: Scorers,
    speakers: SpeakerEmbeddings | None,
    models: Mapping[str, str],
) -> None:
    """Fill in the scores that are missing, from audio at 16 kHz; `models` identifies the scorers."""
    if row.acoustics_revision != ACOUSTICS_REVISION:
        score_acoustics(row, item, samples)
    if scorers.asr is not None and row.asr_model != models["asr"]:
        transcript = Transcript("", looped=False)
        # Whisper hallucinates on a click, as it does on silence.
        if (row.speech_seconds or 0.0) >= MIN_TRANSCRIBED_SECONDS:
            transcript = scorers.asr.transcribe(samples, LISTENING_RATE, base_language(item.language) or None)
        _score_transcript(row, item, transcript)
        row.asr_model = models["asr"]
    if scorers.speaker_encoder is not None and speakers and row.speaker_encoder_model != models["speaker_encoder"]:
        _score_speaker(row, item, scorers.speaker_encoder.embed(samples, LISTENING_RATE), speakers)
        row.speaker_encoder_model = models["speaker_encoder"]
    for name, predictor in (("distillmos", scorers.distillmos), ("dnsmos", scorers.dnsmos)):
        if predictor is not None and getattr(row, f"{name}_model") != models[name]:
            # Silence is not speech of some quality: it counts as silent or ended early instead.
            setattr(row, name, predictor.score(samples, LISTENING_RATE) if row.speech_seconds else None)
            setattr(row, f"{name}_model", models[name])


def _score_transcript(row: ItemScores, item: EvalItem, transcript: Transcript) -> None:
    text, language = transcript.text, item.language
    by_word, by_character = word_errors(item.text, text, language), character_errors(item.text, text, language)
    row.transcript, row.looped = text, transcript.looped
    row.word_errors, row.words = by_word.errors, by_word.total
    row.character_errors, row.characters = by_character.errors, by_character.total
    row.repeats = row.speaks_prompt = None
    if transcript.looped:
        row.word_errors, row.character_errors = row.words, row.characters
        return
    row.repeats = has_repetition(words(item.text, language), words(text, language))
    if item.references:
        rates = [character_errors(clip.text, text, language).rate for clip in item.references]
        row.speaks_prompt = any(rate < min(PROMPT_MAX_CER, by_character.rate) for rate in rates)


def _score_speaker(row: ItemScores, item: EvalItem, embedding: SpeakerEmbedding, speakers: SpeakerEmbeddings) -> None:
    """Fill in speaker similarity and rank. Items of several speakers have none."""
    row.similarity = row.similarity_to_others = row.speaker_rank = None
    row.compared_with = ""
    if len(item.references) > 1:
        return
    # It is compared neither with itself, nor with its reference: a mere copy would be most similar to that.
    excluded = [*item.references, *([item.recording] if item.recording else [])]
    own, compared_with = speakers.of_speaker(item.speaker, excluded), "clips"
    if own is None and item.references:
        own, compared_with = speakers.of_clip(item.references[0]), "reference"
    if own is None:
        return
    row.compared_with = compared_with
    row.similarity = speaker_encoders.cosine_similarity(embedding, own)
    names = [name for name in speakers.eval_set.speaker_clips if item.speaker and name not in ("", item.speaker)]
    others = [other for name in names if (other := speakers.of_speaker(name)) is not None]
    if others:
        similarities = [speaker_encoders.cosine_similarity(embedding, other) for other in others]
        row.similarity_to_others = float(np.mean(similarities))
        row.speaker_rank = speaker_encoders.speaker_rank(embedding, 0, [own, *others])


def has_repetition(reference: Sequence[str], transcript: Sequence[str]) -> bool:
    """Whether words are spoken again that the text has only once. A single word may be transcribed twice by mistake."""
    size = min(REPEATED_WORDS, max(1, len(reference)))

    def ngrams(tokens: Sequence[str]) -> Counter[tuple[str, ...]]:
        return Counter(tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1))

    expected, margin = ngrams(reference), 2 if size == 1 else 1
    return any(count >= max(1, expected[ngram]) + margin for ngram, count in ngrams(transcript).items())


def measure_acoustics(samples: Samples, sample_rate: int) -> dict[str, float]:
    """Measure a clip; the names are those of fields of `ItemScores`, and what cannot be measured is NaN."""
    clip = as_mono_16khz(samples, sample_rate)
    seconds, active = len(clip) / LISTENING_RATE, active_frames(clip)
    measures = {"seconds": seconds, "leading_silence": seconds, "pitch": math.nan, "pitch_range": math.nan}
    measures |= dict.fromkeys(("trailing_silence", "speech_seconds", "pause_share", "voiced_share"), 0.0)
    if not active.any():
        return measures
    first, last = int(np.argmax(active)), len(active) - int(np.argmax(active[::-1]))
    speech_seconds = (last - first) * HOP / LISTENING_RATE
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (~active[first:last]).astype(np.int8), [0]])))
    silences = edges[1::2] - edges[::2]
    pauses = silences[silences >= MIN_PAUSE_SECONDS * LISTENING_RATE / HOP]
    pitch = pitch_track(clip)
    voiced = pitch[active & (pitch > 0)]
    if len(voiced):
        low, median, high = np.percentile(voiced, [10, 50, 90])
        measures |= {"pitch": float(median), "pitch_range": 12 * math.log2(high / low)}
    return measures | {
        "leading_silence": first * HOP / LISTENING_RATE,
        "trailing_silence": max(0.0, seconds - last * HOP / LISTENING_RATE),
        "speech_seconds": speech_seconds,
        "pause_share": int(pauses.sum()) * HOP / LISTENING_RATE / speech_seconds,
        "voiced_share": len(voiced) / int(active.sum()),
    }


def active_frames(clip: Samples) -> npt.NDArray[np.bool_]:
    """Mark the frames that are not silent, (frames,)."""
    count = len(clip) // HOP
    power = np.square(clip[: count * HOP].astype(np.float64)).reshape(count, HOP).mean(axis=1)
    level = 10 * np.log10(power + 1e-12)
    loud = np.percentile(level, 95) if count else SILENCE_DB
    return np.asarray(level > max(loud - BELOW_PEAK_DB, SILENCE_DB))


def pitch_track(clip: Samples) -> Array:
    """Track F0 in hertz, (frames,), 0 if unvoiced, by autocorrelation normalised by that of the window.

    librosa.pyin takes 30 times as long: docs/decisions/0020-own-pitch-tracker.md.
    """
    size, window = LISTENING_RATE // 20, np.hanning(LISTENING_RATE // 20)
    padded = np.pad(clip.astype(np.float64), (size // 2, size))
    starts = np.arange(len(clip) // HOP) * HOP
    frames = padded[starts[:, None] + np.arange(size)]
    frames = (frames - frames.mean(axis=1, keepdims=True)) * window
    lags = np.arange(int(LISTENING_RATE / MAX_PITCH_HZ), int(LISTENING_RATE / MIN_PITCH_HZ) + 1)
    correlation = _autocorrelation(frames)[:, : lags[-1] + 2] / _autocorrelation(window[None])[0, : lags[-1] + 2]
    at_lags = correlation[:, lags]
    peaks = (at_lags >= correlation[:, lags - 1]) & (at_lags >= correlation[:, lags + 1])
    best = np.where(peaks, at_lags, 0.0).max(axis=1, initial=0.0)
    # Multiples of the period correlate nearly as well, and the pitch is the shortest of them.
    shortest = np.argmax(peaks & (at_lags >= 0.9 * best[:, None]), axis=1)
    return np.where(best >= MIN_VOICED_CORRELATION, LISTENING_RATE / lags[shortest], 0.0)


def _autocorrelation(frames: Array) -> Array:
    power = np.square(np.abs(np.fft.rfft(frames, 2 * frames.shape[1], axis=1)))
    correlation = np.fft.irfft(power, axis=1)[:, : frames.shape[1]]
    return np.asarray(correlation / np.maximum(correlation[:, :1], 1e-12))


def copy_similarity(samples: Samples, other: Samples, sample_rate: int) -> float:
    """Compute the cross-correlation of two clips at the best shift in time: 1 is a copy, other words are well below.

    It compares band levels and not samples, so that a copy through a codec is found too.
    """
    first, second = (_band_levels(as_mono_16khz(clip, sample_rate)) for clip in (samples, other))
    size = 1 << int(len(first) + len(second)).bit_length()
    spectrum = np.fft.rfft(first, size, axis=0) * np.conj(np.fft.rfft(second, size, axis=0))
    norm = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(np.fft.irfft(spectrum, size, axis=0).sum(axis=1).max() / norm) if norm else 0.0


def _band_levels(clip: Samples) -> Array:
    """Compute the level of each band in decibels above its own mean, (frames, bands)."""
    size = 2 * HOP
    count = max(0, (len(clip) - size) // HOP + 1)
    if not count or not active_frames(clip).any():
        return np.zeros((1, BANDS))
    starts = np.arange(count) * HOP
    spectrum = np.abs(np.fft.rfft(clip[starts[:, None] + np.arange(size)] * np.hanning(size), axis=1))
    edges = np.unique(np.geomspace(2, spectrum.shape[1], BANDS + 1).astype(int))
    power = np.add.reduceat(np.square(spectrum), edges[:-1], axis=1)
    level = 10 * np.log10(np.maximum(power, power.max() * 1e-5))
    padded = np.zeros((count, BANDS))
    padded[:, : level.shape[1]] = level - level.mean(axis=0)
    return padded
