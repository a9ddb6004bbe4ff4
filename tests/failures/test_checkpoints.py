"""Loading, saving and resuming of checkpoints, and fallbacks that must be errors."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from myna import prepare
from myna.checks import doctor
from myna.core.check import Check
from myna.core.errors import CheckpointError, ModelError, TrainingError
from myna.core.run_folder import Run, checkpoint_folder, checkpoint_steps
from myna.data.dataset import PreparedDataset
from myna.models import convert_checkpoint, open_family
from myna.models.higgs_v2.tiny import save_tiny_codec
from myna.train import checkpoint
from myna.train.loop import run_training

from .tiny_setup import RecordingCallback, load, make_recipe

Patch = pytest.MonkeyPatch


@pytest.fixture
def copy(workspace: Path, tmp_path: Path) -> Path:
    """The model, to be damaged."""
    return Path(shutil.copytree(workspace / "model", tmp_path / "model"))


def diagnosis(folder: Path) -> dict[str, Check]:
    """Checks of `myna doctor --model`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "MACHINE_CHECKS", ())
        return {check.name: check for check in doctor.run_doctor(str(folder))}


# Audio tower that is not there


@pytest.mark.parametrize(
    ("setting", "value"), [("skip_audio_tower", False), ("audio_adapter_type", "stack"), ("use_rq_transformer", True)]
)
def test_a_configuration_with_an_audio_tower_is_refused(
    workspace: Path, tmp_path: Path, setting: str, value: object
) -> None:
    convert_checkpoint(workspace / "model", tmp_path / "original", "original")
    file = tmp_path / "original" / "config.json"
    stored = json.loads(file.read_text())
    assert stored["skip_audio_tower"] is True and stored["encode_whisper_embed"] is False
    file.write_text(json.dumps(stored | {setting: value}))
    with pytest.raises(ModelError, match=f"{setting} is {value!r}; transformers' Higgs Audio v2 can only express"):
        open_family(str(tmp_path / "original"))
    check = diagnosis(tmp_path / "original")["model"]
    assert check.status == "failed" and setting in check.message


@pytest.mark.parametrize("mels", [80, 128])
def test_weights_of_an_unused_audio_tower_are_refused(copy: Path, mels: int) -> None:
    """Neither whisper-large's 128 mel bins nor the 80 of whisper-base, to which others fell back."""
    file = copy / "model.safetensors"
    tower = {"audio_tower.conv1.weight": torch.zeros(8, mels, 3)}
    save_file(load_file(file) | tower, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 unexpected: audio_tower\.conv1\.weight"):
        load(open_family(str(copy)))
    assert diagnosis(copy)["weights"].status == "failed"


# Broken checkpoints


def start(recipe: Any, folder: Path, recorder: RecordingCallback | None = None) -> Run:
    run = Run.create(folder, recipe)
    run_training(recipe, run, recorder or RecordingCallback())
    return run


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def flipped(tensors: dict[str, torch.Tensor], path: Path, **how: Any) -> None:
    """A disk that returns other bytes than were written."""
    save_file(tensors, path, **how)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("disk", "said"), [(full, "No space left on device"), (flipped, "was read back otherwise")])
def test_a_save_that_fails_stops_the_run_and_leaves_the_checkpoint_before_it(
    workspace: Path, tmp_path: Path, monkeypatch: Patch, disk: Callable[..., None], said: str
) -> None:
    recipe = make_recipe(workspace, train={"steps": 4, "save_every": 2})
    saves = []

    def second_time(tensors: dict[str, torch.Tensor], path: Path, **how: Any) -> None:
        saves.append(path)
        (disk if len(saves) == 2 else save_file)(tensors, path, **how)

    monkeypatch.setattr(checkpoint, "save_file", second_time)
    with pytest.raises(TrainingError, match=f"(?s)the checkpoint of step 4 could not be written .*{said}") as caught:
        start(recipe, tmp_path / "run")
    assert f"go on from step 2: myna train --resume {tmp_path / 'run'}" in caught.value.hint
    run = Run.open(tmp_path / "run")
    assert checkpoint_steps(run) == [2] and not run.is_finished
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-000002"], "nothing half-written"

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    run_training(run.recipe, run, RecordingCallback(), resume=True)
    assert checkpoint_steps(run) == [2, 4] and run.is_finished


def test_an_empty_checkpoint_folder_is_refused(workspace: Path, tmp_path: Path) -> None:
    run = start(make_recipe(workspace, train={"steps": 2, "save_every": 1}), tmp_path / "run")
    shutil.rmtree(run.result)
    newest = checkpoint_folder(run, 2)
    for file in newest.iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    with pytest.raises(TrainingError, match="step-000002 is damaged") as caught:
        run_training(run.recipe, run, RecordingCallback(), resume=True)
    assert caught.value.hint == f"rm -r {newest} and resume from the one before it"
    shutil.rmtree(newest)
    run_training(run.recipe, run, RecordingCallback(), resume=True)
    assert run.is_finished


# Silent fallbacks


def test_a_damaged_tokenizer_is_an_error(copy: Path) -> None:
    file = copy / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        open_family(str(copy))
    assert diagnosis(copy)["model"].status == "failed"


def test_a_tokenizer_of_another_model_is_an_error(copy: Path) -> None:
    """A tokenizer of another model is readable, but every id means something else."""
    file = copy / "tokenizer.json"
    file.write_text(file.read_text().replace("<|AUDIO_OUT|>", "<|another|>"))
    with pytest.raises(ModelError, match=r"do not belong together: the tokenizer has no single token <\|AUDIO_OUT\|>"):
        open_family(str(copy))


def test_a_wrong_codec_path_is_an_error_and_never_a_warning(workspace: Path, tmp_path: Path) -> None:
    model = workspace / "model"
    for wrong, said in (
        ("/no/such/codec", "there is no model folder /no/such/codec"),
        (str(workspace / "recordings"), "has no config.json"),
        (str(model), "not a codec"),
        (str(model / "codec" / "config.json"), "is a file, not the folder"),
    ):
        with pytest.raises(ModelError, match=said):
            prepare(str(workspace / "recordings"), tmp_path / "out", model=str(model), codec=wrong, device="cpu")
    assert not (tmp_path / "out" / "prepared.json").exists()


def test_a_codec_of_another_size_is_an_error(workspace: Path, tmp_path: Path) -> None:
    other = save_tiny_codec(tmp_path / "codec", codebook_size=32)
    with pytest.raises(ModelError, match=r"makes 8 x 32 codes at 25 frames/s; .* wants 8 x 64 at 25"):
        open_family(str(workspace / "model"), codec=str(other)).load_encoder()


def test_codes_are_pinned_to_the_weights_that_made_them(workspace: Path, copy: Path, tmp_path: Path) -> None:
    """The codec changes behind an unchanged path: nothing of the old codes is used for the new."""
    out = Path(shutil.copytree(workspace / "prepared", tmp_path / "prepared"))
    before = PreparedDataset.open(out)
    shutil.rmtree(copy / "codec")
    save_tiny_codec(copy / "codec", seed=1)
    prepare(str(workspace / "recordings"), out, model=str(copy), device="cpu")
    after = PreparedDataset.open(out)
    assert after.info.codec_revision != before.info.codec_revision
    one = after.utterances[0]
    assert after.key(one) != before.key(one) and after.codes(one).tolist() != before.codes(one).tolist()


def test_a_revision_is_not_ignored(workspace: Path) -> None:
    with pytest.raises(ModelError, match="is a local folder, which has no revision main"):
        open_family(str(workspace / "model"), revision="main")


# Resume


class InterruptingCallback(RecordingCallback):
    """Interrupts the training after a step without a checkpoint."""

    def on_metrics(self, row: dict[str, Any]) -> None:
        super().on_metrics(row)
        if row["step"] == 5:
            raise KeyboardInterrupt


@pytest.fixture(scope="session")
def whole_and_broken(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that was never disturbed, and the same one, broken off after step 5 with a checkpoint of step 4."""
    recipe = make_recipe(
        workspace,
        data={"evaluation": str(workspace / "evaluation"), "packing_window": 4},
        adapt={"dropout": 0.3, "train_modules": ["audio_head"]},
        train={
            "steps": 7,
            "save_every": 2,
            "evaluate_every": 3,
            "micro_batch_size": 1,
            "ema_decay": 0.9,
            "schedule": "cosine",
        },
    )
    folder = tmp_path_factory.mktemp("resume")
    start(recipe, folder / "whole")
    with pytest.raises(KeyboardInterrupt):
        start(recipe, folder / "broken", InterruptingCallback())
    return folder / "whole", folder / "broken"


def metrics(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "speed"} for row in rows]


def test_resumed_is_uninterrupted_bit_for_bit(whole_and_broken: tuple[Path, Path], tmp_path: Path) -> None:
    whole, broken = whole_and_broken
    folder = Path(shutil.copytree(broken, tmp_path / "run"))
    assert checkpoint_steps(Run.open(folder)) == [3, 4] and metrics(folder)[-1]["step"] == 5
    torch.manual_seed(12345)
    callback = RecordingCallback()
    run = Run.open(folder)
    run_training(run.recipe, run, callback, resume=True)
    assert [row["step"] for row in callback.steps] == [5, 6, 7], "it neither begins again nor skips"
    assert metrics(folder) == metrics(whole)
    for file in ("adapter/adapter_model.safetensors", "checkpoints/step-000007/state.safetensors"):
        assert (folder / file).read_bytes() == (whole / file).read_bytes(), file


@pytest.mark.parametrize("lost", ["optimizer/exp_avg/", "optimizer/", "rng/", "ema/", "weight/"])
def test_a_checkpoint_without_all_its_state_is_refused(
    whole_and_broken: tuple[Path, Path], tmp_path: Path, lost: str
) -> None:
    folder = Path(shutil.copytree(whole_and_broken[1], tmp_path / "run"))
    run = Run.open(folder)
    file = checkpoint_folder(run, 4) / "state.safetensors"
    tensors = load_file(file)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)}
    assert len(kept) < len(tensors)
    save_file(kept, file)
    with pytest.raises(TrainingError, match=rf"step-000004 is damaged: .* disagree about {lost}"):
        run_training(run.recipe, run, RecordingCallback(), resume=True)


def test_a_run_does_not_resume_with_other_settings_or_data(
    whole_and_broken: tuple[Path, Path], workspace: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    folder = Path(shutil.copytree(whole_and_broken[1], tmp_path / "run"))
    with pytest.raises(TrainingError, match=r"cannot go on with another train\.learning_rate"):
        Run.open(folder, ["train.learning_rate=1e-5"])
    moved = Path(shutil.copytree(workspace / "prepared", tmp_path / "prepared"))
    manifest = moved / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace('"text": "you"', '"text": "who are you"'))
    run = Run.open(folder, [f"data.train={moved}"])
    with pytest.raises(TrainingError, match="was made with another training data"):
        run_training(run.recipe, run, RecordingCallback(), resume=True)
    monkeypatch.setattr("myna.models.higgs_v2.render.SYSTEM_PROMPT", "Speak.")
    run = Run.open(folder)
    with pytest.raises(TrainingError, match="was made with another prompt"):
        run_training(run.recipe, run, RecordingCallback(), resume=True)
