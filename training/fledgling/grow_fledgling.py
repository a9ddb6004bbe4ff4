"""Initial checkpoint of a larger fledgling with another codec, from the weights of a trained one.

python training/fledgling/grow_fledgling.py --from src/myna/models/fledgling --codec runs/voices/codec/codec \\
    --speech data/fledgling/en-natural --out data/fledgling/grown

A model that has learned to read should not learn it again. New rows and columns begin near zero, so that the larger
model says what the smaller one said; layers beyond the old ones begin without effect. Clips of `--speech` are encoded
by both codecs. Embeddings of the new codes are fitted to those of the old codes of the same frames (ridge regression on
the delayed sequences), and a row of the new head is the mean of the old rows that occur with its code.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import track
from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration

from codec_training.recordings import decode, recordings
from corpus_making.held_out import is_held_out
from init_fledgling import SIZE, Size, fledgling_config
from myna.core.errors import DataError, MynaError
from myna.data.codec import Codes
from myna.models.files import load_tokenizer
from myna.models.higgs_v2.checkpoint import load_weights, read_config, read_sampling, save_checkpoint
from myna.models.higgs_v2.render import DelayPattern
from myna.models.mel_codec import MelCodec

NEW_WEIGHT_DEVIATION = 0.005
"""Standard deviation of new weights: a quarter of what random initialization has."""
RIDGE = 3.0
SMOOTHING = 2.0
"""Counts that are added to each new code's most general row, the mean of all old ones."""
EMBEDDING, HEAD = "model.embed_audio_tokens.embed_audio_tokens.weight", "audio_lm_head.weight"

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """Codes of one clip by two codecs."""

    old: Codes
    new: Codes


def encoded_pairs(speech: Iterable[Path], old: MelCodec, new: MelCodec, limit: int) -> Iterator[EncodedPair]:
    """Yield at most `limit` clips of each source, spread over it, of speakers that are not held out."""
    for source in speech:
        found = [one for one in recordings(source) if not is_held_out(one.speaker)]
        if not found:
            raise DataError(f"{source} has no clips to learn from", hint="name folders of parquet files")
        for one in track(found[:: max(1, len(found) // limit)], source.name):
            samples = decode(one.data, new.sample_rate)
            samples = samples[: len(samples) // new.hop * new.hop]
            if len(samples):
                yield EncodedPair(old.encode(samples[None])[0], new.encode(samples[None])[0])


def widened(state: State, old: HiggsAudioV2Config, config: HiggsAudioV2Config, seed: int) -> State:
    """The weights in tensors of a larger configuration: the same function, but for small random numbers."""
    torch.manual_seed(seed)
    made: State = HiggsAudioV2ForConditionalGeneration(config).state_dict()
    norm = (old.hidden_size / config.hidden_size) ** 0.5  # of more numbers, of which the new ones are nearly zero
    for name, fresh in made.items():
        if name not in state:  # a layer beyond the old ones: its outputs begin at zero
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                fresh.zero_()
            continue
        known = state[name]
        if fresh.ndim == 1:
            fresh[: len(known)] = known * norm
            continue
        fresh.normal_(0, NEW_WEIGHT_DEVIATION)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            fresh[:, known.shape[1] :] = 0  # new heads and units have no effect yet
        fresh[: known.shape[0], : known.shape[1]] = known
    return made


def translated_embedding(weight: torch.Tensor, pairs: list[EncodedPair], delay: DelayPattern) -> torch.Tensor:
    """Embeddings of the new codes whose sum over codebooks is that of the old ones, as nearly as codes tell."""
    old, new = (
        torch.from_numpy(np.concatenate([delay.apply(codes) for codes in both]).astype(np.int64))
        for both in zip(*_sides(pairs), strict=True)
    )
    entries = len(weight) // delay.codebooks
    offsets = torch.arange(delay.codebooks) * entries
    targets = weight.float()[old + offsets].sum(1)
    gram = torch.zeros(len(weight), len(weight), dtype=torch.float64)
    for one in range(delay.codebooks):
        for other in range(delay.codebooks):
            together = torch.bincount(new[:, one] * entries + new[:, other], minlength=entries**2)
            rows, columns = (slice(book * entries, (book + 1) * entries) for book in (one, other))
            gram[rows, columns] = together.reshape(entries, entries).double()
    gram.diagonal().add_(RIDGE)
    moments = torch.zeros(weight.shape, dtype=torch.float64)
    moments.index_add_(0, (new + offsets).flatten(), targets.double().repeat_interleave(delay.codebooks, 0))
    return torch.cholesky_solve(moments, torch.linalg.cholesky(gram)).float()


def _sides(pairs: list[EncodedPair]) -> Iterator[tuple[Codes, Codes]]:
    return ((pair.old, pair.new) for pair in pairs)


def translated_head(weight: torch.Tensor, pairs: list[EncodedPair], delay: DelayPattern) -> torch.Tensor:
    """Rows of the new codes: means of the old rows, weighted by how often both occur in one frame."""
    entries = len(weight) // delay.codebooks
    rows = weight.float().clone()
    old, new = np.concatenate([pair.old for pair in pairs]), np.concatenate([pair.new for pair in pairs])
    for book in range(delay.codebooks):
        counts: npt.NDArray[np.float32] = np.zeros((delay.begin, delay.begin), np.float32)
        np.add.at(counts, (new[:, book], old[:, book]), 1)
        prior = counts.sum(0) / counts.sum()
        shares = torch.from_numpy((counts + SMOOTHING * prior) / (counts.sum(1, keepdims=True) + SMOOTHING))
        first = book * entries
        rows[first : first + delay.begin] = shares @ weight[first : first + delay.begin].float()
    return rows


def grow(source: Path, codec: Path, pairs: list[EncodedPair], out: Path, size: Size = SIZE, seed: int = 0) -> int:
    """Write the checkpoint; how many parameters it has."""
    old = read_config(source)
    config = fledgling_config(size, codebook_size=old.codebook_size - 2)
    if (config.head_dim, old.num_attention_heads // old.num_key_value_heads) != (old.head_dim, size.heads // size.keys):
        raise DataError("heads must keep their size and share of keys", hint="change `SIZE` in init_fledgling.py")
    state: State = {
        name: tensor.float()
        for name, tensor in load_weights(source, old, dtype=None, device="cpu", text_head=False).state_dict().items()
    }
    delay = DelayPattern(old.num_codebooks, old.audio_stream_bos_id, old.audio_stream_eos_id)
    state[EMBEDDING] = translated_embedding(state[EMBEDDING], pairs, delay)
    state[HEAD] = translated_head(state[HEAD], pairs, delay)
    model = HiggsAudioV2ForConditionalGeneration(config)
    model.load_state_dict(widened(state, old, config, seed))
    save_checkpoint(model.half(), out, load_tokenizer(source), read_sampling(source), codec=codec)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", type=Path, dest="source", required=True, help="trained checkpoint with its codec")
    parser.add_argument("--codec", type=Path, required=True, help="folder of the other codec")
    parser.add_argument("--speech", type=Path, nargs="+", required=True, help="parquet files, or folders of them")
    parser.add_argument("--limit", type=int, default=3000, help="clips of each")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of both codecs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        old, new = (MelCodec.open(folder, args.device) for folder in (args.source / "codec", args.codec))
        pairs = list(encoded_pairs(args.speech, old, new, args.limit))
        count = grow(args.source, args.codec, pairs, args.out, seed=args.seed)
        print(f"{args.out}: {count:,} parameters, begun with those of {args.source}")
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
