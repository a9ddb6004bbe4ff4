"""Evaluation: looping transcripts, gains by chance, trained items, damaged metrics, paths and devices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file

from myna import prepare, train
from myna.core.config import SpeechEvalSettings, absolute_scorer
from myna.core.errors import OutputError, TrainingError
from myna.core.run_folder import Run
from myna.core.statistics import Estimate, RatioPart, paired_difference
from myna.data.manifest import Utterance
from myna.data.pronunciation import (
    MISPRONUNCIATION_F1,
    SCORES,
    Assessment,
    AssessmentTable,
    assessment_table,
    read_assessment,
)
from myna.evaluate import evaluation, pipeline, scoring
from myna.evaluate.evaluation import (
    EvaluationSettings,
    Subject,
    evaluate_system,
    mark_seen_items,
    run_metadata,
)
from myna.evaluate.items import EvalItem, split_items
from myna.evaluate.metrics import count_looped, estimate_metrics
from myna.evaluate.pipeline import Recordings, Results, read_item_scores
from myna.evaluate.ranking import CheckpointScore, best_checkpoint
from myna.evaluate.scoring import ItemScores
from myna.listen import asr, models, speaker_encoders
from myna.listen.asr import ASR
from myna.listen.mos import DistillMOS
from myna.listen.speaker_encoders import EcapaNetwork, open_speaker_encoder
from myna.models import save_tiny_model
from tests import tone_learners
from tests.command_line import run_command
from tests.evaluate import tiny_scorers

from .tiny_setup import LINES, make_recipe, train_run


def _row(number: int, *, looped: bool, system: str = "run") -> ItemScores:
    return ItemScores(
        *(system, f"line-{number}", "key", "so it is", "wren", "en", "sentence", "", f"sound-{number}"),
        stopped=True,
        expected_seconds=1.0,
        transcript="so so so so so so so" if looped else "so it is",
        looped=looped,
        word_errors=6 if looped else 0,
        words=3,
        character_errors=12 if looped else 0,
        characters=6,
    )


def test_a_looped_line_is_wholly_wrong_and_counted() -> None:
    rows = [_row(number, looped=number >= 5) for number in range(10)]
    estimates = estimate_metrics(rows)
    assert estimates["wer"].mean == estimates["cer"].mean == 0.5 and estimates["wer"].n == 10
    assert estimates["loop_rate"].mean == 0.5 and count_looped(rows) == 5
    assert estimate_metrics(rows[5:])["wer"].mean == 1.0, "a loop adds no words that were never asked for"


Scores = npt.NDArray[np.float64]
CHECKPOINTS, NOISE = 10, 0.06
"""Checkpoints of a simulated run, and the standard deviation of an item's score from one reading to the next."""


def _simulate(effect: float, runs: int) -> tuple[float, float]:
    """Shares of simulated trainings whose best checkpoint "beats the base model", on the items that chose it and on
    those that chose nothing. The score of an item is its difficulty, the effect of training, and chance."""
    rng = np.random.default_rng(17)
    items = [EvalItem(f"line-{n}", "so it is") for n in range(SpeechEvalSettings().limit)]
    halves = [np.array([item in half for item in items]) for half in split_items(items, seed=0)]
    assert [int(half.sum()) for half in halves] == [24, 24]
    beaten = np.zeros((runs, 2))
    for run in range(runs):
        difficulty = 0.7 + 0.1 * rng.standard_normal(len(items))
        scores = difficulty + NOISE * rng.standard_normal((1 + CHECKPOINTS, len(items)))
        scores[1:] += effect

        def checkpoint(step: int, gain: Estimate, scores: Scores = scores) -> CheckpointScore:
            named = {str(number): value for number, value in enumerate(scores[step, halves[0]].tolist())}
            return CheckpointScore(step, Estimate(fmean(named.values())), Estimate(), gain, Estimate(), (), named)

        best = best_checkpoint(checkpoint(step, Estimate()) for step in range(1, 1 + CHECKPOINTS))
        assert best is not None
        for which, half in enumerate(halves):
            parts = [[RatioPart(value) for value in scores[step, half]] for step in (best.step, 0)]
            beaten[run, which] = checkpoint(best.step, paired_difference(*parts)).beats_base
    by_choosing, by_confirming = beaten.mean(axis=0).tolist()
    return by_choosing, by_confirming


def test_a_gain_by_chance_is_confirmed_as_rarely_as_the_interval_says() -> None:
    runs = 1000
    by_choosing, by_confirming = _simulate(effect=0.0, runs=runs)
    assert by_choosing > 0.08, "the fault: what chose the best would call it better"
    assert by_confirming <= 0.05 + 2 * (0.05 * 0.95 / runs) ** 0.5


def test_a_true_gain_of_a_checkpoint_is_found() -> None:
    _, by_confirming = _simulate(effect=0.05, runs=200)
    assert by_confirming > 0.75


@pytest.fixture(scope="module")
def short_run(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of three steps, which has hardly learned anything."""
    recipe = make_recipe(workspace, data={"evaluation": str(workspace / "evaluation")})
    return train_run(recipe, tmp_path_factory.mktemp("short") / "run")[0]


def _evaluate(run: Run, out: Path, data: Path, *more: str) -> tuple[dict[str, Any], str]:
    """`myna evaluate` of the first lines; its evaluation.json, and all that it says."""
    words = ["evaluate", str(run.folder), "--data", str(data), "--limit", "3", "--device", "cpu", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        empty = scoring.Scorers()
        patch.setattr(scoring.Scorers, "open", lambda *_, **__: empty)  # they take long
        result = run_command([*words, *more])
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    return content, " ".join(result.output.split())


def test_evaluate_flags_items_that_were_trained_on(workspace: Path, short_run: Run, tmp_path: Path) -> None:
    content, shown = _evaluate(short_run, tmp_path / "trained", workspace / "prepared")
    [warning] = content["warnings"]
    assert next(iter(content)) == "warnings" and "trained on 3 of these 3 items (3 with the same audio" in warning
    assert shown.index("warning: run was trained on") < shown.index("untuned base") and "myna split" in shown
    assert set(content["trained_on"]["run"].values()) == {"audio"} and content["trained_on"]["base"] == {}
    page = (tmp_path / "trained" / "report.html").read_text(encoding="utf-8")
    assert page.index("was trained on 3 of these 3 items") < page.index("<h2>") and ">trained on<" in page
    rows = read_item_scores(tmp_path / "trained" / "items.parquet")
    assert {(row.system, row.trained_on) for row in rows if row.trained_on is not None} == {("run", "audio")}

    held_out, shown = _evaluate(short_run, tmp_path / "held_out", workspace / "evaluation")
    assert held_out["warnings"] == [] and held_out["trained_on"]["run"] == {} and "warning" not in shown


def test_the_words_of_a_trained_line_are_flagged_in_a_list_of_sentences(short_run: Run, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text(f"{LINES[0].upper()}!\nsomething that nobody has said\n", encoding="utf-8")
    items = EvaluationSettings(sentences=tmp_path / "lines.txt").eval_set(Subject.parse(str(short_run.folder)))
    rows = {"run": [replace(_row(0, looped=False), id=item.id, text=item.text) for item in items.items]}
    systems = [Recordings("run", 16_000, metadata={"run": str(short_run.folder)})]
    assert mark_seen_items(systems, [replace(item, speaker="") for item in items.items], rows) == []
    assert [row.trained_on for row in rows["run"]] == ["words", ""]
    assert (
        "1 of these 2 items (0 with the same audio, 1 with the same words)"
        in Results(folder=Path(), rows=rows, base="").warnings[0]
    )


def test_training_data_that_is_gone_is_named_and_nothing_is_refused(workspace: Path, tmp_path: Path) -> None:
    shutil.copytree(workspace / "prepared", tmp_path / "prepared")
    run, _ = train_run(make_recipe(workspace, data={"train": str(tmp_path / "prepared")}), tmp_path / "run")
    shutil.rmtree(tmp_path / "prepared")
    rows = {"run": [_row(0, looped=False)]}
    systems = [Recordings("run", 16_000, metadata={"run": str(run.folder)})]
    [note] = mark_seen_items(systems, [EvalItem("line-0", "so it is")], rows)
    assert "cannot be told" in note and str(tmp_path / "prepared") in note and rows["run"][0].trained_on is None


def test_a_torn_last_line_of_metrics_is_named_and_skipped(workspace: Path, short_run: Run, tmp_path: Path) -> None:
    shutil.copytree(short_run.folder, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    lines = run.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    run.metrics.write_text("".join(lines) + lines[-1][: len(lines[-1]) // 2], encoding="utf-8")
    content, shown = _evaluate(run, tmp_path / "out", workspace / "evaluation")
    named = f"metrics.jsonl:{len(lines) + 1} is torn"
    assert named in shown.replace("\n", "") and any(named in note for note in content["notes"])
    assert content["metadata"]["run"]["loss"] == run_metadata(short_run)["loss"]

    run.metrics.write_text("".join([lines[0], lines[1][:9] + "\n", *lines[2:]]), encoding="utf-8")
    with pytest.raises(TrainingError, match=r"metrics\.jsonl:2 is no line of metrics") as refused:
        run_metadata(run)
    assert "take that line out" in refused.value.hint


def test_numbers_that_are_not_finite_are_read_as_none(short_run: Run, tmp_path: Path) -> None:
    shutil.copytree(short_run.folder, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    rows = [
        {"step": 0, "evaluation": {"loss": 4.0}},
        {"step": 1, "loss": None, "gradient_norm": None},
        {"step": 1, "evaluation": {"loss": None}},
        {"step": 2, "evaluation": {"loss": 3.0}},
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert run_metadata(run) | {"run": "", "model": ""} == {"run": "", "model": "", "loss": 3.0, "base_loss": 4.0}


def _assessed(number: int, *, score: float | None = None, pronounced: str = "T OW K") -> Assessment:
    scores = {name: (number * (place + 3)) % 11 if score is None else score for place, name in enumerate(SCORES)}
    word = {"text": "tok", "phones": "T OW K", "pronounced": pronounced}
    return read_assessment({"text": "tok", "scores": scores, "words": [word]})


def _table(references: Sequence[Assessment], answers: Sequence[str]) -> AssessmentTable:
    extras = [{"assessment": reference.model_dump()} for reference in references]
    lines = [Utterance(str(n), Path("a.wav"), "tok", "wren", extras=one) for n, one in enumerate(extras)]
    table = assessment_table(lines, {str(n): answer for n, answer in enumerate(answers)})
    assert table is not None
    return table


def test_correlations_blank_cells_and_a_constant_answer_are_named() -> None:
    references = [_assessed(n, pronounced="S OW K" if n % 4 == 0 else "T OW K") for n in range(8)]
    table = _table(references, [reference.answer.to_json() for reference in references])
    rows = {row[0]: row for row in table.rows}
    assert [name for name in rows if "correlation" in name] == [f"{name}, correlation" for name in SCORES]
    assert table.header == ("", "model", "canonical phones", "everything is wrong")
    assert all(cell for row in table.rows for cell in row), "no cell is blank"
    # Two of 24 phones are wrong: who calls all wrong has a precision of 2/24 and finds both.
    assert rows[MISPRONUNCIATION_F1][2].startswith("0.000") and rows[MISPRONUNCIATION_F1][3].startswith("0.154")
    assert table.figures["baselines"]["everything is wrong"][MISPRONUNCIATION_F1]["mean"] == pytest.approx(4 / 26)
    assert table.figures["figures"]["fluency"]["measure"] == "correlation"

    same = _table(references, [_assessed(0, score=5).answer.to_json()] * 8)
    assert {row[1] for row in same.rows[: len(SCORES)]} == {"all answers give the same score"}
    assert same.figures["figures"]["total"]["reason"] == "all answers give the same score"
    flat = _table([_assessed(n, score=7) for n in range(3)], [_assessed(n).answer.to_json() for n in range(3)])
    assert flat.rows[0][1] == "all utterances have the same score"
    assert {row[0]: row[1] for row in flat.rows}[MISPRONUNCIATION_F1] == "no phone is wrong, or called so"
    assert _table(references[:1], [""]).rows[0][1] == "one utterance has no correlation"


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that answers, two speakers to train on and two others, and a run of two steps."""
    folder = tmp_path_factory.mktemp("answering")
    save_tiny_model(folder / "model", answers=True)
    lines = tone_learners.record(folder / "recordings").read_text(encoding="utf-8").splitlines()
    for name, speakers in (("prepared", ("s0", "s1")), ("held_out", ("s2", "s3"))):
        file = folder / "recordings" / f"{name}.jsonl"
        file.write_text("\n".join(line for line in lines if json.loads(line)["speaker"] in speakers), encoding="utf-8")
        prepare(str(file), folder / name, model=str(folder / "model"), device="cpu", format="scored_jsonl")
    settings = {"train.steps": 2, "train.learning_rate": 1e-3, "train.warmup": 2}
    train(tone_learners.recipe(folder), settings=settings, out=folder / "run")
    return folder


def _answer(folder: Path, *words: object) -> str:
    more = ["--run", folder / "run", "--device", "cpu", "--max-tokens", 3]
    result = run_command(["answer", *map(str, words), *map(str, more)])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_answers_to_trained_recordings_are_flagged(answering: Path, tmp_path: Path) -> None:
    shown = _answer(answering, answering / "prepared", "-o", tmp_path / "trained.jsonl")
    assert "warning: the run was trained on 8 of these 8 recordings" in shown
    rows = [json.loads(line) for line in (tmp_path / "trained.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 8 and {row["trained_on"] for row in rows} == {"audio"}
    held_out = _answer(answering, answering / "held_out", "-o", tmp_path / "held_out.jsonl")
    assert "warning" not in held_out and '"trained_on": ""' in (tmp_path / "held_out.jsonl").read_text(encoding="utf-8")
    clips = sorted((answering / "recordings").rglob("*.wav"))
    assert "the run was trained on 1 of these 2 recordings" in _answer(answering, clips[0], clips[-1])


def test_answers_write_their_figures_beside_them(answering: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    shown = _answer(answering, answering / "prepared", "-o", out)
    figures = json.loads((tmp_path / "answers.scores.json").read_text(encoding="utf-8"))
    assert next(iter(figures)) == "warnings" and len(figures["warnings"]) == 1 and figures["answers"] == 8
    assessment = figures["assessment"]
    assert assessment["utterances"] == 8 and assessment["unreadable"] == {"not JSON": 8}
    assert assessment["figures"]["word error rate"]["mean"] == 1.0 and "answers.scores.json: every figure" in shown
    before = (tmp_path / "answers.scores.json").read_bytes()
    out.unlink()
    with pytest.raises(OutputError, match=r"answers\.scores\.json exists"):
        _answer(answering, answering / "prepared", "-o", out)
    assert (tmp_path / "answers.scores.json").read_bytes() == before and not out.exists()


def test_paths_of_a_speech_evaluation_open_from_elsewhere(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    elsewhere.mkdir()
    tiny_scorers.save_whisper(here / "whisper")
    tiny_scorers.save_wavlm(here / "wavlm")
    (here / "lines.txt").write_text("hello\n", encoding="utf-8")
    (here / "others").symlink_to(workspace / "evaluation")
    settings = {"asr": "transformers:whisper", "speaker_encoder": "wavlm:wavlm", "sentences": "lines.txt"}
    settings |= {"data": "others", "forgetting_data": "others"}
    monkeypatch.chdir(here)
    run = Run.create(here / "run", make_recipe(workspace, speech_eval=settings).absolute())
    monkeypatch.chdir(elsewhere)
    opened = Run.open(run.folder).recipe.speech_eval
    assert opened.asr == f"transformers:{here / 'whisper'}" and opened.speaker_encoder == f"wavlm:{here / 'wavlm'}"
    assert ASR.open(str(opened.asr)).name.startswith("transformers ")
    assert open_speaker_encoder(opened.speaker_encoder).name.startswith("wavlm ")
    for path in (opened.sentences, opened.data, opened.forgetting_data):
        assert path is not None and path.is_absolute() and path.exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("base", "base"),
        ("transformers:base", "transformers:base"),
        ("resemblyzer", "resemblyzer"),
        ("wavlm", "wavlm"),
        ("owner/name", "owner/name"),
        ("encoder", "{here}/encoder"),
        ("ecapa:encoder/ecapa.safetensors", "ecapa:{here}/encoder/ecapa.safetensors"),
        ("transformers:encoder", "transformers:{here}/encoder"),
    ],
)
def test_only_existing_paths_become_full_paths(
    name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "ecapa.safetensors").touch()
    (tmp_path / "wavlm").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute_scorer(name) == expected.format(here=tmp_path)


class _OpenedError(Exception):
    """A scorer was opened on a device."""


def test_scorers_are_opened_on_the_device_that_was_asked_for(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_scorers.save_whisper(tmp_path / "whisper")
    tiny_scorers.save_wavlm(tmp_path / "wavlm")
    devices: dict[str, str] = {}
    original = models.load_pretrained

    def load_pretrained(folder: Path, *given: Any, device: str, **options: Any) -> Any:
        devices[folder.name] = device
        return original(folder, *given, device="cpu", **options)

    for module in (asr, speaker_encoders):
        monkeypatch.setattr(module, "load_pretrained", load_pretrained)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(DistillMOS, "open", classmethod(lambda _, device: devices.update(distillmos=device) or 1))
    monkeypatch.setattr(scoring, "version", lambda _: "1")
    monkeypatch.setattr(pipeline, "score_systems", _stop)
    named: dict[str, Any] = {"asr": str(tmp_path / "whisper"), "speaker_encoder": str(tmp_path / "wavlm")}
    monkeypatch.setattr(evaluation, "load_engine", lambda *_, **__: _stand_in_engine())
    for device in ("cuda", "auto", "cuda:1"):
        devices.clear()
        with pytest.raises(_OpenedError):
            settings = EvaluationSettings(data=workspace / "evaluation", device=device, **named)
            evaluate_system(str(workspace / "model"), settings, out=tmp_path / "out")
        expected = "cuda" if device == "auto" else device
        assert devices == dict.fromkeys(("whisper", "wavlm", "distillmos"), expected)


def _stop(*_: Any, **__: Any) -> None:
    raise _OpenedError


def _stand_in_engine() -> Any:
    codec = SimpleNamespace(sample_rate=24_000, revision="stand-in", decode=None)
    model = SimpleNamespace(state_dict=dict)
    family = SimpleNamespace(prompt_revision="")
    return SimpleNamespace(
        codec=codec,
        model=model,
        family=family,
        reference_placement="turn",
        _hash_weights=lambda *_: "stand-in",
        _adapters={},
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["asr", "wavlm", "ecapa"])
def test_scorers_agree_on_gpu_and_cpu(kind: str, tmp_path: Path) -> None:
    clip = np.random.default_rng(0).normal(0, 0.1, 16_000).astype(np.float32)
    if kind == "asr":
        tiny_scorers.save_whisper(tmp_path)
        texts = [ASR.open(str(tmp_path), device).transcribe(clip, 16_000, "en") for device in ("cpu", "cuda")]
        assert texts[0] == texts[1]
        return
    if kind == "wavlm":
        tiny_scorers.save_wavlm(tmp_path)
    else:
        torch.manual_seed(0)
        save_file(EcapaNetwork().state_dict(), tmp_path / "ecapa.safetensors")
    cpu, gpu = (open_speaker_encoder(str(tmp_path), device).embed(clip, 16_000) for device in ("cpu", "cuda"))
    assert np.abs(cpu - gpu).max() < 1e-3
