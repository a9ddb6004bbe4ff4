"""Blind listening test: usable by mouse and keyboard, and no text can break out of its data."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from myna.report.page import KEYS, blind_test, page_asset, render_page
from tests.report.html_reader import ATTACK, Reader

PAIR: dict[str, Any] = {"id": "t1", "text": ATTACK, "note": "wren", "language": "en"}
PAIR |= {"sounds": ("s1", "s2"), "names": (ATTACK, "two"), "real": "r"}


@pytest.fixture(scope="module")
def shown() -> str:
    sounds = {"s1": "data:,", "s2": None, "r": "data:,"}
    page = render_page("title", [blind_test([PAIR], sounds, name="n", intervals=[[0.0]], level=0.95)])
    return page[page.index("<main>") : page.index("</main>")]


def test_text_cannot_end_the_data_script(shown: str) -> None:
    assert Reader(shown).tags.count("script") == 1
    inside = shown.split('id="blind-data">', 1)[1].split("</script>", 1)[0]
    data = json.loads(inside)
    assert data["pairs"][0]["text"] == ATTACK and data["sounds"] == {"s1": "data:,", "s2": None, "r": "data:,"}


def test_every_control_has_a_label(shown: str) -> None:
    for tag, inner in re.findall(r"<button([^>]*)>(.*?)</button>", shown):
        assert re.sub(r"<kbd.*?</kbd>|<[^>]+>", "", inner).strip() or 'aria-label="' in tag
        assert 'type="button"' in tag
    assert len(re.findall(r"<label>[^<]*<input|<label><input", shown)) == shown.count("<input") == 2
    assert 'role="status"' in shown and 'aria-live="polite"' in shown and "<progress" in shown


def test_every_button_and_key_has_an_action(shown: str) -> None:
    code = page_asset("page.js")
    actions = set(re.findall(r'data-action="(\w+)"', shown))
    assert actions == {"play", "choose", "help", "close", "real", "back", "next", "download", "reveal"}
    for action in actions - {"play", "choose"}:
        assert re.search(rf"const actions = \{{[^;]*\b{action}\b", code, re.DOTALL), action
    handled = re.search(r"const keys = \{(.*?)\};", code, re.DOTALL)
    assert handled
    names = {quoted or plain for quoted, plain in re.findall(r"'([^']+)':|\b(\w+):", handled[1])}
    assert names == {" ", "1", "2", "x", "r", "a", "b", "=", "t", "arrowleft", "arrowright", "?"}
    told = " ".join(keys for keys, _ in KEYS)
    assert all(key in told for key in ("Space", "1", "2", "X", "R", "A", "B", "=", "T", "←", "→", "?"))


def test_shortcuts_can_be_switched_off_and_ignore_text_fields() -> None:
    code = page_asset("page.js")
    assert "!find('#keys').checked" in code and "input[type=text]" in code and "event.ctrlKey" in code


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_is_valid_javascript(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("script") / "page.js"
    file.write_text(page_asset("page.js"), encoding="utf-8")
    subprocess.run(["node", "--check", str(file)], check=True, capture_output=True)
