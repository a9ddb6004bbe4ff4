#!/usr/bin/env bash
# Makes data/fledgling/bundle for `fledgling.sh both`, on a machine with network (Debian, npm), in about half an hour of a core:
#
#   bash training/fledgling/prepare_bundle.sh EN_REAL WHISPER
#
# EN_REAL is the folder of the corpus en-real, WHISPER one with a CTranslate2 Whisper. Interrupted, it continues when it is
# run again. With `voices` instead of WHISPER, the bundle is that of `fledgling.sh voices`, without words of real speech.
# What crowd_corpora.py made in data/fledgling/crowd is added.
set -euo pipefail
cd "$(dirname "$0")/../.."

[ $# = 2 ] || { echo "usage: bash $0 EN_REAL WHISPER|voices" >&2; exit 2; }
EN_REAL=$(realpath "$1") WHISPER=$2
PYTHON=${PYTHON:-.venv/bin/python}
DATA=${DATA:-data/fledgling}
LIMIT=${LIMIT:-52} # MiB of a part
HERE=training/fledgling
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

say() { echo "[$(date +%T)] $*"; }

mkdir -p "$DATA"
$PYTHON -m pip install --quiet --constraint constraints.txt --editable ".[corpus]"
say "real recordings of Debian packages: $DATA/real.log"
$PYTHON $HERE/real_corpora.py --out "$DATA/real" >"$DATA/real.log" 2>&1 &
real=$!
[ -e "$DATA/texts/words.txt.gz" ] || { say texts; $PYTHON $HERE/extract_texts.py --out "$DATA/texts"; }
if [ ! -e "$DATA/kokoro/voices.safetensors" ] || [ ! -e "$DATA/speech_encoder.safetensors" ]; then
  say "Kokoro, and Whisper tiny's encoder"
  # Apart from the environment: only these two read ONNX files.
  [ -d "$DATA/onnx" ] || $PYTHON -m pip install --quiet --no-deps --target "$DATA/onnx" onnx ml-dtypes protobuf
  PYTHONPATH=$DATA/onnx $PYTHON $HERE/export_kokoro.py --out "$DATA/kokoro"
  PYTHONPATH=$DATA/onnx $PYTHON $HERE/export_speech_encoder.py --out "$DATA/speech_encoder.safetensors"
fi
words=() crowd=()
for folder in "$DATA"/crowd/en-*; do [ ! -d "$folder" ] || crowd+=("$folder"); done
if [ "$WHISPER" != voices ]; then
  [ -e "$DATA/real_words.json" ] || gunzip -c $HERE/real_words.json.gz >"$DATA/real_words.json" # as far as they are known
  say "words of real speech, with their times"
  $PYTHON $HERE/augment_real.py --source "$EN_REAL" "${crowd[@]}" --words "$DATA/real_words.json" --asr "$WHISPER"
  words=(--words "$DATA/real_words.json")
fi
wait $real || { cat "$DATA/real.log"; exit 1; }
say bundle
rm -rf "$DATA/bundle"
train=$DATA/real/train
$PYTHON $HERE/pack_offline.py --texts "$DATA/texts" --kokoro "$DATA/kokoro" --speech-encoder "$DATA/speech_encoder.safetensors" \
  --real "$EN_REAL" "${crowd[@]}" "$train/asterisk-fr-0.parquet" "$train/festvox-ru-0.parquet=12" "$train/menardi-it-0.parquet" \
  "$train/gcin-zh-0.parquet" "$train/armelle-fr-0.parquet=4" --background "$DATA/real/noise/sonic-pi-0.parquet" \
  "${words[@]}" --limit "$LIMIT" --out "$DATA/bundle"
