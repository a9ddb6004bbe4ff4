"""Scores of a folder of speech, clip by clip, and their means."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from codec_training.recordings import decode
from myna.audio.files import LISTENING_RATE, read_audio
from myna.listen.asr import ASR
from myna.listen.mos import DistillMOS
from myna.listen.speaker_encoders import (
    EcapaEncoder,
    ResemblyzerEncoder,
    SpeakerEmbedding,
    cosine_similarity,
    speaker_rank,
)
from myna.text.wer import ErrorCount, word_errors
from voice_evaluation.plan import EvaluationPlan
from voice_evaluation.synthesis import OnProgress, write_json

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class VoiceMetrics:
    """The models that score speech."""

    asr: ASR
    speaker_encoder: ResemblyzerEncoder | EcapaEncoder
    mos: DistillMOS

    @classmethod
    def open(cls, whisper: str, workers: int, ecapa: Path | None = None) -> VoiceMetrics:
        encoder = ResemblyzerEncoder.open() if ecapa is None else EcapaEncoder.open(ecapa)
        return cls(ASR.open(whisper, workers=workers), encoder, DistillMOS.open())


@dataclass(frozen=True, slots=True)
class ScoredClip:
    """A file to score: its system, text and speaker."""

    system: str
    id: str
    text: str
    speaker: int
    """Index in the plan."""


def real_clips(plan: EvaluationPlan) -> list[ScoredClip]:
    return [
        ScoredClip(system, f"{speaker.name}-{number:02d}", original.text, index)
        for system in ("originals", "round_trips")
        for index, speaker in enumerate(plan.speakers)
        for number, original in enumerate(speaker.originals)
    ]


def cloned_clips(plan: EvaluationPlan) -> list[ScoredClip]:
    return [ScoredClip("clones", task.id, task.text, task.speaker) for task in plan.tasks if task.is_scored]


def transcribe_references(plan: EvaluationPlan, asr: ASR) -> EvaluationPlan:
    """The plan with a transcript for each reference that has no text."""
    speakers = [
        speaker
        if speaker.reference.text
        else replace(
            speaker,
            reference=replace(
                speaker.reference,
                text=asr.transcribe(decode(speaker.reference.data, LISTENING_RATE), LISTENING_RATE, "en").text,
            ),
        )
        for speaker in plan.speakers
    ]
    return replace(plan, speakers=tuple(speakers))


def reference_embeddings(
    real: Path, plan: EvaluationPlan, encoder: ResemblyzerEncoder | EcapaEncoder
) -> list[SpeakerEmbedding]:
    files = [real / "references" / f"{speaker.name}.wav" for speaker in plan.speakers]
    return [encoder.embed(read_audio(file, sample_rate=LISTENING_RATE), LISTENING_RATE) for file in files]


def score_clips(
    folder: Path,
    clips: Sequence[ScoredClip],
    embeddings: Sequence[SpeakerEmbedding],
    metrics: VoiceMetrics,
    workers: int,
    on_progress: OnProgress,
) -> dict[str, list[Row]]:
    """Score every clip that has no scores yet, several at once; all rows, by system."""
    torch.set_num_threads(1)  # one thread per clip
    rows: dict[str, list[Row]] = {clip.system: [] for clip in clips}
    with ThreadPoolExecutor(workers) as pool:
        for clip, row in zip(clips, pool.map(lambda clip: _row(folder, clip, embeddings, metrics), clips), strict=True):
            rows[clip.system].append(row)
            on_progress(1)
    return rows


def _row(folder: Path, clip: ScoredClip, embeddings: Sequence[SpeakerEmbedding], metrics: VoiceMetrics) -> Row:
    file = folder / "scores" / clip.system / f"{clip.id}.json"
    if file.is_file():
        known: Row = json.loads(file.read_text(encoding="utf-8"))
        return known
    samples = read_audio(folder / clip.system / f"{clip.id}.wav", sample_rate=LISTENING_RATE)
    transcript = metrics.asr.transcribe(samples, LISTENING_RATE, "en")
    embedding = metrics.speaker_encoder.embed(samples, LISTENING_RATE)
    errors = word_errors(clip.text, transcript.text)
    similarities = [cosine_similarity(embedding, other) for other in embeddings]
    row = {
        "id": clip.id,
        "text": clip.text,
        "transcript": transcript.text,
        "looped": transcript.looped,
        "errors": errors.errors,
        "words": errors.total,
        "similarity": similarities[clip.speaker],
        "similarity to others": float(np.mean(np.delete(similarities, clip.speaker))),
        "rank": speaker_rank(embedding, clip.speaker, embeddings),
        "DistillMOS": metrics.mos.score(samples, LISTENING_RATE),
        "seconds": len(samples) / LISTENING_RATE,
    }
    write_json(file, row)
    return row


def mean_scores(rows: Sequence[Row]) -> dict[str, float]:
    """Scores of a system. Transcripts in which the ASR looped count, and are reported separately too."""

    def rate(some: Sequence[Row]) -> float:
        total = sum((ErrorCount(row["errors"], row["words"]) for row in some), ErrorCount())
        return total.rate if total.total else 1.0

    def mean(name: str) -> float:
        return float(np.mean([row[name] for row in rows]))

    return {
        "word error rate": rate(rows),
        "word error rate without loops": rate([row for row in rows if not row["looped"]]),
        "loops": float(np.mean([row["looped"] for row in rows])),
        "similarity": mean("similarity"),
        "similarity to others": mean("similarity to others"),
        "top-1 speaker accuracy": float(np.mean([row["rank"] == 1 for row in rows])),
        "DistillMOS": mean("DistillMOS"),
        "sentences": float(len(rows)),
    }
