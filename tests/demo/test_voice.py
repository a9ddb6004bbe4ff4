"""Clips that a demo takes, and the texts that it holds out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from myna.audio.files import check_audio, write_audio
from myna.core.errors import DataError
from myna.data.manifest import Span, Utterance
from myna.data.split import TEXTS, TRAIN, DatasetSplit, assign_subsets
from myna.demo import run as demo_voice
from myna.demo.run import BUNDLED, DemoVoice, clean_reference, select_reference, select_voice
from myna.evaluate.items import clip_seconds, load_clip

RATE = 16_000


def recordings(folder: Path, count: int, *, speaker: str = "ann", seconds: float = 2.0) -> list[Utterance]:
    made = []
    for number in range(count):
        audio = folder / f"{speaker}-{number}.wav"
        write_audio(audio, np.full(round((seconds + number / 10) * RATE), 0.1, np.float32), RATE)
        made.append(Utterance(f"{speaker}-{number}", audio, f"Line number {number} of {speaker}.", speaker))
    return made


def split(voice: DemoVoice, folder: Path, seed: int = 0) -> tuple[list[str], list[str]]:
    """Ids of the clips to train on and of those held out."""
    folder.mkdir(exist_ok=True)
    voice.write_marks(folder, seed)
    result = assign_subsets(
        voice.clips,
        lambda clip: clip.id,
        speakers=0,
        texts=voice.held_out_texts(),
        seed=seed,
        previous=DatasetSplit.read(folder),
    )
    return result.ids(TRAIN), result.ids(TEXTS)


@pytest.mark.parametrize(("count", "held_out"), [(8, 3), (30, 3), (50, 5), (100, 8)])
def test_a_tenth_is_held_out_but_at_least_three_and_at_most_eight(tmp_path: Path, count: int, held_out: int) -> None:
    voice = select_voice(recordings(tmp_path, count, seconds=1.0), "here", seed=0)
    assert voice.held_out_texts() == held_out
    train, texts = split(voice, tmp_path / "data")
    assert len(texts) == held_out and sorted(train + texts) == sorted(f"ann-{number}" for number in range(count))


def test_too_few_clips_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"here holds 7 clips .* wants 8") as caught:
        select_voice(recordings(tmp_path, 7), "here", seed=0)
    assert "myna demo" in caught.value.hint


def test_repeated_texts_count_once(tmp_path: Path) -> None:
    clips = recordings(tmp_path, 9)
    again = [
        replace(clip, id=f"{clip.id}-again", audio=tmp_path / f"again-{clip.audio.name}", text=clip.text.upper())
        for clip in clips
    ]
    for clip, copy in zip(clips, again, strict=True):
        copy.audio.write_bytes(clip.audio.read_bytes())
    with pytest.raises(DataError, match="holds 5 clips"):
        select_voice(clips[:5] + again[:5], "here", seed=0)
    train, texts = split(select_voice(clips + again, "here", seed=0), tmp_path / "data")
    spoken = {clip.id: clip.text.lower() for clip in clips + again}
    assert len({spoken[id] for id in texts}) == 3, "distinct texts are counted"
    assert not {spoken[id] for id in texts} & {spoken[id] for id in train}, "and none of them is trained on"


def test_the_seed_decides_the_held_out_texts(tmp_path: Path) -> None:
    voice = select_voice(recordings(tmp_path, 20), "here", seed=0)
    assert split(voice, tmp_path, seed=1) == split(voice, tmp_path, seed=1)
    assert len({tuple(split(voice, tmp_path, seed=seed)[1]) for seed in range(6)}) > 3


def test_clips_of_other_lengths_and_speakers_are_left_out_and_named(tmp_path: Path) -> None:
    clips = recordings(tmp_path, 10) + recordings(tmp_path, 3, speaker="bob")
    clips += [replace(clip, id="short", text="Too short.", span=Span(0.0, 0.5)) for clip in clips[:1]]
    voice = select_voice(clips, "here", seed=0)
    assert voice.speaker == "ann"
    assert not [clip.id for clip in voice.clips if clip.id.startswith(("bob", "short"))]
    assert any("2 speakers" in note for note in voice.notes) and any("1 clips are not" in n for n in voice.notes)


def test_long_recordings_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_voice, "MAX_TOTAL_SECONDS", 20.0)
    voice = select_voice(recordings(tmp_path, 20), "here", seed=0)
    assert 12 < sum(map(clip_seconds, voice.clips)) <= 20
    assert any("left out" in note for note in voice.notes)


def test_marked_clips_are_held_out(tmp_path: Path) -> None:
    clips = recordings(tmp_path, 12)
    clips[4:6] = [replace(clip, extras={"held_out": True}) for clip in clips[4:6]]
    assert split(select_voice(clips, "here", seed=0), tmp_path / "data")[1] == ["ann-4", "ann-5"]


def test_a_named_reference_does_not_cross_the_split(tmp_path: Path) -> None:
    clips = [replace(clip, extras={"references": ["ann-0"], "scene": "a hall"}) for clip in recordings(tmp_path, 10)]
    for clip in select_voice(clips, "here", seed=0).clips:
        assert clip.references is None and clip.extras["scene"] == "a hall"


def test_the_reference_is_the_clip_nearest_to_six_seconds(tmp_path: Path) -> None:
    clips = recordings(tmp_path, 10)
    long = tmp_path / "long.wav"
    write_audio(long, np.full(6 * RATE, 0.1, np.float32), RATE)
    clips.append(Utterance("long", long, "A long one.", "ann", extras={}))
    assert select_reference(clips).id == "long", "all are as faulty"


def test_a_narrow_band_clip_is_not_the_reference_if_a_better_one_exists(tmp_path: Path) -> None:
    clips = []
    for name, rate, seconds in (("call", 8_000, 6.0), ("studio", 24_000, 4.0)):
        times = np.arange(round(seconds * rate)) / rate
        wave = np.random.default_rng(0).standard_normal(len(times)) * np.where(times % 1.0 < 0.7, 0.1, 1e-4)
        write_audio(tmp_path / f"{name}.wav", wave.astype(np.float32), rate)
        clips.append(Utterance(name, tmp_path / f"{name}.wav", "Some words.", "ann", extras={}))
    assert select_reference(clips).id == "studio"
    assert select_reference(clips[:1]).id == "call" and "telephone" in clean_reference(clips[0]).problems[0]


def test_recordings_without_targets_are_refused() -> None:
    with pytest.raises(DataError, match="nothing to learn from"):
        select_voice([], "here", seed=0)


def test_clips_with_a_span_are_read(tmp_path: Path) -> None:
    clip = replace(recordings(tmp_path, 1)[0], span=Span(0.5, 1.5))
    assert len(load_clip(clip, 24_000)) == 24_000


# The voice that comes with Myna


def test_the_bundled_voice_is_three_minutes_and_complete(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (BUNDLED / "manifest.jsonl").read_text(encoding="utf-8").splitlines()]
    files = {path.name: path.stat().st_size for path in BUNDLED.iterdir()}
    assert {line["audio"] for line in lines} == {name for name in files if name.endswith(".opus")}
    assert sum(files.values()) <= 3_000_000
    utterances = [Utterance.from_json(line, BUNDLED) for line in lines]
    lengths = {utterance.id: check_audio(utterance.audio).seconds for utterance in utterances}
    assert 150 <= sum(lengths.values()) <= 240 and all(2 <= seconds <= 8 for seconds in lengths.values())
    voice = select_voice(utterances, "the bundled voice", seed=0)
    train, held_out = split(voice, tmp_path)
    assert len(train) >= 35 and len(held_out) == 10 and not voice.notes
    assert {clip.language for clip in voice.clips} == {"en"}
    assert "Apache License" in (BUNDLED / "NOTICE").read_text(encoding="utf-8")


def test_the_reference_of_the_bundled_voice_is_as_recorded() -> None:
    lines = [json.loads(line) for line in (BUNDLED / "manifest.jsonl").read_text(encoding="utf-8").splitlines()]
    clips = [clip for clip in (Utterance.from_json(line, BUNDLED) for line in lines) if not clip.extras.get("held_out")]
    reference = select_reference(clips)
    assert reference == min(clips, key=lambda clip: (abs(clip_seconds(clip) - 6.0), clip.id)), (
        "the nearest has no fault"
    )
    cleaned = clean_reference(reference)
    assert cleaned.problems == () and np.array_equal(cleaned.samples, load_clip(reference, 24_000))
