"""Resolution of names: runs, checkpoints, adapters, model folders, hub names and shipped models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from myna.core.config import dump_recipe, parse_recipe
from myna.core.errors import ModelError, SpeakError, TrainingError
from myna.core.run_folder import RunFolder
from myna.models import SHIPPED, save_tiny_model
from myna.models.ref import ModelRef, split_name
from myna.provenance.speech_log import model_origin


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def make_adapter(folder: Path, base: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


def make_run(folder: Path, source: str, mode: str = "comprehensive") -> Path:
    tree: dict[str, Any] = {"model": {"source": source}, "data": {"train": "x"}, "train": {"steps": 1}}
    checkpoint = folder / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_recipe(parse_recipe(tree | {"adapt": {"mode": mode}}, where="test")))
    (checkpoint / "state.json").write_text(json.dumps({"inputs": {"prompt": "p1", "training data": "d1"}}))
    for place in (folder, checkpoint):
        if mode == "full":
            (place / "model").mkdir()
        else:
            make_adapter(place / "adapter", source)
    return folder


def test_a_run_and_its_parts_are_resolved_to_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "marta", "owner/base")
    opened = RunFolder.open(run)
    for source in (run, str(run), opened, run / "adapter"):
        ref = ModelRef.find(source)
        assert (ref.kind, ref.folder, ref.adapter, ref.weights) == ("run", run, run / "adapter", run / "adapter")
        assert ref.run is not None and ref.run.recipe == opened.recipe and ref.is_trained
        assert ref.base_source == "owner/base" and ref.metadata.inputs == {"prompt": "p1"}
    checkpoint = ModelRef.find(run / "checkpoints" / "step-000001")
    assert checkpoint.adapter == run / "checkpoints" / "step-000001" / "adapter"
    assert checkpoint.run is not None and checkpoint.run.recipe == opened.recipe
    assert ModelRef.find(run, "owner/other").base_source == "owner/other"


def test_a_fully_trained_run_has_no_adapter(tmp_path: Path) -> None:
    run = make_run(tmp_path / "marta", "owner/base", "full")
    ref = ModelRef.find_trained(run)
    assert (ref.kind, ref.adapter, ref.weights) == ("run", None, run / "model")
    assert model_origin(ref).adapter_sha256 == ""
    with pytest.raises(ModelError, match="was trained in full, and has no LoRA") as caught:
        ref.require_adapter()
    assert caught.value.hint.endswith(f"--model {run / 'model'}")


def test_an_adapter_names_its_base_and_speech_its_origin(tmp_path: Path, model: Path) -> None:
    adapter = make_adapter(tmp_path / "voice", str(model))
    ref = ModelRef.find_trained(adapter)
    assert (ref.kind, ref.folder, ref.adapter, ref.run) == ("adapter", adapter, adapter, None)
    assert ref.open_family().source == ref.base_source == str(model)
    origin = model_origin(ref)
    assert (origin.model, origin.adapter) == ("model", "voice") and len(origin.adapter_sha256) == 64
    gone = ModelRef.find(make_adapter(tmp_path / "other", str(tmp_path / "gone")))
    with pytest.raises(ModelError, match=r"the base model of .*other does not open: there is no model folder"):
        gone.open_family()


def test_models_are_resolved_without_metadata_of_a_training(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(model))
    for source, folder in ((str(model), model), ("owner/model", model), ("fledgling", SHIPPED["fledgling"])):
        ref = ModelRef.find(source)
        assert (ref.kind, ref.folder, ref.weights, ref.adapter) == ("model", folder, folder, None)
        assert ref.base_source == source and not ref.is_trained and ref.metadata.source == ""
    assert ModelRef.find("higgs-v2").folder is None
    assert model_origin(ModelRef.find(model)).model == "model"
    with pytest.raises(ModelError, match="is a whole model, and has no LoRA"):
        ModelRef.find(model).require_adapter()


def test_an_adapter_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloaded = make_adapter(tmp_path / "download", "owner/base")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(downloaded))
    ref = ModelRef.find("owner/voice")
    assert (ref.kind, ref.source, ref.adapter) == ("adapter", "owner/voice", downloaded)
    assert model_origin(ref).adapter == "owner/voice"


def test_wrong_names_are_refused_with_what_to_type(tmp_path: Path, model: Path) -> None:
    with pytest.raises(SpeakError, match="there is no run runs/no/such"):
        ModelRef.find_trained("runs/no/such")
    with pytest.raises(SpeakError, match="is neither a run nor an adapter") as caught:
        ModelRef.find_trained(model)
    assert caught.value.hint.startswith(f"--model {model} opens an untuned model")
    with pytest.raises(ModelError, match="there is no model folder nomodel"):
        ModelRef.find("nomodel")
    with pytest.raises(SpeakError, match="give --run or --model"):
        ModelRef.from_options(None, None)
    unfinished = make_run(tmp_path / "run", "owner/base")
    (unfinished / "adapter").rename(tmp_path / "moved")
    with pytest.raises(ModelError, match="is a run that is not finished"):
        ModelRef.find(unfinished)
    with pytest.raises(TrainingError, match="is not a run"):
        RunFolder.open(tmp_path)
    with pytest.raises(ModelError, match="is a LoRA adapter, and not a model") as caught_adapter:
        ModelRef.find_model(str(tmp_path / "moved")).open_family()
    assert "myna merge" in caught_adapter.value.hint


def test_options_name_a_run_on_another_base_or_a_model(tmp_path: Path, model: Path) -> None:
    run = make_run(tmp_path / "run", "owner/base")
    assert ModelRef.from_options(run, str(model)).base_source == str(model)
    assert ModelRef.from_options(None, str(model)).kind == "model"
    with pytest.raises(ModelError, match="there is no model folder nomodel"):
        ModelRef.from_options(run, "nomodel")


def test_a_subject_may_be_given_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert split_name("mine=runs/marta") == ("mine", "runs/marta")
    assert split_name("runs/marta") == ("marta", "runs/marta") and split_name("owner/name")[0] == "name"
    Path("a=b").mkdir()
    assert split_name("a=b") == ("a=b", "a=b") and split_name(".") == (".", ".")
