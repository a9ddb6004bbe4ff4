"""Check of a consent: the words by speech recognition, the voice by a speaker encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rapidfuzz import fuzz

from myna.audio.files import Samples, check_not_silent, read_audio
from myna.audio.mono import LISTENING_RATE
from myna.core.errors import DataError
from myna.listen.asr import ASR
from myna.listen.speaker_encoders import (
    ECAPA,
    RESEMBLYZER,
    WAVLM,
    SpeakerEncoder,
    cosine_similarity,
    open_speaker_encoder,
)
from myna.provenance.consent_sentences import ConsentSentence, has_name, valid_sentences
from myna.provenance.packages import watermark_installed
from myna.provenance.watermark import MARK_THRESHOLD, watermark_score
from myna.speak.request import MAX_REFERENCE_SECONDS
from myna.text.normalization import words
from myna.text.wer import character_errors

MAX_CHARACTER_ERRORS = 0.25
"""Of the whole sentence: recognisers of any size pass a careful reading."""
MIN_WORD_MATCH = 80
"""Likeness, of 100, of each word of the day with what was recognised."""
MIN_SIMILARITY = {RESEMBLYZER: 0.75, ECAPA: 0.35, WAVLM: 0.86}
"""Cosine of two recordings from which on they count as one speaker, by encoder."""


@dataclass(frozen=True, slots=True)
class ConsentCheck:
    """What was recognised in a consent recording, and how far it is from the sentence."""

    sentence: ConsentSentence
    transcript: str
    character_error_rate: float
    recogniser: str
    watermark_score: float | None
    """None where the watermark's package is not installed, and could not be looked for."""


@dataclass(frozen=True, slots=True)
class SpeakerCheck:
    """Similarity of each recording with that of the consent."""

    similarities: tuple[float, ...]
    required: float
    encoder: str


class ConsentChecker:
    """Recogniser and speaker encoder that check consents. Either missing is an error, and says what to install."""

    def __init__(self, asr: ASR, encoder: SpeakerEncoder) -> None:
        self._asr, self._encoder = asr, encoder

    @classmethod
    def open(cls, asr: str = "base", speaker_encoder: str = RESEMBLYZER, device: str = "cpu") -> ConsentChecker:
        """`asr` and `speaker_encoder` are as for `evaluate`."""
        return cls(ASR.open(asr, device), open_speaker_encoder(speaker_encoder, device))

    def transcribe(self, recording: Path, language: str) -> str:
        """The words of a recording; one without words is refused."""
        transcript = self._asr.transcribe(_read(recording), LISTENING_RATE, language or None)
        if transcript.looped or not transcript.text.strip():
            raise DataError(
                f"no words were recognised in {recording}", hint="record it again, closer to the microphone"
            )
        return transcript.text.strip()

    def check_words(self, recording: Path, name: str, language: str) -> ConsentCheck:
        """Refuse a recording in which the sentence of the last days is not read, or that a model has spoken."""
        sentences = valid_sentences(name, language)
        mark = _watermark_score(recording)
        if mark is not None and mark > MARK_THRESHOLD:
            raise DataError(
                f"{recording} was spoken by a model: it has a watermark (score {mark:.2f})",
                hint=f"have {name} read the sentence aloud, and record it: {sentences[0].text}",
            )
        transcript = self.transcribe(recording, sentences[0].language)
        checks = [_compare(sentence, transcript, self._asr.name, mark) for sentence in sentences]
        best, problem = min(checks, key=lambda check: (bool(check[1]), check[0].character_error_rate))
        if problem:
            raise DataError(
                f"{recording} is no consent of {name}: {problem}; recognised: {transcript!r}",
                hint=f"read this sentence aloud, today, and record it: {sentences[0].text}",
            )
        return best

    def check_speaker(self, consent: Path, recordings: Sequence[Path]) -> SpeakerCheck:
        """Refuse recordings that are not in the voice of the consent."""
        required = required_similarity(self._encoder.name)
        own = self._encoder.embed(_read(consent), LISTENING_RATE)
        similarities = []
        for recording in recordings:
            similarity = cosine_similarity(own, self._encoder.embed(_read(recording), LISTENING_RATE))
            if not similarity >= required:
                raise DataError(
                    f"{recording} is not in the voice of the consent: similarity {similarity:.2f}, and {required:.2f} "
                    f"or more is needed ({self._encoder.name})",
                    hint="give recordings of the person who read the sentence, made with the same microphone",
                )
            similarities.append(round(similarity, 4))
        return SpeakerCheck(tuple(similarities), required, self._encoder.name)


def required_similarity(encoder: str) -> float:
    """The least cosine that is accepted, by the name of the encoder; that of WavLM, the strictest, for others."""
    return MIN_SIMILARITY[next((kind for kind in MIN_SIMILARITY if encoder.startswith(kind)), WAVLM)]


def _compare(
    sentence: ConsentSentence, transcript: str, recogniser: str, mark: float | None
) -> tuple[ConsentCheck, str]:
    """A check, and what is wrong with it; empty where nothing is."""
    rate = character_errors(sentence.text, transcript, sentence.language).rate
    heard = words(transcript, sentence.language)
    problem = ""
    if rate > MAX_CHARACTER_ERRORS:
        problem = f"{rate:.0%} of the sentence was read otherwise"
    elif not has_name(transcript, sentence.name, sentence.language):
        problem = "the name is not in it"
    else:
        for word in sentence.words:
            expected = " ".join(words(word, sentence.language))
            if max((fuzz.ratio(expected, one) for one in heard), default=0) < MIN_WORD_MATCH:
                problem = f"the word `{word}` is not in it"
    return ConsentCheck(sentence, transcript, round(rate, 4), recogniser, mark), problem


def _watermark_score(recording: Path) -> float | None:
    if not watermark_installed():
        return None
    return round(watermark_score(_read(recording), LISTENING_RATE), 4)


def _read(recording: Path) -> Samples:
    """As recorded: a reference is cleaned, a proof is not."""
    samples = read_audio(recording, sample_rate=LISTENING_RATE, max_seconds=MAX_REFERENCE_SECONDS)
    check_not_silent(recording, samples)
    return samples
