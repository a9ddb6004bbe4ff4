"""View of a conversation: learned tokens are green, and nothing else is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from rich.text import Text

from myna.data.conversation import AudioClip, Reference, speech_conversation
from myna.models import open_family, save_tiny_model
from myna.models.base import IGNORE_INDEX, Family, RenderedSequence
from myna.models.token_view import EDGE_FRAMES_SHOWN, SUPERVISED, token_view


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return open_family(str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")))


def rendered(
    family: Family,
    *,
    target: int = 7,
    text: str = "hello\nthere",
    text_too: bool = False,
    supervise_references: bool = False,
    reference_only: bool = False,
) -> RenderedSequence:
    dice = np.random.default_rng(0)
    codes = [dice.integers(0, 64, (frames, 8)).astype(np.uint16) for frames in (5, target)]
    conversation = speech_conversation(
        text,
        id="utterance",
        references=(Reference("as I said", AudioClip("reference", codes[0], reference_only=reference_only)),),
        target=AudioClip("target", codes[1], target=True),
    )
    return family.render(conversation, supervise_text=text_too, supervise_references=supervise_references)


def green(art: Text) -> list[str]:
    return [art.plain[span.start : span.end] for span in art.spans if span.style == SUPERVISED]


switches = pytest.mark.parametrize(
    ("text_too", "supervise_references"), list(itertools.product([False, True], repeat=2))
)


@switches
def test_exactly_the_learned_codes_are_green(family: Family, text_too: bool, supervise_references: bool) -> None:
    drawn = rendered(family, text_too=text_too, supervise_references=supervise_references)
    codes = [int(word) for word in green(token_view(drawn, family)) if word.strip().isdigit()]
    assert codes == drawn.code_labels[drawn.code_labels != IGNORE_INDEX].tolist()


@switches
def test_exactly_the_learned_text_is_green(family: Family, text_too: bool, supervise_references: bool) -> None:
    drawn = rendered(family, text_too=text_too, supervise_references=supervise_references)
    words = [word for word in green(token_view(drawn, family)) if not word.strip().isdigit() and "frames" not in word]
    assert words == [family.show_token(id) for id in drawn.labels[drawn.labels != IGNORE_INDEX].tolist()]
    assert bool(words) == text_too


def test_only_clips_that_are_learned_have_a_green_title(family: Family) -> None:
    assert [word for word in green(token_view(rendered(family), family)) if "frames" in word] == [
        "target: 7 frames, 0.28 s\n"
    ]


def test_a_clip_that_is_a_reference_alone_is_never_learned(family: Family) -> None:
    for reference_only, learned in ((False, 2), (True, 1)):
        drawn = rendered(family, supervise_references=True, reference_only=reference_only)
        assert len([word for word in green(token_view(drawn, family)) if "frames" in word]) == learned


def test_nothing_is_green_in_an_open_conversation(family: Family) -> None:
    assert green(token_view(family.render(speech_conversation("hello", id="open")), family)) == []


def test_masked_codes_are_marked_without_colour_too(family: Family) -> None:
    drawn = rendered(family)
    lines = token_view(drawn, family).plain.splitlines()
    frames = [line.split(maxsplit=1)[1].rstrip() for line in lines if line[8:13].strip().isdigit()]
    assert len(frames) == len(drawn.codes)
    for line, codes, labels in zip(frames, drawn.codes, drawn.code_labels, strict=True):
        marked = [
            str(code) + "·" * (label == IGNORE_INDEX)
            for code, label in zip(codes.tolist(), labels.tolist(), strict=True)
        ]
        assert line.replace("·", "· ").split() == marked


def test_every_position_is_shown(family: Family) -> None:
    drawn = rendered(family)
    art = token_view(drawn, family).plain
    assert art.startswith(f"utterance: {len(drawn)} positions, 0 text and {8 * (7 + 1)} code targets\n")
    assert "h│e│l│l│o│⏎│t│h│e│r│e" in art, "a line of text stays a line"
    starts = {int(line[:6]) for line in art.splitlines()[1:]}
    assert starts == {piece.start for piece in drawn.spans} | set(
        itertools.chain.from_iterable(range(p.start, p.stop) for p in drawn.spans if p.kind == "audio")
    )


def test_long_clips_show_their_ends(family: Family) -> None:
    drawn = rendered(family, target=100)
    art, whole = token_view(drawn, family), token_view(drawn, family, all_frames=True)
    ends, positions = EDGE_FRAMES_SHOWN + 8, 100 + 9
    assert f"… {positions - 2 * ends} more frames" in art.plain and "more frames" not in whole.plain
    assert len(whole.plain.splitlines()) - len(art.plain.splitlines()) == positions - 2 * ends - 1
    codes = [int(word) for word in green(whole) if word.strip().isdigit()]
    assert codes == drawn.code_labels[drawn.code_labels != IGNORE_INDEX].tolist()


def test_brackets_in_a_text_are_text(family: Family) -> None:
    assert "[│b│o│l│d│]│x" in token_view(rendered(family, text="[bold]x"), family).plain
