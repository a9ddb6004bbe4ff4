"""Stored voices: recordings of a speaker with their transcripts, and the consent that was checked against them.

FOLDER/consents/cons_ID/   consent.json and the recording of the sentence
FOLDER/voices/voice_ID/    voice.json, the recordings, and a copy of the consent's recording
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field, ValidationError

from myna.core.config import Settings
from myna.core.errors import DataError
from myna.core.io import acquire_lock, atomic_folder, save_text, sniff_suffix, user_folder
from myna.speak.request import read_reference
from myna.text.normalization import normalise_text

if TYPE_CHECKING:
    from myna.provenance.consent import ConsentChecker

MAX_VOICES = 1_000
MAX_FILE_BYTES = 10 * 2**20
"""Maximum size of a recording, as in OpenAI's interface."""
MAX_RECORDINGS = 20
NAME_PATTERN = re.compile(r"[^\W_][\w .'-]{0,63}")
CONSENT_FILE, VOICE_FILE = "consent.json", "voice.json"
Record = TypeVar("Record", "Consent", "StoredVoice")


class NotStoredError(DataError):
    """A voice or a consent of that name is not stored."""


class DamagedRecordError(DataError):
    """A record or a recording in the store was damaged or changed. The message names the file."""


class StoredRecording(Settings):
    """A recording in the folder of a voice or a consent."""

    file: str
    sha256: str
    text: str
    """Transcript, recognised or given by the owner."""


class Consent(Settings):
    """A consent that was read aloud and recognised."""

    id: str
    name: str
    language: str
    created_at: int
    """Seconds since 1970."""
    sentence: str
    recording: StoredRecording
    checks: dict[str, Any] = Field(default_factory=dict)
    """Transcript, error rate and name of the recogniser."""


class StoredVoice(Settings):
    """A named voice with a checked consent. The first recording is the reference that sets it."""

    id: str
    name: str
    language: str
    created_at: int
    recordings: tuple[StoredRecording, ...]
    consent: Consent
    consent_file: str
    checks: dict[str, Any] = Field(default_factory=dict)
    """Similarities to the consent's recording, the smallest accepted one, and the name of the encoder."""


class VoiceStore:
    """Voices and consents of a folder, by default the user folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else user_folder("data")

    # Consents

    def create_consent(self, name: str, recording: Path, language: str, checker: ConsentChecker) -> Consent:
        """Store a consent after recognising a sentence of the last days in its recording."""
        check_voice_name(name)
        sentence, checks = checker.check_words(recording, name, language)
        with self._lock():
            self._check_room("consents")
            id = f"cons_{secrets.token_hex(12)}"
            with atomic_folder(self.folder / "consents" / id) as folder:
                consent = Consent(
                    id=id,
                    name=name,
                    language=sentence.language,
                    created_at=int(time.time()),
                    sentence=sentence.text,
                    recording=_copy(recording, folder, "consent", checks["transcript"]),
                    checks=checks,
                )
                save_text(folder / CONSENT_FILE, consent.model_dump_json(indent=2))
        return consent

    def list_consents(self) -> list[Consent]:
        """Return all consents, oldest first."""
        return _without_damaged(self._read_all("consents", CONSENT_FILE, Consent))

    def get_consent(self, id: str) -> Consent:
        return _find(self._read_all("consents", CONSENT_FILE, Consent), id, "consent", "myna voice list shows them")

    def update_consent(self, consent: Consent) -> None:
        """Replace what is stored of a consent."""
        with self._lock():
            folder = self.folder / "consents" / self.get_consent(consent.id).id
            save_text(folder / CONSENT_FILE, consent.model_dump_json(indent=2))

    def delete_consent(self, id: str) -> Consent:
        """Remove a consent; refused while a stored voice depends on it."""
        with self._lock():
            consent = self.get_consent(id)
            if voices := [voice.name for voice in self.list_voices() if voice.consent.id == consent.id]:
                raise DataError(
                    f"the voice {voices[0]} rests on the consent {consent.id}",
                    hint=f"remove the voice first: myna voice remove {voices[0]!r}",
                )
            _remove(self.folder / "consents" / consent.id)
        return consent

    # Voices

    def create_voice(
        self, name: str, recordings: Sequence[Path], consent: str, checker: ConsentChecker, *, texts: Sequence[str] = ()
    ) -> StoredVoice:
        """Store a voice after checking that its recordings have the voice of the consent. `texts` are transcripts of
        the recordings; without any, they are recognised."""
        check_voice_name(name)
        known = self.get_consent(consent)
        if not 1 <= len(recordings) <= MAX_RECORDINGS:
            raise DataError(f"{len(recordings)} recordings for {name}", hint=f"give 1 to {MAX_RECORDINGS}")
        if texts and len(texts) != len(recordings):
            raise DataError(
                f"{len(recordings)} recordings but {len(texts)} transcripts",
                hint="give one for each, or none: the recogniser writes them then",
            )
        for recording in recordings:
            _check_size(recording)
            read_reference(recording)  # too long, silent or cut short
        consent_recording = self.folder / "consents" / known.id / known.recording.file
        check = checker.check_speaker(consent_recording, recordings)
        texts = [normalise_text(text) for text in texts] or [
            checker.transcribe(recording, known.language) for recording in recordings
        ]
        with self._lock():
            self._check_room("voices")
            self.check_new_name(name)
            id = f"voice_{secrets.token_hex(12)}"
            with atomic_folder(self.folder / "voices" / id) as folder:
                pairs = enumerate(zip(recordings, texts, strict=True))
                copies = tuple(_copy(recording, folder, f"recording-{n}", text) for n, (recording, text) in pairs)
                held = _copy(consent_recording, folder, "consent", known.recording.text)
                voice = StoredVoice(
                    id=id,
                    name=name,
                    language=known.language,
                    created_at=int(time.time()),
                    recordings=copies,
                    consent=known,
                    consent_file=held.file,
                    checks=check,
                )
                save_text(folder / VOICE_FILE, voice.model_dump_json(indent=2))
        return voice

    def check_new_name(self, name: str) -> None:
        """Refuse the name of an existing voice, in upper or lower case."""
        if any(voice.name.casefold() == name.casefold() for voice in self.list_voices()):
            raise DataError(
                f"there is a voice {name} already",
                hint=f"choose another name, or remove that one first: myna voice remove {name!r}",
            )

    def list_voices(self) -> list[StoredVoice]:
        """Return all voices, oldest first. Damaged ones are left out with a warning."""
        return _without_damaged(self._read_all("voices", VOICE_FILE, StoredVoice))

    def get_voice(self, id_or_name: str) -> StoredVoice:
        """Return a voice by its id or its name, in upper or lower case. If the name is not found and a record is
        damaged, raise another error: the name may be in that record."""
        records = self._read_all("voices", VOICE_FILE, StoredVoice)
        return _find(records, id_or_name, "voice", "myna voice list shows them; myna voice add makes one")

    def delete_voice(self, id_or_name: str) -> StoredVoice:
        """Remove a voice with its recordings; its consent stays."""
        with self._lock():
            voice = self.get_voice(id_or_name)
            _remove(self.folder / "voices" / voice.id)
        return voice

    def remove_voice(self, id_or_name: str) -> StoredVoice:
        """Remove a voice with its recordings, and its consent unless another voice has the same."""
        voice = self.delete_voice(id_or_name)
        if not any(other.consent.id == voice.consent.id for other in self.list_voices()):
            self.delete_consent(voice.consent.id)
        return voice

    def reference(self, voice: StoredVoice) -> tuple[Path, str]:
        """Return the reference recording of a voice and its transcript. A file that was changed since is refused."""
        recording = voice.recordings[0]
        file = self.folder / "voices" / voice.id / recording.file
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != recording.sha256:
            raise DamagedRecordError(
                f"{file} is not the recording that was stored for {voice.name}",
                hint=f"remove the voice and add it again: myna voice remove {voice.name!r}",
            )
        return file, recording.text

    def _lock(self) -> AbstractContextManager[object]:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return acquire_lock(self.folder / ".voices.lock")

    def _check_room(self, kind: str) -> None:
        if sum(1 for _ in (self.folder / kind).glob("*")) >= MAX_VOICES:
            raise DataError(f"{self.folder / kind} holds {MAX_VOICES} already", hint="remove some that are not used")

    def _read_all(self, kind: str, file: str, record: type[Record]) -> list[Record | DamagedRecordError]:
        """Return all records, oldest first, and an error for each damaged one."""
        found: list[Record | DamagedRecordError] = []
        for path in (self.folder / kind).glob(f"*/{file}"):
            if path.parent.name.startswith("."):
                continue  # being written, or removed
            try:
                found.append(record.model_validate_json(path.read_bytes()))
            except FileNotFoundError:
                continue  # it has just been removed
            except ValidationError as error:
                problem, hint = f"{path} is damaged: {error.errors()[0]['msg']}", f"move the folder {path.parent} away"
                found.append(DamagedRecordError(problem, hint=hint))
        return sorted(found, key=lambda one: (0, str(one)) if isinstance(one, Exception) else (one.created_at, one.id))


def _without_damaged(records: list[Record | DamagedRecordError]) -> list[Record]:
    for one in records:
        if isinstance(one, DamagedRecordError):
            warnings.warn(str(one), stacklevel=3)
    return [one for one in records if not isinstance(one, DamagedRecordError)]


def _remove(folder: Path) -> None:
    """Remove a folder of the store. It is renamed first, so that a half-removed folder is never read."""
    shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.removed")))


def check_voice_name(name: str) -> None:
    """Refuse names that are not 1 to 64 letters, digits, spaces, and . ' _ - between them."""
    if not NAME_PATTERN.fullmatch(name) or name.startswith(("voice_", "cons_")) or name != name.strip():
        raise DataError(
            f"{name[:80]!r} cannot be the name of a voice",
            hint="use 1 to 64 letters, digits, spaces and . ' _ - and begin with a letter or digit",
        )


def _find(records: list[Record | DamagedRecordError], id_or_name: str, kind: str, hint: str) -> Record:
    whole = [one for one in records if not isinstance(one, DamagedRecordError)]
    by_id = [one for one in whole if one.id == id_or_name]
    by_name = [one for one in whole if one.name.casefold() == id_or_name.casefold()] if kind == "voice" else []
    if found := by_id or by_name:
        return found[0]
    for one in records:
        if isinstance(one, DamagedRecordError):
            raise one
    raise NotStoredError(f"there is no {kind} {id_or_name[:80]!r}", hint=hint)


def _copy(recording: Path, folder: Path, stem: str, text: str) -> StoredRecording:
    _check_size(recording)
    content = recording.read_bytes()
    file = f"{stem}{sniff_suffix(content)}"
    (folder / file).write_bytes(content)
    return StoredRecording(file=file, sha256=hashlib.sha256(content).hexdigest(), text=text)


def _check_size(recording: Path) -> None:
    if recording.is_file() and recording.stat().st_size > MAX_FILE_BYTES:
        raise DataError(
            f"{recording} has {recording.stat().st_size / 2**20:.1f} MiB, and at most {MAX_FILE_BYTES >> 20} are kept",
            hint=f"make it smaller: ffmpeg -i {recording} -ar 24000 -ac 1 -t 30 OUTPUT.flac",
        )
