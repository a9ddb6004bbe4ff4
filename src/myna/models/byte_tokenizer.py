"""Byte-level tokenizer for small models of any family."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(special_tokens: Sequence[str], *, begin: str, end: str, pad: str) -> PreTrainedTokenizerFast:
    """256 bytes and the special tokens behind them: any text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(special_tokens))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=begin, eos_token=end, pad_token=pad, clean_up_tokenization_spaces=False
    )
