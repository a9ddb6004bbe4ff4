"""`myna prepare` for manifests of our own making, in many processes.

python recipes/fledgling/encode.py data/fledgling/mixed/train=data/fledgling/prepared/train ... \\
    --model data/fledgling/egg --work data/fledgling/codes

The small codec takes one clip at a time, and a large card waits for most of that: eight processes are nearly eight
times as fast. Each encodes a part of all sounds into a folder of its own, every sound once, however many lines and
manifests it stands in. Every prepared folder then gets links to all of their shards, and its index by the way that
`myna prepare` takes, which finds nothing left to encode. Run again after a stop, it goes on.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from myna.data.codec import Codec
from myna.data.codes import CodeStore, encode_corpus
from myna.data.corpus import Corpus, Prepared
from myna.data.lengths import text_tokens
from myna.data.manifest import read_manifest, write_manifest
from myna.data.utterance import Utterance
from myna.errors import MynaError
from myna.models import open_family
from myna.models.base import Family
from myna.train.precision import pick_device


def encode(sources: Mapping[Path, Path], model: str, work: Path, jobs: int, device: str) -> None:
    """Folders with a manifest, and what is to be prepared of them."""
    began, family = time.monotonic(), open_family(model)
    codec = family.load_codec(device=pick_device(device))
    lines = {out: read_manifest(source / "manifest.jsonl") for source, out in sources.items()}
    sounds = list({(one.audio, one.span): one for utterances in lines.values() for one in utterances}.values())
    parts = [work / f"{number}-of-{jobs}" for number in range(jobs)]
    shares = [sounds[number::jobs] for number in range(jobs)]
    if jobs == 1:
        encode_corpus(shares[0], codec, parts[0])
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            list(pool.map(_encode_part, shares, parts, [model] * jobs, [device] * jobs))
    print(f"{len(sounds)} sounds have codes after {time.monotonic() - began:.0f} s", flush=True)
    for out, utterances in lines.items():
        _prepare(utterances, out, parts, codec, family)
        print(f"{out}: {len(utterances)} utterances after {time.monotonic() - began:.0f} s", flush=True)


def _encode_part(utterances: list[Utterance], folder: Path, model: str, device: str) -> None:
    torch.set_num_threads(1)  # there are other processes
    encode_corpus(utterances, open_family(model).load_codec(device=pick_device(device)), folder)


def _prepare(utterances: list[Utterance], out: Path, parts: list[Path], codec: Codec, family: Family) -> None:
    """Shards are whole, and codes known by their keys: neither their order nor what else is there matters."""
    home = out / "codes" / codec.revision[:8]
    home.mkdir(parents=True, exist_ok=True)
    shards = [
        shard for part in parts for shard in sorted(CodeStore.open(part, codec.revision).home.glob("[0-9]*.arrow"))
    ]
    for number, shard in enumerate(shards):
        link = home / f"{number:05d}.arrow"
        if not link.exists():
            os.link(shard, link)
    write_manifest(out / "manifest.jsonl", utterances)
    encode_corpus(utterances, codec, out)
    Prepared.of(codec).write(out)
    text_tokens(Corpus.open(out), family)


def _pair(text: str) -> tuple[Path, Path]:
    source, equals, out = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text} does not say where to: SOURCE=OUT")
    return Path(source), Path(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sources", type=_pair, nargs="+", metavar="SOURCE=OUT", help="folder with manifest.jsonl, and what to make"
    )
    parser.add_argument("--model", required=True, help="folder of the model whose codec is used")
    parser.add_argument("--work", type=Path, required=True, help="folder for the codes of all")
    parser.add_argument("--jobs", type=int, default=8, help="processes")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    try:
        encode(dict(given.sources), given.model, given.work, given.jobs, given.device)
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
