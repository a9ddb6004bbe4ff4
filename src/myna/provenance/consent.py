"""Consent to a stored voice: the sentence that a speaker reads aloud, and the check of its recording.

The sentence has the speaker's name and two words of the day, so that an older recording cannot contain it. Speech
recognition checks the words, a speaker encoder the voice.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidfuzz import fuzz
from rapidfuzz.distance import Levenshtein

from myna.audio.files import LISTENING_RATE, Samples, check_not_silent, read_audio
from myna.core.errors import ConfigError, DataError
from myna.core.io import DEFAULT_SPEAKER_ENCODER, private_file, user_folder
from myna.provenance.voice_store import Consent, VoiceStore, check_voice_name
from myna.speak.request import MAX_REFERENCE_SECONDS
from myna.text.normalization import base_language, letters, words
from myna.text.wer import character_errors

if TYPE_CHECKING:
    from myna.listen.asr import ASR
    from myna.listen.speaker_encoders import SpeakerEncoder

SECRET_FILE = "consent-words.key"
VALID_DAYS = 2
"""Days whose sentences are accepted, including today: a recording may be made before midnight."""
MIN_NAME_MATCH = 60
"""Minimum similarity (0 to 100) of a name to the recognised one: names have many spellings."""
MAX_NAME_ERRORS = 2
"""Letters that may always differ: recognisers write Lee for Li."""

LANGUAGES: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("consent_sentences.json").read_text(encoding="utf-8")
)
"""Sentence of each language, and words from which those of the day are drawn."""
SENTENCES = {language: texts["sentence"] for language, texts in LANGUAGES.items()}
MAX_CHARACTER_ERRORS = 0.25
"""Maximum character error rate of the whole sentence. A careful reading passes with recognisers of any size."""
MIN_WORD_MATCH = 80
"""Minimum similarity (0 to 100) of each word of the day to a recognised word."""
MIN_SIMILARITY = {"resemblyzer": 0.75, "ecapa": 0.5, "wavlm": 0.86}
"""Cosine similarity from which two recordings count as one speaker, by encoder; the last one is the strictest."""


@dataclass(frozen=True, slots=True)
class ConsentSentence:
    """Sentence to be read aloud, with the parts that an older recording cannot contain."""

    text: str
    name: str
    language: str
    words: tuple[str, str]
    day: str
    """Date in UTC, such as 2026-11-17."""


def sentence_of_day(name: str, language: str, day: datetime | None = None) -> ConsentSentence:
    """Return the sentence of a day, by default today. It is the same all day on one machine; others cannot guess it."""
    base = base_language(language)
    if base not in SENTENCES:
        raise ConfigError(
            f"there is no consent sentence in `{language}`",
            hint=f"use one that the speaker reads: {', '.join(SENTENCES)}",
        )
    stamp = (day or datetime.now(UTC)).strftime("%Y-%m-%d")
    secret = private_file(user_folder("config") / SECRET_FILE, secrets.token_bytes(32))
    number = int.from_bytes(hmac.digest(secret, f"{stamp}\n{name}\n{base}".encode(), hashlib.sha256), "big")
    choices = LANGUAGES[base]["words"].split()
    first = choices.pop(number % len(choices))
    second = choices[(number >> 64) % len(choices)]
    text = SENTENCES[base].format(name=name, first=first, second=second)
    return ConsentSentence(text, name, base, (first, second), stamp)


def valid_sentences(name: str, language: str) -> list[ConsentSentence]:
    """Return the sentences that are accepted now, today's first."""
    now = datetime.now(UTC)
    return [sentence_of_day(name, language, now - timedelta(days=age)) for age in range(VALID_DAYS)]


def has_name(transcript: str, name: str, language: str) -> bool:
    """Whether a name, perhaps spelled a little differently, is recognised at its place in the sentence."""
    greeting, agreement, *_ = re.split("{name}|{first}", SENTENCES[base_language(language)])
    said, expected, before, after = (
        "".join(letters(text, language)) for text in (transcript, name, greeting, agreement)
    )
    if end := fuzz.partial_ratio_alignment(after, said):
        said = said[: end.dest_start]
    if start := fuzz.partial_ratio_alignment(before, said):
        said = said[start.dest_end :]
    said = said.strip()
    return fuzz.ratio(expected, said) >= MIN_NAME_MATCH or Levenshtein.distance(expected, said) <= MAX_NAME_ERRORS


def rename_consent(store: VoiceStore, id: str, name: str) -> Consent:
    """Change the name of a stored consent to another spelling of the one that was read aloud."""
    check_voice_name(name)
    consent = store.get_consent(id)
    if not has_name(consent.recording.text, name, consent.language):
        raise DataError(
            f"{name!r} is not the name that was read aloud: {consent.recording.text!r}",
            hint="have the sentence read with that name, and store it as another consent",
        )
    consent = consent.model_copy(update={"name": name})
    store.update_consent(consent)
    return consent


class ConsentChecker:
    """Recogniser and speaker encoder that check consents."""

    def __init__(self, asr: ASR, encoder: SpeakerEncoder) -> None:
        self._asr, self._encoder = asr, encoder

    @classmethod
    def open(
        cls, asr: str = "base", speaker_encoder: str = DEFAULT_SPEAKER_ENCODER, device: str = "cpu"
    ) -> ConsentChecker:
        """Load the models, named as for `myna evaluate`."""
        from myna.listen.asr import ASR
        from myna.listen.speaker_encoders import open_speaker_encoder

        return cls(ASR.open(asr, device), open_speaker_encoder(speaker_encoder, device))

    def transcribe(self, recording: Path, language: str) -> str:
        """Return the words of a recording; one without words is refused."""
        transcript = self._asr.transcribe(_read(recording), LISTENING_RATE, language or None)
        if transcript.looped or not transcript.text.strip():
            raise DataError(
                f"no words were recognised in {recording}", hint="record it again, closer to the microphone"
            )
        return transcript.text.strip()

    def check_words(self, recording: Path, name: str, language: str) -> tuple[ConsentSentence, dict[str, Any]]:
        """Return the sentence that is read in a recording, and what was measured. A recording that a model has spoken,
        or in which no sentence of the last days is read, is refused."""
        sentences, mark = valid_sentences(name, language), None
        if importlib.util.find_spec("perth") is not None:
            from myna.provenance.watermark import MARK_THRESHOLD, watermark_score

            mark = watermark_score(_read(recording), LISTENING_RATE)
            if mark > MARK_THRESHOLD:
                raise DataError(
                    f"{recording} was spoken by a model: it has a watermark (score {mark:.2f})",
                    hint=f"have {name} read the sentence aloud, and record it: {sentences[0].text}",
                )
        transcript = self.transcribe(recording, sentences[0].language)
        compared = [(*_compare(sentence, transcript), sentence) for sentence in sentences]
        problem, rate, sentence = min(compared, key=lambda one: (bool(one[0]), one[1]))
        if problem:
            raise DataError(
                f"{recording} is no consent of {name}: {problem}; recognised: {transcript!r}",
                hint=f"read this sentence aloud, today, and record it: {sentences[0].text}",
            )
        return sentence, {
            "transcript": transcript,
            "character_error_rate": round(rate, 4),
            "recogniser": self._asr.name,
            "watermark_score": None if mark is None else round(mark, 4),
        }

    def check_speaker(self, consent: Path, recordings: Sequence[Path]) -> dict[str, Any]:
        """Return how similar recordings are to that of the consent; one in another voice is refused."""
        from myna.listen.speaker_encoders import cosine_similarity

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
        return {"similarities": similarities, "required": required, "encoder": self._encoder.name}


def required_similarity(encoder: str) -> float:
    """Return the smallest cosine similarity that is accepted for an encoder; the strictest one for unknown encoders."""
    return MIN_SIMILARITY[next((kind for kind in MIN_SIMILARITY if encoder.startswith(kind)), "wavlm")]


def _compare(sentence: ConsentSentence, transcript: str) -> tuple[str, float]:
    """Compare a transcript with a sentence; return what is wrong, empty if nothing is, and the character error rate."""
    rate = character_errors(sentence.text, transcript, sentence.language).rate
    if rate > MAX_CHARACTER_ERRORS:
        return f"{rate:.0%} of the sentence was read otherwise", rate
    if not has_name(transcript, sentence.name, sentence.language):
        return "the name is not in it", rate
    heard, problem = words(transcript, sentence.language), ""
    for word in sentence.words:
        expected = " ".join(words(word, sentence.language))
        if max((fuzz.ratio(expected, one) for one in heard), default=0) < MIN_WORD_MATCH:
            problem = f"the word `{word}` is not in it"
    return problem, rate


def _read(recording: Path) -> Samples:
    """Read a recording unchanged: references are cleaned, but a proof is not."""
    samples = read_audio(recording, sample_rate=LISTENING_RATE, max_seconds=MAX_REFERENCE_SECONDS)
    check_not_silent(recording, samples)
    return samples
