"""Kokoro as a PyTorch module: weights out of an ONNX file by name, and lines that sound alike alone and in a batch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from corpus_making import kokoro, kokoro_fast, kokoro_torch, kokoro_weights
from corpus_making.kokoro_fast import FastGenerator, HalfConv
from corpus_making.kokoro_network import Generator, KokoroNetwork, Lengths, Sizes, StyledNorm
from corpus_making.kokoro_torch import TorchKokoro
from myna.core.errors import DataError

TINY = Sizes(
    symbols=16,
    positions=64,
    embedding=8,
    hidden=16,
    inner=24,
    heads=2,
    layers=2,
    width=16,
    style=6,
    longest_duration=5,
    decoder=20,
    residual=4,
)


@pytest.fixture
def network() -> KokoroNetwork:
    torch.manual_seed(0)
    # In double precision, where lines can be compared sample by sample: rounding turns the angles of faint overtones.
    network = KokoroNetwork(TINY).double().eval().requires_grad_(False)
    for name, parameter in network.named_parameters():
        if "alpha" not in name:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    # As high as a voice, and high enough not to be taken for unvoiced.
    assert network.predictor.F0_proj.bias is not None
    network.predictor.F0_proj.bias.fill_(200.0)
    return network


def said(network: KokoroNetwork, lines: Sequence[list[int]], styles: torch.Tensor) -> list[torch.Tensor]:
    return network.say(network.read(lines, styles, torch.ones(len(lines), dtype=torch.float64)))


def test_a_line_sounds_the_same_alone_and_beside_longer_ones(network: KokoroNetwork) -> None:
    lines = [[0, 3, 4, 5, 0], [0, 7, 8, 9, 10, 11, 12, 13, 2, 0], [0, 1, 0]]
    styles = torch.randn(3, 2 * TINY.style, dtype=torch.float64)
    together = said(network, lines, styles)
    assert len({len(samples) for samples in together}) > 1, "some must be padded"
    for number, line in enumerate(lines):
        [alone] = said(network, [line], styles[number : number + 1])
        assert len(alone) == len(together[number]) and alone.std() > 1e-4
        assert torch.allclose(alone, together[number], atol=1e-8)


def test_speed_and_style_are_heard(network: KokoroNetwork) -> None:
    styles = torch.randn(2, 2 * TINY.style, dtype=torch.float64)
    line = [[0, 3, 4, 5, 6, 7, 8, 0]]
    slow, fast = (
        network.read(line, styles[:1], torch.tensor([speed], dtype=torch.float64)).frames[0] for speed in (0.5, 2.0)
    )
    assert slow > fast
    first, second = said(network, line * 2, styles)
    size = min(len(first), len(second))
    assert not torch.allclose(first[:size], second[:size], atol=1e-4)


def test_padding_does_not_count_in_a_norm() -> None:
    norm = StyledNorm(4, 3)
    x, style = torch.randn(2, 3, 10) + 5, torch.randn(2, 4)
    lengths = Lengths([10, 6], torch.device("cpu"))
    found = norm(lengths.clean(x), style, lengths)[1, :, :6]
    assert torch.allclose(found, norm(x[1:, :, :6], style[1:], Lengths([6], torch.device("cpu")))[0], atol=1e-4)
    gamma, beta = norm.fc(style[1]).chunk(2)
    assert torch.allclose(found.mean(1), beta, atol=1e-4)
    assert torch.allclose(found.std(1, correction=0), (1 + gamma).abs(), atol=1e-4)


# In half precision


WIDE = replace(TINY, width=256)
"""Sizes with 128 and 64 channels in the generator, as the kernels want them."""


def generator_of(sizes: Sizes) -> Generator:
    torch.manual_seed(0)
    generator = Generator(sizes).eval().requires_grad_(False)
    for name, parameter in generator.named_parameters():
        parameter.add_(torch.rand_like(parameter) if "alpha" in name else torch.randn_like(parameter) * 0.02)
    return generator


def quieter(generator: Generator, fast: FastGenerator, frames: Sequence[int], device: str = "cpu") -> list[float]:
    """Return how many decibels the error of each line is below its sound."""
    torch.manual_seed(1)
    lengths, longest = Lengths(frames, torch.device(device)), max(frames)
    x = lengths.clean(torch.randn(len(frames), generator.sizes.width, longest).to(device))
    style = torch.randn(len(frames), generator.sizes.style).to(device)
    pitch = lengths.clean(200 + 20 * torch.randn(len(frames), 1, longest).to(device))
    due, found = generator(x, style, pitch, lengths), fast(x, style, pitch, lengths)
    assert due.shape == found.shape
    samples = generator.sizes.samples_of_frame // 2
    return [
        float(10 * torch.log10(one[:end].square().sum() / (one - other)[:end].square().sum()))
        for one, other, end in zip(due, found, [count * samples for count in frames], strict=True)
    ]


def test_the_fast_generator_says_the_same_but_for_rounding() -> None:
    generator = generator_of(TINY)
    fast = FastGenerator(generator)
    assert all(product.weight.dtype == torch.float16 for product in fast.modules() if isinstance(product, HalfConv))
    assert min(quieter(generator, fast, (6, 3, 1))) > 35, "padded"
    assert min(quieter(generator, fast, (4, 4))) > 35, "with nothing padded"


def test_products_see_nothing_behind_a_line() -> None:
    conv = nn.Conv1d(5, 7, 3, padding=3, dilation=3)
    x, ends = torch.randn(2, 9, 5), torch.tensor([9, 4])
    junk = x.clone()
    junk[1, 4:] = torch.nan
    found, moments = HalfConv.of(conv)(junk, ends, dtype=torch.float32)
    assert found.isfinite().all() and not found[1, 4:].any()
    half = conv.half().float()
    due = half(x[1:, :4].mT)[0].mT
    assert torch.allclose(found[1, :4], due, atol=1e-3)
    assert torch.allclose(moments[0, 1, 0], due.mean(0), atol=1e-3)
    assert torch.allclose(moments[1, 1, 0], due.var(0, correction=0) * 4, atol=1e-2)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton and TRITON_INTERPRET=1")
def test_the_kernels_say_the_same_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The very kernels without a card, slowly: `TRITON_INTERPRET=1 pytest tests/recipes/test_kokoro_network.py`."""
    monkeypatch.setattr(kokoro_fast, "supports_triton", lambda _: True)
    generator = generator_of(WIDE)
    # 180 and 60 moments: a line's end lies inside of a block, before a block and at its edge.
    assert min(quieter(generator, FastGenerator(generator), (3, 1))) > 35


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_say_the_same_on_a_card() -> None:
    generator = generator_of(WIDE).to("cuda")
    assert min(quieter(generator, FastGenerator(generator), (40, 33, 1), "cuda")) > 35


# Weights


def as_onnx(module: nn.LSTM) -> tuple[np.ndarray, ...]:
    """Return the weights as an exporter writes them: gates input, output, forget, cell; both biases in a row;
    directions stacked."""

    def turned(name: str) -> np.ndarray:
        entry, forget, cell, output = getattr(module, name).detach().chunk(4)
        return np.asarray(torch.cat([entry, output, forget, cell]))

    endings = ("_l0", "_l0_reverse")
    inputs, hidden = (np.stack([turned(f"{part}{end}") for end in endings]) for part in ("weight_ih", "weight_hh"))
    biases = np.stack([np.concatenate([turned(f"bias_ih{end}"), turned(f"bias_hh{end}")]) for end in endings])
    return inputs, hidden, biases


def test_gates_of_recurrent_layers_are_put_in_order() -> None:
    module, again = (nn.LSTM(3, 4, batch_first=True, bidirectional=True) for _ in range(2))
    again.load_state_dict(dict(kokoro_weights.recurrent(*as_onnx(module))))
    x = torch.randn(1, 5, 3)
    assert torch.equal(module(x)[0], again(x)[0])


def test_weights_are_named_by_what_uses_them() -> None:
    stored = {
        "encoder.predictor.F0.1.conv1.bias": np.zeros(2, np.float32),
        "/encoder/F0.1/Mul_1_output_0": np.ones((2, 4, 3), np.float32),
        "/encoder/F0.1/Mul_3_output_0": np.ones((2, 4, 1), np.float32),
        "onnx::MatMul_1": np.arange(6, dtype=np.float32).reshape(2, 3),
        "decoder.decoder.generator.stft.window": np.zeros(3, np.float32),
        "onnx::Slice_3": np.zeros(3, np.float32),
    }
    nodes = [
        (
            "Conv",
            "/encoder/F0.1/conv1/Conv",
            ["x", "/encoder/F0.1/Mul_1_output_0", "encoder.predictor.F0.1.conv1.bias"],
        ),
        ("Conv", "/encoder/F0.1/conv1x1/Conv", ["x", "/encoder/F0.1/Mul_3_output_0"]),
        ("MatMul", "/encoder/bert/attention/query/MatMul", ["x", "onnx::MatMul_1"]),
        ("MatMul", "/encoder/bert/attention/query_7/MatMul", ["x", "onnx::MatMul_1"]),
        ("MatMul", "/encoder/bert/attention/MatMul", ["x", "y"]),
        ("Slice", "/encoder/bert/Slice", ["x", "onnx::Slice_3"]),
    ]
    found = kokoro_weights.parameters(nodes, stored)
    assert set(found) == {
        *("predictor.F0.1.conv1.bias", "predictor.F0.1.conv1.weight", "predictor.F0.1.conv1x1.weight"),
        "bert.attention.query.weight",
    }
    assert found["bert.attention.query.weight"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert kokoro_weights.module_of("/decoder/decoder/generator/ups.0/ConvTranspose") == "decoder.generator.ups.0"
    assert kokoro_weights.module_of("/encoder/shared/LSTM") == "predictor.shared"
    assert kokoro_weights.module_of("/encoder/predictor/lstm/LSTM") == "predictor.lstm"


def test_the_real_network_has_the_size_of_kokoro() -> None:
    with torch.device("meta"):
        names = dict(KokoroNetwork().named_parameters())
    assert sum(parameter.numel() for parameter in names.values()) == 81_140_664


# The whole of it


class Spoken:
    """Instead of espeak-ng, which is not everywhere."""

    def phonemes(self, text: str, _: str) -> str:
        return text


@pytest.fixture
def folders(network: KokoroNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(kokoro, "Espeak", Spoken)
    monkeypatch.setattr(kokoro_torch, "KokoroNetwork", lambda: KokoroNetwork(TINY))
    monkeypatch.setattr(kokoro, "VOCABULARY", {letter: number for number, letter in enumerate("abcdefgh", start=1)})
    monkeypatch.setattr(kokoro_weights, "LARGEST", 20_000)
    homes = [tmp_path / "0", tmp_path / "1"]
    parts = list(kokoro_weights._parts({name: tensor.half() for name, tensor in network.state_dict().items()}))
    assert len(parts) > 2 and all(sum(tensor.nbytes for tensor in part.values()) <= 20_000 for part in parts)
    for number, part in enumerate(parts):
        homes[number % 2].mkdir(exist_ok=True)
        save_file(part, homes[number % 2] / f"kokoro-{number}.safetensors")
    styles = {name: torch.randn(30, 2 * TINY.style) for name in ("af_heart", "bm_george")}
    save_file(styles, homes[1] / kokoro_weights.STYLES)
    return homes


def test_matrices_are_written_in_8_bits_and_small_tensors_are_not_rounded_to_0(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {
        "matrix": torch.randn(64, 200) * torch.logspace(-3, 1, 64)[:, None],
        "alpha": torch.full((1, 40, 1), 1e-4),
    }
    weights["alpha"][0, 0] = 3.0
    stored = {name: tensor for key, whole in weights.items() for name, tensor in kokoro_weights._stored(key, whole)}
    assert stored["matrix"].dtype == torch.int8 and stored["alpha"].dtype == torch.float16
    save_file(stored, tmp_path / "kokoro-0.safetensors")
    read = kokoro_weights.read([tmp_path])
    assert read.keys() == weights.keys() and float(read["alpha"].min()) > 0
    error = (read["matrix"] - weights["matrix"]).norm(dim=1) / weights["matrix"].norm(dim=1)
    assert float(error.max()) < 0.01, "each row has a scale of its own"


def test_lines_come_back_in_their_places(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = TorchKokoro(folders, "cpu")
    speaker = kokoro.KokoroSpeaker("anna", ("af_heart", "bm_george"), 0.4, 1.0)
    requests = [kokoro.SynthesisRequest(text, speaker, 1.0) for text in ("abcdefgh" * 2, "ab", "123", "cde")]
    whole = model.say(requests)
    assert [len(samples) > 0 for samples in whole] == [True, True, False, True]
    for request, samples in zip(requests, whole, strict=True):
        [alone] = model.say([request])
        assert samples.shape == alone.shape
        assert not len(samples) or np.corrcoef(samples, alone)[0, 1] > 0.95, "another line is nothing like it"
    monkeypatch.setattr(kokoro_torch, "MAX_SYNTHESIS_BATCH_SECONDS", 0)
    assert [len(samples) for samples in model.say(requests)] == [len(samples) for samples in whole], "in many batches"


def test_formants_are_moved_in_their_lines_alone(folders: list[Path]) -> None:
    model = TorchKokoro(folders, "cpu")
    speaker = kokoro.KokoroSpeaker("anna", ("af_heart", "bm_george"), 0.4, 1.0)
    said = []
    for factor in (1.0, 1.12):
        torch.manual_seed(0)
        texts = {"abcdefgh" * 2: 1.0, "abab": factor, "cdefab": factor}
        said.append(model.say([kokoro.SynthesisRequest(text, speaker, 1.0, moved) for text, moved in texts.items()]))
    assert np.array_equal(said[0][0], said[1][0])
    for plain, moved in list(zip(*said, strict=True))[1:]:
        assert plain.shape == moved.shape and not np.allclose(plain, moved, atol=1e-3)
    waves, factors = torch.randn(3, 2000), np.array([1.0, 1.12, 0.9], np.float32)
    for row, wave in enumerate(model._move_formants(waves.clone(), factors)):
        alone = kokoro.move_formants(waves[row].numpy(), float(factors[row]))
        assert np.allclose(wave.numpy(), alone, atol=1e-5)
        assert np.array_equal(alone, waves[row].numpy()) == (row == 0)


def test_a_load_that_did_not_arrive_is_missed(folders: list[Path]) -> None:
    with pytest.raises(DataError, match="are missing"):
        TorchKokoro(folders[1:], "cpu")
    with pytest.raises(DataError, match="no voices"):
        TorchKokoro(folders[:1], "cpu")


def wrong(generator: Generator) -> kokoro_torch.Generate:
    return lambda *given: generator(*given) * 0.9


def broken(_: Generator) -> kokoro_torch.Generate:
    def generate(*_: object) -> torch.Tensor:
        raise RuntimeError("no such instruction\nand more")

    return generate


@pytest.mark.parametrize(
    ("fast", "said"),
    [(wrong, "dB below the sound"), (broken, "RuntimeError: no such instruction)"), (FastGenerator, "")],
)
def test_a_fast_generator_that_differs_is_not_used(
    fast: object, said: str, folders: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kokoro_torch, "supports_triton", lambda _: True)
    monkeypatch.setattr(kokoro_torch, "FastGenerator", fast)
    model = TorchKokoro(folders, "cpu")
    assert (model._generate is model._network.decoder.generator) == bool(said)
    printed = capsys.readouterr().out
    assert said in printed and bool(said) == ("in fp32" in printed)
    exact = TorchKokoro(folders, "cpu", exactly=True)
    assert exact._generate is exact._network.decoder.generator


def test_a_line_that_overflows_fp16_is_synthesized_again(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = TorchKokoro(folders, "cpu")
    plain = model._generate
    speaker = kokoro.KokoroSpeaker("anna", ("af_heart", "bm_george"), 0.4, 1.0)
    requests = [kokoro.SynthesisRequest(text, speaker, 1.0) for text in ("abcdefgh", "abc")]
    due = model.say(requests)

    def overflowing(*given: object) -> torch.Tensor:
        samples = plain(*given)  # type: ignore[arg-type]
        samples[-1, 5] = torch.inf
        return samples

    monkeypatch.setattr(model, "_generate", overflowing)
    found = model.say(requests)
    assert capsys.readouterr().out.count("synthesized again") == 1
    for one, other in zip(due, found, strict=True):
        assert one.shape == other.shape and np.corrcoef(one, other)[0, 1] > 0.99
