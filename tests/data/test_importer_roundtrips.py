"""Round trips of every layout: arbitrary utterances, written as its tools write them, come back the same."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from myna.data.importers import FORMATS, ImportResult
from myna.data.manifest import Utterance
from myna.text.normalization import normalise_text
from tests.data import sources
from tests.data.sources import Write, expected, found, imported

few = settings(max_examples=25, deadline=None)
notes = st.fixed_dictionaries({"gender": st.sampled_from(["female", "male"])})
facts = st.fixed_dictionaries(
    {"duration": st.floats(0.1, 1), "emotion": sources.lines, "quality_score": st.floats(0, 1)}
)
Written = list[Utterance]


def comes_back(write: Write, written: Written, clips: list[Path], *, format: str, **options: Any) -> ImportResult:
    with imported(write, written, clips, **options) as result:
        assert result.format == format
        assert result.rejected == []
        order = {utterance.id: number for number, utterance in enumerate(found(result))}
        assert found(result) == sorted(expected(written), key=lambda utterance: order[utterance.id])
        return result


@few
@given(sources.utterances(span=st.none() | sources.spans, extras=notes))
def test_myna(clips: list[Path], written: Written) -> None:
    comes_back(sources.myna, written, clips, format="myna")


@few
@given(sources.utterances(speaker=sources.names, language=st.just("vi")))
def test_folder(clips: list[Path], written: Written) -> None:
    written = [replace(utterance, id=f"{utterance.speaker}/{utterance.id}") for utterance in written]
    comes_back(sources.folder_of_pairs, written, clips, format="folder", language="vi")


@few
@given(
    sources.utterances(
        text=sources.lines.filter(lambda text: "|" not in text), speaker=st.just("linda"), language=st.just("en")
    )
)
def test_ljspeech(clips: list[Path], written: Written) -> None:
    numbered = [replace(utterance, extras={"original_text": "No. 5"}) for utterance in written]
    comes_back(sources.ljspeech, numbered, clips, format="ljspeech", speaker="linda", language="en")


plain_names = st.text("abcdef0123456789", min_size=1, max_size=8)
as_written = sources.lines.filter(lambda text: not text.isupper() and not re.search(r"\s[,.;:!?](\s|$)", text))


@few
@given(st.lists(plain_names, min_size=4, max_size=4, unique=True), st.lists(as_written, min_size=4, max_size=4))
def test_transcripts(clips: list[Path], ids: list[str], texts: list[str]) -> None:
    speakers = ("one", "two", "two", "three")
    written = [
        Utterance(id, Path(f"{number}.wav"), text, speaker, "vi")
        for number, (id, text, speaker) in enumerate(zip(ids, texts, speakers, strict=True))
    ]
    comes_back(sources.transcripts, written, clips, format="transcripts", language="vi")


@few
@given(sources.utterances(extras=notes))
def test_webdataset(clips: list[Path], written: Written) -> None:
    comes_back(sources.webdataset, written, clips, format="webdataset")


@few
@given(sources.utterances(span=st.none() | sources.spans, extras=notes))
def test_csv(clips: list[Path], written: Written) -> None:
    comes_back(sources.table, written, clips, format="table")


@few
@given(sources.utterances(text=sources.lines, span=st.none() | sources.spans, extras=notes))
def test_tsv(clips: list[Path], written: Written) -> None:
    def write(folder: Path, utterances: Written) -> Path:
        return sources.table(folder, utterances, suffix=".tsv", delimiter="\t")

    comes_back(write, written, clips, format="table")


@few
@given(
    sources.utterances(extras=facts),
    st.sampled_from(["zero_shot_voice_cloning", "single_speaker_smart_voice", "multi_speaker_smart_voice"]),
)
def test_metadata_json(clips: list[Path], written: Written, task: str) -> None:
    unvoiced: dict[str, Any] = {"references": []} if task.endswith("smart_voice") else {}
    written = [replace(u, extras=u.extras | {"task": task, "scene": "quiet_room"} | unvoiced) for u in written]
    comes_back(sources.metadata_json, written, clips, format="metadata_json")


@few
@given(sources.utterances(span=st.none() | sources.spans, extras=notes), st.booleans())
def test_chatml(clips: list[Path], written: Written, raw: bool) -> None:
    def write(folder: Path, utterances: Written) -> Path:
        return sources.chatml(folder, utterances, raw=raw)

    comes_back(write, written, clips, format="chatml")


@few
@given(sources.utterances(span=st.none() | sources.spans), sources.texts, st.booleans())
def test_chatml_references(clips: list[Path], written: Written, words: str, together: bool) -> None:
    """Both layouts: the reference in turns of its own, or with its text in the user's turn."""

    def write(folder: Path, utterances: Written) -> Path:
        reference = {"type": "audio", "audio_url": str(clips[-1])}
        user = [{"type": "text", "text": words}, reference, {"type": "text", "text": "Now say this."}]
        apart = [{"role": "user", "content": words}, {"role": "assistant", "content": reference}]
        samples = []
        for utterance in utterances:
            target = [{"type": "text", "text": utterance.text}, sources.clip(utterance)]
            before = [{"role": "user", "content": user}] if together else apart
            misc = {"sample_id": utterance.id, "speaker": utterance.speaker}
            messages = [*before, {"role": "assistant", "content": target}]
            start = len(messages) - 1
            samples.append({"messages": messages, "start_index": start, "misc": misc, "language": utterance.language})
        return sources.write_lines(folder / "train.jsonl", samples)

    with imported(write, written, clips) as result:
        assert result.format == "chatml" and result.rejected == []
        (reference,) = [each for each in result.utterances if not each.is_target]
        assert reference.id == f"{written[0].id}/ref0" and reference.text == normalise_text(words)
        asked = [replace(each, extras={"references": [reference.id]}) for each in expected(written)]
        assert [each for each in found(result) if each.is_target] == asked


@few
@given(sources.utterances(text=sources.texts.filter(lambda text: "<audio>" not in text), extras=notes))
def test_ms_swift(clips: list[Path], written: Written) -> None:
    comes_back(sources.ms_swift, written, clips, format="ms_swift")


@few
@given(sources.utterances(extras=notes))
def test_parquet(clips: list[Path], written: Written) -> None:
    comes_back(sources.parquet, written, clips, format="hf")


def test_every_format_has_a_round_trip_above() -> None:
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    scored = {"scored_jsonl", "speechocean"}  # in pronunciation/test_importers.py
    assert set(FORMATS) <= tests | {"table", "hf"} | scored and {"csv", "tsv", "parquet"} <= tests


@few
@given(sources.texts)
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalise_text(normalise_text(text)) == normalise_text(text)
