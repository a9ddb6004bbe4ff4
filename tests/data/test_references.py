"""Reference sampling: never the target's own audio, and always the same reference for the same seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from myna.core.config import DataSettings
from myna.core.errors import DataError
from myna.data import references as references_module
from myna.data.dataset import Indices, ManifestTable
from myna.data.manifest import Span, Utterance
from myna.data.references import Mask, ReferenceSampler
from tests.data.corpora import prepared, said


def pair(folder: Path, utterances: list[Utterance], seed: int = 0, **settings: Any) -> ReferenceSampler:
    return ReferenceSampler(prepared(folder, utterances), DataSettings(train=folder, **settings), seed)


def drawn(pairing: ReferenceSampler, id: str, epochs: int = 60) -> set[str]:
    """Collect every reference that a target gets in many epochs."""
    target = next(target for target in pairing.targets if target.id == id)
    return {reference.id for epoch in range(epochs) for reference in pairing.references(target, epoch)}


def alone(pairing: ReferenceSampler) -> tuple[str, ...]:
    return tuple(target.id for target in pairing.without_reference)


def longest(pairing: ReferenceSampler, length: Callable[[Utterance], int] = lambda _: 1) -> dict[str, list[str]]:
    """Return the references that make the longest sequence, by the target's id."""
    utterances = pairing.dataset.utterances
    found = pairing.longest_references(np.array([length(utterance) for utterance in utterances]))
    return {
        target.id: [utterances[row].id for row in rows]
        for target, rows in zip(pairing.targets, found.as_tuples(), strict=True)
    }


# Another clip of the speaker


def test_a_reference_is_another_clip_of_the_same_speaker(tmp_path: Path) -> None:
    clips = [said(tmp_path, f"{name}{n}", name) for name in ("anna", "bert") for n in range(4)]
    pairing = pair(tmp_path, clips)
    for target in pairing.targets:
        expected = {clip.id for clip in clips if clip.speaker == target.speaker and clip.id != target.id}
        assert drawn(pairing, target.id) == expected, "each of them, some time"
        assert all(len(pairing.references(target, epoch)) == 1 for epoch in range(3))
    assert alone(pairing) == ()


def test_never_the_targets_own_sound_under_another_id(tmp_path: Path) -> None:
    twins = [said(tmp_path, id, sound="the same") for id in ("a", "again", "and again")]
    pairing = pair(tmp_path, [*twins, said(tmp_path, "other")])
    for twin in twins:
        assert drawn(pairing, twin.id) == {"other"}
    assert drawn(pairing, "other") == {"a", "again", "and again"}


def test_twins_alone_have_no_reference(tmp_path: Path) -> None:
    pairing = pair(tmp_path, [said(tmp_path, "a", sound="x"), said(tmp_path, "b", sound="x")])
    assert alone(pairing) == ("a", "b")
    assert drawn(pairing, "a") == set()
    assert longest(pairing)["a"] == []


def test_spans_of_one_recording_serve_each_other_unless_they_overlap(tmp_path: Path) -> None:
    def span(id: str, start: float, end: float | None) -> Utterance:
        return said(tmp_path, id, seconds=9, recording="long", span=Span(start, end))

    clips = [span("0-3", 0, 3), span("2-5", 2, 5), span("3-6", 3, 6), span("6-", 6, None)]
    pairing = pair(tmp_path, clips)
    assert drawn(pairing, "0-3") == {"3-6", "6-"}
    assert drawn(pairing, "2-5") == {"6-"}
    assert drawn(pairing, "3-6") == {"0-3", "6-"}
    assert drawn(pairing, "6-") == {"0-3", "2-5", "3-6"}


def test_a_whole_recording_holds_all_of_its_spans(tmp_path: Path) -> None:
    whole = said(tmp_path, "whole", seconds=6, recording="long")
    part = said(tmp_path, "part", recording="long", span=Span(1, 3))
    assert alone(pair(tmp_path, [whole, part])) == ("whole", "part")


def test_clips_of_unknown_speakers_are_not_one_speakers(tmp_path: Path) -> None:
    pairing = pair(
        tmp_path, [said(tmp_path, "a", ""), said(tmp_path, "b", ""), said(tmp_path, "c"), said(tmp_path, "d")]
    )
    assert alone(pairing) == ("a", "b")
    assert drawn(pairing, "c") == {"d"}


def test_a_clip_that_is_only_a_reference_is_never_a_target(tmp_path: Path) -> None:
    pairing = pair(tmp_path, [said(tmp_path, "a"), said(tmp_path, "voice", reference_only=True)])
    assert [target.id for target in pairing.targets] == ["a"]
    assert drawn(pairing, "a") == {"voice"}


def test_our_references_keep_to_reference_seconds(tmp_path: Path) -> None:
    lengths = {"short": 0.5, "good": 2.0, "long": 9.0}
    clips = [said(tmp_path, id, seconds=seconds) for id, seconds in lengths.items()]
    pairing = pair(tmp_path, clips, reference_seconds=(1, 5))
    assert drawn(pairing, "short") == drawn(pairing, "long") == {"good"}
    assert alone(pairing) == ("good",)
    limits = pair(tmp_path, clips, reference_seconds=(0.5, 9))
    assert drawn(limits, "good") == {"short", "long"}, "the limits themselves are inside"


# What the data names


def test_what_the_data_names_wins(tmp_path: Path) -> None:
    others = [said(tmp_path, f"{n}") for n in range(5)]
    asked = said(tmp_path, "asked", references=["3", "b"])
    of_another = said(tmp_path, "b", "bert", seconds=0.3)
    pairing = pair(tmp_path, [*others, asked, of_another], reference_seconds=(1, 5))
    for epoch in range(5):
        assert [reference.id for reference in pairing.references(asked, epoch)] == ["3", "b"], "in the order given"
    assert longest(pairing)["asked"] == ["3", "b"]


def test_an_empty_list_asks_for_none(tmp_path: Path) -> None:
    pairing = pair(tmp_path, [said(tmp_path, "a", references=[]), said(tmp_path, "b")])
    assert drawn(pairing, "a") == set() and drawn(pairing, "b") == {"a"}
    assert longest(pairing)["a"] == []


def test_given_draws_nothing_of_its_own(tmp_path: Path) -> None:
    clips = [said(tmp_path, "a", references=["b"]), said(tmp_path, "b")]
    pairing = pair(tmp_path, clips, reference="given")
    assert drawn(pairing, "a") == {"b"} and drawn(pairing, "b") == set()
    assert alone(pairing) == ("b",)


def test_none_has_no_references_at_all(tmp_path: Path) -> None:
    clips = [said(tmp_path, "a", references=["b"]), said(tmp_path, "b")]
    pairing = pair(tmp_path, clips, reference="none")
    assert drawn(pairing, "a") == drawn(pairing, "b") == set()
    assert len(pairing.targets) == 2


@pytest.mark.parametrize("reference", ["a", "a again", "part of a"])
def test_a_target_that_names_itself_is_refused(tmp_path: Path, reference: str) -> None:
    clips = [
        said(tmp_path, "a", seconds=3, sound="x", references=["fine", reference]),
        said(tmp_path, "a again", seconds=3, sound="x"),
        said(tmp_path, "part of a", recording="a", span=Span(1, 2)),
        said(tmp_path, "fine"),
    ]
    with pytest.raises(DataError, match="a has itself for a reference") as caught:
        pair(tmp_path, clips)
    assert "references" in caught.value.hint


def test_a_reference_that_is_not_there_is_refused_with_both_names(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a names the reference gone, of which .* holds no codes"):
        pair(tmp_path, [said(tmp_path, "a", references=["gone"])])


# What is left out, and what is required


def test_targets_outside_the_limits_are_left_out_and_counted(tmp_path: Path) -> None:
    lengths = {"blip": 0.1, "shortest": 0.2, "fine": 2.0, "longest": 4.0, "speech": 5.0}
    clips = [said(tmp_path, id, seconds=seconds) for id, seconds in lengths.items()]
    pairing = pair(tmp_path, clips, seconds=(0.2, 4))
    assert [target.id for target in pairing.targets] == ["shortest", "fine", "longest"]
    assert tuple(target.id for target in pairing.outside_seconds) == ("blip", "speech")
    assert "speech" in drawn(pairing, "fine"), "it still lends its voice"


def test_no_target_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no target between 0\.2 and 30\.0 seconds"):
        pair(tmp_path, [said(tmp_path, "a", reference_only=True)])


def test_a_target_without_reference_is_counted_or_refused(tmp_path: Path) -> None:
    clips = [said(tmp_path, "a"), said(tmp_path, "b"), said(tmp_path, "alone", "bert")]
    assert alone(pair(tmp_path, clips)) == ("alone",)
    with pytest.raises(DataError, match="1 targets find no reference, alone first") as caught:
        pair(tmp_path, clips, require_reference=True)
    assert "a second clip" in caught.value.hint
    with pytest.raises(DataError, match="3 targets find no reference, a first") as caught:
        pair(tmp_path, clips, require_reference=True, reference="given")
    assert "`references`" in caught.value.hint
    assert len(pair(tmp_path, clips[:2], require_reference=True).targets) == 2


# Always the same


def test_a_choice_depends_on_seed_epoch_and_target_alone(tmp_path: Path) -> None:
    clips = [said(tmp_path, f"{n}") for n in range(12)]

    def choices(pairing: ReferenceSampler, epoch: int) -> list[str]:
        return [pairing.references(target, epoch)[0].id for target in sorted(pairing.targets, key=lambda t: t.id)]

    first, again = pair(tmp_path, clips), pair(tmp_path, clips)
    later = choices(first, 7)
    assert choices(first, 0) == choices(again, 0), "whatever was asked before"
    assert later == choices(again, 7)
    assert choices(first, 0) != choices(first, 1)
    assert choices(first, 0) != choices(pair(tmp_path, clips, seed=1), 0)

    fewer_targets = [said(tmp_path, f"{n}", reference_only=n > 5) for n in range(12)]
    assert choices(pair(tmp_path, fewer_targets), 0) == [
        id for target, id in zip(sorted(str(n) for n in range(12)), choices(first, 0), strict=True) if int(target) <= 5
    ]


def test_longest_picks_by_the_measure_it_is_given(tmp_path: Path) -> None:
    clips = [said(tmp_path, f"{n}", seconds=1 + n) for n in range(4)]
    pairing = pair(tmp_path, clips)
    by_seconds = longest(pairing, lambda clip: len(pairing.dataset.codes(clip)))
    assert by_seconds == {"0": ["3"], "1": ["3"], "2": ["3"], "3": ["2"]}
    backwards = longest(pairing, lambda clip: 1000 - len(pairing.dataset.codes(clip)))
    assert backwards == {"0": ["1"], "1": ["0"], "2": ["0"], "3": ["0"]}
    without = longest(pairing, lambda clip: -1 if clip.id == "3" else int(clip.id))
    assert without == {"0": ["2"], "1": ["2"], "2": ["1"], "3": ["2"]}, "below zero is not considered"


def test_many_at_once_are_what_each_is_alone(tmp_path: Path) -> None:
    """Sampling many targets at once equals sampling each alone, for speakers of all sizes, equal audio, spans of one
    recording, given references and none."""
    clips = [said(tmp_path, f"{n}", f"speaker{n % 7}", sound=f"{n % 20}") for n in range(40)]
    clips += [said(tmp_path, f"s{n}", "spans", seconds=9, recording="long", span=Span(n, n + 2)) for n in range(7)]
    clips += [said(tmp_path, "asks", "speaker1", references=["3", "s0"]), said(tmp_path, "asks none", references=[])]
    pairing = pair(tmp_path, clips)
    rows = pairing.targets.indices
    for epoch in range(3):
        every = list(pairing.sample(rows, epoch).as_tuples())
        backwards = list(pairing.sample(rows[::-1], epoch).as_tuples())
        assert backwards[::-1] == every
        for target, drawn in zip(pairing.targets, every, strict=True):
            references = pairing.references(target, epoch)
            assert tuple(pairing.dataset.find(reference.id) for reference in references) == drawn
            for reference in references:
                assert target.id == "asks" or reference.speaker == target.speaker
                assert pairing.dataset.key(reference) != pairing.dataset.key(target)
                if reference.span and target.span:
                    assert abs(reference.span.start - target.span.start) >= 2, "each lasts two seconds"


def test_every_clip_that_would_do_is_as_likely_as_the_next(tmp_path: Path) -> None:
    """Draws are even also if most clips are the target's own audio, so that draws fail again and again."""
    twins = [said(tmp_path, f"twin{n}", sound="x") for n in range(30)]
    pairing = pair(tmp_path, [*twins, said(tmp_path, "one"), said(tmp_path, "two")])
    target = pairing.targets.with_id("twin7")[0]
    times = Counter(pairing.references(target, epoch)[0].id for epoch in range(400))
    assert set(times) == {"one", "two"} and abs(times["one"] - 200) < 60
    calm = Counter(pairing.references(pairing.targets.with_id("one")[0], epoch)[0].id for epoch in range(3100))
    assert len(calm) == 31 and max(calm.values()) < 2 * min(calm.values()) + 60


def test_one_speaker_with_many_clips_is_not_compared_pair_by_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clips = [
        said(tmp_path, f"{n}", recording=f"{n % 8}", seconds=30, span=Span(n / 100, n / 100 + 1)) for n in range(2000)
    ]
    corpus = prepared(tmp_path, clips)
    compared, share_audio = 0, references_module._share_audio

    def count(table: ManifestTable, ones: Indices, others: Indices) -> Mask:
        nonlocal compared
        compared += len(others)
        return share_audio(table, ones, others)

    monkeypatch.setattr(references_module, "_share_audio", count)
    pairing = ReferenceSampler(corpus, DataSettings(train=tmp_path), seed=0)
    assert (pairing.sample(pairing.targets.indices, 1).counts == 1).all()
    assert (pairing.longest_references(np.arange(2000)).counts == 1).all()
    assert compared < 20 * 2000, "not four million"
