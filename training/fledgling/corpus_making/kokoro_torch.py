"""Kokoro-82M on a GPU, many lines at once, out of files that travel (`kokoro_weights.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from codec_training.augmentation import FORMANT_WINDOW, warp_formants
from corpus_making import kokoro_weights
from corpus_making.kokoro import SAMPLE_RATE, Kokoro, Samples, Style, move_formants
from corpus_making.kokoro_fast import FastGenerator
from corpus_making.kokoro_network import EncodedText, KokoroNetwork, Lengths
from myna.core.device import supports_triton
from myna.core.errors import DataError
from myna.models.mel_codec import SPECTRUM_OVERLAP

MAX_BATCH_PHONEMES = 12_000
"""Phonemes of lines that are read together, padding included."""
MAX_PITCH_BATCH_SECONDS = 480
"""Seconds of sound in a batch whose pitch is found together, padding included. Recurrent layers take as long for few
as for many."""
MAX_SYNTHESIS_BATCH_SECONDS = 120
"""Seconds of sound that is made together, padding included: a process then takes some gigabytes of a card's memory."""
FULL_SCALE = 32768
"""Full scale of 16 bits: what is a whole number of its parts is written to a file as it is."""
PROBE_LINES = (60, 30, 8)
"""Phonemes of the lines that the fast generator is tried on."""
MIN_SNR_DB = 30.0
"""Decibels by which an error must be quieter than the sound; fp16 leaves 54, and a mistake hardly ten."""

Generate = Callable[[Tensor, Tensor, Tensor, Lengths], Tensor]


class TorchKokoro(Kokoro):
    batch_size = 64

    def __init__(self, folders: Sequence[Path], device: str, exactly: bool = False) -> None:
        """`exactly`: without kernels of our own, and with all numbers in single precision."""
        super().__init__(kokoro_weights.read_styles(folders))
        weights = kokoro_weights.read(folders)
        self._network = KokoroNetwork()
        missing = set(self._network.state_dict()) - set(weights)
        if missing:
            raise DataError(
                f"{len(missing)} weights of Kokoro are missing, {min(missing)} among them",
                hint="name every folder that holds some of the files",
            )
        self._network.load_state_dict(weights)
        self._network.to(device).eval().requires_grad_(False)
        self._device = torch.device(device)
        if self._device.type == "cuda":  # as precise as the weights, which travelled in halves
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        self._generate: Generate = self._network.decoder.generator
        if not exactly and supports_triton(self._network.decoder.generator.hann):
            fast = FastGenerator(self._network.decoder.generator)
            reason = self._fast_path_failure(fast)
            if reason is None:
                self._generate = fast
            else:
                print(f"Kokoro speaks in fp32, which takes several times as long: {reason}", flush=True)

    def sound(self, lines: Sequence[list[int]], styles: Style, speeds: Style, formants: Style) -> list[Samples]:
        outputs = [np.zeros(0, np.float32)] * len(lines)
        with torch.inference_mode():
            batches = [
                (places, read, rows, whole, finite)
                for places, read in self._read(lines, styles, speeds)
                for rows, whole, finite in self._synthesize(read, formants[places])
            ]
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # once for all lines: until here the card was given work ahead
            for places, read, rows, whole, finite in batches:
                for row, samples, good in zip(rows, whole.numpy(), finite.tolist(), strict=True):
                    if good:
                        own = samples[: self._samples(read.frames[row])].astype(np.float32) / FULL_SCALE
                    else:  # halves end at 65,504
                        print("a line overflowed fp16, and is synthesized again in fp32", flush=True)
                        own = self._network.say(read.rows([row]))[0].clamp(-1, 1).cpu().numpy()
                        own = move_formants(own, float(formants[places[row]]))
                    outputs[places[row]] = own
        return outputs

    def _read(self, lines: Sequence[list[int]], styles: Style, speeds: Style) -> list[tuple[list[int], EncodedText]]:
        """Encoded batches of lines with their indices. The host needs the lengths of lines before synthesis, which is a
        synchronisation: all texts are encoded first."""
        found = []
        for places in _batches([len(line) for line in lines], MAX_BATCH_PHONEMES):
            inputs = (torch.from_numpy(each[places]).to(self._device) for each in (styles, speeds))
            found.append((places, self._network.read([lines[place] for place in places], *inputs)))
        return found

    def _synthesize(self, read: EncodedText, formants: Style) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Rows with their samples in 16 bits, on their way from the card, and whether they are numbers."""
        second = SAMPLE_RATE / self._network.sizes.samples_of_frame
        for some in _batches(read.frames, MAX_PITCH_BATCH_SECONDS * second):
            voiced = self._network.voice(read.rows(some))
            for few in _batches(voiced.frames, MAX_SYNTHESIS_BATCH_SECONDS * second):
                batch = voiced.rows(few)
                samples = self._generate(batch.x, batch.style, batch.pitch, batch.lengths)
                finite = samples.isfinite().all(dim=1)
                rows = [some[number] for number in few]
                samples = self._move_formants(samples, formants[rows])
                whole = (samples * FULL_SCALE).round().clamp(-FULL_SCALE, FULL_SCALE - 1).to(torch.int16)
                yield rows, whole.to("cpu", non_blocking=True), finite.to("cpu", non_blocking=True)

    def _move_formants(self, samples: Tensor, factors: Style) -> Tensor:
        moved = [row for row, factor in enumerate(factors) if factor != 1.0]
        if moved:
            hop = FORMANT_WINDOW // SPECTRUM_OVERLAP
            padded = torch.nn.functional.pad(samples[moved].float(), (0, -samples.shape[1] % hop))
            warped = warp_formants(padded, torch.from_numpy(factors[moved, None]).to(self._device))
            samples[moved] = warped[:, : samples.shape[1]].to(samples.dtype)
        return samples

    def _samples(self, frames: int) -> int:
        return frames * self._network.sizes.samples_of_frame

    def _fast_path_failure(self, fast: Generate) -> str | None:
        """Whether it says the same, tried on a few lines of any phonemes; if not, the reason."""
        rng = torch.Generator().manual_seed(0)
        symbols = self._network.sizes.symbols
        lines = [[0, *torch.randint(1, symbols, (length,), generator=rng).tolist(), 0] for length in PROBE_LINES]
        table = self.styles[self.voices[0]]
        styles = torch.from_numpy(np.stack([table[min(length, len(table) - 1)] for length in PROBE_LINES]))
        with torch.inference_mode():
            styles = styles.to(self._device)
            voiced = self._network.voice(self._network.read(lines, styles, torch.ones(len(lines), device=self._device)))
            given = (voiced.x, voiced.style, voiced.pitch, voiced.lengths)
            exact_outputs = self._network.decoder.generator(*given)
            try:
                found = fast(*given)
                for row, (exact, ours) in enumerate(zip(exact_outputs, found, strict=True)):
                    end = self._samples(voiced.frames[row])
                    error = (exact[:end] - ours[:end]).square().mean()
                    quieter = float(10 * torch.log10(exact[:end].square().mean() / error))
                    if not quieter >= MIN_SNR_DB:  # not a number is not close either
                        return f"the error of its fast way is only {quieter:.1f} dB below the sound"
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a compiler or a driver says, there is another way
                first = str(error).strip().partition("\n")[0]
                return f"its kernels do not work here ({type(error).__name__}: {first})"
        return None


def _batches(frames: Sequence[int], most: float) -> Iterator[list[int]]:
    """Lines of like lengths together, with no more frames than so many after padding, if a line alone has no more."""
    batch: list[int] = []
    for place in sorted(range(len(frames)), key=lambda place: frames[place]):
        if batch and frames[place] * (len(batch) + 1) > most:
            yield batch
            batch = []
        batch.append(place)
    yield batch
