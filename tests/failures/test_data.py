"""Training and evaluation data: references, bad samples, leaks, and when to stop."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from myna import prepare
from myna.audio.files import read_audio
from myna.core.errors import ConfigError, DataError, TrainingError
from myna.data.conversation import AudioClip
from myna.data.dataset import PreparedDataset
from myna.data.importers import import_source, write_import
from myna.models import open_family
from myna.models.base import Batch, Family
from myna.models.higgs_v2.family import HiggsV2
from myna.train.loop import make_loader
from myna.train.trainer import Trainer
from tests.tone_corpus import SAMPLE_RATE, SPEAKER_PITCHES, tone_speech

from .conftest import TrainWith
from .tiny_setup import LINES, VOICE, make_recipe, record, train_run, write_clip

Patch = pytest.MonkeyPatch


def prepared(workspace: Path, source: Path, **how: Any) -> Path:
    out = source.with_name(f"{source.name}-prepared")
    prepare(str(source), out, model=str(workspace / "model"), device="cpu", **how)
    return out


# Reference that is the target


def chatml(workspace: Path, file: Path, references: Sequence[dict[str, Any]]) -> Path:
    """Boson's layout: a sample for every way to name the reference of the same target."""
    target = {"type": "audio", "audio_url": str(workspace / "recordings/robin/hi.wav")}
    samples = [
        {
            "messages": [
                {"role": "user", "content": VOICE},
                {"role": "assistant", "content": reference},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": target},
            ],
            "start_index": 3,
            "speaker": "robin",
            "misc": {"sample_id": f"sample-{number}"},
        }
        for number, reference in enumerate(references)
    ]
    file.write_text(json.dumps(samples))
    return file


def test_a_placeholder_without_a_clip_is_never_filled_with_another(workspace: Path, tmp_path: Path) -> None:
    voice = {"type": "audio", "audio_url": str(workspace / "recordings/robin/who.wav")}
    itself = {"type": "audio", "audio_url": str(workspace / "recordings/robin/hi.wav")}
    source = chatml(workspace, tmp_path / "data.json", [{"type": "audio", "audio_url": "placeholder"}, itself, voice])
    imported = import_source(str(source), media=tmp_path / "media")
    assert [(item.id, item.reason) for item in imported.rejected] == [
        ("sample-0", "placeholder without clip"),
        ("sample-1", "reference equals target"),
    ]
    [target] = [utterance for utterance in imported.utterances if utterance.is_target]
    assert target.id == "sample-2"
    with pytest.raises(DataError, match=r"2 of \d items cannot be used .*1 placeholder without clip"):
        write_import(imported, tmp_path / "out")

    write_import(imported, tmp_path / "out", max_bad=0.9)
    corpus_of = prepared(workspace, tmp_path / "out")
    recipe = make_recipe(workspace, data={"train": str(corpus_of), "reference": "given", "require_reference": True})
    loader = make_loader(recipe, open_family(str(workspace / "model")), corpus_of)
    [conversation] = [
        loader.conversation(one, loader.reference_sampler.references(one, 0))
        for one in loader.reference_sampler.targets
    ]
    assert [clip.id for turn in conversation.turns for clip in turn.parts if isinstance(clip, AudioClip)] == [
        "sample-2/ref0",
        "sample-2",
    ]


def test_no_target_ever_stands_in_its_own_reference(workspace: Path, family: Family) -> None:
    recipe = make_recipe(workspace)
    loader = make_loader(recipe, family, recipe.data.train)
    for target in loader.reference_sampler.targets:
        for epoch in range(5):
            sequence = loader.sequence(target, epoch)
            own = loader.dataset.codes(target)
            places = len(sequence.codes)
            assert places == int(np.isin(sequence.ids, audio_ids(family)).sum()), "a frame for every placeholder"
            context = sequence.codes[: places - len(own) - 9]
            assert len(context) > 9, "there is a reference"
            assert all(context[k : k + len(own)].tolist() != delayed(family, own) for k in range(len(context)))


def audio_ids(family: Family) -> tuple[int, ...]:
    assert isinstance(family, HiggsV2)
    return family.config.audio_token_id, family.config.audio_delay_token_id


def delayed(family: Family, codes: Any) -> Any:
    assert isinstance(family, HiggsV2)
    return family.delay.apply(codes)[: len(codes)].tolist()


def test_a_target_that_names_itself_is_refused(workspace: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(workspace / "prepared", tmp_path / "prepared"))
    lines = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    lines[0]["extras"] = {"references": [lines[0]["id"]]}
    (out / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match="has itself for a reference: it would learn to copy"):
        train_run(make_recipe(workspace, data={"train": str(out)}), tmp_path / "run")


def test_the_targets_own_sound_in_another_file_is_found(workspace: Path, tmp_path: Path) -> None:
    """A little silence behind it makes another file of it: only the codes can tell."""
    source = record(tmp_path / "source", {"robin": SPEAKER_PITCHES["robin"]}, ("hi",))
    sound = read_audio(source / "robin" / "hi.wav", sample_rate=SAMPLE_RATE)
    write_clip(source, "robin", "once-more", "once more", np.append(sound, np.zeros(10, np.float32)))
    recipe = make_recipe(workspace, data={"train": str(prepared(workspace, source)), "reference_seconds": [0.04, 10]})
    with pytest.raises(TrainingError, match=r"2 targets have their own sound for a reference, .*robin/hi and its ref"):
        train_run(recipe, tmp_path / "run")


# Swallowed errors


def test_bad_samples_are_counted_named_and_too_many_stop_the_import(workspace: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(workspace / "recordings", tmp_path / "source"))
    (source / "robin" / "hi.wav").write_bytes(b"RIFF, and then nothing")
    soundfile.write(source / "heron" / "hum.wav", np.full(9600, np.nan), SAMPLE_RATE, subtype="FLOAT")
    (source / "heron" / "hum.txt").write_text("hum")
    write_clip(source, "heron", "empty", "", tone_speech("hi", 110.0))
    with pytest.raises(DataError, match=r"3 of 8 items cannot be used \(37\.5%") as caught:
        prepare(str(source), tmp_path / "out", model=str(workspace / "model"), device="cpu")
    for item in ("robin/hi", "heron/hum", "heron/empty"):
        assert item in caught.value.what
    assert "--max-bad 0.38" in caught.value.hint
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert {item["reason"] for item in rejected} == {"unreadable audio", "NaN samples", "empty text"}
    assert not (tmp_path / "out" / "manifest.jsonl").exists()

    prepare(str(source), tmp_path / "out", model=str(workspace / "model"), device="cpu", max_bad=0.38)
    assert len(PreparedDataset.open(tmp_path / "out").utterances) == 5


def test_a_bad_sample_in_prepared_data_stops_the_run_by_name(workspace: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(workspace / "prepared", tmp_path / "prepared"))
    manifest = out / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace('"text": "you"', '"text": "you <|eot_id|>"', 1))
    with pytest.raises(DataError, match=r"the text of heron/you contains the control token <\|eot_id\|>"):
        train_run(make_recipe(workspace, data={"train": str(out), "reference": "none"}), tmp_path / "run")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_that_fails_is_the_last_one(
    train_with: TrainWith, monkeypatch: Patch, tmp_path: Path, workers: int
) -> None:
    whole, calls = Trainer.train_step, []

    def fails_at_the_second(self: Trainer, passes: Sequence[Batch], *given: Any) -> Any:
        calls.append(passes)
        if len(calls) == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return whole(self, passes, *given)

    monkeypatch.setattr(Trainer, "train_step", fails_at_the_second)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        train_with(train={"steps": 5}, data={"workers": workers})
    assert len(calls) == 2, "nothing went on"
    run = tmp_path / "run0"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1] and not (run / "adapter").exists()


# Training data as evaluation data


def test_the_training_data_is_no_evaluation_under_any_name(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(workspace / "prepared")
    for same in (workspace / "prepared", workspace / "others" / ".." / "prepared", tmp_path / "link"):
        with pytest.raises(ConfigError, match=r"`data\.evaluation` is the training data"):
            make_recipe(workspace, data={"evaluation": str(same)})
    copy = shutil.copytree(workspace / "prepared", tmp_path / "copy")
    with pytest.raises(TrainingError, match="6 of 6 evaluation utterances are trained on too"):
        train_run(make_recipe(workspace, data={"evaluation": str(copy)}), tmp_path / "run")


def test_the_base_is_evaluated_first_for_comparison(
    workspace: Path, pretrained_base: Path, train_with: TrainWith
) -> None:
    """A rate that ruins what the model knew: the losses are worse than the untuned one's, and the run says so."""
    run, callback = train_with(
        model={"source": str(pretrained_base)},
        data={"evaluation": str(workspace / "evaluation")},
        adapt={"train_modules": ["audio_head"]},
        train={"steps": 4, "learning_rate": 0.3, "evaluate_every": 2, "early_stopping_patience": 9},
    )
    base = callback.rows[0]
    assert base["step"] == 0 and "evaluation" in base, "before the first step"
    assert [row["step"] for row in callback.evaluations] == [2, 4]
    for row in callback.evaluations:
        heard = row["evaluation"]
        assert heard["against_base"] == heard["loss"] - base["evaluation"]["loss"] > 0
    assert any("no evaluation was better than the untuned model's" in line for line in callback.messages)
    assert json.loads(run.metrics.read_text().splitlines()[0]) == base


def test_early_stopping_without_evaluation_is_refused(workspace: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to go by"):
        make_recipe(workspace, train={"early_stopping_patience": 2})


def test_the_held_out_loss_decides_and_the_best_checkpoint_is_the_result(
    workspace: Path, train_with: TrainWith
) -> None:
    """The training loss falls to the end, while the held-out loss rises again."""
    run, callback = train_with(
        data={"evaluation": str(workspace / "evaluation")},
        adapt={"rank": 16, "alpha": 32, "train_modules": ["audio_head", "audio_embedding"]},
        train={"steps": 60, "learning_rate": 1e-2, "evaluate_every": 5, "early_stopping_patience": 2},
    )
    heard = {row["step"]: row["evaluation"]["loss"] for row in callback.evaluations}
    best = min(heard, key=lambda step: heard[step])
    assert callback.steps[-1]["loss"] < callback.steps[best - 1]["loss"], "the cause: training goes on to look better"
    assert max(heard) == best + 2 * 5 == len(callback.steps) < 60
    assert any(f"no better evaluation since step {best}" in line for line in callback.messages)
    kept = run.folder / "checkpoints" / f"step-{best:06d}" / "adapter" / "adapter_model.safetensors"
    assert (run.adapter / "adapter_model.safetensors").read_bytes() == kept.read_bytes()


# Evaluation clips in training


def test_the_same_recording_under_another_name_is_a_leak(workspace: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(workspace / "others", tmp_path / "source"))
    os.link(workspace / "recordings/robin/hi.wav", source / "wren" / "new.wav")
    (source / "wren" / "new.txt").write_text("something else entirely")
    recipe = make_recipe(workspace, data={"evaluation": str(prepared(workspace, source))})
    with pytest.raises(
        TrainingError, match=r"1 of 5 evaluation .*1 with the same audio, 0 with .*: wren/new"
    ) as caught:
        train_run(recipe, tmp_path / "run")
    assert "myna prepare" in caught.value.hint


def test_the_same_words_of_the_same_speaker_are_a_leak(workspace: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(workspace / "others", tmp_path / "source"))
    write_clip(source, "robin", "take-two", f"{LINES[0].upper()}!", tone_speech(LINES[0], 333.0))
    recipe = make_recipe(workspace, data={"evaluation": str(prepared(workspace, source))})
    with pytest.raises(
        TrainingError, match=r"1 of 5 .*0 with the same audio, 1 with the same words .*: robin/take-two"
    ):
        train_run(recipe, tmp_path / "run")


def test_other_speakers_with_other_words_are_no_leak(workspace: Path, train_with: TrainWith) -> None:
    _, callback = train_with(data={"evaluation": str(workspace / "evaluation")}, train={"steps": 1})
    assert len(callback.evaluations) == 1
