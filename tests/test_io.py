import hashlib
import resource
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from myna.audio.files import AUDIO_FORMATS, write_audio
from myna.errors import OutputError
from myna.io import atomic_write, bytes_hash, claim_folder, disk_error, file_hash, sniff_suffix


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
    """Whatever library wrote the temporary one."""
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
