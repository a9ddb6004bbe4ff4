"""Encode a small corpus in a process of its own, killed for good at a moment of the test's choosing.

    python -m tests.data.kill_helper SOURCE FOLDER MOMENT NUMBER

MOMENT is the name of a call: `encode` (a batch in the codec), `fsync` (half of a file written), `replace` (a file in
place but its name not yet safe on the disk) or `never`. At its NUMBERth such call the process gets SIGKILL, which
nothing can catch.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from myna.data.codec import Codes, EncodedBatch, NotifyCallback, Samples, encode_equal_lengths
from myna.data.encoding import encode_dataset
from myna.data.manifest import Utterance

SHARD_SECONDS = 0.5


class FakeCodec:
    """Codec of eight samples a frame whose codes are a plain function of the samples of the frame."""

    sample_rate, hop, codebooks, codebook_size = 800, 8, 2, 1024
    frame_rate = 100.0

    def __init__(self, revision: str = "0123456789abcdef") -> None:
        self.revision = revision
        self.batches: list[tuple[int, int]] = []

    def encode(self, clips: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
        assert clips.ndim == 2 and clips.size and clips.shape[1] % self.hop == 0
        self.batches.append((clips.shape[0], clips.shape[1] // self.hop))
        frames = np.abs(clips.reshape(len(clips), -1, self.hop))
        return np.stack([1023 * frames.max(-1), 1023 * frames.mean(-1)], axis=-1).astype(np.uint16)

    def encode_batches(
        self, clips: Sequence[Samples], batch_seconds: float, _notify: NotifyCallback
    ) -> Iterator[EncodedBatch]:
        return encode_equal_lengths(self, clips, batch_seconds)

    def decode(self, codes: Codes) -> Samples:
        return np.repeat(codes[:, 0], self.hop).astype(np.float32) / np.float32(1023)


def corpus(source: Path) -> list[Utterance]:
    return [Utterance(path.stem, path, f"text of {path.stem}", "anna") for path in sorted(source.glob("*.wav"))]


def die_at(owner: Any, name: str, number: int) -> None:
    call, calls = getattr(owner, name), count(1)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            if name == "replace":
                call(*args, **kwargs)
            if name == "fsync" and stat.S_ISREG(os.fstat(args[0]).st_mode):
                os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    setattr(owner, name, deadly)


def main(source: str, folder: str, moment: str, number: str) -> None:
    owners = {"encode": FakeCodec, "fsync": os, "replace": Path}
    if moment in owners:
        die_at(owners[moment], moment, int(number))
    encode_dataset(corpus(Path(source)), FakeCodec(), Path(folder), shard_seconds=SHARD_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
