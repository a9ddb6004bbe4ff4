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
from corpus_making.channel import MICROPHONE, REFERENCE, Channel, Dynamics, has_clean_channel
from corpus_making.corpus_folder import CorpusClip
from corpus_making.loudness import Samples
from myna.core.errors import DataError

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
    """Channels of references, which have everything that can be drawn."""
    return [(speaker, Channel.draw(speaker, 0, REFERENCE)) for speaker in SPEAKERS]


def augmented(speaker: str, clips: Iterable[Samples], *, channels: bool = True) -> list[CorpusClip]:
    texts = ((f"{number}", clip) for number, clip in enumerate(clips))
    return list(augment_natural.augmented_clips(speaker, texts, channels=channels))


def magnitudes(response: Numbers) -> npt.NDArray[np.float64]:
    """Return decibels at every hertz up to the half of the rate."""
    return np.asarray(20 * np.log10(np.abs(np.fft.rfft(response, RATE)) + 1e-9))


def power(samples: Numbers, low: float, high: float) -> float:
    spectrum, bins = np.abs(np.fft.rfft(samples)) ** 2, np.fft.rfftfreq(len(samples), 1 / RATE)
    return float(spectrum[(bins >= low) & (bins < high)].sum())


def test_a_third_of_the_speakers_is_clean_and_others_differ() -> None:
    names = [f"kokoro2-{number:04d}" for number in range(3000)]
    assert sum(has_clean_channel(name, 0) for name in names) == pytest.approx(1000, abs=80)
    assert [Channel.draw(name, 0).is_clean for name in SPEAKERS] == [has_clean_channel(name, 0) for name in SPEAKERS]
    for ranges, some in (
        (REFERENCE, [one for _, one in drawn()]),
        (MICROPHONE, [one for one in (Channel.draw(name, 0) for name in names[:200]) if not one.is_clean]),
    ):
        for share, having in (
            (ranges.sharp, [one.cut_off for one in some]),
            (ranges.room, [one.room for one in some]),
            (ranges.noise, [one.noise for one in some]),
            (ranges.clipping + ranges.compression, [one.dynamics for one in some]),
        ):
            assert sum(part is not None for part in having) / len(some) == pytest.approx(share, abs=0.15)
        assert {one.cut_off for one in some} == {None, *ranges.cut_off_weights}
        assert all(ranges.snr_db[0] <= one.snr_db <= ranges.snr_db[1] for one in some if one.noise is not None)


def test_a_channel_is_the_speakers_and_the_same_whenever_it_is_drawn() -> None:
    clip = syllables()
    for speaker, _ in drawn()[:30]:
        one, again = Channel.draw(speaker, 0), Channel.draw(speaker, 0)
        assert np.array_equal(one.record(clip), again.record(clip))
        assert np.array_equal(one.record(clip), again.record(clip)), "the second clip too"
    (first, _), (second, _) = drawn()[:2]
    recorded = [Channel.draw(*which, REFERENCE).record(clip) for which in ((first, 0), (second, 0), (first, 1))]
    assert not np.allclose(recorded[0], recorded[1], atol=1e-3)
    assert not np.allclose(recorded[0], recorded[2], atol=1e-3)


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
        for shaped in augmented(speaker, [8 * syllables(), 0.001 * syllables()]):
            assert np.abs(shaped.samples).max() <= loudness.MAX_PEAK + 1e-6
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
    assert seen == set(REFERENCE.cut_off_weights)


def test_equalisers_and_high_passes_stay_within_their_bounds() -> None:
    nothing = dict.fromkeys(channel.EFFECTS, False)

    def curve_of(number: int, effect: str) -> npt.NDArray[np.float64]:
        return magnitudes(channel._draw_microphone(random.Random(number), nothing | {effect: True}, REFERENCE))

    for number in range(30):
        curve = curve_of(number, "equaliser")
        assert np.abs(curve[60:11_000]).max() <= channel.MAX_EQUALISER_DB + 0.3
        assert np.ptp(curve[60:11_000]) > 1.0
        curve = curve_of(number, "high_pass")
        assert curve[20] < -7 and abs(curve[1000]) < 0.3 and curve[150] > -4.5
        curve = curve_of(number, "gentle")
        assert curve[11_900] < -3 and -4.5 < curve[3790] < 0.1


def test_a_room_fades_in_its_time_and_is_weaker_than_what_comes_straight() -> None:
    for number in range(20):
        rng = random.Random(number)
        tail = channel._draw_room(rng, np.random.default_rng(number), REFERENCE)
        (shortest, longest), (least, most) = REFERENCE.rt60_seconds, REFERENCE.direct_to_reverberant_db
        assert shortest - 0.01 <= len(tail) / RATE <= longest + 0.01
        direct = -10 * math.log10(float(np.sum(np.square(tail, dtype=np.float64))))
        assert least - 0.01 <= direct <= most + 0.01
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
    clips = [syllables(4.0, seed) for seed in range(6)]
    references = 0
    for speaker in SPEAKERS[:30]:
        clean, recorded = augmented(speaker, clips, channels=False), augmented(speaker, clips)
        assert not any(clip.reference_only for clip in clean)
        references += sum(clip.reference_only for clip in recorded)
        first = next((number for number, clip in enumerate(recorded) if clip.reference_only), len(clips))
        # A reference has draws of its own, after which those of other clips are not the same as without it.
        same = [np.array_equal(clean[number].samples, recorded[number].samples) for number in range(first)]
        as_made = loudness.speaker_tract_factor(speaker, augment_natural.SEED) == 1.0
        assert same == [as_made and has_clean_channel(speaker, augment_natural.SEED)] * first
        targets = [clip.samples for clip in recorded if not clip.reference_only]
        levels = [10 * math.log10(loudness.speech_power(samples, RATE)) for samples in targets]
        if len(levels) > 2:
            assert np.mean(levels) == pytest.approx(loudness.speaker_level(speaker, augment_natural.SEED), abs=2.5)
    assert references / (30 * len(clips)) == pytest.approx(augment_natural.REFERENCE_SHARE, abs=0.12)


def test_a_poor_reference_is_the_clip_through_a_channel_of_its_own_at_another_level() -> None:
    clip = syllables(3.0)
    made = [augment_natural.poor_reference(f"anna/{number}", clip, -20.0) for number in range(40)]
    assert all(np.array_equal(made[0], one) == (number == 0) for number, one in enumerate(made))
    assert np.array_equal(made[0], augment_natural.poor_reference("anna/0", clip, -20.0)), "drawn by its name"
    levels = [10 * math.log10(loudness.speech_power(samples, RATE)) for samples in made]
    assert np.std(levels) > 2 and all(np.abs(samples).max() <= 1 and len(samples) == len(clip) for samples in made)
    assert not any(augment_natural.is_reference(f"anna/{number}", 0.5) for number in range(50)), "one word is too short"


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


def test_most_speakers_are_smaller_or_larger_than_they_were_made_or_have_other_formants() -> None:
    sizes = [loudness.speaker_tract_factor(speaker, 0) for speaker in SPEAKERS]
    assert sizes == [loudness.speaker_tract_factor(speaker, 0) for speaker in SPEAKERS]
    others = [size for size in sizes if size != 1.0]
    assert 0.45 < len(others) / len(sizes) < 0.75 and all(0.76 <= size <= 1.2 for size in others)
    assert min(others) < 0.85 and max(others) > 1.1
    formants = [loudness.speaker_formant_factor(speaker, 0) for speaker in SPEAKERS]
    others = [factor for factor in formants if factor != 1.0]
    assert 0.35 < len(others) / len(formants) < 0.65 and all(0.88 <= factor <= 1.14 for factor in others)
    assert sum(one != 1.0 and other != 1.0 for one, other in zip(sizes, formants, strict=True)) > 0


def test_a_larger_speaker_is_deeper_and_slower() -> None:
    tone = np.sin(2 * np.pi * 220 * np.arange(2 * RATE) / RATE).astype(np.float32)
    larger = loudness.resample_tract(tone, 1.1)
    assert len(larger) == pytest.approx(1.1 * len(tone), abs=2) and larger.dtype == np.float32
    assert float(np.abs(np.fft.rfft(larger)).argmax()) * RATE / len(larger) == pytest.approx(200, abs=1)
    assert loudness.resample_tract(tone, 1.0) is tone
