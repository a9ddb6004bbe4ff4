"""Batched encoding of clips of unequal length, on a GPU with the kernels of `codec_kernels.py`.

Codes are those of plain fp32 but for rounding: on an H200 at true size, 99.99 % of them are equal, and 99.9 % of a
probe must be before it is used. The same batch on the same device gives the same codes. In another batch libraries may
choose other kernels and, in rare cases, round to another code; therefore batches depend on the given clips alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from myna.data.codec import Codec, Codes, Samples, encode_equal_lengths
from myna.models.codec_checks import full_precision
from myna.models.higgs_v2.batched_encoder import BatchedEncoder

PROBE_SECONDS = (16.0, 12.0, 10.0, 8.0, 6.0, 4.0, 3.0, 1.0)
"""One minute: 12,000 codes of the released codec, of which 12 may differ."""
PROBE_BATCH_SECONDS = 48.0
"""Gives a large and a small batch, with clips of unequal length in both."""
MIN_EQUAL_SHARE = 0.999


class BatchedCodec:
    """The batched encoder and the codec's own quantizer."""

    def __init__(
        self, model: Any, device: torch.device, resample: Callable[[torch.Tensor, int, int], torch.Tensor]
    ) -> None:
        self._model, self._device = model, device
        self._encoder = BatchedEncoder(model, resample).eval()
        self._hop, self._rate = self._encoder.hop, self._encoder.rates[0]

    @property
    def max_samples(self) -> int:
        """The longest clip: kernel offsets are 32-bit, and the first activations are the widest."""
        return (2**31 - 1) // max(len(self._encoder.acoustic.first.bias), len(self._encoder.hubert.first.bias))

    def encode(self, clips: Sequence[Samples], batch_seconds: float) -> Iterator[tuple[list[int], list[Codes] | None]]:
        """Codes with the indices of their clips; None where an activation overflowed fp16.

        While codes are fetched, the GPU computes the next batch.
        """
        pending = None
        for indices in self.batches([len(clip) for clip in clips], batch_seconds):
            launched = indices, self._launch([clips[index] for index in indices])
            if pending is not None:
                yield pending[0], pending[1]()
            pending = launched
        if pending is not None:
            yield pending[0], pending[1]()

    def batches(self, lengths: Sequence[int], batch_seconds: float) -> Iterator[list[int]]:
        """Indices of clips of similar length, longest first; a batch is padded to its longest."""
        waiting = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
        max_total = min(int(batch_seconds * self._rate), self.max_samples)
        while waiting:
            size = max(1, max_total // lengths[waiting[0]])
            yield waiting[:size]
            waiting = waiting[size:]

    def _launch(self, clips: Sequence[Samples]) -> Callable[[], list[Codes] | None]:
        """Start a batch on the GPU; the function that it returns waits for the codes."""
        on_gpu = self._device.type == "cuda"
        frames = [len(clip) // self._hop for clip in clips]
        waves = torch.zeros(len(clips), max(map(len, clips)), pin_memory=on_gpu)
        for row, clip in zip(waves.numpy(), clips, strict=True):
            row[: len(clip)] = clip
        lengths = torch.tensor(frames, pin_memory=on_gpu).to(self._device, non_blocking=True)
        # Triton launches on the current device, which need not be the codec's.
        with full_precision(self._device), torch.cuda.device(self._device) if on_gpu else nullcontext():
            mixed = lengths if len(set(frames)) > 1 else None
            encoded = self._encoder(waves.to(self._device, non_blocking=True), mixed)
            bandwidth = self._model.config.target_bandwidths[-1]
            codes = self._model.quantizer.encode(encoded.transpose(1, 2), bandwidth).permute(1, 2, 0)
            codes, finite = (x.to("cpu", non_blocking=True) for x in (codes, encoded.isfinite().all()))
            done = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
            if done is not None:
                done.record()

        def fetch() -> list[Codes] | None:
            if done is not None:
                done.synchronize()
            if not bool(finite):
                return None
            return [own[:count] for own, count in zip(codes.numpy().astype(np.uint16), frames, strict=True)]

        return fetch

    def mismatch_reason(self, codec: Codec) -> str | None:
        """Compare with `codec.encode` on a minute of synthetic speech; the reason if the codes differ, else None."""
        lengths = [max(1, int(seconds * self._rate) // self._hop) * self._hop for seconds in PROBE_SECONDS]
        clips = synthetic_voices(lengths, self._rate)
        expected: dict[int, Codes] = {}
        for indices, batch in encode_equal_lengths(codec, clips, PROBE_BATCH_SECONDS):
            expected |= zip(indices, batch, strict=True)
        equal = total = 0
        try:
            for indices, encoded in self.encode(clips, PROBE_BATCH_SECONDS):
                if encoded is None:
                    return "activations of this codec are beyond fp16"
                equal += sum(
                    int((expected[index] == codes).sum()) for index, codes in zip(indices, encoded, strict=True)
                )
                total += sum(codes.size for codes in encoded)
        except torch.OutOfMemoryError:
            # It depends on other processes on the GPU, and the choice of encoder must not.
            raise
        except Exception as error:  # noqa: BLE001 - whatever a compiler or a driver raises, plain fp32 remains
            return f"its kernels do not work here ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
        if equal < MIN_EQUAL_SHARE * total:
            return f"{equal / total:.3%} of a probe's codes were those of fp32, where {MIN_EQUAL_SHARE:.1%} must be"
        return None


def synthetic_voices(lengths: Sequence[int], rate: int, seed: int = 0) -> list[Samples]:
    """Synthetic voices to probe a codec with, of so many samples each: gliding pitch, breath noise, syllables, at
    various levels."""
    rng = np.random.default_rng(seed)
    voices: list[Samples] = []
    for samples in lengths:
        t = np.arange(samples, dtype=np.float32) / rate
        pitch = rng.uniform(80, 250) * (1 + 0.1 * np.sin(2 * np.pi * rng.uniform(0.2, 1) * t))
        phase = 2 * np.pi * np.cumsum(pitch) / rate
        slope = rng.uniform(0.5, 1.5)
        voice = np.sum([np.sin(n * phase) / n**slope for n in range(1, 9)], axis=0)
        syllables = np.clip(0.3 + np.sin(2 * np.pi * rng.uniform(2, 5) * t + rng.uniform(0, 6)), 0.02, None)
        level = 10 ** rng.uniform(-1.5, -0.5)
        breath = rng.standard_normal(samples)
        voices.append((level * syllables * (0.4 * voice + 0.15 * breath)).astype(np.float32))
    return voices
