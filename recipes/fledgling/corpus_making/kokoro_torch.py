"""Kokoro-82M on a card, many lines at once, out of files that travel (`kokoro_weights.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from corpus_making import kokoro_weights
from corpus_making.kokoro import SAMPLE_RATE, Kokoro, Samples, Style
from corpus_making.kokoro_network import KokoroNetwork, Read
from myna.errors import DataError

SECONDS = 60
"""Of sound in a batch, padding included: a process then takes some gigabytes of a card's memory."""


class TorchKokoro(Kokoro):
    at_once = 48

    def __init__(self, folders: Sequence[Path], device: str) -> None:
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
        self._device = device
        if torch.device(device).type == "cuda":  # as precise as the weights, which travelled in halves
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def sound(self, lines: Sequence[list[int]], styles: Style, speeds: Style) -> list[Samples]:
        heard = [np.zeros(0, np.float32)] * len(lines)
        with torch.inference_mode():
            asked = (torch.from_numpy(each).to(self._device) for each in (styles, speeds))
            read = self._network.read(lines, *asked)
            for places in _batches(read, SECONDS * SAMPLE_RATE // self._network.sizes.samples_of_frame):
                for place, samples in zip(places, self._network.say(read.rows(places)), strict=True):
                    heard[place] = samples.cpu().numpy()
        return heard


def _batches(read: Read, most: int) -> Iterator[list[int]]:
    """Lines of like lengths together, with no more frames than so many after padding, if a line alone has no more."""
    batch: list[int] = []
    for place in sorted(range(len(read.frames)), key=lambda place: read.frames[place]):
        if batch and read.frames[place] * (len(batch) + 1) > most:
            yield batch
            batch = []
        batch.append(place)
    yield batch
