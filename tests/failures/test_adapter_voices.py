"""Adapters and merged models that speak, and the base model, codec and files they belong to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

import myna
from myna.core.config import AdaptSettings, Recipe, parse_recipe
from myna.core.errors import CheckpointError, ConfigError, ModelError, MynaError, OutputError, SpeakError
from myna.core.run_folder import Run
from myna.models import SHIPPED, open_family, save_tiny_model
from myna.models.base import Family
from myna.models.files import resolve_checkpoint, weight_files
from myna.models.lora import load_adapter, make_trainable, merge_lora, save_adapter
from myna.models.merge import probe_logits
from myna.models.ref import ModelRef
from myna.speak.loading import load_adapted, load_engine
from tests.command_line import run_command

from .conftest import TrainWith
from .tiny_setup import cloning, load, make_recipe, train_run


def changed_adapter(family: Family, folder: Path, **settings: Any) -> Path:
    """An adapter that has learned something random."""
    model = make_trainable(load(family, text_head=True), family, AdaptSettings(rank=4, alpha=8, **settings))
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    save_adapter(model, folder)
    return folder


def logits(engine: Any) -> torch.Tensor:
    return probe_logits(engine.family, engine.model)


# Another base model or codec


def test_another_base_under_the_same_name_is_not_spoken_with(workspace: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(workspace / "model", tmp_path / "model"))
    run, _ = train_run(make_recipe(workspace, model={"source": str(base), "check_pretrained": False}), tmp_path / "run")
    assert load_engine(ModelRef.find_trained(run.folder), device="cpu")
    file = base / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor + 0.01 for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    moved = Path(shutil.copytree(run.adapter, tmp_path / "adapter"))
    for source in (run.folder, run.adapter, moved, next((run.folder / "checkpoints").iterdir())):
        with pytest.raises(SpeakError, match=r"was trained on another base model than .*: the fingerprint .* was \w+,"):
            load_engine(ModelRef.find_trained(source), device="cpu")
    with pytest.raises(SpeakError, match="another base model"):
        myna.merge(run, tmp_path / "merged")
    engine = load_engine(ModelRef.find_trained(moved, str(workspace / "model")), device="cpu")
    assert engine.family.source == str(workspace / "model"), "the one it was trained on, by another path"
    # Rounded otherwise than in training, it is still the same.
    tuned = ModelRef.find_trained(moved, str(workspace / "model"))
    rounded = load_adapted(tuned, tuned.open_family(), torch.bfloat16, "cpu", text_head=None)
    assert all(
        parameter.dtype == torch.bfloat16 for name, parameter in rounded.named_parameters() if "lora" not in name
    )


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_the_base_is_known_through_quantization_and_a_text_head(
    train_with: TrainWith, workspace: Path, quantization: str
) -> None:
    run, _ = train_with(
        model={"source": str(workspace / "model"), "check_pretrained": False, "quantization": quantization},
        adapt={"rank": 4, "alpha": 8, "train_modules": ["text_head", "audio_embedding"]},
        loss={"text_weight": 0.1},
    )
    assert load_engine(ModelRef.find_trained(run.folder), device="cpu")
    save_tiny_model(run.folder.with_name("other"), seed=5)
    with pytest.raises(SpeakError, match="another base model"):
        load_engine(ModelRef.find_trained(run.folder, str(run.folder.with_name("other"))), device="cpu")


def test_a_fully_trained_model_keeps_its_codec(
    train_with: TrainWith, workspace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    run, _ = train_with(adapt={"mode": "full"}, train={"steps": 1, "learning_rate": 1e-4})
    codec = open_family(str(workspace / "model")).load_encoder()
    moved = Path(shutil.copytree(run.model, tmp_path / "moved"))
    for source in (run.folder, run.model, moved):
        assert myna.load(source, device="cpu").engine.codec.revision == codec.revision
    assert open_family(str(moved)).codec_source == str(workspace / "model" / "codec")
    again, _ = train_with(model={"source": str(moved), "check_pretrained": False}, train={"steps": 1})
    assert load_engine(ModelRef.find_trained(again.folder), device="cpu").codec.revision == codec.revision


def test_a_model_trained_in_full_from_a_shipped_one_opens_on_another_machine(
    train_with: TrainWith, workspace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The package is installed elsewhere there."""
    monkeypatch.setitem(SHIPPED, "tiny", workspace / "model")
    model = {"source": "tiny", "check_pretrained": False}
    run, _ = train_with(model=model, adapt={"mode": "full"}, train={"steps": 1, "learning_rate": 1e-4})
    assert json.loads((run.model / "myna.json").read_text())["codec"] == "tiny"
    monkeypatch.setitem(SHIPPED, "tiny", Path(shutil.copytree(workspace / "model", tmp_path / "installed")))
    moved = Path(shutil.copytree(run.model, tmp_path / "moved"))
    assert open_family(str(moved)).codec_source == str(tmp_path / "installed" / "codec")
    assert myna.load(moved, device="cpu").engine.codec.sample_rate == 24_000
    myna.convert(moved, tmp_path / "converted")
    assert open_family(str(tmp_path / "converted")).codec_source == str(tmp_path / "installed" / "codec")


def test_the_codec_folder_of_another_machine_is_named_with_its_key(workspace: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(workspace / "model", tmp_path / "moved"))
    codec = shutil.move(moved / "codec", tmp_path / "codec")
    (moved / "myna.json").write_text(json.dumps({"codec": "/elsewhere/myna/models/fledgling/codec"}))
    with pytest.raises(ModelError, match=r"myna\.json: `codec` is /elsewhere/.*codec, which is not on") as caught:
        myna.load(moved, device="cpu")
    assert f"copy that folder to {moved}/codec" in caught.value.hint and "fledgling" in caught.value.hint
    assert open_family(str(moved), codec=str(codec)).load_encoder().sample_rate == 24_000
    shutil.copytree(codec, moved / "codec")
    assert myna.load(moved, device="cpu").engine.codec.sample_rate == 24_000


@pytest.mark.parametrize(("asked", "saved"), [("stored", torch.float16), ("fp32", torch.float32)])
def test_a_model_trained_in_full_is_saved_as_its_base_is_stored(
    train_with: TrainWith, workspace: Path, tmp_path: Path, asked: str, saved: torch.dtype
) -> None:
    family = open_family(str(workspace / "model"))
    base = family.load_model(dtype=torch.float16, device="cpu", text_head=False)
    family.save_model(base, tmp_path / "base", codec=workspace / "model" / "codec")
    run, _ = train_with(
        model={"source": str(tmp_path / "base"), "check_pretrained": False},
        adapt={"mode": "full", "save_precision": asked},
        train={"steps": 2, "learning_rate": 1e-3, "precision": "fp32"},
    )
    (file,) = run.model.glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(file).values()} == {saved}
    assert json.loads((run.model / "config.json").read_text())["dtype"] == str(saved).removeprefix("torch.")
    size = sum(file.stat().st_size for file in (tmp_path / "base").glob("*.safetensors"))
    assert file.stat().st_size == pytest.approx(size * saved.itemsize / 2, rel=0.02)
    state = load_file(next((run.folder / "checkpoints").iterdir()) / "state.safetensors")
    assert {x.dtype for name, x in state.items() if name.startswith("weight/")} == {torch.float32}, "to go on exactly"
    assert myna.load(run.folder, device="cpu")


# Unpinned files


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "part/model.safetensors", "..\\x", "", ".."])
def test_an_index_names_files_beside_it_and_nothing_else(workspace: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(workspace / "model", tmp_path / "model"))
    (folder / "model.safetensors").rename(tmp_path / "secret.safetensors")
    shutil.copy(tmp_path / "secret.safetensors", folder / "secret.safetensors")
    weight_map = dict.fromkeys(load_file(tmp_path / "secret.safetensors"), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="names files outside of its folder"):
        weight_files(folder)
    with pytest.raises(CheckpointError, match="names files outside of its folder"):
        load(open_family(str(folder)))


def test_a_codec_is_pinned_by_its_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def download(name: str, revision: str | None, **_: Any) -> str:
        asked.append((name, revision))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_checkpoint("owner/codec@9d4988f", None) == tmp_path
    assert resolve_checkpoint("owner/codec", "main") == tmp_path
    assert asked == [("owner/codec", "9d4988f"), ("owner/codec", "main")]
    with pytest.raises(ModelError, match="two revisions"):
        resolve_checkpoint("owner/codec@9d4988f", "main")


def test_the_released_codec_is_named_in_one_place() -> None:
    sources = Path(str(myna.__file__)).parent.rglob("*.py")
    assert sum(file.read_text(encoding="utf-8").count("higgs-audio-v2-tokenizer") for file in sources) == 1


# Text head that does not learn


def test_a_model_that_answers_trains_its_text_head(tmp_path: Path) -> None:
    family = open_family(str(save_tiny_model(tmp_path / "model", answers=True)))
    tree = {"model": {"source": "x"}, "data": {"train": "x"}, "train": {"steps": 1}}
    recipe: Recipe = parse_recipe(tree | {"adapt": {"rank": 4, "train_modules": ["text_head"]}}, where="test")
    model = make_trainable(load(family), family, recipe.adapt)
    batch = family.collate([family.render(family.probe())])
    family.objective(model)(batch).sums.sum().backward()
    head = model.get_submodule("base_model.model.lm_head")
    gradients = [parameter.grad for parameter in head.parameters() if parameter.requires_grad]
    assert gradients and all(gradient is not None and gradient.any() for gradient in gradients)
    for parameter in head.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter) * parameter.requires_grad

    save_adapter(model, tmp_path / "adapter")
    tuned = merge_lora(load_adapter(load(family), tmp_path / "adapter"))
    expected = probe_logits(family, tuned)
    assert (expected - probe_logits(family, load(family))).abs().max() > 0.01
    myna.merge(tmp_path / "adapter", tmp_path / "merged")
    merged = open_family(str(tmp_path / "merged"))
    assert torch.equal(probe_logits(merged, load(merged)), expected), "a tied head that was trained is tied no more"


def test_a_text_head_that_the_loss_does_not_reach_is_refused(train_with: TrainWith) -> None:
    with pytest.raises(ConfigError, match="loaded without its `text_head`, which this loss never reaches") as caught:
        train_with(adapt={"rank": 4, "train_modules": ["text_head"]})
    assert "loss.text_weight" in caught.value.hint


# Adapters that cannot be used


def test_an_adapter_is_a_voice(overfitted: Run, tmp_path: Path) -> None:
    expected = logits(load_engine(ModelRef.find_trained(overfitted.folder), device="cpu"))
    moved = Path(shutil.copytree(overfitted.adapter, tmp_path / "voice"))
    for source in (overfitted.adapter, moved, str(moved)):
        assert torch.equal(logits(myna.load(source, device="cpu").engine), expected)
    out = tmp_path / "hi.wav"
    spoken = run_command(
        ["speak", "hi", "--run", str(moved), "--max-seconds", "1", "--device", "cpu", "--out", str(out)], catch=True
    )
    assert spoken.exit_code == 0 and out.is_file(), spoken.exception


@pytest.mark.slow
def test_adapters_and_merged_models_are_evaluated_and_compared(
    overfitted: Run, workspace: Path, tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(overfitted.adapter, tmp_path / "voice"))
    myna.merge(moved, tmp_path / "merged")
    data: dict[str, Any] = {"data": workspace / "evaluation", "limit": 2, "device": "cpu"}
    evaluation = myna.evaluate(moved, out=tmp_path / "evaluation", **data)
    assert {"voice", "base"} <= set(evaluation.to_json()["systems"])
    evaluation = myna.evaluate(tmp_path / "merged", out=tmp_path / "again", **data)
    assert "merged" in evaluation.to_json()["systems"]
    comparison = myna.compare([moved, tmp_path / "merged"], out=tmp_path / "comparison", **data)
    assert list(comparison.names) == ["voice", "merged"]
    with pytest.raises(ConfigError, match="is a model by itself, and has no base"):
        myna.evaluate(tmp_path / "merged", model=str(workspace / "model"), out=tmp_path / "not", **data)


def test_an_adapter_of_a_model_that_answers_opens_too(tmp_path: Path) -> None:
    family = open_family(str(save_tiny_model(tmp_path / "model", answers=True)))
    adapter = changed_adapter(family, tmp_path / "adapter", train_modules=["norms"])
    tuned = myna.load_answer_model(adapter, device="cpu")
    untuned = myna.load_answer_model(family.source, device="cpu")
    assert not torch.equal(logits(tuned), logits(untuned))


def test_an_adapter_of_plain_peft_is_a_voice(family: Family, tmp_path: Path) -> None:
    base = load(family)
    plain = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    torch.manual_seed(0)
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.1 * torch.randn_like(parameter)
    plain.save_pretrained(str(tmp_path / "plain"), save_embedding_layers=False)
    expected = probe_logits(family, plain)
    with pytest.raises(MynaError, match="base") as caught:
        myna.load(tmp_path / "plain", device="cpu")
    assert "--model" in caught.value.hint
    voice = myna.load(tmp_path / "plain", model=family.source, device="cpu")
    assert torch.allclose(logits(voice.engine), expected, atol=1e-4)
    assert (expected - probe_logits(family, load(family))).abs().max() > 0.01

    config = json.loads((tmp_path / "plain" / "adapter_config.json").read_text())
    named = config | {"base_model_name_or_path": family.source}
    (tmp_path / "plain" / "adapter_config.json").write_text(json.dumps(named))
    assert torch.equal(logits(myna.load(tmp_path / "plain", device="cpu").engine), logits(voice.engine))
    assert voice.engine.reference_placement == "turn" and voice.engine.scene == ""


def test_an_adapter_on_the_hub_is_a_voice(overfitted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(overfitted.adapter))
    voice = myna.load("somebody/marta", device="cpu")
    assert torch.equal(
        logits(voice.engine), logits(load_engine(ModelRef.find_trained(overfitted.folder), device="cpu"))
    )


def test_an_adapter_keeps_how_it_was_trained(train_with: TrainWith, tmp_path: Path) -> None:
    run, _ = train_with(data={"reference_placement": "system", "scene": "A cave."})
    moved = Path(shutil.copytree(run.adapter, tmp_path / "moved"))
    engine = load_engine(ModelRef.find_trained(moved), device="cpu")
    assert (engine.reference_placement, engine.scene) == ("system", "A cave.")
    myna.merge(moved, tmp_path / "merged")
    engine = load_engine(ModelRef.find_model(str(tmp_path / "merged")), device="cpu")
    assert (engine.reference_placement, engine.scene) == ("system", "A cave.")


def test_an_adapter_that_does_not_fit_is_named(overfitted: Run, workspace: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "phi4", answers=True)
    moved = Path(shutil.copytree(overfitted.adapter, tmp_path / "moved"))
    (moved / "myna.json").unlink()
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_engine(ModelRef.find_trained(moved, str(other)), device="cpu")
    with pytest.raises(SpeakError, match="neither a run nor an adapter"):
        load_engine(ModelRef.find_trained(workspace / "model"), device="cpu")
    with pytest.raises(ModelError, match="is a LoRA adapter, and not a model") as caught:
        load_engine(ModelRef.find_model(str(moved)), device="cpu")
    assert "myna merge" in caught.value.hint
    config = json.loads((moved / "adapter_config.json").read_text())
    gone = config | {"base_model_name_or_path": str(tmp_path / "gone")}
    (moved / "adapter_config.json").write_text(json.dumps(gone))
    with pytest.raises(MynaError, match=r"the base model of .* does not open: there is no model folder") as missing:
        load_engine(ModelRef.find_trained(moved), device="cpu")
    assert "--model" in missing.value.hint


def test_an_extracted_adapter_is_a_voice(train_with: TrainWith, workspace: Path, tmp_path: Path) -> None:
    run, _ = train_with(adapt={"mode": "full"}, train={"steps": 3, "learning_rate": 1e-3})
    myna.extract_lora(str(workspace / "model"), str(run.model), tmp_path / "extracted", rank=64)
    full = logits(load_engine(ModelRef.find_trained(run.folder), device="cpu"))
    extracted = logits(myna.load(tmp_path / "extracted", device="cpu").engine)
    base = logits(load_engine(ModelRef.find_model(str(workspace / "model")), device="cpu"))
    assert (extracted - full).abs().max() < 0.1 * (base - full).abs().max()


@pytest.mark.parametrize("layout", ["transformers", "original"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dora": True},
        {"rslora": True, "train_modules": ["text_head", "audio_head", "audio_embedding", "norms"]},
    ],
)
def test_a_merged_model_has_the_weights_of_its_adapter(
    family: Family, tmp_path: Path, layout: str, settings: dict[str, Any]
) -> None:
    adapter = changed_adapter(family, tmp_path / "adapter", **settings)
    check = myna.merge(adapter, tmp_path / "merged", layout=layout)
    assert check.largest_difference < 1e-4 * check.largest_logit and check.lost_share < 1e-3
    spoken = load_engine(ModelRef.find_trained(adapter), device="cpu")
    merged = load_engine(ModelRef.find_model(str(tmp_path / "merged")), device="cpu")
    ours, theirs = spoken.model.state_dict(), merged.model.state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items()), "bit for bit"
    assert merged.codec.revision == spoken.codec.revision
    prompt = family.render(cloning(target=None))
    assert torch.equal(torch.from_numpy(prompt.ids), torch.from_numpy(merged.family.render(cloning(target=None)).ids))
    provenance = json.loads((tmp_path / "merged" / "myna.json").read_text())["provenance"]
    assert provenance["base"] == family.source and provenance["layout"] == layout
    kind = json.loads((tmp_path / "merged" / "config.json").read_text())["model_type"]
    assert kind == {"transformers": "higgs_audio_v2", "original": "higgs_audio"}[layout]


def test_a_merged_model_has_the_strength_that_was_asked_for(family: Family, tmp_path: Path) -> None:
    adapter = changed_adapter(family, tmp_path / "adapter", train_modules=["audio_head"])
    myna.merge(adapter, tmp_path / "merged", strength=0.5)
    spoken = load_engine(ModelRef.find_trained(adapter), device="cpu", strength=0.5)
    merged = load_engine(ModelRef.find_model(str(tmp_path / "merged")), device="cpu")
    assert torch.equal(logits(spoken), logits(merged))
    assert not torch.equal(logits(merged), logits(load_engine(ModelRef.find_trained(adapter), device="cpu")))
    dora = changed_adapter(family, tmp_path / "dora", dora=True)
    with pytest.raises(ModelError, match="a DoRA has magnitudes of its own"):
        myna.merge(dora, tmp_path / "half", strength=0.5)
    assert not (tmp_path / "half").exists()


def test_a_merged_model_speaks_and_is_trained_on(overfitted: Run, workspace: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    made = run_command(["merge", str(overfitted.folder), "--out", str(out)], catch=True)
    assert made.exit_code == 0 and "logits differ from the adapter's by at most" in made.output, made.exception
    before, after = (
        myna.load(one, device="cpu").speak("hi", temperature=0.0, max_seconds=1.0) for one in (overfitted, out)
    )
    assert before.codes.tolist() == after.codes.tolist() and len(before.samples)
    model = {"source": str(out), "check_pretrained": False}
    data = {"train": str(workspace / "evaluation")}
    run, _ = train_run(make_recipe(workspace, model=model, data=data), tmp_path / "run")
    assert load_engine(ModelRef.find_trained(run.folder), device="cpu")


def test_a_merge_that_rounding_would_lose_is_refused(family: Family, tmp_path: Path) -> None:
    model = make_trainable(load(family), family, AdaptSettings(rank=1, alpha=1))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 1e-6 * torch.randn_like(parameter)
    save_adapter(model, tmp_path / "faint")
    with pytest.raises(ModelError, match="would be lost in rounding to bfloat16") as caught:
        myna.merge(tmp_path / "faint", tmp_path / "merged", dtype="bfloat16")
    assert "--dtype float32" in caught.value.hint
    assert not (tmp_path / "merged").exists()
    myna.merge(tmp_path / "faint", tmp_path / "merged")


def test_merging_overwrites_nothing_and_refuses_a_whole_model(
    overfitted: Run, train_with: TrainWith, workspace: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for taken in (tmp_path / "mine", overfitted.folder, workspace / "model", tmp_path / "mine" / "thesis.txt"):
        with pytest.raises(OutputError, match="exists"):
            myna.merge(overfitted, taken)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    full, _ = train_with(adapt={"mode": "full"}, train={"steps": 1})
    with pytest.raises(ModelError, match="was trained in full") as caught:
        myna.merge(full, tmp_path / "merged")
    assert f"--model {full.model}" in caught.value.hint and "myna model convert" in caught.value.hint
    with pytest.raises(ModelError, match="there is no layout boson"):
        myna.merge(overfitted, tmp_path / "merged", layout="boson")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "run0"]
