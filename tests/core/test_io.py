import hashlib
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from myna.audio.files import AUDIO_FORMATS, write_audio
from myna.core.errors import OutputError
from myna.core.io import (
    atomic_folder,
    atomic_write,
    bytes_hash,
    claim_folder,
    disk_error,
    file_hash,
    lock_folder,
    private_file,
    sniff_suffix,
)


def test_the_hash_is_blake2b_of_the_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5_000
    (tmp_path / "a").write_bytes(data)
    assert file_hash(tmp_path / "a") == bytes_hash(data) == hashlib.blake2b(data, digest_size=16).hexdigest()


@pytest.mark.parametrize("suffix", AUDIO_FORMATS)
def test_encoded_audio_is_known_by_its_first_bytes(tmp_path: Path, suffix: str) -> None:
    write_audio(tmp_path / f"a{suffix}", np.zeros(4_800, np.float32), 24_000)
    assert sniff_suffix((tmp_path / f"a{suffix}").read_bytes()) == suffix


@pytest.mark.parametrize(
    ("data", "suffix"),
    [(b"ID3\x04", ".mp3"), (b"\0\0\0 ftypM4A ", ".m4a"), (b"FORM", ".aiff"), (b"", ".bin"), (b"\xff", ".bin")],
)
def test_other_first_bytes(data: bytes, suffix: str) -> None:
    assert sniff_suffix(data) == suffix


def test_replacing_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with pytest.raises(RuntimeError), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert list(path.parent.iterdir()) == []
    with atomic_write(path) as temporary:
        temporary.write_text("whole")
    assert path.read_text() == "whole" and list(path.parent.iterdir()) == [path]


def test_an_error_of_the_disk_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    """Errors name the output file, whichever library wrote the temporary one."""
    path = tmp_path / "file"

    def python(file: Path) -> None:
        file.write_bytes(bytes(100_000))

    def pyarrow(file: Path) -> None:
        pq.write_table(pa.table({"a": np.random.default_rng(0).random(100_000)}), file)

    def safetensors(file: Path) -> None:
        save_file({"a": np.zeros(100_000)}, file)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for write in (python, pyarrow, safetensors):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises(OSError, match="too large") as caught, atomic_write(path) as temporary:
                write(temporary)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        error = disk_error(caught.value)
        assert error is not None and error.what == f"{path}: File too large" and error.hint
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError) as missing, atomic_write(path):
        (tmp_path / "input").read_bytes()
    assert missing.value.filename == str(tmp_path / "input") and disk_error(missing.value) is None, "a bug of ours"


def test_a_folder_is_claimed_once_and_for_one_kind(tmp_path: Path) -> None:
    folder, other = tmp_path / "out", tmp_path / "other"
    for _ in range(2):
        claim_folder(folder, "evaluation")
    with pytest.raises(OutputError, match="holds no comparison"):
        claim_folder(folder, "comparison")
    claim_folder(folder, "comparison", force=True)
    other.mkdir()
    (other / "evaluation.json").touch()
    claim_folder(other, "evaluation", known=("evaluation.json",))
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="is a file"):
        claim_folder(tmp_path / "file", "evaluation")


@pytest.mark.parametrize("replace", [False, True])
def test_the_second_of_two_writers_of_a_folder_is_refused(tmp_path: Path, replace: bool) -> None:
    """`myna merge` twice into one --out."""
    folder = tmp_path / "merged"
    with pytest.raises(OutputError, match="merged was written by another process in the meantime") as caught:  # noqa: SIM117
        with atomic_folder(folder) as mine:
            (mine / "weights").write_text("mine")
            with atomic_folder(folder, replace=replace) as theirs:
                (theirs / "weights").write_text("theirs")
    assert "name a new folder" in caught.value.hint
    assert (folder / "weights").read_text() == "theirs" and list(tmp_path.iterdir()) == [folder]


def test_a_folder_is_locked_and_cleared_of_half_written_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "audio" / "base").mkdir(parents=True)
    left = [out / ".0123456789ab.tmp", out / "audio" / "base" / ".ba9876543210.tmp"]
    kept = [out / ".mine.tmp", out / "audio" / "0123456789ab.tmp", out / "audio" / "base" / "line.flac"]
    for file in (*left, *kept):
        file.write_text("x")
    with lock_folder(out, "evaluating into"):
        assert not any(file.exists() for file in left) and all(file.exists() for file in kept)
        left[0].write_text("of the process that holds it")
        with (
            pytest.raises(OutputError, match="another process is evaluating into"),
            lock_folder(out, "evaluating into"),
        ):
            pytest.fail("the folder is held")
        assert left[0].exists()
    with lock_folder(out, "evaluating into"):
        assert not left[0].exists()


def test_a_private_file_needs_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """exFAT and SMB have none."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    assert private_file(tmp_path / "a.key", b"first") == private_file(tmp_path / "a.key", b"second") == b"first"
    assert (tmp_path / "a.key").stat().st_mode & 0o777 == 0o600 and not list(tmp_path.glob("*.tmp"))


def test_threads_that_make_a_private_file_have_the_same_content(tmp_path: Path) -> None:
    """The first requests to a server are signed at the same time, with one new key."""
    start = Barrier(16)

    def make(file: Path, number: int) -> bytes:
        start.wait()
        return private_file(file, bytes([number]) * 4096)

    with ThreadPoolExecutor(16) as pool:
        for attempt in range(20):
            file = tmp_path / f"{attempt}.pem"
            contents = set(pool.map(make, [file] * 16, range(16)))
            assert contents == {file.read_bytes()} and file.stat().st_mode & 0o777 == 0o600
    assert len(list(tmp_path.iterdir())) == 20, "nothing else is left"
