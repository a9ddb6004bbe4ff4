"""Checks of a model: configuration, tokenizer, weights and codec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from myna.checks.check import Check
from myna.core.errors import ModelError

if TYPE_CHECKING:
    from myna.models.base import Family

FETCH_AGAIN = "hf download OWNER/NAME --force-download, and give --model that name"
SENTENCES = ("صباح الخير، كيف حالك اليوم؟", "Chào buổi sáng, hôm nay bạn có khỏe không?")


class CheckedModel:
    """The model to check, opened once. Nothing is downloaded for a check."""

    def __init__(self, source: str) -> None:
        self.source = source

    @cached_property
    def family(self) -> Family:
        from myna.models import open_family

        with _offline():
            return open_family(self.source)


def check_model(model: CheckedModel) -> Iterator[Check]:
    """Configuration and tokenizer, each by itself and with one another."""
    try:
        family = model.family
    except ModelError as error:
        if not _not_cached(error):
            raise
        detail = f"{model.source} is no folder here and not in the hub cache, so it was not looked at"
        yield Check("model", "warning", detail, f"hf download {model.source}")
        return
    if not family.has_weights:
        hint = "myna doctor --model FOLDER, or the hub name of a checkpoint"
        yield Check("model", "failed", f"{model.source} is a configuration without weights", hint)
        return
    yield Check("model", "ok", f"{model.source}: {family.name}, configuration and tokenizer agree")


def check_model_tokenizer(model: CheckedModel) -> Iterator[Check]:
    tokenizer = model.family.tokenizer
    for sentence in SENTENCES:
        ids = tokenizer.encode(sentence, add_special_tokens=False)
        back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if back != sentence:
            detail = f"{sentence!r} comes back as {back!r}"
            yield Check("tokenizer", "failed", detail, FETCH_AGAIN)
            return
    yield Check("tokenizer", "ok", f"{len(tokenizer)} tokens; Arabic and Vietnamese come back as they went in")


def check_model_weights(model: CheckedModel) -> Iterator[Check]:
    """Names and shapes of every tensor; reads headers and no tensor."""
    yield Check("weights", "ok", model.family.check_weights())


def check_model_codec(model: CheckedModel) -> Iterator[Check]:
    """A second of noise, encoded and, with a codec, decoded."""
    import numpy as np

    try:
        with _offline():
            encoder: Any = model.family.load_encoder()
    except ModelError as error:
        if not _not_cached(error):
            raise
        yield Check("codec", "warning", f"not looked at: {error.what}", error.hint)
        return
    frames = int(encoder.frame_rate)
    noise = 0.1 * np.random.default_rng(0).standard_normal((1, frames * encoder.hop), dtype=np.float32)
    codes = encoder.encode(noise)[0]
    if not hasattr(encoder, "decode"):
        whole = codes.shape == (frames, encoder.codebooks)
        detail = f"a second of noise is {len(codes)} frames of {encoder.codebooks} features"
        yield Check("features", "ok", detail) if whole else Check("features", "failed", detail, FETCH_AGAIN)
        return
    decoded = encoder.decode(codes)
    detail = f"a second of noise is {len(codes)} frames of {encoder.codebooks} codes and {len(decoded)} samples again"
    is_whole = codes.shape == (frames, encoder.codebooks) and len(decoded) == frames * encoder.hop
    if not is_whole or not np.isfinite(decoded).all():
        yield Check("codec", "failed", detail, FETCH_AGAIN)
    else:
        yield Check("codec", "ok", detail)


@contextmanager
def _offline() -> Iterator[None]:
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _not_cached(error: ModelError) -> bool:
    from huggingface_hub.errors import LocalEntryNotFoundError

    return isinstance(error.__cause__, LocalEntryNotFoundError)
