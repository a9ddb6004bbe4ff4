"""Start-up time: from Enter to the sound file for `myna speak` with fledgling, and to the answer of quick commands.

python benchmarks/startup.py --out docs/benchmarks
python benchmarks/startup.py --out FOLDER --repeats 1     a look at the whole, in half a minute

Every command runs in a process of its own, with warm file caches. Wall time is what a person waits on an idle machine;
CPU time (user and system) also compares two versions on a busy one. Where the time goes is measured in further runs:
phases by timers around the calls of the real command, imports by `python -X importtime`, which slows them a little.
Writes startup.json and startup.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.figures import save_figures

RECORDINGS = Path(__file__).parent.parent / "src" / "myna" / "demo" / "recordings"
REFERENCE, REFERENCE_TEXT = "nicola-learn-01.opus", "A bass voice is lower than a baritone voice."
TEXT = "I will see you tomorrow morning."
"""Two seconds of speech: 1.96 s with the seed that is the default."""
SPEAK = (
    *("speak", TEXT, "--model", "fledgling", "--reference", str(RECORDINGS / REFERENCE)),
    *("--reference-text", REFERENCE_TEXT, "--out", "speech.wav", "--force"),
)
MYNA = "from myna.commands import main; main()"
CASES: dict[str, tuple[tuple[str, ...], float | None]] = {
    "python -c pass": (("-c", "pass"), None),
    "import myna": (("-c", "import myna"), 0.2),
    "myna --help": (("-c", MYNA, "--help"), 1.0),
    "myna train nowhere.yaml (an error)": (("-c", MYNA, "train", "nowhere.yaml"), 1.0),
    "myna speak --model ./nowhere (an error)": (("-c", MYNA, *SPEAK[:3], "./nowhere", *SPEAK[4:]), 1.0),
    "myna speak, two seconds of speech": (("-c", MYNA, *SPEAK), 3.5),
}
"""Arguments for Python, and the seconds of wall time on two idle cores that are the target."""
IMPORT_ROWS = 12

PHASES = """
import sys, time
started, report, *arguments = sys.argv[1:]
marks, inside = [("interpreter", time.time() - float(started))], {}
def mark(name):
    global before
    now = time.perf_counter()
    marks.append((name, now - before))
    before = now
def timed(owner, name, phase):
    function = getattr(owner, name)
    def wrapper(*positional, **keywords):
        begin = time.perf_counter()
        try:
            return function(*positional, **keywords)
        finally:
            inside[phase] = inside.get(phase, 0.0) + time.perf_counter() - begin
    setattr(owner, name, wrapper)
before = time.perf_counter()
import myna; mark("import myna")
from myna.commands import build_app, main
build_app(["speak"]); mark("import the command line")
import torch, transformers; mark("import torch and transformers")
import myna.speak.loading
from myna.models.higgs_v2.family import HiggsV2; mark("import the model's code")
import myna.models.mel_codec, myna.speak.voice
from myna.speak.batch import SpeechBatch
from myna.speak.engine import Engine, Speech; mark("import the rest")
timed(HiggsV2, "load_model", "load the model")
timed(HiggsV2, "load_codec", "load the codec")
timed(Engine, "encode_reference", "encode the reference")
timed(SpeechBatch, "step", "generate codes and decode them")
timed(Speech, "save", "write the file")
sys.argv[1:] = arguments
try:
    main()
except SystemExit as end:
    assert not end.code, end
mark("command")
total = marks.pop()[1]
marks += [*inside.items(), ("parse, render, show, end", total - sum(inside.values()))]
import json, pathlib
pathlib.Path(report).write_text(json.dumps(dict(marks)))
"""
"""The command with timers around its steps; the first arguments are when it was started, and where to report."""


def run_once(arguments: tuple[str, ...], folder: Path) -> tuple[float, float]:
    """Wall and CPU seconds of one process."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, _, usage = os.wait4(process.pid, 0)
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime


def measure_case(name: str, repeats: int, folder: Path) -> dict[str, Any]:
    arguments, target = CASES[name]
    run_once(arguments, folder)
    walls, cpus = zip(*(run_once(arguments, folder) for _ in range(repeats)), strict=True)
    row = {"name": name, "wall": statistics.median(walls), "cpu": statistics.median(cpus), "target": target}
    print(f"{name}: {row['wall']:.2f} s, CPU {row['cpu']:.2f} s", flush=True)
    return row | {"walls": walls, "cpus": cpus}


def measure_phases(repeats: int, folder: Path) -> dict[str, float]:
    """Median seconds of each phase of `myna speak`."""
    report, runs = folder / "phases.json", []
    for _ in range(repeats):
        command = [sys.executable, "-c", PHASES, str(time.time()), str(report), *SPEAK]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        runs.append(json.loads(report.read_text()))
    return {phase: statistics.median(run[phase] for run in runs) for phase in runs[0]}


def measure_imports(folder: Path) -> dict[str, float]:
    """Seconds of import by top-level package, for `myna speak`; the most expensive first."""
    command = [sys.executable, "-X", "importtime", "-c", MYNA, *SPEAK]
    result = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    seconds: dict[str, float] = defaultdict(float)
    for microseconds, module in re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s+([\w.]+)$", result.stderr, re.M):
        package = module.partition(".")[0]
        package = "the standard library" if package in sys.stdlib_module_names else package
        seconds[package] += int(microseconds) / 1e6
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def page(facts: dict[str, Any]) -> str:
    cases = [
        f"| `{row['name']}` | {row['wall']:.2f} | {row['cpu']:.2f} | {row['target'] or ''} |" for row in facts["cases"]
    ]
    phases = [f"| {name} | {seconds:.2f} |" for name, seconds in facts["phases"].items()]
    packages = list(facts["imports"].items())
    imports = [f"| {name} | {seconds:.2f} |" for name, seconds in packages[:IMPORT_ROWS]]
    rest = sum(seconds for _, seconds in packages[IMPORT_ROWS:])
    return "\n".join(
        [
            "# From Enter to the answer",
            "",
            "How long does a command take to start, and where does the time go?",
            "",
            "```bash",
            "python benchmarks/startup.py --out docs/benchmarks",
            "```",
            "",
            f"Measured on {facts['date']} with {facts['cores']} cores ({facts['machine']}; load before: "
            f"{facts['load_before']:.1f}), Python {facts['python']}, torch {facts['torch']} and transformers "
            f"{facts['transformers']}; medians of {facts['repeats']}, warm file caches. Targets: two idle cores.",
            "",
            "| command | wall s | CPU s | target s |",
            "|---|---|---|---|",
            *cases,
            "",
            f"The sentence is “{TEXT}”, spoken by fledgling in the voice of a shipped recording.",
            "",
            "| phase of `myna speak` | s |",
            "|---|---|",
            *phases,
            f"| together | {sum(facts['phases'].values()):.2f} |",
            "",
            "| imports of `myna speak`, by package, under `-X importtime` | s |",
            "|---|---|",
            *imports,
            f"| {len(packages) - IMPORT_ROWS} others | {rest:.2f} |",
            "",
            "The garbage collector is paused until everything is imported.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for startup.json and startup.md")
    parser.add_argument("--repeats", type=int, default=7, help="runs of which the median is taken")
    arguments = parser.parse_args()
    facts: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "repeats": arguments.repeats,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        facts["cases"] = [measure_case(name, arguments.repeats, folder) for name in CASES]
        assert (folder / "speech.wav").is_file(), "myna speak wrote nothing"
        facts["phases"] = measure_phases(arguments.repeats, folder)
        facts["imports"] = measure_imports(folder)
    facts["load_after"] = os.getloadavg()[0]
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_figures(arguments.out / "startup.json", facts)
    (arguments.out / "startup.md").write_text(page(facts), encoding="utf-8")
    print(page(facts))


if __name__ == "__main__":
    main()
