"""Scripts of recordings: the user's own text or subtitles, aligned to recognised words by edit distance."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
from rapidfuzz.distance import Levenshtein

from myna.curate import analysis
from myna.curate.table import set_columns
from myna.curate.text_measures import TEXT_MEASURES, measure_text
from myna.data.text_normalization import UNSPACED, alphanumeric, base_language
from myna.data.utterance import normalise_text
from myna.errors import DataError

TIMING_LINE = re.compile(r"^[\d:.,\s]+-->.*$")
MARKUP = re.compile(r"<[^>]*>|\{\\[^}]*\}")
"""Tags of subtitles: <i>, <v Anna>, {\\an8}."""
MIN_MATCHED_SHARE = 0.5
"""Of a clip's recognised words that its script must match; else the recognised text stays."""

MAX_JUMP_WORDS = 20
"""Script words that may be left out before and after a single word that is read."""


def read_script(path: Path) -> str:
    """The words of a text file, or of subtitles (SRT, VTT) without numbers, times and tags."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}", hint="save the file as UTF-8") from None
    if path.suffix.lower() in (".srt", ".vtt"):
        text = "\n".join(_subtitle_lines(text))
    return normalise_text(text)


def _subtitle_lines(text: str) -> list[str]:
    """Lines of cues alone: what follows a line of times up to the next blank one."""
    spoken: list[str] = []
    in_cue = False
    for line in text.splitlines():
        if TIMING_LINE.match(line):
            in_cue = True
        elif not line.strip():
            in_cue = False
        elif in_cue:
            spoken.append(MARKUP.sub("", line))
    return spoken


def split_words(text: str, language: str) -> list[str]:
    """Words as they are written; characters where a language has no blanks."""
    return list(text.replace(" ", "")) if base_language(language) in UNSPACED else text.split()


def align_script(texts: Sequence[str], script: str, language: str) -> list[str | None]:
    """For the recognised texts of a recording in order, the words of its script; None where they do not agree.

    Edit distance over the words of the whole recording. Script words that nobody recognised between two texts
    belong to neither: they may not have been read.
    """
    recognised = [split_words(text, language) for text in texts]
    words = split_words(script, language)
    spoken = [alphanumeric(word) for group in recognised for word in group]
    written = [alphanumeric(word) for word in words]
    position = _positions(spoken, written)
    aligned: list[str | None] = []
    first = 0
    separator = "" if base_language(language) in UNSPACED else " "
    for group in recognised:
        after = first + len(group)
        matched = [at for at in position[first:after] if at is not None]
        is_trusted = bool(group) and len(matched) >= MIN_MATCHED_SHARE * len(group)
        aligned.append(separator.join(words[matched[0] : matched[-1] + 1]) if is_trusted else None)
        first = after
    return aligned


def _positions(spoken: list[str], written: list[str]) -> list[int | None]:
    """For each spoken word the written one that it stands for: equal, or in its place."""
    position: list[int | None] = [None] * len(spoken)
    for edit in Levenshtein.opcodes(spoken, written):
        if edit.tag in ("equal", "replace"):
            for offset in range(edit.src_end - edit.src_start):
                position[edit.src_start + offset] = edit.dest_start + offset
    # A lone match far from its neighbours is chance: the distance counts deletions wherever they are.
    known = [index for index, at in enumerate(position) if at is not None]
    for before, here, behind in zip(known, known[1:], known[2:], strict=False):
        jumps = [abs((position[b] or 0) - (position[a] or 0) - (b - a)) for a, b in pairwise((before, here, behind))]
        if min(jumps) > MAX_JUMP_WORDS:
            position[here] = None
    return position


def apply_scripts(table: pa.Table, scripts: Mapping[str, str]) -> pa.Table:
    """The table with the text of scripts, by recording, in place of the recognised text, and measures that follow."""
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
                changed["normalised_text"][row] = analysis.normalise_spoken_text(text, languages[row])
    return set_columns(table, changed)
