"""Speech request: a text, the voices to speak it in and all settings, from the border to the decoding batch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from myna.audio.files import Samples, check_not_silent, probe, read_audio
from myna.audio.reference import CheckedReference, check_reference
from myna.core.errors import SpeakError
from myna.data.conversation import Reference, ReferencePlacement
from myna.data.manifest import SPEAKER_TAG, Span
from myna.text.normalization import normalise_text
from myna.text.sentences import PAUSE, split_pauses

if TYPE_CHECKING:
    from myna.models.base import Sampling

MAX_REFERENCE_SECONDS = 60.0
"""Longest recording that is accepted as a reference. A few seconds set a voice; minutes only take memory."""
MAX_PAUSE_SECONDS = 10.0
SPEED_RANGE = (0.25, 4.0)

FinishReason = Literal["stop", "length", "cancelled"]
"""Reason of an end: the model found it, the frame cap was reached, or the caller cancelled."""


@dataclass(frozen=True, slots=True)
class ReferenceRecording:
    """Recording of a reference voice and its transcript."""

    audio: Path | Samples
    """File, or samples at the codec's sample rate."""
    text: str
    span: Span | None = None
    voice: str = ""
    """Name of its stored voice."""
    consent: str = ""
    """Id of the consent to the stored voice."""
    heard: bool = False
    """Whether a recogniser wrote the transcript."""

    @property
    def file(self) -> Path:
        """File of a recording that is not given as samples."""
        assert isinstance(self.audio, Path), "a reference of samples has no file"
        return self.audio

    @property
    def name(self) -> str:
        """Name of the voice in logs and in credentials: that of the stored voice, or of the file."""
        return self.voice or (self.audio.name if isinstance(self.audio, Path) else "reference")


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """Text to speak, the voices to speak it in, and all settings. None is the model's own choice."""

    text: str
    references: tuple[ReferenceRecording | Reference, ...] = ()
    """Recordings, which the engine encodes, or clips that are encoded already."""
    _: KW_ONLY
    id: str = ""
    """Name of the random stream; if empty, the text. Equal names, texts, voices and seeds give equal speech."""
    scene: str | None = None
    reference_placement: ReferencePlacement | None = None
    """Place of the references in the prompt."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Words that are spelled otherwise for the model, as `read_lexicon` reads them."""
    language: str = ""
    """Language of a long text, such as en or de: helps to find its sentences."""
    temperature: float | None = None
    """0 is greedy."""
    top_k: int | None = None
    top_p: float | None = None
    repetition_window: int | None = None
    repetition_limit: int | None = None
    max_seconds: float = 60.0
    """Longest utterance, or longest segment of a long text."""
    seed: int = 0
    adapter: str = ""
    """Name of an adapter that the engine has loaded (`Engine.load_adapter`); empty for the model's own weights."""
    strength: float = 1.0
    """Factor on the adapter's effect."""
    speed: float = 1.0
    """Factor on the tempo of a stream; the pitch stays."""
    priority: int = 0
    """Place in the queue: requests of lower numbers are spoken first."""
    session: str = ""
    """Name of a session, whose requests have those before them in their prompts."""
    watermark: bool = True
    """Whether speech that leaves Myna is marked. Speech that is only measured never is."""

    @property
    def name(self) -> str:
        return self.id or self.text

    @property
    def words(self) -> str:
        """Text without marks of pauses."""
        return PAUSE.sub(" ", self.text)

    @property
    def recordings(self) -> tuple[ReferenceRecording, ...]:
        """References that are not encoded yet."""
        return tuple(one for one in self.references if isinstance(one, ReferenceRecording))

    @property
    def voice(self) -> str:
        """Names of its voices, for logs and credentials."""
        return ", ".join(dict.fromkeys(one.name for one in self.recordings))

    @property
    def consent(self) -> str:
        """Id of the consent to its stored voice, if it has one."""
        return next((one.consent for one in self.recordings if one.consent), "")

    def take(self, number: int) -> SpeechRequest:
        """Return the same request with another seed. Take 0 is the request itself."""
        return replace(self, seed=self.seed + number)

    def sampling(self, model: Sampling) -> Sampling:
        """Return complete sampling settings: those of the request, else those of the model."""
        values = {one.name: getattr(self, one.name) for one in fields(model)}
        return replace(model, **{name: value for name, value in values.items() if value is not None})

    def check(self) -> None:
        """Refuse a request that no model could speak, before one is opened."""
        self._check_text()
        self.check_settings()

    def check_settings(self) -> None:
        """Refuse settings outside their ranges."""
        _check_range("temperature", self.temperature, 0.0, math.inf)
        _check_range("top_k", self.top_k, 0, math.inf)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("speed", self.speed, *SPEED_RANGE)
        _check_range("strength", self.strength, -math.inf, math.inf)
        if not 0 < self.max_seconds < math.inf:
            raise SpeakError(f"max_seconds is {self.max_seconds:g}", hint="give a number of seconds above 0")

    def _check_text(self) -> None:
        """Refuse a text without words, a reference without its transcript, and tags that do not fit the references.
        Several references need `[SPEAKER0]`, `[SPEAKER1]`, ... each; tags without any reference leave the voices to the
        model."""
        if not normalise_text(self.words):
            raise SpeakError("there is no text to speak", hint='give some words: myna speak "Good morning." ...')
        pauses, tagged = split_pauses(self.text), SPEAKER_TAG.search(self.text)
        if re.search(r"(?i)</?break\b", self.words) or not normalise_text(pauses[0][0]) or (tagged and len(pauses) > 1):
            raise SpeakError(
                "a pause is not understood, comes before all words, or is in a text of several speakers",
                hint='write it as <break time="500ms"/> or <break time="1.5s"/>, after words of one speaker',
            )
        if (longest := max(seconds for _, seconds in pauses)) > MAX_PAUSE_SECONDS:
            raise SpeakError(f"a pause of {longest:g} s", hint=f"give at most {MAX_PAUSE_SECONDS:g} s")
        for number, reference in enumerate(self.references, start=1):
            if not normalise_text(reference.text):
                raise SpeakError(
                    f"the text of reference {number} is empty", hint='write what is said in it: --reference-text "..."'
                )
        tags = sorted({int(number) for number in SPEAKER_TAG.findall(self.text)})
        count = len(self.references)
        if count > 1 and not tags:
            raise SpeakError(
                f"there are {count} references, and nothing in the text says who speaks",
                hint='put a tag before each part: "[SPEAKER0] Hello. [SPEAKER1] Hi.", or give one reference',
            )
        expected = list(range(count or len(tags)))
        if tags and tags != expected:
            found, needed = (", ".join(f"[SPEAKER{number}]" for number in some) for some in (tags, expected))
            given = f"the {count} references are" if count > 1 else "the one reference is"
            whose = f"{given} {needed}" if count else f"speakers are numbered from 0: {needed}"
            raise SpeakError(
                f"the text has {found}, but {whose}",
                hint="number the tags from [SPEAKER0], in the order of the references, and give one --reference with "
                "its --reference-text for each",
            )


def read_speech_text(file: Path) -> str:
    """Read a text from a file."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SpeakError(f"{file} cannot be read: {error}", hint="give a UTF-8 text file") from None


def open_reference(recording: Path, sample_rate: int = 24_000, span: Span | None = None) -> CheckedReference:
    """Read and clean a reference recording, and list its problems. Refuse one that is too long, silent or cut short."""
    part, rate = (span.start, span.end) if span is not None else None, probe(recording).sample_rate
    samples = read_audio(recording, sample_rate=rate, span=part, max_seconds=MAX_REFERENCE_SECONDS)
    check_not_silent(recording, samples)
    checked = check_reference(samples, rate, sample_rate)
    return replace(checked, problems=tuple(f"{recording}: {problem}" for problem in checked.problems))


def read_reference(recording: Path, sample_rate: int = 24_000, span: Span | None = None) -> Samples:
    """Read and clean a reference recording."""
    return open_reference(recording, sample_rate, span).samples


def _check_range(name: str, value: Any, least: float, most: float) -> None:
    if value is None or (least <= value <= most and math.isfinite(value)):
        return
    allowed = f"{least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
    raise SpeakError(f"{name} is {value}", hint=f"give a number {allowed}" if least > -math.inf else "give a number")
