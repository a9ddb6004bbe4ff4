#!/usr/bin/env bash
# Train fledgling on one machine with a GPU, stage by stage: bash training/fledgling/fledgling.sh STAGE...
#
#   voices   a codec in $BUDGET seconds: natural and eSpeak speech without channels, then the codec, augmented on the GPU,
#            on that speech and on the real speech of the bundle
#   language a language model in $BUDGET seconds on the codes of a trained codec: natural, eSpeak and real speech, then a
#            training that begins with the checkpoint of the bundle
#   both     voices in $VOICES_BUDGET seconds, then language in the rest of $BUDGET on the codes of that codec; the
#            language model begins with the weights of the shipped model
#
# Stages of these three, which can also be run one by one:
#   check    import everything that the other stages import
#   corpora  natural speech, synthesized and augmented, and eSpeak speech  ($NATURAL_SECONDS and 20 s)
#   codec    train the codec                                               ($CODEC_SECONDS and 35 s)
#   collect  copy what exists of the codec to $OUT, at any time
#   encode   the initial checkpoint, and the codes of all clips
#   trial    sixty steps, from which the number of steps is planned
#   train    the language model                                            ($TRAIN_SECONDS)
#   export   fp16 weights in small files, copied to $OUT
#
# An interrupted stage continues when it is run again. Results are copied to $OUT as soon as they exist. See README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
BUDGET=${BUDGET:-1400}                   # seconds of `voices`, `language` or `both`
HOURS=${HOURS:-40}                       # of espeak for the language model
SPEAKERS=${SPEAKERS:-1200}
CODEC_HOURS=${CODEC_HOURS:-8}            # of espeak for the codec, of more speakers an hour
CODEC_SPEAKERS=${CODEC_SPEAKERS:-800}
CODEC_SECONDS=${CODEC_SECONDS:-430}      # of training in this command, and in all
CODEC_TOTAL=${CODEC_TOTAL:-}
CODEC_CLIPS=${CODEC_CLIPS:-20000}        # of each source: 15 hours and more, of all speakers
CODEC_OPTIONS=${CODEC_OPTIONS:-}
CODEC_ESPEAK_OPTIONS=${CODEC_ESPEAK_OPTIONS:-} # --languages en cs: instead of English, Arabic and Vietnamese
NATURAL_WEIGHT=${NATURAL_WEIGHT:-0.45}   # of each source in a batch of the codec's training
ESPEAK_WEIGHT=${ESPEAK_WEIGHT:-0.1}
REAL_WEIGHTS=${REAL_WEIGHTS:-en-real=0.28 festvox-ru=0.07 asterisk-fr=0.05 gcin-zh=0.03} # by its folders in the bundle
REAL_WEIGHT=${REAL_WEIGHT:-0.02}         # of real speech that is not named there
INIT_FROM=""                             # set by `language`: a checkpoint to begin with, whose codec is kept
CODEC=""                                 # set by `language`: an existing codec, so that none is trained
INIT_OPTIONS=${INIT_OPTIONS:-}
NATURAL_HOURS=${NATURAL_HOURS:-200}      # of natural speech to synthesize here, if Kokoro is in the bundle
NATURAL_SPEAKERS=${NATURAL_SPEAKERS:-6000}
NATURAL_SEED=${NATURAL_SEED:-2}          # another seed than that of speech from elsewhere, so that speaker names differ
NATURAL_SECONDS=${NATURAL_SECONDS:-}     # of synthesis: 165 by default
NATURAL_DEVICE=${NATURAL_DEVICE:-cuda}
NATURAL_OPTIONS=${NATURAL_OPTIONS:-}     # --exactly: in fp32, without our own kernels
CHANNELS=${CHANNELS-yes}                 # channel simulation for two speakers in three; CHANNELS= for none
JOBS=${JOBS:-$(nproc)}
NATURAL_JOBS=${NATURAL_JOBS:-10}
ESPEAK_JOBS=${ESPEAK_JOBS:-$((JOBS > NATURAL_JOBS + 1 ? JOBS - NATURAL_JOBS - 1 : 1))} # beside them
REAL_JOBS=${REAL_JOBS:-$((JOBS / 2 > 0 ? JOBS / 2 : 1))} # beside them as well
REPEAT=${REPEAT:-1}                      # of all lines in an epoch, with other codes each time
ENCODERS=${ENCODERS:-$JOBS}
TRAIN_SECONDS=${TRAIN_SECONDS:-600}
LIMIT=${LIMIT:-}                         # seconds of a command after which it is told to stop and to save a checkpoint
DATA=${DATA:-data/fledgling}
BUNDLE=${BUNDLE:-$DATA/bundle}           # the parts that pack_offline.py made
PARTS=${PARTS:-0}                        # of the bundle that `voices` and `language` wait for after the synthesis
RUNS=${RUNS:-runs}
SET=${SET:-}                             # more settings for the language model: "--set train.learning_rate=1e-3"
HERE=training/fledgling
CLEAN=()
[ -n "$CHANNELS" ] || CLEAN=(--clean)
CONTINUED=() # set by `language`: the learning rate of known weights with unknown codes
export PYTHONPATH=src:$DATA/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

say() { echo "[$(date +%T)] $*"; }

unpack() {
  for wheel in "$BUNDLE"/*/wheels/*.whl; do
    [ -e "$wheel" ] || continue
    [ -e "$DATA/site/.$(basename "$wheel")" ] && continue
    $PYTHON -m zipfile -e "$wheel" "$DATA/site" && touch "$DATA/site/.$(basename "$wheel")"
  done
}

check() {
  $PYTHON -c "
import accelerate, espeakng_loader, peft, pyarrow, pydantic, rich, safetensors, soundfile, soxr, torch, transformers
import cyclopts, yaml
import myna.evaluate.callback, myna.evaluate.model_card, myna.train.loop
for package in (torch, transformers, peft, pyarrow, pydantic):
    print(package.__name__, package.__version__)
print('cuda', torch.cuda.is_available())"
}

texts() { for folder in "$DATA/texts" "$BUNDLE/0/texts"; do [ -d "$folder" ] && echo "$folder" && return; done; }

corpora() {
  espeak_corpora >"$DATA/espeak.log" 2>&1 &
  local beside=$!
  local sources=() # natural speech from elsewhere; what is made here is augmented already, and its manifest has both
  for folder in "$BUNDLE"/*/natural; do [ ! -d "$folder" ] || sources+=("$folder"); done
  [ ${#sources[@]} = 0 ] ||
    $PYTHON $HERE/augment_natural.py "${sources[@]}" --out "$DATA/natural_augmented" --jobs "$JOBS" "${CLEAN[@]}" ||
    { wait $beside || true; return 1; } # what eSpeak has made is kept
  natural_corpus || { wait $beside || true; return 1; }
  wait $beside || { cat "$DATA/espeak.log"; return 1; }
  tail -n 2 "$DATA/espeak.log"
  [ -e "$DATA/natural_augmented/manifest.jsonl" ] || { say "there is no natural speech: bundle some, or Kokoro"; return 1; }
}

espeak_corpora() { # the codec's first, which is needed first
  # shellcheck disable=SC2086
  [ -n "$CODEC" ] ||
    espeak espeak_codec --seed 7 --hours "$CODEC_HOURS" --speakers "$CODEC_SPEAKERS" $CODEC_ESPEAK_OPTIONS
  [ "$HOURS" = 0 ] || espeak espeak --hours "$HOURS" --speakers "$SPEAKERS"
}

espeak() {
  local name=$1
  shift
  [ -e "$DATA/$name/manifest.jsonl" ] ||
    $PYTHON $HERE/espeak_corpus.py --texts "$(texts)" --out "$DATA/$name" --jobs "$ESPEAK_JOBS" "${CLEAN[@]}" "$@"
}

natural_corpus() {
  local weights=("$BUNDLE"/*/kokoro)
  [ -d "${weights[0]}" ] || { say "the bundle has no Kokoro: only its natural speech is used"; return 0; }
  [ -e "$DATA/natural_augmented/finished" ] && return 0
  # shellcheck disable=SC2086
  $PYTHON $HERE/natural_corpus.py --texts "$(texts)" --out "$DATA/natural_augmented" --augment "${CLEAN[@]}" --seed "$NATURAL_SEED" \
    --jobs "$NATURAL_JOBS" --hours "$NATURAL_HOURS" --speakers "$NATURAL_SPEAKERS" \
    --seconds "${NATURAL_SECONDS:-165}" --device "$NATURAL_DEVICE" $NATURAL_OPTIONS --weights "${weights[@]}" \
    >"$DATA/natural.log" 2>&1 || { tail -n 30 "$DATA/natural.log"; return 1; }
  grep -v " to .*: .* x real time" "$DATA/natural.log" | sort | uniq -c || true # warnings, and how often
  grep " x real time" "$DATA/natural.log" | tail -n 3 || true
  touch "$DATA/natural_augmented/finished"
}

codec() {
  [ -z "$CODEC" ] || { mkdir -p "$RUNS/codec" && cp -r "$CODEC" "$RUNS/codec/codec"; return; }
  local sources=() backgrounds=() recogniser=()
  codec_source "$DATA/natural_augmented" "$NATURAL_WEIGHT" "natural speech"
  codec_source "$DATA/espeak_codec" "$ESPEAK_WEIGHT" "eSpeak's speech"
  real_sources
  [ ${#sources[@]} -gt 0 ] || { say "there is no speech to train on"; return 1; }
  for file in "$BUNDLE"/*/background/*.parquet; do [ ! -e "$file" ] || backgrounds+=(--background "$file"); done
  [ ${#backgrounds[@]} -gt 0 ] || say "the bundle has no backgrounds: only synthetic ones are used"
  for file in "$BUNDLE"/*/speech_encoder.safetensors; do [ ! -e "$file" ] || recogniser=(--speech-encoder "$file"); done
  [ ${#recogniser[@]} -gt 0 ] || say "the bundle has no recogniser: speech is compared by its spectra alone"
  # shellcheck disable=SC2086
  $PYTHON $HERE/train_codec.py "${sources[@]}" "${backgrounds[@]}" "${recogniser[@]}" --augment \
    --out "$RUNS/codec" --seconds "$CODEC_SECONDS" --total "${CODEC_TOTAL:-$CODEC_SECONDS}" --limit "$CODEC_CLIPS" \
    $CODEC_OPTIONS
  collect
}

codec_source() { # FOLDER WEIGHT DESCRIPTION
  if [ -e "$1/manifest.jsonl" ]; then sources+=(--source "$1=$2"); else say "there is no $3 in $1: trained without"; fi
}

real_sources() { # parts of one corpus may lie in several parts of the bundle
  local file name weight
  rm -rf "$DATA/real"
  for file in "$BUNDLE"/*/real/*/*.parquet; do
    [ -e "$file" ] || { say "the bundle has no real speech: trained without"; return 0; }
    name=$(basename "$(dirname "$file")")
    mkdir -p "$DATA/real/$name"
    ln -s "$(realpath "$file")" "$DATA/real/$name/"
  done
  for name in "$DATA"/real/*; do
    weight=$(tr ' ' '\n' <<<"$REAL_WEIGHTS" | sed -n "s/^$(basename "$name")=//p")
    sources+=(--source "$name=${weight:-$REAL_WEIGHT}")
  done
}

collect() { # eight files
  [ -n "${OUT:-}" ] || return 0
  [ -d "$RUNS/codec/codec" ] || { say "there is no codec yet"; return 0; }
  rm -rf "$OUT/codec" && cp -r "$RUNS/codec/codec" "$OUT/codec"
  for file in portable.safetensors progress.json round_trips.npz; do
    [ ! -e "$RUNS/codec/$file" ] || cp "$RUNS/codec/$file" "$OUT/"
  done
}

voices() { # with a clock and a folder of their own; whatever is missing, the codec is trained on the rest
  local CODEC="" RUNS=$RUNS/voices CODEC_CLIPS=${VOICES_CLIPS:-12000}
  # Frames at the edges of a window lack the decoder's context, so more are decoded than compared.
  # Words were further from their goal than voices: steps without discriminators take half the time.
  local CODEC_OPTIONS="--window 32 --loss-frames 24 --discriminator-after 0.12 --log-every 20 --checkpoint-every 180 $CODEC_OPTIONS"
  mkdir -p "$RUNS"
  [ -e "$RUNS/began" ] || date +%s >"$RUNS/began"
  [ -e "$RUNS/plan.voices" ] || voices_corpora ||
    say "not all corpora could be made: the codec is trained on what there is"
  wait_for_parts
  planned CODEC_SECONDS voices
  stage codec
}

voices_corpora() { # many voices and languages, a few clips of each voice, in a process of its own, which may fail
  local languages=${VOICES_LANGUAGES:-es fr it pt hi de cs pl sk nl sv da ro ca tr hu fi el}
  INIT_FROM="" CODEC="" OUT="" HOURS=0 CHANNELS="" CODEC_HOURS="${VOICES_ESPEAK_HOURS:-3}" \
    NATURAL_SECONDS="${NATURAL_SECONDS:-40}" NATURAL_HOURS="${VOICES_HOURS:-15}" \
    NATURAL_SPEAKERS="${VOICES_SPEAKERS:-2400}" NATURAL_OPTIONS="$NATURAL_OPTIONS --languages $languages" \
    CODEC_ESPEAK_OPTIONS="--languages en $languages" bash $HERE/fledgling.sh corpora
}

language() { # with a clock and a folder of its own; parts of the bundle may come while speech is synthesized
  local INIT_FROM=$DATA/initial CODEC=$DATA/initial/codec RUNS=$RUNS/language
  local NATURAL_SECONDS=${NATURAL_SECONDS:-360}
  local NATURAL_HOURS=${LANGUAGE_HOURS:-300} NATURAL_SPEAKERS=${LANGUAGE_SPEAKERS:-12000}
  local HOURS=${LANGUAGE_ESPEAK_HOURS:-10} SPEAKERS=${LANGUAGE_ESPEAK_SPEAKERS:-400}
  local CONTINUED=(--set train.learning_rate="${LANGUAGE_RATE:-1.2e-3}") # of known weights with unknown codes
  mkdir -p "$RUNS"
  [ -e "$RUNS/began" ] || date +%s >"$RUNS/began"
  check
  real_corpus_beside &
  local beside=$!
  stage corpora
  wait $beside || { cat "$DATA/real.log"; return 1; }
  tail -n 2 "$DATA/real.log"
  stage initial
  stage codec
  stage encode
  stage trial
  planned TRAIN_SECONDS train
  stage train
  stage export_model
}

both() { # corpora of the codec lie in a folder of their own, since they have other settings
  [ -e "$RUNS/began" ] || date +%s >"$RUNS/began"
  DATA=$DATA/voices BUNDLE=$BUNDLE BUDGET=${VOICES_BUDGET:-$((BUDGET / 2))} bash $HERE/fledgling.sh voices
  local BUDGET=$((BUDGET - $(date +%s) + $(cat "$RUNS/began"))) NATURAL_SECONDS=${LANGUAGE_NATURAL_SECONDS:-150}
  language
}

initial() { # the checkpoint to begin with: its files may lie in several parts of the bundle, or it is made of the shipped one
  local parts=("$BUNDLE"/*/init) speech=("$DATA/natural_augmented") folder
  rm -rf "$DATA/initial" && mkdir -p "$DATA/initial"
  if [ -d "${parts[0]}" ]; then
    for folder in "${parts[@]}"; do cp -r "$folder/." "$DATA/initial/"; done
    return
  fi
  local codec=${RUNS%/language}/voices/codec/codec
  [ -d "$codec" ] || { say "there is no checkpoint to begin with: pack_offline.py --init, or train a codec (voices)"; return 1; }
  for folder in "$BUNDLE"/*/real/en-real; do [ ! -d "$folder" ] || speech+=("$folder"); done
  rm -rf "$DATA/initial"
  $PYTHON $HERE/grow_fledgling.py --from src/myna/models/fledgling --codec "$codec" --speech "${speech[@]}" --limit 900 \
    --out "$DATA/initial"
}

real_corpus() { # English alone; who is in two corpora has the variants of the first
  local sources=() english=() source words="$BUNDLE/0/real_words.json"
  real_sources
  for source in ${REAL_VARIANTS:-en-learners=6 en-real=15 en-commands=3}; do
    [ ! -d "$DATA/real/${source%%=*}" ] || english+=("$DATA/real/$source")
  done
  [ -e "$words" ] && [ ${#english[@]} -gt 0 ] || { say "the bundle has no real English: trained without"; return 0; }
  nice $PYTHON $HERE/augment_real.py --source "${english[@]}" --words "$words" --jobs "$REAL_JOBS" --out "$DATA/real_augmented"
}

real_corpus_beside() { # natural speech needs the GPU most, and leaves processors over
  wait_for_parts
  stage real_corpus >"$DATA/real.log" 2>&1
}

wait_for_parts() { # they may still be on their way while natural speech is made
  local waited=0
  while [ "$(find "$BUNDLE" -mindepth 1 -maxdepth 1 -name '[0-9]*' | wc -l)" -lt "$PARTS" ]; do
    [ $waited -lt 240 ] || { say "of $PARTS parts of the bundle some did not come: goes on without them"; return 0; }
    [ $waited -gt 0 ] || say "waits for the $PARTS parts of the bundle"
    sleep 2
    waited=$((waited + 2))
  done
}

encode() {
  # Another codec needs another initial checkpoint.
  diff -rq "$RUNS/codec/codec" "$DATA/init/codec" >/dev/null 2>&1 || init_model
  local real=()
  [ ! -e "$DATA/real_augmented/manifest.jsonl" ] || real=(--real "$DATA/real_augmented")
  $PYTHON $HERE/mix_corpora.py --natural "$DATA/natural_augmented" --espeak "$DATA/espeak" "${real[@]}" \
    --repeat "$REPEAT" --out "$DATA/mixed"
  $PYTHON $HERE/encode.py --model "$DATA/init" --work "$DATA/codes" --jobs "$ENCODERS" \
    "$DATA/mixed/train=$DATA/prepared/train" "$DATA/mixed/held_out=$DATA/prepared/held_out"
}

init_model() {
  rm -rf "$DATA/init"
  if [ -n "$INIT_FROM" ]; then
    diff -rq "$RUNS/codec/codec" "$INIT_FROM/codec" || { say "$INIT_FROM was trained with other codes than those of $CODEC"; return 1; }
    cp -r "$INIT_FROM" "$DATA/init"
  else
    # shellcheck disable=SC2086
    $PYTHON $HERE/init_fledgling.py --codec "$RUNS/codec/codec" --out "$DATA/init" $INIT_OPTIONS
  fi
}

trial() {
  rm -rf "$RUNS/trial"
  # shellcheck disable=SC2086
  $PYTHON -m myna train $HERE/language_model.yaml --out "$RUNS/trial" --set model.source="$DATA/init" \
    --set data.train="$DATA/prepared/train" --set data.evaluation=null \
    --set train.early_stopping_patience=null --set train.steps=60 --set train.warmup=10 "${CONTINUED[@]}" $SET
}

train() { # as many steps as fit, by the trial; stopped by LIMIT, resumed by the next command
  local run=$RUNS/language_model steps
  [ -d "$run/model" ] && { say "$run is finished"; return; }
  if [ -d "$run/checkpoints" ]; then
    timeout --signal=TERM "$(left)" $PYTHON -m myna train --resume "$run" || cut $?
  else
    steps=$($PYTHON $HERE/plan_steps.py "$RUNS/trial" --seconds "$TRAIN_SECONDS")
    say "$steps steps in about $TRAIN_SECONDS s"
    # shellcheck disable=SC2086
    timeout --signal=TERM "$(left)" $PYTHON -m myna train $HERE/language_model.yaml --out "$run" \
      --set model.source="$DATA/init" --set data.train="$DATA/prepared/train" \
      --set data.evaluation="$DATA/prepared/held_out" --set train.steps="$steps" "${CONTINUED[@]}" $SET || cut $?
  fi
}

left() { # SECONDS is the shell's own clock of this command
  [ -n "$LIMIT" ] || { echo 0; return; } # which is no limit
  echo $((LIMIT > SECONDS + 10 ? LIMIT - SECONDS : 10))
}

cut() { [ "$1" = 124 ] && say "stopped by LIMIT: the same command resumes"; return "$1"; }

export_model() {
  $PYTHON $HERE/export_fledgling.py --run "$RUNS/language_model" --codec "$DATA/init/codec" --out "$DATA/exported"
  if [ -n "${OUT:-}" ]; then # a flat folder of few files
    cp "$DATA"/exported/*.safetensors "$OUT"/
    rm -rf "$OUT/codec" && cp -r "$DATA/exported/codec" "$OUT/codec"
    tar -C "$DATA/exported" --exclude='*.safetensors' -czf "$OUT/rest.tgz" .
    tar -czf "$OUT/metrics.tgz" "$RUNS"/*/metrics.jsonl "$RUNS"/*/log.txt "$RUNS"/*/config.yaml
  fi
}

planned() { # NAME STAGE: seconds of a training, planned once, since the learning rate decays over them
  local plan=$RUNS/plan.$2 elapsed overhead least seconds
  elapsed=$(($(date +%s) - $(cat "$RUNS/began")))
  case $2 in # files are read, kernels chosen, the codec evaluated or the model exported
    voices) overhead=90 least=60 ;;
    train) overhead=50 least=30 ;;
  esac
  seconds=$((BUDGET - elapsed - overhead))
  [ -e "$plan" ] || echo $((seconds > least ? seconds : least)) >"$plan"
  printf -v "$1" %s "$(cat "$plan")"
  say "$elapsed of $BUDGET s are over; ${!1} s for $2"
}

stage() { # once, however often a command is run
  [ -e "$RUNS/done.$1" ] && return 0
  say "$1"
  "$1"
  touch "$RUNS/done.$1"
}

mkdir -p "$DATA" "$RUNS" ${OUT:+"$OUT"}
unpack
for stage in "$@"; do
  case $stage in
    export) say export; export_model ;; # `export` is a word of the shell
    voices | language | both | check | corpora | codec | collect | encode | trial | train) say "$stage"; "$stage" ;;
    *) echo "there is no stage $stage; see the head of $0" >&2; exit 2 ;;
  esac
done
say done
