"""The command line: every command is a call of the Python API, with its progress and its result shown."""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperCommand

from myna import __version__
from myna.core.errors import MynaError

if TYPE_CHECKING:
    from rich.console import Console

    from myna.data.codec import Codes
    from myna.speak.marking import MarkedStream
    from myna.speak.voice import Voice

app = typer.Typer(
    name="myna",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="""Fine-tune speech language models: recordings in, speech out.

    The steps:  **prepare** turns recordings into codes,  **train** turns codes into a LoRA,
    **speak** turns text into speech.  `myna demo` does all of it, end to end.""",
)
model_app = typer.Typer(no_args_is_help=True, help="Inspect checkpoints and convert them.")
app.add_typer(model_app, name="model")
voice_app = typer.Typer(no_args_is_help=True, help="Named voices, each with the consent of its speaker.")
app.add_typer(voice_app, name="voice")

ModelOption = Annotated[str, typer.Option("--model", "-m", help="Hub name or folder of the model.")]
RunOption = Annotated[
    Path | None,
    typer.Option("--run", help="Run folder, one of its checkpoints, or a LoRA adapter: folder or hub name."),
]
UntunedOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Hub name or folder of an untuned model; beside --run, its base model."),
]
BaseOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Base model of a run or an adapter, where it is not the one that it names."),
]
CodecOption = Annotated[
    str | None, typer.Option("--codec", help="Hub name or folder of another codec than the model's.")
]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")]
FormatOption = Annotated[str | None, typer.Option("--format", help="Layout of the source; detected if left out.")]
MaxBadOption = Annotated[float, typer.Option("--max-bad", help="Share of bad items above which the import fails.")]
LanguageOption = Annotated[str, typer.Option("--language", help="Language of utterances whose source names none.")]
SpeakerOption = Annotated[str, typer.Option("--speaker", help="Speaker of utterances whose source names none.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
DataOption = Annotated[
    Path | None, typer.Option("--data", help="Prepared folder; by default the held-out data of the (first) run.")
]
SentencesOption = Annotated[
    Path | None, typer.Option("--sentences", help="Text file, a sentence a line; or a list as of seed-tts-eval.")
]
AsrOption = Annotated[
    str | None,
    typer.Option("--asr", help="Name or folder of a Whisper (base, transformers:base), for word error rates."),
]
SpeakerEncoderOption = Annotated[
    str,
    typer.Option("--speaker-encoder", help="resemblyzer, ecapa:FILE.safetensors, wavlm, or the folder of a WavLM."),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, help="Use this many sentences; speakers take turns.")
]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", min=1, help="Sentences or recordings processed at once.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Same seed, same choice and same speech.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting of the recipe: KEY=VALUE; repeatable.")
]
StrengthOption = Annotated[
    float, typer.Option("--strength", min=0.0, help="Scale of the run's LoRA: less keeps more of the untuned model.")
]
RayOption = Annotated[
    str | None, typer.Option("--ray", help="Address of a Ray cluster that shares the folders, or auto.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Write over files that are there. Inputs never are.")]

MAX_SECONDS_HELP = (
    "Where a runaway is cut, at the latest. A text of more than about 30 s is spoken in segments, and each may take as "
    "long."
)
SINGLE_THREAD_PARAMETERS = 50_000_000


def main() -> None:
    """Run a command. Errors a person can act on are shown without a traceback."""
    try:
        app()
    except MynaError as error:
        _exit_with(error)
    except OSError as error:
        from myna.core.io import disk_error

        # A full disk is no bug; a file of ours that is not where it should be is one, and keeps its traceback.
        if known := disk_error(error):
            _exit_with(known)
        raise


def _exit_with(error: MynaError) -> NoReturn:
    from rich.text import Text

    text = Text.assemble(("error", "bold red"), f" {error.what}\n", ("  → ", "bold"), error.hint)
    _console(stderr=True).print(text, highlight=False, soft_wrap=True)
    sys.exit(1)


@contextmanager
def _fast_start() -> Iterator[int]:
    """Pause the garbage collector while modules are imported, which are no garbage, and load with one thread. Yields
    the number of threads before."""
    gc.disable()
    try:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield threads
    finally:
        gc.freeze()
        gc.enable()


def _restore_threads(voice: Voice, threads: int) -> None:
    """A small model keeps one thread: a second gains nothing, and waits in a busy loop for its share of the cores."""
    import torch

    if sum(parameter.numel() for parameter in voice.engine.model.parameters()) > SINGLE_THREAD_PARAMETERS:
        torch.set_num_threads(threads)


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False)  # brackets are a person's own, as in [laughs]


@app.command("import")
def import_(
    source: Annotated[str, typer.Argument(help="Folder, file or hub name of a dataset.")],
    out: OutOption,
    format: FormatOption = None,
    max_bad: MaxBadOption = 0.01,
    language: LanguageOption = "",
    speaker: SpeakerOption = "",
) -> None:
    """Read recordings and texts in any layout into one manifest; bad items go to rejected.jsonl with their reason."""
    options = dict(locals())
    from myna import api
    from myna.terminal import progress_bars, show_notes

    with progress_bars() as progress:
        report = api.import_dataset(**options, progress=progress)
    show_notes(report.notes, _console())


@app.command()
def prepare(
    source: Annotated[str, typer.Argument(help="Folder, file or hub name of a dataset.")],
    out: OutOption,
    model: ModelOption,
    codec: CodecOption = None,
    format: FormatOption = None,
    max_bad: MaxBadOption = 0.01,
    language: LanguageOption = "",
    speaker: SpeakerOption = "",
    device: DeviceOption = "auto",
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes that encode on the CPU; by default one.")
    ] = None,
    ray: RayOption = None,
) -> None:
    """Import a source and encode its clips, once. Run it again after a stop: only what is new is encoded.

    Many machines encode together with --ray; the result is the same, byte for byte. docs/guides/many-machines.md
    """
    options = dict(locals())
    from myna import api
    from myna.terminal import progress_bars, show_notes

    with progress_bars() as progress:
        report = api.prepare(**options, progress=progress)
    summary = f"{report.utterances} utterances have codes in {out}; {report.encoded} clips were encoded now"
    show_notes([*report.notes, summary], _console())


@app.command()
def curate(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders and files of recordings, sound or film; none to decide again what OUT holds."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write.")] = None,
    asr: Annotated[
        str | None, typer.Option("--asr", help="Name or folder of a Whisper for faster-whisper: base, large-v3-turbo.")
    ] = None,
    language: Annotated[str | None, typer.Option("--language", help="Of all recordings, as en; else detected.")] = None,
    speakers: Annotated[int | None, typer.Option("--speakers", min=1, help="How many speak, if you know.")] = None,
    enrol: Annotated[
        list[str] | None,
        typer.Option("--enrol", help="Recording of a speaker to keep, FILE or NAME=FILE; others are dropped."),
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option("--script", help="What is read (txt, srt, vtt); by default a file of the recording's name."),
    ] = None,
    settings_file: Annotated[Path | None, typer.Option("--settings", help="YAML file of settings.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting, as keep.min_snr_db=20; OUT/curate.yaml has all. Repeatable."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Recordings to take, by name.")] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes; by default one a core, as memory allows.")
    ] = None,
    ray: RayOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Listen to ten minutes; forecast the hours kept and the time it takes.")
    ] = False,
) -> None:
    """Turn raw recordings into clips with text and speaker. Nothing is lost in silence: every second is in
    OUT/segments.parquet, kept or dropped with its reason.

    Run it again after a stop: what was listened to is not listened to again. With other thresholds and no sources it
    decides again within seconds:  myna curate --out OUT --set keep.min_snr_db=20
    """
    from myna import api
    from myna.core.errors import ConfigError
    from myna.terminal import curation_bars, show_curation, show_forecast, show_notes

    if out is None and not dry_run:
        raise ConfigError("--out is missing", hint="myna curate SOURCE --out data/NAME")
    if dry_run and not sources:
        raise ConfigError("--dry-run needs recordings", hint="myna curate SOURCE --dry-run")
    options: dict[str, Any] = {
        "asr": asr,
        "language": language,
        "speakers": speakers,
        "enrol": enrol or (),
        "settings_file": settings_file,
        "settings": settings or (),
        "workers": workers,
    }
    if sources:
        from myna.curate.models import missing_models

        listen = api._curate_settings(out, asr, language, speakers, enrol or (), settings_file, settings or ()).listen
        show_notes([f"without {note}" for note in missing_models(listen)], _console(stderr=True))
    with curation_bars() as progress:
        if dry_run:
            forecast = api.forecast_curation(sources or [], **options, progress=progress)
        else:
            assert out is not None
            result = api.curate(sources or [], out, script=script, limit=limit, ray=ray, **options, progress=progress)
    if dry_run:
        show_forecast(forecast, _console())
    else:
        show_curation(result, _console())


@app.command()
def xray(
    folder: Annotated[Path, typer.Argument(help="A folder made by `myna curate` or `myna prepare`.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Compare the texts with this model's tokenizer.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a dataset holds: FOLDER/xray/report.html, a page to look at and listen to, without a network.

    Where the hours went, what each threshold costs, who speaks, doubtful texts, duplicates, leaks, and a verdict.
    """
    from myna import api
    from myna.terminal import progress_bars, show_xray

    with progress_bars() as progress:
        result = api.xray(folder, model=model, progress=progress)
    if as_json:
        typer.echo(json.dumps(result.numbers, ensure_ascii=False, indent=1))
    else:
        show_xray(result, _console())


@app.command()
def correct(
    folder: Annotated[Path, typer.Argument(help="A folder made by `myna curate` or `myna import`.")],
    clip: Annotated[str | None, typer.Argument(help="Id of a clip, as the X-ray shows it.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="The right text of the clip.")] = None,
    drop: Annotated[bool, typer.Option("--drop", help="Do not use the clip.")] = False,
    restore: Annotated[bool, typer.Option("--restore", help="Use the clip, whatever dropped it.")] = False,
    speaker: Annotated[
        str | None, typer.Option("--speaker", help="The clip's speaker; without a clip A=B: A is the same person as B.")
    ] = None,
    start: Annotated[float | None, typer.Option("--start", min=0, help="Where it begins, in seconds.")] = None,
    end: Annotated[float | None, typer.Option("--end", min=0, help="Where it ends, in seconds.")] = None,
) -> None:
    """Correct a dataset by hand: one correction, added to FOLDER/corrections.jsonl. The later one wins.

    `myna curate --out FOLDER` applies them within seconds; a folder that was not curated has them applied when
    `myna prepare FOLDER` reads it.
    """
    options = dict(locals())
    from myna import api
    from myna.terminal import show_notes

    notes = api.correct(**options)
    is_curated = (folder / "segments.parquet").is_file()
    go_on = f"myna curate --out {folder}" if is_curated else f"myna prepare {folder} --model MODEL --out NEW"
    show_notes([*notes, f"added to {folder / 'corrections.jsonl'}", f"Apply it:  {go_on}"], _console())


@app.command()
def split(
    data: Annotated[Path, typer.Argument(help="A folder made by `myna prepare`.")],
    speakers: Annotated[
        int, typer.Option("--speakers", min=0, help="Speakers to hold out, for voices never heard.")
    ] = 0,
    texts: Annotated[int, typer.Option("--texts", min=0, help="Texts to hold out, for voices that are known.")] = 10,
    seed: SeedOption = 0,
) -> None:
    """Hold out speakers and texts to evaluate on. Made once: DATA/subsets holds a prepared folder for each subset."""
    from myna import api
    from myna.terminal import show_notes

    parts = api.split(data, speakers=speakers, texts=texts, seed=seed)
    counts = [f"{part.folder}: {part.utterances} utterances" for part in parts.values()]
    show_notes([*counts, *(note for part in parts.values() for note in part.notes)], _console())


@app.command()
def render(
    data: Annotated[Path, typer.Argument(help="A folder made by `myna prepare`.")],
    model: ModelOption,
    id: Annotated[str | None, typer.Option("--id", help="Utterance to show; the first one if left out.")] = None,
    count: Annotated[int, typer.Option("--count", "-n", help="How many utterances to show.")] = 1,
    frames: Annotated[bool, typer.Option("--frames", help="Show every frame of every clip.")] = False,
    settings: SetOption = None,
) -> None:
    """Print training sequences token by token: green is supervised, the rest is context."""
    from myna import api
    from myna.models import open_family
    from myna.models.token_view import token_view

    console, family = _console(), open_family(model)
    for sequence in api.render(data, model=model, id=id, count=count, settings=settings or ()):
        console.print(token_view(sequence, family, all_frames=frames), soft_wrap=True)


@app.command()
def train(
    recipe: Annotated[Path | None, typer.Argument(help="A YAML file, or a name that `myna recipes` lists.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder; runs/NAME by default.")] = None,
    settings: SetOption = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs of this machine to use, a process each.")] = 1,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Continue this run; with --set train.steps=... for longer.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, plan the memory, train nothing.")
    ] = False,
) -> None:
    """Train what a recipe says, into a run folder. Every setting can be changed with --set train.steps=100."""
    from myna import api
    from myna.core.config import load_recipe
    from myna.core.errors import ConfigError
    from myna.train.run import Run

    if (recipe is None) == (resume is None) or (resume is not None and (out is not None or dry_run)):
        raise ConfigError(
            "give a recipe, or --resume with a run and nothing else that says where or what",
            hint="myna train RECIPE.yaml, or myna train --resume runs/NAME",
        )
    # A mistake in it is told before anything heavy is imported.
    if recipe is not None:
        load_recipe(recipe, settings)
    elif resume is not None:
        Run.open(resume, settings)
    from myna.models import open_family
    from myna.models.base import SpeakingFamily
    from myna.terminal import TrainingDisplay
    from myna.train.distributed import ProcessInfo

    leads = ProcessInfo.from_environment().is_main
    with TrainingDisplay(shown=leads and gpus == 1) as display:
        if resume is not None:
            run = api.resume(resume, settings=settings or (), gpus=gpus, progress=display.progress, observer=display)
        else:
            run = api.train(
                recipe,
                out=out,
                settings=settings or (),
                gpus=gpus,
                dry_run=dry_run,
                progress=display.progress,
                observer=display,
            )
    if not leads or gpus > 1 or dry_run or not run.is_finished:
        return
    source = run.recipe.model
    family = open_family(source.source, revision=source.revision, codec=source.codec)
    if isinstance(family, SpeakingFamily):
        command = f'myna speak "your words" --run {run.folder} --reference REF.wav --reference-text "..." -o out.wav'
    else:
        command = f"myna answer RECORDING.wav --run {run.folder}"
    _console().print(f"\nTry it:  {command}", soft_wrap=True)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="A recipe to print; all are listed if left out.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Copy it to this file, to change it.")] = None,
    force: ForceOption = False,
) -> None:
    """List the recipes that ship, print one, or copy one to start from. `myna train NAME` takes their names too."""
    from myna.core.config import shipped_recipes
    from myna.core.errors import ConfigError
    from myna.core.io import check_output_file, save_text
    from myna.terminal import show_recipes

    shipped = shipped_recipes()
    if name is None:
        if out is not None:
            raise ConfigError("--out copies one recipe", hint="myna recipes NAME --out mine.yaml")
        show_recipes(shipped, _console())
        return
    if name not in shipped:
        raise ConfigError(f"no recipe {name} ships", hint=f"name one of {', '.join(shipped)}")
    content = shipped[name].read_text(encoding="utf-8")
    if out is None:
        print(content, end="")
        return
    check_output_file(out, force=force)
    save_text(out, content)
    _console().print(f"{out}: change it, then myna train {out}", soft_wrap=True)


class _TextCommand(TyperCommand):
    """A command whose one argument is a text, which may begin with a dash: `-5 degrees` is no option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {
            name: not getattr(parameter, "is_flag", False)
            for parameter in self.get_params(ctx)
            for name in parameter.opts
        }
        options, texts, waiting = list[str](), list[str](), list(args)
        while waiting and waiting[0] != "--":
            word = waiting.pop(0)
            name = word.partition("=")[0] if word.startswith("--") else word[:2]
            # A single word after two dashes is an option, perhaps a misspelt one.
            if word[:1] == "-" and name not in takes_value and (not word.startswith("--") or " " in name):
                texts.append(word)
                continue
            options.append(word)
            if takes_value.get(word) and waiting:
                options.append(waiting.pop(0))
        return super().parse_args(ctx, [*options, "--", *texts, *waiting[1:]])


@app.command(cls=_TextCommand)
def speak(
    text: Annotated[
        str | None, typer.Argument(help="What to say; [SPEAKER0] ... [SPEAKER1] ... for several voices.")
    ] = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Audio file to write: .wav, .flac, .mp3, .m4a, .ogg, .opus. One that exists needs --force. "
            "With --lines, a folder.",
        ),
    ] = None,
    text_file: Annotated[
        Path | None, typer.Option("--text-file", help="Read the text from this UTF-8 file instead.")
    ] = None,
    lines: Annotated[
        Path | None,
        typer.Option(
            "--lines",
            help="Speak the lines of this file into the folder --out, with a row for each in spoken.jsonl: a text a "
            "line; or .jsonl with text and, if wanted, id, reference, reference_text, scene, seed, language; or "
            "ChatML. Given again, it goes on where it was interrupted.",
        ),
    ] = None,
    reference: Annotated[
        list[Path] | None,
        typer.Option("--reference", help="Recording of the voice to speak in, of at most 60 s; repeatable."),
    ] = None,
    reference_text: Annotated[
        list[str] | None, typer.Option("--reference-text", help="Transcript of that recording; repeatable.")
    ] = None,
    run: RunOption = None,
    model: UntunedOption = None,
    strength: StrengthOption = 1.0,
    quantization: Annotated[
        Literal["none", "fp8", "int8", "nf4"],
        typer.Option("--quantization", help="Store the weights smaller: fp8 or int8 in half, nf4 in a quarter."),
    ] = "none",
    codec: CodecOption = None,
    scene: Annotated[
        str | None,
        typer.Option("--scene", help="A sentence about the room or the manner; if not given, as the run was trained."),
    ] = None,
    language: Annotated[
        str, typer.Option("--language", help="Of a long text, such as en or de: helps to find its sentences.")
    ] = "",
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", min=0.0, help="0 is greedy; if not given, as the model asks."),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", min=0, help="Sample from the likeliest k codes, 0: all; or as the model asks."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", min=0.0, max=1.0, help="Sample within this probability; or as the model asks."),
    ] = None,
    max_seconds: Annotated[float, typer.Option("--max-seconds", min=0.1, help=MAX_SECONDS_HELP)] = 60.0,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same speech.")] = 0,
    takes: Annotated[
        int,
        typer.Option("--takes", min=1, help="Speak it so many times, with --seed and those after it: NAME-1.wav, ..."),
    ] = 1,
    best: Annotated[
        bool,
        typer.Option(
            "--best",
            help="Of several --takes, write the best to --out: by its end, by word errors (--asr), by similarity to "
            "the reference, by predicted MOS, as far as they are installed. With --lines, of every line.",
        ),
    ] = False,
    keep_takes: Annotated[
        bool, typer.Option("--keep-takes", help="With --best, write the other takes too: NAME-2.wav, ...")
    ] = False,
    asr: AsrOption = None,
    speaker_encoder: SpeakerEncoderOption = "resemblyzer",
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Write raw audio to standard output as it is generated: signed 16 bits, little-endian, mono, at the "
            "model's rate, mostly 24000: myna speak ... --stream | aplay -f S16_LE -r 24000",
        ),
    ] = False,
    play: Annotated[
        bool, typer.Option("--play", help="Play it as it is generated, with ffplay, aplay or afplay.")
    ] = False,
    batch_size: BatchSizeOption = 16,
    format: Annotated[
        Literal["wav", "flac", "mp3", "ogg", "opus", "m4a"] | None,
        typer.Option("--format", help="Of the files of --lines."),
    ] = None,
    voice_name: Annotated[
        str | None, typer.Option("--voice", help="A voice of `myna voice list`, in place of --reference.")
    ] = None,
    watermark: Annotated[
        bool,
        typer.Option(
            "--watermark/--no-watermark",
            help="An inaudible mark that `myna detect` finds. Speech without it is logged as such.",
        ),
    ] = True,
    device: DeviceOption = "auto",
    codes: Annotated[Path | None, typer.Option("--codes", help="Also write the codes, as .npy.")] = None,
    force: ForceOption = False,
) -> None:
    """Speak a text in the voice of a recording, with an untuned model or as a run has tuned it.

    A text of more than about 30 s is spoken segment by segment, each continuing the one before."""
    from myna.core.errors import ReferenceWarning, SpeakError
    from myna.speak.request import check_speech_text, open_reference, read_speech_text

    if [text, text_file, lines].count(None) != 2:
        raise SpeakError(
            "give either a text, --text-file or --lines",
            hint='myna speak "Good morning." --out morning.wav ...; after -- a text may begin with -o or -m too',
        )
    _check_speak_outputs(out, lines=lines, takes=takes, best=best, codes=codes, stream=stream, play=play)
    if (keep_takes or asr is not None) and not best:
        name = "--keep-takes" if keep_takes else "--asr"
        raise SpeakError(f"{name} goes with --best", hint="--takes 4 --best")
    if format is not None and lines is None:
        raise SpeakError("--format goes with --lines", hint=f"name the file so: --out NAME.{format}")
    inputs = [*(reference or ()), *([text_file] if text_file is not None else [])]
    files = _take_files(out, takes) if lines is None and out is not None else []
    best_files = [out] if best and lines is None and out is not None else []
    codes_files = _take_files(codes.with_name(codes.name.removesuffix(".npy") + ".npy"), takes) if codes else []
    _check_speech_files([*best_files, *(files if keep_takes or not best else ())], codes_files, inputs, force=force)
    if len(reference or ()) != len(reference_text or ()):
        raise SpeakError(
            f"{len(reference or ())} --reference but {len(reference_text or ())} --reference-text",
            hint="give the transcript of each recording",
        )
    # What is wrong is reported before seconds go into imports.
    if watermark:
        from myna.provenance import check_installed

        check_installed()
    pairs = list(zip(reference or (), reference_text or (), strict=True))
    if voice_name is not None:
        from myna.provenance.voice_store import VoiceStore

        if pairs:
            raise SpeakError("--voice has a reference of its own", hint="give --voice or --reference, not both")
        pairs = [VoiceStore().reference(VoiceStore().get_voice(voice_name))]
    if lines is None:
        text = read_speech_text(text_file) if text_file is not None else str(text)
        check_speech_text(text, [transcript for _, transcript in pairs])
    if problems := [problem for recording in reference or () for problem in open_reference(recording).problems]:
        from myna.terminal import show_warnings

        show_warnings(problems, _console(stderr=True))
        warnings.simplefilter("ignore", ReferenceWarning)  # they are said
    from myna.models.ref import ModelRef

    ref = ModelRef.from_options(run, model)
    settings: dict[str, Any] = {
        "reference": reference or (),
        "reference_text": reference_text or (),
        "scene": scene,
        "language": language,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "max_seconds": max_seconds,
        "seed": seed,
        "voice": voice_name,
        "watermark": watermark,
    }
    if lines is not None:
        from myna.speak.lines import open_lines
        from myna.speak.request import ReferenceRecording, SpeechRequest

        assert out is not None
        defaults = SpeechRequest("", tuple(ReferenceRecording(*pair) for pair in pairs))
        open_lines(lines, out, defaults, suffix=f".{format or 'wav'}", force=force)
    from myna.speak.voice import Voice
    from myna.terminal import progress_bars, show_speech, show_spoken_lines, show_takes

    with _fast_start() as threads:
        voice = Voice.open(ref, codec=codec, device=device, strength=strength, quantization=quantization)
    _restore_threads(voice, threads)
    if lines is not None:
        assert out is not None
        with progress_bars() as progress:
            spoken = voice.speak_lines(
                lines,
                out,
                **settings,
                takes=takes,
                asr=asr,
                speaker_encoder=speaker_encoder,
                keep_takes=keep_takes,
                format=format or "wav",
                batch_size=batch_size,
                force=force,
                progress=progress,
            )
        show_spoken_lines(spoken, _console())
    elif best:
        with progress_bars() as progress:
            ranking = voice.speak_best(
                str(text), takes, asr=asr, speaker_encoder=speaker_encoder, **settings, progress=progress
            )
        for file in best_files:
            ranking.best.save(file, force=force)
        for take in ranking.takes[1:] if keep_takes else ():
            if len(take.speech.samples):
                take.speech.save(files[take.number - 1], force=force)
        show_takes(ranking, _console())
        for file in best_files:
            show_speech(file, ranking.best, _console())
    elif stream or play:
        _stream_speech(voice.stream(str(text), **settings), files, play=play, force=force)
    else:
        with progress_bars() as progress:
            speeches = voice.speak_takes(str(text), takes, **settings, progress=progress)
        for file, speech in zip(files, speeches, strict=True):
            speech.save(file, force=force)
            show_speech(file, speech, _console())
        for file, speech in zip(codes_files, speeches, strict=False):
            _save_codes(file, speech.codes)


def _check_speak_outputs(
    out: Path | None, *, lines: Path | None, takes: int, best: bool, codes: Path | None, stream: bool, play: bool
) -> None:
    """Refuse outputs that do not go together, and a stream that would go to a terminal or to no player."""
    from myna.core.errors import SpeakError

    if out is None and not stream and not play:
        raise SpeakError("there is nowhere for the speech to go", hint="--out FILE.wav, --play, or --stream | PLAYER")
    if best and takes == 1:
        raise SpeakError("--best is one of several takes", hint="--takes 4 --best")
    if lines is not None and takes > 1 and not best:
        raise SpeakError("--lines does not go with --takes alone", hint="keep the best of each line: --takes 4 --best")
    given = {"--takes": takes > 1, "--codes": codes is not None, "--stream": stream, "--play": play}
    refusing = {"--lines": lines is not None, "--stream": stream, "--play": play, "--best": best}
    refused = next((name for name, is_given in refusing.items() if is_given), "")
    allowed = (refused, "--takes") if best and refused in ("--lines", "--best") else (refused,)
    others = [name for name, is_given in given.items() if is_given and name not in allowed]
    if refused and others:
        raise SpeakError(f"{refused} does not go with {others[0]}", hint=f"leave out one of them: {others[0]} first")
    if lines is not None and out is None:
        raise SpeakError("--lines needs a folder to speak into", hint="--out FOLDER")
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


def _check_speech_files(files: list[Path], codes_files: list[Path], inputs: list[Path], *, force: bool) -> None:
    from myna.audio.files import check_audio_suffix
    from myna.core.io import check_output_file

    for file in files:
        check_audio_suffix(file)
    for file in (*files, *codes_files):
        check_output_file(file, inputs=inputs, force=force)


def _save_codes(file: Path, codes: Codes) -> None:
    import numpy as np

    from myna.core.io import atomic_write

    with atomic_write(file) as temporary, temporary.open("wb") as opened:
        np.save(opened, codes)


def _stream_speech(stream: MarkedStream, files: list[Path], *, play: bool, force: bool) -> None:
    """Play samples, or write them to standard output, as they come; and to a file where one is wanted."""
    import numpy as np

    from myna.core.errors import SpeakError
    from myna.core.io import check_output_file
    from myna.provenance.credentials import write_speech
    from myna.speak.playback import open_player, open_standard_output
    from myna.terminal import show_stream

    pieces = []
    with open_player(stream.sample_rate) if play else open_standard_output() as write:
        for samples in stream:
            write(samples)
            pieces.append(samples)
        if not pieces:
            raise SpeakError("the model ended at once: there is no speech", hint="try another --seed, or train more")
    for file in files:
        check_output_file(file, force=force)
        write_speech(file, np.concatenate(pieces), stream.sample_rate, stream.origin)
    show_stream(stream, sum(map(len, pieces)) / stream.sample_rate, _console(stderr=True))


@app.command()
def detect(
    files: Annotated[list[Path], typer.Argument(help="Recordings in any format.")],
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Tell whether recordings were spoken by a model: their watermark, and who signed them with which model.

    Exit code 0 where every file is marked, or signed as speech of a model; 1 where one is neither; 2 where one cannot
    be read. Without a mark a recording may still be synthetic: `docs/guides/provenance.md` says what removes it."""
    from myna import api
    from myna.core.errors import AudioError
    from myna.terminal import show_detection, show_warnings

    found, failures = [], list[str]()
    for file in files:
        try:
            found.append(api.detect(file, device=device))
        except AudioError as error:
            failures.append(error.what)
        else:
            if not as_json:
                show_detection(found[-1], _console())
    if as_json:
        print(json.dumps([one.to_json() for one in found], indent=2, ensure_ascii=False))
    show_warnings(failures, _console(stderr=True))
    raise typer.Exit(2 if failures else 0 if all(one.is_synthetic for one in found) else 1)


@voice_app.command("add")
def add_voice(
    name: Annotated[str, typer.Argument(help="Name of the voice: that of its speaker, as the consent says it.")],
    recordings: Annotated[
        list[Path], typer.Option("--recording", help="A few seconds of the voice, at most 60; repeatable.")
    ],
    consent: Annotated[
        Path, typer.Option("--consent", help="Recording of `myna voice consent-sentence NAME`, read aloud today.")
    ],
    language: Annotated[
        str, typer.Option("--language", help="Of the consent and the recordings: en, ar, vi ...")
    ] = "en",
    texts: Annotated[
        list[str] | None,
        typer.Option("--text", help="Transcript of each recording; by default by the ASR; repeatable."),
    ] = None,
    asr: Annotated[str, typer.Option("--asr", help="Name or folder of a Whisper, which checks the words.")] = "base",
    speaker_encoder: SpeakerEncoderOption = "resemblyzer",
    device: DeviceOption = "auto",
) -> None:
    """Store a voice under a name, once its speaker's consent is checked: the words of the sentence by speech
    recognition, the voice by a speaker encoder against the recordings. `myna speak --voice NAME` uses it."""
    options = dict(locals()) | {"texts": texts or ()}
    from myna import api
    from myna.terminal import show_notes, show_voices

    voice = api.add_voice(**options)
    show_voices([voice], _console())
    show_notes([f'myna speak "your words" --voice "{voice.name}" --model MODEL -o out.wav'], _console())


@voice_app.command("list")
def list_voices(as_json: JsonOption = False) -> None:
    """List the stored voices."""
    from myna.provenance.voice_store import VoiceStore
    from myna.terminal import show_notes, show_voices

    voices = VoiceStore().list_voices()
    if as_json:
        print(json.dumps([voice.model_dump(mode="json") for voice in voices], indent=2, ensure_ascii=False))
    elif voices:
        show_voices(voices, _console())
    else:
        show_notes(["no voices yet: myna voice consent-sentence NAME, then myna voice add NAME"], _console())


@voice_app.command("show")
def show_voice(name: Annotated[str, typer.Argument(help="Name or id of a voice.")]) -> None:
    """Print all that is stored of a voice, as JSON: recordings with their hashes, and how its consent was checked."""
    from myna.provenance.voice_store import VoiceStore

    print(VoiceStore().get_voice(name).model_dump_json(indent=2))


@voice_app.command("remove")
def remove_voice(name: Annotated[str, typer.Argument(help="Name or id of a voice.")]) -> None:
    """Remove a voice, its recordings and its consent from this machine. What was spoken with it stays in the log."""
    from myna.provenance.voice_store import VoiceStore
    from myna.terminal import show_notes

    store = VoiceStore()
    voice = store.delete_voice(name)
    if not any(other.consent.id == voice.consent.id for other in store.list_voices()):
        store.delete_consent(voice.consent.id)
    show_notes([f"{voice.name}: removed"], _console())


@voice_app.command("consent-sentence")
def consent_sentence(
    name: Annotated[str, typer.Argument(help="Name of the speaker.")],
    language: Annotated[str, typer.Option("--language", help="en, ar, vi, de, fr or es.")] = "en",
) -> None:
    """Print the sentence that a speaker reads aloud to agree. It has two words of the day: record it today."""
    from myna import api

    print(api.consent_sentence(name, language=language))


@app.command()
def answer(
    recordings: Annotated[
        list[Path], typer.Argument(help="Recordings, or one folder made by `myna prepare` with answers.")
    ],
    run: RunOption = None,
    model: UntunedOption = None,
    question: Annotated[
        str | None, typer.Option("--question", help="What to ask; by default to rate the pronunciation.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="JSONL file for the answers to a folder. One that exists needs --force."),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Where a runaway is cut.")] = 512,
    batch_size: BatchSizeOption = 16,
    constrained: Annotated[
        bool, typer.Option("--constrained", help="Keep answers to the JSON of an assessment: all can be parsed.")
    ] = False,
    device: DeviceOption = "auto",
    force: ForceOption = False,
) -> None:
    """Answer questions about recordings with a model that listens, or compare its answers with those of a folder."""
    from myna.core.errors import SpeakError
    from myna.core.io import check_output_file
    from myna.data.dataset import DATASET_INFO_FILE
    from myna.terminal import progress_bars, show_dataset_answers, show_notes, show_warnings

    folder = recordings[0] if (recordings[0] / DATASET_INFO_FILE).is_file() else None
    if folder is not None and (len(recordings) > 1 or out is None or question is not None):
        raise SpeakError(
            f"{folder} is a prepared folder, which comes alone, with questions of its own and an --out",
            hint=f"myna answer {folder} --run RUN --out answers.jsonl",
        )
    if out is not None:
        if folder is None:
            raise SpeakError(
                "--out is for the answers to a prepared folder", hint="leave it out, or name such a folder"
            )
        from myna.speak.answering import AnswerModel

        for file in (out, AnswerModel.scores_file(out)):
            check_output_file(file, inputs=folder.rglob("*"), force=force)
    from myna.models.ref import ModelRef
    from myna.speak.answering import AnswerModel, trained_warnings

    answerer = AnswerModel.open(ModelRef.from_options(run, model), device=device, batch_size=batch_size)
    console = _console()
    with progress_bars() as progress:
        if folder is None or out is None:
            answers = answerer.answer_all(
                recordings, question, max_tokens=max_tokens, constrained=constrained, progress=progress
            )
        else:
            result = answerer.answer_dataset(
                folder, out, max_tokens=max_tokens, constrained=constrained, force=force, progress=progress
            )
    if folder is None or out is None:
        show_warnings(trained_warnings(answerer.trained_recordings(recordings)), _console(stderr=True))
        for recording, reply in zip(recordings, answers, strict=True):
            console.print(f"{recording}: {reply.text}", highlight=False, soft_wrap=True)
        return
    show_dataset_answers(result, console)
    exact = f"{result.exact} of {len(result.rows)} answers equal the expected ones, letter for letter"
    show_notes([f"{out}: {exact}", f"{answerer.scores_file(out)}: every figure"], console)


@app.command()
def evaluate(
    subject: Annotated[
        str, typer.Argument(help="A run folder, or the hub name or folder of an adapter or of a model.")
    ],
    data: DataOption = None,
    sentences: SentencesOption = None,
    against: Annotated[
        list[str] | None, typer.Option("--against", help="Another run or model, or NAME=IT; repeatable.")
    ] = None,
    asr: AsrOption = None,
    speaker_encoder: SpeakerEncoderOption = "resemblyzer",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder; RUN/evaluation or evaluations/NAME by default.")
    ] = None,
    language: LanguageOption = "",
    strength: StrengthOption = 1.0,
    model: BaseOption = None,
    limit: LimitOption = None,
    seed: SeedOption = 0,
    batch_size: BatchSizeOption = 16,
    device: DeviceOption = "auto",
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Evaluate speech: words, speaker similarity, quality and stopping, beside real recordings and the untuned base.

    Run again after a stop, or with another --asr: only what is missing is done."""
    options = dict(locals()) | {"against": against or ()}
    del options["as_json"]
    from myna import api
    from myna.terminal import progress_bars, show_evaluation, show_notes, show_warnings

    with progress_bars() as progress:
        evaluation = api.evaluate(**options, progress=progress)
    show_notes(evaluation.notes, _console(stderr=True))
    if as_json:
        show_warnings(evaluation.warnings, _console(stderr=True))
        print(json.dumps(evaluation.to_json(), indent=2, ensure_ascii=False))
    else:
        show_evaluation(evaluation, _console())


@app.command()
def compare(
    subjects: Annotated[
        list[str],
        typer.Argument(
            help="Runs, adapters, models or folders of evaluations, or NAME=IT; or one folder that this has made."
        ),
    ],
    data: DataOption = None,
    sentences: SentencesOption = None,
    asr: AsrOption = None,
    speaker_encoder: SpeakerEncoderOption = "resemblyzer",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder; comparisons/NAMES by default.")] = None,
    language: LanguageOption = "",
    model: BaseOption = None,
    limit: LimitOption = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Sentences to hear blindly, of those compared.")] = 20,
    seed: SeedOption = 0,
    batch_size: BatchSizeOption = 16,
    device: DeviceOption = "auto",
    force: ForceOption = False,
    preferences: Annotated[
        list[Path] | None, typer.Option("--preferences", help="Answers that the page saved; repeatable.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Give the page to browsers on this machine and save their answers.")
    ] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="For --serve; 0 is any free one.")] = 8765,
    as_json: JsonOption = False,
) -> None:
    """Compare two or more systems on the same sentences: metrics side by side, and a page for blind listening.

    `myna compare runs/marta runs/again -o marta-again` makes marta-again/compare.html. It opens without a network:
    A or B by a key, names at the end, answers saved as a file.

    `myna compare marta-again --preferences anna.json --preferences ben.json` adds up what listeners answered and says
    which is preferred. `myna compare marta-again --serve` saves answers as they are given.

    What `myna evaluate` has generated and scored of a run is reused. A folder of an evaluation is taken as it is, with
    no weights opened: `runs/marta/evaluation`, and `runs/marta/evaluation:base` for the untuned model beside it."""
    options = {key: value for key, value in locals().items() if key not in ("preferences", "serve", "port", "as_json")}
    from myna import api
    from myna.core.errors import ConfigError
    from myna.evaluate import comparison as compared
    from myna.terminal import progress_bars, show_comparison, show_notes, show_preferences

    console, folder = _console(), Path(subjects[0])
    messages = _console(stderr=True)
    if len(subjects) > 1 or not compared.is_comparison(folder):
        if preferences:
            raise ConfigError(
                "preferences belong to a comparison that is made already",
                hint="myna compare FOLDER --preferences FILE, where FOLDER holds compare.json",
            )
        with progress_bars() as progress:
            comparison = api.compare(**options, progress=progress)
        folder = comparison.folder
        if not as_json:
            show_comparison(comparison, console)
    else:
        show_preferences(compared.add_preferences(folder, preferences or []), messages if as_json else console)
    if serve:
        compared.serve_comparison(folder, port, lambda message: show_notes([message], console))
        show_preferences(compared.add_preferences(folder, []), console)
    if as_json:
        print((folder / compared.COMPARISON_FILE).read_text(encoding="utf-8"), end="")


@app.command()
def demo(
    out: OutOption = Path("demo"),
    voice: Annotated[
        str | None, typer.Option("--voice", help="Your recordings, in any layout `prepare` reads; at least 8 clips.")
    ] = None,
    format: FormatOption = None,
    language: LanguageOption = "",
    model: Annotated[str, typer.Option("--model", "-m", help="Hub name or folder of the model.")] = "fledgling",
    asr: AsrOption = None,
    seed: SeedOption = 0,
    settings: SetOption = None,
    strength: Annotated[
        float | None,
        typer.Option("--strength", min=0.0, help="Scale of the LoRA when speaking; if not given, by the model."),
    ] = None,
) -> None:
    """A voice before and after fine-tuning: recordings, codes, a LoRA, evaluation, and a page to compare by ear."""
    options = dict(locals()) | {"settings": settings or ()}
    from myna.demo.run import run_demo
    from myna.terminal import DemoDisplay, show_demo

    with DemoDisplay() as display:
        result = run_demo(**options, progress=display.progress, observer=display)
    show_demo(result, _console())


@app.command()
def serve(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="A run, an adapter or a model: folder or hub name. Several runs, each perhaps as NAME=RUN, are served "
            "together on their base model."
        ),
    ],
    *,
    model: BaseOption = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is reachable from other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 is any free one.")] = 8000,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option("--allow-host", help="Name of a proxy in front, to which it answers too; repeatable."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="MYNA_API_KEY", help="Key that clients must send; better in MYNA_API_KEY."),
    ] = None,
    streams: Annotated[
        int, typer.Option("--streams", min=1, max=512, help="Requests that are spoken at a time; others wait.")
    ] = 16,
    queue: Annotated[int, typer.Option("--queue", min=0, help="Requests that wait; more are refused (429).")] = 64,
    positions: Annotated[
        int,
        typer.Option("--positions", min=256, help="Of one stream: reference, text and frames (25 a second) together."),
    ] = 2048,
    max_characters: Annotated[int, typer.Option("--max-characters", min=1, help="Of one text.")] = 4096,
    adapter_folders: Annotated[
        list[Path] | None,
        typer.Option(
            "--allow-adapter-loading",
            help="Folder below which adapters may be loaded and unloaded while the server runs; repeatable.",
        ),
    ] = None,
    adapter_rank: Annotated[int, typer.Option("--adapter-rank", min=1, help="Highest rank of adapters.")] = 64,
    voices: Annotated[
        Path | None, typer.Option("--voices", help="Folder of stored voices, if not your own of `myna voice`.")
    ] = None,
    asr: Annotated[
        str | None,
        typer.Option("--asr", help="Whisper that checks consents; without one no new voices are taken."),
    ] = None,
    watermark: Annotated[
        bool,
        typer.Option("--watermark/--no-watermark", help="Mark all speech. Speech without the mark is logged as such."),
    ] = True,
    strength: StrengthOption = 1.0,
    quantization: Annotated[
        Literal["none", "fp8", "int8", "nf4"],
        typer.Option("--quantization", help="Store the weights smaller: fp8 or int8 in half, nf4 in a quarter."),
    ] = "none",
    exact: Annotated[
        bool, typer.Option("--exact", help="Same bits alone and in a crowd, on a GPU too; somewhat slower.")
    ] = False,
    codec: CodecOption = None,
    device: DeviceOption = "auto",
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", min=0.0, help="That running requests have to end after SIGTERM.")
    ] = 30.0,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            help="Serve on a Ray cluster: its address, auto for the one this machine belongs to, or local for this "
            "machine alone. All of its machines see the same folders.",
        ),
    ] = None,
    replicas: Annotated[
        str,
        typer.Option(
            "--replicas",
            help="With --ray: servers, each on a card of its own. 1-4 starts with one, and others while more than "
            "three quarters of --streams are in use.",
        ),
    ] = "1",
    haproxy: Annotated[
        bool,
        typer.Option(
            "--haproxy", help="With --ray, on Linux: HAProxy in front of the replicas, which adds least to first audio."
        ),
    ] = False,
) -> None:
    """Serve a voice over HTTP, in the contract of OpenAI's speech API, with a page to try it.

    `myna serve runs/marta` opens http://127.0.0.1:8000; programs use http://127.0.0.1:8000/v1 as their base URL.
    """
    from myna.core.errors import ConfigError

    try:
        from myna.serve.context import ServerSettings
        from myna.serve.messages import EngineSettings
        from myna.serve.server import bind, run_server
        from myna.serve.sources import resolve_sources
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed, which serving needs", hint="pip install 'myna[serve]'"
        ) from error
    from myna.terminal import show_server

    if ray is None and (haproxy or replicas != "1"):
        raise ConfigError("--replicas and --haproxy are for Ray", hint="add --ray auto, or --ray local")
    listener = bind(host, port)
    source, adapters = resolve_sources(sources, model, keep_adapters=bool(adapter_folders))
    engine = EngineSettings(
        source,
        None if adapters else model,
        codec,
        device,
        quantization,
        exact,
        strength,
        adapters,
        adapter_rank if adapters or adapter_folders else None,
        streams,
        positions,
        queue,
        watermark,
    )
    folders = tuple(adapter_folders or ())
    port = listener.getsockname()[1]
    names = tuple(allowed_hosts or ())
    settings = ServerSettings(engine, host, port, api_key, max_characters, folders, voices, asr, drain_seconds, names)
    console = _console()
    if ray is None:
        run_server(settings, listener, lambda info: show_server(settings, info, console))
        return
    from myna.serve.ray_server import run_on_ray

    listener.close()
    run_on_ray(
        *(settings, ray, replicas),
        haproxy=haproxy,
        on_ready=lambda info: show_server(settings, info, console, replicas=replicas),
    )


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(help="Run folder, one of its checkpoints, or a LoRA adapter.")],
    out: OutOption,
    model: BaseOption = None,
    layout: Annotated[str, typer.Option("--layout", help="transformers or original (boson).")] = "transformers",
    strength: StrengthOption = 1.0,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Type of the weights: auto (the base model's), float32, bfloat16, float16.")
    ] = "auto",
    device: Annotated[str, typer.Option("--device", help="Where to merge: cpu, cuda, mps or auto.")] = "cpu",
) -> None:
    """Merge a LoRA into its base model: a model by itself, with tokenizer and codec, to speak with and to train on.

    Its logits are compared with the adapter's, and what was written is read back bit for bit; myna.json in it says how.
    """
    options = {key: value for key, value in locals().items() if key != "run"}
    from myna import api

    check = api.merge(run, **options)
    _console().print(
        f"{out}: a whole model in {check.dtype}, {layout} layout; {check.logits:,} logits differ from the adapter's by "
        f"at most {check.largest_difference:.2g} of {check.largest_logit:.3g}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="Model, run folder, one of its checkpoints, or a LoRA adapter.")],
    base: BaseOption = None,
    codec: CodecOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write verify.json and verify.html into.")
    ] = None,
    device: DeviceOption = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Generate less: a minute instead of several.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Verify a model on this device: our forward, speech, streams, merging and training paths against transformers'
    own and against one another. Exit code 1 where one differs, and the first difference is named.
    """
    from dataclasses import asdict

    from myna import api
    from myna.terminal import progress_bars, show_certificate

    with progress_bars() as progress:
        found = api.verify(model, out, model=base, codec=codec, device=device, quick=quick, progress=progress)
    if as_json:
        print(json.dumps({"verdict": found.verdict, "passed": found.passed, **asdict(found)}, indent=2))
    else:
        show_certificate(found, _console())
    raise typer.Exit(0 if found.passed else 1)


@model_app.command()
def stats(
    model: Annotated[str, typer.Argument(help="Hub name, folder, or `higgs-v2` for the true size without weights.")],
    lora: Annotated[
        str, typer.Option("--lora", help="comprehensive, audio_focused, attention_only or custom.")
    ] = "comprehensive",
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the LoRA.")] = 16,
    targets: Annotated[str, typer.Option("--targets", help="With custom: ends of module names, by commas.")] = "",
    train_modules: Annotated[
        str, typer.Option("--train-modules", help="Trained in full: text_head,audio_head,audio_embedding.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Count what a LoRA would train, on the meta device, without weights."""
    from myna import api
    from myna.terminal import show_model_stats

    numbers = api.model_stats(
        model, lora=lora, rank=rank, targets=_commas(targets), train_modules=_commas(train_modules)
    )
    if as_json:
        print(json.dumps(numbers, indent=2))
    else:
        show_model_stats(f"{model}, {lora}, rank {rank}", numbers, _console())


@model_app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Folder of a checkpoint or of a LoRA adapter.")],
    out: OutOption,
    layout: Annotated[str, typer.Option("--layout", help="transformers or original (boson).")] = "transformers",
) -> None:
    """Rewrite a checkpoint or an adapter from one layout to the other, bit for bit."""
    from myna import api

    _console().print(f"{api.convert(source, out, layout=layout)}: {layout} layout")


@model_app.command()
def extract(
    base: Annotated[str, typer.Argument(help="Hub name or folder of the model that was tuned.")],
    tuned: Annotated[str, typer.Argument(help="Hub name or folder of the fully trained model.")],
    out: OutOption,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the LoRA.")] = 16,
    lora: Annotated[str, typer.Option("--lora", help="Which projections get one.")] = "comprehensive",
) -> None:
    """Turn a fully trained model into a LoRA of its base, by truncated SVD, and say what is lost."""
    from myna import api

    report = api.extract_lora(base, tuned, out, rank=rank, lora=lora)
    _console().print(f"{out}: rank {rank}, relative error {report['error']:.2%}")


@model_app.command()
def tiny(
    out: OutOption,
    seed: Annotated[int, typer.Option("--seed", help="Of the weights.")] = 0,
    answers: Annotated[bool, typer.Option("--answers", help="One that listens and answers in words.")] = False,
) -> None:
    """Write a tiny random checkpoint of the real classes, to try everything on."""
    from myna import api

    api.make_tiny(out, seed=seed, answers=answers)
    can = "answer" if answers else "speak"
    _console().print(f"{out}: a tiny random model with its codec; it has to be trained before it can {can}")


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option("--model", "-m", help="Hub name or folder of a model to check.")] = None,
    ray: Annotated[
        str | None, typer.Option("--ray", help="Compare the nodes of the Ray cluster at this address, or auto.")
    ] = None,
    shared: Annotated[
        Path | None, typer.Option("--shared", help="With --ray: a folder that all nodes have to share.")
    ] = None,
    asr: Annotated[
        str | None, typer.Option("--asr", help="With --ray: the recogniser of `myna curate`, to compare as well.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, and a model if one is named; with --ray, compare the nodes of a cluster. Says what to type
    where something is wrong."""
    from dataclasses import asdict

    from myna.checks.doctor import run_doctor
    from myna.core.errors import ConfigError
    from myna.terminal import show_checks, show_nodes

    found: dict[str, Any] = {}
    if ray is not None:
        from myna.checks.cluster import check_cluster

        report = check_cluster(ray, shared=shared, model=model, asr=asr)
        checks = report.checks
        found["nodes"] = [asdict(node) for node in report.nodes]
        if not as_json:
            show_nodes(report.nodes, _console())
            show_checks(iter(checks), _console())
    elif shared is not None or asr is not None:
        raise ConfigError("--shared and --asr are for a cluster", hint="name it: --ray auto, or --ray HEAD:6379")
    else:
        checks = list(run_doctor(model)) if as_json else show_checks(run_doctor(model), _console())
    if as_json:
        print(json.dumps(found | {"checks": [asdict(check) for check in checks]}, indent=2))
    raise typer.Exit(1 if any(check.status == "failed" for check in checks) else 0)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _commas(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
