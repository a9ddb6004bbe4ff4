"""Checks of a model: the paths of Myna against those of transformers, and against one another.

Each check is a function of a `VerifiedModel` that returns a `Check`, or raises `CheckSkipped`. They run in the
order of `CHECKS`: the first one merges an adapter, the last one puts a LoRA on the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import PeftModel

from myna.checks.verified_model import (
    GREEDY,
    TEXTS,
    GreedyChoices,
    VerifiedModel,
    adapter_choices,
    decode_together,
    greedy_choices,
    speak_together,
)
from myna.core.check import Check, CheckFunction, CheckSkipped
from myna.core.config import AdaptSettings
from myna.core.errors import CheckpointError, ModelError
from myna.data.codec import Codec, Samples
from myna.data.conversation import AudioClip
from myna.models.base import (
    IGNORE_INDEX,
    AnsweringFamily,
    Batch,
    LoraMatrices,
    LossSums,
    RenderedSequence,
    SpeakingFamily,
    get_base_model,
)
from myna.models.lora import load_adapter, make_trainable, merge_lora, read_lora_matrices
from myna.models.merge import LOGIT_TOLERANCES, compare_merged, probe_logits
from myna.speak.engine import Engine
from myna.speak.request import SpeechRequest
from myna.speak.streaming import StreamDecoder

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


def check_merged(verified: VerifiedModel) -> Check:
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
        choices = adapter_choices(verified, matrices) if matrices is not None else []
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


def _row_matrices(verified: VerifiedModel, adapter: Path) -> tuple[LoraMatrices | None, str]:
    """Return the adapter's matrices for rows of a batch, or the reason why it can only be merged."""
    if not isinstance(verified.family, SpeakingFamily):
        return None, ""
    try:
        return read_lora_matrices(verified.family, adapter), ""
    except CheckpointError:
        raise
    except ModelError as error:
        return None, f"not in rows of a batch: {error.what}"


def check_forward(verified: VerifiedModel) -> Check:
    """training forward, and transformers' own: losses by stream and all logits"""
    family, largest, worst_logit, worst = verified.family, 0.0, 0.0, (0.0, "", 0.0, 0.0)
    objective = family.objective(verified.model).eval()
    for sequence in verified.sequences:
        batch = family.collate([sequence])
        with torch.no_grad(), _recorded_logits(verified) as recorded:
            sums = objective(batch.to(verified.device)).sums.double().cpu()
        theirs, ours = family.transformers_forward(verified.model, sequence), torch.cat(recorded)
        if ours.shape != theirs.logits.shape or not (
            torch.isfinite(ours).all() and torch.isfinite(theirs.logits).all()
        ):
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


def check_packed(verified: VerifiedModel) -> Check:
    """losses of sequences packed into one batch, and of each by itself"""
    family = verified.family
    objective = family.objective(verified.model).eval()

    def sums(sequences: Sequence[RenderedSequence]) -> list[float]:
        with torch.no_grad():
            found: list[float] = objective(family.collate(sequences).to(verified.device)).sums.double().tolist()
        return found

    packed = sums(verified.sequences)
    single = [sum(parts) for parts in zip(*(sums([one]) for one in verified.sequences), strict=True)]
    return _compare_losses(family.loss_terms, packed, single, "packed", "one by one", LOSS_TOLERANCES[verified.dtype])


def check_generate(verified: VerifiedModel) -> Check:
    """greedy choices, and those of transformers' own generate"""
    return _compare_choices(verified, greedy_choices(verified))


def _compare_choices(verified: VerifiedModel, choices: Sequence[GreedyChoices]) -> Check:
    """Compare greedy choices for all prompts with transformers' `generate`, up to the first difference."""
    compared, complete, gap, largest, note = 0, 0, 0.0, 0.0, ""
    for prompt, found, theirs in zip(verified.prompts, choices, verified.generated, strict=True):
        ours = found.choices
        if found.stopped:
            ours = np.concatenate([ours, np.full((1, theirs.choices.shape[1]), theirs.end)])
        count = min(len(ours), len(theirs.choices))
        steps, mine, other = theirs.steps[:count], ours[:count], theirs.choices[:count]
        known = other != IGNORE_INDEX
        if not found.stopped and len(ours) <= len(theirs.choices):
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
        detail += f", whose logits differ by {gap:.2g} of {largest:.3g}: a tie in {_name(verified.dtype)}"
    if share <= tolerance and compared < MIN_STEPS and not complete:
        raise CheckSkipped(f"only {compared} steps could be compared: transformers chose ids that ours may not")
    return _finding(share <= tolerance, detail, share, tolerance)


def check_alone(verified: VerifiedModel) -> Check:
    """each request by itself, and among others that join and leave: codes, log-probabilities and samples"""
    if isinstance(verified.family, AnsweringFamily):
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
    crowd = speak_together(verified, verified.prompts, caps, rows)
    equal = total = compared = 0
    worst, note, tolerance = 0.0, "", LOG_PROB_TOLERANCES[verified.dtype]
    for prompt, cap, among in zip(verified.prompts, caps, crowd, strict=True):
        # An exact batch always has the same shape.
        [alone] = speak_together(verified, [prompt], [cap], rows if verified.is_exact else 1, max(caps))
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
    for prompt, among, samples in zip(verified.prompts, crowd, decode_together(codec, crowd), strict=True):
        if (finding := _compare_samples(samples, decode_together(codec, [among])[0], codec)) is not None:
            return replace(finding, message=f"{finding.message}, of {prompt.id!r} decoded among other streams")
    detail = f"codes{note}; log-probabilities differ by {worst:.2g}; samples of all streams are equal"
    return _equality(verified, equal / total if total else 1.0, detail)


def check_replay(verified: VerifiedModel) -> Check:
    """log-probabilities of sampled codes as reported, and of their replay through the training forward"""
    family, _ = verified.speaking
    objective = family.objective(verified.model).eval()
    streams = [place for place, stream in enumerate(family.loss_terms) if stream.startswith("code")]
    caps = [verified.frames] * len(verified.prompts)
    spoken = speak_together(verified, verified.prompts, caps, len(caps))
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
        where = f"{family.loss_terms[streams[book]]} of {TEXTS[number]!r}"
        worst = max(worst, (found, where, float(reported[book]), float(replayed[book])))
        codes += one.log_probs.size
    if not codes:
        raise CheckSkipped("the model ended at once, whatever it was asked to say")
    tolerance = LOG_PROB_TOLERANCES[verified.dtype] / 2
    if not worst[0] <= tolerance:
        detail = f"the mean log-probability of {worst[1]} is reported as {worst[2]:.5g}, and {worst[3]:.5g} in a replay"
        return _finding(False, detail, worst[0], tolerance)
    return _finding(
        True, f"of {codes:,} codes and ends, means by codebook differ by at most {worst[0]:.1e}", worst[0], tolerance
    )


def check_stream(verified: VerifiedModel) -> Check:
    """streamed samples, and those of the whole clip, bit for bit"""
    family, codec = verified.speaking
    random = np.random.default_rng(0)
    frames = 40 if verified.quick else 300
    codes = random.integers(0, codec.codebook_size, (frames, codec.codebooks)).astype(np.uint16)
    whole = codec.decode(codes)
    chunkings = 3 if verified.quick else 8
    for _ in range(chunkings):
        cuts = np.sort(random.integers(0, frames + 1, int(random.integers(1, 12))))
        decoder = StreamDecoder(codec)
        parts = [decoder.decode(part) for part in np.split(codes, cuts)]
        if (finding := _compare_samples(np.concatenate([*parts, decoder.finish()]), whole, codec)) is not None:
            return replace(finding, message=f"{finding.message}, in chunks that end at {cuts.tolist()}")
    engine = Engine(family, verified.model, codec)
    sampling = replace(GREEDY, max_seconds=verified.frames / codec.frame_rate)
    request = SpeechRequest(TEXTS[1], id="line", **asdict(sampling))
    [speech] = engine.speak([request])
    streamed = np.concatenate([np.zeros(0, np.float32), *engine.stream(request)])
    if (finding := _compare_samples(streamed, speech.samples, codec)) is not None:
        return replace(finding, message=f"{finding.message}, in speech of the model")
    return _finding(True, f"{chunkings} random chunkings of {frames} frames, and {len(speech.codes)} spoken ones", 0, 0)


def check_codec(verified: VerifiedModel) -> Check:
    """a synthetic voiced sound, encoded and decoded"""
    _, codec = verified.speaking
    sound = voiced_sound(codec, seconds=1.0 if verified.quick else 3.0)
    codes = codec.encode(sound[None])[0]
    decoded, again = codec.decode(codes), codec.decode(codes)
    frames = len(sound) // codec.hop
    if codes.shape != (frames, codec.codebooks) or int(codes.max(initial=0)) >= codec.codebook_size:
        return _finding(
            False, f"{frames} frames of sound are codes of shape {codes.shape}, up to {codes.max(initial=0)}"
        )
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


def check_fused(verified: VerifiedModel) -> Check:
    """losses and LoRA gradients of the fused training path, and of the plain one"""
    family = verified.family
    layers = get_base_model(verified.model).config.num_hidden_layers
    learner = make_learner(verified)
    batch = family.collate(verified.sequences)
    plain, gradients = train_pass(verified, family.objective(learner), batch)
    objective: Any = family.objective(learner, fused_lora=True)
    if not objective.fused:
        raise CheckSkipped(f"{family.name} on {verified.device.type} has no fused layers: it trains on the plain path")
    fused, fused_gradients = train_pass(verified, objective, batch)
    tolerance = gradient_tolerance(verified.dtype, layers)
    losses = _compare_losses(
        family.loss_terms, fused.tolist(), plain.tolist(), "fused", "plain", LOSS_TOLERANCES[verified.dtype]
    )
    if not losses.passed:
        return losses
    apart = gradient_differences(fused_gradients, gradients)
    worst = max(apart, key=lambda name: apart[name] if np.isfinite(apart[name]) else np.inf)
    if not apart[worst] <= tolerance:
        return _finding(False, f"the gradient of {worst} differs", apart[worst], tolerance)
    return replace(losses, message=f"{losses.message}; gradients of {len(apart)} matrices by {apart[worst]:.1e}")


def make_learner(verified: VerifiedModel) -> Any:
    """Return the model with a random LoRA."""
    learner = make_trainable(get_base_model(verified.model), verified.family, AdaptSettings(rank=8))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in learner.named_parameters():
        if "lora_B" in name:  # zero in a new LoRA, which would have no effect
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(0.02 * noise)
    return learner


def gradient_differences(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the difference of each matrix's gradients, as a share of its norm."""
    norms = {name: float(gradient.norm()) for name, gradient in plain.items()}
    floor = 0.01 * max(norms.values())  # smaller gradients are mostly rounding errors
    return {name: float((ours[name] - gradient).norm()) / max(norms[name], floor) for name, gradient in plain.items()}


def gradient_tolerance(dtype: torch.dtype, layers: int) -> float:
    return GRADIENT_TOLERANCES[dtype] * math.sqrt(max(1.0, layers / TOLERATED_LAYERS))


def _comparison(name: str, function: Callable[[VerifiedModel], Check]) -> CheckFunction:
    """Name a check; its docstring says what it compares."""
    return CheckFunction(name, function, compared=(function.__doc__ or "").strip())


CHECKS: tuple[CheckFunction, ...] = (
    _comparison("adapter = merged", check_merged),
    _comparison("forward = transformers", check_forward),
    _comparison("packed = one by one", check_packed),
    _comparison("greedy = generate", check_generate),
    _comparison("alone = crowd", check_alone),
    _comparison("log-probabilities = replay", check_replay),
    _comparison("stream = file", check_stream),
    _comparison("codec round trip", check_codec),
    _comparison("fused = plain", check_fused),
)


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
def _recorded_logits(verified: VerifiedModel) -> Iterator[list[torch.Tensor]]:
    """Record the logits of every head in the order of computation, in fp32 on the CPU."""
    core, found = get_base_model(verified.model), list[torch.Tensor]()
    parts = verified.family.module_names(core).items()
    hooks = [
        core.get_submodule(name).register_forward_hook(
            lambda _module, _inputs, logits: found.append(logits.float().cpu().flatten())
        )
        for part, names in parts
        if part.endswith("_head")
        for name in names
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def train_pass(verified: VerifiedModel, objective: Any, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss sums and the gradients of the trained weights."""
    with verified.autocast():
        losses: LossSums = objective.train()(batch.to(verified.device))
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
    return _finding(
        True, f"losses of {len(streams)} streams differ by at most {apart:.1e} of their size", apart, tolerance
    )


def _compare_samples(found: Samples, expected: Samples, codec: Codec) -> Check | None:
    if found.shape != expected.shape:
        return _finding(False, f"{len(found)} samples streamed, {len(expected)} in the file")
    if np.array_equal(found, expected):
        return None
    first = int((found != expected).argmax())
    apart = float(np.abs(found - expected).max())
    return _finding(False, f"samples differ from frame {first // codec.hop} on", apart, 0)


def _equality(verified: VerifiedModel, share: float, detail: str) -> Check:
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
