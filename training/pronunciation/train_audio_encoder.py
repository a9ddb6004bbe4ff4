"""CTC pretraining of the audio encoder of a small model on phones.

python training/pronunciation/train_audio_encoder.py --model data/learners/model --data data/learners/prepared/train \\
    --held-out data/learners/prepared/test --out data/learners/encoder --seconds 120

Phi-4-multimodal itself begins with a pretrained audio encoder. A model with random weights that learns phones and their
alignment from answers alone predicts the likeliest sentences for thousands of steps instead. So a temporary CTC head
predicts phones from the encoder's output, and the model that is written to OUT is trained further with `learners.yaml`.
Nothing but the encoder changes. All features are kept on the device; the learning rate decays over --seconds. Prints
the phone error rate of held-out learners.
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
from rapidfuzz.distance import Levenshtein
from torch import nn
from torch.nn import functional as F

from myna.core.errors import DataError, MynaError
from myna.data.dataset import PreparedDataset
from myna.data.pronunciation import read_answer
from myna.models import open_family
from myna.models.base import get_base_model
from myna.models.phi4.codec import CODES_PER_UNIT, valid_frames
from myna.models.phi4.forward import encode_audio

OUTPUTS_PER_POSITION = 3
"""Outputs of the head for each position: 80 ms of fast speech hold more than one phone."""
MAX_BATCH_FRAMES = 40_000
"""Padding included: 400 s of audio, which fits a GPU and is too much for a few cores."""
FRAME_MULTIPLE = 64
"""Batches are padded to multiples of it: libraries choose their kernels anew for every new length."""
WARM_UP_SHARE = 0.08
"""Share of the time in which the rate rises."""
LOG_EVERY_SECONDS = 10.0


@dataclass(frozen=True, eq=False)
class PhoneDataset:
    """Clips of a prepared folder on the device, and their phones."""

    features: torch.Tensor
    """(spectra, bands): of all clips end to end."""
    starts: torch.Tensor
    lengths: torch.Tensor
    phones: list[list[int]]
    """Phones by their positions in `names`, from 1 on: 0 is what stands between phones."""
    names: tuple[str, ...]

    @classmethod
    def open(cls, folder: Path, device: torch.device, names: tuple[str, ...] = ()) -> PhoneDataset:
        corpus = PreparedDataset.open(folder)
        clips = [valid_frames(corpus.codes_at(row)) for row in range(len(corpus.table))]
        spoken = [read_answer(answer.as_py()).phones.split() for answer in corpus.table.answer]
        names = names or tuple(sorted({name for phones in spoken for name in phones}))
        number = {name: place for place, name in enumerate(names, start=1)}
        if unknown := {name for phones in spoken for name in phones} - number.keys():
            raise DataError(
                f"{folder} has unknown phones: {', '.join(sorted(unknown))}",
                hint="prepare both folders from one corpus of learner_corpus.py",
            )
        lengths = torch.tensor([len(clip) for clip in clips])
        flat = torch.from_numpy(np.concatenate(clips).astype(np.int32))
        return cls(
            (flat / CODES_PER_UNIT).to(torch.float16).to(device),
            (lengths.cumsum(0) - lengths).to(device),
            lengths.to(device),
            [[number[name] for name in phones] for phones in spoken],
            names,
        )

    def batches(self, batch_frames: int, rng: torch.Generator | None) -> Iterator[list[int]]:
        """Batches of clips of similar length; shuffled if a generator is given."""
        lengths = self.lengths.cpu().double()
        jitter = torch.rand(len(lengths), generator=rng, dtype=torch.double) if rng else torch.zeros(len(lengths))
        made: list[list[int]] = [[]]
        for clip in (lengths * (1 + 0.1 * jitter)).argsort().tolist():
            if made[-1] and (len(made[-1]) + 1) * padded_length(int(lengths[clip] * 1.1)) > batch_frames:
                made.append([])
            made[-1].append(clip)
        order = torch.randperm(len(made), generator=rng).tolist() if rng else range(len(made))
        yield from (made[place] for place in order)

    def collate(self, clips: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(clips, spectra, bands), zero where a clip has ended, and how many spectra each has."""
        chosen = torch.tensor(clips, device=self.features.device)
        lengths = self.lengths[chosen]
        positions = torch.arange(padded_length(int(lengths.max())), device=lengths.device)
        inside = positions < lengths[:, None]
        rows = (self.starts[chosen][:, None] + positions).clamp(max=len(self.features) - 1)
        return self.features[rows].float() * inside[..., None], lengths


def padded_length(frames: int) -> int:
    return -(-frames // FRAME_MULTIPLE) * FRAME_MULTIPLE


class PhoneCTCModel(nn.Module):
    """The audio encoder of a model with a CTC head on phones."""

    def __init__(self, core: Any, phones: int) -> None:
        super().__init__()
        self.encoder = core.model.embed_tokens_extend.audio_embed
        self.head = nn.Linear(core.config.hidden_size, OUTPUTS_PER_POSITION * (phones + 1)).to(
            next(self.encoder.parameters()).device
        )
        self._core = (core,)  # in a tuple: only the encoder is trained

    def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(clips, parts of positions, phones) as logarithms, and how many of them each clip has."""
        read = self.head(F.rms_norm(encode_audio(self._core[0], features, lengths), (self.head.in_features,)))
        for _ in range(3):  # the convolutions that halve the time
            lengths = (lengths + 1) // 2
        return read.unflatten(-1, (OUTPUTS_PER_POSITION, -1)).flatten(1, 2).float().log_softmax(
            -1
        ), lengths * OUTPUTS_PER_POSITION


def elapsed_share(seconds: float) -> Callable[[int], float]:
    """A function of the step that gives the elapsed share of the time budget."""
    began = time.monotonic()
    return lambda _: (time.monotonic() - began) / seconds


def train(
    model: PhoneCTCModel,
    dataset: PhoneDataset,
    progress: Callable[[int], float],
    *,
    batch_frames: int,
    learning_rate: float,
    seed: int,
) -> list[dict[str, float]]:
    """Train until `progress` reaches 1; the loss curve."""
    device = dataset.features.device
    rng = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    began, steps, curve = time.monotonic(), 0, [{"steps": 0.0, "seconds": 0.0, "loss": math.nan}]
    losses: list[torch.Tensor] = []

    def log(now: float) -> None:
        curve.append({"steps": steps, "seconds": now, "loss": float(torch.stack(losses).mean())})
        print(f"{steps:7,d} steps  {now:5.0f} s  {curve[-1]['loss']:.3f} a phone", flush=True)
        losses.clear()

    while True:
        for clips in dataset.batches(batch_frames, rng):
            share = progress(steps)
            if share >= 1:
                if losses:
                    log(time.monotonic() - began)
                return curve[1:]
            for group in optimizer.param_groups:
                group["lr"] = (
                    learning_rate * min(1.0, (share + 1e-3) / WARM_UP_SHARE) * 0.5 * (1 + math.cos(math.pi * share))
                )
            features, lengths = dataset.collate(clips)
            targets = [dataset.phones[clip] for clip in clips]
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                read, parts = model(features, lengths)
            loss: torch.Tensor = F.ctc_loss(
                read.transpose(0, 1),
                torch.tensor([phone for phones in targets for phone in phones], device=device),
                parts,
                torch.tensor([len(phones) for phones in targets], device=device),
                reduction="sum",
                zero_infinity=True,
            ) / sum(map(len, targets))
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            steps += 1
            now = time.monotonic() - began
            if now - curve[-1]["seconds"] >= LOG_EVERY_SECONDS:
                log(now)


@torch.no_grad()
def phone_error_rate(model: PhoneCTCModel, dataset: PhoneDataset) -> float:
    """Phone error rate of the greedy decoding."""
    wrong = 0
    model.eval()
    for clips in dataset.batches(MAX_BATCH_FRAMES, None):
        read, parts = model(*dataset.collate(clips))
        for clip, best, count in zip(clips, read.argmax(-1).tolist(), parts.tolist(), strict=True):
            row = best[:count]
            decoded = [phone for phone, before in zip(row, [0, *row], strict=False) if phone and phone != before]
            wrong += Levenshtein.distance(dataset.phones[clip], decoded)
    model.train()
    return wrong / sum(map(len, dataset.phones))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the small model")
    parser.add_argument("--data", type=Path, required=True, help="prepared folder to train on")
    parser.add_argument("--held-out", type=Path, required=True, help="prepared folder for the evaluation at the end")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument(
        "--batch-frames", type=int, default=MAX_BATCH_FRAMES, help="100 a second; 6000 suit a few cores"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    try:
        family = open_family(args.model)
        model = family.load_model(dtype=torch.float32, device=device, text_head=True)
        dataset = PhoneDataset.open(args.data, device)
        ctc_model = PhoneCTCModel(get_base_model(model), len(dataset.names))
        progress = elapsed_share(args.seconds)
        curve = train(
            ctc_model,
            dataset,
            progress,
            batch_frames=args.batch_frames,
            learning_rate=args.learning_rate,
            seed=args.seed,
        )
        error_rate = phone_error_rate(ctc_model, PhoneDataset.open(args.held_out, device, dataset.names))
        print(f"phone error rate of held-out learners: {error_rate:.1%}")
        results = {"curve": curve, "phone_error_rate": error_rate}
        family.save_model(model, args.out)
        (args.out / "pretraining.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    except MynaError as error:
        sys.exit(f"{error.what}\n  → {error.hint}")


if __name__ == "__main__":
    main()
