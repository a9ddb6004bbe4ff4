"""One step of training, from drawing sounds to moving weights, without a word between device and host.

A small network on a large card is ruled by the cost of launching kernels. Nothing in a step asks the host anything, so
that on a card the whole step is recorded once as a graph and played back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from codec_training.bank import Bank, Batch
from codec_training.critics import Critics
from codec_training.hearing import MelDistance
from codec_training.letters import Reader, spelling_loss
from codec_training.quantising import LearningQuantiser
from codec_training.running_mean import RunningMean
from myna.models.codec_checks import exactly
from myna.models.mel_codec.network import MelCodecNetwork

MEL = 45.0
"""What the distance of mel spectrograms counts, as in HiFi-GAN."""
CLIP = 100.0
OF_THE_CODES = ("distance", "left", "letters")
REPORTED = ("mel", *OF_THE_CODES, "fooled", "likeness", "critics", "norm", "critics' norm")


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a step is made of."""

    clips: int
    letters: float = 1.0
    """Weight of spelling with the first codebook; 0 leaves the reader out."""
    letters_every: int = 1
    """Steps from one spelling to the next, which then counts for all of them: it is a long chain of small kernels."""
    criticised: int | None = None
    """Clips that the critics hear, of all; they take most of the time, and each clip less is that much less of it."""
    shallow: float = 0.1
    """Share of clips that must do with fewer codebooks, so that the first ones carry most."""
    fooled: float = 0.5
    """What the critics' verdicts count."""
    likeness: float = 1.0
    """What the likeness of all that they feel on the way to them counts."""
    pull: float = 0.25
    """How much latents are pulled to the entries of each codebook."""
    pull_left: float = 0.0
    """How much they are pulled to what all codebooks together make of them."""
    mean: float = 0.0
    """How much of the running mean of the codec's weights a step keeps; 0: there is none."""
    compared: int | None = None
    """Frames that are compared and criticised, of those that are decoded; all of them if not said."""
    decoder_only: bool = False
    """Whether codes mean something to somebody already: then encoder and codebooks stay as they are, bit by bit."""
    bf16: bool = False


class Learner(nn.Module):
    """The codec with all that only training needs."""

    def __init__(self, network: MelCodecNetwork, letters: int, critic_width: int, reader_width: int = 256) -> None:
        super().__init__()
        config = network.config
        self.network = network
        self.quantiser = LearningQuantiser(network.quantiser)
        self.reader = Reader(config.latent, reader_width, letters)
        self.critics = Critics(critic_width)
        self.mel_distance = MelDistance(config.sample_rate)


class Kind(NamedTuple):
    """What a step may leave out."""

    critics: bool
    letters: bool


class Heard(NamedTuple):
    """What the decoder is to make sound of, and what was learned on the way there."""

    true: torch.Tensor
    """(clips, window * hop)."""
    latent: torch.Tensor
    """(clips, window, latent)."""
    loss: torch.Tensor | None
    """Of encoder and codebooks; none where they do not learn."""
    reported: dict[str, torch.Tensor]


class Teacher:
    """Gives lessons to a learner, one step at a time."""

    def __init__(self, learner: Learner, bank: Bank, lesson: Lesson, betas: tuple[float, float] = (0.8, 0.99)) -> None:
        self.learner, self.bank, self.lesson = learner, bank, lesson
        self.device = bank.device
        self.rate = torch.zeros((), device=self.device)
        on_card = self.device.type == "cuda"
        network = learner.network
        if lesson.decoder_only:
            network.encoder.requires_grad_(False)
            self.taught = list(network.decoder.parameters())
        else:
            self.taught = [*network.parameters(), *learner.reader.parameters()]
        self.judging = list(learner.critics.parameters())

        def optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
            return torch.optim.AdamW(
                parameters, lr=self.rate, betas=betas, weight_decay=0.01, fused=on_card or None, capturable=on_card
            )

        self.optimizers = {"codec": optimizer(self.taught), "critics": optimizer(self.judging)}
        self.reports = tuple(name for name in REPORTED if not (lesson.decoder_only and name in OF_THE_CODES))
        self.told = torch.zeros(len(self.reports), device=self.device)
        self.mean = RunningMean(network.decoder if lesson.decoder_only else network, lesson.mean)
        self.lap: Callable[[str], None] = lambda _: None
        self.records = on_card
        self._steps = 0
        self._graphs: dict[Kind, torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def lay_out(self, batches: int = 16) -> None:
        """Lay out the codebooks by what the encoder makes of some sounds now."""
        assert not self.lesson.decoder_only, "codes would no longer mean what they meant"
        latents = []
        with torch.compiler.set_stance("force_eager"):
            for _ in range(batches):
                batch = self.bank.draw(self.lesson.clips)
                latents.append(self.latent(batch.waves)[batch.heard])
        self.learner.quantiser.lay_out(torch.cat(latents), len(torch.cat(latents)) / batches)
        self.mean.begin()  # a mean of entries before and after would lie nowhere

    def latent(self, waves: torch.Tensor) -> torch.Tensor:
        with self._half():
            latent: torch.Tensor = self.learner.network.encoder(self.learner.network.hear(waves))
        return latent.float()

    def step(self, with_critics: bool) -> None:
        """One step. On a card the first of each kind records it, and all others play it back."""
        kind = Kind(with_critics, self._spells())
        self._steps += 1
        if not self.records:
            self._step(kind)
            return
        if kind not in self._graphs:
            self._record(kind)
        self._graphs[kind].replay()

    def _spells(self) -> bool:
        return bool(self.lesson.letters) and self._steps % self.lesson.letters_every == 0

    def tell(self, steps: int) -> dict[str, float]:
        """The means of so many steps since it was last asked. This is where the host waits for the card."""
        means = (self.told / steps).tolist()
        self.told.zero_()
        return dict(zip(self.reports, means, strict=True))

    def _record(self, kind: Kind) -> None:
        """Some plain steps first, in which libraries choose their kernels and optimizers make room for their state."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._step(kind)
        torch.cuda.current_stream().wait_stream(aside)
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(kind)
        self._graphs[kind] = graph

    def _step(self, kind: Kind) -> None:
        learner, lesson = self.learner, self.lesson
        batch = self.bank.draw(lesson.clips)
        self.lap("draw")
        true, latent, loss, reported = self._as_codes(batch) if lesson.decoder_only else self._encoded(batch, kind)
        with self._half():
            made = learner.network.decoder(latent)
        self.lap("decode")
        true, made = self._compared(true, made)
        mel = learner.mel_distance(true, made)
        self.lap("mel distance")
        reported |= {"mel": mel}
        loss = MEL * mel if loss is None else MEL * mel + loss
        if kind.critics:
            # The first clips are as good as any: all are drawn by dice.
            some = made[: lesson.criticised]
            slope, heard = self._criticise(true[: lesson.criticised], some)
            reported |= heard
            torch.autograd.backward([loss, some], [None, slope])
        else:
            loss.backward()
        self.lap("backward")
        reported["norm"] = nn.utils.clip_grad_norm_(self.taught, CLIP)
        for name, optimizer in self.optimizers.items():
            if name == "codec" or kind.critics:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        self.mean.follow()
        self.lap("move weights")
        zero = self.told.new_zeros(())
        self.told += torch.stack([reported.get(name, zero).detach().float() for name in self.reports])

    def _encoded(self, batch: Batch, kind: Kind) -> Heard:
        """By an encoder and codebooks that learn on the way."""
        lesson = self.lesson
        latent = self.latent(batch.waves)
        self.lap("encode")
        quantised = self.learner.quantiser(latent, batch.heard, self._depths())
        self.lap("quantise")
        letters = self._letters(quantised.first, batch) if kind.letters else latent.new_zeros(())
        self.lap("letters")
        loss = lesson.letters * letters + lesson.pull * quantised.distance + lesson.pull_left * quantised.left
        reported = {"distance": quantised.distance, "left": quantised.left, "letters": letters}
        return Heard(*self._window(batch, quantised.latent), loss, reported)

    def _as_codes(self, batch: Batch) -> Heard:
        """By an encoder and codebooks that stay as they are: the very codes that a language model learns, in fp32.

        Nothing here is learned, so that nothing is there to go back to. Only what is decoded is written down, always
        by all codebooks: no language model leaves some of them out.
        """
        with exactly(self.device):
            latent = self.learner.network.encoder(self.learner.network.hear(batch.waves))
            self.lap("encode")
            true, latent = self._window(batch, latent)
            latent = self.learner.quantiser.rounded(latent)
        self.lap("quantise")
        # Copied, since what was made under `exactly` may take no part in a way back.
        return Heard(true.clone(), latent.clone(), None, {})

    def _criticise(self, true: torch.Tensor, made: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Gradients for the critics, and the slope of their verdict at the made sound, from one pass."""
        apart = made.detach().requires_grad_()
        with self._half():
            verdicts = self.learner.critics(true, apart)
        self.lap("critics listen")
        for parameter, slope in zip(
            self.judging, torch.autograd.grad(verdicts.critics, self.judging, retain_graph=True), strict=True
        ):
            parameter.grad = slope
        norm = nn.utils.clip_grad_norm_(self.judging, CLIP)
        self.lap("critics learn")
        blame = self.lesson.fooled * verdicts.fooled + self.lesson.likeness * verdicts.likeness
        (slope,) = torch.autograd.grad(blame, apart)
        self.lap("critics teach")
        return slope, {**verdicts._asdict(), "critics' norm": norm}

    def _letters(self, first: torch.Tensor, batch: Batch) -> torch.Tensor:
        with self._half():
            scores = self.learner.reader(first)
        return self.lesson.letters_every * spelling_loss(scores, batch.letters, batch.counts)

    def _depths(self) -> torch.Tensor:
        """How many codebooks each clip may use."""
        dice = torch.rand(2, self.lesson.clips, device=self.device)
        books = self.learner.network.config.codebooks
        fewer = 1 + (dice[1] * (books - 1)).long()
        return torch.where(dice[0] < self.lesson.shallow, fewer, books)

    def _window(self, batch: Batch, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sound and the latents of the frames that are decoded."""
        sound = batch.waves.reshape(len(latent), -1, self.bank.hop)
        cut = self._cut(sound, batch.window, self.bank.window)
        return cut.flatten(1), self._cut(latent, batch.window, self.bank.window)

    def _compared(self, true: torch.Tensor, made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Some frames of each clip, anywhere in what was decoded: mostly with all that the decoder sees around them, as
        in a whole clip, now and then at an edge, as where a recording begins."""
        frames = self.lesson.compared
        if frames is None or frames == self.bank.window:
            return true, made
        spare = self.bank.window - frames
        starts = (torch.rand(len(made), device=self.device) * (spare + 1)).long().clamp(max=spare)
        shape = (len(made), self.bank.window, self.bank.hop)
        return (
            self._cut(true.reshape(shape), starts, frames).flatten(1),
            self._cut(made.reshape(shape), starts, frames).flatten(1),
        )

    def _cut(self, clips: torch.Tensor, starts: torch.Tensor, frames: int) -> torch.Tensor:
        """So many frames of (clips, frames, ...), from where each clip's begin."""
        places = starts[:, None] + torch.arange(frames, device=self.device)
        return clips[torch.arange(len(clips), device=self.device)[:, None], places]

    def _half(self) -> AbstractContextManager[Any]:
        # Without the cache of casts, which would outlive the recording of a graph.
        wanted = self.lesson.bf16
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False) if wanted else nullcontext()
