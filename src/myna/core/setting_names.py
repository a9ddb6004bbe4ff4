"""Names of settings that are not quite right: the nearest ones, and what other trainers call them."""

import difflib
from collections.abc import Collection, Sequence

FOREIGN_NAMES = {
    "model.source": ("model_name_or_path", "model_name", "model_id", "pretrained_model_name_or_path"),
    "model.quantization": ("load_in_4bit", "load_in_8bit", "quantization_bit", "quant_bits", "bnb_4bit_quant_type"),
    "data.train": ("dataset", "train_dataset", "dataset_name", "train_file"),
    "data.evaluation": ("val_dataset", "eval_dataset", "validation_file"),
    "data.row_tokens": ("max_length", "max_seq_length", "max_seq_len", "model_max_length", "cutoff_len"),
    "data.pack": ("packing", "sample_packing"),
    "data.workers": ("dataloader_num_workers", "num_workers"),
    "adapt.mode": ("train_type", "sft_type", "tuner_type", "finetuning_type"),
    "adapt.targets": ("target_modules", "lora_target", "lora_target_modules"),
    "adapt.rank": ("lora_rank", "lora_r", "r"),
    "adapt.alpha": ("lora_alpha",),
    "adapt.dropout": ("lora_dropout", "lora_dropout_p"),
    "adapt.rslora": ("use_rslora",),
    "adapt.dora": ("use_dora",),
    "adapt.train_modules": ("modules_to_save",),
    "adapt.init": ("adapter_name_or_path", "adapters"),
    "train.epochs": ("num_train_epochs", "num_epochs", "max_epochs"),
    "train.steps": ("max_steps", "total_steps"),
    "train.batch_size": ("gradient_accumulation_steps", "grad_accum", "train_batch_size", "global_batch_size"),
    "train.micro_batch_size": ("per_device_train_batch_size", "per_gpu_train_batch_size"),
    "train.learning_rate": ("lr",),
    "train.warmup": ("warmup_ratio", "warmup_steps", "num_warmup_steps", "lr_warmup_steps"),
    "train.schedule": ("lr_scheduler_type", "lr_scheduler"),
    "train.betas": ("adam_beta1", "adam_beta2"),
    "train.max_grad_norm": ("clip_grad", "gradient_clip_val"),
    "train.precision": ("fp16", "bf16", "tf32", "mixed_precision", "torch_dtype", "dtype"),
    "train.gradient_checkpointing": ("use_gradient_checkpointing", "activation_checkpointing"),
    "train.compile": ("torch_compile",),
    "train.evaluate_every": ("eval_steps", "eval_interval"),
    "train.save_every": ("save_steps", "save_interval"),
    "train.keep_checkpoints": ("save_total_limit",),
    "train.trackers": ("report_to",),
    "train.seed": ("random_state",),
}
"""Names of settings in Hugging Face's trainers, ms-swift and unsloth, for answers with the name here."""


def own_setting(foreign: str, known: Collection[str]) -> str | None:
    """Return what to type instead of another trainer's setting or option; None for a name that is not known."""
    name = foreign.lstrip("-").replace("-", "_")
    meant = (key for key in known if name in (_leaf(key), *FOREIGN_NAMES.get(key, ())))
    key = next(meant, None)
    return f"--set {key}={name if name in ('fp16', 'bf16') else '...'}" if key else None


def nearest_settings(key: str, known: Collection[str], groups: Sequence[str]) -> str:
    """Return a hint for a key that is not among the `known` ones: what it may mean, or what there is."""
    group, _, leaf = key.rpartition(".")
    if leaf not in map(_leaf, known) and (ours := own_setting(leaf, known)):
        return f"here it is {ours}"
    if group == "" and key in groups:
        return f"`{key}` is a group; its settings: " + ", ".join(k for k in known if k.startswith(f"{key}."))
    inside = {_leaf(k): k for k in known if k.rpartition(".")[0] == group}
    close = [inside[name] for name in difflib.get_close_matches(leaf, inside, n=3, cutoff=0.6)]
    close += [k for k in known if _leaf(k) == leaf]
    close = close or difflib.get_close_matches(key, [*known, *groups], n=3, cutoff=0.75)
    if close:
        return "did you mean " + " or ".join(f"`{k}`" for k in dict.fromkeys(close)) + "?"
    return "valid settings: " + ", ".join(inside.values() if group and inside else known)


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]
