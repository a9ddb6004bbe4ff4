"""Encoding by several processes gives the bytes of one process, also after processes were killed."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import time
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import torch

import myna
from myna.core.errors import AudioError, ConfigError, DataError
from myna.core.pools import MAX_ATTEMPTS
from myna.data.encoding import encode_dataset
from myna.data.manifest import read_manifest, write_manifest
from myna.models import save_tiny_model
from tests.data.kill_helper import FakeCodec
from tests.data.pooled import SHARDS, DeadlyCodec, encode_pooled, files, write_source

pytestmark = pytest.mark.slow
DEMO_RECORDINGS = Path(myna.__file__).parent / "demo" / "recordings"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("pooled") / "source")


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    report = encode_pooled(source, out, None)
    assert report.too_short == ("040",)
    assert len(files(out)) >= SHARDS
    return files(out)


def test_two_processes_give_the_bytes_of_one(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    report = encode_pooled(source, tmp_path, 2, progress=lambda *call: seen.append(call))
    assert files(tmp_path) == expected
    assert (report.encoded, report.utterances, report.too_short) == (55, 55, ("040",))
    assert seen[-1] == ("encoding", 56, 56)
    again = encode_pooled(source, tmp_path, 2)
    assert again.encoded == 0 and files(tmp_path) == expected


def test_killed_workers_cost_nothing(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "deaths").mkdir()
    encode_pooled(source, tmp_path / "out", 2, open_codec=partial(DeadlyCodec, tmp_path / "deaths", 2))
    assert list((tmp_path / "deaths").iterdir()), "none was killed"
    assert files(tmp_path / "out") == expected


def test_a_worker_that_always_dies_is_given_up(source: Path, tmp_path: Path) -> None:
    (tmp_path / "deaths").mkdir()
    with pytest.raises(DataError, match=rf"encode .*\.arrow died {MAX_ATTEMPTS} times"):
        encode_pooled(source, tmp_path / "out", 2, open_codec=partial(DeadlyCodec, tmp_path / "deaths", 999, share=1))


def test_a_killed_driver_takes_its_workers_along_and_can_go_on(
    source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for _ in range(3):
        process = multiprocessing.get_context("spawn").Process(target=encode_pooled, args=(source, out, 2))
        process.start()
        before = len(list(out.glob("codes/*/0*.arrow")))
        while process.is_alive() and len(list(out.glob("codes/*/0*.arrow"))) <= before:
            time.sleep(0.01)
        time.sleep(random.random() / 10)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.join()
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert workers and not alive
        assert files(out).items() <= expected.items()
    encode_pooled(source, out, 2)
    assert files(out) == expected


def test_an_error_of_a_worker_is_raised_here(source: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "source"))
    gone = sorted(copy.iterdir())[-1]
    with pytest.raises(AudioError, match=rf"{gone.stem}: .*{gone.name}"):
        encode_pooled(copy, tmp_path / "out", 2, progress=lambda *_: gone.unlink(missing_ok=True))


def test_a_worker_with_another_codec_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"codec fedcba98.* is for 01234567") as caught:
        encode_pooled(source, tmp_path, 2, open_codec=partial(FakeCodec, "fedcba9876543210"))
    assert "doctor" in caught.value.hint


def test_prepare_with_a_real_codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings of the demo, by the codec of a model in a folder of a relative name."""
    assert encode_dataset.__kwdefaults__ is not None
    monkeypatch.setitem(encode_dataset.__kwdefaults__, "shard_seconds", 6.0)
    monkeypatch.chdir(tmp_path)
    save_tiny_model(Path("model"))
    recordings = read_manifest(DEMO_RECORDINGS / "manifest.jsonl")[:10]
    write_manifest(Path("source/manifest.jsonl"), recordings)
    for out, workers in (("one", 1), ("two", 2)):
        myna.prepare("source", out, model="model", workers=workers, device="cpu")
    assert len(list(Path("one").glob("codes/*/0*.arrow"))) > 3
    assert files(Path("one")) == files(Path("two"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_processes_on_a_gpu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one process keeps a GPU busy"):
        myna.prepare(DEMO_RECORDINGS, tmp_path, model="fledgling", workers=2)
