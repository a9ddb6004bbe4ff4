"""The page of a comparison in a browser: accessible, and answered by keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from myna.evaluate.comparison import build_comparison, comparison_page
from myna.evaluate.listening import ComparedSystem
from myna.evaluate.metrics import REAL
from myna.evaluate.pipeline import Recordings, System, score_systems
from tests.browser.conftest import COLOR_SCHEMES, WIDTHS, check_accessible
from tests.evaluate.speech import RATE, FakeSystem, fake_scorers, make_eval_set, poorly, well

if TYPE_CHECKING:
    from tests.browser.conftest import PageOpener


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    systems: list[System] = [Recordings(REAL, RATE), FakeSystem("good", well), FakeSystem("poor", poorly)]
    rows = score_systems(make_eval_set(folder), systems, fake_scorers(), folder / "out")
    real, good, poor = (ComparedSystem(name, rows[name], folder / "out") for name in (REAL, "good", "poor"))
    page = comparison_page(build_comparison([good, poor], real, folder=folder, seed=0, trials=4))
    (folder / "compare.html").write_text(page, encoding="utf-8")
    return folder / "compare.html"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("color_scheme", COLOR_SCHEMES)
def test_the_comparison_is_accessible(open_page: PageOpener, comparison: Path, color_scheme: str, width: int) -> None:
    page = open_page(comparison, width=width, color_scheme=color_scheme)
    page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    check_accessible(page)


def test_a_pair_is_heard_and_answered_by_keyboard(open_page: PageOpener, comparison: Path) -> None:
    page = open_page(comparison)
    assert page.locator("[data-action=choose]").first.is_disabled(), "both sounds come first"
    for key in "12":
        page.keyboard.press(key)
        page.wait_for_function(f"() => document.querySelectorAll('.heard')[{key} - 1].textContent === 'heard'")
    page.keyboard.press("a")
    page.wait_for_function("() => document.getElementById('where').textContent === 'Pair 2 of 4'")
    assert page.locator("#status").inner_text().startswith("A is better.")
