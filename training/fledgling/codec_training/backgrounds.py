"""Sounds without speech: coloured noise, hum, chords and clicks, made once on the device before the training."""

from __future__ import annotations

import math

import torch

ROW_SECONDS = 10.0
ROWS = {"noise": 160, "hum": 32, "music": 48, "clicks": 16}
"""Rows of each kind."""


def background_bank(
    sample_rate: int, device: torch.device, generator: torch.Generator | None = None, rows: dict[str, int] | None = None
) -> torch.Tensor:
    """(rows, samples) in half precision, each with a root mean square of 0.1."""
    samples = int(ROW_SECONDS * sample_rate)
    kinds = {"noise": coloured_noise, "hum": hum, "music": chords, "clicks": clicks}
    made = [
        kinds[kind](count, samples, sample_rate, device, generator) for kind, count in (rows or ROWS).items() if count
    ]
    bank = torch.cat(made)
    bank = bank / bank.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6)
    return (0.1 * bank.clamp(-9, 9)).half()


def coloured_noise(
    rows: int, samples: int, sample_rate: int, device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    """Stationary noise from brown to blue with a random spectrum, half of it swelling slowly."""
    hertz = torch.linspace(0, sample_rate / 2, samples // 2 + 1, device=device)
    slope = _uniform(rows, -1.4, 0.3, device, generator)
    knots = 5 * torch.randn(rows, 10, device=device, generator=generator)
    place = torch.linspace(0, 8.999, len(hertz), device=device)
    low = place.long()
    shape = 10 ** ((knots[:, low] * (1 - place + low) + knots[:, low + 1] * (place - low)) / 20)
    white = torch.fft.rfft(torch.randn(rows, samples, device=device, generator=generator))
    noise = torch.fft.irfft(white * shape * (hertz.clamp(min=30) / 1000) ** slope, samples)
    seconds = torch.arange(samples, device=device) / sample_rate
    swelling = torch.sin(2 * math.pi * _uniform(rows, 0.1, 3.0, device, generator) * seconds)
    swelled: torch.Tensor = noise * (1 + _uniform(rows, -0.8, 0.8, device, generator).clamp(min=0) * swelling)
    return swelled


def hum(
    rows: int, samples: int, sample_rate: int, device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    """Harmonics of 45 to 125 Hz, as of mains and motors, over some noise."""
    phase = 2 * math.pi * _uniform(rows, 45.0, 125.0, device, generator) * torch.arange(samples, device=device)
    loudness = torch.rand(rows, 20, device=device, generator=generator)
    tones = torch.zeros(rows, samples, device=device)
    for number in range(20):
        tones += loudness[:, number : number + 1] / (number + 1) * torch.sin((number + 1) * phase / sample_rate)
    noise = torch.randn(rows, samples, device=device, generator=generator)
    return tones + noise * _uniform(rows, 0.01, 0.3, device, generator)


def chords(
    rows: int, samples: int, sample_rate: int, device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    """Chords of decaying harmonic tones, a new one every 0.2 to 1 s: what music has that speech lacks."""
    seconds = torch.arange(samples, device=device) / sample_rate
    beat = _uniform(rows, 0.2, 1.0, device, generator)
    count = (seconds / beat).long()
    since = seconds - count * beat
    envelope = torch.exp(-since / beat * _uniform(rows, 0.3, 4.0, device, generator)) * (since / 0.01).clamp(max=1)
    steps = int(ROW_SECONDS / 0.2) + 1
    root = 110 * 2 ** (torch.randint(0, 25, (rows, 1), device=device, generator=generator) / 12)
    music = torch.zeros(rows, samples, device=device)
    for interval in (0, 4, 7):
        shift = torch.randint(0, 8, (rows, steps), device=device, generator=generator)
        pitch = (root * 2 ** ((interval + shift) / 12)).gather(1, count)
        phase = 2 * math.pi * pitch * since
        for harmonic in range(1, 7):
            music += torch.sin(harmonic * phase) / harmonic**1.3
    return music * envelope


def clicks(
    rows: int, samples: int, sample_rate: int, device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    """Short resonant transients, as of keys and cutlery, over faint noise."""
    length = int(0.05 * sample_rate)
    seconds = torch.arange(length, device=device) / sample_rate
    ringing = torch.exp(-seconds * _uniform(rows, 80.0, 600.0, device, generator)) * torch.sin(
        2 * math.pi * _uniform(rows, 300.0, 6000.0, device, generator) * seconds
    )
    often = _uniform(rows, 2.0, 12.0, device, generator) / sample_rate
    impulses = torch.randn(rows, samples, device=device, generator=generator) * (
        torch.rand(rows, samples, device=device, generator=generator) < often
    )
    size = 2 ** math.ceil(math.log2(samples + length))
    struck: torch.Tensor = torch.fft.irfft(torch.fft.rfft(impulses, size) * torch.fft.rfft(ringing, size), size)[
        :, :samples
    ]
    return struck + 0.003 * torch.randn(rows, samples, device=device, generator=generator)


def _uniform(
    rows: int, low: float, high: float, device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    return low + (high - low) * torch.rand(rows, 1, device=device, generator=generator)
