"""Losses, gradients and answers on a GPU equal those on a CPU, in the precisions of GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from myna.core.config import AdaptSettings
from myna.data.conversation import Conversation
from myna.models.lora import make_trainable
from myna.models.phi4.family import Phi4

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recompute", [0, 2])
def test_losses_and_gradients_are_those_of_the_cpu(
    family: Phi4, asked: list[Conversation], dtype: torch.dtype, recompute: int
) -> None:
    batch = family.collate([family.render(one) for one in asked])
    losses = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        torch.manual_seed(0)
        learner = make_trainable(
            family.load_model(dtype=kind, device="cpu", text_head=True), family, AdaptSettings(rank=2)
        )
        objective: Any = family.objective(learner.to(device), recompute=recompute).train()
        with torch.autocast(device, kind, enabled=kind != torch.float32):
            sums = objective(batch.to(torch.device(device))).sums
        sums.sum().backward()
        gradients = [p.grad for p in learner.parameters() if p.requires_grad]
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
        losses.append(float(sums.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4 if dtype == torch.float32 else 0.02)


def test_answers_are_those_of_the_cpu(family: Phi4, model: Any, left_open: list[Conversation]) -> None:
    prompts = [family.render(one) for one in left_open]
    before = family.answer(model, prompts, 8)
    assert family.answer(model.to("cuda"), prompts, 8) == before
