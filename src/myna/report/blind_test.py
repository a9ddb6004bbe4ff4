"""Blind listening test (A/B preference) as a section of a page: by keyboard or mouse, with or without a screen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from markupsafe import Markup

from myna.report.document import render_template

KEYS = (
    ("Space", "play what is still to be heard, then pause and go on"),
    ("1 and 2", "play A, play B, from the start"),
    ("X", "change to the other one, at the same place"),
    ("R", "play the real recording, where there is one"),
    ("A and B", "this one is better"),
    ("= or T", "no difference"),
    ("← and →", "the pair before, the next pair"),
    ("?", "these keys"),
)


@dataclass(frozen=True, slots=True)
class BlindTestPair:
    """Two clips of one text. `sounds` are clip names in playing order; `names` are the systems, shown at the end."""

    id: str
    text: str
    note: str
    sounds: tuple[str, str]
    names: tuple[str, str]
    real: str | None = None
    """Clip name of the real recording, which may be played beside them and is named as such."""
    language: str = ""


def blind_test_section(
    pairs: Sequence[BlindTestPair],
    sounds: Mapping[str, str | None],
    *,
    name: str,
    intervals: Sequence[Sequence[float]],
    level: float,
) -> Markup:
    """The test itself. `sounds` are data URIs, None for an empty clip; the browser stores answers under `name`;
    `intervals[n][k]` is the lower bound of the preference for k of n answers at the confidence `level`."""
    data = {
        "name": name,
        "pairs": [asdict(pair) for pair in pairs],
        "sounds": dict(sounds),
        "intervals": [[round(low, 4) for low in lows] for lows in intervals],
        "level": level,
    }
    return render_template("report/blind_test.html", data=json_for_script(data), count=len(pairs), keys=KEYS)


def json_for_script(data: Any) -> Markup:
    """JSON that cannot close the script element it is put in."""
    return Markup(json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"))
