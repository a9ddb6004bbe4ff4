"""SpeechOcean762: Kaldi's `wav.scp`, `text` and `utt2spk` of one part, and the `scores.json` of both.

speechocean762/train/{wav.scp,text,utt2spk}  test/...  resource/scores.json  WAVE/SPEAKER0001/000010011.WAV
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from myna.data.importers.assessed import with_answer
from myna.data.importers.base import Bad, Context, Found, Record, Rejected, build
from myna.data.importers.fields import required, typed
from myna.data.importers.reading import lines, locate, parsed
from myna.data.utterance import Utterance

DESCRIPTION = "a part of SpeechOcean762, train or test: wav.scp, text and utt2spk, with resource/scores.json beside it"

CORPUS = "speechocean762"
"""Told in the extras, so that whoever judges knows which figures are published for it."""
SCORES = "scores.json"
DROPPED, UNKNOWN = "<DEL>", "<UNK>"
"""A phone that was left out, and one that nobody could name."""


def matches(source: Path) -> bool:
    return (source / "wav.scp").is_file() and _scores(source).is_file()


def read(source: Path, context: Context) -> Iterator[Found | Rejected]:
    path = _scores(source)
    scores = parsed(path)
    if isinstance(scores, Rejected):
        yield scores
        return
    line_of = _keys(path)
    texts, speakers = (dict(_pairs(source / name)) for name in ("text", "utt2spk"))

    def make(record: Record) -> Iterator[Utterance]:
        record.id, name = record.data
        if name.endswith("|"):
            raise Bad("malformed", "wav.scp names a command; only files are read")
        if record.id not in texts:
            raise Bad("empty text", f"{source / 'text'} has no line for it")
        if not isinstance(scores, dict) or record.id not in scores:
            raise Bad("bad score", f"{path} has none for it")
        # From here on it is the scores that can be wrong.
        record.source, record.line = path, line_of.get(record.id)
        audio = locate(name, source, source.parent, Path())
        speaker = speakers.get(record.id, context.speaker)
        utterance = Utterance(record.id, audio, texts[record.id], speaker, context.language or "en", None, {})
        utterance.extras["corpus"] = CORPUS
        yield with_answer(utterance, _known(typed(scores[record.id], dict, record.id)))

    records = (Record(source / "wav.scp", number, pair) for number, pair in _numbered(source / "wav.scp"))
    yield from build(records, make)


def _known(stored: dict[str, Any]) -> dict[str, Any]:
    """A sentence of scores.json as ours. `completeness` is left out, as everybody leaves it: nearly all are 10."""
    scores = {name: stored[name] for name in ("accuracy", "fluency", "prosodic", "total") if name in stored}
    return {"scores": scores, "words": [_word(typed(word, dict, "words")) for word in required(stored, "words", list)]}


def _word(stored: dict[str, Any]) -> dict[str, Any]:
    phones = stored.get("phones", [])
    phones = phones.split() if isinstance(phones, str) else list(typed(phones, list, "phones"))
    heard: list[list[str]] = [[phone] for phone in phones]
    for mistake in stored.get("mispronunciations", []):
        place, said = required(mistake, "index", int), required(mistake, "pronounced-phone", str)
        if not 0 <= place < len(phones):
            raise Bad("bad score", f"`{stored.get('text')}` has {len(phones)} phones, and a mistake in number {place}")
        # A star marks an accent on a phone that can still be named.
        named = [phone.strip("*") or phones[place] for phone in said.split()]
        heard[place] = [UNKNOWN if phone.upper() == UNKNOWN else phone for phone in named if phone.upper() != DROPPED]
    word = {key: stored[key] for key in ("text", "accuracy", "stress", "total") if key in stored}
    given = {"phone_scores": stored["phones-accuracy"]} if "phones-accuracy" in stored else {}
    return word | given | {"phones": phones, "heard": [phone for phones in heard for phone in phones]}


def _scores(source: Path) -> Path:
    return locate(SCORES, source, source / "resource", source.parent / "resource")


def _numbered(path: Path) -> Iterator[tuple[int, tuple[str, str]]]:
    if not path.is_file():
        return
    for number, line in lines(path):
        key, _, value = line.decode("utf-8", errors="replace").replace("\t", " ").partition(" ")
        yield number, (key, value.strip())


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    return (pair for _, pair in _numbered(path))


def _keys(path: Path) -> dict[str, int]:
    """On which line of the JSON file each sentence begins, for whoever has to mend one."""
    begins = re.compile(rb'"([^"]+)"\s*:\s*\{')
    return {key.decode(): number for number, line in lines(path) for key in begins.findall(line)}
