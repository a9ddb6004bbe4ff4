"""Texts of a dataset: characters against a tokenizer, digits, repeated sentences, and two transcripts as a diff."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from rapidfuzz.distance import Levenshtein

from myna.text.normalization import UNSPACED, alphanumeric, base_language

GRAPHEME_TEXTS = 20_000
"""Texts whose grapheme clusters and tokens are counted; of more, every so manieth."""
SHOWN_CHARACTERS = 400
RARE_COUNT = 5
"""Clips, or fewer, in which a rare character occurs."""
REPEATED = 20
"""Repeated sentences that are shown."""


class DiffPiece(NamedTuple):
    """A stretch of two texts: equal, or with words of one, the other or both."""

    equal: str
    first: str
    second: str


def text_diff(first: str, second: str, language: str) -> list[DiffPiece]:
    """Two texts word by word, or character by character where words are not spaced. Case and punctuation are equal."""
    is_spaced = base_language(language) not in UNSPACED
    texts = [text.split() if is_spaced else list(text) for text in (first, second)]
    keys = [[alphanumeric(word) or word for word in words] for words in texts]
    glue = " " if is_spaced else ""
    pieces = []
    for step in Levenshtein.opcodes(*keys):
        left = glue.join(texts[0][step.src_start : step.src_end])
        right = glue.join(texts[1][step.dest_start : step.dest_end])
        pieces.append(DiffPiece(left, "", "") if step.tag == "equal" else DiffPiece("", left, right))
    return pieces


def text_summary(texts: Sequence[str], spoken: Sequence[str], tokenizer: Any = None) -> dict[str, Any]:
    """Characters of the kept texts; `spoken` are the same texts as they are read aloud."""
    import regex  # type: ignore[import-untyped]

    characters: Counter[str] = Counter()
    clips: Counter[str] = Counter()
    for text in texts:
        characters.update(text)
        clips.update(set(text))
    step = max(1, -(-len(texts) // GRAPHEME_TEXTS))
    graphemes = Counter(cluster for text in texts[::step] for cluster in regex.findall(r"\X", text))
    combined = {cluster: count for cluster, count in graphemes.items() if len(cluster) > 1}
    keys = [alphanumeric(text) for text in texts]
    sentences = Counter(filter(None, keys))
    repeated = {key: count for key, count in sentences.most_common(REPEATED) if count > 1}
    originals = {key: text for key, text in zip(keys, texts, strict=True) if key in repeated}
    coverage = None if tokenizer is None else tokenizer_coverage(characters, texts[::step], tokenizer)
    common = characters.most_common(SHOWN_CHARACTERS)
    return {
        "texts": len(texts),
        "characters": sum(characters.values()),
        "distinct": len(characters),
        "common": [
            {"character": one, "name": unicodedata.name(one, f"U+{ord(one):04X}"), "count": count, "clips": clips[one]}
            for one, count in common
            if not one.isspace()
        ],
        "rare": sorted(one for one, count in clips.items() if count <= RARE_COUNT and not one.isspace()),
        "graphemes": {
            "texts": len(texts[::step]),
            "distinct": len(graphemes),
            "combined": sorted(combined, key=lambda one: -combined[one])[:SHOWN_CHARACTERS],
        },
        "digit_texts": sum(any(map(str.isdecimal, text)) for text in texts),
        "digit_texts_spoken": sum(any(map(str.isdecimal, text)) for text in spoken),
        "repeated_texts": sum(count - 1 for count in sentences.values()),
        "repeated": [{"text": originals[key], "clips": count} for key, count in repeated.items()],
        "coverage": None
        if coverage is None
        else coverage._asdict() | {"lost_clips": sum(not set(coverage.lost).isdisjoint(text) for text in texts)},
    }


class TokenizerCoverage(NamedTuple):
    """How a tokenizer takes the characters of texts."""

    lost: list[str]
    """Characters that do not come back as they went in; their case may change."""
    split: dict[str, int]
    """Characters that take several tokens, such as the bytes that spell them, and how many; the commonest first."""
    split_share: float
    """Of all characters of the texts."""
    tokens_per_character: float


def tokenizer_coverage(characters: Counter[str], texts: Sequence[str], tokenizer: Any) -> TokenizerCoverage:
    """Compare characters, by their counts, and whole texts with a tokenizer of transformers."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    lost, split = [], {}
    for one, _ in characters.most_common():
        back = tokenizer.decode(encode(f"a{one}a"), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        tokens = len(encode(f"a{one}")) - len(encode("a"))
        if one.casefold() not in back.casefold():
            lost.append(one)
        elif tokens > 1:
            split[one] = tokens
    split_count, length = sum(characters[one] for one in split), sum(map(len, texts))
    tokens = sum(len(encode(text)) for text in texts)
    return TokenizerCoverage(sorted(lost), split, split_count / max(1, characters.total()), tokens / max(1, length))
