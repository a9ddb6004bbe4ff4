"""Adapters merged into their base model, and adapters extracted from fully trained models.

A merged model is checked before and after it is written. Extraction takes, for each weight, the nearest update of a
given rank by truncated SVD. Norms, heads and embeddings, which a LoRA cannot hold, are copied beside it if
`train_modules` names them, and reported otherwise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from myna.core.config import AdaptSettings
from myna.core.errors import CheckpointError, ConfigError, ModelError
from myna.core.io import atomic_folder, check_new_folder
from myna.models import files, open_family
from myna.models.base import Family, get_base_model
from myna.models.lora import make_trainable, merge_lora, resolve_module_names, save_adapter, scale_adapter

LOGIT_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference between the logits of a merged model and those of the adapter, as a share of the largest logit, by
the type of the weights. A merged weight is rounded to that type once, the adapter's was not."""
MAX_LOST_SHARE = 0.5
"""Largest part of an adapter's change of the logits that rounding may lose: quotient of the two root-mean-squares."""
MAX_EXACT_SVD_SIZE = 1024
"""Largest number of rows or columns for an exact SVD; above it the SVD is randomized."""
SVD_OVERSAMPLING, SVD_ITERATIONS = 32, 6
"""Additional singular vectors, and power iterations, of the randomized SVD."""


@dataclass(frozen=True, slots=True)
class MergeCheck:
    """Comparison of the logits of a base model, of the adapter on it, and of the merged model."""

    dtype: str
    """Type of the merged weights, in which all three were computed."""
    logits: int
    """Number of logits that were compared."""
    largest_logit: float
    largest_difference: float
    """Largest difference between the logits of the adapter and of the merged model."""
    lost_share: float
    """Root-mean-square of that difference, as a share of the one between the adapter and the base."""

    @property
    def tolerance(self) -> float:
        return LOGIT_TOLERANCES[getattr(torch, self.dtype)] * self.largest_logit

    @property
    def problem(self) -> str | None:
        """Reason why the merged model must not be used; None if it may."""
        if not self.largest_difference <= self.tolerance:
            return (
                f"the merged model's logits differ from the adapter's by up to {self.largest_difference:.3g}, of "
                f"{self.largest_logit:.3g}: more than rounding to {self.dtype} explains"
            )
        if self.lost_share > MAX_LOST_SHARE:
            return f"{self.lost_share:.0%} of what the adapter changes would be lost in rounding to {self.dtype}"
        return None


def merge_adapter(
    family: Family, model: nn.Module, folder: Path, *, layout: str = "transformers", strength: float = 1.0
) -> MergeCheck:
    """Merge an adapter into its base and write the model: weights, configuration, tokenizer and codec. The logits are
    compared before anything is written, and every tensor is read back and compared bit for bit."""
    if not isinstance(model, PeftModel):
        raise ModelError("the model carries no adapter to merge", hint="open a run that was trained with a LoRA")
    with model.disable_adapter():
        base = probe_logits(family, model)
    scale_adapter(model, strength)
    adapted = probe_logits(family, model)
    merged = merge_lora(model)
    check = compare_merged(base, adapted, probe_logits(family, merged), next(merged.parameters()).dtype)
    if check.problem is not None:
        raise ModelError(
            check.problem, hint="merge it in another type, --dtype float32, or use the adapter as it is: --run"
        )
    codec = files.resolve_checkpoint(family.codec_source, None)
    verify_written(folder, family.save_model(merged, folder, layout=layout, codec=codec))
    return check


@torch.inference_mode()
def probe_logits(family: Family, model: nn.Module) -> torch.Tensor:
    """Return the logits of a model for the family's probe: all heads at supervised positions, in fp32 on the CPU."""
    core, found = get_base_model(model), list[torch.Tensor]()
    heads = [name for part, names in family.module_names(core).items() if part.endswith("_head") for name in names]
    hooks = [
        core.get_submodule(name).register_forward_hook(lambda _module, _inputs, logits: found.append(logits))
        for name in heads
    ]
    try:
        batch = family.collate([family.render(family.probe(), supervise_text=True)])
        family.objective(model).eval()(batch.to(next(core.parameters()).device))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([logits.float().cpu().flatten() for logits in found])


def compare_merged(base: torch.Tensor, adapted: torch.Tensor, merged: torch.Tensor, dtype: torch.dtype) -> MergeCheck:
    """Compare logits of the probe; `dtype` is the type of the merged weights."""

    def rms(tensor: torch.Tensor) -> float:
        return float(tensor.double().square().mean().sqrt())

    effect = rms(adapted - base)
    largest, difference = float(adapted.abs().max()), float((merged - adapted).abs().max())
    lost_share = rms(merged - adapted) / effect if effect else 1.0
    return MergeCheck(str(dtype).removeprefix("torch."), len(adapted), largest, difference, lost_share)


def verify_written(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read the weights of a folder back, and check that names and bits are unchanged."""
    stored = {tensor.name: tensor for tensor in files.stored_tensors(folder)}
    if differing := sorted(stored.keys() ^ tensors.keys()):
        raise CheckpointError(f"{folder} was written with other tensors: {differing[0]}", hint="write it once more")
    for name, tensor in stored.items():
        pair = tensor.read(), tensors[name].detach().cpu()
        found, written = (one.contiguous().flatten().view(torch.uint8) for one in pair)
        if pair[0].dtype != pair[1].dtype or not torch.equal(found, written):
            raise CheckpointError(
                f"{name} in {tensor.file} was read back otherwise than it was written",
                hint="check the disk, and write it once more",
            )


@dataclass(frozen=True, slots=True)
class ExtractionReport:
    """Errors of an extraction, as shares of the training's change from 0 to 1."""

    rank: int
    error: float
    """Error over all weights that changed."""
    modules: dict[str, float]
    """Error of each module with a LoRA."""
    copied: tuple[str, ...]
    left: dict[str, float]
    """Parameters that changed and were not extracted, with their change relative to their size."""


def extract_adapter(
    base_source: str, tuned_source: str, out: Path, rank: int, *, mode: str = "comprehensive"
) -> dict[str, Any]:
    """Write the adapter that turns one checkpoint into the other as closely as its rank allows, and return its errors.
    Every part that changed and gets no LoRA is copied, except the text head, which a model trained on audio alone does
    not save. Both models are loaded in fp32."""
    check_new_folder(out)
    family, tuned_family = open_family(base_source), open_family(tuned_source)
    base, tuned = (
        opened.load_model(dtype=torch.float32, device="cpu", text_head=False) for opened in (family, tuned_family)
    )
    settings = AdaptSettings.model_validate({"mode": mode, "rank": rank, "alpha": float(rank)})
    changed_parts = _changed_parts(base, tuned, family, settings)
    model, report = fit_lora(base, tuned, family, settings.model_copy(update={"train_modules": changed_parts}))
    known = (tuned_family.folder and files.read_metadata(tuned_family.folder)) or files.WeightsMetadata()
    inputs = {name: value for name, value in known.inputs.items() if name in files.USAGE_FINGERPRINTS}
    changed = {"source": files.absolute_source(base_source), "revision": None, "text_head": False, "inputs": inputs}
    with atomic_folder(out) as written:
        save_adapter(model, written)
        files.save_metadata(written, known.model_copy(update=changed))
    return asdict(report)


@torch.no_grad()
def fit_lora(
    base: nn.Module, tuned: nn.Module, family: Family, settings: AdaptSettings
) -> tuple[nn.Module, ExtractionReport]:
    """Return the base with a LoRA that approximates the tuned model."""
    if settings.mode == "full" or settings.dora:
        setting = "adapt.mode: full" if settings.mode == "full" else "adapt.dora"
        raise ConfigError(f"`{setting}` is no plain LoRA, which is what can be extracted", hint="drop it")
    before, after = _matching_parameters(base, tuned)
    trained = resolve_module_names(family, base, settings.train_modules, "adapt.train_modules")
    model = make_trainable(base, family, settings)

    def change(name: str) -> torch.Tensor:
        return after[name].float() - before[name].float()

    errors: dict[str, float] = {}
    covered, lost, total = set(), 0.0, 0.0
    for full_name, layer in model.named_modules():
        name = full_name.removeprefix("base_model.model.")
        if isinstance(layer, LoraLayer):
            delta, scaling = change(f"{name}.weight"), layer.scaling["default"]
            lora_a, lora_b = layer.lora_A["default"].weight.zero_(), layer.lora_B["default"].weight.zero_()
            b, a = _low_rank_factors(delta, len(lora_a))
            lora_a[: len(a)].copy_(a)
            lora_b[:, : b.shape[1]].copy_(b / scaling)
            missing = _squared_norm(delta - scaling * (lora_b.float() @ lora_a.float()))
            size = _squared_norm(delta)
            errors[name] = math.sqrt(missing / size) if size else 0.0
            lost, total = lost + missing, total + size
            covered.add(f"{name}.weight")
        elif isinstance(layer, ModulesToSaveWrapper):
            own = tuned.get_submodule(name)
            for inner, parameter in layer.modules_to_save["default"].named_parameters():
                parameter.copy_(own.get_parameter(inner))
                covered.add(f"{name}.{inner}")
                total += _squared_norm(change(f"{name}.{inner}"))

    left = {}
    for name in before.keys() - covered:
        if size := _squared_norm(change(name)):
            left[name] = math.sqrt(size / max(_squared_norm(before[name].float()), 1e-30))
            lost, total = lost + size, total + size
    error = math.sqrt(lost / total) if total else 0.0
    return model, ExtractionReport(settings.rank, error, errors, tuple(trained), dict(sorted(left.items())))


def _low_rank_factors(delta: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors (rows, rank) and (rank, columns) of equal norm, whose product is the nearest of that rank."""
    smaller = min(delta.shape)
    if smaller <= MAX_EXACT_SVD_SIZE or smaller <= 4 * (rank + SVD_OVERSAMPLING):
        left, values, right = torch.linalg.svd(delta, full_matrices=False)
    else:
        devices = [delta.device] if delta.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(0)
            left, values, right = torch.svd_lowrank(delta, q=rank + SVD_OVERSAMPLING, niter=SVD_ITERATIONS)
        right = right.mT
    roots = values[:rank].sqrt()
    return left[:, :rank] * roots, roots[:, None] * right[:rank]


def _changed_parts(base: nn.Module, tuned: nn.Module, family: Family, settings: AdaptSettings) -> tuple[str, ...]:
    """Return the short names of the parts that changed and get no LoRA."""
    before, after = _matching_parameters(base, tuned)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    adapted = family.lora_targets(base, settings.mode, settings.targets).adapted

    def inside(names: Sequence[str], modules: Sequence[str]) -> bool:
        return any(name == module or name.startswith(f"{module}.") for name in names for module in modules)

    parts = family.module_names(base).items()
    return tuple(short for short, modules in parts if inside(changed, modules) and not inside(adapted, modules))


def _matching_parameters(base: nn.Module, tuned: nn.Module) -> list[dict[str, nn.Parameter]]:
    """Return the parameters of both models by name; names and shapes must agree."""
    parameters = [dict(model.named_parameters()) for model in (base, tuned)]
    before, after = map(files.shapes_of, parameters)
    if odd := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
        was, now = before.get(odd[0], "missing"), after.get(odd[0], "missing")
        raise CheckpointError(
            f"the two models are not of one shape: {odd[0]} is {was} and {now}, and {len(odd) - 1} more differ",
            hint="name the model that the tuned one was trained from",
        )
    return parameters


def _squared_norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())
