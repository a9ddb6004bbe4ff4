"""A small model learns to hear before it learns to answer: its ear spells phones, and nothing else of it changes.

python training/pronunciation/teach_ear.py --model data/learners/model --data data/learners/prepared/train \\
    --held-out data/learners/prepared/test --out data/learners/hearing --seconds 120

The true Phi-4-multimodal begins with an ear that was taught before. Random weights that must find out what phones are,
and where in the sound each stands, from the answers alone guess the likeliest sentences for thousands of steps instead.
So a head that is thrown away reads phones off the ear's output (CTC: in order, wherever they are), and the model that
is written to OUT goes on with `learners.yaml`. All features lie on the device; the rate falls over the time that was
given, so that it ends when it should. Prints the phone errors of held-out learners.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from myna.data.dataset import PreparedDataset
from myna.data.pronunciation.assessment import read_answer
from myna.errors import DataError, MynaError
from myna.evaluate.wer import edit_distance
from myna.models import open_family
from myna.models.base import core_of
from myna.models.phi4.audio_encoder import hear
from myna.models.phi4.codec import STEPS, heard

PARTS = 3
"""Into which the head divides a position: 80 ms of quick speech hold more than one phone."""
SPECTRA = 40_000
"""Of a batch at most, 400 s of sound with what fills it up: much for a card, and too much for a few cores."""
ROUND = 64
"""Spectra to which a batch is filled up: libraries choose their kernels anew for every length they have not met."""
WARM_UP = 0.08
"""Share of the time in which the rate rises."""
TELL_EVERY = 10.0


@dataclass(frozen=True, eq=False)
class Lessons:
    """Clips of a prepared folder, all of them on the device, and what is said in each."""

    features: torch.Tensor
    """(spectra, bands): of all clips end to end."""
    starts: torch.Tensor
    lengths: torch.Tensor
    phones: list[list[int]]
    """By their places in `names`, from 1 on: 0 is what stands between phones."""
    names: tuple[str, ...]

    @classmethod
    def open(cls, folder: Path, device: torch.device, names: tuple[str, ...] = ()) -> Lessons:
        corpus = PreparedDataset.open(folder)
        clips = [heard(corpus.codes_at(row)) for row in range(len(corpus.table))]
        said = [read_answer(answer.as_py()).phones.split() for answer in corpus.table.answer]
        names = names or tuple(sorted({name for phones in said for name in phones}))
        number = {name: place for place, name in enumerate(names, start=1)}
        if strange := {name for phones in said for name in phones} - number.keys():
            raise DataError(
                f"{folder} has phones that are not learned: {', '.join(sorted(strange))}",
                hint="prepare both folders from one corpus of learner_corpus.py",
            )
        lengths = torch.tensor([len(clip) for clip in clips])
        flat = torch.from_numpy(np.concatenate(clips).astype(np.int32))
        return cls(
            (flat / STEPS).to(torch.float16).to(device),
            (lengths.cumsum(0) - lengths).to(device),
            lengths.to(device),
            [[number[name] for name in phones] for phones in said],
            names,
        )

    def batches(self, spectra: int, dice: torch.Generator | None) -> Iterator[list[int]]:
        """Clips of about one length together; in a random order, with other neighbours each time, if there are dice."""
        lengths = self.lengths.cpu().double()
        jitter = torch.rand(len(lengths), generator=dice, dtype=torch.double) if dice else torch.zeros(len(lengths))
        made: list[list[int]] = [[]]
        for clip in (lengths * (1 + 0.1 * jitter)).argsort().tolist():
            if made[-1] and (len(made[-1]) + 1) * rounded(int(lengths[clip] * 1.1)) > spectra:
                made.append([])
            made[-1].append(clip)
        order = torch.randperm(len(made), generator=dice).tolist() if dice else range(len(made))
        yield from (made[place] for place in order)

    def side_by_side(self, clips: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(clips, spectra, bands), zero where a clip has ended, and how many spectra each has."""
        chosen = torch.tensor(clips, device=self.features.device)
        lengths = self.lengths[chosen]
        places = torch.arange(rounded(int(lengths.max())), device=lengths.device)
        within = places < lengths[:, None]
        rows = (self.starts[chosen][:, None] + places).clamp(max=len(self.features) - 1)
        return self.features[rows].float() * within[..., None], lengths


def rounded(spectra: int) -> int:
    return -(-spectra // ROUND) * ROUND


class Speller(nn.Module):
    """The ear of a model, and the head that reads phones off it."""

    def __init__(self, core: Any, phones: int) -> None:
        super().__init__()
        self.ear = core.model.embed_tokens_extend.audio_embed
        self.head = nn.Linear(core.config.hidden_size, PARTS * (phones + 1)).to(next(self.ear.parameters()).device)
        self._core = (core,)  # not a part of this: only the ear learns

    def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(clips, parts of positions, phones) as logarithms, and how many of them each clip has."""
        read = self.head(F.rms_norm(hear(self._core[0], features, lengths), (self.head.in_features,)))
        for _ in range(3):  # the convolutions that halve the time
            lengths = (lengths + 1) // 2
        return read.unflatten(-1, (PARTS, -1)).flatten(1, 2).float().log_softmax(-1), lengths * PARTS


def within(seconds: float) -> Callable[[int], float]:
    """The share of the time that is gone, from now on, after any number of steps."""
    began = time.monotonic()
    return lambda _: (time.monotonic() - began) / seconds


def teach(
    speller: Speller, lessons: Lessons, share_gone: Callable[[int], float], *, spectra: int, rate: float, seed: int
) -> list[dict[str, float]]:
    """Until all is gone; what was told on the way."""
    device = lessons.features.device
    dice = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(speller.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    began, steps, told = time.monotonic(), 0, [{"steps": 0.0, "seconds": 0.0, "loss": math.nan}]
    losses: list[torch.Tensor] = []

    def tell(now: float) -> None:
        told.append({"steps": steps, "seconds": now, "loss": float(torch.stack(losses).mean())})
        print(f"{steps:7,d} steps  {now:5.0f} s  {told[-1]['loss']:.3f} a phone", flush=True)
        losses.clear()

    while True:
        for clips in lessons.batches(spectra, dice):
            gone = share_gone(steps)
            if gone >= 1:
                if losses:
                    tell(time.monotonic() - began)
                return told[1:]
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (gone + 1e-3) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * gone))
            features, lengths = lessons.side_by_side(clips)
            targets = [lessons.phones[clip] for clip in clips]
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                read, parts = speller(features, lengths)
            loss: torch.Tensor = F.ctc_loss(
                read.transpose(0, 1),
                torch.tensor([phone for phones in targets for phone in phones], device=device),
                parts,
                torch.tensor([len(phones) for phones in targets], device=device),
                reduction="sum",
                zero_infinity=True,
            ) / sum(map(len, targets))
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(speller.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            steps += 1
            now = time.monotonic() - began
            if now - told[-1]["seconds"] >= TELL_EVERY:
                tell(now)


@torch.no_grad()
def phone_errors(speller: Speller, lessons: Lessons) -> float:
    """Of the likeliest reading, against what was said."""
    wrong = 0
    speller.eval()
    for clips in lessons.batches(SPECTRA, None):
        read, parts = speller(*lessons.side_by_side(clips))
        for clip, best, count in zip(clips, read.argmax(-1).tolist(), parts.tolist(), strict=True):
            row = best[:count]
            spelt = [phone for phone, before in zip(row, [0, *row], strict=False) if phone and phone != before]
            wrong += edit_distance(lessons.phones[clip], spelt)
    speller.train()
    return wrong / sum(map(len, lessons.phones))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the small model")
    parser.add_argument("--data", type=Path, required=True, help="prepared folder to learn from")
    parser.add_argument(
        "--held-out", type=Path, required=True, help="prepared folder of others, who are listened to at the end"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--spectra", type=int, default=SPECTRA, help="of a batch: 100 a second; 6000 suit a few cores")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    device = torch.device(given.device)
    try:
        family = open_family(given.model)
        model = family.load_model(dtype=torch.float32, device=device, text_head=True)
        lessons = Lessons.open(given.data, device)
        speller = Speller(core_of(model), len(lessons.names))
        lasts = within(given.seconds)
        curve = teach(speller, lessons, lasts, spectra=given.spectra, rate=given.rate, seed=given.seed)
        wrong = phone_errors(speller, Lessons.open(given.held_out, device, lessons.names))
        print(f"{wrong:.1%} of held-out phones are wrong")
        told = {"curve": curve, "phone_error_rate": wrong}
        family.save_model(model, given.out)
        (given.out / "hearing.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    except MynaError as error:
        sys.exit(f"{error.what}\n  → {error.hint}")


if __name__ == "__main__":
    main()
