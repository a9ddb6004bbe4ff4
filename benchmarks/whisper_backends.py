"""Whisper by CTranslate2 and by Myna's own decoding in torch, on one GPU with the same weights and windows.

python benchmarks/whisper_backends.py pack --python-version 3.12                  # here: build/whisper-backends.tar.xz
PYTHONPATH=src python3 benchmarks/whisper_backends.py run --out OUT               # there: OUT/whisper-backends.json

The pack holds CTranslate2, faster-whisper and Whisper base with weights rounded to `--bits` bits, so that it is small
enough to be carried. Both backends get the rounded weights in float16. CTranslate2 asks for libcublas.so.12; where only
version 13 is installed, a link with the old name is made to it: the functions that are called did not change.
`run --device cpu` is a dry run.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import io
import json
import lzma
import os
import random
import shutil
import struct
import subprocess
import sys
import tarfile
import time
import traceback
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

ROOT, PACK = Path("build/whisper-backends"), Path("build/whisper-backends.tar.xz")
WHISPER, RECORDINGS = Path(".cache/metrics/whisper-base"), Path("src/myna/demo/recordings")
RATE, WINDOW_SECONDS, GAP_SECONDS = 16_000, 25.0, 0.4
BATCH_CLIPS, GROUP = 32, 64
"""Windows that curation decodes at once on a GPU, and weights that share a scale in the pack."""
BACKENDS, KINDS = ("ctranslate2", "torch"), ("with times of words", "text alone")


def pack(python_version: str, bits: int) -> None:
    """Write everything that the other machine lacks into one archive."""
    shutil.rmtree(ROOT, ignore_errors=True)
    site = ROOT / "site"
    site.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(ROOT)]
    command += ["--python-version", python_version, "ctranslate2", "faster-whisper", "soxr", "soundfile", "cffi"]
    subprocess.run(command, check=True)
    for wheel in ROOT.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        wheel.unlink()
    for library in site.glob("ctranslate2/_ext*.so"):
        subprocess.run(["strip", str(library)], check=True)  # 69 MB, 1.3 without symbols
    (site / "av.py").write_text("")  # faster-whisper imports it and does not use it here
    for file in ("tokenizer.json", "vocabulary.json", "config.json"):
        shutil.copy(WHISPER / file, ROOT / file)
    (ROOT / "model.rounded").write_bytes(round_weights((WHISPER / "model.bin").read_bytes(), bits))
    packed = io.BytesIO()
    with lzma.open(packed, "wb", preset=1) as compressed, tarfile.open(fileobj=compressed, mode="w|") as archive:
        archive.add(ROOT, ".")
    PACK.write_bytes(packed.getvalue())
    print(f"{PACK}: {len(packed.getvalue()) / 1e6:.1f} MB with weights of {bits} bits")


def float16_places(content: bytes) -> list[tuple[int, int]]:
    """Return offset and number of bytes of each large float16 variable of a `model.bin` of CTranslate2."""
    at = 4
    at += 2 + struct.unpack_from("<H", content, at)[0] + 4
    (count,) = struct.unpack_from("<I", content, at)
    at += 4
    places = []
    for _ in range(count):
        at += 2 + struct.unpack_from("<H", content, at)[0]
        at += 1 + 4 * content[at]
        dtype, size = struct.unpack_from("<BI", content, at)
        at += 5
        if dtype == 4 and size >= 1 << 16 and size % (2 * GROUP) == 0:
            places.append((at, size))
        at += size
    return places


def round_weights(content: bytes, bits: int) -> bytes:
    """Replace large variables by a scale for each group of weights and a byte for each weight."""
    pieces, done, limit = [struct.pack("<I", len(content))], 0, 2 ** (bits - 1) - 1
    for start, size in float16_places(content):
        weights = np.frombuffer(content, np.float16, size // 2, start).astype(np.float32).reshape(-1, GROUP)
        scales = (np.abs(weights).max(1, keepdims=True) / limit).clip(1e-7).astype(np.float16)
        codes = np.rint(weights / scales.astype(np.float32)).clip(-limit, limit).astype(np.int8)
        pieces += [content[done:start], scales.tobytes(), codes.tobytes()]
        done = start + size
    index = np.array(float16_places(content), np.int64)
    packer = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)  # near the entropy of the codes, in a second
    whole = struct.pack("<I", len(index)) + index.tobytes() + b"".join([*pieces, content[done:]])
    return packer.compress(whole) + packer.flush()


def widen_weights(packed: bytes) -> bytes:
    """Return a `model.bin` with the rounded weights in float16."""
    packed = zlib.decompress(packed)
    (count,) = struct.unpack_from("<I", packed)
    index = np.frombuffer(packed, np.int64, 2 * count, 4).reshape(-1, 2)
    at = 4 + index.nbytes
    content = bytearray(struct.unpack_from("<I", packed, at)[0])
    at, done = at + 4, 0
    for start, size in index.tolist():
        content[done:start] = packed[at : at + start - done]
        at += start - done
        groups = size // 2 // GROUP
        scales = np.frombuffer(packed, np.float16, groups, at).astype(np.float32)[:, None]
        codes = np.frombuffer(packed, np.int8, size // 2, at + 2 * groups).reshape(-1, GROUP)
        content[start : start + size] = (codes * scales).astype(np.float16).tobytes()
        at, done = at + 2 * groups + size // 2, start + size
    content[done:] = packed[at:]
    return bytes(content)


def unpack() -> None:
    if (ROOT / "transformers").is_dir():
        return
    with lzma.open(PACK) as content, tarfile.open(fileobj=content, mode="r|") as archive:
        archive.extractall(ROOT, filter="data")
    (ROOT / "model.bin").write_bytes(widen_weights((ROOT / "model.rounded").read_bytes()))
    command = [sys.executable, "tools/whisper_to_transformers.py", str(ROOT), str(ROOT / "transformers")]
    subprocess.run(command, check=True)


def make_windows(count: int) -> list[np.ndarray[Any, Any]]:
    """Join the recordings to windows of 25 s, each in another order."""
    from myna.audio.files import read_audio

    clips = [read_audio(file, sample_rate=RATE) for file in sorted(RECORDINGS.glob("*.opus"))]
    gap, windows = np.zeros(round(GAP_SECONDS * RATE), np.float32), []
    for number in range(count):
        order, window = random.Random(number).sample(clips, len(clips)), [gap]
        while order and sum(map(len, window)) + len(order[-1]) < WINDOW_SECONDS * RATE:
            window += [order.pop(), gap]
        windows.append(np.concatenate(window))
    return windows


def link_cuda_libraries() -> str:
    """Return a folder in which libcublas.so.12 is found, and what it is: CTranslate2 opens it by this name."""
    folders = [Path(path) / "nvidia" for path in sys.path if (Path(path) / "nvidia").is_dir()]
    places = [*folders, Path("/usr/local"), Path("/usr/lib/x86_64-linux-gnu")]
    found = {
        version: next((file for place in places for file in sorted(place.rglob(f"libcublas.so.{version}"))), None)
        for version in ("12", "13")
    }
    file = found["12"] or found["13"]
    if file is None:
        raise OSError(f"there is no libcublas.so.12 or .13 below {', '.join(map(str, places))}")
    links = ROOT / "libraries"
    links.mkdir(exist_ok=True)
    (links / "libcublas.so.12").unlink(missing_ok=True)
    (links / "libcublas.so.12").symlink_to(file)
    os.environ["LD_LIBRARY_PATH"] = ":".join(
        [str(links.absolute()), str(file.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    )
    return str(file)


def measure(backend: str, device: str, beams: int, windows: int, repeats: int) -> dict[str, Any]:
    """Decode the windows with one backend in this process; the first round compiles, and is not counted."""
    from myna.listen import asr

    asr.BEAMS = beams
    if backend == "ctranslate2":
        if device == "cuda":
            ctypes.CDLL("libcublas.so.12")
        package = importlib.import_module("faster_whisper")
        numbers = "float16" if device == "cuda" else "float32"
        whisper = package.WhisperModel(str(ROOT), device=device, compute_type=numbers)
    else:
        import torch
        from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer

        from myna.listen.torch_whisper import open_torch_whisper

        folder = ROOT / "transformers"
        dtype = torch.float16 if device == "cuda" else torch.float32
        model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=dtype).to(device).eval()
        features, tokenizer = (one.from_pretrained(folder) for one in (WhisperFeatureExtractor, WhisperTokenizer))
        whisper = open_torch_whisper(model, tokenizer.backend_tokenizer, features.feature_size)
    clips = make_windows(windows)
    result: dict[str, Any] = {"seconds of audio": sum(map(len, clips)) / RATE}
    for kind in KINDS:
        took, texts = [], []
        for _ in range(1 + repeats):
            began, texts = time.perf_counter(), []
            for start in range(0, len(clips), BATCH_CLIPS):
                batch = clips[start : start + BATCH_CLIPS]
                decoded = asr.decode_clips(whisper, batch, ["en"] * len(batch), word_times=kind == KINDS[0])
                texts += [" ".join(one.segments) for one in decoded]
            took.append(time.perf_counter() - began)
        result[kind] = {"audio-s/s": result["seconds of audio"] / min(took[1:]), "texts": texts}
    return result


def measure_apart(backend: str, arguments: argparse.Namespace, beams: int) -> dict[str, Any]:
    """Measure in a process of its own, since both backends bring CUDA libraries."""
    command = [sys.executable, __file__, "one", "--backend", backend, "--beams", str(beams)]
    command += ["--device", arguments.device, "--windows", str(arguments.windows), "--repeats", str(arguments.repeats)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    return {"error": last} if done.returncode else dict(json.loads(last))


def run(arguments: argparse.Namespace) -> None:
    unpack()
    report: dict[str, Any] = {
        "device": arguments.device,
        "windows": arguments.windows,
        "batch": BATCH_CLIPS,
        "beams": {},
    }
    os.environ["PYTHONPATH"] = ":".join([*filter(None, [os.environ.get("PYTHONPATH")]), "src", str(ROOT / "site")])
    if arguments.device == "cuda":
        report["libcublas"] = link_cuda_libraries()
    for beams in arguments.beams:
        both = {name: measure_apart(name, arguments, beams) for name in BACKENDS}
        entry: dict[str, Any] = {name: one["error"] for name, one in both.items() if "error" in one}
        for kind in KINDS if not entry else ():
            texts = [both[name][kind]["texts"] for name in BACKENDS]
            rates = {name: round(both[name][kind]["audio-s/s"], 1) for name in BACKENDS}
            equal = sum(one == other for one, other in zip(*texts, strict=True))
            ratio = round(rates["torch"] / rates["ctranslate2"], 3)
            entry[kind] = rates | {"torch over ctranslate2": ratio, "equal texts": f"{equal} of {len(texts[0])}"}
        report["beams"][beams] = entry
        print(beams, json.dumps(entry, indent=1), flush=True)
        (arguments.out / "whisper-backends.json").write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("--python-version", default="3.12")
    packing.add_argument("--bits", type=int, default=4)
    for name in ("run", "one"):
        running = commands.add_parser(name)
        running.add_argument("--device", default="cuda")
        running.add_argument("--windows", type=int, default=128)
        running.add_argument("--repeats", type=int, default=2)
        if name == "run":
            running.add_argument("--out", type=Path, default=Path("build"))
            running.add_argument("--beams", type=int, nargs="+", default=[5, 1])
        else:
            running.add_argument("--backend", choices=BACKENDS, required=True)
            running.add_argument("--beams", type=int, required=True)
    arguments = parser.parse_args()
    if arguments.command == "pack":
        pack(arguments.python_version, arguments.bits)
    elif arguments.command == "run":
        run(arguments)
    else:
        try:
            found = measure(arguments.backend, arguments.device, arguments.beams, arguments.windows, arguments.repeats)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            traceback.print_exc()
            print(f"{arguments.backend} does not run on {arguments.device}: {error!r}")
            sys.exit(1)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
