"""Adapters of single requests in one batch, against the same adapters merged into the model."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import myna
from myna.audio.files import read_audio
from myna.core.errors import CheckpointError, ModelError, SpeakError
from myna.models import open_family
from myna.models.base import Sampling
from myna.models.higgs_v2.family import HiggsV2
from myna.models.higgs_v2.tiny import save_tiny
from myna.models.lora import load_adapter, merge_lora, save_adapter
from myna.models.ref import ModelRef
from myna.speak.engine import Engine
from myna.speak.loading import load_engine
from myna.speak.request import SpeechRequest
from myna.speak.scheduler import BatchScheduler

GREEDY: dict[str, Any] = {"temperature": 0, "max_seconds": 0.8}
LONG = " ".join(f"Sentence number {number} is here to be spoken slowly." for number in range(12))
SAMPLED: dict[str, Any] = {"seed": 3, "max_seconds": 0.8}
RANKS = {"first": 4, "second": 16, "third": 20}
"""Make adapters, of which the last does not fit the slots that the first makes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("adapters") / "model")


@pytest.fixture(scope="module")
def family(model: Path) -> HiggsV2:
    opened = open_family(str(model))
    assert isinstance(opened, HiggsV2)
    return opened


@pytest.fixture(scope="module")
def adapters(family: HiggsV2, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    return {name: write(family, folder / name, r=rank, seed=rank) for name, rank in RANKS.items()}


def write(family: HiggsV2, folder: Path, *, r: int, seed: int = 0, mode: str = "comprehensive", **options: Any) -> Path:
    loaded = family.load_model(dtype=torch.float32, device="cpu", text_head=False)
    targets = list(family.lora_targets(loaded, mode).adapted)
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=r, lora_alpha=3 * r, target_modules=targets, init_lora_weights=options.pop("init", False), **options
    )
    folder.mkdir()
    save_adapter(peft.get_peft_model(loaded, config), folder)
    return folder


def merged(family: HiggsV2, folder: Path, strength: float = 1.0) -> Engine:
    loaded = family.load_model(dtype=torch.float32, device="cpu", text_head=False)
    weights = merge_lora(load_adapter(loaded, folder), strength)
    return Engine(family, weights, family.load_codec())


@pytest.fixture
def engine(model: Path, adapters: dict[str, Path]) -> Engine:
    opened = load_engine(ModelRef.find_model(str(model)), device="cpu")
    for name, folder in adapters.items():
        assert opened.load_adapter(name, folder) > 0
    return opened


def finish(scheduler: BatchScheduler) -> None:
    while scheduler.busy:
        scheduler.advance()


def requests(
    adapter: str, strength: float = 1.0, count: int = 3, settings: Mapping[str, Any] = GREEDY
) -> list[SpeechRequest]:
    return [
        SpeechRequest(f"line {n}" * (n + 1), id=f"{n}", adapter=adapter, strength=strength, **settings)
        for n in range(count)
    ]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_adapters_in_one_batch_speak_as_their_merged_models(
    engine: Engine, family: HiggsV2, adapters: dict[str, Path], model: Path, sampling: dict[str, Any]
) -> None:
    kinds = [("", 1.0), *((name, 1.0) for name in adapters), ("second", 0.5)]
    crowd = [request for kind in kinds for request in requests(*kind, settings=sampling)]
    spoken = engine.speak(crowd)
    plain = load_engine(ModelRef.find_model(str(model)), device="cpu")
    alone = [plain, *(merged(family, adapters[name], strength) for name, strength in kinds[1:])]
    for number, other in enumerate(alone):
        expected = other.speak(requests("", settings=sampling))
        for ours, theirs in zip(spoken[3 * number : 3 * number + 3], expected, strict=True):
            assert np.array_equal(ours.codes, theirs.codes)
    different = {speech.codes.tobytes() for speech in spoken[::3]}
    assert len(different) == len(kinds), "every adapter says something else"


def test_an_attention_only_adapter_speaks_as_merged(family: HiggsV2, model: Path, tmp_path: Path) -> None:
    folder = write(family, tmp_path / "attention", r=8, mode="attention_only")
    engine = load_engine(ModelRef.find_model(str(model)), device="cpu")
    engine.load_adapter("a", folder)
    ours = engine.speak(requests("a"))
    theirs = merged(family, folder).speak(requests(""))
    assert all(np.array_equal(a.codes, b.codes) for a, b in zip(ours, theirs, strict=True))


def test_takes_share_a_prefill_only_with_the_same_adapter(engine: Engine) -> None:
    scheduler = engine.batch_of(4, 256).scheduler
    prompt = engine.render(SpeechRequest("hello"), (), "hello")
    generations = [
        scheduler.submit(prompt, Sampling(**GREEDY), 9, adapter, strength)
        for adapter, strength in (("", 1.0), ("first", 1.0), ("first", 0.3), ("first", 1.0))
    ]
    finish(scheduler)
    codes = [generation.codes().tobytes() for generation in generations]
    assert codes[1] == codes[3] and len(set(codes)) == 3


def test_an_adapter_is_loaded_and_unloaded_while_others_speak(engine: Engine, adapters: dict[str, Path]) -> None:
    alone = engine.speak([SpeechRequest("on and on", adapter="first", **GREEDY)])[0]
    stream = engine.stream(SpeechRequest("on and on", adapter="first", **GREEDY))
    samples = [next(stream)]
    engine.unload_adapter("first")
    with pytest.raises(SpeakError, match="no adapter first"):
        engine.speak([SpeechRequest("again", adapter="first", **GREEDY)])
    engine.load_adapter("fourth", adapters["second"])  # takes no slot that is in use
    samples += list(stream)
    assert np.array_equal(np.concatenate(samples), alone.samples)
    assert engine.adapters == ("second", "third", "fourth")


def test_a_long_text_goes_on_when_its_adapter_is_unloaded(
    engine: Engine, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All segments keep the adapter, its scene and the place of its references."""
    trained = engine._adapters["first"].model_copy(update={"scene": "A quiet room.", "reference_placement": "system"})
    monkeypatch.setitem(engine._adapters, "first", trained)
    request = SpeechRequest(LONG, adapter="first", **GREEDY)
    plan = engine.plan(request)
    [(_, alone)] = engine.speak_plans([plan])
    stream = engine.stream(request, split=True)
    samples = [next(stream)]
    engine.unload_adapter("first")
    engine.load_adapter("fourth", adapters["second"])
    samples += list(stream)
    assert len(plan.segments) > 2 and np.array_equal(np.concatenate(samples), alone.samples)
    assert plan.request.scene == "A quiet room." and plan.request.reference_placement == "system"


def test_slots_are_used_again(model: Path, adapters: dict[str, Path]) -> None:
    engine = load_engine(ModelRef.find_model(str(model)), device="cpu")
    engine.max_adapters = 2
    for _ in range(3):
        engine.load_adapter("a", adapters["first"])
        engine.load_adapter("b", adapters["second"])
        with pytest.raises(SpeakError, match="all 2 places"):
            engine.load_adapter("c", adapters["third"])
        generation = engine.speak([SpeechRequest("hello", adapter="a", **GREEDY)])
        assert generation[0].codes.size
        engine.unload_adapter("a")
        engine.unload_adapter("b")


def test_an_adapter_without_effect_is_refused(family: HiggsV2, model: Path, tmp_path: Path) -> None:
    folder = write(family, tmp_path / "untrained", r=4, init=True)
    engine = load_engine(ModelRef.find_model(str(model)), device="cpu")
    with pytest.raises(SpeakError, match="changes nothing"):
        engine.load_adapter("none", folder)
    assert engine.adapters == ()


def test_adapters_that_can_only_be_merged_are_refused(family: HiggsV2, model: Path, tmp_path: Path) -> None:
    engine = load_engine(ModelRef.find_model(str(model)), device="cpu")
    for name, options in (("dora", {"use_dora": True}), ("head", {"modules_to_save": ["audio_lm_head"]})):
        folder = write(family, tmp_path / name, r=4, **options)
        with pytest.raises(ModelError, match=r"DoRA|in full") as error:
            engine.load_adapter(name, folder)
        assert "myna merge" in error.value.hint


def test_an_adapter_of_another_model_is_refused(model: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(adapters["first"], tmp_path / "wide")
    tensors = load_file(folder / "adapter_model.safetensors")
    wider = {name: torch.cat([x, x], 1) if "lora_A" in name else x for name, x in tensors.items()}
    save_file(wider, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="does not fit"):
        load_engine(ModelRef.find_model(str(model)), device="cpu").load_adapter("other", folder)


def test_exact_speech_is_the_same_alone_and_in_a_crowd(model: Path, adapters: dict[str, Path]) -> None:
    engine = load_engine(ModelRef.find_model(str(model)), device="cpu", exact=True)
    engine.max_rows = 5
    engine.load_adapter("a", adapters["first"])
    crowd = [*requests("", count=5, settings=SAMPLED), *requests("a", 0.7, count=5, settings=SAMPLED)]
    together = engine.speak(crowd)
    for request, speech in zip(crowd, together, strict=True):
        [alone] = engine.speak([request])
        assert np.array_equal(alone.codes, speech.codes) and np.array_equal(alone.samples, speech.samples)


def test_exact_log_probabilities_are_the_same_bits(model: Path) -> None:
    engine = load_engine(ModelRef.find_model(str(model)), device="cpu", exact=True)
    engine.max_rows = 4
    scheduler = engine.batch_of(1, 256).scheduler
    prompts = [engine.render(request, (), request.text) for request in requests("", count=4)]
    together = [scheduler.submit(prompt, Sampling(**SAMPLED), 9) for prompt in prompts]
    finish(scheduler)
    for prompt, crowd in zip(prompts, together, strict=True):
        alone = scheduler.submit(prompt, Sampling(**SAMPLED), 9)
        finish(scheduler)
        assert np.array_equal(alone.log_probs(), crowd.log_probs())


def test_voices_of_adapters_share_a_model(model: Path, family: HiggsV2, adapters: dict[str, Path]) -> None:
    base = myna.load(str(model), device="cpu")
    options: dict[str, Any] = {"temperature": 0.0, "max_seconds": 0.8, "watermark": False}
    before = base.speak("hello", **options).codes
    first, second = base.load_adapter(adapters["first"]), base.load_adapter(adapters["second"], name="b", strength=0.5)
    for voice, name, strength in ((first, "first", 1.0), (second, "second", 0.5)):
        expected = merged(family, adapters[name], strength).speak([SpeechRequest("hello", id="hello", **GREEDY)])[0]
        assert np.array_equal(voice.speak("hello", **options).codes, expected.codes)
        assert np.array_equal(np.concatenate(list(voice.stream("hello", **options))), expected.samples)
    assert np.array_equal(base.speak("hello", **options).codes, before)
    second.unload_adapter()
    with pytest.raises(SpeakError, match="no adapter b"):
        second.speak("hello", **options)


def test_lines_of_a_file_are_spoken_with_an_adapter(model: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    lines, out = tmp_path / "lines.txt", tmp_path / "out"
    lines.write_text("Good morning.\nGood evening.\n", encoding="utf-8")
    settings: dict[str, Any] = {"max_seconds": 0.4, "watermark": False}
    base = myna.load(str(model), device="cpu")
    first, weaker, second, again = (
        base.load_adapter(adapters[adapter], name=name, strength=strength)
        for adapter, name, strength in (("first", "a", 1), ("first", "b", 0.5), ("second", "c", 1), ("first", "d", 1))
    )
    spoken = {}
    for name, voice in (("base", base), ("first", first), ("weaker", weaker), ("second", second)):
        found = voice.speak_lines(lines, out, **settings)
        assert found.kept == 0, f"{name} is another voice"
        spoken[name] = read_audio(out / found.rows[0]["file"])
        alone = voice.speak("Good morning.", **settings).samples
        assert np.abs(spoken[name] - alone.clip(-1, 1)).max() < 1e-3
        assert voice.speak_lines(lines, out, **settings).kept == 2
    for one, other in itertools.combinations(spoken.values(), 2):
        assert one.shape != other.shape or np.abs(one - other).max() > 1e-2
    first.speak_lines(lines, out, **settings)
    assert again.speak_lines(lines, out, **settings).kept == 2, "the same adapter, whatever it is called"
