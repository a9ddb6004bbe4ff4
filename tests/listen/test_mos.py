"""Predictors of quality."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from myna.core.errors import AudioError, ConfigError
from myna.listen.mos import DistillMOS


class FakeModel:
    def __call__(self, waves: torch.Tensor) -> torch.Tensor:
        assert waves.dtype == torch.float32
        return torch.tensor([float(waves.shape[1])])


def test_one_clip_at_the_listening_rate() -> None:
    predictor = DistillMOS(FakeModel())
    assert predictor.score(np.ones(24_000, np.float32), 24_000) == 16_000
    with pytest.raises(AudioError, match="empty"):
        predictor.score(np.zeros(0, np.float32), 24_000)


def test_what_to_type_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError) as caught:
        DistillMOS.open()
    assert caught.value.hint == "pip install --no-deps distillmos==0.9.1 xls_r_sqa==0.1.0"


def test_real_distillmos_rates_noise_low(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xls_r_sqa", reason="pip install --no-deps distillmos==0.9.1 xls_r_sqa==0.1.0")
    predictor = DistillMOS.open()
    noise = 0.1 * np.random.default_rng(0).standard_normal(48_000).astype(np.float32)
    assert 1 <= predictor.score(noise, 24_000) < 2.5
    assert predictor.score(0.5 * noise, 24_000) == pytest.approx(predictor.score(noise, 24_000), abs=1e-3)
    assert not capsys.readouterr().out
