"""Clips in a batch: stored as 16-bit codes in transfer, floats in the encoder, and nothing is lost."""

from __future__ import annotations

import pickle

import numpy as np
import torch

from myna.data.codec import Codes
from myna.data.conversation import AudioClip, Conversation, answer_conversation
from myna.models.phi4.codec import CODES_PER_UNIT, MAX_CODE, valid_frames
from myna.models.phi4.family import Phi4


def test_features_come_out_as_they_went_in(family: Phi4, asked: list[Conversation], codes: list[Codes]) -> None:
    batch = family.collate([family.render(one) for one in asked])
    features = batch.padded_features()
    assert features.shape == (len(codes), max(len(valid_frames(one)) for one in codes), 80)
    for clip, length, one in zip(features, batch.spectra.tolist(), codes, strict=True):
        assert np.array_equal(clip[:length].numpy(), valid_frames(one) / np.float32(CODES_PER_UNIT))
        assert not clip[length:].any()
    assert batch.features.dtype == torch.int16, "and travel in 16 bits"


def test_large_features_are_not_negative_ones(family: Phi4) -> None:
    loud = np.full((12, 80), MAX_CODE, np.uint16)
    batch = family.collate([family.render(answer_conversation("How?", AudioClip("loud", loud), id="q", answer="a"))])
    assert torch.allclose(batch.padded_features(), torch.tensor(MAX_CODE / CODES_PER_UNIT))


def test_a_batch_travels_between_processes(family: Phi4, asked: list[Conversation]) -> None:
    batch = family.collate([family.render(one) for one in asked])
    again = pickle.loads(pickle.dumps(batch, protocol=5))
    assert again.lengths == batch.lengths and again.max_spectra == batch.max_spectra
    assert torch.equal(again.padded_features(), batch.padded_features()) and torch.equal(
        again.padded_at, batch.padded_at
    )


def test_a_batch_of_text_has_no_features(family: Phi4) -> None:
    from myna.data.conversation import Turn

    turns = (Turn("user", ("How?",)), Turn("assistant", ("So.",)))
    batch = family.collate([family.render(Conversation("words", turns))])
    assert len(batch.audio_at) == len(batch.features) == batch.max_spectra == 0
