"""Clips in a batch: as they are stored on the way, numbers where they are heard, and nothing of it is lost."""

from __future__ import annotations

import pickle

import numpy as np
import torch

from myna.data.codec import Codes
from myna.data.conversation import AudioClip, Conversation, question
from myna.models.phi4.codec import LARGEST, STEPS, heard
from myna.models.phi4.family import Phi4


def test_features_come_out_as_they_went_in(family: Phi4, asked: list[Conversation], codes: list[Codes]) -> None:
    batch = family.collate([family.render(one) for one in asked])
    features = batch.side_by_side()
    assert features.shape == (len(codes), max(len(heard(one)) for one in codes), 80)
    for clip, length, one in zip(features, batch.spectra.tolist(), codes, strict=True):
        assert np.array_equal(clip[:length].numpy(), heard(one) / np.float32(STEPS))
        assert not clip[length:].any()
    assert batch.features.dtype == torch.int16, "and travel in 16 bits"


def test_large_features_are_not_negative_ones(family: Phi4) -> None:
    loud = np.full((12, 80), LARGEST, np.uint16)
    batch = family.collate([family.render(question("How?", AudioClip("loud", loud), id="q", answer="a"))])
    assert torch.allclose(batch.side_by_side(), torch.tensor(LARGEST / STEPS))


def test_a_batch_travels_between_processes(family: Phi4, asked: list[Conversation]) -> None:
    batch = family.collate([family.render(one) for one in asked])
    again = pickle.loads(pickle.dumps(batch, protocol=5))
    assert again.lengths == batch.lengths and again.most_spectra == batch.most_spectra
    assert torch.equal(again.side_by_side(), batch.side_by_side()) and torch.equal(again.places, batch.places)


def test_words_alone_have_nothing_to_hear(family: Phi4) -> None:
    from myna.data.conversation import Turn

    turns = (Turn("user", ("How?",)), Turn("assistant", ("So.",)))
    batch = family.collate([family.render(Conversation("words", turns))])
    assert len(batch.audio_at) == len(batch.features) == batch.most_spectra == 0
