#!/usr/bin/env bash
# What Myna claims of pronunciation, measured on one machine: bash training/pronunciation/learners.sh STAGE...
#
#   all        on a machine with a card: everything below in $BUDGET seconds, the true size while the corpus is made
#   small      on any machine: all but the true size. For a few cores, as docs/benchmarks/pronunciation.md was made:
#                BUDGET=3900 AFTER=150 HEARING=900 SPEAKERS=800 HELD_OUT=0.03 TOGETHER=64 OMP_NUM_THREADS=1 \
#                MODEL_SIZE="--hidden 256 --layers 4 --blocks 4 --channels 16" HEAR_OPTIONS="--spectra 6000" \
#                SET="--set data.row_tokens=4096 --set data.workers=1 --set train.ema_decay=0.99"
#
#   check      is everything there that the other stages import?
#   corpus     learners who do not exist, on all cores
#   prepare    a small model with random weights, and the features of all recordings
#   hear       its ear learns to spell phones, for $HEARING seconds: teach_ear.py
#   trial      sixty steps, to see how many fit into the time
#   learn      the small model, until $BUDGET less $AFTER
#   listen     it answers held-out learners who read held-out sentences
#   report     table, curve and numbers
#   true_size  the paper's recipe at the true size within 24 GB, on random weights: benchmarks/pronunciation.py
#
# Each stage is done once, so that a command may be cut and typed again; rm -r $RUNS begins anew. What is worth keeping is
# copied to $OUT, if that is set, as soon as it is there; everything said is in $RUNS/log.txt too. At home, afterwards:
#   python training/pronunciation/report.py --json FOLDER/pronunciation.json --true-size FOLDER/true_size.json \
#     --out docs/benchmarks
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
BUDGET=${BUDGET:-570}           # seconds of `all`, from its start to its report: a command there may last 600
AFTER=${AFTER:-60}              # of these, for listening and the report
STARTING=${STARTING:-30}        # for training to open everything and to look at it before its first step
HEARING=${HEARING:-120}         # for the ear alone
SPEAKERS=${SPEAKERS:-2400}
SENTENCES=${SENTENCES:-25}      # of each: some 60 hours
HELD_OUT=${HELD_OUT:-0.04}      # share of the speakers
MODEL_SIZE=${MODEL_SIZE:-}      # options of make_small.py
HEAR_OPTIONS=${HEAR_OPTIONS:-}  # of teach_ear.py
TRIAL_STEPS=${TRIAL_STEPS:-60}
TOGETHER=${TOGETHER:-192}       # recordings answered at once
TRUE_SIZE=${TRUE_SIZE:-}        # options of benchmarks/pronunciation.py
JOBS=${JOBS:-$(nproc)}
IMPORTS=${IMPORTS:-8}           # processes that import a part each
DATA=${DATA:-data/learners}
RUNS=${RUNS:-runs/learners}
SET=${SET:-}                    # more settings for the small model: "--set train.compile=true"
HERE=training/pronunciation
export PYTHONPATH=src:training/fledgling${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

say() { echo "[$(date +%T)] $*"; }
keep() { [ -z "${OUT:-}" ] || cp "$@" "$OUT"/; }
gone() { echo $(($(date +%s) - $(cat "$RUNS/began"))); }

check() {
  $PYTHON -c "
import accelerate, espeakng_loader, peft, pyarrow, pydantic, rich, safetensors, soundfile, soxr, tokenizers, torch
import transformers, typer, yaml
import myna.workflow
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
  $PYTHON $HERE/make_small.py --answers "$DATA/train/scores.jsonl" --out "$DATA/model" $MODEL_SIZE &
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

hear() { # the model that goes on is written beside the one that has heard nothing
  # shellcheck disable=SC2086
  $PYTHON $HERE/teach_ear.py --model "$DATA/model" --data "$DATA/prepared/train" --held-out "$DATA/prepared/test" \
    --out "$DATA/hearing" --seconds "$HEARING" $HEAR_OPTIONS
}

settings() { echo "--set model.source=$DATA/hearing --set data.train=$DATA/prepared/train $SET"; }

trial() {
  rm -rf "$RUNS/trial"
  # shellcheck disable=SC2046
  $PYTHON -m myna train $HERE/learners.yaml --out "$RUNS/trial" $(settings) --set data.evaluation=null \
    --set train.steps="$TRIAL_STEPS"
}

learn() {
  local seconds steps
  [ -e "$RUNS/steps" ] || {
    seconds=$((BUDGET - $(gone) - AFTER - STARTING))
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

left() { # until it is time to listen; whoever is asked to stop keeps what it has
  local seconds=$((BUDGET - $(gone) - AFTER + 15))
  echo $((seconds > 30 ? seconds : 30))
}

cut() { [ "$1" = 124 ] && say "stopped by the clock: its last checkpoint answers" || return "$1"; }

model() { # what is finished, or else the newest checkpoint
  local newest
  [ -d "$RUNS/run/model" ] && { echo "$RUNS/run/model"; return; }
  newest=$(ls -d "$RUNS"/run/checkpoints/*/model | sort | tail -n 1)
  echo "$newest"
}

listen() {
  $PYTHON -m myna listen "$DATA/prepared/test" --model "$(model)" --out "$RUNS/answers.jsonl" --batch "$TOGETHER" \
    --max-tokens 200
  keep "$RUNS/answers.jsonl"
}

report() {
  $PYTHON $HERE/report.py --run "$RUNS/run" --answers "$RUNS/answers.jsonl" --data "$DATA/prepared/test" \
    --hearing "$DATA/hearing/hearing.json" \
    --true-size "$RUNS/true_size.json" --out "$RUNS/report"
  keep "$RUNS"/report/pronunciation.*
}

true_size() {
  # shellcheck disable=SC2086
  $PYTHON benchmarks/pronunciation.py --out "$RUNS" $TRUE_SIZE || say "the true size is not as it should be"
  [ ! -e "$RUNS/true_size.json" ] || keep "$RUNS/true_size.json"
}

all() {
  stage check
  stage true_size >"$RUNS/true_size.txt" 2>&1 &
  local beside=$!
  JOBS=$((JOBS > 3 ? JOBS - 2 : JOBS)) stage corpus
  JOBS=$((JOBS > 3 ? JOBS - 2 : JOBS)) stage prepare
  wait $beside || say "the true size ended with $?"
  tail -n 3 "$RUNS/true_size.txt"
  small
}

small() {
  stage check
  stage corpus
  stage prepare
  stage hear
  stage trial
  stage learn
  stage listen
  stage report
}

stage() { # once, however often it is typed
  [ -e "$RUNS/done.$1" ] && return 0
  say "$1, after $(gone) s"
  "$1"
  touch "$RUNS/done.$1"
}

mkdir -p "$DATA" "$RUNS" ${OUT:+"$OUT"}
[ -e "$RUNS/began" ] || date +%s >"$RUNS/began"
exec > >(tee -a "$RUNS/log.txt") 2>&1
trap 'keep "$RUNS/log.txt"' EXIT
for stage in "$@"; do
  case $stage in
    all | small) $stage ;;
    check | corpus | prepare | hear | trial | learn | listen | report | true_size) stage "$stage" ;;
    *) echo "there is no stage $stage; see the head of $0" >&2; exit 2 ;;
  esac
done
say "done after $(gone) s"
