"""Checks of the software: Python, packages, audio, transformers, the hub and trackers."""

from __future__ import annotations

import importlib
import io
import pkgutil
import platform
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from importlib import metadata, util
from typing import get_args

from myna.checks.check import Check, Status

HUB_TIMEOUT = 3.0
"""Seconds to wait for the hub; a name server that does not answer may take much longer to give up."""


def check_python() -> Iterator[Check]:
    from packaging.specifiers import SpecifierSet

    version, wanted = platform.python_version(), metadata.metadata("myna")["Requires-Python"]
    detail = f"{version} at {sys.executable}"
    if SpecifierSet(wanted).contains(version, prereleases=True):
        yield Check("python", "ok", detail)
    else:
        yield Check(
            "python", "failed", f"{detail}; Myna needs {wanted}", "python3.11 -m venv .venv, and install Myna there"
        )


def check_packages() -> Iterator[Check]:
    """What Myna's own metadata asks for, against what is installed."""
    from packaging.requirements import Requirement

    fine, wrong, install = [], [], []
    for line in metadata.requires("myna") or []:
        needed = Requirement(line)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            version = "absent"
        if version != "absent" and needed.specifier.contains(version, prereleases=True):
            fine.append(f"{needed.name} {version}")
        else:
            wrong.append(f"{needed.name} is {version}, Myna needs {needed.specifier}")
            install.append(f"'{needed.name}{needed.specifier}'")
    if wrong:
        yield Check("packages", "failed", "; ".join(wrong), f"pip install {' '.join(install)}")
    else:
        yield Check("packages", "ok", ", ".join(fine))


def check_audio_files() -> Iterator[Check]:
    """A tone through every format and the resampler, in memory."""
    import numpy as np
    import soundfile
    import soxr  # type: ignore[import-untyped]

    from myna.audio.files import AUDIO_FORMATS

    rate = 24_000
    tone = (0.3 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)).astype(np.float32)
    lost = {}
    for suffix, (kind, subtype) in AUDIO_FORMATS.items():
        try:
            file = io.BytesIO()
            soundfile.write(file, tone, rate, format=kind, subtype=subtype)
            file.seek(0)
            decoded, _ = soundfile.read(file, dtype="float32")
        except (soundfile.SoundFileError, ValueError) as error:
            lost[suffix] = str(error)
            continue
        if abs(len(decoded) - rate) > rate / 5 or not 0.8 < decoded.std() / tone.std() < 1.25:
            lost[suffix] = "a tone does not come back as it was written"
    version = f"soundfile {soundfile.__version__}, libsndfile {soundfile.__libsndfile_version__}"
    if lost:
        listing = "; ".join(f"{suffix}: {reason}" for suffix, reason in lost.items())
        status: Status = "failed" if ".wav" in lost else "warning"
        yield Check("audio files", status, f"{version}; {listing}", "pip install --upgrade --force-reinstall soundfile")
    else:
        yield Check("audio files", "ok", f"{version}: {' '.join(AUDIO_FORMATS)} are written and read back")
    resampled = soxr.resample(tone, rate, 16_000, quality="VHQ")
    if len(resampled) == 16_000 and 0.95 < resampled.std() / tone.std() < 1.05:
        yield Check("resampling", "ok", f"soxr {soxr.__version__}")
    else:
        detail = f"soxr {soxr.__version__}: a second at 24 kHz became {len(resampled)} samples at 16 kHz"
        yield Check("resampling", "failed", detail, "pip install --upgrade --force-reinstall soxr")


def check_transformers() -> Iterator[Check]:
    """Whether it can be imported: it takes torchaudio along wherever that is installed, and falls with it."""
    if util.find_spec("torchaudio") is None:
        yield Check("torchaudio", "ok", "absent; Myna does not need it")
    else:
        try:
            torchaudio = importlib.import_module("torchaudio")
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            detail = f"it is installed, but `import torchaudio` fails, and transformers with it: {error}"
            yield Check("torchaudio", "failed", detail, "pip uninstall torchaudio")
            return
        yield Check("torchaudio", "ok", torchaudio.__version__)

    from myna import models

    classes: list[type] = []
    for family in pkgutil.iter_modules(models.__path__):
        if family.ispkg:  # each of which has a codec.py
            codec = importlib.import_module(f"myna.models.{family.name}.codec")
            classes += codec.codec_classes() if hasattr(codec, "codec_classes") else []
    yield Check("codec classes", "ok", ", ".join(kind.__name__ for kind in classes))


def check_hub() -> Iterator[Check]:
    from huggingface_hub import constants

    if constants.is_offline_mode():
        yield Check("hub", "ok", "HF_HUB_OFFLINE is set: only folders and the cache are used")
        return
    outcome = [f"no answer within {HUB_TIMEOUT:g} s"]

    def request() -> None:
        try:
            urllib.request.urlopen(
                urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_TIMEOUT
            ).close()
        except urllib.error.HTTPError:
            outcome[0] = ""  # a refusal is an answer
        except (OSError, HTTPException, ValueError) as error:
            outcome[0] = str(getattr(error, "reason", error))
        else:
            outcome[0] = ""

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT)
    if reason := outcome[0]:
        hint = "export HF_HUB_OFFLINE=1 to use folders and the cache alone, or set HTTPS_PROXY or HF_ENDPOINT"
        yield Check("hub", "warning", f"{constants.ENDPOINT} cannot be reached: {reason}", hint)
    else:
        yield Check("hub", "ok", f"{constants.ENDPOINT} answers")


def check_trackers() -> Iterator[Check]:
    from myna.core.config import TrainSettings

    names: tuple[str, ...] = get_args(get_args(TrainSettings.model_fields["trackers"].annotation)[0])
    listing = []
    for name in names:
        if util.find_spec(name) is None:
            listing.append(f"{name} absent (pip install {name})")
        else:
            importlib.import_module(name)
            listing.append(f"{name} {metadata.version(name)}")
    yield Check("trackers", "ok", ", ".join(listing))
