"""Speech engines from a model, a run or an adapter; and adapters merged into models of their own."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
from torch import nn

from myna.core.config import Quantization
from myna.core.device import pick_device
from myna.core.errors import ConfigError, ModelError, SpeakError
from myna.core.io import atomic_folder, check_new_folder, file_hash
from myna.data.codec import Encoder
from myna.models import files
from myna.models.base import Family, LoraMatrices, require_speaking
from myna.models.files import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, WeightsMetadata
from myna.models.quantized import quantize, quantized_linears, supports_fp8
from myna.models.ref import ModelRef
from myna.speak.engine import Engine
from myna.train.precision import DTYPES, choose_precision

if TYPE_CHECKING:
    from myna.models.merge import MergeCheck

MERGED_DTYPES = {"auto": None, "float32": DTYPES["fp32"], "bfloat16": DTYPES["bf16"], "float16": DTYPES["fp16"]}


def load_engine(
    ref: ModelRef,
    *,
    codec: str | None = None,
    device: str = "auto",
    strength: float = 1.0,
    quantization: Quantization = "none",
    exact: bool = False,
) -> Engine:
    """Load the speech engine of a run, an adapter or a model. `strength` scales the LoRA. With a `quantization` the
    weights are loaded in main memory, merged, and packed onto the device one by one. `exact` is as in `Engine`."""
    if quantization not in get_args(Quantization):
        hint = "choose one of: " + ", ".join(get_args(Quantization))
        raise SpeakError(f"{quantization} is no way to store weights for speaking", hint=hint)
    target = pick_device(device)
    place = target if quantization == "none" else torch.device("cpu")
    family, weights = load_model_weights(ref, codec, target, place, strength)
    if quantization != "none":
        if quantization == "fp8" and not supports_fp8(target):
            raise SpeakError(
                f"fp8 weights need a GPU with 8-bit products (CUDA capability 8.9 or more), this is {target}",
                hint="--quantization int8, nf4 for the least memory, or none",
            )
        names = family.lora_targets(weights, "comprehensive").adapted
        weights = quantize(weights, quantization, names, target)
        for linear in quantized_linears(weights):
            linear.drop_backward()
    encoder = require_speaking(family).load_codec(device=target)
    check_trained_with(ref, family, encoder)
    weights.requires_grad_(False)  # not to be trained: they may be rearranged
    placement, scene = ref.metadata.reference_placement, ref.metadata.scene
    engine = Engine(family, weights, encoder, reference_placement=placement, scene=scene, exact=exact)
    engine.tuned_with = ref.source if ref.is_trained else ""
    return engine


def read_adapter(engine: Engine, ref: ModelRef) -> tuple[LoraMatrices, WeightsMetadata, str]:
    """Read the LoRA of a run or an adapter, after checking that it fits the engine's model. Return its matrices, its
    metadata and the hash of its files. Weights that are quantized, rounded otherwise or without the text head cannot be
    compared."""
    from myna.models.lora import read_lora_matrices

    family = engine.family
    if engine.tuned_with:
        raise SpeakError(
            f"the engine speaks with {engine.tuned_with}, merged into its model: adapters need the base model",
            hint=f"open the base model, and load {engine.tuned_with} as an adapter too",
        )
    if ref.adapter is None:
        raise SpeakError(f"{ref.source} was trained in full, and has no LoRA", hint="open it as a model of its own")
    known, dtype = ref.metadata, next(engine.model.parameters()).dtype
    trained_in = DTYPES.get(known.inputs.get("precision", ""))
    is_plain = not any(True for _ in quantized_linears(engine.model)) and not known.text_head
    if is_plain and trained_in is not None and dtype in (trained_in, torch.float32):
        _check_base(ref, family, engine.model, trained_in)
    check_trained_with(ref, family, engine.codec)
    matrices = read_lora_matrices(family, ref.adapter)  # which also refuses what is no adapter
    hashes = [file_hash(ref.adapter / name) for name in (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE)]
    return matrices, known, " ".join(hashes)


def load_model_weights(
    ref: ModelRef, codec: str | None, target: torch.device, place: torch.device, strength: float = 1.0
) -> tuple[Family, nn.Module]:
    """Open a model and load its weights in the type of the target device, to another place if they are packed first."""
    if not ref.is_trained and strength != 1.0:
        raise SpeakError("`strength` scales the LoRA of a run", hint="give --run, or leave it out")
    dtype = choose_precision("auto", target).compute_dtype
    if ref.is_trained and ref.adapter is None:
        if strength != 1.0:
            raise SpeakError(f"{ref.source} was trained in full, and has no LoRA", hint="leave out --strength")
        if ref.base is not None:
            raise SpeakError(f"{ref.source} was trained in full, and needs no other model", hint="leave out --model")
    family = ref.open_family(codec)
    if ref.adapter is None:
        weights = family.load_model(dtype=dtype, device=place, text_head=False)
    else:
        from myna.models.lora import merge_lora

        weights = merge_lora(load_adapted(ref, family, dtype, place, text_head=None), strength)
    return family, weights


def load_adapted(
    ref: ModelRef, family: Family, dtype: torch.dtype | None, device: torch.device | str, *, text_head: bool | None
) -> nn.Module:
    """Load the base model with the adapter on it, not yet merged, and check that it was trained on this base. `dtype`
    None keeps the stored types. `text_head` None is what the adapter needs."""
    from myna.models.lora import load_adapter, trains_text_head

    adapter = ref.require_adapter()
    trained_in = DTYPES.get(ref.metadata.inputs.get("precision", ""))
    # Compare hashes only if the weights have the same type as in training, or fp32.
    as_trained = dtype in (None, trained_in, torch.float32) or trained_in is None
    if text_head is None:
        known = ref.metadata.text_head
        text_head = trains_text_head(adapter, family) if known is None else known
    loaded = family.load_model(
        dtype=dtype if as_trained else torch.float32, device=device if as_trained else "cpu", text_head=text_head
    )
    _check_base(ref, family, loaded, trained_in)
    return load_adapter(loaded if as_trained else loaded.to(device, dtype), adapter)


def _check_base(ref: ModelRef, family: Family, model: nn.Module, trained_in: torch.dtype | None) -> None:
    from myna.models.lora import base_model_hash

    expected = ref.metadata.inputs.get("base model")
    if expected is None or trained_in is None:
        return
    found = base_model_hash(
        model,
        family,
        ref.require_adapter(),
        dtype=trained_in,
        quantization=ref.metadata.quantization,
        text_head=bool(ref.metadata.text_head),
    )
    if found != expected:
        raise SpeakError(
            f"{ref.folder} was trained on another base model than {family.source} is now: the fingerprint of its "
            f"weights was {expected}, and is {found}",
            hint="open it on the model it was trained on: --model HUB_NAME_OR_FOLDER",
        )


def check_trained_with(ref: ModelRef, family: Family, encoder: Encoder) -> None:
    """Refuse a codec or a prompt other than that of the training."""
    known = ref.metadata.inputs
    for name, revision in (("codec", encoder.revision), ("prompt", family.prompt_revision)):
        if known.get(name, revision) != revision:
            raise SpeakError(
                f"{ref.source} was trained with another {name} than would speak now ({known[name]}, now {revision})",
                hint=f"use the {name} it was trained with",
            )


def merge_tuned(ref: ModelRef, out: Path, *, layout: str, strength: float, dtype: str, device: str) -> MergeCheck:
    """Write a whole model into `out`, which must be new; it appears complete, or not at all. `myna.json` in it says
    what it was made of, how it was checked, and how it is to be used."""
    from myna.models.merge import merge_adapter

    check_new_folder(out)
    if dtype not in MERGED_DTYPES:
        raise ConfigError(f"there is no dtype {dtype}", hint=f"choose one of: {', '.join(MERGED_DTYPES)}")
    if strength == 0:
        raise ConfigError("a strength of 0 is the base model itself", hint="leave out --strength, or raise it")
    adapter = ref.require_trained().adapter
    if adapter is None:
        raise ModelError(
            f"{ref.source} was trained in full: its result is a whole model already, with nothing to merge",
            hint=f"use it as it is, --model {ref.weights}, or: myna model convert {ref.weights} --out {out}",
        )
    family = ref.open_family()
    adapted = load_adapted(ref, family, MERGED_DTYPES[dtype], pick_device(device), text_head=family.has_text_head)
    with atomic_folder(out) as written:
        check = merge_adapter(family, adapted, written, layout=layout, strength=strength)
        known = ref.metadata
        provenance = {
            "made_by": "myna merge",
            "base": files.absolute_source(known.source),
            "base_revision": known.revision,
            "base_fingerprint": known.inputs.get("base model"),
            "adapter": str(adapter.absolute()),
            "adapter_hash": file_hash(adapter / ADAPTER_WEIGHTS_FILE),
            "strength": strength,
            "layout": layout,
            "check": asdict(check),
        }
        inputs = {name: value for name, value in known.inputs.items() if name in files.USAGE_FINGERPRINTS}
        changed = {"codec": None, "quantization": "none", "inputs": inputs, "provenance": provenance}
        files.save_metadata(written, known.model_copy(update=changed))
    return check
