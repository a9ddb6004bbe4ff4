#!/usr/bin/env bash
# Makes fledgling on one machine with a card, stage by stage: bash training/fledgling/fledgling.sh STAGE...
#
#   all      everything below in $BUDGET seconds: what is late shortens what comes after it
#   decoder  instead: $CODEC, or the codec that ships, in $BUDGET seconds made to sound better, with the same codes;
#            sounds, then training of the decoder alone, and no language model
#
#   check    is everything there that the other stages import?
#   sounds   natural speech made and shaped, corpora of espeak voices beside it
#                                                                        ($NATURAL_SOUND_SECONDS and 20 s)
#   codec    train the codec                                             ($CODEC_SECONDS and 35 s)
#   encode   an egg, and the codes of all sounds                         (50 s)
#   trial    sixty steps, to see how many fit into the time
#   learn    the language model                                          ($LEARN_SECONDS)
#   ship     halves in small files, copied to $OUT
#
# Each stage goes on where it was when it is run again, so that a command may be cut at any moment. What each training
# leaves is copied to $OUT as soon as it is there. What is not said here is said in README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
BUDGET=${BUDGET:-1400}                   # seconds of `all`
HOURS=${HOURS:-40}                       # of espeak for the language model
SPEAKERS=${SPEAKERS:-1200}
CODEC_HOURS=${CODEC_HOURS:-8}            # of espeak for the codec, of more speakers an hour
CODEC_SPEAKERS=${CODEC_SPEAKERS:-800}
CODEC_SECONDS=${CODEC_SECONDS:-430}      # of training in this command, and in all
CODEC_TOTAL=${CODEC_TOTAL:-}
CODEC_CLIPS=${CODEC_CLIPS:-20000}        # of each source that it reads: 15 hours and more, of all speakers
CODEC_OPTIONS=${CODEC_OPTIONS:-}
BEGIN_WITH=${BEGIN_WITH:-}               # a fledgling that goes on learning, with its codec; else an egg of random weights
CODEC=${CODEC:-${BEGIN_WITH:+$BEGIN_WITH/codec}} # a codec that is there already: none is trained
EGG_OPTIONS=${EGG_OPTIONS:-}
NATURAL_HOURS=${NATURAL_HOURS:-200}      # of natural speech to make here, if Kokoro was carried
NATURAL_SPEAKERS=${NATURAL_SPEAKERS:-6000}
NATURAL_SEED=${NATURAL_SEED:-2}          # of another seed than what was made elsewhere: no two speakers have one name
NATURAL_SOUND_SECONDS=${NATURAL_SOUND_SECONDS:-} # after which what is made is enough: 165, or 60 for `decoder`
NATURAL_DEVICE=${NATURAL_DEVICE:-cuda}
NATURAL_OPTIONS=${NATURAL_OPTIONS:-}     # --exactly: in fp32, without kernels of our own
CHANNELS=${CHANNELS-yes}                 # microphones, rooms and noise for two speakers in three; CHANNELS= for none
JOBS=${JOBS:-$(nproc)}
NATURAL_JOBS=${NATURAL_JOBS:-10}
ESPEAK_JOBS=${ESPEAK_JOBS:-$((JOBS > NATURAL_JOBS + 1 ? JOBS - NATURAL_JOBS - 1 : 1))} # beside them
REPEAT=${REPEAT:-1}                      # how often a natural line comes beside espeak
ENCODERS=${ENCODERS:-$JOBS}
LEARN_SECONDS=${LEARN_SECONDS:-600}
LIMIT=${LIMIT:-}                         # seconds of a command after which it is asked to stop and to keep what it has
DATA=${DATA:-data/fledgling}
CARRY=${CARRY:-$DATA/carry}              # the loads that carry.py made
RUNS=${RUNS:-runs}
SET=${SET:-}                             # more settings for the language model: "--set train.learning_rate=1e-3"
HERE=training/fledgling
CLEAN=()
[ -n "$CHANNELS" ] || CLEAN=(--clean)
GOES_ON=() # what was learned before should not be thrown away by the first steps
[ -z "$BEGIN_WITH" ] || GOES_ON=(--set model.check_pretrained=true --set train.learning_rate=1e-3)
export PYTHONPATH=src:$DATA/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

say() { echo "[$(date +%T)] $*"; }

unpack() {
  for wheel in "$CARRY"/*/wheels/*.whl; do
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

texts() { for folder in "$DATA/texts" "$CARRY/0/texts"; do [ -d "$folder" ] && echo "$folder" && return; done; }

sounds() {
  espeak_sounds >"$DATA/espeak.log" 2>&1 &
  local beside=$!
  local sources=() # natural speech that was made elsewhere; what is made here is shaped already, and its manifest has both
  for folder in "$CARRY"/*/natural; do [ ! -d "$folder" ] || sources+=("$folder"); done
  [ ${#sources[@]} = 0 ] ||
    $PYTHON $HERE/shape_natural.py "${sources[@]}" --out "$DATA/natural_shaped" --jobs "$JOBS" "${CLEAN[@]}"
  natural_sounds
  wait $beside || { cat "$DATA/espeak.log"; return 1; }
  tail -n 2 "$DATA/espeak.log"
  [ -e "$DATA/natural_shaped/manifest.jsonl" ] || { say "there is no natural speech: carry some, or Kokoro"; return 1; }
}

espeak_sounds() { # the codec's first, which is wanted first
  [ -n "$CODEC" ] || espeak espeak_codec --seed 7 --hours "$CODEC_HOURS" --speakers "$CODEC_SPEAKERS"
  [ "$HOURS" = 0 ] || espeak espeak --hours "$HOURS" --speakers "$SPEAKERS"
}

espeak() {
  local name=$1
  shift
  [ -e "$DATA/$name/manifest.jsonl" ] ||
    $PYTHON $HERE/espeak_corpus.py --texts "$(texts)" --out "$DATA/$name" --jobs "$ESPEAK_JOBS" "${CLEAN[@]}" "$@"
}

natural_sounds() {
  local weights=("$CARRY"/*/kokoro)
  [ -d "${weights[0]}" ] || { say "Kokoro was not carried: there is only the natural speech that was"; return 0; }
  [ -e "$DATA/natural_shaped/finished" ] && return 0
  # shellcheck disable=SC2086
  $PYTHON $HERE/natural_corpus.py --texts "$(texts)" --out "$DATA/natural_shaped" --shaped "${CLEAN[@]}" --seed "$NATURAL_SEED" \
    --jobs "$NATURAL_JOBS" --hours "$NATURAL_HOURS" --speakers "$NATURAL_SPEAKERS" \
    --seconds "${NATURAL_SOUND_SECONDS:-165}" --device "$NATURAL_DEVICE" $NATURAL_OPTIONS --weights "${weights[@]}" \
    >"$DATA/natural.log" 2>&1 || { tail -n 30 "$DATA/natural.log"; return 1; }
  grep -v " to .*: .* x real time" "$DATA/natural.log" | sort | uniq -c || true # what was remarked, and how often
  grep " x real time" "$DATA/natural.log" | tail -n 3 || true
  touch "$DATA/natural_shaped/finished"
}

codec() {
  [ -z "$CODEC" ] || { mkdir -p "$RUNS/codec" && cp -r "$CODEC" "$RUNS/codec/codec"; return; }
  # shellcheck disable=SC2086
  $PYTHON $HERE/train_codec.py --source "$DATA/natural_shaped=0.7" --source "$DATA/espeak_codec=0.3" \
    --out "$RUNS/codec" --seconds "$CODEC_SECONDS" --total "${CODEC_TOTAL:-$CODEC_SECONDS}" --limit "$CODEC_CLIPS" \
    $CODEC_OPTIONS
  [ -n "${OUT:-}" ] || return 0
  cp "$RUNS/codec/codec/model.safetensors" "$OUT/codec.safetensors"
  cp "$RUNS/codec/codec/config.json" "$OUT/codec.json"
  cp "$RUNS/codec/progress.json" "$OUT/codec_progress.json"
}

decoder() { # the two stages that it takes, with a clock and a folder of their own
  local begun=${CODEC:-src/myna/models/fledgling/codec} CODEC="" HOURS=0 RUNS=$RUNS/decoder
  local NATURAL_SOUND_SECONDS=${NATURAL_SOUND_SECONDS:-60}
  local CODEC_OPTIONS="--decoder-only --begin-with $begun $CODEC_OPTIONS"
  mkdir -p "$RUNS"
  [ -e "$RUNS/began" ] || date +%s >"$RUNS/began"
  stage sounds
  planned CODEC_SECONDS decoder
  stage codec
}

encode() {
  # A codec that has learned more since is another codec, and wants another egg.
  diff -rq "$RUNS/codec/codec" "$DATA/egg/codec" >/dev/null 2>&1 || egg
  $PYTHON $HERE/mix.py --natural "$DATA/natural_shaped" --espeak "$DATA/espeak" --repeat "$REPEAT" --out "$DATA/mixed"
  $PYTHON $HERE/encode.py --model "$DATA/egg" --work "$DATA/codes" --jobs "$ENCODERS" \
    "$DATA/mixed/train=$DATA/prepared/train" "$DATA/mixed/held_out=$DATA/prepared/held_out"
}

egg() {
  rm -rf "$DATA/egg"
  if [ -n "$BEGIN_WITH" ]; then
    diff -rq "$RUNS/codec/codec" "$BEGIN_WITH/codec" || { say "$BEGIN_WITH knows other codes than those of $CODEC"; return 1; }
    cp -r "$BEGIN_WITH" "$DATA/egg"
  else
    # shellcheck disable=SC2086
    $PYTHON $HERE/make_fledgling.py --codec "$RUNS/codec/codec" --out "$DATA/egg" $EGG_OPTIONS
  fi
}

trial() {
  rm -rf "$RUNS/trial"
  # shellcheck disable=SC2086
  $PYTHON -m myna train $HERE/language_model.yaml --out "$RUNS/trial" --set model.source="$DATA/egg" \
    --set data.train="$DATA/prepared/train" --set data.evaluation=null \
    --set train.steps=60 --set train.warmup=10 "${GOES_ON[@]}" $SET
}

learn() { # as many steps as fit, by the trial; cut by LIMIT, carried on by the next command
  local run=$RUNS/language_model steps
  [ -d "$run/model" ] && { say "$run is finished"; return; }
  if [ -d "$run/checkpoints" ]; then
    timeout --signal=TERM "$(left)" $PYTHON -m myna train --resume "$run" || cut $?
  else
    steps=$($PYTHON $HERE/plan_steps.py "$RUNS/trial" --seconds "$LEARN_SECONDS")
    say "$steps steps in about $LEARN_SECONDS s"
    # shellcheck disable=SC2086
    timeout --signal=TERM "$(left)" $PYTHON -m myna train $HERE/language_model.yaml --out "$run" \
      --set model.source="$DATA/egg" --set data.train="$DATA/prepared/train" \
      --set data.evaluation="$DATA/prepared/held_out" --set train.steps="$steps" "${GOES_ON[@]}" $SET || cut $?
  fi
}

left() { # SECONDS is the shell's own clock of this command
  [ -n "$LIMIT" ] || { echo 0; return; } # which is no limit
  echo $((LIMIT > SECONDS + 10 ? LIMIT - SECONDS : 10))
}

cut() { [ "$1" = 124 ] && say "stopped by the clock: the same command goes on"; return "$1"; }

ship() {
  $PYTHON $HERE/ship.py --run "$RUNS/language_model" --codec "$DATA/egg/codec" --out "$DATA/shipped"
  if [ -n "${OUT:-}" ]; then # a flat folder: only so many files come back, and they are named by what they are
    cp "$DATA"/shipped/*.safetensors "$OUT"/
    cp "$DATA/shipped/codec/model.safetensors" "$OUT/codec.safetensors"
    tar -C "$DATA/shipped" --exclude='*.safetensors' -czf "$OUT/rest.tgz" .
    tar -czf "$OUT/metrics.tgz" "$RUNS"/*/metrics.jsonl "$RUNS"/*/log.txt "$RUNS"/*/config.yaml
  fi
}

all() {
  [ -e "$RUNS/began" ] || date +%s >"$RUNS/began"
  check
  planned NATURAL_SOUND_SECONDS sounds
  stage sounds
  [ -n "$CODEC" ] || planned CODEC_SECONDS codec
  stage codec
  stage encode
  stage trial
  planned LEARN_SECONDS learn
  stage learn
  stage ship
}

planned() { # NAME STAGE: what is left decides, and is decided once: the rate falls over it
  local kept=$RUNS/plan.$2 gone
  gone=$(($(date +%s) - $(cat "$RUNS/began")))
  [ -e "$kept" ] || $PYTHON $HERE/plan_seconds.py "$2" --budget "$BUDGET" --gone "$gone" \
    ${CODEC:+--codec-there} >"$kept"
  printf -v "$1" %s "$(cat "$kept")"
  say "$gone of $BUDGET s are over; ${!1} s for $2"
}

stage() { # once, however often `all` is cut and typed again
  [ -e "$RUNS/done.$1" ] && return 0
  say "$1"
  "$1"
  touch "$RUNS/done.$1"
}

mkdir -p "$DATA" "$RUNS" ${OUT:+"$OUT"}
unpack
for stage in "$@"; do
  case $stage in
    all | decoder | check | sounds | codec | encode | trial | learn | ship) say "$stage"; "$stage" ;;
    *) echo "there is no stage $stage; see the head of $0" >&2; exit 2 ;;
  esac
done
say done
