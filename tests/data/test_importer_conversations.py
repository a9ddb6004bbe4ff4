"""ChatML and ms-swift: targets, their texts and their references."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from myna.core.io import bytes_hash
from myna.data.importers import ImportResult, import_source
from myna.data.manifest import Span, Utterance
from tests.data.sources import write_json, write_lines

SYSTEM = "Generate audio following instruction.\n\n<|scene_desc_start|>\nA quiet room.\n<|scene_desc_end|>"


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def audio(path: Path | str, **more: Any) -> dict[str, Any]:
    return {"type": "audio", "audio_url": str(path)} | more


def says(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": content[0] if len(content) == 1 else list(content)}


def chatml(folder: Path, *samples: Any) -> ImportResult:
    return import_source(str(write_json(folder / "train.json", list(samples))), media=folder / "media")


def by_id(imported: ImportResult) -> dict[str, Utterance]:
    assert imported.rejected == []
    return {utterance.id: utterance for utterance in imported.utterances}


def pairs(clips: list[Path]) -> list[dict[str, Any]]:
    """Layout A: text from the user, audio from the assistant, twice."""
    return [
        says("system", SYSTEM),
        says("user", "the reference"),
        says("assistant", audio(clips[0])),
        says("user", "the target"),
        says("assistant", audio(clips[1])),
    ]


def arabic(clips: list[Path], **changes: Any) -> dict[str, Any]:
    """Layout B: the user brings reference text, reference audio and the wish; the assistant text and audio."""
    wish = "Please generate speech for given text in reference audio's voice: والميزة فيها"
    unset = {"raw_audio": "", "duration": None, "offset": None}
    return {
        "messages": [
            says("system", "You are a helpful assistant."),
            says("user", text("مثل ما قال"), audio(clips[0], **unset), text(wish)),
            says("assistant", text("والميزة فيها"), audio(clips[1], **unset | {"duration": 0.25})),
        ],
        "start_index": 0,
        "speaker": "sample_00000000",
        "misc": {
            "sample_id": "sample_00000000",
            "ref_transcript": "مثل ما قال",
            "target_transcript": "والميزة فيها",
            "duration": 0.25,
        },
    } | changes


def test_pairs_before_start_index_are_references(tmp_path: Path, clips: list[Path]) -> None:
    sample = {
        "messages": pairs(clips),
        "start_index": 3,
        "speaker": "belinda",
        "misc": {"sample_id": "s", "mood": "calm"},
    }
    found = by_id(chatml(tmp_path, sample))
    reference = Utterance("s/ref0", clips[0], "the reference", "belinda", extras={"reference_only": True})
    system = {"system": "Generate audio following instruction.", "scene": "A quiet room."}
    target = Utterance(
        "s", clips[1], "the target", "belinda", extras={"mood": "calm", **system, "references": ["s/ref0"]}
    )
    assert found == {"s/ref0": reference, "s": target}


def test_without_start_index_every_turn_of_the_assistant_is_learned(tmp_path: Path, clips: list[Path]) -> None:
    found = by_id(chatml(tmp_path, {"messages": pairs(clips)}))
    assert [(each.id, each.text, each.references, each.is_target) for each in found.values()] == [
        ("train-1/0", "the reference", None, True),
        ("train-1/1", "the target", ("train-1/0",), True),
    ]


def test_the_arabic_layout(tmp_path: Path, clips: list[Path]) -> None:
    found = by_id(chatml(tmp_path, arabic(clips)))
    id = "sample_00000000"
    assert found[f"{id}/ref0"] == Utterance(f"{id}/ref0", clips[0], "مثل ما قال", id, extras={"reference_only": True})
    target = found[id]
    assert (target.audio, target.text, target.span, target.references) == (
        clips[1],
        "والميزة فيها",
        None,
        (f"{id}/ref0",),
    )
    kept = {"ref_transcript", "target_transcript", "duration", "system", "references"}
    assert set(target.extras) == kept


def test_the_wish_is_not_spoken(tmp_path: Path, clips: list[Path]) -> None:
    sample = arabic(clips, misc=None)
    sample["messages"][2] = says("assistant", audio(clips[1]))
    assert by_id(chatml(tmp_path, sample))["train-1"].text == "والميزة فيها"


def test_misc_fills_in_where_the_turns_are_silent(tmp_path: Path, clips: list[Path]) -> None:
    sample = arabic(clips)
    sample["messages"][1:] = [says("user", audio(clips[0])), says("assistant", audio(clips[1]))]
    found = by_id(chatml(tmp_path, sample))
    assert [each.text for each in found.values()] == ["مثل ما قال", "والميزة فيها"]


def test_an_answer_in_words_is_not_the_next_text(tmp_path: Path, clips: list[Path]) -> None:
    messages = [
        says("user", text("the reference"), audio(clips[0])),
        says("assistant", "I understand the reference voice."),
        says("user", "the target"),
        says("assistant", audio(clips[1])),
    ]
    found = by_id(chatml(tmp_path, {"messages": messages, "misc": {"sample_id": "s"}}))
    assert [each.text for each in found.values()] == ["the reference", "the target"]


def test_audio_in_the_system_message_is_a_reference(tmp_path: Path, clips: list[Path]) -> None:
    scene = (text("<|scene_desc_start|>\nSPEAKER0:"), audio(clips[0]), text("<|scene_desc_end|>"))
    messages = [says("system", *scene), says("user", "hello"), says("assistant", audio(clips[1]))]
    found = by_id(chatml(tmp_path, {"messages": messages, "misc": {"sample_id": "s"}}))
    assert found["s/ref0"].text == "" and not found["s/ref0"].is_target
    assert found["s"].references == ("s/ref0",) and found["s"].extras["scene"] == "SPEAKER0:"
    assert "system" not in found["s"].extras


def test_one_reference_serves_many_samples(tmp_path: Path, clips: list[Path]) -> None:
    samples = [arabic([clips[0], clips[number]], misc={"sample_id": str(number)}) for number in (1, 2, 3)]
    samples[2]["messages"][1]["content"][0] = text("other words")
    found = by_id(chatml(tmp_path, *samples))
    assert list(found) == ["1/ref0", "1", "2", "3/ref0", "3"]
    assert found["2"].references == ("1/ref0",) and found["3"].references == ("3/ref0",)


def test_raw_audio_is_kept_once_under_its_hash(tmp_path: Path, clips: list[Path]) -> None:
    data = clips[0].read_bytes()
    raw = audio("placeholder", raw_audio=base64.b64encode(data).decode(), offset=0.125)
    samples = [{"messages": [says("user", "hi"), says("assistant", raw)], "misc": {"sample_id": id}} for id in "ab"]
    found = by_id(chatml(tmp_path, *samples))
    kept = tmp_path / "media" / f"{bytes_hash(data)}.wav"
    assert {each.audio for each in found.values()} == {kept} and kept.read_bytes() == data
    assert found["a"].span == Span(0.125, None)
    assert list(kept.parent.iterdir()) == [kept]


def test_json_lines_and_a_single_object(tmp_path: Path, clips: list[Path]) -> None:
    samples = [arabic(clips, misc={"sample_id": id}) for id in "ab"]
    for path in (tmp_path / "train.jsonl", tmp_path / "lines.json"):
        lines = import_source(str(write_lines(path, samples)), media=tmp_path)
        assert lines.format == "chatml" and {"a", "b"} <= set(by_id(lines))
    single = import_source(str(write_json(tmp_path / "one.json", samples[0])), media=tmp_path)
    assert set(by_id(single)) == {"a", "a/ref0"}


def test_paths_may_start_at_the_file_or_at_the_working_folder(
    tmp_path: Path, clips: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(clips[0].parent)
    sample = arabic([Path(clips[0].name), Path("here.wav")])
    (tmp_path / "here.wav").write_bytes(clips[1].read_bytes())
    assert len(by_id(chatml(tmp_path, sample))) == 2


def test_what_is_wrong_with_a_conversation(tmp_path: Path, clips: list[Path]) -> None:
    def answered(part: Any) -> dict[str, Any]:
        return {"messages": [says("user", "hi"), says("assistant", part)]}

    wrong: list[tuple[Any, str]] = [
        (answered(audio("")), "placeholder without clip"),
        (answered(audio("", raw_audio="?? not base64")), "unreadable audio"),
        (answered(audio(clips[0], offset=3, duration=1)), "bad span"),
        (answered(audio(clips[0], offset="soon")), "bad span"),
        (answered(audio("x" * 9_000)), "missing file"),
        (answered("only words"), "malformed"),
        (answered({"type": "image"}), "malformed"),
        ({"messages": "hello"}, "malformed"),
        ({"messages": [{"role": "user"}]}, "malformed"),
        ({"messages": pairs(clips), "start_index": 9}, "malformed"),
        ({"messages": pairs(clips), "start_index": "3"}, "malformed"),
        (arabic(clips, misc="none"), "malformed"),
        (arabic([clips[0], clips[0]]), "reference equals target"),
        (arabic([Path("gone.wav"), clips[0]], misc={"sample_id": "s"}), "missing file"),
    ]
    result = chatml(tmp_path, *[sample for sample, _ in wrong])
    assert result.utterances == []
    reasons = {item.line: item.reason for item in reversed(result.rejected)}
    assert reasons == {number: reason for number, (_, reason) in enumerate(wrong, start=1)}
    assert result.rejected[-1].reason == "missing reference" and result.rejected[-1].id == "s"


# -- ms-swift ----------------------------------------------------------------------------------------------------------


def swift(folder: Path, *samples: dict[str, Any]) -> ImportResult:
    result = import_source(str(write_lines(folder / "huo.jsonl", list(samples))), media=folder, speaker="huo")
    assert result.format == "ms_swift"
    return result


def test_the_user_brings_references_and_the_assistant_the_target(tmp_path: Path, clips: list[Path]) -> None:
    messages = [
        says("system", "Speak."),
        says("user", "<audio>the reference"),
        says("assistant", "the target <audio>"),
    ]
    audios = [str(clip) for clip in clips[:2]]
    found = by_id(
        swift(tmp_path, {"id": "s", "messages": messages, "audios": audios, "speaker_id": "lan", "mood": "calm"})
    )
    assert found["s/ref0"].audio == clips[0] and not found["s/ref0"].is_target
    extras = {"mood": "calm", "system": "Speak.", "references": ["s/ref0"]}
    assert found["s"] == Utterance("s", clips[1], "the target", "lan", extras=extras)


def test_a_spoken_answer_takes_the_users_words(tmp_path: Path, clips: list[Path]) -> None:
    messages = [says("user", "the target"), says("assistant", "<audio>")]
    found = by_id(swift(tmp_path, {"messages": messages, "audios": [str(clips[0])]}))
    assert found["huo-1"].text == "the target" and found["huo-1"].speaker == "huo"


@pytest.mark.parametrize("user", [[says("user", "<audio> /translate")], []])
def test_a_transcription_is_a_target_too(tmp_path: Path, clips: list[Path], user: list[dict[str, Any]]) -> None:
    messages = [*user, says("assistant", "大家好")]
    found = by_id(swift(tmp_path, {"messages": messages, "audios": [str(clips[0])]}))
    assert [(each.audio, each.text, each.references) for each in found.values()] == [(clips[0], "大家好", None)]


@pytest.mark.parametrize(("placeholders", "clips_listed"), [(2, 1), (1, 2), (1, 0), (0, 2)])
def test_every_placeholder_has_its_clip(
    tmp_path: Path, clips: list[Path], placeholders: int, clips_listed: int
) -> None:
    messages = [says("user", "hi"), says("assistant", "hello" + "<audio>" * placeholders)]
    result = swift(tmp_path, {"messages": messages, "audios": [str(clip) for clip in clips[:clips_listed]]})
    assert result.counts == {"placeholder without clip": 1}


def test_what_is_wrong_with_a_line(tmp_path: Path, clips: list[Path]) -> None:
    one = [str(clips[0])]
    wrong: list[dict[str, Any]] = [
        {"messages": [says("user", "<audio>"), says("user", "and?")], "audios": one},
        {"messages": [says("assistant", {"type": "audio"})], "audios": one},
        {"messages": [says("assistant", "<audio>")], "audios": [{"url": "x"}]},
        {"messages": [says("assistant", "<audio>")], "audios": "x.wav"},
        {"audios": one},
    ]
    assert swift(tmp_path, *wrong).counts == {"malformed": len(wrong)}
