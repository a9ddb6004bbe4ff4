"""Corpora of many people: learners that are known, and lists of single words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

import crowd_corpora
from codec_training.recordings import decode, recordings
from corpus_making.loudness import Samples
from corpus_making.real_lines import COMMANDS, is_word_list
from myna.core.errors import DataError

RATE = crowd_corpora.FILE_RATE


def word(start: float, end: float, noise: float = 1e-4, seconds: float = 1.0) -> Samples:
    rng, samples = np.random.default_rng(0), np.zeros(round(seconds * RATE))
    samples[round(start * RATE) : round(end * RATE)] = 0.2 * rng.standard_normal(round((end - start) * RATE))
    return np.asarray(samples + noise * rng.standard_normal(len(samples)), np.float32)


def test_only_whole_words_without_noise_are_taken() -> None:
    found = crowd_corpora.whole_word(word(0.3, 0.8))
    assert found is not None
    snr, samples = found
    assert 55 < snr < 75 and abs(len(samples) / RATE - (0.5 + sum(crowd_corpora.MARGINS))) < 0.03
    for poor in (word(0.0, 0.5), word(0.6, 1.0), word(0.4, 0.45), word(0.05, 0.95), word(0.3, 0.8, noise=0.03)):
        assert crowd_corpora.whole_word(poor) is None
    assert crowd_corpora.whole_word(np.zeros(RATE, np.float32)) is None


def test_words_of_a_speaker_become_lists(tmp_path: Path) -> None:
    folder = tmp_path / "speech_commands"
    names = sorted(COMMANDS)
    for name in (*names, "_background_noise_"):
        (folder / name).mkdir(parents=True)
    for name in names[:14]:
        soundfile.write(folder / name / "0a1b2c3d_nohash_0.wav", word(0.3, 0.8), RATE)
    for name in names[:5]:  # enough for one list, which would have no reference
        soundfile.write(folder / name / "ffffffff_nohash_0.wav", word(0.3, 0.8), RATE)
    (folder / names[20] / "0a1b2c3d_nohash_1.wav").write_bytes(b"")
    report = crowd_corpora.write_corpus(crowd_corpora.commands(folder, 1), tmp_path / "out", "en-commands")
    made = list(recordings(tmp_path / "out" / "en-commands"))
    assert "1 people" in report and 2 <= len(made) <= 3 and {one.speaker for one in made} == {"command-0a1b2c3d"}
    said = [one.text.lower().rstrip(".").split(", ") for one in made]
    assert all(4 <= len(words) <= 6 and is_word_list(one.text) for words, one in zip(said, made, strict=True))
    assert len({word for words in said for word in words}) == sum(map(len, said)), "each recording once"
    for words, one in zip(said, made, strict=True):
        assert abs(len(decode(one.data, 24_000)) / 24_000 - 0.72 * len(words)) < 0.2
    with pytest.raises(DataError, match=r"speech_commands_v0\.01"):
        next(crowd_corpora.commands(tmp_path / "out", 1))


def test_learners_are_taken_whose_names_are_known(tmp_path: Path) -> None:
    known, checkout = tmp_path / "en-real", tmp_path / "speechocean762"
    known.mkdir()
    row = {"id": "so762-000010011", "speaker": "so762-0001"}
    pq.write_table(pa.Table.from_pylist([row]), known / "part-0.parquet")
    clips = {"000010011": "0001", "000010035": "0001", "000020001": "0002"}
    for part in ("train", "test"):
        (checkout / part).mkdir(parents=True)
        some = clips if part == "train" else {}
        tables = {"utt2spk": dict(some), "text": dict.fromkeys(some, "WE CALL IT BEAR")}
        tables["wav.scp"] = {name: f"WAVE/{name}.WAV" for name in some}
        for name, table in tables.items():
            (checkout / part / name).write_text("".join(f"{key}\t{value}\n" for key, value in table.items()))
    (checkout / "WAVE").mkdir()
    for name in clips:
        soundfile.write(checkout / "WAVE" / f"{name}.WAV", word(0.3, 0.8), RATE)
    assert [(one["id"], one["text"]) for one in crowd_corpora.learners(checkout, known)] == [
        ("so762-000010035", "We call it bear")
    ]
    with pytest.raises(DataError, match=r"github\.com/jimbozhang"):
        list(crowd_corpora.learners(tmp_path, known))
