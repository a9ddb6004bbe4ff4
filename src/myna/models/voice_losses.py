"""Optional losses that compare the voice of a target with that of its reference, in the model's own hidden states.

A voice is the mean hidden state over the positions of a clip, after the final norm, scaled to length 1.
docs/decisions/0021 says why these, and docs/benchmarks/optional_losses.md what they bring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

TEMPERATURE = 0.1
"""Of the similarities in the contrastive loss."""


def voice_losses(
    hidden: torch.Tensor, lengths: Sequence[int], negatives: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed losses (2,), contrastive and consistency, and the number of targets that are nearest to their own
    reference (2,), which only the first loss knows.

    `hidden` holds the positions of all targets and then of their references, `lengths` of them each.
    """
    if not lengths:
        return hidden.new_zeros(2, dtype=torch.float32), hidden.new_zeros(2, dtype=torch.long)
    with torch.autocast("cpu" if hidden.is_meta else hidden.device.type, enabled=False):
        # A mean per clip: adding up by index would add in another order each time on a GPU.
        voices = torch.stack([clip.mean(0) for clip in torch.split(hidden.float(), list(lengths))])
        targets, references = F.normalize(voices, dim=1).chunk(2)
        own = (targets * references).sum(1)
        others = (targets @ references.T).masked_fill(~negatives, -torch.inf)
        losses = torch.cat([own[:, None], others], dim=1).div(TEMPERATURE).logsumexp(1) - own / TEMPERATURE
        consistency = 1 - (targets * references.detach()).sum(1)
        nearest = ((own > others.amax(1)) & negatives.any(1)).sum()
    return torch.stack([losses.sum(), consistency.sum()]), torch.stack([nearest, torch.zeros_like(nearest)])
