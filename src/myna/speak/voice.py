"""A model that speaks, with stored voices and several takes; and the marks on all speech that leaves it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from myna.audio.files import AudioFileFormat, Samples, pcm16
from myna.core.config import Quantization
from myna.core.errors import SpeakError
from myna.core.io import DEFAULT_SPEAKER_ENCODER
from myna.core.progress import ProgressCallback, silent
from myna.models.ref import ModelRef, display_name
from myna.provenance.credentials import check_installed
from myna.provenance.speech_log import SpeechOrigin, check_log, log_speech, model_origin, new_id
from myna.provenance.watermark import MARK_NAME, StreamWatermark, watermark
from myna.speak import SpeechOptions
from myna.speak.batch import SpeechPlan
from myna.speak.engine import Engine, Speech, SpeechStream
from myna.speak.lines import LineSpeaker, LineTakes, SpokenLines, open_lines
from myna.speak.loading import load_engine
from myna.speak.request import FinishReason, SpeechRequest, speech_request, unchecked_request

if TYPE_CHECKING:
    from myna.core.run_folder import Run
    from myna.evaluate.takes import TakeRanker, TakeRanking


@dataclass(frozen=True, slots=True)
class SpeechMarker:
    """Marker for speech of one model. `origin` has a `watermark` unless that was switched off."""

    origin: SpeechOrigin
    device: str = "cpu"

    @classmethod
    def open(cls, origin: SpeechOrigin, *, with_watermark: bool, device: str) -> SpeechMarker:
        """Make a marker. Missing packages are an error here, before anything is spoken."""
        if with_watermark:
            check_installed()
        check_log()
        return cls(replace(origin, watermark=MARK_NAME if with_watermark else ""), device)

    def mark(self, speech: Speech, request: SpeechRequest) -> Speech:
        """Return speech with the watermark, and with its origin, which signs and logs the files it is saved to."""
        samples = speech.samples
        if self.origin.watermark:
            samples = watermark(samples, speech.sample_rate, device=self.device)
        return replace(speech, samples=samples, origin=self._origin(request))

    def mark_stream(self, stream: SpeechStream, request: SpeechRequest) -> MarkedStream:
        """Return a stream with the watermark, which is logged when it ends."""
        return MarkedStream(stream, self._origin(request), self.device)

    def _origin(self, request: SpeechRequest) -> SpeechOrigin:
        voice, consent = request.voice, request.consent
        return replace(self.origin, text=request.text, seed=request.seed, voice=voice, consent=consent, id=new_id())


def _give_out(speeches: Sequence[Speech], plans: Sequence[SpeechPlan], marker: SpeechMarker) -> list[Speech]:
    """Mark and log speech that is handed to a program."""
    marked = [marker.mark(speech, plan.request) for speech, plan in zip(speeches, plans, strict=True)]
    for speech in marked:
        assert speech.origin is not None
        log_speech("spoken", speech.origin, pcm16(speech.samples), seconds=round(speech.seconds, 3))
    return marked


class MarkedStream(Iterator[Samples]):
    """Samples of one request as they are generated, with the watermark. Together they are those of `Voice.speak`, bit
    for bit. `close` ends the request; the samples until then are logged."""

    def __init__(self, stream: SpeechStream, origin: SpeechOrigin, device: str) -> None:
        self.origin, self._stream, self.sample_rate = origin, stream, stream.sample_rate
        self._samples = self._generate(stream, origin, device)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason of the end, as in `Speech`, once all is generated."""
        return self._stream.finish_reason

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings, as in `Speech`, for what is generated so far."""
        return self._stream.warnings

    def __next__(self) -> Samples:
        return next(self._samples)

    def close(self) -> None:
        self._samples.close()
        self._stream.close()

    @staticmethod
    def _generate(stream: SpeechStream, origin: SpeechOrigin, device: str) -> Generator[Samples, None, None]:
        digest, count = hashlib.sha256(), 0
        pieces = _marked(stream, StreamWatermark(stream.sample_rate, device=device)) if origin.watermark else stream
        try:
            for samples in filter(len, pieces):
                digest.update(pcm16(samples))
                count += len(samples)
                yield samples
        finally:
            if count:
                seconds = round(count / stream.sample_rate, 3)
                log_speech("streamed", origin, digest, seconds=seconds, finish_reason=stream.finish_reason)


def _marked(stream: SpeechStream, marker: StreamWatermark) -> Iterator[Samples]:
    yield from map(marker.push, stream)
    yield marker.finish()


PathLike = str | os.PathLike[str]


class Voice:
    """A model that speaks: untuned, or tuned by a run. `load` makes it. Keyword `options` of its methods are those of
    `SpeechOptions`. The scene, if None, is that of the training; sampling settings that are None are the model's own.
    All speech has a watermark and is logged; `watermark=False` leaves out the mark, and the log says so."""

    def __init__(
        self, engine: Engine, origin: SpeechOrigin | None = None, *, adapter: str = "", strength: float = 1.0
    ) -> None:
        self.engine, self._known_origin = engine, origin
        self._adapter, self._strength = adapter, strength
        self._rankers: dict[tuple[str | None, str], TakeRanker] = {}

    @classmethod
    def open(
        cls,
        ref: ModelRef,
        *,
        codec: str | None = None,
        device: str = "auto",
        strength: float = 1.0,
        quantization: Quantization = "none",
        exact: bool = False,
    ) -> Voice:
        """Load the voice of a run, an adapter or a model."""
        engine = load_engine(ref, codec=codec, device=device, strength=strength, quantization=quantization, exact=exact)
        return cls(engine, model_origin(ref))

    @property
    def sample_rate(self) -> int:
        return self.engine.codec.sample_rate

    @property
    def origin(self) -> SpeechOrigin:
        """Model and adapter, as named in files, the log and cards."""
        return self._known_origin or SpeechOrigin(display_name(self.engine.family.source))

    def load_adapter(self, source: Run | PathLike, *, name: str | None = None, strength: float = 1.0) -> Voice:
        """Load a run or an adapter beside the weights of this voice, which must be its base model. Both voices share
        the model, and so do further ones; `strength` scales the LoRA. `unload_adapter` frees its place."""
        name = name or Path(source).name
        self.engine.load_adapter(name, source)
        origin = model_origin(ModelRef.find_trained(source, self.engine.family.source))
        return Voice(self.engine, origin, adapter=name, strength=strength)

    def unload_adapter(self) -> None:
        """Unload the adapter of this voice."""
        self.engine.unload_adapter(self._adapter)

    def speak(self, text: str, *, progress: ProgressCallback = silent, **options: Unpack[SpeechOptions]) -> Speech:
        """Speak a text in the voice of a reference recording, given with its transcript; or of several, where the text
        has `[SPEAKER0]`, `[SPEAKER1]` tags; or of a stored voice (`myna voice add`).

        A text of more than about 30 seconds is spoken in segments, each continuing those before it; `language` helps to
        find its sentences. `max_seconds` is the most for one utterance, or one segment: a runaway ends there, or where
        its text should have long been spoken. `finish_reason` is `length` then, and `warnings` say which words.
        """
        return self.speak_takes(text, 1, progress=progress, **options)[0]

    def speak_takes(
        self, text: str, takes: int, *, progress: ProgressCallback = silent, **options: Unpack[SpeechOptions]
    ) -> list[Speech]:
        """Speak a text several times at once: each take is what `speak` gives with `seed`, `seed` + 1, and so on."""
        request = self._own(speech_request(text, **options))
        plans, marker = self._plans(request, takes), self._marker(request)
        return _give_out(self._speak_plans(plans, progress), plans, marker)

    def speak_best(
        self,
        text: str,
        takes: int = 4,
        *,
        asr: str | None = None,
        speaker_encoder: str = DEFAULT_SPEAKER_ENCODER,
        progress: ProgressCallback = silent,
        **options: Unpack[SpeechOptions],
    ) -> TakeRanking:
        """Speak a text several times at once, as `speak_takes`, and rank the takes: those that found their end first,
        then by word errors (`asr`: a Whisper, as of `evaluate`), by similarity to the reference's speaker and by
        predicted MOS, as far as these metrics are installed. `best` of the result is the best `Speech`."""
        request, ranker = self._own(speech_request(text, **options)), self._ranker(asr, speaker_encoder)
        ranker.check(len(request.references))
        plans, marker = self._plans(request, takes), self._marker(request)
        ranking = ranker.rank(request, self._speak_plans(plans, progress, all_must_speak=False), progress)
        # They are ranked as the model made them, and marked afterwards.
        chosen = [plans[take.number - 1] for take in ranking.takes]
        marked = _give_out([take.speech for take in ranking.takes], chosen, marker)
        takes_marked = (replace(take, speech=one) for take, one in zip(ranking.takes, marked, strict=True))
        return replace(ranking, takes=tuple(takes_marked))

    def stream(self, text: str, **options: Unpack[SpeechOptions]) -> MarkedStream:
        """Speak a text as `speak` does, yielding arrays of samples as they are generated, at `sample_rate`. Together
        they are the samples of `speak`; its `finish_reason` and `warnings` are known at the end."""
        request = self._own(speech_request(text, **options))
        return self._marker(request).mark_stream(self.engine.stream(request, split=True), request)

    def speak_lines(
        self,
        file: PathLike,
        out: PathLike,
        *,
        takes: int = 1,
        asr: str | None = None,
        speaker_encoder: str = DEFAULT_SPEAKER_ENCODER,
        keep_takes: bool = False,
        format: AudioFileFormat = "wav",
        batch_size: int = 16,
        force: bool = False,
        progress: ProgressCallback = silent,
        **options: Unpack[SpeechOptions],
    ) -> SpokenLines:
        """Speak the lines of a file into a folder, `batch_size` at a time: a text a line, JSON lines with `text` and
        perhaps `id`, `reference`, `reference_text`, `scene`, `seed` and `language`, or ChatML. What a line does not say
        is as given here. `spoken.jsonl` has a row for each; lines that are in it, from the same text, voice, settings
        and weights, are not spoken again. Of several `takes` the best is kept, chosen as by `speak_best`; with
        `keep_takes` the others are written beside it."""
        defaults, suffix = self._own(unchecked_request("", **options)), f".{format}"
        defaults.check_settings()
        lines = open_lines(Path(file), Path(out), defaults, suffix=suffix, force=force)
        choice = None
        if takes > 1:
            ranker = self._ranker(asr, speaker_encoder)
            for count in {len(line.request.references) for line in lines}:
                ranker.check(count)
            choice = LineTakes(takes, ranker, keep_takes)
        speaker = LineSpeaker(self.engine, self._marker(defaults), Path(out), suffix, choice)
        return speaker.speak(lines, batch_size, progress)

    def _own(self, request: SpeechRequest) -> SpeechRequest:
        return replace(request, adapter=self._adapter, strength=self._strength)

    def _plans(self, request: SpeechRequest, takes: int) -> list[SpeechPlan]:
        plan = self.engine.plan(request)
        return [plan.take(number) for number in range(takes)]

    def _speak_plans(
        self, plans: Sequence[SpeechPlan], progress: ProgressCallback, *, all_must_speak: bool = True
    ) -> list[Speech]:
        spoken = dict(self.engine.speak_plans(plans, lambda frames: progress("speaking", frames, None)))
        silent_takes = [number for number, speech in sorted(spoken.items()) if not len(speech.samples)]
        if silent_takes and (all_must_speak or len(silent_takes) == len(plans)):
            raise SpeakError(
                f"the model ended at once with seed {plans[silent_takes[0]].request.seed}: there is no speech",
                hint="try another --seed, or train more",
            )
        return [speech for _, speech in sorted(spoken.items())]

    def _marker(self, request: SpeechRequest) -> SpeechMarker:
        device = str(next(self.engine.model.parameters()).device)
        return SpeechMarker.open(self.origin, with_watermark=request.watermark, device=device)

    def _ranker(self, asr: str | None, speaker_encoder: str) -> TakeRanker:
        """Return a ranker of takes, opened once."""
        from myna.evaluate.takes import TakeRanker

        if (asr, speaker_encoder) not in self._rankers:
            device = next(self.engine.model.parameters()).device.type
            self._rankers[asr, speaker_encoder] = TakeRanker.open(asr, speaker_encoder, device=device)
        return self._rankers[asr, speaker_encoder]
