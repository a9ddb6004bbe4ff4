import hashlib
from pathlib import Path

import numpy as np
import pytest

from myna.audio.files import AUDIO_FORMATS, write_audio
from myna.io import atomic_write, bytes_hash, file_hash, sniff_suffix


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
