"""A model that speaks, with stored voices and several takes; and the marks on all speech that leaves it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from myna.audio.files import AudioFileFormat, pcm16
from myna.core.errors import SpeakError
from myna.core.io import DEFAULT_SPEAKER_ENCODER
from myna.core.progress import ProgressCallback, silent
from myna.models.ref import ModelRef, display_name
from myna.provenance.credentials import check_installed
from myna.provenance.speech_log import SpeechOrigin, check_log, log_speech, model_origin, new_id
from myna.provenance.watermark import MARK_NAME, watermark
from myna.speak import SpeechOptions
from myna.speak.batch import SpeechPlan
from myna.speak.engine import Engine, Speech, SpeechStream
from myna.speak.lines import LineSpeaker, SpokenLines, open_lines
from myna.speak.references import speech_request
from myna.speak.request import SpeechRequest

if TYPE_CHECKING:
    from myna.core.run_folder import Run
    from myna.evaluate.takes import TakeRanker, TakeRanking


PathLike = str | os.PathLike[str]


def check_marks(*, with_watermark: bool) -> None:
    """Refuse to speak where the packages of the watermark are missing, or the log cannot be written."""
    if with_watermark:
        check_installed()
    check_log()


class Voice:
    """A model that speaks: untuned, or tuned by a run. `load` makes it. Keyword `options` of its methods are those of
    `SpeechOptions`. The scene, if None, is that of the training; sampling settings that are None are the model's own.
    All speech has a watermark and is logged; `watermark=False` leaves out the mark, and the log says so."""

    def __init__(
        self, engine: Engine, ref: ModelRef | None = None, *, adapter: str = "", strength: float = 1.0
    ) -> None:
        self.engine, self._adapter, self._strength = engine, adapter, strength
        self._known_origin = model_origin(ref) if ref is not None else None
        self._rankers: dict[tuple[str | None, str], TakeRanker] = {}

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
        ref = ModelRef.find_trained(source, self.engine.family.source)
        return Voice(self.engine, ref, adapter=name, strength=strength)

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
        plans = self._plans(self._request(text, **options), takes)
        return self._give_out(self._speak_plans(plans, progress), plans)

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
        request, ranker = self._request(text, asr, **options), self._ranker(asr, speaker_encoder)
        ranker.check(len(request.references))
        plans = self._plans(request, takes)
        ranking = ranker.rank(request, self._speak_plans(plans, progress, all_must_speak=False), progress)
        # They are ranked as the model made them, and marked afterwards.
        chosen = [plans[take.number - 1] for take in ranking.takes]
        marked = self._give_out([take.speech for take in ranking.takes], chosen)
        takes_marked = (replace(take, speech=one) for take, one in zip(ranking.takes, marked, strict=True))
        return replace(ranking, takes=tuple(takes_marked))

    def stream(self, text: str, **options: Unpack[SpeechOptions]) -> SpeechStream:
        """Speak a text as `speak` does, yielding arrays of samples as they are generated, at `sample_rate`. Together
        they are the samples of `speak`; its `finish_reason` and `warnings` are known at the end."""
        request = self._request(text, **options)
        return self.engine.stream(request, self._origin(request), split=True)

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
        defaults, suffix = self._own(speech_request("", asr=asr, **options)), f".{format}"
        defaults.check_settings()
        check_marks(with_watermark=defaults.watermark)
        lines = open_lines(Path(file), Path(out), defaults, suffix=suffix, asr=asr, force=force)
        ranker = self._ranker(asr, speaker_encoder) if takes > 1 else None
        if ranker is not None:
            for count in {len(line.request.references) for line in lines}:
                ranker.check(count)
        speaker = LineSpeaker(self.engine, self._mark, Path(out), suffix, takes, ranker, keep_takes and takes > 1)
        return speaker.speak(lines, batch_size, progress)

    def _request(self, text: str, asr: str | None = None, **options: Unpack[SpeechOptions]) -> SpeechRequest:
        """Make a checked request to this voice."""
        request = self._own(speech_request(text, asr=asr, **options))
        request.check()
        check_marks(with_watermark=request.watermark)
        return request

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

    def _origin(self, request: SpeechRequest) -> SpeechOrigin:
        """Return the origin of one generation."""
        mark, voice, consent = MARK_NAME if request.watermark else "", request.voice, request.consent
        known = replace(self.origin, text=request.text, seed=request.seed, voice=voice, consent=consent)
        return replace(known, watermark=mark, id=new_id())

    def _mark(self, speech: Speech, request: SpeechRequest) -> Speech:
        """Return speech with the watermark, and with its origin, which signs and logs the files it is saved to."""
        origin, samples = self._origin(request), speech.samples
        if origin.watermark:
            samples = watermark(samples, speech.sample_rate, device=str(self.engine.device))
        return replace(speech, samples=samples, origin=origin)

    def _give_out(self, speeches: Sequence[Speech], plans: Sequence[SpeechPlan]) -> list[Speech]:
        """Mark and log speech that is handed to a program."""
        marked = [self._mark(speech, plan.request) for speech, plan in zip(speeches, plans, strict=True)]
        for speech in marked:
            assert speech.origin is not None
            log_speech("spoken", speech.origin, pcm16(speech.samples), seconds=round(speech.seconds, 3))
        return marked

    def _ranker(self, asr: str | None, speaker_encoder: str) -> TakeRanker:
        """Return a ranker of takes, opened once."""
        from myna.evaluate.takes import TakeRanker

        if (asr, speaker_encoder) not in self._rankers:
            device = self.engine.device.type
            self._rankers[asr, speaker_encoder] = TakeRanker.open(asr, speaker_encoder, device=device)
        return self._rankers[asr, speaker_encoder]
