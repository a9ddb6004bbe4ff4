"""Helpers of the failure tests: a tiny model, synthetic recordings, and trainings of a second or two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from myna.audio.files import write_audio
from myna.core.config import Recipe, parse_recipe
from myna.core.run_folder import Run
from myna.data.codec import Codes
from myna.data.conversation import AudioClip, Conversation, Reference, speech_conversation
from myna.models.base import IGNORE_INDEX, Batch, Family, RenderedSequence
from myna.train.loop import make_loader, run_training
from tests.tone_corpus import SAMPLE_RATE, SPEAKER_PITCHES, tone_speech

VOICE = "who"
"""Text of each speaker's reference recording."""
LINES = ("hi", "you")
OTHER_SPEAKERS = {"wren": 190.0, "kite": 140.0}
OTHER_LINES = ("ah", "oh no")
"""Lines used for evaluation only."""


class RecordingCallback:
    """Training callback that records messages and metrics."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.planned_steps = 0

    def on_message(self, text: str) -> None:
        self.messages.append(text)

    def on_start(self, steps: int, *_: int) -> None:
        self.planned_steps = steps

    def on_metrics(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The rows of optimizer steps, without what the clock says."""
        return [{k: v for k, v in row.items() if k != "speed"} for row in self.rows if "evaluation" not in row]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Evaluations of trained steps; the untuned model is step 0."""
        return [row for row in self.rows if "evaluation" in row and row["step"] > 0]


def write_clip(folder: Path, speaker: str, name: str, text: str, samples: Any) -> None:
    """Write one clip of a speaker, with its text beside it."""
    write_audio(folder / speaker / f"{name}.wav", samples, SAMPLE_RATE)
    (folder / speaker / f"{name}.txt").write_text(text, encoding="utf-8")


def record(folder: Path, speakers: dict[str, float], lines: Sequence[str]) -> Path:
    """One folder a speaker, each clip with its text beside it."""
    for speaker, pitch in speakers.items():
        for text in lines:
            clip = folder / speaker / f"{text.replace(' ', '-')}.wav"
            write_audio(clip, tone_speech(text, pitch), SAMPLE_RATE)
            clip.with_suffix(".txt").write_text(text, encoding="utf-8")
    return folder


def recordings(folder: Path) -> Path:
    return record(folder, SPEAKER_PITCHES, (VOICE, *LINES))


def make_recipe(workspace: Path, **changes: dict[str, Any]) -> Recipe:
    tree: dict[str, dict[str, Any]] = {
        "model": {"source": str(workspace / "model"), "check_pretrained": False},
        "data": {
            "train": str(workspace / "prepared"),
            "row_tokens": 400,
            "seconds": [0.04, 30],
            "reference_seconds": [0.2, 10],
            "workers": 0,
        },
        "adapt": {"rank": 4, "alpha": 8},
        "train": {
            "steps": 3,
            "batch_size": 2,
            "learning_rate": 2e-3,
            "warmup": 0,
            "schedule": "constant",
            "save_every": 100,
            "device": "cpu",
        },
    }
    for branch, values in changes.items():
        tree[branch] = tree.get(branch, {}) | values
    return parse_recipe(tree, where="test")


def train_run(recipe: Recipe, folder: Path) -> tuple[Run, RecordingCallback]:
    """A complete training."""
    callback = RecordingCallback()
    run = Run.create(folder, recipe)
    run_training(recipe, run, callback)
    return run, callback


def adapter_of(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.adapter / "adapter_model.safetensors")


def load(family: Family, dtype: torch.dtype = torch.float32, *, text_head: bool = False) -> Any:
    return family.load_model(dtype=dtype, device="cpu", text_head=text_head)


def sequences_of(family: Family, recipe: Recipe) -> list[RenderedSequence]:
    """All training sequences of two epochs."""
    loader = make_loader(recipe, family, recipe.data.train)
    return [loader.sequence(target, epoch) for target in loader.reference_sampler.targets for epoch in range(2)]


def random_codes(frames: int, seed: int = 0) -> Codes:
    return np.random.default_rng(seed).integers(0, 64, (frames, 8)).astype(np.uint16)


def cloning(text: str = "hello", reference: int = 5, target: int | None = 7, seed: int = 0) -> Conversation:
    """A voice cloning sample of random codes; without a target it is a prompt."""
    return speech_conversation(
        text,
        id=text,
        references=(Reference("as I said", AudioClip("reference", random_codes(reference, seed))),)
        if reference
        else (),
        target=AudioClip("target", random_codes(target, seed + 1), target=True) if target else None,
    )


def overfit(family: Family, model: nn.Module, batch: Batch, steps: int, rate: float = 1e-2) -> list[float]:
    """Train a whole model on one batch; the mean code loss before every step."""
    model.requires_grad_(True)
    objective = family.objective(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = objective(batch).sums[1:].sum() / batch.counts[1:].sum()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().requires_grad_(False)
    return losses


@torch.no_grad()
def code_loss(family: Family, model: nn.Module, batch: Batch) -> float:
    sums = family.objective(model).eval()(batch).sums
    return float(sums[1:].sum() / batch.counts[1:].sum())


def stock_inputs(*sequences: RenderedSequence) -> dict[str, torch.Tensor]:
    """Sequences end to end in one row, as transformers' own forward takes them."""
    codes = torch.from_numpy(np.concatenate([sequence.codes for sequence in sequences]))[None]
    return {
        "input_ids": torch.from_numpy(np.concatenate([sequence.ids for sequence in sequences]))[None],
        "audio_input_ids": codes,
        "audio_input_ids_mask": torch.ones(codes.shape[:2], dtype=torch.bool),
    }


def stock_code_sums(model: Any, rendered: RenderedSequence, logits: torch.Tensor) -> torch.Tensor:
    """Per codebook, the loss sum that follows from (positions, codebooks x classes) of transformers' logits."""
    config = model.config
    labels = np.full((len(rendered), config.num_codebooks), IGNORE_INDEX)
    labels[np.isin(rendered.ids, (config.audio_token_id, config.audio_delay_token_id))] = rendered.code_labels
    classes = logits.view(len(rendered), config.num_codebooks, config.codebook_size)
    return torch.stack(
        [
            F.cross_entropy(classes[:-1, k], torch.from_numpy(labels[1:, k]), reduction="sum")
            for k in range(config.num_codebooks)
        ]
    )
