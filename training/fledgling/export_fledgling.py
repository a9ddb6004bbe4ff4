"""Export of the trained fledgling into the package: fp16, files of less than 16 MB, 80 MB in all.

python training/fledgling/export_fledgling.py --run runs/language_model --codec data/fledgling/init/codec \\
    --out src/myna/models/fledgling
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import HiggsAudioV2ForConditionalGeneration

from myna.core.errors import CheckpointError, MynaError
from myna.models import open_codec, open_family
from myna.models.files import load_tokenizer, read_json, write_json
from myna.models.higgs_v2.checkpoint import load_weights, read_config

MAX_SHARD_BYTES = 15_900_000
"""Bytes of tensors in a file, which with its header stays under 16 MB."""
MAX_FILE_BYTES, MAX_PACKAGE_BYTES = 16_000_000, 80_000_000


def export(model: Path, codec: Path, out: Path, temperature: float | None = None) -> str:
    """Write the folder, check that it loads, and describe its size. `out` is replaced as a whole."""
    config, tokenizer = read_config(model), load_tokenizer(model)
    weights = load_weights(model, config, dtype=torch.float32, device="cpu", text_head=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        made = Path(scratch, "made")
        _to_half(weights).save_pretrained(made, max_shard_size=MAX_SHARD_BYTES)
        tokenizer.save_pretrained(made)
        settings = read_json(model / "generation_config.json")
        sampling = {} if temperature is None else {"temperature": temperature, "do_sample": True}
        write_json(made / "generation_config.json", settings | sampling)
        shutil.copytree(codec, made / "codec")
        size = _check_sizes(made)
        family = open_family(str(made))
        found = family.check_weights()
        opened = open_codec(made / "codec")
        if not family.accepts_codes(opened.codebooks, opened.codebook_size, opened.frame_rate):
            raise CheckpointError(f"{codec} is not the codec of {model}", hint="name the one it was trained with")
        if out.exists():
            out.rename(Path(scratch, "before"))
        made.rename(out)
    return f"{out}: {size / 1e6:.1f} MB; {found}"


def _to_half(
    weights: HiggsAudioV2ForConditionalGeneration,
) -> HiggsAudioV2ForConditionalGeneration:
    for name, tensor in weights.named_parameters():
        if not tensor.half().isfinite().all():
            raise CheckpointError(f"{name} does not fit half precision", hint="the training has diverged: train anew")
    return weights.half()


def _check_sizes(folder: Path) -> int:
    sizes = {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    large = [file.name for file, size in sizes.items() if size > MAX_FILE_BYTES]
    if large or sum(sizes.values()) > MAX_PACKAGE_BYTES:
        raise CheckpointError(
            f"{sum(sizes.values()):,} bytes in all, above {MAX_FILE_BYTES:,} alone: {', '.join(large) or 'none'}",
            hint="make the model smaller: `Size` in init_fledgling.py",
        )
    return sum(sizes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="finished run, or folder of a checkpoint")
    parser.add_argument("--codec", type=Path, required=True, help="folder of the codec it was trained with")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--temperature", type=float, help="default sampling temperature; choose it with evaluate_voice.py --sweep"
    )
    args = parser.parse_args()
    model = args.run / "model" if (args.run / "model").is_dir() else args.run
    try:
        print(export(model, args.codec, args.out, args.temperature))
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
