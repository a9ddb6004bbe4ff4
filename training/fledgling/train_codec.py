"""Train the codec of fledgling.

    python training/fledgling/train_codec.py --source CORPUS/natural=0.7 --source CORPUS/espeak=0.3 \\
        --out runs/codec --seconds 520

    python training/fledgling/train_codec.py --source CORPUS/natural=0.7 --source CORPUS/espeak=0.3 \\
        --out runs/decoder --seconds 400 --decoder-only --begin-with src/myna/models/fledgling/codec

The second one makes the sound of a codec better whose codes a language model has learned: they stay what they are.

A source is a folder with manifest.jsonl, a folder of parquet files, or a file written by --gather. The same command
once more goes on where the last one stopped, up to --total. A tenth of the speakers is held out, by their names
(corpus_making/held_out.py).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from codec_training import sounds
from codec_training.around import shifts_are_quicker, use_shifts
from codec_training.bank import Bank
from codec_training.judging import standing
from codec_training.keeping import Progress, begin_with, go_on, keep, read_progress, refuse_other_codes
from codec_training.learner import Learner, Lesson, Teacher
from codec_training.letters import alphabet_of
from codec_training.profiling import profile
from codec_training.sounds import Clip, decoded, described, hours
from myna.errors import ConfigError, MynaError, TrainingError
from myna.models.mel_codec.network import Block, MelCodecConfig, MelCodecNetwork

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
"""Trains on a CPU in seconds, and shows that all parts work together; no more."""
WARM_UP = 200
"""Steps in which the rate rises, at the start and after going on without the optimizers' moments."""
LAID_OUT, LAID_OUT_EVERY = (20, 60, 200, 500), 1000
"""Steps at which the codebooks are laid out anew in the first half of the training: an encoder that learns fast runs
away from the entries it had, of which few stay in use."""
LOWEST = 0.02
"""What is left of the rate at the end."""
DECODER_ONLY = {
    # Critics hear every clip, since they are what teaches voices, and from the first step on: 225 steps by the mel
    # distance alone made voices worse. Hence fewer clips, and more steps of them.
    "batch": 32,
    "critics_after": 0.0,
    # The decoder sees 14 frames to either side, of which windows of 26 showed it few. Twice as many are decoded, which
    # costs little without an encoder's way back, and critics hear as many as before.
    "window": 52,
    "compared": 26,
    # What the encoder sees to either side of them is 10 frames. Longer clips were wanted to be spelled as a whole.
    "context": 80,
    # As where a codec was last begun with that knew something already.
    "rate": 3e-4,
    # These teach encoder and codebooks: to spell, to stay near entries, to put most into the first ones. A decoder that
    # must do with some codebooks would spend weights on codes that nobody says. Hiss stays (--noise): people's
    # recordings have it, and a decoder that never heard it again would forget what its codes sound like.
    "letters": 0.0,
    "pull": 0.0,
    "pull_left": 0.0,
    "shallow": 0.0,
}
"""What `--decoder-only` asks for where nothing else is said."""
OF_THE_CODES = ("letters", "pull", "pull_left", "shallow")


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.decoder_only:
        options = parser(**DECODER_ONLY).parse_args(arguments)
    try:
        if options.gather:
            if len(options.source) > 1:
                raise ConfigError(
                    "a gathered file has one source, so that each keeps its weight", hint="gather them singly"
                )
            count = sounds.gather(options.source[0].path, options.gather, options.limit)
            print(f"{count} clips in {options.gather}, {options.gather.stat().st_size / 1e6:.1f} MB")
        else:
            train(options)
    except MynaError as error:
        sys.exit(f"{error}")


@dataclass(frozen=True, slots=True)
class Source:
    path: Path
    weight: float


def source(text: str) -> Source:
    path, _, weight = text.rpartition("=")
    return Source(Path(path), float(weight)) if path else Source(Path(text), 1.0)


def parser(**instead: float) -> argparse.ArgumentParser:
    """With other defaults where some are given."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add(
        "--source", type=source, action="append", required=True, metavar="PATH[=WEIGHT]", help="sounds; may be repeated"
    )
    add("--gather", type=Path, metavar="FILE", help="write the source to one .safetensors file as Opus, and stop")
    add("--out", type=Path, default=Path("runs/codec"), help="what is made, and what it takes to go on")
    add(
        "--begin-with", type=Path, metavar="CODEC", help="the codec of an earlier training, to learn more than it knows"
    )
    add(
        "--decoder-only",
        action="store_true",
        help="leave encoder and codebooks of --begin-with as they are, and so its codes; other settings are "
        + ", ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in DECODER_ONLY.items()),
    )
    add("--seconds", type=float, help="train so long in this command, reading the sources not counted")
    add("--steps", type=int, help="or so many steps")
    add("--total", type=float, help="seconds (or steps) of all commands together, over which the rate falls")
    add("--batch", type=int, default=48, help="clips in a step")
    add("--context", type=int, default=128, help="frames of a clip that are encoded")
    add("--window", type=int, default=26, help="frames of it that are decoded")
    add("--compared", type=int, help="frames of those that are compared and criticised; all if not said")
    add("--rate", type=float, default=5e-4, help="learning rate at its highest")
    add("--critics-after", type=float, default=0.08, help="the share of the training after which critics join in")
    add("--critic-width", type=int, default=32)
    add("--criticised", type=int, help="clips of a step that the critics hear; half of them if not said, or all")
    add("--fooled", type=float, default=0.5, help="weight of fooling the critics")
    add("--likeness", type=float, default=2.0, help="weight of being felt alike by them")
    add("--letters-every", type=int, default=2, help="steps from one spelling to the next")
    add(
        "--mean",
        type=float,
        default=0.999,
        help="how much of a running mean a step keeps, which ships if it is better; 0: none",
    )
    add("--around", choices=("library", "shifts"), help="how filters are computed; on a card it is measured")
    add("--letters", type=float, default=1.0, help="weight of spelling the text with the first codebook; 0: none")
    add("--pull", type=float, default=0.25, help="weight of the distance of latents from each codebook's entries")
    add("--pull-left", type=float, default=0.0, help="weight of their distance from all codebooks' entries together")
    add("--shallow", type=float, default=0.1, help="share of clips that must do with fewer codebooks")
    add("--noise", type=float, default=0.1, help="share of clips with a hiss under them")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--fp32", action="store_true", help="no bf16 on a card")
    add("--no-graph", action="store_true", help="launch every kernel of every step on a card")
    add("--compile", action="store_true", help="compile blocks and critics: a minute more at first, then faster steps")
    add("--profile", action="store_true", help="say where the time of a step goes, and stop")
    add("--tiny", action="store_true", help="a network of toy size")
    add("--limit", type=int, help="read only so many clips of each source")
    add("--tell-every", type=float, default=10.0, help="seconds between two lines of progress")
    add("--keep-every", type=float, default=150.0, help="seconds between two checkpoints")
    add("--seed", type=int, default=0)
    made.set_defaults(**instead)
    return made


def train(options: argparse.Namespace) -> None:
    budget = Budget.of(options)
    _check(options)
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True

    config = TINY if options.tiny else MelCodecConfig()
    learned, judged = read(options, config.sample_rate)
    before = read_progress(options.out)
    progress = before or Progress(
        "" if options.decoder_only else alphabet_of(clip.text for clips in learned for clip in clips),
        decoder_only=options.decoder_only,
    )
    torch.manual_seed(options.seed + progress.steps)
    bank = Bank(
        learned,
        [source.weight for source in options.source],
        alphabet=progress.alphabet,
        hop=config.hop,
        context=options.context,
        window=options.window,
        noise=options.noise,
        device=device,
    )
    reader_width = 32 if options.tiny else 256
    network = MelCodecNetwork(config)
    if options.begin_with and before is None:
        begin_with(options.begin_with, network)
    learner = Learner(network, len(progress.alphabet), options.critic_width, reader_width).to(device)
    size = sum(tensor.numel() for tensor in learner.network.state_dict().values())
    print(
        f"{size / 1e6:.2f} M weights, of which {_million(learner.network.encoder)} encode and "
        f"{_million(learner.network.decoder)} decode; critics have {_million(learner.critics)}"
    )
    lesson = Lesson(
        options.batch,
        options.letters,
        options.letters_every,
        criticised=options.criticised or (options.batch if options.decoder_only else -(-options.batch // 2)),
        shallow=options.shallow,
        fooled=options.fooled,
        likeness=options.likeness,
        pull=options.pull,
        pull_left=options.pull_left,
        mean=options.mean,
        compared=options.compared,
        decoder_only=options.decoder_only,
        bf16=device.type == "cuda" and not options.fp32,
    )
    teacher = Teacher(learner, bank, lesson)
    teacher.records = teacher.records and not options.no_graph
    _choose_around(teacher, options.around)
    if options.compile:
        taught = learner.network.decoder if options.decoder_only else learner
        for module in [*(one for one in taught.modules() if isinstance(one, Block)), *learner.critics.all]:
            module.compile(dynamic=False)
    warm = 0
    if before is None:
        if not options.decoder_only:
            teacher.lay_out()
    else:
        went_on = go_on(options.out, teacher)
        if options.decoder_only:
            refuse_other_codes(options.begin_with, network)
        warm = progress.steps if went_on.with_moments else 0
        print(f"goes on after {progress.steps} steps and {progress.seconds:.0f} s with {went_on.what}")
    if options.profile:
        profile(teacher)
        return
    _go(teacher, progress, budget, options, judged, warm)


def _check(options: argparse.Namespace) -> None:
    if not 0 < (options.compared or options.window) <= options.window <= options.context:
        raise ConfigError(
            f"{options.compared} frames of {options.window} of {options.context} cannot be compared",
            hint="let --compared be at most --window, and that at most --context",
        )
    if not options.decoder_only:
        return
    if options.begin_with is None:
        raise ConfigError(
            "--decoder-only leaves the codes of a codec as they are, and does not say of which",
            hint="add --begin-with src/myna/models/fledgling/codec",
        )
    for name in OF_THE_CODES:
        if getattr(options, name):
            said = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{said} teaches encoder and codebooks, which --decoder-only leaves as they are",
                hint=f"leave out {said}, or --decoder-only",
            )


def _choose_around(teacher: Teacher, asked: str | None) -> None:
    """How filters of one channel each are computed: as asked, or on a card by what is quicker there. An encoder that
    does not learn keeps the library's, which its codes were made with."""
    network, bank = teacher.learner.network, teacher.bank
    decoder_only = teacher.lesson.decoder_only
    blocks = network.decoder.fine if decoder_only else network.encoder.fine
    shifts = asked == "shifts"
    if asked is None and teacher.device.type == "cuda":
        first = next(block for block in blocks if isinstance(block, Block))
        places = (bank.window if decoder_only else bank.context) * network.config.subframes
        shifts, said = shifts_are_quicker(first, teacher.lesson.clips, places, teacher._half)
        print(f"a block forward and backward: {said}")
    if shifts:
        use_shifts(network.decoder if decoder_only else teacher.learner)


def read(options: argparse.Namespace, sample_rate: int) -> tuple[list[list[Clip]], dict[str, list[Clip]]]:
    """What to learn from, by source, and some clips of speakers held out, by the name of their source."""
    learned, judged = [], {}
    for source in options.source:
        began = time.perf_counter()
        known, unknown = sounds.split(source.path, options.limit)
        learned.append(decoded(known, sample_rate))
        judged[source.path.stem] = decoded(unknown, sample_rate)
        print(
            f"{source.path}: {described(known)}, {hours(learned[-1], sample_rate):.2f} h, weight {source.weight:g}; "
            f"to judge by {described(unknown)}; read in {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    return learned, judged


@dataclass(frozen=True, slots=True)
class Budget:
    """How far this command goes, and how far all commands go together, in seconds or in steps."""

    here: float
    total: float
    in_steps: bool

    @classmethod
    def of(cls, options: argparse.Namespace) -> Budget:
        if options.profile:
            return cls(0, 1, in_steps=True)
        if (options.seconds is None) == (options.steps is None):
            raise ConfigError(
                "how long to train is not said, or said twice", hint="add --seconds 500, or --steps 10000"
            )
        here = options.steps if options.seconds is None else options.seconds
        return cls(here, options.total or here, options.seconds is None)

    def done(self, progress: Progress) -> float:
        return progress.steps if self.in_steps else progress.seconds


def rate_at(share: float, warm: int, highest: float) -> float:
    """A short rise, then half a cosine down."""
    fall = LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return highest * min(1.0, (warm + 1) / WARM_UP) * fall


def _go(
    teacher: Teacher,
    progress: Progress,
    budget: Budget,
    options: argparse.Namespace,
    judged: dict[str, list[Clip]],
    warm: int,
) -> None:
    """Up to the end of the budget; `warm` is the number of steps that the optimizers' moments know of."""
    at_first, since_told = budget.done(progress), 0
    lays_out = not teacher.lesson.decoder_only
    before, began = progress.seconds, time.perf_counter()
    told_at, kept_at = began, began
    while budget.done(progress) - at_first < budget.here and budget.done(progress) < budget.total:
        share = budget.done(progress) / budget.total
        due = progress.steps in LAID_OUT or (progress.steps and not progress.steps % LAID_OUT_EVERY)
        if lays_out and share < 0.5 and due:
            teacher.lay_out()
        teacher.rate.fill_(rate_at(share, warm, options.rate))
        teacher.step(share >= options.critics_after)
        warm, since_told, progress.steps = warm + 1, since_told + 1, progress.steps + 1
        now = time.perf_counter()
        progress.seconds = before + now - began
        if now - told_at >= options.tell_every:
            _tell(teacher, progress, since_told, time.perf_counter() - told_at)
            told_at, since_told = time.perf_counter(), 0
        if now - kept_at >= options.keep_every:
            _judge(teacher, progress, judged)
            keep(options.out, teacher, progress)
            kept_at = told_at = time.perf_counter()
            since_told = 0
            teacher.tell(1)
    if since_told:
        _tell(teacher, progress, since_told, time.perf_counter() - told_at)
    _judge(teacher, progress, judged)
    keep(options.out, teacher, progress)
    print(f"{progress.steps} steps in {progress.seconds:.0f} s; the codec is in {options.out / 'codec'}")


def _tell(teacher: Teacher, progress: Progress, steps: int, seconds: float) -> None:
    """A line of progress. Steps are launched ahead of the card, so the seconds are true only here, where we waited."""
    means = teacher.tell(steps)
    if not all(math.isfinite(value) for value in means.values()):
        raise TrainingError(
            f"the losses are no longer finite after {progress.steps} steps: {means}",
            hint="go on from the last checkpoint with a lower --rate, or with --fp32",
        )
    progress.history.append({"steps": progress.steps, "seconds": round(progress.seconds, 1)} | means)
    line = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
    print(f"{progress.steps:>7} {progress.seconds:6.0f} s {steps / seconds:6.1f}/s  {line}", flush=True)


def _judge(teacher: Teacher, progress: Progress, judged: dict[str, list[Clip]]) -> None:
    """As it is, and as its running mean; what is nearer to the sounds of strangers ships."""
    teacher.learner.eval()
    apart = {False: 0.0, True: 0.0}
    for of_mean in (False, True) if teacher.mean else (False,):
        with teacher.mean.instead() if of_mean else nullcontext():
            for name, clips in judged.items():
                if clips:
                    # Clips of all lengths are not worth a compilation each.
                    with torch.compiler.set_stance("force_eager"):
                        found = standing(teacher.learner, clips, teacher.device)
                    row = {"steps": progress.steps, "held out": name, "mean": of_mean} | found._asdict()
                    progress.history.append(row)
                    apart[of_mean] += found.mel
                    as_what = " (running mean)" if of_mean else ""
                    print(f"        held out of {name}{as_what}: mel {found.mel:.4f}, codes in use {found.used}")
    teacher.mean.ships = bool(teacher.mean) and apart[True] <= apart[False]
    print(f"        what ships is {'the running mean' if teacher.mean.ships else 'the last step'}", flush=True)
    teacher.learner.train()


def _million(module: torch.nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in module.parameters()) / 1e6:.2f} M"


if __name__ == "__main__":
    main()
