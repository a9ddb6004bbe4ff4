"""Stock baseline: transformers' forward and loss, PEFT's LoRA, torch's AdamW, and nothing of ours.

Only the synthetic weights and utterances are shared, so that first losses and gradients can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from benchmarks.synthetic import random_model, randomize_adapter
from peft import LoraConfig, get_peft_model
from torch import nn

from myna.models.base import IGNORE_INDEX, RenderedSequence

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_PROJECTIONS = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
RANK, ALPHA, MAX_GRAD_NORM, LEARNING_RATE = 16, 32, 1.0, 1e-4


@dataclass(frozen=True, slots=True)
class StockMicroBatch:
    """Inputs of one forward pass, and its share of the step's targets."""

    inputs: dict[str, torch.Tensor]
    share: float
    tokens: int
    """Real ones."""
    positions: int
    """Padding included."""
    target_seconds: float


StockStep = list[StockMicroBatch]


def padded(sequences: Sequence[RenderedSequence], pad_id: int) -> dict[str, torch.Tensor]:
    """A batch padded on the right, as the processor of transformers makes it."""
    count, codebooks = len(sequences), sequences[0].codes.shape[1]
    longest, frames = max(map(len, sequences)), max(len(sequence.codes) for sequence in sequences)
    ids = np.full((count, longest), pad_id, np.int64)
    attention = np.zeros((count, longest), np.int64)
    codes = np.zeros((count, frames, codebooks), np.int64)
    labels = np.full((count, frames, codebooks), IGNORE_INDEX, np.int64)
    valid = np.zeros((count, frames), bool)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence.ids
        attention[row, : len(sequence)] = 1
        codes[row, : len(sequence.codes)] = sequence.codes
        labels[row, : len(sequence.codes)] = sequence.code_labels
        valid[row, : len(sequence.codes)] = True
    arrays = {
        "input_ids": ids,
        "attention_mask": attention,
        "audio_input_ids": codes,
        "audio_input_ids_mask": valid,
        "audio_labels": labels,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def packed(sequences: Sequence[RenderedSequence]) -> dict[str, torch.Tensor]:
    """One row of all sequences, separated by positions that start over; with a mask of ones they would leak."""
    arrays = {
        "input_ids": np.concatenate([sequence.ids for sequence in sequences]),
        "position_ids": np.concatenate([np.arange(len(sequence)) for sequence in sequences]),
        "audio_input_ids": np.concatenate([sequence.codes for sequence in sequences]),
        "audio_labels": np.concatenate([sequence.code_labels for sequence in sequences]),
    }
    inputs = {name: torch.from_numpy(array)[None] for name, array in arrays.items()}
    return inputs | {"audio_input_ids_mask": torch.ones(inputs["audio_input_ids"].shape[:2], dtype=torch.bool)}


def make_step(micro_batches: Sequence[Sequence[RenderedSequence]], pad_id: int | None) -> StockStep:
    """One optimizer step; sequences are padded with `pad_id`, or packed without one."""
    # Every codebook has the same number of targets, and so the same share of them.
    targets = [
        sum(int((one.code_labels[:, 0] != IGNORE_INDEX).sum()) for one in sequences) for sequences in micro_batches
    ]
    step = []
    for sequences, count in zip(micro_batches, targets, strict=True):
        inputs = packed(sequences) if pad_id is None else padded(sequences, pad_id)
        step.append(
            StockMicroBatch(
                inputs=inputs,
                share=count / sum(targets),
                tokens=sum(map(len, sequences)),
                positions=inputs["input_ids"].numel(),
                target_seconds=sum(sequence.target_seconds for sequence in sequences),
            )
        )
    return step


class StockStepper:
    """A stock training: model, adapter and optimizer as the documentation of each has them."""

    def __init__(
        self,
        config: Any,
        *,
        targets: list[str],
        dropout: float,
        device: torch.device,
        dtype: torch.dtype,
        attention: str,
        compiled: bool,
    ) -> None:
        self.device, self.codebooks = device, config.num_codebooks
        model = random_model(config, dtype=dtype, device=device, rng_device=device, attention=attention)
        lora = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=dropout, target_modules=targets, bias="none")
        self.model: nn.Module = get_peft_model(model, lora).train()
        trainables = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        randomize_adapter(trainables)
        self.trainables = list(trainables.values())
        self.optimizer = torch.optim.AdamW(
            self.trainables, lr=LEARNING_RATE, weight_decay=0.0, fused=device.type == "cuda"
        )
        if compiled:
            # Layer by layer, which is compiled once; the whole model at once would be twenty-eight times that.
            for layer in model.model.layers:
                layer.compile()

    def train_step(self, step: StockStep) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step: its loss and gradient norm, without synchronisation."""
        total = torch.zeros((), device=self.device)
        for micro_batch in step:
            inputs = {name: tensor.to(self.device, non_blocking=True) for name, tensor in micro_batch.inputs.items()}
            # transformers sums over codebooks where we take their mean.
            loss = self.model(**inputs, use_cache=False).loss * (micro_batch.share / self.codebooks)
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.trainables, MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm

    @staticmethod
    def loss_and_norm(result: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
        return float(result[0]), float(result[1])
