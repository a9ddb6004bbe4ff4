"""`myna curate` on a machine with a GPU and no network: what it needs is packed here, and measured there.

python benchmarks/curate_gpu.py pack RECORDINGS    # here: .cache/gpu/piece-*, about 150 MB with two hours
python benchmarks/curate_gpu.py unpack             # there, once all pieces lie in .cache/gpu
PYTHONPATH=src:.cache/gpu/site python benchmarks/curate_gpu.py run

RECORDINGS is a folder of files that libsndfile reads; many short ones are decoded at once, one long one by one process.
Weights of Whisper and of the speaker encoder travel as int8 rows. CTranslate2 and PyAV are left out: faster-whisper
imports them by name, and nothing of them is called where Whisper runs by transformers. The machine has torch,
transformers, onnxruntime and scipy of its own. `run --device cpu` is a dry run.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from myna.core.io import curation_models_folder, whisper_folder

ROOT = Path(".cache/gpu")
WHISPER, CURATION = whisper_folder(), curation_models_folder()
PACKAGES = (
    *("faster-whisper", "soxr", "soundfile", "cffi", "pycparser", "pyarrow", "rapidfuzz", "psutil", "pydantic"),
    *(
        "pydantic-core",
        "annotated-types",
        "typing-inspection",
        "cyclopts",
        "attrs",
        "docstring-parser",
        "rich-rst",
        "rich",
        "markdown-it-py",
    ),
    *("mdurl", "pygments"),
)
UNUSED = (
    "flight",
    "_s3",
    "s3fs",
    "gandiva",
    "_orc",
    "_gcs",
    "_azure",
    "_hdfs",
    "/include/",
    "/tests/",
    "/src/",
    ".pxd",
)
"""Parts of pyarrow that are left out, by what is in their names."""
STAND_INS = {
    "ctranslate2": "class StorageView: ...\nclass models:\n    Whisper = WhisperGenerationResult = object\n",
    "av": "",
}


def pack(recordings: Path, piece_mb: int, python_version: str) -> None:
    scratch = ROOT / "bundle"
    shutil.rmtree(ROOT, ignore_errors=True)
    (scratch / "site").mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", python_version, "-c", "constraints.txt", "-d", str(ROOT / "wheels"), *PACKAGES]
    for platform in ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64"):
        command += ["--platform", platform]
    subprocess.run(command, check=True)
    for wheel in sorted((ROOT / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not any(part in name for part in UNUSED)]
            archive.extractall(scratch / "site", names if wheel.name.startswith("pyarrow") else None)
    for name, content in STAND_INS.items():
        (scratch / "site" / name).mkdir()
        (scratch / "site" / name / "__init__.py").write_text(content)
    whisper = scratch / "whisper-base"
    subprocess.run([sys.executable, "tools/whisper_to_transformers.py", str(WHISPER), str(whisper)], check=True)
    shutil.copytree(CURATION, scratch / "curation")
    for file in (whisper / "model.safetensors", scratch / "curation/ecapa.safetensors"):
        shrink(file)
    shutil.copytree(recordings, scratch / "recordings")
    packed = io.BytesIO()
    with lzma.open(packed, "wb", preset=1) as compressed, tarfile.open(fileobj=compressed, mode="w|") as archive:
        archive.add(scratch, ".")
    content, size = packed.getvalue(), piece_mb * 10**6
    for number, start in enumerate(range(0, len(content), size)):
        (ROOT / f"piece-{number:02d}").write_bytes(content[start : start + size])
    print(f"{ROOT}: {len(content) / 1e6:.0f} MB in pieces of {piece_mb}")


def shrink(file: Path) -> None:
    """Matrices as int8 with a scale for each row, under the names NAME|int8 and NAME|scale."""
    weights = {}
    for name, tensor in load_file(file).items():
        rows = tensor.float().reshape(len(tensor), -1) if tensor.ndim >= 2 else tensor.new_empty(0)
        if rows.numel() < 4096:
            weights[name] = tensor.contiguous()
            continue
        scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        weights[f"{name}|int8"] = (rows / scale).round().to(torch.int8).reshape(tensor.shape)
        weights[f"{name}|scale"] = scale[:, 0].contiguous()
    save_file(weights, file)


def widen(file: Path) -> None:
    stored = load_file(file)
    weights = {}
    for name, tensor in stored.items():
        if name.endswith("|int8"):
            rows = tensor.float().reshape(len(tensor), -1) * stored[name.replace("|int8", "|scale")][:, None]
            weights[name.removesuffix("|int8")] = rows.reshape(tensor.shape)
        elif not name.endswith("|scale"):
            weights[name] = tensor.float() if tensor.is_floating_point() else tensor
    save_file(weights, file, metadata={"format": "pt"})


def unpack() -> None:
    pieces = sorted(ROOT.glob("piece-*"))
    packed = io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))
    with lzma.open(packed) as content, tarfile.open(fileobj=content, mode="r|") as archive:
        archive.extractall(ROOT, filter="data")
    for file in (ROOT / "whisper-base/model.safetensors", ROOT / "curation/ecapa.safetensors"):
        widen(file)
    print(f"{ROOT}: unpacked from {len(pieces)} pieces")


def run(root: Path, device: str, workers: int, out: Path, max_seconds: float) -> None:
    """`myna curate` on ROOT/recordings: each part is told as it is done, with the seconds of audio a second so far.

    OUT/curate-gpu.json has them all, also of a run that was stopped. Processes share a GPU by MPS where there is one.
    """
    if device == "cuda" and shutil.which("nvidia-cuda-mps-control"):
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
    curated, recordings = out / "curated", root / "recordings"
    command = [
        sys.executable,
        "-m",
        "myna",
        "curate",
        str(recordings),
        "--out",
        str(curated),
        "--workers",
        str(workers),
    ]
    command += ["--asr", str(root / "whisper-base")]
    command += ["--set", f"listen.models={root / 'curation'}", "--set", f"listen.device={device}"]
    seen: dict[Path, tuple[float, float]] = {}
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "workers": workers,
        "recordings": len(list(recordings.iterdir())),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
    }
    began = time.monotonic()
    process = subprocess.Popen(command)
    running = True
    while running:
        time.sleep(0.2)
        running, elapsed = process.poll() is None, time.monotonic() - began
        if running and elapsed > max_seconds:
            process.send_signal(signal.SIGINT)
            process.wait(60)
        for file in sorted({*(curated / "parts").glob("*.flac"), *(curated / "parts").glob("*.parquet")} - seen.keys()):
            seen[file] = elapsed, audio_seconds(file)
            total = sum(seconds for one, (_, seconds) in seen.items() if one.suffix == file.suffix)
            done = "decoded" if file.suffix == ".flac" else f"listened to: {total / elapsed:.1f} x real time"
            print(f"{elapsed:6.1f} s  {total:7.1f} s of audio {done}", flush=True)
    wall = time.monotonic() - began
    decoded = sum(seconds for file, (_, seconds) in seen.items() if file.suffix == ".flac")
    listened = sum(seconds for file, (_, seconds) in seen.items() if file.suffix == ".parquet")
    report |= {
        "finished": process.returncode == 0,
        "audio_seconds_decoded": round(decoded, 1),
        "audio_seconds_listened_to": round(listened, 1),
        "wall_seconds": round(wall, 1),
        "seconds_of_audio_a_second": round(listened / wall, 2),
    }
    (out / "curate-gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    sys.exit(0 if report["finished"] else 1)


def audio_seconds(file: Path) -> float:
    """Seconds of a part: of its FLAC, or of the rows that tile it."""
    import pyarrow.compute as pc  # with soundfile in the packed folder, which `unpack` has to do without
    import pyarrow.parquet as pq
    import soundfile

    if file.suffix == ".flac":
        return float(soundfile.info(file).duration)
    rows = pq.read_table(file, columns=["start_ms", "end_ms"])
    return float(pc.sum(pc.subtract(rows["end_ms"], rows["start_ms"])).as_py()) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("pack", "unpack", "run"))
    parser.add_argument("recordings", type=Path, nargs="?", help="folder to pack")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder with recordings, whisper-base and curation")
    parser.add_argument("--piece-mb", type=int, default=52)
    parser.add_argument("--python-version", default="3.12", help="of the machine with the GPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=8, help="processes that share the GPU")
    parser.add_argument("--max-seconds", type=float, default=600.0, help="after which a run is stopped")
    parser.add_argument("--out", type=Path, default=ROOT / "work")
    arguments = parser.parse_args()
    if arguments.command == "pack":
        if arguments.recordings is None:
            parser.error("name the folder of recordings to pack")
        pack(arguments.recordings, arguments.piece_mb, arguments.python_version)
    elif arguments.command == "unpack":
        unpack()
    else:
        run(arguments.root, arguments.device, arguments.workers, arguments.out, arguments.max_seconds)


if __name__ == "__main__":
    main()
