"""Verification: a sound model passes, and a planted fault fails the check that is there for it, by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import myna
from myna.checks import verify as checks
from myna.checks.verify import Certificate, load_verified, run_verification
from myna.commands.model import show_certificate
from myna.core.check import Check
from myna.core.config import AdaptSettings
from myna.core.errors import MynaError
from myna.models import open_family, save_tiny_model
from myna.models.code_sampling import log_probabilities, sample_frame
from myna.models.higgs_v2 import decode
from myna.models.higgs_v2.codec import HiggsCodec
from myna.models.higgs_v2.decode.weights import HiggsAdapterSlots
from myna.models.higgs_v2.family import HiggsV2
from myna.models.higgs_v2.forward import HiggsObjective, PackedAttention
from myna.models.higgs_v2.fused import linear
from myna.models.higgs_v2.tiny import save_tiny
from myna.models.lora import make_trainable, save_adapter
from myna.models.phi4 import family as phi4_family
from myna.models.phi4.forward import RotaryTables
from myna.models.phi4.generate import generate
from tests.command_line import run_command
from tests.failures.tiny_setup import make_recipe, recordings, train_run

ALL_CHECKS = list(checks.CHECKS)
OF_SPEECH = {"log-probabilities = replay", "stream = file", "codec round trip"}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("speaking") / "model")


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("answering") / "model", answers=True)


@pytest.fixture(scope="module")
def adapter(speaking: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_adapter(speaking, tmp_path_factory.mktemp("adapter") / "lora")


def random_adapter(base: Path, folder: Path, **settings: Any) -> Path:
    family = open_family(str(base))
    model = family.load_model(dtype=torch.float32, device="cpu", text_head=family.has_text_head)
    model = make_trainable(model, family, AdaptSettings(rank=4, **settings))
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter) * parameter.requires_grad
    save_adapter(model, folder)
    return folder


def verify(source: Path, **options: Any) -> Certificate:
    return run_verification(source, device="cpu", quick=True, **options)


def statuses(certificate: Certificate) -> dict[str, str]:
    return {check.name: check.status for check in certificate.checks}


def failures(certificate: Certificate) -> list[str]:
    return [check.name for check in certificate.checks if check.status == "failed"]


# Sound models


def test_a_sound_model_passes(speaking: Path) -> None:
    certificate = verify(speaking)
    assert certificate.passed, certificate.verdict
    assert statuses(certificate) == dict.fromkeys(ALL_CHECKS, "passed") | {"adapter = merged": "skipped"}
    for check in certificate.checks:
        assert check.compared and check.message
        if check.difference is not None and check.tolerance is not None:
            assert check.difference <= check.tolerance, check
    assert certificate.verdict == f"{speaking} on cpu in float32: verified, 8 checks passed, 1 skipped"


def test_a_sound_adapter_passes(adapter: Path) -> None:
    certificate = verify(adapter)
    assert statuses(certificate) == dict.fromkeys(ALL_CHECKS, "passed"), certificate.verdict
    merged = certificate.checks[0]
    assert merged.difference is not None and merged.tolerance is not None and merged.difference < merged.tolerance
    assert re.search(r"; in rows of a batch \d+ steps are the same$", merged.message), merged.message


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dora": True}, "is a DoRA"),
        ({"train_modules": ["audio_head"]}, "trained in full, which every request would share"),
    ],
)
def test_an_adapter_that_can_only_be_merged_passes_and_says_so(
    speaking: Path, tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    certificate = verify(random_adapter(speaking, tmp_path / "lora", **settings))
    assert statuses(certificate) == dict.fromkeys(ALL_CHECKS, "passed"), certificate.verdict
    assert "; not in rows of a batch: " in certificate.checks[0].message and reason in certificate.checks[0].message


def test_a_model_that_answers_passes_the_checks_that_apply(answering: Path, tmp_path: Path) -> None:
    certificate = verify(answering)
    not_applicable = OF_SPEECH | {"adapter = merged", "fused = plain"}
    assert statuses(certificate) == {name: "skipped" if name in not_applicable else "passed" for name in ALL_CHECKS}, (
        certificate.verdict
    )
    adapter = verify(random_adapter(answering, tmp_path / "lora"))
    assert adapter.passed and statuses(adapter)["adapter = merged"] == "passed", adapter.verdict


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_within_its_tolerances(speaking: Path, dtype: torch.dtype) -> None:
    verified = load_verified(speaking, base=None, codec=None, device="cpu", quick=True)
    verified.model, verified.dtype = verified.model.to(dtype), dtype
    for check in (checks.check_forward, checks.check_packed, checks.check_generate):
        finding = check(verified)
        assert finding.passed, finding


def test_gradients_of_deep_models_are_rounded_more(tmp_path: Path) -> None:
    """The plain path in bf16 against itself in fp32, with weights that weigh as much as those of the true width.
    Another path errs as much, and the two differ by the root of two of it: the tolerance has room for that."""
    rounding = {}
    for layers in (checks.TOLERATED_LAYERS, 28):
        folder = save_tiny(tmp_path / str(layers), hidden=128, layers=layers)
        gradients = {}
        for dtype in (torch.float32, torch.bfloat16):
            verified = load_verified(folder, base=None, codec=None, device="cpu", quick=True)
            for parameter in verified.model.parameters():
                parameter.data *= (3072 / 128) ** 0.5 if parameter.dim() > 1 else 1
            verified.model, verified.dtype = verified.model.to(torch.bfloat16).to(dtype), dtype
            torch.manual_seed(0)
            objective = verified.family.objective(checks.make_learner(verified))
            _, gradients[dtype] = checks.train_pass(verified, objective, verified.family.collate(verified.sequences))
        apart = checks.gradient_differences(gradients[torch.bfloat16], gradients[torch.float32])
        rounding[layers] = max(apart.values())
    assert rounding[28] > 1.4 * rounding[checks.TOLERATED_LAYERS], "it grows with the depth"
    for layers, error in rounding.items():
        assert 0.3 < 2**0.5 * error / checks.gradient_tolerance(torch.bfloat16, layers) < 1


@pytest.mark.slow
@pytest.mark.parametrize("quick", [True, False])
def test_the_shipped_model_passes(quick: bool) -> None:
    certificate = myna.verify("fledgling", device="cpu", quick=quick)
    assert certificate.passed, certificate.verdict


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["comprehensive", "full"])
def test_a_run_passes(speaking: Path, tmp_path: Path, mode: str) -> None:
    data = myna.prepare(recordings(tmp_path / "recordings"), tmp_path / "prepared", model=str(speaking), device="cpu")
    (tmp_path / "model").symlink_to(speaking)
    run, _ = train_run(make_recipe(tmp_path, adapt={"mode": mode}), tmp_path / "run")
    certificate = myna.verify(run, tmp_path / "verified", device="cpu", quick=True)
    assert certificate.passed, certificate.verdict
    merged = statuses(certificate)["adapter = merged"]
    assert merged == ("skipped" if mode == "full" else "passed") and data.utterances
    assert (tmp_path / "verified" / "verify.html").is_file()


# Planted faults


def leaky_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PackedAttention.rotate_and_attend
    monkeypatch.setattr(
        PackedAttention, "rotate_and_attend", lambda self, q, k, v: attend(self, q, k, v) + 0.01 * v.mean(0)[:1].mean()
    )


def shifted_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    collate = HiggsV2.collate
    monkeypatch.setattr(HiggsV2, "collate", lambda self, sequences: collate(self, sequences, offset=2))


def neighbours_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed sequences attend to those before them."""
    hidden = HiggsObjective.hidden

    def joined(self: HiggsObjective, batch: Any, **options: Any) -> torch.Tensor:
        bounds = torch.tensor([0, batch.tokens], dtype=torch.int32)
        return hidden(self, replace(batch, lengths=(batch.tokens,), cu_seqlens=bounds), **options)

    monkeypatch.setattr(HiggsObjective, "hidden", joined)


def wrong_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    def undelay(self: Any, delayed: list[Any], start: int, stop: int) -> Any:
        books = self.delay.codebooks
        return np.stack(delayed[start + books - 1 : stop + books - 1]) if stop > start else np.zeros((0, books))

    monkeypatch.setattr(decode.HiggsDecoder, "undelay", undelay)


def second_best(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = sample_frame

    def worse(logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return sample(logits.scatter(-1, logits.argmax(-1, keepdim=True), -1e3), *arguments)

    monkeypatch.setattr(decode, "sample_frame", worse)


def sampler_that_sees_its_neighbours(monkeypatch: pytest.MonkeyPatch, share: float = 0.5) -> None:
    sample, measure = sample_frame, log_probabilities

    def mixed(logits: torch.Tensor) -> torch.Tensor:
        return logits + share * (logits.mean(0) - logits)

    monkeypatch.setattr(decode, "sample_frame", lambda logits, *rest: sample(mixed(logits), *rest))
    monkeypatch.setattr(decode, "log_probabilities", lambda logits, codes: measure(mixed(logits), codes))


def codec_that_hears_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode windows louder if several are decoded at once."""
    decode_windows = HiggsCodec.decode_windows

    def louder(self: HiggsCodec, windows: Any) -> Any:
        pending = decode_windows(self, windows)
        return lambda: [samples * np.float32(1 + 1e-5 * (len(windows) - 1)) for samples in pending()]

    monkeypatch.setattr(HiggsCodec, "decode_windows", louder)


def log_probabilities_after_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report log-probabilities after the sampling temperature instead of the model's own."""
    measure = log_probabilities
    monkeypatch.setattr(decode, "log_probabilities", lambda logits, codes: measure(logits / 0.9, codes))


def cache_that_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget earlier codes after some frame, alone and in a batch alike."""
    attend, steps = decode.HiggsDecoder.step, 20

    def forget(self: Any, rows: int, longest: int) -> Any:
        if longest > steps:
            for values in self.values:
                values[:, :, 2:steps] = 0
        return attend(self, rows, longest)

    monkeypatch.setattr(decode.HiggsDecoder, "step", forget)


def codec_with_windows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode each window differently, and a whole file as one window."""
    decode_windows = HiggsCodec.decode_windows

    def uneven(self: HiggsCodec, windows: Any) -> Any:
        pending = decode_windows(self, windows)
        return lambda: [
            samples * np.float32(1 + 1e-4 * len(codes)) for samples, codes in zip(pending(), windows, strict=True)
        ]

    monkeypatch.setattr(HiggsCodec, "decode_windows", uneven)
    monkeypatch.setattr(HiggsCodec, "decode", lambda self, codes: self.decode_windows([codes])()[0])


def silent_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = HiggsCodec.decode
    monkeypatch.setattr(HiggsCodec, "decode", lambda self, codes: 1e-9 * decoded(self, codes))
    leave_out_stream(monkeypatch)


def codec_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = HiggsCodec.decode
    monkeypatch.setattr(HiggsCodec, "decode", lambda self, codes: np.nan * decoded(self, codes))
    leave_out_stream(monkeypatch)


def short_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = HiggsCodec.decode
    monkeypatch.setattr(HiggsCodec, "decode", lambda self, codes: decoded(self, codes)[:-1])
    leave_out_stream(monkeypatch)


def leave_out_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the stream check, which would fail first."""
    monkeypatch.setattr(checks, "CHECKS", {name: one for name, one in checks.CHECKS.items() if name != "stream = file"})


def wrong_fused_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    swiglu = linear.swiglu

    def wrong(hidden: torch.Tensor, activated: Any) -> None:
        swiglu(hidden, activated)
        activated.x.mul_(1.05)

    monkeypatch.setattr(linear, "swiglu", wrong)


def wrong_fused_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = linear.swiglu_backward

    def wrong(d_activated: torch.Tensor, hidden: torch.Tensor, d_hidden: Any) -> None:
        backward(d_activated, hidden, d_hidden)
        d_hidden.x.mul_(1.05)

    monkeypatch.setattr(linear, "swiglu_backward", wrong)


@pytest.mark.parametrize(
    ("fault", "check", "message"),
    [
        (leaky_attention, "forward = transformers", r"the loss of \w+ of .+ is .+, by transformers|logits differ"),
        (shifted_labels, "forward = transformers", r"the loss of|logits"),
        (neighbours_in_a_row, "packed = one by one", r"the loss of \w+ is .+ packed, .+ one by one"),
        (wrong_delay, "greedy = generate", r"in '.+' at step \d+, stream \d, \d+ instead of \d+"),
        (second_best, "greedy = generate", r"in '.+' at step \d+, stream \d, \d+ instead of \d+"),
        (
            sampler_that_sees_its_neighbours,
            "alone = crowd",
            r"log-probabilities of|equal codes; the first",
        ),
        (codec_that_hears_other_streams, "alone = crowd", r"samples differ from frame \d+ on, of '.+' decoded among"),
        (
            log_probabilities_after_temperature,
            "log-probabilities = replay",
            r"reported as -\d.*, and -\d.* in a replay",
        ),
        (codec_with_windows_of_their_own, "stream = file", r"samples differ from frame \d+ on"),
        (silent_codec, "codec round trip", r"silent"),
        (codec_that_is_not_finite, "codec round trip", r"not finite"),
        (short_codec, "codec round trip", r"samples come back as"),
        (wrong_fused_forward, "fused = plain", r"the loss of \w+ is .+ fused, .+ plain|the gradient of"),
        (wrong_fused_backward, "fused = plain", r"the gradient of .+lora_\w.+ differs"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_planted_fault_fails_its_check(
    speaking: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    check: str,
    message: str,
) -> None:
    fault(monkeypatch)
    certificate = verify(speaking)
    assert not certificate.passed
    failure = next((check for check in certificate.checks if check.status == "failed"), None)
    assert failure is not None and failure.name == check, failures(certificate)
    assert re.search(message, failure.message), failure.message
    assert check in certificate.verdict and failure.message in certificate.verdict


def test_a_cache_that_forgets_fails_the_replay(speaking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_that_forgets(monkeypatch)
    assert "log-probabilities = replay" in failures(verify(speaking))


def test_a_merge_that_loses_the_adapter_fails(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "merge_lora", lambda model: model.unload().requires_grad_(False))
    certificate = verify(adapter)
    assert failures(certificate) == ["adapter = merged"], "the base model itself is sound"
    assert "more than rounding to float32 explains" in certificate.verdict


def adapter_without_its_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    write = HiggsAdapterSlots._write
    monkeypatch.setattr(
        HiggsAdapterSlots,
        "_write",
        lambda self, slot, matrices: write(self, slot, {name: (a, 0.5 * b) for name, (a, b) in matrices.items()}),
    )


def adapter_in_the_prompt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames are generated by the base model."""
    monkeypatch.setattr(
        HiggsAdapterSlots, "row_deltas", lambda self, slots, strengths: self.delta(slots[:1] * 0 - 1, strengths[:1])
    )


def adapter_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    deltas = HiggsAdapterSlots.row_deltas
    monkeypatch.setattr(
        HiggsAdapterSlots, "row_deltas", lambda self, slots, strengths: deltas(self, slots.roll(1), strengths)
    )


def adapter_with_its_matrices_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key's B is the value's, in rows of a batch alone."""
    write = HiggsAdapterSlots._write

    def mixed(self: HiggsAdapterSlots, slot: int, matrices: Any) -> None:
        swapped = {"k_proj": "v_proj", "v_proj": "k_proj"}
        named = {name: name.replace(name[-6:], swapped.get(name[-6:], name[-6:])) for name in matrices}
        write(self, slot, {name: (pair[0], matrices[named[name]][1]) for name, pair in matrices.items()})

    monkeypatch.setattr(HiggsAdapterSlots, "_write", mixed)


@pytest.mark.parametrize(
    "fault",
    [
        adapter_without_its_scaling,
        adapter_in_the_prompt_alone,
        adapter_of_another_row,
        adapter_with_its_matrices_mixed_up,
    ],
)
def test_a_fault_of_adapters_in_rows_fails(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    fault(monkeypatch)
    certificate = verify(adapter)
    assert failures(certificate) == ["adapter = merged"], "merged, it is sound"
    assert re.search(
        r"in rows of a batch .*in '.+' at step \d+, stream \d, \d+ instead of \d+$", certificate.checks[0].message
    ), certificate.checks[0].message


def test_rows_that_break_fail_and_the_merged_model_is_verified(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(HiggsAdapterSlots, "_write", broken)
    certificate = verify(adapter)
    assert failures(certificate) == ["adapter = merged"], "the others are of the merged model"
    assert "no kernel image" in certificate.verdict


def test_faults_of_a_model_that_answers_fail(answering: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(RotaryTables, "apply", lambda _, x: x)
        assert "forward = transformers" in failures(verify(answering))

    def later(*arguments: Any) -> Any:
        return [([7, *ids], stopped) for ids, stopped in generate(*arguments)]

    monkeypatch.setattr(phi4_family, "generate", later)
    assert failures(verify(answering)) == ["greedy = generate"]


def test_an_exception_fails_its_check_and_the_others_are_run(speaking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(linear, "swiglu", broken)
    certificate = verify(speaking)
    assert failures(certificate) == ["fused = plain"] and len(certificate.checks) == len(ALL_CHECKS)
    assert "RuntimeError: no kernel image is available" in certificate.verdict


def test_on_an_accelerator_other_bits_are_reported_and_other_probabilities_fail(
    speaking: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = load_verified(speaking, base=None, codec=None, device="cpu", quick=True)
    verified.device = torch.device("mps")  # by its name alone: the model stays where it is
    assert checks.check_alone(verified) == replace(checks.check_alone(verified), status="passed", difference=0.0)
    with monkeypatch.context() as patched:
        sampler_that_sees_its_neighbours(patched, share=1.0)
        assert not checks.check_alone(verified).passed
    monkeypatch.setitem(checks.LOG_PROB_TOLERANCES, torch.float32, 100.0)
    sampler_that_sees_its_neighbours(monkeypatch, share=1.0)
    finding = checks.check_alone(verified)
    assert finding.passed and "reported, not judged" in finding.message and "mps has no exact batch" in finding.message
    assert finding.difference is not None and finding.difference > 0
    verified.device = torch.device("cuda")
    assert checks.check_alone(verified).passed
    assert not checks._equality(verified, 0.99, "codes").passed, "CUDA has exact batches"


# The command and its files


def test_the_command_writes_a_page_and_exits_with_the_verdict(
    speaking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["verify", str(speaking), "--device", "cpu", "--quick", "--out", str(tmp_path / "out")]
    result = run_command(words, catch=True)
    assert result.exit_code == 0, result.output
    assert "verified, 8 checks passed" in " ".join(result.output.split())
    written = json.loads((tmp_path / "out" / "verify.json").read_text(encoding="utf-8"))
    assert written["passed"] and [check["name"] for check in written["checks"]] == ALL_CHECKS
    assert {"torch", "transformers", "myna"} <= written["versions"].keys()
    page = (tmp_path / "out" / "verify.html").read_text(encoding="utf-8")
    assert "<h1>Verified</h1>" in page and "forward = transformers" in page
    assert not re.search(r"(?:src|href)=.?https?:", page)
    monkeypatch.setattr(linear, "swiglu", lambda *_: None)
    result = run_command(words, catch=True)
    assert result.exit_code == 1 and "fused = plain failed" in " ".join(result.output.split())
    assert not json.loads((tmp_path / "out" / "verify.json").read_text(encoding="utf-8"))["passed"]
    assert "<h1>Not verified</h1>" in (tmp_path / "out" / "verify.html").read_text(encoding="utf-8")


def test_progress_is_reported_and_a_wrong_name_is_refused(speaking: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    verify(speaking, progress=lambda *step: told.append(step))
    assert [done for _, done, _ in told] == list(range(len(ALL_CHECKS) + 1))
    assert {total for _, _, total in told} == {len(ALL_CHECKS)}
    with pytest.raises(MynaError):
        verify(tmp_path / "nothing")
    with pytest.raises(MynaError):
        verify(Path("higgs-v2"))


def test_the_sound_of_the_round_trip_is_voiced(speaking: Path) -> None:
    codec = load_verified(speaking, base=None, codec=None, device="cpu", quick=True).codec
    assert codec is not None
    sound = checks.voiced_sound(codec, 1.0)
    assert len(sound) == codec.sample_rate and np.abs(sound).max() == pytest.approx(0.3, abs=1e-3)
    spectrum = np.abs(np.fft.rfft(sound)) ** 2
    assert spectrum[100:4000].sum() > 0.95 * spectrum.sum()


@pytest.mark.parametrize("width", [80, 160])
def test_measurements_are_readable_on_any_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    detail = "log-probabilities of the same codes differ by 0.00012"
    check = Check("log-probabilities = replay", "passed", detail, "", 1.2e-4, 1e-3, "this and that", 1.0)
    certificate = Certificate("model", "higgs_v2", "cpu", "float32", True, {}, (check,))
    show_certificate(certificate)
    lines = capsys.readouterr().out.splitlines()
    assert any(detail in line for line in lines) and len(lines) <= 4
