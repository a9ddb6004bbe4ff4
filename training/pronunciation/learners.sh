#!/usr/bin/env bash
# Benchmark of pronunciation assessment on one machine: bash training/pronunciation/learners.sh STAGE...
#
#   all        on a machine with a GPU: everything below in $BUDGET seconds, the full size while the corpus is made
#   small      on any machine: all but the full size. For a few cores, as docs/benchmarks/pronunciation.md was made:
#                BUDGET=3900 AFTER=150 PRETRAIN_SECONDS=900 SPEAKERS=800 HELD_OUT=0.03 BATCH_SIZE=64 \
#                OMP_NUM_THREADS=1 MODEL_SIZE="--hidden 256 --layers 4 --blocks 4 --channels 16" \
#                PRETRAIN_OPTIONS="--batch-frames 6000" \
#                SET="--set data.row_tokens=4096 --set data.workers=1 --set train.ema_decay=0.99"
#
#   check      is everything there that the other stages import?
#   corpus     simulated learners, on all cores
#   prepare    a small model with random weights, and the features of all recordings
#   pretrain   its audio encoder, on phones, for $PRETRAIN_SECONDS: train_audio_encoder.py
#   trial      sixty steps, to see how many fit into the time
#   train      the small model, until $BUDGET less $AFTER
#   answer     its answers to held-out sentences of held-out learners
#   report     scores, table and loss curve
#   full_size  the paper's recipe at the full size within 24 GB, on random weights: benchmarks/pronunciation.py
#
# Each stage is done once, so that an interrupted command can be run again; rm -r $RUNS starts over. Results are copied to
# $OUT, if that is set, as soon as they are there; all output is in $RUNS/log.txt too. Afterwards:
#   python training/pronunciation/report.py --json FOLDER/pronunciation.json --full-size FOLDER/full_size.json \
#     --out docs/benchmarks
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
BUDGET=${BUDGET:-570}           # seconds of `all`, from its start to its report: a command there may last 600
AFTER=${AFTER:-60}              # of these, for answers and the report
STARTING=${STARTING:-30}        # before the first training step
PRETRAIN_SECONDS=${PRETRAIN_SECONDS:-120} # of the audio encoder
SPEAKERS=${SPEAKERS:-2400}
SENTENCES=${SENTENCES:-25}      # of each: some 60 hours
HELD_OUT=${HELD_OUT:-0.04}      # share of the speakers
MODEL_SIZE=${MODEL_SIZE:-}      # options of init_small_model.py
PRETRAIN_OPTIONS=${PRETRAIN_OPTIONS:-} # of train_audio_encoder.py
TRIAL_STEPS=${TRIAL_STEPS:-60}
BATCH_SIZE=${BATCH_SIZE:-192}   # of the answers
FULL_SIZE=${FULL_SIZE:-}        # options of benchmarks/pronunciation.py
JOBS=${JOBS:-$(nproc)}
IMPORTS=${IMPORTS:-8}           # processes that import a part each
DATA=${DATA:-data/learners}
RUNS=${RUNS:-runs/learners}
SET=${SET:-}                    # more settings for the small model: "--set train.compile=true"
HERE=training/pronunciation
export PYTHONPATH=src:training/fledgling${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

say() { echo "[$(date +%T)] $*"; }
save() { [ -z "${OUT:-}" ] || cp "$@" "$OUT"/; }
elapsed() { echo $(($(date +%s) - $(cat "$RUNS/began"))); }

check() {
  $PYTHON -c "
import accelerate, espeakng_loader, peft, pyarrow, pydantic, rich, safetensors, soundfile, soxr, tokenizers, torch
import cyclopts, transformers, yaml
import myna.train.loop
for package in (torch, transformers, peft, accelerate):
    print(package.__name__, package.__version__)
print('cuda', torch.cuda.is_available(), 'cores', '$JOBS')"
}

corpus() {
  OMP_NUM_THREADS=1 $PYTHON $HERE/learner_corpus.py --out "$DATA" --speakers "$SPEAKERS" --sentences "$SENTENCES" \
    --held-out "$HELD_OUT" --jobs "$JOBS"
}

prepare() { # features cost little; to read and to check recordings costs more, and all cores do it
  rm -rf "$DATA/model" "$DATA/imported" "$DATA"/*/part-*.jsonl
  # shellcheck disable=SC2086
  $PYTHON $HERE/init_small_model.py --answers "$DATA/train/scores.jsonl" --out "$DATA/model" $MODEL_SIZE &
  local model=$! imports=() import name
  for name in train test; do
    split --number="l/$IMPORTS" --additional-suffix=.jsonl "$DATA/$name/scores.jsonl" "$DATA/$name/part-"
    for part in "$DATA/$name"/part-*.jsonl; do
      [ -s "$part" ] || continue
      OMP_NUM_THREADS=1 $PYTHON -m myna import "$part" --out "$DATA/imported/$name-$(basename "$part" .jsonl)" \
        >/dev/null 2>&1 &
      imports+=($!)
    done
  done
  for import in "${imports[@]}"; do wait "$import" || { echo "an import failed" >&2; return 1; }; done
  wait $model
  for name in train test; do
    mkdir -p "$DATA/imported/$name"
    cat "$DATA/imported/$name"-part-*/manifest.jsonl >"$DATA/imported/$name/manifest.jsonl"
  done
  OMP_NUM_THREADS=1 $PYTHON training/fledgling/encode.py --model "$DATA/model" --work "$DATA/codes" --jobs "$JOBS" \
    --device cpu "$DATA/imported/train=$DATA/prepared/train" "$DATA/imported/test=$DATA/prepared/test"
}

pretrain() { # writes another model beside the one with random weights
  # shellcheck disable=SC2086
  $PYTHON $HERE/train_audio_encoder.py --model "$DATA/model" --data "$DATA/prepared/train" --held-out "$DATA/prepared/test" \
    --out "$DATA/encoder" --seconds "$PRETRAIN_SECONDS" $PRETRAIN_OPTIONS
}

settings() { echo "--set model.source=$DATA/encoder --set data.train=$DATA/prepared/train $SET"; }

trial() {
  rm -rf "$RUNS/trial"
  # shellcheck disable=SC2046
  $PYTHON -m myna train $HERE/learners.yaml --out "$RUNS/trial" $(settings) --set data.evaluation=null \
    --set train.steps="$TRIAL_STEPS"
}

train() {
  local seconds steps
  [ -e "$RUNS/steps" ] || {
    seconds=$((BUDGET - $(elapsed) - AFTER - STARTING))
    [ "$seconds" -ge 20 ] || seconds=20
    $PYTHON training/fledgling/plan_steps.py "$RUNS/trial" --seconds "$seconds" >"$RUNS/steps"
    say "$(cat "$RUNS/steps") steps in about $seconds s"
  }
  steps=$(cat "$RUNS/steps")
  if [ -d "$RUNS/run/checkpoints" ]; then
    # shellcheck disable=SC2046
    timeout --signal=TERM "$(left)" $PYTHON -m myna train --resume "$RUNS/run" || cut $?
  else
    rm -rf "$RUNS/run"
    # shellcheck disable=SC2046
    timeout --signal=TERM "$(left)" $PYTHON -m myna train $HERE/learners.yaml --out "$RUNS/run" $(settings) \
      --set data.evaluation="$DATA/prepared/test" --set train.steps="$steps" || cut $?
  fi
}

left() { # seconds until the answers; a training that is stopped saves a checkpoint
  local seconds=$((BUDGET - $(elapsed) - AFTER + 15))
  echo $((seconds > 30 ? seconds : 30))
}

cut() { [ "$1" = 124 ] && say "stopped by the clock: the last checkpoint is used" || return "$1"; }

model() { # the finished model, or else the newest checkpoint
  local newest
  [ -d "$RUNS/run/model" ] && { echo "$RUNS/run/model"; return; }
  newest=$(ls -d "$RUNS"/run/checkpoints/*/model | sort | tail -n 1)
  echo "$newest"
}

answer() {
  $PYTHON -m myna answer "$DATA/prepared/test" --model "$(model)" --out "$RUNS/answers.jsonl" --batch-size "$BATCH_SIZE" \
    --max-tokens 200
  save "$RUNS/answers.jsonl"
}

report() {
  $PYTHON $HERE/report.py --run "$RUNS/run" --answers "$RUNS/answers.jsonl" --data "$DATA/prepared/test" \
    --pretraining "$DATA/encoder/pretraining.json" \
    --full-size "$RUNS/full_size.json" --out "$RUNS/report"
  save "$RUNS"/report/pronunciation.*
}

full_size() {
  # shellcheck disable=SC2086
  $PYTHON benchmarks/pronunciation.py --out "$RUNS" $FULL_SIZE || say "the full size is not as it should be"
  [ ! -e "$RUNS/full_size.json" ] || save "$RUNS/full_size.json"
}

all() {
  stage check
  stage full_size >"$RUNS/full_size.txt" 2>&1 &
  local beside=$!
  JOBS=$((JOBS > 3 ? JOBS - 2 : JOBS)) stage corpus
  JOBS=$((JOBS > 3 ? JOBS - 2 : JOBS)) stage prepare
  wait $beside || say "the full size ended with $?"
  tail -n 3 "$RUNS/full_size.txt"
  small
}

small() {
  stage check
  stage corpus
  stage prepare
  stage pretrain
  stage trial
  stage train
  stage answer
  stage report
}

stage() { # once, however often it is run
  [ -e "$RUNS/done.$1" ] && return 0
  say "$1, after $(elapsed) s"
  "$1"
  touch "$RUNS/done.$1"
}

mkdir -p "$DATA" "$RUNS" ${OUT:+"$OUT"}
[ -e "$RUNS/began" ] || date +%s >"$RUNS/began"
exec > >(tee -a "$RUNS/log.txt") 2>&1
trap 'save "$RUNS/log.txt"' EXIT
for stage in "$@"; do
  case $stage in
    all | small) $stage ;;
    check | corpus | prepare | pretrain | trial | train | answer | report | full_size) stage "$stage" ;;
    *) echo "there is no stage $stage; see the head of $0" >&2; exit 2 ;;
  esac
done
say "done after $(elapsed) s"
