"""Marks of generated speech, stored voices and their consents; here, the optional packages of the extra `mark`.

Nothing heavy is imported to find out whether the packages are there.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

from myna.core.errors import OutputError

PERTH_CHECKPOINT = "perth/perth_net/pretrained/implicit/perth_net_250000.pth.tar"
INSTALL_HINT = 'pip install "myna[mark]"'
UNMARKED_HINT = f"{INSTALL_HINT}, or speak without a watermark: --no-watermark (watermark=False)"


def check_installed() -> None:
    """Refuse to mark speech if a package for it is missing."""
    perth_checkpoint()
    if not credentials_installed():
        raise OutputError("what is spoken is signed, and c2pa-python is not installed", hint=UNMARKED_HINT)


def credentials_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("c2pa", "cryptography"))


def watermark_installed() -> bool:
    return importlib.util.find_spec("perth") is not None


def perth_checkpoint(hint: str = UNMARKED_HINT) -> Path:
    """Return the file of the watermark's weights in the package resemble-perth, which is not imported. Missing weights
    are an error with the `hint`."""
    try:
        file = Path(str(metadata.distribution("resemble-perth").locate_file(PERTH_CHECKPOINT)))
    except metadata.PackageNotFoundError:
        raise OutputError("the watermark needs resemble-perth, which is not installed", hint=hint) from None
    if not file.is_file():
        raise OutputError(f"resemble-perth is installed without its weights: {file} is missing", hint=hint)
    return file
