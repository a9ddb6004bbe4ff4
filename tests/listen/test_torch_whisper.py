"""Beam search of Whisper compared with transformers', over random decoders with windows that end early, late and never;
on a GPU, CUDA graphs compared with plain calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from myna.listen import torch_whisper
from myna.listen.torch_whisper import BeamSearch, SpecialTokens, WhisperDecoder
from tests.listen.transformers_beams import search_by_transformers, to_end

SPECIAL = SpecialTokens(end=40, first_time=46, vocabulary=106)
START, NO_TIMES, SUPPRESSED = 41, SPECIAL.first_time - 1, [3, 17, 43]
FRAMES, WIDTH, LAST_INITIAL_TIME = 30, 32, 9


def random_whisper(seed: int, device: str = "cpu") -> Any:
    """Make a small random Whisper that writes text, times and ends in turn."""
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=SPECIAL.vocabulary,
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=16,
        decoder_ffn_dim=48,
        max_source_positions=FRAMES,
        max_target_positions=200,
        pad_token_id=SPECIAL.end,
        bos_token_id=SPECIAL.end,
        eos_token_id=SPECIAL.end,
        decoder_start_token_id=START,
    )
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.model.decoder.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.normal_(std=1.5 / weight.shape[1] ** 0.5)
        model.model.decoder.embed_tokens.weight.normal_(std=0.5)
        model.model.decoder.embed_positions.weight.normal_(std=0.5)
    return model.to(device)


def search(model: Any, encoded: torch.Tensor, max_tokens: int, beams: int, prompts: torch.Tensor) -> Any:
    found = BeamSearch(WhisperDecoder(model), SPECIAL, len(encoded), beams, prompts.shape[1] + max_tokens, FRAMES)
    return run(found, encoded, max_tokens, prompts)


@torch.inference_mode()
def run(found: BeamSearch, encoded: torch.Tensor, max_tokens: int, prompts: torch.Tensor) -> Any:
    tokens, scores, logits = found(
        encoded,
        prompts,
        max_tokens=max_tokens,
        suppressed=torch.tensor([*SUPPRESSED, NO_TIMES], device=encoded.device),
        last_initial_time=LAST_INITIAL_TIME,
    )
    return [to_end(row, SPECIAL) for row in tokens.tolist()], scores.tolist(), logits.cpu()


def windows(seed: int, count: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    encoded = torch.randn(count, FRAMES, WIDTH, generator=random)
    prompts = torch.stack([torch.tensor([START, 42 + row % 2, 44]) for row in range(count)])
    return encoded.to(device), prompts.to(device)


@pytest.mark.parametrize(("beams", "max_tokens"), [(5, 90), (5, 11), (2, 40), (3, 1)])
def test_the_tokens_and_scores_are_those_of_transformers(beams: int, max_tokens: int) -> None:
    lengths = set()
    for seed in range(6):
        model = random_whisper(seed)
        encoded, prompts = windows(seed, 6)
        expected, expected_scores = search_by_transformers(
            model,
            encoded,
            prompts,
            SPECIAL,
            beams=beams,
            max_tokens=max_tokens,
            suppressed=SUPPRESSED,
            last_initial_time=LAST_INITIAL_TIME,
        )
        tokens, scores, logits = search(model, encoded, max_tokens, beams, prompts)
        assert tokens == expected
        assert scores == pytest.approx(expected_scores, abs=1e-5)
        with torch.inference_mode():
            theirs = model(encoder_outputs=(encoded,), decoder_input_ids=prompts[:, :1]).logits[:, 0]
        assert torch.allclose(logits, theirs, atol=1e-4)
        lengths |= {(len(row), row[-1] == SPECIAL.end) for row in tokens}
    if max_tokens > 30:
        assert {ended for _, ended in lengths} == {True, False} and len(lengths) > 3, lengths


def test_a_search_that_is_used_again_remembers_nothing() -> None:
    model = random_whisper(3)
    encoded, prompts = windows(3, 4)
    others, _ = windows(4, 4)
    found = BeamSearch(WhisperDecoder(model), SPECIAL, 4, 5, 60, FRAMES)
    once = run(found, encoded, 50, prompts)
    other = run(found, others, 20, prompts)
    again = run(found, encoded, 50, prompts)
    assert once[:2] == again[:2] and once[0] != other[0]


def test_nothing_is_read_from_the_device_between_checks() -> None:
    """A device without numbers raises an error for every such read; in a CUDA graph it would be an error too."""
    encoded, prompts = windows(0, 4, "meta")
    found = BeamSearch(WhisperDecoder(random_whisper(0, "meta")), SPECIAL, 4, 5, 200, FRAMES)
    options: dict[str, Any] = {"suppressed": torch.tensor(SUPPRESSED, device="meta"), "last_initial_time": 9}
    with torch.inference_mode():
        tokens, _, _ = found(encoded, prompts, max_tokens=torch_whisper.CHECKED_STEPS, **options)
        assert tokens.shape == (4, torch_whisper.CHECKED_STEPS)
        with pytest.raises(RuntimeError, match="meta"):
            found(encoded, prompts, max_tokens=torch_whisper.CHECKED_STEPS + 1, **options)


@pytest.mark.gpu
def test_graphs_give_what_single_kernels_give(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(4):
        model = random_whisper(seed, "cuda")
        encoded, prompts = windows(seed, 8, "cuda")
        found = BeamSearch(WhisperDecoder(model), SPECIAL, 8, 5, 93, FRAMES)
        recorded, replayed = (run(found, encoded, 90, prompts) for _ in range(2))
        assert found._graphs
        with monkeypatch.context() as patched:
            patched.setattr(BeamSearch, "_step", lambda self, reach: self._choose(self._next_logits(reach)))
            eager = run(found, encoded, 90, prompts)
        assert recorded[0] == eager[0] and replayed[0] == eager[0]
        assert recorded[1] == pytest.approx(eager[1], abs=1e-5) and replayed[1] == pytest.approx(eager[1], abs=1e-5)
        # Because of rounding, the CPU may prefer another of two equally good hypotheses.
        _, on_cpu, _ = search(random_whisper(seed), encoded.cpu(), 90, 5, prompts.cpu())
        assert eager[1] == pytest.approx(on_cpu, abs=1e-3)
        assert max(map(len, eager[0])) > torch_whisper.REACH_STEP, "more than one graph"
