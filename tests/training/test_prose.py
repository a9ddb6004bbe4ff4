"""Prose cut into lines that can be read aloud in one way only."""

from __future__ import annotations

import pytest

from corpus_making.prose import MAX_CHARACTERS, MIN_CLAUSE_CHARACTERS, prose_lines


def lines_of(text: str) -> list[str]:
    return list(prose_lines(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "She put it into my hand without a word. How did you\nall behave? Nobody answered!",
            ["She put it into my hand without a word.", "How did you all behave?", "Nobody answered!"],
            id="sentences end at marks, not at lines",
        ),
        pytest.param(
            '"Why, what has happened, Maggie?" he said.\n\n"I\'m sorry, sir," she said, "but I had to follow him."',
            ["Why, what has happened, Maggie?", "I'm sorry, sir, she said, but I had to follow him."],
            id="marks of speech go, and what was left of a sentence with them",
        ),
        pytest.param(
            "'Curiouser and curiouser!' cried Alice. 'Why, 'tis the boys' own garden, isn't it?'",
            ["Curiouser and curiouser!", "Why, 'tis the boys own garden, isn't it?"],
            id="apostrophes within words stay",
        ),
        pytest.param(
            "Mr. Knightley spoke to Mrs. Weston. He came from St. Petersburg in the U.S. Navy. He saw Dr. Grant.",
            ["Mr Knightley spoke to Mrs Weston.", "He saw Dr Grant."],
            id="titles lose their dot, other abbreviations are left out whole",
        ),
        pytest.param(
            "It was all a joke--you know it was. He stopped!--Then he went on. He saw noth--",
            ["It was all a joke, you know it was.", "Then he went on."],
            id="dashes become commas or ends",
        ),
        pytest.param(
            "In May, 1994, we had 3 million of them. It was the 26th of July. It cost $4.50 in all.\n\n"
            "There were 12,000 of these. Call us at 555-1234 please. The 123456 was not read.",
            ["In May, 1994, we had 3 million of them.", "It was the 26th of July."],
            id="counts, years and days, but no numbers that are written in many ways",
        ),
        pytest.param(
            "CHAPTER IV. In which he sails\n\nThis was Louis XIV of France. "
            "He fought in World War I again. Vitamin C is good.",
            [],
            id="no heads, Roman numbers or letters",
        ),
        pytest.param(
            "They were Negroes of that town. They were people of that town.",
            ["They were people of that town."],
            id="no slurs",
        ),
        pytest.param(
            "Roses are as red as wine,\nViolets are blue and fine,\nSugar is as sweet as you.",
            [],
            id="no verse",
        ),
        pytest.param(
            "We were glad [Laughter] of it all. He came to- day (Applause) to the town.",
            ["We were glad of it all.", "He came to-day to the town."],
            id="no remarks",
        ),
        pytest.param(
            "Ein schöner Tag war es für ihn. It was a _fine_ day.", ["It was a fine day."], id="plain letters"
        ),
    ],
)
def test_prose_becomes_sentences(text: str, expected: list[str]) -> None:
    assert lines_of(text) == expected


def test_what_is_too_long_is_cut_at_its_strongest_marks() -> None:
    first = "The door of the house stood open that morning to everybody in the village"
    second = "and nobody in the village had seen the owner of the house for a year"
    third = "which was the longest time that anybody there could well remember"
    assert lines_of(f"{first}; {second}, {third}.") == [
        *(f"{first}.", f"{second.capitalize()}, {third}."),
    ]
    assert lines_of(f"{first}, {second}, {third}!") == [
        *(f"{first}.", f"{second.capitalize()}.", f"{third.capitalize()}!"),
    ]
    assert lines_of(f"{first}; so it seemed; {second}, {third}.")[1].startswith("And nobody"), "scraps are left out"
    endless = " ".join(["very"] * MAX_CHARACTERS)
    assert lines_of(f"It was {endless} long.") == []
    assert all(
        MIN_CLAUSE_CHARACTERS <= len(line) <= MAX_CHARACTERS
        for line in lines_of(f"{first}, {second} {third}, {first} {third}.")
    )
