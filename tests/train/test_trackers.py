"""Audio and pictures reach every tracker through its own functions."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from myna.train.callbacks import LoggedSample, log_samples

SAMPLE = LoggedSample("line", np.zeros(240, np.float32), 24_000, np.zeros((96, 1, 3), np.uint8))


class FakeTracker:
    """Object of any tracker that keeps every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self.calls.append((name, given, named))


def shown(name: str) -> FakeTracker:
    notebook = FakeTracker()
    accelerator: Any = SimpleNamespace(trackers=[SimpleNamespace(name=name, tracker=notebook)])
    log_samples(accelerator, [SAMPLE], 20)
    return notebook


def test_tensorboard_has_a_word_for_each() -> None:
    (audio, sound, how), (image, picture, where) = shown("tensorboard").calls
    assert audio == "add_audio" and sound[0] == "speech_eval/line" and how == {"global_step": 20, "sample_rate": 24_000}
    assert (
        image == "add_image" and picture[1] is SAMPLE.spectrogram and where == {"global_step": 20, "dataformats": "HWC"}
    )


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_others_log_them_like_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = ModuleType(name)
    library.Audio, library.Image = (lambda value, sample_rate: ("sound", len(value), sample_rate)), lambda _: "picture"
    monkeypatch.setitem(sys.modules, name, library)
    [(log, [told], how)] = shown(name).calls
    assert log == "log" and how == {"step": 20}
    assert told == {"speech_eval/line": ("sound", 240, 24_000), "speech_eval/line/mel": "picture"}


def test_whoever_has_nothing_to_show_is_silent() -> None:
    accelerator: Any = SimpleNamespace(trackers=[SimpleNamespace(name="tensorboard", tracker=None)])
    log_samples(accelerator, [], 20)
