#!/usr/bin/env bash
# Makes fledgling on one machine with a card, stage by stage: bash recipes/fledgling/fledgling.sh STAGE...
#
#   check    is everything there that the other stages import?
#   sounds   corpora of espeak voices, and natural speech shaped        (about 1 minute on 16 cores)
#   codec    train the codec; `sounds` goes on beside it                 ($CODEC_SECONDS)
#   encode   an egg, and the codes of all sounds                         (about 2 minutes)
#   trial    sixty steps, to see how many fit into the time
#   learn    the language model on everything                            ($LEARN_SECONDS)
#   natural  its end, on natural speech alone                            ($NATURAL_SECONDS)
#   ship     halves in small files, copied to $OUT
#
# Each stage goes on where it was when it is run again, so that a command may be cut at any moment. What is not said
# here is said in README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
HOURS=${HOURS:-100}                      # of espeak for the language model
SPEAKERS=${SPEAKERS:-2500}
CODEC_HOURS=${CODEC_HOURS:-8}            # of espeak for the codec, of more speakers an hour
CODEC_SPEAKERS=${CODEC_SPEAKERS:-800}
CODEC_SECONDS=${CODEC_SECONDS:-460}      # of training in this command, and in all
CODEC_TOTAL=${CODEC_TOTAL:-$CODEC_SECONDS}
CODEC_OPTIONS=${CODEC_OPTIONS:-}
REPEAT=${REPEAT:-4}                      # how often a natural line comes beside espeak
JOBS=${JOBS:-$(nproc)}
ENCODERS=${ENCODERS:-8}
LEARN_SECONDS=${LEARN_SECONDS:-400}
NATURAL_SECONDS=${NATURAL_SECONDS:-180}
LIMIT=${LIMIT:-560}                      # seconds of a command after which it is asked to stop and to keep what it has
DATA=${DATA:-data/fledgling}
RUNS=${RUNS:-runs}
SET=${SET:-}                             # more settings for the language model: "--set train.compile=true"
HERE=recipes/fledgling
export PYTHONPATH=src:$DATA/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

say() { echo "[$(date +%T)] $*"; }

unpack() {
  for wheel in "$DATA"/carry/*/wheels/*.whl; do
    [ -e "$wheel" ] || continue
    [ -e "$DATA/site/.$(basename "$wheel")" ] && continue
    $PYTHON -m zipfile -e "$wheel" "$DATA/site" && touch "$DATA/site/.$(basename "$wheel")"
  done
}

check() {
  $PYTHON -c "
import accelerate, espeakng_loader, peft, pyarrow, pydantic, rich, safetensors, soundfile, soxr, torch, transformers
import typer, yaml
import myna.workflow
for package in (torch, transformers, peft, pyarrow, pydantic):
    print(package.__name__, package.__version__)
print('cuda', torch.cuda.is_available())"
}

texts() { for folder in "$DATA/texts" "$DATA/carry/0/texts"; do [ -d "$folder" ] && echo "$folder" && return; done; }

small_sounds() {
  $PYTHON $HERE/espeak_corpus.py --texts "$(texts)" --out "$DATA/espeak_codec" --seed 7 --jobs "$JOBS" \
    --hours "$CODEC_HOURS" --speakers "$CODEC_SPEAKERS"
  $PYTHON $HERE/shape_natural.py "$DATA"/carry/*/natural --out "$DATA/natural_shaped"
}

large_sounds() {
  [ -e "$DATA/espeak/manifest.jsonl" ] || $PYTHON $HERE/espeak_corpus.py --texts "$(texts)" --out "$DATA/espeak" \
    --jobs "$JOBS" --hours "$HOURS" --speakers "$SPEAKERS"
}

sounds() { small_sounds; large_sounds; }

codec() {
  large_sounds >"$DATA/espeak.log" 2>&1 &
  local beside=$!
  # shellcheck disable=SC2086
  $PYTHON $HERE/train_codec.py --source "$DATA/natural_shaped=0.7" --source "$DATA/espeak_codec=0.3" \
    --out "$RUNS/codec" --seconds "$CODEC_SECONDS" --total "$CODEC_TOTAL" $CODEC_OPTIONS
  wait $beside || { cat "$DATA/espeak.log"; return 1; }
}

encode() {
  # A codec that has learned more since is another codec, and wants another egg.
  diff -rq "$RUNS/codec/codec" "$DATA/egg/codec" >/dev/null 2>&1 ||
    { rm -rf "$DATA/egg"; $PYTHON $HERE/make_fledgling.py --codec "$RUNS/codec/codec" --out "$DATA/egg"; }
  $PYTHON $HERE/mix.py --natural "$DATA/natural_shaped" --espeak "$DATA/espeak" --repeat "$REPEAT" --out "$DATA/mixed"
  $PYTHON $HERE/mix.py --natural "$DATA/natural_shaped" --out "$DATA/mixed_natural"
  $PYTHON $HERE/encode.py --model "$DATA/egg" --work "$DATA/codes" --jobs "$ENCODERS" \
    "$DATA/mixed/train=$DATA/prepared/train" "$DATA/mixed/held_out=$DATA/prepared/held_out" \
    "$DATA/mixed_natural/train=$DATA/prepared_natural/train" \
    "$DATA/mixed_natural/held_out=$DATA/prepared_natural/held_out"
}

trial() {
  rm -rf "$RUNS/trial"
  # shellcheck disable=SC2086
  $PYTHON -m myna train $HERE/language_model.yaml --out "$RUNS/trial" --set model.source="$DATA/egg" \
    --set data.train="$DATA/prepared/train" --set data.evaluation=null \
    --set train.steps=60 --set train.warmup=10 $SET
}

# train RECIPE SECONDS FACTOR SETTINGS...: as many steps as fit (a step of the trial is FACTOR of these), cut by LIMIT,
# carried on by the next command.
train() {
  local recipe=$1 seconds=$2 factor=$3
  shift 3
  [ -d "$RUNS/$recipe/model" ] && { say "$RUNS/$recipe is finished"; return; }
  if [ -d "$RUNS/$recipe/checkpoints" ]; then
    timeout --signal=TERM "$(left)" $PYTHON -m myna train --resume "$RUNS/$recipe" || cut $?
  else
    local steps
    steps=$(($($PYTHON $HERE/plan_steps.py "$RUNS/trial" --seconds "$seconds") * factor))
    say "$recipe: $steps steps in about $seconds s"
    # shellcheck disable=SC2086
    timeout --signal=TERM "$(left)" $PYTHON -m myna train "$HERE/$recipe.yaml" --out "$RUNS/$recipe" \
      --set train.steps="$steps" "$@" $SET || cut $?
  fi
}

left() { echo $((LIMIT > SECONDS + 10 ? LIMIT - SECONDS : 10)); } # SECONDS is the shell's own clock of this command

cut() { [ "$1" = 124 ] && say "stopped by the clock: the same command goes on"; return "$1"; }

learn() {
  train language_model "$LEARN_SECONDS" 1 --set model.source="$DATA/egg" \
    --set data.train="$DATA/prepared/train" --set data.evaluation="$DATA/prepared/held_out"
}

natural() { # half the rows a step, so twice the steps
  train language_model_natural "$NATURAL_SECONDS" 2 --set model.source="$RUNS/language_model/model" \
    --set model.codec="$DATA/egg/codec" --set data.train="$DATA/prepared_natural/train" \
    --set data.evaluation="$DATA/prepared_natural/held_out"
}

ship() {
  local run=$RUNS/language_model_natural
  [ -d "$run/model" ] || run=$RUNS/language_model
  $PYTHON $HERE/ship.py --run "$run" --codec "$DATA/egg/codec" --out "$DATA/shipped"
  if [ -n "${OUT:-}" ]; then # a flat folder: only so many files come back, and they are named by what they are
    cp "$DATA"/shipped/*.safetensors "$OUT"/
    cp "$DATA/shipped/codec/model.safetensors" "$OUT/codec.safetensors"
    tar -C "$DATA/shipped" --exclude='*.safetensors' -czf "$OUT/rest.tgz" .
    tar -czf "$OUT/metrics.tgz" "$RUNS"/*/metrics.jsonl "$RUNS"/*/log.txt "$RUNS"/*/config.yaml
  fi
}

mkdir -p "$DATA" "$RUNS"
unpack
for stage in "$@"; do
  case $stage in
    check | sounds | small_sounds | codec | encode | trial | learn | natural | ship) say "$stage"; "$stage" ;;
    *) echo "there is no stage $stage; see the head of $0" >&2; exit 2 ;;
  esac
done
say done
