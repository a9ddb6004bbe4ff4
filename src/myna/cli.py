"""The door. Every command is here, and nothing but commands: work is done in the rooms behind it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import TextColumn

from myna import __version__
from myna.errors import MynaError

app = typer.Typer(
    name="myna",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="""Teach a speech language model a voice: recordings in, speech out.

    The way through:  **prepare** turns recordings into codes,  **train** turns codes into a LoRA,
    **speak** turns text into sound.  `myna demo` walks it end to end.""",
)
model_app = typer.Typer(no_args_is_help=True, help="Look at checkpoints and convert them.")
app.add_typer(model_app, name="model")

console = Console()
complaints = Console(stderr=True)

ModelOption = Annotated[str, typer.Option("--model", "-m", help="Hub name or folder of the model.")]
CodecOption = Annotated[
    str | None, typer.Option("--codec", help="Hub name or folder of another codec than the model's.")
]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")]
FormatOption = Annotated[
    str | None, typer.Option("--format", help="Layout of the source; found by looking if left out.")
]
MaxBadOption = Annotated[float, typer.Option("--max-bad", help="Share of bad items above which the import fails.")]
LanguageOption = Annotated[str, typer.Option("--language", help="Language of utterances whose source names none.")]
SpeakerOption = Annotated[str, typer.Option("--speaker", help="Speaker of utterances whose source names none.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
RecogniserOption = Annotated[
    str | None,
    typer.Option("--recogniser", help="Folder or name of a Whisper (base, transformers:base), to count wrong words."),
]
VoicesOption = Annotated[
    str,
    typer.Option("--voices", help="Ear for voices: resemblyzer, ecapa:FILE.safetensors, wavlm, or a WavLM's folder."),
]
StrengthOption = Annotated[
    float,
    typer.Option("--strength", min=0.0, help="Share of what the run's LoRA learned: less keeps more of the old."),
]


def main() -> None:
    """Errors a person can act on are shown without a traceback."""
    try:
        app()
    except MynaError as error:
        complaints.print(
            f"[bold red]error[/] {_escape(error.what)}\n[bold]  → [/]{_escape(error.hint)}",
            highlight=False,
            soft_wrap=True,
        )
        sys.exit(1)


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
    from myna.workflow import import_into

    import_into(source, out, format, max_bad, language, speaker)


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
) -> None:
    """Import a source and turn its clips into codes, once. Run it again after a stop: only what is new is encoded."""
    from myna.workflow import prepare as run_prepare

    run_prepare(source, out, model, codec, format, max_bad, language, speaker, device)


@app.command()
def split(
    data: Annotated[Path, typer.Argument(help="A folder made by `myna prepare`.")],
    speakers: Annotated[
        int, typer.Option("--speakers", min=0, help="Speakers to hold out, for voices never heard.")
    ] = 0,
    texts: Annotated[int, typer.Option("--texts", min=0, help="Texts to hold out, for voices that are known.")] = 10,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Another seed, another choice.")] = 0,
) -> None:
    """Keep some speakers and texts to judge by. Made once: DATA/parts holds a prepared folder for each part."""
    from myna.data.split import PARTS
    from myna.data.split import split as run_split

    made = run_split(data, speakers=speakers, texts=texts, seed=seed)
    for part in PARTS:
        if ids := made.ids(part):
            console.print(f"{data / 'parts' / part}: {len(ids)} utterances", highlight=False, soft_wrap=True)


@app.command()
def render(
    data: Annotated[Path, typer.Argument(help="A folder made by `myna prepare`.")],
    model: ModelOption,
    id: Annotated[str | None, typer.Option("--id", help="Utterance to show; the first one if left out.")] = None,
    count: Annotated[int, typer.Option("--count", "-n", help="How many utterances to show.")] = 1,
    frames: Annotated[bool, typer.Option("--frames", help="Show every frame of every clip.")] = False,
    settings: Annotated[list[str] | None, typer.Option("--set", help="data.* and loss.* settings, KEY=VALUE.")] = None,
) -> None:
    """Print conversations token by token, as training sees them: green is learned, the rest is context."""
    from myna.config import override, parse_recipe
    from myna.errors import DataError
    from myna.models import open_family
    from myna.models.token_view import token_view
    from myna.train.loop import make_loader

    tree: dict[str, Any] = {"model": {"source": model}, "data": {"train": str(data)}, "train": {"steps": 1}}
    for setting in settings or []:
        override(tree, setting)
    recipe = parse_recipe(tree, where="--set")
    family = open_family(model)
    loader = make_loader(recipe, family, data)
    targets = loader.pairing.targets
    if id is not None:
        targets = targets.named(id)
        if not targets:
            raise DataError(f"{data} has no target {id}", hint="the ids stand in its manifest.jsonl")
    for target in targets[:count]:
        console.print(token_view(loader.sequence(target, epoch=0), family, all_frames=frames), soft_wrap=True)


@app.command()
def train(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe; recipes/ has some to start from.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder; runs/NAME by default.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Change a setting: KEY=VALUE.")] = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Cards of this machine to use, a process each.")] = 1,
    resume: Annotated[Path | None, typer.Option("--resume", help="Go on with this run instead of a recipe.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all, plan the memory, train nothing.")] = False,
) -> None:
    """Train what a recipe says, into a run folder. Every setting can be changed with --set train.steps=100."""
    from myna.errors import ConfigError
    from myna.workflow import how_to_try
    from myna.workflow import resume as go_on
    from myna.workflow import train as run_training

    if (recipe is None) == (resume is None) or (resume is not None and (out is not None or dry_run)):
        raise ConfigError(
            "give a recipe, or --resume with a run and nothing else that says where or what",
            hint="myna train recipes/NAME.yaml, or myna train --resume runs/NAME",
        )
    run = go_on(resume, settings, gpus) if resume is not None else None
    run = run_training(recipe, out, settings, gpus, dry_run) if recipe is not None else run
    if run is None or not run.is_finished:
        return
    console.print(f"\n{how_to_try(run)}", soft_wrap=True)


@app.command()
def speak(
    text: Annotated[str, typer.Argument(help="What to say; [SPEAKER0] ... [SPEAKER1] ... for several voices.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Sound file to write: .wav, .flac, .ogg, .mp3.")],
    voice: Annotated[
        list[Path] | None, typer.Option("--voice", help="Recording that sets the voice; repeatable.")
    ] = None,
    voice_text: Annotated[
        list[str] | None, typer.Option("--voice-text", help="What is said in it; repeatable.")
    ] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Run folder whose voice to use.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Hub name or folder of an untuned model.")] = None,
    strength: StrengthOption = 1.0,
    codec: CodecOption = None,
    scene: Annotated[str, typer.Option("--scene", help="A sentence about the room or the manner.")] = "",
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", min=0.0, help="0 always takes the likeliest; if not given, as the model asks."),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", min=0, help="Choose among the likeliest k codes, 0: all; or as the model asks."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", min=0.0, max=1.0, help="Choose within this probability; or as the model asks."),
    ] = None,
    max_seconds: Annotated[float, typer.Option("--max-seconds", min=0.1, help="Where a runaway is cut.")] = 60.0,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same speech.")] = 0,
    device: DeviceOption = "auto",
    codes: Annotated[Path | None, typer.Option("--codes", help="Also write the codes, as .npy.")] = None,
) -> None:
    """Say something, in the voice of a recording, with a model as it is or as a run has tuned it."""
    import numpy as np

    from myna.audio.files import check_suffix, write
    from myna.errors import SpeakError
    from myna.speak.engine import SpeechRequest
    from myna.workflow import open_engine, progress

    check_suffix(out)
    voices, voice_texts = voice or [], voice_text or []
    if len(voices) != len(voice_texts):
        raise SpeakError(
            f"{len(voices)} --voice but {len(voice_texts)} --voice-text", hint="say what is spoken in each recording"
        )
    engine = open_engine(run=run, model=model, codec=codec, device=device, strength=strength)
    line = SpeechRequest(
        text, tuple(engine.voice(*pair) for pair in zip(voices, voice_texts, strict=True)), scene, id=text
    )
    asked: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    said = {name: value for name, value in asked.items() if value is not None}
    sampling = replace(engine.family.sampling, max_seconds=max_seconds, seed=seed, **said)
    with progress("speaking", TextColumn("{task.fields[heard]}")) as bar:
        task = bar.add_task("speaking", total=None, heard="")
        rate = engine.codec.frame_rate
        speech = engine.speak([line], sampling, lambda n: bar.update(task, completed=n, heard=f"{n / rate:.1f} s"))[0]
    if not len(speech.samples):
        raise SpeakError("the model ended at once: there is nothing to hear", hint="try another --seed, or train more")
    write(out, speech.samples, engine.codec.sample_rate)
    if codes is not None:
        np.save(codes, speech.codes)
    end = "stopped by itself" if speech.stopped else f"[yellow]cut at --max-seconds {max_seconds:g}: it found no end[/]"
    console.print(f"{out}: {len(speech.codes) / rate:.2f} s, {end}")


@app.command()
def listen(
    what: Annotated[list[Path], typer.Argument(help="Recordings, or one folder made by `myna prepare` with answers.")],
    run: Annotated[Path | None, typer.Option("--run", help="Run folder of a model that was taught to answer.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Hub name or folder of an untuned model.")] = None,
    ask: Annotated[str | None, typer.Option("--ask", help="What to ask; by default to rate the pronunciation.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSONL file for the answers to a folder.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Where a runaway is cut.")] = 512,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Recordings answered at once.")] = 16,
    constrained: Annotated[
        bool, typer.Option("--constrained", help="Hold answers to the JSON of an assessment: all can be read.")
    ] = False,
    device: DeviceOption = "auto",
) -> None:
    """Have a model that listens answer: print what it says of recordings, or compare its answers with a folder's."""
    from myna.data.dataset import PREPARED, PreparedDataset
    from myna.data.pronunciation.assessment import QUESTION
    from myna.data.pronunciation.grammar import AnswerGrammar
    from myna.errors import SpeakError
    from myna.workflow import judge_answers, open_listener
    from myna.workflow import listen as run_listen

    folder = what[0] if (what[0] / PREPARED).is_file() else None
    if folder is not None and (len(what) > 1 or out is None or ask is not None):
        raise SpeakError(
            f"{folder} is a prepared folder, which comes alone, with questions of its own and an --out",
            hint=f"myna listen {folder} --run RUN --out answers.jsonl",
        )
    listener = open_listener(run=run, model=model, device=device)
    listener.grammar, listener.together = AnswerGrammar() if constrained else None, batch
    if folder is None or out is None:
        clips = [listener.recording(path, ask if ask is not None else QUESTION) for path in what]
        for clip, said in zip(clips, listener.answer(clips, max_tokens), strict=True):
            console.print(f"{clip.id}: {said.text}", markup=False, highlight=False, soft_wrap=True)
        return
    corpus = PreparedDataset.open(folder)
    rows = run_listen(listener, corpus, out, max_tokens)
    if table := judge_answers(corpus, rows):
        console.print(table)
    right = sum(row["answer"] == row["due"] for row in rows)
    console.print(f"{out}: {right} of {len(rows)} answers are as they were due, letter for letter")


@app.command()
def evaluate(
    subject: Annotated[str, typer.Argument(help="A run folder, or the hub name or folder of a model.")],
    data: Annotated[
        Path | None, typer.Option("--data", help="Prepared folder; a run's own held-out one by default.")
    ] = None,
    lines: Annotated[
        Path | None, typer.Option("--lines", help="Text file, a sentence a line; or a list as of seed-tts-eval.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option("--against", help="Another run or model, or NAME=IT; repeatable.")
    ] = None,
    recogniser: RecogniserOption = None,
    voices: VoicesOption = "resemblyzer",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder; RUN/evaluation or evaluations/NAME by default.")
    ] = None,
    language: LanguageOption = "",
    strength: StrengthOption = 1.0,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Judge so many lines; speakers take turns.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Same seed, same lines, same speech.")] = 0,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Lines spoken at once.")] = 16,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print evaluation.json.")] = False,
) -> None:
    """Judge by ear: words, voice, quality and stopping, beside the real recordings and the untuned base.

    Run again after a stop, or with another recogniser: only what is missing is done."""
    from myna.evaluate.runner import Asked, folder_of, show_summary
    from myna.evaluate.runner import evaluate as run_evaluation

    asked = Asked(
        *(subject, data, lines, tuple(against or ()), out, recogniser, language, seed, limit, batch, device, voices),
        strength=strength,
    )
    summary = run_evaluation(asked, complaints)
    if as_json:
        print(json.dumps(summary.to_json(), indent=2, ensure_ascii=False))
    else:
        show_summary(summary, folder_of(asked), console)


@app.command()
def compare(
    subjects: Annotated[
        list[str],
        typer.Argument(help="Runs, models or folders of evaluations, or NAME=IT; or one folder that this has made."),
    ],
    data: Annotated[
        Path | None, typer.Option("--data", help="Prepared folder; the first run's held-out one by default.")
    ] = None,
    lines: Annotated[
        Path | None, typer.Option("--lines", help="Text file, a sentence a line; or a list as of seed-tts-eval.")
    ] = None,
    recogniser: RecogniserOption = None,
    voices: VoicesOption = "resemblyzer",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder; comparisons/NAMES by default.")] = None,
    language: LanguageOption = "",
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Compare so many lines; speakers take turns.")
    ] = None,
    listen: Annotated[int, typer.Option("--listen", min=1, help="Lines to hear blindly, of those compared.")] = 20,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Same seed, same lines, same speech, same order.")] = 0,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Lines spoken at once.")] = 16,
    device: DeviceOption = "auto",
    preferences: Annotated[
        list[Path] | None, typer.Option("--preferences", help="Answers that the page saved; repeatable.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Give the page to browsers on this machine and save their answers.")
    ] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="For --serve; 0 is any free one.")] = 8765,
    as_json: Annotated[bool, typer.Option("--json", help="Print compare.json.")] = False,
) -> None:
    """Two or more on the same lines: figures side by side, and a page to hear them without knowing who it is.

    `myna compare runs/marta runs/again -o marta-again` makes marta-again/compare.html. It opens without a network:
    A or B by a key, names at the end, answers saved as a file.

    `myna compare marta-again --preferences anna.json --preferences ben.json` adds up what listeners answered and says
    who is preferred. `myna compare marta-again --serve` saves answers as they are given.

    What `myna evaluate` has said and heard of a run is taken over. A folder of an evaluation is taken as it is, with
    no weights opened: `runs/marta/evaluation`, and `runs/marta/evaluation:base` for the untuned model beside it."""
    from myna.compare import runner
    from myna.errors import ConfigError

    folder = Path(subjects[0])
    if len(subjects) > 1 or not runner.is_comparison(folder):
        if preferences:
            raise ConfigError(
                "preferences belong to a comparison that is made already",
                hint="myna compare FOLDER --preferences FILE, where FOLDER holds compare.json",
            )
        asked = runner.Asked(
            tuple(subjects), data, lines, out, recogniser, language, seed, limit, listen, batch, device, voices
        )
        made, folder = runner.compare(asked, complaints)
        if not as_json:
            runner.show_comparison(made, folder, console)
    else:
        runner.show_preferences(runner.add_preferences(folder, preferences or []), complaints if as_json else console)
    if serve:
        runner.serve(folder, port, console)
        runner.show_preferences(runner.add_preferences(folder, []), console)
    if as_json:
        print((folder / runner.COMPARED).read_text(encoding="utf-8"), end="")


@app.command()
def demo(
    out: OutOption = Path("demo"),
    voice: Annotated[
        str | None, typer.Option("--voice", help="Your recordings, in any layout `prepare` reads; at least 8 clips.")
    ] = None,
    format: FormatOption = None,
    language: LanguageOption = "",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Hub name or folder of the model; fledgling by default.")
    ] = None,
    recogniser: Annotated[
        str | None, typer.Option("--recogniser", help="Folder or name of a Whisper (base), to count wrong words with.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Same seed, same demo.")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting of the recipe, e.g. train.steps=30; repeatable.")
    ] = None,
    strength: Annotated[
        float | None,
        typer.Option("--strength", min=0.0, help="Share of what is learned to speak with; if not given, by the model."),
    ] = None,
) -> None:
    """A voice before and after: recordings, codes, speech, a LoRA, speech again, and a page to compare them."""
    from myna.demo.run import MODEL, Asked, run_demo

    asked = Asked(out, voice, format, language, model or MODEL, seed, recogniser, tuple(set_ or ()), strength)
    run_demo(asked, console)


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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count what a LoRA would train, on the meta device, without weights."""
    from rich.table import Table

    from myna.config import AdaptSettings, parse_settings
    from myna.models import open_family
    from myna.models.stats import model_stats as count

    settings = parse_settings(
        AdaptSettings,
        {"mode": lora, "rank": rank, "targets": _commas(targets), "train_modules": _commas(train_modules)},
        where="--lora",
    )
    numbers = count(open_family(model), settings)
    if as_json:
        print(json.dumps(numbers, indent=2))
        return
    table = Table(title=f"{model}, {lora}, rank {rank}", show_header=False)
    for key, value in numbers.items():
        table.add_row(
            key, f"{value:,}" if isinstance(value, int) else f"{value:.4%}" if isinstance(value, float) else str(value)
        )
    console.print(table)


@model_app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Folder of a checkpoint or of a LoRA adapter.")],
    out: OutOption,
    layout: Annotated[str, typer.Option("--layout", help="transformers or original (boson).")] = "transformers",
) -> None:
    """Rewrite a checkpoint or an adapter from one layout to the other, bit for bit."""
    from myna.models import convert as convert_checkpoint

    convert_checkpoint(source, out, layout)
    console.print(f"{out}: {layout} layout")


@model_app.command()
def extract(
    base: Annotated[str, typer.Argument(help="Hub name or folder of the model that was tuned.")],
    tuned: Annotated[str, typer.Argument(help="Hub name or folder of the fully trained model.")],
    out: OutOption,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the LoRA.")] = 16,
    mode: Annotated[str, typer.Option("--lora", help="Which projections get one.")] = "comprehensive",
) -> None:
    """Turn a fully trained model into a LoRA of its base, by truncated SVD, and say what is lost."""
    from myna.models.extract import extract as extract_adapter

    report = extract_adapter(base, tuned, out, rank, mode=mode)
    console.print(f"{out}: rank {rank}, relative error {report['error']:.2%}")


@model_app.command()
def tiny(
    out: OutOption,
    seed: Annotated[int, typer.Option("--seed", help="Of the weights.")] = 0,
    listens: Annotated[bool, typer.Option("--listens", help="One that listens and answers in words.")] = False,
) -> None:
    """Write a tiny random checkpoint of the real classes, to try everything on."""
    from myna.models import save_tiny

    save_tiny(out, seed=seed, listens=listens)
    can = "answer" if listens else "speak"
    console.print(f"{out}: a tiny random model with its codec; it has to be trained before it can {can}")


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option("--model", "-m", help="Hub name or folder of a model to check.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine, and a model if one is named. Says what to type where something is wrong."""
    from dataclasses import asdict

    from myna.doctor import examine, show

    checks = list(examine(model)) if as_json else show(examine(model), console)
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in checks]}, indent=2))
    raise typer.Exit(1 if any(check.status == "failed" for check in checks) else 0)


@app.command()
def version() -> None:
    """Print the version."""
    console.print(__version__)


def _commas(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
