"""Predicted quality: mean opinion scores (MOS) from 1 to 5.

DistillMOS was trained on all kinds of speech, also synthetic: 1 is noise, natural speech has about 4.5. DNSMOS was made
for calls and rates noise and damage: clean speech has about 3.3. `DNSMOS` runs the published wheel, for figures that
others publish; `DNSMOSNetwork` is DNSMOS P.835 in plain torch, for curation.
"""

import importlib.util
import itertools
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from myna.audio.files import LISTENING_RATE, Samples, as_mono_16khz
from myna.core.errors import AudioError, ConfigError, import_optional
from myna.listen.models import remake_hint
from myna.models.files import load_network

# Both require torchaudio, which would replace torch, so they are installed alone; their other imports come with Myna.
INSTALL_DISTILLMOS = "pip install --no-deps distillmos==0.9.1 xls_r_sqa==0.1.0"
DISTILLMOS_WEIGHTS = "weights/distill_mos_v7.pt"
DISTILLMOS_SAMPLES, DISTILLMOS_WINDOW, DISTILLMOS_HOP = 122_880, 320, 160
"""Samples of a window that is scored, of a frame of its spectrum, and from one frame to the next."""
INSTALL_DNSMOS = ("pip install --no-deps speechmos==0.0.1.1", 'pip install onnxruntime requests "myna[evaluate]"')


class DistillMOS:
    """MOS of any speech by DistillMOS, whose weights come in its wheel."""

    def __init__(self, model: Any, device: str = "cpu") -> None:
        self._model, self._device = model, device

    @classmethod
    def open(cls, device: str = "cpu") -> Self:
        wheel = importlib.util.find_spec("distillmos")
        if wheel is None or wheel.origin is None:
            raise ConfigError("distillmos cannot be imported: there is no such package", hint=INSTALL_DISTILLMOS)
        weights = torch.load(Path(wheel.origin).parent / DISTILLMOS_WEIGHTS, map_location="cpu", weights_only=True)
        network = DistillMOSNetwork()
        network.load_state_dict(weights["model"])
        return cls(network.to(device).eval().requires_grad_(False), device)

    @torch.inference_mode()
    def score(self, samples: Samples, sample_rate: int) -> float:
        """Return the MOS, which is independent of loudness."""
        clip = _nonempty_clip(samples, sample_rate)
        return float(self._model(torch.from_numpy(clip)[None].to(self._device)))


class DistillMOSNetwork(nn.Module):
    """DistillMOS in plain torch, with the head of xls_r_sqa: the wheel's own module needs torchaudio."""

    def __init__(self) -> None:
        super().__init__()
        settings = import_optional("xls_r_sqa.config", INSTALL_DISTILLMOS)
        model = import_optional("xls_r_sqa.sqa_model", INSTALL_DISTILLMOS)
        channels = (2, 64, 64, 128, 256, 256, 256)
        layers: list[nn.Module] = []
        bins = DISTILLMOS_WINDOW // 2 + 1
        for number, (inputs, outputs) in enumerate(itertools.pairwise(channels)):
            stride = (2 if number else 1, 2 if number == len(channels) - 2 else 1)
            bins = (bins - 3) // stride[0] + 1
            layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=(0, 1)), nn.LeakyReLU(0.1)]
        self.cnn = nn.ModuleDict({"cnn": nn.Sequential(*layers)})
        head = settings.Config(
            "", None, settings.FEAT_SEQ_LEN, dim_transformer=200, nhead_transformer=8, nlayers_transformer=7
        )
        head.dim_input = channels[-1] * bins
        self.transformer_pool_attn = model.SingleLayerModel(head)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        """Return the MOS of one clip (1, samples) at 16 kHz: the mean over windows of 7.7 s."""
        spare = max(0, wave.shape[1] - DISTILLMOS_SAMPLES)
        wave = F.pad(wave, (0, max(0, DISTILLMOS_SAMPLES - wave.shape[1])))
        starts = [int(place * spare) for place in np.linspace(0, 1, -(-spare // LISTENING_RATE) + 1)]
        windows = torch.cat([wave[:, start : start + DISTILLMOS_SAMPLES] for start in starts])
        windows = windows / (windows.abs().amax(1, keepdim=True) + 1e-8)
        pad = (DISTILLMOS_WINDOW - DISTILLMOS_HOP) // 2
        window = torch.hann_window(DISTILLMOS_WINDOW, device=wave.device)
        spectra = torch.stft(
            F.pad(windows, (pad, pad), mode="reflect"),
            DISTILLMOS_WINDOW,
            DISTILLMOS_HOP,
            window=window,
            center=False,
            return_complex=True,
        )
        parts = torch.view_as_real(spectra)
        size = parts.square().sum(-1, keepdim=True).sqrt()
        compressed = size.clip(1e-12) ** 0.3 * parts / size.clip(1e-12)
        features = self.cnn["cnn"](compressed.permute(0, 3, 1, 2)).flatten(1, -2).permute(0, 2, 1)
        score: torch.Tensor = 1 + 4 * self.transformer_pool_attn(features).mean()
        return score


class DNSMOS:
    """Overall DNSMOS, computed by the wheel's own code so that the figures are comparable with published ones."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @classmethod
    def open(cls) -> Self:
        return cls(import_optional("speechmos.dnsmos", *INSTALL_DNSMOS).run)

    def score(self, samples: Samples, sample_rate: int) -> float:
        clip = _nonempty_clip(samples, sample_rate)
        return float(self._run(np.clip(clip, -1.0, 1.0), LISTENING_RATE)["ovrl_mos"])


def _nonempty_clip(samples: Samples, sample_rate: int) -> Samples:
    if not len(samples):
        raise AudioError("an empty clip has no quality", hint="leave it out, and count it as not spoken")
    return as_mono_16khz(samples, sample_rate)


WINDOW_SAMPLES = 144_160
"""Samples of a window (9.01 s). Shorter clips are repeated up to it, longer ones covered by evenly spaced windows. The
published code has a window each second: its scores differed by 0.02 to 0.06 on four clips, at up to nine times the
cost."""
FFT, HOP = 320, 160
CHANNELS = (1, 128, 64, 64, 32, 32, 32, 64)
POOLED_AFTER = (3, 4, 5)
"""Convolutions that are followed by a maximum over 2 x 2."""
CALIBRATIONS = {
    "dnsmos_sig": (-0.08397278, 1.22083953, 0.0052439),
    "dnsmos_bak": (-0.13166888, 1.60915514, -0.39604546),
    "dnsmos_ovrl": (-0.06766283, 1.11546468, 0.04602535),
}
"""Polynomials from the network's outputs to the scale of listeners, in the order of the outputs."""


class DNSMOSNetwork(nn.Module):
    """Network from samples at 16 kHz to uncalibrated signal, background and overall quality (batch, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.stft = nn.Linear(FFT, 2 * (FFT // 2 + 1), bias=False)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(inputs, outputs, 3, padding=1) for inputs, outputs in itertools.pairwise(CHANNELS)
        )
        self.dense = nn.ModuleList([nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, len(CALIBRATIONS))])

    @classmethod
    def open(cls, file: Path, device: str = "cpu") -> Self:
        network = load_network(cls(), file, device, hint=remake_hint(file))
        for layer in network.convolutions:  # two thirds of the time on a CPU
            layer.weight = nn.Parameter(
                layer.get_parameter("weight").to(memory_format=torch.channels_last), requires_grad=False
            )
        return network

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        real, imaginary = self.stft(waves.unfold(-1, FFT, HOP)).chunk(2, -1)
        x = (real.square() + imaginary.square()).clamp(min=1e-12).log10()[:, None]
        for index, convolution in enumerate(self.convolutions):
            x = F.relu(convolution(x), inplace=True)
            x = F.max_pool2d(x, 2) if index in POOLED_AFTER else x
        x = x.amax((2, 3))
        *hidden, last = self.dense
        for layer in hidden:
            x = F.relu(layer(x))
        scores: torch.Tensor = last(x)
        return scores

    @torch.inference_mode()
    def score(self, samples: Samples, sample_rate: int) -> dict[str, float]:
        """Return mean scores over windows of 9 s; NaN for an empty clip."""
        wave = np.clip(as_mono_16khz(samples, sample_rate), -1, 1)
        if not len(wave):
            return dict.fromkeys(CALIBRATIONS, float("nan"))
        if len(wave) < WINDOW_SAMPLES:
            wave = np.resize(wave, WINDOW_SAMPLES)
        count = -(-len(wave) // WINDOW_SAMPLES)
        starts = np.linspace(0, len(wave) - WINDOW_SAMPLES, count).astype(int)
        device = self.stft.weight.device
        # One window at a time: two at once take no less time, and twice the memory.
        windows = (torch.from_numpy(wave[start : start + WINDOW_SAMPLES])[None].to(device) for start in starts)
        raw = torch.cat([self(window) for window in windows]).cpu().numpy()
        scores = zip(CALIBRATIONS.items(), raw.T, strict=True)
        return {name: float(np.polyval(coefficients, values).mean()) for (name, coefficients), values in scores}
