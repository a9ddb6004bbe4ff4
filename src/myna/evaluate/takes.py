"""Ranking of several takes of one text by the metrics that are installed."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import torch

from myna.audio.files import as_mono_16khz
from myna.core.errors import ConfigError
from myna.core.io import DEFAULT_SPEAKER_ENCODER
from myna.core.progress import ProgressCallback, silent
from myna.data.manifest import SPEAKER_TAG, Utterance
from myna.evaluate import pipeline, scoring
from myna.evaluate.items import EvalItem, EvalSet
from myna.speak.engine import Speech
from myna.speak.request import SpeechRequest
from myna.text.normalization import normalise_text

SHOWN_SCORES = ("word_errors", "words", "similarity", "distillmos", "dnsmos", "transcript")


@dataclass(frozen=True, slots=True, eq=False)
class RankedTake:
    """Take with its scores."""

    number: int
    """Number from 1 on, in the order of the seeds."""
    speech: Speech
    scores: scoring.ItemScores

    @property
    def defects(self) -> list[str]:
        """Defects that no metric may outweigh."""
        scores = self.scores
        found = {
            "silent": scores.silent,
            "ended early": scores.ended_early,
            "copies the reference": (scores.copy_similarity or 0.0) >= scoring.COPY_THRESHOLD,
        }
        return [name for name, has in found.items() if has]

    @property
    def sort_key(self) -> tuple[float, ...]:
        """Sort key: smaller is better. If similarities are equal to two digits, quality decides."""
        scores = self.scores
        return (
            not self.speech.stopped,
            bool(self.defects),
            scores.word_errors or 0,
            -round(scores.similarity or 0.0, 2),
            -(scores.distillmos or 0.0),
            -(scores.dnsmos or 0.0),
            self.number,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the measured metrics that the ranking used."""
        measured = {name: getattr(self.scores, name) for name in SHOWN_SCORES}
        end = {"take": self.number, "finish_reason": self.speech.finish_reason, "defects": self.defects}
        return end | {name: value for name, value in measured.items() if value is not None}


@dataclass(frozen=True, slots=True, eq=False)
class TakeRanking:
    """Takes of one text, best first."""

    takes: tuple[RankedTake, ...]
    notes: tuple[str, ...] = ()
    """Sentences on metrics that were not measured."""

    @property
    def best(self) -> Speech:
        return self.takes[0].speech


class TakeRanker:
    """Ranker of takes: those that found their end come first, then fewer word errors, higher speaker similarity to the
    reference, and higher predicted MOS, as far as the scorers are installed."""

    def __init__(self, scorers: scoring.Scorers) -> None:
        self.scorers = scorers

    @classmethod
    def open(
        cls, asr: str | None = None, speaker_encoder: str = DEFAULT_SPEAKER_ENCODER, *, device: str = "cpu"
    ) -> Self:
        """Open every scorer that can be opened; one that was named and cannot be opened is an error."""
        scorers = scoring.Scorers.open(asr, speaker_encoder, device=device)
        named = {"asr": asr is not None, "speaker_encoder": speaker_encoder != DEFAULT_SPEAKER_ENCODER}
        for scorer, reason in scorers.missing.items():
            if named.get(scorer):
                raise ConfigError(f"takes cannot be ranked by the {scorer} that was named", hint=reason)
        return cls(scorers)

    @property
    def name(self) -> str:
        """Names of the scorers: others may choose another take."""
        return str(sorted(self.scorers.names.items()))

    def check(self, references: int) -> None:
        """Raise an error before anything is spoken if no scorer can rank takes with so many references."""
        usable = self.scorers.names.keys() - (set() if references == 1 else {"speaker_encoder"})
        if usable:
            return
        reasons = dict(self.scorers.missing)
        if "speaker_encoder" in self.scorers.names:
            reasons["speaker_encoder"] = "it compares with one reference: --reference REF.wav --reference-text '...'"
        raise ConfigError(
            "no metric is installed that could tell which take is the best",
            hint="one of these is enough: " + "; ".join(f"({key}) {reason}" for key, reason in reasons.items()),
        )

    def rank(self, request: SpeechRequest, takes: Sequence[Speech], progress: ProgressCallback = silent) -> TakeRanking:
        """Rank takes of one request."""
        self.check(len(request.references))
        language = request.language
        clips = [Utterance(str(one.file), one.file, one.text, "", language, one.span) for one in request.recordings]
        words = normalise_text(SPEAKER_TAG.sub(" ", request.words))
        item = EvalItem("take", words, language=language, references=tuple(clips))
        encoder = self.scorers.speaker_encoder
        speakers = scoring.SpeakerEmbeddings(EvalSet((item,), {}), encoder) if encoder is not None else None
        if speakers is not None and len(clips) == 1:
            speakers.of_clip(clips[0])  # before several threads need it

        def score(number: int) -> RankedTake:
            speech = takes[number]
            row = scoring.ItemScores.unscored("takes", item, speech.samples, speech.stopped)
            samples = as_mono_16khz(speech.samples, speech.sample_rate)
            scoring.score_item(row, item, samples, self.scorers, speakers, self.scorers.names)
            return RankedTake(number + 1, speech, row)

        workers = min(scoring.SCORING_WORKERS, len(takes))
        with pipeline.torch_threads(max(1, torch.get_num_threads() // workers)), ThreadPoolExecutor(workers) as pool:
            ranked = []
            for take in pool.map(score, range(len(takes))):
                ranked.append(take)
                progress("ranking takes", len(ranked), len(takes))
        notes = [f"{key}: not measured. {reason}" for key, reason in self.scorers.missing.items()]
        return TakeRanking(tuple(sorted(ranked, key=lambda take: take.sort_key)), (*notes, *self.scorers.notes))
