"""Quantized layers: accuracy of weights and products, and memory for the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from myna.core.config import AdaptSettings
from myna.core.errors import ConfigError
from myna.models.higgs_v2.family import HiggsV2, builtin_config
from myna.models.higgs_v2.tiny import tiny_config
from myna.models.lora import adapter_state_dict, count_parameters, frozen_linear_names, make_trainable
from myna.models.quantized import (
    NF4_BLOCK_SIZE,
    NF4_LEVELS,
    NF4_SCALE_GROUP_SIZE,
    QUANTIZED_LINEARS,
    Fp8Linear,
    Int8Linear,
    Nf4Linear,
    QuantizedLinear,
    check_quantization,
    quantize,
    quantized_linears,
)

KIND = pytest.mark.parametrize("kind", QUANTIZED_LINEARS.values(), ids=list(QUANTIZED_LINEARS))
UNPACKED = pytest.mark.parametrize("kind", [Int8Linear, Nf4Linear], ids=["int8", "nf4"])
"""Kinds that unpack their weight to the compute type."""
SHAPE = pytest.mark.parametrize("shape", [(7, 9), (1, 1), (65, 3), (64, 128), (96, 100)], ids=str)
"""Shapes (outputs, inputs): most of them end in the middle of a block, and in the middle of a byte."""
GIB = 2**30


def linear_of(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight.data = weight
    return linear


def random_linear(shape: tuple[int, int], seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Linear:
    return linear_of(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype) / 8)


@contextmanager
def kept_for_backward(*known: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Collect the tensors that a forward pass keeps, except for known ones."""
    there, kept = {tensor.untyped_storage().data_ptr() for tensor in known}, list[torch.Tensor]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in there:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


# Accuracy of weights


@st.composite
def packed(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw codes, shares and scales of whole blocks, each with a weight at one of its ends, as after packing."""
    blocks = draw(st.integers(1, 2 * NF4_SCALE_GROUP_SIZE))
    dice = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    codes = torch.randint(0, 16, (blocks, NF4_BLOCK_SIZE), generator=dice)
    codes[:, int(torch.randint(0, NF4_BLOCK_SIZE, (1,), generator=dice))] = draw(st.sampled_from([0, 15]))
    groups = -(-blocks // NF4_SCALE_GROUP_SIZE)
    shares = torch.randint(1, 256, (groups, NF4_SCALE_GROUP_SIZE), generator=dice)
    shares[:, 0] = 255
    shares.view(-1)[blocks:] = 0
    scale = 10.0 ** torch.empty(groups, 1).uniform_(-12, 3, generator=dice)
    return (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8).flatten(), shares.to(torch.uint8), scale


@settings(deadline=None, max_examples=30)
@given(packed())
def test_weights_on_nf4_levels_are_restored_exactly(made: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    codes, shares, scale = made
    layer = Nf4Linear.from_linear(nn.Linear(NF4_BLOCK_SIZE, 2 * len(codes) // NF4_BLOCK_SIZE, bias=False))
    layer.codes, layer.block_scales, layer.scale = codes, shares, scale
    again = Nf4Linear.from_linear(linear_of(layer.dequantize()))
    assert torch.equal(again.codes, codes)
    assert torch.equal(again.block_scales, shares)
    torch.testing.assert_close(again.dequantize(), layer.dequantize(), rtol=1e-6, atol=0)


@settings(deadline=None, max_examples=30)
@given(
    st.tuples(st.integers(1, 130), st.integers(1, 130)), st.integers(0, 2**32), st.floats(1e-20, 1e6), st.floats(1, 50)
)
def test_nf4_is_as_near_as_its_levels(shape: tuple[int, int], seed: int, size: float, outlier: float) -> None:
    dice = torch.Generator().manual_seed(seed)
    weight = size * torch.randn(shape, generator=dice)
    weight.view(-1)[torch.randint(0, weight.numel(), (3,), generator=dice)] *= outlier
    off = (Nf4Linear.from_linear(linear_of(weight)).dequantize() - weight).abs().flatten()
    blocks = F.pad(weight.abs().flatten(), (0, -weight.numel() % NF4_BLOCK_SIZE)).view(-1, NF4_BLOCK_SIZE)
    largest = blocks.amax(1)
    in_group = (
        F.pad(largest, (0, -len(largest) % NF4_SCALE_GROUP_SIZE))
        .view(-1, NF4_SCALE_GROUP_SIZE)
        .amax(1)
        .repeat_interleave(NF4_SCALE_GROUP_SIZE)
    )
    # Half the widest gap between two levels, and half a step of a share of the group's largest.
    gap = max(high - low for low, high in pairwise(NF4_LEVELS))
    allowed = (largest * gap / 2 + in_group[: len(largest)] / 255 / 2) * 1.0001
    assert (off <= allowed.repeat_interleave(NF4_BLOCK_SIZE)[: len(off)]).all()


@SHAPE
def test_int8_is_as_near_as_half_a_step(shape: tuple[int, int]) -> None:
    linear = random_linear(shape)
    step = linear.weight.abs().amax(1, keepdim=True) / 127
    assert ((Int8Linear.from_linear(linear).dequantize() - linear.weight).abs() <= 0.5001 * step).all()


@SHAPE
def test_fp8_is_as_near_as_four_bits_can_tell(shape: tuple[int, int]) -> None:
    linear = random_linear(shape)
    layer = Fp8Linear.from_linear(linear)
    for codes, scale, weight in (
        (layer.codes, layer.scale, linear.weight),
        (layer.codes_back, layer.scale_back, linear.weight.t()),
    ):
        assert codes.is_contiguous() and codes.shape == weight.shape and scale.shape == (len(weight), 1)
        assert torch.equal(scale.log2(), scale.log2().round()), "powers of two"
        off = (codes.float() * scale - weight).abs()
        assert (off <= torch.maximum(weight.abs() * 2**-4, scale * 2**-10) * 1.0001).all()


@KIND
def test_zeros_and_single_weights_are_exact(kind: type[QuantizedLinear]) -> None:
    assert not kind.from_linear(linear_of(torch.zeros(3, 70))).dequantize().any()
    lone = torch.zeros(3, 70)
    lone[1, 5] = -0.3
    # The scales of fp8 are powers of two, so that even the largest of a row has the error of its bits.
    near = 2**-4 if kind is Fp8Linear else 1e-6
    torch.testing.assert_close(kind.from_linear(linear_of(lone)).dequantize(), lone, rtol=near, atol=0)


@pytest.mark.parametrize(("kind", "most"), [("fp8", 2.01), ("int8", 1.01), ("nf4", 0.517)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_per_weight(kind: str, most: float, dtype: torch.dtype) -> None:
    layer = QUANTIZED_LINEARS[kind].from_linear(random_linear((1024, 3072), dtype=dtype))
    taken = sum(tensor.nbytes for tensor in layer.buffers(recurse=False))
    assert taken <= most * 1024 * 3072
    on_meta = QUANTIZED_LINEARS[kind].from_linear(nn.Linear(3072, 1024, bias=False, device="meta", dtype=dtype))
    assert [(t.shape, t.dtype) for t in on_meta.buffers(recurse=False)] == [
        (t.shape, t.dtype) for t in layer.buffers(recurse=False)
    ]


# Products


@UNPACKED
@SHAPE
def test_both_products_are_those_of_the_plain_weight(kind: type[QuantizedLinear], shape: tuple[int, int]) -> None:
    layer, (outputs, inputs) = kind.from_linear(random_linear(shape)), shape
    x, dy = torch.randn(2, 5, inputs, requires_grad=True), torch.randn(2, 5, outputs)
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    assert torch.equal(y, F.linear(x, layer.dequantize())) and torch.equal(x.grad, dy @ layer.dequantize())
    assert torch.equal(layer.matmul(x.detach()), y) and torch.equal(layer.matmul_backward(dy), x.grad)


@SHAPE
def test_fp8_multiplies_8_bit_numbers_on_both_sides(shape: tuple[int, int]) -> None:
    layer, (outputs, inputs) = Fp8Linear.from_linear(random_linear(shape)), shape
    back = (layer.codes_back.float() * layer.scale_back).t()
    x, dy = torch.randn(2, 5, inputs, requires_grad=True), torch.randn(2, 5, outputs)
    y = layer(x)
    y.backward(dy)
    torch.testing.assert_close(y, F.linear(in_8_bits(x), layer.dequantize()), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad, in_8_bits(dy) @ back, rtol=1e-5, atol=1e-6)


def in_8_bits(x: torch.Tensor) -> torch.Tensor:
    scale = x.detach().abs().amax(-1, keepdim=True) / 448
    return (x.detach() / scale).to(torch.float8_e4m3fn).float() * scale


@KIND
def test_products_are_near_those_of_the_original_weight(kind: type[QuantizedLinear]) -> None:
    linear = random_linear((256, 192))
    layer, x, dy = kind.from_linear(linear), torch.randn(32, 192), torch.randn(32, 256)
    allowed = {"fp8": 0.04, "int8": 0.01, "nf4": 0.11}[layer.kind]
    for got, meant in ((layer.matmul(x), x @ linear.weight.t()), (layer.matmul_backward(dy), dy @ linear.weight)):
        assert (got - meant).norm() < allowed * meant.norm()


@KIND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_of_another_type_are_brought_to_the_compute_type(
    kind: type[QuantizedLinear], dtype: torch.dtype
) -> None:
    layer = kind.from_linear(random_linear((12, 20), dtype=dtype))
    x = torch.randn(3, 20, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert layer.dtype == y.dtype == layer.dequantize().dtype == dtype and x.grad is not None
    torch.testing.assert_close(y.float(), x @ layer.dequantize().float().t(), rtol=0.1, atol=0.1)


@KIND
def test_bias_is_kept_and_frozen(kind: type[QuantizedLinear]) -> None:
    linear = nn.Linear(20, 12)
    layer, x = kind.from_linear(linear), torch.randn(3, 20)
    assert layer.bias is linear.bias and not layer.bias.requires_grad
    torch.testing.assert_close(layer(x), layer.matmul(x) + linear.bias)


@KIND
def test_products_without_rows_are_empty(kind: type[QuantizedLinear]) -> None:
    layer, x = kind.from_linear(random_linear((12, 20))), torch.empty(0, 20, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (0, 12) and x.grad is not None and x.grad.shape == (0, 20)


def test_gradients_too_small_for_8_bits_have_a_scale() -> None:
    layer, dy = Fp8Linear.from_linear(random_linear((12, 20))), torch.randn(3, 12)
    torch.testing.assert_close(layer.matmul_backward(dy * 1e-25) * 1e25, layer.matmul_backward(dy))


def test_an_overflow_is_visible_in_its_row_alone() -> None:
    dy = torch.randn(3, 12)
    dy[1, 4] = torch.inf
    assert Fp8Linear.from_linear(random_linear((12, 20))).matmul_backward(dy).isfinite().all(1).tolist() == [
        True,
        False,
        True,
    ]


# Memory for the backward pass


@KIND
def test_nothing_is_kept_for_the_backward_pass(kind: type[QuantizedLinear]) -> None:
    layer = kind.from_linear(random_linear((96, 100)))
    with kept_for_backward() as kept:
        layer(torch.randn(3, 100, requires_grad=True))
    assert kept == []


class Chain(nn.Module):
    """Two layers, each with a LoRA."""

    def __init__(self, kind: type[QuantizedLinear]) -> None:
        super().__init__()
        self.bases = nn.ModuleList(kind.from_linear(random_linear((96, 96), seed)) for seed in range(2))
        self.downs = nn.ParameterList(torch.randn(4, 96) for _ in range(2))
        self.ups = nn.ParameterList(torch.randn(96, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.bases, self.downs, self.ups, strict=True):
            x = F.silu(base(x) + x @ down.t() @ up.t())
        return x


@KIND
def test_a_compiler_keeps_no_weight_either(kind: type[QuantizedLinear]) -> None:
    chain, x = Chain(kind), torch.randn(5, 96, requires_grad=True)
    expected = torch.autograd.grad(chain(x).sum(), x)[0]
    torch._dynamo.reset()
    compiled = torch.compile(chain, fullgraph=True, dynamic=True, backend="aot_eager_decomp_partition")
    with kept_for_backward(*chain.parameters(), *chain.buffers()) as kept:
        y = compiled(x)
    assert kept and all(tensor.numel() < 96 * 96 for tensor in kept), [tuple(tensor.shape) for tensor in kept]
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected, rtol=1e-4, atol=1e-3)


@KIND
def test_packed_weights_are_not_in_checkpoints(kind: type[QuantizedLinear]) -> None:
    layer = kind.from_linear(random_linear((96, 100)))
    assert {name: tensor.numel() for name, tensor in layer.state_dict().items()} == {"weight": 0}
    assert not any(parameter.requires_grad for parameter in layer.parameters())


# In a model


@pytest.fixture
def family() -> HiggsV2:
    return HiggsV2("tiny", tiny_config(hidden=32), None)


def model_of(family: HiggsV2) -> nn.Module:
    """Make a model with random weights on the CPU."""
    torch.manual_seed(0)
    return type(family.load_model(dtype=torch.float32, device="meta", text_head=True))(
        family.config, use_text_head=True
    )


def frozen(family: HiggsV2, kind: str, settings: AdaptSettings, model: nn.Module | None = None) -> nn.Module:
    model = model_of(family) if model is None else model
    return quantize(model, kind, frozen_linear_names(model, family, settings), "cpu")  # type: ignore[arg-type]


def test_layers_are_frozen_and_heads_are_not(family: HiggsV2) -> None:
    model = frozen(family, "nf4", AdaptSettings())
    kinds = {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {name for name, kind in kinds.items() if kind is nn.Linear} == {"audio_lm_head", "text_lm_head"}
    assert len(list(quantized_linears(model))) == 2 * 10
    assert frozen(family, "none", AdaptSettings()).state_dict().keys() == model_of(family).state_dict().keys()


def test_fully_trained_modules_are_not_quantized(family: HiggsV2) -> None:
    settings = AdaptSettings(mode="attention_only", train_modules=("text_ffn", "audio_head"))
    model = frozen(family, "nf4", settings)
    layer = model.get_submodule("model.layers.0")
    assert type(layer.get_submodule("mlp.up_proj")) is nn.Linear
    assert type(layer.get_submodule("audio_mlp.up_proj")) is Nf4Linear
    learning = {name for name, p in make_trainable(model, family, settings).named_parameters() if p.requires_grad}
    assert any("mlp.modules_to_save.default.up_proj.weight" in name for name in learning)


@KIND
def test_an_adapter_works_as_on_the_plain_model(family: HiggsV2, kind: type[QuantizedLinear]) -> None:
    settings = AdaptSettings(rank=4, train_modules=("audio_head",))
    plain = make_trainable(model_of(family), family, settings)
    packed = make_trainable(frozen(family, kind.kind, settings), family, settings)
    assert count_parameters(packed) == count_parameters(plain)
    one, other = adapter_state_dict(plain), adapter_state_dict(packed)
    assert {name: t.shape for name, t in one.items()} == {name: t.shape for name, t in other.items()}
    learning = [name for name, p in packed.named_parameters() if p.requires_grad]
    assert learning == [name for name, p in plain.named_parameters() if p.requires_grad]


def test_weights_are_moved_and_freed_one_at_a_time(family: HiggsV2, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for a GPU that the whole model would not fit on."""
    model = model_of(family)
    weights = [weakref.ref(module.weight) for module in model.modules() if isinstance(module, nn.Linear)]
    gone, pack = list[int](), Int8Linear.from_linear

    def watched(linear: nn.Linear) -> QuantizedLinear:
        plain = [module for module in model.modules() if type(module) is nn.Linear]
        assert [module for module in plain if module.weight.is_meta] == [linear]
        gone.append(sum(weight() is None for weight in weights))
        return pack(linear)

    monkeypatch.setattr(Int8Linear, "from_linear", watched)
    quantize(model, "int8", frozen_linear_names(model, family, AdaptSettings()), "meta")
    assert gone == list(range(1, 21))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_memory_of_the_true_model_in_nf4() -> None:
    family = HiggsV2("higgs-v2", builtin_config(), None)
    taken = {}
    for kind in ("none", *QUANTIZED_LINEARS):
        model = family.load_model(dtype=torch.bfloat16, device="meta", text_head=False)
        quantize(model, kind, frozen_linear_names(model, family, AdaptSettings()), "meta")  # type: ignore[arg-type]
        assert count_parameters(model).total == 5_377_281_024
        taken[kind] = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) / GIB
    assert taken == pytest.approx({"none": 10.02, "fp8": 10.03, "int8": 5.43, "nf4": 3.20}, abs=0.01)


def test_fp8_is_refused_on_a_device_that_would_emulate_it() -> None:
    with pytest.raises(ConfigError, match=r"fp8.*capability 8\.9.*cpu") as told:
        check_quantization("fp8", torch.device("cpu"))
    assert "model.quantization=nf4" in told.value.hint
    for kind in ("none", "int8", "nf4"):
        check_quantization(kind, torch.device("cpu"))


@pytest.mark.gpu
def test_a_gpu_multiplies_what_the_cpu_emulates() -> None:
    layer, x, dy = (
        Fp8Linear.from_linear(random_linear((128, 256), dtype=torch.bfloat16)),
        torch.randn(48, 256),
        torch.randn(48, 128),
    )
    x, dy = x.bfloat16(), dy.bfloat16()
    here = layer.matmul(x), layer.matmul_backward(dy)
    assert not layer.native_fp8
    layer = layer.to("cuda")
    assert layer.native_fp8 == (torch.cuda.get_device_capability() >= (8, 9))
    for there, meant in zip((layer.matmul(x.cuda()), layer.matmul_backward(dy.cuda())), here, strict=True):
        # The GPU accumulates with fewer bits than fp32, which is faster.
        assert float((there.cpu() - meant).float().norm() / meant.float().norm()) < 1e-2


@pytest.mark.gpu
@KIND
def test_a_gpu_packs_as_the_cpu_does(kind: type[QuantizedLinear]) -> None:
    linear = random_linear((96, 100), dtype=torch.bfloat16)
    here, there = kind.from_linear(linear), kind.from_linear(linear_of(linear.weight.data.cuda()))
    for one, other in zip(here.buffers(recurse=False), there.buffers(recurse=False), strict=True):
        assert torch.equal(one.float(), other.float().cpu())
