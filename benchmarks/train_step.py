"""Benchmark of the training step on one GPU: matrix product ceiling, stock baselines, and ours, in one run.

python benchmarks/train_step.py --out FOLDER          all rows, within ten minutes on an H200
python benchmarks/train_step.py --rows ours-bf16      some rows, added to those in the folder
python benchmarks/train_step.py --parity              200 steps of each base, for their losses
python benchmarks/train_step.py --report              table, plot and page from train_step.json
python benchmarks/train_step.py --tiny --device cpu   everything at toy size

Every row is measured in a process of its own, so that neither memory nor compiled code is shared, and is written to
train_step.json at once. A row that fails reports the error, and the others continue. Weights are random and of the full
size; weights, adapters and utterances are the same for all, and so must be the first loss and gradient norm.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve()
ROOT = SCRIPT.parent.parent
if str(ROOT) not in sys.path:  # run as a script, which knows only its own folder
    sys.path.insert(0, str(ROOT))

from benchmarks.figures import BarColumn, bars_file, save_figures  # noqa: E402
from benchmarks.variants import BY_NAME, CEILINGS, PARITY, REFERENCE, VARIANTS, Variant  # noqa: E402

Row = dict[str, Any]
PAGE_FOLDER = ROOT / "docs" / "benchmarks"
RUN_SECONDS, ROW_SECONDS, FINAL_CEILING_SECONDS = 570.0, 150.0, 15.0
"""Limits of the whole run and of one row, and the reserve for the last measurement of the ceiling."""
PARITY_TOLERANCE = 0.01
MEASURED_BEGIN, MEASURED_END = "<!-- measured: written by benchmarks/train_step.py -->", "<!-- /measured -->"
"""The part of the page between these is generated."""


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Options of a measuring process besides the name of its row."""

    device: str
    tiny: bool

    @property
    def arguments(self) -> list[str]:
        return ["--device", self.device, *(["--tiny"] if self.tiny else [])]


def measure_in_process(name: str, options: RowOptions, out: Path) -> None:
    """Measure one row in this process."""
    # Imported here: the parent process need not load torch.
    from benchmarks.harness import Benchmark

    benchmark = Benchmark.of(options.device, options.tiny)
    row = benchmark.measure(BY_NAME[name])
    out.write_text(json.dumps({**row, "about": benchmark.about()}), encoding="utf-8")


def measure_in_subprocess(variant: Variant, options: RowOptions, seconds: float) -> Row:
    """Measure one row in a process with its own caches; a failure is returned as the row's `error`."""
    if variant.recipe and not (ROOT / "src/myna/recipes" / variant.recipe).is_file():
        return {"name": variant.name, "error": f"there is no recipes/{variant.recipe}"}
    if seconds <= 0:
        return {"name": variant.name, "error": "not measured: the time of the run was spent"}
    with tempfile.TemporaryDirectory() as scratch:
        out, log = Path(scratch, "row.json"), Path(scratch, "log.txt")
        command = [sys.executable, str(SCRIPT), "--only", variant.name, "--row", str(out), *options.arguments]
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor", "TRITON_CACHE_DIR": f"{scratch}/triton"}
        with log.open("w", encoding="utf-8") as written:
            process = subprocess.Popen(
                command, env={**os.environ, **caches}, stdout=written, stderr=written, start_new_session=True
            )
            try:
                code = process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                # With the compiler's workers, which are in the same session.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return {"name": variant.name, "error": f"not done after {seconds:.0f} s"}
        if code == 0:
            row: Row = json.loads(out.read_text(encoding="utf-8"))
            return row
        output = log.read_text(encoding="utf-8", errors="replace")
        print(output[-3000:], file=sys.stderr, flush=True)
        return {"name": variant.name, "error": failure(output, code)}


def failure(output: str, code: int) -> str:
    """Reason of a crash: the last unindented line of a traceback, with what follows it."""
    lines = output.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if line.partition(":")[0].endswith(("Error", "Exception"))]
    return "\n".join(lines[starts[-1] :])[:600] if starts else f"ended with {code}: {' '.join(lines[-3:])[:600]}"


class Results:
    """train_step.json, written after every row."""

    def __init__(self, folder: Path, *, keep: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "train_step.json"
        there = self.file.is_file() and keep
        self.facts: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8")) if there else {}
        self.facts.setdefault("rows", [])
        self._fresh: set[str] = set()

    def begin(self, command: str) -> None:
        self.facts |= {"date": datetime.now(UTC).date().isoformat(), "command": command}
        self.write()

    def ceiling(self, row: Row) -> None:
        """The higher of those that this run has measured; shares of this run's rows follow it."""
        self.facts |= row.pop("about", {})
        if "error" in row:
            self.facts["ceiling_error"] = row["error"]
        else:
            measured = self.facts.setdefault("ceilings_tflops", {}) if self._fresh else {}
            self.facts["ceilings_tflops"] = measured | {row["name"]: row["tflops"]}
            self.facts["ceiling_tflops"] = max(self.facts["ceilings_tflops"].values())
            self.facts["sustained_tflops"] = row["sustained_tflops"]
        self._fresh.add(row["name"])
        self.write()

    def add(self, row: Row, variant: Variant) -> None:
        self._fresh.add(row["name"])
        self.facts |= row.pop("about", {})
        row.pop("losses", None)
        where = "parity" if variant.kind == "parity" else "rows"
        self.facts[where] = sort_rows(
            [*(other for other in self.facts.get(where, []) if other["name"] != row["name"]), row]
        )
        self.write()

    def write(self) -> None:
        for row in self.facts["rows"]:
            if row["name"] in self._fresh and "model_tflops" in row and "ceiling_tflops" in self.facts:
                row["ceiling_tflops"] = self.facts["ceiling_tflops"]
                row["share_of_ceiling"] = row["model_tflops"] / row["ceiling_tflops"]
        compare_first_steps(self.facts["rows"])
        if "parity" in self.facts:
            compare_final_losses(self.facts["parity"])
        save_figures(self.file, self.facts)


def sort_rows(rows: Iterable[Row]) -> list[Row]:
    order = list(BY_NAME)
    return sorted(rows, key=lambda row: order.index(row["name"]))


def compare_first_steps(rows: list[Row]) -> None:
    """Whether first loss and gradient norm of each row agree with the reference; None without one."""
    reference = next((row for row in rows if row["name"] == REFERENCE and "error" not in row), None)
    for row in rows:
        if "error" in row:
            continue
        variant = BY_NAME[row["name"]]
        row["tolerance"] = variant.tolerance
        row["agrees"] = (
            None
            if reference is None
            else all(
                abs(row[column] / reference[column] - 1) <= variant.tolerance for column in sorted(variant.compares)
            )
        )


def compare_final_losses(rows: list[Row]) -> None:
    """Compare the final loss of each training with that of bf16."""
    reference = next((row for row in rows if row["name"] == PARITY[0].name and "error" not in row), None)
    for row in rows:
        if "error" not in row and reference is not None:
            row["relative_loss"] = row["final_loss"] / reference["final_loss"] - 1
            row["passed"] = abs(row["relative_loss"]) <= PARITY_TOLERANCE and row["final_loss"] < row["first_loss"]


def table(facts: dict[str, Any]) -> str:
    """Markdown table of the rows."""
    columns = (
        ("s/step", "seconds_per_step", "{:.3f}"),
        ("target audio s/s", "target_audio_seconds_per_second", "{:,.0f}"),
        ("tokens/s", "tokens_per_second", "{:,.0f}"),
        ("model TFLOP/s", "model_tflops", "{:.0f}"),
        ("of the ceiling", "share_of_ceiling", "{:.1%}"),
        ("peak GiB", "peak_gib", "{:.1f}"),
        ("fill", "fill", "{:.1%}"),
        ("first step s", "seconds_to_first_step", "{:.0f}"),
        ("host syncs", "host_syncs_per_step", "{}"),
        ("first loss", "first_loss", "{:.4f}"),
        ("gradient norm", "gradient_norm", "{:.4f}"),
    )
    lines = [f"| row | {' | '.join(head for head, _, _ in columns)} | agrees |", f"|---{'|---' * (len(columns) + 1)}|"]
    for row in facts["rows"]:
        if "error" in row:
            lines.append(f"| {row['name']} | {_first_line(row['error'])} {'|' * (len(columns) + 1)}")
            continue
        shown = [shape.format(row[key]) if row.get(key) is not None else "n/a" for _, key, shape in columns]
        agrees = {True: "yes", False: "NO", None: "n/a"}[row["agrees"]]
        lines.append(f"| {row['name']} | {' | '.join(shown)} | {agrees} (within {row['tolerance']:.0%}) |")
    return "\n".join(lines)


def parity_table(rows: Sequence[Row]) -> str:
    lines = ["| base | steps | first loss | final loss | against bf16 | within 1 % |", "|---|---|---|---|---|---|"]
    for row in rows:
        name = row["name"].removeprefix("parity-")
        if "error" in row:
            lines.append(f"| {name} | {_first_line(row['error'])} |||||")
            continue
        against = f"{row['relative_loss']:+.2%}" if "relative_loss" in row else "n/a"
        passed = {True: "yes", False: "NO", None: "n/a"}[row.get("passed")]
        losses = f"{row['first_loss']:.4f} | {row['final_loss']:.4f}"
        lines.append(f"| {name} | {row['steps']} | {losses} | {against} | {passed} |")
    return "\n".join(lines)


def summary(facts: dict[str, Any]) -> str:
    """The generated part of the page."""
    versions = ", ".join(f"{name} {number}" for name, number in facts.get("versions", {}).items())
    ceilings = facts.get("ceilings_tflops", {})
    measured = " and ".join(f"{tflops:.0f}" for tflops in ceilings.values())
    parts = [
        f"Measured on {facts['date']} on {facts.get('machine', 'nothing')} with {versions}.",
        f"The ceiling, a bf16 matrix product, was {measured} TFLOP/s at the start and the end; the higher one counts.",
        f"In a long row of products the GPU did {facts['sustained_tflops']:.0f}."
        if "sustained_tflops" in facts
        else "",
        *([facts["remark"]] if "remark" in facts else []),
        "",
        f"```bash\n{facts['command']}\n```",
        "",
        table(facts),
    ]
    if facts.get("parity"):
        parts += ["", "Losses after a short training from the same start, means of the last ten steps:", ""]
        parts += [parity_table(facts["parity"])]
    return "\n".join(parts)


def bar_chart_svg(facts: dict[str, Any]) -> str:
    """Draw the share of the ceiling, and target audio per second."""
    rows = [row for row in facts["rows"] if "error" not in row]
    shares = [row.get("share_of_ceiling", 0.0) for row in rows]
    audio = [row["target_audio_seconds_per_second"] for row in rows]
    columns = [
        BarColumn("share of the bf16 ceiling (line: 100 %)", shares, [f"{share:.1%}" for share in shares], 1.0),
        BarColumn("target-audio seconds per second", audio, [f"{one:,.0f}" for one in audio]),
    ]
    return bars_file([row["name"] for row in rows], columns, faint=[row["name"].startswith("stock") for row in rows])


def fill_page(page: str, facts: dict[str, Any]) -> str:
    """The page with its measured part replaced."""
    before, opened, rest = page.partition(MEASURED_BEGIN)
    _, closed, after = rest.partition(MEASURED_END)
    if not opened or not closed:
        raise ValueError(f"the page has no place for numbers: {MEASURED_BEGIN} ... {MEASURED_END}")
    return f"{before}{MEASURED_BEGIN}\n{summary(facts)}\n{MEASURED_END}{after}"


def report(folder: Path, facts: dict[str, Any]) -> None:
    (folder / "train_step.svg").write_text(bar_chart_svg(facts), encoding="utf-8")
    page = folder / "train_step.md"
    if page.is_file():
        page.write_text(fill_page(page.read_text(encoding="utf-8"), facts), encoding="utf-8")
    print(summary(facts), flush=True)


def run(chosen: Sequence[Variant], options: RowOptions, results: Results, *, budget: float, patience: float) -> None:
    """Measure all rows, between two measurements of the ceiling."""
    ends = time.monotonic() + budget
    training = any(variant.kind != "parity" for variant in chosen)
    before, after = CEILINGS
    if training:
        results.ceiling(measure_in_subprocess(before, options, patience))
    for variant in chosen:
        began = time.monotonic()
        left = ends - began - (FINAL_CEILING_SECONDS if training else 0)
        row = measure_in_subprocess(variant, options, min(patience, left))
        results.add(row, variant)
        shown = row.get("error") or {key: row[key] for key in ("model_tflops", "peak_gib", "final_loss") if key in row}
        print(f"{variant.name}: {shown} ({time.monotonic() - began:.0f} s)", flush=True)
    if training:
        results.ceiling(measure_in_subprocess(after, options, patience))


def all_passed(facts: dict[str, Any]) -> bool:
    """Whether no row of ours failed, all agree with the reference, and all parity trainings passed."""
    ours = [row for row in facts["rows"] if row["name"].startswith("ours")]
    began = all("error" not in row and row["agrees"] is not False for row in ours)
    return began and all(row.get("passed", False) for row in facts.get("parity", []))


def _first_line(text: str) -> str:
    return text.splitlines()[0][:160].replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGE_FOLDER)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy model and short clips")
    rows = [variant.name for variant in (*VARIANTS, *PARITY)]
    parser.add_argument("--rows", nargs="+", choices=rows, metavar="ROW", default=None)
    parser.add_argument("--parity", action="store_true", help="only the trainings whose losses are compared")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--budget", type=float, default=RUN_SECONDS, help="seconds for everything")
    parser.add_argument("--patience", type=float, default=ROW_SECONDS, help="seconds for one row")
    parser.add_argument("--only", choices=list(BY_NAME), help=argparse.SUPPRESS)
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    options = RowOptions(args.device, args.tiny)
    if args.only:
        measure_in_process(args.only, options, args.row)
        return 0
    some = bool(args.rows) or args.parity or args.report
    results = Results(args.out, keep=some)
    if not args.report:
        results.begin(f"python {' '.join(sys.argv)}")
        chosen = [BY_NAME[name] for name in args.rows] if args.rows else [] if args.parity else list(VARIANTS)
        chosen += PARITY if args.parity else ()
        run(chosen, options, results, budget=args.budget, patience=args.patience)
    report(args.out, results.facts)
    return 0 if all_passed(results.facts) else 1


if __name__ == "__main__":
    sys.exit(main())
