"""The decoding batch as CUDA graphs, compared with the same batch step by step on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np
import peft
import pytest
import torch

from myna.models.base import RenderedSequence, Sampling, get_base_model
from myna.models.code_sampling import (
    MAX_REPETITION_WINDOW,
    RowState,
    advance,
    log_probabilities,
    sample_frame,
)
from myna.models.higgs_v2.decode.weights import can_join
from myna.models.higgs_v2.family import HiggsV2
from myna.models.quantized import quantize
from myna.speak.scheduler import BatchScheduler, Generation

from .conftest import cloning

pytestmark = pytest.mark.gpu

GREEDY = Sampling(temperature=0)
SAMPLINGS = [GREEDY, Sampling(seed=3), Sampling(seed=4, temperature=0.7, top_k=0, top_p=0.7, repetition_limit=1)]


@pytest.fixture(scope="module")
def models(family: HiggsV2) -> dict[str, Any]:
    return {
        device: family.load_model(dtype=torch.float32, device=device, text_head=False).requires_grad_(False)
        for device in ("cpu", "cuda")
    }


def spoken(
    family: HiggsV2, model: Any, prompts: list[RenderedSequence], sampling: Sampling, rows: int
) -> list[Generation]:
    scheduler = BatchScheduler(family.speech_decoder(model, rows, 512))
    generations = [scheduler.submit(prompt, sampling, 6 + number % 9) for number, prompt in enumerate(prompts)]
    while scheduler.busy:
        scheduler.advance()
    return generations


def prompts_of(family: HiggsV2, count: int) -> list[RenderedSequence]:
    return [family.render(cloning(f"line {n}" * (1 + n % 4), reference=3 + n % 40, target=None)) for n in range(count)]


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_graphs_equal_eager_steps(family: HiggsV2, models: dict[str, Any], sampling: Sampling, rows: int) -> None:
    prompts = prompts_of(family, 2 * rows)
    eager, graphs = (spoken(family, models[device], prompts, sampling, rows) for device in ("cpu", "cuda"))
    same = [np.array_equal(a.codes(), b.codes()) for a, b in zip(eager, graphs, strict=True)]
    # Sums in fp32 have another order: a draw on the edge between two codes may differ.
    assert np.mean(same) >= 0.95
    for a, b in zip(eager, graphs, strict=True):
        if np.array_equal(a.codes(), b.codes()):
            assert a.finish_reason == b.finish_reason
            assert np.abs(a.log_probs() - b.log_probs()).max() < 1e-3


def test_the_sampling_kernel_equals_torch() -> None:
    """Random logits, settings and seeds give the same codes, ends and log-probabilities, row by row."""
    from myna.models.higgs_v2.decode import sampling_kernels as kernels

    rows, device = 64, torch.device("cuda")
    state = RowState.create(rows, 8, device)
    for row in range(rows):
        sampling = Sampling(
            temperature=(1.0, 0.7, 0.0, 1.3)[row % 4],
            top_k=(50, 0, 20, 7)[row // 4 % 4],
            top_p=(0.95, 1.0, 0.5)[row % 3],
            repetition_limit=1,
            seed=row * 12345678901 + 7,
        )
        state.set_row(row, position=5, sampling=sampling, max_frames=40, begin=1024)
    reference = RowState(**{field.name: getattr(state, field.name).cpu() for field in fields(state)})
    result = torch.zeros(rows, 17, dtype=torch.int32, device=device)
    torch.manual_seed(1)
    for step in range(60):
        logits = torch.randn(rows, 8, 1026, device=device) * 3
        if step % 2:
            logits[:, :, :5] += 8
        codes = sample_frame(logits.cpu(), reference, rows, 1024, 1025)
        advance(reference, rows, codes, 1025)
        kernels.sample_kernel[rows, 8](
            *(logits, state.codes, result, state.frames, state.ends, state.caps, state.seeds, state.temperatures),
            *(state.top_ks, state.top_ps, state.windows, state.limits, state.history, 8, 1026, 2048, 1024, 1025),
            HISTORY=MAX_REPETITION_WINDOW,
        )
        kernels.advance_kernel[(2,)](
            *(state.codes, result, state.frames, state.ends, state.positions, state.active, state.history, rows),
            *(8, 1025),
            HISTORY=MAX_REPETITION_WINDOW,
            BLOCK=32,
        )
        assert torch.equal(result[:, :8].cpu().long(), codes)
        log_probs = result[:, 8:16].cpu().view(torch.float32)
        assert torch.allclose(log_probs, log_probabilities(logits.cpu(), codes), atol=1e-4)
        for name in ("ends", "frames", "active", "positions"):
            assert torch.equal(getattr(state, name).cpu(), getattr(reference, name)), (name, step)


@pytest.mark.parametrize("kind", ["adapter", "int8", "nf4"])
def test_weights_that_are_not_plain_run_as_graphs(family: HiggsV2, kind: str) -> None:
    """Cases: an adapter that is not merged, as in training, and quantized weights."""
    prompts = prompts_of(family, 6)

    def prepared(device: str) -> Any:
        model = family.load_model(dtype=torch.float32, device=device, text_head=False)
        names = family.lora_targets(model, "comprehensive").adapted
        if kind != "adapter":
            return quantize(model, kind, names, device).requires_grad_(False)  # type: ignore[arg-type]
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(names), init_lora_weights=False))
        return adapted.to(device)

    models = {"cpu": prepared("cpu")}
    models["cuda"] = prepared("cuda")
    if kind == "adapter":
        models["cuda"].load_state_dict(models["cpu"].state_dict())
    assert can_join(get_base_model(models["cuda"])) is False
    eager, graphs = (spoken(family, models[device], prompts, GREEDY, 3) for device in ("cpu", "cuda"))
    assert np.mean([np.array_equal(a.codes(), b.codes()) for a, b in zip(eager, graphs, strict=True)]) >= 0.8
    decoder = family.speech_decoder(models["cuda"], 1, 256)
    assert type(decoder).__name__ == "CudaDecoder"


@pytest.mark.parametrize(("rows", "ranks"), [(1, (2, 7, 5)), (5, (4, 7, 12)), (12, (4, 16, 20))])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_adapters_of_rows_are_those_of_the_eager_steps(
    family: HiggsV2, models: dict[str, Any], sampling: Sampling, rows: int, ranks: tuple[int, ...]
) -> None:
    """One batch has three adapters and rows without one, at two strengths; some need wider slots than the first."""
    prompts, results = prompts_of(family, 24), {}
    for device, model in models.items():
        slots = family.adapter_slots(model, len(ranks), 8)
        for number, rank in enumerate(ranks):
            slots.load(str(number), random_lora(family, model, rank, number))
        scheduler = BatchScheduler(family.speech_decoder(model, rows, 512, slots))
        results[device] = [
            scheduler.submit(prompt, sampling, 6 + n % 9, "" if n % 4 == 3 else str(n % 4), 1.0 if n % 2 else 0.6)
            for n, prompt in enumerate(prompts)
        ]
        while scheduler.busy:
            scheduler.advance()
    same = [np.array_equal(a.codes(), b.codes()) for a, b in zip(results["cpu"], results["cuda"], strict=True)]
    assert np.mean(same) >= 0.9
    for equal, a, b in zip(same, results["cpu"], results["cuda"], strict=True):
        if equal:
            assert np.abs(a.log_probs() - b.log_probs()).max() < 2e-3


def test_a_wider_adapter_drops_the_graphs(family: HiggsV2, models: dict[str, Any]) -> None:
    """All graphs and their memory must be freed."""
    model = models["cuda"]
    slots = family.adapter_slots(model, 2, 4)
    scheduler = BatchScheduler(family.speech_decoder(model, 2, 512, slots))
    for name, rank in (("narrow", 4), ("wide", 20)):
        slots.load(name, random_lora(family, model, rank, rank))
        spoken = [scheduler.submit(prompt, GREEDY, 6, name) for prompt in prompts_of(family, 3)]
        while scheduler.busy:
            scheduler.advance()
        assert [one.finish_reason for one in spoken] == ["length"] * 3


def random_lora(family: HiggsV2, model: Any, rank: int, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    linears = {name: model.get_submodule(name) for name in family.lora_targets(model, "comprehensive").adapted}
    return {
        name: (
            torch.randn(rank, linear.in_features, generator=generator) * 0.2,
            torch.randn(linear.out_features, rank, generator=generator) * 0.2,
        )
        for name, linear in linears.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_rows_have_the_same_bits_alone_and_in_a_batch(family: HiggsV2, dtype: torch.dtype) -> None:
    model = family.load_model(dtype=dtype, device="cuda", text_head=False).requires_grad_(False)
    slots = family.adapter_slots(model, 2, 8)
    slots.load("a", random_lora(family, model, 8, 0))
    scheduler = BatchScheduler(family.speech_decoder(model, 16, 512, slots, exact=True))
    prompts, sampling = prompts_of(family, 40), Sampling(seed=5)

    def speak_some(numbers: Iterable[int]) -> list[Generation]:
        generations = [
            scheduler.submit(prompts[number], sampling, 6 + number % 9, "a" if number % 3 == 0 else "")
            for number in numbers
        ]
        while scheduler.busy:
            scheduler.advance()
        return generations

    crowd = speak_some(range(40))
    for number in (0, 1, 7, 18, 39):
        [alone] = speak_some([number])
        assert np.array_equal(alone.codes(), crowd[number].codes())
        assert np.array_equal(alone.log_probs(), crowd[number].log_probs())


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("kind", ["fp8", "int8", "nf4"])
def test_kernels_read_quantized_weights_as_their_modules_do(family: HiggsV2, kind: str, rows: int) -> None:
    model = family.load_model(dtype=torch.bfloat16, device="cuda", text_head=False)
    names = family.lora_targets(model, "comprehensive").adapted
    model = quantize(model, kind, names, "cuda").requires_grad_(False)  # type: ignore[arg-type]
    logits = {}
    for path in ("kernels", "modules"):
        decoder: Any = family.speech_decoder(model, rows, 256)
        assert decoder._packed is not None
        if path == "modules":
            decoder._packed, decoder._fp8_products = None, False
        for row, prompt in enumerate(prompts_of(family, rows)):
            decoder.prefill(row, prompt)
            decoder.begin(row, len(prompt), GREEDY, 9)
        decoder.step(rows, 200).result()
        logits[path] = decoder._logits.clone()
    difference = (logits["kernels"] - logits["modules"]).norm() / logits["modules"].norm()
    # A single row of fp8 is multiplied with inputs that are not rounded to fp8.
    assert difference < (0.06 if kind == "fp8" else 0.02)


def test_without_triton_steps_are_eager_with_a_warning(
    family: HiggsV2, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(family, 8)
    graphs = spoken(family, models["cuda"], prompts, GREEDY, 4)
    why = "Triton is not installed"
    monkeypatch.setattr("myna.models.higgs_v2.family.supports_triton", lambda _: False)
    monkeypatch.setattr("myna.models.higgs_v2.family.why_no_triton", lambda _: why)
    with pytest.warns(UserWarning, match=f"{why}: speech is generated without CUDA graphs"):
        eager = spoken(family, models["cuda"], prompts, GREEDY, 4)
    assert np.mean([np.array_equal(a.codes(), b.codes()) for a, b in zip(eager, graphs, strict=True)]) >= 0.8


def test_no_step_waits_for_the_device(family: HiggsV2, models: dict[str, Any]) -> None:
    scheduler = BatchScheduler(family.speech_decoder(models["cuda"], 2, 512))
    first, second = prompts_of(family, 2)
    for prompt in (first, second):  # captures the graphs
        scheduler.submit(prompt, Sampling(), 9)
    while scheduler.busy:
        scheduler.advance()
    generation = scheduler.submit(first, Sampling(), 9)
    torch.cuda.set_sync_debug_mode("error")
    try:
        while not generation.finished:
            scheduler.advance()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert generation.frames


def test_many_requests_do_not_grow_memory(family: HiggsV2, models: dict[str, Any]) -> None:
    scheduler = BatchScheduler(family.speech_decoder(models["cuda"], 4, 512))
    prompts = prompts_of(family, 8)

    def burst() -> int:
        for number in range(60):
            generation = scheduler.submit(prompts[number % 8], Sampling(seed=number), 1 + number % 5)
            if number % 7 == 0:
                generation.cancel()
        while scheduler.busy:
            scheduler.advance()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    burst()
    assert burst() == burst()
