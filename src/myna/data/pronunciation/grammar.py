"""Lark grammar of assessment answers: JSON that `read_answer` reads.

Keys may come in any order, with blanks where JSON has them, so that constrained decoding leaves an answer alone that
is valid already. Left out are scores with an exponent or a minus, key names in escapes, and long runs of blanks, in
which models lose themselves.
"""

from __future__ import annotations

from itertools import combinations

from myna.data.pronunciation.assessment import SCORES, AssessmentAnswer

KEYS = tuple(AssessmentAnswer.model_fields)
MAX_BLANKS = 16
TERMINALS = rf"""
ws: WS?
WS: /[ \t\n\r]{{1,{MAX_BLANKS}}}/
STRING: /"([^"\\\x00-\x1f]|\\["\\\/bfnrt]|\\u[0-9a-fA-F]{{4}})*"/
SCORE: /10(\.0+)?|[0-9](\.[0-9]+)?/
"""


def answer_grammar() -> str:
    """One rule for every set of keys that may be left."""
    rules = [f'start: ws "{{" ws {_rule(KEYS)} ws {TERMINALS}']
    for count in range(1, len(KEYS) + 1):
        rules += [
            f"{_rule(keys)}: {' | '.join(_pair(key, keys) for key in keys)}" for keys in combinations(KEYS, count)
        ]
    return "\n".join(rules)


def _rule(keys: tuple[str, ...]) -> str:
    return "_".join(("pairs", *keys))


def _pair(key: str, keys: tuple[str, ...]) -> str:
    rest = tuple(other for other in keys if other != key)
    value = "SCORE" if key in SCORES else "STRING"
    return rf'"\"{key}\"" ws ":" ws {value} ws ' + (f'"," ws {_rule(rest)}' if rest else '"}"')
