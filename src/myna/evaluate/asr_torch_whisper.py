"""Whisper of transformers behind the interface of CTranslate2's: encode, detect_language, generate and align.

faster-whisper's procedure (asr_windows.py) then runs on either of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from myna.evaluate.dependencies import import_optional

MAX_TOKENS = 448
"""Of a window, its prompt among them."""
ENCODED_FRAMES_PER_SECOND = 50
MEDIAN_FRAMES = 7

FloatArray = npt.NDArray[np.float32]


class GeneratedTokens(NamedTuple):
    """As `ctranslate2.models.WhisperGenerationResult`."""

    sequences_ids: list[list[int]]
    scores: list[float]
    no_speech_prob: float


class TokenAlignment(NamedTuple):
    """As `ctranslate2.models.WhisperAlignmentResult`."""

    alignments: list[tuple[int, int]]
    text_token_probs: list[float]


class TimestampRules:
    """Whisper's rules for times among the tokens, as a logits processor: in pairs, never back, and a time where times
    together are more probable than any text. All rows at once and without a wait for the GPU: transformers' own has
    several for every row up to 5.17, hundreds for each token of a batch."""

    def __init__(self, prompt: int, no_timestamps: int, end: int, max_initial_index: int) -> None:
        self._prompt, self._first_time, self._end = prompt, no_timestamps + 1, end
        self._last_initial_time = self._first_time + max_initial_index

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        written = input_ids[:, self._prompt :]
        tokens = torch.arange(scores.shape[-1], device=scores.device)
        is_time = tokens >= self._first_time
        forbidden = (tokens == self._first_time - 1).expand(scores.shape).clone()
        if not written.shape[1]:
            forbidden |= ~is_time | (tokens > self._last_initial_time)
        else:
            were_times = written >= self._first_time
            last = were_times[:, -1:]
            before = were_times[:, -2:-1] if written.shape[1] > 1 else torch.ones_like(last)
            forbidden |= last & before & is_time
            forbidden |= last & ~before & (tokens < self._end)
            # The end of a segment may be its start, the next start not the last end; times never go back.
            latest = written.masked_fill(~were_times, self._first_time - 1).amax(1, keepdim=True)
            earliest = torch.where(last & ~before, latest, latest + 1)
            forbidden |= is_time & (tokens < earliest)
        scores = scores.masked_fill(forbidden, -torch.inf)
        log_probs = scores.float().log_softmax(-1)
        text, times = log_probs[:, : self._first_time], log_probs[:, self._first_time :]
        prefers_time = times.logsumexp(-1, keepdim=True) > text.amax(-1, keepdim=True)
        return scores.masked_fill(prefers_time & ~is_time, -torch.inf)


class TorchWhisperNetwork:
    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, config = model, model.generation_config
        self._token_id = tokenizer.token_to_id
        self._languages = getattr(config, "lang_to_id", None) or {}
        self.is_multilingual = bool(getattr(config, "is_multilingual", bool(self._languages)))
        layers, heads = model.config.decoder_layers, model.config.decoder_attention_heads
        # Without a list of the heads that follow the audio: those of the upper half, as in the first Whisper.
        upper = [[layer, head] for layer in range(layers // 2, layers) for head in range(heads)]
        self._alignment_heads = getattr(config, "alignment_heads", None) or upper

    @torch.inference_mode()
    def encode(self, features: FloatArray) -> torch.Tensor:
        inputs = torch.from_numpy(np.ascontiguousarray(features)).to(self._model.device, self._model.dtype)
        encoded: torch.Tensor = self._model.model.encoder(inputs).last_hidden_state
        return encoded

    def detect_language(self, encoded: torch.Tensor) -> list[list[tuple[str, float]]]:
        """Languages of each window with their probabilities, the most probable first."""
        tokens = list(self._languages)
        logits = self._first_logits(encoded)[:, [self._languages[token] for token in tokens]]
        rows = logits.softmax(-1).tolist()
        return [sorted(zip(tokens, row, strict=True), key=lambda one: -one[1]) for row in rows]

    @torch.inference_mode()
    def generate(
        self,
        encoded: torch.Tensor,
        prompts: Sequence[Sequence[int]],
        *,
        beam_size: int,
        max_length: int,
        suppress_tokens: Sequence[int],
        max_initial_timestamp_index: int,
        **_: object,
    ) -> list[GeneratedTokens]:
        """Beam search with times as tokens; prompts have equal lengths."""
        from transformers import GenerationConfig, LogitsProcessorList
        from transformers.generation import GenerationMixin
        from transformers.modeling_outputs import BaseModelOutput

        size, end = len(prompts[0]), self._token_id("<|endoftext|>")
        config = GenerationConfig(
            num_beams=beam_size,
            do_sample=False,
            early_stopping=True,
            max_length=max_length,
            eos_token_id=end,
            pad_token_id=end,
            bos_token_id=end,
            decoder_start_token_id=self._token_id("<|startoftranscript|>"),
            suppress_tokens=list(suppress_tokens),
            begin_suppress_tokens=[self._token_id("Ġ"), end],
            return_dict_in_generate=True,
            output_scores=True,
        )
        rules = TimestampRules(size, self._token_id("<|notimestamps|>"), end, max_initial_timestamp_index)
        # Whisper's own `generate` would cut windows and choose prompts by itself.
        output = GenerationMixin.generate(
            self._model,
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
            attention_mask=torch.ones(encoded.shape[:2], dtype=torch.long, device=encoded.device),
            decoder_input_ids=torch.tensor(prompts, device=encoded.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([rules]),
        )
        silence = self._token_id("<|nospeech|>") or self._token_id("<|nocaptions|>")
        no_speech = self._first_logits(encoded).softmax(-1)[:, silence].tolist()
        results = []
        for row, score, probability in zip(
            output.sequences[:, size:].tolist(), output.sequences_scores.tolist(), no_speech, strict=True
        ):
            tokens = row[: row.index(end)] if end in row else row
            # Here a score is a mean with the end of text, and in CTranslate2 without.
            total = score * (len(tokens) + (end in row))
            results.append(GeneratedTokens([tokens], [total / max(1, len(tokens))], probability))
        return results

    @torch.inference_mode()
    def align(
        self,
        encoded: torch.Tensor,
        start_sequence: Sequence[int],
        text_tokens: Sequence[Sequence[int]],
        num_frames: Sequence[int],
        *,
        median_filter_width: int = MEDIAN_FRAMES,
    ) -> list[TokenAlignment]:
        """Frames of 20 ms of each token: dynamic time warping of the cross-attention of the alignment heads."""
        end, start = self._token_id("<|endoftext|>"), len(start_sequence)
        rows = [[*start_sequence, self._token_id("<|notimestamps|>"), *tokens, end] for tokens in text_tokens]
        longest = max(map(len, rows))
        inputs = torch.tensor([row + [end] * (longest - len(row)) for row in rows], device=encoded.device)
        attention = self._model.config._attn_implementation
        self._model.set_attn_implementation("eager")  # the others do not tell their weights
        try:
            output = self._model(encoder_outputs=(encoded,), decoder_input_ids=inputs, output_attentions=True)
        finally:
            self._model.set_attn_implementation(attention)
        weights = torch.stack([output.cross_attentions[layer][:, head] for layer, head in self._alignment_heads], 1)
        results = []
        for index, tokens in enumerate(text_tokens):
            used = weights[index, :, : len(rows[index]), : num_frames[index] // 2].float()
            used = used / used.sum(-1, keepdim=True).clamp(min=1e-12)
            deviation, mean = torch.std_mean(used, dim=-2, keepdim=True, unbiased=False)
            heads = _median(((used - mean) / deviation.clamp(min=1e-12)), median_filter_width)
            cost = -heads.mean(0)[start:-1].cpu().numpy()
            logits = output.logits[index, start : start + len(tokens), :end].float().softmax(-1)
            chosen = torch.tensor(list(tokens), dtype=torch.long, device=logits.device)[:, None]
            results.append(TokenAlignment(time_warping(cost), logits.gather(1, chosen)[:, 0].tolist()))
        return results

    @torch.inference_mode()
    def _first_logits(self, encoded: torch.Tensor) -> torch.Tensor:
        """Of the token after the start of a transcript."""
        start = torch.full((len(encoded), 1), self._token_id("<|startoftranscript|>"), device=encoded.device)
        logits: torch.Tensor = self._model(encoder_outputs=(encoded,), decoder_input_ids=start).logits[:, 0].float()
        return logits


def open_torch_whisper(model: Any, tokenizer: Any, mel_bands: int) -> Any:
    """A `faster_whisper.WhisperModel` whose network is a Whisper of transformers; `tokenizer` is of tokenizers."""
    package = import_optional("faster_whisper", 'pip install "myna[evaluate]"')
    extractor = import_optional("faster_whisper.feature_extractor").FeatureExtractor(feature_size=mel_bands)
    whisper = object.__new__(package.WhisperModel)  # its constructor opens the files of CTranslate2
    network = TorchWhisperNetwork(model, tokenizer)
    vars(whisper).update(
        model=network,
        encode=network.encode,
        hf_tokenizer=tokenizer,
        feature_extractor=extractor,
        input_stride=2,
        time_precision=1 / ENCODED_FRAMES_PER_SECOND,
        frames_per_second=2 * ENCODED_FRAMES_PER_SECOND,
        tokens_per_second=ENCODED_FRAMES_PER_SECOND,
        max_length=min(MAX_TOKENS, model.config.max_target_positions),
    )
    return whisper


def time_warping(cost: FloatArray) -> list[tuple[int, int]]:
    """Cheapest path through (tokens, frames), in steps to the next token, the next frame or both. By anti-diagonals:
    each needs only the two before it."""
    tokens, frames = cost.shape
    total = np.full((tokens + 1, frames + 1), np.inf)
    total[0, 0] = 0
    steps = np.array([(0, 1), (1, 1), (1, 0)])
    chosen = np.zeros((tokens + 1, frames + 1), np.int8)
    for diagonal in range(2, tokens + frames + 1):
        token = np.arange(max(1, diagonal - frames), min(tokens, diagonal - 1) + 1)
        frame = diagonal - token
        before = np.stack([total[token - down, frame - right] for down, right in steps])
        best = before.argmin(0)
        chosen[token, frame] = best
        total[token, frame] = cost[token - 1, frame - 1] + before.min(0)
    path, place = [], np.array([tokens, frames])
    while (place > 0).all():
        path.append((int(place[0]) - 1, int(place[1]) - 1))
        place = place - steps[chosen[tuple(place)]]
    return path[::-1]


def _median(values: torch.Tensor, width: int) -> torch.Tensor:
    """Running median over the last axis, its ends mirrored."""
    pad = width // 2
    if values.shape[-1] <= pad:
        return values
    return F.pad(values, (pad, pad), mode="reflect").unfold(-1, width, 1).median(-1).values
