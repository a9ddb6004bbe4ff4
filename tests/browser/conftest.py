"""Chromium for tests of pages: one browser a session, a context a page, and nothing that leaves this machine.

    def test_my_page(open_page: PageOpener, report: Path) -> None:
        page = open_page(report)                    # or an address, with allowed=("http://127.0.0.1:8000",)
        check_accessible(page)
        check_plays(page, ".picture")

`open_page` fails the test, at its end, if a page wrote an error to the console, threw one, or asked any other host for
anything. Screenshots are kept in the folder that MYNA_SCREENSHOTS names.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    PageOpener = Callable[..., Page]

TIMEOUT_MS = 30_000
WIDTHS = (1280, 390)
"""A laptop's window and a telephone's."""
COLOR_SCHEMES = ("light", "dark")
OWN_SCHEMES = ("file:", "data:", "blob:")
"""Schemes that a page may load from without a server: its own, and files beside it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, driven by Playwright, which downloads nothing."""
    executable = os.environ.get("MYNA_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        _unavailable("there is no Chromium: apt-get install chromium, or name one in MYNA_CHROMIUM")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _unavailable("there is no Playwright: pip install -c constraints.txt -e '.[browser]'")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable)
        yield browser
        browser.close()


def _unavailable(reason: str) -> NoReturn:
    """Skip, or fail where MYNA_BROWSER=required, as in `make test-browser`."""
    if os.environ.get("MYNA_BROWSER") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def open_page(chromium: Browser, request: pytest.FixtureRequest) -> Iterator[PageOpener]:
    """Opens a file or an address in a window of its own, and watches over it until the test ends."""
    errors: list[str] = []
    contexts = []

    def open_one(
        address: Path | str,
        *,
        width: int = 1280,
        height: int = 900,
        color_scheme: str = "light",
        allowed: Sequence[str] = (),
        ignored_errors: Sequence[str] = (),
        **options: Any,
    ) -> Page:
        """`allowed` are origins, as http://127.0.0.1:8000, that may be asked beside the page's own files;
        `ignored_errors` are words of console errors that the test provokes."""
        context = chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=color_scheme, reduced_motion="reduce", **options
        )
        contexts.append(context)
        context.set_default_timeout(TIMEOUT_MS)

        def check_request(route: Any) -> None:
            url = route.request.url
            if url.startswith((*OWN_SCHEMES, *(f"{origin.rstrip('/')}/" for origin in allowed))):
                route.continue_()
                return
            errors.append(f"asked {url}")
            route.abort()

        context.route("**/*", check_request)
        page = context.new_page()

        def check_message(message: Any) -> None:
            if message.type == "error" and not any(words in message.text for words in ignored_errors):
                errors.append(message.text)

        page.on("console", check_message)
        page.on("pageerror", lambda error: errors.append(f"threw {error}"))
        page.goto(address.resolve().as_uri() if isinstance(address, Path) else address, wait_until="load")
        return page

    yield open_one
    if folder := os.environ.get("MYNA_SCREENSHOTS"):
        for number, context in enumerate(contexts):
            for page in context.pages:
                name = re.sub(r"[^\w-]+", "-", request.node.name).strip("-")
                page.screenshot(path=Path(folder, f"{name}-{number}.png"), full_page=True)
    for context in contexts:
        context.close()
    assert not errors, "\n".join(errors)


def check_accessible(page: Page) -> None:
    """Fail on anything that axe finds, and on a page that is wider than its window."""
    from axe_playwright_python.sync_playwright import Axe

    results = Axe().run(page)
    violations = results.response["violations"]
    found = [
        f"{violation['id']} ({violation['impact']}): {violation['help']}\n"
        + "\n".join(f"    {node['html'][:160]}\n      {node['failureSummary']}" for node in violation["nodes"][:4])
        for violation in violations
    ]
    assert not found, f"{page.url}: {len(found)} violations\n" + "\n".join(found)
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0, f"{page.url} is {overflow} px wider than its window"
    assert page.title() and page.locator("h1").count() == 1, f"{page.url} wants a title and one h1"


def check_plays(page: Page, button: str, *, audio: str = "audio") -> None:
    """Click a button as a person would, and wait until one of the page's sounds has been decoded and moves on."""
    page.locator(button).first.click()
    page.wait_for_function(
        """selector => [...document.querySelectorAll(selector)].some(
             sound => !sound.error && !sound.muted && sound.webkitAudioDecodedByteCount > 0 && sound.played.length
               && sound.played.end(0) - sound.played.start(0) > 0.05)""",
        arg=audio,
    )
