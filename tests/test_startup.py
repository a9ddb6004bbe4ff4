"""Packages that a command imports: heavy ones only where they are used, and none that an operating system lacks."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import myna

HEAVY = ("torch", "transformers", "numpy", "rich", "cyclopts", "pydantic", "pyarrow", "peft", "accelerate", "datasets")
CLI = "import sys; sys.argv[0] = 'myna'; from myna.commands import main; main()"
NEEDS_TRITON = (
    "myna.models.cross_entropy_kernel",
    "myna.models.higgs_v2.codec_kernels",
    "myna.models.higgs_v2.decode.cuda",
    "myna.models.higgs_v2.decode.kernels",
    "myna.models.higgs_v2.decode.sampling_kernels",
    "myna.models.higgs_v2.fused.attention_kernels",
    "myna.models.higgs_v2.fused.kernels",
)


def imported_by(code: str, *arguments: str, cwd: Path | None = None) -> tuple[set[str], str]:
    """Packages that a program has imported when it ends (of torch, its parts too), and what it wrote."""
    at_exit = (
        "import atexit, json, sys;"
        "packages = lambda: json.dumps([name for name in sys.modules if '.' not in name or name.startswith('torch.')]);"
        "atexit.register(lambda: print(packages(), file=sys.__stdout__));"
    )
    result = subprocess.run(
        [sys.executable, "-c", at_exit + code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=cwd,
    )
    *lines, modules = result.stdout.strip().splitlines()
    return set(json.loads(modules)), "\n".join(lines) + result.stderr


def test_import_myna_imports_nothing_heavy() -> None:
    modules, output = imported_by("import myna; dir(myna)")
    assert not output.strip()
    assert "myna" in modules and not modules.intersection(HEAVY)
    modules, output = imported_by("import myna; assert callable(myna.train)")
    assert not output.strip()
    assert not modules.intersection({*HEAVY} - {"rich", "cyclopts"})


@pytest.mark.parametrize("arguments", [("--help",), ("speak", "--help"), ("train", "--help"), ("version",)])
def test_help_and_version_do_without_torch(arguments: tuple[str, ...]) -> None:
    modules, output = imported_by(CLI, *arguments)
    assert "Usage" in output or myna.__version__ in output
    assert not modules & {"torch", "transformers", "numpy", "pyarrow"}


def test_a_missing_recipe_is_reported_without_torch(tmp_path: Path) -> None:
    modules, output = imported_by(CLI, "train", "nowhere.yaml", cwd=tmp_path)
    assert "nowhere.yaml" in output and "error" in output
    assert not modules & {"torch", "transformers", "numpy", "pyarrow"}


def test_a_missing_model_is_reported_without_transformers(tmp_path: Path) -> None:
    words = ("speak", "Hello.", "--model", "./nowhere", "--out", "hello.wav")
    modules, output = imported_by(CLI, *words, cwd=tmp_path)
    assert "./nowhere" in output and "error" in output
    assert not modules & {"transformers", "peft", "accelerate", "scipy", "datasets"}


@pytest.mark.slow
def test_speaking_imports_no_training_packages(tmp_path: Path) -> None:
    words = ("speak", "Hi.", "--model", "fledgling", "--max-seconds", "0.2", "--out", "hi.wav")
    modules, output = imported_by(CLI, *words, cwd=tmp_path)
    assert (tmp_path / "hi.wav").is_file(), output
    assert not modules & {"peft", "datasets", "pandas"}


def test_every_module_imports_where_there_is_no_unix() -> None:
    """Windows has no fcntl and no resource, and fewer names in signal and os."""
    names = [module.name for module in pkgutil.walk_packages(myna.__path__, "myna.")]
    names = [name for name in names if name not in (*NEEDS_TRITON, "myna.__main__", "myna.serve.ray_app")]
    absent = ("fcntl", "resource", "grp", "pwd", "termios")
    assert len(names) > 100
    code = (
        "import importlib, os, signal, sys\n"
        # These have builds for Windows, but look for its own modules only there.
        "import torch, transformers, peft, accelerate, datasets, huggingface_hub, soundfile, filelock\n"
        f"sys.modules.update(dict.fromkeys({absent!r}))\n"
        "for name in ('SIGHUP', 'SIGKILL', 'SIGUSR1', 'SIGALRM'): delattr(signal, name)\n"
        "for name in ('fork', 'sysconf', 'getuid', 'sched_getaffinity'): delattr(os, name)\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print('imported')"
    )
    _, output = imported_by(code)
    assert "imported" in output, output
