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
from myna.models.mel_codec.network import MelCodecNetwork

MEL = 45.0
"""What the distance of mel spectrograms counts, as in HiFi-GAN."""
CLIP = 100.0
REPORTED = ("mel", "distance", "left", "letters", "fooled", "likeness", "critics", "norm", "critics' norm")


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


class Teacher:
    """Gives lessons to a learner, one step at a time."""

    def __init__(self, learner: Learner, bank: Bank, lesson: Lesson, betas: tuple[float, float] = (0.8, 0.99)) -> None:
        self.learner, self.bank, self.lesson = learner, bank, lesson
        self.device = bank.device
        self.rate = torch.zeros((), device=self.device)
        on_card = self.device.type == "cuda"
        self.taught = [*learner.network.parameters(), *learner.reader.parameters()]
        self.judging = list(learner.critics.parameters())

        def optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
            return torch.optim.AdamW(
                parameters, lr=self.rate, betas=betas, weight_decay=0.01, fused=on_card or None, capturable=on_card
            )

        self.optimizers = {"codec": optimizer(self.taught), "critics": optimizer(self.judging)}
        self.told = torch.zeros(len(REPORTED), device=self.device)
        self.mean = RunningMean(learner.network, lesson.mean)
        self.lap: Callable[[str], None] = lambda _: None
        self.records = on_card
        self._steps = 0
        self._graphs: dict[Kind, torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def lay_out(self, batches: int = 16) -> None:
        """Lay out the codebooks by what the encoder makes of some sounds now."""
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
        return dict(zip(REPORTED, means, strict=True))

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
        latent = self.latent(batch.waves)
        self.lap("encode")
        quantised = learner.quantiser(latent, batch.heard, self._depths())
        self.lap("quantise")
        letters = self._letters(quantised.first, batch) if kind.letters else latent.new_zeros(())
        self.lap("letters")
        true, latent = self._window(batch, quantised.latent)
        with self._half():
            made = learner.network.decoder(latent)
        self.lap("decode")
        mel = learner.mel_distance(true, made)
        self.lap("mel distance")
        loss = MEL * mel + lesson.letters * letters
        loss = loss + lesson.pull * quantised.distance + lesson.pull_left * quantised.left
        reported = {"mel": mel, "distance": quantised.distance, "left": quantised.left, "letters": letters}
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
        self.told += torch.stack([reported.get(name, zero).detach().float() for name in REPORTED])

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
        """The sound and the latents of the frames that are compared."""
        frames = batch.window[:, None] + torch.arange(self.bank.window, device=self.device)
        clips = torch.arange(len(frames), device=self.device)[:, None]
        sound = batch.waves.reshape(len(frames), -1, self.bank.hop)[clips, frames].flatten(1)
        return sound, latent[clips, frames]

    def _half(self) -> AbstractContextManager[Any]:
        # Without the cache of casts, which would outlive the recording of a graph.
        wanted = self.lesson.bf16
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False) if wanted else nullcontext()
