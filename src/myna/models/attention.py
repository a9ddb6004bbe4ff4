"""Attention of sequences that lie end to end or go on step by step: the same for every family."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend_within(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Causal attention inside each sequence; (positions, heads, head size) in sequence order.

    One call per sequence: exact on every device, and no mask that grows with the square of a row.
    """
    if q.is_cuda and q.dtype != torch.float32:
        # An older card has a kernel for such numbers, but not where heads share keys: there it would compute all pairs.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    attended = []
    for parts in zip(*(torch.split(x, list(lengths)) for x in (q, k, v)), strict=True):
        one_q, one_k, one_v = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        grouped = one_q.shape[1] != one_k.shape[1]
        out = F.scaled_dot_product_attention(one_q, one_k, one_v, is_causal=True, enable_gqa=grouped)
        attended.append(out[0].transpose(0, 1))
    return torch.cat(attended)


def attend_side_by_side(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: torch.Tensor, lengths: tuple[int, ...]
) -> torch.Tensor:
    """The same in one call for all sequences, which a host of many short ones would otherwise wait for.

    `places` says where each position stands when sequences lie side by side, each as long as the longest. Whatever
    fills up a short one stands behind its end, and no position looks ahead. Where most of it would be filling, it is
    not worth it.
    """
    count, longest = len(lengths), max(lengths)
    if count * longest > 2 * len(q):
        return attend_within(q, k, v, lengths)
    if q.is_cuda and q.dtype != torch.float32:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (
        x.new_zeros(count * longest, *x.shape[1:]).index_copy(0, places, x).view(count, longest, *x.shape[1:])
        for x in (q, k, v)
    )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return attended.transpose(1, 2).flatten(0, 1)[places]


class Cache:
    """Keys and values of every layer, one row per prompt, left-aligned; it grows by blocks as what is said goes on."""

    BLOCK = 256

    def __init__(self, layers: int, lengths: tuple[int, ...]) -> None:
        self.filled = torch.tensor(lengths)
        self.keys: list[torch.Tensor] = [torch.empty(0)] * layers
        self.values: list[torch.Tensor] = [torch.empty(0)] * layers

    def start(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Take over a prefill: (positions, heads, size), sequences end to end."""
        lengths = self.filled.tolist()
        for store, x in ((self.keys, k), (self.values, v)):
            store[layer] = torch.nn.utils.rnn.pad_sequence(list(torch.split(x, lengths)), batch_first=True)

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add one position per prompt; keys, values and which of them each prompt may see."""
        rows = torch.arange(len(self.filled))
        if int(self.filled.max()) >= self.keys[layer].shape[1]:
            for store in (self.keys, self.values):
                store[layer] = F.pad(store[layer], (0, 0, 0, 0, 0, self.BLOCK))
        self.keys[layer][rows, self.filled] = k
        self.values[layer][rows, self.filled] = v
        seen = torch.arange(self.keys[layer].shape[1]) <= self.filled[:, None]
        return self.keys[layer], self.values[layer], seen.to(k.device)

    @staticmethod
    def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """One query per prompt, (prompts, heads, head size), over what `extend` returned."""
        attended = F.scaled_dot_product_attention(
            q.unsqueeze(2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=seen[:, None, None],
            enable_gqa=q.shape[1] != keys.shape[2],
        )
        return attended.squeeze(2)
