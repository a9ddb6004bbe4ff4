"""Work that is done once: what is known is kept, what is missing is done, what has changed is done again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from myna.errors import ConfigError, DataError
from myna.evaluate.items import EvalItem, EvalSet
from myna.evaluate.pipeline import SystemScores, score_systems
from myna.evaluate.report import page, worst_first
from myna.evaluate.results import Results, file_name, read_rows
from myna.evaluate.summary import summarise
from myna.evaluate.systems import BASE, REAL, Recordings, System, SystemOutput
from tests.evaluate.speech import (
    LINES,
    RATE,
    REFERENCE,
    SPEAKERS,
    LetterEar,
    Puppet,
    ears,
    plan,
    poorly,
    record,
    say,
    well,
)

FEW = ("wren", "heron")


class CountingEar(LetterEar):
    def __init__(self) -> None:
        self.count = 0

    def transcribe(self, *sound: object) -> object:  # type: ignore[override]
        self.count += 1
        return super().transcribe(*sound)  # type: ignore[arg-type]


def test_a_second_time_nothing_is_said_or_heard_again(tmp_path: Path) -> None:
    asked, out = plan(tmp_path, FEW), tmp_path / "out"
    first = score_systems(asked, [Puppet("model", well)], ears(), out)
    again, ear = Puppet("model", well), CountingEar()
    listening = ears()
    object.__setattr__(listening, "words", ear)
    second = score_systems(asked, [again], listening, out)
    assert again.asked == [] and ear.count == 0
    assert second == first
    assert read_rows(out / "lines.parquet") == first.rows["model"]


def test_a_stop_loses_one_batch_at_most(tmp_path: Path) -> None:
    asked, out = plan(tmp_path, FEW), tmp_path / "out"
    said = 0

    def stopped_half_way(task: EvalItem) -> SystemOutput:
        nonlocal said
        said += 1
        if said > 7:
            raise KeyboardInterrupt
        return well(task)

    with pytest.raises(KeyboardInterrupt):
        score_systems(asked, [Puppet("model", stopped_half_way)], ears(), out, batch=2)
    kept = set(Results.of(out, "model").rows)
    assert len(kept) == 6
    model = Puppet("model", well)
    judged = score_systems(asked, [model], ears(), out, batch=2)
    assert sorted(model.asked) == sorted({task.id for task in asked.tasks} - kept)
    whole = score_systems(asked, [Puppet("model", well)], ears(), tmp_path / "other", batch=5)
    assert judged == whole, "neither the stop nor the size of a batch can be heard"


def test_an_ear_that_comes_later_hears_what_was_said_before(tmp_path: Path) -> None:
    asked, out = plan(tmp_path, FEW), tmp_path / "out"
    deaf = ears(words="no recogniser was named", dnsmos="speechmos is not installed")
    before = score_systems(asked, [Puppet("model", well)], deaf, out)
    assert all(row.heard is None and row.similarity is not None for row in before.rows["model"])
    model = Puppet("model", well)
    after = score_systems(asked, [model], ears(), out)
    assert model.asked == [] and all(row.heard == row.text for row in after.rows["model"])


def test_a_recogniser_is_not_asked_what_a_click_says(tmp_path: Path) -> None:
    """It would make something up, and a model that ends at once would have no word errors."""
    listening, ear = ears(), CountingEar()
    object.__setattr__(listening, "words", ear)
    model = Puppet("model", lambda _: SystemOutput(say("a", 150.0), stopped=True))
    judged = score_systems(plan(tmp_path, FEW), [model], listening, tmp_path / "out")
    assert ear.count == 0 and all(row.heard == "" and row.word_errors == row.words for row in judged.rows["model"])


def test_another_recogniser_hears_again(tmp_path: Path) -> None:
    asked, out = plan(tmp_path, FEW), tmp_path / "out"
    score_systems(asked, [Puppet("model", well)], ears(), out)
    other, ear = ears(), CountingEar()
    object.__setattr__(other, "words", ear)
    object.__setattr__(other, "names", {**other.names, "words": "another"})
    score_systems(asked, [Puppet("model", well)], other, out)
    assert ear.count == len(asked.tasks)


def test_what_has_changed_is_said_again(tmp_path: Path) -> None:
    asked, out = plan(tmp_path, FEW), tmp_path / "out"
    score_systems(asked, [Puppet("model", well)], ears(), out)
    first = asked.tasks[0]
    changed = EvalItem(first.id, "other words", first.speaker, "en", first.references, first.real)
    model = Puppet("model", well)
    judged = score_systems(EvalSet((changed, *asked.tasks[1:]), asked.clips), [model], ears(), out)
    assert model.asked == [first.id] and judged.rows["model"][0].heard == "other words"
    sound = out / judged.rows["model"][1].sound
    sound.unlink()
    model = Puppet("model", well)
    score_systems(asked, [model], ears(), out)
    assert set(model.asked) == {first.id, asked.tasks[1].id}


def test_a_line_is_known_by_its_own_key_whoever_says_it_and_in_old_results_too(tmp_path: Path) -> None:
    asked, out = plan(tmp_path, FEW), tmp_path / "out"
    judged = score_systems(asked, [Puppet("one", well), Puppet("two", poorly)], ears(), out)
    keys = [[row.line for row in judged.rows[name]] for name in ("one", "two")]
    assert keys[0] == keys[1] == [task.key for task in asked.tasks]
    results = Results.of(out, "one")
    for row in results.rows.values():
        row.line = ""
    results.save()
    model = Puppet("one", well)
    assert [row.line for row in score_systems(asked, [model], ears(), out).rows["one"]] == keys[0] and model.asked == []
    assert [row.line for row in read_rows(out / "lines.parquet")] == keys[0]


def test_a_voice_is_not_compared_with_its_own_line_or_reference(tmp_path: Path) -> None:
    """Real recordings would be their own best match, and a copy of the reference would be the best of clones."""
    asked = plan(tmp_path, FEW)
    first = asked.tasks[0]
    odd = replace(record(tmp_path, "odd", "not her voice", "heron"), speaker="wren")
    strange = EvalItem("odd", odd.text, "wren", "en", (odd,), odd)
    among = EvalSet((strange, first), {**asked.clips, "wren": (*asked.clips["wren"], odd)})
    row, usual = score_systems(among, [Recordings(REAL, RATE)], ears(), tmp_path / "out").rows[REAL]
    assert row.compared_with == usual.compared_with == "clips"
    assert (row.similarity or 0) < 0.6 < (usual.similarity or 0) and row.rank == 2 and usual.rank == 1
    lonely = EvalSet((first,), {"wren": tuple(filter(None, (*first.references, first.real)))})
    row = score_systems(lonely, [Puppet("model", well)], ears(), tmp_path / "lonely").rows["model"][0]
    assert row.compared_with == "reference" and row.rank is None


def test_lines_without_recordings_or_references_say_so(tmp_path: Path) -> None:
    asked = EvalSet(tuple(EvalItem(f"line-{number}", text, language="en") for number, text in enumerate(LINES)), {})
    systems: list[System] = [
        Recordings(REAL, RATE),
        Puppet("model", lambda task: SystemOutput(say(task.text, SPEAKERS["wren"]), stopped=True)),
    ]
    summary = summarise(score_systems(asked, systems, ears(), tmp_path), ears(), "model", {})
    assert summary.systems[REAL]["wer"].n == 0 and summary.systems["model"]["wer"].mean == 0
    assert {REAL, "similarity", "similarity_rank1"} <= summary.missing.keys()
    told = json.loads(json.dumps(summary.to_json(), allow_nan=False))
    assert told["systems"]["model"]["similarity"] == {"mean": None, "low": None, "high": None, "n": 0}
    assert "these lines have no recordings" in page(summary, tmp_path)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[SystemScores, Path]:
    folder = tmp_path_factory.mktemp("judged")

    def slips_once(task: EvalItem) -> SystemOutput:
        if task.id == "heron-2":
            return SystemOutput(say("mumble <&> mumble".replace("<&>", "x"), SPEAKERS[task.speaker]), stopped=True)
        return well(task)

    systems: list[System] = [Recordings(REAL, RATE), Puppet("mine", slips_once), Puppet(BASE, poorly)]
    return score_systems(plan(folder), systems, ears(), folder / "out"), folder / "out"


def test_the_keys_that_others_read(judged: tuple[SystemScores, Path]) -> None:
    rows, _ = judged
    told = json.loads(json.dumps(summarise(rows, ears(), "mine", {}).to_json(), allow_nan=False))
    assert list(told["systems"]) == [REAL, "mine", BASE] and list(told["deltas"]) == ["mine"]
    wanted = (
        "wer",
        "cer",
        "similarity",
        "similarity_rank1",
        "distillmos",
        "dnsmos",
        "stop_rate",
        "runaway_rate",
        "pace",
    )
    for figures in (told["systems"]["mine"], told["deltas"]["mine"]):
        assert all(set(figures[key]) == {"mean", "low", "high", "n"} for key in wanted)
        assert all(figures[key]["n"] == 18 for key in wanted)
    assert set(told["groups"]["speaker"]) == set(SPEAKERS) and set(told["groups"]["length"]) == {"one word", "usual"}
    assert told["groups"]["language"] == {}, "one language has nothing to say beside all lines"
    assert told["groups"]["length"]["one word"]["mine"]["stop_rate"]["n"] == 3


def test_the_worst_line_comes_first(judged: tuple[SystemScores, Path]) -> None:
    rows, out = judged
    assert worst_first(rows.rows["mine"])[0].id == "heron-2"
    shown = page(summarise(rows, ears(), "mine", {}), out)
    listen = shown[shown.index("Listen, the worst lines first") :]
    assert listen.index("the river runs under the bridge") < listen.index("good morning to you")
    assert "of 6 words wrong: “mumble x mumble”" in listen


def test_the_page_opens_without_a_network_and_escapes_what_it_shows(tmp_path: Path) -> None:
    text = "<script>alert(1)</script> & yes"
    asked = EvalSet((EvalItem("a<b", text, language="en"),), {})
    model = Puppet("<i>mine</i>", lambda _: SystemOutput(say("yes", 150.0), stopped=True))
    summary = summarise(score_systems(asked, [model], ears(), tmp_path), ears(), model.name, {})
    shown = page(summary, tmp_path)
    assert "<script>alert" not in shown and "<i>mine</i>" not in shown and "&lt;i&gt;mine" in shown
    assert "http://" not in shown.replace("http://www.w3.org/2000/svg", "") and "https://" not in shown
    assert shown.count("<audio") == 1 and "data:audio/flac" in shown


def test_missing_ears_are_told_and_not_made_up(judged: tuple[SystemScores, Path], tmp_path: Path) -> None:
    _, out = judged
    deaf = ears(words="no recogniser was named: --recogniser base", distillmos="pip install distillmos")
    asked = plan(tmp_path, ("wren",))
    summary = summarise(score_systems(asked, [Puppet("mine", well)], deaf, tmp_path / "out"), deaf, "mine", {})
    assert summary.missing["wer"] == summary.missing["cer"] == "no recogniser was named: --recogniser base"
    assert summary.systems["mine"]["wer"].to_json() == {"mean": None, "low": None, "high": None, "n": 0}
    shown = page(summary, tmp_path / "out")
    assert "no recogniser was named: --recogniser base" in shown and "pip install distillmos" in shown
    assert out.is_dir()


def test_two_systems_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one name"):
        score_systems(plan(tmp_path, FEW), [Puppet("model", well), Puppet("Model", well)], ears(), tmp_path / "out")


def test_names_become_files_of_their_own(tmp_path: Path) -> None:
    names = ["plain-1.0", "a/b", "a b", "a_b", "..", "ünïcode", "x" * 200]
    files = [file_name(name) for name in names]
    assert files[0] == "plain-1.0" and len(set(files)) == len(files)
    assert all("/" not in file and file.strip(".") and len(file) < 100 for file in files)
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "model.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot be read"):
        Results.of(tmp_path, "model")


def test_company_does_not_change_where_a_line_is_cut() -> None:
    short, long = EvalItem("a", "Yes."), EvalItem("b", "word " * 60)
    assert short.cap < long.cap and short.kind == "word" and long.kind == "long"
    assert all(task.cap >= 2 * task.expected_seconds for task in (short, long, EvalItem("d", "word " * 2000)))
    assert EvalItem("c", REFERENCE).kind == "line" and np.isclose(EvalItem("c", "x" * 130).expected_seconds, 10)
