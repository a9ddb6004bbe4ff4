"""Parallel, batched `myna prepare` for the fledgling corpora.

python training/fledgling/encode.py data/fledgling/mixed/train=data/fledgling/prepared/train ... \\
    --model data/fledgling/init --work data/fledgling/codes

`myna prepare` encodes one clip at a time with the small codec, which leaves a large GPU idle. Here clips of exactly the
same length are batched: nothing is padded, and codes differ from those of single clips only where rounding decides
between two entries. Each process encodes the clips that a hash of their file names assigns to it into a folder of its
own, every clip once, however many lines and manifests refer to it. Every prepared folder then gets links to all shards
and an index. Run again after an interruption, it continues.
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

from myna.core.device import pick_device
from myna.core.errors import MynaError
from myna.data.code_store import CodeStore, relative_audio_path, span_bounds, write_index
from myna.data.codec import Encoder
from myna.data.dataset import DatasetInfo, PreparedDataset
from myna.data.encoding import encode_dataset
from myna.data.lengths import count_text_tokens
from myna.data.manifest import Span, Utterance, iterate_manifest, missing_manifest_error, read_manifest, write_manifest
from myna.models import open_family
from myna.models.base import Family
from myna.models.codecs import check_clips, full_precision
from myna.models.mel_codec import MelCodec

SHARD_SECONDS, BATCH_SECONDS = 3600.0, 400.0
"""Seconds of speech in a shard, and in a batch."""
AUDIO_FIELD = re.compile(rb'"audio": *"(?:[^"\\]|\\.)*"')
"""Field of a line of a manifest that names its sound."""
NO_FOLDER = Path("/nowhere")
"""A folder that no sound is in, so that all places are absolute."""

AudioKey = tuple[Path, Span | None]


class BatchedMelCodec(MelCodec):
    """The small codec with batches of clips of equal length."""

    def encode(self, clips: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
        check_clips(self, clips)
        with full_precision(self._device):
            waves = torch.from_numpy(np.ascontiguousarray(clips, dtype=np.float32)).to(self._device)
            codes = self._network.encode(waves)
        stacked: npt.NDArray[np.uint16] = codes.cpu().numpy().astype(np.uint16)
        return stacked


@cache
def open_codec_of(model: str, device: str) -> tuple[Family, Encoder]:
    """Open the codec once in each process."""
    family = open_family(model)
    codec: Encoder = family.load_encoder(device=pick_device(device))
    if isinstance(codec, MelCodec):
        codec = BatchedMelCodec.open(Path(family.codec_source), pick_device(device))
    return family, codec


def encode(sources: Mapping[Path, Path], model: str, work: Path, jobs: int, device: str) -> None:
    """Folders with a manifest, and what is to be prepared of them."""
    began = time.monotonic()
    manifests = [source / "manifest.jsonl" for source in sources]
    if missing := [manifest for manifest in manifests if not manifest.is_file()]:
        raise missing_manifest_error(missing[0])
    parts = [work / f"{number}-of-{jobs}" for number in range(jobs)]

    def log(message: str) -> None:
        print(f"{message} after {time.monotonic() - began:.0f} s", flush=True)

    if jobs == 1:
        counts, lines = [_encode_part(manifests, 0, parts, model, device)], _write_manifests(sources)
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_use_one_thread) as pool:
            encoding = [pool.submit(_encode_part, manifests, number, parts, model, device) for number in range(jobs)]
            lines = _write_manifests(sources)  # which takes less than they do
            open_codec_of(model, device)
            counts = [part.result() for part in encoding]
    log(f"{sum(counts)} sounds have codes")
    for out, utterances in lines.items():
        _prepare(utterances, out, parts, model, device)
        log(f"{out}: {len(utterances)} utterances")


def _write_manifests(sources: Mapping[Path, Path]) -> dict[Path, list[Utterance]]:
    """The lines of each folder that is to be prepared, which are written down there."""
    lines = {out: read_manifest(source / "manifest.jsonl") for source, out in sources.items()}
    for out, utterances in lines.items():
        write_manifest(out / "manifest.jsonl", utterances)
    return lines


def assigned_clips(manifests: Iterable[Path], number: int, jobs: int) -> list[Utterance]:
    """The sounds of one of so many processes, each once, by the size of their files, which says how long they are."""

    def wanted(line: bytes) -> bool:
        named = AUDIO_FIELD.search(line)
        return crc32(named[0] if named else line) % jobs == number

    lines = (one for manifest in manifests for one in iterate_manifest(manifest, wanted))
    sounds = {(one.audio, one.span): one for one in lines}
    return sorted(sounds.values(), key=lambda one: (one.audio.stat().st_size, one.id))


def _use_one_thread() -> None:
    torch.set_num_threads(1)  # there are other processes


def _encode_part(manifests: Sequence[Path], number: int, parts: Sequence[Path], model: str, device: str) -> int:
    """One part of the sounds; how many they are."""
    sounds, codec = assigned_clips(manifests, number, len(parts)), open_codec_of(model, device)[1]
    encode_dataset(sounds, codec, parts[number], shard_seconds=SHARD_SECONDS, batch_seconds=BATCH_SECONDS, notify=print)
    return len(sounds)


def _prepare(utterances: list[Utterance], out: Path, parts: Sequence[Path], model: str, device: str) -> None:
    """Shards are whole, and codes known by their keys: neither their order nor what else is there matters."""
    family, codec = open_codec_of(model, device)
    home = out / "codes" / codec.revision[:8]
    home.mkdir(parents=True, exist_ok=True)
    stores = [CodeStore.open(part, codec.revision) for part in parts]
    for number, shard in enumerate(
        shard for store in stores for shard in sorted(store.codes_folder.glob("[0-9]*.arrow"))
    ):
        link = home / f"{number:05d}.arrow"
        if not link.exists():
            os.link(shard, link)
    known = _known_keys(stores, utterances)
    keys = [known[one.audio, one.span] for one in utterances]
    write_index(utterances, keys, out, revision=codec.revision, sample_rate=codec.sample_rate)
    DatasetInfo.from_codec(codec).write(out)
    count_text_tokens(PreparedDataset.open(out), family)


def _known_keys(stores: Iterable[CodeStore], utterances: Iterable[Utterance]) -> dict[AudioKey, str]:
    """Keys of the sounds, as they were found out when they were encoded."""
    of_audio: defaultdict[str, dict[tuple[float, float | None], str]] = defaultdict(dict)
    for store in stores:
        index = store.index()
        columns = (index[name].to_pylist() for name in ("audio", "start", "end", "key"))
        for audio, start, end, key in zip(*columns, strict=True):
            of_audio[audio][start, end] = key
    return {
        (one.audio, one.span): of_audio[relative_audio_path(one.audio, NO_FOLDER)][span_bounds(one.span)]
        for one in utterances
    }


def _source_and_out(text: str) -> tuple[Path, Path]:
    source, equals, out = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text} does not say where to: SOURCE=OUT")
    return Path(source), Path(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sources",
        type=_source_and_out,
        nargs="+",
        metavar="SOURCE=OUT",
        help="folder with manifest.jsonl, and what to make",
    )
    parser.add_argument("--model", required=True, help="folder of the model whose codec is used")
    parser.add_argument("--work", type=Path, required=True, help="folder for the codes of all")
    parser.add_argument("--jobs", type=int, default=8, help="processes")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    try:
        encode(dict(args.sources), args.model, args.work, args.jobs, args.device)
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
