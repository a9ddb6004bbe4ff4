"""GAN training step of the codec, captured as a CUDA graph.

For a small network on a large GPU, the cost of launching kernels dominates. Nothing in a step synchronises with the
host, so that on CUDA the whole step is captured once and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from codec_training.ctc import CTCHead, ctc_loss
from codec_training.device_dataset import AudioBatch, DeviceDataset
from codec_training.discriminators import Discriminators
from codec_training.ema import WeightEMA
from codec_training.mel_loss import MelDistance
from codec_training.quantizer import EMAQuantizer
from codec_training.speech_features import SpeechFeatureDistance, WhisperEncoder
from myna.models.mel_codec import MelCodecNetwork

MEL_WEIGHT = 45.0
"""Weight of the mel distance in the loss, as in HiFi-GAN."""
MAX_GRAD_NORM = 100.0
LOSS_NAMES = (
    "mel",
    "speech",
    "commitment",
    "ctc",
    "adversarial",
    "feature_matching",
    "discriminator",
    "grad_norm",
    "discriminator_grad_norm",
)


@dataclass(frozen=True, slots=True)
class StepConfig:
    """Settings of a training step."""

    clips: int
    ctc_weight: float = 1.0
    """Weight of the CTC loss on the first codebook; 0 leaves the CTC head out."""
    ctc_every: int = 1
    """Steps between two CTC losses, each of which then counts for all of them: it is a long chain of small kernels."""
    discriminator_clips: int | None = None
    """Clips of the batch that the discriminators see: they take most of the time of a step."""
    codebook_dropout: float = 0.1
    """Share of clips that use fewer codebooks, so that the first ones carry most of the information."""
    adversarial_weight: float = 0.5
    feature_matching_weight: float = 1.0
    commitment_weight: float = 0.25
    """Weight of the distance between latents and the entries of each codebook."""
    speech_weight: float = 0.0
    """Weight of the distance in a recogniser's hidden states; 0: none is computed."""
    ema_decay: float = 0.0
    """Decay of the moving average of the codec's weights; 0: none is kept."""
    loss_frames: int | None = None
    """Frames of the decoded window that enter the losses; all by default."""
    bf16: bool = False


class CodecTrainingModel(nn.Module):
    """The codec together with the modules that only training needs."""

    def __init__(
        self,
        network: MelCodecNetwork,
        letters: int,
        discriminator_width: int,
        ctc_width: int = 256,
        speech_encoder: WhisperEncoder | None = None,
    ) -> None:
        super().__init__()
        config = network.config
        self.network = network
        self.quantiser = EMAQuantizer(network.quantiser)
        self.ctc_head = CTCHead(config.latent, ctc_width, letters)
        self.discriminators = Discriminators(discriminator_width)
        self.mel_distance = MelDistance(config.sample_rate)
        self.speech_distance = SpeechFeatureDistance(speech_encoder) if speech_encoder else None


class StepKind(NamedTuple):
    """Optional parts of a step; every combination is a CUDA graph of its own."""

    adversarial: bool
    ctc: bool


class EncodedWindow(NamedTuple):
    """Input of the decoder, its target, and the losses of the encoder."""

    target: torch.Tensor
    """(clips, window * hop)."""
    latent: torch.Tensor
    """(clips, window, latent)."""
    loss: torch.Tensor
    """Loss of encoder and codebooks."""
    metrics: dict[str, torch.Tensor]


class CodecTrainer:
    """Runs training steps of a `CodecTrainingModel`."""

    def __init__(
        self,
        model: CodecTrainingModel,
        dataset: DeviceDataset,
        step_config: StepConfig,
        betas: tuple[float, float] = (0.8, 0.99),
    ) -> None:
        self.model, self.dataset, self.step_config = model, dataset, step_config
        self.device = dataset.device
        self.rate = torch.zeros((), device=self.device)
        on_cuda = self.device.type == "cuda"
        network = model.network
        self.codec_parameters = [*network.parameters(), *model.ctc_head.parameters()]
        self.discriminator_parameters = list(model.discriminators.parameters())

        def optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
            return torch.optim.AdamW(
                parameters, lr=self.rate, betas=betas, weight_decay=0.01, fused=on_cuda or None, capturable=on_cuda
            )

        self.optimizers = {
            "codec": optimizer(self.codec_parameters),
            "discriminators": optimizer(self.discriminator_parameters),
        }
        self.loss_names = tuple(name for name in LOSS_NAMES if name != "speech" or model.speech_distance)
        self.loss_sums = torch.zeros(len(self.loss_names), device=self.device)
        self.ema = WeightEMA(network, step_config.ema_decay)
        self.use_cuda_graph = on_cuda
        self._steps = 0
        self._graphs: dict[StepKind, torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def init_codebooks(self, batches: int = 16) -> None:
        """Initialise the codebooks by k-means on latents of some batches."""
        latents = []
        with torch.compiler.set_stance("force_eager"):
            for _ in range(batches):
                batch = self.dataset.draw(self.step_config.clips)
                latents.append(self.latent(batch.waves)[batch.mask])
        self.model.quantiser.init_by_kmeans(torch.cat(latents), len(torch.cat(latents)) / batches)
        self.ema.reset()  # an average of entries before and after would mean nothing

    def latent(self, waves: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            latent: torch.Tensor = self.model.network.encoder(self.model.network.log_mel(waves))
        return latent.float()

    def step(self, adversarial: bool) -> None:
        """One step. On CUDA the first of each kind is captured, and all others are replayed."""
        kind = StepKind(adversarial, self._ctc_due())
        self._steps += 1
        if not self.use_cuda_graph:
            self._step(kind)
            return
        if kind not in self._graphs:
            self._capture(kind)
        self._graphs[kind].replay()

    def _ctc_due(self) -> bool:
        return bool(self.step_config.ctc_weight) and self._steps % self.step_config.ctc_every == 0

    def mean_losses(self, steps: int) -> dict[str, float]:
        """Mean losses of the `steps` since the last call. The host waits for the device here."""
        means = (self.loss_sums / steps).tolist()
        self.loss_sums.zero_()
        return dict(zip(self.loss_names, means, strict=True))

    def _capture(self, kind: StepKind) -> None:
        """Capture a step after some eager ones, in which libraries choose kernels and optimizers allocate state."""
        side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(3):
                self._step(kind)
        torch.cuda.current_stream().wait_stream(side_stream)
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(kind)
        self._graphs[kind] = graph

    def _step(self, kind: StepKind) -> None:
        model, step_config = self.model, self.step_config
        batch = self.dataset.draw(step_config.clips)
        target, latent, loss, metrics = self._encode(batch, kind)
        with self._autocast():
            decoded = model.network.decoder(latent)
        target, decoded = self._crop_for_loss(target, decoded)
        mel = model.mel_distance(target, decoded)
        metrics |= {"mel": mel}
        loss = MEL_WEIGHT * mel + loss
        if model.speech_distance is not None:
            with self._autocast():
                metrics["speech"] = model.speech_distance(target, decoded)
            loss = loss + step_config.speech_weight * metrics["speech"]
        if kind.adversarial:
            # The first clips are as good as any: all are drawn at random.
            some = decoded[: step_config.discriminator_clips]
            gradient, adversarial_metrics = self._discriminate(target[: step_config.discriminator_clips], some)
            metrics |= adversarial_metrics
            torch.autograd.backward([loss, some], [None, gradient])
        else:
            loss.backward()
        metrics["grad_norm"] = nn.utils.clip_grad_norm_(self.codec_parameters, MAX_GRAD_NORM)
        for name, optimizer in self.optimizers.items():
            if name == "codec" or kind.adversarial:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        self.ema.update()
        zero = self.loss_sums.new_zeros(())
        self.loss_sums += torch.stack([metrics.get(name, zero).detach().float() for name in self.loss_names])

    def _encode(self, batch: AudioBatch, kind: StepKind) -> EncodedWindow:
        """Encode with the encoder and codebooks that are being trained."""
        step_config = self.step_config
        latent = self.latent(batch.waves)
        quantized = self.model.quantiser(latent, batch.mask, self._codebook_depths())
        ctc = self._ctc(quantized.first, batch) if kind.ctc else latent.new_zeros(())
        loss = step_config.ctc_weight * ctc + step_config.commitment_weight * quantized.commitment
        metrics = {"commitment": quantized.commitment, "ctc": ctc}
        return EncodedWindow(*self._window(batch, quantized.latent), loss, metrics)

    def _discriminate(
        self, target: torch.Tensor, decoded: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Gradients of the discriminators, and of the generator loss at the decoded audio, from one forward pass."""
        detached = decoded.detach().requires_grad_()
        with self._autocast():
            losses = self.model.discriminators(target, detached)
        gradients = torch.autograd.grad(losses.discriminator, self.discriminator_parameters, retain_graph=True)
        for parameter, gradient in zip(self.discriminator_parameters, gradients, strict=True):
            parameter.grad = gradient
        norm = nn.utils.clip_grad_norm_(self.discriminator_parameters, MAX_GRAD_NORM)
        config = self.step_config
        generator_loss = (
            config.adversarial_weight * losses.adversarial + config.feature_matching_weight * losses.feature_matching
        )
        (gradient,) = torch.autograd.grad(generator_loss, detached)
        return gradient, {**losses._asdict(), "discriminator_grad_norm": norm}

    def _ctc(self, first: torch.Tensor, batch: AudioBatch) -> torch.Tensor:
        with self._autocast():
            scores = self.model.ctc_head(first)
        return self.step_config.ctc_every * ctc_loss(scores, batch.letters, batch.letter_counts)

    def _codebook_depths(self) -> torch.Tensor:
        """Draw the number of codebooks that each clip may use."""
        uniform = torch.rand(2, self.step_config.clips, device=self.device)
        books = self.model.network.config.codebooks
        fewer = 1 + (uniform[1] * (books - 1)).long()
        return torch.where(uniform[0] < self.step_config.codebook_dropout, fewer, books)

    def _window(self, batch: AudioBatch, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples and latents of the frames that are decoded."""
        samples = batch.waves.reshape(len(latent), -1, self.dataset.hop)
        cut = self._cut(samples, batch.window_start, self.dataset.window)
        return cut.flatten(1), self._cut(latent, batch.window_start, self.dataset.window)

    def _crop_for_loss(self, target: torch.Tensor, decoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Random frames of the decoded window of each clip: mostly with the decoder's full receptive field around them,
        as in a whole clip, sometimes at an edge, as where a recording begins."""
        frames = self.step_config.loss_frames
        if frames is None or frames == self.dataset.window:
            return target, decoded
        spare = self.dataset.window - frames
        starts = (torch.rand(len(decoded), device=self.device) * (spare + 1)).long().clamp(max=spare)
        shape = (len(decoded), self.dataset.window, self.dataset.hop)
        return (
            self._cut(target.reshape(shape), starts, frames).flatten(1),
            self._cut(decoded.reshape(shape), starts, frames).flatten(1),
        )

    def _cut(self, clips: torch.Tensor, starts: torch.Tensor, frames: int) -> torch.Tensor:
        """`frames` frames of (clips, frames, ...), from each clip's start."""
        positions = starts[:, None] + torch.arange(frames, device=self.device)
        return clips[torch.arange(len(clips), device=self.device)[:, None], positions]

    def _autocast(self) -> AbstractContextManager[Any]:
        # Without the cache of casts, which would outlive the capture of a graph.
        wanted = self.step_config.bf16
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False) if wanted else nullcontext()
