"""The check-up: one small function per question, each answered with what to type where something is wrong.

A sick machine must not stop the doctor, so nothing beyond the standard library is imported before it is needed, and an
exception that nobody foresaw is a finding like any other.
"""

from __future__ import annotations

import importlib
import io
import math
import os
import pkgutil
import platform
import shutil
import sys
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPException
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal, get_args

from myna.errors import ModelError, MynaError

MODEL_ROOM, RUN_ROOM, NO_ROOM = 15e9, 5e9, 1e9
"""Bytes on disk: the 3B model with its codec; a LoRA run with three checkpoints; too little for anything."""
MEMORY = 8e9
"""Bytes of main memory below which loading a 3B model gets tight."""
PATIENCE = 3.0
"""Seconds to wait for the hub; a name server that does not answer may take much longer to give up."""
CUDA_TORCH = "pip install --force-reinstall torch, in the build that https://pytorch.org/get-started names for the GPU"
CPU_TORCH = "install the CPU build of torch: pytorch.org/get-started has the line for this machine"
FETCH_AGAIN = "hf download OWNER/NAME --force-download, and give --model that name"
SENTENCES = ("صباح الخير، كيف حالك اليوم؟", "Chào buổi sáng, hôm nay bạn có khỏe không?")
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CGROUP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
NVIDIA = Path("/proc/driver/nvidia/version")
MARKS = {"ok": ("✓", "+", "green"), "warning": ("!", "!", "yellow"), "failed": ("✗", "x", "red")}
"""As they should be, in ASCII for terminals that have no more, and their colour."""


Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Status
    detail: str
    hint: str = ""
    """What to type; only what is ok goes without."""

    def __post_init__(self) -> None:
        assert self.hint or self.status == "ok", f"{self.name} leaves people alone"


Probe = Callable[..., Iterator[Check]]


def examine(model: str | None = None) -> Iterator[Check]:
    """Every check, as soon as it is done; those of the model where one is named."""
    broken = False
    for probe, package in MACHINE:
        found = _safely(probe, package)
        yield from found
        broken |= probe is transformers_ and any(check.status == "failed" for check in found)
    if model is None:
        return
    if broken:
        hint = f"mend what failed above, then: myna doctor --model {model}"
        yield Check("model", "failed", "not looked at, since transformers does not work here", hint)
        return
    patient = Patient(model)
    opened = _safely(model_, "transformers", patient)
    yield from opened
    if all(check.status == "ok" for check in opened):
        for probe in MODEL:
            yield from _safely(probe, "transformers", patient)


def _safely(probe: Probe, package: str, *arguments: Any) -> list[Check]:
    """What a probe finds, come what may; `package` is what to suspect when it comes to the worst."""
    found, name = [], probe.__name__.strip("_")
    try:
        for check in probe(*arguments):
            found.append(check)  # noqa: PERF402 - one by one, to keep those before an exception
    except MynaError as error:
        found.append(Check(name, "failed", error.what, error.hint))
    # Broad on purpose, and only here: the doctor is for machines on which anything may be broken, and has to go on to
    # the next check with whatever this one ran into as its finding.
    except Exception as error:  # noqa: BLE001
        hint = f"pip install --force-reinstall --no-deps {package}; if it stays, report this with `myna doctor --json`"
        if isinstance(error, ModuleNotFoundError):
            hint = "pip install myna, which brings what it needs"
        found.append(Check(name, "failed", f"{type(error).__name__}: {error}", hint))
    return found


def python() -> Iterator[Check]:
    from packaging.specifiers import SpecifierSet

    version, wanted = platform.python_version(), metadata.metadata("myna")["Requires-Python"]
    detail = f"{version} at {sys.executable}"
    if SpecifierSet(wanted).contains(version, prereleases=True):
        yield Check("python", "ok", detail)
    else:
        yield Check(
            "python", "failed", f"{detail}; Myna needs {wanted}", "python3.11 -m venv .venv, and install Myna there"
        )


def packages() -> Iterator[Check]:
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


def torch_() -> Iterator[Check]:
    import torch

    cuda, rocm = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "CPU"
    detail = f"{torch.__version__}, {build} build"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        works = torch.cuda.is_available()
    if build == "CPU" and NVIDIA.exists():
        yield Check("torch", "warning", f"{detail}, but there is an NVIDIA driver: the GPUs lie idle", CUDA_TORCH)
    elif build == "CPU" or works:
        yield Check("torch", "ok", detail)
    elif os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Check("torch", "warning", f"{detail}; CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    else:
        reason = str(said[0].message).splitlines()[0] if said else "no GPU answers"
        smi = "rocm-smi" if rocm else "nvidia-smi"
        yield Check(
            "torch",
            "warning",
            f"{detail} without a working driver ({reason}): training would run on the CPU",
            f"{smi} shows whether the driver works: if not, install or update it; if there is no GPU, {CPU_TORCH}",
        )


def gpu() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        here = "Apple MPS" if torch.backends.mps.is_available() else "none: the CPU will do for tiny models and tests"
        yield Check("gpu", "ok", here)
        return
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        detail = (
            f"{card.name}, {total / 2**30:.1f} GiB of memory ({free / 2**30:.1f} free), "
            f"compute capability {card.major}.{card.minor}"
        )
        if not torch.version.hip and not _built_for(card.major, card.minor, torch.cuda.get_arch_list()):
            detail += f", which this torch has no kernels for ({', '.join(torch.cuda.get_arch_list())})"
            yield Check(f"gpu {number}", "failed", detail, CUDA_TORCH)
        elif free < total / 2:
            yield Check(f"gpu {number}", "warning", f"{detail}: most of it is taken", "nvidia-smi shows who holds it")
        else:
            yield Check(f"gpu {number}", "ok", detail)


def _built_for(major: int, minor: int, kernels: list[str]) -> bool:
    """Machine code serves later cards of its generation, PTX (`compute_..`) all later cards."""
    for kernel in kernels:
        kind, _, digits = kernel.partition("_")
        number = int("".join(digit for digit in digits if digit.isdigit()) or 0)
        generation, step = divmod(number, 10)
        if (generation == major and step <= minor) or (kind == "compute" and (generation, step) <= (major, minor)):
            return True
    return False


def precision() -> Iterator[Check]:
    from myna.train.precision import decide, pick_device

    yield Check("precision", "ok", str(decide("auto", pick_device("auto"))))


def disk() -> Iterator[Check]:
    from huggingface_hub import constants

    yield _room("disk for runs", Path("runs"), RUN_ROOM, "myna train RECIPE --out /a/bigger/disk/NAME")
    cache = Path(constants.HF_HUB_CACHE)
    yield _room("disk for the hub cache", cache, MODEL_ROOM, "export HF_HOME=/a/bigger/disk/huggingface")


def _room(name: str, folder: Path, wanted: float, hint: str) -> Check:
    there = next(part for part in (folder.absolute(), *folder.absolute().parents) if part.is_dir())
    free = shutil.disk_usage(there).free
    detail = f"{free / 1e9:.0f} GB free at {folder.absolute()}"
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "warning", f"{there} cannot be written to", hint)
    if free < wanted:
        status: Status = "failed" if free < NO_ROOM else "warning"
        return Check(name, status, f"{detail}, {wanted / 1e9:.0f} GB are wanted", hint)
    return Check(name, "ok", detail)


def memory() -> Iterator[Check]:
    import psutil  # type: ignore[import-untyped]

    free, limit = float(psutil.virtual_memory().available), _limit()
    detail = f"{free / 1e9:.1f} GB free of {psutil.virtual_memory().total / 1e9:.1f}"
    if limit < free:
        free, detail = limit, f"{limit / 1e9:.1f} GB left by the limit of this container or job"
    if free < MEMORY:
        hint = "close other programs, or ask for more where there is a limit: sbatch --mem=64G, docker run --memory=64g"
        yield Check("memory", "warning", f"{detail}; a 3B model wants {MEMORY / 1e9:.0f} GB", hint)
    else:
        yield Check("memory", "ok", detail)


def _limit() -> float:
    """Bytes that the control groups (v2) of this process leave it; infinite where there are none."""
    left, lines = math.inf, CGROUP.read_text().splitlines() if CGROUP.is_file() else []
    for group in [CGROUPS / line.removeprefix("0::/") for line in lines if line.startswith("0::/")]:
        for folder in (group, *group.parents):
            limit, stat = folder / "memory.max", folder / "memory.stat"
            if limit.is_file() and stat.is_file() and (most := limit.read_text().strip()) != "max":
                used = dict(line.split() for line in stat.read_text().splitlines())
                left = min(left, float(most) - float(used["anon"]))  # cached files make room when asked
    return left


def audio() -> Iterator[Check]:
    """A tone through every format and the resampler, in memory."""
    import numpy as np
    import soundfile
    import soxr  # type: ignore[import-untyped]

    from myna.audio.files import FORMATS

    rate = 24_000
    tone = (0.3 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)).astype(np.float32)
    lost = {}
    for suffix, (kind, subtype) in FORMATS.items():
        try:
            file = io.BytesIO()
            soundfile.write(file, tone, rate, format=kind, subtype=subtype)
            file.seek(0)
            heard, _ = soundfile.read(file, dtype="float32")
        except (soundfile.SoundFileError, ValueError) as error:
            lost[suffix] = str(error)
            continue
        if abs(len(heard) - rate) > rate / 5 or not 0.8 < heard.std() / tone.std() < 1.25:
            lost[suffix] = "a tone does not come back as it was written"
    version = f"soundfile {soundfile.__version__}, libsndfile {soundfile.__libsndfile_version__}"
    if lost:
        told = "; ".join(f"{suffix}: {reason}" for suffix, reason in lost.items())
        status: Status = "failed" if ".wav" in lost else "warning"
        yield Check("audio files", status, f"{version}; {told}", "pip install --upgrade --force-reinstall soundfile")
    else:
        yield Check("audio files", "ok", f"{version}: {' '.join(FORMATS)} are written and read back")
    resampled = soxr.resample(tone, rate, 16_000, quality="VHQ")
    if len(resampled) == 16_000 and 0.95 < resampled.std() / tone.std() < 1.05:
        yield Check("resampling", "ok", f"soxr {soxr.__version__}")
    else:
        detail = f"soxr {soxr.__version__}: a second at 24 kHz became {len(resampled)} samples at 16 kHz"
        yield Check("resampling", "failed", detail, "pip install --upgrade --force-reinstall soxr")


def transformers_() -> Iterator[Check]:
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


def hub() -> Iterator[Check]:
    from huggingface_hub import constants

    if constants.is_offline_mode():
        yield Check("hub", "ok", "HF_HUB_OFFLINE is set: only folders and the cache are used")
        return
    outcome = [f"no answer within {PATIENCE:g} s"]

    def knock() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=PATIENCE).close()
        except urllib.error.HTTPError:
            outcome[0] = ""  # a refusal is an answer
        except (OSError, HTTPException, ValueError) as error:
            outcome[0] = str(getattr(error, "reason", error))
        else:
            outcome[0] = ""

    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if reason := outcome[0]:
        hint = "export HF_HUB_OFFLINE=1 to use folders and the cache alone, or set HTTPS_PROXY or HF_ENDPOINT"
        yield Check("hub", "warning", f"{constants.ENDPOINT} cannot be reached: {reason}", hint)
    else:
        yield Check("hub", "ok", f"{constants.ENDPOINT} answers")


def processes() -> Iterator[Check]:
    """What torchrun, accelerate or srun has put into the environment."""
    from myna.train.distributed import ProcessInfo

    there = {name: os.environ[name] for name in PLACE if name in os.environ}
    told = ", ".join(f"{name}={value}" for name, value in there.items())
    start_over = f"unset {' '.join(PLACE)}, then: myna train RECIPE --gpus N"
    if bad := [name for name in PLACE[:3] if not there.get(name, "0").removeprefix("-").isdecimal()]:
        yield Check("processes", "failed", f"{' and '.join(bad)} should be a number: {told}", start_over)
        return
    place, launched = ProcessInfo.find(), "WORLD_SIZE" in there  # srun tells its tasks otherwise, and the rest follows
    absent = [name for name in PLACE[3:] if name not in there and launched and place.world > 1]
    if absent:
        yield Check("processes", "failed", f"several processes, but no {' and '.join(absent)}: {told}", start_over)
    elif max(place.rank, int(there.get("RANK", "0"))) >= place.world:
        yield Check("processes", "failed", f"ranks run from 0 to WORLD_SIZE - 1: {told}", start_over)
    elif place.world > 1:
        detail = f"rank {place.rank} of {place.world} on {place.device('auto')}, as {told or 'Slurm has it'}"
        yield Check("processes", "ok", detail)
    else:
        single = "LOCAL_RANK=-1 means a single process" if there.get("LOCAL_RANK") == "-1" else "a single process"
        yield Check("processes", "ok", f"{single} ({told})" if told else single)


def trackers() -> Iterator[Check]:
    from myna.config import TrainSettings

    asked: tuple[str, ...] = get_args(get_args(TrainSettings.model_fields["trackers"].annotation)[0])
    told = []
    for name in asked:
        if util.find_spec(name) is None:
            told.append(f"{name} absent (pip install {name})")
        else:
            importlib.import_module(name)
            told.append(f"{name} {metadata.version(name)}")
    yield Check("trackers", "ok", ", ".join(told))


class Patient:
    """The model asked about, opened once. Nothing is ever downloaded for a check-up."""

    def __init__(self, source: str) -> None:
        self.source = source

    @cached_property
    def family(self) -> Any:
        from myna.models import open_family

        with _offline():
            return open_family(self.source)


def model_(patient: Patient) -> Iterator[Check]:
    """Configuration and tokenizer, each by itself and with one another."""
    try:
        family = patient.family
    except ModelError as error:
        if not _not_cached(error):
            raise
        detail = f"{patient.source} is no folder here and not in the hub cache, so it was not looked at"
        yield Check("model", "warning", detail, f"hf download {patient.source}")
        return
    if not family.has_weights:
        hint = "myna doctor --model FOLDER, or the hub name of a checkpoint"
        yield Check("model", "failed", f"{patient.source} is a configuration without weights", hint)
        return
    yield Check("model", "ok", f"{patient.source}: {family.name}, configuration and tokenizer agree")


def tokenizer(patient: Patient) -> Iterator[Check]:
    words = patient.family.tokenizer
    for sentence in SENTENCES:
        ids = words.encode(sentence, add_special_tokens=False)
        back = words.decode(ids, clean_up_tokenization_spaces=False)
        if back != sentence:
            detail = f"{sentence!r} comes back as {back!r}"
            yield Check("tokenizer", "failed", detail, FETCH_AGAIN)
            return
    yield Check("tokenizer", "ok", f"{len(words)} tokens; Arabic and Vietnamese come back as they went in")


def weights(patient: Patient) -> Iterator[Check]:
    """Names and shapes of every tensor; reads headers and no tensor."""
    yield Check("weights", "ok", patient.family.check_weights())


def codec(patient: Patient) -> Iterator[Check]:
    """A second of noise there and, of a model that speaks, back."""
    import numpy as np

    try:
        with _offline():
            coder: Any = patient.family.load_encoder()
    except ModelError as error:
        if not _not_cached(error):
            raise
        yield Check("codec", "warning", f"not looked at: {error.what}", error.hint)
        return
    frames = int(coder.frame_rate)
    noise = 0.1 * np.random.default_rng(0).standard_normal((1, frames * coder.hop), dtype=np.float32)
    codes = coder.encode(noise)[0]
    if not hasattr(coder, "decode"):
        whole = codes.shape == (frames, coder.codebooks)
        detail = f"a second of noise is {len(codes)} frames of {coder.codebooks} features"
        yield Check("features", "ok", detail) if whole else Check("features", "failed", detail, FETCH_AGAIN)
        return
    heard = coder.decode(codes)
    detail = f"a second of noise is {len(codes)} frames of {coder.codebooks} codes and {len(heard)} samples again"
    if codes.shape != (frames, coder.codebooks) or len(heard) != frames * coder.hop or not np.isfinite(heard).all():
        yield Check("codec", "failed", detail, FETCH_AGAIN)
    else:
        yield Check("codec", "ok", detail)


MACHINE: tuple[tuple[Probe, str], ...] = (
    (python, "packaging"),
    (packages, "packaging"),
    (torch_, "torch"),
    (gpu, "torch"),
    (precision, "torch"),
    (disk, "huggingface-hub"),
    (memory, "psutil"),
    (audio, "soundfile soxr"),
    (transformers_, "transformers"),
    (hub, "huggingface-hub"),
    (processes, "accelerate"),
    (trackers, "tensorboard wandb trackio"),
)
"""Each probe with the packages it stands on."""
MODEL: tuple[Probe, ...] = (tokenizer, weights, codec)


@contextmanager
def _offline() -> Iterator[None]:
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _not_cached(error: ModelError) -> bool:
    from huggingface_hub.errors import LocalEntryNotFoundError

    return isinstance(error.__cause__, LocalEntryNotFoundError)


def show(checks: Iterator[Check], console: Any) -> list[Check]:
    """Print each check as it comes, with its hint below."""
    from rich.table import Table
    from rich.text import Text

    if isinstance(console.file, io.TextIOWrapper):
        console.file.reconfigure(errors="replace")  # an old encoding is no reason to stop
    shown = []
    for check in checks:
        mark, plain, colour = MARKS[check.status]
        line = Table.grid(padding=(0, 1))
        line.add_column(width=1)
        line.add_column(width=22)
        line.add_column(overflow="fold")
        line.add_row(
            Text(mark if console.encoding.startswith("utf") else plain, colour),
            Text(check.name, "bold"),
            Text(check.detail),
        )
        if check.hint:
            line.add_row("", "", Text(f"→ {check.hint}", colour))
        console.print(line)
        shown.append(check)
    return shown
