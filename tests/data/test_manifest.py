import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myna.core.errors import DataError
from myna.data.manifest import Span, Utterance, iterate_manifest, read_manifest, write_manifest
from tests.data import sources

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | sources.texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(sources.texts, inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=50, deadline=None)
@given(
    sources.utterances(
        text=sources.lines,
        language=st.sampled_from(["", "vi"]),
        span=st.none() | sources.spans,
        # `references` has a meaning, and is refused where it is no list of ids.
        extras=st.dictionaries(sources.texts.filter(lambda key: key != "references"), anything, max_size=3),
    )
)
def test_what_is_written_is_read(written: list[Utterance]) -> None:
    with TemporaryDirectory() as name:
        utterances = [replace(utterance, audio=Path(name) / "wavs" / utterance.audio) for utterance in written]
        write_manifest(Path(name) / "manifest.jsonl", utterances)
        assert read_manifest(Path(name) / "manifest.jsonl") == utterances


def utterance(audio: Path) -> Utterance:
    return Utterance("a", audio, "مرحبًا", "marta")


def test_the_file_is_plain_utf8(tmp_path: Path) -> None:
    write_manifest(tmp_path / "m.jsonl", [utterance(tmp_path / "a.wav")])
    line = (tmp_path / "m.jsonl").read_text(encoding="utf-8")
    assert "مرحبًا" in line
    assert json.loads(line) == {"id": "a", "audio": "a.wav", "text": "مرحبًا", "speaker": "marta"}


def test_a_folder_may_move_with_its_audio(tmp_path: Path) -> None:
    write_manifest(tmp_path / "here" / "m.jsonl", [utterance(tmp_path / "here" / "wavs" / "a.wav")])
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert read_manifest(tmp_path / "there" / "m.jsonl")[0].audio == tmp_path / "there" / "wavs" / "a.wav"


@pytest.mark.parametrize("elsewhere", ["other/a.wav", "here/../other/a.wav"])
def test_audio_elsewhere_stays_where_it_is(tmp_path: Path, elsewhere: str) -> None:
    write_manifest(tmp_path / "here" / "m.jsonl", [utterance(tmp_path / elsewhere)])
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert read_manifest(tmp_path / "there" / "m.jsonl")[0].audio == tmp_path / "other" / "a.wav"


def test_a_path_from_the_working_folder_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_manifest(Path("m.jsonl"), [utterance(Path("a.wav")), utterance(Path("../b.wav"))])
    monkeypatch.chdir("/")
    assert [u.audio for u in read_manifest(tmp_path / "m.jsonl")] == [tmp_path / "a.wav", tmp_path.parent / "b.wav"]


PARTS = ["..", ".", "", "here", "here2", "a..b", "é", "x y"]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["", "/", "//", "FOLDER/", "OUTSIDE/"]), st.lists(st.sampled_from(PARTS), max_size=4))
def test_audio_is_stored_as_paths_would_say(root: str, parts: list[str]) -> None:
    """Paths are compared as strings, without `pathlib`, which takes most of the time of a long manifest."""
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.chdir(name)
        here = Path(name) / "here"
        audio = Path(root.replace("FOLDER", str(here)).replace("OUTSIDE", name) + "/".join(parts))
        for folder in (Path("here"), here, Path()):
            write_manifest(folder / "m.jsonl", [utterance(audio)])
            stored = json.loads((folder / "m.jsonl").read_text(encoding="utf-8"))["audio"]
            beside = folder.absolute()
            whole = audio.resolve() if ".." in audio.parts else audio.absolute()
            assert stored == (whole.relative_to(beside) if whole.is_relative_to(beside) else whole).as_posix()


@pytest.mark.parametrize(
    "more",
    [
        {"language": "vi", "span": Span(0, None), "extras": {"references": [], "scene": ""}},
        {"id": "", "text": "", "speaker": "", "span": Span(1.5, 2)},
        {},
    ],
)
def test_a_line_says_what_is_not_empty_in_the_order_of_the_fields(more: dict[str, Any]) -> None:
    one = replace(utterance(Path("wavs/a.wav")), **more)
    everything = asdict(one) | {"audio": "wavs/a.wav"}
    due = {key: value for key, value in everything.items() if value not in (None, {}, "") or key in ("text", "speaker")}
    assert list(one.to_json().items()) == list(due.items())


def test_lines_that_are_not_wanted_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"{not json\n" + json.dumps(GOOD).encode() + b"\n{bad\n")
    read = iterate_manifest(path, lambda line: b"not" not in line)
    assert next(read).id == "a"
    with pytest.raises(DataError, match=r"m\.jsonl:3"):
        next(read)


GOOD: dict[str, Any] = {"id": "a", "audio": "a.wav", "text": "hello", "speaker": "marta"}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{not json", "line 1"),
        (b'"a string"', "not a JSON object"),
        (b'{"id": "\xff"}', "not UTF-8"),
        ({"text": None}, "`text` is None"),
        ({"id": 3}, "`id` is 3, which is no str"),
        ({"language": ["vi"]}, "`language`"),
        ({"extras": []}, "`extras`"),
        ({"extras": {"references": "b"}}, "not a list of ids"),
        ({"extras": {"references": None}}, "not a list of ids"),
        ({"span": [0, 1]}, "start and end"),
        ({"span": {"start": "0", "end": 1}}, "start and end"),
        ({"span": {"start": 0}}, "start and end"),
        ({"span": {"start": 2, "end": 1}}, "must run forwards"),
        ({"span": {"start": -1, "end": None}}, "must run forwards"),
        ({"span": {"start": float("nan"), "end": 1}}, "must run forwards"),
        ({"span": {"start": 0, "end": float("nan")}}, "must run forwards"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes | dict[str, Any], complaint: str) -> None:
    bad = line if isinstance(line, bytes) else json.dumps(GOOD | line).encode()
    path = tmp_path / "m.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + bad + b"\n")
    with pytest.raises(DataError, match=r"m\.jsonl:3.*" + complaint) as caught:
        read_manifest(path)
    assert caught.value.hint


@pytest.mark.parametrize("key", GOOD)
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    line = {name: value for name, value in GOOD.items() if name != key}
    (tmp_path / "m.jsonl").write_text(json.dumps(line))
    with pytest.raises(DataError, match=rf"m\.jsonl:1: there is no `{key}`"):
        read_manifest(tmp_path / "m.jsonl")


def test_no_manifest_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no manifest"):
        read_manifest(tmp_path / "m.jsonl")


def test_a_failed_write_keeps_the_old_manifest(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_manifest(path, [utterance(tmp_path / "a.wav")])
    with pytest.raises(TypeError):
        write_manifest(path, [replace(utterance(tmp_path / "a.wav"), extras={"not json": object()})])
    assert len(read_manifest(path)) == 1
    assert list(tmp_path.iterdir()) == [path]
