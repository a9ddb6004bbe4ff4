"""Speech engine: text to audio through the training renderer, the model and the codec."""

import base64
import hashlib
import itertools
import math
import operator
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from myna.audio.files import encode_audio_file, pcm16, write_audio
from myna.core.errors import ReferenceWarning, SpeakError
from myna.core.io import check_output_file
from myna.data.codec import Codec, Codes, Encoder, Samples
from myna.data.conversation import AudioClip, Reference, ReferencePlacement, Turn, speech_conversation
from myna.data.manifest import SPEAKER_TAG
from myna.models.base import AdapterSlots, Family, LoraMatrices, RenderedSequence, require_speaking
from myna.models.files import WeightsMetadata
from myna.models.ref import ModelRef
from myna.provenance.credentials import write_speech
from myna.provenance.speech_log import SpeechOrigin, log_speech
from myna.provenance.watermark import StreamWatermark
from myna.speak.batch import MAX_CONTEXT_SECONDS, RunningRequest, SpeechBatch, SpeechPlan, SpokenSegment
from myna.speak.request import FinishReason, ReferenceRecording, SpeechRequest, open_reference
from myna.speak.scheduler import SPARE_POSITIONS
from myna.text import sentences
from myna.text.lexicon import respell
from myna.text.normalization import normalise_text

MAX_ROWS = 64
"""Number of requests that are spoken at the same time; the others wait."""
MAX_SINGLE_THREAD_BYTES = 2**28
"""Size of weights up to which a model computes on one thread of a CPU."""
MAX_ADAPTERS = 32
"""Number of adapters that an engine holds at the same time."""
EXACT_POSITIONS = 2048
"""Number of positions of an exact batch, for any requests."""
LEAST_FACTOR = 2.0
"""Factor on the estimated length for which a segment must have room. A slower voice would be cut."""
SHORTEST_SPLIT_SECONDS = 4.0
"""Estimated seconds of a segment below which splitting it again would not help."""
MIN_PLAYED_SECONDS = 0.02
"""Seconds of playback below which the filter of the tempo gives no sample."""
POSITION_BLOCK = 256
"""Size in positions of which caches are multiples, so that a slightly longer request fits too."""


@dataclass(frozen=True, slots=True, eq=False)
class Speech:
    """Generated audio; notebooks show it as a player."""

    samples: Samples
    codes: Codes
    finish_reason: FinishReason
    """`stop` if the model found its end, `length` if a cap ended it or a segment of it."""
    sample_rate: int
    warnings: tuple[str, ...] = ()
    """Segments of a text that were cut, or not spoken, in words."""
    origin: SpeechOrigin | None = None
    """Origin of speech that leaves Myna: its files are signed and logged. None for speech that is only measured."""

    @property
    def stopped(self) -> bool:
        """Whether the model found its end, in every segment."""
        return self.finish_reason == "stop"

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate

    def save(self, path: Path | str, *, force: bool = False) -> Path:
        """Write an audio file, in the format of its name. An existing file is replaced only with `force`."""
        file = Path(path)
        check_output_file(file, force=force)
        if self.origin is None:
            write_audio(file, self.samples, self.sample_rate)
        else:
            write_speech(file, self.samples, self.sample_rate, self.origin)
        return file

    def _repr_html_(self) -> str:
        content = encode_audio_file(Path("speech.wav"), self.samples, self.sample_rate)
        return f'<audio controls src="data:audio/wav;base64,{base64.b64encode(content).decode()}"></audio>'


AdapterFiles = tuple[LoraMatrices, WeightsMetadata, str]
"""Matrices of an adapter, its metadata, and the hash of its files."""


class Engine:
    """A model that speaks, with its codec.

    `reference_placement` must be where the training put references. A model that is still in training has weights of
    several types, and needs the `autocast` context of its training. `scene` is the most frequent one of its training.

    With `exact`, codes and samples of a request are the same bits alone and in a crowd. The batch then always has the
    same shape: `max_rows` slots on a GPU, and on a CPU each slot is computed by itself.
    """

    def __init__(
        self,
        family: Family,
        model: nn.Module,
        codec: Codec,
        *,
        reference_placement: ReferencePlacement = "turn",
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        scene: str = "",
        max_rows: int = MAX_ROWS,
        exact: bool = False,
        max_adapters: int = MAX_ADAPTERS,
    ) -> None:
        self.family, self.model, self.codec = require_speaking(family), model.eval(), codec
        self.reference_placement, self.autocast, self.scene = reference_placement, autocast, scene
        self.max_rows, self.exact, self.max_adapters = max_rows, exact, max_adapters
        self._batch: SpeechBatch | None = None
        self._silence: Codes | None = None
        """One frame of silence, once a pause was asked for."""
        self.adapter_slots: AdapterSlots | None = None
        self._adapters: dict[str, WeightsMetadata] = {}
        self._adapter_hashes: dict[str, str] = {}
        self.tuned_with = ""
        """Run that is merged into the model: adapters need the base model."""
        parameters = list(model.parameters())
        self.device = parameters[0].device
        is_small = sum(parameter.nbytes for parameter in parameters) < MAX_SINGLE_THREAD_BYTES
        self.single_thread = is_small and self.device.type == "cpu"

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(self._adapters)

    def load_adapter(self, name: str, source: str | os.PathLike[str]) -> float:
        """Load the LoRA of a run, or an adapter, beside the model's own weights, for requests that name it. Other
        requests continue. Return the largest change of a logit of a test prompt, which must not be 0."""
        return self.add_adapter(name, self.read_adapter(name, source))

    def read_adapter(self, name: str, source: str | os.PathLike[str]) -> AdapterFiles:
        """Read an adapter for `add_adapter`, and check it. Another thread may do this while requests are spoken."""
        from myna.speak.loading import read_adapter

        if not name:
            raise SpeakError("an adapter needs a name", hint="give one, by which requests can ask for it")
        if name in self._adapters:
            raise SpeakError(
                f"an adapter named {name} is loaded already", hint="unload it first, or choose another name"
            )
        return read_adapter(self, ModelRef.find_trained(source, self.family.source))

    def add_adapter(self, name: str, files: AdapterFiles) -> float:
        """Put an adapter of `read_adapter` beside the model's weights, as `load_adapter`."""
        matrices, metadata, files_hash = files
        if self.adapter_slots is None:
            rank = max(len(a) for a, _ in matrices.values())
            self._batch = None  # made anew, with adapters, by the next request; what runs in the old one goes on
            self.adapter_slots = self.family.adapter_slots(self.model, self.max_adapters, rank)
        slots = self.adapter_slots
        slots.load(name, matrices)
        with self.computing():
            effect = self.family.adapter_effect(self.model, slots, name)
        if not effect > 0:
            slots.unload(name)
            raise SpeakError(
                f"{name} changes nothing: with it, every logit of a test prompt is what it is without",
                hint="train it for longer, or load a later checkpoint",
            )
        self._adapters[name], self._adapter_hashes[name] = metadata, files_hash
        return effect

    def resolve(self, request: SpeechRequest) -> SpeechRequest:
        """Return a request with scene and placement of references, if it has none those of the training of its adapter
        or of the model. It keeps them when the adapter is unloaded."""
        if request.scene is not None and request.reference_placement is not None:
            return request
        known = self._adapters.get(request.adapter)
        if request.adapter and known is None:
            hint = f"loaded: {', '.join(self._adapters) or 'none'}"
            raise SpeakError(f"there is no adapter {request.adapter}", hint=hint)
        trained = self if known is None else known
        scene = trained.scene if request.scene is None else request.scene
        placement = request.reference_placement or trained.reference_placement
        return replace(request, scene=scene, reference_placement=placement)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Requests that speak with it continue."""
        if name not in self._adapters or self.adapter_slots is None:
            raise SpeakError(f"there is no adapter {name}", hint=f"loaded: {', '.join(self._adapters) or 'none'}")
        self.adapter_slots.unload(name)
        del self._adapters[name], self._adapter_hashes[name]

    def fingerprint(self, adapter: str = "", strength: float = 1.0) -> str:
        """Return a hash of all weights, of an adapter, and of how they are used. Equal hashes speak alike."""
        known = self._adapters.get(adapter)
        used = f"{self._adapter_hashes[adapter]} {known.reference_placement} {strength}" if known is not None else ""
        return self._hash_weights(used, self.model.state_dict())

    def trainable_fingerprint(self) -> str:
        """Return a hash of the trainable parameters of a model in training. The others are frozen, and may be large."""
        parameters = {name: tensor for name, tensor in self.model.named_parameters() if tensor.requires_grad}
        return self._hash_weights(self.family.source, parameters)

    def _hash_weights(self, source: str, tensors: Mapping[str, torch.Tensor]) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for part in (source, self.codec.revision, self.family.prompt_revision, self.reference_placement):
            digest.update(part.encode())
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{name} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def encode_reference(self, reference: ReferenceRecording) -> Reference:
        """Encode a reference recording. Faults of a file are given as warnings."""
        name, samples = reference.name, reference.audio
        if isinstance(samples, Path):
            checked = open_reference(samples, self.codec.sample_rate, reference.span)
            name = samples.stem
            for problem in checked.problems:
                warnings.warn(problem, ReferenceWarning, stacklevel=2)
            samples = checked.samples
        if len(samples) < self.codec.hop:
            raise SpeakError(
                f"{reference.audio if isinstance(reference.audio, Path) else 'a reference'} is shorter than one frame "
                f"of {1000 / self.codec.frame_rate:g} ms",
                hint="give a few seconds of the voice",
            )
        return Reference(normalise_text(reference.text), AudioClip(name, encode_clip(self.codec, samples)))

    def speak(self, requests: Sequence[SpeechRequest], on_frame: Callable[[int], None] | None = None) -> list[Speech]:
        """Speak requests together, each as one segment; `on_frame` is called with the number of whole frames so far."""
        plans = [self.plan(request, split=False) for request in requests]
        return [speech for _, speech in sorted(self.speak_plans(plans, on_frame), key=lambda spoken: spoken[0])]

    def plan(self, request: SpeechRequest, *, split: bool = True, positions: int | None = None) -> SpeechPlan:
        """Plan how a request will be spoken: encode its references, and split its text.

        A text of more than 30 s, by estimate, is split into segments, unless it has tags of several speakers.
        `max_seconds` caps each of them, and so does a budget by the length of its text. With `split` off it is one
        segment, capped by `max_seconds` alone. Where slots have no more than `positions`, a text is split further until
        each segment fits with its references; if none does, it is refused before anything is spoken.
        """
        request = self.resolve(request)
        request.check_settings()
        references = tuple(
            one if isinstance(one, Reference) else self.encode_reference(one) for one in request.references
        )
        frame_rate = self.codec.frame_rate
        pace = max(
            (sentences.voice_pace(one.text, len(one.clip.codes) / frame_rate) for one in references), default=1.0
        )
        room = positions or (EXACT_POSITIONS if self.exact else math.inf)
        parts = [(respell(part, request.spellings), pause) for part, pause in sentences.split_pauses(request.text)]
        text = normalise_text(" ".join(part for part, _ in parts))
        can_split, longest = split and not SPEAKER_TAG.search(text), sentences.MAX_SEGMENT_SECONDS
        segments = _segments(parts, request.language, pace, longest) if can_split else [(text, 0.0)]
        plan, needed = self._lay_out(request, references, segments, pace if split else None)
        while needed > room and can_split and longest > SHORTEST_SPLIT_SECONDS:
            longest /= 2
            segments = _segments(parts, request.language, pace, longest)
            plan, needed = self._lay_out(request, references, segments, pace)
        if needed > room:
            seconds = sum(len(one.clip.codes) for one in references) / frame_rate
            given = f"with {seconds:.1f} s of references, " if references else ""
            raise SpeakError(
                f"{given}the text takes at least {needed} positions, and there are {room}",
                hint="use a shorter reference or text, a lower limit of seconds, or serve with more --positions",
            )
        return replace(plan, max_positions=int(min(plan.max_positions, room)))

    def _lay_out(
        self,
        request: SpeechRequest,
        references: tuple[Reference, ...],
        segments: Sequence[tuple[str, float]],
        pace: float | None,
    ) -> tuple[SpeechPlan, int]:
        """Return the plan of these segments, and the positions that it needs. Without a pace frames are capped by
        `max_seconds` alone."""
        sampling, frame_rate = request.sampling(self.family.sampling), self.codec.frame_rate
        cap = max(1, int(sampling.max_seconds * frame_rate))
        if cap / frame_rate / request.speed < MIN_PLAYED_SECONDS:
            least_seconds = math.ceil(MIN_PLAYED_SECONDS * request.speed * frame_rate) / frame_rate
            raise SpeakError(
                f"nothing would be left of {sampling.max_seconds:g} s of speech at speed {request.speed:g}",
                hint=f"give at least {least_seconds:g} for max_seconds, or a lower speed",
            )
        texts = tuple(segment for segment, _ in segments)
        budgets = tuple(
            min(cap, sentences.frame_budget(one, frame_rate, pace)) if pace is not None else cap for one in texts
        )
        least = tuple(
            min(budget, sentences.frame_budget(one, frame_rate, pace or 1.0, LEAST_FACTOR))
            for one, budget in zip(texts, budgets, strict=True)
        )
        prompt = self.render(request, references, texts[0])
        if len(texts) == 1:
            needed, positions = len(prompt) + least[0] + SPARE_POSITIONS, len(prompt) + cap + SPARE_POSITIONS
        else:
            # Later prompts contain codes not yet generated. Reserve room for the references, the text and up to two
            # earlier segments.
            lengths = [len(self.render(request, (), segment)) for segment in texts]
            before = len(prompt) - lengths[0]
            context = 2 * max(lengths) + int(MAX_CONTEXT_SECONDS * frame_rate) + 3 * SPARE_POSITIONS
            needed = before + max(map(operator.add, lengths, least)) + SPARE_POSITIONS
            positions = before + max(lengths) + context + max(budgets)
        plan = SpeechPlan(
            request,
            references,
            sampling,
            segments=texts,
            max_frames=budgets,
            least_frames=least,
            pauses=tuple(round(pause * frame_rate) for _, pause in segments),
            prompt=prompt,
            max_positions=positions,
        )
        return plan, needed

    def speak_plans(
        self,
        plans: Iterable[SpeechPlan],
        on_frame: Callable[[int], None] | None = None,
        *,
        batch_size: int | None = None,
    ) -> Iterator[tuple[int, Speech]]:
        """Speak plans together, yielding each when it ends, with its place among them. `on_frame` is called with the
        number of whole frames of the longest. Plans are read twice a batch ahead, and end when the caller stops."""
        source, spoken, frames = enumerate(plans), dict[RunningRequest, int](), 0
        waiting = deque(itertools.islice(source, 2 * (batch_size or self.max_rows)))
        slots = min(len(waiting), batch_size or self.max_rows)
        batch: SpeechBatch | None = None
        try:
            while True:
                # Some requests wait in the scheduler, so that a free slot is filled at once.
                waiting.extend(itertools.islice(source, max(0, 2 * slots - len(spoken) - len(waiting))))
                if not spoken:
                    if not waiting:
                        break
                    batch = None  # freed where a new one is made
                    batch = self.batch_of(slots, max(plan.max_positions for _, plan in waiting))
                assert batch is not None
                # A plan that does not fit the batch waits until all before it have ended. Then a new batch is made.
                while waiting and len(spoken) < 2 * slots and waiting[0][1].max_positions <= batch.positions:
                    number, plan = waiting.popleft()
                    spoken[batch.submit(plan, streamed=False)] = number
                batch.step()
                if on_frame is not None and (longest := max(one.frames for one in spoken)) > frames:
                    frames = longest
                    on_frame(frames)
                for running in [running for running in spoken if running.ended]:
                    yield spoken.pop(running), self._speech(running)
            if batch is not None:
                batch.release()
        finally:
            if batch is not None:
                for running in spoken:
                    batch.cancel(running)

    def stream(
        self, request: SpeechRequest, origin: SpeechOrigin | None = None, *, split: bool = False
    ) -> "SpeechStream":
        """Speak one request, yielding samples as they are generated, marked and logged if they have an origin."""
        return SpeechStream(self, self.plan(request, split=split), origin)

    def open_batch(
        self,
        slots: int,
        positions: int,
        *,
        adapter_rank: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> SpeechBatch:
        """Allocate and warm up a batch for listeners, with room for adapters up to a rank."""
        if adapter_rank is not None and self.adapter_slots is None:
            with self.computing():
                self.adapter_slots = self.family.adapter_slots(self.model, self.max_adapters, adapter_rank)
        batch = SpeechBatch(self, slots, positions, paced=True, clock=clock)
        batch.warm_up()
        self.silence(1)  # encoded before requests come
        return batch

    def silence(self, frames: int) -> Codes:
        """Return codes of silence: the middle frame of an encoded second without sound, repeated."""
        if not frames:
            return np.zeros((0, self.codec.codebooks), np.uint16)
        if self._silence is None:
            with self.threads():
                codes = encode_clip(self.codec, np.zeros(self.codec.sample_rate, np.float32))
            self._silence = codes[len(codes) // 2]
        return np.repeat(self._silence[None], frames, axis=0)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Return a context for everything that runs the model: the types of its training, and its threads."""
        with self.threads(), self.autocast():
            yield

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Return a context of one thread for a small model on a CPU. Its products are so short that two threads
        mostly wait for one another."""
        threads = torch.get_num_threads()
        if self.single_thread:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def _speech(self, running: RunningRequest) -> Speech:
        if running.error is not None:
            raise running.error
        assert running.finish_reason is not None
        codes = running.codes()
        with self.threads():
            samples = self.codec.decode(codes) if len(codes) else np.zeros(0, np.float32)
        return Speech(samples, codes, running.finish_reason, self.codec.sample_rate, tuple(running.warnings))

    def batch_of(self, requests: int, positions: int) -> SpeechBatch:
        """Return the engine's own batch, made anew if these requests do not fit it."""
        slots = max(1, min(requests, self.max_rows))
        if self.exact:
            if positions > EXACT_POSITIONS:
                raise SpeakError(
                    f"an exact batch has {EXACT_POSITIONS} positions, this needs {positions}",
                    hint="use a shorter reference or a lower limit of seconds, or leave out exact",
                )
            slots, positions = self.max_rows, EXACT_POSITIONS
        current = self._batch
        if current is None or current.slots < slots or current.positions < positions:
            positions = -(-positions // POSITION_BLOCK) * POSITION_BLOCK
            del current
            self._batch = None  # freed before the next is allocated
            self._batch = current = SpeechBatch(self, slots, positions)
        return current

    def render(
        self,
        request: SpeechRequest,
        references: tuple[Reference, ...],
        text: str,
        context: tuple[SpokenSegment, ...] = (),
    ) -> RenderedSequence:
        """Render the open prompt of a segment: earlier segments are turns between the references and its text."""
        text = normalise_text(text)
        if not text:
            raise SpeakError(f"{request.name or 'the request'} has no text to speak", hint="give some words")
        request = self.resolve(request)
        opened = speech_conversation(
            text,
            id=request.name,
            references=references,
            scene=request.scene or "",
            reference_placement=request.reference_placement or self.reference_placement,
        )
        clips = [(said, AudioClip(f"segment {number}", codes)) for number, (said, codes) in enumerate(context)]
        earlier = [turn for said, clip in clips for turn in (Turn("user", (said,)), Turn("assistant", (clip,)))]
        return self.family.render(replace(opened, turns=(*opened.turns[:-1], *earlier, opened.turns[-1])))


class SpeechStream(Iterator[Samples]):
    """Samples of one plan as they are generated: together those of `speak_plans`, bit for bit. With an origin they have
    its watermark, and are logged when they end. `close` ends the request, and so does a caller that stops reading."""

    def __init__(self, engine: Engine, plan: SpeechPlan, origin: SpeechOrigin | None = None) -> None:
        self.sample_rate, self.origin = engine.codec.sample_rate, origin
        self._engine, self._batch = engine, engine.batch_of(1, plan.max_positions)  # which does not keep the engine
        is_marked = origin is not None and origin.watermark
        watermark = StreamWatermark(self.sample_rate, device=str(engine.device)) if is_marked else None
        self._running = self._batch.submit(plan, watermark=watermark)
        self._digest, self._count = hashlib.sha256(), 0

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason of the end, as of `Speech`, once all is generated."""
        return self._running.finish_reason

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings, as of `Speech`, for what is generated so far."""
        return tuple(self._running.warnings)

    def __next__(self) -> Samples:
        running = self._running
        if running.cancelled and running.error is None:
            raise StopIteration
        while not len(samples := running.take_samples()):
            if running.ended:
                self._log()
                raise running.error if running.error is not None else StopIteration
            self._batch.step()
        self._digest.update(pcm16(samples))
        self._count += len(samples)
        return samples

    def close(self) -> None:
        self._log()
        self._batch.cancel(self._running)

    def __del__(self) -> None:
        if hasattr(self, "_count"):  # it was begun
            self.close()

    def _log(self) -> None:
        """Log what was given out, once."""
        count, self._count = self._count, 0
        if self.origin is not None and count:
            seconds = round(count / self.sample_rate, 3)
            log_speech("streamed", self.origin, self._digest, seconds=seconds, finish_reason=self.finish_reason)


def _segments(
    parts: Sequence[tuple[str, float]], language: str, pace: float, longest: float
) -> list[tuple[str, float]]:
    """Return segments of parts that pauses separate, each with the seconds of silence after it."""
    segments: list[tuple[str, float]] = []
    for part, pause in parts:
        is_long = sentences.estimate_seconds(normalise_text(part), pace) > longest
        texts = sentences.split_long_text(part, language, pace, longest) if is_long else [normalise_text(part)]
        segments += [(text.strip(), 0.0) for text in texts[:-1]] + [(texts[-1].strip(), pause)]
    return segments


def encode_clip(codec: Encoder, samples: Samples) -> Codes:
    """Encode one clip, trimmed to whole frames."""
    whole = len(samples) // codec.hop * codec.hop
    codes: Codes = codec.encode(samples[None, :whole])[0]
    return codes
