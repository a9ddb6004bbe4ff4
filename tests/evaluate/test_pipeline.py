"""Work that is done once: what is known is kept, what is missing is done, what has changed is done again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from myna.core.errors import ConfigError, DataError
from myna.core.io import safe_file_name
from myna.evaluate.evaluation import Evaluation, evaluation_page
from myna.evaluate.items import EvalItem, EvalSet
from myna.evaluate.metrics import BASE, REAL
from myna.evaluate.pipeline import (
    ItemScoresFile,
    Recordings,
    System,
    SystemOutput,
    read_item_scores,
    score_systems,
    worst_first,
)
from tests.evaluate.speech import (
    LINES,
    RATE,
    REFERENCE,
    SPEAKERS,
    FakeASR,
    FakeSystem,
    evaluate_systems,
    fake_scorers,
    make_eval_set,
    poorly,
    record,
    say,
    well,
)

FEW = ("wren", "heron")


class CountingASR(FakeASR):
    def __init__(self) -> None:
        self.count = 0

    def transcribe(self, *audio: object) -> object:  # type: ignore[override]
        self.count += 1
        return super().transcribe(*audio)  # type: ignore[arg-type]


def test_finished_items_are_not_spoken_or_scored_again(tmp_path: Path) -> None:
    eval_set, out = make_eval_set(tmp_path, FEW), tmp_path / "out"
    first = score_systems(eval_set, [FakeSystem("model", well)], fake_scorers(), out)
    again, asr = FakeSystem("model", well), CountingASR()
    scorers = fake_scorers()
    object.__setattr__(scorers, "asr", asr)
    second = score_systems(eval_set, [again], scorers, out)
    assert again.spoken == [] and asr.count == 0
    assert second == first
    assert read_item_scores(out / "items.parquet") == first["model"]


def test_an_interruption_loses_only_unsaved_items(tmp_path: Path) -> None:
    eval_set, out = make_eval_set(tmp_path, FEW), tmp_path / "out"
    said = 0

    def stopped_half_way(item: EvalItem) -> SystemOutput:
        nonlocal said
        said += 1
        if said > 7:
            raise KeyboardInterrupt
        return well(item)

    with pytest.raises(KeyboardInterrupt):
        score_systems(eval_set, [FakeSystem("model", stopped_half_way)], fake_scorers(), out, batch_size=2)
    kept = set(ItemScoresFile(out, "model").rows)
    assert len(kept) == 7
    model = FakeSystem("model", well)
    scores = score_systems(eval_set, [model], fake_scorers(), out, batch_size=2)
    assert sorted(model.spoken) == sorted({item.id for item in eval_set.items} - kept)
    whole = score_systems(eval_set, [FakeSystem("model", well)], fake_scorers(), tmp_path / "other", batch_size=5)
    assert scores == whole, "neither the stop nor the size of a batch can be heard"


def test_a_scorer_added_later_scores_existing_audio(tmp_path: Path) -> None:
    eval_set, out = make_eval_set(tmp_path, FEW), tmp_path / "out"
    deaf = fake_scorers(asr="no ASR model was named", dnsmos="speechmos is not installed")
    before = score_systems(eval_set, [FakeSystem("model", well)], deaf, out)
    assert all(row.transcript is None and row.similarity is not None for row in before["model"])
    model = FakeSystem("model", well)
    after = score_systems(eval_set, [model], fake_scorers(), out)
    assert model.spoken == [] and all(row.transcript == row.text for row in after["model"])


def test_a_click_is_not_transcribed(tmp_path: Path) -> None:
    """It would make something up, and a model that ends at once would have no word errors."""
    scorers, asr = fake_scorers(), CountingASR()
    object.__setattr__(scorers, "asr", asr)
    model = FakeSystem("model", lambda _: SystemOutput(say("a", 150.0), stopped=True))
    scores = score_systems(make_eval_set(tmp_path, FEW), [model], scorers, tmp_path / "out")
    assert asr.count == 0 and all(row.transcript == "" and row.word_errors == row.words for row in scores["model"])


def test_another_asr_transcribes_again(tmp_path: Path) -> None:
    eval_set, out = make_eval_set(tmp_path, FEW), tmp_path / "out"
    score_systems(eval_set, [FakeSystem("model", well)], fake_scorers(), out)
    other, asr = fake_scorers(), CountingASR()
    object.__setattr__(other, "asr", asr)
    object.__setattr__(other, "names", {**other.names, "asr": "another"})
    score_systems(eval_set, [FakeSystem("model", well)], other, out)
    assert asr.count == len(eval_set.items)


def test_changed_items_are_spoken_again(tmp_path: Path) -> None:
    eval_set, out = make_eval_set(tmp_path, FEW), tmp_path / "out"
    score_systems(eval_set, [FakeSystem("model", well)], fake_scorers(), out)
    first = eval_set.items[0]
    changed = EvalItem(first.id, "other words", first.speaker, "en", first.references, first.recording)
    model = FakeSystem("model", well)
    scores = score_systems(
        EvalSet((changed, *eval_set.items[1:]), eval_set.speaker_clips), [model], fake_scorers(), out
    )
    assert model.spoken == [first.id] and scores["model"][0].transcript == "other words"
    audio = out / scores["model"][1].audio
    audio.unlink()
    model = FakeSystem("model", well)
    score_systems(eval_set, [model], fake_scorers(), out)
    assert set(model.spoken) == {first.id, eval_set.items[1].id}


def test_an_item_key_is_equal_for_all_systems(tmp_path: Path) -> None:
    eval_set, out = make_eval_set(tmp_path, FEW), tmp_path / "out"
    scores = score_systems(eval_set, [FakeSystem("one", well), FakeSystem("two", poorly)], fake_scorers(), out)
    keys = [[row.item_key for row in scores[name]] for name in ("one", "two")]
    assert keys[0] == keys[1] == [item.key for item in eval_set.items]
    assert [row.item_key for row in read_item_scores(out / "items.parquet")] == [*keys[0], *keys[1]]


def test_similarity_excludes_the_item_and_its_reference(tmp_path: Path) -> None:
    """Real recordings would be their own best match, and a copy of the reference would be the best of clones."""
    eval_set = make_eval_set(tmp_path, FEW)
    first = eval_set.items[0]
    odd = replace(record(tmp_path, "odd", "not her voice", "heron"), speaker="wren")
    strange = EvalItem("odd", odd.text, "wren", "en", (odd,), odd)
    among = EvalSet((strange, first), {**eval_set.speaker_clips, "wren": (*eval_set.speaker_clips["wren"], odd)})
    row, usual = score_systems(among, [Recordings(REAL, RATE)], fake_scorers(), tmp_path / "out")[REAL]
    assert row.compared_with == usual.compared_with == "clips"
    assert (row.similarity or 0) < 0.6 < (usual.similarity or 0) and row.speaker_rank == 2 and usual.speaker_rank == 1
    lonely = EvalSet((first,), {"wren": tuple(filter(None, (*first.references, first.recording)))})
    row = score_systems(lonely, [FakeSystem("model", well)], fake_scorers(), tmp_path / "lonely")["model"][0]
    assert row.compared_with == "reference" and row.speaker_rank is None


def test_items_without_recordings_or_references_are_noted(tmp_path: Path) -> None:
    eval_set = EvalSet(tuple(EvalItem(f"line-{number}", text, language="en") for number, text in enumerate(LINES)), {})
    systems: list[System] = [
        Recordings(REAL, RATE),
        FakeSystem("model", lambda item: SystemOutput(say(item.text, SPEAKERS["wren"]), stopped=True)),
    ]
    evaluation = evaluate_systems(eval_set, systems, tmp_path)
    assert evaluation.estimates[REAL]["wer"].n == 0 and evaluation.estimates["model"]["wer"].mean == 0
    assert {REAL, "similarity", "similarity_rank1"} <= evaluation.missing.keys()
    content = json.loads(json.dumps(evaluation.to_json(), allow_nan=False))
    assert content["systems"]["model"]["similarity"] == {"mean": None, "low": None, "high": None, "n": 0}
    assert "these items have no recordings" in evaluation_page(evaluation)


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    folder = tmp_path_factory.mktemp("scores")

    def slips_once(item: EvalItem) -> SystemOutput:
        if item.id == "heron-2":
            return SystemOutput(say("mumble <&> mumble".replace("<&>", "x"), SPEAKERS[item.speaker]), stopped=True)
        return well(item)

    systems: list[System] = [Recordings(REAL, RATE), FakeSystem("mine", slips_once), FakeSystem(BASE, poorly)]
    return evaluate_systems(make_eval_set(folder), systems, folder / "out", name="mine")


def test_evaluation_json_has_its_documented_keys(evaluation: Evaluation) -> None:
    content = json.loads(json.dumps(evaluation.to_json(), allow_nan=False))
    assert list(content["systems"]) == [REAL, "mine", BASE] and list(content["differences"]) == ["mine"]
    wanted = (
        "wer",
        "cer",
        "similarity",
        "similarity_rank1",
        "distillmos",
        "dnsmos",
        "stop_rate",
        "runaway_rate",
        "speaking_rate",
    )
    for figures in (content["systems"]["mine"], content["differences"]["mine"]):
        assert all(set(figures[key]) == {"mean", "low", "high", "n"} for key in wanted)
        assert all(figures[key]["n"] == 18 for key in wanted)
    assert set(content["groups"]["speaker"]) == set(SPEAKERS) and set(content["groups"]["length"]) == {
        "one word",
        "usual",
    }
    assert content["groups"]["language"] == {}, "one language has nothing to say beside all lines"
    assert content["groups"]["length"]["one word"]["mine"]["stop_rate"]["n"] == 3


def test_the_worst_item_comes_first(evaluation: Evaluation) -> None:
    assert worst_first(evaluation.rows["mine"])[0].id == "heron-2"
    shown = evaluation_page(evaluation)
    listen = shown[shown.index("Listen, the worst items first") :]
    assert listen.index("the river runs under the bridge") < listen.index("good morning to you")
    assert "of 6 words wrong: “mumble x mumble”" in listen


def test_the_page_opens_without_a_network_and_escapes_what_it_shows(tmp_path: Path) -> None:
    text = "<script>alert(1)</script> & yes"
    eval_set = EvalSet((EvalItem("a<b", text, language="en"),), {})
    model = FakeSystem("<i>mine</i>", lambda _: SystemOutput(say("yes", 150.0), stopped=True))
    evaluation = evaluate_systems(eval_set, [model], tmp_path, name=model.name)
    shown = evaluation_page(evaluation)
    assert "<script>alert" not in shown and "<i>mine</i>" not in shown and "&lt;i&gt;mine" in shown
    assert "http://" not in shown.replace("http://www.w3.org/2000/svg", "") and "https://" not in shown
    assert shown.count("<audio") == 1 and "data:audio/flac" in shown


def test_missing_scorers_are_named_with_the_reason(tmp_path: Path) -> None:
    deaf = fake_scorers(asr="no ASR model was named: --asr base", distillmos="pip install distillmos")
    eval_set = make_eval_set(tmp_path, ("wren",))
    evaluation = evaluate_systems(eval_set, [FakeSystem("mine", well)], tmp_path / "out", name="mine", scorers=deaf)
    assert evaluation.missing["wer"] == evaluation.missing["cer"] == "no ASR model was named: --asr base"
    assert evaluation.estimates["mine"]["wer"].to_json() == {"mean": None, "low": None, "high": None, "n": 0}
    shown = evaluation_page(evaluation)
    assert "no ASR model was named: --asr base" in shown and "pip install distillmos" in shown


def test_two_systems_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one name"):
        score_systems(
            make_eval_set(tmp_path, FEW),
            [FakeSystem("model", well), FakeSystem("Model", well)],
            fake_scorers(),
            tmp_path / "out",
        )


def test_names_become_distinct_file_names(tmp_path: Path) -> None:
    names = ["plain-1.0", "a/b", "a b", "a_b", "..", "ünïcode", "x" * 200]
    files = [safe_file_name(name) for name in names]
    assert files[0] == "plain-1.0" and len(set(files)) == len(files)
    assert all("/" not in file and file.strip(".") and len(file) < 100 for file in files)
    (tmp_path / "items").mkdir()
    (tmp_path / "items" / "model.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot be read"):
        ItemScoresFile(tmp_path, "model")


def test_maximum_length_depends_on_the_item_alone() -> None:
    short, long = EvalItem("a", "Yes."), EvalItem("b", "word " * 60)
    assert short.max_seconds < long.max_seconds and short.length_class == "word" and long.length_class == "long"
    assert all(item.max_seconds >= 2 * item.expected_seconds for item in (short, long, EvalItem("d", "word " * 2000)))
    assert EvalItem("c", REFERENCE).length_class == "sentence" and np.isclose(
        EvalItem("c", "x" * 130).expected_seconds, 10
    )
