from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from myna.models.base import Sampling
from myna.models.code_sampling import advance, gumbel_noise, log_probabilities, mix, sample_frame
from tests.models.helpers import BEGIN, END, new_state, sampled_frames

GREEDY = Sampling(temperature=0)


def saying(track: list[int]) -> list[torch.Tensor]:
    """Return logits of a model whose codebook 0 follows `track`, and is 1 afterwards; the other codebooks are always
    7."""
    steps = []
    for code in [*track, *[1] * 400]:
        logits = torch.zeros(1, 8, 66)
        logits[0, 0, code] = 9
        logits[0, 1:, 7] = 9
        steps.append(logits)
    return steps


def test_frames_follow_the_delay_pattern_and_codebook_0_ends_them_all() -> None:
    frames = sampled_frames(saying([5, 6, 5, END]), GREEDY)
    assert len(frames) == 4 + 7
    assert frames[:, 0].tolist() == [5, 6, 5, *[END] * 8]
    for book in range(1, 8):
        assert frames[:, book].tolist() == [*[BEGIN] * book, 7, 7, 7, *[END] * (8 - book)]


def test_an_immediate_end_and_the_cap() -> None:
    assert len(sampled_frames(saying([END]), GREEDY)) == 8
    frames = sampled_frames(saying([5] * 300), GREEDY, max_frames=50)
    assert (frames[:50, 0] == 5).all() and (frames[50:, 0] == END).all() and len(frames) == 58


def test_the_state_of_a_row_that_ended_does_not_change() -> None:
    state = new_state([GREEDY, GREEDY])
    for step in range(12):
        frame = sample_frame(torch.cat([saying([END])[0], saying([5])[0]]), state, 2, BEGIN, END)
        advance(state, 2, frame, END)
        assert state.positions.tolist() == [10 + min(step + 1, 8), 10 + step + 1]
    assert state.active.tolist() == [0, 1]


def test_draws_follow_the_distribution() -> None:
    """Frequencies of 4,000 draws, under temperature, top-k and top-p, are those of the filtered softmax."""
    sampling = Sampling(temperature=0.8, top_k=6, top_p=0.9, repetition_window=0, seed=3)
    raw = torch.linspace(-2, 2, 66)[torch.randperm(66, generator=torch.Generator().manual_seed(0))]
    frames = sampled_frames([raw.expand(1, 8, 66)] * 4000, sampling, max_frames=5000)
    counts = torch.bincount(frames[8:, 1:].flatten(), minlength=66).double()
    allowed = raw.clone().double()
    allowed[[BEGIN, END]] = -torch.inf
    scaled = allowed / 0.8
    scaled[scaled < scaled.topk(6).values[-1]] = -torch.inf
    wanted = scaled.softmax(-1)
    order = wanted.argsort(descending=True)
    wanted[order[wanted[order].cumsum(0) - wanted[order] > 0.9]] = 0
    wanted /= wanted.sum()
    assert ((counts > 0) == (wanted > 0)).all()
    assert torch.allclose(counts / counts.sum(), wanted, atol=0.01)


def test_noise_is_uniform_and_differs_by_seed_frame_codebook_and_class() -> None:
    keys = mix(torch.arange(500))[:, None]
    bits = mix(keys ^ torch.arange(1026)) >> 8
    assert abs(len(np.unique(bits.numpy())) - 2**24 * -math.expm1(-bits.numel() / 2**24)) < 500, (
        "as many as of random numbers"
    )
    uniform = torch.exp(-torch.exp(-gumbel_noise(keys, torch.arange(1026)))).double()
    assert abs(uniform.mean() - 0.5) < 0.002 and abs(uniform.var() - 1 / 12) < 0.001
    one = [Sampling(seed=1, top_k=0, top_p=1.0, repetition_window=0)]
    flat = [torch.zeros(1, 8, 66)] * 40
    first, again = (sampled_frames(flat, one[0]) for _ in range(2))
    assert torch.equal(first, again)
    other = sampled_frames(flat, Sampling(seed=2**33 + 1, top_k=0, top_p=1.0, repetition_window=0))
    assert (first[8:] == other[8:]).float().mean() < 0.1, "the high half of a seed counts"


def test_rows_have_their_own_settings_and_do_not_see_one_another() -> None:
    samplings = [
        Sampling(temperature=t, top_k=k, top_p=p, seed=7) for t, k, p in ((1, 50, 0.95), (0, 5, 1), (2, 0, 0.5))
    ]
    logits = [torch.randn(3, 8, 66, generator=torch.Generator().manual_seed(step)) for step in range(30)]
    together = new_state(samplings)
    frames = []
    for one in logits:
        frame = sample_frame(one, together, 3, BEGIN, END)
        advance(together, 3, frame, END)
        frames.append(frame)
    for row, sampling in enumerate(samplings):
        alone = sampled_frames([one[row : row + 1] for one in logits], sampling)
        assert torch.equal(torch.stack(frames)[: len(alone), row], alone)


def test_repetition_aware_sampling_breaks_a_loop() -> None:
    logits = torch.zeros(1, 8, 66)
    logits[..., 3] = 1.0

    def loops(window: int) -> int:
        sampling = Sampling(temperature=0.1, repetition_window=window, repetition_limit=2)
        return int((sampled_frames([logits] * 120, sampling)[:, 0] == 3).sum())

    assert loops(window=7) < loops(window=0)


def test_log_probabilities_are_the_models_own() -> None:
    logits = torch.randn(2, 8, 66, generator=torch.Generator().manual_seed(0))
    codes = torch.from_numpy(np.random.default_rng(0).integers(0, 66, (2, 8)))
    wanted = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="none")
    assert log_probabilities(logits, codes).flatten().tolist() == pytest.approx(wanted.tolist(), abs=1e-6)
