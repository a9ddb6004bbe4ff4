"""The forward pass equals transformers', in any batch and in every precision."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Phi4MultimodalForCausalLM

from myna.core.config import AdaptSettings
from myna.data.codec import Samples
from myna.data.conversation import Conversation
from myna.models import open_family
from myna.models.base import IGNORE_INDEX
from myna.models.lora import make_trainable
from myna.models.phi4.family import Phi4
from tests.models.phi4.conftest import FEATURE_EXTRACTOR, transformers_features


def loss(family: Phi4, model: Any, conversations: list[Conversation], **options: Any) -> float:
    batch = family.collate([family.render(one) for one in conversations], **options)
    with torch.no_grad():
        return float(family.objective(model).eval()(batch).sums)


@pytest.mark.parametrize("number", range(4))
def test_the_loss_equals_transformers(
    family: Phi4, model: Any, stock: Any, asked: list[Conversation], waves: list[Samples], number: int
) -> None:
    rendered = family.render(asked[number])
    ids, labels = torch.from_numpy(rendered.ids)[None], torch.from_numpy(rendered.labels)[None]
    with torch.no_grad():
        due = stock(input_ids=ids, labels=labels, **transformers_features(waves[number])).loss
    assert loss(family, model, [asked[number]]) == pytest.approx(float(due * (labels != IGNORE_INDEX).sum()), rel=1e-5)


def test_rotary_positions_of_the_released_model_equal_transformers(
    folder: Path, asked: list[Conversation], waves: list[Samples], tmp_path: Path
) -> None:
    """The released model scales its rotations by factors, which differ for short and long sequences."""
    copied = Path(shutil.copytree(folder, tmp_path / "copy"))
    config = json.loads((copied / "config.json").read_text())
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 3.0], "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]}
    config["rope_parameters"] |= factors | {"rope_type": "longrope"}
    config["max_position_embeddings"] = 131_072
    (copied / "config.json").write_text(json.dumps(config))
    family, stock = open_family(str(copied)), Phi4MultimodalForCausalLM.from_pretrained(copied).eval()
    assert isinstance(family, Phi4)
    rendered = family.render(asked[1])
    ids, labels = torch.from_numpy(rendered.ids)[None], torch.from_numpy(rendered.labels)[None]
    with torch.no_grad():
        due = stock(input_ids=ids, labels=labels, **transformers_features(waves[1])).loss
    model: Any = family.load_model(dtype=torch.float32, device="cpu", text_head=True)
    assert model.model.rotary_emb.attention_scaling > 1.1
    assert loss(family, model, [asked[1]]) == pytest.approx(float(due * (labels != IGNORE_INDEX).sum()), rel=1e-5)


def test_a_loss_does_not_depend_on_the_batch(family: Phi4, model: Any, asked: list[Conversation]) -> None:
    alone = sum(loss(family, model, [one]) for one in asked)
    assert loss(family, model, asked) == pytest.approx(alone, rel=1e-6)


def test_transformers_own_encoding_depends_on_the_batch(stock: Any, waves: list[Samples]) -> None:
    """Reason why clips are not padded as in transformers: a clip is encoded differently beside a longer one."""
    encoder = stock.model.embed_tokens_extend.audio_embed.encoder
    pair = FEATURE_EXTRACTOR([*waves[:2]], sampling_rate=16_000, return_tensors="pt")
    single = transformers_features(waves[0])["audio_input_features"]
    with torch.no_grad():
        alone, together = encoder(single, None), encoder(pair["audio_input_features"], pair["audio_attention_mask"])
    assert not torch.allclose(alone[0], together[0, : alone.shape[1]], atol=1e-3)


def test_the_loss_depends_on_the_audio(family: Phi4, model: Any, asked: list[Conversation]) -> None:
    batch = family.collate([family.render(asked[0])])
    objective: Any = family.objective(model).eval()
    with torch.no_grad():
        before = float(objective(batch).sums)
        batch.features.zero_()
        assert float(objective(batch).sums) != pytest.approx(before, rel=1e-4)


def test_every_end_of_an_answer_is_counted(family: Phi4, model: Any, asked: list[Conversation]) -> None:
    objective: Any = family.objective(model).eval()
    assert objective(family.collate([family.render(one) for one in asked])).stops[1] == 4


@pytest.mark.parametrize("mode", ["comprehensive", "attention_only", "audio_focused", "full"])
@pytest.mark.parametrize("recompute", [0, 2])
def test_every_trainable_parameter_gets_a_gradient(
    family: Phi4, model: Any, asked: list[Conversation], mode: Any, recompute: int
) -> None:
    learner = make_trainable(model, family, AdaptSettings(mode=mode, rank=2))
    objective: Any = family.objective(learner, recompute=recompute).train()
    objective(family.collate([family.render(one) for one in asked[:2]])).sums.sum().backward()
    gradients = {name: p.grad for name, p in learner.named_parameters() if p.requires_grad}
    assert gradients and all(gradient is not None and gradient.isfinite().all() for gradient in gradients.values())
    assert any(gradient.any() for gradient in gradients.values() if gradient is not None)


def test_recomputing_changes_no_gradient(family: Phi4, asked: list[Conversation]) -> None:
    def gradients(recompute: int) -> list[torch.Tensor]:
        model = family.load_model(dtype=torch.float32, device="cpu", text_head=True)
        objective: Any = family.objective(model, recompute=recompute).train()
        objective(family.collate([family.render(one) for one in asked])).sums.sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for one, other in zip(gradients(0), gradients(2), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_under_autocast_is_near(family: Phi4, asked: list[Conversation], dtype: torch.dtype) -> None:
    """The base is frozen in half precision, the LoRA and the stream are fp32, as in `train.precision`."""
    batch = family.collate([family.render(one) for one in asked])
    losses = []
    for kind in (torch.float32, dtype):
        torch.manual_seed(0)
        learner = make_trainable(
            family.load_model(dtype=kind, device="cpu", text_head=True), family, AdaptSettings(rank=2)
        )
        objective: Any = family.objective(learner).train()
        with torch.autocast("cpu", dtype, enabled=kind == dtype):
            sums = objective(batch).sums
        sums.sum().backward()
        assert all(p.dtype == torch.float32 and p.grad is not None for p in learner.parameters() if p.requires_grad)
        losses.append(float(sums.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_the_forward_pass_runs_on_the_meta_device(family: Phi4, asked: list[Conversation]) -> None:
    model = family.load_model(dtype=torch.bfloat16, device="meta", text_head=True)
    objective: Any = family.objective(model).train()
    batch = family.collate([family.render(one) for one in asked]).to(torch.device("meta"))
    assert objective(batch).sums.shape == (1,)


def test_a_shift_of_the_labels_is_seen(family: Phi4, model: Any, asked: list[Conversation]) -> None:
    assert loss(family, model, asked, offset=0) != pytest.approx(loss(family, model, asked), rel=1e-3)
