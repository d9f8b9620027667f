#!/usr/bin/env bash
# Trains a dictionary of the built-in model: features of the residual stream after a middle block, on stories and exercises like those
# that it learned from; and writes a page with the texts that each feature is active in.
# usage: models/stories/dictionary.sh OUT
# The same commit gives the same files. What is there already is kept, and an interrupted training is resumed. SEED, TOKENS, STEPS, SITE,
# LATENTS and MODEL may be set in the environment.
set -euo pipefail
out=$(realpath --canonicalize-missing "${1:?usage: models/stories/dictionary.sh OUT}")
cd "$(dirname "$0")/../.."
mkdir -p "$out"
seed=${SEED:-1}
model=${MODEL:-built-in}

gpt2() { cargo run --quiet --release --locked -p candle-gpt2-cli -- "$@"; }

[ -d "$out/stories" ] || {
  rm -rf "$out/stories.part"
  cargo run --quiet --release --locked -p story-generator -- corpus --seed "$((seed + 1000))" \
    --tokens "${TOKENS:-2500000}" --out "$out/stories.part"
  mv "$out/stories.part" "$out/stories"
}

resume=()
[ ! -f "$out/dictionary/training-state.safetensors" ] || resume=(--resume)
gpt2 train --task dictionary --init "$model" --data "$out/stories/train.jsonl" --out "$out/dictionary" --seed "$seed" \
  --site "${SITE:-blocks.3.hook_resid_post}" --kind batch-top-k --latents "${LATENTS:-768}" --k 16 --steps "${STEPS:-1000}" \
  --batch-size 8 --context 256 --lr 2e-3 --held-out 0.02 --eval-every 250 --save-every 250 "${resume[@]}"

head -n 1500 "$out/stories/train.jsonl" > "$out/examples.jsonl"
[ -f "$out/features.html" ] ||
  gpt2 look features --model "$model" --sae "$out/dictionary" --prompts-file "$out/examples.jsonl" --html "$out/features.html"
