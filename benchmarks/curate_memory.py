"""Memory and speed of `myna curate` on recordings: peak PSS of all processes, CPU seconds, hours an hour.

python benchmarks/curate_memory.py long.wav --out scratch --asr base
python benchmarks/curate_memory.py long.wav --out scratch --minutes 40
python benchmarks/curate_memory.py long.wav --out scratch --decode-only

PSS counts a page that processes share once. Results go to docs/benchmarks/curate-memory.json, a row for each label,
also of a run that is interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import soundfile

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.figures import save_figures

from myna.core.io import curation_models_folder

RESULTS = Path(__file__).parents[1] / "docs/benchmarks/curate-memory.json"
INTERVAL_SECONDS = 1.0
DECODE = """
import sys
from pathlib import Path
from myna.listen.sounds import voice_activity
from myna.curate.recordings import decode_recording
from myna.curate.settings import ListenSettings
decode_recording(Path(sys.argv[1]), Path(sys.argv[2]), ListenSettings(part_minutes=float(sys.argv[3])), voice_activity)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path, help="a file, or a folder of them")
    parser.add_argument("--out", type=Path, required=True, help="empty folder for the curation")
    parser.add_argument("--asr", default="base")
    parser.add_argument("--models", default=str(curation_models_folder()))
    parser.add_argument("--minutes", type=float, help="of a file, from its beginning; by default all of it")
    parser.add_argument("--part-minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, help="by default those of myna curate")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--decode-only", action="store_true", help="decode into parts, and listen to nothing")
    parser.add_argument("--label", default="", help="of the row")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    recording = _beginning(arguments.recording, arguments.minutes, arguments.out)
    curated = arguments.out / "curated"
    command = [sys.executable, "-m", "myna", "curate", str(recording), "--out", str(curated), "--asr", arguments.asr]
    for setting in (
        f"models={arguments.models}",
        f"part_minutes={arguments.part_minutes}",
        f"device={arguments.device}",
    ):
        command += ["--set", f"listen.{setting}"]
    if arguments.workers:
        command += ["--workers", str(arguments.workers)]
    if arguments.decode_only:
        command = [sys.executable, "-c", DECODE, str(recording), str(curated), str(arguments.part_minutes)]
    files = sorted(recording.iterdir()) if recording.is_dir() else [recording]
    seconds = sum(float(soundfile.info(file).duration) for file in files)
    row = {
        "label": arguments.label or ("decode" if arguments.decode_only else "curate"),
        "recordings": len(files),
        "audio_minutes": round(seconds / 60, 1),
        "part_minutes": arguments.part_minutes,
        "device": arguments.device,
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
        "machine": platform.machine(),
    }
    row |= measured(command, seconds / 3600)
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else []
    save_figures(RESULTS, [*(one for one in rows if one["label"] != row["label"]), row])
    print(json.dumps(row, indent=1))


def _beginning(recording: Path, minutes: float | None, folder: Path) -> Path:
    if minutes is None or recording.is_dir():
        return recording
    info = soundfile.info(recording)
    short = folder / f"first-{minutes:g}-minutes.wav"
    samples, _ = soundfile.read(recording, frames=round(60 * minutes * info.samplerate), dtype="int16")
    soundfile.write(short, samples, info.samplerate, subtype="PCM_16")
    return short


def measured(command: list[str], hours: float) -> dict[str, Any]:
    """Run a command and watch its process tree; Ctrl-C ends it and keeps what was seen."""
    began = time.monotonic()
    process = subprocess.Popen(command)
    tree = psutil.Process(process.pid)
    peaks: dict[int, int] = {}
    cpu: dict[int, float] = {}
    peak, processes, interrupted = 0, 0, False
    try:
        while process.poll() is None:
            sizes = {}
            for one in [tree, *_children(tree)]:
                try:
                    sizes[one.pid] = one.memory_full_info().pss
                    times = one.cpu_times()
                    cpu[one.pid] = times.user + times.system
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue  # it ended meanwhile
            peaks |= {pid: max(size, peaks.get(pid, 0)) for pid, size in sizes.items()}
            if sum(sizes.values()) > peak:
                peak, processes = sum(sizes.values()), len(sizes)
            time.sleep(INTERVAL_SECONDS)
    except KeyboardInterrupt:
        interrupted = True
        process.wait()
    seconds, total = time.monotonic() - began, sum(cpu.values())
    driver = peaks.pop(process.pid, 0)
    row: dict[str, Any] = {
        "finished": process.returncode == 0 and not interrupted,
        "peak_tree_mb": round(peak / 1e6),
        "processes_at_peak": processes,
        "peak_driver_mb": round(driver / 1e6),
        "peak_worker_mb": round(max(peaks.values(), default=0) / 1e6),
        "wall_seconds": round(seconds),
        "cpu_seconds": round(total),
    }
    if row["finished"]:
        row |= {
            "cpu_seconds_per_audio_hour": round(total / hours),
            "audio_hours_per_hour": round(hours / seconds * 3600, 2),
            "audio_hours_per_hour_of_idle_cores": round((os.cpu_count() or 1) * hours / max(total, 1e-9) * 3600, 2),
        }
    return row


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


if __name__ == "__main__":
    main()
