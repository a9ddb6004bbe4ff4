"""Sound to words: the training renderer with the last turn left open, and the model's answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn

from myna.audio.files import read
from myna.data.codec import Codes, Encoder
from myna.data.conversation import AudioClip, question
from myna.data.dataset import PreparedDataset
from myna.data.pronunciation.grammar import Grammar
from myna.errors import SpeakError
from myna.models.base import Family, GeneratedAnswer


class AudioQuestion(NamedTuple):
    """A clip, and what is asked about it."""

    id: str
    codes: Codes
    asked: str


class AnswerEngine:
    """A model that hears and answers. `together` clips are answered at a time, which changes no answer; `grammar` is
    what answers are held to, if anything."""

    grammar: Grammar | None = None

    def __init__(self, family: Family, model: nn.Module, encoder: Encoder, together: int = 16) -> None:
        self.family, self.model, self.encoder, self.together = family, model.eval(), encoder, together

    def recording(self, path: Path, asked: str) -> AudioQuestion:
        samples = read(path, sample_rate=self.encoder.sample_rate)
        whole = len(samples) // self.encoder.hop * self.encoder.hop
        if not whole:
            raise SpeakError(f"{path} is shorter than one frame", hint="give a recording of speech")
        return AudioQuestion(str(path), self.encoder.encode(samples[None, :whole])[0], asked)

    def corpus(self, corpus: PreparedDataset) -> list[AudioQuestion]:
        """Every clip of a prepared folder that has an answer."""
        table = corpus.table
        rows = [row for row in range(len(table)) if table.answer[row].as_py()]
        return [AudioQuestion(table.id[row].as_py(), corpus.codes_at(row), table.scene.at(row)) for row in rows]

    def answer(
        self, clips: Sequence[AudioQuestion], max_tokens: int, on_answer: Callable[[int], None] | None = None
    ) -> Iterator[GeneratedAnswer]:
        for start in range(0, len(clips), self.together):
            part = clips[start : start + self.together]
            prompts = [self.family.render(question(asked, AudioClip(id, codes), id=id)) for id, codes, asked in part]
            yield from self.family.answer(self.model, prompts, max_tokens, self.grammar)
            if on_answer is not None:
                on_answer(start + len(part))
