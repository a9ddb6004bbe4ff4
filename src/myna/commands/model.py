"""`myna merge`, `verify` and `model`: checkpoints and adapters, and whether they compute what they should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from rich.text import Text

from myna.commands import options as opt
from myna.commands.display import call_with_bars, console, plain_table, show, show_json
from myna.commands.options import Call, PathLike, command, option
from myna.core.io import check_writable, report_disk_errors
from myna.core.progress import ProgressCallback, silent

if TYPE_CHECKING:
    from myna.checks.verify import Certificate
    from myna.models.merge import MergeCheck

MIN_DETAIL_WIDTH = 120
"""Columns of a terminal that has room for sentences beside a table."""
LoraMode = Annotated[str, option("comprehensive, audio_focused, attention_only or custom.")]
LoraRank = Annotated[int, option("Rank of the LoRA.", least=1)]


def merge(
    source: Annotated[PathLike, option("Run folder, one of its checkpoints, or a LoRA adapter.")],
    out: opt.Out,
    *,
    model: opt.BaseModel = None,
    layout: opt.WeightsLayout = "transformers",
    strength: opt.Strength = 1.0,
    dtype: Annotated[str, option("Type of the weights: auto (the base model's), float32, bfloat16, float16.")] = "auto",
    device: opt.Device = "cpu",
) -> MergeCheck:
    """Merge a LoRA into its base model: a whole model with tokenizer and codec, to speak with and to train on.

    Its logits are compared with the adapter's, and the written files are read back bit for bit; myna.json in it says
    how it was made.
    """
    from myna.models.ref import ModelRef
    from myna.speak.loading import merge_tuned

    ref = ModelRef.find_trained(source, model)
    return merge_tuned(ref, Path(out), layout=layout, strength=strength, dtype=dtype, device=device)


@command("merge", merge, example="myna merge runs/marta --out models/marta")
def _(call: Call[MergeCheck]) -> None:
    check = call()
    layout = call.keywords.get("layout", "transformers")
    difference = f"at most {check.largest_difference:.2g} of {check.largest_logit:.3g}"
    made = f"{call.keywords['out']}: a whole model in {check.dtype}, {layout} layout"
    show(f"{made}; {check.logits:,} logits differ from the adapter's by {difference}")


@report_disk_errors()
def verify(
    source: Annotated[PathLike, option("Model, run folder, one of its checkpoints, or a LoRA adapter.")],
    out: Annotated[PathLike | None, option("Folder to write verify.json and verify.html into.", "-o")] = None,
    *,
    model: opt.BaseModel = None,
    codec: opt.Codec = None,
    device: opt.Device = "auto",
    quick: Annotated[bool, option("Generate less: a minute instead of several.")] = False,
    progress: ProgressCallback = silent,
) -> Certificate:
    """Verify a model, a run or an adapter on this device: compare our forward, speech, streams, merging and training
    paths with transformers' own and with one another.

    The first difference is named. A failed check is no exception in Python: see `passed` and `verdict` of the result.
    """
    from myna.checks.verify import run_verification

    if out is not None:
        check_writable(Path(out))
    found = run_verification(source, base=model, codec=codec, device=device, quick=quick, progress=progress)
    if out is not None:
        found.save(Path(out))
    return found


@command("verify", verify, example="myna verify runs/marta --quick")
def _(call: Call[Certificate], *, as_json: opt.Json = False) -> int:
    """Exit code 1 if a check fails."""
    found = call_with_bars(call)
    if as_json:
        show_json({"verdict": found.verdict, "passed": found.passed, **asdict(found)})
    else:
        show_certificate(found)
    return 0 if found.passed else 1


def show_certificate(certificate: Certificate) -> None:
    """Print every check of a verification, and the verdict."""
    screen = console()
    table = plain_table()
    for title in ("check", "result", "difference", "tolerance", "seconds"):
        table.add_column(title, no_wrap=True, justify="left" if title in ("check", "result") else "right")
    is_wide = screen.width >= MIN_DETAIL_WIDTH
    if is_wide:
        table.add_column("measured", overflow="fold")
    styles = {"passed": "green", "failed": "red", "skipped": "dim"}
    for check in certificate.checks:
        figures = ["" if value is None else f"{value:.2g}" for value in (check.difference, check.tolerance)]
        status = Text(check.status, styles[check.status])
        detail = [Text(check.explanation)] if is_wide else []
        table.add_row(Text(check.name, "bold"), status, *figures, f"{check.seconds:.1f}", *detail)
    screen.print(table)
    if not is_wide:
        show(*(f"{check.name}: {check.explanation}" for check in certificate.checks))
    show(certificate.verdict)


def model_stats(
    model: Annotated[str, option("Hub name, folder, or `higgs-v2` for the true size without weights.")],
    *,
    lora: LoraMode = "comprehensive",
    rank: LoraRank = 16,
    targets: Annotated[Sequence[str], option("End of a module name, for `custom`; repeatable.")] = (),
    train_modules: Annotated[
        Sequence[str], option("Module trained in full: text_head, audio_head or audio_embedding; repeatable.")
    ] = (),
) -> dict[str, Any]:
    """Count the parameters of a model and those that a LoRA would train, from shapes alone and without weights."""
    from myna.core.config import AdaptSettings, parse_settings
    from myna.models import lora as adapters
    from myna.models import open_family

    tree = {"mode": lora, "rank": rank, "targets": tuple(targets), "train_modules": tuple(train_modules)}
    return adapters.count_model(open_family(model), parse_settings(AdaptSettings, tree, where="`lora`"))


@command("model stats", model_stats, example="myna model stats higgs-v2 --rank 32")
def _(call: Call[dict[str, Any]], *, as_json: opt.Json = False) -> None:
    numbers, options = call(), call.keywords
    if as_json:
        show_json(numbers)
    else:
        title = f"{options['model']}, {options.get('lora', 'comprehensive')}, rank {options.get('rank', 16)}"
        show_model_stats(title, numbers)


def show_model_stats(title: str, numbers: dict[str, Any]) -> None:
    """Print counts and shares in a table."""
    table = Table(title=title, show_header=False)
    for key, value in numbers.items():
        is_share = isinstance(value, float)
        table.add_row(key, f"{value:,}" if isinstance(value, int) else f"{value:.4%}" if is_share else str(value))
    console().print(table)


def convert(
    source: Annotated[PathLike, option("Folder of a checkpoint or of a LoRA adapter.")],
    out: opt.Out,
    *,
    layout: opt.WeightsLayout = "transformers",
) -> Path:
    """Rewrite a checkpoint or an adapter in another layout, bit for bit."""
    from myna.models import convert_checkpoint

    convert_checkpoint(Path(source), Path(out), layout)
    return Path(out)


@command("model convert", convert, example="myna model convert models/marta --out original --layout original")
def _(call: Call[Path]) -> None:
    show(f"{call()}: {call.keywords.get('layout', 'transformers')} layout")


def extract_lora(
    base: Annotated[str, option("Hub name or folder of the model that was tuned.")],
    tuned: Annotated[str, option("Hub name or folder of the fully trained model.")],
    out: opt.Out,
    *,
    rank: LoraRank = 16,
    lora: LoraMode = "comprehensive",
) -> dict[str, Any]:
    """Turn a fully trained model into a LoRA of its base, by truncated SVD, and report the relative error."""
    from myna.models.merge import extract_adapter

    return dict(extract_adapter(base, tuned, Path(out), rank, mode=lora))


@command("model extract", extract_lora, example="myna model extract fledgling models/marta --out adapter")
def _(call: Call[dict[str, Any]]) -> None:
    error = call()["error"]
    show(f"{call.keywords['out']}: rank {call.keywords.get('rank', 16)}, relative error {error:.2%}")


def make_tiny(
    out: opt.Out,
    *,
    seed: Annotated[int, option("Seed of the weights.")] = 0,
    answers: Annotated[bool, option("Make a model that listens and answers in words.")] = False,
) -> Path:
    """Write a tiny random checkpoint of the real classes, to try everything on."""
    from myna.models import save_tiny_model

    return save_tiny_model(Path(out), seed=seed, answers=answers)


@command("model tiny", make_tiny, example="myna model tiny --out models/tiny")
def _(call: Call[Path]) -> None:
    can = "answer" if call.keywords.get("answers") else "speak"
    show(f"{call()}: a tiny random model with its codec; it has to be trained before it can {can}")
