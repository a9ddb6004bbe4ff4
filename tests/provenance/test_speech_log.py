"""The log of what was spoken: appended by many processes at once, read in spite of a torn line."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import stat
from pathlib import Path

import pytest

from myna.core.errors import OutputError
from myna.provenance.speech_log import SpeechOrigin, append_row, check_log, log_file, log_speech, read_log


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MYNA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_rows() -> None:
    origin = SpeechOrigin("fledgling", adapter_sha256="ab", voice="Marta", text="Guten Tag", seed=3)
    log_speech("spoken", origin, b"audio", seconds=1.5)
    log_speech("saved", origin, b"file", file=Path("out.wav"))
    spoken, saved = read_log()
    assert spoken["audio_sha256"] == hashlib.sha256(b"audio").hexdigest()
    assert spoken["watermark"] is None
    assert (spoken["text"], spoken["voice"], spoken["seed"]) == ("Guten Tag", "Marta", 3)
    assert saved["id"] == spoken["id"]
    assert saved["file"] == str(Path("out.wav").absolute())
    assert stat.S_IMODE(log_file().stat().st_mode) == 0o600


def test_texts_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYNA_LOG_TEXT", "0")
    log_speech("spoken", SpeechOrigin("m", text="secret"), b"")
    assert "secret" not in log_file().read_text()
    assert next(read_log())["text_sha256"] == hashlib.sha256(b"secret").hexdigest()


def test_torn_line_is_left_out_and_stays_alone() -> None:
    append_row({"n": 1})
    whole = log_file().read_bytes()
    for cut in range(1, len(json.dumps({"n": 2}))):
        log_file().write_bytes(whole + json.dumps({"n": 2}).encode()[:cut])
        append_row({"n": 3})
        assert [row["n"] for row in read_log()] == [1, 3]


def _append(path: Path, writer: int) -> None:
    for number in range(20):
        append_row({"writer": writer, "number": number, "text": "ž" * 3_000}, path)


def test_many_processes(tmp_path: Path) -> None:
    context, path = multiprocessing.get_context("spawn"), tmp_path / "log.jsonl"
    workers = [context.Process(target=_append, args=(path, writer)) for writer in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    rows = list(read_log(path))
    assert len(rows) == 60
    assert all([row["number"] for row in rows if row["writer"] == n] == list(range(20)) for n in range(3))


def test_a_log_that_cannot_be_written_is_an_error(home: Path) -> None:
    home.write_text("a file where the folder should be")
    with pytest.raises(OutputError, match="log of what is spoken") as error:
        check_log()
    assert "MYNA_HOME" in error.value.hint
