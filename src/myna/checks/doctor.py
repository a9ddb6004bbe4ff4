"""All checks in order. A broken machine must not stop them, so nothing beyond the standard library is imported before a
check needs it, and an exception that no check foresaw is a finding like any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from myna.checks import environment, hardware
from myna.checks import model as model_checks
from myna.checks.check import Check, Probe
from myna.core.errors import MynaError

MACHINE_CHECKS: tuple[tuple[Probe, str], ...] = (
    (environment.check_python, "packaging"),
    (environment.check_packages, "packaging"),
    (hardware.check_torch, "torch"),
    (hardware.check_gpu, "torch"),
    (hardware.check_precision, "torch"),
    (hardware.check_disk, "huggingface-hub"),
    (hardware.check_memory, "psutil"),
    (environment.check_audio_files, "soundfile soxr"),
    (environment.check_transformers, "transformers"),
    (environment.check_hub, "huggingface-hub"),
    (hardware.check_processes, "accelerate"),
    (environment.check_trackers, "tensorboard wandb trackio"),
)
"""Each check with the packages it stands on."""
MODEL_CHECKS: tuple[Probe, ...] = (
    model_checks.check_model_tokenizer,
    model_checks.check_model_weights,
    model_checks.check_model_codec,
)


def run_checks(model: str | None = None) -> Iterator[Check]:
    """Every check, as soon as it is done; those of the model where one is named."""
    broken = False
    for probe, package in MACHINE_CHECKS:
        found = _guarded(probe, package)
        yield from found
        broken |= probe is environment.check_transformers and any(check.status == "failed" for check in found)
    if model is None:
        return
    if broken:
        hint = f"mend what failed above, then: myna doctor --model {model}"
        yield Check("model", "failed", "not looked at, since transformers does not work here", hint)
        return
    checked = model_checks.CheckedModel(model)
    opened = _guarded(model_checks.check_model, "transformers", checked)
    yield from opened
    if all(check.status == "ok" for check in opened):
        for probe in MODEL_CHECKS:
            yield from _guarded(probe, "transformers", checked)


def _guarded(probe: Probe, package: str, *arguments: Any) -> list[Check]:
    """What a probe finds, come what may; `package` is what to suspect when it comes to the worst."""
    found, name = [], probe.__name__.removeprefix("check_").removeprefix("model_").replace("_", " ")
    try:
        for check in probe(*arguments):
            found.append(check)  # noqa: PERF402 - one by one, to keep those before an exception
    except MynaError as error:
        found.append(Check(name, "failed", error.what, error.hint))
    # Broad on purpose, and only here: this is for machines on which anything may be broken, and has to go on to
    # the next check with whatever this one ran into as its finding.
    except Exception as error:  # noqa: BLE001
        hint = f"pip install --force-reinstall --no-deps {package}; if it stays, report this with `myna doctor --json`"
        if isinstance(error, ModuleNotFoundError):
            hint = "pip install myna, which brings what it needs"
        found.append(Check(name, "failed", f"{type(error).__name__}: {error}", hint))
    return found
