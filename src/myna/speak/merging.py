"""A run or an adapter merged into its base: a folder that is a model by itself."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from myna.core.device import pick_device
from myna.core.errors import ConfigError, ModelError
from myna.core.io import atomic_folder, check_new_folder, file_hash
from myna.models.files import ADAPTER_WEIGHTS_FILE, USAGE_FINGERPRINTS, absolute_source, save_metadata
from myna.models.merge import MergeCheck, merge_adapter
from myna.models.ref import ModelRef
from myna.speak.loading import load_adapted
from myna.train.precision import DTYPES

MERGED_DTYPES = {"auto": None, "float32": DTYPES["fp32"], "bfloat16": DTYPES["bf16"], "float16": DTYPES["fp16"]}


def merge_tuned(
    ref: ModelRef,
    out: Path,
    *,
    layout: str = "transformers",
    strength: float = 1.0,
    dtype: str = "auto",
    device: str = "cpu",
) -> MergeCheck:
    """Write a whole model into `out`, which must be new; it appears complete, or not at all.

    `myna.json` in it says what it was made of, how it was checked, and how it is to be used.
    """
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
            "base": absolute_source(known.source),
            "base_revision": known.revision,
            "base_fingerprint": known.inputs.get("base model"),
            "adapter": str(adapter.absolute()),
            "adapter_hash": file_hash(adapter / ADAPTER_WEIGHTS_FILE),
            "strength": strength,
            "layout": layout,
            "check": asdict(check),
        }
        inputs = {name: value for name, value in known.inputs.items() if name in USAGE_FINGERPRINTS}
        changed = {"codec": None, "quantization": "none", "inputs": inputs, "provenance": provenance}
        save_metadata(written, known.model_copy(update=changed))
    return check
