"""Evaluation items: a text to speak, reference clips of its voice, and its recording if there is one; and sets of items
from prepared data or text files. The seed and names alone decide the choice, so that every model gets the same items.
"""

import functools
import gzip
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from myna.audio.files import Samples, probe, read_audio
from myna.core.config import DataSettings
from myna.core.errors import AudioError, DataError
from myna.core.io import bytes_hash, file_hash, is_file, string_hash
from myna.data.dataset import PreparedDataset
from myna.data.manifest import Utterance
from myna.data.references import ReferenceSampler
from myna.text.normalization import UNSPACED, base_language, normalise_text

AnyItem = TypeVar("AnyItem", bound=Any)
"""Something with an `id` and a `speaker`."""
LengthClass = Literal["word", "sentence", "long"]
LONG_TEXT_CHARACTERS = 200
"""Characters from which a text is long, about a quarter of a minute."""
CHARACTERS_PER_SECOND, UNSPACED_CHARACTERS_PER_SECOND = 13.0, 5.0
"""Usual speaking rates. In scripts without spaces a character is a syllable or more."""
MAX_SECONDS_STEPS = (6.0, 12.0, 24.0, 48.0, 96.0, 192.0, 384.0)
"""Maximum lengths of generation. They depend on the item alone, so that its batch changes nothing."""


@dataclass(frozen=True, slots=True)
class EvalItem:
    """Text to speak, its voice, and its recording."""

    id: str
    text: str
    speaker: str = ""
    language: str = ""
    references: tuple[Utterance, ...] = ()
    """Clips that set the voice, one for each speaker of the text."""
    recording: Utterance | None = None
    """Real recording of the text."""
    scene: str = ""

    @property
    def length_class(self) -> LengthClass:
        if base_language(self.language) not in UNSPACED and len(self.text.split()) == 1:
            return "word"
        return "long" if len(self.text) >= LONG_TEXT_CHARACTERS else "sentence"

    @property
    def expected_seconds(self) -> float:
        """Seconds of the recording, or at the usual speaking rate."""
        if self.recording is not None:
            return clip_seconds(self.recording)
        is_unspaced = base_language(self.language) in UNSPACED
        return len(self.text) / (UNSPACED_CHARACTERS_PER_SECOND if is_unspaced else CHARACTERS_PER_SECOND)

    @property
    def max_seconds(self) -> float:
        """Return twice the expected length and a few seconds: a model that still speaks then has not found the end."""
        enough = 2 * self.expected_seconds + 3
        return next((step for step in MAX_SECONDS_STEPS if step >= enough), float(round(enough)))

    @property
    def key(self) -> str:
        """Hash of the text, the scene, the references and the maximum length."""
        clips = [(recording_key(clip), clip.text) for clip in self.references]
        return bytes_hash(repr((self.text, self.scene, self.max_seconds, clips)).encode())


@dataclass(frozen=True, slots=True)
class EvalSet:
    """Items, and real recordings of each speaker to compare their voices with."""

    items: tuple[EvalItem, ...]
    speaker_clips: Mapping[str, tuple[Utterance, ...]]
    notes: tuple[str, ...] = ()
    """Sentences on items without a reference or a language."""


@contextmanager
def _missing_clip_named(utterance: Utterance) -> Iterator[None]:
    """Name the clip whose recording is gone, and the likely cause."""
    try:
        yield
    except (AudioError, FileNotFoundError):
        if is_file(utterance.audio):
            raise
        raise DataError(
            f"the recording of {utterance.id} is not there: {utterance.audio}",
            hint="it was moved, or `myna curate` has cut other clips since: myna prepare SOURCE --out DATA again",
        ) from None


def load_clip(utterance: Utterance, sample_rate: int) -> Samples:
    span = (utterance.span.start, utterance.span.end) if utterance.span else None
    with _missing_clip_named(utterance):
        return read_audio(utterance.audio, sample_rate=sample_rate, span=span)


_probe = functools.lru_cache(maxsize=65_536)(probe)
_file_key = functools.lru_cache(maxsize=65_536)(file_hash)


def clip_seconds(utterance: Utterance) -> float:
    span = utterance.span
    if span is not None and span.end is not None:
        return span.end - span.start
    with _missing_clip_named(utterance):
        return _probe(utterance.audio).seconds - (span.start if span else 0.0)


def recording_key(utterance: Utterance) -> str:
    """Identify a recording by its content, wherever the file is."""
    span = utterance.span
    with _missing_clip_named(utterance):
        return _file_key(utterance.audio) + (f"@{span.start}-{span.end}" if span else "")


MAX_CLIPS_PER_SPEAKER, MIN_CLIPS_PER_SPEAKER, MAX_CLIPS = 10, 3, 400
"""Numbers of recordings that voices are compared with, for each speaker and in all; each has to be embedded."""
MIN_SPEAKERS = 20
"""Minimum number of speakers to compare voices with, if the data has so many."""
LIST_HINT = "each line is ID|WORDS OF THE REFERENCE|REFERENCE.wav|TEXT, and |RECORDING.wav where there is one"


def load_eval_set(
    data: Path | None,
    sentences: Path | None,
    settings: DataSettings | None,
    seed: int,
    limit: int | None = None,
    language: str = "",
    scene: str = "",
) -> EvalSet:
    """Load sentences of a text file, given to the speakers of `data` in turn, or without a reference if there is no
    `data`; a list as of seed-tts-eval names a reference for each sentence. Without a file, load the targets of `data`.

    `settings` say what may be a reference, and `scene` is used for sentences whose reference names none. A `limit`
    takes targets of each speaker in turn.
    """
    clips: dict[str, tuple[Utterance, ...]] = {}
    lines = _read_lines(sentences) if sentences is not None else []
    texts = {f"line-{number:04d}": normalise_text(line) for number, line in enumerate(lines[:limit], start=1)}
    if sentences is not None and (sentences.suffix == ".lst" or all(line.count("|") >= 3 for line in lines)):
        items = list(_parse_list(sentences, lines, language, scene))[:limit]
    elif data is None or settings is None:
        assert sentences is not None, "there is nothing to say"
        items = [EvalItem(id, text, language=language, scene=scene) for id, text in texts.items()]
    else:
        dataset = PreparedDataset.open(data)
        if sentences is not None:
            items = _sentence_items(texts, _references(dataset, settings, seed), language, scene or settings.scene)
        else:
            items = _target_items(dataset, settings, seed, limit, language)
        clips = _speaker_clips(dataset, items, seed)
    notes = []
    if alone := sum(not item.references for item in items):
        notes.append(f"{alone} items are spoken without a reference, since there is no other clip of their speaker")
    if unnamed := sum(not item.language for item in items):
        notes.append(
            f"{unnamed} items name no language, so that only case and punctuation are normalized: --language en, or "
            "speech_eval.language in a recipe"
        )
    return EvalSet(tuple(items), clips, tuple(notes))


def split_items(items: Sequence[AnyItem], seed: int) -> tuple[list[AnyItem], list[AnyItem]]:
    """Split items into two halves in their order, one to choose checkpoints by and one to confirm a gain with. Each
    speaker has equally many in both, and the first is larger by at most one."""
    order = sorted(items, key=lambda item: (item.speaker, string_hash(f"{seed}/confirmation/{item.id}")))
    confirming = {item.id for item in order[1::2]}
    return [item for item in items if item.id not in confirming], [item for item in items if item.id in confirming]


def _target_items(
    dataset: PreparedDataset, settings: DataSettings, seed: int, limit: int | None, language: str
) -> list[EvalItem]:
    """Make an item of every target of a prepared folder, or of `limit` targets of each speaker in turn, with the
    reference that training would give it."""
    update = {"train": dataset.folder, "require_reference": False}
    sampler = ReferenceSampler(dataset, settings.model_copy(update=update), seed)
    targets = list(sampler.targets)
    if limit is not None and limit < len(targets):
        of_speaker = _by_speaker(_shuffled(targets, f"{seed}/lines"))
        ranked = sorted((rank, name, target.id) for name, of in of_speaker.items() for rank, target in enumerate(of))
        selected = {id for _, _, id in ranked[:limit]}
        targets = [target for target in targets if target.id in selected]
    return [
        EvalItem(
            target.id,
            target.text,
            target.speaker,
            target.language or language,
            sampler.references(target, epoch=0),
            recording=target,
            scene=str(target.extras.get("scene") or settings.scene),
        )
        for target in targets
    ]


def _sentence_items(
    texts: Mapping[str, str], references: Mapping[str, Sequence[Utterance]], language: str, scene: str
) -> list[EvalItem]:
    """Make an item of each sentence; speakers take turns, and so do the references of each speaker."""
    items, speakers = [], sorted(references)
    for index, (id, text) in enumerate(texts.items()):
        speaker = speakers[index % len(speakers)]
        clip = references[speaker][index // len(speakers) % len(references[speaker])]
        described = str(clip.extras.get("scene") or scene)
        items.append(EvalItem(id, text, speaker, clip.language or language, (clip,), scene=described))
    return items


def _parse_list(file: Path, lines: Sequence[str], language: str, scene: str) -> Iterator[EvalItem]:
    for number, line in enumerate(lines, start=1):
        parts = [part.strip() for part in line.split("|")]
        if len(parts) not in (4, 5) or not parts[0] or not parts[3]:
            raise DataError(f"{file}:{number} is no line of a list", hint=LIST_HINT)
        paths = [file.parent / part for part in (parts[2], *parts[4:])]
        for path in paths:
            if not is_file(path):
                raise DataError(f"{file}:{number} names {path}, which is not there", hint=LIST_HINT)
        id, reference_text, _, text = parts[:4]
        reference = Utterance(f"{id}-reference", paths[0], normalise_text(reference_text), "", language)
        recording = Utterance(id, paths[1], text, "", language) if len(paths) == 2 else None
        yield EvalItem(id, normalise_text(text), "", language, (reference,), recording, scene)


def _read_lines(file: Path) -> list[str]:
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        lines = [line.strip() for line in content.decode("utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}", hint="give a UTF-8 text file, one sentence a line") from None
    if not lines:
        raise DataError(f"{file} has no lines", hint="write one sentence a line")
    return lines


def _speaker_clips(dataset: PreparedDataset, items: Sequence[EvalItem], seed: int) -> dict[str, tuple[Utterance, ...]]:
    """Choose some recordings of every named speaker of the items, and of others to tell them from."""
    clips = _by_speaker(utterance for utterance in dataset.utterances if utterance.speaker)
    own = {item.speaker for item in items}
    speakers = sorted(clips, key=lambda speaker: (speaker not in own, string_hash(f"{seed}/others/{speaker}")))
    speakers = speakers[: max(MIN_SPEAKERS, len(own))]
    count = min(MAX_CLIPS_PER_SPEAKER, max(MIN_CLIPS_PER_SPEAKER, MAX_CLIPS // max(1, len(speakers))))
    return {speaker: tuple(_shuffled(clips[speaker], f"{seed}/clips")[:count]) for speaker in sorted(speakers)}


def _references(dataset: PreparedDataset, settings: DataSettings, seed: int) -> dict[str, list[Utterance]]:
    shortest, longest = settings.reference_seconds
    clips = _by_speaker(clip for clip in dataset.utterances if shortest <= clip_seconds(clip) <= longest)
    if not clips:
        raise DataError(
            f"{dataset.folder} has no clip of {shortest:g} to {longest:g} s to set a voice",
            hint="give other --data, or leave it out to speak without a reference",
        )
    return {speaker: _shuffled(of, f"{seed}/references") for speaker, of in clips.items()}


def _by_speaker(utterances: Iterable[Utterance]) -> dict[str, list[Utterance]]:
    groups: defaultdict[str, list[Utterance]] = defaultdict(list)
    for utterance in utterances:
        groups[utterance.speaker].append(utterance)
    return groups


def _shuffled(utterances: Sequence[Utterance], key: str) -> list[Utterance]:
    return sorted(utterances, key=lambda utterance: string_hash(f"{key}/{utterance.id}"))
