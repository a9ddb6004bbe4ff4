"""Answers: greedy decoding, which may be constrained to a grammar and is then complete within its token budget.

llguidance masks the tokens that cannot continue the grammar. It has no budget, so every chosen token is checked here:
if it would leave fewer tokens than the shortest completion takes, a token of that completion replaces it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from myna.core.errors import ModelError
from myna.models.attention import KVCache, padded_causal_attention
from myna.models.phi4.batch import Phi4Batch
from myna.models.phi4.forward import RotaryTables, compute_dtype, embed, run_layer

CLOSING_BYTES = b'"},:50'
"""Bytes that lead to the end of a JSON object soonest, in order of preference. If none of them is allowed, the smallest
byte that is no blank is used: the next letter of a key, or the rest of a character."""
LONGEST_DETOUR_BYTES = 16
"""Bytes by which a completion may exceed that of an empty answer: an escape or a character that has begun."""

Mask = npt.NDArray[np.bool_]


class TokenGrammar:
    """Lark grammar compiled for one tokenizer and a head of `vocab_size` logits."""

    def __init__(self, lark: str, tokenizer: Any, eos_ids: Sequence[int], vocab_size: int) -> None:
        try:
            from llguidance import LLMatcher, LLTokenizer
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise ModelError(
                "constrained decoding needs llguidance, which is not installed",
                hint='pip install "myna[answer]", or leave --constrained out',
            ) from None
        self.lark, self.eos_ids, self.vocab_size = lark, tuple(eos_ids), vocab_size
        try:
            self.tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_ids))
        except ValueError as error:
            raise ModelError(
                f"llguidance cannot read this tokenizer: {error}", hint="leave --constrained out"
            ) from None
        grammar = LLMatcher.grammar_from_lark(lark)
        self.token_matcher = LLMatcher(self.tokenizer, grammar)
        self.byte_matcher = LLMatcher(LLTokenizer("byte"), grammar)
        if self.token_matcher.is_error():
            raise ModelError(f"llguidance refuses the grammar: {self.token_matcher.get_error()}", hint="report this")
        # A tokenizer may list control tokens as plain text.
        control_ids = set(tokenizer.get_added_vocab().values()) - set(eos_ids)
        self.is_text = np.isin(np.arange(vocab_size), list(control_ids), invert=True)
        closing = _closing_bytes(self.byte_matcher)
        self.completion = self.tokenize(closing)
        """Tokens of the shortest answer."""
        self.max_completion = len(closing) + LONGEST_DETOUR_BYTES

    def tokenize(self, text: bytes) -> list[int]:
        """Split a completion by longest match, which takes fewer tokens than the tokenizer's own merges may."""
        text_start = next(index for index, byte in enumerate((*text, 0)) if byte < 0x80)  # after a cut character
        ids: list[int] = self.tokenizer.tokenize_bytes(text[:text_start])
        ids += self.tokenizer.greedy_tokenize(text[text_start:].decode())
        if self.tokenizer.decode_bytes(ids) != text:
            raise ModelError(
                f"the tokenizer has no token for some of {text.decode(errors='replace')!r}, without which no answer "
                "can be closed",
                hint="leave --constrained out",
            )
        return ids


class ConstrainedDecoder:
    """Greedy decoding of a batch of answers, each of which follows the grammar and ends within `max_tokens`."""

    def __init__(self, grammar: TokenGrammar, batch_size: int, max_tokens: int) -> None:
        fewest = len(grammar.completion) + 1
        if max_tokens < fewest:
            raise ModelError(
                f"no answer can be closed within {max_tokens} tokens", hint=f"--max-tokens {fewest} or more"
            )
        self.answers = [_Answer(grammar) for _ in range(batch_size)]
        self.tokens_left = max_tokens

    def choose(self, logits: torch.Tensor) -> list[int]:
        """Return the likeliest allowed token of each answer, (answers, vocabulary); any token if the answer ended."""
        masks = torch.from_numpy(np.stack([answer.mask() for answer in self.answers])).to(logits.device)
        likeliest = logits.masked_fill(~masks, -torch.inf).argmax(-1).tolist()
        self.tokens_left -= 1
        return [answer.accept(id, self.tokens_left) for answer, id in zip(self.answers, likeliest, strict=True)]


class _Answer:
    """State of one answer. Its completion is kept only while the budget may be too small for it."""

    def __init__(self, grammar: TokenGrammar) -> None:
        self.grammar, self.completion, self.ended = grammar, grammar.completion, False
        self.tokens, self.bytes = grammar.token_matcher.deep_copy(), grammar.byte_matcher.deep_copy()

    def mask(self) -> Mask:
        if self.ended:
            return np.ones(self.grammar.vocab_size, np.bool_)
        return _allowed(self.tokens, self.grammar.vocab_size) & self.grammar.is_text

    def accept(self, id: int, tokens_left: int) -> int:
        """Append a token, or the first token of the completion if too few would be left, and return it."""
        if self.ended:
            return id
        if id not in self.grammar.eos_ids:
            after = self._bytes_after(id)
            if tokens_left <= self.grammar.max_completion:
                completion = self.grammar.tokenize(_closing_bytes(after))
                if len(completion) < tokens_left:
                    self.completion = completion
                elif self.completion:
                    id, *self.completion = self.completion
                    after = self._bytes_after(id)
                else:
                    id = self.grammar.eos_ids[0]
            self.bytes = after
        self.ended = id in self.grammar.eos_ids
        if not self.ended:
            _consume(self.tokens, [id])
        return id

    def _bytes_after(self, id: int) -> Any:
        matcher = self.bytes.deep_copy()
        _consume(matcher, list(self.grammar.tokenizer.decode_bytes([id])))
        return matcher


def _consume(matcher: Any, ids: list[int]) -> None:
    if not matcher.consume_tokens(ids):
        raise AssertionError(f"a token was chosen that may not come: {matcher.get_error().partition('<')[0]}")


def _closing_bytes(matcher: Any) -> bytes:
    """Return the shortest text that completes what a byte-level matcher has consumed."""
    matcher, text = matcher.deep_copy(), bytearray()
    while not matcher.is_accepting():
        allowed = np.flatnonzero(_allowed(matcher, 256)).tolist()
        text.append(next(byte for byte in (*CLOSING_BYTES, *allowed) if byte in allowed and byte > ord(" ")))
        _consume(matcher, [text[-1]])
    return bytes(text)


def _allowed(matcher: Any, vocab_size: int) -> Mask:
    packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(packed, count=vocab_size, bitorder="little").astype(np.bool_)


@torch.inference_mode()
def generate(
    core: Any, batch: Phi4Batch, eos_ids: tuple[int, ...], max_tokens: int, decoder: ConstrainedDecoder | None = None
) -> list[tuple[list[int], bool]]:
    """Generate ids for each prompt, and return them with whether an end token came. They do not depend on the batch."""
    cache, device = KVCache(len(core.model.layers), batch.lengths), batch.ids.device
    hidden = _prefill(core, batch, cache)
    generated: list[list[int]] = [[] for _ in batch.lengths]
    stopped = [False] * len(generated)
    for _ in range(max_tokens):
        logits = core.lm_head(core.model.norm(hidden).to(compute_dtype(core))).float()
        if not logits.isfinite().all():
            raise ModelError(
                "the model's logits are not finite, so no answer can be read from them",
                hint="check its weights with `myna verify`; a GPU without bf16 may overflow in fp16: --device cpu",
            )
        chosen = logits.argmax(-1).tolist() if decoder is None else decoder.choose(logits)
        for number, id in enumerate(chosen):
            stopped[number] = stopped[number] or id in eos_ids
            if not stopped[number]:
                generated[number].append(id)
        if all(stopped):
            break
        hidden = _step(core, torch.tensor(chosen, device=device), cache)
    return list(zip(generated, stopped, strict=True))


def _prefill(core: Any, batch: Phi4Batch, cache: KVCache) -> torch.Tensor:
    """Return the residual stream at each prompt's last position."""
    stream, rotary = embed(core, batch), RotaryTables.at(core, batch.position_ids)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache.prefill(layer, k, v)
        return padded_causal_attention(q, k, v, batch.padded_at, batch.lengths)

    for layer in core.model.layers:
        stream = run_layer(layer, stream, rotary, attend, compute_dtype(core))
    last = torch.tensor(batch.lengths, device=stream.device).cumsum(0) - 1
    return stream[last]


def _step(core: Any, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
    stream: torch.Tensor = core.model.embed_tokens(ids).float()
    rotary = RotaryTables.at(core, cache.lengths.to(ids.device))

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return cache.attend(q, *cache.append(layer, k, v))

    for layer in core.model.layers:
        stream = run_layer(layer, stream, rotary, attend, compute_dtype(core))
    cache.lengths += 1
    return stream
