"""Private parts of torch, accelerate and transformers that Myna relies on, each in a named function.

A new version of these libraries may move or drop them; each docstring says what fails then. One use overrides a method
and cannot be collected here: `models/quantized.py` extends `nn.Module._apply` to see a layer move.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

# No public name yet: the memory plan counts live tensors with them.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return the identity of a tensor's memory, also on the meta device, where every data pointer is 0. Without it, the
    memory plan would count views twice."""
    return int(storage._cdata)


def foreach_copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy many tensors in place in few kernels. Without it, moving a row of a decoding batch needs two for every
    layer."""
    torch._foreach_copy_(list(targets), list(sources))


def foreach_lerp(tensors: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], weight: float) -> None:
    """Interpolate many tensors in place in one kernel. Without it, the EMA needs a kernel per tensor."""
    torch._foreach_lerp_(list(tensors), list(ends), weight)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply fp8 matrices with a scale per row and fast accumulation. Without it, `model.quantization: fp8` would
    dequantize before every product."""
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=True, out=out)


def cpu_has_bf16() -> bool:
    """Return whether this CPU computes in bf16 (AMX or AVX512-bf16). Without it, there is no warning of slow bf16 on a
    CPU."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def ddp_ignore_buffers(module: nn.Module) -> None:
    """Keep DDP from broadcasting the module's buffers, packed weights among them, which every rank has built itself.
    Without it, wrapping sends them all."""
    from torch.nn.parallel import DistributedDataParallel

    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(module, [name for name, _ in module.named_buffers()])


def reset_accelerator_state() -> None:
    """Forget the device and precision of an earlier training in this process. Without it, a second `Accelerator`
    silently keeps those of the first."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def model_from_config(model_class: Any, config: Any, **options: Any) -> Any:
    """Build a transformers model without weights. The public constructor takes neither a dtype nor an attention
    implementation."""
    return model_class._from_config(config, **options)


def set_beam_reordering(model: Any, reorder: Callable[[Any, torch.Tensor], Any]) -> None:
    """Replace how a transformers model reorders its cache between beams. Without it, beam search with Whisper copies
    the encoder's keys and values at every token."""
    model._reorder_cache = reorder


def conv_output_length(model: Any, samples: int) -> int:
    """Return the number of frames that the convolutions of a transformers wav2vec2-like model make of the samples."""
    return int(model._get_feat_extract_output_lengths(samples))
