"""A LoRA out of a model that was trained in full: for every weight the nearest update of a given rank.

What no LoRA can carry, such as norms, heads and embeddings, is copied beside it where `train_modules` says so, and
reported where it does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from myna.config import AdaptSettings
from myna.errors import CheckpointError, ConfigError, ModelError
from myna.models import open_family
from myna.models.lora import Adaptable, cast_trainable, full_names, save_adapter, wrap

EXACT = 1024
"""Up to this many rows or columns, all singular values are computed; beyond, only those that are wanted."""
SPARE, ROUNDS = 32, 6
"""More singular vectors, and more rounds of refinement, than are wanted: they make the wanted ones right."""


@dataclass(frozen=True, slots=True)
class Extraction:
    """What an extraction kept of all that training had changed. Errors are shares of the change, from 0 to 1."""

    rank: int
    error: float
    """Over every weight that changed."""
    modules: dict[str, float]
    """The error of each module with a LoRA."""
    copied: tuple[str, ...]
    """Modules that were taken over whole."""
    left: dict[str, float]
    """Parameters that changed and were left behind, with their change as a share of what they were."""


def extract(
    base_source: str,
    tuned_source: str,
    out: Path,
    rank: int,
    *,
    mode: str = "comprehensive",
    targets: Sequence[str] = (),
    alpha: float | None = None,
    train_modules: Sequence[str] | None = None,
    text_head: bool = False,
    device: str = "cpu",
) -> dict[str, Any]:
    """Write the adapter that turns one checkpoint into the other, as nearly as its rank allows, and say how nearly.

    `train_modules` None copies every part that changed and gets no LoRA. The text head is looked at only if asked for:
    a model that was trained on audio alone is saved without it. Both models are held in fp32.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists and is not empty", hint="choose another folder")
    family = open_family(base_source)
    base, tuned = (
        opened.load_model(dtype=torch.float32, device=device, text_head=text_head)
        for opened in (family, open_family(tuned_source))
    )
    chosen = {"mode": mode, "targets": tuple(targets), "rank": rank, "alpha": alpha or float(rank)}
    settings = AdaptSettings.model_validate(chosen)
    if train_modules is None:
        train_modules = _changed_parts(base, tuned, family, settings)
    model, report = extract_lora(base, tuned, family, settings.model_copy(update={"train_modules": (*train_modules,)}))
    save_adapter(model, out)
    return asdict(report)


@torch.no_grad()
def extract_lora(
    base: nn.Module, tuned: nn.Module, family: Adaptable, settings: AdaptSettings
) -> tuple[nn.Module, Extraction]:
    """The base, wrapped in place with a LoRA that brings it as near to the tuned model as the settings allow."""
    if settings.mode == "full" or settings.dora:
        what = "adapt.mode: full" if settings.mode == "full" else "adapt.dora"
        raise ConfigError(f"`{what}` is no plain LoRA, which is what can be extracted", hint="drop it")
    before, after = dict(base.named_parameters()), dict(tuned.named_parameters())
    _check_alike(before, after)
    trained = full_names(family, base, settings.train_modules, "adapt.train_modules")
    model = cast_trainable(wrap(base, family, settings))

    def change(name: str) -> torch.Tensor:
        return after[name].float() - before[name].float()

    errors: dict[str, float] = {}
    carried, lost, whole = set(), 0.0, 0.0
    for full_name, layer in model.named_modules():
        name = full_name.removeprefix("base_model.model.")
        if isinstance(layer, LoraLayer):
            delta = change(f"{name}.weight")
            missing = _fit(layer, delta)
            size = _square(delta)
            errors[name] = math.sqrt(missing / size) if size else 0.0
            lost, whole = lost + missing, whole + size
            carried.add(f"{name}.weight")
        elif isinstance(layer, ModulesToSaveWrapper):
            own = tuned.get_submodule(name)
            for inner, parameter in layer.modules_to_save["default"].named_parameters():
                parameter.copy_(own.get_parameter(inner))
                carried.add(f"{name}.{inner}")
                whole += _square(change(f"{name}.{inner}"))

    left = {}
    for name in before.keys() - carried:
        size = _square(change(name))
        if size:
            left[name] = math.sqrt(size / max(_square(before[name].float()), 1e-30))
            lost, whole = lost + size, whole + size
    error = math.sqrt(lost / whole) if whole else 0.0
    return model, Extraction(settings.rank, error, errors, tuple(trained), dict(sorted(left.items())))


def _fit(layer: Any, delta: torch.Tensor) -> float:
    """Set a layer's LoRA to the nearest update of its rank; the squared size of what it misses."""
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    left, right = _truncated(delta, len(down))
    down.zero_()
    up.zero_()
    down[: len(right)].copy_(right)
    up[:, : left.shape[1]].copy_(left / layer.scaling["default"])
    return _square(delta - layer.scaling["default"] * (up.float() @ down.float()))


def _truncated(delta: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, rank) and (rank, columns), equally large, whose product is the nearest of that rank."""
    smaller = min(delta.shape)
    if smaller <= EXACT or smaller <= 4 * (rank + SPARE):
        left, values, right = torch.linalg.svd(delta, full_matrices=False)
    else:
        devices = [delta.device] if delta.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(0)
            left, values, right = torch.svd_lowrank(delta, q=rank + SPARE, niter=ROUNDS)
        right = right.mT
    roots = values[:rank].sqrt()
    return left[:, :rank] * roots, roots[:, None] * right[:rank]


def _changed_parts(base: nn.Module, tuned: nn.Module, family: Adaptable, settings: AdaptSettings) -> list[str]:
    """Short names of the parts that training has changed and no LoRA touches."""
    before, after = dict(base.named_parameters()), dict(tuned.named_parameters())
    _check_alike(before, after)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    adapted = family.adapt_targets(base, settings.mode, settings.targets).adapted

    def inside(names: Sequence[str], modules: Sequence[str]) -> bool:
        return any(name == module or name.startswith(f"{module}.") for name in names for module in modules)

    parts = family.module_names(base).items()
    return [short for short, modules in parts if inside(changed, modules) and not inside(adapted, modules)]


def _check_alike(before: dict[str, nn.Parameter], after: dict[str, nn.Parameter]) -> None:
    shapes = [{name: tuple(p.shape) for name, p in parameters.items()} for parameters in (before, after)]
    odd = sorted(name for name in before.keys() | after.keys() if shapes[0].get(name) != shapes[1].get(name))
    if odd:
        was, now = (side.get(odd[0], "missing") for side in shapes)
        raise CheckpointError(
            f"the two models are not of one shape: {odd[0]} is {was} and {now}, and {len(odd) - 1} more differ",
            hint="name the model that the tuned one was trained from",
        )


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())
