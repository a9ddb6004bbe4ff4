"""Whisper of transformers behind the interface of CTranslate2's: encode, detect_language, generate and align.

faster-whisper's procedure (asr_windows.py) then runs on either of them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from myna.core.optional import import_optional
from myna.listen.asr_beam_search import MIN_GRAPH_WINDOWS, BeamSearch, SpecialTokens, WhisperDecoder, attend

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
        self._decoder = WhisperDecoder(model)
        self._special = SpecialTokens(
            self._token_id("<|endoftext|>"), self._token_id("<|notimestamps|>") + 1, model.config.vocab_size
        )
        self._searches: dict[int, BeamSearch] = {}
        self._lock = threading.Lock()

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
        """Beam search with times as tokens; prompts have equal lengths. At most half of `max_length` is written, as by
        CTranslate2 and by Whisper itself, so that an alignment, which has five tokens besides the text, fits too."""
        windows, size, end = len(prompts), len(prompts[0]), self._special.end
        max_tokens = min(max_length // 2, max_length - size)
        on_gpu = encoded.device.type == "cuda"
        rows = max(MIN_GRAPH_WINDOWS, 1 << (windows - 1).bit_length()) if on_gpu else windows
        # Windows that fill up a graph repeat the last one.
        filled = torch.arange(rows, device=encoded.device).clamp(max=windows - 1)
        suppressed = torch.tensor([*suppress_tokens, self._special.first_time - 1], device=encoded.device)
        with self._lock:
            search = self._searches.get(rows)
            if search is None or search.positions < size + max_tokens:
                search = BeamSearch(
                    self._decoder, self._special, rows, beam_size, size + max_tokens, frames=encoded.shape[1]
                )
            if on_gpu:
                self._searches[rows] = search
            written, scores, first_logits = search(
                encoded[filled],
                torch.tensor(prompts, device=encoded.device)[filled],
                max_tokens=max_tokens,
                suppressed=suppressed,
                last_initial_time=max_initial_timestamp_index,
            )
            columns = written.tolist(), scores.tolist(), self._no_speech(first_logits)
        results = []
        for row, score, probability in list(zip(*columns, strict=True))[:windows]:
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
        end, start = self._special.end, len(start_sequence)
        rows = [[*start_sequence, self._special.first_time - 1, *tokens, end] for tokens in text_tokens]
        longest = max(map(len, rows))
        inputs = torch.tensor([row + [end] * (longest - len(row)) for row in rows], device=encoded.device)
        positions = torch.arange(longest, device=encoded.device)
        future = torch.full((longest, longest), -torch.inf, dtype=encoded.dtype, device=encoded.device).triu(1)
        heads: list[torch.Tensor] = []

        def watch(layer: int, weights: torch.Tensor) -> None:
            heads.extend(weights[:, head] for at, head in self._alignment_heads if at == layer)

        def attend_self(_: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return attend(queries, keys, values, future)[0]

        audio = self._decoder.cache_audio(encoded, self._decoder.new_cache(len(rows), encoded.shape[1]))
        self._decoder(inputs, positions, audio, attend_self, watch)
        weights = torch.stack(heads, 1)
        costs = []
        for row, used, frames in zip(rows, weights, num_frames, strict=True):
            used = used[:, : len(row), : frames // 2].float()
            used = used / used.sum(-1, keepdim=True).clamp(min=1e-12)
            deviation, mean = torch.std_mean(used, dim=-2, keepdim=True, unbiased=False)
            filtered = _median(((used - mean) / deviation.clamp(min=1e-12)), median_filter_width)
            costs.append(-filtered.mean(0)[start:-1].cpu().numpy())
        # Nobody reads the probabilities of words.
        unknown = ([math.nan] * len(tokens) for tokens in text_tokens)
        return [TokenAlignment(*one) for one in zip(time_warping(costs), unknown, strict=True)]

    def _no_speech(self, logits: torch.Tensor) -> list[float]:
        """Probability that nobody speaks, from the logits after the start of a transcript."""
        silence = self._token_id("<|nospeech|>") or self._token_id("<|nocaptions|>")
        probabilities: list[float] = logits.softmax(-1)[:, silence].tolist()
        return probabilities

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


def time_warping(costs: Sequence[FloatArray]) -> list[list[tuple[int, int]]]:
    """Cheapest path through each (tokens, frames), in steps to the next frame, both, or the next token. All at once, by
    anti-diagonals: each needs only the two before it."""
    tokens, frames = (max(cost.shape[axis] for cost in costs) for axis in (0, 1))
    diagonals = np.full((tokens + frames - 1, len(costs), tokens), np.inf, np.float32)
    for index, cost in enumerate(costs):
        token, frame = np.indices(cost.shape)
        diagonals[token + frame, index, token] = cost
    steps = np.zeros(diagonals.shape, np.int8)
    # Sums by token on the last two diagonals, the first column before the first token: a path begins there.
    last, before_last = (np.full((len(costs), tokens + 1), np.inf) for _ in range(2))
    before_last[:, 0] = 0
    for number, diagonal in enumerate(diagonals):
        options = np.stack((last[:, 1:], before_last[:, :-1], last[:, :-1]))
        steps[number] = options.argmin(0)
        last, before_last = np.full_like(last, np.inf), last
        last[:, 1:] = diagonal + options.min(0)
    return [_path_back(steps[:, index], *cost.shape) for index, cost in enumerate(costs)]


def _path_back(steps: npt.NDArray[np.int8], tokens: int, frames: int) -> list[tuple[int, int]]:
    token, frame = tokens - 1, frames - 1
    path = []
    while token >= 0 and frame >= 0:
        path.append((token, frame))
        step = int(steps[token + frame, token])
        token, frame = token - (step > 0), frame - (step < 2)
    return path[::-1]


def _median(values: torch.Tensor, width: int) -> torch.Tensor:
    """Running median over the last axis, its ends mirrored."""
    pad = width // 2
    if values.shape[-1] <= pad:
        return values
    return F.pad(values, (pad, pad), mode="reflect").unfold(-1, width, 1).median(-1).values
