"""Whoever says the lines: a model, or the recordings themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from myna.audio.files import Samples
from myna.evaluate.items import EvalItem, clip_key, samples_of

REAL, ROUND_TRIP, BASE = "real", "round_trip", "base"


@dataclass(frozen=True, slots=True, eq=False)
class SystemOutput:
    samples: Samples
    stopped: bool | None
    """False when the length cap ended it; None for a recording, which has no end to find."""


class System(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def sample_rate(self) -> int: ...

    @property
    def about(self) -> Mapping[str, Any]:
        """What it is, for the report."""

    def key(self, task: EvalItem) -> str:
        """Equal keys are equal sound: what was said under this key is not said again."""

    def can_say(self, task: EvalItem) -> bool: ...

    def speak(self, tasks: Sequence[EvalItem]) -> list[SystemOutput]:
        """Lines of one cap, several at once; none may depend on its company."""

    def close(self) -> None:
        """Let go of weights. Whoever speaks again opens them again."""


@dataclass(frozen=True, slots=True)
class Recordings:
    """The real recordings, or what a codec leaves of them: no model that speaks through it can be better."""

    name: str
    sample_rate: int
    revision: str = ""
    through: Callable[[Samples], Samples] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def key(self, task: EvalItem) -> str:
        return f"{clip_key(task.real)}/{self.sample_rate}/{self.revision}" if task.real is not None else ""

    def can_say(self, task: EvalItem) -> bool:
        return task.real is not None

    def speak(self, tasks: Sequence[EvalItem]) -> list[SystemOutput]:
        sounds = [samples_of(task.real, self.sample_rate) for task in tasks if task.real is not None]
        return [SystemOutput(self.through(sound) if self.through is not None else sound, None) for sound in sounds]

    def close(self) -> None:
        pass
