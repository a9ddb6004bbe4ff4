"""The page of a speech server, in a browser: typed, heard as it comes, stopped, and refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from tests.browser.conftest import COLOR_SCHEMES, WIDTHS, check_accessible
from tests.serve.conftest import RunningServer, start_server

if TYPE_CHECKING:
    from tests.browser.conftest import PageOpener

LONG = "It was a fine day, and they walked along the river for a long time. " * 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    home = tmp_path_factory.mktemp("server")
    with start_server(home, "--streams", "2", "--no-watermark") as one:
        yield one


@pytest.fixture
def page(open_page: PageOpener, server: RunningServer) -> Any:
    page = open_page(f"{server.url}/", allowed=[server.url])
    page.wait_for_function("() => document.getElementById('voice').options.length > 0")
    return page


def wait_for_status(page: Any, words: str) -> None:
    page.wait_for_function(
        "words => document.getElementById('status').textContent.includes(words)", arg=words, timeout=90_000
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("color_scheme", COLOR_SCHEMES)
@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_pages_are_accessible(
    open_page: PageOpener, server: RunningServer, path: str, color_scheme: str, width: int
) -> None:
    page = open_page(f"{server.url}{path}", allowed=[server.url], width=width, color_scheme=color_scheme)
    page.evaluate("document.getElementById('result')?.removeAttribute('hidden')")
    check_accessible(page)


def test_the_serve_page_works_by_keyboard_alone(page: Any, server: RunningServer) -> None:
    """Speak a text by keyboard alone. The page gathers as many bytes as the server sends."""
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "text"
    page.keyboard.press("Control+A")
    page.keyboard.type("Good morning, how are you?")
    order = []
    for _ in range(5):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id"))
    assert order == ["model", "voice", "seed", "speed", "speak"]
    page.keyboard.press("Enter")
    wait_for_status(page, "Spoken: ")
    size = int(page.get_attribute("#download", "data-bytes"))
    body = {"input": "Good morning, how are you?", "response_format": "pcm"}
    assert size == 44 + len(httpx2.post(f"{server.url}/v1/audio/speech", json=body, timeout=60).content)
    page.wait_for_function("() => document.getElementById('player').duration > 0.5")


def test_speech_plays_while_it_is_generated_and_can_be_stopped(page: Any, server: RunningServer) -> None:
    page.fill("#text", LONG)
    assert page.is_disabled("#stop")
    page.focus("#text")
    page.keyboard.press("Control+Enter")
    wait_for_status(page, "Speaking.")
    assert server.metric("myna_streams_speaking") == 1, "it is still being made"
    page.keyboard.press("Escape")
    wait_for_status(page, "Stopped.")
    server.wait_for("myna_requests_in_flight", 0)
    assert page.is_disabled("#stop")


def test_an_error_is_shown(open_page: PageOpener, server: RunningServer) -> None:
    """The browser's console notes every status of 400, so the answer is made up here."""
    page = open_page(f"{server.url}/", allowed=[server.url])
    answer = "{ ok: false, status: 400, json: async () => ({ error: { message: 'at most 4096 characters' } }) }"
    page.evaluate(f"window.fetch = async () => ({answer})")
    page.click("#speak")
    wait_for_status(page, "at most 4096 characters")
    assert page.get_attribute("#status", "role") == "status" and page.is_disabled("#stop")


def test_hostile_names_are_escaped(open_page: PageOpener, server: RunningServer) -> None:
    page = open_page(f"{server.url}/", allowed=[server.url])
    page.wait_for_function("() => document.getElementById('voice').options.length > 0")
    page.evaluate("""fill(document.getElementById('voice'), ['<img src=x onerror="document.title=1">'])""")
    assert page.locator("img").count() == 0 and page.title() == "Myna speech server"
