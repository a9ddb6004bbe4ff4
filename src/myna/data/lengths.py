"""How long sequences are before any of them is rendered, to the token.

A text takes as many tokens wherever it stands, and frames take as many positions as the family says. What else a
sequence holds depends on its form alone: the scene, how many references there are, and which speakers its texts have
tags for; of a clip that is heard, the question. So the tokens of each text are counted once and kept beside the codes,
one sequence of each form is measured by the family, and all others are sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from myna.config import DataSettings
from myna.data.code_store import FORMAT, publish, read_arrow
from myna.data.conversation import AudioClip, Conversation, Reference, question, script
from myna.data.dataset import PreparedDataset
from myna.data.manifest_table import Rows
from myna.data.pairing import References
from myna.errors import DataError

TEXTS_AT_ONCE = 1 << 14


class LengthEstimator(Protocol):
    """What a family must know of lengths."""

    @property
    def text_revision(self) -> str:
        """Changes whenever a text may come to another number of tokens."""

    def count_tokens(self, texts: Mapping[str, str]) -> Sequence[int]:
        """How many tokens each text takes as a part of a turn. A text that cannot be rendered is refused by its key,
        the id of an utterance."""

    def positions(self, frames: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """How many positions clips of so many frames take, up to what every clip takes."""

    def length(self, conversation: Conversation) -> int:
        """How many positions a conversation takes."""


def text_tokens(corpus: PreparedDataset, ruler: LengthEstimator) -> npt.NDArray[np.int32]:
    """The tokens of every utterance's text: read from the folder, or counted and left there for the next time."""
    path = corpus.store.home / f"tokens-{ruler.text_revision[:8]}.arrow"
    whose = {"tokenizer": ruler.text_revision, "texts": corpus.table.identity}
    kept = _kept(path, corpus.store.revision, whose)
    if kept is not None:
        return kept
    counted = np.empty(len(corpus.table), np.int32)
    for start in range(0, len(counted), TEXTS_AT_ONCE):
        part = slice(start, start + TEXTS_AT_ONCE)
        texts = zip(corpus.table.id[part].to_pylist(), corpus.table.written(part), strict=True)
        counted[part] = ruler.count_tokens(dict(texts))
    label = {"format": FORMAT, "codec": corpus.store.revision, **whose}
    batch = pa.record_batch({"tokens": pa.array(counted)}).replace_schema_metadata(label)
    try:
        publish(corpus.folder, path, batch)
    except DataError as error:
        corpus.notes += (f"the tokens of all texts have to be counted every time: {error.what}",)
    return counted


def _kept(path: Path, revision: str, whose: dict[str, str]) -> npt.NDArray[np.int32] | None:
    if not path.is_file():
        return None
    try:
        batch = read_arrow(path, revision)
    except DataError:
        return None
    label = {name.decode(): value.decode() for name, value in batch.schema.metadata.items()}
    kept: npt.NDArray[np.int32] = batch["tokens"].to_numpy(zero_copy_only=True)
    return kept if label.items() >= whose.items() else None


class Lengths:
    """Lengths of the sequences of one corpus, laid out as the settings say."""

    def __init__(
        self,
        corpus: PreparedDataset,
        settings: DataSettings,
        ruler: LengthEstimator,
        conversation: Callable[[int, Sequence[int]], Conversation],
    ) -> None:
        """`conversation` makes one of the rows of a target and its references."""
        self._table, self._settings, self._ruler, self._conversation = corpus.table, settings, ruler, conversation
        self._in_turns = settings.reference_placement == "turn"
        self._frame = np.zeros((1, corpus.prepared.codebooks), np.uint16)
        self._known: dict[Any, int] = {}
        tokens, frames = text_tokens(corpus, ruler), ruler.positions(corpus.table.frames)
        self._heard = corpus.table.is_heard
        self.as_target = (tokens + frames).astype(np.int64)
        self.as_reference = self.as_target if self._in_turns else frames.astype(np.int64)
        """What a clip adds to a sequence, up to what every other clip adds too."""
        self.kinds = corpus.table.tags.numbers.astype(np.int64) * self._in_turns
        """A number for each clip: references of one kind make for the same form."""

    def of(self, targets: Rows, references: References) -> Rows:
        """The length of each target's sequence with its references."""
        table, counts = self._table, references.counts
        owners = np.repeat(np.arange(len(targets)), counts)
        lengths = self.as_target[targets]
        np.add.at(lengths, owners, self.as_reference[references.rows])
        # There are few forms and many sequences. With one reference at most, a form is a number.
        kinds = len(table.tags.values)
        of_reference = np.zeros(len(targets), np.int64)
        of_reference[owners] = self.kinds[references.rows]
        scenes = table.scene.numbers[targets].astype(np.int64) * 2 + self._heard[targets]
        forms = scenes * kinds + table.tags.numbers[targets]
        forms = (forms * 2 + (counts > 0)) * kinds + of_reference
        each, which = np.unique(forms, return_inverse=True)
        rests = np.zeros(len(each), np.int64)
        for number in np.unique(which[counts < 2]).tolist():
            rest, kind = divmod(int(each[number]), kinds)
            rest, is_voiced = divmod(rest, 2)
            rests[number] = self._rest(*divmod(rest, kinds), (kind,) * is_voiced)
        lengths += np.where(counts < 2, rests[which], 0)
        starts = references.starts
        for place in np.flatnonzero(counts > 1).tolist():
            voices = tuple(references.rows[starts[place] : starts[place] + counts[place]].tolist())
            lengths[place] = self._of_many(int(targets[place]), voices, int(lengths[place]))
        return lengths

    def _of_many(self, target: int, voices: tuple[int, ...], counted: int) -> int:
        scene, tags = 2 * int(self._table.scene.numbers[target]), int(self._table.tags.numbers[target])
        if not self._in_turns or self._table.tags.at(target) == "":
            return counted + self._rest(scene, tags, tuple(self.kinds[list(voices)].tolist()))
        # Tags of a dialogue are put before the texts of its references, which then come to other tokens.
        if (target, voices) not in self._known:
            self._known[target, voices] = self._ruler.length(self._conversation(target, voices))
        return self._known[target, voices]

    def _rest(self, scene: int, tags: int, voices: tuple[int, ...]) -> int:
        """What a form takes beside texts and frames: measured when first met, with texts that are but their tags.

        An odd `scene` is the question to a clip that is heard.
        """
        form = (scene, tags, voices)
        if form not in self._known:
            said, *heard = (self._tags_alone(kind) for kind in (tags, *voices))
            said_around, is_heard = str(self._table.scene.values[scene // 2].as_py()), scene % 2
            if is_heard:
                bare = question(said_around, AudioClip("", self._frame), id=f"the question {said_around!r}", answer="")
                self._known[form] = self._ruler.length(bare) - int(self._ruler.positions(np.ones(1, np.int32))[0])
                return self._known[form]
            described = said_around or self._settings.scene
            bare = script(
                said,
                id=f"the scene {described!r}",
                references=tuple(Reference(text, AudioClip("", self._frame)) for text in heard),
                target=AudioClip("", self._frame, target=True),
                scene=described,
                place=self._settings.reference_placement,
            )
            texts = [said, *heard] if self._in_turns else [said]
            tokens = sum(self._ruler.count_tokens({"": text})[0] for text in texts if text)
            framed = (1 + len(voices)) * int(self._ruler.positions(np.ones(1, np.int32))[0])
            self._known[form] = self._ruler.length(bare) - tokens - framed
        return self._known[form]

    def _tags_alone(self, kind: int) -> str:
        return " ".join(f"[SPEAKER{number}]" for number in str(self._table.tags.values[kind].as_py()).split())
