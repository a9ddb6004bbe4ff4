from __future__ import annotations

import dataclasses
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from myna.core.errors import SpeakError
from myna.data.conversation import AudioClip, Reference, speech_conversation
from myna.models import open_family
from myna.models.base import RenderedSequence, Sampling
from myna.models.higgs_v2.family import HiggsV2
from myna.models.higgs_v2.forward import HiggsObjective
from myna.models.higgs_v2.tiny import save_tiny
from myna.speak.scheduler import BatchScheduler, Generation
from tests.models.higgs_v2.conftest import cloning, generate, random_codes

GREEDY = Sampling(temperature=0, max_seconds=0.6)
TEXTS = ("hello", "a", "what a long sentence this is", "two words", "a third one", "x y z")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> HiggsV2:
    found = open_family(str(save_tiny(tmp_path_factory.mktemp("tiny") / "model")))
    assert isinstance(found, HiggsV2)
    return found


@pytest.fixture(scope="module")
def model(family: HiggsV2) -> Any:
    return family.load_model(dtype=torch.float32, device="cpu", text_head=False).requires_grad_(False)


@pytest.fixture(scope="module")
def prompts(family: HiggsV2) -> list[RenderedSequence]:
    return [family.render(cloning(text, reference=3 + 2 * n, target=None)) for n, text in enumerate(TEXTS)]


def batch(family: HiggsV2, model: Any, rows: int, positions: int = 256) -> BatchScheduler:
    return BatchScheduler(family.speech_decoder(model, rows, positions))


def finish(scheduler: BatchScheduler) -> None:
    while scheduler.busy:
        scheduler.advance()


def run_alone(family: HiggsV2, model: Any, prompt: RenderedSequence, sampling: Sampling, frames: int) -> Generation:
    scheduler = batch(family, model, 1)
    generation = scheduler.submit(prompt, sampling, frames)
    finish(scheduler)
    return generation


def teacher_forced_logits(family: HiggsV2, model: Any, codes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(targets, codebooks, classes) and the targets: a clip replayed through the training forward pass."""
    again = speech_conversation(
        "hello",
        id="again",
        references=(Reference("as I said", AudioClip("reference", random_codes(5))),),
        target=AudioClip("target", codes, target=True),
    )
    replay = family.collate([family.render(again)])
    with torch.no_grad():
        hidden = model.model.norm(HiggsObjective(model).hidden(replay)[replay.audio_predictors])
        return model.audio_lm_head(hidden).unflatten(-1, (8, 66)), replay.audio_targets


def test_greedy_codes_are_the_first_choice_of_the_training_forward(family: HiggsV2, model: Any) -> None:
    [spoken] = generate(family, model, [family.render(cloning("hello", target=None))], GREEDY)
    codes = spoken.codes()
    assert codes.shape == (15, 8) and spoken.finish_reason == "length"
    logits, targets = teacher_forced_logits(family, model, codes)
    is_code = (targets >= 0) & (targets < 64)
    assert is_code.sum() == 15 * 8
    assert torch.equal(logits[..., :64].argmax(-1)[is_code], targets[is_code])


def test_greedy_codes_are_those_of_transformers_generate(family: HiggsV2, model: Any) -> None:
    prompt = family.render(speech_conversation("hello there", id="line", references=()))
    [ours] = generate(family, model, [prompt], dataclasses.replace(GREEDY, max_seconds=0.8))
    with torch.no_grad():
        theirs = model.generate(
            input_ids=torch.from_numpy(prompt.ids)[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=20,
            do_sample=False,
        )
    delayed = theirs[0].numpy()
    own = family.delay.apply(ours.codes())
    # It may choose the begin of stream as a code, which we never do; from there on they have different pasts.
    pattern = np.arange(8) >= np.arange(len(delayed))[:, None]
    strays = np.flatnonzero(((delayed >= 64) & ~pattern).any(1))
    same = int(strays[0]) if len(strays) else len(delayed)
    assert same > 8
    assert np.array_equal(delayed[:same], own[:same])


@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3), Sampling(seed=4, top_k=0, top_p=0.7)])
def test_codes_do_not_depend_on_other_requests(
    family: HiggsV2, model: Any, prompts: list[RenderedSequence], rows: int, sampling: Sampling
) -> None:
    """Let requests of different lengths join and leave: their codes are those of each alone."""
    scheduler = batch(family, model, rows)
    generations = [scheduler.submit(prompt, sampling, 5 + 3 * n) for n, prompt in enumerate(prompts)]
    finish(scheduler)
    for n, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
        alone = run_alone(family, model, prompt, sampling, 5 + 3 * n)
        assert np.array_equal(generation.codes(), alone.codes()) and generation.finish_reason == alone.finish_reason
        assert np.abs(generation.log_probs() - alone.log_probs()).max() < 1e-4


@pytest.mark.parametrize("bucket", [1, 2, 4])
def test_codes_do_not_depend_on_held_rows(
    family: HiggsV2, model: Any, prompts: list[RenderedSequence], bucket: int
) -> None:
    """Leave out any of them in any step; the decoder computes a multiple of `bucket` rows."""
    random, scheduler, sizes = np.random.default_rng(bucket), batch(family, model, 5), set[int]()
    decoder: Any = scheduler.decoder
    decoder.bucket = lambda rows: -(-rows // bucket) * bucket
    step = decoder.step

    def checked_step(rows: int, longest: int) -> Any:
        assert rows in (len(scheduler._rows), decoder.bucket(rows)), "all that a graph would advance are counted"
        sizes.add(rows)
        return step(rows, longest)

    decoder.step = checked_step
    waiting = list(enumerate(prompts))
    generations: list[Generation] = []
    while waiting or scheduler.busy:
        if waiting and random.random() < 0.3:
            number, prompt = waiting.pop(0)
            generations.append(scheduler.submit(prompt, Sampling(seed=number), 5 + 3 * number))
        for generation in scheduler._rows:
            generation.held = bool(random.random() < 0.6)
        scheduler.advance()
    assert len(sizes) > 1
    for number, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
        alone = run_alone(family, model, prompt, Sampling(seed=number), 5 + 3 * number)
        assert np.array_equal(generation.codes(), alone.codes()) and generation.finish_reason == alone.finish_reason


def test_log_probabilities_are_those_of_a_replay(family: HiggsV2, model: Any) -> None:
    generation = run_alone(family, model, family.render(cloning("hello", target=None)), Sampling(seed=1), 9)
    assert generation.finish_reason == "length" and generation.frames == 9
    logits, targets = teacher_forced_logits(family, model, generation.codes())
    replayed = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    undelayed = torch.stack([replayed[targets[:, book] >= 0, book] for book in range(8)], 1)
    assert generation.log_probs().shape == (10, 8), "9 frames and the end"
    assert np.allclose(generation.log_probs(), undelayed.numpy(), atol=1e-4)


def test_takes_of_one_prompt_share_its_prefill(
    family: HiggsV2, model: Any, prompts: list[RenderedSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = batch(family, model, 4)
    prefilled: list[int] = []
    prefill = scheduler.decoder.prefill

    def counted(row: int, prompt: RenderedSequence) -> None:
        prefilled.append(row)
        prefill(row, prompt)

    monkeypatch.setattr(scheduler.decoder, "prefill", counted)
    takes = [scheduler.submit(prompts[2], Sampling(seed=seed), 8) for seed in range(4)]
    finish(scheduler)
    assert prefilled == [0]
    for seed, take in enumerate(takes):
        assert np.array_equal(take.codes(), run_alone(family, model, prompts[2], Sampling(seed=seed), 8).codes())


def test_a_cancelled_request_frees_its_row_at_once(
    family: HiggsV2, model: Any, prompts: list[RenderedSequence]
) -> None:
    scheduler = batch(family, model, 2)
    first, second, third = (scheduler.submit(prompts[n], GREEDY, 30) for n in range(3))
    for _ in range(12):
        scheduler.advance()
    frames = first.frames
    assert frames == 12 - 7 and third.frames == 0
    first.cancel()
    scheduler.advance()
    assert first.finish_reason == "cancelled" and first.frames == frames == len(first.codes())
    assert first.log_probs().shape == (frames, 8)
    for _ in range(8):
        scheduler.advance()
    assert third.frames > 0, "it has the row"
    finish(scheduler)
    for n, generation in ((1, second), (2, third)):
        alone = run_alone(family, model, prompts[n], GREEDY, 30)
        assert np.array_equal(generation.codes(), alone.codes())
    waiting = [scheduler.submit(prompts[0], GREEDY, 9) for _ in range(3)]
    waiting[2].cancel()
    finish(scheduler)
    assert [one.finish_reason for one in waiting] == ["length", "length", "cancelled"] and waiting[2].frames == 0


def test_frames_come_as_they_are_generated(family: HiggsV2, model: Any, prompts: list[RenderedSequence]) -> None:
    scheduler = batch(family, model, 1)
    generation = scheduler.submit(prompts[0], Sampling(seed=2), 12)
    pieces, done = [], 0
    while not generation.finished:
        scheduler.advance()
        if generation.frames > done:
            pieces.append(generation.codes(done))
            assert len(pieces[-1]) == generation.frames - done
            done = generation.frames
    assert len(pieces) == 12
    assert np.array_equal(np.concatenate(pieces), generation.codes())


def test_a_request_above_the_cache_is_refused(family: HiggsV2, model: Any, prompts: list[RenderedSequence]) -> None:
    with pytest.raises(SpeakError, match=r"needs \d+ positions, the batch has 64"):
        batch(family, model, 1, positions=64).submit(prompts[0], GREEDY, 60)


def test_an_error_repeats_no_whole_text_and_no_line_break(
    family: HiggsV2, model: Any, prompts: list[RenderedSequence]
) -> None:
    """Prompts are named by their text, which may forge lines of a log and belongs into no error."""
    prompt = replace(prompts[0], id="hello\nINFO forged " + "words " * 200)
    with pytest.raises(SpeakError, match="hello INFO") as error:
        batch(family, model, 1, positions=64).submit(prompt, GREEDY, 60)
    assert len(error.value.what) < 130 and "\n" not in error.value.what


def test_many_requests_leave_memory_flat(family: HiggsV2, model: Any, prompts: list[RenderedSequence]) -> None:
    scheduler = batch(family, model, 4)

    def burst(requests: int) -> None:
        for number in range(requests):
            generation = scheduler.submit(prompts[number % 6], Sampling(seed=number), 1 + number % 3)
            if number % 5 == 0:
                generation.cancel()
        finish(scheduler)

    def kept() -> int:
        gc.collect()
        return sum(isinstance(one, torch.Tensor | Generation) for one in gc.get_objects())

    burst(20)
    before = kept()
    burst(100)
    assert kept() == before


def test_a_model_in_training_is_not_rearranged(family: HiggsV2, tmp_path: Path) -> None:
    """Modules of transformers give the codes of joined weights, and the parameters stay as they were."""
    prompt = family.render(cloning("hello", target=None))
    training = family.load_model(dtype=torch.float32, device="cpu", text_head=False)
    plain = family.load_model(dtype=torch.float32, device="cpu", text_head=False).requires_grad_(False)
    parameters = dict(training.named_parameters())
    sampling = Sampling(seed=5, max_seconds=0.6)
    first, second = (generate(family, one, [prompt], sampling)[0].codes() for one in (training, plain))
    assert np.array_equal(first, second)
    assert all(parameters[name] is parameter for name, parameter in training.named_parameters())
    family.save_model(plain, tmp_path / "saved")
    again = family.load_model(dtype=torch.float32, device="cpu", text_head=False)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), plain.state_dict().values(), strict=True))
