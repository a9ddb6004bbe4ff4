"""`myna voice` and `myna detect`: stored voices with their consents, and the marks of generated speech."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from myna.commands import options as opt
from myna.commands.display import show, show_json, show_table, show_warnings
from myna.commands.options import Call, PathLike, command, option
from myna.core.errors import AudioError
from myna.core.io import DEFAULT_SPEAKER_ENCODER

if TYPE_CHECKING:
    from myna.provenance.voice_store import StoredVoice, VoiceStore
    from myna.provenance.watermark import Detection

VoiceName = Annotated[str, option("Name or id of a voice.")]


def add_voice(
    name: Annotated[str, option("Name of the voice: that of its speaker, as the consent says it.")],
    recordings: Annotated[
        Sequence[PathLike], option("A few seconds of the voice, at most 60; repeatable.", name="--recording")
    ],
    consent: Annotated[
        PathLike, option("Recording of `myna voice consent-sentence NAME`, read aloud today.", name="--consent")
    ],
    *,
    language: Annotated[str, option("Language of the consent and the recordings: en, ar, vi ...")] = "en",
    texts: Annotated[
        Sequence[str], option("Transcript of each recording; by default of the ASR; repeatable.", name="--text")
    ] = (),
    asr: Annotated[str, option("Name or folder of a Whisper, which checks the words.")] = "base",
    speaker_encoder: opt.SpeakerEncoder = DEFAULT_SPEAKER_ENCODER,
    device: opt.Device = "auto",
) -> StoredVoice:
    """Store a voice under a name, once the consent of its speaker is checked: the words of the sentence by speech
    recognition, the voice by a speaker encoder against the recordings. `myna speak --voice NAME` uses it."""
    from myna.core.device import pick_device
    from myna.provenance.consent import ConsentChecker
    from myna.provenance.voice_store import VoiceStore, check_voice_name

    check_voice_name(name)
    store = VoiceStore()
    store.check_new_name(name)
    checker = ConsentChecker.open(asr, speaker_encoder, str(pick_device(device)))
    checked = store.create_consent(name, Path(consent), language, checker)
    try:
        return store.create_voice(name, [Path(one) for one in recordings], checked.id, checker, texts=texts)
    except BaseException:
        store.delete_consent(checked.id)  # of no use without its voice
        raise


@command("voice add", add_voice, example='myna voice add "Marta Gil" --recording marta.wav --consent marta-consent.wav')
def _(call: Call[StoredVoice]) -> None:
    voice = call()
    _show_voices([voice])
    if not call.keywords.get("texts"):
        show(*(f'{recording.file}: heard "{recording.text}"' for recording in voice.recordings))
    show(f'myna speak "your words" --voice "{voice.name}" --model MODEL -o out.wav')


@command("voice list", example="myna voice list")
def _(*, as_json: opt.Json = False) -> None:
    """List the stored voices."""
    voices = _open_store().list_voices()
    if as_json:
        show_json([voice.model_dump(mode="json") for voice in voices])
    elif voices:
        _show_voices(voices)
    else:
        show("no voices yet: myna voice consent-sentence NAME, then myna voice add NAME")


def _open_store() -> VoiceStore:
    from myna.provenance.voice_store import VoiceStore

    return VoiceStore()


def _show_voices(voices: Sequence[StoredVoice]) -> None:
    rows = []
    for voice in voices:
        added = datetime.fromtimestamp(voice.created_at, UTC).strftime("%Y-%m-%d")
        similarity = f"{min(voice.checks['similarities']):.2f}"
        rows.append([voice.name, voice.language, str(len(voice.recordings)), similarity, added])
    show_table(["name", "language", "recordings", "similarity", "added"], rows)


@command("voice show", example='myna voice show "Marta Gil"')
def _(name: VoiceName) -> None:
    """Print all that is stored of a voice, as JSON: recordings with their hashes, and how its consent was checked."""
    print(_open_store().get_voice(name).model_dump_json(indent=2))


@command("voice remove", example='myna voice remove "Marta Gil"')
def _(name: VoiceName) -> None:
    """Remove a voice, its recordings and its consent from this machine. Its speech stays in the log."""
    show(f"{_open_store().remove_voice(name).name}: removed")


def consent_sentence(
    name: Annotated[str, option("Name of the speaker.")],
    *,
    language: Annotated[str, option("en, ar, vi, de, fr or es.")] = "en",
) -> str:
    """Return the sentence that a speaker reads aloud to agree to a stored voice. It has two words of the day: record it
    today."""
    from myna.provenance import consent, voice_store

    voice_store.check_voice_name(name)
    return consent.sentence_of_day(name, language).text


@command("voice consent-sentence", consent_sentence, example='myna voice consent-sentence "Marta Gil"')
def _(call: Call[str]) -> None:
    print(call())


def detect(file: PathLike, *, device: str = "cpu") -> Detection:
    """Look for the watermark and content credentials in an audio file, and for the file in this machine's log."""
    from myna.provenance.watermark import inspect_file

    return inspect_file(Path(file), device=device)


@command("detect", example="myna detect morning.wav")
def _(
    files: Annotated[Sequence[PathLike], option("Recordings in any format.")],
    *,
    device: Annotated[str, option("cpu or cuda.")] = "cpu",
    as_json: opt.Json = False,
) -> int:
    """Tell whether recordings were spoken by a model: look for the watermark, the content credentials and an entry in
    this machine's log.

    Exit code 0 if every file is marked, or signed as speech of a model; 1 if one is neither; 2 if one cannot be read.
    A recording without a mark may still be synthetic: noise, a change of speed or a neural codec removes the mark."""
    found, failures = [], list[str]()
    for file in files:
        try:
            found.append(detect(file, device=device))
            if not as_json:
                _show_detection(found[-1])
        except AudioError as error:
            failures.append(error.what)
    if as_json:
        show_json([one.to_json() for one in found])
    show_warnings(failures, stderr=True)
    return 2 if failures else 0 if all(one.is_synthetic for one in found) else 1


def _show_detection(found: Detection) -> None:
    """Print what was found in a file, and who signed it."""
    parts = [span for span in found.spans if span.score > 0.5]
    score = max((span.score for span in parts), default=found.score)
    mark = f"{'marked' if parts else 'not marked'} (score {score:.2f})"
    if 0 < len(parts) < len(found.spans):
        mark += f", in {', '.join(f'{span.start:.0f}-{span.end:.0f} s' for span in parts)}"
    lines, known = [f"{found.file}: {mark}"], found.credentials
    if known is not None:
        who = {
            "own": f"signed by this installation ({known.signer})",
            "valid": f"signed by {known.signer or 'an unknown key'}, for which nobody vouches",
            "invalid": f"signature does not hold ({', '.join(known.problems) or 'damaged'}): do not trust what it says",
        }
        lines.append(f"  credentials: {who[known.state]}")
        lines += [f"    {key}: {value}" for key, value in known.speech.items()]
    if found.logged is not None:
        lines.append(f"  spoken here: {found.logged['time']}, voice {found.logged['voice'] or 'of the model'}")
    style = "yellow" if known is not None and known.state == "invalid" else "none"
    show(*lines, style=style)
