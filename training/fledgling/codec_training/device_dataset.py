"""Audio dataset in device memory; batches are drawn without synchronising with the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from codec_training.augmentation import Augmentation, interpolate
from codec_training.ctc import letter_ids
from codec_training.recordings import DecodedClip, pcm_to_float

WHOLE_CLIP_SHARE = 0.7
"""Share of clips that are taken whole where they fit; the others are cropped anywhere, as at the edges of
recordings."""
MAX_ATTENUATION_DB = 12.0
"""Upper bound of the random attenuation of half of the clips, since recordings come at all levels."""
EDGE_FRAMES = 3
"""Frames of silence that a window may contain before and after a clip."""


class AudioBatch(NamedTuple):
    """Clips on the device, with CTC targets."""

    waves: torch.Tensor
    """(clips, context * hop): each clip, or a part of it, with silence around it."""
    mask: torch.Tensor
    """(clips, context): True for frames that hold samples of the clip."""
    window_start: torch.Tensor
    """(clips,): first frame of the window that is decoded and compared."""
    letters: torch.Tensor
    letter_counts: torch.Tensor
    """Letters of each clip; 0 where the clip was cropped."""


class DeviceDataset:
    """Clips of several weighted sources: the share of a source in a batch does not depend on its hours."""

    def __init__(
        self,
        sources: Sequence[Sequence[DecodedClip]],
        weights: Sequence[float],
        *,
        alphabet: str,
        hop: int,
        context: int,
        window: int,
        noise: float,
        device: torch.device,
        augmentation: Augmentation | None = None,
    ) -> None:
        """`noise` is the share of clips with white noise where there is no augmentation."""
        assert window <= context
        self.augmentation = augmentation
        self.hop, self.context, self.window, self.noise, self.device = hop, context, window, noise, device
        clips = [clip for source in sources for clip in source]
        lengths = torch.tensor([len(clip.samples) for clip in clips])
        self.samples = torch.cat([torch.from_numpy(clip.samples) for clip in clips]).to(device)
        self.starts = (lengths.cumsum(0) - lengths).to(device)
        self.lengths = lengths.to(device)
        # Clips longer than the context are never whole, so their texts would only widen the table.
        fits = [bool(alphabet) and len(clip.samples) <= context * hop for clip in clips]
        texts = [clip.text if fit else "" for clip, fit in zip(clips, fits, strict=True)]
        letters, counts = letter_ids(texts, alphabet)
        self.letters, self.letter_counts = letters.to(device), counts.to(device)
        shares = [
            torch.full((len(source),), weight / sum(weights)) * _lengths(source) / _lengths(source).sum()
            for source, weight in zip(sources, weights, strict=True)
        ]
        self.cumulative_shares = torch.cat(shares).double().cumsum(0).float().to(device)

    def draw(self, clips: int) -> AudioBatch:
        size, device = self.context * self.hop, self.device
        chosen = torch.searchsorted(self.cumulative_shares, torch.rand(clips, device=device)).clamp(
            max=len(self.cumulative_shares) - 1
        )
        starts, stored = self.starts[chosen], self.lengths[chosen]
        lengths, speed_places = self._played_lengths(stored)
        begins = self._begins(lengths, size)
        waves = self._cut(starts, stored, begins, size)
        if speed_places is not None:
            waves[::2] = self._played(starts[::2], stored[::2], begins[::2], size, speed_places)

        frames = torch.arange(self.context, device=device)[None] * self.hop + begins[:, None]
        mask = (frames < lengths[:, None]) & (frames + self.hop > 0)
        first = torch.div((-begins).clamp(min=0), self.hop, rounding_mode="floor") - EDGE_FRAMES
        last = (
            torch.div((lengths - begins).clamp(max=size), self.hop, rounding_mode="floor") - self.window + EDGE_FRAMES
        )
        first = first.clamp(0, self.context - self.window)
        last = torch.maximum(last.clamp(max=self.context - self.window), first)
        window_start = (first + torch.rand(clips, device=device) * (last - first + 1)).long()

        whole = (begins <= 0) & (begins + size >= lengths)
        if self.augmentation is None:
            waves = self._random_level(waves)
        else:
            active = mask[:, :, None].expand(-1, -1, self.hop).reshape(clips, size)
            waves, replaced = self.augmentation(waves, active)
            whole = whole & ~replaced
        return AudioBatch(
            waves, mask, window_start, self.letters[chosen], torch.where(whole, self.letter_counts[chosen], 0)
        )

    def _begins(self, lengths: torch.Tensor, size: int) -> torch.Tensor:
        """Start of the context within each clip, in samples; negative where silence comes first."""
        uniform = torch.rand(2, len(lengths), device=self.device)
        spare, window = lengths - size, self.window * self.hop
        low = torch.where(uniform[0] < WHOLE_CLIP_SHARE, spare.clamp(max=0), window - size)
        high = torch.where(uniform[0] < WHOLE_CLIP_SHARE, spare.clamp(min=0), torch.maximum(lengths - window, low))
        return (low + uniform[1] * (high - low + 1)).long()

    def _cut(self, starts: torch.Tensor, lengths: torch.Tensor, begins: torch.Tensor, size: int) -> torch.Tensor:
        positions = begins[:, None] + torch.arange(size, device=self.device)
        inside = (positions >= 0) & (positions < lengths[:, None])
        samples = self.samples[(starts[:, None] + positions).clamp(0, len(self.samples) - 1)]
        return pcm_to_float(samples) * inside

    def _played_lengths(self, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Lengths of the clips as they are played, every other one at a random speed, and the places of the speeds."""
        if self.augmentation is None:
            return stored, None
        places = self.augmentation.draw_speeds(len(stored[::2]))
        played = stored.clone()
        played[::2] = (stored[::2] / self.augmentation.speeds[places]).long()
        return played, places

    def _played(
        self, starts: torch.Tensor, lengths: torch.Tensor, begins: torch.Tensor, size: int, speed_places: torch.Tensor
    ) -> torch.Tensor:
        """Cut windows as `_cut` does, of clips that are played at other speeds."""
        assert self.augmentation is not None
        positions = (begins[:, None] + torch.arange(size, device=self.device)).double()
        positions = positions * self.augmentation.speeds[speed_places][:, None]
        inside = (positions >= 0) & (positions <= lengths[:, None] - 1)
        first = starts[:, None]
        samples = interpolate(
            self.samples,
            first,
            first + lengths[:, None] - 1,
            first + positions,
            self.augmentation.sinc_rows[speed_places],
        )
        return samples / 32767 * inside

    def _random_level(self, waves: torch.Tensor) -> torch.Tensor:
        uniform = torch.rand(4, len(waves), 1, device=self.device)
        gain = torch.where(uniform[0] < 0.5, 10 ** (-MAX_ATTENUATION_DB / 20 * uniform[1]), 1.0)
        # White noise between -80 and -50 dB under some clips: recordings are never silent.
        noise = torch.where(uniform[2] < self.noise, 10 ** (-4 + 1.5 * uniform[3]), 0.0)
        return waves * gain + noise * torch.randn_like(waves)


def _lengths(source: Sequence[DecodedClip]) -> torch.Tensor:
    return torch.tensor([len(clip.samples) for clip in source], dtype=torch.float64)
