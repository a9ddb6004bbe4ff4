"""Batches of clips by faster-whisper's procedure with a small random Whisper: equal results alone and in a batch, and
the alignment of tokens with frames."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from myna.audio.files import Samples, read_audio
from myna.core.errors import ConfigError
from myna.data.manifest import read_manifest
from myna.demo.run import BUNDLED
from myna.listen.asr import ASR, GPU_BATCH_CLIPS, TimedTranscript, Transcript, decode_clips
from myna.listen.torch_whisper import TorchWhisperNetwork, time_warping
from tests.evaluate.tiny_scorers import save_whisper
from tests.listen.transformers_beams import search_by_transformers
from tests.real_models import WHISPER

RATE = 16_000
ROOT = Path(__file__).parents[2]


def sound(seed: int, seconds: float) -> Samples:
    """Make two tones, one after the other."""
    random = np.random.default_rng(seed)
    times = np.arange(round(seconds * RATE)) / RATE
    first, second = random.uniform(150, 900, 2)
    pitches = np.where(times < seconds / 2, first, second)
    return np.asarray(0.3 * np.sin(2 * np.pi * pitches * times), np.float32)


@pytest.fixture(scope="module")
def asr(tmp_path_factory: pytest.TempPathFactory) -> ASR:
    return ASR.open(str(save_whisper(tmp_path_factory.mktemp("whisper"), seconds=30)))


CLIPS = [sound(seed, seconds) for seed, seconds in enumerate((29.0, 20.0, 0.6, 26.0))]
LANGUAGES = ["en", None, "ar", None]


@pytest.fixture
def faster_whisper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the list of symbols that are no speech: it needs more of a tokenizer than letters."""
    package = pytest.importorskip("faster_whisper.tokenizer")
    monkeypatch.setattr(package.Tokenizer, "non_speech_tokens", ())


@pytest.mark.extras
@pytest.mark.usefixtures("faster_whisper")
def test_a_clip_has_the_same_words_alone_and_in_a_batch(asr: ASR) -> None:
    together = asr.transcribe_words_batch(CLIPS, RATE, LANGUAGES)
    for clip, language, among_others in zip(CLIPS, LANGUAGES, together, strict=True):
        alone = asr.transcribe_words(clip, RATE, language)
        assert alone.words and alone.text == among_others.text
        assert [(one.start, one.end) for one in alone.words] == [(one.start, one.end) for one in among_others.words]
        assert alone.avg_log_prob == pytest.approx(among_others.avg_log_prob, abs=1e-5)
        assert (alone.language, round(alone.language_probability, 4)) == (
            among_others.language,
            round(among_others.language_probability, 4),
        )
        assert alone.language == (language or alone.language) and (language is None) == (alone.language_probability < 1)
    assert len({round(one.avg_log_prob, 4) for one in together}) > 2, "a clip in another's place would be found"
    texts = asr.transcribe_batch(CLIPS, RATE, LANGUAGES)
    assert all(text.text for text in texts)


@pytest.mark.extras
@pytest.mark.usefixtures("faster_whisper")
def test_short_windows_are_hardly_longer_than_their_clips(asr: ASR, monkeypatch: pytest.MonkeyPatch) -> None:
    whisper = asr._whisper  # type: ignore[attr-defined]
    encode, shapes = whisper.encode, []

    def encode_any_width(features: Samples) -> object:
        shapes.append(features.shape)
        return encode(np.pad(features, ((0, 0), (0, 0), (0, 3000 - features.shape[-1]))))

    monkeypatch.setattr(whisper, "encode", encode_any_width)
    clips = [sound(seed, seconds) for seed, seconds in enumerate((0.6, 11.0, 29.5))]
    together = decode_clips(whisper, clips, ["en"] * 3, word_times=False, short_windows=True)
    assert [shape[0] for shape in shapes] == [1] * len(shapes)
    assert [shape[2] for shape in shapes[:3]] == [1000, 1500, 3000]
    assert all(one.segments for one in together)


@pytest.mark.extras
@pytest.mark.usefixtures("faster_whisper")
@pytest.mark.parametrize("frames", [1, 2, 3, 4])
def test_what_is_too_short_for_a_word_has_no_text(asr: ASR, frames: int) -> None:
    """A decoder may stop shortly before the end of its clip, and write text about the rest."""
    transcript = asr.transcribe_words(sound(0, frames / 100), RATE, "en")
    assert np.isnan(transcript.avg_log_prob) == (frames < 4)


@pytest.mark.extras
@pytest.mark.usefixtures("faster_whisper")
def test_silence_in_a_batch_is_not_given_to_the_recogniser(asr: ASR) -> None:
    batch = [np.zeros(RATE, np.float32), CLIPS[0], np.zeros(0, np.float32)]
    silent, spoken, empty = asr.transcribe_words_batch(batch, RATE, ["en"] * 3)
    assert silent.words == empty.words == () and spoken.words
    assert asr.transcribe_batch(batch[:1], RATE, ["en"]) == [Transcript("", looped=False)]
    assert asr.transcribe_words_batch([], RATE, []) == []


@pytest.mark.extras
@pytest.mark.usefixtures("faster_whisper")
def test_a_batch_that_does_not_fit_into_memory_is_halved(asr: ASR, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    encode = TorchWhisperNetwork.encode
    whisper = asr._whisper  # type: ignore[attr-defined]

    def small(features: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> torch.Tensor:
        sizes.append(len(features))
        if len(features) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(whisper.model, features)

    expected = asr.transcribe_words_batch(CLIPS[:3], RATE, LANGUAGES[:3])
    monkeypatch.setattr(whisper, "encode", small)
    assert [one.text for one in asr.transcribe_words_batch(CLIPS[:3], RATE, LANGUAGES[:3])] == [
        one.text for one in expected
    ]
    assert max(sizes) == 3 and 1 in sizes

    def broken(_: object) -> torch.Tensor:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(whisper, "encode", broken)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        asr.transcribe_words_batch(CLIPS[:2], RATE, ["en", "en"])


def test_without_faster_whisper_words_say_what_to_install(
    asr: ASR, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "faster_whisper", None)
    fresh = ASR.open(str(save_whisper(tmp_path)))
    with pytest.raises(ConfigError) as caught:
        fresh.transcribe_words(CLIPS[0], RATE, "en")
    assert caught.value.hint == 'pip install "myna[evaluate]"'
    assert asr.batch_size == 1 and GPU_BATCH_CLIPS > 1
    assert TimedTranscript().text == ""


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3), st.integers(0, 999))
def test_the_path_of_an_alignment_is_the_cheapest(sizes: list[tuple[int, int]], seed: int) -> None:
    random = np.random.default_rng(seed)
    costs = [random.normal(size=size).astype(np.float32) for size in sizes]
    for cost, path in zip(costs, time_warping(costs), strict=True):
        tokens, frames = cost.shape
        assert path[0] == (0, 0) and path[-1] == (tokens - 1, frames - 1)
        steps = {(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(path)}
        assert steps <= {(0, 1), (1, 0), (1, 1)}
        total = sum(float(cost[place]) for place in path)
        assert total == pytest.approx(cheapest(cost, tokens - 1, frames - 1), abs=1e-5)


def cheapest(cost: npt.NDArray[np.float32], token: int, frame: int) -> float:
    before = [(token - 1, frame - 1), (token - 1, frame), (token, frame - 1)]
    costs = [cheapest(cost, *one) for one in before if min(one) >= 0]
    return float(cost[token, frame]) + min(costs, default=0.0)


def test_a_transcript_that_runs_to_its_limit_is_aligned(asr: ASR) -> None:
    """The transcript is one time and then letters to the end: an alignment has more tokens than were written."""
    model, tokenizer = asr._model, asr._tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    network = TorchWhisperNetwork(model, tokenizer)
    start = [tokenizer.token_to_id(f"<|{name}|>") for name in ("startoftranscript", "en", "transcribe")]
    end, first_time = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|0.00|>")
    encoded = network.encode(np.random.default_rng(0).normal(size=(2, 8, 3000)).astype(np.float32))
    limit = model.config.max_target_positions
    [first, second] = network.generate(
        encoded,
        [start, start],
        beam_size=5,
        max_length=limit,
        suppress_tokens=[end, *range(first_time + 1, model.config.vocab_size)],
        max_initial_timestamp_index=50,
    )
    tokens = [one.sequences_ids[0][1:] for one in (first, second)]
    assert [len(row) + 1 for row in tokens] == [limit // 2] * 2 and max(map(max, tokens)) < end
    aligned = network.align(encoded, start, tokens, [3000, 3000])
    assert [one.alignments[-1] for one in aligned] == [(len(row), 1499) for row in tokens]


@pytest.mark.extras
@pytest.mark.skipif(
    not (WHISPER / "model.bin").is_file() and os.environ.get("MYNA_EXTRAS") != "required",
    reason="`make test-extras` fetches the models that it needs",
)
def test_a_real_whisper_writes_the_tokens_that_transformers_beam_search_writes(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/whisper_to_transformers.py"), str(WHISPER), str(tmp_path / "whisper")]
    subprocess.run(command, check=True)
    asr = ASR.open(str(tmp_path / "whisper"))
    whisper, model = asr._whisper, asr._model  # type: ignore[attr-defined]
    recordings = [read_audio(one.audio, sample_rate=RATE) for one in read_manifest(BUNDLED / "manifest.jsonl")[:7]]
    clips = [recordings[0], np.concatenate(recordings[1:4]), np.concatenate(recordings[4:])]
    generate, calls = whisper.model.generate, []

    def spy(encoded: torch.Tensor, prompts: list[list[int]], **options: Any) -> Any:
        calls.append((encoded, prompts, options, generate(encoded, prompts, **options)))
        return calls[-1][-1]

    whisper.model.generate = spy
    decoded = decode_clips(whisper, clips, ["en"] * 3, word_times=True)
    assert all(len(one.words) > 5 for one in decoded) and calls
    special = whisper.model._special
    for encoded, prompts, options, results in calls:
        written, scores = search_by_transformers(
            model,
            encoded,
            torch.tensor(prompts),
            special,
            beams=options["beam_size"],
            max_tokens=options["max_length"] // 2,
            suppressed=options["suppress_tokens"],
            last_initial_time=options["max_initial_timestamp_index"],
        )
        assert [[*one.sequences_ids[0], special.end] for one in results] == written
        means = [one.scores[0] * (len(row) - 1) / len(row) for one, row in zip(results, written, strict=True)]
        assert means == pytest.approx(scores, abs=1e-5)
