"""Sound to words: the training renderer with the last turn left open, and the model's answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn

from myna.audio.clip import read
from myna.data.answer_grammar import Grammar
from myna.data.codec import Codes, Encoder
from myna.data.conversation import Clip, question
from myna.data.corpus import Corpus
from myna.errors import SpeakError
from myna.models.base import Answered, Family


class Heard(NamedTuple):
    """A clip, and what is asked about it."""

    id: str
    codes: Codes
    asked: str


class Listener:
    """A model that hears and answers. `together` clips are answered at a time, which changes no answer; `grammar` is
    what answers are held to, if anything."""

    grammar: Grammar | None = None

    def __init__(self, family: Family, model: nn.Module, encoder: Encoder, together: int = 16) -> None:
        self.family, self.model, self.encoder, self.together = family, model.eval(), encoder, together

    def recording(self, path: Path, asked: str) -> Heard:
        samples = read(path, sample_rate=self.encoder.sample_rate)
        whole = len(samples) // self.encoder.hop * self.encoder.hop
        if not whole:
            raise SpeakError(f"{path} is shorter than one frame", hint="give a recording of speech")
        return Heard(str(path), self.encoder.encode(samples[None, :whole])[0], asked)

    def corpus(self, corpus: Corpus) -> list[Heard]:
        """Every clip of a prepared folder that has an answer."""
        table = corpus.table
        rows = [row for row in range(len(table)) if table.answer[row].as_py()]
        return [Heard(table.id[row].as_py(), corpus.codes_at(row), table.scene.at(row)) for row in rows]

    def answer(
        self, clips: Sequence[Heard], max_tokens: int, on_answer: Callable[[int], None] | None = None
    ) -> Iterator[Answered]:
        for start in range(0, len(clips), self.together):
            part = clips[start : start + self.together]
            prompts = [self.family.render(question(asked, Clip(id, codes), id=id)) for id, codes, asked in part]
            yield from self.family.answer(self.model, prompts, max_tokens, self.grammar)
            if on_answer is not None:
                on_answer(start + len(part))
