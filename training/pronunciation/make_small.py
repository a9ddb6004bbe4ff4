"""A small Phi-4-multimodal with random weights, to be taught by the learners of `learner_corpus.py` alone.

python training/pronunciation/make_small.py --answers data/learners/train/scores.jsonl --out data/learners/model

Its classes are the true model's. Its tokenizer is made of the answers it is to give: nearly every word, every phone and
every score is one token, as most are in the true one. In bytes an answer would be three times as long, and what stands
behind 80 ms of sound would be spelt in letters.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from myna.data.pronunciation.assessment import QUESTION, read_assessment
from myna.errors import ModelError, MynaError
from myna.models.phi4.render import SYSTEM
from myna.models.phi4.tiny import SPECIAL_TOKENS, save_tiny

HIDDEN, LAYERS, BLOCKS, CHANNELS = 384, 6, 6, 32
TOKENS = 1024
"""Of the tokenizer at most; the special ones come on top."""
LINES = 5000
"""That it is made of: in so many every word and every phone comes often."""


def said(answers: Path) -> Iterator[str]:
    """All that the model reads and writes, each line of the corpus for itself."""
    with answers.open(encoding="utf-8") as lines:
        for line in map(json.loads, islice(lines, LINES)):
            yield f"{SYSTEM} {QUESTION}"
            yield read_assessment({key: line[key] for key in ("text", "scores", "words")}).answer.to_json()


def make_tokenizer(answers: Path) -> PreTrainedTokenizerFast:
    """Pairs of bytes that come often become tokens, never across words."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(
        said(answers), trainers.BpeTrainer(vocab_size=TOKENS, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_special_tokens(list(SPECIAL_TOKENS))
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), SPECIAL_TOKENS[0])
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **ends)


def make(answers: Path, out: Path, seed: int, hidden: int, layers: int, blocks: int, channels: int) -> None:
    if out.exists():
        raise ModelError(f"{out} is there already", hint="name another folder with --out")
    tokenizer = make_tokenizer(answers)
    save_tiny(
        out, seed=seed, tokenizer=tokenizer, hidden=hidden, layers=layers, blocks=blocks, channels=channels, tied=True
    )
    print(
        f"{out}: {layers} layers of {hidden} that answer, {blocks} of {hidden // 2} that hear, all random; "
        f"{len(tokenizer)} tokens"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True, help="scores.jsonl of the part to learn from")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="width of the layers that answer")
    parser.add_argument("--layers", type=int, default=LAYERS, help="how many answer")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="how many hear, half as wide")
    parser.add_argument("--channels", type=int, default=CHANNELS, help="of the convolutions before those")
    asked = parser.parse_args()
    try:
        make(asked.answers, asked.out, asked.seed, asked.hidden, asked.layers, asked.blocks, asked.channels)
    except MynaError as error:
        sys.exit(f"{error.what}\n  → {error.hint}")


if __name__ == "__main__":
    main()
