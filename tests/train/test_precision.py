"""Choice of the precision: devices, rejected settings, and the reason in the message."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch

from myna.core.config import TrainSettings
from myna.core.device import pick_device
from myna.core.errors import ConfigError
from myna.train import precision as precision_module
from myna.train.precision import Precision, PrecisionName, PrecisionSetting, choose_precision, supports_bf16_matmul

CUDA, CPU, MPS = torch.device("cuda"), torch.device("cpu"), torch.device("mps")
NAMES = get_args(PrecisionName)


def never(_: torch.device) -> bool:
    return False


def always(_: torch.device) -> bool:
    return True


@pytest.mark.parametrize(
    ("device", "capability", "probe", "name", "scaler"),
    [
        (CUDA, (7, 5), never, "fp16", True),
        (CUDA, (8, 0), never, "bf16", False),
        (CUDA, (9, 0), never, "bf16", False),
        (CUDA, (12, 0), never, "bf16", False),
        (CPU, None, always, "fp32", False),
        (MPS, None, always, "bf16", False),
        (MPS, None, never, "fp32", False),
    ],
)
def test_auto_follows_the_device(
    device: torch.device,
    capability: tuple[int, int] | None,
    probe: Callable[[torch.device], bool],
    name: str,
    scaler: bool,
) -> None:
    precision = choose_precision("auto", device, capability, probe)
    assert (precision.name, precision.mixed_precision == "fp16") == (name, scaler)
    assert str(precision).startswith(f"{name}: ")


def test_every_setting_can_be_decided() -> None:
    setting = TrainSettings.model_fields["precision"].annotation
    assert set(get_args(setting)) == {"auto", *NAMES}
    for asked in get_args(setting):
        assert choose_precision(asked, CUDA, (9, 0)).name == ("bf16" if asked == "auto" else asked)


@pytest.mark.parametrize("name", NAMES)
def test_trainable_weights_are_fp32_unless_all_is_fp16(name: PrecisionName) -> None:
    precision = Precision(name, "a test")
    pure = name == "pure-fp16"
    assert precision.compute_dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}.get(name, torch.float16)
    assert precision.trainable_dtype == (torch.float16 if pure else torch.float32)
    assert precision.mixed_precision == (name if name in ("bf16", "fp16") else "no")
    assert precision.may_overflow == (name in ("fp16", "pure-fp16"))
    assert ("WARNING" in str(precision)) == pure


def test_bf16_on_turing_is_refused_with_what_to_use() -> None:
    with pytest.raises(ConfigError, match=r"train\.precision=fp16"):
        choose_precision("bf16", CUDA, (7, 5))


@pytest.mark.parametrize("asked", ["fp16", "pure-fp16"])
@pytest.mark.parametrize("device", [CPU, MPS])
def test_fp16_off_cuda_is_refused(asked: PrecisionSetting, device: torch.device) -> None:
    with pytest.raises(ConfigError, match=r"(?s)CUDA card.*train\.precision=fp32"):
        choose_precision(asked, device, probe=always)


def test_bf16_on_mps_goes_by_the_probe() -> None:
    assert choose_precision("bf16", MPS, probe=always).name == "bf16"
    with pytest.raises(ConfigError, match=r"train\.precision=fp32"):
        choose_precision("bf16", MPS, probe=never)
    assert choose_precision("fp32", MPS, probe=always).name == "fp32"


@pytest.mark.parametrize(("has", "said"), [(True, "has bf16 instructions"), (False, "will be slow")])
def test_bf16_on_a_cpu_says_what_to_expect(monkeypatch: pytest.MonkeyPatch, has: bool, said: str) -> None:
    monkeypatch.setattr(precision_module, "cpu_has_bf16", lambda: has)
    assert said in str(choose_precision("bf16", CPU))


def test_the_probe_believes_results_and_not_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    assert supports_bf16_matmul(CPU)
    assert not supports_bf16_matmul(torch.device("meta"))  # no numbers come out
    wrong = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: wrong(a, b) * (2 if a.dtype == torch.bfloat16 else 1))
    assert not supports_bf16_matmul(CPU)


def test_a_device_that_is_not_there_is_refused() -> None:
    assert pick_device("cpu") == CPU
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="not available"):
            pick_device("cuda")
