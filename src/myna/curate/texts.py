"""Texts of clips: scripts aligned to recognised words by edit distance, and measures of a text."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from rapidfuzz.distance import Levenshtein

from myna.core.errors import DataError
from myna.data.segments import set_columns
from myna.text.normalization import UNSPACED, alphanumeric, base_language, letters, normalise_text, words
from myna.text.spoken_forms import normalise_spoken_text
from myna.text.wer import character_errors

TIMING_LINE = re.compile(r"^[\d:.,\s]+-->.*$")
MARKUP = re.compile(r"<[^>]*>|\{\\[^}]*\}")
"""Tags of subtitles: <i>, <v Anna>, {\\an8}."""
MIN_MATCHED_SHARE = 0.5
"""Minimum share of a clip's recognised words that its script must match; otherwise the recognised text stays."""

MAX_SKIPPED_WORDS = 5
"""Maximum number of words that may be missing between two neighbouring matches, in the text or in the script."""


def read_script(path: Path) -> str:
    """Return the words of a text file, or of subtitles (SRT, VTT) without numbers, times and tags."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}", hint="save the file as UTF-8") from None
    if path.suffix.lower() not in (".srt", ".vtt"):
        return normalise_text(text)
    spoken: list[str] = []
    in_cue = False  # lines of cues are those between a line of times and the next blank line
    for line in text.splitlines():
        if TIMING_LINE.match(line):
            in_cue = True
        elif not line.strip():
            in_cue = False
        elif in_cue:
            spoken.append(MARKUP.sub("", line))
    return normalise_text("\n".join(spoken))


def split_words(text: str, language: str) -> list[str]:
    """Split a text into words as they are written, or into characters if the language has no blanks."""
    return list(text.replace(" ", "")) if base_language(language) in UNSPACED else text.split()


def align_script(texts: Sequence[str], script: str, language: str) -> list[str | None]:
    """Return the script's words for each recognised text of a recording, in order; None if they do not agree.

    Edit distance aligns the words of the whole recording. The words of a text that stand together in the script tell
    its place; single matches elsewhere are chance, because the distance counts omissions wherever they are.
    """
    groups = [split_words(text, language) for text in texts]
    words = split_words(script, language)
    spoken = [alphanumeric(word) for group in groups for word in group]
    places: list[int | None] = [None] * len(spoken)  # of an equal word in the script, in an alignment of least edits
    for edit in Levenshtein.opcodes(spoken, [*map(alphanumeric, words)]):
        if edit.tag == "equal":
            places[edit.src_start : edit.src_end] = range(edit.dest_start, edit.dest_end)
    anchors: list[list[tuple[int, int]]] = []
    first = 0
    for group in groups:
        here = [(n, place) for n, place in enumerate(places[first : first + len(group)]) if place is not None]
        cluster = max(_clusters(here), key=len, default=[])
        anchors.append(cluster if len(cluster) >= MIN_MATCHED_SHARE * len(group) else [])
        first += len(group)
    separator = "" if base_language(language) in UNSPACED else " "
    aligned: list[str | None] = []
    used = 0
    for number, (group, cluster) in enumerate(zip(groups, anchors, strict=True)):
        if not cluster:
            aligned.append(None)
            continue
        # Words before the first and after the last common word are taken as they are written.
        (before, start), (last, end) = cluster[0], cluster[-1]
        limit = next((later[0][1] for later in anchors[number + 1 :] if later), len(words))
        start, end = max(used, start - before), min(limit, end + len(group) - last)
        aligned.append(separator.join(words[start:end]))
        used = end
    return aligned


def _clusters(places: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Group the words of a text by their places in the script; many script words between two start a new group."""
    clusters: list[list[tuple[int, int]]] = []
    for word, place in places:
        if clusters and abs((place - clusters[-1][-1][1]) - (word - clusters[-1][-1][0])) <= MAX_SKIPPED_WORDS:
            clusters[-1].append((word, place))
        else:
            clusters.append([(word, place)])
    return clusters


def apply_scripts(table: pa.Table, scripts: Mapping[str, str]) -> pa.Table:
    """Replace recognised texts by the scripts of their recordings, and update the measures that depend on them."""
    if not scripts:
        return table
    columns = ("text", "text_source", "normalised_text", *TEXT_MEASURES)
    changed: dict[str, list[Any]] = {name: table[name].to_pylist() for name in columns}
    recordings, kinds = table["recording"].to_pylist(), table["kind"].to_pylist()
    languages, checks = table["language"].to_pylist(), table["check_text"].to_pylist()
    spans = list(zip(table["start_ms"].to_pylist(), table["end_ms"].to_pylist(), strict=True))
    recognised = table["text"].to_pylist()
    for name, script in scripts.items():
        rows = [row for row, recording in enumerate(recordings) if recording == name and kinds[row] == "clip"]
        language = next((languages[row] for row in rows if languages[row]), "en")
        for row, text in zip(rows, align_script([recognised[row] for row in rows], script, language), strict=True):
            if text:
                seconds = (spans[row][1] - spans[row][0]) / 1000
                for column, value in measure_text(text, checks[row], languages[row], seconds).items():
                    changed[column][row] = value
                changed["text"][row] = text
                changed["text_source"][row] = "script"
                changed["normalised_text"][row] = normalise_spoken_text(text, languages[row])
    return set_columns(table, changed)


TEXT_MEASURES = ("cer", "edge_cer", "characters_per_second", "unique_word_share")
EDGE_CHARACTERS = 12
"""Characters at either end of a text that are compared separately."""


def measure_text(text: str, check_text: str, language: str, seconds: float) -> dict[str, float]:
    """Return `TEXT_MEASURES` of a clip."""
    language = language or "en"
    spoken = words(text, language)
    return {
        "cer": character_errors(text, check_text, language).rate,
        "edge_cer": edge_cer(text, check_text, language),
        "characters_per_second": len(letters(text, language)) / seconds if spoken else math.nan,
        # Without blanks a word is a character, and the characters of any text come again.
        "unique_word_share": len(set(spoken)) / len(spoken)
        if spoken and base_language(language) not in UNSPACED
        else math.nan,
    }


def edge_cer(text: str, transcript: str, language: str = "en") -> float:
    """Return the character error rate of the first or last 12 characters, whichever is worse; NaN without a text.

    At a cut word the rest of the text may agree. The transcript is aligned to the whole text first, so that its length
    does not matter.
    """
    reference, hypothesis = letters(text, language), letters(transcript, language)
    if not reference:
        return math.nan
    size, length = min(EDGE_CHARACTERS, len(reference)), len(reference)
    start = end = 0
    for edit in Levenshtein.opcodes(reference, hypothesis):
        inserted = edit.dest_end - edit.dest_start
        if edit.tag == "insert":
            start += inserted if edit.src_start < size else 0
            end += inserted if edit.src_start > length - size else 0
        elif edit.tag != "equal":
            start += max(0, min(edit.src_end, size) - edit.src_start)
            end += max(0, edit.src_end - max(edit.src_start, length - size))
    return max(start, end) / size
