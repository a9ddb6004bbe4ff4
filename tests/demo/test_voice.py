"""Whose recordings a demo takes, and which of them it keeps to judge by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from myna.audio.files import check, write
from myna.data.utterance import Span, Utterance
from myna.demo import voice as demo_voice
from myna.demo.voice import BUNDLED, choose, samples_of
from myna.errors import DataError

RATE = 16_000


def recordings(folder: Path, count: int, *, speaker: str = "ann", seconds: float = 2.0) -> list[Utterance]:
    made = []
    for number in range(count):
        audio = folder / f"{speaker}-{number}.wav"
        write(audio, np.full(round((seconds + number / 10) * RATE), 0.1, np.float32), RATE)
        made.append(Utterance(f"{speaker}-{number}", audio, f"Line number {number} of {speaker}.", speaker))
    return made


def ids(utterances: tuple[Utterance, ...]) -> list[str]:
    return [utterance.id for utterance in utterances]


@pytest.mark.parametrize(("count", "kept"), [(8, 3), (30, 3), (50, 5), (100, 8)])
def test_a_tenth_is_kept_but_at_least_three_and_at_most_eight(tmp_path: Path, count: int, kept: int) -> None:
    chosen = choose(recordings(tmp_path, count, seconds=1.0), "here", seed=0)
    assert len(chosen.held_out) == kept
    assert sorted(ids(chosen.train) + ids(chosen.held_out)) == sorted(f"ann-{number}" for number in range(count))
    assert chosen.reference in chosen.train


def test_too_few_clips_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"here holds 7 clips .* wants 8") as caught:
        choose(recordings(tmp_path, 7), "here", seed=0)
    assert "myna demo" in caught.value.hint


def test_the_same_words_again_are_no_clip_more(tmp_path: Path) -> None:
    clips = recordings(tmp_path, 9)
    again = [replace(clip, id=f"{clip.id}-again", text=clip.text.upper()) for clip in clips]
    with pytest.raises(DataError, match="holds 5 clips"):
        choose(clips[:5] + again[:5], "here", seed=0)
    chosen = choose(clips + again, "here", seed=0)
    words = {clip.text.lower() for clip in chosen.held_out}
    assert len(words) == len(chosen.held_out), "one clip of each line is judged by"
    assert not words & {clip.text.lower() for clip in chosen.train}, "and none is learned from"


def test_the_seed_chooses(tmp_path: Path) -> None:
    clips = recordings(tmp_path, 20)
    assert choose(clips, "here", seed=1) == choose(clips, "here", seed=1)
    assert len({tuple(ids(choose(clips, "here", seed=seed).held_out)) for seed in range(6)}) > 3


def test_clips_of_other_lengths_and_speakers_are_left_out_and_named(tmp_path: Path) -> None:
    clips = recordings(tmp_path, 10) + recordings(tmp_path, 3, speaker="bob")
    clips += [replace(clip, id="short", text="Too short.", span=Span(0.0, 0.5)) for clip in clips[:1]]
    chosen = choose(clips, "here", seed=0)
    assert chosen.speaker == "ann"
    assert not [id for id in ids(chosen.train) + ids(chosen.held_out) if id.startswith(("bob", "short"))]
    assert any("2 speakers" in note for note in chosen.notes) and any("1 clips are not" in n for n in chosen.notes)


def test_hours_of_recordings_are_cut_to_what_a_demo_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_voice, "ENOUGH", 20.0)
    chosen = choose(recordings(tmp_path, 20), "here", seed=0)
    assert 12 < chosen.seconds <= 20
    assert any("left out" in note for note in chosen.notes)


def test_what_the_source_marks_as_held_out_is(tmp_path: Path) -> None:
    clips = recordings(tmp_path, 12)
    clips[4:6] = [replace(clip, extras={"held_out": True}) for clip in clips[4:6]]
    assert ids(choose(clips, "here", seed=0).held_out) == ["ann-4", "ann-5"]


def test_a_named_reference_does_not_cross_the_split(tmp_path: Path) -> None:
    clips = [replace(clip, extras={"references": ["ann-0"], "scene": "a hall"}) for clip in recordings(tmp_path, 10)]
    for clip in choose(clips, "here", seed=0).train:
        assert clip.references is None and clip.extras["scene"] == "a hall"


def test_the_reference_is_the_clip_nearest_to_six_seconds(tmp_path: Path) -> None:
    clips = recordings(tmp_path, 10) + recordings(tmp_path, 0)
    long = tmp_path / "long.wav"
    write(long, np.full(6 * RATE, 0.1, np.float32), RATE)
    clips.append(Utterance("long", long, "A long one.", "ann", extras={}))
    marked = [replace(clip, extras={"held_out": clip.id in ("ann-1", "ann-2")}) for clip in clips]
    assert choose(marked, "here", seed=0).reference.id == "long"


def test_nothing_to_learn_from_is_said() -> None:
    with pytest.raises(DataError, match="nothing to learn from"):
        choose([], "here", seed=0)


def test_a_span_is_read_as_such(tmp_path: Path) -> None:
    clip = replace(recordings(tmp_path, 1)[0], span=Span(0.5, 1.5))
    assert len(samples_of(clip, 24_000)) == 24_000


# The voice that comes with Myna


def test_the_bundled_voice_is_about_three_minutes_small_and_whole() -> None:
    lines = [json.loads(line) for line in (BUNDLED / "manifest.jsonl").read_text(encoding="utf-8").splitlines()]
    files = {path.name: path.stat().st_size for path in BUNDLED.iterdir()}
    assert {line["audio"] for line in lines} == {name for name in files if name.endswith(".opus")}
    assert sum(files.values()) <= 3_000_000
    utterances = [Utterance.from_json(line, BUNDLED) for line in lines]
    lengths = {utterance.id: check(utterance.audio).seconds for utterance in utterances}
    assert 150 <= sum(lengths.values()) <= 240 and all(2 <= seconds <= 8 for seconds in lengths.values())
    chosen = choose(utterances, "the bundled voice", seed=0)
    assert len(chosen.train) >= 35 and len(chosen.held_out) == 10 and not chosen.notes
    assert chosen.language == "en"
    assert "Apache License" in (BUNDLED / "NOTICE").read_text(encoding="utf-8")
