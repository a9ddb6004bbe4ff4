from __future__ import annotations

import pytest
import torch

from myna.core.config import LossSettings
from myna.core.errors import ConfigError
from myna.train.loss import term_means, term_weights, weighted_loss

STREAMS = ("text", "code0", "code1", "code2")


def weights(**settings: object) -> list[float]:
    return term_weights(STREAMS, LossSettings.model_validate(settings)).tolist()


def test_weights_of_codebooks_sum_to_one() -> None:
    assert weights() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    assert weights(codebook_weights="1/k", text_weight=0.5) == pytest.approx([0.5, 6 / 11, 3 / 11, 2 / 11])
    assert weights(codebook_weights=[2, 1, 1]) == pytest.approx([0, 0.5, 0.25, 0.25])


@pytest.mark.parametrize("wrong", [[1, 1], [0, 0, 0]])
def test_wrong_lists_are_refused(wrong: list[int]) -> None:
    with pytest.raises(ConfigError, match="codebook_weights"):
        weights(codebook_weights=wrong)


def test_passes_add_up_to_the_whole_step() -> None:
    """However a step is divided into micro-batches, dividing by the step's counts gives the same loss."""
    parts = [torch.tensor([4.0, 6.0, 8.0, 2.0]), torch.tensor([0.0, 3.0, 1.0, 5.0])]
    counts = torch.tensor([2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    w = term_weights(STREAMS, LossSettings(text_weight=1.0))
    whole = weighted_loss(parts[0] + parts[1], counts, w)
    assert float(sum(weighted_loss(p, counts, w) for p in parts)) == pytest.approx(float(whole))
    assert float(whole) == pytest.approx(4 / 2 + (9 / 3 + 9 / 4 + 7 / 5) / 3)


def test_an_empty_stream_has_no_mean_and_no_loss() -> None:
    sums, counts = torch.zeros(4), torch.tensor([0.0, 1, 1, 1], dtype=torch.float64)
    assert term_means(sums, counts)[0] is None
    assert float(weighted_loss(sums, counts, torch.ones(4, dtype=torch.float64))) == 0.0
