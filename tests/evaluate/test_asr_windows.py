"""Batches of clips by faster-whisper's procedure over a small random Whisper of transformers: the same alone and among
others; and the alignment of tokens with frames."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from myna.audio.files import Samples
from myna.errors import ConfigError
from myna.evaluate import asr_transformers
from myna.evaluate.asr import ASR, TimedTranscript, Transcript
from myna.evaluate.asr_torch_whisper import TimestampRules, TorchWhisperNetwork, time_warping
from myna.evaluate.asr_windows import decode_clips
from tests.evaluate.tiny_scorers import save_whisper

RATE = 16_000


def sound(seed: int, seconds: float) -> Samples:
    """Two tones, one after the other."""
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
    """Its list of symbols that are no speech needs more of a tokenizer than letters."""
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
    whisper = asr._backend._whisper  # type: ignore[union-attr]
    encode, shapes = whisper.encode, []

    def encode_any_width(features: Samples) -> object:
        shapes.append(features.shape)
        return encode(np.pad(features, ((0, 0), (0, 0), (0, 3000 - features.shape[-1]))))

    monkeypatch.setattr(whisper, "encode", encode_any_width)
    clips = [sound(seed, seconds) for seed, seconds in enumerate((0.6, 11.0, 29.5))]
    together = decode_clips(whisper, clips, ["en"] * 3, word_times=False, short_windows=True)
    assert [shape[0] for shape in shapes] == [1] * len(shapes)
    assert [shape[2] for shape in shapes[:3]] == [1000, 1500, 3000]
    assert all(one.texts for one in together)


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
    whisper = asr._backend._whisper  # type: ignore[union-attr]

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
    assert asr.batch_size == 1 and asr_transformers.GPU_BATCH_CLIPS > 1
    assert TimedTranscript().text == ""


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 999))
def test_the_path_of_an_alignment_is_the_cheapest(tokens: int, frames: int, seed: int) -> None:
    cost = np.random.default_rng(seed).normal(size=(tokens, frames)).astype(np.float32)
    path = time_warping(cost)
    assert path[0] == (0, 0) and path[-1] == (tokens - 1, frames - 1)
    steps = {(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(path)}
    assert steps <= {(0, 1), (1, 0), (1, 1)}

    def cheapest(token: int, frame: int) -> float:
        before = [(token - 1, frame - 1), (token - 1, frame), (token, frame - 1)]
        costs = [cheapest(*one) for one in before if min(one) >= 0]
        return float(cost[token, frame]) + min(costs, default=0.0)

    assert sum(float(cost[place]) for place in path) == pytest.approx(cheapest(tokens - 1, frames - 1), abs=1e-5)


@given(st.data())
def test_the_rules_of_times_are_transformers_own(data: st.DataObject) -> None:
    from transformers import GenerationConfig, WhisperTimeStampLogitsProcessor

    prompt, no_times, end, size = 3, 20, 18, 30
    config = GenerationConfig(eos_token_id=end, bos_token_id=end)
    config.no_timestamps_token_id, config.max_initial_timestamp_index = no_times, 4
    length = data.draw(st.integers(0, 5))
    rows = []
    for _ in range(3):
        row, latest = [1, 2, 3], no_times + 1
        for _ in range(length):
            latest = data.draw(st.integers(latest, size - 1))
            row.append(data.draw(st.sampled_from([5, 6, latest])))
        rows.append(row)
    ids = torch.tensor(rows)
    scores = torch.from_numpy(np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(3, size)) * 3).float()
    expected = WhisperTimeStampLogitsProcessor(config, begin_index=prompt)(ids, scores)
    assert torch.equal(TimestampRules(prompt, no_times, end, 4)(ids, scores), expected)
