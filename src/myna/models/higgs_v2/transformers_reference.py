"""Forward pass and greedy generation as transformers itself does them, as a reference for ours.

None of our routing, packing, collating, delay pattern or sampling is used here: labels are shifted and codes are placed
anew.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import GenerationConfig

from myna.models.base import IGNORE_INDEX, RenderedSequence, TransformersForward, TransformersGeneration


@torch.no_grad()
def transformers_forward(_: Any, core: Any, sequence: RenderedSequence) -> TransformersForward:
    """Run the model's own `forward` on one sequence, without padding."""
    config = core.config
    hidden = core.model(**_inputs(core, sequence)).last_hidden_state[0, :-1]
    device, books = hidden.device, config.num_codebooks
    labels = np.full((len(sequence), books), IGNORE_INDEX)
    labels[np.isin(sequence.ids, (config.audio_token_id, config.audio_delay_token_id))] = sequence.code_labels
    targets = torch.from_numpy(labels[1:]).to(device)
    logits = core.audio_lm_head(hidden).unflatten(-1, (books, config.codebook_size)).float()
    sums = [F.cross_entropy(logits[:, book], targets[:, book], reduction="sum") for book in range(books)]
    found = [logits[(targets != IGNORE_INDEX).any(1)].flatten()]
    text = sums[0].new_zeros(())
    if core.text_lm_head is not None:
        targets = torch.from_numpy(sequence.labels[1:]).to(device)
        logits = core.text_lm_head(hidden).float()
        text = F.cross_entropy(logits, targets, reduction="sum")
        found.append(logits[targets != IGNORE_INDEX].flatten())
    return TransformersForward(torch.stack([text, *sums]).double().cpu(), torch.cat(found).cpu())


@torch.no_grad()
def transformers_generate(_: Any, core: Any, prompt: RenderedSequence, frames: int) -> TransformersGeneration:
    """Run the model's own `generate`, greedy. It may choose the begin of stream as a code, or end another codebook
    before the first, which our decoder never does; nothing is compared from there on."""
    config, books = core.config, core.config.num_codebooks
    known, core.generation_config = core.generation_config, GenerationConfig(eos_token_id=config.eos_token_id)
    try:
        result = core.generate(
            **_inputs(core, prompt),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=core.audio_lm_head.weight.device),
            max_new_tokens=frames + books + 1,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
    finally:
        core.generation_config = known
    delayed = result.audio_sequences[0, len(prompt.codes) :].cpu().numpy()
    scores = torch.cat(list(result.scores)).float().cpu().numpy()
    steps, book = np.arange(len(delayed))[:, None], np.arange(books)
    begins, ends = delayed == config.audio_stream_bos_id, delayed == config.audio_stream_eos_id
    ended = int(ends[:, 0].argmax()) if ends[:, 0].any() else len(delayed)
    strays = np.flatnonzero(((begins & (steps > book)) | (ends & (steps < ended + book))).any(1))
    end = int(strays[0]) if len(strays) else len(delayed)
    # Frame f of codebook k is chosen at step 1 + f + k, after a frame of begins.
    at = 1 + np.arange(max(0, end - 1))[:, None] + book
    inside = np.minimum(at, end - 1)
    return TransformersGeneration(
        choices=np.where(at < end, delayed[inside, book], IGNORE_INDEX),
        steps=at,
        scores=scores[inside, book],
        end=int(config.audio_stream_eos_id),
    )


def _inputs(core: Any, sequence: RenderedSequence) -> dict[str, torch.Tensor]:
    device = core.audio_lm_head.weight.device
    inputs = {"input_ids": torch.from_numpy(sequence.ids)[None].to(device)}
    if len(sequence.codes):
        codes = torch.from_numpy(sequence.codes)[None].to(device)
        inputs |= {"audio_input_ids": codes, "audio_input_ids_mask": codes.new_ones(codes.shape[:2], dtype=torch.bool)}
    return inputs
