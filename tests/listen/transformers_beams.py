"""Beam search with times as tokens by transformers alone, for comparison."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, WhisperTimeStampLogitsProcessor
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

from myna.listen.torch_whisper import SpecialTokens


@torch.inference_mode()
def search_by_transformers(
    model: Any,
    encoded: torch.Tensor,
    prompts: torch.Tensor,
    special: SpecialTokens,
    *,
    beams: int,
    max_tokens: int,
    suppressed: list[int],
    last_initial_time: int,
) -> tuple[list[list[int]], list[float]]:
    """Return the tokens of each window with their end, if they have one, and their mean log probability."""
    size = prompts.shape[1]
    rules = GenerationConfig(eos_token_id=special.end, bos_token_id=special.end)
    rules.no_timestamps_token_id, rules.max_initial_timestamp_index = special.first_time - 1, last_initial_time
    config = GenerationConfig(
        num_beams=beams,
        do_sample=False,
        early_stopping=True,
        max_length=size + max_tokens,
        eos_token_id=special.end,
        pad_token_id=special.end,
        bos_token_id=special.end,
        decoder_start_token_id=int(prompts[0, 0]),
        suppress_tokens=suppressed,
        return_dict_in_generate=True,
        output_scores=True,
    )
    output = GenerationMixin.generate(
        model,
        encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
        attention_mask=torch.ones(encoded.shape[:2], dtype=torch.long, device=encoded.device),
        decoder_input_ids=prompts,
        generation_config=config,
        logits_processor=LogitsProcessorList([WhisperTimeStampLogitsProcessor(rules, begin_index=size)]),
    )
    return [to_end(row, special) for row in output.sequences[:, size:].tolist()], output.sequences_scores.tolist()


def to_end(tokens: list[int], special: SpecialTokens) -> list[int]:
    return tokens[: tokens.index(special.end) + 1] if special.end in tokens else tokens
