"""A corpus as a folder that `myna prepare` and the codec's training both read.

    OUT/corpus.json                         settings of the corpus
    OUT/augmentation.json                   settings of augment_natural.py
    OUT/train/manifest.jsonl                one clip a line
    OUT/train/sound/SPEAKER/000.wav ...     24 kHz, 16 bits
    OUT/train/sound/SPEAKER.jsonl           the speaker's lines, written last: without it the speaker is made anew
    OUT/held_out/...                        the same, of speakers that are never trained on
    OUT/manifest.jsonl                      both together

Clips depend on the settings and the speaker's name alone, so that an interrupted corpus can be continued, with any
number of processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import soundfile

from corpus_making.held_out import is_held_out
from corpus_making.loudness import Samples
from myna.core.errors import DataError
from myna.core.io import atomic_write
from myna.data.manifest import Utterance, missing_manifest_error
from myna.text.normalization import normalise_text

SAMPLE_RATE = 24_000
PARTS = ("train", "held_out")
AUDIO = b'"audio": "%ssound/'
"""Field of a line that names its sound, which lies in a folder beside it."""
LINE = re.compile(rb'\{"id": "([^"\\]+)", "audio": "(sound/[^"\\]+)", (.*)\}\n')


class CorpusClip(NamedTuple):
    """A clip of a speaker."""

    text: str
    samples: Samples
    reference_only: bool = False
    """Whether the clip only sets a voice, and is never a target."""


class CorpusFolder:
    """Writer of a corpus, speaker by speaker."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def begin(self, settings: Mapping[str, Any], name: str = "corpus.json") -> None:
        """Refuse to go on with a corpus that was begun with other settings."""
        file = self.out / name
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        if file.is_file():
            if file.read_text(encoding="utf-8") != text:
                raise DataError(
                    f"{self.out} was begun with other settings, see {file}", hint="choose another folder with --out"
                )
            return
        with atomic_write(file) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def part(self, speaker: str) -> Path:
        return self.out / PARTS[is_held_out(speaker)]

    def has(self, speaker: str) -> bool:
        return self._lines(speaker).is_file()

    def add(self, speaker: str, language: str, clips: Iterable[CorpusClip]) -> float:
        """All clips of a speaker; how many seconds they are."""
        home, seconds, lines = self.part(speaker), 0.0, []
        for number, (text, samples, reference_only) in enumerate(clips):
            name = Path("sound", speaker, f"{number:03d}.wav")
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(home / name, samples, SAMPLE_RATE, format="WAV", subtype="PCM_16")
            seconds += len(samples) / SAMPLE_RATE
            extras = {"reference_only": True} if reference_only else {}
            one = Utterance(f"{speaker}-{number:03d}", name, normalise_text(text), speaker, language, extras=extras)
            lines.append(one.to_json())
        with atomic_write(self._lines(speaker)) as temporary:
            written = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            temporary.write_text(written, encoding="utf-8")
        return seconds

    def finish(self) -> dict[str, int]:
        """Write the manifests of what is there; how many clips each has.

        Speakers' lines are manifest lines already. They are joined as they are, and not read: of 287,000 of them that
        would take longer than a minute.
        """
        found = {part: self._lines_of(self.out / part / "sound") for part in PARTS}
        for part, lines in found.items():
            if lines:
                write_manifest_lines(self.out / part / "manifest.jsonl", [lines])
        # A quote inside a JSON string has a backslash before it: this is the key and the beginning of its value.
        inside = (lines.replace(AUDIO % b"", AUDIO % f"{part}/".encode()) for part, lines in found.items())
        write_manifest_lines(self.out / "manifest.jsonl", inside)
        return {part: lines.count(b"\n") for part, lines in found.items()}

    def _lines_of(self, sound: Path) -> bytes:
        return b"".join(file.read_bytes() for file in sorted(sound.glob("*.jsonl")))

    def _lines(self, speaker: str) -> Path:
        return self.part(speaker) / "sound" / f"{speaker}.jsonl"


class ManifestLine(NamedTuple):
    """A line of the manifest of a part, taken apart and not read: reading is what takes long, of very many."""

    id: bytes
    audio: bytes
    """Absolute, as JSON writes it."""
    rest: bytes
    """All other keys, in JSON."""

    def __bytes__(self) -> bytes:
        return b'{"id": "%s", "audio": "%s", %s}\n' % self


def manifest_lines(part: Path) -> Iterator[ManifestLine]:
    """Yield the lines of the manifest of `train` or `held_out`, for manifests elsewhere."""
    manifest = part / "manifest.jsonl"
    if not manifest.is_file():
        raise missing_manifest_error(manifest)
    home = part.resolve() if ".." in part.parts else part.absolute()
    before = json.dumps(f"{home.as_posix()}/", ensure_ascii=False)[1:-1].encode()
    with manifest.open("rb") as file:
        for number, line in enumerate(file, start=1):
            found = LINE.fullmatch(line)
            if found is None:
                raise DataError(
                    f"{manifest}:{number} is no line of a corpus that was made here",
                    hint="make it with natural_corpus.py, augment_natural.py or espeak_corpus.py",
                )
            id, audio, rest = found.groups()
            yield ManifestLine(id, before + audio, rest)


def write_manifest_lines(path: Path, lines: Iterable[bytes]) -> None:
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.writelines(lines)
