"""A larger model that begins with what a smaller one has learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import HiggsAudioV2ForConditionalGeneration

import grow_fledgling
from grow_fledgling import EncodedPair, translated_embedding, translated_head, widened
from init_fledgling import Size, fledgling_config
from myna.core.errors import DataError
from myna.models.higgs_v2.checkpoint import save_checkpoint
from myna.models.higgs_v2.render import DelayPattern
from myna.models.higgs_v2.tiny import tiny_tokenizer

SMALL = Size(hidden=64, layers=2, ffn=48, heads=2, keys=1)
LARGE = Size(hidden=128, layers=3, ffn=96, heads=4, keys=2)
ENTRIES, DELAY = 32, DelayPattern(8, 32, 33)


def codes(seed: int, frames: int = 40) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    return np.random.default_rng(seed).integers(0, ENTRIES, (frames, 8)).astype(np.uint16)


def logits_of(model: HiggsAudioV2ForConditionalGeneration) -> torch.Tensor:
    delayed = torch.from_numpy(DELAY.apply(codes(0)))
    ids = torch.full((1, len(delayed)), model.config.audio_token_id)
    with torch.no_grad():
        states: torch.Tensor = model.model(input_ids=ids, audio_input_ids=delayed[None]).last_hidden_state
        logits: torch.Tensor = model.audio_lm_head(states)
    return logits


def test_a_larger_model_says_what_the_smaller_one_said() -> None:
    torch.manual_seed(1)
    small = HiggsAudioV2ForConditionalGeneration(fledgling_config(SMALL, codebook_size=ENTRIES)).eval()
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.1)
    config = fledgling_config(LARGE, codebook_size=ENTRIES)
    large = HiggsAudioV2ForConditionalGeneration(config).eval()
    large.load_state_dict(widened(small.state_dict(), small.config, config, seed=0))
    one, other = logits_of(small), logits_of(large)
    assert torch.nn.functional.cosine_similarity(one, other, dim=-1).min() > 0.95
    random = logits_of(HiggsAudioV2ForConditionalGeneration(config).eval())
    assert torch.nn.functional.cosine_similarity(one, random, dim=-1).abs().max() < 0.5


def test_codes_that_are_only_renamed_are_found_again() -> None:
    """Embedding and head follow exactly when the new codec renumbers the entries."""
    rng = np.random.default_rng(3)
    renamed = np.stack([rng.permutation(ENTRIES) for _ in range(8)])
    old = [codes(seed) for seed in range(60)]
    pairs = [EncodedPair(one, renamed[np.arange(8), one].astype(np.uint16)) for one in old]
    weight = torch.randn(8 * (ENTRIES + 2), 16, generator=torch.Generator().manual_seed(0))
    embedding, head = (translate(weight, pairs, DELAY) for translate in (translated_embedding, translated_head))
    places = torch.arange(8) * (ENTRIES + 2)
    before = weight[torch.from_numpy(DELAY.apply(old[0])) + places].sum(1)
    after = embedding[torch.from_numpy(DELAY.apply(pairs[0].new)) + places].sum(1)
    assert (before - after).square().mean() < 0.02 * before.square().mean()
    for book in range(8):
        first = book * (ENTRIES + 2)
        found = head[first + torch.from_numpy(renamed[book])]
        assert torch.nn.functional.cosine_similarity(found, weight[first : first + ENTRIES]).min() > 0.9
        assert torch.equal(head[first + ENTRIES :][:2], weight[first + ENTRIES :][:2]), "begin and end stay"


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = HiggsAudioV2ForConditionalGeneration(fledgling_config(SMALL, codebook_size=ENTRIES))
    save_checkpoint(model, tmp_path / "small", tiny_tokenizer())
    with pytest.raises(DataError, match="heads must keep their size"):
        grow_fledgling.grow(tmp_path / "small", tmp_path, [], tmp_path / "out", Size(96, 2, 48, 2, 1))
