"""Models opened to speak or to answer: an untuned model, a run or one of its checkpoints, or an adapter."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, get_args

import torch
from torch import nn

from myna.core.config import Quantization
from myna.core.device import pick_device
from myna.core.errors import MynaError, SpeakError
from myna.core.io import file_hash
from myna.data.codec import Encoder
from myna.models import open_family
from myna.models.adapters import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from myna.models.base import Family, require_speaking
from myna.models.metadata import WeightsMetadata, read_metadata
from myna.models.speech_decoder import LoraMatrices
from myna.speak.engine import Engine
from myna.speak.tuned import TunedWeights, require_tuned
from myna.train.precision import DTYPES, choose_precision

if TYPE_CHECKING:
    from myna.speak.answering import AnswerEngine

Source = str | os.PathLike[str]


def load_engine(
    *,
    run: Source | None = None,
    model: str | None = None,
    codec: str | None = None,
    device: str,
    strength: float = 1.0,
    quantization: Quantization = "none",
    exact: bool = False,
) -> Engine:
    """The speech engine of a run or an adapter, or of an untuned model. `strength` scales the LoRA, and a `model`
    beside a run or an adapter is the base model to open it on. With a `quantization` the weights are loaded in main
    memory, merged, and packed onto the device one by one. `exact` is as of `Engine`."""
    if quantization not in get_args(Quantization):
        hint = "choose one of: " + ", ".join(get_args(Quantization))
        raise SpeakError(f"{quantization} is no way to store weights for speaking", hint=hint)
    target = pick_device(device)
    place = target if quantization == "none" else torch.device("cpu")
    loaded = _load(run, model, codec, target, place, strength)
    if quantization != "none":
        from myna.models.quantized import quantize, quantized_linears, supports_fp8

        if quantization == "fp8" and not supports_fp8(target):
            raise SpeakError(
                f"fp8 weights need a GPU with 8-bit products (CUDA capability 8.9 or more), this is {target}",
                hint="--quantization int8, nf4 for the least memory, or none",
            )
        names = loaded.family.lora_targets(loaded.weights, "comprehensive").adapted
        loaded = loaded._replace(weights=quantize(loaded.weights, quantization, names, target))
        for linear in quantized_linears(loaded.weights):
            linear.drop_backward()
    encoder = require_speaking(loaded.family).load_codec(device=loaded.device)
    _check_trained_with(loaded, encoder)
    known, weights = loaded.metadata, loaded.weights.requires_grad_(False)  # not to be trained: they may be rearranged
    engine = Engine(loaded.family, weights, encoder, known.reference_placement, scene=known.scene, exact=exact)
    engine.tuned_with = "" if run is None else os.fspath(run)
    return engine


class SavedLora(NamedTuple):
    """A LoRA as it was saved, for a batch whose requests have adapters of their own."""

    matrices: LoraMatrices
    metadata: WeightsMetadata
    base_checked: bool
    """Whether the base model is known to be the one it was trained on: weights that are quantized, rounded otherwise or
    without the text head cannot be compared."""
    files_hash: str


def read_adapter(engine: Engine, source: Source) -> SavedLora:
    """The LoRA of a run, or of an adapter, once it is seen to fit the engine's model."""
    from myna.models.lora import read_lora_matrices
    from myna.models.quantized import quantized_linears

    family, tuned = engine.family, require_tuned(source, engine.family.source)
    if engine.tuned_with:
        raise SpeakError(
            f"the engine speaks with {engine.tuned_with}, merged into its model: adapters need the base model",
            hint=f"open the base model, and load {engine.tuned_with} as an adapter too",
        )
    if tuned.is_full:
        raise SpeakError(f"{source} was trained in full, and has no LoRA", hint="open it as a model of its own")
    known, dtype = tuned.metadata, next(engine.model.parameters()).dtype
    trained_in = DTYPES.get(known.inputs.get("precision", ""))
    is_plain = not any(True for _ in quantized_linears(engine.model)) and not known.text_head
    comparable = is_plain and trained_in is not None and dtype in (trained_in, torch.float32)
    if comparable:
        _check_base(tuned, family, engine.model, trained_in)
    _check_trained_with(_Loaded(family, engine.model, source, known, torch.device("cpu")), engine.codec)
    checked = comparable and "base model" in known.inputs
    matrices = read_lora_matrices(family, tuned.adapter)  # which also refuses what is no adapter
    files = [file_hash(tuned.adapter / name) for name in (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE)]
    return SavedLora(matrices, known, checked, " ".join(files))


def load_answer_engine(*, run: Source | None = None, model: str | None = None, device: str) -> AnswerEngine:
    """The engine of a model that answers in words, as `load_engine`."""
    from myna.speak.answering import AnswerEngine

    target = pick_device(device)
    loaded = _load(run, model, None, target, target)
    encoder = loaded.family.load_encoder(device=loaded.device)
    _check_trained_with(loaded, encoder)
    return AnswerEngine(loaded.family, loaded.weights, encoder)


class _Loaded(NamedTuple):
    family: Family
    weights: nn.Module
    name: Source
    metadata: WeightsMetadata
    device: torch.device


def _load(
    run: Source | None,
    model: str | None,
    codec: str | None,
    target: torch.device,
    place: torch.device,
    strength: float = 1.0,
) -> _Loaded:
    """Weights in the type for the target device, at another place where they are to be packed first."""
    if run is None and model is None:
        raise SpeakError("give --run or --model", hint="--run runs/NAME, or --model HUB_NAME_OR_FOLDER")
    if run is None and strength != 1.0:
        raise SpeakError("--strength scales the LoRA of a run", hint="give --run, or leave it out")
    dtype = choose_precision("auto", target).compute_dtype
    if run is None:
        return _load_model(str(model), codec, dtype, place)._replace(device=target)
    tuned = require_tuned(run, model)
    if tuned.is_full:
        if strength != 1.0:
            raise SpeakError(f"{run} was trained in full, and has no LoRA", hint="leave out --strength")
        if model is not None:
            raise SpeakError(f"{run} was trained in full, and needs no other model", hint="leave out --model")
        loaded = _load_model(str(tuned.weights), codec or full_model_codec(tuned), dtype, place)
        return loaded._replace(name=run, metadata=tuned.metadata, device=target)
    from myna.models.lora import merge_lora

    family = open_base(tuned, codec)
    adapted = load_adapted(tuned, family, dtype, place, text_head=None)
    return _Loaded(family, merge_lora(adapted, strength), run, tuned.metadata, target)


def _load_model(source: str, codec: str | None, dtype: torch.dtype, device: torch.device) -> _Loaded:
    family = open_family(source, codec=codec)
    # A model that was merged or trained in full says how.
    metadata = (read_metadata(family.folder) if family.folder is not None else None) or WeightsMetadata()
    weights = family.load_model(dtype=dtype, device=device, text_head=False)
    return _Loaded(family, weights, source, metadata, device)


def full_model_codec(tuned: TunedWeights) -> str | None:
    """The codec of a fully trained model: None where its own folder says it, else that of its base."""
    return None if read_metadata(tuned.weights) is not None else open_base(tuned).codec_source


def open_base(tuned: TunedWeights, codec: str | None = None) -> Family:
    """The base model of trained weights, without its own weights."""
    known = tuned.metadata
    try:
        return open_family(known.source, revision=known.revision, codec=codec or known.codec)
    except MynaError as error:
        raise type(error)(
            f"the base model of {tuned.folder} does not open: {error.what}",
            hint="say where it is, --model HUB_NAME_OR_FOLDER, unless this helps: " + error.hint,
        ) from error


def load_adapted(
    tuned: TunedWeights,
    family: Family,
    dtype: torch.dtype | None,
    device: torch.device | str,
    *,
    text_head: bool | None,
) -> nn.Module:
    """The base model with the adapter on it, not yet merged, once it is seen to be the base that was trained on.

    `dtype` None keeps the stored types. `text_head` None is as the adapter needs it.
    """
    from myna.models.lora import load_adapter, trains_text_head

    trained_in = DTYPES.get(tuned.metadata.inputs.get("precision", ""))
    # A hash of rounded weights can only be compared with weights that are not rounded otherwise.
    as_trained = dtype in (None, trained_in, torch.float32) or trained_in is None
    if text_head is None:
        known = tuned.metadata.text_head
        text_head = trains_text_head(tuned.adapter, family) if known is None else known
    loaded = family.load_model(
        dtype=dtype if as_trained else torch.float32, device=device if as_trained else "cpu", text_head=text_head
    )
    _check_base(tuned, family, loaded, trained_in)
    return load_adapter(loaded if as_trained else loaded.to(device, dtype), tuned.adapter)


def _check_base(tuned: TunedWeights, family: Family, model: nn.Module, trained_in: torch.dtype | None) -> None:
    from myna.models.lora import base_model_hash

    expected = tuned.metadata.inputs.get("base model")
    if expected is None or trained_in is None:
        return
    found = base_model_hash(
        model,
        family,
        tuned.adapter,
        dtype=trained_in,
        quantization=tuned.metadata.quantization,
        text_head=bool(tuned.metadata.text_head),
    )
    if found != expected:
        raise SpeakError(
            f"{tuned.folder} was trained on another base model than {family.source} is now: the fingerprint of its "
            f"weights was {expected}, and is {found}",
            hint="open it on the model it was trained on: --model HUB_NAME_OR_FOLDER",
        )


def _check_trained_with(loaded: _Loaded, encoder: Encoder) -> None:
    known = loaded.metadata.inputs
    for name, revision in (("codec", encoder.revision), ("prompt", loaded.family.prompt_revision)):
        if known.get(name, revision) != revision:
            raise SpeakError(
                f"{loaded.name} was trained with another {name} than would speak now ({known[name]}, now {revision})",
                hint=f"use the {name} it was trained with",
            )
