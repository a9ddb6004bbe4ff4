"""Answer engine: recording and question to text through the training renderer and the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn

from myna.audio.files import read_audio
from myna.data.codec import Codes, Encoder
from myna.data.conversation import AudioClip, answer_conversation
from myna.data.dataset import PreparedDataset
from myna.errors import SpeakError
from myna.models.base import Family, GeneratedAnswer, require_answering
from myna.speak.engine import encode_clip


class AudioQuestion(NamedTuple):
    """An encoded recording and a question about it."""

    id: str
    codes: Codes
    question: str


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
