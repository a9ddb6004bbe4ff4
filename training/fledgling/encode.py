"""`myna prepare` for manifests of our own making, in a few processes, and many clips at a time.

python training/fledgling/encode.py data/fledgling/mixed/train=data/fledgling/prepared/train ... \\
    --model data/fledgling/egg --work data/fledgling/codes

`myna prepare` gives the small codec one clip at a time, for which a large card is never awake. Here clips of exactly
the same length go through it together: nothing is padded, and codes differ from those of single clips only where
rounding decides between two entries. Each process reads and encodes a part of all sounds into a folder of its own,
every sound once, however many lines and manifests it stands in. Every prepared folder then gets links to all shards,
and an index by the keys that are known by then. Run again after a stop, it goes on.

No lines go from process to process: each reads those that it wants, whose sounds are its own by a hash of their names.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch

from myna.data.code_store import CodeStore, edges, encode_corpus, index_corpus, place_of
from myna.data.codec import Encoder
from myna.data.dataset import DatasetInfo, PreparedDataset
from myna.data.lengths import text_tokens
from myna.data.manifest import iterate_manifest, no_manifest, read_manifest, write_manifest
from myna.data.utterance import Span, Utterance
from myna.errors import MynaError
from myna.models import open_family
from myna.models.base import Family
from myna.models.codec_checks import check_clips, exactly
from myna.models.mel_codec.codec import MelCodec
from myna.train.precision import pick_device

SHARD_SECONDS, BATCH_SECONDS = 3600.0, 400.0
"""Of speech that is read before it is encoded, and that goes through the codec at once."""
AUDIO = re.compile(rb'"audio": *"(?:[^"\\]|\\.)*"')
"""Where a line of a manifest names its sound."""
AWAY = Path("/nowhere")
"""A folder that no sound is in, so that all places are absolute."""

Sound = tuple[Path, Span | None]


class TogetherCodec(MelCodec):
    """The small codec, which takes clips of equal length all at once."""

    def encode(self, clips: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
        check_clips(self, clips)
        with exactly(self._device):
            waves = torch.from_numpy(np.ascontiguousarray(clips, dtype=np.float32)).to(self._device)
            codes = self._network.encode(waves)
        stacked: npt.NDArray[np.uint16] = codes.cpu().numpy().astype(np.uint16)
        return stacked


@cache
def opened(model: str, device: str) -> tuple[Family, Encoder]:
    """Once in each process."""
    family = open_family(model)
    codec: Encoder = family.load_encoder(device=pick_device(device))
    if isinstance(codec, MelCodec):
        codec = TogetherCodec.open(family.codec_source, pick_device(device))
    return family, codec


def encode(sources: Mapping[Path, Path], model: str, work: Path, jobs: int, device: str) -> None:
    """Folders with a manifest, and what is to be prepared of them."""
    began = time.monotonic()
    manifests = [source / "manifest.jsonl" for source in sources]
    if missing := [manifest for manifest in manifests if not manifest.is_file()]:
        raise no_manifest(missing[0])
    parts = [work / f"{number}-of-{jobs}" for number in range(jobs)]

    def told(what: str) -> None:
        print(f"{what} after {time.monotonic() - began:.0f} s", flush=True)

    if jobs == 1:
        counts, lines = [_encode_part(manifests, 0, parts, model, device)], _copied(sources)
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_alone) as pool:
            encoding = [pool.submit(_encode_part, manifests, number, parts, model, device) for number in range(jobs)]
            lines = _copied(sources)  # which takes less than they do
            opened(model, device)
            counts = [part.result() for part in encoding]
    told(f"{sum(counts)} sounds have codes")
    for out, utterances in lines.items():
        _prepare(utterances, out, parts, model, device)
        told(f"{out}: {len(utterances)} utterances")


def _copied(sources: Mapping[Path, Path]) -> dict[Path, list[Utterance]]:
    """The lines of each folder that is to be prepared, which are written down there."""
    lines = {out: read_manifest(source / "manifest.jsonl") for source, out in sources.items()}
    for out, utterances in lines.items():
        write_manifest(out / "manifest.jsonl", utterances)
    return lines


def own_sounds(manifests: Iterable[Path], number: int, jobs: int) -> list[Utterance]:
    """The sounds of one of so many processes, each once, by the size of their files, which says how long they are."""

    def wanted(line: bytes) -> bool:
        named = AUDIO.search(line)
        return crc32(named[0] if named else line) % jobs == number

    lines = (one for manifest in manifests for one in iterate_manifest(manifest, wanted))
    sounds = {(one.audio, one.span): one for one in lines}
    return sorted(sounds.values(), key=lambda one: (one.audio.stat().st_size, one.id))


def _alone() -> None:
    torch.set_num_threads(1)  # there are other processes


def _encode_part(manifests: Sequence[Path], number: int, parts: Sequence[Path], model: str, device: str) -> int:
    """One part of the sounds; how many they are."""
    sounds, codec = own_sounds(manifests, number, len(parts)), opened(model, device)[1]
    encode_corpus(sounds, codec, parts[number], shard_seconds=SHARD_SECONDS, batch_seconds=BATCH_SECONDS)
    return len(sounds)


def _prepare(utterances: list[Utterance], out: Path, parts: Sequence[Path], model: str, device: str) -> None:
    """Shards are whole, and codes known by their keys: neither their order nor what else is there matters."""
    family, codec = opened(model, device)
    home = out / "codes" / codec.revision[:8]
    home.mkdir(parents=True, exist_ok=True)
    stores = [CodeStore.open(part, codec.revision) for part in parts]
    for number, shard in enumerate(shard for store in stores for shard in sorted(store.home.glob("[0-9]*.arrow"))):
        link = home / f"{number:05d}.arrow"
        if not link.exists():
            os.link(shard, link)
    index_corpus(utterances, _known(stores, utterances), codec, out)
    DatasetInfo.of(codec).write(out)
    text_tokens(PreparedDataset.open(out), family)


def _known(stores: Iterable[CodeStore], utterances: Iterable[Utterance]) -> dict[Sound, str]:
    """Keys of the sounds, as they were found out when they were encoded."""
    of_audio: defaultdict[str, dict[tuple[float, float | None], str]] = defaultdict(dict)
    for store in stores:
        index = store.index()
        columns = (index[name].to_pylist() for name in ("audio", "start", "end", "key"))
        for audio, start, end, key in zip(*columns, strict=True):
            of_audio[audio][start, end] = key
    return {(one.audio, one.span): of_audio[place_of(one.audio, AWAY)][edges(one.span)] for one in utterances}


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
