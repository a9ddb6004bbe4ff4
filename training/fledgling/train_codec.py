"""Train the fledgling codec.

    python training/fledgling/train_codec.py --source CORPUS/natural=0.5 --source CORPUS/real=0.4 \\
        --source CORPUS/espeak=0.1 --augment --out runs/codec --seconds 780

A source is a folder with manifest.jsonl, or a folder of parquet files. The same command run again resumes where the
last one stopped, up to --total. A tenth of the speakers is held out, by their names (corpus_making/held_out.py).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from codec_training import recordings
from codec_training.augmentation import Augmentation
from codec_training.checkpoint import (
    Progress,
    read_progress,
    resume,
    save_checkpoint,
)
from codec_training.ctc import alphabet_of
from codec_training.depthwise import compile_blocks, fastest_convs, use_shifted_convs
from codec_training.device_dataset import DeviceDataset
from codec_training.evaluation import HeldOutWindows, perplexity, score_codec, write_round_trips
from codec_training.recordings import DecodedClip, clip_summary, decode_all, hours, pcm_to_float
from codec_training.speech_features import WhisperEncoder
from codec_training.trainer import CodecTrainer, CodecTrainingModel, StepConfig
from myna.core.errors import ConfigError, MynaError, TrainingError
from myna.models.mel_codec import ConvNeXtBlock, MelCodecConfig, MelCodecNetwork

TINY = MelCodecConfig(
    codebook_size=64,
    latent=16,
    mel_bins=40,
    expansion=2,
    encoder_width=32,
    encoder_fine=1,
    encoder_frame_width=32,
    encoder_coarse=1,
    decoder_frame_width=48,
    decoder_coarse=1,
    decoder_width=48,
    decoder_fine=2,
)
"""Toy size for tests: trains on a CPU in seconds."""
LARGE = MelCodecConfig(
    mel_bins=128,
    encoder_width=256,
    encoder_fine=4,
    encoder_frame_width=320,
    encoder_coarse=3,
    decoder_frame_width=448,
    decoder_coarse=3,
    decoder_width=384,
    decoder_fine=7,
)
"""15.3 million weights, two files of 16 MB: for real voices. A core takes 1.7 times as long to decode."""
SIZES = {"tiny": TINY, "large": LARGE}
WARM_UP_STEPS = 200
"""Steps of learning rate warm-up, at the start and after resuming without the optimizers' moments."""
CODEBOOK_INIT_STEPS, CODEBOOK_INIT_EVERY = (20, 60, 200, 500), 1000
"""Steps at which the codebooks are initialised anew in the first half of the training: the latents of an encoder that
learns fast leave the entries, of which few stay in use."""
SPEECH_WEIGHT = 10.0
"""Weight of the distance in a recogniser's hidden states: its gradient at the decoder's weights is four fifths of that
of the mel distance. After 150 steps on a CPU, hidden states of another recogniser (Whisper base) were 3 and 7 % nearer
on Spanish and Italian with a weight of 6, and 4 and 9 % with 16, which made the mel distance 3 % worse."""
MIN_RATE_SHARE = 0.02
"""Final learning rate as a share of the highest."""


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    try:
        with fast_products(torch.device(options.device)):
            train(options)
    except MynaError as error:
        sys.exit(f"{error}")


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Let a GPU multiply fp32 as TF32, with the fastest convolutions. These settings belong to the process, and are
    restored: a codec that is opened after the training in the same process would compute other samples."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)


@dataclass(frozen=True, slots=True)
class Source:
    """A corpus and its share in a batch."""

    path: Path
    weight: float


def source(text: str) -> Source:
    path, _, weight = text.rpartition("=")
    return Source(Path(path), float(weight)) if path else Source(Path(text), 1.0)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add(
        "--source", type=source, action="append", required=True, metavar="PATH[=WEIGHT]", help="corpus; may be repeated"
    )
    add("--out", type=Path, default=Path("runs/codec"), help="folder for the codec and its checkpoint")
    add("--seconds", type=float, help="train so long in this command, not counting reading of the sources")
    add("--steps", type=int, help="or so many steps")
    add("--total", type=float, help="seconds (or steps) of all commands together, over which the learning rate decays")
    add("--batch-size", type=int, default=48, help="clips in a step")
    add("--context", type=int, default=128, help="frames of a clip that are encoded")
    add("--window", type=int, default=26, help="frames of it that are decoded")
    add("--loss-frames", type=int, help="frames of those that enter the losses; all by default")
    add("--learning-rate", type=float, default=5e-4, help="at its highest")
    add(
        "--discriminator-after",
        type=float,
        default=0.08,
        help="share of the training before the adversarial losses start",
    )
    add("--discriminator-width", type=int, default=32)
    add("--discriminator-clips", type=int, help="clips of a step that the discriminators see; half by default, or all")
    add("--adversarial-weight", type=float, default=0.5)
    add("--feature-matching-weight", type=float, default=2.0)
    add("--ctc-every", type=int, default=2, help="steps between two CTC losses")
    add(
        "--ema-decay",
        type=float,
        default=0.999,
        help="of the moving average of the weights, which is exported if it is better; 0: none",
    )
    add(
        "--depthwise",
        choices=("library", "shifts", "compiled"),
        help="implementation of blocks and their depthwise convolutions; by default measured on CUDA",
    )
    add("--ctc-weight", type=float, default=1.0, help="of the CTC loss on the first codebook; 0: none")
    add("--commitment-weight", type=float, default=0.25, help="of the distance of latents from each codebook's entries")
    add("--speech-encoder", type=Path, metavar="FILE", help="recogniser in whose hidden states speech is compared")
    add("--speech-weight", type=float, default=SPEECH_WEIGHT, help="of that distance, where a recogniser is given")
    add("--codebook-dropout", type=float, default=0.1, help="share of clips that use fewer codebooks")
    add("--noise", type=float, default=0.1, help="share of clips with white noise added, without --augment")
    add("--augment", action="store_true", help="speeds, vocal tracts, microphones, rooms, noise, band limits, levels")
    add("--lossy", type=float, default=0.12, help="share of clips that went through MP3, Opus ..., with --augment")
    add("--background", type=Path, action="append", default=[], help="more recordings without speech, for --augment")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--fp32", action="store_true", help="no bf16 on CUDA")
    add("--no-graph", action="store_true", help="no CUDA graphs")
    add("--size", choices=SIZES, default="large", help="size of the network")
    add("--tiny", action="store_const", const="tiny", dest="size", help="the same as --size tiny")
    add("--limit", type=int, help="read only so many clips of each source")
    add("--log-every", type=float, default=10.0, help="seconds between two lines of progress")
    add("--checkpoint-every", type=float, default=150.0, help="seconds between two checkpoints")
    add("--seed", type=int, default=0)
    return made


def train(options: argparse.Namespace) -> None:
    budget = TrainingBudget.of(options)
    _check(options)
    device = torch.device(options.device)
    config = SIZES[options.size]
    train_clips, held_out = read_sources(options, config.sample_rate)
    before = read_progress(options.out)
    progress = before or Progress(alphabet_of(clip.text for clips in train_clips for clip in clips))
    torch.manual_seed(options.seed + progress.steps)
    dataset = DeviceDataset(
        train_clips,
        [source.weight for source in options.source],
        alphabet=progress.alphabet,
        hop=config.hop,
        context=options.context,
        window=options.window,
        noise=options.noise,
        device=device,
        augmentation=_augmentation(options, config, device) if options.augment else None,
    )
    ctc_width = 32 if config == TINY else 256
    network = MelCodecNetwork(config)
    speech_encoder = WhisperEncoder.open(options.speech_encoder) if options.speech_encoder else None
    model = CodecTrainingModel(
        network, len(progress.alphabet), options.discriminator_width, ctc_width, speech_encoder
    ).to(device)
    size = sum(tensor.numel() for tensor in model.network.state_dict().values())
    print(
        f"{size / 1e6:.2f} M weights, of which {_million(model.network.encoder)} encode and "
        f"{_million(model.network.decoder)} decode; discriminators have {_million(model.discriminators)}"
    )
    step_config = StepConfig(
        options.batch_size,
        options.ctc_weight,
        options.ctc_every,
        discriminator_clips=options.discriminator_clips or -(-options.batch_size // 2),
        codebook_dropout=options.codebook_dropout,
        adversarial_weight=options.adversarial_weight,
        feature_matching_weight=options.feature_matching_weight,
        commitment_weight=options.commitment_weight,
        speech_weight=options.speech_weight,
        ema_decay=options.ema_decay,
        loss_frames=options.loss_frames,
        bf16=device.type == "cuda" and not options.fp32,
    )
    trainer = CodecTrainer(model, dataset, step_config)
    trainer.use_cuda_graph = trainer.use_cuda_graph and not options.no_graph
    _choose_depthwise(trainer, options.depthwise)
    warm = 0
    if before is None:
        trainer.init_codebooks()
    else:
        resumed = resume(options.out, trainer)
        warm = progress.steps if resumed.with_moments else 0
        print(f"resumes after {progress.steps} steps and {progress.seconds:.0f} s with {resumed.description}")
    _train_loop(trainer, progress, budget, options, held_out, warm)


def _check(options: argparse.Namespace) -> None:
    if not 0 < (options.loss_frames or options.window) <= options.window <= options.context:
        raise ConfigError(
            f"the losses cannot use {options.loss_frames} frames of {options.window} of {options.context}",
            hint="let --loss-frames be at most --window, and that at most --context",
        )


def _choose_depthwise(trainer: CodecTrainer, choice: str | None) -> None:
    """Choose the implementation of depthwise convolutions: as given, or on CUDA the fastest one."""
    network, dataset = trainer.model.network, trainer.dataset
    if choice is None and trainer.device.type == "cuda":
        first = next(block for block in network.encoder.fine if isinstance(block, ConvNeXtBlock))
        positions = dataset.context * network.config.subframes
        choice, timings = fastest_convs(first, trainer.step_config.clips, positions, trainer._autocast)
        print(f"a block forward and backward: {timings}", flush=True)
    change = {"shifts": use_shifted_convs, "compiled": compile_blocks}.get(choice or "library")
    if change:
        change(trainer.model)


def _augmentation(options: argparse.Namespace, config: MelCodecConfig, device: torch.device) -> Augmentation:
    samples = options.context * config.hop
    found = [recording for source in options.background for recording in recordings.recordings(source)]
    rows = [_row_of(clip, samples) for clip in decode_all(found, config.sample_rate)]
    if rows:
        print(f"backgrounds: {len(rows)} recordings")
    return Augmentation(samples, config.sample_rate, device, backgrounds=torch.stack(rows) if rows else None)


def _row_of(clip: DecodedClip, samples: int) -> torch.Tensor:
    """A recording without speech as long as a row of the bank, with a root mean square of 0.1."""
    wave = pcm_to_float(torch.from_numpy(clip.samples))
    wave = wave.repeat(-(-2 * samples // len(wave)))[: 2 * samples]
    return 0.1 * wave / wave.square().mean().sqrt().clamp(min=1e-6)


def read_sources(
    options: argparse.Namespace, sample_rate: int
) -> tuple[list[list[DecodedClip]], dict[str, list[DecodedClip]]]:
    """Training clips by source, and some clips of held-out speakers by the name of their source."""
    train_clips: list[list[DecodedClip]] = []
    held_out: dict[str, list[DecodedClip]] = {}
    for source in options.source:
        began = time.perf_counter()
        known, strangers = recordings.split_held_out(source.path, options.limit)
        train_clips.append(decode_all(known, sample_rate, options.lossy if options.augment else 0.0))
        name = source.path.stem
        held_out[name if name not in held_out else f"{name}-{len(held_out)}"] = decode_all(strangers, sample_rate)
        print(
            f"{source.path}: {clip_summary(known)}, {hours(train_clips[-1], sample_rate):.2f} h, "
            f"weight {source.weight:g}; held out {clip_summary(strangers)}; "
            f"read in {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    return train_clips, held_out


@dataclass(frozen=True, slots=True)
class TrainingBudget:
    """Length of this command, and of all commands together, in seconds or in steps."""

    here: float
    total: float
    in_steps: bool

    @classmethod
    def of(cls, options: argparse.Namespace) -> TrainingBudget:
        if (options.seconds is None) == (options.steps is None):
            raise ConfigError("give the length of the training once", hint="add --seconds 500, or --steps 10000")
        here = options.steps if options.seconds is None else options.seconds
        return cls(here, options.total or here, options.seconds is None)

    def done(self, progress: Progress) -> float:
        return progress.steps if self.in_steps else progress.seconds


def learning_rate_at(share: float, warm: int, highest: float) -> float:
    """Linear warm-up, then cosine decay."""
    decay = MIN_RATE_SHARE + (1 - MIN_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return highest * min(1.0, (warm + 1) / WARM_UP_STEPS) * decay


def _train_loop(
    trainer: CodecTrainer,
    progress: Progress,
    budget: TrainingBudget,
    options: argparse.Namespace,
    held_out: dict[str, list[DecodedClip]],
    warm: int,
) -> None:
    """Train to the end of the budget; `warm` is the number of steps in the optimizers' moments."""
    at_first, since_log = budget.done(progress), 0
    windows = HeldOutWindows(held_out, trainer.model.network.config, trainer.device)
    before, began = progress.seconds, time.perf_counter()
    logged_at, saved_at = began, began
    while budget.done(progress) - at_first < budget.here and budget.done(progress) < budget.total:
        share = budget.done(progress) / budget.total
        due = progress.steps in CODEBOOK_INIT_STEPS or (progress.steps and not progress.steps % CODEBOOK_INIT_EVERY)
        if share < 0.5 and due:
            trainer.init_codebooks()
        trainer.rate.fill_(learning_rate_at(share, warm, options.learning_rate))
        trainer.step(share >= options.discriminator_after)
        warm, since_log, progress.steps = warm + 1, since_log + 1, progress.steps + 1
        now = time.perf_counter()
        progress.seconds = before + now - began
        if now - logged_at >= options.log_every:
            _log(trainer, progress, since_log, time.perf_counter() - logged_at, windows)
            logged_at, since_log = time.perf_counter(), 0
        if now - saved_at >= options.checkpoint_every:
            _evaluate(trainer, progress, held_out)
            save_checkpoint(options.out, trainer, progress)
            saved_at = logged_at = time.perf_counter()
            since_log = 0
            trainer.mean_losses(1)
    if since_log:
        _log(trainer, progress, since_log, time.perf_counter() - logged_at, windows)
    _evaluate(trainer, progress, held_out)
    save_checkpoint(options.out, trainer, progress)
    write_round_trips(options.out, held_out, trainer.device)
    print(f"{progress.steps} steps in {progress.seconds:.0f} s; the codec is in {options.out / 'codec'}")


def _log(trainer: CodecTrainer, progress: Progress, steps: int, seconds: float, windows: HeldOutWindows) -> None:
    """Log a line of progress. Steps are launched asynchronously: seconds are true only after a synchronisation."""
    means = trainer.mean_losses(steps)
    if not all(math.isfinite(value) for value in means.values()):
        raise TrainingError(
            f"the losses are no longer finite after {progress.steps} steps: {means}",
            hint="resume from the last checkpoint with a lower --learning-rate, or with --fp32",
        )
    row: dict[str, object] = {"steps": progress.steps, "seconds": round(progress.seconds, 1), **means}
    trainer.model.eval()
    with torch.compiler.set_stance("force_eager"):
        distances = windows.score(trainer.model)
    trainer.model.train()
    row["held_out_mel"] = distances
    line = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
    line += "  held out " + " ".join(f"{name} {value:.4f}" for name, value in distances.items())
    row["perplexity"] = perplexity(trainer.model.quantiser.counts)
    line += "  perplexity " + " ".join(f"{value:.0f}" for value in perplexity(trainer.model.quantiser.counts))
    progress.history.append(row)
    print(f"{progress.steps:>7} {progress.seconds:6.0f} s {steps / seconds:6.1f}/s  {line}", flush=True)


def _evaluate(trainer: CodecTrainer, progress: Progress, held_out: dict[str, list[DecodedClip]]) -> None:
    """Score the codec and its EMA on held-out speakers; the one with the lower mel distance is exported."""
    trainer.model.eval()
    distance = {False: 0.0, True: 0.0}
    for of_ema in (False, True) if trainer.ema else (False,):
        with trainer.ema.swapped_in() if of_ema else nullcontext():
            for name, clips in held_out.items():
                if clips:
                    # Clips of all lengths are not worth a compilation each.
                    with torch.compiler.set_stance("force_eager"):
                        scores = score_codec(trainer.model, clips, trainer.device)
                    row = {"steps": progress.steps, "held_out": name, "ema": of_ema} | scores._asdict()
                    progress.history.append(row)
                    distance[of_ema] += scores.mel
                    suffix = " (EMA)" if of_ema else ""
                    print(f"        held out of {name}{suffix}: mel {scores.mel:.4f}, perplexity {scores.perplexity}")
    trainer.ema.is_exported = bool(trainer.ema) and distance[True] <= distance[False]
    print(f"        exported: {'the EMA' if trainer.ema.is_exported else 'the last step'}", flush=True)
    trainer.model.train()


def _million(module: torch.nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in module.parameters()) / 1e6:.2f} M"


if __name__ == "__main__":
    main()
