"""Augmentation of the codec's training: each kind by what it changes, all of it finite, and drawn by one generator."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from codec_training.augmentation import (
    SPEEDS,
    Augmentation,
    AugmentationShares,
    Draws,
    equaliser,
    fft_size,
    filter_waves,
    interpolate,
    level,
    low_pass,
    mix_at_snr,
    mu_law,
    quantise,
    room_impulses,
    set_level,
    sinc_table,
    warp_formants,
)
from codec_training.backgrounds import background_bank
from codec_training.device_dataset import DeviceDataset
from codec_training.lossy import FORMATS, lossy_round_trip
from codec_training.recordings import DecodedClip, Recording, decode_all, recordings
from pack_offline import _pack_backgrounds

CPU, RATE, SAMPLES = torch.device("cpu"), 24_000, 24_000
SMALL_BANK = {"noise": 2, "hum": 1, "music": 1, "clicks": 1}
EVERYTHING = AugmentationShares(0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0)
NOTHING = AugmentationShares(1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tone(hertz: float, samples: int = SAMPLES) -> torch.Tensor:
    return 0.3 * torch.sin(2 * math.pi * hertz / RATE * torch.arange(samples))[None]


def vowel(pitch: float, formant: float, samples: int = SAMPLES) -> torch.Tensor:
    """Harmonics under one resonance."""
    t = torch.arange(samples) / RATE
    numbers = torch.arange(1, int(8000 / pitch))[:, None]
    loudness = torch.exp(-(((numbers * pitch - formant) / 300) ** 2)) + 0.003
    return 0.1 * (loudness * torch.sin(2 * math.pi * numbers * pitch * t)).sum(0)[None]


def energy(waves: torch.Tensor, low: float, high: float) -> float:
    spectrum = torch.fft.rfft(waves).abs().square()
    hertz = torch.linspace(0, RATE / 2, spectrum.shape[1])
    return float(spectrum[:, (hertz >= low) & (hertz < high)].sum())


def centroid(waves: torch.Tensor) -> float:
    spectrum = torch.fft.rfft(waves)[0].abs().square()
    return float((spectrum * torch.linspace(0, RATE / 2, len(spectrum))).sum() / spectrum.sum())


@pytest.fixture(autouse=True)
def small_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codec_training.backgrounds.ROWS", SMALL_BANK)


@pytest.mark.parametrize("speed", [SPEEDS[0], 1.0, SPEEDS[-1]])
def test_a_clip_played_faster_is_higher(speed: float) -> None:
    bank = (tone(3000, 48_000)[0] * 32767).round().to(torch.int16)
    rows = sinc_table([speed])[None]
    positions = 100 + speed * torch.arange(SAMPLES, dtype=torch.float64)[None]
    played = interpolate(bank, torch.zeros(1, 1).long(), torch.full((1, 1), len(bank) - 1), positions, rows) / 32767
    expected = 0.3 * torch.sin(2 * math.pi * 3000 / RATE * positions).float()
    error = (played - expected).square().mean() / expected.square().mean()
    assert 10 * math.log10(float(error)) < -40


def test_formants_move_and_pitch_stays() -> None:
    waves = vowel(120, 1200)
    assert torch.allclose(warp_formants(waves, torch.ones(1, 1))[:, 960:-960], waves[:, 960:-960], atol=1e-4)
    higher = warp_formants(waves, torch.full((1, 1), 1.2))
    lower = warp_formants(waves, torch.full((1, 1), 0.84))
    assert centroid(lower) < 0.93 * centroid(waves) < centroid(waves) < 0.93 * centroid(higher)
    strongest = torch.fft.rfft(higher)[0].abs()
    harmonics = torch.arange(1, 40) * 120
    assert float(strongest[harmonics].sum()) > 10 * float(strongest[harmonics + 60].sum())


def test_an_equaliser_is_smooth_and_flat_without_strength() -> None:
    hertz = torch.linspace(0, 12_000, 1201)
    draws = Draws(50, CPU, seeded())
    gains = 20 * equaliser(draws, hertz, torch.full((50, 1), 6.0)).log10()
    assert 4 < float(gains[:, 100].std()) < 9
    assert float((gains[:, 101:] - gains[:, 100:-1]).abs().max()) < 1.0, "dB in 10 Hz above 1 kHz"
    assert torch.equal(equaliser(draws, hertz, torch.zeros(50, 1)), torch.ones(50, 1201))


def test_rooms_prolong_a_click_and_band_limits_end_the_spectrum() -> None:
    click = torch.zeros(2, SAMPLES)
    click[:, 100] = 1
    on = torch.tensor([[True], [False]])
    size = fft_size(SAMPLES + RATE // 2)
    impulses = room_impulses(Draws(2, CPU, seeded()), RATE // 2, RATE, on)
    heard = filter_waves(click, torch.ones(2, size // 2 + 1), impulses, size)
    assert float(heard[0, 700:5000].abs().max()) > 1e-3 and float(heard[1, 700:].abs().max()) < 1e-5
    assert torch.allclose(heard[:, 100], torch.ones(2), atol=1e-4), "the direct sound comes at once"
    response = low_pass(
        torch.linspace(0, RATE / 2, size // 2 + 1), torch.tensor([[4000.0], [8000.0]]), torch.tensor(30.0)
    )
    noise = torch.randn(2, SAMPLES, generator=seeded())
    limited = filter_waves(noise, response, click.roll(-100, 1)[:, : RATE // 2], size)
    assert energy(limited[:1], 4500, 12_000) < 1e-4 * energy(noise[:1], 4500, 12_000)
    assert energy(limited[1:], 5000, 7500) == pytest.approx(energy(noise[1:], 5000, 7500), rel=0.05)


def test_noise_is_mixed_at_its_level_and_levels_are_set() -> None:
    active = torch.ones(3, SAMPLES)
    active[:, SAMPLES // 2 :] = 0
    speech, noise = tone(300).expand(3, -1), 0.01 * torch.randn(3, SAMPLES, generator=seeded())
    snr = torch.tensor([[0.0], [20.0], [40.0]])
    added = mix_at_snr(speech, noise, snr, active) - speech
    assert torch.allclose(20 * (level(speech, active) / level(added, active)).log10(), snr, atol=0.1)
    due = torch.tensor([[-50.0], [-24.0], [0.0]])
    leveled = set_level(speech, due, active)
    assert torch.allclose(20 * level(leveled, active)[:2].log10(), due[:2], atol=0.1)
    assert float(leveled.abs().max()) == pytest.approx(0.99), "as loud as the peak allows"
    assert torch.equal(set_level(torch.zeros(1, 9), due[:1], torch.ones(1, 9)), torch.zeros(1, 9))


def test_quantisation_leaves_the_noise_of_its_bits() -> None:
    waves = 0.9 * torch.sin(torch.linspace(0, 1000, SAMPLES))[None]
    for bits in (8, 12):
        error = quantise(waves, torch.tensor([[float(bits)]])) - waves
        snr = 10 * math.log10(float(waves.square().mean() / error.square().mean()))
        assert snr == pytest.approx(6.02 * bits + 0.8, abs=1.0)
    error = mu_law(waves) - waves
    assert 33 < 10 * math.log10(float(waves.square().mean() / error.square().mean())) < 41, "G.711 has 37 dB"
    quiet = 0.01 * waves
    assert float((mu_law(quiet) - quiet).abs().max()) < 0.001


def test_backgrounds_are_of_equal_level_and_not_alike() -> None:
    bank = background_bank(RATE, CPU, seeded(), SMALL_BANK).float()
    assert bank.shape == (5, 240_000) and bool(bank.isfinite().all())
    assert torch.allclose(bank.square().mean(1).sqrt(), torch.full((5,), 0.1), rtol=0.5), "clicks are clipped"
    assert float(torch.corrcoef(bank).fill_diagonal_(0).abs().max()) < 0.2


@pytest.mark.parametrize("shares", [EVERYTHING, AugmentationShares()])
def test_clips_are_finite_and_their_levels_in_range(shares: AugmentationShares) -> None:
    augmentation = Augmentation(SAMPLES, RATE, CPU, shares, generator=seeded())
    speech = torch.cat([vowel(90 + 10 * n, 600 + 100 * n) for n in range(11)] + [torch.zeros(1, SAMPLES)])
    waves, replaced = augmentation(speech, torch.ones_like(speech))
    assert waves.shape == speech.shape and bool(waves.isfinite().all()) and replaced.shape == (12,)
    assert float(waves.abs().max()) <= 1.0
    levels = 20 * level(waves, torch.ones_like(waves))[:11].log10()
    assert bool(((levels > -52) & (levels < -9)).all())
    assert not torch.allclose(waves[1], speech[1], atol=1e-2)


def test_clean_clips_keep_their_sound() -> None:
    augmentation = Augmentation(SAMPLES, RATE, CPU, NOTHING, generator=seeded())
    speech = torch.cat([vowel(100, 900), vowel(130, 700), vowel(160, 1100)])
    waves, replaced = augmentation(speech, torch.ones_like(speech))
    assert not bool(replaced.any())
    for one, other in zip(waves[1:], speech[1:], strict=True):  # the first has another vocal tract
        assert float(torch.corrcoef(torch.stack([one, other]))[0, 1]) > 0.9999


def test_replaced_clips_have_no_words_and_seeds_repeat() -> None:
    clips = [DecodedClip("a", "ab", np.full(12_000, 9000, np.int16))]

    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        shares = AugmentationShares(clean=0, non_speech=0.5)
        augmentation = Augmentation(25 * 960, RATE, CPU, shares, generator=seeded(seed))
        dataset = DeviceDataset(
            [clips],
            [1.0],
            alphabet="ab",
            hop=960,
            context=25,
            window=12,
            noise=0,
            device=CPU,
            augmentation=augmentation,
        )
        drawn = dataset.draw(32)
        return drawn.waves, drawn.letter_counts

    waves, counts = batch(0)
    assert 0 < int((counts == 0).sum()) < 32
    again, _ = batch(0)
    other, _ = batch(1)
    assert torch.equal(waves, again) and not torch.allclose(waves, other)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_lossy_copies_are_the_same_speech(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codec_training.lossy.FORMATS", {name: FORMATS[name]})
    speech = vowel(140, 900)[0].numpy().astype(np.float32)
    copy = lossy_round_trip(speech, RATE, random.Random(0))
    assert copy.shape == speech.shape and np.isfinite(copy).all() and not np.array_equal(copy, speech)
    one, other = (np.abs(np.fft.rfft(x[4000:20_000]))[:2000] for x in (speech, copy))
    assert np.corrcoef(one, other)[0, 1] > 0.8


def test_a_share_of_the_recordings_goes_through_a_lossy_codec(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "x.wav", vowel(140, 900)[0].numpy(), RATE)
    found = [Recording(f"clip{n}", "a", "", tmp_path / "x.wav") for n in range(40)]
    plain, some = (decode_all(found, RATE, share) for share in (0.0, 0.5))
    changed = [not np.array_equal(a.samples, b.samples) for a, b in zip(plain, some, strict=True)]
    assert 8 < sum(changed) < 32
    again = decode_all(found, RATE, 0.5)
    assert all(np.array_equal(a.samples, b.samples) for a, b in zip(some, again, strict=True)), "drawn by their ids"


def test_backgrounds_of_a_folder_are_packed_as_a_source(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "long.wav", tone(500, 60_000)[0].numpy(), RATE)
    soundfile.write(tmp_path / "short.wav", tone(500, 6000)[0].numpy(), RATE)
    _pack_backgrounds(tmp_path, tmp_path / "packed" / "all.parquet")
    (clip,) = decode_all(list(recordings(tmp_path / "packed" / "all.parquet")), RATE)
    assert len(clip.samples) == 60_000
