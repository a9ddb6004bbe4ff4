"""The engine on a tiny real model with its real codec: it says what the renderer and the model say."""

from __future__ import annotations

import base64
import io
import itertools
import re
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from myna.audio.files import read_audio, write_audio
from myna.core.errors import AudioError, MynaError, ReferenceWarning, SpeakError
from myna.data.conversation import AudioClip, Reference, ReferencePlacement, speech_conversation
from myna.models import open_family, save_tiny_model
from myna.models.base import Sampling, require_speaking
from myna.models.quantized import quantized_linears
from myna.models.ref import ModelRef
from myna.speak.engine import Engine, Speech, encode_clip
from myna.speak.loading import load_engine
from myna.speak.request import ReferenceRecording, SpeechRequest, read_reference
from tests.models.higgs_v2.conftest import generate

GREEDY: dict[str, Any] = {"temperature": 0, "max_seconds": 0.4}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    family = open_family(str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")))
    model = family.load_model(dtype=torch.float32, device="cpu", text_head=False)
    return Engine(family, model.train(), require_speaking(family).load_codec())


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Make two recordings, one of them at another rate and not a whole number of frames long."""
    folder = tmp_path_factory.mktemp("voices")
    for name, rate, seconds, pitch in (("robin", 24_000, 0.4, 320), ("heron", 16_000, 0.51, 110)):
        time = np.arange(round(seconds * rate)) / rate
        write_audio(folder / f"{name}.wav", (0.4 * np.sin(2 * np.pi * pitch * time)).astype(np.float32), rate)
    return [folder / "robin.wav", folder / "heron.wav"]


# Voices


def test_a_voice_is_the_recordings_codes_and_words(engine: Engine, voices: list[Path]) -> None:
    robin, heron = (
        engine.encode_reference(ReferenceRecording(*one))
        for one in zip(voices, ("  good\nmorning ", "cafe\u0301"), strict=False)
    )
    assert (robin.text, robin.clip.id) == ("good morning", "robin")
    assert heron.text == "caf\u00e9", "as a manifest would have it"
    assert not robin.clip.target
    samples = read_reference(voices[0], sample_rate=24_000)
    assert np.array_equal(robin.clip.codes, engine.codec.encode(samples[None])[0])
    assert robin.clip.codes.shape == (10, 8)
    assert heron.clip.codes.shape == (12, 8), "0.51 seconds hold twelve whole frames"


def test_a_poor_recording_of_a_voice_is_warned_of(engine: Engine, voices: list[Path]) -> None:
    with pytest.warns(ReferenceWarning, match=r"robin.*s of speech: give 3 to 15 s"):
        engine.encode_reference(ReferenceRecording(voices[0], "good morning"))


def test_a_clip_is_trimmed_to_whole_frames(engine: Engine) -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 5 * engine.codec.hop + 7).astype(np.float32)
    assert np.array_equal(encode_clip(engine.codec, noise), encode_clip(engine.codec, noise[: 5 * engine.codec.hop]))


def test_a_recording_of_less_than_a_frame_is_refused(engine: Engine, tmp_path: Path) -> None:
    write_audio(
        tmp_path / "click.wav", np.sin(np.arange(engine.codec.hop - 1), dtype=np.float32), engine.codec.sample_rate
    )
    with pytest.raises(SpeakError, match=r"click\.wav is shorter than one frame of 40 ms"):
        engine.encode_reference(ReferenceRecording(tmp_path / "click.wav", "click"))


def test_a_recording_that_is_not_there_is_named(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(AudioError, match=r"nobody\.wav"):
        engine.encode_reference(ReferenceRecording(tmp_path / "nobody.wav", "hello"))


# Lines


@pytest.mark.parametrize("text", ["", "  \n\t"])
def test_a_line_without_words_is_refused_by_name(engine: Engine, text: str) -> None:
    frames: list[int] = []
    with pytest.raises(SpeakError, match="greeting has no text to speak") as caught:
        engine.speak([SpeechRequest("fine", **GREEDY), SpeechRequest(text, id="greeting", **GREEDY)], frames.append)
    assert caught.value.hint and frames == [], "before anything is spoken"


def test_a_control_token_in_a_line_is_refused(engine: Engine) -> None:
    with pytest.raises(MynaError, match="control token"):
        engine.speak([SpeechRequest("hello <|eot_id|>", **GREEDY)])


def test_no_requests_give_no_speech(engine: Engine) -> None:
    assert engine.speak([]) == []


@pytest.mark.parametrize("place", ["turn", "system"])
def test_the_prompt_is_that_of_the_training_renderer(
    engine: Engine, voices: list[Path], place: ReferencePlacement
) -> None:
    reference = engine.encode_reference(ReferenceRecording(voices[0], "good morning"))
    placed = Engine(engine.family, engine.model, engine.codec, reference_placement=place)
    speech = placed.speak([SpeechRequest(" hello  there ", (reference,), scene="A room.", **GREEDY)])[0]
    prompt = engine.family.render(
        speech_conversation(
            "hello there", id="line", references=(reference,), scene="A room.", reference_placement=place
        )
    )
    codes = generate(engine.family, engine.model, [prompt], Sampling(**GREEDY))[0].codes()
    assert np.array_equal(speech.codes, codes) and len(speech.codes)
    assert np.array_equal(speech.samples, engine.codec.decode(codes))
    assert speech.samples.dtype == np.float32 and len(speech.samples) == len(speech.codes) * engine.codec.hop
    assert not speech.stopped, "a random model does not find its end"


def test_progress_is_reported_in_frames(engine: Engine) -> None:
    frames: list[int] = []
    speech = engine.speak([SpeechRequest("hello", **GREEDY)], frames.append)[0]
    assert frames == list(range(1, len(speech.codes) + 1))


def test_dropout_is_off(engine: Engine) -> None:
    assert not engine.model.training


# The end


@contextmanager
def determined(engine: Engine, code: int, from_step: int = 0) -> Iterator[None]:
    """A model whose codebook 0 says `code` from a certain step on."""
    config: Any = engine.family.config
    bias = torch.zeros(config.num_codebooks * config.codebook_size)
    bias[code] = 1e6
    calls = iter(range(10_000))
    head: Any = engine.model.audio_lm_head
    hook = head.register_forward_hook(lambda _module, _inputs, out: out + bias * (next(calls) >= from_step))
    yield
    hook.remove()


def test_a_model_that_ends_at_once_gives_silence_of_no_length(engine: Engine) -> None:
    with determined(engine, code=65):
        speech = engine.speak([SpeechRequest("hello", **GREEDY)])[0]
    assert speech.stopped and speech.codes.shape == (0, 8)
    assert speech.samples.shape == (0,) and speech.samples.dtype == np.float32


def test_a_model_that_ends_says_so(engine: Engine) -> None:
    with determined(engine, code=65, from_step=5):
        speech = engine.speak([SpeechRequest("hello", **GREEDY)])[0]
    assert speech.stopped and len(speech.codes) == 5
    assert len(speech.samples) == 5 * engine.codec.hop


# Several speakers


def thoughts(engine: Engine, line: SpeechRequest) -> torch.Tensor:
    """Return the model's logits for the first frame. The choice of a random model alone hardly depends on its
    prompt."""
    seen: list[torch.Tensor] = []
    head: Any = engine.model.audio_lm_head
    hook = head.register_forward_hook(lambda _module, _inputs, out: seen.append(out))
    engine.speak([replace(line, max_seconds=0.04)])
    hook.remove()
    return seen[0]


def test_several_speakers_are_heard_in_their_order(engine: Engine, voices: list[Path]) -> None:
    robin, heron = (
        engine.encode_reference(ReferenceRecording(*one))
        for one in zip(voices, ("good morning", "good evening"), strict=False)
    )
    text = "[SPEAKER0] hello [SPEAKER1] well hello"
    ways: list[tuple[Reference, ...]] = [(robin, heron), (heron, robin), (robin,), ()]
    lines = [SpeechRequest(text, references, id=f"{number}", **GREEDY) for number, references in enumerate(ways)]
    heard = [thoughts(engine, line) for line in lines]
    for one, other in itertools.combinations(heard, 2):
        assert not torch.allclose(one, other, atol=1e-4)
    for line, speech in zip(lines, engine.speak(lines), strict=True):
        assert np.array_equal(speech.codes, engine.speak([line])[0].codes), "company changes nothing"


def test_lines_with_the_same_words_sound_alike_only_under_the_same_seed_and_id(engine: Engine) -> None:
    def codes(id: str, seed: int) -> bytes:
        return engine.speak([SpeechRequest("hello", id=id, max_seconds=0.4, seed=seed)])[0].codes.tobytes()

    assert codes("a", 1) == codes("a", 1)
    assert len({codes("a", 1), codes("a", 2), codes("b", 1)}) == 3


def test_codes_of_another_codec_are_refused_by_the_clips_name(engine: Engine) -> None:
    foreign = Reference("hello", AudioClip("foreign", np.full((4, 8), 1000, np.uint16)))
    with pytest.raises(MynaError, match="clip foreign has code 1000"):
        engine.speak([SpeechRequest("hello", (foreign,), **GREEDY)])


# What comes out


def test_speech_is_saved_and_shown_in_notebooks(tmp_path: Path) -> None:
    samples = np.linspace(-1.5, 0.5, 240, dtype=np.float32)
    speech = Speech(samples, np.zeros((1, 8), np.uint16), finish_reason="stop", sample_rate=24_000)
    assert speech.seconds == 0.01
    stored = read_audio(speech.save(tmp_path / "out.wav"), sample_rate=24_000)
    [encoded] = re.findall(r'src="data:audio/wav;base64,([^"]+)"', speech._repr_html_())
    with wave.open(io.BytesIO(base64.b64decode(encoded))) as player:
        shown = np.frombuffer(player.readframes(240), "<i2") / 32767
        assert (player.getframerate(), player.getnchannels()) == (24_000, 1)
    for audio in (stored, shown):
        assert np.abs(audio - samples.clip(-1, 1)).max() < 1e-3


def test_a_stream_has_the_samples_of_its_file(engine: Engine, voices: list[Path]) -> None:
    reference = engine.encode_reference(ReferenceRecording(voices[0], "good morning"))
    request = SpeechRequest("hello there", (reference,), max_seconds=4.0, seed=3)
    whole = engine.speak([request])[0]
    pieces = list(engine.stream(request))
    assert len(pieces) > 1 or len(whole.codes) <= 12
    assert np.array_equal(np.concatenate(pieces), whole.samples)


def test_an_abandoned_stream_frees_its_row(engine: Engine) -> None:
    endless = engine.stream(SpeechRequest("hello", temperature=0, max_seconds=8.0))
    first = next(endless)
    assert len(first) == 2 * engine.codec.hop, "the first window is short"
    endless.close()
    after = engine.speak([SpeechRequest("hello", **GREEDY)])[0]
    assert len(after.codes) and engine._batch is not None and not engine._batch.busy


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantized_weights_speak_from_a_model_and_from_a_run(tmp_path: Path, kind: Any) -> None:
    folder = save_tiny_model(tmp_path / "model")
    engine = load_engine(ModelRef.find_model(str(folder)), device="cpu", quantization=kind)
    assert len(list(quantized_linears(engine.model))) == 2 * 10, "every projection of both layers"
    whole = load_engine(ModelRef.find_model(str(folder)), device="cpu")
    first, second = (one.speak([SpeechRequest("hello", **GREEDY)])[0].codes[:, 0] for one in (engine, whole))
    assert len(first) == len(second) and (first == second).mean() > 0.3, "near the model that it was made of"
    with pytest.raises(SpeakError, match="fp8 weights need a GPU"):
        load_engine(ModelRef.find_model(str(folder)), device="cpu", quantization="fp8")
    with pytest.raises(SpeakError, match="int4 is no way to store weights"):
        load_engine(ModelRef.find_model(str(folder)), device="cpu", quantization="int4")  # type: ignore[arg-type]
