"""Checks of `myna doctor`: software, hardware and a model.

A broken machine must not stop them, so nothing beyond the standard library is imported before a check needs it.
"""

from __future__ import annotations

import importlib
import io
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
from http.client import HTTPException
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from myna.core.check import Check, CheckFunction, CheckStatus, run_check
from myna.core.errors import ModelError

if TYPE_CHECKING:
    from myna.models.base import Family

HUB_TIMEOUT = 3.0
"""Seconds to wait for the hub; a name server that does not answer may block much longer."""
MODEL_BYTES, RUN_BYTES, LEAST_BYTES = 15e9, 5e9, 1e9
"""Bytes on disk for the 3B model with its codec, for a LoRA run with three checkpoints, and at the very least."""
MEMORY_BYTES = 8e9
"""Main memory in bytes below which loading a 3B model may fail."""
CUDA_TORCH = "pip install --force-reinstall torch, in the build that https://pytorch.org/get-started names for the GPU"
CPU_TORCH = "install the CPU build of torch: pytorch.org/get-started has the line for this machine"
TRITON = "pip install triton (on Linux), with a card of compute capability 8.0 or later"
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NVIDIA = Path("/proc/driver/nvidia/version")
FETCH_AGAIN = "hf download OWNER/NAME --force-download, and give --model that name"
SENTENCES = ("صباح الخير، كيف حالك اليوم؟", "Chào buổi sáng, hôm nay bạn có khỏe không?")


def check_python() -> Iterator[Check]:
    from packaging.specifiers import SpecifierSet

    version, wanted = platform.python_version(), metadata.metadata("myna")["Requires-Python"]
    detail, hint = f"{version} at {sys.executable}", "python3.11 -m venv .venv, and install Myna there"
    fits = SpecifierSet(wanted).contains(version, prereleases=True)
    yield (
        Check("python", "passed", detail) if fits else Check("python", "failed", f"{detail}; Myna needs {wanted}", hint)
    )


def check_packages() -> Iterator[Check]:
    """Compare the installed packages with the requirements in Myna's metadata."""
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
    failed = Check("packages", "failed", "; ".join(wrong), f"pip install {' '.join(install)}")
    yield failed if wrong else Check("packages", "passed", ", ".join(fine))


def check_audio_files() -> Iterator[Check]:
    """Write and read a tone in every format, and resample it, in memory."""
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
    install = "pip install --upgrade --force-reinstall"
    if lost:
        listing = "; ".join(f"{suffix}: {reason}" for suffix, reason in lost.items())
        status: CheckStatus = "failed" if ".wav" in lost else "warning"
        yield Check("audio files", status, f"{version}; {listing}", f"{install} soundfile")
    else:
        yield Check("audio files", "passed", f"{version}: {' '.join(AUDIO_FORMATS)} are written and read back")
    resampled, version = soxr.resample(tone, rate, 16_000, quality="VHQ"), f"soxr {soxr.__version__}"
    if len(resampled) == 16_000 and 0.95 < resampled.std() / tone.std() < 1.05:
        yield Check("resampling", "passed", version)
    else:
        detail = f"{version}: a second at 24 kHz became {len(resampled)} samples at 16 kHz"
        yield Check("resampling", "failed", detail, f"{install} soxr")


def check_transformers() -> Iterator[Check]:
    """Import transformers. It imports torchaudio wherever that is installed, and fails with it."""
    if util.find_spec("torchaudio") is None:
        yield Check("torchaudio", "passed", "absent; Myna does not need it")
    else:
        try:
            torchaudio = importlib.import_module("torchaudio")
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            detail = f"it is installed, but `import torchaudio` fails, and transformers with it: {error}"
            yield Check("torchaudio", "failed", detail, "pip uninstall torchaudio")
            return
        yield Check("torchaudio", "passed", torchaudio.__version__)

    from myna import models

    classes: list[type] = []
    for family in pkgutil.iter_modules(models.__path__):
        if family.ispkg:  # a model family, which has a codec.py
            codec = importlib.import_module(f"myna.models.{family.name}.codec")
            classes += codec.codec_classes() if hasattr(codec, "codec_classes") else []
    yield Check("codec classes", "passed", ", ".join(kind.__name__ for kind in classes))


def check_hub() -> Iterator[Check]:
    from huggingface_hub import constants

    if constants.is_offline_mode():
        yield Check("hub", "passed", "HF_HUB_OFFLINE is set: only folders and the cache are used")
        return
    outcome = [f"no answer within {HUB_TIMEOUT:g} s"]

    def ask() -> None:
        try:
            request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
            urllib.request.urlopen(request, timeout=HUB_TIMEOUT).close()
            outcome[0] = ""
        except (OSError, HTTPException, ValueError) as error:
            refused = isinstance(error, urllib.error.HTTPError)  # which is an answer
            outcome[0] = "" if refused else str(getattr(error, "reason", error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT)
    if reason := outcome[0]:
        hint = "export HF_HUB_OFFLINE=1 to use folders and the cache alone, or set HTTPS_PROXY or HF_ENDPOINT"
        yield Check("hub", "warning", f"{constants.ENDPOINT} cannot be reached: {reason}", hint)
    else:
        yield Check("hub", "passed", f"{constants.ENDPOINT} answers")


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
    yield Check("trackers", "passed", ", ".join(listing))


def check_whisper() -> Iterator[Check]:
    from myna.core.io import whisper_folder
    from myna.listen.asr import INSTALL, REQUIRED_FILES

    folder = whisper_folder()
    if util.find_spec("faster_whisper") is None:
        yield Check("whisper", "warning", "faster-whisper is absent, which `--asr base` needs", INSTALL)
    elif not all((folder / file).is_file() for file in REQUIRED_FILES):
        detail = f"none at {folder}: without a network `--asr` needs the folder of one"
        yield Check("whisper", "warning", detail, "myna setup metrics")
    else:
        yield Check("whisper", "passed", f"base at {folder}")


def check_scorers() -> Iterator[Check]:
    """Look for what `myna evaluate` scores voices and quality with."""
    from myna.core.io import ecapa_file
    from myna.listen.mos import INSTALL_DISTILLMOS, INSTALL_DNSMOS

    file = ecapa_file()
    lacking = {} if file.is_file() else {f"the speaker encoder {file}": "myna setup metrics"}
    packages = {"distillmos": (INSTALL_DISTILLMOS,), "speechmos": INSTALL_DNSMOS}
    lacking |= {name: " && ".join(how) for name, how in packages.items() if util.find_spec(name) is None}
    if lacking:
        yield Check("scorers", "warning", f"absent: {', '.join(lacking)}", "; ".join(lacking.values()))
    else:
        yield Check("scorers", "passed", f"{', '.join(packages)}, and the speaker encoder {file}")


def check_curation_models() -> Iterator[Check]:
    """Look for what `myna curate` listens with."""
    from myna.curate.models import LOST, missing_models, models_folder
    from myna.curate.settings import ListenSettings
    from myna.listen.models import FETCH_COMMAND, INSTALL

    folder = models_folder(ListenSettings())
    if lacking := missing_models(ListenSettings()):
        hint = f"{INSTALL} && {FETCH_COMMAND}"
        yield Check("curation models", "warning", f"in {folder}: without {'; without '.join(lacking)}", hint)
    else:
        yield Check("curation models", "passed", f"{', '.join(LOST)}: at {folder}")


def check_torch() -> Iterator[Check]:
    import torch

    cuda, rocm = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "CPU"
    detail = f"{torch.__version__}, {build} build"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        works = torch.cuda.is_available()
    if build == "CPU" and NVIDIA.exists():
        yield Check("torch", "warning", f"{detail}, but there is an NVIDIA driver: the GPUs lie idle", CUDA_TORCH)
    elif build == "CPU" or works:
        yield Check("torch", "passed", detail)
    elif os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Check("torch", "warning", f"{detail}; CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    else:
        reason = str(caught[0].message).splitlines()[0] if caught else "no GPU answers"
        detail += f" without a working driver ({reason}): training would run on the CPU"
        smi = "rocm-smi" if rocm else "nvidia-smi"
        hint = f"{smi} shows whether the driver works: if not, install or update it; if there is no GPU, {CPU_TORCH}"
        yield Check("torch", "warning", detail, hint)


def check_gpu() -> Iterator[Check]:
    import torch

    from myna.core.device import why_no_triton

    if not torch.cuda.is_available():
        here = "Apple MPS" if torch.backends.mps.is_available() else "none: the CPU will do for tiny models and tests"
        yield Check("gpu", "passed", here)
        return
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        detail = f"{card.name}, {total / 2**30:.1f} GiB of memory ({free / 2**30:.1f} free), "
        detail += f"compute capability {card.major}.{card.minor}"
        if not torch.version.hip and not _built_for(card.major, card.minor, torch.cuda.get_arch_list()):
            detail += f", which this torch has no kernels for ({', '.join(torch.cuda.get_arch_list())})"
            yield Check(f"gpu {number}", "failed", detail, CUDA_TORCH)
        elif free < total / 2:
            yield Check(f"gpu {number}", "warning", f"{detail}: most of it is taken", "nvidia-smi shows who holds it")
        elif reason := why_no_triton(number):
            detail += f". {reason}: speaking and training take plain paths there, which are slower"
            yield Check(f"gpu {number}", "warning", detail, TRITON)
        else:
            yield Check(f"gpu {number}", "passed", detail)


def _built_for(major: int, minor: int, kernels: list[str]) -> bool:
    """Whether kernels run on a card. Machine code runs on later cards of its generation, PTX (`compute_..`) on all."""
    for kernel in kernels:
        kind, _, digits = kernel.partition("_")
        number = int("".join(digit for digit in digits if digit.isdigit()) or 0)
        generation, step = divmod(number, 10)
        if (generation == major and step <= minor) or (kind == "compute" and (generation, step) <= (major, minor)):
            return True
    return False


def check_precision() -> Iterator[Check]:
    from myna.core.device import pick_device
    from myna.train.precision import choose_precision

    yield Check("precision", "passed", str(choose_precision("auto", pick_device("auto"))))


def check_disk() -> Iterator[Check]:
    from huggingface_hub import constants

    yield _disk_space("disk for runs", Path("runs"), RUN_BYTES, "myna train RECIPE --out /a/bigger/disk/NAME")
    elsewhere = "export HF_HOME=/a/bigger/disk/huggingface"
    yield _disk_space("disk for the hub cache", Path(constants.HF_HUB_CACHE), MODEL_BYTES, elsewhere)


def _disk_space(name: str, folder: Path, wanted: float, hint: str) -> Check:
    there = next(part for part in (folder.absolute(), *folder.absolute().parents) if part.is_dir())
    free = shutil.disk_usage(there).free
    detail = f"{free / 1e9:.0f} GB free at {folder.absolute()}"
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "warning", f"{there} cannot be written to", hint)
    if free < wanted:
        status: CheckStatus = "failed" if free < LEAST_BYTES else "warning"
        return Check(name, status, f"{detail}, {wanted / 1e9:.0f} GB are wanted", hint)
    return Check(name, "passed", detail)


def check_memory(root: Path = Path("/")) -> Iterator[Check]:
    import psutil  # type: ignore[import-untyped]

    from myna.core.device import cgroups

    free = psutil.virtual_memory().available
    detail = f"{free / 1e9:.1f} GB free of {psutil.virtual_memory().total / 1e9:.1f}"
    left = min((group.limit - group.used for group in cgroups(root)), default=free)
    if left < free:
        free, detail = left, f"{left / 1e9:.1f} GB left by the limit of this container or job"
    if free < MEMORY_BYTES:
        hint = "close other programs, or ask for more where there is a limit: sbatch --mem=64G, docker run --memory=64g"
        yield Check("memory", "warning", f"{detail}; a 3B model wants {MEMORY_BYTES / 1e9:.0f} GB", hint)
    else:
        yield Check("memory", "passed", detail)


def check_processes() -> Iterator[Check]:
    """Check the environment variables of torchrun, accelerate or srun."""
    from myna.train.distributed import ProcessInfo

    variables = {name: os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ}
    listing = ", ".join(f"{name}={value}" for name, value in variables.items())
    start_over = f"unset {' '.join(LAUNCHER_VARIABLES)}, then: myna train RECIPE --gpus N"
    if bad := [name for name in LAUNCHER_VARIABLES[:3] if not variables.get(name, "0").removeprefix("-").isdecimal()]:
        yield Check("processes", "failed", f"{' and '.join(bad)} should be a number: {listing}", start_over)
        return
    process = ProcessInfo.from_environment()
    launched = "WORLD_SIZE" in variables  # srun has its own variables
    absent = [name for name in LAUNCHER_VARIABLES[3:] if name not in variables and launched and process.world_size > 1]
    if absent:
        yield Check("processes", "failed", f"several processes, but no {' and '.join(absent)}: {listing}", start_over)
    elif max(process.rank, int(variables.get("RANK", "0"))) >= process.world_size:
        yield Check("processes", "failed", f"ranks run from 0 to WORLD_SIZE - 1: {listing}", start_over)
    elif process.world_size > 1:
        rank = f"rank {process.rank} of {process.world_size}"
        yield Check("processes", "passed", f"{rank} on {process.device('auto')}, as {listing or 'Slurm has it'}")
    else:
        single = "LOCAL_RANK=-1 means a single process" if variables.get("LOCAL_RANK") == "-1" else "a single process"
        yield Check("processes", "passed", f"{single} ({listing})" if listing else single)


def check_model(source: str, opened: list[Family]) -> Iterator[Check]:
    """Open the model, into `opened`: its configuration and tokenizer must be valid and agree."""
    from myna.models import open_family

    try:
        with _offline():
            family = open_family(source)
    except ModelError as error:
        if not _not_cached(error):
            raise
        detail = f"{source} is no folder here and not in the hub cache, so it was not looked at"
        yield Check("model", "warning", detail, f"hf download {source}")
        return
    if not family.has_weights:
        hint = "myna doctor --model FOLDER, or the hub name of a checkpoint"
        yield Check("model", "failed", f"{source} is a configuration without weights", hint)
        return
    opened.append(family)
    yield Check("model", "passed", f"{source}: {family.name}, configuration and tokenizer agree")


def check_model_tokenizer(family: Family) -> Iterator[Check]:
    tokenizer = family.tokenizer
    for sentence in SENTENCES:
        ids = tokenizer.encode(sentence, add_special_tokens=False)
        back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if back != sentence:
            detail = f"{sentence!r} comes back as {back!r}"
            yield Check("tokenizer", "failed", detail, FETCH_AGAIN)
            return
    yield Check("tokenizer", "passed", f"{len(tokenizer)} tokens; Arabic and Vietnamese text survives it unchanged")


def check_model_weights(family: Family) -> Iterator[Check]:
    """Check names and shapes of all tensors, from the headers of the files."""
    yield Check("weights", "passed", family.check_weights())


def check_model_codec(family: Family) -> Iterator[Check]:
    """Encode a second of noise and, with a codec, decode it."""
    import numpy as np

    try:
        with _offline():
            encoder: Any = family.load_encoder()
    except ModelError as error:
        if not _not_cached(error):
            raise
        yield Check("codec", "warning", f"not looked at: {error.what}", error.hint)
        return
    frames = int(encoder.frame_rate)
    noise = 0.1 * np.random.default_rng(0).standard_normal((1, frames * encoder.hop), dtype=np.float32)
    codes = encoder.encode(noise)[0]
    name, detail = "features", f"a second of noise is {len(codes)} frames of {encoder.codebooks} features"
    is_whole = codes.shape == (frames, encoder.codebooks)
    if hasattr(encoder, "decode"):
        decoded = encoder.decode(codes)
        name, detail = "codec", f"{detail.removesuffix('features')}codes and {len(decoded)} samples again"
        is_whole &= len(decoded) == frames * encoder.hop and bool(np.isfinite(decoded).all())
    yield Check(name, "passed", detail) if is_whole else Check(name, "failed", detail, FETCH_AGAIN)


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


def run_doctor(model: str | None = None) -> Iterator[Check]:
    """Yield the result of every check as soon as it is there; those of the model if one is named."""
    broken = False
    for check in MACHINE_CHECKS:
        for result in _run(check):
            broken |= check.run is check_transformers and result.status == "failed"
            yield result
    if model is None:
        return
    if broken:
        hint = f"mend what failed above, then: myna doctor --model {model}"
        yield Check("model", "failed", "not looked at, since transformers does not work here", hint)
        return
    opened: list[Family] = []
    yield from _run(_needs("transformers", check_model), model, opened)
    for family in opened:
        for function in (check_model_tokenizer, check_model_weights, check_model_codec):
            yield from _run(_needs("transformers", function), family)


def _run(check: CheckFunction, *arguments: Any) -> Iterator[Check]:
    for result in run_check(check, *arguments):
        assert result.hint or result.status == "passed", f"{result.name} has no hint"
        yield result


def _needs(packages: str, function: Callable[..., Iterator[Check]]) -> CheckFunction:
    """Name a check for its function; `packages` are suspected if it raises an unexpected exception."""
    name = function.__name__.removeprefix("check_").removeprefix("model_").replace("_", " ")
    hint = f"pip install --force-reinstall --no-deps {packages}; if it stays, report this with `myna doctor --json`"
    return CheckFunction(name, function, hint)


MACHINE_CHECKS: tuple[CheckFunction, ...] = (
    _needs("packaging", check_python),
    _needs("packaging", check_packages),
    _needs("torch", check_torch),
    _needs("torch", check_gpu),
    _needs("torch", check_precision),
    _needs("huggingface-hub", check_disk),
    _needs("psutil", check_memory),
    _needs("soundfile soxr", check_audio_files),
    _needs("transformers", check_transformers),
    _needs("huggingface-hub", check_hub),
    _needs("accelerate", check_processes),
    _needs("tensorboard wandb trackio", check_trackers),
    _needs("transformers faster-whisper", check_whisper),
    _needs("distillmos speechmos", check_scorers),
    _needs("onnxruntime scipy", check_curation_models),
)
