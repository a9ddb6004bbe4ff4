"""Channel simulation: drawn once for each speaker, and kept within bounds."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import augment_natural
import espeak_corpus
import natural_corpus
from corpus_making import channel, loudness
from corpus_making.channel import Channel, Dynamics, has_clean_channel
from corpus_making.loudness import Samples
from myna.errors import DataError

Numbers = Samples | npt.NDArray[np.float64]
RATE = 24_000
SPEAKERS = [f"kokoro2-{number:04d}" for number in range(120)]


def syllables(seconds: float = 2.0, seed: int = 0) -> Samples:
    """Noise of all frequencies that comes and goes as speech does, with silence before and after."""
    times = np.arange(round(seconds * RATE)) / RATE
    envelope = np.clip(np.sin(2 * np.pi * 2 * times), 0, 1) * ((times > 0.25) & (times < seconds - 0.5))
    return (0.1 * envelope * np.random.default_rng(seed).standard_normal(len(times))).astype(np.float32)


@cache
def drawn() -> list[tuple[str, Channel]]:
    """Speakers that have a channel."""
    channels = [(speaker, Channel.draw(speaker, 0)) for speaker in SPEAKERS]
    return [(speaker, one) for speaker, one in channels if not one.is_clean]


def augmented(speaker: str, clips: Iterable[Samples], *, channels: bool = True) -> list[Samples]:
    return [
        samples
        for _, samples in augment_natural.augmented_clips(speaker, (("x", clip) for clip in clips), channels=channels)
    ]


def magnitudes(response: Numbers) -> npt.NDArray[np.float64]:
    """In decibels, at every hertz up to the half of the rate."""
    return np.asarray(20 * np.log10(np.abs(np.fft.rfft(response, RATE)) + 1e-9))


def power(samples: Numbers, low: float, high: float) -> float:
    spectrum, bins = np.abs(np.fft.rfft(samples)) ** 2, np.fft.rfftfreq(len(samples), 1 / RATE)
    return float(spectrum[(bins >= low) & (bins < high)].sum())


def test_a_third_of_the_speakers_is_clean_and_others_differ() -> None:
    names = [f"kokoro2-{number:04d}" for number in range(3000)]
    assert sum(has_clean_channel(name, 0) for name in names) == pytest.approx(1000, abs=80)
    assert [Channel.draw(name, 0).is_clean for name in SPEAKERS] == [has_clean_channel(name, 0) for name in SPEAKERS]
    some = [one for _, one in drawn()]
    for share, having in (
        (channel.EFFECT_SHARES["sharp"], [one.cut_off for one in some]),
        (channel.EFFECT_SHARES["room"], [one.room for one in some]),
        (channel.EFFECT_SHARES["noise"], [one.noise for one in some]),
        (channel.CLIPPING_SHARE + channel.COMPRESSION_SHARE, [one.dynamics for one in some]),
    ):
        assert sum(part is not None for part in having) / len(some) == pytest.approx(share, abs=0.15)
    assert {one.cut_off for one in some} == {None, *channel.CUT_OFF_WEIGHTS}
    assert all(channel.SNR_DB[0] <= one.snr_db <= channel.SNR_DB[1] for one in some if one.noise is not None)


def test_a_channel_is_the_speakers_and_the_same_whenever_it_is_drawn() -> None:
    clip = syllables()
    for speaker, _ in drawn()[:30]:
        one, again = Channel.draw(speaker, 0), Channel.draw(speaker, 0)
        assert np.array_equal(one.record(clip), again.record(clip))
        assert np.array_equal(one.record(clip), again.record(clip)), "the second clip too"
    (first, _), (second, _) = drawn()[:2]
    assert not np.allclose(Channel.draw(first, 0).record(clip), Channel.draw(second, 0).record(clip), atol=1e-3)
    assert not np.allclose(Channel.draw(first, 0).record(clip), Channel.draw(first, 1).record(clip), atol=1e-3)


def test_clips_of_a_speaker_share_a_microphone_and_differ_in_noise() -> None:
    noisy = next(one for _, one in drawn() if one.noise is not None and one.snr_db > 35 and one.room is None)
    clip = syllables(4.0)
    first, second = noisy.record(clip), noisy.record(clip)
    difference = float(np.std(first - second) / np.std(first))
    assert 0 < difference < 0.1, "what is said sounds the same, but the noise is another stretch"
    in_room = next(one for _, one in drawn() if one.room is not None)
    bare = replace(in_room, noise=None)
    first, second = bare.record(clip), bare.record(clip)
    assert 0 < np.std(first - second) / np.std(first) < 0.2, "nobody sits still"


def test_length_is_kept_and_nothing_is_infinite_clipped_or_late() -> None:
    click = np.zeros(RATE, np.float32)
    click[9000] = 0.5
    for speaker, one in drawn():
        for clip in (syllables(), syllables(0.013), syllables(0.7)[:-7], np.zeros(500, np.float32)):
            heard = one.record(clip)
            assert heard.shape == clip.shape and heard.dtype == np.float32 and np.isfinite(heard).all()
        bare = replace(one, noise=None, dynamics=None)
        assert abs(int(np.abs(bare.record(click)).argmax()) - 9000) < 24, "within a millisecond"
        for samples in augmented(speaker, [8 * syllables(), 0.001 * syllables()]):
            assert np.abs(samples).max() <= loudness.MAX_PEAK + 1e-6
    assert len(drawn()[0][1].record(np.zeros(0, np.float32))) == 0, "espeak may say nothing"


def test_above_a_sharp_band_there_is_nothing_whatever_else_is_done() -> None:
    pressed = Dynamics(ceiling=2.0, ratio=2.0)
    seen = set()
    for _, one in drawn():
        if one.cut_off is None:
            continue
        seen.add(one.cut_off)
        heard = replace(one, dynamics=pressed).record(syllables())
        # Ten hertz are left to the clip's own ends, which are cut.
        assert power(heard * np.hanning(len(heard)), one.cut_off + 10, RATE) < 1e-6 * power(heard, 0, RATE)
        below = power(heard, 0.8 * one.cut_off, 0.88 * one.cut_off) / power(
            syllables(), 0.8 * one.cut_off, 0.88 * one.cut_off
        )
        whole = power(heard, 0, 0.88 * one.cut_off) / power(syllables(), 0, 0.88 * one.cut_off)
        assert below > 0.05 * whole, "and below it there is what there was"
    assert seen == set(channel.CUT_OFF_WEIGHTS)


def test_equalisers_and_high_passes_stay_within_their_bounds() -> None:
    everything = dict.fromkeys(channel.EFFECT_SHARES, False)
    for number in range(30):
        curve = magnitudes(channel._draw_microphone(random.Random(number), everything | {"equaliser": True}))
        assert np.abs(curve[60:11_000]).max() <= channel.MAX_EQUALISER_DB + 0.3
        assert np.ptp(curve[60:11_000]) > 1.0
        curve = magnitudes(channel._draw_microphone(random.Random(number), everything | {"high-pass": True}))
        assert curve[20] < -7 and abs(curve[1000]) < 0.3 and curve[150] > -4.5
        curve = magnitudes(channel._draw_microphone(random.Random(number), everything | {"gentle": True}))
        assert curve[11_900] < -3 and -4.5 < curve[3790] < 0.1


def test_a_room_fades_in_its_time_and_is_weaker_than_what_comes_straight() -> None:
    for number in range(20):
        rng = random.Random(number)
        tail = channel._draw_room(rng, np.random.default_rng(number))
        assert channel.RT60_SECONDS[0] - 0.01 <= len(tail) / RATE <= channel.RT60_SECONDS[1] + 0.01
        direct = -10 * math.log10(float(np.sum(np.square(tail, dtype=np.float64))))
        assert channel.DIRECT_TO_REVERBERANT_DB[0] - 0.01 <= direct <= channel.DIRECT_TO_REVERBERANT_DB[1] + 0.01
        third = len(tail) // 3
        early, late = (float(np.mean(np.square(part))) for part in (tail[:third], tail[-third:]))
        assert late < early * 10**-3


def test_noise_is_as_far_below_speech_as_was_drawn_and_hum_is_of_the_mains() -> None:
    for _, one in drawn():
        if one.noise is None or one.room is not None:
            continue
        clip = syllables(5.0)
        bare = replace(one, noise=None).record(clip)
        noise = one.record(clip) - bare
        below = 10 * math.log10(loudness.speech_power(bare, RATE) / float(np.mean(np.square(noise))))
        assert below == pytest.approx(one.snr_db, abs=4 * channel.NOISE_JITTER_DB)
    with_hum = channel._draw_noise(random.Random(1), np.random.default_rng(1), np.ones(1), hum=True)
    without = channel._draw_noise(random.Random(1), np.random.default_rng(1), np.ones(1), hum=False)
    assert with_hum.std() == pytest.approx(1.0, rel=1e-3)
    mains = [(power(with_hum, hertz - 1, hertz + 1) / power(without, hertz - 1, hertz + 1)) for hertz in (50, 60)]
    assert max(mains) > 10


def test_loud_moments_are_bent_or_pressed() -> None:
    clip = syllables(3.0)
    clip[24_000:36_000] *= 4
    level = math.sqrt(loudness.speech_power(clip, RATE))
    bent = Dynamics(ceiling=2.0).apply(clip, level)
    assert np.abs(bent).max() <= 2.0 * level < np.abs(clip).max()
    pressed = Dynamics(ratio=2.0).apply(clip, level)
    loud, soft = slice(24_000, 36_000), slice(38_000, 46_000)

    def between(samples: Samples) -> float:
        return 20 * math.log10(float(np.std(samples[loud])) / float(np.std(samples[soft])))

    assert between(pressed) < between(clip) - 3
    assert len(Dynamics(ratio=2.0).apply(clip[:100], level)) == 100


def test_clean_speakers_are_shaped_as_if_there_were_no_channels_and_levels_hold_for_all() -> None:
    clips = [syllables(2.0, seed) for seed in range(4)]
    for speaker in SPEAKERS[:30]:
        clean, recorded = augmented(speaker, clips, channels=False), augmented(speaker, clips)
        same = [np.array_equal(one, other) for one, other in zip(clean, recorded, strict=True)]
        as_made = loudness.speaker_tract_factor(speaker, augment_natural.SEED) == 1.0
        assert same == [as_made and has_clean_channel(speaker, augment_natural.SEED)] * 4
        if as_made:
            assert list(map(len, clean)) == list(map(len, recorded)), "silence is cut before there is noise in it"
        levels = [10 * math.log10(loudness.speech_power(samples, RATE)) for samples in recorded]
        assert np.mean(levels) == pytest.approx(loudness.speaker_level(speaker, augment_natural.SEED), abs=2.5)


def test_a_folder_does_not_go_on_with_other_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"text": "Hello.", "speaker": "anna", "audio": {"bytes": natural_corpus._encoded(syllables(), "wav")}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "part.parquet")
    for clean in (False, True):
        out = tmp_path / f"augmented {clean}"
        for _ in range(2):
            assert sum(augment_natural.augment([tmp_path / "part.parquet"], out, 1, channels=not clean).values()) == 1
        with pytest.raises(DataError, match="other settings"):
            augment_natural.augment([tmp_path / "part.parquet"], out, 1, channels=clean)
    synthesis = natural_corpus.SynthesisConfig(tmp_path, tmp_path, (), "cuda")
    config = natural_corpus.CorpusConfig(hours=1, speakers=0, seed=2)
    natural_corpus.make(config, synthesis, tmp_path / "made", 1, augment=True)
    assert json.loads((tmp_path / "made" / "corpus.json").read_text())["channels"] is True
    with pytest.raises(DataError, match="other settings"):
        natural_corpus.make(config, replace(synthesis, channels=False), tmp_path / "made", 1, augment=True)
    robots = espeak_corpus.CorpusConfig("texts", hours=1, speakers=0, seed=0, other_language_share=0.0)
    monkeypatch.setattr(espeak_corpus, "map_with_restarts", lambda *_: iter(()))
    espeak_corpus.make(robots, tmp_path / "robots", 1)
    with pytest.raises(DataError, match="other settings"):
        espeak_corpus.make(replace(robots, channels=False), tmp_path / "robots", 1)
    espeak_corpus.make(replace(robots, channels=False), tmp_path / "clean robots", 1)
    assert "channels" not in json.loads((tmp_path / "clean robots" / "corpus.json").read_text()), "as folders of before"


# The speaker before it


def test_half_of_the_speakers_are_smaller_or_larger_than_they_were_made() -> None:
    sizes = [loudness.speaker_tract_factor(speaker, 0) for speaker in SPEAKERS]
    assert sizes == [loudness.speaker_tract_factor(speaker, 0) for speaker in SPEAKERS]
    others = [size for size in sizes if size != 1.0]
    assert 0.35 < len(others) / len(sizes) < 0.65 and all(0.9 <= size <= 1.12 for size in others)
    assert min(others) < 0.95 and max(others) > 1.07


def test_a_larger_speaker_is_deeper_and_slower() -> None:
    tone = np.sin(2 * np.pi * 220 * np.arange(2 * RATE) / RATE).astype(np.float32)
    larger = loudness.resample_tract(tone, 1.1)
    assert len(larger) == pytest.approx(1.1 * len(tone), abs=2) and larger.dtype == np.float32
    assert float(np.abs(np.fft.rfft(larger)).argmax()) * RATE / len(larger) == pytest.approx(200, abs=1)
    assert loudness.resample_tract(tone, 1.0) is tone
