"""Code store: codes come back as stored, nothing is encoded twice, and kills leave no trace."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from myna.audio.files import read_audio
from myna.core.errors import AudioError, DataError
from myna.data.code_store import CodeStore, codes_key
from myna.data.encoding import PlannedClip, encode_dataset, group_into_shards
from myna.data.manifest import Span, Utterance
from tests.data.corpora import utterance_key
from tests.data.kill_helper import SHARD_SECONDS, FakeCodec, corpus

REVISION = FakeCodec().revision


def record(path: Path, samples: int, seed: int = 0) -> Path:
    noise = np.random.default_rng([seed, samples]).uniform(-0.9, 0.9, samples)
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, noise, FakeCodec.sample_rate)
    return path


def make(folder: Path, lengths: list[int]) -> list[Utterance]:
    for number, samples in enumerate(lengths):
        record(folder / f"{number:03d}.wav", samples, seed=number)
    return corpus(folder)


def encode(utterances: list[Utterance], folder: Path, codec: FakeCodec | None = None, **options: Any) -> Any:
    return encode_dataset(utterances, codec or FakeCodec(), folder, **({"shard_seconds": SHARD_SECONDS} | options))


def expected(utterance: Utterance) -> Any:
    samples = soundfile.read(utterance.audio, dtype="float32")[0]
    return FakeCodec().encode(samples[None, : len(samples) // 8 * 8])[0]


class Stored(NamedTuple):
    key: str
    codes: Any


def stored(folder: Path, store: CodeStore | None = None) -> dict[str, Stored]:
    """Return the codes of each utterance that is long enough to have some."""
    store = store or CodeStore.open(folder, REVISION)
    index = store.index().to_pydict()
    places = store.locate(pa.array(index["key"], pa.string()))
    found = {}
    for id, key, frames, shard, offset in zip(index["id"], index["key"], index["frames"], *places, strict=True):
        if frames:
            assert shard >= 0, id
            found[id] = Stored(key, store.codes(int(shard), int(offset), (frames, FakeCodec.codebooks)))
    return found


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "codes" / REVISION[:8]).glob("0*.arrow"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make(tmp_path / "source", [160, 240, 163, 400, 160, 88, 167, 320, 160, 240, 8, 480])
    return tmp_path / "source"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prepared"


# What goes in comes out


def test_codes_come_back_as_they_were(source: Path, folder: Path) -> None:
    utterances = corpus(source)
    report = encode(utterances, folder)
    assert (report.utterances, report.encoded, report.too_short) == (12, 12, ())
    assert report.seconds == sum(len(expected(u)) for u in utterances) / 100

    kept = stored(folder)
    assert list(kept) == [utterance.id for utterance in utterances]
    for utterance in utterances:
        codes = kept[utterance.id].codes
        assert kept[utterance.id].key == utterance_key(utterance, REVISION)
        assert np.array_equal(codes, expected(utterance)) and codes.dtype == np.uint16
    shards, _ = CodeStore.open(folder, REVISION).locate(pa.array(["0" * 32, kept["003"].key]))
    assert shards[0] < 0 <= shards[1]


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 200), max_size=12), shard=st.floats(0.01, 2), batch=st.floats(0.01, 2))
def test_any_lengths_come_back_as_they_were(lengths: list[int], shard: float, batch: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        utterances, folder = make(Path(name) / "source", lengths), Path(name) / "prepared"
        report = encode(utterances, folder, shard_seconds=shard, batch_seconds=batch)
        long_enough = [u for u, samples in zip(utterances, lengths, strict=True) if samples >= 8]
        assert report.too_short == tuple(u.id for u in utterances if u not in long_enough)
        kept = stored(folder)
        assert list(kept) == [u.id for u in long_enough]
        for utterance in long_enough:
            assert np.array_equal(kept[utterance.id].codes, expected(utterance))


def test_codes_are_views_of_the_file(source: Path, folder: Path) -> None:
    utterances = corpus(source)
    encode(utterances, folder)
    held = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None  # noqa: PTH208
    store = CodeStore.open(folder, REVISION)
    codes = stored(folder, store)["003"].codes
    assert not codes.flags.owndata and not codes.flags.writeable
    assert pa.total_allocated_bytes() < 1 << 20
    if held is not None:
        assert len(os.listdir("/proc/self/fd")) == held  # noqa: PTH208
    del store
    assert np.array_equal(codes, expected(utterances[3]))


def test_a_shard_is_plain_arrow(source: Path, folder: Path) -> None:
    utterances = corpus(source)
    encode(utterances, folder)
    rows = [row for path in shards(folder) for row in pa.ipc.open_file(path).read_all().to_pylist()]
    assert [row["text"] for row in rows] == [u.text for u in utterances]
    for row, utterance in zip(rows, utterances, strict=True):
        assert row["codes"] == expected(utterance).reshape(-1).tolist()
        assert (row["frames"] * row["codebooks"], row["frame_rate"]) == (len(row["codes"]), 100.0)
        assert row["seconds"] == row["frames"] / 100
    label = pa.ipc.open_file(shards(folder)[0]).schema.metadata
    assert label == {b"format": b"1", b"codec": REVISION.encode(), b"sample_rate": b"800"}


def test_a_store_travels_to_workers(source: Path, folder: Path) -> None:
    encode(corpus(source), folder)
    store = CodeStore.open(folder, REVISION)
    sent = pickle.dumps(store)
    assert len(sent) < 1000
    there, here = stored(folder, pickle.loads(sent)), stored(folder, store)
    assert all(np.array_equal(there[id].codes, here[id].codes) for id in here)


def test_only_so_many_shards_are_mapped_at_a_time(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("myna.data.code_store.MAX_MAPPED_SHARDS", 2)
    encode(corpus(source), folder)
    assert len(shards(folder)) > 4
    opened: list[str] = []

    def read_whole(path: Path) -> Any:
        opened.append(path.stem)
        return pa.py_buffer(path.read_bytes())

    monkeypatch.setattr("myna.data.code_store._map", read_whole)
    store = CodeStore.open(folder, REVISION)
    [first, second, third] = [(number, 0, (1, 1)) for number in range(3)]
    for place in (first, second, first, second, third, first):
        store.codes(*place)
    assert opened == ["00000", "00001", "00002", "00000"]


# Keys


def test_a_key_is_audio_span_and_codec(tmp_path: Path) -> None:
    here, copy, other = (record(tmp_path / name, 100 + (name == "c.wav")) for name in ("a.wav", "b.wav", "c.wav"))
    plain = Utterance("1", here, "", "")
    key = utterance_key(plain, "r")
    assert utterance_key(Utterance("2", copy, "other text", "berta"), "r") == key
    assert utterance_key(dataclasses.replace(plain, span=Span(0, None)), "r") == key
    changes = [
        utterance_key(dataclasses.replace(plain, audio=other), "r"),
        utterance_key(dataclasses.replace(plain, span=Span(0.0, 0.05)), "r"),
        utterance_key(dataclasses.replace(plain, span=Span(0.05, None)), "r"),
        utterance_key(plain, "s"),
    ]
    assert len({key, *changes}) == 5
    assert codes_key("00", Span(0, 1), "r") == codes_key("00", Span(0.0, 1.0), "r")


def test_spans_of_one_recording_and_equal_clips(tmp_path: Path, folder: Path) -> None:
    audio = record(tmp_path / "long.wav", 800)
    spans = [Span(0.0, 0.25), Span(0.25, 0.5), Span(0.0, 0.25), Span(0.5, None)]
    utterances = [Utterance(str(n), audio, "", "", span=span) for n, span in enumerate(spans)]
    report = encode(utterances, folder)
    assert (report.utterances, report.encoded, report.seconds) == (4, 3, 1.0)
    kept, whole = stored(folder), expected(Utterance("", audio, "", ""))
    for utterance, part in zip(utterances, [whole[:25], whole[25:50], whole[:25], whole[50:]], strict=True):
        assert np.array_equal(kept[utterance.id].codes, part)


# Cutting and batching


def cut_frames(frames: Iterable[int], limit: float) -> list[list[int]]:
    clips = (PlannedClip("", "", Path(), None, "", n) for n in frames)
    return [[clip.frames for clip in shard] for shard in group_into_shards(clips, limit)]


@given(frames=st.lists(st.integers(0, 50)), limit=st.floats(0.5, 100), more=st.lists(st.integers(0, 50)))
def test_cuts_stand_whatever_follows_or_was_done(frames: list[int], limit: float, more: list[int]) -> None:
    shards = cut_frames(frames, limit)
    assert list(chain(*shards)) == frames
    full = [shard for shard in shards if sum(shard) >= limit]
    assert full == shards[: len(full)] and all(sum(shard[:-1]) < limit for shard in full)
    assert cut_frames(frames + more, limit)[: len(full)] == full
    for done in range(len(shards)):
        assert cut_frames(chain(*shards[done:]), limit) == shards[done:]


def test_equal_lengths_go_together_and_nothing_is_padded(source: Path, folder: Path) -> None:
    codec = FakeCodec()
    encode(corpus(source), folder, codec, shard_seconds=100, batch_seconds=0.65)
    # 160, 160, 163, 167 and 160 samples are five clips of 20 frames; 65 frames hold three of them.
    assert codec.batches == [(1, 60), (1, 50), (1, 40), (2, 30), (3, 20), (2, 20), (1, 11), (1, 1)]


def test_the_next_shard_is_read_while_one_is_encoded(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("myna.data.encoding.READER_THREADS", 1)
    lock, began = threading.Condition(), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal began
        with lock:
            began += 1
            lock.notify_all()
        return read_audio(*args, **kwargs)

    monkeypatch.setattr("myna.data.encoding.read_audio", counted)
    seen: list[int] = []

    class Slow(FakeCodec):
        def encode(self, clips: Any) -> Any:
            with lock:
                lock.wait_for(lambda: began >= min(30, len(seen) * 5 + 10), timeout=30)
                seen.append(began)
            return super().encode(clips)

    encode(make(tmp_path / "source", [160] * 30), folder, Slow(), shard_seconds=1.0)
    # Five clips are a shard. While one is encoded, the next five are read and few more.
    assert len(seen) == 6 and all(min(30, 5 * n + 10) <= count <= 5 * n + 12 for n, count in enumerate(seen))


def test_progress_ends_where_it_should(tmp_path: Path, folder: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    report = encode(
        make(tmp_path / "source", [160, 7, 160, 240, 160]), folder, progress=lambda *call: seen.append(call)
    )
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == ("encoding", 5, 5) and report.seconds == 0.9
    assert dataclasses.replace(report, seconds=50.0, elapsed=5.0).pace == 10.0
    assert dataclasses.replace(report, elapsed=0.0).pace == 0.0


# Again


def test_a_rerun_encodes_only_what_is_new(source: Path, folder: Path) -> None:
    encode(corpus(source), folder)
    before, codec = digests(folder), FakeCodec()
    assert encode(corpus(source), folder, codec).encoded == 0
    assert digests(folder) == before and not codec.batches
    record(source / "zzz.wav", 200, seed=99)
    (source / "004.wav").unlink()
    report = encode(corpus(source), folder, codec)
    assert (report.encoded, report.utterances, codec.batches) == (1, 12, [(1, 25)])
    after = digests(folder)
    assert {path: after[path] for path in before if "index" not in path} == {
        path: digest for path, digest in before.items() if "index" not in path
    }
    assert corpus(source)[-1].id in stored(folder)


def test_another_codec_misses_cleanly(source: Path, folder: Path) -> None:
    utterances, other = corpus(source), FakeCodec("fedcba9876543210")
    encode(utterances, folder)
    with pytest.raises(DataError, match="no codes of the codec fedcba98"):
        CodeStore.open(folder, other.revision)
    before = digests(folder)
    assert encode(utterances, folder, other).encoded == 12
    assert digests(folder).items() >= before.items()
    ours, theirs = (
        {each.key for each in stored(folder, CodeStore.open(folder, revision)).values()}
        for revision in (REVISION, other.revision)
    )
    assert len(ours) == len(theirs) == 12 and ours.isdisjoint(theirs)


def test_codecs_that_share_eight_characters_are_not_mixed_up(source: Path, folder: Path) -> None:
    encode(corpus(source), folder)
    with pytest.raises(DataError, match="codec 0123456789abcdef"):
        CodeStore.open(folder, REVISION[:8] + "00000000").index()


def test_a_deleted_shard_is_made_again(source: Path, folder: Path) -> None:
    utterances = corpus(source)
    encode(utterances, folder)
    before = digests(folder)
    shards(folder)[1].unlink()
    with pytest.raises(AssertionError, match="00"):
        stored(folder)
    encode(utterances, folder)
    assert digests(folder) == before


# Killed


def helper(source: Path, folder: Path, moment: str = "never", number: int = 0) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.data.kill_helper", str(source), str(folder), moment, str(number)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2])


def test_a_kill_leaves_no_trace(source: Path, tmp_path: Path) -> None:
    encode(corpus(source), tmp_path / "calm")
    calm = digests(tmp_path / "calm")
    assert len(calm) > 5
    moments = [("encode", 1), ("encode", 6), ("fsync", 2), ("fsync", 4), ("replace", 1), ("replace", 3), ("fsync", 12)]
    for moment, number in moments:
        folder = tmp_path / f"{moment}{number}"
        assert helper(source, folder, moment, number).wait() == -signal.SIGKILL
        finished = shards(folder)
        for path in finished:
            assert digests(folder)[str(path.relative_to(folder))] == calm[str(path.relative_to(folder))]
        codec = FakeCodec()
        report = encode(corpus(source), folder, codec)
        assert digests(folder) == calm, (moment, number)
        kept = sum(pa.ipc.open_file(path).read_all().num_rows for path in finished)
        assert report.encoded == 12 - kept


def test_kill_upon_kill_leaves_no_trace(source: Path, tmp_path: Path) -> None:
    encode(corpus(source), tmp_path / "calm")
    folder = tmp_path / "hunted"
    for _ in range(4):  # each run gets one shard further, and dies before the next is in place
        assert helper(source, folder, "replace", 1).wait() == -signal.SIGKILL
    assert len(shards(folder)) == 4
    encode(corpus(source), folder)
    assert digests(folder) == digests(tmp_path / "calm")


def test_a_kill_from_outside_leaves_no_trace(tmp_path: Path) -> None:
    utterances = make(tmp_path / "source", [400] * 80)
    encode(utterances, tmp_path / "calm")
    folder, process = tmp_path / "hunted", helper(tmp_path / "source", tmp_path / "hunted")
    deadline = time.monotonic() + 60
    while len(shards(folder)) < 10 and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert 10 <= len(shards(folder)) < 80
    encode(utterances, folder)
    assert digests(folder) == digests(tmp_path / "calm")


# What can go wrong


def test_a_clip_that_cannot_be_read_is_named(source: Path, folder: Path) -> None:
    utterances = corpus(source)
    utterances[5].audio.write_bytes(b"RIFF and nothing more")
    with pytest.raises(AudioError, match=r"005: .*005\.wav: unreadable") as caught:
        encode(utterances, folder)
    assert caught.value.hint
    utterances[5].audio.unlink()
    with pytest.raises(AudioError, match=r"005: .*005\.wav"):
        encode(utterances, folder)
    encode([u for u in utterances if u.id != "005"], folder)


def test_a_span_outside_the_recording_is_named(source: Path, folder: Path) -> None:
    utterances = corpus(source)
    utterances[9] = dataclasses.replace(utterances[9], span=Span(0.1, 99.0))
    with pytest.raises(AudioError, match=r"009: .*bad span"):
        encode(utterances, folder, shard_seconds=0.1)
    assert len(shards(folder)) >= 5, "what was finished before it stays"


def test_two_of_one_name_are_refused(source: Path, folder: Path) -> None:
    twins = [corpus(source)[0], dataclasses.replace(corpus(source)[1], id="000")]
    with pytest.raises(DataError, match="two utterances have the id 000"):
        encode(twins, folder)


def test_only_one_at_a_time(source: Path, folder: Path) -> None:
    encode(corpus(source), folder)
    with (folder / "codes" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another") as caught:
            encode(corpus(source), folder)
    assert "wait" in caught.value.hint
    encode(corpus(source), folder)


def test_a_file_that_cannot_grow_is_a_data_error(source: Path, folder: Path) -> None:
    """A limit on the size of files stands in for a full disk: the write itself fails."""
    utterances = corpus(source)
    encode(utterances[:4], folder)
    before, limits = digests(folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(DataError, match=f"cannot write codes into {folder}") as caught:
            encode(utterances, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "finished shards stay" in caught.value.hint
    assert digests(folder) == before
    assert utterances[0].id in stored(folder)
    encode(utterances, folder)


def test_a_folder_that_cannot_be_is_a_data_error(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write codes into"):
        encode(corpus(source), tmp_path / "file")


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999])
def test_a_shard_cut_short_is_named(source: Path, folder: Path, part: float) -> None:
    utterances = corpus(source)
    encode(utterances, folder)
    path, before = shards(folder)[1], digests(folder)
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    with pytest.raises(DataError, match=str(path)) as caught:
        stored(folder)
    assert f"rm {path}" in caught.value.hint and "myna prepare" in caught.value.hint
    with pytest.raises(DataError, match=str(path)):
        encode(utterances, folder)
    path.unlink()
    encode(utterances, folder)
    assert digests(folder) == before


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_an_index_cut_short_is_named_and_made_anew(source: Path, folder: Path, part: float) -> None:
    encode(corpus(source), folder)
    path, before = shards(folder)[0].with_name("index.arrow"), digests(folder)
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    with pytest.raises(DataError, match=str(path)):
        stored(folder)
    encode(corpus(source), folder)
    assert digests(folder) == before


def test_a_damaged_shard_is_named_or_harmless(source: Path, folder: Path) -> None:
    """A damaged byte outside the codes gives an error that names the file, or the same keys and frames."""
    utterances = corpus(source)
    encode(utterances, folder)
    path = shards(folder)[0]
    sound, frames = path.read_bytes(), {id: len(each.codes) for id, each in stored(folder).items()}
    keys = pa.array([each.key for each in stored(folder).values()])
    refused = 0
    for place in range(0, len(sound), 11):
        path.unlink()  # never change a file that is mapped
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 0xFF]) + sound[place + 1 :])
        store = CodeStore.open(folder, REVISION)
        try:
            places = store.locate(keys)
        except DataError as error:
            assert str(path) in error.what
            refused += 1
        else:
            lost = places[0] < 0
            assert lost.sum() <= 1
            for shard, offset, count in zip(*places, frames.values(), strict=True):
                assert shard < 0 or store.codes(int(shard), int(offset), (count, 2)).sum() >= 0
    assert refused > 20


def test_what_was_never_prepared_says_so(source: Path, folder: Path) -> None:
    with pytest.raises(DataError, match="no codes of the codec 01234567") as caught:
        CodeStore.open(folder, REVISION)
    assert f"myna prepare SOURCE --out {folder}" in caught.value.hint
    encode(corpus(source), folder)
    (folder / "codes" / REVISION[:8] / "index.arrow").unlink()
    with pytest.raises(DataError, match="not encoded to the end"):
        CodeStore.open(folder, REVISION)
