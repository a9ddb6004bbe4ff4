"""The doctor on this machine as it is, and on machines and models broken on purpose."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata, util
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from huggingface_hub import constants
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from myna.checks import doctor
from myna.checks.doctor import run_doctor
from myna.core import device
from myna.core.check import Check, CheckFunction
from myna.core.io import ECAPA_FILE
from myna.listen.asr import REQUIRED_FILES
from myna.models import convert_checkpoint, save_tiny_model
from myna.models.higgs_v2.tiny import save_tiny_codec
from tests.command_line import run_command

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def bare(monkeypatch: Patch) -> None:
    """No launcher's variables, whatever started the tests."""
    for name in (*doctor.LAUNCHER_VARIABLES, "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("doctor") / "model")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A model to break."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


def of_model(source: object) -> dict[str, Check]:
    """The checks of a model alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "MACHINE_CHECKS", ())
        return {check.name: check for check in run_doctor(str(source))}


def only(function: Callable[[], Iterator[Check]]) -> Check:
    (check,) = function()
    return check


def run(*words: object) -> tuple[int, str]:
    result = run_command(["doctor", *map(str, words)])
    return result.exit_code, result.stdout


# The command


def test_json_has_the_schema_and_nothing_is_wrong_with_a_sound_model(sound: Path) -> None:
    status, output = run("--json", "--model", sound)
    tree = json.loads(output)
    assert tree.keys() == {"checks"}
    for check in tree["checks"]:
        assert check.keys() == {field.name for field in fields(Check)}
        assert check["status"] in ("passed", "warning", "failed") and check["message"]
        assert check["hint"] or check["status"] == "passed"
    names = [check["name"] for check in tree["checks"]]
    assert len(set(names)) == len(names)
    wanted = {"python", "packages", "torch", "precision", "disk for runs", "disk for the hub cache", "memory"}
    wanted |= {"whisper", "scorers", "curation models"}
    wanted |= {"audio files", "resampling", "torchaudio", "codec classes", "hub", "processes", "trackers"}
    assert wanted | {"model", "tokenizer", "weights", "codec"} <= set(names)
    assert not [check for check in tree["checks"] if check["status"] == "failed"]
    assert status == 0


def test_models_that_listen_have_a_line_each_with_the_command_that_fetches_them(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("myna.core.io.user_folder", lambda _: tmp_path)
    monkeypatch.setattr(util, "find_spec", lambda _: object())
    whisper, scorers, curation = map(only, (doctor.check_whisper, doctor.check_scorers, doctor.check_curation_models))
    for check, command in ((whisper, "metrics"), (scorers, "metrics"), (curation, "curation")):
        assert check.status == "warning" and str(tmp_path) in check.message and f"myna setup {command}" in check.hint
    (tmp_path / "whisper-base").mkdir()
    for name in REQUIRED_FILES:
        (tmp_path / "whisper-base" / name).touch()
    (tmp_path / "ecapa").mkdir()
    (tmp_path / "ecapa" / ECAPA_FILE).touch()
    assert only(doctor.check_whisper).status == only(doctor.check_scorers).status == "passed"
    monkeypatch.setattr(util, "find_spec", lambda _: None)
    assert "faster-whisper is absent" in only(doctor.check_whisper).message
    assert "distillmos" in only(doctor.check_scorers).hint


def test_people_see_marks_and_hints(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    status, output = run("-m", folder)
    assert status == 1
    assert re.search(r"^✓ python +3\.", output, re.MULTILINE)
    assert re.search(r"^✗ weights ", output, re.MULTILINE)
    assert re.search(r"^ +→ give the folder that holds the weights", output, re.MULTILINE)


def test_python_m_myna_is_the_command_and_an_old_encoding_does_not_stop_it(folder: Path) -> None:
    (folder / "config.json").unlink()
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "myna", "doctor", "--model", str(folder)]
    result = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert result.returncode == 1
    assert b"+ python" in result.stdout and b"x model" in result.stdout
    assert b"Traceback" not in result.stderr


def test_an_unexpected_exception_is_a_failed_check(monkeypatch: Patch) -> None:
    def stumbles() -> Iterator[Check]:
        yield Check("first half", "passed", "fine")
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(
        doctor, "MACHINE_CHECKS", (doctor._needs("stilts", stumbles), doctor._needs("torch", doctor.check_precision))
    )
    first, second, third = run_doctor()
    assert (first.name, first.status) == ("first half", "passed")
    assert (second.name, second.status, second.message) == ("stumbles", "failed", "ZeroDivisionError: by zero")
    assert "pip install --force-reinstall --no-deps stilts" in second.hint
    assert third.name == "precision"


def test_it_goes_on_without_torch(monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(
        doctor,
        "MACHINE_CHECKS",
        [doctor._needs("x", one) for one in (doctor.check_torch, doctor.check_gpu, doctor.check_audio_files)],
    )
    found = {check.name: check for check in run_doctor()}
    assert found["torch"].status == found["gpu"].status == "failed"
    assert "import of torch halted" in found["torch"].message and "pip install myna" in found["torch"].hint
    assert found["audio files"].status == "passed"


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    heavy = (
        "import sys, myna.checks.doctor; print(sorted({'torch', 'numpy', 'soundfile', 'pydantic'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_every_failed_check_has_a_hint() -> None:
    with pytest.raises(AssertionError, match="has no hint"):
        list(doctor._run(CheckFunction("x", lambda: Check("x", "warning", "hm"))))


# The machine


def test_python_and_packages_are_those_of_the_metadata(monkeypatch: Patch) -> None:
    assert only(doctor.check_python).status == only(doctor.check_packages).status == "passed"
    assert f"numpy {np.__version__}" in only(doctor.check_packages).message
    assert "pytest" not in only(doctor.check_packages).message, "extras are nobody's duty"
    monkeypatch.setattr(metadata, "requires", lambda _: ["numpy>=99", "nonesuch>=1", "rich>=1"])
    check = only(doctor.check_packages)
    assert check.status == "failed"
    assert f"numpy is {np.__version__}, Myna needs >=99; nonesuch is absent, Myna needs >=1" == check.message
    assert check.hint == "pip install 'numpy>=99' 'nonesuch>=1'"
    monkeypatch.setattr("platform.python_version", lambda: "3.10.1")
    assert "Myna needs >=3.11" in only(doctor.check_python).message


@pytest.fixture
def cuda(monkeypatch: Patch) -> Iterator[Callable[..., None]]:
    """Pretend to be a CUDA build of torch, with cards or without."""

    def pretend(
        *cards: tuple[str, int, int], free: float = 0.9, kernels: str = "sm_80 sm_90 compute_90", triton: bool = True
    ) -> None:
        def is_available() -> bool:
            if not cards:
                warnings.warn("CUDA initialization: the driver is too old\nmore", stacklevel=1)
            return bool(cards)

        def properties(number: int) -> Any:
            name, major, minor = cards[number]
            return SimpleNamespace(name=name, major=major, minor=minor)

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: cards[0][1:])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free * 80 * 2**30), 80 * 2**30))
        monkeypatch.setattr(torch.cuda, "get_arch_list", kernels.split)
        monkeypatch.setattr(device, "find_spec", lambda _: triton or None)
        device.why_no_triton.cache_clear()

    yield pretend
    device.why_no_triton.cache_clear()


def test_a_cuda_build_without_a_driver_is_a_warning(cuda: Callable[..., None], monkeypatch: Patch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cuda()
    check = only(doctor.check_torch)
    assert check.status == "warning"
    assert "CUDA 13.0 build without a working driver (CUDA initialization: the driver is too old)" in check.message
    assert "nvidia-smi" in check.hint and "CPU build of torch" in check.hint
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert only(doctor.check_torch).hint == "unset CUDA_VISIBLE_DEVICES"


def test_a_cpu_build_beside_a_driver_is_a_warning(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "none")
    assert only(doctor.check_torch) == Check("torch", "passed", f"{torch.__version__}, CPU build")
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path)
    check = only(doctor.check_torch)
    assert check.status == "warning" and "the GPUs lie idle" in check.message


def test_each_gpu_is_named(cuda: Callable[..., None]) -> None:
    cuda(("NVIDIA H200", 9, 0), ("NVIDIA RTX A6000", 8, 6))
    assert list(doctor.check_gpu()) == [
        Check("gpu 0", "passed", "NVIDIA H200, 80.0 GiB of memory (72.0 free), compute capability 9.0"),
        Check("gpu 1", "passed", "NVIDIA RTX A6000, 80.0 GiB of memory (72.0 free), compute capability 8.6"),
    ]
    assert only(doctor.check_precision).message.startswith("bf16: CUDA capability 9.0 has bf16")


def test_a_gpu_that_is_taken_is_a_warning_and_one_without_kernels_a_failure(cuda: Callable[..., None]) -> None:
    cuda(("NVIDIA H200", 9, 0), free=0.2)
    check = only(doctor.check_gpu)
    assert check.status == "warning" and "nvidia-smi" in check.hint
    cuda(("Tesla V100", 7, 0))
    check = only(doctor.check_gpu)
    assert check.status == "failed" and "no kernels for (sm_80, sm_90, compute_90)" in check.message


def test_a_gpu_without_triton_is_a_warning(cuda: Callable[..., None]) -> None:
    cuda(("Tesla T4", 7, 5), kernels="sm_75")
    check = only(doctor.check_gpu)
    assert check.status == "warning" and "Triton needs compute capability 8.0: speaking and training" in check.message
    cuda(("NVIDIA H200", 9, 0), triton=False)
    check = only(doctor.check_gpu)
    assert check.status == "warning" and "Triton is not installed" in check.message and "pip install" in check.hint


@pytest.mark.parametrize(
    ("card", "kernels", "runs"),
    [
        ((9, 0), "sm_90a", True),
        ((8, 9), "sm_80", True),
        ((8, 0), "sm_86", False),
        ((12, 0), "sm_90 compute_90", True),
        ((12, 0), "sm_100 sm_90", False),
        ((12, 1), "sm_120", True),
    ],
)
def test_kernels_run_on_later_cards_of_their_generation(card: tuple[int, int], kernels: str, runs: bool) -> None:
    assert doctor._built_for(*card, kernels.split()) is runs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpus_of_this_machine_are_fine() -> None:
    checks = list(doctor.check_gpu())
    assert len(checks) == torch.cuda.device_count()
    assert all(check.status == "passed" and "compute capability" in check.message for check in checks)


def test_a_full_disk_fails_and_a_small_one_is_a_warning(monkeypatch: Patch, tmp_path: Path) -> None:
    for free, status in ((100e9, "passed"), (10e9, "warning"), (0.5e9, "failed")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        check = doctor._disk_space("disk", tmp_path / "not" / "yet" / "there", 15e9, "make room")
        assert check.status == status and str(tmp_path / "not" / "yet" / "there") in check.message
    monkeypatch.setattr("os.access", lambda *_: False)
    assert doctor._disk_space("disk", tmp_path, 1e9, "make room").message == f"{tmp_path} cannot be written to"


def test_memory_knows_the_limits_of_a_job(monkeypatch: Patch, tmp_path: Path) -> None:
    memory = SimpleNamespace(available=60e9, total=64e9)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    check_memory = partial(doctor.check_memory, tmp_path)
    assert only(check_memory) == Check("memory", "passed", "60.0 GB free of 64.0")
    groups = tmp_path / "sys/fs/cgroup"
    (tmp_path / "proc/self").mkdir(parents=True)
    (groups / "job/step").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:name=systemd:/x\n0::/job/step\n")
    for folder, limit in (("job", "6000000000"), ("job/step", "max")):
        (groups / folder / "memory.max").write_text(f"{limit}\n")
        (groups / folder / "memory.stat").write_text("anon 1000000000\nfile 5000000000\n")
    check = only(check_memory)
    assert check.status == "warning" and check.message.startswith("5.0 GB left by the limit") and "sbatch" in check.hint


def test_audio_formats_that_do_not_work_are_named(monkeypatch: Patch) -> None:
    files, resampling = doctor.check_audio_files()
    assert files.status == resampling.status == "passed" and ".mp3" in files.message
    real = soundfile.write

    def deaf(*words: Any, format: str, **more: Any) -> None:
        if format == "MP3":
            raise ValueError("Unknown format: 'MP3'")
        real(*words, format=format, **more)

    monkeypatch.setattr(soundfile, "write", deaf)
    files, _ = doctor.check_audio_files()
    assert files.status == "warning" and ".mp3: Unknown format" in files.message and ".wav" not in files.message
    monkeypatch.setattr(soundfile, "read", lambda *_, **__: (np.zeros(24_000, np.float32), 24_000))
    files, _ = doctor.check_audio_files()
    assert files.status == "failed" and ".wav: a tone does not come back" in files.message
    monkeypatch.setattr("soxr.resample", lambda tone, *_, **__: tone)
    _, resampling = doctor.check_audio_files()
    assert resampling.status == "failed" and "soxr" in resampling.hint


def test_a_broken_torchaudio_is_named_before_it_takes_transformers_along(monkeypatch: Patch, tmp_path: Path) -> None:
    absent, classes = doctor.check_transformers()
    assert (absent.name, absent.status) == ("torchaudio", "passed")
    assert (classes.name, classes.message) == (
        "codec classes",
        "HiggsAudioV2TokenizerConfig, HiggsAudioV2TokenizerModel",
    )
    (tmp_path / "torchaudio.py").write_text("raise OSError('libtorchaudio.so: undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "MACHINE_CHECKS", (doctor._needs("transformers", doctor.check_transformers),))
    broken, model = run_doctor("somewhere")
    assert broken.status == "failed" and "`import torchaudio` fails" in broken.message
    assert "undefined symbol" in broken.message and broken.hint == "pip uninstall torchaudio"
    assert model.status == "failed" and "mend what failed above" in model.hint


class Refusal(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_error(403)

    def log_message(self, *_: object) -> None:
        pass


def test_the_hub_may_be_off_silent_or_there(monkeypatch: Patch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert only(doctor.check_hub).message.startswith("HF_HUB_OFFLINE is set")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with HTTPServer(("127.0.0.1", 0), Refusal) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert only(doctor.check_hub).status == "passed", "a refusal is an answer"
        server.shutdown()
    check = only(doctor.check_hub)
    assert check.status == "warning" and "refused" in check.message and "HF_HUB_OFFLINE=1" in check.hint


def test_a_name_server_that_hangs_is_not_waited_for(monkeypatch: Patch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(doctor, "HUB_TIMEOUT", 0.01)
    released = Event()
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: released.wait(60) and io.BytesIO())
    assert only(doctor.check_hub).message.endswith("cannot be reached: no answer within 0.01 s")
    released.set()


@pytest.mark.parametrize(
    ("variables", "status", "detail"),
    [
        ("", "passed", "a single process"),
        ("LOCAL_RANK=-1", "passed", "LOCAL_RANK=-1 means a single process (LOCAL_RANK=-1)"),
        ("RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1", "passed", "a single process (RANK=0"),
        ("RANK=9 LOCAL_RANK=1 WORLD_SIZE=16 MASTER_ADDR=a MASTER_PORT=1", "passed", "rank 9 of 16 on cpu, as RANK=9"),
        ("RANK=1 LOCAL_RANK=1 WORLD_SIZE=2", "failed", "several processes, but no MASTER_ADDR and MASTER_PORT"),
        ("LOCAL_RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "failed", "RANK does not say which"),
        (
            "RANK=2 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1",
            "failed",
            "ranks run from 0 to WORLD_SIZE - 1",
        ),
        ("RANK=3", "failed", "ranks run from 0 to WORLD_SIZE - 1: RANK=3"),
        ("RANK=one", "failed", "RANK should be a number: RANK=one"),
        (
            "SLURM_STEP_NUM_TASKS=16 SLURM_PROCID=9 SLURM_LOCALID=1 SLURM_STEP_NODELIST=n[1-2] SLURM_JOB_ID=7",
            "passed",
            "rank 9 of 16 on cpu, as Slurm has it",
        ),
    ],
)
def test_launcher_variables_must_be_consistent(monkeypatch: Patch, variables: str, status: str, detail: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    (check,) = doctor._run(doctor._needs("", doctor.check_processes))
    assert check.status == status and detail in check.message


def test_more_processes_than_gpus_are_a_failure(monkeypatch: Patch, cuda: Callable[..., None]) -> None:
    cuda(("NVIDIA H200", 9, 0))
    for name, value in zip(doctor.LAUNCHER_VARIABLES, ("1", "1", "2", "here", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    (check,) = doctor._run(doctor._needs("", doctor.check_processes))
    assert (
        check.status == "failed" and "card 1" in check.message and "as many processes as there are cards" in check.hint
    )


def test_trackers_are_information(monkeypatch: Patch, tmp_path: Path) -> None:
    for name in ("tensorboard", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "wandb" or None)
    (tmp_path / "wandb.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(metadata, "version", lambda _: "1.2")
    check = only(doctor.check_trackers)
    assert check.status == "passed"
    assert "tensorboard absent (pip install tensorboard), wandb 1.2, trackio absent" in check.message


# The model


def test_a_sound_model(sound: Path) -> None:
    found = of_model(sound)
    assert list(found) == ["model", "tokenizer", "weights", "codec"]
    assert {check.status for check in found.values()} == {"passed"}
    assert "a second of noise is 25 frames of 8 codes and 24000 samples" in found["codec"].message


def test_a_sound_model_of_the_original_layout(sound: Path, tmp_path: Path) -> None:
    convert_checkpoint(sound, tmp_path / "original", "original")
    found = of_model(tmp_path / "original")
    assert {check.status for check in found.values()} == {"passed"}


def test_weights_are_checked_by_their_headers_alone(folder: Path, monkeypatch: Patch) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()  # rather than written over, while its tensors are mapped
    save_file(
        {name: tensor for name, tensor in state.items() if "text_lm_head" not in name}, folder / "model.safetensors"
    )

    @contextmanager
    def headers(*words: Any, **more: Any) -> Iterator[Any]:
        with safe_open(*words, **more) as file:
            yield SimpleNamespace(keys=file.keys, get_slice=file.get_slice)  # and no get_tensor

    monkeypatch.setattr("myna.models.files.safe_open", headers)
    check = of_model(folder)["weights"]
    assert check.status == "passed" and "without a text head" in check.message


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def rename_a_tensor(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.nonesuch"] = state.pop("model.layers.0.mlp.up_proj.weight")
    (folder / "model.safetensors").unlink()
    save_file(state, folder / "model.safetensors")


def garble(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


def swap_token(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|AUDIO_OUT|>", "<|AUDIO_GONE|>"))


def forget_letters(folder: Path) -> None:
    """A tokenizer that was made for English."""
    file = folder / "tokenizer.json"
    tree = json.loads(file.read_text())
    vocabulary = tree["model"]["vocab"].items()
    tree["model"]["vocab"] = {symbol if symbol.isascii() else f"word{id}": id for symbol, id in vocabulary}
    file.write_text(json.dumps(tree))


def other_codec(folder: Path) -> None:
    shutil.rmtree(folder / "codec")
    save_tiny_codec(folder / "codec", codebook_size=32)


def a_model_for_a_codec(folder: Path) -> None:
    shutil.copy(folder / "config.json", folder / "codec" / "config.json")


def no_codec_weights(folder: Path) -> None:
    (folder / "codec" / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("breaks", "name", "detail"),
    [
        (garble("tokenizer.json", '{"version": "1.0", "tru'), "model", "tokenizer.json cannot be read"),
        (garble("config.json", "{"), "model", "config.json cannot be read"),
        (garble("config.json", '{"model_type": "bert"}'), "model", "'bert', which Myna does not know"),
        (swap_token, "model", "has no single token <|AUDIO_OUT|>"),
        (forget_letters, "tokenizer", "comes back as"),
        (cut, "weights", "model.safetensors cannot be read"),
        (rename_a_tensor, "weights", "1 missing: model.layers.0.mlp.up_proj.weight"),
        (lambda folder: (folder / "model.safetensors").unlink(), "weights", "has no model.safetensors"),
        (other_codec, "codec", "makes 8 x 32 codes"),
        (a_model_for_a_codec, "codec", "not a codec"),
        (no_codec_weights, "codec", "has no model.safetensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_a_broken_model_fails_where_it_is_broken(
    folder: Path, breaks: Callable[[Path], Any], name: str, detail: str
) -> None:
    breaks(folder)
    found = of_model(folder)
    assert [check.name for check in found.values() if check.status != "passed"] == [name]
    assert found[name].status == "failed" and detail in found[name].message


def test_what_is_not_in_the_cache_is_not_fetched(folder: Path, monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("it went to the network"))
    found = of_model("nobody/nothing")
    assert list(found) == ["model"] and found["model"].status == "warning"
    assert found["model"].hint == "hf download nobody/nothing"
    assert constants.HF_HUB_OFFLINE is False, "the doctor leaves things as they were"
    shutil.rmtree(folder / "codec")
    check = of_model(folder)["codec"]
    assert check.status == "warning" and "hf download" in check.hint


def test_a_folder_that_is_not_there_and_a_name_without_weights_fail() -> None:
    assert of_model("./nowhere")["model"].status == "failed"
    found = of_model("higgs-v2")
    assert list(found) == ["model"] and "without weights" in found["model"].message
