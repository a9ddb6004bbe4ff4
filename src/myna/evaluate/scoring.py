"""Scores of one synthesized item: acoustics, word errors, speaker similarity and MOS.

All scorers of one evaluation: those that could be opened, and why the others could not."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from myna.audio.files import Samples, read_audio
from myna.audio.mono import LISTENING_RATE
from myna.core.device import pick_device
from myna.core.errors import MynaError
from myna.core.progress import ProgressCallback
from myna.data.manifest import Span, Utterance
from myna.evaluate.acoustics import ACOUSTICS_REVISION, HOP, active_frames, copy_similarity, measure_acoustics
from myna.evaluate.items import EvalItem, EvalSet, load_clip, recording_key
from myna.listen.asr import ASR, Transcript
from myna.listen.mos import DNSMOS, DistillMOS
from myna.listen.speaker_encoders import (
    RESEMBLYZER,
    SpeakerEmbedding,
    SpeakerEncoder,
    cosine_similarity,
    open_speaker_encoder,
    speaker_rank,
)
from myna.text.normalization import base_language, letters, words
from myna.text.wer import character_errors, word_errors

EARLY_SHARE = 0.4
"""An item that takes less than this share of its expected time ended early."""
COPY_THRESHOLD = 0.75
"""From this similarity on a clip is a copy of its reference. Two sentences of one speaker have at most about 0.5."""
MIN_TRANSCRIBED_SECONDS = 0.1
"""Shorter speech is not transcribed: nothing can have been said."""
PROMPT_MAX_CER = 0.5
"""Character error rate against the reference's text below which the transcript may be that text."""
REPEATED_WORDS = 3
"""So many words in a row that come again, and not in the text, are a repetition."""


@dataclass(slots=True)
class ItemScores:
    """One item as one system speaks it, with its scores. What no scorer has computed is None."""

    system: str
    id: str
    key: str
    """Of the request to the system: another key, other audio."""
    text: str
    speaker: str
    language: str
    length_class: str
    audio: str
    """Path inside the results folder; empty where nothing was spoken."""
    audio_hash: str
    stopped: bool | None
    """None for recordings."""
    expected_seconds: float
    item_key: str = ""
    """Of the item, whatever the system: its text, references and maximum length. Equal items can be compared."""

    trained_on: str | None = None
    """`audio` or `words` where the system was trained on the item's audio, or on its words by the same speaker; empty
    where it was not; None where its training data is not known."""
    chose_checkpoint: bool | None = None
    """Whether the item chose the checkpoint during training: a gain on such items is too high."""

    acoustics_revision: str = ""
    seconds: float = 0.0
    leading_silence: float | None = None
    trailing_silence: float | None = None
    speech_seconds: float | None = None
    pause_share: float | None = None
    voiced_share: float | None = None
    pitch: float | None = None
    pitch_range: float | None = None
    speaking_rate: float | None = None
    """Characters a second, from the first active frame to the last."""
    silent: bool | None = None
    """It has its length, and nothing can be heard."""
    ended_early: bool | None = None
    """It ended long before the text could have been spoken."""
    copy_similarity: float | None = None
    """To its reference."""

    asr_model: str = ""
    transcript: str | None = None
    looped: bool | None = None
    word_errors: int | None = None
    words: int | None = None
    character_errors: int | None = None
    characters: int | None = None
    repeats: bool | None = None
    speaks_prompt: bool | None = None
    """The transcript is the reference's text instead of the item's."""

    speaker_encoder_model: str = ""
    similarity: float | None = None
    similarity_to_others: float | None = None
    speaker_rank: int | None = None
    compared_with: str = ""
    """`clips` of the speaker that are neither the item nor its reference, or the `reference` where there are none."""

    distillmos_model: str = ""
    distillmos: float | None = None
    dnsmos_model: str = ""
    dnsmos: float | None = None

    def __post_init__(self) -> None:
        self.count_loop_as_wrong()

    def count_loop_as_wrong(self) -> None:
        """A looped transcript says nothing about the audio except that it was not understood: every word is an error,
        and words that the loop adds are none."""
        if self.looped:
            self.word_errors, self.character_errors = self.words, self.characters


@dataclass(slots=True)
class SpeakerEmbeddings:
    """Embeddings of the real recordings; each clip is embedded once."""

    eval_set: EvalSet
    encoder: SpeakerEncoder
    _embeddings: dict[str, SpeakerEmbedding] = field(default_factory=dict)

    def of_clip(self, clip: Utterance) -> SpeakerEmbedding:
        key = recording_key(clip)
        if key not in self._embeddings:
            self._embeddings[key] = self.encoder.embed(load_clip(clip, LISTENING_RATE), LISTENING_RATE)
        return self._embeddings[key]

    def embed_all(self, progress: ProgressCallback) -> None:
        """Every clip, before several threads need it."""
        clips = [clip for speaker in self.eval_set.speaker_clips.values() for clip in speaker]
        clips += [clip for item in self.eval_set.items for clip in item.references]
        for number, clip in enumerate(clips, start=1):
            self.of_clip(clip)
            progress("embedding real recordings", number, len(clips))

    def of_speaker(self, speaker: str, excluded: Sequence[Utterance] = ()) -> SpeakerEmbedding | None:
        """Mean over a speaker's clips without the excluded ones. None where none is left."""
        keys = {recording_key(clip) for clip in excluded}
        clips = [clip for clip in self.eval_set.speaker_clips.get(speaker, ()) if recording_key(clip) not in keys]
        return np.mean([self.of_clip(clip) for clip in clips], axis=0) if clips else None

    @property
    def revision(self) -> str:
        """Changes whenever the same audio could be compared with other clips."""
        clips = self.eval_set.speaker_clips
        return str(sorted((speaker, *map(recording_key, clips[speaker])) for speaker in clips))


@functools.lru_cache(maxsize=65_536)
def _speech_seconds(audio: Path, span: Span | None) -> float:
    """From the first active frame of a recording to the last."""
    active = active_frames(read_audio(audio, sample_rate=LISTENING_RATE, span=(span.start, span.end) if span else None))
    return float(np.ptp(np.flatnonzero(active)) + 1) * HOP / LISTENING_RATE if active.any() else 0.0


def score_acoustics(row: ItemScores, item: EvalItem, samples: Samples) -> None:
    """Fill in what needs no model, from audio at 16 kHz."""
    measures = measure_acoustics(samples, LISTENING_RATE)
    for name, value in asdict(measures).items():
        setattr(row, name, None if math.isnan(value) else value)
    characters = len(letters(item.text, item.language))
    row.speaking_rate = characters / measures.speech_seconds if measures.speech_seconds and characters else None
    recording = item.recording
    expected = _speech_seconds(recording.audio, recording.span) if recording is not None else item.expected_seconds
    # Without speech the item either ended at once or was silent for as long as the text takes: one or the other.
    seconds = measures.speech_seconds or measures.seconds
    row.ended_early = row.stopped is not False and seconds < EARLY_SHARE * expected
    row.silent = measures.is_silent and not row.ended_early
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
    """Fill in what the scorers have not computed yet, from audio at 16 kHz; `models` identifies the scorers."""
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
        row.count_loop_as_wrong()
        return
    row.repeats = has_repetition(words(item.text, language), words(text, language))
    if item.references:
        rates = [character_errors(clip.text, text, language).rate for clip in item.references]
        row.speaks_prompt = any(rate < min(PROMPT_MAX_CER, by_character.rate) for rate in rates)


def _score_speaker(row: ItemScores, item: EvalItem, embedding: SpeakerEmbedding, speakers: SpeakerEmbeddings) -> None:
    """Speaker similarity and rank. Items of several speakers have none."""
    row.similarity = row.similarity_to_others = row.speaker_rank = None
    row.compared_with = ""
    if len(item.references) > 1:
        return
    # Neither with itself, nor with the clip it was cloned from, which a mere copy would be most similar to.
    excluded = [*item.references, *([item.recording] if item.recording else [])]
    own, compared_with = speakers.of_speaker(item.speaker, excluded), "clips"
    if own is None and item.references:
        own, compared_with = speakers.of_clip(item.references[0]), "reference"
    if own is None:
        return
    row.compared_with = compared_with
    row.similarity = cosine_similarity(embedding, own)
    names = [name for name in speakers.eval_set.speaker_clips if item.speaker and name not in ("", item.speaker)]
    others = [other for name in names if (other := speakers.of_speaker(name)) is not None]
    if others:
        row.similarity_to_others = float(np.mean([cosine_similarity(embedding, other) for other in others]))
        row.speaker_rank = speaker_rank(embedding, 0, [own, *others])


def has_repetition(reference: Sequence[str], transcript: Sequence[str]) -> bool:
    """Whether words come again that the text has once. A single word may be transcribed twice by mistake."""
    size = min(REPEATED_WORDS, max(1, len(reference)))

    def ngrams(tokens: Sequence[str]) -> Counter[tuple[str, ...]]:
        return Counter(tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1))

    expected, margin = ngrams(reference), 2 if size == 1 else 1
    return any(count >= max(1, expected[ngram]) + margin for ngram, count in ngrams(transcript).items())


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
