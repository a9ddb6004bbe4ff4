"""A run or an adapter merged into its base: a folder that is a model by itself."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from myna.core.device import pick_device
from myna.core.errors import ConfigError, ModelError
from myna.core.io import atomic_folder, check_new_folder, file_hash
from myna.models.adapters import ADAPTER_WEIGHTS_FILE
from myna.models.files import absolute_source
from myna.models.merge import MergeCheck, merge_adapter
from myna.models.metadata import USAGE_FINGERPRINTS, save_metadata
from myna.speak.loading import load_adapted, open_base
from myna.speak.tuned import require_tuned
from myna.train.precision import DTYPES

MERGED_DTYPES = {"auto": None, "float32": DTYPES["fp32"], "bfloat16": DTYPES["bf16"], "float16": DTYPES["fp16"]}


def merge_tuned(
    source: str | os.PathLike[str],
    out: Path,
    *,
    base: str | None = None,
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
    tuned = require_tuned(source, base)
    if tuned.is_full:
        raise ModelError(
            f"{source} was trained in full: its result is a whole model already, with nothing to merge",
            hint=f"use it as it is, --model {tuned.weights}, or: myna model convert {tuned.weights} --out {out}",
        )
    family = open_base(tuned)
    adapted = load_adapted(tuned, family, MERGED_DTYPES[dtype], pick_device(device), text_head=family.has_text_head)
    with atomic_folder(out) as written:
        check = merge_adapter(family, adapted, written, layout=layout, strength=strength)
        known = tuned.metadata
        provenance = {
            "made_by": "myna merge",
            "base": absolute_source(known.source),
            "base_revision": known.revision,
            "base_fingerprint": known.inputs.get("base model"),
            "adapter": str(tuned.adapter.absolute()),
            "adapter_hash": file_hash(tuned.adapter / ADAPTER_WEIGHTS_FILE),
            "strength": strength,
            "layout": layout,
            "check": asdict(check),
        }
        inputs = {name: value for name, value in known.inputs.items() if name in USAGE_FINGERPRINTS}
        changed = {"codec": None, "quantization": "none", "inputs": inputs, "provenance": provenance}
        save_metadata(written, known.model_copy(update=changed))
    return check
