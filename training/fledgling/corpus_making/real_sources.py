"""Sources of real recordings in Debian packages: licences, people, and how texts and speakers are found in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

Part = Literal["train", "judge", "noise"]

FESTIVAL_LINE = re.compile(r'\(\s*(\S+)\s+"(.*)"\s*\)')
QUOTED = r'"((?:[^"\\]|\\.)*)"'
DIALOGUE = re.compile(rf"dialogId\({QUOTED},\s*{QUOTED},\s*{QUOTED}\)\s*dialogStr\({QUOTED}\)")
"""A line of Fish Fillets: its name, the font that is its speaker's, the English and the translated text."""
STAMP_FILE = re.compile(r"(.+)_desc_([a-z]{2})\.ogg")
NO_VOICE = {"silence", "beep", "beeperr", "ascending-2tone", "descending-2tone", "tt-monkeys"}
"""Folders and prompts of telephone exchanges that hold no voice."""


class SourceClip(NamedTuple):
    """A recording in an unpacked package."""

    path: Path
    text: str
    """Empty where the package does not tell it."""
    speaker: str
    language: str


@dataclass(frozen=True, slots=True)
class RealSource:
    """A corpus in one or several packages. `read` finds its clips below the folder that they are unpacked into."""

    name: str
    packages: tuple[str, ...]
    part: Part
    licence: str
    attribution: str
    read: Callable[[Path], Iterator[SourceClip]]


def festival_voice(speaker: str, language: str) -> Callable[[Path], Iterator[SourceClip]]:
    """Recordings of a voice for Festival: `wav/` and `etc/txt.done.data`, in which a plus marks stress."""

    def read(root: Path) -> Iterator[SourceClip]:
        for index in sorted(root.rglob("txt.done.data")):
            for name, text in FESTIVAL_LINE.findall(index.read_text(encoding="utf-8")):
                if (path := index.parents[1] / "wav" / f"{name}.wav").is_file():
                    yield SourceClip(path, text.replace("+", ""), speaker, language)

    return read


def files(speaker: str, language: str, pattern: str) -> Callable[[Path], Iterator[SourceClip]]:
    """All recordings of a pattern, without texts, except what exchanges play that is no voice."""

    def read(root: Path) -> Iterator[SourceClip]:
        for path in sorted(root.rglob(pattern)):
            if path.is_file() and not NO_VOICE & {path.parent.name, path.stem}:
                yield SourceClip(path, "", speaker, language)

    return read


def fish_fillets(language: str) -> Callable[[Path], Iterator[SourceClip]]:
    """Dialogues of Fish Fillets: texts and speakers in Lua, one folder of recordings for each level."""

    def read(root: Path) -> Iterator[SourceClip]:
        for script in sorted(root.rglob(f"script/*/dialogs_{language}.lua")):
            sound = script.parents[2] / "sound" / script.parent.name / language
            for name, font, _, text in DIALOGUE.findall(script.read_text(encoding="utf-8")):
                if text and (path := sound / f"{name}.ogg").is_file():
                    speaker = font.removeprefix("font_") or "unknown"
                    yield SourceClip(path, re.sub(r"\\(.)", r"\1", text), f"fillets-{language}-{speaker}", language)

    return read


def stamps(root: Path) -> Iterator[SourceClip]:
    """Names of Tux Paint's stamps, spoken by volunteers: one voice for most languages, texts in NAME.txt."""
    for path in sorted(root.rglob("*_desc_??.ogg")):
        if found := STAMP_FILE.fullmatch(path.name):
            name, language = found.groups()
            texts = path.with_name(f"{name}.txt")
            lines = texts.read_text(encoding="utf-8").splitlines() if texts.is_file() else []
            text = next((line.partition("=")[2] for line in lines if line.startswith(f"{language}.utf8=")), "")
            yield SourceClip(path, text.strip(), f"stamps-{language}", language)


ASTERISK = "asterisk-core-sounds-{}-g722"
REAL_SOURCES = (
    RealSource(
        "festvox-ru",
        ("festvox-ru",),
        "train",
        "BSD-like (festvox-ru)",
        "Nickolay V. Shmyrev, 2005",
        festival_voice("shmyrev", "ru"),
    ),
    RealSource(
        "asterisk-fr",
        (ASTERISK.format("fr"),),
        "train",
        "CC BY-SA 3.0",
        "June Wallack for Digium, Inc., 2006-2008",
        files("wallack", "fr", "*.g722"),
    ),
    RealSource(
        "armelle-fr",
        ("asterisk-prompt-fr-armelle",),
        "train",
        "BSD-like (asterisk-prompt-fr-armelle)",
        "Armelle Desjardins; copyright 2006 Michel Gutierrez",
        files("armelle", "fr", "*.gsm"),
    ),
    RealSource(
        "menardi-it",
        ("asterisk-prompt-it-menardi-wav",),
        "train",
        "CC BY-SA 3.0 IT",
        "Marco Menardi and Paola Dal Zot, www.voip.ammdomus.it, 2006-2011",
        files("dalzot", "it", "*.wav"),
    ),
    RealSource(
        "gcin-zh",
        ("gcin-voice",),
        "train",
        "CC BY 3.0",
        "ChionMeilin with the vocal source from Chu Lo",
        files("chulo", "zh", "5.ogg"),
    ),
    # The same person reads the English and the Spanish prompts: neither may be trained on while one of them judges.
    RealSource(
        "asterisk-en",
        (ASTERISK.format("en"),),
        "judge",
        "CC BY-SA 3.0",
        "Allison Smith for Digium, Inc., 2003-2010",
        files("allison", "en", "*.g722"),
    ),
    RealSource(
        "asterisk-es",
        (ASTERISK.format("es"),),
        "judge",
        "CC BY-SA 3.0",
        "Allison Smith for Digium, Inc., 2003-2010",
        files("allison", "es", "*.g722"),
    ),
    RealSource(
        "asterisk-it",
        (ASTERISK.format("it"),),
        "judge",
        "CC BY 3.0",
        "Carlo Flora, 2012",
        files("flora", "it", "*.g722"),
    ),
    RealSource(
        "asterisk-ru",
        (ASTERISK.format("ru"),),
        "judge",
        "CC BY 3.0",
        "provided by Maxim Topal, ivrvoice.ru, 2010",
        files("ivrvoice", "ru", "*.g722"),
    ),
    RealSource(
        "telephone-es",
        ("asterisk-prompt-es-co",),
        "judge",
        "GPL-2",
        "Avatar Ltda., July E. Jiménez",
        files("jimenez", "es", "*.gsm"),
    ),
    RealSource(
        "fillets-cs",
        ("fillets-ng-data", "fillets-ng-data-cs"),
        "judge",
        "GPL-2",
        "ALTAR interactive and the Fish Fillets team",
        fish_fillets("cs"),
    ),
    RealSource(
        "fillets-nl",
        ("fillets-ng-data", "fillets-ng-data-nl"),
        "judge",
        "GPL-2",
        "the Fish Fillets team",
        fish_fillets("nl"),
    ),
    RealSource(
        "stamps",
        ("tuxpaint-stamps-default",),
        "judge",
        "GPL-2",
        "volunteers of Tux Paint",
        stamps,
    ),
    RealSource(
        "sonic-pi",
        ("sonic-pi-samples",),
        "noise",
        "CC0",
        "Sonic Pi's samples, freesound.org",
        files("sonic-pi", "", "*.flac"),
    ),
    RealSource(
        "opsound",
        ("asterisk-moh-opsound-g722",),
        "noise",
        "CC BY-SA 3.0",
        "music by Paul Shuler (Macroform), Manolo Camp and Reno Project, 2008-2009",
        files("opsound", "", "*.g722"),
    ),
)
