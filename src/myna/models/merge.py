"""Adapters merged into their base model: a whole model that needs neither, checked before it is written and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import nn

from myna.core.errors import CheckpointError, ModelError
from myna.models.base import Family, get_base_model
from myna.models.files import open_safetensors, resolve_checkpoint, stored_tensors
from myna.models.lora import merge_lora, scale_adapter

LOGIT_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far the logits of a merged model may be from those of the adapter, as a share of the largest, by the type of the
weights: a merged weight is rounded to it once, and the adapter's was not."""
MAX_LOST_SHARE = 0.5
"""The largest part of an adapter's change of the logits that may be lost in rounding: the quotient of the two
root-mean-squares."""


@dataclass(frozen=True, slots=True)
class MergeCheck:
    """Comparison of the logits of a base model, of the adapter on it, and of the merged model."""

    dtype: str
    """Type of the merged weights, in which all three were computed."""
    logits: int
    """How many were compared."""
    largest_logit: float
    largest_difference: float
    """Between the adapter's and the merged model's."""
    lost_share: float
    """Root-mean-square of that difference, as a share of that between the adapter and the base."""

    @property
    def tolerance(self) -> float:
        """The largest difference that rounding explains."""
        return LOGIT_TOLERANCES[getattr(torch, self.dtype)] * self.largest_logit

    @property
    def problem(self) -> str | None:
        """Why the merged model must not be used; None where it may."""
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
    """Write the model that an adapter on its base amounts to: weights, configuration, tokenizer and codec.

    The logits are compared before anything is written, and every tensor is read back and compared bit for bit.
    """
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
    codec = resolve_checkpoint(family.codec_source, None)
    verify_written(folder, family.save_model(merged, folder, layout=layout, codec=codec))
    return check


@torch.inference_mode()
def probe_logits(family: Family, model: nn.Module) -> torch.Tensor:
    """All logits of a model for the family's probe, in fp32 on the CPU: those of supervised positions, of each head."""
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
    """Compare logits of the probe; `dtype` is that of the merged weights."""

    def rms(tensor: torch.Tensor) -> float:
        return float(tensor.double().square().mean().sqrt())

    effect = rms(adapted - base)
    return MergeCheck(
        dtype=str(dtype).removeprefix("torch."),
        logits=len(adapted),
        largest_logit=float(adapted.abs().max()),
        largest_difference=float((merged - adapted).abs().max()),
        lost_share=rms(merged - adapted) / effect if effect else 1.0,
    )


def verify_written(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read the weights of a folder back: the same names, and every tensor the same bit for bit."""
    stored = {tensor.name: tensor.file for tensor in stored_tensors(folder)}
    if differing := sorted(stored.keys() ^ tensors.keys()):
        raise CheckpointError(f"{folder} was written with other tensors: {differing[0]}", hint="write it once more")
    for name, file in stored.items():
        with open_safetensors(file) as opened:
            found, written = opened.get_tensor(name), tensors[name].detach().cpu()
        if found.dtype != written.dtype or not torch.equal(_bytes(found), _bytes(written)):
            raise CheckpointError(
                f"{name} in {file} was read back otherwise than it was written",
                hint="check the disk, and write it once more",
            )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
