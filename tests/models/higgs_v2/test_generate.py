from __future__ import annotations

from typing import Any

import numpy as np
import torch

from myna.data.conversation import AudioClip, Reference, speech_conversation
from myna.models.base import Sampling
from myna.models.higgs_v2.family import HiggsV2
from myna.models.higgs_v2.forward import HiggsObjective
from myna.models.higgs_v2.generate import _Sampler
from myna.models.higgs_v2.render import DelayPattern

from .conftest import cloning, random_codes

GREEDY = Sampling(temperature=0, max_seconds=0.6)


def test_cached_frames_are_what_the_training_forward_predicts(family: HiggsV2, model: Any) -> None:
    """Free-running codes, fed back through the training pass, must each be that pass's own first choice."""
    spoken = family.generate(model, [family.render(cloning("hello", target=None))], GREEDY)[0]
    assert spoken.codes.shape == (15, 8) and not spoken.stopped
    again = speech_conversation(
        "hello",
        id="again",
        references=(Reference("as I said", AudioClip("reference", random_codes(5))),),
        target=AudioClip("target", spoken.codes, target=True),
    )
    batch = family.collate([family.render(again)])
    with torch.no_grad():
        hidden = model.model.norm(HiggsObjective(model).hidden(batch)[batch.audio_predictors])
        logits = model.audio_lm_head(hidden).unflatten(-1, (8, 66))
    is_code = (batch.audio_targets >= 0) & (batch.audio_targets < 64)
    assert is_code.sum() == 15 * 8
    assert torch.equal(logits[..., :64].argmax(-1)[is_code], batch.audio_targets[is_code])


def test_company_changes_nothing(family: HiggsV2, model: Any) -> None:
    prompts = [family.render(cloning(text, reference=n, target=None)) for n, text in ((3, "a"), (9, "a longer line"))]
    for sampling in (GREEDY, Sampling(max_seconds=1.0, seed=3)):
        together = family.generate(model, prompts, sampling)
        alone = [family.generate(model, [prompt], sampling)[0] for prompt in prompts]
        for a, b in zip(together, alone, strict=True):
            assert np.array_equal(a.codes, b.codes) and a.stopped == b.stopped


def test_seeds_repeat_and_differ(family: HiggsV2, model: Any) -> None:
    prompt = [family.render(cloning(target=None))]
    first, again, other = (family.generate(model, prompt, Sampling(max_seconds=0.5, seed=s))[0] for s in (1, 1, 2))
    assert np.array_equal(first.codes, again.codes)
    assert not np.array_equal(first.codes, other.codes)


def test_codes_never_hold_stream_ids(family: HiggsV2, model: Any) -> None:
    for seed in range(5):
        spoken = family.generate(model, [family.render(cloning(target=None))], Sampling(max_seconds=3.0, seed=seed))[0]
        assert spoken.codes.size == 0 or spoken.codes.max() < 64


def sampled(track: list[int], limit: float = 10.0) -> Any:
    """What comes out when codebook 0 would say `track`, the others always 7."""
    delay = DelayPattern(8, 64, 65)
    sampler = _Sampler(delay, Sampling(temperature=0, max_seconds=limit), [0])
    for code in [0, *track, *[1] * 400]:
        logits = torch.zeros(1, 8, 66)
        logits[0, 0, code] = 9
        logits[0, 1:, 7] = 9
        sampler.next_frame(logits)
        if sampler.all_done:
            return sampler.result()[0]
    raise AssertionError("it never ended")


def test_codebook_0_ends_the_stream_for_all() -> None:
    spoken = sampled([5, 6, 5, 65])
    assert spoken.stopped and spoken.codes[:, 0].tolist() == [5, 6, 5] and (spoken.codes[:, 1:] == 7).all()


def test_an_immediate_end_is_empty() -> None:
    assert sampled([65]).codes.shape == (0, 8)


def test_the_cap_is_exact_and_says_so() -> None:
    spoken = sampled([5] * 300, limit=2.0)
    assert len(spoken.codes) == 50 and not spoken.stopped and (spoken.codes[:, 1:] == 7).all()


def test_repetition_aware_sampling_breaks_a_loop() -> None:
    delay = DelayPattern(8, 64, 65)

    def longest_run(window: int) -> int:
        sampler = _Sampler(delay, Sampling(temperature=0.1, repetition_window=window, repetition_limit=2), [0])
        for _ in range(120):
            logits = torch.zeros(1, 8, 66)
            logits[..., 3] = 1.0
            sampler.next_frame(logits)
        track = torch.stack(sampler.frames)[1:, 0, 0]
        return int((track == 3).sum())

    assert longest_run(window=7) < longest_run(window=0)
