"""Pronunciation lexicon: words of a text that are spelled otherwise for the model."""

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from myna.core.errors import SpeakError

LEXICON_HINT = "a word, a tab and its spelling in each line; or a YAML file (.yaml) of WORD: SPELLING"


def read_lexicon(file: Path) -> dict[str, str]:
    """Read a lexicon: YAML, or lines of a word, a tab and its spelling. Lines that begin with `#` are comments."""
    try:
        content = file.read_text(encoding="utf-8-sig")
        found = yaml.safe_load(content) if file.suffix in (".yaml", ".yml") else _read_lines(content)
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        raise SpeakError(f"the lexicon {file} cannot be read: {error}", hint=LEXICON_HINT) from None
    if not isinstance(found, dict):
        raise SpeakError(f"the lexicon {file} is no table of words", hint=LEXICON_HINT)
    for word, spelling in found.items():
        if not isinstance(word, str) or not isinstance(spelling, str) or not word.strip():
            raise SpeakError(
                f"the lexicon {file} has {word!r}: {spelling!r}, not two texts", hint="write both in quotes"
            )
    return found


def _read_lines(content: str) -> dict[str, str]:
    found = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            word, tab, spelling = line.partition("\t")
            if not tab:
                raise ValueError(f"line {number} has no tab: {line!r}")
            found[word.strip()] = spelling.strip()
    return found


def respell(text: str, lexicon: Mapping[str, str]) -> str:
    """Replace whole words, the longest entry first. An entry in small letters is found in any case, another one only
    as it is written: `US` leaves `us` alone."""
    if not lexicon:
        return text
    by_length = sorted(lexicon, key=len, reverse=True)
    entries = (f"(?i:{re.escape(word)})" if word == word.lower() else re.escape(word) for word in by_length)
    small = {word.lower(): lexicon[word] for word in lexicon if word == word.lower()}
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(entries)})(?!\w)")
    return pattern.sub(lambda match: lexicon.get(match[0], small.get(match[0].lower(), match[0])), text)
