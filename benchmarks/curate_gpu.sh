#!/usr/bin/env bash
# `myna curate` on a machine with a GPU and no network: what it needs is packed here in pieces, and measured there.
#
#   benchmarks/curate_gpu.sh pack RECORDING      # here: wheels, models and audio as .cache/gpu/piece-*, of PIECE (60M) each
#   benchmarks/curate_gpu.sh unpack              # there, once all pieces lie in .cache/gpu
#   benchmarks/curate_gpu.sh try-ctranslate2     # there: does faster-whisper run with torch's own cuBLAS?
#   benchmarks/curate_gpu.sh run [DEVICE]        # there: hours of audio an hour, by transformers in float16
#
# `run cpu` with MINUTES=2 is the dry run on a CPU. PYTHON names the interpreter, PYTHON_VERSION its version there.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
PYTHON_VERSION=${PYTHON_VERSION:-3.12}
GPU=.cache/gpu
WHEELS=(ctranslate2 faster-whisper onnxruntime av soxr soundfile pyarrow scipy rapidfuzz psutil filelock pydantic
  pydantic-core annotated-types typing-inspection)
WHISPER=$GPU/whisper-base
export PYTHONPATH="$PWD/src:$PWD/$GPU/site${PYTHONPATH:+:$PYTHONPATH}"

pack() {
  local recording=$1
  mkdir -p $GPU/wheels && rm -f $GPU/piece-*
  "$PYTHON" -m pip download -q --no-deps --only-binary :all: --python-version "$PYTHON_VERSION" \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 \
    -c constraints.txt -d $GPU/wheels "${WHEELS[@]}"
  "$PYTHON" - "$recording" $GPU/recording.opus <<'PY'
import sys

import soundfile
import soxr

rate = soundfile.info(sys.argv[1]).samplerate
stream = soxr.ResampleStream(rate, 24_000, 1, dtype="float32")
with soundfile.SoundFile(sys.argv[2], "w", 24_000, 1, format="OGG", subtype="OPUS") as out:
    for block in soundfile.blocks(sys.argv[1], 60 * rate, dtype="float32", always_2d=True):
        out.write(stream.resample_chunk(block.mean(1)))
PY
  tar c -C .cache gpu/wheels gpu/recording.opus curation -C metrics whisper-base | split -b "${PIECE:-60M}" -d - $GPU/piece-
  ls -l $GPU/piece-*
}

unpack() {
  cat $GPU/piece-* | tar x -C .cache && rm -rf $GPU/site $WHISPER && mv .cache/whisper-base $WHISPER
  mkdir -p $GPU/site
  for wheel in $GPU/wheels/*.whl; do "$PYTHON" -m zipfile -e "$wheel" $GPU/site; done
  "$PYTHON" tools/whisper_to_transformers.py $WHISPER $WHISPER-transformers
  "$PYTHON" -c 'import av, faster_whisper, onnxruntime, pyarrow, scipy, soxr, soundfile, torch, transformers'
  "$PYTHON" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU")'
}

# CTranslate2's wheel asks for libcublas.so.12 by name, and calls nine functions that cuBLAS 13 has as well.
try_ctranslate2() {
  local cublas
  cublas=$("$PYTHON" -c 'import pathlib, sys
found = [file for path in sys.path for file in pathlib.Path(path or ".").glob("nvidia/*/lib/libcublas.so.1[23]")]
print(found[0])')
  mkdir -p $GPU/lib && ln -sf "$cublas" $GPU/lib/libcublas.so.12
  LD_LIBRARY_PATH="$PWD/$GPU/lib:$(dirname "$cublas")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$PYTHON" - $WHISPER <<'PY'
import sys
import time

import numpy as np

from myna.evaluate.asr import ASR

asr = ASR.open(sys.argv[1], "cuda")
noise = np.random.default_rng(0).normal(0, 0.1, (32, 10 * 16_000)).astype(np.float32)
began = time.monotonic()
asr.transcribe_words_batch(list(noise), 16_000, ["en"] * 32)
print(asr.name, f"runs: 32 windows in {time.monotonic() - began:.2f} s")
PY
}

run() {
  local device=${1:-cuda}
  # Parts of ten minutes: as many workers share the GPU as there are cores, and each wants parts of its own.
  "$PYTHON" benchmarks/curate_memory.py $GPU/recording.opus --out "$(mktemp -d)" --asr $WHISPER-transformers \
    --models .cache/curation --part-minutes 10 --device "$device" --label "curate on $device" ${MINUTES:+--minutes $MINUTES}
}

case ${1:-} in
  pack | unpack | run) "$@" ;;
  try-ctranslate2) try_ctranslate2 ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
