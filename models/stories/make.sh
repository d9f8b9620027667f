#!/usr/bin/env bash
# Makes the stories, a tokenizer, a model that learns from them, its GGUF in q8_0, a report of what it can do and one of what it learned
# when, from nothing.
# usage: models/stories/make.sh OUT
# The same commit gives the same files. What is there already is kept, and an interrupted training goes on. SEED, CORPUS_TOKENS and the
# steps and ramps below may be set in the environment, for a quick try.
set -euo pipefail
out=$(realpath --canonicalize-missing "${1:?usage: models/stories/make.sh OUT}")
cd "$(dirname "$0")/../.."
mkdir -p "$out"
seed=${SEED:-1}

gpt2() { cargo run --quiet --release --locked -p candle-gpt2-cli -- "$@"; }
probes() { cargo run --quiet --release --locked -p story-probes -- "$@" --corpus "$out/corpus"; }

[ -d "$out/corpus" ] || {
  rm -rf "$out/corpus.part"
  cargo run --quiet --release --locked -p story-generator -- corpus --seed "$seed" \
    --tokens "${CORPUS_TOKENS:-24000000}" --out "$out/corpus.part"
  mv "$out/corpus.part" "$out/corpus"
}

# A training makes the tokenizer of its data; one step of the smallest model is enough.
[ -f "$out/tokenizer/tokenizer.json" ] || {
  rm -rf "$out/tokenizer"
  echo '{"vocab_size": 2048, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 1}' > "$out/smallest.json"
  gpt2 train --data "$out/corpus/tokenizer.jsonl" --config "$out/smallest.json" --out "$out/tokenizer" \
    --steps 1 --batch-size 1 --held-out 0
}

for lesson in copying train; do
  [ -d "$out/tokens-$lesson" ] ||
    gpt2 tokenize "$out/corpus/$lesson.jsonl" --tokenizer "$out/tokenizer/tokenizer.json" --out "$out/tokens-$lesson" --held-out 0.002
done

# A narrow model's matrices must be drawn wider than GPT-2's 0.02 for signals to pass: about one over the root of 192.
cat > "$out/config.json" <<'JSON'
{"vocab_size": 2048, "n_positions": 512, "n_embd": 192, "n_layer": 6, "n_head": 3, "initializer_range": 0.06,
 "embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0}
JSON

# A lesson: its name, the tokens that it is of, and options. It goes on where it was interrupted.
lesson() {
  local resume=()
  [ ! -f "$out/$1/training-state.safetensors" ] || resume=(--resume)
  gpt2 train --out "$out/$1" --data "$out/tokens-$2" --seed "$seed" --dtype f16 --beta-2-half-life 100000 \
    --eval-every 500 --save-every 500 "${@:3}" "${resume[@]}"
}

# Copying first, in windows that begin short: what goes back to where a token stood before needs fewer tokens there.
lesson copying copying --config "$out/config.json" --steps "${COPYING_STEPS:-4000}" --batch-size 32 \
  --context-ramp "${COPYING_RAMP:-0:16,1200:32,2400:64}" --lr 2e-3 --schedule constant --warmup-steps 50 --weight-decay 0 \
  --keep-steps 0,16,64,128,256,512,724,1024,1448,2048,2896,4000

# Then everything: 10 million tokens each in windows of 128, 256 and 512.
lesson model train --init "$out/copying" --steps "${STEPS:-17100}" --batch-size 8 \
  --context-ramp "${CONTEXT_RAMP:-0:128,9800:256,14700:512}" --random-positions --document-starts 0.5 --lr 2e-3 \
  --schedule linear --final-share 0 --warmup-steps 200 --weight-decay 0.1 \
  --keep-steps 64,128,256,362,512,724,1024,1448,2048,2896,4096,5793,8192,11585,14700,17100

[ -f "$out/model.gguf" ] || gpt2 convert "$out/model" "$out/model.gguf" --dtype q8_0
probes history "$out/copying" "$out/model" > "$out/history.json"
probes report "$out/model" --save "$out/report.json"
probes report "$out/model.gguf" --against "$out/report.json" --save "$out/report-q8.json"
