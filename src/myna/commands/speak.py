"""`myna speak`, `speak-lines` and `answer`; in Python `load`, `load_answer_model` and methods of their results."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from myna.commands import options as opt
from myna.commands.display import call_with_bars, show, show_table, show_warnings
from myna.commands.options import PathLike, command, option
from myna.core.errors import ReferenceWarning, SpeakError
from myna.core.io import DEFAULT_SPEAKER_ENCODER, atomic_write, check_output_file
from myna.speak import SpeechOptions

if TYPE_CHECKING:
    from myna.evaluate.takes import TakeRanking
    from myna.models.ref import ModelRef
    from myna.speak.answering import AnswerModel
    from myna.speak.engine import Speech, SpeechStream
    from myna.speak.request import ReferenceRecording
    from myna.speak.voice import Voice

OUTPUT, TAKES = "Output", "Takes"

KeepTakes = Annotated[bool, option("Write the takes that are not the best too: NAME-2.wav, ...", panel=TAKES)]


class SpeakOptions(SpeechOptions, opt.ModelOptions, total=False):
    """Options of both commands."""


def load(
    source: PathLike,
    *,
    model: str | None = None,
    codec: str | None = None,
    device: str = "auto",
    strength: float = 1.0,
    quantization: opt.StoredWeights = "none",
    exact: bool = False,
) -> Voice:
    """Open a model that speaks: a run or one of its checkpoints, a LoRA adapter of PEFT, or an untuned model; folders,
    or names on the hub.

    `model` is the base of a run or an adapter, if not the one that it names; `strength` scales the LoRA;
    `quantization` stores the weights smaller: fp8 (recent GPUs alone) and int8 in half, nf4 in a quarter. With `exact`,
    speech is the same bits whatever else is spoken at the same time, and slower.
    """
    ref = model_ref(source, model)
    return _load(ref, codec=codec, device=device, strength=strength, quantization=quantization, exact=exact)


def _load(ref: ModelRef, **options: Any) -> Voice:
    from myna.speak.loading import load_engine
    from myna.speak.voice import Voice

    return Voice(load_engine(ref, **options), ref)


def load_answer_model(
    source: PathLike, *, model: str | None = None, device: str = "auto", batch_size: int = 16
) -> AnswerModel:
    """Open a model that answers in words, as `load` opens one that speaks."""
    from myna.speak.answering import AnswerModel

    return AnswerModel(model_ref(source, model), device=device, batch_size=batch_size)


def model_ref(source: PathLike, base: str | None) -> ModelRef:
    """Resolve what was named; with a base model, only a run or an adapter."""
    from myna.models.ref import ModelRef

    return ModelRef.find(source) if base is None else ModelRef.find_trained(source, base)


def _refuse_option(_type: Any, text: str | None) -> None:
    if text and text.startswith("--") and " " not in text:
        raise ValueError("There is no such option; --text-file takes any text")


@command("speak", example='myna speak "Good morning." --model fledgling --out morning.wav')
def _(
    text: Annotated[
        str | None,
        option(
            'Words to say; [SPEAKER0] ... [SPEAKER1] ... for several voices, <break time="500ms"/> for a pause.',
            validator=_refuse_option,
            allow_leading_hyphen=True,
        ),
    ] = None,
    *,
    text_file: Annotated[PathLike | None, option("Read the text from this UTF-8 file instead.")] = None,
    out: Annotated[
        PathLike | None,
        option("Audio file to write: .wav, .flac, .mp3, .m4a, .ogg, .opus. One that exists needs --force.", "-o"),
    ] = None,
    stream: Annotated[
        bool,
        option(
            "Write raw audio to standard output as it is generated: signed 16 bits, little-endian, mono, at the "
            "model's rate, mostly 24000: myna speak ... --stream | aplay -f S16_LE -r 24000",
            panel=OUTPUT,
        ),
    ] = False,
    play: Annotated[bool, option("Play it as it is generated, with ffplay, aplay or afplay.", panel=OUTPUT)] = False,
    codes: Annotated[PathLike | None, option("Write the codes too, as .npy.", panel=OUTPUT)] = None,
    force: opt.Force = False,
    takes: Annotated[
        int, option("Number of takes, with --seed and the seeds after it: NAME-1.wav, ...", panel=TAKES, least=1)
    ] = 1,
    best: Annotated[
        bool,
        option(
            "Write the best take to --out: by its end, by word errors (--asr), by similarity to the reference, by "
            "predicted MOS, as far as they are installed.",
            panel=TAKES,
        ),
    ] = False,
    keep_takes: KeepTakes = False,
    asr: opt.ASR = None,
    speaker_encoder: opt.SpeakerEncoder = DEFAULT_SPEAKER_ENCODER,
    **options: Unpack[SpeakOptions],
) -> None:
    """Speak a text in the voice of a recording, with an untuned model or as a run has tuned it.

    A text of more than about 30 s is spoken segment by segment, each continuing the one before. `myna speak-lines`
    speaks the lines of a file."""
    import numpy as np

    from myna.audio.files import check_audio_suffix
    from myna.speak.references import speech_request
    from myna.speak.request import read_speech_text

    if (text is None) == (text_file is None):
        raise SpeakError(
            "give either a text or --text-file",
            hint='myna speak "Good morning." --out morning.wav ...; after -- a text may begin with -o or -m too',
        )
    _check_outputs(out, takes=takes, best=best, codes=codes, stream=stream, play=play)
    if (keep_takes or (asr is not None and not _lacks_transcripts(options))) and not best:
        name = "--keep-takes" if keep_takes else "--asr"
        raise SpeakError(f"{name} goes with --best", hint="--takes 4 --best")
    speech, inputs = _pick(options, SpeechOptions), [*_references(options), *([text_file] if text_file else [])]
    best_file = Path(out) if best and out is not None else None
    take_files = _take_files(Path(out), takes) if out is not None else []
    written = [*([best_file] if best_file else []), *(take_files if keep_takes or not best else [])]
    codes_files = _take_files(Path(os.fspath(codes).removesuffix(".npy") + ".npy"), takes) if codes is not None else []
    for file in written:
        check_audio_suffix(file)
    for file in (*written, *codes_files):
        check_output_file(file, inputs=[Path(file) for file in inputs], force=force)
    text = read_speech_text(Path(text_file)) if text_file is not None else str(text)
    warnings.simplefilter("ignore", ReferenceWarning)  # what they say is shown
    request = speech_request(text, asr=asr, **speech)
    request.check()
    speech |= _show_heard(request.recordings)
    voice = _open_voice(options)
    if stream or play:
        _stream_speech(voice.stream(text, **speech), take_files, play=play, force=force)
        return
    if best_file is not None:
        scorers = {"asr": asr, "speaker_encoder": speaker_encoder}
        ranking = call_with_bars(voice.speak_best, text, takes, **scorers, **speech)
        ranking.best.save(best_file, force=force)
        for take in ranking.takes[1:] if keep_takes else ():
            if len(take.speech.samples):
                take.speech.save(take_files[take.number - 1], force=force)
        _show_takes(ranking)
        _show_end(f"{best_file}: ", ranking.best, ranking.best.seconds)
        return
    speeches = call_with_bars(voice.speak_takes, text, takes, **speech)
    for file, one in zip(take_files, speeches, strict=True):
        one.save(file, force=force)
        _show_end(f"{file}: ", one, one.seconds)
    for file, one in zip(codes_files, speeches, strict=False):
        with atomic_write(file) as temporary, temporary.open("wb") as opened:
            np.save(opened, one.codes)


@command("speak-lines", example="myna speak-lines lines.txt --run runs/marta --voice Marta --out spoken")
def _(
    file: Annotated[
        PathLike,
        option(
            "File of lines: a text a line; or .jsonl with text and, if wanted, id, reference, reference_text, scene, "
            "seed, language; or ChatML."
        ),
    ],
    *,
    out: Annotated[PathLike, option("Folder to write, with a row for each line in spoken.jsonl.", "-o")],
    format: Annotated[
        Literal["wav", "flac", "mp3", "ogg", "opus", "m4a"], option("Format of the files.", panel=OUTPUT)
    ] = "wav",
    batch_size: opt.BatchSize = 16,
    force: opt.Force = False,
    takes: Annotated[
        int, option("Number of takes of each line; the best is kept, as by `myna speak --best`.", panel=TAKES, least=1)
    ] = 1,
    keep_takes: KeepTakes = False,
    asr: opt.ASR = None,
    speaker_encoder: opt.SpeakerEncoder = DEFAULT_SPEAKER_ENCODER,
    **options: Unpack[SpeakOptions],
) -> None:
    """Speak the lines of a file into a folder, many at a time. Given again, it goes on where it was interrupted.

    Options set what a line does not say itself."""
    from myna.speak import lines, references

    if keep_takes and takes == 1:
        raise SpeakError("--keep-takes chooses among several takes", hint="--takes 4")
    warnings.simplefilter("ignore", ReferenceWarning)  # what they say is shown
    speech = _pick(options, SpeechOptions)
    defaults = references.speech_request("", asr=asr, **speech)
    opened = lines.open_lines(Path(file), Path(out), defaults, suffix=f".{format}", asr=asr, force=force)
    heard = _show_heard([recording for line in opened for recording in line.request.recordings])
    if asr is not None and takes == 1 and not heard:
        raise SpeakError(
            "--asr chooses among several takes, or hears references without a transcript", hint="--takes 4"
        )
    voice = _open_voice(options)
    spoken = call_with_bars(
        voice.speak_lines,
        file,
        out,
        takes=takes,
        asr=asr,
        speaker_encoder=speaker_encoder,
        keep_takes=keep_takes,
        format=format,
        batch_size=batch_size,
        force=force,
        **speech,
    )
    show(*spoken.warnings, style="yellow")
    before = f", {spoken.kept} of them before" if spoken.kept else ""
    show(f"{spoken.folder}: {len(spoken.rows)} lines{before}, {sum(row['seconds'] for row in spoken.rows):.1f} s")


@command("answer", example="myna answer lesson.wav --run runs/learner")
def _(
    recordings: Annotated[Sequence[PathLike], option("Recordings, or one folder made by `myna prepare` with answers.")],
    *,
    run: Annotated[PathLike | None, option("Run folder, one of its checkpoints, or a LoRA adapter.")] = None,
    model: Annotated[str | None, option("An untuned model; beside --run, its base model.", "-m")] = None,
    question: Annotated[str | None, option("Question to ask; by default to rate the pronunciation.")] = None,
    out: Annotated[PathLike | None, option("JSONL file for the answers to a prepared folder.", "-o")] = None,
    max_tokens: Annotated[int, option("Longest answer, at which a runaway is cut.", least=1)] = 512,
    batch_size: opt.BatchSize = 16,
    constrained: Annotated[bool, option("Keep answers to the JSON of an assessment: all can be parsed.")] = False,
    device: opt.Device = "auto",
    force: opt.Force = False,
) -> None:
    """Answer questions about recordings with a model that listens, or compare its answers with those of a folder."""
    from myna.data.dataset import DATASET_INFO_FILE
    from myna.models.ref import ModelRef
    from myna.speak.answering import AnswerModel, trained_warnings

    first = Path(recordings[0])
    folder = first if (first / DATASET_INFO_FILE).is_file() else None
    if folder is not None and (len(recordings) > 1 or out is None or question is not None):
        raise SpeakError(
            f"{folder} is a prepared folder, which comes alone, with questions of its own and an --out",
            hint=f"myna answer {folder} --run RUN --out answers.jsonl",
        )
    if folder is None and out is not None:
        raise SpeakError("--out is for the answers to a prepared folder", hint="leave it out, or name such a folder")
    if folder is not None and out is not None:
        for file in (Path(out), AnswerModel.scores_file(out)):
            check_output_file(file, inputs=folder.rglob("*"), force=force)
    answerer = AnswerModel(ModelRef.from_options(run, model), device=device, batch_size=batch_size)
    settings: dict[str, Any] = {"max_tokens": max_tokens, "constrained": constrained}
    if folder is None or out is None:
        answers = call_with_bars(answerer.answer_all, recordings, question, **settings)
        show_warnings(trained_warnings(answerer.trained_recordings(recordings)), stderr=True)
        show(*(f"{os.fspath(one)}: {reply.text}" for one, reply in zip(recordings, answers, strict=True)))
        return
    result = call_with_bars(answerer.answer_dataset, folder, out, force=force, **settings)
    show_warnings(result.warnings)
    show(*result.notes)
    if (table := result.assessment) is not None:
        show_table(table.header, table.rows, title=table.title)
    exact = f"{result.exact} of {len(result.rows)} answers equal the expected ones, letter for letter"
    show(f"{os.fspath(out)}: {exact}", f"{answerer.scores_file(out)}: every figure")


def _pick(options: Any, group: type) -> Any:
    """Return those options that belong to a group."""
    return {name: value for name, value in options.items() if name in group.__annotations__}


def _references(options: SpeakOptions) -> list[PathLike]:
    given = options.get("reference", ())
    return [given] if isinstance(given, str | os.PathLike) else list(given)


def _lacks_transcripts(options: SpeakOptions) -> bool:
    return "reference" in options and "reference_text" not in options


def _show_heard(recordings: Sequence[ReferenceRecording]) -> dict[str, Any]:
    """Print what was heard in references without a transcript, and return it as options for the request that speaks."""
    heard = {one.file: one.text for one in recordings if one.heard}
    show(*(f'{file}: heard "{text}"' for file, text in heard.items()), stderr=True)
    return {"reference_text": [one.text for one in recordings]} if heard else {}


def _open_voice(options: SpeakOptions) -> Voice:
    """Load the model, after all checks that need no model, because imports take seconds."""
    from myna.models.ref import ModelRef
    from myna.speak.request import open_reference

    opened = _pick(options, opt.ModelOptions)
    if options.get("watermark", True):
        from myna.provenance.credentials import check_installed

        check_installed()
    if problems := [problem for file in _references(options) for problem in open_reference(Path(file)).problems]:
        show_warnings(problems, stderr=True)
    ref = ModelRef.from_options(opened.pop("run", None), opened.pop("model", None))
    gc.disable()  # a search for garbage among the imported modules would take a second
    try:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        voice = _load(ref, **opened)
    finally:
        gc.freeze()
        gc.enable()
    if not voice.engine.single_thread:
        torch.set_num_threads(threads)
    return voice


def _check_outputs(
    out: PathLike | None, *, takes: int, best: bool, codes: PathLike | None, stream: bool, play: bool
) -> None:
    """Refuse outputs that exclude one another, a stream to a terminal, and `--play` without a player."""
    if out is None and not stream and not play:
        raise SpeakError("there is nowhere for the speech to go", hint="--out FILE.wav, --play, or --stream | PLAYER")
    if best and takes == 1:
        raise SpeakError("--best is one of several takes", hint="--takes 4 --best")
    given = {"--takes": takes > 1, "--codes": codes is not None, "--stream": stream, "--play": play}
    refusing = {"--stream": stream, "--play": play, "--best": best}
    refused = next((name for name, is_given in refusing.items() if is_given), "")
    allowed = (refused, "--takes") if refused == "--best" else (refused,)
    others = [name for name, is_given in given.items() if is_given and name not in allowed]
    if refused and others:
        raise SpeakError(f"{refused} does not go with {others[0]}", hint=f"leave out one of them: {others[0]} first")
    if best and out is None:
        raise SpeakError("--best writes a file", hint="--out FILE.wav")
    if stream and sys.stdout.isatty():
        raise SpeakError(
            "--stream writes raw audio, and standard output is a terminal",
            hint="pipe it: myna speak ... --stream | aplay -f S16_LE -r 24000; or hear it with --play",
        )
    if play:
        from myna.speak.playback import find_player

        find_player()


def _take_files(file: Path, takes: int) -> list[Path]:
    return [file] if takes == 1 else [file.with_stem(f"{file.stem}-{number}") for number in range(1, takes + 1)]


def _stream_speech(stream: SpeechStream, files: list[Path], *, play: bool, force: bool) -> None:
    """Play samples, or write them to standard output, as they come; and to a file if one is wanted."""
    import numpy as np

    from myna.provenance.credentials import write_speech
    from myna.speak.playback import open_player, open_standard_output

    pieces = []
    assert stream.origin is not None
    with open_player(stream.sample_rate) if play else open_standard_output() as write:
        for samples in stream:
            write(samples)
            pieces.append(samples)
        if not pieces:
            raise SpeakError("the model ended at once: there is no speech", hint="try another --seed, or train more")
    for file in files:
        check_output_file(file, force=force)
        write_speech(file, np.concatenate(pieces), stream.sample_rate, stream.origin)
    _show_end("", stream, sum(map(len, pieces)) / stream.sample_rate, stderr=True)


def _show_end(name: str, speech: Speech | SpeechStream, seconds: float, *, stderr: bool = False) -> None:
    """Print the length of the speech, and whether the model found its end. If not, print the words that were cut."""
    end = "stopped by itself" if speech.finish_reason == "stop" else "it did not find its end"
    style = "none" if speech.finish_reason == "stop" and not speech.warnings else "yellow"
    unmarked = ", without a watermark" if speech.origin is not None and not speech.origin.watermark else ""
    show(f"{name}{seconds:.2f} s, {end}{unmarked}", *speech.warnings, style=style, stderr=stderr)


def _show_takes(ranking: TakeRanking) -> None:
    """Print takes, the best first, with the metrics that were measured, and a note for each that was not."""
    rows = []
    for take in ranking.takes:
        end = "stopped by itself" if take.speech.stopped else "it did not find its end"
        row: dict[str, str] = {"take": str(take.number), "seconds": f"{take.speech.seconds:.2f}"}
        row["end"] = ", ".join([end, *take.defects])
        if (scores := take.scores).word_errors is not None:
            row["word errors"] = f"{scores.word_errors} of {scores.words}"
        measures = {"similarity": scores.similarity, "DistillMOS": scores.distillmos, "DNSMOS": scores.dnsmos}
        rows.append(row | {title: f"{value:.3f}" for title, value in measures.items() if value is not None})
    header = list(dict.fromkeys(title for row in rows for title in row))
    show_table(header, [[row.get(title, "") for title in header] for row in rows])
    show(*ranking.notes)
