"""Whisper in torch behind the interface of CTranslate2: encode, detect_language, generate and align.

The procedure of faster-whisper (`decode_clips` in asr.py) runs on either of them. The beam search stays on its device:
a step is one CUDA graph, and the host waits for it once in 16. It chooses what the beam search of transformers chooses
with early stopping, a length penalty of 1, and Whisper's rules for times: in pairs, never back, and a time if times
together are more probable than any text.
"""

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from myna.audio.files import FloatArray
from myna.core.errors import import_optional

MAX_TOKENS = 448
"""Maximum tokens of a window, its prompt included."""
ENCODED_FRAMES_PER_SECOND = 50
MEDIAN_FRAMES = 7


class GeneratedTokens(NamedTuple):
    """Result of `generate`, with the fields of `ctranslate2.models.WhisperGenerationResult`."""

    sequences_ids: list[list[int]]
    scores: list[float]
    no_speech_prob: float


class TokenAlignment(NamedTuple):
    """Result of `align`, with the fields of `ctranslate2.models.WhisperAlignmentResult`."""

    alignments: list[tuple[int, int]]
    text_token_probs: list[float]


class TorchWhisperNetwork:
    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, config = model, model.generation_config
        self._token_id = tokenizer.token_to_id
        self._languages = getattr(config, "lang_to_id", None) or {}
        self.is_multilingual = bool(getattr(config, "is_multilingual", bool(self._languages)))
        layers, heads = model.config.decoder_layers, model.config.decoder_attention_heads
        # Default heads that follow the audio: those of the upper half, as in the first Whisper.
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
        """Return the languages of each window with their probabilities, the most probable first."""
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
        """Run beam search with times as tokens; prompts have equal lengths.

        At most half of `max_length` is written, as in CTranslate2 and Whisper itself, so that an alignment, which has
        five tokens besides the text, fits too.
        """
        windows, size, end = len(prompts), len(prompts[0]), self._special.end
        max_tokens = min(max_length // 2, max_length - size)
        on_gpu = encoded.device.type == "cuda"
        rows = max(MIN_GRAPH_WINDOWS, 1 << (windows - 1).bit_length()) if on_gpu else windows
        # Repeat the last window to fill up a graph.
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
            # A score here is a mean that includes the end of text; in CTranslate2 it does not.
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
        """Return the frames of 20 ms of each token, by dynamic time warping of the attention of the alignment heads."""
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
        # The probabilities of words are never read.
        unknown = ([math.nan] * len(tokens) for tokens in text_tokens)
        return [TokenAlignment(*one) for one in zip(time_warping(costs), unknown, strict=True)]

    def _no_speech(self, logits: torch.Tensor) -> list[float]:
        """Return the probability of no speech from the logits after the start of a transcript."""
        silence = self._token_id("<|nospeech|>") or self._token_id("<|nocaptions|>")
        probabilities: list[float] = logits.softmax(-1)[:, silence].tolist()
        return probabilities

    @torch.inference_mode()
    def _first_logits(self, encoded: torch.Tensor) -> torch.Tensor:
        """Return the logits of the token after the start of a transcript."""
        start = torch.full((len(encoded), 1), self._token_id("<|startoftranscript|>"), device=encoded.device)
        logits: torch.Tensor = self._model(encoder_outputs=(encoded,), decoder_input_ids=start).logits[:, 0].float()
        return logits


def open_torch_whisper(model: Any, tokenizer: Any, mel_bands: int) -> Any:
    """Return a `faster_whisper.WhisperModel` whose network is a Whisper of transformers."""
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
    """Return the cheapest path through each (tokens, frames), in steps to the next frame, both, or the next token.

    All are computed at once by anti-diagonals, each of which needs only the two before it.
    """
    tokens, frames = (max(cost.shape[axis] for cost in costs) for axis in (0, 1))
    diagonals = np.full((tokens + frames - 1, len(costs), tokens), np.inf, np.float32)
    for index, cost in enumerate(costs):
        token, frame = np.indices(cost.shape)
        diagonals[token + frame, index, token] = cost
    steps = np.zeros(diagonals.shape, np.int8)
    # Sums by token on the last two diagonals, with a column before the first token, where a path begins.
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
    """Return the running median over the last axis, its ends mirrored."""
    pad = width // 2
    if values.shape[-1] <= pad:
        return values
    return F.pad(values, (pad, pad), mode="reflect").unfold(-1, width, 1).median(-1).values


CHECKED_STEPS = 16
REACH_STEP = 64
"""Multiple to which the positions that a step attends to are rounded up; each multiple has a graph."""
MIN_GRAPH_WINDOWS = 4
"""Smallest number of windows of a graph; larger ones are its doublings."""

AttendSelf = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Self-attention of a layer, given its number, queries, keys and values."""


def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return attention (..., heads, queries, size) and its weights; queries are scaled already."""
    scores = queries @ keys.transpose(-1, -2)
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return weights @ values, weights


class WhisperDecoder:
    """Decoder of a Whisper of transformers, working on caches of the caller."""

    def __init__(self, model: Any) -> None:
        self._decoder, self._head = model.model.decoder, model.proj_out
        self._heads: int = model.config.decoder_attention_heads

    def new_cache(self, windows: int, *length: int) -> Tensor:
        """Return zeros (layers, keys and values, windows, heads, *length, size of a head)."""
        weight: Tensor = self._head.weight
        shape = len(self._decoder.layers), 2, windows, self._heads, *length, weight.shape[1] // self._heads
        return weight.new_zeros(shape)

    def cache_audio(self, encoded: Tensor, cache: Tensor) -> Tensor:
        """Write the keys and values of the encoded audio into a cache."""
        for layer, (keys, values) in zip(self._decoder.layers, cache, strict=True):
            keys.copy_(self._by_head(layer.encoder_attn.k_proj(encoded)))
            values.copy_(self._by_head(layer.encoder_attn.v_proj(encoded)))
        return cache

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        audio: Tensor,
        attend_self: AttendSelf,
        watch: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Return the last hidden states of tokens (windows, n); `watch` receives each layer's attention to the
        audio."""
        hidden = self._decoder.embed_tokens(tokens) + self._decoder.embed_positions.weight[positions]
        for index, layer in enumerate(self._decoder.layers):
            module, states = layer.self_attn, layer.self_attn_layer_norm(hidden)
            queries, keys, values = (
                self._by_head(projected)
                for projected in (module.q_proj(states) * module.scaling, module.k_proj(states), module.v_proj(states))
            )
            hidden = hidden + module.out_proj(_joined(attend_self(index, queries, keys, values)))
            module, states = layer.encoder_attn, layer.encoder_attn_layer_norm(hidden)
            heard, weights = attend(self._by_head(module.q_proj(states) * module.scaling), *audio[index])
            if watch is not None:
                watch(index, weights)
            hidden = hidden + module.out_proj(_joined(heard))
            hidden = hidden + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(hidden))))
        normalised: Tensor = self._decoder.layer_norm(hidden)
        return normalised

    def logits(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self._head(hidden)
        return scores

    def _by_head(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:2], self._heads, -1).transpose(1, 2)


def _joined(states: Tensor) -> Tensor:
    return states.transpose(1, 2).flatten(2)


class SpecialTokens(NamedTuple):
    """Numbers of special tokens: tokens before the end are text, and those from `first_time` on are times."""

    end: int
    first_time: int
    vocabulary: int


class BeamSearch:
    """Beam search over a fixed number of windows, with its caches.

    Keys and values stay in the slot of their position and beam. All beams of a window attend to the slots of all, each
    restricted to the slots that hold its own past.
    """

    def __init__(
        self, decoder: WhisperDecoder, special: SpecialTokens, windows: int, beams: int, positions: int, frames: int
    ) -> None:
        self._decoder, self._special, self.windows = decoder, special, windows
        self.positions = _reach(positions - 1)
        self._slots = decoder.new_cache(windows, self.positions, beams)
        self._audio = decoder.new_cache(windows, frames)
        zeros = partial(torch.zeros, device=self._slots.device)
        self._visible = zeros((windows, beams, self.positions, beams), dtype=torch.bool)
        self._own_slot = torch.eye(beams, dtype=torch.bool, device=self._slots.device)[:, None]
        self._position, self._count, self._limit = (zeros(1, dtype=torch.long) for _ in range(3))
        self._suppressed = zeros(special.vocabulary)
        self._moments = torch.arange(special.vocabulary - special.first_time, device=self._slots.device)
        # Per beam: its last token, all written tokens, the sum of their log probabilities, and its times.
        self._token, self._latest = (zeros((windows, beams), dtype=torch.long) for _ in range(2))
        self._written = zeros((windows, beams, self.positions), dtype=torch.long)
        self._score = zeros((windows, beams))
        self._is_time, self._was_time = (zeros((windows, beams), dtype=torch.bool) for _ in range(2))
        # Finished hypotheses, the best first by their mean log probability.
        self._ended, self._ended_score = torch.zeros_like(self._written), torch.zeros_like(self._score)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def __call__(
        self, encoded: Tensor, prompts: Tensor, *, max_tokens: int, suppressed: Tensor, last_initial_time: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens of the best hypothesis of each window, its mean log probability including the end, and the
        logits after the first token of the prompt."""
        self._decoder.cache_audio(encoded, self._audio)
        for state in (self._slots, self._visible, self._position, self._count, self._suppressed):
            state.zero_()
        self._suppressed[suppressed] = -torch.inf
        self._limit.fill_(max_tokens)
        self._latest.fill_(-1)
        self._is_time.fill_(True)  # the first time counts as the end of a pair: text comes next
        self._written.fill_(self._special.end)
        self._score.fill_(-torch.inf)[:, 0] = 0
        self._ended_score.fill_(-torch.inf)
        logits = []
        for position, tokens in enumerate(prompts.T):
            self._token.copy_(tokens[:, None].expand_as(self._token))
            logits.append(self._next_logits(_reach(position)))
        self._choose(logits[-1], last_initial_time)
        for count in range(1, max_tokens):
            if count % CHECKED_STEPS == 0 and bool(self._ended_score.isfinite().all()):
                break
            self._step(_reach(prompts.shape[1] + count - 1))
        return self._ended[:, 0, :max_tokens], self._ended_score[:, 0], logits[0][:, 0].float()

    def _step(self, reach: int) -> None:
        if self._slots.device.type != "cuda":
            self._choose(self._next_logits(reach))
        elif reach in self._graphs:
            self._graphs[reach].replay()
        else:  # the first step runs eagerly, which loads its kernels; the next is recorded
            device = self._slots.device
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                self._choose(self._next_logits(reach))
            torch.cuda.current_stream(device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._choose(self._next_logits(reach))
            self._graphs[reach], self._pool = graph, graph.pool()

    def _next_logits(self, reach: int) -> Tensor:
        """Return the logits after the last token of each beam; write its keys and values, and move the position on."""
        self._visible.index_copy_(2, self._position, self._own_slot.expand(self.windows, -1, -1, -1))
        visible = self._visible[:, None, :, :reach].flatten(3)
        bias = torch.zeros_like(visible, dtype=self._slots.dtype).masked_fill_(~visible, -torch.inf)

        def attend_self(layer: int, queries: Tensor, *new: Tensor) -> Tensor:
            for cache, states in zip(self._slots[layer], new, strict=True):
                cache.index_copy_(2, self._position, states[:, :, None])
            keys, values = (cache[:, :, :reach].flatten(2, 3) for cache in self._slots[layer])
            return attend(queries, keys, values, bias)[0]

        logits = self._decoder.logits(self._decoder(self._token, self._position, self._audio, attend_self))
        self._position += 1
        return logits

    def _choose(self, logits: Tensor, last_initial_time: int | None = None) -> None:
        """Choose the next token of each beam; the first must be a time, at most `last_initial_time`."""
        special, beams = self._special, self._score.shape[1]
        scores = logits.log_softmax(-1, dtype=torch.float32) + self._suppressed
        opened, closed = self._is_time & ~self._was_time, self._is_time & self._was_time
        if last_initial_time is None:
            # The end of a segment may equal its start; the next start may not equal the last end.
            earliest = torch.where(opened, self._latest, self._latest + 1)
            no_time = closed[..., None] | (self._moments < earliest[..., None])
            no_text, no_end = opened, torch.zeros_like(opened)
        else:
            no_time = (self._moments > last_initial_time).expand(*opened.shape, -1)
            no_text = no_end = torch.ones_like(opened)
        times = scores[..., special.first_time :].masked_fill(no_time, -torch.inf)
        # Best tokens of each kind: no further ones of a beam can be among the best of its window.
        text_top, end_top, time_top = (
            kind.topk(min(2 * beams, kind.shape[-1]))
            for kind in (scores[..., : special.end], scores[..., special.end : special.first_time], times)
        )
        text = text_top.values.masked_fill(no_text[..., None], -torch.inf)
        ends = end_top.values.masked_fill(no_end[..., None], -torch.inf)
        prefers_time = times.logsumexp(-1, keepdim=True) > torch.maximum(text[..., :1], ends[..., :1])
        kinds = (
            text.masked_fill(prefers_time, -torch.inf),
            ends.masked_fill(prefers_time, -torch.inf),
            time_top.values,
        )
        tokens = torch.cat((text_top.indices, end_top.indices + special.end, time_top.indices + special.first_time), -1)
        totals = torch.cat(kinds, -1) + self._score[..., None]
        best, places = totals.flatten(1).topk(2 * beams)
        self._take(best, places // totals.shape[-1], tokens.flatten(1).gather(1, places))

    def _take(self, score: Tensor, parents: Tensor, tokens: Tensor) -> None:
        """Continue with the best candidates (windows, twice the beams), and keep the first half's finished ones."""
        special, beams = self._special, self._score.shape[1]
        written = _pick(self._written, parents).index_copy_(2, self._count, tokens[..., None])
        self._count += 1
        over = (tokens == special.end) | (self._count >= self._limit)
        is_full = self._ended_score.isfinite().all(1, keepdim=True)
        ended = (score / self._count).masked_fill(~over | is_full, -torch.inf)[:, :beams]
        best, places = torch.cat((self._ended_score, ended), 1).topk(beams)
        self._ended_score.copy_(best)
        self._ended.copy_(_pick(torch.cat((self._ended, written[:, :beams]), 1), places))
        best, places = score.masked_fill(over, -torch.inf).topk(beams)
        parents, tokens = parents.gather(1, places), tokens.gather(1, places)
        self._score.copy_(best)
        self._token.copy_(tokens)
        self._written.copy_(_pick(written, places))
        self._visible.copy_(_pick(self._visible, parents))
        self._was_time.copy_(self._is_time.gather(1, parents))
        self._is_time.copy_(tokens >= special.first_time)
        latest = self._latest.gather(1, parents)
        self._latest.copy_(torch.where(self._is_time, tokens - special.first_time, latest))


def _reach(position: int) -> int:
    return (position // REACH_STEP + 1) * REACH_STEP


def _pick(states: Tensor, beams: Tensor) -> Tensor:
    """Pick (windows, chosen, ...) from states (windows, beams, ...)."""
    return states.take_along_dim(beams.reshape(*beams.shape, *[1] * (states.ndim - 2)), 1)
