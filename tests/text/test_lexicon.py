"""The pronunciation lexicon: whole words, spelled otherwise for the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from myna.core.errors import SpeakError
from myna.text.lexicon import read_lexicon, respell


def test_whole_words_are_respelled_the_longest_first(tmp_path: Path) -> None:
    file = tmp_path / "words.tsv"
    file.write_text(
        "# names\nnguyen\twin\nnguyen van a\twin van ah\nUS\tyou ess\n\nc++\tsee plus plus\n", encoding="utf-8"
    )
    lexicon = read_lexicon(file)
    assert respell("Nguyen Van A and NGUYEN met us in the US.", lexicon) == "win van ah and win met us in the you ess."
    assert respell("Nguyens write C++, not c++x.", lexicon) == "Nguyens write see plus plus, not c++x."
    assert respell("nothing here", lexicon) == "nothing here" and respell("nguyen", {}) == "nguyen"


def test_a_lexicon_may_be_yaml(tmp_path: Path) -> None:
    file = tmp_path / "words.yaml"
    file.write_text("Myna: my nah\n", encoding="utf-8")
    assert respell("Myna, not myna", read_lexicon(file)) == "my nah, not myna"


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.tsv", "one two\n", "line 1 has no tab"),
        ("a.yaml", "- one\n", "no table of words"),
        ("a.yaml", "no: yes\n", "not two texts"),
        ("a.yaml", "a: [", "cannot be read"),
        ("gone.tsv", None, "cannot be read"),
    ],
)
def test_a_damaged_lexicon_is_refused_by_its_line(tmp_path: Path, name: str, content: str | None, match: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SpeakError, match=match) as error:
        read_lexicon(tmp_path / name)
    assert name in error.value.what and error.value.hint
