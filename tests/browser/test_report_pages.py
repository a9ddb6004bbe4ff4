"""The demo's page and the evaluation's page, made from the shipped voice and model, in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from myna.demo.run import run_demo
from myna.evaluate.evaluation import EvaluationSettings, evaluate_system
from tests.browser.conftest import COLOR_SCHEMES, WIDTHS, check_accessible, check_plays
from tests.demo.stub_scorers import install_scorers

if TYPE_CHECKING:
    from tests.browser.conftest import PageOpener

QUICK = ("train.steps=3", "train.evaluate_every=2", "train.warmup=1")
TRANSCRIPT = 'it was said with </script><script>document.title = "owned"</script> a <b>smile</b>'


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Report pages by name."""
    out = tmp_path_factory.mktemp("pages") / "demo"
    with pytest.MonkeyPatch.context() as monkeypatch:
        install_scorers(monkeypatch, TRANSCRIPT)
        run_demo(out, settings=QUICK, asr="constant")
        held_out = out / "data" / "subsets" / "held_out_texts"
        settings = EvaluationSettings(data=held_out, limit=2, device="cpu", asr="constant")
        evaluate_system(str(out / "run"), settings, out=out / "scored")
    return {"demo": out / "report.html", "evaluation": out / "scored" / "report.html"}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("color_scheme", COLOR_SCHEMES)
@pytest.mark.parametrize("name", ["demo", "evaluation"])
def test_a_report_is_accessible(
    open_page: PageOpener, pages: dict[str, Path], name: str, color_scheme: str, width: int
) -> None:
    page = open_page(pages[name], width=width, color_scheme=color_scheme)
    page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    check_accessible(page)
    assert page.title() != "owned" and "<b>smile</b>" in page.locator("body").inner_text()


@pytest.mark.parametrize("name", ["demo", "evaluation"])
def test_a_report_plays_its_audio(open_page: PageOpener, pages: dict[str, Path], name: str) -> None:
    """Another sound stops the first, and a click on a spectrogram begins there."""
    page = open_page(pages[name])
    check_plays(page, ".picture")
    check_plays(page, ".clip:nth-of-type(2) .picture", audio=".clip:nth-of-type(2) audio")
    playing = "[...document.querySelectorAll('audio')].filter(sound => !sound.paused && !sound.ended).length"
    assert page.evaluate(playing) <= 1
    assert page.evaluate("document.querySelectorAll('.picture i:not([hidden])').length") == 2
