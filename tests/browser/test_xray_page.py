"""The X-ray of a small curated folder in a browser: seen, heard, and its thresholds moved."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from myna.curate.decision import decide
from myna.curate.settings import load_curate_settings
from myna.curate.xray import Xray, run_xray
from myna.curate.xray.source import open_xray_source
from tests.browser.conftest import COLOR_SCHEMES, WIDTHS, check_accessible, check_plays
from tests.curate.curated_folder import HOSTILE, write_curated_folder

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.conftest import PageOpener


@pytest.fixture(scope="module")
def xray(tmp_path_factory: pytest.TempPathFactory) -> Xray:
    folder = tmp_path_factory.mktemp("xray") / "my tapes"
    write_curated_folder(folder)
    return run_xray(folder, model="fledgling")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("color_scheme", COLOR_SCHEMES)
def test_the_xray_is_accessible(open_page: PageOpener, xray: Xray, color_scheme: str, width: int) -> None:
    page = open_page(xray.page, width=width, color_scheme=color_scheme)
    page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    page.locator(".play").first.click()
    check_accessible(page)
    assert page.title().startswith("X-ray of "), "what a transcript says is not run"
    assert HOSTILE in page.locator("#text").inner_text()


def test_every_kind_of_piece_plays(open_page: PageOpener, xray: Xray) -> None:
    """Play pieces by their button, the bar, a timeline (mouse and keyboard), and the map of voices."""
    page = open_page(xray.page)
    check_plays(page, "#hours .play")
    assert "kept" in page.locator("#playing").inner_text()
    check_plays_anew(page, lambda: page.locator(".bar button").nth(1).click())
    assert page.locator("tr.shown .play").first.get_attribute("data-src") == page.locator("#sound").get_attribute("src")
    strip = page.locator(".strip").first
    check_plays_anew(page, lambda: strip.click(position={"x": 300, "y": 80}))
    assert page.evaluate("document.getElementById('sound').src").endswith(".flac")
    # A timeline plays the recording from the place that was clicked.
    page.wait_for_function("() => document.getElementById('sound').currentTime > 5")
    strip.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    said = strip.get_attribute("aria-valuetext")
    assert said and " to 0:00:" in said and strip.get_attribute("aria-valuenow") != "1"
    check_plays_anew(page, lambda: page.keyboard.press("Enter"))
    check_plays_anew(page, lambda: page.locator(".map circle").first.click(force=True))
    page.wait_for_function("() => document.getElementById('sound').paused")


def check_plays_anew(page: Page, act: Any) -> None:
    """Do something while nothing plays, and wait until the player moves on by itself."""
    page.evaluate("document.getElementById('sound').pause()")
    act()
    page.wait_for_function(
        """() => {
             const sound = document.getElementById('sound'), before = window.place;
             window.place = sound.currentTime;
             return !sound.error && !sound.paused && !sound.seeking && before > 0 && sound.currentTime > before;
           }"""
    )


def test_a_moved_threshold_shows_its_cost(open_page: PageOpener, xray: Xray) -> None:
    """The page's own sum is that of the real decision, and the line to paste has the setting."""
    page = open_page(xray.page)
    folder = xray.page.parent.parent
    number = next(n for n, one in enumerate(xray.numbers["measures"]) if one["measure"] == "snr_db")
    measure = xray.numbers["measures"][number]
    card = page.locator(".measure").nth(number)
    card.locator("input").focus()
    for _ in range(7):
        page.keyboard.press("ArrowRight")
    value = measure["edges"][measure["edges"].index(15.0) + 7]
    command = page.locator("#settings").inner_text()
    assert shlex.split(command) == ["myna", "curate", "--out", str(folder), "--set", f"keep.min_snr_db={value:g}"]
    source = open_xray_source(folder)
    status = decide(source.table, load_curate_settings(folder, [shlex.split(command)[-1]]))["status"]
    lengths = source.table["end_ms"].to_numpy() - source.table["start_ms"].to_numpy()
    kept = lengths[status.to_numpy(zero_copy_only=False) == "kept"].sum()
    assert kept < measure["kept_ms"] and f"Keeps {kept / 60_000:.1f} min of" in card.inner_text()
    for _ in range(7):
        page.keyboard.press("ArrowLeft")
    assert shlex.split(page.locator("#settings").inner_text()) == ["myna", "curate", "--out", str(folder)]


def test_corrections_become_commands(open_page: PageOpener, xray: Xray) -> None:
    page = open_page(xray.page)
    page.on("dialog", lambda dialog: dialog.accept())
    first, second = page.locator(".doubt").nth(0), page.locator(".doubt").nth(1)
    text = 'it\'s $HOME & `echo` "so" كان'
    first.locator("textarea").fill(text)
    second.locator("[data-flag]").click()
    lines = [shlex.split(line) for line in page.locator("#commands").inner_text().splitlines()]
    folder = str(xray.page.parent.parent)
    clips = [one.get_attribute("data-clip") for one in (first, second)]
    assert lines == [
        ["myna", "correct", folder, clips[0], "--text", text],
        ["myna", "correct", folder, clips[1], "--drop"],
    ]
    second.locator("[data-flag]").click()
    assert len(page.locator("#commands").inner_text().splitlines()) == 1


def test_a_page_without_its_folder_names_what_is_missing(open_page: PageOpener, xray: Xray, tmp_path: Path) -> None:
    (tmp_path / "alone.html").write_text(xray.page.read_text(encoding="utf-8"), encoding="utf-8")
    page = open_page(tmp_path / "alone.html", ignored_errors=("ERR_FILE_NOT_FOUND",))
    page.locator("#hours .play").first.click()
    page.get_by_text("Keep the page in its folder").wait_for()
