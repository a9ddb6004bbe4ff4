"""Synthesis of the planned sentences into a folder; what is there is not synthesized again.

OUT/settings.json       settings; a folder begun with others is refused
OUT/references/         reference clips
OUT/originals/          real recordings of the same speakers
OUT/round_trips/        the same through the codec: an upper bound of the clones
OUT/clones/ID.wav       output of the model
OUT/clones/ID.json      whether it stopped by itself, and how long it took
OUT/scores/SYSTEM/ID.json   scores of a clip
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from codec_training.recordings import Recording, decode
from myna.audio.files import write_audio
from myna.audio.reference import check_reference
from myna.core.errors import DataError
from myna.core.io import atomic_write
from myna.data.conversation import AudioClip, Reference
from myna.models.base import Sampling
from myna.speak.engine import Engine, encode_clip
from myna.speak.request import SpeechRequest
from myna.text.normalization import normalise_text
from voice_evaluation.plan import EvaluationPlan, SynthesisTask

OnProgress = Callable[[int], None]
"""Called with the number of further clips that are done."""
MIN_SAMPLES = 960
"""Minimum length of a file: a model that stops at once gives no samples, and an empty file is no recording."""


def write_json(file: Path, value: Any) -> None:
    with atomic_write(file) as temporary:
        temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def begin_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings, or refuse a folder that was begun with others."""
    file = folder / "settings.json"
    if not file.is_file():
        write_json(file, settings)
    known = json.loads(file.read_text(encoding="utf-8"))
    if known != json.loads(json.dumps(settings)):
        other = sorted(name for name in {*known, *settings} if known.get(name) != settings.get(name))
        raise DataError(
            f"{folder} was begun with another {', '.join(other)}",
            hint="choose another folder with --out or --real, or delete it",
        )


def fingerprint(engine: Engine) -> str:
    """Hash of the model's weights."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(engine.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_real_clips(folder: Path, plan: EvaluationPlan, engine: Engine, on_progress: OnProgress) -> None:
    """Write references, originals and their codec round trips."""
    rate = engine.codec.sample_rate
    for speaker in plan.speakers:
        _write_recording(folder / "references" / f"{speaker.name}.wav", speaker.reference, rate)
        for number, original in enumerate(speaker.originals):
            name = f"{speaker.name}-{number:02d}.wav"
            samples = _write_recording(folder / "originals" / name, original, rate)
            if not (folder / "round_trips" / name).is_file():
                copy = engine.codec.decode(encode_clip(engine.codec, samples))
                write_audio(folder / "round_trips" / name, copy, rate)
            on_progress(1)


def _write_recording(file: Path, recording: Recording, rate: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    samples = decode(recording.data, rate)
    if not file.is_file():
        write_audio(file, samples, rate)
    return samples


def encode_references(plan: EvaluationPlan, engine: Engine, *, clean: bool = False) -> list[Reference]:
    """References in codes; `clean` ones are trimmed and levelled as `myna speak` does it."""
    references, rate = [], engine.codec.sample_rate
    for speaker in plan.speakers:
        samples = decode(speaker.reference.data, rate)
        codes = encode_clip(engine.codec, check_reference(samples, rate, rate).samples if clean else samples)
        references.append(Reference(normalise_text(speaker.reference.text), AudioClip(speaker.reference.id, codes)))
    return references


def synthesize_missing(
    folder: Path,
    tasks: Sequence[SynthesisTask],
    references: Sequence[Reference],
    engine: Engine,
    sampling: Sampling,
    batch_size: int,
    on_progress: OnProgress,
) -> dict[str, dict[str, Any]]:
    """Stop flag and duration of each sentence. Those of similar length are batched, since the longest decides."""
    missing = [task for task in tasks if not (folder / "clones" / f"{task.id}.json").is_file()]
    on_progress(len(tasks) - len(missing))
    missing.sort(key=lambda task: (len(task.text), task.id))
    for start in range(0, len(missing), batch_size):
        chosen, began = missing[start : start + batch_size], time.perf_counter()
        outputs = engine.speak(
            [
                SpeechRequest(task.text, (references[task.speaker],), id=task.id, scene="", **asdict(sampling))
                for task in chosen
            ]
        )
        spent = time.perf_counter() - began
        for task, speech in zip(chosen, outputs, strict=True):
            samples = np.pad(speech.samples, (0, max(0, MIN_SAMPLES - len(speech.samples))))
            write_audio(folder / "clones" / f"{task.id}.wav", samples, engine.codec.sample_rate)
            length = len(speech.samples) / engine.codec.sample_rate
            note = {"text": task.text, "stopped": speech.stopped, "seconds": length, "spent": spent / len(chosen)}
            write_json(folder / "clones" / f"{task.id}.json", note)
        on_progress(len(chosen))
    return {task.id: json.loads((folder / "clones" / f"{task.id}.json").read_text(encoding="utf-8")) for task in tasks}


def measure_speed(
    file: Path, tasks: Sequence[SynthesisTask], references: Sequence[Reference], engine: Engine, sampling: Sampling
) -> dict[str, float]:
    """Speed relative to real time, one sentence at a time.

    The first sentence warms up and does not count. A measurement is kept: delete the file to measure anew.
    """
    if not file.is_file():
        length = spent = 0.0
        for number, task in enumerate(tasks):
            began = time.perf_counter()
            request = SpeechRequest(task.text, (references[task.speaker],), id=task.id, scene="", **asdict(sampling))
            (speech,) = engine.speak([request])
            if number:
                spent += time.perf_counter() - began
                length += len(speech.samples) / engine.codec.sample_rate
        speed = length / spent if spent else 0.0
        write_json(file, {"seconds of speech": length, "seconds of work": spent, "times real time": speed})
    known: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return known
