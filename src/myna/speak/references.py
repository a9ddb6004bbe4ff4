"""Requests from the options of users: references with transcripts, heard where they are missing; stored voices."""

from __future__ import annotations

import os
import warnings
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from myna.audio.files import LISTENING_RATE, Samples
from myna.core.errors import ReferenceWarning, SpeakError
from myna.core.io import file_hash, is_file, whisper_folder
from myna.data.manifest import Span
from myna.speak import SpeechOptions
from myna.speak.request import ReferenceRecording, SpeechRequest, open_reference
from myna.text.lexicon import read_lexicon
from myna.text.normalization import base_language, normalise_text

if TYPE_CHECKING:
    from myna.listen.asr import ASR

WRITE_IT = 'write what is said in it: --reference-text "..."'


def speech_request(text: str, *, asr: str | None = None, **options: Unpack[SpeechOptions]) -> SpeechRequest:
    """Make a request, with the recording of a stored voice if one is named. References without any transcript are
    heard: by `asr`, or by the recogniser that is installed. `check` the request, unless a file of lines gives the
    text."""
    settings: dict[str, Any] = dict(options)
    name, given, said = (settings.pop(key, None) for key in ("voice", "reference", "reference_text"))
    recordings = [given] if isinstance(given, str | os.PathLike) else list(given or ())
    transcripts = [said] if isinstance(said, str) else list(said or ())
    if transcripts and len(recordings) != len(transcripts):
        raise SpeakError(
            f"{len(recordings)} references but {len(transcripts)} reference texts",
            hint="give the transcript of each reference: --reference REF.wav --reference-text '...'",
        )
    language, lexicon = settings.get("language", ""), settings.pop("lexicon", None)
    references = tuple(
        transcribed_reference(Path(one), transcripts[number] if transcripts else None, asr, language)
        for number, one in enumerate(recordings)
    )
    if name is not None:
        from myna.provenance.voice_store import VoiceStore

        if references:
            raise SpeakError("a stored voice has a reference of its own", hint="give `voice` or `reference`, not both")
        store = VoiceStore()
        stored = store.get_voice(name)
        recording, transcript = store.reference(stored)
        references = (ReferenceRecording(recording, transcript, voice=stored.name, consent=stored.consent.id),)
    spellings = read_lexicon(Path(lexicon)) if lexicon is not None else {}
    return SpeechRequest(text, references, spellings=spellings, **settings)


def transcribed_reference(
    recording: Path, text: str | None, asr: str | None = None, language: str = "", span: Span | None = None
) -> ReferenceRecording:
    """Return a reference with its transcript. Without one a recogniser hears its words, and a warning says them."""
    if text is not None:
        return ReferenceRecording(recording, text, span)
    heard = _hear_file(recording, file_hash(recording) if is_file(recording) else "", asr, language, span)
    warnings.warn(f'{recording}: heard "{heard}"', ReferenceWarning, stacklevel=3)
    return ReferenceRecording(recording, heard, span, heard=True)


def hear_reference(samples: Samples, sample_rate: int, asr: str | None = None, language: str = "") -> str:
    """Return the words of a reference as `asr` hears them, or the recogniser of `myna setup metrics`."""
    try:
        transcript = _recogniser(asr).transcribe(samples, sample_rate, base_language(language) or None)
    except ValueError as error:  # a language that the recogniser does not know
        raise SpeakError(f"a reference cannot be heard: {error}", hint=WRITE_IT) from None
    text = normalise_text(transcript.text)
    if transcript.looped or not text:
        raise SpeakError("no words were recognised in a reference", hint=WRITE_IT)
    return text


@lru_cache(maxsize=1024)
def _hear_file(recording: Path, _hash: str, asr: str | None, language: str, span: Span | None) -> str:
    return hear_reference(open_reference(recording, LISTENING_RATE, span).samples, LISTENING_RATE, asr, language)


@lru_cache(maxsize=1)
def _recogniser(asr: str | None) -> ASR:
    if asr is None and not whisper_folder().is_dir():
        raise SpeakError(
            "a reference has no transcript, and no recogniser is installed to hear it",
            hint=f"{WRITE_IT}; or install a recogniser: myna setup metrics",
        )
    from myna.listen.asr import ASR

    return ASR.open(asr if asr is not None else str(whisper_folder()))
