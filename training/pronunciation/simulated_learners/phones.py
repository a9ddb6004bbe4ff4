"""English phones in eSpeak's notation and in ARPAbet."""

from __future__ import annotations

from typing import NamedTuple

CONSONANTS = {
    **{"P": "p", "B": "b", "T": "t", "D": "d", "K": "k", "G": "g", "F": "f", "V": "v", "TH": "T", "DH": "D"},
    **{"S": "s", "Z": "z", "SH": "S", "ZH": "Z", "HH": "h", "M": "m", "N": "n", "NG": "N", "L": "l", "R": "r"},
    **{"W": "w", "Y": "j", "CH": "tS", "JH": "dZ"},
}
VOWELS = {
    **{"IY": "i:", "IH": "I", "EH": "E", "AE": "a", "AA": "A:", "AO": "O:", "UH": "U", "UW": "u:", "AH": "V"},
    **{"ER": "3:", "AY": "aI", "EY": "eI", "OW": "oU", "AW": "aU", "OY": "OI"},
}
ARPABET_TO_ESPEAK = CONSONANTS | VOWELS
"""ARPAbet -> espeak."""
ESPEAK_TO_ARPABET = {spoken: (name,) for name, spoken in ARPABET_TO_ESPEAK.items()} | {
    **{
        "t#": ("T",),
        "t2": ("T",),
        "@": ("AH",),
        "@2": ("AH",),
        "a#": ("AH",),
        "3": ("ER",),
        "0": ("AA",),
        "aa": ("AE",),
    },
    **{"O2": ("AO",), "i": ("IY",), "I2": ("IH",), "I#": ("IH",), "E2": ("EH",), "@L": ("AH", "L")},
    **{"e@": ("EH", "R"), "A@": ("AA", "R"), "o@": ("AO", "R"), "O@": ("AO", "R"), "U@": ("UH", "R")},
    **{"i@": ("IH", "R"), "i@3": ("IH", "R"), "aI@": ("AY", "AH"), "aI3": ("AY", "ER"), "aU3": ("AW", "ER")},
}
"""espeak -> ARPAbet; American vowels before an r are two phones there."""
STRESS_MARKS = "',%=|_:;"
"""Stress and the like, before or between espeak's phones."""

CONFUSIONS = {
    **{"TH": "S T F", "DH": "D Z", "V": "W B F", "W": "V", "Z": "S", "S": "SH", "SH": "S", "ZH": "SH", "R": "L W"},
    **{"L": "R N", "N": "NG L", "NG": "N", "P": "B", "B": "P", "T": "D", "D": "T", "K": "G", "G": "K", "F": "P"},
    **{"HH": "K", "M": "N", "CH": "SH", "JH": "CH", "Y": "JH", "IY": "IH", "IH": "IY EH", "EH": "AE IH"},
    **{"AE": "EH AA", "AA": "AO AH", "AO": "OW AA", "UH": "UW", "UW": "UH", "AH": "AA AO", "ER": "AO AH"},
    **{"AY": "AE EY", "EY": "EH", "OW": "AO", "AW": "AA", "OY": "AO"},
}
"""Substitutions of learners."""


class Phone(NamedTuple):
    name: str
    stressed: bool = False


def parse_espeak(phonemes: str) -> list[Phone]:
    """Phones of a word as eSpeak writes them, separated by underscores. A `KeyError` for an unknown phone."""
    phones: list[Phone] = []
    for part in phonemes.split("_"):
        stressed = part.startswith("'")
        bare = part.lstrip(STRESS_MARKS)
        if bare:
            names = ESPEAK_TO_ARPABET[bare]
            phones += [Phone(name, stressed and name in VOWELS) for name in names]
    return phones


def format_espeak(phones: list[Phone]) -> str:
    """Phones as eSpeak input. Two names that would read as a third are separated."""
    return "|".join(("'" if phone.stressed else "") + ARPABET_TO_ESPEAK[phone.name] for phone in phones)
