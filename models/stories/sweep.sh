#!/usr/bin/env bash
# Compares vocabularies, widths and depths of about the built-in model's size: trains each on the same number of
# tokens, and prints a table of held-out bits per byte.
# usage: models/stories/sweep.sh --stories DIR OUT
# Existing files are kept, and an interrupted training is resumed. The environment can set SEED and STEPS.
set -euo pipefail
# shellcheck source=models/stories/common.sh
source "$(dirname "$0")/common.sh"
[ $# -eq 3 ] || usage
mkdir -p "$out"
steps=${STEPS:-300}

corpus 2000 --tokens 2500000 >&2

# size VOCABULARY WIDTH LAYERS HEADS SEED: trains one model and prints its row.
size() {
  local model="$out/$1-$2-$3-$4-$5" tokens="$out/tokens-$1" resume=()
  local sizes="\"vocab_size\": $1, \"n_positions\": 512, \"n_embd\": $2, \"n_layer\": $3, \"n_head\": $4, \"initializer_range\": 0.05"
  [ -f "$tokens/tokenizer.json" ] || {
    rm -rf "$tokens" "$out/tokenizer"
    echo "{\"vocab_size\": $1, \"n_positions\": 8, \"n_embd\": 4, \"n_layer\": 1, \"n_head\": 1}" > "$out/smallest.json"
    gpt2 train --data "$out/corpus/tokenizer.jsonl" --config "$out/smallest.json" --out "$out/tokenizer" --steps 1 --batch-size 1 --held-out 0 >&2
    gpt2 tokenize "$out/corpus/last.jsonl" --tokenizer "$out/tokenizer/tokenizer.json" --out "$tokens" --held-out 0.002 >&2
  }
  echo "{$sizes, \"embd_pdrop\": 0, \"attn_pdrop\": 0, \"resid_pdrop\": 0}" > "$out/config.json"
  [ ! -f "$model/training-state.safetensors" ] || resume=(--resume)
  gpt2 train --out "$model" --data "$tokens" --tokenizer "$tokens/tokenizer.json" --config "$out/config.json" --initialization mimetic \
    --seed "$5" --optimizer muon --document-starts 0.5 --lr 2e-3 --schedule linear --final-share 0 --warmup-steps 30 --weight-decay 0.1 \
    --batch-size 16 --context 256 --steps "$steps" --eval-every "$steps" --save-every 50 --json "${resume[@]}" > "$model.json"
  gpt2 eval text:bits --model "$model" --data "$stories/core-valid.txt" --json > "$model-valid.json"
  sed -n "s/.*\"parameters\": *\([0-9]*\).*/| $1 | $2 | $3 | $4 | $5 | \1 | /p" "$model.json" | tr -d '\n'
  sed -n 's/.*"bits_per_byte","value":\([0-9.]*\).*/\1 |/p' "$model-valid.json"
}

echo "| vocabulary | width | blocks | heads | seed | parameters | held-out bits per byte |"
echo "|---|---|---|---|---|---|---|"
size 4096 256 7 4 "${SEED:-1}"
size 4096 256 7 4 "$((${SEED:-1} + 1))"
size 4096 256 7 8 "${SEED:-1}"
size 4096 192 13 3 "${SEED:-1}"
size 4096 384 3 6 "${SEED:-1}"
size 2048 256 8 4 "${SEED:-1}"
size 8192 256 6 4 "${SEED:-1}"
