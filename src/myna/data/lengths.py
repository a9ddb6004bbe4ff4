"""How long sequences are before any of them is rendered, to the token.

A text takes as many tokens wherever it stands, and a frame takes one position. What else a sequence holds depends on
its form alone: the scene, how many references there are, and which speakers its texts have tags for. So the tokens of
each text are counted once and kept beside the codes, one sequence of each form is measured by the family, and all
others are sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from myna.config import DataSettings
from myna.data.codes import FORMAT, publish, read_arrow
from myna.data.conversation import Conversation
from myna.data.corpus import Corpus
from myna.data.pairing import References
from myna.data.table import Rows
from myna.errors import DataError

TEXTS_AT_ONCE = 1 << 14


class Ruler(Protocol):
    """What a family must know of lengths."""

    @property
    def text_revision(self) -> str:
        """Changes whenever a text may come to another number of tokens."""

    def count_tokens(self, texts: Mapping[str, str]) -> Sequence[int]:
        """How many tokens each text takes as a part of a turn. A text that cannot be rendered is refused by its key,
        the id of an utterance."""

    def length(self, conversation: Conversation) -> int:
        """How many positions a conversation takes."""


def text_tokens(corpus: Corpus, ruler: Ruler) -> npt.NDArray[np.int32]:
    """The tokens of every utterance's text: read from the folder, or counted and left there for the next time."""
    path = corpus.store.home / f"tokens-{ruler.text_revision[:8]}.arrow"
    whose = {"tokenizer": ruler.text_revision, "texts": corpus.table.identity}
    kept = _kept(path, corpus.store.revision, whose)
    if kept is not None:
        return kept
    counted = np.empty(len(corpus.table), np.int32)
    for start in range(0, len(counted), TEXTS_AT_ONCE):
        part = slice(start, start + TEXTS_AT_ONCE)
        texts = zip(corpus.table.id[part].to_pylist(), corpus.table.text[part].to_pylist(), strict=True)
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
        corpus: Corpus,
        settings: DataSettings,
        ruler: Ruler,
        conversation: Callable[[int, Sequence[int]], Conversation],
    ) -> None:
        self._table, self._ruler, self._conversation = corpus.table, ruler, conversation
        tokens, frames = text_tokens(corpus, ruler), corpus.table.frames
        self.as_target = (tokens + frames).astype(np.int64)
        self._in_turns = settings.reference_place == "turn"
        self.as_reference = self.as_target if self._in_turns else frames.astype(np.int64)
        """What a clip adds to a sequence, up to what every other clip adds too."""
        self._forms: dict[Any, int] = {}

    def of(self, targets: Rows, references: References) -> Rows:
        """The length of each target's sequence with its references."""
        table, counts = self._table, references.counts
        owners = np.repeat(np.arange(len(targets)), counts)
        lengths = self.as_target[targets]
        np.add.at(lengths, owners, self.as_reference[references.rows])
        # With one reference at most, a form is a number; there are few forms and many sequences.
        kinds = len(table.tags.values)
        of_reference = np.zeros(len(targets), np.int64)
        if self._in_turns:
            of_reference[owners] = table.tags.numbers[references.rows]
        form = table.scene.numbers[targets].astype(np.int64) * kinds + table.tags.numbers[targets]
        form = (form * 2 + (counts > 0)) * kinds + of_reference
        form[counts > 1] = -1
        each, first, which = np.unique(form, return_index=True, return_inverse=True)
        rest = np.zeros(len(each), np.int64)
        starts = references.starts
        for number, (kind, place) in enumerate(zip(each.tolist(), first.tolist(), strict=True)):
            if kind >= 0:
                own = references.rows[starts[place] : starts[place] + counts[place]].tolist()
                rest[number] = self._rest(kind, int(targets[place]), own, int(lengths[place]))
        lengths += rest[which]
        for place in np.flatnonzero(counts > 1).tolist():
            own = references.rows[starts[place] : starts[place] + counts[place]].tolist()
            lengths[place] += self._rest_of_many(int(targets[place]), own, int(lengths[place]))
        return lengths

    def kinds(self) -> Rows:
        """A number for each clip that differs where its text, as a reference's, may make for another form."""
        return self._table.tags.numbers.astype(np.int64) * self._in_turns

    def _rest_of_many(self, target: int, references: list[int], counted: int) -> int:
        tags = self._table.tags.numbers
        scene, said = int(self._table.scene.numbers[target]), int(tags[target])
        # Tags of a dialogue are put before the texts of its references, which then come to other tokens.
        changed = self._in_turns and self._table.tags.at(target) != ""
        form = (target, *references) if changed else (scene, said, *(int(tags[row]) for row in references))
        return self._rest((changed, form), target, references, counted)

    def _rest(self, form: Any, target: int, references: list[int], counted: int) -> int:
        """What a form takes beside texts and frames, measured the first time that it is met."""
        if form not in self._forms:
            self._forms[form] = self._ruler.length(self._conversation(target, references)) - counted
        return self._forms[form]
