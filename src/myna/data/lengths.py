"""Sequence lengths before rendering, exact to the token.

A text always has the same number of tokens, and the family says how many positions frames take. Everything else in a
sequence depends on its form: the scene, the number of references and the speaker tags of the texts, or the question of
a clip with an answer. The tokens of each text are counted once and kept beside the codes, the family measures one
sequence of each form, and all other lengths are sums.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from myna.core.config import DataSettings
from myna.core.errors import DataError
from myna.data.code_store import arrow_batch, read_cached_arrow, write_arrow
from myna.data.conversation import AudioClip, Conversation, Reference, answer_conversation, speech_conversation
from myna.data.dataset import Indices, PreparedDataset
from myna.data.references import ReferenceLists

TEXTS_PER_BATCH = 1 << 14


class LengthEstimator(Protocol):
    """Parts of a family that the loader needs to know lengths without rendering."""

    @property
    def text_revision(self) -> str:
        """Revision that changes whenever the number of tokens of a text may change."""

    def count_tokens(self, texts: Mapping[str, str]) -> Sequence[int]:
        """Tokens of each text as a part of a turn. An error about a text names its key, the id of an utterance."""

    def positions(self, frames: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Positions that clips with these numbers of frames take, up to a constant that every clip takes."""

    def length(self, conversation: Conversation) -> int:
        """Positions that a conversation takes."""


def count_text_tokens(dataset: PreparedDataset, estimator: LengthEstimator) -> npt.NDArray[np.int32]:
    """Tokens of every utterance's text (or answer): read from the folder, or counted and cached there."""
    path = dataset.store.codes_folder / f"tokens-{estimator.text_revision[:8]}.arrow"
    metadata = {"tokenizer": estimator.text_revision, "texts": dataset.table.fingerprint}
    cached = read_cached_arrow(path, dataset.store.revision, metadata)
    if cached is not None:
        return cached["tokens"].to_numpy(zero_copy_only=True)  # type: ignore[no-any-return]
    tokens = np.empty(len(dataset.table), np.int32)
    for start in range(0, len(tokens), TEXTS_PER_BATCH):
        part = slice(start, start + TEXTS_PER_BATCH)
        texts = zip(dataset.table.id[part].to_pylist(), dataset.table.learned_texts(part), strict=True)
        tokens[part] = estimator.count_tokens(dict(texts))
    try:
        write_arrow(dataset.folder, path, arrow_batch({"tokens": pa.array(tokens)}, dataset.store.revision, **metadata))
    except DataError as error:
        dataset.notes += (f"the tokens of all texts have to be counted every time: {error.what}",)
    return tokens


class SequenceLengths:
    """Lengths of the sequences of one dataset, laid out as the settings say."""

    def __init__(
        self,
        dataset: PreparedDataset,
        settings: DataSettings,
        estimator: LengthEstimator,
        conversation: Callable[[int, Sequence[int]], Conversation],
    ) -> None:
        """`conversation` builds the conversation of a target and its references, given by index."""
        self._table, self._settings, self._estimator = dataset.table, settings, estimator
        self._in_turns = settings.reference_placement == "turn"
        self._frame = np.zeros((1, dataset.info.codebooks), np.uint16)
        self._frame_positions = int(estimator.positions(np.ones(1, np.int32))[0])
        # Measured on first use.
        self._answer_overhead = cache(self._measure_answer_overhead)
        self._speech_overhead = cache(self._measure_speech_overhead)
        self._dialogue_length = cache(lambda target, references: estimator.length(conversation(target, references)))
        tokens, frames = count_text_tokens(dataset, estimator), estimator.positions(dataset.table.frames)
        self.as_target = (tokens + frames).astype(np.int64)
        self.as_reference = self.as_target if self._in_turns else frames.astype(np.int64)
        """Positions that a clip adds to a sequence, up to a constant that every clip adds."""
        self.kinds = dataset.table.speaker_tags.indices.astype(np.int64) * self._in_turns
        """Number of each clip's form: references of the same kind give the same form."""

    def of(self, targets: Indices, references: ReferenceLists) -> Indices:
        """Return the length of each target's sequence with its references."""
        table, counts, offsets = self._table, references.counts, references.offsets
        owners = np.repeat(np.arange(len(targets)), counts)
        lengths = self.as_target[targets]
        np.add.at(lengths, owners, self.as_reference[references.indices])

        has_answer = table.has_answer[targets]
        lengths[has_answer] += _per_form(table.question.indices[targets[has_answer]], self._answer_overhead)

        # There are few forms and many sequences. With one reference at most, a form is four small integers.
        reference_kinds = np.zeros(len(targets), np.int64)
        reference_kinds[owners] = self.kinds[references.indices]
        simple = np.flatnonzero(~has_answer & (counts < 2))
        scenes, tags = table.scene.indices[targets[simple]], table.speaker_tags.indices[targets[simple]]
        shape = (len(table.scene.dictionary), len(table.speaker_tags.dictionary), 2, int(self.kinds.max()) + 1)
        forms = np.ravel_multi_index((scenes, tags, counts[simple].astype(np.int64), reference_kinds[simple]), shape)

        def measure(form: int) -> int:
            scene, tags, count, kind = map(int, np.unravel_index(form, shape))
            return self._speech_overhead(scene, tags, (kind,) * count)

        lengths[simple] += _per_form(forms, measure)
        for position in np.flatnonzero(counts > 1).tolist():
            several = references.indices[offsets[position] : offsets[position] + counts[position]]
            target = int(targets[position])
            if self._in_turns and table.speaker_tags.value_at(target):
                # Tags of a dialogue are put before the texts of its references, which changes their tokens.
                lengths[position] = self._dialogue_length(target, tuple(several.tolist()))
            else:
                form = int(table.scene.indices[target]), int(table.speaker_tags.indices[target])
                lengths[position] += self._speech_overhead(*form, tuple(self.kinds[several].tolist()))
        return lengths

    def _measure_answer_overhead(self, question: int) -> int:
        """Positions of an answer form beside the answer and the frames."""
        text = str(self._table.question.dictionary[question].as_py())
        bare = answer_conversation(text, AudioClip("", self._frame), id=f"the question {text!r}", answer="")
        return self._estimator.length(bare) - self._frame_positions

    def _measure_speech_overhead(self, scene: int, tags: int, reference_kinds: tuple[int, ...]) -> int:
        """Positions of a speech form beside texts and frames, measured with texts that are only tags."""
        numbers = [str(self._table.speaker_tags.dictionary[kind].as_py()).split() for kind in (tags, *reference_kinds)]
        target_text, *reference_texts = (" ".join(f"[SPEAKER{number}]" for number in one) for one in numbers)
        description = str(self._table.scene.dictionary[scene].as_py()) or self._settings.scene
        bare = speech_conversation(
            target_text,
            id=f"the scene {description!r}",
            references=tuple(Reference(text, AudioClip("", self._frame)) for text in reference_texts),
            target=AudioClip("", self._frame, target=True),
            scene=description,
            reference_placement=self._settings.reference_placement,
        )
        texts = [target_text, *reference_texts] if self._in_turns else [target_text]
        tokens = sum(self._estimator.count_tokens({"": text})[0] for text in texts if text)
        return self._estimator.length(bare) - tokens - (1 + len(reference_kinds)) * self._frame_positions


def _per_form(forms: npt.NDArray[np.signedinteger], measure: Callable[[int], int]) -> Indices:
    """Map each form to its `measure`, called once for each distinct form."""
    distinct, inverse = np.unique(forms, return_inverse=True)
    return np.array([measure(form) for form in distinct.tolist()], np.int64)[inverse]
