"""Pauses in a text: silence of the length that was asked for, in a file and in a stream."""

from __future__ import annotations

import numpy as np
import pytest

from myna.core.errors import SpeakError
from myna.models.ref import ModelRef
from myna.speak.engine import Engine
from myna.speak.loading import load_engine
from myna.speak.request import SpeechRequest
from myna.text.sentences import split_pauses


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(ModelRef.find_model("fledgling"), device="cpu")


def test_marks_of_pauses_are_split_off() -> None:
    assert split_pauses("Yes.") == [("Yes.", 0.0)]
    assert split_pauses("One <break time=\"500ms\"/> two<break time='1.5s' />.") == [
        ("One ", 0.5),
        (" two.", 1.5),
    ]
    assert split_pauses("One <break/> <BREAK> two <break time=2s/>") == [("One ", 1.0), (" two ", 2.0)]


def test_a_pause_is_silence_between_the_words(engine: Engine) -> None:
    request = SpeechRequest('Yes. <break time="800ms"/> No.', seed=1, max_seconds=4)
    request.check()
    plan = engine.plan(request)
    assert plan.segments == ("Yes.", "No.") and plan.pauses == (20, 0)
    [(_, speech)] = engine.speak_plans([plan])
    stream = engine.stream(request, split=True)
    assert np.array_equal(np.concatenate(list(stream)), speech.samples)
    whole, hop = np.abs(speech.samples), engine.codec.hop
    quiet = np.array([whole[start : start + hop].max() < 1e-4 for start in range(0, len(whole) - hop, hop)])
    longest = max(map(len, "".join("q" if one else " " for one in quiet).split()), default=0)
    assert 16 <= longest <= 30, "20 frames, but for what their neighbours reach into them"
    assert np.abs(speech.samples[-20 * hop :]).max() > 1e-2, "and words after it"


def test_a_long_text_has_its_pauses_between_its_segments(engine: Engine) -> None:
    long = "The wind blew over the hills all night, and the river rose above its banks. " * 8
    plan = engine.plan(SpeechRequest(f"{long}<break time='1s'/> That is all. <break time='2s'/>"))
    assert len(plan.segments) > 3 and plan.segments[-1] == "That is all."
    assert plan.pauses == (*(0,) * (len(plan.segments) - 2), 25, 50)


@pytest.mark.parametrize(
    "text",
    [
        '<break time="1s"/> Yes.',
        'Yes. <break time="soon"/>',
        'Yes. <break strength="weak"/> No.',
        "[SPEAKER0] Yes. <break/> [SPEAKER1] No.",
        'Yes. <break time="11s"/> No.',
    ],
)
def test_a_pause_that_cannot_be_made_is_refused(text: str) -> None:
    with pytest.raises(SpeakError, match="a pause") as error:
        SpeechRequest(text).check()
    assert "<break" in error.value.hint or "10 s" in error.value.hint


def test_other_words_in_angle_brackets_are_no_pauses() -> None:
    SpeechRequest("What is for <breakfast>?").check()


def test_a_text_of_pauses_alone_has_no_words() -> None:
    with pytest.raises(SpeakError, match="no text to speak"):
        SpeechRequest("<break/> <break/>").check()


def test_words_are_spelled_for_the_model_and_kept_in_the_request(engine: Engine) -> None:
    plan = engine.plan(SpeechRequest("Nguyen says yes.", spellings={"nguyen": "win"}))
    assert plan.segments == ("win says yes.",) and plan.request.text == "Nguyen says yes."


def test_a_lexicon_leaves_the_marks_of_pauses_alone(engine: Engine) -> None:
    plan = engine.plan(SpeechRequest('No time. <break time="1s"/> Yes.', spellings={"time": "tyme", "break": "brake"}))
    assert plan.segments == ("No tyme.", "Yes.") and plan.pauses == (25, 0)


def test_the_closing_tag_of_a_pause_is_not_spoken() -> None:
    assert split_pauses('Yes <break time="1s"></break> no.') == [("Yes ", 1.0), (" no.", 0.0)]
    with pytest.raises(SpeakError, match="a pause is not understood"):
        SpeechRequest("Yes </break> no.").check()
