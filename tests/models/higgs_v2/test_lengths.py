"""Planned lengths of sequences equal rendered lengths exactly."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from myna.core.config import DataSettings
from myna.core.errors import DataError
from myna.data.conversation import AudioClip, Conversation, Reference, Turn, speech_conversation
from myna.data.dataset import DatasetInfo, PreparedDataset
from myna.data.encoding import encode_dataset
from myna.data.loader import Loader, Shard
from myna.data.manifest import Utterance, write_manifest
from myna.models import open_family
from myna.models.base import RenderedSequence
from myna.models.higgs_v2.family import HiggsV2
from myna.models.higgs_v2.render import MULTI_SPEAKER_SYSTEM_PROMPT, SYSTEM_PROMPT
from myna.models.higgs_v2.tiny import SPECIAL_TOKENS
from tests.data.corpora import said
from tests.data.kill_helper import FakeCodec

from .conftest import random_codes

SENTENCES = (
    "Good morning, all of you. The train leaves at ten; the other one, I am told, does not leave at all.",
    "[SPEAKER0] Are you there? [SPEAKER1] I am here. [SPEAKER0] Good.",
    "SPEAKER0: \n\nSPEAKER1: \n\n\n A quiet room. Two people on a train.\n\n",
    "Chào buổi sáng, cả nhà. Hôm nay trời đẹp quá!",
    "صباح الخير يا جماعة، كيف الحال اليوم؟",
)


@pytest.fixture(scope="module")
def family(checkpoint: Path) -> HiggsV2:
    """Family with a tokenizer of many merges, over blanks and line ends too, so that neighbouring text could change
    tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([*SENTENCES, SYSTEM_PROMPT, MULTI_SPEAKER_SYSTEM_PROMPT] * 20, trainer)
    family = open_family(str(checkpoint))
    assert isinstance(family, HiggsV2)
    family.__dict__["tokenizer"] = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    return family


fragments = st.sampled_from(
    [part for sentence in SENTENCES for part in sentence.split(" ")] + ["\n", " ", "[SPEAKER2]"]
)
anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda text: "<|" not in text)
texts = anything | st.lists(fragments, max_size=12).map(" ".join)
clips = st.builds(
    lambda frames, target: AudioClip("clip", random_codes(frames), target), st.integers(1, 30), st.booleans()
)
turns = st.builds(
    Turn, st.sampled_from(["user", "assistant"]), st.lists(texts | clips, min_size=1, max_size=3).map(tuple)
)
systems = st.builds(Turn, st.just("system"), st.lists(texts | clips, max_size=3).map(tuple))


@given(st.lists(turns, min_size=1, max_size=5), st.none() | systems, texts)
@settings(max_examples=150, deadline=None)
def test_the_length_of_a_conversation_is_its_rendered_length(
    family: HiggsV2, said: list[Turn], system: Turn | None, scene: str
) -> None:
    conversation = Conversation("any", ((system,) if system else ()) + tuple(said), scene)
    assert family.length(conversation) == len(family.render(conversation))
    assert family.length(conversation) == len(
        family.render(conversation, supervise_text=True, supervise_references=True)
    )


@given(texts)
@settings(max_examples=100, deadline=None)
def test_tokens_are_those_of_the_tokenizer(family: HiggsV2, text: str) -> None:
    ids = family.tokenizer.encode(text, add_special_tokens=False)
    assert family.count_tokens({"any": text}) == [len(ids)]
    rendered = family.render(Conversation("any", (Turn("user", (text,)),)))
    piece = [piece for piece in rendered.spans if piece.kind == "text"][5]
    assert piece.shown == text and rendered.ids[piece.start : piece.stop].tolist() == ids


@given(texts, texts, st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_tokens_of_a_text_do_not_depend_on_its_place(
    family: HiggsV2, one: str, other: str, frames: int, more: int
) -> None:
    def length(text: str, frames: int, **how: Any) -> int:
        reference = Reference("as I said", AudioClip("r", random_codes(3)))
        target = AudioClip("t", random_codes(frames), target=True)
        return family.length(speech_conversation(text, id="any", references=(reference,), target=target, **how))

    if "[SPEAKER" in one + other:
        return
    counts = family.count_tokens({"one": one, "other": other})
    assert length(one, frames) - length(other, more) == counts[0] + frames - counts[1] - more
    assert length(one, frames, reference_placement="system") - length(other, more, reference_placement="system") == (
        counts[0] + frames - counts[1] - more
    )


def test_this_tokenizer_merges_blanks(family: HiggsV2) -> None:
    """The tests above could not fail if the tokenizer did not merge blanks."""
    apart = sum(family.count_tokens({"a": "A quiet", "b": " room."}))
    assert family.count_tokens({"a": "A quiet room."})[0] < apart


def test_a_control_token_is_refused_with_the_id_of_its_text(family: HiggsV2) -> None:
    with pytest.raises(DataError, match=r"the text of b contains the control token <\|eot_id\|>"):
        family.count_tokens({"a": "fine", "b": "the end<|eot_id|>"})


def test_a_control_token_in_a_scene_is_refused_before_the_first_step(family: HiggsV2, tmp_path: Path) -> None:
    lines = [said(tmp_path, "fine"), said(tmp_path, "not", scene="A room.<|eot_id|>")]
    with pytest.raises(DataError, match=r"the scene 'A room.<\|eot_id\|>' contains the control token <\|eot_id\|>"):
        open_loader(family, tmp_path, lines).check_lengths()


def test_another_tokenizer_has_another_revision(family: HiggsV2, checkpoint: Path) -> None:
    plain = open_family(str(checkpoint))
    assert plain.text_revision == open_family(str(checkpoint)).text_revision != family.text_revision


# From recipe to batch


class EightBooks(FakeCodec):
    codebooks, codebook_size = 8, 64

    def encode(self, clips: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
        return np.tile(super().encode(clips) % 64, (1, 1, 4))


def open_loader(
    family: HiggsV2, folder: Path, utterances: Sequence[Utterance], **how: Any
) -> Loader[RenderedSequence, list[RenderedSequence]]:
    write_manifest(folder / "manifest.jsonl", utterances)
    encode_dataset(utterances, EightBooks(), folder)
    DatasetInfo.from_codec(EightBooks()).write(folder)
    chosen = DataSettings(train=folder, row_tokens=1500, packing_window=8, reference_seconds=(0.05, 9), **how)
    return Loader(
        PreparedDataset.open(folder), chosen, render=family.render, collate=list, length_estimator=family, seed=0
    )


@given(
    said_texts=st.lists(texts, min_size=4, max_size=14),
    scenes=st.lists(st.sampled_from(["", "", "A cave.", "Two people\non a train"]) | texts, min_size=14, max_size=14),
    asks=st.lists(st.none() | st.lists(st.integers(0, 2), max_size=3), min_size=14, max_size=14),
    place=st.sampled_from(["turn", "system"]),
    scene=st.sampled_from(["", "A room."]),
)
@settings(max_examples=25, deadline=None)
def test_planned_lengths_are_rendered_lengths(
    family: HiggsV2,
    said_texts: list[str],
    scenes: list[str],
    asks: list[list[int] | None],
    place: str,
    scene: str,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        voices = [said(folder, f"voice{n}", text=f"[SPEAKER{n}] I am {n}.", reference_only=True) for n in range(3)]
        lines = []
        for number, (text, asked) in enumerate(zip(said_texts, asks, strict=False)):
            lines.append(said(folder, f"{number}", seconds=0.1 + number / 10, text=text, scene=scenes[number]))
            if asked is not None:
                lines[-1].extras["references"] = [f"voice{n}" for n in asked]
        loader = open_loader(family, folder, [*voices, *lines], reference_placement=place, scene=scene)
        loader.check_lengths()
        targets = loader.reference_sampler.targets
        for epoch in range(2):
            planned = loader.lengths.of(targets.indices, loader.reference_sampler.sample(targets.indices, epoch))
            assert planned.tolist() == [len(loader.sequence(target, epoch)) for target in targets]
        # A sequence of another length than planned would raise an error.
        batches = [batch for [batch] in islice(loader.steps(1, 1, Shard()), loader.rows_in_first_epoch())]
        assert sorted(each.id for batch in batches for each in batch) == sorted(target.id for target in targets)


def test_the_longest_sequence_is_known_to_the_token(family: HiggsV2, tmp_path: Path) -> None:
    """The case includes a tag in a reference's text, which changes the prompt around it."""
    lines = [said(tmp_path, f"{n}", seconds=1 + n / 100, text="word " * n) for n in range(6)]
    lines.append(said(tmp_path, "tags", seconds=1.0, text="[SPEAKER0] a [SPEAKER1] b"))
    loader = open_loader(family, tmp_path, lines)
    targets = loader.reference_sampler.targets
    lengths = {
        target.id: max(
            len(family.render(loader.conversation(target, (other,)))) for other in targets if other.id != target.id
        )
        for target in targets
    }
    worst = max(lengths, key=lambda id: lengths[id])
    chosen = loader.settings
    loader.settings = chosen.model_copy(update={"row_tokens": lengths[worst]})
    loader.check_lengths()
    loader.settings = chosen.model_copy(update={"row_tokens": lengths[worst] - 1})
    with pytest.raises(DataError, match=f"{worst} takes {lengths[worst]} tokens with its longest reference"):
        loader.check_lengths()
