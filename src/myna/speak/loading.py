"""Models opened to speak or to answer: an untuned model, a run, or one of a run's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from myna.data.codec import Encoder
from myna.errors import SpeakError
from myna.models import open_family
from myna.models.base import Family, require_speaking
from myna.speak.engine import Engine
from myna.train.precision import choose_precision, pick_device

if TYPE_CHECKING:
    from myna.speak.answering import AnswerEngine
    from myna.train.run import Run


def load_engine(
    *, run: Path | None = None, model: str | None = None, codec: str | None = None, device: str, strength: float = 1.0
) -> Engine:
    """The speech engine of a run or of an untuned model; `strength` scales a run's LoRA."""
    loaded = _load(run, model, codec, device, strength)
    encoder = require_speaking(loaded.family).load_codec(device=loaded.device)
    if loaded.run is None:
        return Engine(loaded.family, loaded.weights, encoder)
    _check_trained_with(loaded.run, encoder, loaded.family)
    return Engine(loaded.family, loaded.weights, encoder, loaded.run.recipe.data.reference_placement)


def load_answer_engine(*, run: Path | None = None, model: str | None = None, device: str) -> AnswerEngine:
    """The engine of a model that answers in words, from a run or from an untuned model."""
    from myna.speak.answering import AnswerEngine

    loaded = _load(run, model, None, device)
    encoder = loaded.family.load_encoder(device=loaded.device)
    if loaded.run is not None:
        _check_trained_with(loaded.run, encoder, loaded.family)
    return AnswerEngine(loaded.family, loaded.weights, encoder)


class _Loaded(NamedTuple):
    family: Family
    weights: nn.Module
    run: Run | None
    device: torch.device


def _load(run: Path | None, model: str | None, codec: str | None, device: str, strength: float = 1.0) -> _Loaded:
    if (run is None) == (model is None):
        raise SpeakError("give either --run or --model", hint="--run runs/NAME, or --model HUB_NAME_OR_FOLDER")
    if run is None and strength != 1.0:
        raise SpeakError("--strength scales the LoRA of a run", hint="give --run, or leave it out")
    target = pick_device(device)
    dtype = choose_precision("auto", target).compute_dtype
    if run is None:
        family = open_family(str(model), codec=codec)
        return _Loaded(family, family.load_model(dtype=dtype, device=target, text_head=False), None, target)
    from myna.models.lora import load_adapter, merge_lora
    from myna.train.run import Run

    tuned = Run.open_for_inference(run)
    settings = tuned.recipe.model
    family = open_family(settings.source, revision=settings.revision, codec=codec or settings.codec)
    if tuned.model.is_dir():
        if strength != 1.0:
            raise SpeakError(f"{run} was trained in full, and has no LoRA", hint="leave out --strength")
        # Full training saves the model without its codec, which is still the base model's.
        family = open_family(str(tuned.model), codec=family.codec_source)
    weights = family.load_model(dtype=dtype, device=target, text_head=tuned.recipe.needs_text_head)
    if not tuned.model.is_dir():
        weights = merge_lora(load_adapter(weights, tuned.adapter), strength)
    return _Loaded(family, weights, tuned, target)


def _check_trained_with(run: Run, encoder: Encoder, family: Family) -> None:
    from myna.train.checkpoint import training_inputs

    known = training_inputs(run)
    for name, revision in (("codec", encoder.revision), ("prompt", family.prompt_revision)):
        if known.get(name, revision) != revision:
            raise SpeakError(
                f"{run.folder} was trained with another {name} than would speak now",
                hint=f"use the {name} it was trained with",
            )
