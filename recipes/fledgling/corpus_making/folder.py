"""A corpus as a folder that `myna prepare` and the codec's training both read.

    OUT/corpus.json                         what was asked for
    OUT/train/manifest.jsonl                one clip a line
    OUT/train/sound/SPEAKER/000.wav ...     24 kHz, 16 bits
    OUT/train/sound/SPEAKER.jsonl           the speaker's lines, written last: without it the speaker is made anew
    OUT/held_out/...                        the same, of speakers that nothing may learn from
    OUT/manifest.jsonl                      both, for who tells them apart by the same rule

Who says what depends on nothing but the settings and the speaker's name, so that a corpus that was interrupted goes on
where it was, and in any number of processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import soundfile

from corpus_making.held_out import is_held_out
from corpus_making.sound import Samples
from myna.audio.files import replacing
from myna.data.manifest import write_manifest
from myna.data.utterance import Utterance
from myna.errors import DataError

SAMPLE_RATE = 24_000
PARTS = ("train", "held_out")


class CorpusFolder:
    def __init__(self, out: Path) -> None:
        self.out = out

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Refuse to go on with a corpus that was begun with other settings."""
        file = self.out / "corpus.json"
        asked = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        if file.is_file():
            if file.read_text(encoding="utf-8") != asked:
                raise DataError(
                    f"{self.out} was begun with other settings, see {file}", hint="choose another folder with --out"
                )
            return
        with replacing(file) as temporary:
            temporary.write_text(asked, encoding="utf-8")

    def part(self, speaker: str) -> Path:
        return self.out / PARTS[is_held_out(speaker)]

    def has(self, speaker: str) -> bool:
        return self._lines(speaker).is_file()

    def add(self, speaker: str, language: str, clips: Iterable[tuple[str, Samples]]) -> float:
        """All clips of a speaker, each with its text; how many seconds they are."""
        home, seconds, lines = self.part(speaker), 0.0, []
        for number, (text, samples) in enumerate(clips):
            name = Path("sound", speaker, f"{number:03d}.wav")
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(home / name, samples, SAMPLE_RATE, format="WAV", subtype="PCM_16")
            seconds += len(samples) / SAMPLE_RATE
            lines.append(Utterance(f"{speaker}-{number:03d}", name, text, speaker, language).to_json())
        with replacing(self._lines(speaker)) as temporary:
            written = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            temporary.write_text(written, encoding="utf-8")
        return seconds

    def finish(self) -> dict[str, int]:
        """Write the manifests of what is there; how many clips each has."""
        found = {part: list(self._utterances(self.out / part)) for part in PARTS}
        for part, utterances in found.items():
            if utterances:
                write_manifest(self.out / part / "manifest.jsonl", utterances)
        write_manifest(self.out / "manifest.jsonl", chain(*found.values()))
        return {part: len(utterances) for part, utterances in found.items()}

    def _utterances(self, home: Path) -> Iterator[Utterance]:
        for file in sorted((home / "sound").glob("*.jsonl")):
            for line in file.read_text(encoding="utf-8").splitlines():
                yield Utterance.from_json(json.loads(line), home)

    def _lines(self, speaker: str) -> Path:
        return self.part(speaker) / "sound" / f"{speaker}.jsonl"
