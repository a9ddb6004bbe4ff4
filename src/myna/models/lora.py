"""Adapters on any family: put one on, count it, save it, open a saved one, merge it.

Training, speaking and `myna model stats` all come here, so that there is one way a model is wrapped.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from myna.config import AdaptSettings
from myna.errors import CheckpointError, ConfigError, ModelError, TrainingError
from myna.models.base import LoraTargets
from myna.models.quantized import frozen_linears

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_ADAPTER = "default"
"""PEFT's own name for the only adapter; it is not written to the file."""


class Adaptable(Protocol):
    """The part of a `Family` that adapters need."""

    @property
    def source(self) -> str: ...
    def adapt_targets(self, model: nn.Module, mode: str, custom: Sequence[str] = ()) -> LoraTargets: ...
    def module_names(self, model: nn.Module) -> dict[str, tuple[str, ...]]: ...


class ParameterCounts(NamedTuple):
    total: int
    """Everything held in memory, the base's copy of a fully trained module included."""
    trainable: int
    lora: int
    """LoRA matrices and DoRA magnitudes."""


def wrap(model: nn.Module, family: Adaptable, settings: AdaptSettings) -> nn.Module:
    """Decide what learns: a LoRA around the frozen model, or with `full` the model itself less what is frozen.

    Works on the meta device too. Changes the model in place; dtypes stay as they are.
    """
    if settings.mode == "full":
        model.requires_grad_(True)
        for name in full_names(family, model, settings.freeze, "adapt.freeze"):
            model.get_submodule(name).requires_grad_(False)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError("`adapt.freeze` leaves nothing to train", hint="take something off the list")
        return model

    trained = full_names(family, model, settings.train_modules, "adapt.train_modules")
    targets = family.adapt_targets(model, settings.mode, settings.targets)
    if not targets.adapted:
        raise ModelError(f"adapt.mode {settings.mode} meets no layer of {family.source}", hint="try another mode")
    for name in trained:
        inner = [target for target in targets.adapted if target == name or target.startswith(f"{name}.")]
        if inner:
            raise ConfigError(
                f"`adapt.train_modules` covers `{name}`, where adapt.mode {settings.mode} puts a LoRA on `{inner[0]}`",
                hint="train it in full or with a LoRA: drop it from train_modules, or choose another mode",
            )
    config = LoraConfig(
        task_type=None,  # a task type would put `labels=` into every forward
        target_modules=list(targets.adapted),
        modules_to_save=list(trained) or None,
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        bias="none",
    )
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    with torch.device("meta") if on_meta else nullcontext():
        wrapped: nn.Module = get_peft_model(model, config)
    config.base_model_name_or_path = family.source
    # PEFT shortens long lists of names to common ends and matches modules by their ends.
    assert set(_names(wrapped, LoraLayer)) == set(targets.adapted)
    assert set(_names(wrapped, ModulesToSaveWrapper)) == set(trained)
    return wrapped


def frozen_names(model: nn.Module, family: Adaptable, settings: AdaptSettings) -> list[str]:
    """The linear layers that only carry a LoRA or nothing at all, by full name; heads are none of them."""
    trained = full_names(family, model, settings.train_modules, "adapt.train_modules")
    layers = family.adapt_targets(model, "comprehensive").adapted
    return [name for name in layers if not any(name == one or name.startswith(f"{one}.") for one in trained)]


def full_names(family: Adaptable, model: nn.Module, short_names: Iterable[str], setting: str) -> list[str]:
    """Short names (`audio_head`) to full module names; `setting` is what to blame for a wrong one."""
    known = family.module_names(model)
    found: list[str] = []
    for short in short_names:
        if short not in known:
            close = difflib.get_close_matches(short, known, n=3, cutoff=0.5)
            hint = "did you mean " + " or ".join(f"`{name}`" for name in close) + "?" if close else "known: "
            raise ConfigError(f"`{setting}`: there is no `{short}`", hint=hint if close else hint + ", ".join(known))
        if not known[short] and setting == "adapt.train_modules":
            raise ConfigError(
                f"`{setting}`: the model was loaded without its `{short}`, which this loss never reaches",
                hint=f"set loss.text_weight above 0, or drop `{short}`",
            )
        found += known[short]
    return list(dict.fromkeys(found))


def cast_trainable(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Trainable parameters in one type. PEFT sees to the LoRA, but not to modules that are trained in full."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def count_parameters(model: nn.Module) -> ParameterCounts:
    """Weights as the model has them, however many of them share a byte."""
    total = sum(layer.in_features * layer.out_features for layer in frozen_linears(model))
    trainable = lora = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        trainable += parameter.numel() if parameter.requires_grad else 0
        lora += parameter.numel() if any(part.startswith("lora_") for part in name.split(".")) else 0
    return ParameterCounts(total, trainable, lora)


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What an adapter is made of, by the names PEFT saves it under."""
    # Not "auto", which would look the base model up on the hub to see whether its vocabulary has grown.
    tensors: dict[str, torch.Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return tensors


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`, each under a temporary name first.

    Any PEFT program reads them. The configuration goes last, so a folder that has one has its weights too.
    """
    if not isinstance(model, PeftModel):
        raise TrainingError("the model carries no adapter to save", hint="with adapt.mode: full save the whole model")
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{WEIGHTS_FILE}.partial"
    tensors = {name: tensor.contiguous() for name, tensor in adapter_tensors(model).items()}
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / WEIGHTS_FILE)

    base = model.get_base_model()
    config = dataclasses.replace(
        model.peft_config[_ADAPTER],
        inference_mode=True,
        auto_mapping={"base_model_class": type(base).__name__, "parent_library": type(base).__module__},
    ).to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    partial = folder / f"{CONFIG_FILE}.partial"
    partial.write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(folder / CONFIG_FILE)


def load_adapter(model: nn.Module, folder: Path, *, trainable: bool = False) -> nn.Module:
    """Put a saved adapter on a model, every key accounted for.

    To speak: frozen, in the model's dtype, and refused if it changes nothing. `trainable` is for training on: fp32, and
    an adapter that has not learned yet is fine.
    """
    config, tensors = _read(folder)
    config.task_type = None
    config.inference_mode = not trainable
    try:
        wrapped: nn.Module = PeftModel(model, config, autocast_adapter_dtype=trainable)
    except ValueError as error:
        raise CheckpointError(f"{folder} does not fit the model: {error}", hint=_wrong_model(config)) from None
    if trainable:
        cast_trainable(wrapped)
    _check_fit(folder, tensors, adapter_tensors(wrapped), config)
    set_peft_model_state_dict(wrapped, tensors)
    if trainable:
        return wrapped
    if _is_inert(wrapped):
        raise ModelError(
            f"the adapter in {folder} changes nothing: it is as it was before training",
            hint="train it for longer, or open a later checkpoint",
        )
    return wrapped.eval()


def merge(model: nn.Module, strength: float = 1.0) -> nn.Module:
    """Fold the adapter into the model, which comes back unwrapped and in its own dtype. `strength` is the share of what
    was learned that is folded in: less than 1 lies between the model as it was and as it was tuned."""
    if not isinstance(model, PeftModel):
        raise ModelError("the model carries no adapter to merge", hint="open a run that was trained with a LoRA")
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            for copy, original in zip(
                module.modules_to_save[_ADAPTER].parameters(), module.original_module.parameters(), strict=True
            ):
                copy.data = torch.lerp(original.float(), copy.float(), strength).to(original.dtype)
        elif isinstance(module, LoraLayer) and strength != 1.0:
            if _ADAPTER in module.lora_magnitude_vector:
                raise ModelError(
                    "a DoRA has magnitudes of its own, and is applied as a whole", hint="leave out --strength"
                )
            module.scaling[_ADAPTER] *= strength
    try:
        merged: nn.Module = model.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise ModelError(f"the adapter cannot be merged: {error}", hint="open another checkpoint of the run") from None
    return merged.requires_grad_(False)


def _names(model: nn.Module, kind: type[nn.Module]) -> Iterator[str]:
    """Full names, as in the unwrapped model, of the modules PEFT has replaced."""
    for name, module in model.named_modules():
        if isinstance(module, kind):
            yield name.removeprefix("base_model.model.")


def _read(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / file).is_file():
            pickled = file == WEIGHTS_FILE and (folder / "adapter_model.bin").is_file()
            raise CheckpointError(
                f"{folder} holds no {file}" + (", only a pickle, which could run anything" if pickled else ""),
                hint="save it again as safetensors" if pickled else "pass the folder of a saved adapter",
            )
    try:
        config = PeftConfig.from_pretrained(str(folder))
        tensors = load_file(folder / WEIGHTS_FILE)
    except (ValueError, TypeError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is damaged: {error}", hint="open another checkpoint of the run") from None
    if not isinstance(config, LoraConfig):
        raise ModelError(f"{folder} is a {config.peft_type} adapter", hint="only LoRA adapters can be opened")
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise CheckpointError(f"{folder}: {_some(broken)} not finite", hint="open an earlier checkpoint of the run")
    return config, tensors


def _check_fit(folder: Path, got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], config: Any) -> None:
    problems = []
    if missing := sorted(expected.keys() - got.keys()):
        problems.append(f"missing: {_some(missing)}")
    if unexpected := sorted(got.keys() - expected.keys()):
        problems.append(f"unexpected: {_some(unexpected)}")
    shapes = [
        f"{name} {list(got[name].shape)} for {list(expected[name].shape)}"
        for name in sorted(expected.keys() & got.keys())
        if got[name].shape != expected[name].shape
    ]
    if shapes:
        problems.append(f"of another shape: {_some(shapes)}")
    if problems:
        raise CheckpointError(f"{folder} does not fit the model; " + "; ".join(problems), hint=_wrong_model(config))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _wrong_model(config: Any) -> str:
    heads = f", with {json.dumps(sorted(config.modules_to_save))}" if config.modules_to_save else ""
    return f"open it on the model it was trained on: {config.base_model_name_or_path}{heads}"


def _is_inert(model: nn.Module) -> bool:
    """True when the model speaks as if there were no adapter."""
    return not any(
        _lora_acts(module) if isinstance(module, LoraLayer) else _copy_differs(module)
        for module in model.modules()
        if isinstance(module, LoraLayer | ModulesToSaveWrapper)
    )


def _lora_acts(layer: Any) -> bool:
    if layer.lora_A[_ADAPTER].weight.any() and layer.lora_B[_ADAPTER].weight.any():
        return True
    if _ADAPTER not in layer.lora_magnitude_vector:
        return False
    weight = layer.get_base_layer().weight
    norm = torch.linalg.vector_norm(weight.float(), dim=1)
    magnitude = layer.lora_magnitude_vector[_ADAPTER].weight.float()
    return not torch.allclose(magnitude, norm, rtol=2 * torch.finfo(weight.dtype).eps)


def _copy_differs(module: Any) -> bool:
    copy = module.modules_to_save[_ADAPTER].state_dict()
    return any(not torch.equal(copy[name], value) for name, value in module.original_module.state_dict().items())
