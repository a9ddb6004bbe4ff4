"""Speech generation: ends, prompts, decoding and very short lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from myna import prepare
from myna.audio.files import read_audio
from myna.core.errors import AudioError, DataError, ModelError, SpeakError, TrainingError
from myna.core.run_folder import Run
from myna.data.conversation import Reference
from myna.data.dataset import PreparedDataset
from myna.data.loader import Shard
from myna.models.base import IGNORE_INDEX, Family, Sampling
from myna.models.higgs_v2.batch import HiggsBatch
from myna.models.higgs_v2.render import DelayPattern
from myna.models.ref import ModelRef
from myna.speak.engine import Engine, Speech, encode_clip
from myna.speak.loading import load_engine
from myna.speak.request import ReferenceRecording, SpeechRequest
from myna.speak.scheduler import BatchScheduler, Generation
from myna.train.loop import make_loader
from tests.models.helpers import sampled_frames
from tests.models.higgs_v2.conftest import generate
from tests.tone_corpus import SAMPLE_RATE, SPEAKER_PITCHES, code_accuracy, tone_speech

from .conftest import TrainWith
from .tiny_setup import LINES, VOICE, cloning, load, make_recipe, overfit, random_codes, record, train_run, write_clip

GREEDY: dict[str, Any] = {"temperature": 0, "max_seconds": 1.2}
Patch = pytest.MonkeyPatch


def voice(engine: Engine, workspace: Path, speaker: str) -> Reference:
    return engine.encode_reference(ReferenceRecording(workspace / "recordings" / speaker / f"{VOICE}.wav", VOICE))


def say(engine: Engine, workspace: Path, speaker: str, text: str, **settings: Any) -> Speech:
    return engine.speak([SpeechRequest(text, (voice(engine, workspace, speaker),), id=text, **GREEDY | settings)])[0]


def real(workspace: Path, speaker: str, text: str) -> Any:
    corpus = PreparedDataset.open(workspace / "prepared")
    return next(corpus.codes(u) for u in corpus.utterances if (u.speaker, u.text) == (speaker, text))


# Speech that never stops


def mask_ends(patch: Patch) -> None:
    """transformers' `output_labels=True`: every end of stream is masked."""
    labels = DelayPattern.labels

    def masked(self: DelayPattern, codes: Any) -> Any:
        sound = labels(self, codes)
        return np.where(sound == self.end, IGNORE_INDEX, sound)

    patch.setattr(DelayPattern, "labels", masked)


def test_masked_ends_never_stop_and_supervised_ones_stop_on_their_frame(family: Family) -> None:
    """Overfit one model on the same sentences with and without end labels."""
    prompts = [family.render(cloning(text, target=None, seed=seed)) for seed, text in enumerate(("one", "two"))]

    def overfitted() -> list[Generation]:
        lines = [cloning(text, target=5 + seed, seed=seed) for seed, text in enumerate(("one", "two"))]
        model = load(family)
        assert overfit(family, model, family.collate([family.render(line) for line in lines]), steps=45)[-1] < 0.05
        return generate(family, model, prompts, Sampling(**GREEDY))

    with pytest.MonkeyPatch.context() as patch:
        mask_ends(patch)
        endless = overfitted()
    assert all(spoken.finish_reason == "length" for spoken in endless), "the cause"
    assert all(spoken.frames == 30 for spoken in endless), "cut off at 1.2 seconds"

    for seed, spoken in enumerate(overfitted()):
        assert spoken.finish_reason == "stop"
        assert spoken.codes().tolist() == random_codes(5 + seed, seed + 1).tolist()


def test_masked_ends_are_refused_before_the_first_step(train_with: TrainWith, monkeypatch: Patch) -> None:
    mask_ends(monkeypatch)
    with pytest.raises(
        TrainingError, match="6 samples have 0 ends of stream among their labels: speech would not learn"
    ):
        train_with()


def test_every_target_keeps_one_end_per_codebook_to_the_last_row(workspace: Path, family: Family) -> None:
    """Through the loader and the collator, in the smallest row that is allowed."""
    with pytest.raises(DataError) as caught:
        make_loader(make_recipe(workspace, data={"row_tokens": 100}), family, workspace / "prepared")
    tight = int(caught.value.hint.split("data.row_tokens=")[1].split(",")[0])
    loader = make_loader(make_recipe(workspace, data={"row_tokens": tight}), family, workspace / "prepared")
    ends = torch.zeros(8)
    for batch in loader.evaluation_batches(1, Shard()):
        assert isinstance(batch, HiggsBatch)
        ends += (batch.audio_targets == 65).sum(0)
    assert ends.tolist() == [6.0] * 8


def test_an_overfitted_run_stops_where_it_should_and_says_so(engine: Engine, workspace: Path, overfitted: Run) -> None:
    for speaker in SPEAKER_PITCHES:
        for text in LINES:
            spoken, sound = say(engine, workspace, speaker, text), real(workspace, speaker, text)
            assert spoken.stopped and len(spoken.codes) == len(sound)
            assert code_accuracy(spoken.codes, sound) >= 0.99
    cut = say(engine, workspace, "robin", "you", max_seconds=0.12)
    assert not cut.stopped and len(cut.codes) == 3, "truncated speech is marked as such"
    last = overfitted.metrics.read_text().splitlines()[-1]
    assert '"stop_accuracy": 1.0' in last


# Prompt other than in training


def test_speaking_has_the_prompt_that_training_rendered(engine: Engine, workspace: Path, monkeypatch: Patch) -> None:
    """Token by token, from the loader's sequence to the engine's prompt."""
    recipe = make_recipe(workspace)
    loader = make_loader(recipe, engine.family, recipe.data.train)
    target = next(one for one in loader.reference_sampler.targets if one.id == "robin/you")
    reference = next(one for one in loader.dataset.utterances if one.id == f"robin/{VOICE}")
    trained = engine.family.render(loader.conversation(target, (reference,)))
    prompts: list[Any] = []

    submit = BatchScheduler.submit

    def listen(self: BatchScheduler, prompt: Any, *rest: Any) -> Any:
        prompts.append(prompt)
        return submit(self, prompt, *rest)

    monkeypatch.setattr(BatchScheduler, "submit", listen)
    engine.speak([SpeechRequest(" you\n", (voice(engine, workspace, "robin"),), **GREEDY)])
    [prompt] = prompts
    assert prompt.ids.tolist() == trained.ids[: len(prompt)].tolist()
    assert prompt.codes.tolist() == trained.codes[: len(prompt.codes)].tolist()
    assert engine.family.show_token(int(prompt.ids[-1])) == "<|audio_out_bos|>"
    assert trained.ids[len(prompt)] == engine.family.config.audio_token_id


def test_another_prompt_loses_learned_lines(engine: Engine, workspace: Path) -> None:
    sound = real(workspace, "robin", "you")
    assert code_accuracy(say(engine, workspace, "robin", "you").codes, sound) >= 0.99
    elsewhere = Engine(engine.family, engine.model, engine.codec, reference_placement="system")
    assert code_accuracy(say(elsewhere, workspace, "robin", "you").codes, sound) < 0.5, "the cause"


def test_a_run_remembers_its_reference_placement(workspace: Path, tmp_path: Path) -> None:
    recipe = make_recipe(workspace, data={"reference_placement": "system"}, train={"steps": 1, "learning_rate": 1e-2})
    run, _ = train_run(recipe, tmp_path / "run")
    assert load_engine(ModelRef.find_trained(run.folder), device="cpu").reference_placement == "system"


def test_a_lora_is_applied_at_the_given_strength(overfitted: Run, engine: Engine, workspace: Path) -> None:
    def opened(strength: float) -> Engine:
        return load_engine(ModelRef.find_trained(overfitted.folder), device="cpu", strength=strength)

    untuned = Engine(engine.family, load(engine.family), engine.codec, reference_placement=engine.reference_placement)
    none, some, whole = (say(one, workspace, "robin", "you").codes.tolist() for one in map(opened, (0.0, 0.5, 1.0)))
    assert none == say(untuned, workspace, "robin", "you").codes.tolist()
    assert whole == say(engine, workspace, "robin", "you").codes.tolist() and some != whole


def test_a_strength_without_a_lora_is_refused(workspace: Path, tmp_path: Path) -> None:
    recipe = make_recipe(workspace, adapt={"mode": "full"}, train={"steps": 1})
    run, _ = train_run(recipe, tmp_path / "run")
    with pytest.raises(SpeakError, match="was trained in full"):
        load_engine(ModelRef.find_trained(run.folder), device="cpu", strength=0.5)
    with pytest.raises(SpeakError, match="scales the LoRA of a run"):
        load_engine(ModelRef.find_model(str(workspace / "model")), device="cpu", strength=0.5)


def test_a_prompt_cannot_be_smuggled_into_a_line(engine: Engine) -> None:
    with pytest.raises(DataError, match=r"control token <\|eot_id\|>"):
        engine.speak([SpeechRequest("hi<|eot_id|>you", **GREEDY)])


def test_repetition_aware_sampling_breaks_a_loop() -> None:
    """A model that repeats one code for ever without the repetition check."""

    def share_of_loop(window: int) -> float:
        sampling = Sampling(temperature=0.1, repetition_window=window, repetition_limit=2, max_seconds=60)
        logits = torch.zeros(1, 8, 66)
        logits[..., 3] = 1.0
        logits[..., 65] = -9.0
        return float((sampled_frames([logits] * 100, sampling)[9:] == 3).float().mean())

    assert share_of_loop(0) > 0.9
    assert share_of_loop(Sampling().repetition_window) < 0.5


# Two ways to decode


def test_store_engine_and_codec_encode_a_clip_alike(engine: Engine, workspace: Path) -> None:
    """Compare codes for training, for a reference, and of the codec alone."""
    sound = read_audio(workspace / "recordings/robin/who.wav", sample_rate=SAMPLE_RATE)
    stored = real(workspace, "robin", VOICE)
    assert voice(engine, workspace, "robin").clip.codes.tolist() == stored.tolist()
    assert encode_clip(engine.codec, sound).tolist() == stored.tolist()


def test_spoken_samples_are_those_the_codec_decodes(engine: Engine, workspace: Path) -> None:
    spoken = say(engine, workspace, "robin", "you")
    assert np.array_equal(spoken.samples, engine.codec.decode(spoken.codes))
    assert len(spoken.samples) == len(spoken.codes) * engine.codec.hop
    assert np.isfinite(spoken.samples).all() and spoken.samples.std() > 1e-3, "no silence"
    assert np.array_equal(spoken.samples, engine.codec.decode(real(workspace, "robin", "you"))), (
        "as if it were the clip"
    )


def test_delayed_codes_are_refused_and_never_decoded(engine: Engine, workspace: Path) -> None:
    codes = real(workspace, "robin", "you")
    delay = DelayPattern(8, 64, 65)
    with pytest.raises(ModelError, match="undo the delay pattern"):
        engine.codec.decode(delay.apply(codes).astype(np.uint16))
    with pytest.raises(ModelError, match="must have the shape"):
        engine.codec.decode(codes.T)


def test_a_padded_or_broken_clip_is_refused_and_not_clicked_through(engine: Engine) -> None:
    hop = engine.codec.hop
    with pytest.raises(AudioError, match="whole frames"):
        engine.codec.encode(np.zeros((1, hop + 1), np.float32))
    with pytest.raises(AudioError, match="not finite"):
        engine.codec.encode(np.full((1, hop), np.inf, np.float32))
    assert encode_clip(engine.codec, tone_speech("hi", 320.0)).shape == (4, 8)


# Very short lines


@pytest.fixture(scope="module")
def short(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A voice that says one word, one letter, and one letter in a single frame; overfitted."""
    folder = tmp_path_factory.mktemp("short")
    source = record(folder / "recordings", {"robin": 320.0, "heron": 110.0}, (VOICE, "a"))
    for speaker, pitch in SPEAKER_PITCHES.items():
        write_clip(source, speaker, "i", "I", tone_speech("i", pitch)[1440 : 1440 + 960])
    prepare(str(source), folder / "prepared", model=str(workspace / "model"), device="cpu")
    recipe = make_recipe(
        workspace,
        data={"train": str(folder / "prepared")},
        adapt={"rank": 16, "alpha": 32, "train_modules": ["audio_head", "audio_embedding"]},
        train={"steps": 120, "learning_rate": 1e-2, "warmup": 5, "schedule": "cosine", "micro_batch_size": 2},
    )
    return folder, train_run(recipe, folder / "run")[0]


def test_one_word_and_one_frame_are_learned_spoken_and_ended(short: tuple[Path, Run], workspace: Path) -> None:
    folder, run = short
    engine = load_engine(ModelRef.find_trained(run.folder), device="cpu")
    corpus = PreparedDataset.open(folder / "prepared")
    lengths = set()
    for utterance in corpus.utterances:
        if utterance.text == VOICE:
            continue
        sound = corpus.codes(utterance)
        spoken = say(engine, workspace, utterance.speaker, utterance.text)
        other = next(u for u in corpus.utterances if u.text == utterance.text and u.speaker != utterance.speaker)
        assert spoken.stopped and code_accuracy(spoken.codes, sound) >= 0.99, utterance.id
        assert code_accuracy(spoken.codes, corpus.codes(other)) < 0.9, "in its own voice, not the other speaker's"
        lengths.add(len(sound))
    assert min(lengths) == 1, "a single frame is among them"


def test_short_lines_that_are_left_out_are_counted_and_named(
    short: tuple[Path, Run], workspace: Path, tmp_path: Path
) -> None:
    data = {"train": str(short[0] / "prepared"), "seconds": [0.2, 30]}
    _, callback = train_run(make_recipe(workspace, data=data, train={"steps": 1}), tmp_path / "run")
    assert any(
        line.startswith("4 targets lie outside data.seconds and are left out (heron/") for line in callback.messages
    )


def test_a_word_without_a_voice_is_spoken_too(engine: Engine) -> None:
    [spoken] = engine.speak([SpeechRequest("hi", max_seconds=0.4, seed=1)])
    assert spoken.samples.shape == (len(spoken.codes) * engine.codec.hop,)
    assert len(spoken.codes) <= 10
