"""The result of one check, and the type of the functions that make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: its name, how it stands, and what to type where it is not ok."""

    name: str
    status: Status
    detail: str
    hint: str = ""

    def __post_init__(self) -> None:
        assert self.hint or self.status == "ok", f"{self.name} has no hint"


Probe = Callable[..., Iterator[Check]]
