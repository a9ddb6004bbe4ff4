"""Adaptive codebook weights, and losses that compare voices: as defined, however a step is divided, and resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from myna.api import prepare
from myna.core.config import LossSettings, Recipe, parse_recipe
from myna.core.errors import ConfigError, DataError
from myna.data.batch_builder import VoiceLabel
from myna.data.loader import Shard
from myna.data.manifest import read_manifest, write_manifest
from myna.models import open_family
from myna.models.base import VOICE_STREAMS
from myna.models.higgs_v2.batch import HiggsBatch
from myna.models.higgs_v2.family import HiggsV2
from myna.models.voice_losses import TEMPERATURE, voice_losses
from myna.train.checkpoint import read_checkpoint_metadata
from myna.train.loop import make_loader, run_training
from myna.train.loss import (
    ADAPTIVE_FLOOR,
    AdaptiveCodebookWeights,
    LossAccumulator,
    collate_for_training,
    stage_weights,
    stream_weights,
)
from myna.train.run import Run
from tests.models.higgs_v2.conftest import cloning
from tests.train.distributed_helper import asked_to_stop
from tests.train.resume_helper import Notes, contents, make_birds, metrics, recipe_for

ROOT = Path(__file__).parents[2]
STREAMS = ("text", "code0", "code1", "code2")
VOICES = {"speaker_contrastive_weight": 0.5, "reference_consistency_weight": 0.5}


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_birds(tmp_path_factory.mktemp("birds"))


@pytest.fixture(scope="module")
def family(birds: Path) -> HiggsV2:
    family = open_family(str(birds / "model"))
    assert isinstance(family, HiggsV2)
    return family


def losses(*means: float) -> LossAccumulator:
    """A step with ten targets per stream."""
    step = LossAccumulator.zeros(len(means))
    step.counts += 10
    step.sums.add_(10 * torch.tensor(means, dtype=torch.float64))
    return step


# Adaptive codebook weights


def test_adaptive_weights_follow_what_is_predicted() -> None:
    adaptive = AdaptiveCodebookWeights(STREAMS, (5.0, 4.0, 4.0, 4.0))
    assert list(adaptive.weights) == [1, 1, 1], "before the first step"
    adaptive.update(losses(1.0, 2.0, 3.0, 4.4))
    shares = [0.5 + ADAPTIVE_FLOOR, 0.25 + ADAPTIVE_FLOOR, ADAPTIVE_FLOOR]
    assert adaptive.weights == pytest.approx([3 * share / sum(shares) for share in shares])
    before = adaptive.means
    assert before == pytest.approx([2.0, 3.0, 4.4])
    adaptive.update(losses(1.0, 1.0, float("inf"), 4.4))
    adaptive.update(LossAccumulator.zeros(4))
    assert adaptive.means == before, "steps that overflow or have no audio do not count"
    adaptive.update(losses(1.0, 1.0, 3.0, 4.4))
    assert adaptive.means == pytest.approx([1.9, 3.0, 4.4])


def test_adaptive_weights_share_the_audio_weight_and_evaluations_weigh_codebooks_alike() -> None:
    tree = {"model": {"source": "m"}, "data": {"train": "d"}, "train": {"steps": 9}}
    recipe = parse_recipe(tree | {"loss": {"codebook_weights": "adaptive", "audio_weight": 2.0}}, where="test")
    assert stream_weights(STREAMS, recipe.loss).tolist() == pytest.approx([0, 2 / 3, 2 / 3, 2 / 3])
    adaptive = AdaptiveCodebookWeights(STREAMS, (5.0, 4.0, 4.0, 4.0))
    adaptive.update(losses(1.0, 2.0, 3.0, 4.0))
    weights = stage_weights(STREAMS, recipe, 2, 9, adaptive)
    assert weights[1:].tolist() == pytest.approx([2 / 3 * weight for weight in adaptive.weights])
    assert float(weights.sum()) == pytest.approx(2.0)


def test_adaptive_training_is_logged_and_learns(birds: Path, tmp_path: Path) -> None:
    rows = train(birds, tmp_path / "run", {"codebook_weights": "adaptive"})
    assert rows[0]["codebook_weights"] == pytest.approx([1 / 8] * 8)
    for row in rows:
        assert sum(row["codebook_weights"]) == pytest.approx(1)
        codes = [row[f"code{k}"] for k in range(8)]
        assert row["loss"] == pytest.approx(sum(map(float.__mul__, row["codebook_weights"], codes)), abs=1e-6)
    assert rows[-1]["codebook_weights"] != rows[1]["codebook_weights"]


# Losses that compare voices


def test_voice_losses_by_hand() -> None:
    torch.manual_seed(0)
    lengths = (2, 3, 1, 4, 2, 2)  # three targets, then their references
    hidden = torch.randn(sum(lengths), 5, requires_grad=True)
    negatives = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    sums, nearest = voice_losses(hidden, lengths, negatives)
    means = [part.mean(0) / part.mean(0).norm() for part in torch.split(hidden, list(lengths))]
    targets, references = means[:3], means[3:]
    near = [[float((t @ r).detach()) / TEMPERATURE for r in references] for t in targets]
    pairs = [(near[0][0], near[0][1]), (near[1][1], near[1][0])]
    contrastive = sum(-torch.tensor(pair).log_softmax(0)[0] for pair in pairs)
    assert float(sums[0].detach()) == pytest.approx(float(contrastive), rel=1e-5)
    assert float(sums[1].detach()) == pytest.approx(3 - TEMPERATURE * (near[0][0] + near[1][1] + near[2][2]), rel=1e-5)
    assert nearest.tolist() == [sum(own > other for own, other in pairs), 0]
    [gradient] = torch.autograd.grad(sums[1], hidden)
    assert gradient[:6].any() and not gradient[6:].any(), "consistency does not move the reference"


def test_no_voices_give_no_loss() -> None:
    sums, nearest = voice_losses(torch.zeros(0, 4), (), torch.zeros(0, 0, dtype=torch.bool))
    assert sums.tolist() == [0, 0] and nearest.tolist() == [0, 0]


def test_a_batch_with_voices_is_the_same_batch_and_more(family: HiggsV2) -> None:
    """A sequence with no reference has no pair; an unnamed speaker is nobody's negative; rows are apart."""
    shapes: list[dict[str, Any]] = [
        {"text": "one", "reference": 5, "target": 7},
        {"text": "two", "reference": 3, "target": 12, "reference_placement": "system"},
        {"text": "three", "reference": 0, "target": 6},
        {"text": "four", "reference": 4, "target": 5},
        {"text": "five", "reference": 4, "target": 5},
        {"text": "six", "reference": 4, "target": 5},
    ]
    sequences = [family.render(cloning(**shape, seed=n)) for n, shape in enumerate(shapes)]
    labels = [(0, 7), (0, 8), (0, 8), (0, None), (0, 7), (1, 8)]
    plain = family.collate(sequences)
    batch = family.collate_voices(sequences, [VoiceLabel(*label) for label in labels])
    assert batch.counts.tolist() == [*plain.counts.tolist(), 3, 5]
    assert batch.voice_negatives is not None and batch.voice_negatives.int().tolist() == [
        [0, 1, 0, 0, 0],
        [1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    model = family.load_model(dtype=torch.float32, device="cpu", text_head=False)
    objective: Any = family.objective(model).eval()
    for name in ("text_ids", "codes", "audio_targets", "to_sequence"):
        assert torch.equal(getattr(plain, name), getattr(batch, name))
    with torch.no_grad():
        without, result = objective(plain), objective(batch)
        torch.testing.assert_close(result.sums[:9], without.sums)
        # The last layer computes what is compared, and no position is mistaken for another.
        stream = model.model.norm(objective.hidden(batch))[batch.to_sequence]  # type: ignore[operator]
    starts, clips = [0], []
    for sequence in sequences:
        spans = [span for span in sequence.spans if span.kind == "audio"]
        if len(spans) == 2:
            clips.append([stream[starts[-1] + span.start : starts[-1] + span.stop] for span in spans])
        starts.append(starts[-1] + len(sequence))
    ordered = [target for _, target in clips] + [reference for reference, _ in clips]
    expected, nearest = voice_losses(torch.cat(ordered), [len(clip) for clip in ordered], batch.voice_negatives)
    torch.testing.assert_close(result.sums[9:], expected)
    assert result.correct[9:].tolist() == nearest.tolist()


def train(birds: Path, folder: Path, loss: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    recipe, notes = recipe_for(birds, loss=loss, **changes), Notes()
    run_training(recipe, Run.create(folder, recipe), notes)
    return [row for row in notes.rows if "evaluation" not in row]


LARGE_ROWS = {"row_tokens": 800, "evaluation": None}


def test_a_step_divided_otherwise_is_the_same_step(birds: Path, tmp_path: Path) -> None:
    """Four micro-batches of a row, or one of four rows: the negatives are those of the row."""
    runs = [
        train(
            birds,
            tmp_path / f"run{size}",
            VOICES | {"codebook_weights": "adaptive"},
            data=LARGE_ROWS,
            train={"batch_size": 4, "micro_batch_size": size, "steps": 4},
        )
        for size in (1, 4)
    ]
    for one, other in zip(*runs, strict=True):
        assert one["speaker_contrastive"] > 0 and one["reference_consistency"] > 0
        for name in ("loss", "gradient_norm", *VOICE_STREAMS, "code0"):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name
        codes = [one[f"code{k}"] for k in range(8)]
        weighted = sum(map(float.__mul__, one["codebook_weights"], codes))
        assert one["loss"] == pytest.approx(weighted + 0.5 * sum(one[name] for name in VOICE_STREAMS), abs=1e-5)


def test_ranks_count_what_one_process_counts(birds: Path, family: HiggsV2) -> None:
    recipe = recipe_for(birds, loss=VOICES, data=LARGE_ROWS)
    objective: Any = family.objective(family.load_model(dtype=torch.float32, device="cpu", text_head=False)).eval()

    def step(shard: Shard, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        loader = make_loader(recipe, family, recipe.data.train, voices=True)
        batches = next(loader.steps(4, rows, shard))
        with torch.no_grad():
            return sum(objective(batch).sums for batch in batches), sum(batch.counts for batch in batches)  # type: ignore[return-value]

    sums, counts = step(Shard(), 4)
    ranks = [step(Shard(rank, 2), 1) for rank in range(2)]
    torch.testing.assert_close(ranks[0][0] + ranks[1][0], sums, rtol=1e-4, atol=1e-4)
    assert torch.equal(ranks[0][1] + ranks[1][1], counts) and bool(counts[-2:].all())


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(birds: Path, tmp_path: Path) -> None:
    recipe = recipe_for(
        birds,
        loss=VOICES | {"codebook_weights": "adaptive"},
        data=LARGE_ROWS,
        train={"batch_size": 4, "steps": 4},
    )
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    for processes in (1, 2):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "myna"]
        subprocess.run(
            [sys.executable, *launcher, "train", str(file), "--out", str(tmp_path / str(processes))],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
            timeout=300,
        )
    rows = [[json.loads(line) for line in metrics(tmp_path / name)] for name in ("1", "2")]
    for one, two in zip(*rows, strict=True):
        for name in ("loss", *VOICE_STREAMS):
            assert one[name] == pytest.approx(two[name], rel=1e-4), name
        assert one["codebook_weights"] == pytest.approx(two["codebook_weights"], rel=1e-5)


def test_resumed_to_the_bit(birds: Path, tmp_path: Path) -> None:
    recipe = recipe_for(
        birds,
        loss=VOICES | {"codebook_weights": "adaptive"},
        data={"row_tokens": 800, "evaluation": str(birds / "evaluation")},
        train={"steps": 6, "save_every": 2},
    )
    folders = [tmp_path / "whole", tmp_path / "resumed"]
    run_training(recipe, Run.create(folders[0], recipe), Notes())
    with asked_to_stop(3):
        run_training(recipe, Run.create(folders[1], recipe), Notes())
    state = read_checkpoint_metadata(folders[1] / "checkpoints" / "step-000003")
    assert len(state["codebook_losses"]) == 8
    run_training(recipe, Run.open(folders[1]), Notes(), resume=True)
    assert metrics(folders[0]) == metrics(folders[1])
    results = [contents(Run.open(folder).result) for folder in folders]
    assert results[0] == results[1]


def test_off_by_default(birds: Path, family: HiggsV2) -> None:
    recipe = recipe_for(birds)
    assert not LossSettings().compares_voices
    loader = make_loader(recipe, family, recipe.data.train)
    [batch] = next(loader.steps(1, 1, Shard()))
    assert isinstance(batch, HiggsBatch) and batch.voice_index is None and len(batch.counts) == 9
    sequences = [loader.sequence(target, 0) for target in loader.reference_sampler.targets]
    plain, measured = family.collate(sequences), collate_for_training(family, recipe.loss, sequences)
    for field in fields(plain):
        one, other = getattr(plain, field.name), getattr(measured, field.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert int(plain.num_text_outputs) + len(set(plain.audio_output_index.tolist())) >= len(plain.output_positions)


def test_evaluations_are_those_of_the_tokens(birds: Path, tmp_path: Path) -> None:
    recipe, notes = recipe_for(birds, loss=VOICES, data={"evaluation": str(birds / "evaluation")}), Notes()
    run_training(recipe, Run.create(tmp_path / "run", recipe), notes)
    evaluations = [row["evaluation"] for row in notes.rows if "evaluation" in row]
    assert evaluations
    for row in evaluations:
        assert not set(VOICE_STREAMS) & set(row)
        assert row["loss"] == pytest.approx(sum(row[f"code{k}"] for k in range(8)) / 8, abs=1e-6)


# What is refused


@pytest.mark.parametrize(
    ("loss", "data", "message", "hint"),
    [
        ({"codebook_weights": "adaptiv"}, {}, "'uniform', '1/k' or 'adaptive'", "codebook_weights"),
        ({"speaker_contrastive": 1}, {}, "no setting `loss.speaker_contrastive`", "speaker_contrastive_weight"),
        ({"speaker_contrastive_weight": -1}, {}, "greater than or equal to 0", "recipe.md"),
        ({"reference_consistency_weight": 1}, {"reference": "none"}, "gives it none", "data.reference=same_speaker"),
        ({"speaker_contrastive_weight": 1}, {"pack": False}, "alone in its row", "data.pack=true"),
    ],
)
def test_refused_recipes(birds: Path, loss: dict[str, Any], data: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        recipe_for(birds, loss=loss, data=data)
    assert message in error.value.what and error.value.hint is not None and hint in error.value.hint


def refusal(recipe: Recipe, folder: Path) -> DataError:
    with pytest.raises(DataError) as error:
        run_training(recipe, Run.create(folder, recipe), Notes())
    return error.value


def rename_speakers(birds: Path, out: Path, name: str) -> Path:
    """The same data with one name, or none, for all speakers."""
    out.mkdir()
    lines = read_manifest(birds / "prepared" / "manifest.jsonl")
    write_manifest(out / "manifest.jsonl", [replace(line, speaker=name) for line in lines])
    prepare(str(out), out.with_name(f"{out.name}-prepared"), model=str(birds / "model"), device="cpu")
    return out.with_name(f"{out.name}-prepared")


def test_one_speaker_is_refused_by_the_contrastive_loss_alone(birds: Path, tmp_path: Path) -> None:
    data = {"train": str(rename_speakers(birds, tmp_path / "one", "robin")), "row_tokens": 800}
    error = refusal(recipe_for(birds, loss=VOICES, data=data), tmp_path / "run")
    assert "names 1" in error.what and "speaker_contrastive_weight=0" in str(error.hint)
    rows = train(birds, tmp_path / "other", {"reference_consistency_weight": 1.0}, data=data)
    assert "speaker_contrastive" not in rows[0] and rows[0]["reference_consistency"] > 0


def test_data_without_references_and_rows_too_small_are_refused(birds: Path, tmp_path: Path) -> None:
    unnamed = {"train": str(rename_speakers(birds, tmp_path / "unnamed", "")), "row_tokens": 800}
    error = refusal(recipe_for(birds, loss=VOICES, data=unnamed), tmp_path / "run")
    assert "have no reference" in error.what
    small = {"row_tokens": 190}
    error = refusal(recipe_for(birds, loss=VOICES, data=small), tmp_path / "small")
    assert "holds two speakers" in error.what and "data.row_tokens=760" in str(error.hint)
