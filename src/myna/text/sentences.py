"""Sentences and segments of long text, and the frames that a text may take.

A model speaks well for some seconds, and was trained on clips of at most about thirty. Segments are whole sentences if
these are short enough. A missed sentence end matters little, since short sentences are merged anyway.
"""

import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from myna.text.normalization import ABBREVIATIONS, clusters, normalise_text

MAX_SEGMENT_SECONDS = 30.0
TARGET_SEGMENT_SECONDS = 8.0
"""Seconds up to which sentences of a paragraph are merged: the length of training clips. With 15 s and the segment
before in the prompt, 6 of 21 segments of fledgling ran away, with 8 s 1 of 39."""
SHORT_SEGMENT_SECONDS = 2.0
"""Seconds below which a segment, such as a heading, is merged beyond its paragraph and the target."""
PACE_RANGE = (0.5, 2.5)
"""Plausible paces of voices; another pace comes from a reference with a wrong transcript."""
BUDGET_FACTOR, BUDGET_SECONDS = 3.0, 2.0
"""Factor on the estimated length of a text, and seconds added to it: speech that takes longer has run away."""

LETTER_SECONDS = 0.078
"""Seconds per letter of an alphabet, pauses included: 770 letters a minute, about 150 words of English."""
DIGIT_SECONDS = 0.3
"""Seconds per digit or symbol that is read as a word."""
SCRIPT_SECONDS = (
    (0x0590, 0x08FF, 0.1),  # Hebrew, Arabic, Syriac: most vowels are not written
    (0x0900, 0x0E7F, 0.1),  # scripts of India, Thai: vowels are marks
    (0x0E80, 0x109F, 0.1),  # Lao, Tibetan, Burmese
    (0x1200, 0x137F, 0.15),  # Ethiopic
    (0x3040, 0x30FF, 0.14),  # kana
    (0x3400, 0x9FFF, 0.25),  # ideographs
    (0xAC00, 0xD7AF, 0.19),  # Hangul
    (0xF900, 0xFAFF, 0.25),
    (0x20000, 0x3FFFF, 0.25),
)
"""First and last character of a script, and seconds per letter or syllable."""
WORD_SYMBOLS = "%&@#"

ENDS = ".!?…؟۔।॥։።။"
"""Marks that end a sentence before a space."""
WIDE_ENDS = "。！？｡"
"""Marks that end a sentence without a space."""
CLAUSE_ENDS = ",;:–—،؛"
WIDE_CLAUSE_ENDS = "、，；："
OPENING = "\"'“‘„‚«‹([{¿¡「『（【《〈"
CLOSING = "\"'”’“‘»›)]}」』）】》〉"

PAUSE = re.compile(
    r"""<break(?:\s+time\s*=\s*["']?(\d+(?:\.\d+)?)(ms|s)["']?)?\s*/?>(?:\s*</break\s*>)?""", re.IGNORECASE
)
PAUSE_SECONDS = 0.5
"""Seconds of a pause that names none."""
SENTENCE_END = re.compile(rf"[{ENDS}{WIDE_ENDS}]+(?:[{re.escape(CLOSING)}]| [»”])*(?: |$)?")
CLAUSE_END = re.compile(
    rf"[{CLAUSE_ENDS}]+[{re.escape(CLOSING)}]* | [–—-] |[{WIDE_CLAUSE_ENDS}]+[{re.escape(CLOSING)}]* ?"
)
WORD_END = re.compile(" ")
AFTER_OPENING = re.compile(rf"[ {re.escape(OPENING)}]*(.)")
PARAGRAPH_END = re.compile(r"\n[^\S\n]*\n\s*")


@lru_cache(maxsize=4096)
def _character_seconds(character: str) -> float:
    category = unicodedata.category(character)
    if category[0] == "N" or category == "Sc" or character in WORD_SYMBOLS:
        return DIGIT_SECONDS
    if category[0] != "L":
        return 0.0
    code = ord(character)
    return next((seconds for first, last, seconds in SCRIPT_SECONDS if first <= code <= last), LETTER_SECONDS)


def estimate_seconds(text: str, pace: float = 1.0) -> float:
    """Estimate the seconds that a text takes to speak from its letters; `pace` comes from `voice_pace`."""
    return pace * sum(map(_character_seconds, text))


def voice_pace(reference_text: str, seconds: float) -> float:
    """Return the seconds that a voice takes for each estimated second, from a reference and its transcript."""
    estimate = estimate_seconds(reference_text)
    return min(max(seconds / estimate, PACE_RANGE[0]), PACE_RANGE[1]) if estimate else 1.0


def frame_budget(text: str, frame_rate: float, pace: float = 1.0, factor: float = BUDGET_FACTOR) -> int:
    """Return the number of frames after which the speech of a text has run away, and is ended."""
    return math.ceil((factor * estimate_seconds(text, pace) + BUDGET_SECONDS) * frame_rate)


def split_pauses(text: str) -> list[tuple[str, float]]:
    """Split text at marks such as `<break time="500ms"/>`: parts, each with the seconds of silence after it."""
    first, *rest = PAUSE.split(text)
    parts = [(first, 0.0)]
    for number, unit, following in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        before, seconds = parts.pop()
        seconds += PAUSE_SECONDS if number is None else float(number) * (0.001 if unit.lower() == "ms" else 1.0)
        # A full stop behind a pause is no part of its own: the model would be asked to speak it alone.
        has_words = bool(estimate_seconds(following))
        parts += [(before, seconds), (following, 0.0)] if has_words else [(before + following.strip(), seconds)]
    return parts


def split_long_text(
    text: str, language: str = "", pace: float = 1.0, max_seconds: float = MAX_SEGMENT_SECONDS
) -> list[str]:
    """Split text into segments of at most `max_seconds` each, by estimate; joined, they are the normalised text.

    Blank lines end paragraphs. An unknown or missing language uses the abbreviations of all.
    """
    target = min(TARGET_SEGMENT_SECONDS, max_seconds / 2)
    segments: list[str] = []
    seconds: list[float] = []
    paragraphs = [paragraph for part in PARAGRAPH_END.split(text) if (paragraph := normalise_text(part))]
    for number, paragraph in enumerate(paragraphs, start=1):
        new_paragraph = True
        sentences = split_sentences(paragraph + " " * (number < len(paragraphs)), language)
        for piece in (piece for sentence in sentences for piece in _cut(sentence, max_seconds, pace)):
            own = estimate_seconds(piece, pace)
            # A heading joins the following text, marks without a letter join the text before them.
            last = seconds[-1] if seconds else math.inf
            shorter = last if new_paragraph and own else min(last, own)
            limit = max_seconds if shorter < SHORT_SEGMENT_SECONDS else target * (not new_paragraph)
            if last + own <= limit:
                segments[-1] += piece
                seconds[-1] += own
            else:
                segments.append(piece)
                seconds.append(own)
            new_paragraph = False
    return segments


def split_sentences(text: str, language: str = "") -> list[str]:
    """Split normalised text into sentences, each with the blank after it."""
    abbreviations = _abbreviations(language.partition("-")[0].lower())
    ends = (match for match in SENTENCE_END.finditer(text) if _ends_sentence(text, match, abbreviations, language))
    return _pieces(text, (match.end() for match in ends))


@lru_cache
def _abbreviations(language: str) -> frozenset[str]:
    return frozenset(ABBREVIATIONS.get(language, " ".join(ABBREVIATIONS.values())).split())


def _ends_sentence(text: str, match: re.Match[str], abbreviations: frozenset[str], language: str) -> bool:
    mark = match[0]
    if any(character in WIDE_ENDS for character in mark):
        return True
    if not mark.endswith(" "):
        return match.end() == len(text)
    following = AFTER_OPENING.match(text, match.end())
    if following and following[1].islower():
        return False
    if not mark.startswith(".") or mark.startswith(".."):
        return True
    word = text[text.rfind(" ", 0, match.start()) + 1 : match.start()].lstrip(OPENING)
    if word.lower() in abbreviations or (len(word) == 1 and word.isupper()) or re.search(r"\w\.\w", word):
        return False
    # A German ordinal: "am 3. Mai".
    return not (word.isdigit() and len(word) <= 2 and language.lower().startswith("de"))


def _pieces(text: str, ends: Iterator[int]) -> list[str]:
    places = sorted({0, *ends, len(text)})
    return [text[start:end] for start, end in pairwise(places)]


def _cut(
    text: str, max_seconds: float, pace: float, breaks: Sequence[re.Pattern[str]] = (CLAUSE_END, WORD_END)
) -> list[str]:
    """Cut a sentence into pieces of at most `max_seconds` and about equal length: clauses, else words, else
    characters."""
    total = estimate_seconds(text, pace)
    if total <= max_seconds:
        return [text]
    if breaks:
        parts = _pieces(text, (match.end() for match in breaks[0].finditer(text)))
        pieces = [piece for part in parts for piece in _cut(part, max_seconds, pace, breaks[1:])]
    else:
        pieces = clusters(text)
    share = min(max_seconds, 1.2 * total / math.ceil(total / max_seconds))
    packed, seconds = [pieces[0]], estimate_seconds(pieces[0], pace)
    for piece in pieces[1:]:
        own = estimate_seconds(piece, pace)
        if seconds + own <= share or not own:
            packed[-1] += piece
            seconds += own
        else:
            packed.append(piece)
            seconds = own
    return packed
