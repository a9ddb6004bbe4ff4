"""The seam: everything the rest of the house may know of a model family.

A `Family` is a checkpoint opened without its weights: configuration, tokenizer and the rules of its prompt. It is
cheap, picklable and enough for the loader. Weights come from `load_model` and travel beside it as a plain
`nn.Module`, so that PEFT, Accelerate and the loop can wrap them. The loop knows nothing else of a model.

A family speaks (`load_codec`, `generate`) or listens and answers in words (`load_encoder`, `answer`). All else, and so
all of training, is the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from myna.data.codec import Codec, Codes, Encoder
from myna.data.conversation import Conversation
from myna.data.pronunciation.grammar import Grammar
from myna.errors import ModelError

IGNORED = -100
"""The label of a position that is not supervised, as torch's losses have it."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A stretch of a rendered sequence, for people: `myna render` prints these."""

    kind: Literal["text", "special", "audio"]
    start: int
    stop: int
    shown: str
    supervised: bool


@dataclass(frozen=True, slots=True, eq=False)
class RenderedSequence:
    """One conversation as the model sees it.

    `labels` and `code_labels` hold, at each position, the token of *that* position where it is to be learned, and
    `IGNORED` elsewhere. The shift by one happens once, in `collate`.
    """

    id: str
    ids: npt.NDArray[np.int64]
    """(positions,): text ids, with a placeholder where an audio frame stands."""
    codes: npt.NDArray[np.int64]
    """(audio positions, codebooks): what stands at the placeholders, in order; for a listener the features there."""
    labels: npt.NDArray[np.int64]
    """(positions,): supervised text."""
    code_labels: npt.NDArray[np.int64]
    """(audio positions, codebooks): supervised codes."""
    pieces: tuple[TokenSpan, ...]
    target_seconds: float
    """Seconds of supervised audio; for a listener, of what the supervised words are about."""

    def __len__(self) -> int:
        return len(self.ids)


def core_of(model: nn.Module) -> Any:
    """The model itself, inside whatever PEFT put around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one forward pass reads: sequences end to end, and in each family what it makes of them. Made on the CPU by
    `collate`, moved once."""

    lengths: tuple[int, ...]
    """Of the sequences, in positions."""
    counts: torch.Tensor
    """(streams,): supervised targets in this batch, as float64; they stay on the CPU."""
    target_seconds: float

    @property
    def tokens(self) -> int:
        """Real positions, padding not counted."""
        return sum(self.lengths)

    def to(self, device: torch.device) -> Self:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> Self:
        """The same in memory that a card can copy from while the host goes on. Needs CUDA."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Every tensor that a pass reads; the counts stay where they are."""
        changed: dict[str, Any] = {
            field.name: change(getattr(self, field.name))
            for field in fields(self)
            if field.name != "counts" and isinstance(getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **changed)

    def __reduce__(self) -> tuple[Any, ...]:
        # Between processes arrays travel as they lie in memory; a tensor would be written like a file.
        values = [getattr(self, field.name) for field in fields(self)]
        return _of_arrays, (type(self), *(v.numpy() if isinstance(v, torch.Tensor) else v for v in values))


def _of_arrays(kind: Callable[..., Batch], *values: Any) -> Batch:
    return kind(*(torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in values))


class StreamLosses(NamedTuple):
    """Summed losses of one batch. Divide by counts over all ranks and micro-batches, once."""

    sums: torch.Tensor
    """(streams,): cross-entropy summed over targets, differentiable."""
    correct: torch.Tensor
    """(streams,): targets the model ranks first, for accuracy."""
    stops: torch.Tensor
    """(2,): ends of stream that the model ranks first, and ends of stream in all."""


@dataclass(frozen=True, slots=True)
class LoraTargets:
    """What a LoRA mode means for a family, in names of its modules."""

    adapted: tuple[str, ...]
    """Full names of the linear layers that get an adapter."""
    selected: tuple[str, ...]
    """The same plus the heads the mode covers; a head is only ever trained in full, through `train_modules`."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose codes. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.95
    repetition_window: int = 7
    """Repetition-aware sampling: look back this many frames; 0 switches it off."""
    repetition_limit: int = 2
    """A code seen this often in the window is drawn anew from the unfiltered distribution."""
    max_seconds: float = 60.0
    seed: int = 0


class GeneratedCodes(NamedTuple):
    codes: Codes
    """(frames, codebooks), the delay undone."""
    stopped: bool
    """False when the length cap ended it."""


class GeneratedAnswer(NamedTuple):
    text: str
    stopped: bool
    """False when the length cap ended it."""


class Family(ABC):
    """One model architecture behind the seam."""

    name: str
    source: str
    """What the user typed: a hub name, a folder or a built-in name."""
    listens = False
    """True for one that hears and answers in words, instead of speaking."""

    @property
    @abstractmethod
    def streams(self) -> tuple[str, ...]:
        """Names of the supervised streams, for example `text, code0 ... code7`."""

    @property
    @abstractmethod
    def chance(self) -> tuple[float, ...]:
        """Loss of a uniform guess per stream."""

    @property
    @abstractmethod
    def prompt_revision(self) -> str:
        """Changes whenever the same conversation would render to other ids."""

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """The checkpoint's own, as transformers loads it."""

    @property
    def sampling(self) -> Sampling:
        """How the checkpoint asks to be sampled, where nobody says otherwise."""
        return Sampling()

    @property
    @abstractmethod
    def has_weights(self) -> bool:
        """False for a built-in configuration."""

    @abstractmethod
    def check_weights(self) -> str:
        """See that every tensor has its place without reading one; what was found, in words."""

    @abstractmethod
    def load_model(self, *, dtype: torch.dtype, device: torch.device | str, text_head: bool) -> nn.Module:
        """The weights, checked key by key. Device `meta` gives shapes without weights."""

    @abstractmethod
    def accepts(self, codebooks: int, codebook_size: int, frame_rate: float) -> bool:
        """Whether codes of this shape are what the model speaks or hears."""

    @property
    @abstractmethod
    def codec_source(self) -> str:
        """Hub name or folder the codec comes from."""

    def load_encoder(self, *, device: torch.device | str = "cpu") -> Encoder:
        """What `myna prepare` turns clips into codes with: the codec, or the features that a listener hears."""
        return self.load_codec(device=device)

    def load_codec(self, *, device: torch.device | str = "cpu") -> Codec:  # noqa: ARG002
        raise ModelError(f"{self.source} listens, and does not speak", hint="have it answer with `myna listen`")

    @abstractmethod
    def render(
        self, conversation: Conversation, *, supervise_text: bool = False, supervise_references: bool = False
    ) -> RenderedSequence:
        """The one renderer, for training and for speaking."""

    @property
    @abstractmethod
    def text_revision(self) -> str:
        """Changes whenever a text may come to another number of tokens."""

    @abstractmethod
    def count_tokens(self, texts: Mapping[str, str]) -> list[int]:
        """How many tokens each text takes as a part of a turn, whatever stands beside it. A text that cannot be
        rendered is refused by its key, the id of an utterance."""

    def positions(self, frames: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """How many positions clips of so many frames take, up to what every clip takes."""
        return frames

    @abstractmethod
    def length(self, conversation: Conversation) -> int:
        """`len(render(conversation))`, without rendering."""

    @abstractmethod
    def show_token(self, id: int) -> str:
        """A token as people read it."""

    @abstractmethod
    def collate(self, sequences: Sequence[RenderedSequence], *, offset: int = 1) -> Batch:
        """Sequences that travel together; none can see another.

        Position t learns the label of position t + `offset`. Anything but 1 is for the alignment test alone.
        """

    @abstractmethod
    def objective(
        self,
        model: nn.Module,
        *,
        label_smoothing: float = 0.0,
        recompute: int = 0,
        fast: bool = False,
        compiled: bool = False,
    ) -> nn.Module:
        """A module that maps a `Batch` to `StreamSums`, with the weights as its `model`; what DDP and FSDP wrap.

        The first `recompute` layers are computed again in the backward pass; the module keeps the number under that
        name and may be given another. `fast` may rearrange frozen weights, and other layers may be `compiled`; what is
        computed stays the same. Whether `fast` could be followed, the module says as `folded`.
        """

    @abstractmethod
    def layers(self, objective: nn.Module) -> Sequence[nn.Module]:
        """The layers of an objective, as modules that are called: what can be compiled or sharded."""

    @abstractmethod
    def adapt_targets(self, model: nn.Module, mode: str, custom: Sequence[str] = ()) -> LoraTargets: ...

    @abstractmethod
    def module_names(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Short names for `train_modules` and `freeze` to full module names: one for `audio_head`, one per layer for
        `attention`. Together they cover every parameter once; a part that was not loaded has no names."""

    def generate(
        self,
        model: nn.Module,  # noqa: ARG002
        prompts: Sequence[RenderedSequence],  # noqa: ARG002
        sampling: Sampling,  # noqa: ARG002
        on_frame: Callable[[int], None] | None = None,  # noqa: ARG002
    ) -> list[GeneratedCodes]:
        """Speak open conversations."""
        raise ModelError(f"{self.source} listens, and does not speak", hint="have it answer with `myna listen`")

    def answer(
        self,
        model: nn.Module,  # noqa: ARG002
        prompts: Sequence[RenderedSequence],  # noqa: ARG002
        max_tokens: int,  # noqa: ARG002
        grammar: Grammar | None = None,  # noqa: ARG002
    ) -> list[GeneratedAnswer]:
        """Answer open conversations in words, each with what is likeliest, among what a grammar allows if one is
        given."""
        raise ModelError(f"{self.source} speaks, and does not answer in words", hint="hear it with `myna speak`")

    @abstractmethod
    def save_model(self, model: nn.Module, folder: Path) -> None:
        """Weights, configuration and tokenizer in the transformers layout."""
