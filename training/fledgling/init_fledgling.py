"""Initial checkpoint of fledgling: configuration, tokenizer, random weights, and the codec.

python training/fledgling/init_fledgling.py --codec data/fledgling/codec --out data/fledgling/init

The folder is a checkpoint like any other: `language_model.yaml` trains it. Its size and its
byte tokenizer are explained in docs/decisions/0011-fledgling.md.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import normalizers
from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration, PreTrainedTokenizerFast

from myna.core.errors import ModelError, MynaError
from myna.models import open_codec
from myna.models.higgs_v2.checkpoint import check_tokenizer, save_checkpoint
from myna.models.higgs_v2.tiny import tiny_config, tiny_tokenizer

QUOTES = (("‘", "'"), ("’", "'"), ("“", '"'), ("”", '"'), ("–", "-"), ("—", "-"), ("…", "..."))
"""Characters of keyboards, and their replacements in the corpora."""


@dataclass(frozen=True, slots=True)
class Size:
    """21.8 million parameters: 44 MB in half precision, and with a codec of 31 MB less than the 80 that a package may
    have."""

    hidden: int = 384
    layers: int = 8
    ffn: int = 640
    heads: int = 12
    keys: int = 6
    """Heads of keys and values, each shared by two heads."""


SIZE = Size()
TINY = Size(hidden=64, layers=2, ffn=64, heads=2, keys=1)
"""Trains on a CPU in seconds, and shows that all stages work together; no more."""


def fledgling_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the special tokens of Higgs Audio v2: 270 ids.

    It reads small letters only. The corpora know capitals from the beginnings of sentences, and a small model should
    not learn every letter twice; what capitals say about pronunciation, as in US and us, is lost.
    """
    tokenizer = tiny_tokenizer()
    replaced = [normalizers.Replace(mark, instead) for mark, instead in QUOTES]
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), *replaced, normalizers.Lowercase()]
    )
    return tokenizer


def fledgling_config(size: Size = SIZE, *, codebook_size: int = 1024) -> HiggsAudioV2Config:
    config = tiny_config(codebook_size=codebook_size)
    config.hidden_size, config.num_hidden_layers, config.intermediate_size = size.hidden, size.layers, size.ffn
    config.num_attention_heads, config.num_key_value_heads = size.heads, size.keys
    config.head_dim = size.hidden // size.heads
    # Plain rotary positions: the scaling of the released model is for contexts far beyond a minute of speech.
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    return config


def make(out: Path, codec: Path, *, size: Size = SIZE, seed: int = 0) -> int:
    """Write the checkpoint; how many parameters it has."""
    opened = open_codec(codec)
    if (opened.codebooks, opened.frame_rate) != (8, 25.0):
        raise ModelError(
            f"{codec} makes {opened.codebooks} codes at {opened.frame_rate:g} frames a second, not 8 at 25",
            hint="name the folder of fledgling's codec",
        )
    config, tokenizer = fledgling_config(size, codebook_size=opened.codebook_size), fledgling_tokenizer()
    check_tokenizer(config, tokenizer)
    torch.manual_seed(seed)
    model = HiggsAudioV2ForConditionalGeneration(config)
    save_checkpoint(model, out, tokenizer)
    shutil.copytree(codec, out / "codec")
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", type=Path, required=True, help="folder of the trained codec")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="of toy size")
    args = parser.parse_args()
    try:
        count = make(args.out, args.codec, size=TINY if args.tiny else SIZE, seed=args.seed)
        print(f"{args.out}: {count:,} parameters with random weights")
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
