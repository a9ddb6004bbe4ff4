from __future__ import annotations

import pytest

from myna.core.config import TrainSettings
from myna.train.optimizer import learning_rate


def rates(**settings: object) -> list[float]:
    train = TrainSettings.model_validate({"steps": 100, "learning_rate": 1.0, **settings})
    return [learning_rate(train, step, 100) for step in range(1, 101)]


def test_warmup_rises_to_the_full_rate_then_falls() -> None:
    cosine = rates(warmup=10, schedule="cosine")
    assert cosine[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert cosine[10:] == sorted(cosine[10:], reverse=True)
    assert cosine[10] == pytest.approx(1.0)
    assert 0 < cosine[-1] < 0.001, "the last step still learns"


def test_a_share_and_a_count_of_warmup_are_the_same() -> None:
    assert rates(warmup=0.1) == rates(warmup=10)


def test_no_warmup_starts_at_the_top_of_the_schedule() -> None:
    assert rates(warmup=0, schedule="constant") == [1.0] * 100
    assert rates(warmup=0, schedule="linear")[0] == pytest.approx(1.0)


def test_the_floor_is_where_it_ends() -> None:
    for schedule in ("cosine", "linear"):
        assert rates(schedule=schedule, final_learning_rate_ratio=0.1)[-1] == pytest.approx(0.1, abs=0.01)


def test_a_warmup_longer_than_the_run_is_shortened_to_half_of_it() -> None:
    """Otherwise the rate would never reach its peak."""
    assert rates(warmup=500, schedule="constant") == rates(warmup=50, schedule="constant")
    assert max(rates(warmup=500)) == 1.0 and max(rates(warmup=100)) == 1.0
