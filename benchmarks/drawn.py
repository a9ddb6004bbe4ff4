"""What the training benchmarks learn from: random weights of the true size and utterances of believable lengths.

No checkpoint, recording or tokenizer is needed. Everything is drawn by name or number, so that every process that draws
it, ours or a peer's, has the same weights, the same adapters and the same data.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from myna.data.packing import first_fit_decreasing
from myna.models.base import IGNORED, RenderedSequence
from myna.models.higgs_v2.checkpoint import meta_model
from myna.models.higgs_v2.family import HiggsV2
from myna.models.higgs_v2.render import FRAME_RATE
from myna.models.higgs_v2.tiny import tiny_config

WEIGHT = 0.02
"""Standard deviation of every weight, as transformers initialises this model."""
MEDIAN_SECONDS, SPREAD, SHORTEST, LONGEST = 8.3, 0.55, 1.0, 30.0
"""Of the targets, which are log-normal: a mean of 9.7 s."""
REFERENCE_SECONDS = (3.0, 10.0)
TEXT_PER_SECOND, PROMPT, TURN = 4, 30, 5
"""Text tokens: per second of speech, before the reference, and before the target."""
WINDOW = 1024
"""Utterances that are packed together, as `data.packing_window` has it."""
CHECKED = 8
"""How many utterances every variant sees in its first step; together they fit the shortest row."""

Codes = npt.NDArray[np.int64]
MakeCodes = Callable[[int, np.random.Generator], Codes]
"""(frames, random stream) -> (frames, codebooks)"""


@dataclass(frozen=True, slots=True)
class Size:
    """How large everything is: the true size for a card, a toy for a look at the whole on a CPU."""

    row_tokens: int
    small_row_tokens: int
    warm_up: int
    timed: int
    pace: float
    """Seconds are multiplied by this: toys are shorter."""
    batches: tuple[int, ...]
    """Of the peer that may take the largest that fits, in the order they are tried."""
    packed_tokens: tuple[int, ...]
    """The same for the packed peer."""
    gemm: int
    parity_steps: int


TRUE_SIZE = Size(16_384, 4_096, 4, 12, 1.0, (24, 16, 12, 8, 4), (16_384, 12_288, 8_192, 4_096), 8192, 200)
TOY_SIZE = Size(2_048, 1_024, 1, 2, 0.12, (8, 4), (2_048, 1_024), 256, 6)


class DrawnHiggs(HiggsV2):
    """The true-size model, or a toy of it, whose checkpoint is a random stream."""

    drawn_on: torch.device
    """Where the stream is: another device draws other numbers, and a CPU takes minutes for billions of them."""

    @classmethod
    def of(cls, tiny: bool, drawn_on: torch.device) -> DrawnHiggs:
        config = tiny_config() if tiny else HiggsV2.builtin("higgs-v2").config
        family = cls("drawn", config, None)
        family.drawn_on = drawn_on
        return family

    def load_model(self, *, dtype: torch.dtype, device: torch.device | str, text_head: bool) -> nn.Module:
        model: nn.Module = draw_model(
            self.config, dtype=dtype, device=device, drawn_on=self.drawn_on, text_head=text_head
        )
        return model


def draw_model(
    config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    drawn_on: torch.device,
    text_head: bool = False,
    attention: str = "sdpa",
) -> Any:
    """transformers' own model with weights drawn one after another, as from a file. On `meta` it has shapes alone."""
    device = torch.device(device)
    model: Any = meta_model(config, text_head=text_head, dtype=dtype)
    if device.type == "meta":
        return model
    drawn = {name: draw_weight(name, tensor, drawn_on).to(device) for name, tensor in model.state_dict().items()}
    model.load_state_dict(drawn, strict=True, assign=True)
    # What is computed and never stored is still on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    offsets = torch.arange(config.num_codebooks, device=device) * config.codebook_size
    model.model.embed_audio_tokens.audio_tokens_offsets = offsets
    model.set_attn_implementation(attention)
    return model


def draw_weight(name: str, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The weight of this name; norms, which are vectors, are ones."""
    if like.dim() == 1:
        return torch.ones(like.shape, dtype=like.dtype, device=device)
    return _normal(name, like.shape, device, like.dtype)


@torch.no_grad()
def draw_adapter(trainables: Mapping[str, torch.Tensor], *, high: float = WEIGHT) -> None:
    """The LoRA of these names, in place. PEFT starts with B at zero, where A has no gradient and could not be compared;
    `high` 0 leaves it so."""
    for name, parameter in trainables.items():
        spread = high if "lora_B" in name else WEIGHT
        parameter.copy_(_normal(name, parameter.shape, parameter.device, parameter.dtype) * (spread / WEIGHT))


def _normal(name: str, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    stream = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(*shape, device=device, dtype=dtype).normal_(0, WEIGHT, generator=stream)


@dataclass(frozen=True, slots=True)
class Work:
    """Weights that one token meets, whether it is text or audio: attention and one of the two FFNs."""

    frozen: int
    adapters: int

    @classmethod
    def of(cls, model: nn.Module) -> Work:
        """From the shapes of an adapted model on any device; heads and embeddings are left out."""
        shapes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        layers = {name: count for name, count in shapes.items() if ".layers." in name and "norm" not in name}
        text, audio = (
            {name: count for name, count in layers.items() if f".{part}." in name} for part in ("mlp", "audio_mlp")
        )
        # A token goes through one of them, and the count holds for both only if they are alike.
        assert sorted(text.values()) == sorted(audio.values()), "text and audio cost differently"
        met = {name: count for name, count in layers.items() if name not in text}
        adapters = sum(count for name, count in met.items() if ".lora_" in name)
        return cls(frozen=sum(met.values()) - adapters, adapters=adapters)

    @property
    def per_token(self) -> int:
        """Operations: forward and backward through frozen weights, which get no gradient, and through adapters, which
        do."""
        return 4 * self.frozen + 6 * self.adapters


def noise(codebooks: int, codebook_size: int) -> MakeCodes:
    """Codes with nothing to learn in them."""
    return lambda frames, stream: stream.integers(codebook_size, size=(frames, codebooks))


def walk(codebooks: int, codebook_size: int, *, length: int = 1 << 20) -> MakeCodes:
    """Codes that go the same way four times out of five, so that there is something to learn and a floor to reach.

    Worked out once, as many short walks side by side, of which every clip is a piece.
    """
    stream = np.random.default_rng(0)
    follows = np.stack([stream.permutation(codebook_size) for _ in range(codebooks)])
    abreast = length // 1024
    steps = np.empty((1024, abreast, codebooks), np.int64)
    steps[0] = stream.integers(codebook_size, size=(abreast, codebooks))
    for number in range(1, len(steps)):
        kept = stream.random((abreast, codebooks)) < 0.8
        following = follows[np.arange(codebooks), steps[number - 1]]
        steps[number] = np.where(kept, following, stream.integers(codebook_size, size=kept.shape))

    def piece(frames: int, random_stream: np.random.Generator) -> Codes:
        assert frames <= len(steps)
        start = random_stream.integers(len(steps) - frames + 1)
        return steps[start : start + frames, random_stream.integers(abreast)]

    return piece


def utterances(family: HiggsV2, codes: MakeCodes, *, pace: float = 1.0, seed: int = 0) -> Iterator[RenderedSequence]:
    """Cloning samples for ever: a prompt, a reference of the voice, and the target, the only thing supervised."""
    config, delay = family.config, family.delay
    # Below all special tokens, and so never a placeholder.
    words = min(config.audio_token_id, config.audio_delay_token_id, config.bos_token_id, config.pad_token_id)
    lengths, stream, number = random.Random(seed), np.random.default_rng(seed), 0
    while True:
        target = min(LONGEST, max(SHORTEST, lengths.lognormvariate(math.log(MEDIAN_SECONDS), SPREAD))) * pace
        reference = lengths.uniform(*REFERENCE_SECONDS) * pace
        ids: list[npt.NDArray[np.int64]] = []
        frames: list[Codes] = []
        for seconds, around in ((reference, PROMPT), (target, TURN)):
            clip = codes(max(1, int(seconds * FRAME_RATE)), stream)
            frames.append(clip)
            positions, tail = delay.positions(len(clip)), delay.codebooks - 1
            ids.append(stream.integers(words, size=around + int(seconds * TEXT_PER_SECOND)))
            ids.append(np.array([config.audio_token_id] * (positions - tail) + [config.audio_delay_token_id] * tail))
        said, spoken = (clip.astype(np.uint16) for clip in frames)
        whole = np.concatenate(ids)
        yield RenderedSequence(
            id=f"drawn-{number}",
            ids=whole,
            codes=np.concatenate([delay.apply(said), delay.apply(spoken)]),
            labels=np.full_like(whole, IGNORED),
            code_labels=np.concatenate([np.full_like(delay.apply(said), IGNORED), delay.labels(spoken)]),
            pieces=(),
            target_seconds=len(spoken) / FRAME_RATE,
        )
        number += 1


def rows(drawn: Iterable[RenderedSequence], budget: int, *, window: int = WINDOW) -> Iterator[list[RenderedSequence]]:
    """Full rows, packed as the loader packs them: window by window, the rows of each in random order.

    The last row of a window is what was left over, and is left out: with a window as large as a corpus there is one in
    an epoch.
    """
    stream = iter(drawn)
    for number in count():
        pool = list(islice(stream, window))
        packed = first_fit_decreasing([len(sequence) for sequence in pool], budget)[:-1]
        random.Random(number).shuffle(packed)
        yield from ([pool[index] for index in row] for row in packed)


def checked(family: HiggsV2, codes: MakeCodes, *, shortest_row: int, pace: float = 1.0) -> list[RenderedSequence]:
    """The few short utterances that every variant begins with."""
    drawn = utterances(family, codes, pace=pace, seed=1)
    return list(islice((one for one in drawn if len(one) <= shortest_row // CHECKED), CHECKED))
