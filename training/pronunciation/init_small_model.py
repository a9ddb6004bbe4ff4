"""Small Phi-4-multimodal with random weights, for training on the simulated learners of `learner_corpus.py` alone.

python training/pronunciation/init_small_model.py --answers data/learners/train/scores.jsonl --out data/learners/model

Its classes are those of the full model. Its tokenizer is trained on the answers: nearly every word, phone and score is
one token, as in the full model. In bytes an answer would be three times as long.
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

from myna.core.errors import ModelError, MynaError
from myna.data.pronunciation import DEFAULT_QUESTION, read_assessment
from myna.models.phi4.tiny import SPECIAL_TOKENS, save_tiny

HIDDEN, LAYERS, BLOCKS, CHANNELS = 384, 6, 6, 32
MAX_VOCABULARY = 1024
"""Maximum number of tokens, without special ones."""
TOKENIZER_LINES = 5000
"""Lines that the tokenizer is trained on: in so many every word and every phone is frequent."""


def training_texts(answers: Path) -> Iterator[str]:
    """Prompts and answers of the corpus, line by line."""
    with answers.open(encoding="utf-8") as lines:
        for line in map(json.loads, islice(lines, TOKENIZER_LINES)):
            yield DEFAULT_QUESTION
            yield read_assessment({key: line[key] for key in ("text", "scores", "words")}).answer.to_json()


def make_tokenizer(answers: Path) -> PreTrainedTokenizerFast:
    """Pairs of bytes that come often become tokens, never across words."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(
        training_texts(answers),
        trainers.BpeTrainer(vocab_size=MAX_VOCABULARY, initial_alphabet=alphabet, show_progress=False),
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
        f"{out}: {layers} decoder layers of {hidden}, {blocks} encoder blocks of {hidden // 2}, random weights; "
        f"{len(tokenizer)} tokens"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True, help="scores.jsonl of the training part")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="width of the decoder")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the decoder")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of the audio encoder, half as wide")
    parser.add_argument("--channels", type=int, default=CHANNELS, help="of the encoder's first convolutions")
    args = parser.parse_args()
    try:
        make(args.answers, args.out, args.seed, args.hidden, args.layers, args.blocks, args.channels)
    except MynaError as error:
        sys.exit(f"{error.what}\n  → {error.hint}")


if __name__ == "__main__":
    main()
