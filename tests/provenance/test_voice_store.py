"""Stored voices: consent by words and by voice, and nothing else."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz import fuzz

import myna
from myna.audio.files import Samples, read_audio, write_audio
from myna.core.errors import ConfigError, DataError
from myna.listen.asr import Transcript
from myna.listen.speaker_encoders import SpeakerEmbedding
from myna.provenance.consent import (
    LANGUAGES,
    MIN_WORD_MATCH,
    SENTENCES,
    VALID_DAYS,
    ConsentChecker,
    ConsentSentence,
    has_name,
    rename_consent,
    sentence_of_day,
    valid_sentences,
)
from myna.provenance.speech_log import read_log
from myna.provenance.voice_store import MAX_FILE_BYTES, VoiceStore, check_voice_name
from myna.provenance.watermark import watermark
from myna.text.normalization import words
from tests.command_line import run_command


class PitchEncoder:
    """Tells speakers apart by the frequency of their tone."""

    name = "resemblyzer of tones"

    def embed(self, samples: Samples, sample_rate: int) -> SpeakerEmbedding:
        spectrum = np.abs(np.fft.rfft(samples, n=sample_rate))[:1_000]
        return np.asarray(spectrum / np.linalg.norm(spectrum), np.float32)


class DictationASR:
    """Hears what it is told, whatever is said."""

    name = "dictation"

    def __init__(self) -> None:
        self.text = "a few words"
        self.languages: list[str | None] = []

    def transcribe(self, _: Samples, __: int, language: str | None) -> Transcript:
        self.languages.append(language)
        return Transcript(self.text, looped=False)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MYNA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def asr() -> DictationASR:
    return DictationASR()


@pytest.fixture
def checker(asr: DictationASR) -> ConsentChecker:
    return ConsentChecker(asr, PitchEncoder())  # type: ignore[arg-type]


@pytest.fixture
def store(home: Path) -> VoiceStore:
    return VoiceStore(home)


def tone(folder: Path, name: str, frequency: float, seconds: float = 1.0) -> Path:
    time = np.arange(int(16_000 * seconds)) / 16_000
    write_audio(folder / name, (0.3 * np.sin(2 * np.pi * frequency * time)).astype(np.float32), 16_000)
    return folder / name


def add(store: VoiceStore, checker: ConsentChecker, asr: DictationASR, folder: Path, name: str = "Marta Lind") -> str:
    asr.text = sentence_of_day(name, "en").text
    consent = store.create_consent(name, tone(folder, "consent.wav", 220), "en", checker)
    asr.text = "The birch canoe slid on the smooth planks."
    return store.create_voice(name, [tone(folder, "own.flac", 220)], consent.id, checker).id


def test_a_voice_with_its_consent(
    store: VoiceStore, checker: ConsentChecker, asr: DictationASR, tmp_path: Path
) -> None:
    id = add(store, checker, asr, tmp_path)
    voice = store.get_voice("marta lind")
    assert voice.id == id
    assert voice.id.startswith("voice_")
    assert voice.consent.id.startswith("cons_")
    assert voice.recordings[0].text == "The birch canoe slid on the smooth planks."
    assert voice.checks["similarities"][0] > 0.99
    assert voice.consent.checks["character_error_rate"] == 0
    assert voice.created_at >= datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    recording, text = store.reference(voice)
    assert np.array_equal(read_audio(recording), read_audio(tmp_path / "own.flac"))
    assert text == voice.recordings[0].text
    assert asr.languages == ["en", "en"]
    with pytest.raises(DataError, match="already"):
        store.create_voice("MARTA LIND", [tmp_path / "own.flac"], voice.consent.id, checker)
    with pytest.raises(DataError, match="rests on"):
        store.delete_consent(voice.consent.id)
    store.delete_voice(id)
    assert store.list_voices() == []
    assert store.delete_consent(voice.consent.id).name == "Marta Lind"
    with pytest.raises(DataError, match="no voice"):
        store.get_voice(id)


def older_sentence(sentence: ConsentSentence) -> ConsentSentence:
    """Return a sentence of an earlier month, with other words."""
    now = datetime.now(UTC)
    days = (now - timedelta(days=number) for number in range(30, 200))
    older = (sentence_of_day(sentence.name, sentence.language, day) for day in days)
    accepted = {word for one in valid_sentences(sentence.name, sentence.language) for word in one.words}
    return next(one for one in older if not accepted & set(one.words))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda _: "", "no words"),
        (lambda _: "I agree to nothing at all, thank you.", "read otherwise"),
        (lambda sentence: sentence.text.replace(sentence.words[1], "umbrella"), "the word"),
        (lambda sentence: sentence.text.replace("Marta Lind", "Hugo"), "read otherwise|the name"),
        (lambda sentence: older_sentence(sentence).text, "the word"),
    ],
)
def test_other_words_are_no_consent(
    change: Any, problem: str, store: VoiceStore, checker: ConsentChecker, asr: DictationASR, tmp_path: Path
) -> None:
    asr.text = change(sentence_of_day("Marta Lind", "en"))
    with pytest.raises(DataError, match=problem):
        store.create_consent("Marta Lind", tone(tmp_path, "consent.wav", 220), "en", checker)
    assert store.list_consents() == []


def test_small_slips_of_the_recogniser_are_forgiven(
    store: VoiceStore, checker: ConsentChecker, asr: DictationASR, tmp_path: Path
) -> None:
    sentence = sentence_of_day("Nicola", "en")
    asr.text = sentence.text.replace("Nicola", "Nikola").replace("recordings", "recording").upper()
    assert store.create_consent("Nicola", tone(tmp_path, "consent.wav", 220), "en", checker).name == "Nicola"
    asr.text = sentence_of_day("Nicola", "en", datetime.now(UTC) - timedelta(days=VALID_DAYS - 1)).text
    assert store.create_consent("Nicola", tmp_path / "consent.wav", "en", checker)


def test_a_consent_that_a_model_has_spoken(
    store: VoiceStore, checker: ConsentChecker, asr: DictationASR, tmp_path: Path
) -> None:
    recording = sorted((Path(myna.__file__).parent / "demo" / "recordings").glob("*.opus"))[0]
    samples = read_audio(recording, sample_rate=24_000)
    asr.text = sentence_of_day("Marta", "en").text
    write_audio(tmp_path / "marked.flac", watermark(samples, 24_000), 24_000)
    with pytest.raises(DataError, match="spoken by a model"):
        store.create_consent("Marta", tmp_path / "marked.flac", "en", checker)
    write_audio(tmp_path / "plain.flac", samples, 24_000)
    consent = store.create_consent("Marta", tmp_path / "plain.flac", "en", checker)
    assert consent.checks["watermark_score"] < 0.5


def test_another_voice_than_that_of_the_consent(
    store: VoiceStore, checker: ConsentChecker, asr: DictationASR, tmp_path: Path
) -> None:
    asr.text = sentence_of_day("Marta", "en").text
    consent = store.create_consent("Marta", tone(tmp_path, "consent.wav", 220), "en", checker)
    recordings = [tone(tmp_path, "own.wav", 220), tone(tmp_path, "other.wav", 440)]
    with pytest.raises(DataError, match=r"other\.wav is not in the voice of the consent"):
        store.create_voice("Marta", recordings, consent.id, checker)
    assert store.list_voices() == []


def test_recordings_that_cannot_be_used(
    store: VoiceStore, checker: ConsentChecker, asr: DictationASR, tmp_path: Path
) -> None:
    asr.text = sentence_of_day("Marta", "en").text
    consent = store.create_consent("Marta", tone(tmp_path, "consent.wav", 220), "en", checker)
    large = tmp_path / "large.wav"
    large.write_bytes(bytes(MAX_FILE_BYTES + 1))
    text = tmp_path / "text.wav"
    text.write_text("no audio")
    for recording in (large, text, tmp_path / "missing.wav", tone(tmp_path, "long.flac", 220, 61.0)):
        with pytest.raises(DataError):
            store.create_voice("Marta", [recording], consent.id, checker)
    for count in (0, 21):
        with pytest.raises(DataError, match="recordings"):
            store.create_voice("Marta", [tmp_path / "consent.wav"] * count, consent.id, checker)
    with pytest.raises(DataError, match="no consent"):
        store.create_voice("Marta", [tmp_path / "consent.wav"], "cons_../../etc", checker)
    assert store.list_voices() == []


def test_a_consent_gets_another_spelling_of_its_name_alone(
    store: VoiceStore, checker: ConsentChecker, asr: DictationASR, tmp_path: Path
) -> None:
    asr.text = sentence_of_day("Nicola Berg", "en").text
    consent = store.create_consent("Nicola Berg", tone(tmp_path, "consent.wav", 220), "en", checker)
    assert rename_consent(store, consent.id, "Nikola Berg").name == "Nikola Berg"
    with pytest.raises(DataError, match="not the name that was read aloud"):
        rename_consent(store, consent.id, "Hugo Winter")
    with pytest.raises(DataError, match="cannot be the name"):
        rename_consent(store, consent.id, "../Nicola")
    kept = store.get_consent(consent.id)
    assert (kept.name, kept.sentence, kept.recording) == ("Nikola Berg", consent.sentence, consent.recording)


@pytest.mark.parametrize("language", SENTENCES)
def test_a_word_of_the_day_is_not_taken_for_a_name(language: str) -> None:
    first, *others = LANGUAGES[language]["words"].split()
    for word in others:
        read = SENTENCES[language].format(name="Nicola Berg", first=first, second=word)
        assert has_name(read, "Nikola Berg", language)
        assert not has_name(read, f"Hugo {word}", language)
        assert not has_name(read, f"{first} {word}", language)


@pytest.mark.parametrize(
    ("recognised", "name"), [("Lee", "Li"), ("Nicolas Bergh", "Nicola Berg"), ("Dan Tee Mee", "Đặng Thị Mỹ")]
)
def test_a_name_may_be_spelled_as_it_was_recognised(recognised: str, name: str) -> None:
    assert has_name(SENTENCES["en"].format(name=recognised, first="winter", second="anchor"), name, "en")
    assert not has_name(SENTENCES["en"].format(name="Hugo Winter", first="winter", second="anchor"), name, "en")


def test_a_changed_recording_is_refused(
    store: VoiceStore, checker: ConsentChecker, asr: DictationASR, tmp_path: Path
) -> None:
    voice = store.get_voice(add(store, checker, asr, tmp_path))
    recording, _ = store.reference(voice)
    recording.write_bytes(tone(tmp_path, "else.flac", 300).read_bytes())
    with pytest.raises(DataError, match="not the recording"):
        store.reference(voice)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80))
def test_names_never_leave_the_folder(name: str) -> None:
    try:
        check_voice_name(name)
    except DataError:
        return
    assert not set(name) & set('/\\\0\n:*?"<>|')
    assert not name.startswith((".", " ", "-"))


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "voice_1", "cons_2", "", " x", "x ", "a\nb", "-x"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="name of a voice"):
        check_voice_name(name)


@pytest.mark.parametrize("language", SENTENCES)
def test_sentences(language: str) -> None:
    today = sentence_of_day("Lê Thị Mai", language)
    assert today == sentence_of_day("Lê Thị Mai", language)
    assert "Lê Thị Mai" in today.text
    assert today.words[0] != today.words[1]
    assert all(word in today.text.split() or f"{word}." in today.text for word in today.words)
    assert len(set(LANGUAGES[language]["words"].split())) == len(LANGUAGES[language]["words"].split()) >= 36
    pairs = combinations([" ".join(words(word, language)) for word in LANGUAGES[language]["words"].split()], 2)
    assert max(fuzz.ratio(*pair) for pair in pairs) < MIN_WORD_MATCH, "no word passes for another"
    days = [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=number) for number in range(30)]
    assert len({sentence_of_day("Lê Thị Mai", language, day).words for day in days}) > 20
    assert sentence_of_day("Lê Thị Mai", f"{language}-XX").text == today.text


def test_words_differ_between_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = set()
    for number in range(5):
        monkeypatch.setenv("MYNA_HOME", str(tmp_path / str(number)))
        found.add(sentence_of_day("Marta", "en", datetime(2026, 1, 1, tzinfo=UTC)).words)
    assert len(found) > 1


def test_languages_without_a_sentence() -> None:
    with pytest.raises(ConfigError, match="no consent sentence") as error:
        sentence_of_day("Marta", "tlh")
    assert "en, ar, vi" in error.value.hint


def test_commands(
    checker: ConsentChecker,
    asr: DictationASR,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ConsentChecker, "open", lambda *_: checker)
    sentence = run_command(["voice", "consent-sentence", "Marta"], catch=True).output.strip()
    own, consent = str(tone(tmp_path, "own.wav", 220)), str(tone(tmp_path, "consent.wav", 220))
    other = str(tone(tmp_path, "other.wav", 440))
    asr.text = sentence
    failed = run_command(
        ["voice", "add", "Marta", "--recording", other, "--consent", consent, "--text", "hi"], catch=True
    )
    assert isinstance(failed.exception, DataError)
    assert VoiceStore().list_consents() == [], "a consent without its voice is not kept"
    words = ["voice", "add", "Marta", "--recording", own, "--consent", consent, "--text", "hello"]
    assert run_command(words, catch=True).exit_code == 0
    assert json.loads(run_command(["voice", "list", "--json"], catch=True).output)[0]["name"] == "Marta"
    shown = json.loads(run_command(["voice", "show", "marta"], catch=True).output)
    assert shown["recordings"][0]["text"] == "hello"

    model = str(myna.make_tiny(tmp_path_factory.mktemp("tiny") / "model"))
    speak = ["speak", "hi", "-m", model, "--device", "cpu", "--max-seconds", "0.4", "--voice", "marta"]
    assert run_command([*speak, "-o", str(tmp_path / "out.wav")], catch=True).exit_code == 0
    row = list(read_log())[-1]
    assert (row["voice"], row["consent"]) == ("Marta", shown["consent"]["id"])
    both = run_command(
        [*speak, "-o", str(tmp_path / "x.wav"), "--reference", own, "--reference-text", "hello"], catch=True
    )
    assert "not both" in str(both.exception)

    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"text": "one"}) + "\n")
    said = ["speak-lines", str(lines), "-m", model, "--device", "cpu", "--max-seconds", "0.4", "--voice", "Marta"]
    assert run_command([*said, "-o", str(tmp_path / "lines")], catch=True).exit_code == 0
    assert list(read_log())[-1]["consent"] == shown["consent"]["id"]

    assert run_command(["voice", "remove", "Marta"], catch=True).exit_code == 0
    assert VoiceStore().list_voices() == []
    assert VoiceStore().list_consents() == []
    gone = run_command([*speak, "-o", str(tmp_path / "gone.wav")], catch=True)
    assert "myna voice list" in gone.exception.hint  # type: ignore[union-attr]
