"""Clips of a demo: those of one speaker that have a usable length, with some texts held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from myna.audio.files import probe
from myna.audio.reference import CheckedReference, check_reference
from myna.core.errors import DataError
from myna.core.io import string_hash
from myna.data.manifest import Utterance
from myna.data.split import TEXTS, DatasetSplit
from myna.evaluate.items import clip_seconds, load_clip
from myna.text.normalization import alphanumeric

BUNDLED = Path(__file__).parent / "recordings"
"""Three minutes of a voice that fledgling was not trained on; some clips are marked `held_out`."""
MIN_TEXTS = 8
"""Minimum number of distinct texts to train and evaluate on."""
HELD_OUT_SHARE, MIN_HELD_OUT, MAX_HELD_OUT = 0.1, 3, 8
MIN_CLIP_SECONDS, MAX_CLIP_SECONDS = 1.0, 15.0
MAX_TOTAL_SECONDS = 900.0
"""Maximum seconds of all clips: a demo trains for minutes, in which more would not be seen."""
REFERENCE_SECONDS, REFERENCE_CANDIDATES = 6.0, 12
"""Preferred length of the reference, long enough for a voice and short enough to be encoded quickly; and number of
clips of about that length that are searched for one without noise, clipping or a telephone's narrow band."""


@dataclass(frozen=True, slots=True)
class DemoVoice:
    """Speaker, clips, and notes on what was left out."""

    speaker: str
    clips: tuple[Utterance, ...]
    notes: tuple[str, ...] = ()

    @property
    def marked(self) -> dict[str, str]:
        """Normalized texts of the clips that the source marks as held out, by id."""
        return {clip.id: alphanumeric(clip.text) for clip in self.clips if clip.extras.get("held_out")}

    def held_out_texts(self) -> int:
        """Return how many texts to hold out: those that are marked, or a share."""
        if self.marked:
            return len(set(self.marked.values()))
        texts = len({alphanumeric(clip.text) for clip in self.clips})
        return min(MAX_HELD_OUT, max(MIN_HELD_OUT, round(HELD_OUT_SHARE * texts)))

    def write_marks(self, folder: Path, seed: int) -> None:
        """Write the source's marks as the split of a prepared folder, which splitting then completes and checks."""
        if self.marked:
            DatasetSplit(seed, 0, self.held_out_texts(), dict.fromkeys(self.marked, TEXTS)).write(folder)


def select_voice(utterances: Sequence[Utterance], source: str, seed: int) -> DemoVoice:
    """Select the clips of the speaker who has most."""
    counts = Counter(utterance.speaker for utterance in utterances if utterance.is_target)
    if not counts:
        raise DataError(f"{source} holds nothing to learn from", hint="give recordings with what is said in them")
    speaker, notes = counts.most_common(1)[0][0], []
    if len(counts) > 1:
        notes.append(f"{source} holds {len(counts)} speakers; this is `{speaker}`, who has most clips")
    clips = [utterance for utterance in utterances if utterance.is_target and utterance.speaker == speaker]
    usable = [clip for clip in clips if MIN_CLIP_SECONDS <= clip_seconds(clip) <= MAX_CLIP_SECONDS]
    limits = f"{MIN_CLIP_SECONDS:g} and {MAX_CLIP_SECONDS:g} s"
    if len(usable) < len(clips):
        notes.append(f"{len(clips) - len(usable)} clips are not between {limits} long")
    texts = len({alphanumeric(clip.text) for clip in usable})
    if texts < MIN_TEXTS and not any(clip.extras.get("held_out") for clip in usable):
        raise DataError(
            f"{source} holds {texts} clips between {limits} with words of their own; a demo wants {MIN_TEXTS} of one "
            "speaker",
            hint="record some more, or see the demo with its own voice: myna demo",
        )
    kept, total = set(), 0.0
    for clip in sorted(usable, key=lambda clip: string_hash(f"{seed}/enough/{clip.id}")):
        if clip.extras.get("held_out") or total + clip_seconds(clip) <= MAX_TOTAL_SECONDS:
            kept.add(clip.id)
            total += clip_seconds(clip)
    if len(kept) < len(usable):
        left_out = len(usable) - len(kept)
        notes.append(f"{left_out} clips are left out: {MAX_TOTAL_SECONDS / 60:g} minutes are enough for a demo")
    return DemoVoice(speaker, tuple(_without_references(clip) for clip in usable if clip.id in kept), tuple(notes))


def select_reference(clips: Sequence[Utterance]) -> Utterance:
    """Select the clip with the fewest faults among those whose lengths are nearest to `REFERENCE_SECONDS`."""
    nearest = sorted(clips, key=lambda clip: (abs(clip_seconds(clip) - REFERENCE_SECONDS), clip.id))
    return min(nearest[:REFERENCE_CANDIDATES], key=lambda clip: len(clean_reference(clip).problems))


def clean_reference(clip: Utterance, sample_rate: int = 24_000) -> CheckedReference:
    """Clean a clip for use as a reference, and find its faults."""
    rate = probe(clip.audio).sample_rate
    return check_reference(load_clip(clip, rate), rate, sample_rate)


def _without_references(clip: Utterance) -> Utterance:
    """Remove the references that the source names, which may be of another speaker or left out."""
    return replace(clip, extras={key: value for key, value in clip.extras.items() if key != "references"})
