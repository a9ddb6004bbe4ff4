"""Progress of long work where nobody watches a terminal."""

from __future__ import annotations

import io
import time

import pytest

from myna.commands import display
from myna.core import progress


def test_long_work_tells_a_file_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`myna curate > log` was silent for minutes, also within a part that is reported when it is done."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.05)
    with display.progress_bars() as update:
        update("listening", 0, 300)
        wait_for_line(lines := io.StringIO(), capsys, "listening: 0 of 300, 0 s so far\n")
        update("listening", 150, 300)
        wait_for_line(lines, capsys, "listening: 150 of 300, 0 s so far, about 0 s left\n")
        update("reading", 7, None)
        wait_for_line(lines, capsys, "reading: 7, 0 s so far\n")


def wait_for_line(lines: io.StringIO, capsys: pytest.CaptureFixture[str], line: str) -> None:
    end = time.monotonic() + 60
    while line not in lines.getvalue() and time.monotonic() < end:
        lines.write(capsys.readouterr().err)
        time.sleep(0.01)
    assert line in lines.getvalue()


def test_short_work_writes_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with display.progress_bars() as update:
        update("listening", 300, 300)
    assert capsys.readouterr().err == ""
