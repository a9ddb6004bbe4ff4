"""`myna answer`: a model that listens and answers in words."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table

from myna.commands.command import command
from myna.commands.display import console, progress_bars, show_notes, show_warnings
from myna.commands.options import BatchSize, Device, Force, PathLike, option
from myna.core.errors import SpeakError

if TYPE_CHECKING:
    from rich.console import Console

    from myna.speak.answering import AnswerModel, DatasetAnswers


def load_answer_model(
    source: PathLike, *, model: str | None = None, device: str = "auto", batch_size: int = 16
) -> AnswerModel:
    """Open a model that answers in words, as `load` opens one that speaks."""
    from myna.commands.speak import model_ref
    from myna.speak.answering import AnswerModel

    return AnswerModel.open(model_ref(source, model), device=device, batch_size=batch_size)


@command("answer", example="myna answer lesson.wav --run runs/learner")
def _(
    recordings: Annotated[Sequence[PathLike], option("Recordings, or one folder made by `myna prepare` with answers.")],
    *,
    run: Annotated[PathLike | None, option("Run folder, one of its checkpoints, or a LoRA adapter.")] = None,
    model: Annotated[str | None, option("An untuned model; beside --run, its base model.", "-m")] = None,
    question: Annotated[str | None, option("Question to ask; by default to rate the pronunciation.")] = None,
    out: Annotated[PathLike | None, option("JSONL file for the answers to a prepared folder.", "-o")] = None,
    max_tokens: Annotated[int, option("Longest answer, at which a runaway is cut.", least=1)] = 512,
    batch_size: BatchSize = 16,
    constrained: Annotated[bool, option("Keep answers to the JSON of an assessment: all can be parsed.")] = False,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Answer questions about recordings with a model that listens, or compare its answers with those of a folder."""
    from myna.core.io import check_output_file
    from myna.data.dataset import DATASET_INFO_FILE
    from myna.models.ref import ModelRef
    from myna.speak.answering import AnswerModel, trained_warnings

    first = Path(recordings[0])
    folder = first if (first / DATASET_INFO_FILE).is_file() else None
    if folder is not None and (len(recordings) > 1 or out is None or question is not None):
        raise SpeakError(
            f"{folder} is a prepared folder, which comes alone, with questions of its own and an --out",
            hint=f"myna answer {folder} --run RUN --out answers.jsonl",
        )
    if folder is None and out is not None:
        raise SpeakError("--out is for the answers to a prepared folder", hint="leave it out, or name such a folder")
    if folder is not None and out is not None:
        for file in (Path(out), AnswerModel.scores_file(out)):
            check_output_file(file, inputs=folder.rglob("*"), force=force)
    answerer = AnswerModel.open(ModelRef.from_options(run, model), device=device, batch_size=batch_size)
    if folder is None or out is None:
        with progress_bars() as progress:
            answers = answerer.answer_all(
                recordings, question, max_tokens=max_tokens, constrained=constrained, progress=progress
            )
        show_warnings(trained_warnings(answerer.trained_recordings(recordings)), console(stderr=True))
        for recording, reply in zip(recordings, answers, strict=True):
            show_notes([f"{os.fspath(recording)}: {reply.text}"], console())
        return
    with progress_bars() as progress:
        result = answerer.answer_dataset(
            folder, out, max_tokens=max_tokens, constrained=constrained, force=force, progress=progress
        )
    _show_dataset_answers(result, console())
    exact = f"{result.exact} of {len(result.rows)} answers equal the expected ones, letter for letter"
    show_notes([f"{os.fspath(out)}: {exact}", f"{answerer.scores_file(out)}: every figure"], console())


def _show_dataset_answers(answers: DatasetAnswers, console: Console) -> None:
    """Print warnings, and the metrics of answers that are assessments."""
    show_warnings(answers.warnings, console)
    show_notes(answers.notes, console)
    if answers.assessment is not None:
        table = Table(*answers.assessment.header, title=answers.assessment.title)
        for cells in answers.assessment.rows:
            table.add_row(*cells)
        console.print(table)
