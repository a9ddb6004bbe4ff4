"""Attention over packed sequences, and the key-value cache of generation."""

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_causal_attention(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Attend causally inside each sequence, one call each: exact on every device, without a quadratic mask."""
    k, v = _repeat_heads(q, k, v)
    attended = []
    for parts in zip(*(torch.split(x, list(lengths)) for x in (q, k, v)), strict=True):
        one_q, one_k, one_v = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        grouped = one_q.shape[1] != one_k.shape[1]
        out = F.scaled_dot_product_attention(one_q, one_k, one_v, is_causal=True, enable_gqa=grouped)
        attended.append(out[0].transpose(0, 1))
    return torch.cat(attended)


def padded_causal_attention(q: Tensor, k: Tensor, v: Tensor, places: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Compute `packed_causal_attention` in one call, which is faster for many short sequences. `places` are the
    positions in the batch padded to the longest sequence. Padding follows the end of a sequence, so the causal mask
    hides it. If most of the batch would be padding, sequences go one by one."""
    count, longest = len(lengths), max(lengths)
    if count * longest > 2 * len(q):
        return packed_causal_attention(q, k, v, lengths)
    k, v = _repeat_heads(q, k, v)
    q, k, v = (
        x.new_zeros(count * longest, *x.shape[1:]).index_copy(0, places, x).view(count, longest, *x.shape[1:])
        for x in (q, k, v)
    )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return attended.transpose(1, 2).flatten(0, 1)[places]


def _repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat shared heads in half precision on CUDA: older GPUs have no fused kernel for them and compute all pairs."""
    if not q.is_cuda or q.dtype == torch.float32:
        return k, v
    repeats = q.shape[1] // k.shape[1]
    return k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)


class KVCache:
    """Keys and values of every layer, one left-aligned row per prompt. Grows in blocks."""

    BLOCK_SIZE = 256

    def __init__(self, layers: int, lengths: tuple[int, ...]) -> None:
        self.lengths, self._rows = torch.tensor(lengths), torch.arange(len(lengths))
        self._mask = torch.empty(0, dtype=torch.bool)
        self.keys: list[Tensor] = [torch.empty(0)] * layers
        self.values: list[Tensor] = [torch.empty(0)] * layers

    def prefill(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the packed prompts: (positions, heads, size)."""
        lengths = self.lengths.tolist()
        for store, x in ((self.keys, k), (self.values, v)):
            store[layer] = torch.nn.utils.rnn.pad_sequence(list(torch.split(x, lengths)), batch_first=True)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add one position per prompt; returns keys, values and their mask. Layers come in order and share the mask."""
        if layer == 0:
            if int(self.lengths.max()) >= self.keys[0].shape[1]:
                for store in (self.keys, self.values):
                    store[:] = [F.pad(x, (0, 0, 0, 0, 0, self.BLOCK_SIZE)) for x in store]
            self._mask = (torch.arange(self.keys[0].shape[1]) <= self.lengths[:, None]).to(k.device)
        self.keys[layer][self._rows, self.lengths] = k
        self.values[layer][self._rows, self.lengths] = v
        return self.keys[layer], self.values[layer], self._mask

    @staticmethod
    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attend with one query per prompt, (prompts, heads, head size), to the result of `append`."""
        q, k, v, mask = q.unsqueeze(2), keys.transpose(1, 2), values.transpose(1, 2), mask[:, None, None]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        return attended.squeeze(2)
