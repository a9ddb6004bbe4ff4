"""Forward pass and greedy generation as transformers itself does them, as a reference for ours.

Clips go one at a time: in a batch, transformers' padding changes what the audio encoder makes of a clip.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import GenerationConfig

from myna.models.base import IGNORE_INDEX, RenderedSequence, TransformersForward, TransformersGeneration
from myna.models.phi4 import checkpoint
from myna.models.phi4.family import Phi4


@torch.no_grad()
def transformers_forward(family: Phi4, core: Any, sequence: RenderedSequence) -> TransformersForward:
    """Run the model's own `forward` on one sequence."""
    logits = core(**_inputs(family, core, sequence)).logits[0, :-1].float()
    targets = torch.from_numpy(sequence.labels[1:]).to(logits.device)
    total = F.cross_entropy(logits, targets, reduction="sum")
    return TransformersForward(total[None].double().cpu(), logits[targets != IGNORE_INDEX].flatten().cpu())


@torch.no_grad()
def transformers_generate(family: Phi4, core: Any, prompt: RenderedSequence, tokens: int) -> TransformersGeneration:
    """Run the model's own `generate`, greedy; placeholders of audio are never chosen, as transformers needs their
    clips."""
    known, eos_ids = core.generation_config, checkpoint.eos_ids(family.config)
    core.generation_config = GenerationConfig(
        eos_token_id=list(eos_ids), pad_token_id=eos_ids[0], suppress_tokens=[core.config.audio_config.audio_token_id]
    )
    try:
        result = core.generate(
            **_inputs(family, core, prompt),
            max_new_tokens=tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    finally:
        core.generation_config = known
    choices = result.sequences[0, len(prompt) :].cpu().numpy()
    # Any of the ends counts as the first of them.
    is_end = np.isin(choices, eos_ids)
    scores = torch.cat(list(result.logits)).float().cpu().numpy()
    scores[:, eos_ids[0]] = scores[:, list(eos_ids)].max(1)
    return TransformersGeneration(
        choices=np.where(is_end, eos_ids[0], choices)[:, None],
        steps=np.arange(len(choices))[:, None],
        scores=scores[:, None],
        end=eos_ids[0],
    )


def _inputs(family: Phi4, core: Any, sequence: RenderedSequence) -> dict[str, Any]:
    device, batch = core.lm_head.weight.device, family.collate([sequence])  # for its features alone
    ids = torch.from_numpy(sequence.ids)[None].to(device)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "audio_input_features": batch.padded_features().to(device),
        "audio_embed_sizes": torch.tensor([len(sequence.codes)], device=device),
    }
