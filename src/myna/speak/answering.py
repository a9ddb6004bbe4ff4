"""Answers in words: recordings and questions to text, through the training renderer and the model."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from myna.audio.files import read_audio
from myna.core.device import pick_device
from myna.core.errors import DataError, SpeakError
from myna.core.io import check_output_file, save_text
from myna.core.progress import ProgressCallback, silent
from myna.data.codec import Codes
from myna.data.conversation import AudioClip, answer_conversation
from myna.data.dataset import PreparedDataset
from myna.data.pronunciation import DEFAULT_QUESTION, AssessmentTable, answer_grammar, assessment_table
from myna.data.split import ComparedClip, TrainedClips
from myna.models.base import GeneratedAnswer, require_answering
from myna.models.files import format_names
from myna.models.ref import ModelRef
from myna.speak.engine import encode_clip
from myna.speak.loading import check_trained_with, load_model_weights

PathLike = str | os.PathLike[str]


class AudioQuestion(NamedTuple):
    """An encoded recording and a question about it."""

    id: str
    codes: Codes
    question: str


@dataclass(frozen=True, slots=True)
class DatasetAnswers:
    """Answers to the clips of a prepared folder, and how good they are."""

    rows: list[dict[str, Any]]
    """`id`, `answer`, `expected` and `stopped` of each clip. `trained_on` is `audio` or `words` if the run was
    trained on the clip, empty if not, and None if that is not known."""
    assessment: AssessmentTable | None
    """Metrics of pronunciation, if the answers are assessments."""
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> int:
        return sum(row["answer"] == row["expected"] for row in self.rows)

    @property
    def warnings(self) -> list[str]:
        """Warnings that belong above every figure."""
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
    """Return a warning if the run was trained on some of these recordings, given by id."""
    trained = [id for id, kind in trained_on.items() if kind]
    if not trained:
        return []
    return [
        f"the run was trained on {len(trained)} of these {len(trained_on)} recordings: {format_names(trained)}. Its "
        "answers to them say nothing about new ones; hold some out before training: myna split DATA --speakers 2"
    ]


class AnswerModel:
    """A model that answers questions about recordings in words, made by `load_answer_model`. Answers do not depend on
    `batch_size`."""

    def __init__(self, ref: ModelRef, *, device: str = "auto", batch_size: int = 16) -> None:
        """Load a run, an adapter or a model that answers."""
        target = pick_device(device)
        family, weights = load_model_weights(ref, None, target, target)
        self.encoder = family.load_encoder(device=target)
        check_trained_with(ref, family, self.encoder)
        self.family, self.model = require_answering(family), weights.eval()
        self.batch_size, self._recipe = batch_size, ref.run.recipe if ref.run is not None else None

    def answer_questions(
        self,
        questions: Sequence[AudioQuestion],
        max_tokens: int,
        *,
        constrained: bool,
        progress: ProgressCallback = silent,
    ) -> Iterator[GeneratedAnswer]:
        """Answer questions about encoded recordings, in batches."""
        grammar = answer_grammar() if constrained else None
        for start in range(0, len(questions), self.batch_size):
            batch = questions[start : start + self.batch_size]
            conversations = (answer_conversation(text, AudioClip(id, codes), id=id) for id, codes, text in batch)
            yield from self.family.answer(self.model, list(map(self.family.render, conversations)), max_tokens, grammar)
            progress("answering", start + len(batch), len(questions))

    def answer(
        self, recording: PathLike, question: str | None = None, *, max_tokens: int = 512, constrained: bool = False
    ) -> GeneratedAnswer:
        """Answer a question about one recording; by default, rate its pronunciation. `constrained` limits the answer
        to the JSON of an assessment."""
        return self.answer_all([recording], question, max_tokens=max_tokens, constrained=constrained)[0]

    def answer_all(
        self,
        recordings: Sequence[PathLike],
        question: str | None = None,
        *,
        max_tokens: int = 512,
        constrained: bool = False,
        progress: ProgressCallback = silent,
    ) -> list[GeneratedAnswer]:
        """Answer one question about many recordings, in batches."""
        text, clips = question if question is not None else DEFAULT_QUESTION, list[AudioQuestion]()
        for path in map(Path, recordings):
            samples = read_audio(path, sample_rate=self.encoder.sample_rate)
            if len(samples) < self.encoder.hop:
                raise SpeakError(f"{path} is shorter than one frame", hint="give a recording of speech")
            clips.append(AudioQuestion(str(path), encode_clip(self.encoder, samples), text))
        return list(self.answer_questions(clips, max_tokens, constrained=constrained, progress=progress))

    def answer_dataset(
        self,
        data: PathLike,
        out: PathLike,
        *,
        max_tokens: int = 512,
        constrained: bool = False,
        force: bool = False,
        progress: ProgressCallback = silent,
    ) -> DatasetAnswers:
        """Answer every clip of a prepared folder that has an answer. The answers are written to `out` as JSONL, and the
        metrics beside it as `.scores.json`. Existing files are replaced only with `force`."""
        for file in (Path(out), self.scores_file(out)):
            check_output_file(file, inputs=Path(data).rglob("*"), force=force)
        dataset = PreparedDataset.open(Path(data))
        table = dataset.table
        clips = [
            AudioQuestion(table.id[row].as_py(), dataset.codes_at(row), table.question.value_at(row))
            for row in range(len(table))
            if table.answer[row].as_py()
        ]
        if not clips:
            raise DataError(f"{data} has no answers to compare with", hint="prepare it from recordings with scores")
        expected = dict(zip(table.id.to_pylist(), table.answer.to_pylist(), strict=True))
        answers = self.answer_questions(clips, max_tokens, constrained=constrained, progress=progress)
        rows = [
            {"id": clip.id, "answer": answer.text, "expected": expected[clip.id], "stopped": answer.stopped}
            for clip, answer in zip(clips, answers, strict=True)
        ]
        utterances = [table.utterance(index) for index in map(dataset.find, expected) if index is not None]
        trained_on, notes = self._trained_on(
            lambda _: [ComparedClip(one.id, one.speaker, one.text, dataset.key(one), one) for one in utterances]
        )
        result = DatasetAnswers(
            [row | {"trained_on": trained_on.get(row["id"])} for row in rows],
            assessment_table(utterances, {row["id"]: row["answer"] for row in rows}),
            notes,
        )
        save_text(Path(out), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in result.rows))
        save_text(self.scores_file(out), json.dumps(result.to_json(), indent=2, ensure_ascii=False) + "\n")
        return result

    @staticmethod
    def scores_file(answers: PathLike) -> Path:
        """Return the file of the metrics, which lies beside that of the answers."""
        path = Path(answers)
        return path.with_name(f"{path.name.removesuffix('.jsonl')}.scores.json")

    def trained_recordings(self, recordings: Sequence[PathLike]) -> dict[str, str | None]:
        """Return `audio` for each recording that the run was trained on, empty for others, None if its data is not
        known."""
        paths = [os.fspath(recording) for recording in recordings]
        found, _ = self._trained_on(
            lambda trained: [ComparedClip(path, "", "", trained.key(Path(path))) for path in paths]
        )
        return {path: found.get(path) for path in paths}

    def _trained_on(
        self, clips: Callable[[TrainedClips], list[ComparedClip]]
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return why each clip counts as trained on, empty if it does not, by id; and a note if that is not known."""
        if self._recipe is None:
            return {}, ()
        try:
            trained = TrainedClips.open(self._recipe)
        except DataError as error:
            return {}, (f"whether the run was trained on these recordings cannot be told: {error.what}",)
        compared = clips(trained)
        return {clip.id: "" for clip in compared} | trained.find(compared), ()
