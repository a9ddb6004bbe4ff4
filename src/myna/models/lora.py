"""LoRA adapters of any family: add, count, save, load, merge."""

import dataclasses
import difflib
import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import save_file
from torch import nn

from myna.core.config import AdaptSettings, Quantization
from myna.core.errors import CheckpointError, ConfigError, ModelError, TrainingError
from myna.core.io import atomic_write
from myna.models import files
from myna.models.base import Family, LoraMatrices
from myna.models.quantized import QUANTIZED_LINEARS, quantized_linears

_ADAPTER = "default"
"""PEFT's name of the only adapter; it is not written to the file."""


class ParameterCounts(NamedTuple):
    """Parameters of a model, as logical weights (a byte may hold two)."""

    total: int
    """All parameters in memory, including the frozen original of a fully trained module."""
    trainable: int
    lora: int
    """LoRA matrices and DoRA magnitudes."""


def make_trainable(
    model: nn.Module, family: Family, settings: AdaptSettings, dtype: torch.dtype | None = torch.float32
) -> nn.Module:
    """Set up LoRA on the frozen model, or its own parameters with `adapt.mode: full`, as the settings say. Trainable
    parameters become `dtype`; None keeps their types. Changes the model in place, on the meta device too."""
    if settings.mode == "full":
        model.requires_grad_(True)
        for name in resolve_module_names(family, model, settings.freeze, "adapt.freeze"):
            model.get_submodule(name).requires_grad_(False)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError("`adapt.freeze` leaves nothing to train", hint="take something off the list")
    else:
        model = _add_lora(model, family, settings)
    return model if dtype is None else cast_trainable(model, dtype)


def _add_lora(model: nn.Module, family: Family, settings: AdaptSettings) -> nn.Module:
    trained = resolve_module_names(family, model, settings.train_modules, "adapt.train_modules")
    targets = family.lora_targets(model, settings.mode, settings.targets)
    if not targets.adapted:
        raise ModelError(f"adapt.mode {settings.mode} meets no layer of {family.source}", hint="try another mode")
    for name in trained:
        if inner := [target for target in targets.adapted if f"{target}.".startswith(f"{name}.")]:
            raise ConfigError(
                f"`adapt.train_modules` covers `{name}`, where adapt.mode {settings.mode} puts a LoRA on `{inner[0]}`",
                hint="train it in full or with a LoRA: drop it from train_modules, or choose another mode",
            )
    config = LoraConfig(
        task_type=None,  # with a task type, every forward would get `labels=`
        target_modules=list(targets.adapted),
        modules_to_save=list(trained) or None,
        **{"r": settings.rank, "lora_alpha": settings.alpha, "lora_dropout": settings.dropout},
        **{"use_rslora": settings.rslora, "use_dora": settings.dora, "bias": "none"},
    )
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    with torch.device("meta") if on_meta else nullcontext():
        wrapped: nn.Module = get_peft_model(model, config)
    config.base_model_name_or_path = files.absolute_source(family.source)
    # PEFT shortens long lists of names to common ends and matches modules by their ends, so the result is checked.
    for kind, expected in ((LoraLayer, targets.adapted), (ModulesToSaveWrapper, trained)):
        replaced = {name for name, module in wrapped.named_modules() if isinstance(module, kind)}
        assert replaced == {f"base_model.model.{name}" for name in expected}
    return wrapped


def frozen_linear_names(model: nn.Module, family: Family, settings: AdaptSettings) -> list[str]:
    """Return the full names of linear layers whose own weights stay frozen, heads excluded. These can be quantized."""
    trained = resolve_module_names(family, model, settings.train_modules, "adapt.train_modules")
    layers = family.lora_targets(model, "comprehensive").adapted
    return [name for name in layers if not any(f"{name}.".startswith(f"{module}.") for module in trained)]


def resolve_module_names(family: Family, model: nn.Module, short_names: Iterable[str], setting: str) -> list[str]:
    """Map short names (`audio_head`) to full module names. `setting` is named in the error for a wrong one."""
    modules = family.module_names(model)
    full_names: list[str] = []
    for short in short_names:
        if short not in modules:
            close = difflib.get_close_matches(short, modules, n=3, cutoff=0.5)
            nearest = "did you mean " + " or ".join(f"`{name}`" for name in close) + "?"
            hint = nearest if close else "known: " + ", ".join(modules)
            raise ConfigError(f"`{setting}`: there is no `{short}`", hint=hint)
        if not modules[short] and setting == "adapt.train_modules":
            raise ConfigError(
                f"`{setting}`: the model was loaded without its `{short}`, which this loss never reaches",
                hint=f"set loss.text_weight above 0, or drop `{short}`",
            )
        full_names += modules[short]
    return list(dict.fromkeys(full_names))


def cast_trainable(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Cast trainable parameters. PEFT casts LoRA matrices itself, but not fully trained modules."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def count_parameters(model: nn.Module) -> ParameterCounts:
    total = sum(layer.in_features * layer.out_features for layer in quantized_linears(model))
    trainable = lora = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        trainable += parameter.numel() if parameter.requires_grad else 0
        lora += parameter.numel() if any(part.startswith("lora_") for part in name.split(".")) else 0
    return ParameterCounts(total, trainable, lora)


def adapter_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter by the names PEFT saves them under."""
    # Not "auto", which would look up the base model's vocabulary on the hub.
    return get_peft_model_state_dict(model, save_embedding_layers=False)  # type: ignore[no-any-return]


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write an adapter in PEFT's format. The configuration goes last: a folder that has one has its weights too."""
    if not isinstance(model, PeftModel):
        raise TrainingError("the model carries no adapter to save", hint="with adapt.mode: full save the whole model")
    tensors = {name: tensor.contiguous() for name, tensor in adapter_state_dict(model).items()}
    with atomic_write(folder / files.ADAPTER_WEIGHTS_FILE) as file:
        save_file(tensors, file, metadata={"format": "pt"})

    base = model.get_base_model()
    config = dataclasses.replace(
        model.peft_config[_ADAPTER],
        inference_mode=True,
        auto_mapping={"base_model_class": type(base).__name__, "parent_library": type(base).__module__},
    ).to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    with atomic_write(folder / files.ADAPTER_CONFIG_FILE) as file:
        files.write_json(file, plain)


def load_adapter(model: nn.Module, folder: Path) -> nn.Module:
    """Load a saved adapter onto a model for inference, every key checked. LoRA matrices are fp32, whole modules get the
    model's dtype. An adapter without effect is refused."""
    config, tensors = _read_adapter(folder)
    config.task_type = None
    config.inference_mode = True
    wrapped = _wrap(model, folder, config, tensors)
    set_peft_model_state_dict(wrapped, tensors)
    if not any(map(_has_effect, wrapped.modules())):
        raise ModelError(
            f"the adapter in {folder} changes nothing: it is as it was before training",
            hint="train it for longer, or open a later checkpoint",
        )
    return wrapped.eval()


def read_lora_matrices(family: Family, folder: Path) -> LoraMatrices:
    """Read the matrices of a saved adapter, for batches with several adapters; the model itself need not be loaded."""
    config, tensors = _read_adapter(folder)
    hint = f"merge it first: myna merge {folder} --out MODEL, and speak with MODEL"
    if config.use_dora:
        raise ModelError(f"{folder} is a DoRA, which cannot be applied request by request", hint=hint)
    if config.modules_to_save:
        whole = files.format_names(sorted(config.modules_to_save))
        raise ModelError(f"{folder} has {whole} trained in full, which every request would share", hint=hint)
    config.task_type = None
    model = family.load_model(dtype=torch.float32, device="meta", text_head=False)
    wrapped, matrices = _wrap(model, folder, config, tensors), {}
    for name, module in wrapped.named_modules():
        if isinstance(module, LoraLayer):
            a, b = (tensors[f"{name}.lora_{side}.weight"] for side in "AB")
            matrices[name.removeprefix("base_model.model.")] = (a.float(), b.float() * module.scaling[_ADAPTER])
    return matrices


def initialize_adapter(model: nn.Module, folder: Path) -> None:
    """Give a new adapter the weights of a saved one of the same shape; `dropout` may differ."""
    assert isinstance(model, PeftModel), "there is a LoRA to initialize"
    own, (config, tensors) = model.peft_config[_ADAPTER], _read_adapter(folder)
    merged = f"merge it into its base first (myna merge {folder} --out MODEL), and train a new adapter on that"
    if config.rank_pattern or config.alpha_pattern:
        raise CheckpointError(f"{folder} has ranks or scales of their own for single layers", hint=merged)
    settings = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
    pairs = {key: (getattr(config, field), getattr(own, field)) for key, field in settings.items()}
    if differing := {f"adapt.{key}": pair for key, pair in pairs.items() if pair[0] != pair[1]}:
        raise CheckpointError(
            f"{folder} has another "
            + " and another ".join(f"`{key}` ({there}, here {here})" for key, (there, here) in differing.items()),
            hint=" ".join(f"--set {key}={json.dumps(there)}" for key, (there, _) in differing.items())
            + f"; or {merged}",
        )
    if problems := files.state_dict_problems(files.shapes_of(adapter_state_dict(model)), files.shapes_of(tensors)):
        layers = sorted({".".join(name.split(".lora_")[0].split(".")[-2:]) for name in tensors if ".lora_" in name})
        saved = files.format_names(sorted(config.modules_to_save or ()))
        whole = f", and trains {saved} in full" if saved else ""
        raise CheckpointError(
            f"{folder} has other modules than adapt.mode, adapt.targets and adapt.train_modules name; "
            + "; ".join(problems),
            hint=f"it has a LoRA on {', '.join(layers)}{whole}: set these to the same; or {merged}",
        )
    set_peft_model_state_dict(model, tensors)


def scale_adapter(model: nn.Module, strength: float) -> None:
    """Scale the effect of an adapter; 0 is the base, 1 the tuned model. Whole modules get the base model's dtype."""
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            trained = module.modules_to_save[_ADAPTER]
            for copy, original in zip(trained.parameters(), module.original_module.parameters(), strict=True):
                copy.data = torch.lerp(original.float(), copy.float(), strength).to(original.dtype)
        elif isinstance(module, LoraLayer) and strength != 1.0:
            if _ADAPTER in module.lora_magnitude_vector:
                raise ModelError(
                    "a DoRA has magnitudes of its own, and is applied as a whole", hint="leave out --strength"
                )
            module.scaling[_ADAPTER] *= strength


def merge_lora(model: nn.Module, strength: float = 1.0) -> nn.Module:
    """Merge the scaled adapter into the model, unwrapped and in its own dtype; weights are computed in fp32."""
    if not isinstance(model, PeftModel):
        raise ModelError("the model carries no adapter to merge", hint="open a run that was trained with a LoRA")
    scale_adapter(model, strength)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            _merge_layer(module)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All adapters are already merged")
        merged: nn.Module = model.merge_and_unload()
    return merged.requires_grad_(False)


@torch.no_grad()
def _merge_layer(layer: Any) -> None:
    """Merge one layer in fp32. PEFT's own merge would round to the weight's type before it adds."""
    base = layer.get_base_layer()
    types = {name: parameter.dtype for name, parameter in base.named_parameters()}
    base.float()
    try:
        layer.merge(safe_merge=True)
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"the adapter cannot be merged: {error}", hint="open another checkpoint of the run") from None
    for name, parameter in base.named_parameters():
        parameter.data = parameter.data.to(types[name])


def trains_text_head(folder: Path, family: Family) -> bool:
    """Return whether an adapter has tensors of the text head, which is not loaded otherwise."""
    files.require_adapter_files(folder)
    model = family.load_model(dtype=torch.float32, device="meta", text_head=True)
    prefixes = tuple(f"base_model.model.{name}." for name in family.module_names(model)["text_head"])
    return any(tensor.name.startswith(prefixes) for tensor in files.stored_tensors(folder, stem="adapter_model"))


def base_model_hash(
    model: nn.Module,
    family: Family,
    adapter: Path,
    *,
    dtype: torch.dtype,
    quantization: Quantization,
    text_head: bool,
) -> str:
    """Return the `weights_hash` of a base model as the training of an adapter had it."""
    layers: tuple[str, ...] = ()
    if quantization != "none":
        config = json.loads((adapter / files.ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))
        trained = [f"{name}." for name in config.get("modules_to_save") or ()]
        adapted = family.lora_targets(model, "comprehensive").adapted
        layers = tuple(name for name in adapted if not f"{name}.".startswith(tuple(trained)))
    as_trained = family.load_model(dtype=dtype, device="meta", text_head=text_head)
    weights = {f"{name}.weight" for name in layers}
    names = [name for name, _ in as_trained.named_parameters() if name not in weights]
    samples = [model.get_parameter(name).flatten()[:16].to(dtype) for name in names]
    for name in layers:
        # The hash samples only the first rows.
        rows = model.get_parameter(f"{name}.weight").detach()[:16].to(dtype)
        linear = nn.Linear(rows.shape[1], len(rows), bias=False, device="meta")
        linear.weight = nn.Parameter(rows, requires_grad=False)
        samples.append(QUANTIZED_LINEARS[quantization].from_linear(linear).weight_sample())
    return weights_hash(samples)


def weights_hash(weights: Iterable[torch.Tensor]) -> str:
    """Hash the beginning of every tensor, which is cheap and enough to tell one base model from another."""
    sample = torch.cat([torch.zeros(1), *(tensor.detach().flatten()[:16].float().cpu() for tensor in weights)])
    return hashlib.blake2b(sample.numpy().tobytes(), digest_size=8).hexdigest()


def _read_adapter(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    files.require_adapter_files(folder)
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder} is damaged: {error}", hint="open another checkpoint of the run") from None
    if not isinstance(config, LoraConfig):
        raise ModelError(f"{folder} is a {config.peft_type} adapter", hint="only LoRA adapters can be opened")
    tensors = {tensor.name: tensor.read() for tensor in files.stored_tensors(folder, stem="adapter_model")}
    if broken := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise CheckpointError(
            f"{folder}: {files.format_names(broken)} not finite", hint="open an earlier checkpoint of the run"
        )
    return config, tensors


def _wrap(model: nn.Module, folder: Path, config: Any, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Add the modules of a saved adapter to a model, with every key and shape checked."""
    heads = f", with {json.dumps(sorted(config.modules_to_save))}" if config.modules_to_save else ""
    hint = f"open it on the model it was trained on: {config.base_model_name_or_path}{heads}"
    try:
        wrapped: nn.Module = PeftModel(model, config)
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, ImportError) as error:
        raise CheckpointError(f"{folder} does not fit the model: {error}", hint=hint) from error
    if problems := files.state_dict_problems(files.shapes_of(adapter_state_dict(wrapped)), files.shapes_of(tensors)):
        raise CheckpointError(f"{folder} does not fit the model; " + "; ".join(problems), hint=hint)
    return wrapped


def _has_effect(layer: Any) -> bool:
    """Return whether a module has a LoRA that changes its output, or a trained copy that differs from the original."""
    if isinstance(layer, ModulesToSaveWrapper):
        copy = layer.modules_to_save[_ADAPTER].state_dict()
        return any(not torch.equal(copy[name], value) for name, value in layer.original_module.state_dict().items())
    if not isinstance(layer, LoraLayer):
        return False
    if _ADAPTER in layer.lora_embedding_A:
        return bool(layer.lora_embedding_A[_ADAPTER].any() and layer.lora_embedding_B[_ADAPTER].any())
    if layer.lora_A[_ADAPTER].weight.any() and layer.lora_B[_ADAPTER].weight.any():
        return True
    if _ADAPTER not in layer.lora_magnitude_vector:
        return False
    weight = layer.get_base_layer().weight
    norm = torch.linalg.vector_norm(weight.float(), dim=1)
    magnitude = layer.lora_magnitude_vector[_ADAPTER].weight.float()
    return not torch.allclose(magnitude, norm, rtol=2 * torch.finfo(weight.dtype).eps)


def count_model(family: Family, settings: AdaptSettings) -> dict[str, Any]:
    """Count total, trainable and LoRA parameters, on the meta device and with the text head; shares are 0 to 1."""
    model = family.load_model(dtype=torch.bfloat16, device="meta", text_head=True)
    if settings.mode == "full":
        adapted = selected = 0
        parts = [part for part in family.module_names(model) if part not in settings.freeze]
        trained = resolve_module_names(family, model, parts, "adapt.freeze")
    else:
        targets = family.lora_targets(model, settings.mode, settings.targets)
        adapted, selected = len(targets.adapted), len(targets.selected)
        trained = resolve_module_names(family, model, settings.train_modules, "adapt.train_modules")
    counts = count_parameters(make_trainable(model, family, settings))
    shares = {"trainable_share": counts.trainable / counts.total, "lora_share": counts.lora / counts.total}
    modules = {"lora_modules": adapted, "selected_modules": selected, "trained_modules": trained}
    return counts._asdict() | shares | modules
