"""Verification of a model, a run or an adapter: the paths of Myna against those of transformers, and one another.

Each check is a function of a `VerifiedModel` that returns a `Check`, or raises `CheckSkipped`. They run in the
order of `CHECKS`: the first one merges an adapter, the last one puts a LoRA on the model.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import PeftModel

from myna.checks import verified_model as subject
from myna.core.check import Check, CheckFunction, CheckSkipped, run_check
from myna.core.config import AdaptSettings
from myna.core.device import pick_device
from myna.core.errors import CheckpointError, ModelError
from myna.core.io import save_text
from myna.core.progress import ProgressCallback, silent
from myna.data.codec import Codec, Samples
from myna.data.conversation import AudioClip
from myna.models import base as interface
from myna.models.lora import load_adapter, make_trainable, merge_lora, read_lora_matrices
from myna.models.merge import LOGIT_TOLERANCES, compare_merged, probe_logits
from myna.models.ref import ModelRef
from myna.report import page
from myna.speak.engine import Engine
from myna.speak.loading import load_adapted
from myna.speak.request import SpeechRequest
from myna.speak.streaming import CodeStream, decode_streams
from myna.train.precision import choose_precision

LOSS_TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Largest accepted difference of two losses of one term, as a share of the larger one, by type of the weights."""
GRADIENT_TOLERANCES = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""Largest accepted difference of two gradients of a LoRA matrix, as a share of its norm, in a model of up to
`TOLERATED_LAYERS`. Rounding errors of more layers grow with the square root of their number."""
TOLERATED_LAYERS = 8
LOG_PROB_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Largest accepted difference of two log-probabilities of one code."""
MIN_STEPS = 8
"""Minimum number of steps comparable with transformers' `generate`, over all prompts."""
MIN_LEVEL = 1e-4
"""Root-mean-square level below which decoded audio counts as silence: -80 dB."""


def check_merged(verified: subject.VerifiedModel) -> Check:
    """the adapter on its base, and the merged model: logits, and greedy codes of the adapter in rows of a batch"""
    model = verified.model
    if not isinstance(model, PeftModel) or verified.adapter is None:
        raise CheckSkipped("there is no adapter: this is a whole model")
    with model.disable_adapter():
        base = probe_logits(verified.family, model)
    adapted = probe_logits(verified.family, model)
    matrices, note = _row_matrices(verified, verified.adapter)
    if matrices is not None:
        verified.model = model.unload()
    try:
        choices = subject.adapter_choices(verified, matrices) if matrices is not None else []
    finally:
        verified.model = merge_lora(model if matrices is None else load_adapter(verified.model, verified.adapter))
    check = compare_merged(base, adapted, probe_logits(verified.family, verified.model), verified.dtype)
    if check.problem is not None:
        return _finding(False, check.problem, check.largest_difference, check.tolerance)
    if choices:
        try:
            spoken = _compare_choices(verified, choices)
        except CheckSkipped as reason:
            note = f"in rows of a batch {reason}"
        else:
            note = f"in rows of a batch {spoken.message}"
            if not spoken.passed:
                return replace(spoken, message=note)
    detail = f"{check.logits:,} logits; {check.lost_share:.2%} of what the adapter changes is lost in rounding"
    return _finding(True, f"{detail}; {note}" if note else detail, check.largest_difference, check.tolerance)


def _row_matrices(verified: subject.VerifiedModel, adapter: Path) -> tuple[interface.LoraMatrices | None, str]:
    """Return the adapter's matrices for rows of a batch, or the reason why it can only be merged."""
    if not isinstance(verified.family, interface.SpeakingFamily):
        return None, ""
    try:
        return read_lora_matrices(verified.family, adapter), ""
    except ModelError as error:
        if isinstance(error, CheckpointError):
            raise
        return None, f"not in rows of a batch: {error.what}"


def check_forward(verified: subject.VerifiedModel) -> Check:
    """training forward, and transformers' own: losses by stream and all logits"""
    family, largest, worst_logit, worst = verified.family, 0.0, 0.0, (0.0, "", 0.0, 0.0)
    objective = family.objective(verified.model).eval()
    for sequence in verified.sequences:
        batch = family.collate([sequence])
        with torch.no_grad(), _recorded_logits(verified) as recorded:
            sums = objective(batch.to(verified.device)).sums.double().cpu()
        theirs, ours = family.transformers_forward(verified.model, sequence), torch.cat(recorded)
        if ours.shape != theirs.logits.shape or not torch.isfinite(torch.cat([ours, theirs.logits])).all():
            return _finding(False, f"{len(ours):,} logits where transformers has {len(theirs.logits):,}, or not finite")
        largest = max(largest, float(theirs.logits.abs().max()))
        worst_logit = max(worst_logit, float((ours - theirs.logits).abs().max()))
        for stream, our, their in zip(family.loss_terms, sums.tolist(), theirs.sums.tolist(), strict=True):
            worst = max(worst, (_relative(our, their), f"{stream} of {sequence.id!r}", our, their))
    tolerance, loss_tolerance = LOGIT_TOLERANCES[verified.dtype], LOSS_TOLERANCES[verified.dtype]
    share = worst_logit / largest
    if not worst[0] <= loss_tolerance:
        detail = f"the loss of {worst[1]} is {worst[2]:.6g}, by transformers {worst[3]:.6g}"
        return _finding(False, detail, worst[0], loss_tolerance)
    detail = f"logits differ by at most {worst_logit:.2g} of {largest:.3g}, losses by {worst[0]:.1e} of their size"
    return _finding(share <= tolerance, detail, share, tolerance)


def check_packed(verified: subject.VerifiedModel) -> Check:
    """losses of sequences packed into one batch, and of each by itself"""
    family = verified.family
    objective = family.objective(verified.model).eval()

    def sums(sequences: Sequence[interface.RenderedSequence]) -> list[float]:
        with torch.no_grad():
            found: list[float] = objective(family.collate(sequences).to(verified.device)).sums.double().tolist()
        return found

    packed = sums(verified.sequences)
    single = [sum(parts) for parts in zip(*(sums([one]) for one in verified.sequences), strict=True)]
    return _compare_losses(family.loss_terms, packed, single, "packed", "one by one", LOSS_TOLERANCES[verified.dtype])


def check_generate(verified: subject.VerifiedModel) -> Check:
    """greedy choices, and those of transformers' own generate"""
    return _compare_choices(verified, subject.greedy_choices(verified))


def _compare_choices(verified: subject.VerifiedModel, choices: Sequence[subject.GreedyChoices]) -> Check:
    """Compare greedy choices for all prompts with transformers' `generate`, up to the first difference."""
    compared, complete, gap, largest, note = 0, 0, 0.0, 0.0, ""
    for prompt, (ours, stopped), theirs in zip(verified.prompts, choices, verified.generated, strict=True):
        if stopped:
            ours = np.concatenate([ours, np.full((1, theirs.choices.shape[1]), theirs.end)])
        count = min(len(ours), len(theirs.choices))
        steps, mine, other = theirs.steps[:count], ours[:count], theirs.choices[:count]
        known = other != interface.IGNORE_INDEX
        if not stopped and len(ours) <= len(theirs.choices):
            # At the limit of frames the codebooks are forced to end, which the later ones see.
            known &= steps <= theirs.steps[len(ours) - 1, 0]
        different = known & (mine != other)
        complete += bool(known[:, 0].all()) and len(ours) == count and not different.any()
        first = int(steps[different].min()) if different.any() else int(steps[known].max(initial=-1)) + 1
        compared += len(np.unique(steps[known & (steps < first)]))
        finite = np.isfinite(theirs.scores)
        largest = max(largest, float(np.abs(theirs.scores[finite]).max(initial=0.0)))
        for frame, stream in np.argwhere(different & (steps == first)):
            scores, (we, they) = theirs.scores[frame, stream], (mine[frame, stream], other[frame, stream])
            if (apart := float(scores[they] - scores[we])) > gap:
                gap = apart
                note = f"; in {prompt.id!r} at step {first}, stream {stream}, {we} instead of {they}"
    tolerance = LOGIT_TOLERANCES[verified.dtype]
    share = gap / largest if largest else 0.0
    detail = f"{compared} steps are the same{note}"
    if note and share <= tolerance:
        dtype = str(verified.dtype).removeprefix("torch.")
        detail += f", whose logits differ by {gap:.2g} of {largest:.3g}: a tie in {dtype}"
    if share <= tolerance and compared < MIN_STEPS and not complete:
        raise CheckSkipped(f"only {compared} steps could be compared: transformers chose ids that ours may not")
    return _finding(share <= tolerance, detail, share, tolerance)


def check_alone(verified: subject.VerifiedModel) -> Check:
    """each request by itself, and among others that join and leave: codes, log-probabilities and samples"""
    if isinstance(verified.family, interface.AnsweringFamily):
        answers = verified.family.answer(verified.model, verified.prompts, verified.frames)
        alike = [
            verified.family.answer(verified.model, [prompt], verified.frames) == [answer]
            for prompt, answer in zip(verified.prompts, answers, strict=True)
        ]
        return _equality(verified, sum(alike) / len(alike), "answers")
    _, codec = verified.speaking
    # With fewer rows than requests and different limits, some requests wait and rows are moved.
    caps = [verified.frames - 3 * number for number in range(len(verified.prompts))]
    rows = len(caps) - 1
    crowd = subject.speak_together(verified, verified.prompts, caps, rows)
    equal = total = compared = 0
    worst, note, tolerance = 0.0, "", LOG_PROB_TOLERANCES[verified.dtype]
    for prompt, cap, among in zip(verified.prompts, caps, crowd, strict=True):
        # An exact batch always has the same shape.
        [alone] = subject.speak_together(verified, [prompt], [cap], rows if verified.is_exact else 1, max(caps))
        count = min(len(alone.codes), len(among.codes))
        same = alone.codes[:count] == among.codes[:count]
        equal, total = equal + int(same.sum()), total + max(alone.codes.size, among.codes.size)
        if not note and (not same.all() or alone.codes.shape != among.codes.shape):
            frame = count if same.all() else int((~same).any(1).argmax())
            note = f"; the first difference is in frame {frame} of {prompt.id!r}"
        # Codes chosen after a difference have another context.
        steps = alone.steps[:count]
        shared = same & (steps <= steps[~same].min(initial=np.iinfo(np.int64).max))
        apart = np.abs(alone.log_probs[:count] - among.log_probs[:count])[shared]
        compared, worst = compared + len(apart), max(worst, float(apart.max(initial=0.0)))
    if total and not compared:
        return _finding(False, "every request begins with other codes among others than by itself", 1.0, 0)
    if not worst <= tolerance:
        return _finding(False, f"log-probabilities of the same codes differ by {worst:.3g}{note}", worst, tolerance)
    for prompt, among, samples in zip(verified.prompts, crowd, subject.decode_together(codec, crowd), strict=True):
        if (finding := _compare_samples(samples, subject.decode_together(codec, [among])[0], codec)) is not None:
            return replace(finding, message=f"{finding.message}, of {prompt.id!r} decoded among other streams")
    detail = f"codes{note}; log-probabilities differ by {worst:.2g}; samples of all streams are equal"
    return _equality(verified, equal / total if total else 1.0, detail)


def check_replay(verified: subject.VerifiedModel) -> Check:
    """log-probabilities of sampled codes as reported, and of their replay through the training forward"""
    family, _ = verified.speaking
    objective = family.objective(verified.model).eval()
    streams = [place for place, stream in enumerate(family.loss_terms) if stream.startswith("code")]
    caps = [verified.frames] * len(verified.prompts)
    spoken = subject.speak_together(verified, verified.prompts, caps, len(caps))
    worst, codes = (0.0, "", 0.0, 0.0), 0
    for number, one in enumerate(spoken):
        if not len(one.codes):
            continue
        target = AudioClip("replay", one.codes, target=True)
        batch = family.collate([family.render(verified.speech(number, target))])
        with torch.no_grad():
            sums = objective(batch.to(verified.device)).sums.double().cpu()[streams]
        replayed, reported = -sums / len(one.log_probs), one.log_probs.astype(np.float64).mean(0)
        apart = np.abs(replayed.numpy() - reported)
        book = int(np.where(np.isfinite(apart), apart, np.inf).argmax())
        found = float(apart[book]) if np.isfinite(apart[book]) else float("inf")
        where = f"{family.loss_terms[streams[book]]} of {subject.TEXTS[number]!r}"
        worst = max(worst, (found, where, float(reported[book]), float(replayed[book])))
        codes += one.log_probs.size
    if not codes:
        raise CheckSkipped("the model ended at once, whatever it was asked to say")
    tolerance = LOG_PROB_TOLERANCES[verified.dtype] / 2
    if not worst[0] <= tolerance:
        detail = f"the mean log-probability of {worst[1]} is reported as {worst[2]:.5g}, and {worst[3]:.5g} in a replay"
        return _finding(False, detail, worst[0], tolerance)
    detail = f"of {codes:,} codes and ends, means by codebook differ by at most {worst[0]:.1e}"
    return _finding(True, detail, worst[0], tolerance)


def check_stream(verified: subject.VerifiedModel) -> Check:
    """streamed samples, and those of the whole clip, bit for bit"""
    family, codec = verified.speaking
    random = np.random.default_rng(0)
    frames = 40 if verified.quick else 300
    codes = random.integers(0, codec.codebook_size, (frames, codec.codebooks)).astype(np.uint16)
    whole = codec.decode(codes)
    chunkings = 3 if verified.quick else 8
    for _ in range(chunkings):
        cuts = np.sort(random.integers(0, frames + 1, int(random.integers(1, 12))))
        stream, parts = CodeStream(codec), []
        for part in np.split(codes, cuts):
            stream.push(part)
            parts += decode_streams(codec, [stream])()
        stream.end()
        parts += decode_streams(codec, [stream])()
        if (finding := _compare_samples(np.concatenate(parts), whole, codec)) is not None:
            return replace(finding, message=f"{finding.message}, in chunks that end at {cuts.tolist()}")
    engine = Engine(family, verified.model, codec)
    sampling = replace(subject.GREEDY, max_seconds=verified.frames / codec.frame_rate)
    request = SpeechRequest(subject.TEXTS[1], id="line", **asdict(sampling))
    [speech] = engine.speak([request])
    streamed = np.concatenate([np.zeros(0, np.float32), *engine.stream(request)])
    if (finding := _compare_samples(streamed, speech.samples, codec)) is not None:
        return replace(finding, message=f"{finding.message}, in speech of the model")
    return _finding(True, f"{chunkings} random chunkings of {frames} frames, and {len(speech.codes)} spoken ones", 0, 0)


def check_codec(verified: subject.VerifiedModel) -> Check:
    """a synthetic voiced sound, encoded and decoded"""
    _, codec = verified.speaking
    sound = voiced_sound(codec, seconds=1.0 if verified.quick else 3.0)
    codes = codec.encode(sound[None])[0]
    decoded, again = codec.decode(codes), codec.decode(codes)
    frames = len(sound) // codec.hop
    if codes.shape != (frames, codec.codebooks) or int(codes.max(initial=0)) >= codec.codebook_size:
        shape = f"codes of shape {codes.shape}, up to {codes.max(initial=0)}"
        return _finding(False, f"{frames} frames of sound are {shape}")
    if decoded.shape != sound.shape:
        return _finding(False, f"{len(sound)} samples come back as {len(decoded)}")
    if not np.isfinite(decoded).all():
        return _finding(False, f"{np.count_nonzero(~np.isfinite(decoded))} decoded samples are not finite")
    level = _rms(decoded)
    if level < MIN_LEVEL:
        return _finding(False, f"the decoded sound is silent: level {level:.1e}", level, MIN_LEVEL)
    if not np.array_equal(decoded, again):
        return _finding(False, "the same codes were decoded to other samples", float(np.abs(decoded - again).max()), 0)
    agreement = float((codec.encode(decoded[None])[0] == codes).mean())
    noise = _rms(decoded - sound)
    snr, gain = (20 * np.log10(_rms(value) / over) for value, over in ((sound, noise), (decoded, _rms(sound))))
    return _finding(
        True,
        f"{frames} frames: signal-to-noise ratio {snr:.1f} dB, level {gain:+.1f} dB; {agreement:.0%} of the codes are "
        "the same when encoded again (reported, not judged); decoding is deterministic",
    )


def check_fused(verified: subject.VerifiedModel) -> Check:
    """losses and LoRA gradients of the fused training path, and of the plain one"""
    family = verified.family
    layers = interface.get_base_model(verified.model).config.num_hidden_layers
    learner = make_learner(verified)
    batch = family.collate(verified.sequences)
    plain, gradients = train_pass(verified, family.objective(learner), batch)
    objective: Any = family.objective(learner, fused_lora=True)
    if not objective.fused:
        raise CheckSkipped(f"{family.name} on {verified.device.type} has no fused layers: it trains on the plain path")
    fused, fused_gradients = train_pass(verified, objective, batch)
    tolerance = gradient_tolerance(verified.dtype, layers)
    sums, loss_tolerance = (fused.tolist(), plain.tolist()), LOSS_TOLERANCES[verified.dtype]
    losses = _compare_losses(family.loss_terms, *sums, "fused", "plain", loss_tolerance)
    if not losses.passed:
        return losses
    apart = gradient_differences(fused_gradients, gradients)
    worst = max(apart, key=lambda name: apart[name] if np.isfinite(apart[name]) else np.inf)
    if not apart[worst] <= tolerance:
        return _finding(False, f"the gradient of {worst} differs", apart[worst], tolerance)
    return replace(losses, message=f"{losses.message}; gradients of {len(apart)} matrices by {apart[worst]:.1e}")


def make_learner(verified: subject.VerifiedModel) -> Any:
    """Return the model with a random LoRA."""
    learner = make_trainable(interface.get_base_model(verified.model), verified.family, AdaptSettings(rank=8))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in learner.named_parameters():
        if "lora_B" in name:  # zero in a new LoRA, which would have no effect
            parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return learner


def gradient_differences(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the difference of each matrix's gradients, as a share of its norm."""
    norms = {name: float(gradient.norm()) for name, gradient in plain.items()}
    floor = 0.01 * max(norms.values())  # smaller gradients are mostly rounding errors
    return {name: float((ours[name] - gradient).norm()) / max(norms[name], floor) for name, gradient in plain.items()}


def gradient_tolerance(dtype: torch.dtype, layers: int) -> float:
    return GRADIENT_TOLERANCES[dtype] * math.sqrt(max(1.0, layers / TOLERATED_LAYERS))


CHECKS: dict[str, Callable[[subject.VerifiedModel], Check]] = {
    "adapter = merged": check_merged,
    "forward = transformers": check_forward,
    "packed = one by one": check_packed,
    "greedy = generate": check_generate,
    "alone = crowd": check_alone,
    "log-probabilities = replay": check_replay,
    "stream = file": check_stream,
    "codec round trip": check_codec,
    "fused = plain": check_fused,
}
"""Checks by name. Their docstrings say what they compare."""


def voiced_sound(codec: Codec, seconds: float) -> Samples:
    """Synthesize glottal pulses of falling pitch through three formants, in whole frames."""
    rate = codec.sample_rate
    time = np.arange(max(1, int(seconds * codec.frame_rate)) * codec.hop) / rate
    phase = 2 * np.pi * np.cumsum(140 - 30 * time / time[-1]) / rate
    sound = np.zeros_like(time)
    for harmonic in range(1, int(4000 / 140)):
        frequency = 125.0 * harmonic
        gain = sum(1 / (1 + ((frequency - formant) / 120) ** 2) for formant in (500, 1500, 2500))
        sound += gain / harmonic * np.sin(harmonic * phase)
    envelope = 0.5 + 0.5 * np.sin(2 * np.pi * 3 * time) ** 2
    sound *= envelope
    return np.asarray(0.3 * sound / np.abs(sound).max(), np.float32)


@contextmanager
def _recorded_logits(verified: subject.VerifiedModel) -> Iterator[list[torch.Tensor]]:
    """Record the logits of every head in the order of computation, in fp32 on the CPU."""
    core, found = interface.get_base_model(verified.model), list[torch.Tensor]()

    def record(_module: Any, _inputs: Any, logits: torch.Tensor) -> None:
        found.append(logits.float().cpu().flatten())

    parts = verified.family.module_names(core).items()
    heads = [core.get_submodule(name) for part, names in parts if part.endswith("_head") for name in names]
    hooks = [head.register_forward_hook(record) for head in heads]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def train_pass(
    verified: subject.VerifiedModel, objective: Any, batch: interface.Batch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss sums and the gradients of the trained weights."""
    with verified.autocast():
        losses: interface.LossSums = objective.train()(batch.to(verified.device))
    torch.autograd.backward(losses.sums.sum())
    gradients = {}
    for name, parameter in objective.model.named_parameters():
        if parameter.grad is not None:
            gradients[name], parameter.grad = parameter.grad.float().cpu(), None
    return losses.sums.detach().double().cpu(), gradients


def _finding(passed: bool, message: str, difference: float | None = None, tolerance: float | None = None) -> Check:
    return Check("", "passed" if passed else "failed", message, difference=difference, tolerance=tolerance)


def _compare_losses(
    streams: Sequence[str], ours: Sequence[float], plain: Sequence[float], this: str, other: str, tolerance: float
) -> Check:
    apart, stream, one, two = max(
        (_relative(a, b), stream, a, b) for stream, a, b in zip(streams, ours, plain, strict=True)
    )
    if not apart <= tolerance:
        return _finding(False, f"the loss of {stream} is {one:.6g} {this}, {two:.6g} {other}", apart, tolerance)
    detail = f"losses of {len(streams)} streams differ by at most {apart:.1e} of their size"
    return _finding(True, detail, apart, tolerance)


def _compare_samples(found: Samples, expected: Samples, codec: Codec) -> Check | None:
    if found.shape != expected.shape:
        return _finding(False, f"{len(found)} samples streamed, {len(expected)} in the file")
    if np.array_equal(found, expected):
        return None
    first = int((found != expected).argmax())
    apart = float(np.abs(found - expected).max())
    return _finding(False, f"samples differ from frame {first // codec.hop} on", apart, 0)


def _equality(verified: subject.VerifiedModel, share: float, detail: str) -> Check:
    """Require equality on a CPU and in an exact batch; elsewhere kernels may round differently by batch size."""
    if verified.device.type == "cpu" or verified.is_exact or share == 1:
        return _finding(share == 1, f"{share:.2%} equal {detail}", 1 - share, 0)
    reason = f"kernels round otherwise for other batch sizes, and {verified.device.type} has no exact batch"
    return _finding(True, f"{share:.2%} equal {detail}; reported, not judged: {reason}", 1 - share)


def _relative(one: float, other: float) -> float:
    if not (np.isfinite(one) and np.isfinite(other)):
        return float("inf")
    larger = max(abs(one), abs(other))
    return abs(one - other) / larger if larger else 0.0


def _rms(samples: npt.NDArray[Any]) -> float:
    return float(np.sqrt(np.square(samples.astype(np.float64)).mean()))


# The certificate


@dataclass(frozen=True, slots=True)
class Certificate:
    """All checks of one model on one device."""

    source: str
    family: str
    device: str
    dtype: str
    quick: bool
    versions: dict[str, str]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.status != "failed" for check in self.checks)

    @property
    def verdict(self) -> str:
        """One line that says that all checks passed, or names the first failure."""
        where = f"{self.source} on {self.device} in {self.dtype}"
        for failure in (check for check in self.checks if check.status == "failed"):
            return f"{where}: {failure.name} failed: {failure.explanation}"
        passed = sum(check.status == "passed" for check in self.checks)
        left_out = len(self.checks) - passed
        others = f", {left_out} skipped" if left_out else ""
        return f"{where}: verified, {passed} checks passed{others}"

    def save(self, folder: Path) -> None:
        """Write verify.json and verify.html."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {"verdict": self.verdict, "passed": self.passed, **asdict(self)}
        save_text(folder / "verify.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        save_text(folder / "verify.html", certificate_page(self))


def certificate_page(certificate: Certificate) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in certificate.versions.items())
    extent = "quick checks" if certificate.quick else "full checks"
    setting = f"{certificate.family}, {certificate.device}, {certificate.dtype}, {extent}; {versions}"
    header = ("Check", "Compared", "Result", "Measured", "Difference", "Tolerance", "Seconds")
    rows = []
    for check in certificate.checks:
        status = page.cell(check.status, {"passed": "good", "failed": "bad"}.get(check.status, "note"))
        figures = ("" if value is None else f"{value:.3g}" for value in (check.difference, check.tolerance))
        rows.append([check.name, check.compared, status, check.explanation, *figures, f"{check.seconds:.1f}"])
    return page.render_page(
        f"Verification of {certificate.source}",
        [
            page.heading("Verified" if certificate.passed else "Not verified", 1),
            page.paragraph(certificate.verdict, "lead"),
            page.table("Checks", header, rows),
            page.paragraph(setting, "note"),
            page.footer("Every figure is in verify.json."),
        ],
    )


def run_verification(
    source: str | os.PathLike[str],
    *,
    base: str | None = None,
    codec: str | None = None,
    device: str = "auto",
    quick: bool = False,
    progress: ProgressCallback = silent,
) -> Certificate:
    """Run every check of a model. `base` replaces the base model that a run or an adapter names."""
    progress("verify", 0, len(CHECKS))
    verified = load_verified(source, base=base, codec=codec, device=device, quick=quick)
    checks, target = list[Check](), verified.device
    for number, (name, check) in enumerate(CHECKS.items(), start=1):
        checks += run_check(CheckFunction(name, check, compared=(check.__doc__ or "").strip()), verified)
        progress("verify", number, len(CHECKS))
    return Certificate(
        source=os.fspath(source),
        family=verified.family.name,
        device=torch.cuda.get_device_name(target) if target.type == "cuda" else target.type,
        dtype=str(verified.dtype).removeprefix("torch."),
        quick=quick,
        versions={name: version(name) for name in ("myna", "torch", "transformers", "peft")},
        checks=tuple(checks),
    )


def load_verified(
    source: str | os.PathLike[str], *, base: str | None, codec: str | None, device: str, quick: bool
) -> subject.VerifiedModel:
    """Load the model in the type in which it speaks on the device; an adapter is not merged yet."""
    target = pick_device(device)
    dtype = choose_precision("auto", target).compute_dtype
    ref = ModelRef.find(source) if base is None else ModelRef.find_trained(source, base)
    family = ref.open_family(codec)
    if ref.adapter is not None:
        model = load_adapted(ref, family, dtype, target, text_head=family.has_text_head)
    else:
        model = family.load_model(dtype=dtype, device=target, text_head=family.has_weights and family.has_text_head)
    loaded = family.load_codec(device=target) if isinstance(family, interface.SpeakingFamily) else None
    return subject.VerifiedModel(family, model.requires_grad_(False).eval(), ref.adapter, loaded, target, dtype, quick)
