"""Systems side by side: the same items or none, metrics by the same scorers, and pairs that reveal no system."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from myna.audio.files import Samples
from myna.core.errors import DataError
from myna.evaluate.comparison import MAX_PEAK, Comparison, build_comparison, comparison_page, match_loudness, speech_rms
from myna.evaluate.items import EvalItem
from myna.evaluate.listening import ComparedSystem
from myna.evaluate.metrics import REAL
from myna.evaluate.pipeline import Recordings, SystemOutput, score_systems
from tests.evaluate.speech import LINES, RATE, SPEAKERS, FakeSystem, fake_scorers, make_eval_set, poorly, say, well
from tests.report.html_reader import Reader

ATTACK = "</script><script>alert('x')</script>"


def loud(task: EvalItem) -> SystemOutput:
    return SystemOutput(2 * well(task).samples, stopped=True)


@pytest.fixture(scope="module")
def systems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ComparedSystem]:
    folder = tmp_path_factory.mktemp("systems")
    spoken = [Recordings(REAL, RATE), FakeSystem("good", well), FakeSystem("poor", poorly), FakeSystem("loud", loud)]
    judged = score_systems(make_eval_set(folder), spoken, fake_scorers(dnsmos="not installed"), folder / "out")  # type: ignore[arg-type]
    return {name: ComparedSystem(name, rows, folder / "out") for name, rows in judged.items()}


def compared(systems: dict[str, ComparedSystem], *names: str, **options: Any) -> Comparison:
    chosen = [systems[name] for name in names]
    return build_comparison(chosen, systems[REAL], **{"folder": Path("unused"), "seed": 0, "trials": 20, **options})


def test_differences_are_from_the_first_system_on_common_items(systems: dict[str, ComparedSystem]) -> None:
    found = compared(systems, "good", "poor")
    assert list(found.estimates) == [REAL, "good", "poor"] and list(found.differences) == [REAL, "poor"]
    worse = found.differences["poor"]["wer"]
    assert worse.n == len(LINES) * len(SPEAKERS) and worse.low is not None and worse.low > 0
    row = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert row["names"] == ["good", "poor"] and row["differences"]["poor"]["wer"]["mean"] == worse.mean
    assert row["preferences"]["pairs"][0]["wins"] == [0, 0]


def changed(side: ComparedSystem, name: str, **values: str) -> ComparedSystem:
    """Copy of a system with other values in all of its rows."""
    return ComparedSystem(name, [replace(row, **values) for row in side.rows], side.folder)  # type: ignore[arg-type]


def test_items_match_only_with_equal_texts_and_references(systems: dict[str, ComparedSystem]) -> None:
    good, poor = systems["good"], systems["poor"]
    cut = ComparedSystem("poor", [*changed(poor, "poor", item_key="another").rows[:4], *poor.rows[4:]], poor.folder)
    found = build_comparison([good, cut], None, folder=Path("unused"), seed=0, trials=20)
    assert len(found.systems[0].rows) == len(found.systems[1].rows) == len(poor.rows) - 4
    assert "18 items, of which 14 are compared" in found.notes[0]
    assert [row.id for row in found.systems[0].rows] == [row.id for row in found.systems[1].rows]
    with pytest.raises(DataError, match="no item that all have spoken") as caught:
        build_comparison([good, changed(poor, "old", item_key="")], None, folder=Path("unused"), seed=0, trials=1)
    assert "--seed" in caught.value.hint


def test_metrics_of_different_scorers_are_not_compared(systems: dict[str, ComparedSystem]) -> None:
    other = changed(systems["poor"], "poor", asr_model="another Whisper")
    found = build_comparison(
        [systems["good"], other],
        systems[REAL],
        folder=Path("unused"),
        seed=0,
        trials=2,
        missing={"dnsmos": "not installed"},
    )
    assert "wer" not in found.estimates["good"] and "wer" not in found.differences["poor"]
    assert "another Whisper" in found.missing["wer"] and found.missing["dnsmos"] == "not installed"
    assert found.estimates["good"]["similarity"].n
    assert "another Whisper" in comparison_page(found)


def test_every_pair_has_the_same_items_and_each_system_comes_first_equally_often(
    systems: dict[str, ComparedSystem],
) -> None:
    found = compared(systems, "good", "poor", "loud", trials=10)
    assert Counter(tuple(sorted(trial.systems)) for trial in found.trials) == {
        ("good", "poor"): 10,
        ("good", "loud"): 10,
        ("loud", "poor"): 10,
    }
    assert set(Counter(trial.systems for trial in found.trials).values()) == {5}
    assert len({trial.item for trial in found.trials}) == 10
    assert len({trial.id for trial in found.trials}) == 30


def test_the_order_follows_from_the_seed(systems: dict[str, ComparedSystem]) -> None:
    once, again, other = (compared(systems, "good", "poor", seed=seed).trials for seed in (0, 0, 1))
    assert once == again and once != other
    assert {trial.id for trial in once} == {trial.id for trial in other}, "answers count whatever the order was"
    first = [trial.systems[0] for trial in once]
    assert first != sorted(first), "neither comes first all the time"
    few = compared(systems, "good", "poor", trials=3).trials
    assert {trial.id for trial in few} < {trial.id for trial in once}, "more lines keep the answers that are there"


def test_items_with_identical_audio_are_not_in_the_test(systems: dict[str, ComparedSystem]) -> None:
    poor = systems["poor"]
    twin = ComparedSystem("twin", [*poor.rows[:3], *systems["good"].rows[3:]], poor.folder)
    found = build_comparison([poor, twin], None, folder=Path("unused"), seed=0, trials=20)
    assert len(found.trials) == len(poor.rows) - 3 and "the very same audio for 3 items" in found.notes[0]
    same = build_comparison(
        [poor, ComparedSystem("same", poor.rows, poor.folder)], None, folder=Path("unused"), seed=0, trials=20
    )
    assert same.trials == () and "all items sound the same" in comparison_page(same)


def test_the_page_hides_system_names_and_loads_nothing(systems: dict[str, ComparedSystem]) -> None:
    named = [
        ComparedSystem(name, systems[key].rows, systems[key].folder)
        for name, key in (("secret-one", "good"), (ATTACK, "poor"))
    ]
    rows = [replace(row, text=ATTACK) if number == 0 else row for number, row in enumerate(named[0].rows)]
    named[0] = ComparedSystem("secret-one", rows, named[0].folder)
    shown = comparison_page(build_comparison(named, systems[REAL], folder=Path("unused"), seed=0, trials=18))
    read = Reader(shown)
    assert read.tags.count("script") == 2, "the data and our own"
    start = shown.index('<section class="card blind"')
    listening = shown[start : shown.index("</section>", start)]
    assert "secret-one" not in listening and "alert" not in listening
    addresses = [value or "" for name, value in read.attributes if name in ("src", "href")]
    assert all(address.startswith(("#", "data:")) for address in addresses)
    policy = next(value for name, value in read.attributes if name == "content" and value and "default-src" in value)
    assert policy.startswith("default-src 'none'") and policy.endswith("connect-src 'self'")
    data = json.loads(shown.split('id="blind-data">', 1)[1].split("</script>", 1)[0])
    assert len(data["pairs"]) == 18 and all(sound.startswith("data:audio/flac") for sound in data["sounds"].values())
    assert {name for pair in data["pairs"] for name in pair["names"]} == {"secret-one", ATTACK}
    assert not any("secret" in name or "alert" in name for name in data["sounds"])
    assert len(data["intervals"]) == 19 and data["intervals"][18][18] == pytest.approx(0.025 ** (1 / 18), abs=1e-4)
    assert all(pair["real"] in data["sounds"] for pair in data["pairs"])


def test_a_system_with_an_empty_clip_stays_in_the_test(systems: dict[str, ComparedSystem]) -> None:
    silent = changed(systems["good"], "silent", audio="", audio_hash="none")
    found = build_comparison([systems["good"], silent], None, folder=Path("unused"), seed=0, trials=2)
    data = json.loads(comparison_page(found).split('id="blind-data">', 1)[1].split("</script>", 1)[0])
    for pair in data["pairs"]:
        silent_one = pair["sounds"][pair["names"].index("silent")]
        assert data["sounds"][silent_one] is None and pair["real"] is None


def tone(level: float) -> Samples:
    return np.asarray(level * say("hello there", 150.0), np.float32)


@pytest.mark.parametrize("levels", [(1.0, 0.1), (0.01, 0.02), (1.0, 1.0)])
def test_sounds_are_equally_loud_and_not_clipped(levels: tuple[float, float]) -> None:
    spike = tone(levels[1])
    spike[100] = 40 * np.abs(spike).max()
    pause = np.zeros(3 * RATE, np.float32)
    sounds = {"one": np.concatenate([tone(levels[0]), pause]), "other": spike, "none": np.zeros(0, np.float32)}
    made = match_loudness(sounds)
    assert speech_rms(made["one"]) == pytest.approx(speech_rms(made["other"]), rel=1e-4)
    assert max(np.abs(sound).max(initial=0) for sound in made.values()) <= MAX_PEAK + 1e-6
    assert not len(made["none"]) and np.array_equal(match_loudness({"x": pause})["x"], pause)
