"""Hugging Face datasets: Parquet, Arrow, save_to_disk, and the hub by way of `datasets` itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from myna.core.errors import DataError
from myna.core.io import file_hash
from myna.data.importers import import_source, tables
from myna.data.manifest import Utterance
from tests.data import sources


@pytest.fixture
def rows(clips: list[Path]) -> list[dict[str, Any]]:
    written = [
        Utterance(str(n), clip, f"xin chào {n}", "lan", "vi", extras={"mood": "calm"}) for n, clip in enumerate(clips)
    ]
    return sources.rows(written)


def check(source: str | Path, media: Path, clips: list[Path], *splits: str) -> None:
    """The eight utterances of `rows`, each with its own sound, and with its split where the source names one."""
    result = import_source(str(source), media=media)
    assert result.format == "hf" and result.rejected == []
    named = [{"split": split} for split in splits] or [{}] * len(clips)
    expected = [(str(n), f"xin chào {n}", "lan", "vi", {"mood": "calm"} | split) for n, split in enumerate(named)]
    assert [(u.id, u.text, u.speaker, u.language, u.extras) for u in result.utterances] == expected
    assert [file_hash(u.audio) for u in result.utterances] == [file_hash(clip) for clip in clips]
    assert all(u.audio.parent == media and u.audio.suffix == ".wav" for u in result.utterances)


def test_parquet_in_parts(
    tmp_path: Path, clips: list[Path], rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RECORDS_PER_BATCH", 3)
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(rows[:5]), tmp_path / "data" / "train-0.parquet")
    pq.write_table(pa.Table.from_pylist(rows[5:]), tmp_path / "data" / "train-1.parquet")
    (tmp_path / "data" / "._train-0.parquet").write_bytes(b"a twin from another system")
    check(tmp_path, tmp_path / "media", clips, *["train"] * 8)


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_arrow(
    tmp_path: Path, clips: list[Path], rows: list[dict[str, Any]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RECORDS_PER_BATCH", 3)
    table = pa.Table.from_pylist(rows)
    new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with new(str(tmp_path / "data.arrow"), table.schema) as writer:
        writer.write_table(table)
    check(tmp_path / "data.arrow", tmp_path / "media", clips)


def dataset(rows: list[dict[str, Any]]) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows).cast_column("audio", datasets.Audio())


def test_save_to_disk(tmp_path: Path, clips: list[Path], rows: list[dict[str, Any]]) -> None:
    splits = datasets.DatasetDict({"test": dataset(rows[:3]), "train": dataset(rows[3:])})
    splits.save_to_disk(tmp_path / "saved")
    check(f"{tmp_path}/saved:test+train", tmp_path / "media", clips, *["test"] * 3, *["train"] * 5)
    dataset(rows).save_to_disk(tmp_path / "single")
    check(tmp_path / "single", tmp_path / "media", clips)


@pytest.mark.parametrize(
    "names",
    [
        ("train.parquet", "test.parquet"),
        ("data/train-00000-of-00001.parquet", "data/invalidated-00000-of-00001.parquet"),
        ("train/0000.parquet", "test/0000.parquet"),
        ("vi/train/part-0.parquet", "vi/validation/part-0.parquet"),
    ],
)
def test_several_splits_of_a_dataset_do_not_all_become_training_data(
    tmp_path: Path, rows: list[dict[str, Any]], names: tuple[str, str]
) -> None:
    source = tmp_path / "voices"
    for name, some in zip(names, (rows[:5], rows[5:]), strict=True):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(some), source / name)
    with pytest.raises(DataError, match=r"has the splits .*train, and all of them|has the splits train, ") as caught:
        import_source(str(source), media=tmp_path / "media")
    assert f"{source}:" in caught.value.hint
    chosen = import_source(f"{source}:train", media=tmp_path / "media").utterances
    assert [(one.id, one.extras["split"]) for one in chosen] == [(str(n), "train") for n in range(5)]
    with pytest.raises(DataError, match="has no split trian"):
        import_source(f"{source}:trian", media=tmp_path / "media")


@pytest.mark.parametrize("name", ["lan/voices", "lan/voices:train", "lan/voices/vi:train"])
def test_the_hub(
    tmp_path: Path, clips: list[Path], rows: list[dict[str, Any]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None, str | None]] = []

    def load(path: str, config: str | None, split: str | None) -> datasets.Dataset:
        asked.append((path, config, split))
        return dataset(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_: ["train"])
    check(name, tmp_path / "media", clips, *["train"] * 8)
    assert asked == [("lan/voices", "vi" if "/vi" in name else None, "train")]
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_: ["train", "test"])
    if ":" not in name:
        with pytest.raises(DataError, match="lan/voices has the splits train, test"):
            import_source(name, media=tmp_path / "media")
        assert len(asked) == 1


def test_a_name_the_hub_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError("no such dataset")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_split_names", load)
    with pytest.raises(DataError, match="neither a file here nor a dataset") as caught:
        import_source("nobody/nothing", media=tmp_path)
    assert "OWNER/NAME" in caught.value.hint
    with pytest.raises(DataError, match="not named like one"):
        import_source("gone.parquet", media=tmp_path, format="hf")


def test_audio_by_path_by_bytes_and_under_another_name(tmp_path: Path, clips: list[Path]) -> None:
    (tmp_path / "a.wav").write_bytes(clips[0].read_bytes())
    tables = {
        "path": [{"audio": {"bytes": None, "path": "a.wav"}, "text": "x"}],
        "bytes": [{"audio": clips[0].read_bytes(), "text": "x"}],
        "other": [{"speech": {"bytes": clips[0].read_bytes(), "path": None}, "path": "ignored", "text": "x"}],
    }
    for name, table in tables.items():
        pq.write_table(pa.Table.from_pylist(table), tmp_path / f"{name}.parquet")
        (utterance,) = import_source(str(tmp_path / f"{name}.parquet"), media=tmp_path / "media").utterances
        assert file_hash(utterance.audio) == file_hash(clips[0])


def test_bad_rows_and_bad_files_are_named(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    rows = rows[:4]
    rows[1]["audio"] = {"bytes": b"garbage", "path": "x.wav"}
    rows[2]["audio"] = None
    table = pa.Table.from_pylist(rows)
    latin = pa.array([b"a", b"b", b"c", b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(table.set_column(1, "text", latin), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and then nothing")
    result = import_source(str(tmp_path), media=tmp_path / "media")
    assert [utterance.id for utterance in result.utterances] == ["0"]
    assert [(Path(item.source).name, item.line, item.reason) for item in result.rejected] == [
        ("a.parquet", 2, "unreadable audio"),
        ("a.parquet", 3, "missing file"),
        ("a.parquet", 4, "not UTF-8"),
        ("b.parquet", 1, "malformed"),
    ]
