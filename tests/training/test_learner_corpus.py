"""Simulated learners: scores follow from the mispronunciations."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rapidfuzz.distance import Levenshtein

from myna.core.errors import ModelError
from myna.data.importers import import_source
from myna.data.pronunciation import mispronounced, read_assessment
from myna.models import open_family
from simulated_learners.learner import Learner, SpokenWord, mispronounce, score_record
from simulated_learners.phones import ARPABET_TO_ESPEAK, CONFUSIONS, Phone, format_espeak, parse_espeak
from simulated_learners.sentences import draw_sentence, is_held_out

SENTENCE = {"bear": "B EH R", "tok": "T OW K"}
CANONICAL = [(word, [Phone(name) for name in phones.split()]) for word, phones in SENTENCE.items()] * 6
PERFECT = replace(Learner.draw("x", 0), clumsiness=0.0, hesitation=0.0, pace=1.0, pitch_range=60)


def scores(learner: Learner, words: list[SpokenWord]) -> dict[str, int]:
    made: dict[str, int] = score_record("x.wav", learner, words)["scores"]
    return made


def read(learner: Learner, seed: int = 0) -> list[SpokenWord]:
    return mispronounce(CANONICAL, learner, random.Random(seed))


class Steady(random.Random):
    """Random numbers whose `uniform` is always the mean."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


def test_whoever_makes_no_mistake_gets_full_marks() -> None:
    words = mispronounce(CANONICAL, PERFECT, Steady(0))
    assert all(word.spoken == word.canonical and not word.pause for word in words)
    assert scores(PERFECT, words) == {"accuracy": 10, "fluency": 10, "prosodic": 10, "total": 10}


@pytest.mark.parametrize(
    ("worse", "score"),
    [
        ({"clumsiness": 1.0}, "accuracy"),
        ({"hesitation": 1.0}, "fluency"),
        ({"pace": 0.6}, "fluency"),
        ({"pitch_range": 10}, "prosodic"),
    ],
)
def test_each_weakness_costs_its_score(worse: dict[str, Any], score: str) -> None:
    learner = replace(PERFECT, **worse)
    told = scores(learner, mispronounce(CANONICAL, learner, Steady(0)))
    assert told[score] < 8 and told["total"] < 10
    if score != "accuracy":
        assert told["accuracy"] == 10


@pytest.mark.parametrize("seed", range(20))
def test_a_line_can_be_read_and_tells_what_was_done(seed: int) -> None:
    learner = replace(PERFECT, clumsiness=0.5)
    words = read(learner, seed)
    told = score_record("x.wav", learner, words)
    assessment = read_assessment({key: told[key] for key in ("text", "scores", "words")})
    done = sum(len(word.wrong) + word.inserted for word in words)
    assert (
        done
        >= Levenshtein.distance(assessment.phones, assessment.pronounced)
        >= sum(mispronounced(assessment.phones, assessment.pronounced))
    )
    for word in words:
        assert word.spoken, "no word is left out as a whole"
        assert (word.spoken == word.canonical) == (not word.wrong and not word.inserted)


def test_habits_make_the_same_mistake_again() -> None:
    learner = replace(PERFECT, clumsiness=1.0)
    for word in read(learner):
        changed = [(phone.name, said.name) for phone, said in zip(word.canonical, word.spoken, strict=False)]
        if len(word.spoken) == len(word.canonical) and not word.inserted:
            assert all(said in (phone, learner.habits[phone]) for phone, said in changed)


def test_what_is_said_instead_is_another_phone_that_can_be_said() -> None:
    assert CONFUSIONS.keys() == ARPABET_TO_ESPEAK.keys()
    assert all(
        other in ARPABET_TO_ESPEAK and other != phone
        for phone, others in CONFUSIONS.items()
        for other in others.split()
    )


def test_phones_are_written_with_their_stress() -> None:
    assert parse_espeak("b_'e@") == [Phone("B"), Phone("EH", stressed=True), Phone("R")]
    assert format_espeak(parse_espeak("w_'3:_l_d")) == "w|'3:|l|d"
    with pytest.raises(KeyError):
        parse_espeak("x_Q")


def test_held_out_sentences_are_never_learned_from() -> None:
    rng = random.Random(0)
    learned = {draw_sentence(rng, held_out=False) for _ in range(300)}
    assert min(len(text.split()) for text in learned) == 1, "some of it is only a few words"
    assert learned.isdisjoint({draw_sentence(rng, held_out=True) for _ in range(30)}) and not any(
        is_held_out(text) for text in learned if len(text.split()) > 3
    )


def test_a_corpus_is_made_and_imported(tmp_path: Path) -> None:
    pytest.importorskip("espeakng_loader")
    import learner_corpus

    asked = learner_corpus.CorpusConfig(tmp_path, speakers=3, sentences=2, held_out=0.3, seed=1)
    learner_corpus.make(asked, jobs=1)
    learner_corpus.make(replace(asked, out=tmp_path / "again"), jobs=2)
    for part in ("train", "test"):
        lines = [(tmp_path / out / part / "scores.jsonl").read_text() for out in ("", "again")]
        assert lines[0] == lines[1], "however many make it"
    parts = {
        part: import_source(str(tmp_path / part / "scores.jsonl"), media=tmp_path / "m") for part in ("train", "test")
    }
    assert {part: len(found.utterances) for part, found in parts.items()} == {"train": 4, "test": 2}
    assert not any(found.rejected for found in parts.values())
    speakers = [{u.speaker for u in found.utterances} for found in parts.values()]
    assert speakers[0].isdisjoint(speakers[1])


def test_what_is_said_otherwise_sounds_otherwise() -> None:
    pytest.importorskip("espeakng_loader")
    import learner_corpus

    reader = learner_corpus.PhoneReader()
    meant = list(reader.phones("bear"))
    assert [phone.name for phone in meant] == ["B", "EH", "R"]
    one, same, other = (reader.say_phones([phones]) for phones in (meant, meant, [Phone("P"), *meant[1:]]))
    assert len(one) > 1000 and abs(len(one) - len(same)) < 200
    assert len(other) != len(one) or not np.allclose(one, other, atol=0.01)


def test_the_small_model_is_phis_and_nothing_is_written_over(tmp_path: Path) -> None:
    import init_small_model

    answers = tmp_path / "scores.jsonl"
    told = [score_record("x.wav", PERFECT, read(replace(PERFECT, clumsiness=0.5), seed)) for seed in range(5)]
    answers.write_text("".join(json.dumps(one) + "\n" for one in told))
    init_small_model.make(answers, tmp_path / "model", seed=0, hidden=64, layers=2, blocks=2, channels=8)
    family = open_family(str(tmp_path / "model"))
    assert family.name == "phi4" and "have their place" in family.check_weights()
    phones = " ".join(told[0]["words"][0]["pronounced"])
    assert len(family.tokenizer.encode(f" {phones}")) == len(phones.split()), "a phone is a token"
    strange = "straße 日本"
    assert family.tokenizer.decode(family.tokenizer.encode(strange)) == strange, "and all else can be spelt"
    with pytest.raises(ModelError, match="there already"):
        init_small_model.make(answers, tmp_path / "model", seed=0, hidden=64, layers=2, blocks=2, channels=8)
