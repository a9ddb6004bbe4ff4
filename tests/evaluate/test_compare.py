"""`myna compare` from end to end on tiny models: what is said, what is taken over, what listeners answer."""

from __future__ import annotations

import http.client
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from myna.core.errors import ConfigError, DataError, MynaError
from myna.core.io import file_hash
from myna.evaluate import items, listening
from myna.evaluate.comparison import Comparison, compare_systems
from myna.evaluate.evaluation import EvaluationSettings
from myna.evaluate.listening import FORMAT, TIE, local_page_server
from myna.evaluate.metrics import BASE, REAL
from myna.evaluate.pipeline import SpeechSystem, read_item_scores
from tests.command_line import run_command
from tests.tone_corpus import recipe, write_recordings


def myna(*words: object) -> str:
    result = run_command([str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two speakers, a tiny model, two runs, of which the first is evaluated."""
    folder = tmp_path_factory.mktemp("runs_folder")
    write_recordings(folder / "recordings")
    myna("model", "tiny", "-o", folder / "model")
    myna("prepare", folder / "recordings", "-o", folder / "prepared", "-m", folder / "model", "--device", "cpu")
    for name, steps in (("one", 2), ("two", 4)):
        tree = recipe(folder, steps=steps)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        myna("train", folder / f"{name}.yaml", "-o", folder / name)
    words = ("--data", folder / "prepared", "--limit", 3, "--device", "cpu", "--language", "en")
    myna("evaluate", folder / "one", *words)
    return folder


def compare(runs_folder: Path, *subjects: str, out: Path | None = None) -> Comparison:
    settings = EvaluationSettings(data=runs_folder / "prepared", limit=3, device="cpu", language="en")
    return compare_systems(subjects, settings, out=out or runs_folder / "compared")


@pytest.fixture(scope="module")
def made(runs_folder: Path) -> dict[str, Any]:
    words = ("--data", runs_folder / "prepared", "--limit", 3, "--device", "cpu", "--language", "en", "--json")
    told: dict[str, Any] = json.loads(
        myna("compare", runs_folder / "one", runs_folder / "two", "-o", runs_folder / "compared", *words)
    )
    return told


def test_two_runs_are_compared_on_the_same_items(runs_folder: Path, made: dict[str, Any]) -> None:
    assert made["names"] == ["one", "two"] and list(made["systems"]) == [REAL, "one", "two"]
    assert list(made["differences"]) == [REAL, "two"] and made["items"] == 3
    assert "no ASR model was named" in made["missing"]["wer"]
    assert {frozenset(trial["systems"]) for trial in made["trials"]} == {frozenset(("one", "two"))}
    page = (runs_folder / "compared" / "compare.html").read_text(encoding="utf-8")
    assert "Listen without knowing who it is" in page and page.count("data:audio/flac") >= 2 * len(made["trials"])


def test_audio_and_scores_of_evaluations_are_reused(
    runs_folder: Path, made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoken: list[str] = []
    speak = SpeechSystem.speak

    def counted(self: SpeechSystem, items: Any, batch_size: int) -> Any:
        spoken.extend([self.name] * len(items))
        return speak(self, items, batch_size)

    monkeypatch.setattr(SpeechSystem, "speak", counted)
    fresh = compare(runs_folder, str(runs_folder / "one"), f"untuned={runs_folder / 'model'}", out=tmp_path)
    assert spoken == [], "the run and its base were both evaluated, under other names"
    assert fresh.names == ["one", "untuned"]
    assert [row.audio_hash for row in fresh.systems[0].rows] == [
        row.audio_hash for row in read_item_scores(runs_folder / "one" / "evaluation" / "items" / "one.parquet")
    ]
    assert all(
        (tmp_path / row.audio).is_file() and row.system == "untuned" for row in fresh.systems[1].rows if row.audio
    )
    compare(runs_folder, str(runs_folder / "one"), str(runs_folder / "two"), out=tmp_path / "new")
    assert spoken == ["two"] * 3, "nobody has evaluated this one"
    spoken.clear()
    again = compare(runs_folder, str(runs_folder / "one"), str(runs_folder / "two"), out=tmp_path / "new")
    assert spoken == [] and again.id == made["comparison"]


def test_evaluations_are_compared_without_opening_any_weights(
    runs_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpeechSystem, "engine", property(lambda _: pytest.fail("weights are not needed")))
    folder = runs_folder / "one" / "evaluation"
    found = compare_systems([f"tuned={folder}", f"{folder}:base"], EvaluationSettings(), out=tmp_path)
    assert found.names == ["tuned", BASE] and found.real is not None and list(found.differences) == [REAL, BASE]
    assert (found.folder / "compare.html").is_file() and not (tmp_path / "audio").exists()
    against_real = compare_systems([str(folder), f"{folder}:real"], EvaluationSettings(), out=tmp_path / "real")
    assert against_real.names == ["one", REAL] and against_real.real is None, "a recording beside itself is no secret"


def test_subjects_that_cannot_be_compared_are_refused(runs_folder: Path, tmp_path: Path) -> None:
    folder = runs_folder / "one" / "evaluation"
    evaluation, two = str(folder), str(runs_folder / "two")
    wrong: list[tuple[list[str], dict[str, Any], type[MynaError], str]] = [
        ([evaluation], {}, ConfigError, "nothing to compare with"),
        ([evaluation, evaluation], {}, ConfigError, "two have one name"),
        ([evaluation, f"{folder}:nobody"], {}, DataError, "holds no nobody, but real, round_trip, one, base"),
        ([evaluation, f"x={folder}"], {"out": folder}, ConfigError, "is the folder of an evaluation"),
        ([evaluation, two], {"settings": EvaluationSettings(seed=1), "out": tmp_path}, ConfigError, "different seeds"),
    ]
    for subjects, options, kind, message in wrong:
        with pytest.raises(kind, match=message):
            compare_systems(subjects, **{"settings": EvaluationSettings(), **options})
    with pytest.raises(ConfigError, match="made already"):
        run_command(["compare", "a", "b", "--preferences", "x.json"])


def test_a_clip_that_is_gone_is_named_with_the_likely_cause(
    runs_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`myna curate` may write clips anew under other names after the data was prepared."""
    monkeypatch.setattr(items, "_file_key", file_hash)  # another process knows no hash yet
    clip = sorted((runs_folder / "recordings").rglob("*.wav"))[0]
    clip.rename(tmp_path / "moved.wav")
    try:
        with pytest.raises(DataError, match=f"the recording of .* is not there: {clip}") as caught:
            compare(runs_folder, f"again={runs_folder / 'one'}", str(runs_folder / "two"), out=tmp_path / "out")
    finally:
        (tmp_path / "moved.wav").rename(clip)
    assert "myna curate" in caught.value.hint and "myna prepare" in caught.value.hint


def test_evaluations_in_another_language_are_not_compared(runs_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "evaluation"
    words = ("--data", runs_folder / "prepared", "--limit", 2, "--device", "cpu", "--language", "ar", "--out", other)
    myna("evaluate", runs_folder / "model", *words)
    with pytest.raises(DataError, match="no item that all have spoken"):
        compare_systems(
            [str(runs_folder / "one" / "evaluation"), str(other)], EvaluationSettings(), out=tmp_path / "out"
        )


def answers(made: dict[str, Any], prefer: str, ties: int = 0) -> dict[str, Any]:
    """Answers of one listener, in the form in which the page saves them."""
    chosen = {}
    for number, trial in enumerate(made["trials"]):
        choice = TIE if number < ties else trial["sounds"][trial["systems"].index(prefer)]
        chosen[trial["id"]] = {"choice": choice, "at": "2026-11-15T10:00:00.000Z"}
    return {"format": FORMAT, "listener": {"id": f"{prefer}00000{ties}", "name": f"for {prefer}"}, "answers": chosen}


def test_answers_of_listeners_add_up_in_terminal_and_file(
    runs_folder: Path, made: dict[str, Any], tmp_path: Path
) -> None:
    compared = runs_folder / "compared"
    assert "There are no answers of listeners yet" in myna("compare", compared)
    count = len(made["trials"])
    for name, told in (("anna", answers(made, "two")), ("ben", answers(made, "two", ties=1))):
        (tmp_path / f"{name}.json").write_text(json.dumps(told))
    files = [word for name in ("anna", "ben") for word in ("--preferences", tmp_path / f"{name}.json")]
    shown = " ".join(myna("compare", compared, *files).split())
    assert f"one 0, two {2 * count - 1}, no difference 1" in shown and "p = 0.0625" in shown
    found = json.loads((compared / "compare.json").read_text(encoding="utf-8"))
    assert found["systems"] == made["systems"], "figures stay as they were"
    pair = found["preferences"]["pairs"][0]
    assert pair["systems"] == ["one", "two"] and pair["wins"] == [0, 2 * count - 1] and pair["ties"] == 1
    assert len(found["preferences"]["items"]) == count and len(found["preferences"]["listeners"]) == 2
    for item in found["preferences"]["items"]:
        assert sum(item["wins"]) + item["ties"] == 2 and item["low"] < item["high"]
    again = json.loads(myna("compare", compared, "--preferences", tmp_path / "anna.json", "--json"))
    assert again["preferences"] == found["preferences"], "the same answers do not count twice"
    remade = compare(runs_folder, str(runs_folder / "one"), str(runs_folder / "two"))
    kept = json.loads((compared / "compare.json").read_text(encoding="utf-8"))
    assert kept["preferences"] == found["preferences"] and remade.id == found["comparison"], "made again, they stay"


def test_a_served_page_saves_answers_as_they_come(runs_folder: Path, made: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "compared"
    folder.mkdir()
    for name in ("compare.json", "compare.html"):
        (folder / name).write_bytes((runs_folder / "compared" / name).read_bytes())
    replies: list[tuple[int, bytes]] = []
    running = local_page_server

    def serving(*arguments: Any) -> Any:
        """The server, and somebody who answers and then leaves."""
        opened = running(*arguments)

        def answer() -> None:
            for body in (json.dumps(answers(made, "one")).encode(), b"{}"):
                connection = http.client.HTTPConnection("127.0.0.1", opened.server_port, timeout=10)
                connection.request("POST", "/preferences", body, {"Content-Type": "application/json"})
                reply = connection.getresponse()
                replies.append((reply.status, reply.read()))
                connection.close()
            opened.shutdown()

        threading.Thread(target=answer).start()
        return opened

    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        patch.setattr(listening, "local_page_server", serving)
        shown = " ".join(myna("compare", folder, "--serve", "--port", 0).split())
    assert [status for status, _ in replies] == [200, 400] and b"holds no preferences" in replies[1][1]
    assert f"for one: {len(made['trials'])} answers" in shown and "http://127.0.0.1:" in shown
    found = json.loads((folder / "compare.json").read_text(encoding="utf-8"))["preferences"]
    assert found["pairs"][0]["wins"] == [len(made["trials"]), 0]
