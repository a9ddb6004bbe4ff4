"""Interface of model families: what training needs of all of them, and what speaking and answering need.

A `Family` is a checkpoint opened without its weights: configuration, tokenizer and prompt format. It is cheap,
picklable and enough for the data loader. `load_model` loads the weights as a plain `nn.Module`, so that PEFT,
Accelerate and the training loop can wrap them. A `SpeakingFamily` generates codes of its codec in a `SpeechDecoder`, an
`AnsweringFamily` generates text about a recording.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from myna.core.errors import ModelError
from myna.data.codec import Codec, Encoder
from myna.data.conversation import Conversation
from myna.models.files import load_tokenizer, stored_tensors

if TYPE_CHECKING:
    from myna.models.family_parts import ModulePatterns, PromptRenderer

IGNORE_INDEX = -100
"""Label of a position that is not supervised; torch's default."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Span of a rendered sequence, as `myna render` prints it."""

    kind: Literal["text", "special", "audio"]
    start: int
    stop: int
    shown: str
    supervised: bool


@dataclass(frozen=True, slots=True, eq=False)
class RenderedSequence:
    """Token ids, audio codes and labels of one conversation. `labels` and `code_labels` hold, at each position, the
    token of *that* position where it is supervised, and `IGNORE_INDEX` elsewhere. The shift by one happens once, in
    `collate`."""

    id: str
    ids: npt.NDArray[np.int64]
    """(positions,): text ids, with a placeholder where an audio frame stands."""
    codes: npt.NDArray[np.int64]
    """(audio positions, codebooks): codes at the placeholders, in order. For an answering family, input features."""
    labels: npt.NDArray[np.int64]
    """(positions,): supervised text."""
    code_labels: npt.NDArray[np.int64]
    """(audio positions, codebooks): supervised codes."""
    spans: tuple[TokenSpan, ...]
    target_seconds: float
    """Seconds of supervised audio. For an answering family, seconds of the audio that the answer is about."""

    def __len__(self) -> int:
        return len(self.ids)


def get_base_model(model: nn.Module) -> Any:
    """Return the model inside PEFT's wrapper, or the model itself if it has none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Input of one forward pass: sequences end to end, and each family's own tensors. Made on the CPU by `collate`."""

    lengths: tuple[int, ...]
    """Length of each sequence, in positions."""
    counts: torch.Tensor
    """(loss terms,): supervised targets in this batch, as float64; they stay on the CPU."""
    target_seconds: float

    @property
    def tokens(self) -> int:
        """Number of positions without padding."""
        return sum(self.lengths)

    def to(self, device: torch.device) -> Self:
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """Copy to page-locked memory, from which transfers are asynchronous. Needs CUDA."""
        return self._map_tensors(torch.Tensor.pin_memory)

    def _map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Apply a change to every tensor except the counts."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "counts"}
        changed: dict[str, Any] = {k: change(v) for k, v in tensors.items() if isinstance(v, torch.Tensor)}
        return replace(self, **changed)

    def __reduce__(self) -> tuple[Any, ...]:
        # Arrays are pickled without a copy of their memory; a tensor would be written like a file.
        values = [getattr(self, field.name) for field in fields(self)]
        return _from_arrays, (type(self), *(v.numpy() if isinstance(v, torch.Tensor) else v for v in values))


def _from_arrays(batch_type: Callable[..., Batch], *values: Any) -> Batch:
    return batch_type(*(torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in values))


class LossSums(NamedTuple):
    """Summed losses of one batch, to be divided once by the counts over all ranks and micro-batches."""

    sums: torch.Tensor
    """(loss terms,): cross-entropy summed over targets, differentiable."""
    correct: torch.Tensor
    """(loss terms,): number of targets that the model ranks first, for accuracy."""
    stops: torch.Tensor
    """(2,): ends of stream that the model ranks first, and number of all ends of stream."""


@dataclass(frozen=True, slots=True)
class LoraTargets:
    """Module names that a LoRA mode covers in a family."""

    adapted: tuple[str, ...]
    """Full names of the linear layers that get an adapter."""
    selected: tuple[str, ...]
    """`adapted` and the heads that the mode covers. A head is only ever trained in full, through `train_modules`."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of code generation. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.95
    repetition_window: int = 7
    """Repetition-aware sampling: frames to look back; 0 switches it off."""
    repetition_limit: int = 2
    """A code that occurs this often in the window is drawn anew from the unfiltered distribution."""
    max_seconds: float = 60.0
    seed: int = 0


class GeneratedAnswer(NamedTuple):
    """Text that an answering family generated for one prompt."""

    text: str
    ids: list[int]
    """Its tokens, without the end."""
    stopped: bool
    """Whether the answer came to its end; False if the length limit cut it."""


class TransformersForward(NamedTuple):
    """Losses and logits of transformers' own forward pass on one sequence."""

    sums: torch.Tensor
    """(loss terms,): cross-entropy summed over targets, in float64 on the CPU."""
    logits: torch.Tensor
    """All logits of supervised positions, in fp32 on the CPU, one head after the other as in the objective."""


class TransformersGeneration(NamedTuple):
    """Greedy choices of transformers' own `generate` for one prompt."""

    choices: npt.NDArray[np.int64]
    """(frames or tokens, codebooks or 1), without a delay; `IGNORE_INDEX` where there is nothing to compare."""
    steps: npt.NDArray[np.int64]
    """Step of each choice, in the shape of `choices`. A choice follows from the choices of earlier steps."""
    scores: npt.NDArray[np.float32]
    """(..., classes): logits that each choice was made from; -inf where a class was not allowed."""
    end: int
    """Class that ends a stream of codes."""


class Family(ABC):
    """Checkpoint of a model architecture, as far as training has to know it. Without a folder it is a configuration for
    counting and planning."""

    name: str
    checkpoint: ClassVar[Any]
    """`checkpoint` module of the family."""
    modules: ClassVar[ModulePatterns]
    builtin_config: ClassVar[Any]
    """Function that returns the configuration of the released model."""
    objective_type: ClassVar[Any]
    """Class of the training objective, which takes the settings of `objective`."""
    reference_module: ClassVar[str]
    """Module with forward pass and generation as transformers does them."""

    def __init__(self, source: str, config: Any, folder: Path | None, codec: str | None = None) -> None:
        self.source, self.config, self.folder, self._codec = source, config, folder, codec

    @classmethod
    def open(cls, source: str, folder: Path, codec: str | None = None) -> Self:
        family = cls(source, cls.checkpoint.read_config(folder), folder, codec)
        cls.checkpoint.check_tokenizer(family.config, family.tokenizer)
        return family

    @property
    @abstractmethod
    def renderer(self) -> PromptRenderer:
        """Renderer of conversations to token ids."""

    @property
    @abstractmethod
    def loss_terms(self) -> tuple[str, ...]:
        """Names of the terms of the loss, for example `text, code0 ... code7`."""

    @property
    @abstractmethod
    def chance(self) -> tuple[float, ...]:
        """Loss of a uniform guess, by term of the loss."""

    @property
    def prompt_revision(self) -> str:
        """Hash that changes whenever a conversation would be rendered to other ids."""
        return self.renderer.revision

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the checkpoint, as transformers loads it."""
        return load_tokenizer(self._require_folder())

    @property
    def has_weights(self) -> bool:
        """Whether there are weights to load; a built-in configuration has none."""
        return self.folder is not None

    @cached_property
    def stored_dtype(self) -> torch.dtype:
        """Type of the largest tensor in the files of the checkpoint; fp32 for any that is not a half precision."""
        largest = max(stored_tensors(self._require_folder()), key=lambda tensor: math.prod(tensor.shape))
        dtype: torch.dtype = largest.read().dtype
        return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32

    def check_weights(self) -> str:
        """Check names and shapes of all tensors without reading one, and return a summary for the user."""
        return str(self.checkpoint.check_weights(self._require_folder(), self.config))

    def load_model(self, *, dtype: torch.dtype | None, device: torch.device | str, text_head: bool) -> nn.Module:
        """Load the weights, checked key by key. `dtype` None keeps stored types; device `meta` gives shapes alone."""
        folder = Path() if torch.device(device).type == "meta" else self._require_folder()
        load: Callable[..., nn.Module] = self.checkpoint.load_weights
        return load(folder, self.config, dtype=dtype, device=device, text_head=text_head)

    @abstractmethod
    def accepts_codes(self, codebooks: int, codebook_size: int, frame_rate: float) -> bool:
        """Return whether codes of this shape fit the model."""

    @property
    @abstractmethod
    def codec_source(self) -> str:
        """Hub name or folder of the audio encoder."""

    @abstractmethod
    def load_encoder(self, *, device: torch.device | str = "cpu") -> Encoder:
        """Load the audio encoder of `myna prepare`: the codec, or the feature extractor of an answering family."""

    def render(self, conversation: Conversation, **supervise: bool) -> RenderedSequence:
        """Render a conversation, for training and for inference alike. `supervise_text` and `supervise_references` say
        what is learned beside the target."""
        return self.renderer.render(conversation, **supervise)

    @cached_property
    def text_revision(self) -> str:
        """Hash that changes whenever a text may have another number of tokens."""
        return self.renderer.text_revision

    def count_tokens(self, texts: Mapping[str, str]) -> list[int]:
        """Count the tokens of each text as a part of a turn. A text that cannot be rendered is refused by its key."""
        return self.renderer.count_tokens(texts)

    def positions(self, frames: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the positions that clips of these numbers of frames take, without the constant part of every clip."""
        return frames

    def length(self, conversation: Conversation) -> int:
        """Return `len(render(conversation))` without rendering."""
        return self.renderer.length(conversation)

    def show_token(self, id: int) -> str:
        """Return a token as readable text."""
        return str(self.tokenizer.decode([id]))

    @abstractmethod
    def collate(self, sequences: Sequence[RenderedSequence], *, offset: int = 1) -> Batch:
        """Pack sequences, none attending to another. Position t learns the label of t + `offset`, which only a test
        changes."""

    def objective(self, model: nn.Module, **settings: Any) -> nn.Module:
        """Build the module that maps a `Batch` to `LossSums`, with the weights as its `model`. DDP and FSDP wrap it.
        Settings are `label_smoothing`; `recompute`, the number of first layers whose activations the backward pass
        recomputes, an attribute that can be changed; `fused_lora`, which may rearrange frozen weights; and `compiled`,
        for layers that are not fused. Results stay the same. The module's `fused` says whether its layers are fused."""
        return self.objective_type(model, **settings)  # type: ignore[no-any-return]

    def layers(self, objective: Any) -> Sequence[nn.Module]:
        """Return the decoder layers of an objective, as modules that can be compiled or sharded."""
        return list(objective.layers)

    def lora_targets(self, model: nn.Module, mode: str, custom: Sequence[str] = ()) -> LoraTargets:
        return self.modules.lora_targets(get_base_model(model), mode, custom)

    def module_names(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Map short names for `train_modules` and `freeze` to full module names: one for `audio_head`, one per layer
        for `attention`. Together they cover every parameter once; a part that was not loaded has no names."""
        return self.modules.module_names(get_base_model(model))

    @property
    @abstractmethod
    def has_text_head(self) -> bool:
        """Whether the checkpoint holds a text head."""

    @abstractmethod
    def probe(self) -> Conversation:
        """Return a conversation with random audio and an answer, to compare two models by their logits."""

    def transformers_forward(self, model: nn.Module, sequence: RenderedSequence) -> TransformersForward:
        """Run transformers' own forward pass with the same weights, for `myna verify`."""
        reference: Any = import_module(self.reference_module)
        return reference.transformers_forward(self, get_base_model(model), sequence)  # type: ignore[no-any-return]

    def transformers_generate(self, model: nn.Module, prompt: RenderedSequence, steps: int) -> TransformersGeneration:
        """Run transformers' own `generate`, greedy, for at least this many frames or tokens, for `myna verify`."""
        reference: Any = import_module(self.reference_module)
        return reference.transformers_generate(self, get_base_model(model), prompt, steps)  # type: ignore[no-any-return]

    @abstractmethod
    def save_model(
        self, model: nn.Module, folder: Path, *, layout: str = "transformers", codec: Path | None = None
    ) -> Mapping[str, torch.Tensor]:
        """Write weights, configuration, tokenizer and a copy of the codec; returns the tensors by the names in the
        files."""

    def _require_folder(self) -> Path:
        if self.folder is None:
            raise ModelError(
                f"{self.source} is a configuration without weights", hint="name a checkpoint: a folder or a hub name"
            )
        return self.folder


class SpeakingFamily(Family):
    """Family that generates speech: codes in, codes out, and a codec for both."""

    @property
    def sampling(self) -> Sampling:
        """Default sampling parameters of the checkpoint."""
        return Sampling()

    @abstractmethod
    def load_codec(self, *, device: torch.device | str = "cpu") -> Codec: ...

    def load_encoder(self, *, device: torch.device | str = "cpu") -> Encoder:
        return self.load_codec(device=device)

    @property
    @abstractmethod
    def frame_rate(self) -> float:
        """Frames of codes per second."""

    @abstractmethod
    def speech_decoder(
        self,
        model: nn.Module,
        rows: int,
        max_positions: int,
        adapters: AdapterSlots | None = None,
        *,
        exact: bool = False,
    ) -> SpeechDecoder:
        """Build a decoding batch of `rows` rows, each with a cache of `max_positions` positions, which may use
        `adapters`. With `exact`, the bits of a row's results do not depend on the other rows, at some cost. Weights of
        a model that is not in training may be rearranged; its function stays the same."""

    @abstractmethod
    def adapter_slots(self, model: nn.Module, capacity: int, rank: int) -> AdapterSlots:
        """Allocate places for adapters; the rank grows if an adapter needs more."""

    @abstractmethod
    def adapter_effect(self, model: nn.Module, adapters: AdapterSlots, name: str) -> float:
        """Return the largest change of a logit by an adapter, for a prompt of the family's own."""


class AnsweringFamily(Family):
    """Family that answers questions about a recording in text."""

    @abstractmethod
    def answer(
        self, model: nn.Module, prompts: Sequence[RenderedSequence], max_tokens: int, grammar: str | None = None
    ) -> list[GeneratedAnswer]:
        """Answer conversations whose last turn is open, greedily; answers follow a Lark `grammar` if one is given."""


def require_speaking(family: Family) -> SpeakingFamily:
    if not isinstance(family, SpeakingFamily):
        raise ModelError(
            f"{family.source} answers in words and has no codec to speak with", hint="ask it with `myna answer`"
        )
    return family


def require_answering(family: Family) -> AnsweringFamily:
    if not isinstance(family, AnsweringFamily):
        raise ModelError(f"{family.source} speaks, and does not answer in words", hint="use it with `myna speak`")
    return family


class StepResult(NamedTuple):
    """One frame of the first rows, on the host."""

    codes: torch.Tensor
    """(rows, codebooks), under the delay pattern, as the model reads them."""
    log_probs: torch.Tensor
    """(rows, codebooks): log-probabilities of the codes under the model's own distribution; not finite where a logit is
    not."""
    active: torch.Tensor
    """(rows,): 0 where this was the row's last frame, or where the row had ended before."""

    def result(self) -> StepResult:
        return self


class PendingStep(Protocol):
    """A step that may still be running."""

    def result(self) -> StepResult:
        """Wait for the step."""


Number = TypeVar("Number", bound=np.generic)
StepHistory = list[npt.NDArray[Number]]
"""Codes of one row, or their log-probabilities, step by step: (codebooks,) each."""
LoraMatrices = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Full module name -> A (rank, inputs) and B (outputs, rank); B includes the scaling."""


class AdapterSlots(Protocol):
    """Adapters of a decoding batch, by name. Every row may use another one."""

    capacity: int

    @property
    def names(self) -> tuple[str, ...]: ...

    def load(self, name: str, matrices: LoraMatrices) -> None:
        """Load an adapter while requests go on."""

    def unload(self, name: str) -> None:
        """Remove a name. Requests that use the adapter go on with it."""

    def acquire(self, adapter: str | int) -> int:
        """Return the slot of an adapter, and keep it for a request until it is released. A slot in use may be acquired
        again, even if its adapter has no name any more."""

    def release(self, slot: int) -> None: ...


class SpeechDecoder(Protocol):
    """Decoding batch of a speaking family, with one row per request. A row is filled by `prefill` or `copy_prompt`,
    started by `begin`, and generates one frame in every `step` until its result says that it ended. Only the first rows
    are processed, so the last row is moved to the place of a row that ended."""

    rows: int
    max_positions: int
    steps_ahead: int
    """Number of steps that may be enqueued before the result of the first is read; 0 if a step is synchronous."""

    @property
    def adapters(self) -> AdapterSlots | None:
        """Adapters that the rows may use."""

    def warm_up(self) -> None:
        """Compile and capture what prompts of usual sizes need. No row may be in use."""

    def use_adapter(self, row: int, slot: int, strength: float) -> None:
        """Let a row use an adapter from its prefill until it ends; slot -1 is no adapter."""

    def prefill(self, row: int, prompt: RenderedSequence) -> None:
        """Process a prompt into a row of the cache."""

    def copy_prompt(self, source: int, target: int, positions: int) -> None:
        """Copy the first positions of a row's cache to another row."""

    def begin(self, row: int, positions: int, sampling: Sampling, max_frames: int) -> None:
        """Start generation after a prompt of `positions` positions, with random numbers of `sampling.seed`."""

    def move_row(self, source: int, target: int, positions: int) -> None:
        """Copy a row with its state and the first positions of its cache."""

    def end(self, row: int) -> None:
        """Stop a row. It generates nothing more, and costs as little as possible until it is used again."""

    def bucket(self, rows: int) -> int:
        """Return the batch size that a step of this many rows runs as. Rows up to it take part if they have begun."""

    def step(self, rows: int, longest: int) -> PendingStep:
        """Generate a frame of the first rows, whose longest context so far is `longest`."""

    def positions(self, prompt: RenderedSequence, max_frames: int) -> int:
        """Return the largest number of positions that a request takes."""

    def frames(self, delayed: StepHistory[Any], ended: bool) -> int:
        """Return the number of whole frames of codes in a row's step results."""

    def undelay(self, delayed: StepHistory[Number], start: int, stop: int) -> npt.NDArray[Number]:
        """Return the frames `start` to `stop` without the delay pattern of the codebooks, (frames, codebooks).
        The frame after the last one holds the end codes."""
