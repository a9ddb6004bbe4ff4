"""Synthetic models and data of the training benchmarks: random weights of the full size, and realistic lengths.

No checkpoint, recording or tokenizer is needed. Everything is seeded by name or number, so that every process, ours or
the stock baseline, has the same weights, adapters and data.
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

from myna.data.loader import first_fit_decreasing
from myna.models.base import IGNORE_INDEX, RenderedSequence
from myna.models.higgs_v2 import tiny
from myna.models.higgs_v2.checkpoint import meta_model
from myna.models.higgs_v2.codec import HiggsCodec, codec_classes
from myna.models.higgs_v2.family import HiggsV2
from myna.models.higgs_v2.render import FRAME_RATE
from myna.models.higgs_v2.tiny import tiny_config

WEIGHT_STD = 0.02
"""Standard deviation of every weight, as transformers initialises this model."""
MEDIAN_SECONDS, LOG_STD, MIN_SECONDS, MAX_SECONDS = 8.3, 0.55, 1.0, 30.0
"""Lengths of the targets, which are log-normal: a mean of 9.7 s."""
REFERENCE_SECONDS = (3.0, 10.0)
TEXT_TOKENS_PER_SECOND, PROMPT_TOKENS, TURN_TOKENS = 4, 30, 5
"""Text tokens: per second of speech, before the reference, and before the target."""
PACKING_WINDOW = 1024
"""Utterances packed together, the default of `data.packing_window`."""
PARITY_UTTERANCES = 8
"""Utterances of every variant's first step; together they fit the shortest row."""

Codes = npt.NDArray[np.int64]
MakeCodes = Callable[[int, np.random.Generator], Codes]
"""(frames, random stream) -> (frames, codebooks)"""


@dataclass(frozen=True, slots=True)
class BenchmarkSize:
    """Sizes of model, rows and steps: the full size for a GPU, a toy for a CPU."""

    row_tokens: int
    small_row_tokens: int
    warm_up: int
    timed: int
    duration_scale: float
    """Factor of all durations: toys are shorter."""
    batches: tuple[int, ...]
    """Batch sizes of the stock baseline, tried in this order until one fits."""
    packed_tokens: tuple[int, ...]
    """Tokens of a packed batch of the packed baseline, tried in this order."""
    gemm: int
    parity_steps: int


FULL_SIZE = BenchmarkSize(16_384, 4_096, 4, 12, 1.0, (24, 16, 12, 8, 4), (16_384, 12_288, 8_192, 4_096), 8192, 200)
TOY_SIZE = BenchmarkSize(2_048, 1_024, 1, 2, 0.12, (8, 4), (2_048, 1_024), 256, 6)


class RandomHiggs(HiggsV2):
    """The full-size model, or a toy of it, with random weights instead of a checkpoint."""

    rng_device: torch.device
    """Device of the random generator: another one gives other numbers, and a CPU takes minutes for billions."""

    @classmethod
    def of(cls, tiny: bool, rng_device: torch.device) -> RandomHiggs:
        config = tiny_config() if tiny else HiggsV2.builtin_config()
        family = cls("synthetic", config, None)
        family.rng_device = rng_device
        return family

    def load_model(self, *, dtype: torch.dtype | None, device: torch.device | str, text_head: bool) -> nn.Module:
        model: nn.Module = random_model(
            self.config, dtype=dtype or torch.float32, device=device, rng_device=self.rng_device, text_head=text_head
        )
        return model


def random_model(
    config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    rng_device: torch.device,
    text_head: bool = False,
    attention: str = "sdpa",
) -> Any:
    """transformers' model with random weights, or with shapes alone on `meta`."""
    device = torch.device(device)
    model: Any = meta_model(config, text_head=text_head, dtype=dtype)
    if device.type == "meta":
        return model
    drawn = {name: random_weight(name, tensor, rng_device).to(device) for name, tensor in model.state_dict().items()}
    model.load_state_dict(drawn, strict=True, assign=True)
    # What is computed and never stored is still on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    offsets = torch.arange(config.num_codebooks, device=device) * config.codebook_size
    model.model.embed_audio_tokens.audio_tokens_offsets = offsets
    model.set_attn_implementation(attention)
    return model


def random_codec(device: torch.device) -> HiggsCodec:
    """The Higgs codec with random weights and a decoder of the full size. Its encoder is small: it gives codes, and
    its speed means nothing."""
    config_class, model_class = codec_classes()
    semantic = {
        "model_type": "hubert",
        **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
        **{"conv_dim": [8] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2},
        "mask_time_prob": 0.0,
    }
    ratios = [8, 5, 4, 2, 3]
    acoustic = {
        "model_type": "dac",
        **{"encoder_hidden_size": 4, "decoder_hidden_size": 1024, "hidden_size": 256},
        **{"downsampling_ratios": ratios, "upsampling_ratios": ratios},
    }
    config = config_class(
        target_bandwidths=[0.5, 1, 1.5, 2], acoustic_model_config=acoustic, semantic_model_config=semantic
    )
    with device:
        model = model_class(config).to(device).eval().requires_grad_(False)
        tiny._calibrate(model)
    return HiggsCodec(model, "random", device)


def random_weight(name: str, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Random weight seeded by its name; vectors, which are norms, are ones."""
    if like.dim() == 1:
        return torch.ones(like.shape, dtype=like.dtype, device=device)
    return _normal(name, like.shape, device, like.dtype)


@torch.no_grad()
def randomize_adapter(trainables: Mapping[str, torch.Tensor], *, b_std: float = WEIGHT_STD) -> None:
    """Randomize LoRA weights in place. PEFT initialises B with zeros, where A has no gradient; `b_std` 0 keeps them."""
    for name, parameter in trainables.items():
        spread = b_std if "lora_B" in name else WEIGHT_STD
        parameter.copy_(_normal(name, parameter.shape, parameter.device, parameter.dtype) * (spread / WEIGHT_STD))


def _normal(name: str, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    stream = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(*shape, device=device, dtype=dtype).normal_(0, WEIGHT_STD, generator=stream)


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Weights that one token passes through, text or audio: attention and one of the two FFNs."""

    frozen: int
    adapters: int

    @classmethod
    def of(cls, model: nn.Module) -> TokenCost:
        """Count from the shapes of an adapted model on any device; heads and embeddings are left out."""
        shapes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        layers = {name: count for name, count in shapes.items() if ".layers." in name and "norm" not in name}
        text, audio = (
            {name: count for name, count in layers.items() if f".{part}." in name} for part in ("mlp", "audio_mlp")
        )
        # A token goes through one of them, and the count holds for both only if they are alike.
        assert sorted(text.values()) == sorted(audio.values()), "text and audio cost differently"
        passed = {name: count for name, count in layers.items() if name not in text}
        adapters = sum(count for name, count in passed.items() if ".lora_" in name)
        return cls(frozen=sum(passed.values()) - adapters, adapters=adapters)

    @property
    def per_token(self) -> int:
        """FLOPs of forward and backward: 4 per frozen weight, which gets no gradient, 6 per adapter weight."""
        return 4 * self.frozen + 6 * self.adapters


def random_codes(codebooks: int, codebook_size: int) -> MakeCodes:
    """Uniform codes."""
    return lambda frames, stream: stream.integers(codebook_size, size=(frames, codebooks))


def markov_codes(codebooks: int, codebook_size: int, *, length: int = 1 << 20) -> MakeCodes:
    """Codes of a Markov chain that takes the likeliest transition four times out of five: a learnable target.

    Computed once, as many short chains side by side, of which every clip is a piece.
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


def utterances(
    family: HiggsV2, codes: MakeCodes, *, duration_scale: float = 1.0, seed: int = 0
) -> Iterator[RenderedSequence]:
    """Endless voice cloning samples: prompt, reference, and the supervised target."""
    config, delay = family.config, family.delay
    # Below all special tokens, and so never a placeholder.
    words = min(config.audio_token_id, config.audio_delay_token_id, config.bos_token_id, config.pad_token_id)
    lengths, stream, number = random.Random(seed), np.random.default_rng(seed), 0
    while True:
        target = (
            min(MAX_SECONDS, max(MIN_SECONDS, lengths.lognormvariate(math.log(MEDIAN_SECONDS), LOG_STD)))
            * duration_scale
        )
        reference = lengths.uniform(*REFERENCE_SECONDS) * duration_scale
        ids: list[npt.NDArray[np.int64]] = []
        frames: list[Codes] = []
        for seconds, around in ((reference, PROMPT_TOKENS), (target, TURN_TOKENS)):
            clip = codes(max(1, int(seconds * FRAME_RATE)), stream)
            frames.append(clip)
            positions, tail = delay.positions(len(clip)), delay.codebooks - 1
            ids.append(stream.integers(words, size=around + int(seconds * TEXT_TOKENS_PER_SECOND)))
            ids.append(np.array([config.audio_token_id] * (positions - tail) + [config.audio_delay_token_id] * tail))
        reference_codes, target_codes = (clip.astype(np.uint16) for clip in frames)
        whole = np.concatenate(ids)
        yield RenderedSequence(
            id=f"synthetic-{number}",
            ids=whole,
            codes=np.concatenate([delay.apply(reference_codes), delay.apply(target_codes)]),
            labels=np.full_like(whole, IGNORE_INDEX),
            code_labels=np.concatenate(
                [np.full_like(delay.apply(reference_codes), IGNORE_INDEX), delay.labels(target_codes)]
            ),
            spans=(),
            target_seconds=len(target_codes) / FRAME_RATE,
        )
        number += 1


def packed_rows(
    sequences: Iterable[RenderedSequence], budget: int, *, window: int = PACKING_WINDOW
) -> Iterator[list[RenderedSequence]]:
    """Full rows, packed as the loader packs them: window by window, the rows of each in random order.

    The last row of a window, which is not full, is left out: with a window as large as a corpus there is one in
    an epoch.
    """
    stream = iter(sequences)
    for number in count():
        pool = list(islice(stream, window))
        packed = first_fit_decreasing([len(sequence) for sequence in pool], budget)[:-1]
        random.Random(number).shuffle(packed)
        yield from ([pool[index] for index in row] for row in packed)


def parity_utterances(
    family: HiggsV2, codes: MakeCodes, *, shortest_row: int, duration_scale: float = 1.0
) -> list[RenderedSequence]:
    """Short utterances of the first step of every variant."""
    sequences = utterances(family, codes, duration_scale=duration_scale, seed=1)
    return list(
        islice(
            (sequence for sequence in sequences if len(sequence) <= shortest_row // PARITY_UTTERANCES),
            PARITY_UTTERANCES,
        )
    )
