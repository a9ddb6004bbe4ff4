"""Lines spoken into a folder, each with a note of how it ended; what is there is not spoken again.

OUT/asked.json          what was asked for; a folder begun with anything else is refused
OUT/references/         the clips that are cloned
OUT/originals/          real recordings of the same voices
OUT/round_trips/        the same through the codec: no clone can be better than that
OUT/clones/ID.wav       what the model says
OUT/clones/ID.json      whether it stopped by itself, and how long it took
OUT/heard/SYSTEM/ID.json    what the ears made of it
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from codec_training.sounds import Recording, decode
from myna.audio.files import write
from myna.data.conversation import AudioClip, Reference
from myna.data.utterance import normalise_text
from myna.errors import DataError
from myna.io import replacing
from myna.models.base import Sampling
from myna.speak.engine import Engine, SpeechRequest, encode_clip
from voice_judging.plan import Plan, Task

Tell = Callable[[int], None]
"""Told how many more are done."""
SMALLEST = 960
"""Samples in a file: a model that ends at once leaves nothing, and nothing is no recording."""


def write_json(file: Path, value: Any) -> None:
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def begin(folder: Path, asked: Mapping[str, Any]) -> None:
    """Refuse a folder that holds answers to another question."""
    file = folder / "asked.json"
    if not file.is_file():
        write_json(file, asked)
    known = json.loads(file.read_text(encoding="utf-8"))
    if known != json.loads(json.dumps(asked)):
        other = sorted(name for name in {*known, *asked} if known.get(name) != asked.get(name))
        raise DataError(
            f"{folder} was begun with another {', '.join(other)}",
            hint="choose another folder with --out or --real, or delete it",
        )


def fingerprint(engine: Engine) -> str:
    """A model by its weights, wherever they came from."""
    made = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(engine.model.state_dict().items()):
        made.update(name.encode())
        made.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def lay_out_real(folder: Path, plan: Plan, engine: Engine, tell: Tell) -> None:
    """References, originals and their round trips as files."""
    rate = engine.codec.sample_rate
    for voice in plan.voices:
        _put(folder / "references" / f"{voice.speaker}.wav", voice.reference, rate)
        for number, original in enumerate(voice.originals):
            name = f"{voice.speaker}-{number:02d}.wav"
            samples = _put(folder / "originals" / name, original, rate)
            if not (folder / "round_trips" / name).is_file():
                copy = engine.codec.decode(encode_clip(engine.codec, samples))
                write(folder / "round_trips" / name, copy, rate)
            tell(1)


def _put(file: Path, recording: Recording, rate: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    samples = decode(recording.data, rate)
    if not file.is_file():
        write(file, samples, rate)
    return samples


def references(plan: Plan, engine: Engine) -> list[Reference]:
    made = []
    for voice in plan.voices:
        codes = encode_clip(engine.codec, decode(voice.reference.data, engine.codec.sample_rate))
        made.append(Reference(normalise_text(voice.reference.text), AudioClip(voice.reference.id, codes)))
    return made


def speak_missing(
    folder: Path,
    tasks: Sequence[Task],
    voices: Sequence[Reference],
    engine: Engine,
    sampling: Sampling,
    batch: int,
    tell: Tell,
) -> dict[str, dict[str, Any]]:
    """How each line ended. Lines of like length go together, since a batch lasts as long as its longest."""
    missing = [task for task in tasks if not (folder / "clones" / f"{task.id}.json").is_file()]
    tell(len(tasks) - len(missing))
    missing.sort(key=lambda task: (len(task.text), task.id))
    for start in range(0, len(missing), batch):
        chosen, began = missing[start : start + batch], time.perf_counter()
        spoken = engine.speak(
            [SpeechRequest(task.text, (voices[task.voice],), id=task.id) for task in chosen], sampling
        )
        spent = time.perf_counter() - began
        for task, speech in zip(chosen, spoken, strict=True):
            samples = np.pad(speech.samples, (0, max(0, SMALLEST - len(speech.samples))))
            write(folder / "clones" / f"{task.id}.wav", samples, engine.codec.sample_rate)
            length = len(speech.samples) / engine.codec.sample_rate
            note = {"text": task.text, "stopped": speech.stopped, "seconds": length, "spent": spent / len(chosen)}
            write_json(folder / "clones" / f"{task.id}.json", note)
        tell(len(chosen))
    return {task.id: json.loads((folder / "clones" / f"{task.id}.json").read_text(encoding="utf-8")) for task in tasks}


def pace(
    file: Path, tasks: Sequence[Task], voices: Sequence[Reference], engine: Engine, sampling: Sampling
) -> dict[str, float]:
    """Seconds of speech for a second of work, one line at a time, as a person would wait for it.

    The first line warms up and does not count. What was measured once is kept: delete the file to measure anew.
    """
    if not file.is_file():
        length = spent = 0.0
        for number, task in enumerate(tasks):
            began = time.perf_counter()
            (speech,) = engine.speak([SpeechRequest(task.text, (voices[task.voice],), id=task.id)], sampling)
            if number:
                spent += time.perf_counter() - began
                length += len(speech.samples) / engine.codec.sample_rate
        paced = length / spent if spent else 0.0
        write_json(file, {"seconds of speech": length, "seconds of work": spent, "times real time": paced})
    known: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return known
