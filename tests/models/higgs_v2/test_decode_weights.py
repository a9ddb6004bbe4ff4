"""Weights of a decoding step, and its products with them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import HiggsAudioV2ForConditionalGeneration

from myna.models.higgs_v2 import tiny
from myna.models.higgs_v2.decode import MAX_SLAB_ROWS, _product
from myna.models.higgs_v2.decode.weights import Weight, join_weights


@pytest.mark.parametrize("outputs", [768, 8 * 1026, 20])
@pytest.mark.parametrize("rows", [1, 2, MAX_SLAB_ROWS, MAX_SLAB_ROWS + 1])
def test_a_product_in_slabs_is_the_product(rows: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, values = torch.randn(rows, 96, generator=generator), torch.randn(outputs, 96, generator=generator)
    for weight in (Weight(values), Weight(values, input_major=values.t().contiguous().t())):
        found = _product(x, weight)
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), F.linear(x.double(), values.double()), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_modules_keep_views_of_joined_weights(dtype: torch.dtype) -> None:
    model = HiggsAudioV2ForConditionalGeneration(tiny.tiny_config()).eval().requires_grad_(False).to(dtype)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    layers, head = join_weights(model)
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.weight.untyped_storage().data_ptr() == layers[0].qkv.values.untyped_storage().data_ptr()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    for weight in (layers[0].qkv, layers[0].down, head):
        assert (weight.input_major is None) == (dtype != torch.float32), "fp16 is slower input by input"
        assert weight.input_major is None or torch.equal(weight.input_major, weight.values)
