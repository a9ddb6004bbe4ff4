"""Beam search of Whisper that stays on its device: a step is one CUDA graph, and the host waits for it once in 16.

It chooses what transformers' beam search chooses with early stopping, a length penalty of 1, and Whisper's rules for
times: in pairs, never back, and a time where times together are more probable than any text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHECKED_STEPS = 16
REACH_STEP = 64
"""A step attends to positions up to a multiple of it; each has a graph."""
MIN_GRAPH_WINDOWS = 4
"""Graphs are for so many windows, twice as many, and so on."""

AttendSelf = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of the tokens of a layer among themselves, by its queries, keys and values."""


def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention (..., heads, queries, size), and its weights; queries are scaled already."""
    scores = queries @ keys.transpose(-1, -2)
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return weights @ values, weights


class WhisperDecoder:
    """Decoder of a Whisper of transformers, over caches of the caller."""

    def __init__(self, model: Any) -> None:
        self._decoder, self._head = model.model.decoder, model.proj_out
        self._heads: int = model.config.decoder_attention_heads

    def new_cache(self, windows: int, *length: int) -> Tensor:
        """Zeros (layers, keys and values, windows, heads, *length, size of a head)."""
        weight: Tensor = self._head.weight
        shape = len(self._decoder.layers), 2, windows, self._heads, *length, weight.shape[1] // self._heads
        return weight.new_zeros(shape)

    def cache_audio(self, encoded: Tensor, cache: Tensor) -> Tensor:
        """Write into a cache what tokens attend to in the encoded audio."""
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
        """Last hidden states of tokens (windows, n); `watch` is given the attention to the audio in each layer."""
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
    """Tokens before the end are text, and those from `first_time` on are times."""

    end: int
    first_time: int
    vocabulary: int


class BeamSearch:
    """Beam search over a number of windows, with its caches. Keys and values stay where they were written, in the slot
    of a position and a beam: all beams of a window attend to the slots of all, each to those that hold its own past."""

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
        # Of each beam: its last token, all that it wrote, the sum of their log-probabilities, and its times.
        self._token, self._latest = (zeros((windows, beams), dtype=torch.long) for _ in range(2))
        self._written = zeros((windows, beams, self.positions), dtype=torch.long)
        self._score = zeros((windows, beams))
        self._is_time, self._was_time = (zeros((windows, beams), dtype=torch.bool) for _ in range(2))
        # Of hypotheses that ended: the best first, by their mean log-probability.
        self._ended, self._ended_score = torch.zeros_like(self._written), torch.zeros_like(self._score)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def __call__(
        self, encoded: Tensor, prompts: Tensor, *, max_tokens: int, suppressed: Tensor, last_initial_time: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of the best hypothesis of each window, their mean log-probability with the end, and the logits after
        the first token of the prompt."""
        self._decoder.cache_audio(encoded, self._audio)
        for state in (self._slots, self._visible, self._position, self._count, self._suppressed):
            state.zero_()
        self._suppressed[suppressed] = -torch.inf
        self._limit.fill_(max_tokens)
        self._latest.fill_(-1)
        self._is_time.fill_(True)  # so that the first time counts as the second of a pair, and text follows it
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
        else:  # a first step is done, which loads its kernels, and then recorded for the next
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
        """After the last token of each beam, whose keys and values are written at the position, which moves on."""
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
        """The next token of each beam; the first must be a time, not after `last_initial_time`."""
        special, beams = self._special, self._score.shape[1]
        scores = logits.log_softmax(-1, dtype=torch.float32) + self._suppressed
        opened, closed = self._is_time & ~self._was_time, self._is_time & self._was_time
        if last_initial_time is None:
            # The end of a segment may be its start, the next start not the last end.
            earliest = torch.where(opened, self._latest, self._latest + 1)
            no_time = closed[..., None] | (self._moments < earliest[..., None])
            no_text, no_end = opened, torch.zeros_like(opened)
        else:
            no_time = (self._moments > last_initial_time).expand(*opened.shape, -1)
            no_text = no_end = torch.ones_like(opened)
        times = scores[..., special.first_time :].masked_fill(no_time, -torch.inf)
        # The best of each kind: no more of a beam can be among the best of its window.
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
        """Go on with the best of candidates (windows, twice the beams), and keep those of the first half that end."""
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
    """(windows, chosen, ...) of states (windows, beams, ...)."""
    return states.take_along_dim(beams.reshape(*beams.shape, *[1] * (states.ndim - 2)), 1)
