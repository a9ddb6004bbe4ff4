"""Many clips of unequal length through the codec, in batches, on a card that has the kernels of `codec_kernels.py`.

Codes are those of plain fp32 but for rounding: on an H200 at true size, 99.99 % of them are equal, and 99.9 % of a
probe must be before anything is encoded this way. The same batch on the same device gives the same codes, always. In
another batch a clip may be rounded elsewhere, since libraries choose their kernels by shape, and in rare cases that is
another code; therefore batches follow from the clips that are given, and from nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from myna.data.codec import Codec, Codes, Samples, by_equal_lengths
from myna.models.codec_checks import exactly
from myna.models.higgs_v2.batched_encoder import FastEncoder

PROBE_SECONDS = (16.0, 12.0, 10.0, 8.0, 6.0, 4.0, 3.0, 1.0)
"""One minute is 12,000 codes of the released codec, where the bar lies at 12 that differ."""
PROBE_BATCH_SECONDS = 48.0
"""So that the probe has a large batch, a small one, and clips of unequal length in both."""
EQUAL_SHARE = 0.999


class _Launched(NamedTuple):
    """A batch that the card may still be at work on."""

    places: list[int]
    frames: list[int]
    codes: torch.Tensor
    finite: torch.Tensor
    done: torch.cuda.Event | None


class BatchedCodec:
    """The fast encoder and the codec's own quantiser."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        resample: Callable[[torch.Tensor, int, int], torch.Tensor],
    ) -> None:
        self._model, self._device = model, device
        self._encoder = FastEncoder(model, resample).eval()
        self._hop, self._rate = self._encoder.hop, self._encoder.rates[0]

    @property
    def longest(self) -> int:
        """Samples of the longest clip: the kernels count places in 32 bits, and no activation is wider per sample."""
        return (2**31 - 1) // max(len(self._encoder.acoustic.first.bias), len(self._encoder.speech.first.bias))

    def encode(self, clips: Sequence[Samples], batch_seconds: float) -> Iterator[tuple[list[int], list[Codes] | None]]:
        """Codes with the places of their clips; none where an activation was beyond fp16.

        While codes are fetched, the card is at work on the next batch.
        """
        before: _Launched | None = None
        for places in self.batches([len(clip) for clip in clips], batch_seconds):
            launched = self._launch(places, [clips[place] for place in places])
            if before is not None:
                yield before.places, _fetch(before)
            before = launched
        if before is not None:
            yield before.places, _fetch(before)

    def batches(self, lengths: Sequence[int], batch_seconds: float) -> Iterator[list[int]]:
        """Places of clips of similar length, longest first, filled up to the longest of each batch."""
        waiting = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
        room = min(int(batch_seconds * self._rate), self.longest)
        while waiting:
            size = max(1, room // lengths[waiting[0]])
            yield waiting[:size]
            waiting = waiting[size:]

    def _launch(self, places: list[int], clips: Sequence[Samples]) -> _Launched:
        on_card = self._device.type == "cuda"
        frames = [len(clip) // self._hop for clip in clips]
        waves = torch.zeros(len(clips), max(map(len, clips)), pin_memory=on_card)
        for row, clip in zip(waves.numpy(), clips, strict=True):
            row[: len(clip)] = clip
        lengths = torch.tensor(frames, pin_memory=on_card).to(self._device, non_blocking=True)
        # Kernels are launched on the current device, which need not be the codec's.
        with exactly(self._device), torch.cuda.device(self._device) if on_card else nullcontext():
            mixed = lengths if len(set(frames)) > 1 else None
            heard = self._encoder(waves.to(self._device, non_blocking=True), mixed)
            bandwidth = self._model.config.target_bandwidths[-1]
            codes = self._model.quantizer.encode(heard.transpose(1, 2), bandwidth).permute(1, 2, 0)
            codes, finite = (one.to("cpu", non_blocking=True) for one in (codes, heard.isfinite().all()))
            done = torch.cuda.Event() if on_card else None  # type: ignore[no-untyped-call]
            if done is not None:
                done.record()
        return _Launched(places, frames, codes, finite, done)

    def why_not(self, codec: Codec) -> str | None:
        """Whether this way makes the codes of `codec.encode`, tried on a minute of sound; if not, the reason."""
        lengths = [max(1, int(seconds * self._rate) // self._hop) * self._hop for seconds in PROBE_SECONDS]
        clips = voices(lengths, self._rate)
        due: dict[int, Codes] = {}
        for places, batch in by_equal_lengths(codec, clips, PROBE_BATCH_SECONDS):
            due |= zip(places, batch, strict=True)
        equal = total = 0
        try:
            for places, found in self.encode(clips, PROBE_BATCH_SECONDS):
                if found is None:
                    return "activations of this codec are beyond fp16"
                equal += sum(int((due[place] == one).sum()) for place, one in zip(places, found, strict=True))
                total += sum(one.size for one in found)
        except torch.OutOfMemoryError:
            # It depends on who else is on the card, and the choice of a way must not.
            raise
        except Exception as error:  # noqa: BLE001 - whatever a compiler or a driver says, there is another way
            return f"its kernels do not work here ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
        if equal < EQUAL_SHARE * total:
            return f"{equal / total:.3%} of a probe's codes were those of fp32, where {EQUAL_SHARE:.1%} must be"
        return None


def _fetch(launched: _Launched) -> list[Codes] | None:
    if launched.done is not None:
        launched.done.synchronize()
    if not bool(launched.finite):
        return None
    whole = launched.codes.numpy().astype(np.uint16)
    return [own[:count] for own, count in zip(whole, launched.frames, strict=True)]


def voices(lengths: Sequence[int], rate: int, seed: int = 0) -> list[Samples]:
    """Sounds to try a codec on, of so many samples each: gliding voices with breath in them, in syllables, at all
    levels."""
    random = np.random.default_rng(seed)
    made: list[Samples] = []
    for samples in lengths:
        t = np.arange(samples, dtype=np.float32) / rate
        pitch = random.uniform(80, 250) * (1 + 0.1 * np.sin(2 * np.pi * random.uniform(0.2, 1) * t))
        phase = 2 * np.pi * np.cumsum(pitch) / rate
        slope = random.uniform(0.5, 1.5)
        voice = np.sum([np.sin(n * phase) / n**slope for n in range(1, 9)], axis=0)
        syllables = np.clip(0.3 + np.sin(2 * np.pi * random.uniform(2, 5) * t + random.uniform(0, 6)), 0.02, None)
        level = 10 ** random.uniform(-1.5, -0.5)
        breath = random.standard_normal(samples)
        made.append((level * syllables * (0.4 * voice + 0.15 * breath)).astype(np.float32))
    return made
