#!/usr/bin/env bash
# Makes the stories, a tokenizer, a model that learns from them, its GGUF in q8_0 and a report of what it can do, from nothing.
# usage: models/stories/make.sh OUT
# The same commit gives the same files. What is there already is kept, and an interrupted training goes on. About 150 minutes of
# training on two cores; CORPUS_TOKENS, STEPS and the ramps in the environment change it.
set -euo pipefail
out=$(realpath --canonicalize-missing "${1:?usage: models/stories/make.sh OUT}")
cd "$(dirname "$0")/../.."
mkdir -p "$out"

gpt2() { cargo run --quiet --release --locked -p candle-gpt2-cli -- "$@"; }

[ -d "$out/corpus" ] || {
  rm -rf "$out/corpus.part"
  cargo run --quiet --release --locked -p story-generator -- corpus --seed "${SEED:-1}" \
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

[ -d "$out/tokens" ] ||
  gpt2 tokenize "$out/corpus/train.jsonl" --tokenizer "$out/tokenizer/tokenizer.json" --out "$out/tokens" --held-out 0.002

# Short windows first: a head that goes back to what followed a token before needs fewer tokens there. 12 million tokens at 8 windows of
# 64, and 10 million each at 128, 256 and 512.
cat > "$out/config.json" <<'JSON'
{"vocab_size": 2048, "n_positions": 512, "n_embd": 192, "n_layer": 6, "n_head": 6,
 "embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0}
JSON
resume=()
[ ! -f "$out/model/training-state.safetensors" ] || resume=(--resume)
gpt2 train --data "$out/tokens" --config "$out/config.json" --out "$out/model" --seed "${SEED:-1}" --dtype f16 \
  --steps "${STEPS:-40500}" --batch-size 8 --context-ramp "${CONTEXT_RAMP:-0:64,23400:128,33200:256,38100:512}" \
  --random-positions --document-starts 0.5 --lr 3e-3 --schedule linear --final-share 0 --warmup-steps 200 \
  --weight-decay 0.1 --beta-2-half-life 20000 --eval-every 1000 --save-every 1000 "${resume[@]}"

[ -f "$out/model.gguf" ] || gpt2 convert "$out/model" "$out/model.gguf" --dtype q8_0
cargo run --quiet --release --locked -p story-probes -- "$out/model" --corpus "$out/corpus" --json > "$out/report.json"
cargo run --quiet --release --locked -p story-probes -- "$out/model" --corpus "$out/corpus"
