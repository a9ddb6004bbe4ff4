"""Answer engine: recording and question to text through the training renderer and the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from myna.audio.files import read_audio
from myna.core.errors import SpeakError
from myna.data.codec import Codes, Encoder
from myna.data.conversation import AudioClip, answer_conversation
from myna.data.dataset import PreparedDataset
from myna.data.pronunciation import AssessmentTable
from myna.models.base import Family, GeneratedAnswer, require_answering
from myna.models.files import format_names
from myna.speak.engine import encode_clip


class AudioQuestion(NamedTuple):
    """An encoded recording and a question about it."""

    id: str
    codes: Codes
    question: str


@dataclass(frozen=True, slots=True)
class DatasetAnswers:
    """Answers to the clips of a prepared folder, and how good they are."""

    rows: list[dict[str, Any]]
    """`id`, `answer`, `expected` and `stopped` of each clip; `trained_on` is `audio` or `words` where the run was
    trained on the clip, empty where it was not, and None where that is not known."""
    assessment: AssessmentTable | None
    """Metrics, where the answers are assessments."""
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> int:
        return sum(row["answer"] == row["expected"] for row in self.rows)

    @property
    def warnings(self) -> list[str]:
        """What belongs above every figure."""
        return trained_warnings({row["id"]: row["trained_on"] for row in self.rows})

    def to_json(self) -> dict[str, Any]:
        return {
            "warnings": self.warnings,
            "answers": len(self.rows),
            "exact": self.exact,
            "assessment": self.assessment.figures if self.assessment is not None else None,
            "notes": list(self.notes),
        }


def trained_warnings(trained_on: Mapping[str, str | None]) -> list[str]:
    """A warning where some of these recordings, by id, were trained on."""
    trained = [id for id, kind in trained_on.items() if kind]
    if not trained:
        return []
    return [
        f"the run was trained on {len(trained)} of these {len(trained_on)} recordings: {format_names(trained)}. Its "
        "answers to them say nothing about new ones; hold some out before training: myna split DATA --speakers 2"
    ]


class AnswerEngine:
    """An answering model with its audio encoder. Answers do not depend on `batch_size`; with a Lark `grammar`, as
    `data/pronunciation/grammar.py` has one, they follow it."""

    grammar: str | None = None

    def __init__(self, family: Family, model: nn.Module, encoder: Encoder, batch_size: int = 16) -> None:
        self.family, self.model = require_answering(family), model.eval()
        self.encoder, self.batch_size = encoder, batch_size

    def recording(self, path: Path, question: str) -> AudioQuestion:
        samples = read_audio(path, sample_rate=self.encoder.sample_rate)
        if len(samples) < self.encoder.hop:
            raise SpeakError(f"{path} is shorter than one frame", hint="give a recording of speech")
        return AudioQuestion(str(path), encode_clip(self.encoder, samples), question)

    def dataset_questions(self, dataset: PreparedDataset) -> list[AudioQuestion]:
        """The clips of a prepared folder that have an answer."""
        table = dataset.table
        return [
            AudioQuestion(table.id[row].as_py(), dataset.codes_at(row), table.question.value_at(row))
            for row in range(len(table))
            if table.answer[row].as_py()
        ]

    def answer(
        self, questions: Sequence[AudioQuestion], max_tokens: int, on_answer: Callable[[int], None] | None = None
    ) -> Iterator[GeneratedAnswer]:
        for start in range(0, len(questions), self.batch_size):
            batch = questions[start : start + self.batch_size]
            conversations = (answer_conversation(text, AudioClip(id, codes), id=id) for id, codes, text in batch)
            yield from self.family.answer(
                self.model, [self.family.render(one) for one in conversations], max_tokens, self.grammar
            )
            if on_answer is not None:
                on_answer(start + len(batch))
