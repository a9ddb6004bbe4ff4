"""Real speech for the language model: pieces at pauses, understood recordings, variants, poor references."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

import augment_real
from codec_training.recordings import Recording
from corpus_making import real_lines
from corpus_making.corpus_folder import CorpusFolder
from corpus_making.held_out import is_held_out
from corpus_making.loudness import Samples
from corpus_making.real_lines import HeardRecordings, HeardWord, pieces, word_times
from myna.core.errors import DataError
from myna.data.manifest import read_manifest
from myna.listen.asr import TimedTranscript, TimedWord

RATE = 24_000


def speech(seconds: float, seed: int = 0) -> Samples:
    noise = np.random.default_rng(seed).standard_normal(round(seconds * RATE))
    return np.asarray(0.1 * noise, np.float32)


def recording(speaker: str, id: str, text: str, seconds: float) -> Recording:
    file = io.BytesIO()
    soundfile.write(file, speech(seconds, len(id)), RATE, format="FLAC")
    return Recording(id, speaker, text, file.getvalue())


class OneWordASR:
    """Hears `word` half a second after every silence, where speech begins."""

    def __init__(self) -> None:
        self.calls: list[float] = []

    def transcribe_words(self, samples: Samples, sample_rate: int, language: str) -> TimedTranscript:
        assert language == "en"
        self.calls.append(len(samples) / sample_rate)
        loud = np.abs(samples) > 1e-3
        begun = np.flatnonzero(loud & ~np.concatenate([np.zeros(2400, bool), loud[:-2400]])) / sample_rate
        starts = [float(time) for number, time in enumerate(begun) if number == 0 or time - begun[number - 1] > 0.5]
        return TimedTranscript(tuple(TimedWord(" word", start, start + 0.4) for start in starts))


def test_clips_are_heard_together_and_words_are_those_of_their_clip() -> None:
    silence = np.zeros(RATE, np.float32)
    clips = [np.concatenate([silence, speech(8.0, seed), silence]) for seed in range(4)]
    asr = OneWordASR()
    times = word_times(clips, asr)  # type: ignore[arg-type]
    assert len(asr.calls) == 2 and max(asr.calls) <= 30, "without their silence three of them fit into a window"
    assert [len(words) for words in times] == [1] * 4
    assert all(words[0].start == pytest.approx(1.0, abs=0.05) for words in times)


def test_a_long_recording_is_cut_in_pauses() -> None:
    words = [HeardWord(f" w{second}", second, second + 0.7) for second in range(14)]
    cut = list(pieces(words, 14.5))
    assert " ".join(text for text, _, _ in cut) == " ".join(word.text.strip() for word in words)
    assert [start for _, start, _ in cut] == [0.0, *(end for _, _, end in cut[:-1])] and cut[-1][2] == 14.5
    assert all(real_lines.PIECE_SECONDS[0] <= end - start <= real_lines.PIECE_SECONDS[1] for _, start, end in cut)
    hurried = [HeardWord(f" w{number}", 0.5 * number, 0.5 * number + 0.49) for number in range(20)]
    assert len(list(pieces(hurried, 10.0))) == 1, "where there is no pause, nothing is cut"
    assert list(pieces([], 3.0)) == []


def test_speakers_and_variants_are_written_with_poor_references_and_go_on(tmp_path: Path) -> None:
    texts = ("the old bird", "sang a song", "not what was said", "in the morning")
    names = [f"learner{number}" for number in range(40)]
    held_out = next(name for name in names if is_held_out(name))
    learners = [*[name for name in names if not is_held_out(name)][:7], held_out]
    people = {
        name: [recording(name, f"{name}-{number}", text, 2.0 + number) for number, text in enumerate(texts)]
        for name in learners
    }
    people["reader"] = [recording("reader", "reader-long", "one two three four five six", 12.0)]
    spoken = ("one", "two", "three", "four", "five", "six")
    words = [(f" {word}", 2.0 * number, 2.0 * number + 1.2) for number, word in enumerate(spoken)]
    heard = {"reader-long": {"word_error_rate": 0.0, "words": words}}
    for found in people.values():
        for one in found[: len(texts)]:
            rate = 0.9 if one.text == texts[2] else 0.0
            heard.setdefault(one.id, {"word_error_rate": rate, "words": []})
    file, out = tmp_path / "words.json", tmp_path / "out"
    file.write_text(json.dumps(heard))
    unheard = [recording("nobody", f"nobody-{number}", "what", 2.0) for number in range(2)]
    for found in (*people.values(), unheard):
        augment_real.augment_speaker(augment_real.Speaker(found, 2), file, out)
    counts = CorpusFolder(out).finish()
    lines = read_manifest(out / "train" / "manifest.jsonl")
    assert counts == {"train": len(lines), "held_out": 4} and not any("nobody" in one.id for one in lines)
    speakers = {one.speaker for one in lines}
    assert {name.partition("~")[0] for name in speakers} == people.keys() - {held_out}
    assert len(speakers) == 3 * (len(people) - 1) and not any(map(is_held_out, speakers))
    assert not any(one.is_target for one in lines if one.text == texts[2]), "Whisper did not hear that"
    understood = [one for one in lines if one.text in texts and one.text != texts[2]]
    assert 0.15 < sum(not one.is_target for one in understood) / len(understood) < 0.55
    assert {one.text for one in lines if one.speaker.startswith("reader")} != {"one two three four five six"}
    before = {path: path.read_bytes() for path in out.rglob("*.wav")}
    for found in people.values():
        augment_real.augment_speaker(augment_real.Speaker(found, 2), file, out)
    assert before == {path: path.read_bytes() for path in out.rglob("*.wav")}


def test_words_are_heard_once_and_kept(tmp_path: Path) -> None:
    found = [recording("anna", "anna-0", "word", 2.0), recording("anna", "anna-1", "other", 2.0)]
    heard = HeardRecordings(tmp_path / "words.json")
    assert not heard.has(found)
    heard.hear(found, OneWordASR())  # type: ignore[arg-type]
    again = HeardRecordings(tmp_path / "words.json")
    assert again.has(found) and [again.is_understood(one) for one in found] == [True, False]
    assert [word.text for word in again.words(found[0])] == [" word"]
    digits = [recording("bert", "bert-0", "Three seven five", 2.0)]
    again.hear(digits, OneWordASR())  # type: ignore[arg-type]
    assert again.is_understood(digits[0]), "which Whisper writes as 375"
    commands = [recording("carl", f"carl-{number}", text, 2.0) for number, text in enumerate(("Up, two, stop.", "Go."))]
    assert again.has(commands) and all(map(again.is_understood, commands)), "of known words, which nobody need hear"
    assert [line.is_target for line in real_lines.real_lines(commands[:1], again)] == [True], "and not cut"
    assert not real_lines.is_word_list("") and not real_lines.is_word_list("Two birds")


def test_people_of_several_corpora_have_the_variants_of_the_first(tmp_path: Path) -> None:
    for name, people in (("learners", ("anna", "bert")), ("readers", ("bert", "carl"))):
        rows = [
            {"id": f"{name}-{speaker}", "speaker": speaker, "text": "word", "audio": {"bytes": b"", "path": ""}}
            for speaker in people
        ]
        (tmp_path / name).mkdir()
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name / "part-0.parquet")
    found = augment_real.read_speakers([f"{tmp_path / 'learners'}=2", str(tmp_path / "readers")])
    by_name = {one.recordings[0].speaker: (len(one.recordings), one.variants) for one in found}
    assert by_name == {"anna": (1, 2), "bert": (2, 2), "carl": (1, augment_real.VARIANTS)}
    with pytest.raises(DataError, match="many is no number"):
        augment_real.read_speakers([f"{tmp_path / 'learners'}=many"])
