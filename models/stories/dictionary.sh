#!/usr/bin/env bash
# Trains the built-in model's transcoders, which ship with the program and the page: one for each block's MLP,
# on stories and exercises like the model's training data. Writes them to OUT/transcoders, and their figures
# to OUT/figures.md.
# usage: models/stories/dictionary.sh --stories DIR OUT [LAYER]
# The output depends only on the commit and the stories. Existing files are kept, and an interrupted training
# is resumed. With a LAYER, also writes OUT/features_LAYER.html, a page with texts that activate each feature
# of that block. The environment can set SEED, TOKENS, STEPS, LATENTS, K and MODEL.
set -euo pipefail
# shellcheck source=models/stories/common.sh
source "$(dirname "$0")/common.sh"
page=${4:-}
mkdir -p "$out/transcoders"
seed=${SEED:-1}
model=${MODEL:-built-in}

corpus "$((seed + 1000))" --tokens "${TOKENS:-2500000}"
layers=$(seq 0 "$(($(sed -n 's/.*"n_layer": *\([0-9]*\).*/\1/p' models/stories/config.json) - 1))")

# bf16 takes less space on the page than f16, because its low bytes compress better.
for layer in $layers; do
  trained=$out/layer_$layer
  resume=()
  [ ! -f "$trained/training-state.safetensors" ] || resume=(--resume)
  [ -f "$trained.json" ] || {
    gpt2 train --task dictionary --init "$model" --data "$out/corpus/late.jsonl" --out "$trained" --seed "$seed" \
      --site "blocks.$layer.hook_resid_mid" --kind transcoder --latents "${LATENTS:-256}" --k "${K:-12}" --steps "${STEPS:-1200}" \
      --batch-size 8 --context 128 --lr 2e-3 --held-out 0.01 --eval-every 400 --save-every 400 --dtype bf16 --json "${resume[@]}" \
      > "$trained.json.part"
    mv "$trained.json.part" "$trained.json"
  }
  mkdir -p "$out/transcoders/layer_$layer"
  cp "$trained/cfg.json" "$trained/sae_weights.safetensors" "$out/transcoders/layer_$layer/"
done

# Figures by layer that `gpt2 train --json` measured on held-out texts.
number() { sed -n "s/.*\"$2\": *\([-0-9.][-0-9.e]*\).*/\1/p" "$1" | head -n 1; }
{
  echo '| block | active at a token (L0) | variance not explained (FVU) | loss, nats per token | dead of all |'
  echo '|---|---|---|---|---|'
  for layer in $layers; do
    report=$out/layer_$layer.json
    awk -v layer="$layer" -v l0="$(number "$report" l0)" -v explained="$(number "$report" explained_variance)" \
      -v delta="$(number "$report" delta_cross_entropy)" -v dead="$(number "$report" dead_latents)" -v all="${LATENTS:-256}" \
      'BEGIN { printf "| %d | %.1f | %.3f | %+.3f | %d of %d |\n", layer, l0, 1 - explained, delta, dead, all }'
  done
} | tee "$out/figures.md"

[ -z "$page" ] || {
  head -n 1500 "$out/corpus/late.jsonl" > "$out/examples.jsonl"
  gpt2 look features --model "$model" --sae "$out/transcoders/layer_$page" --prompts-file "$out/examples.jsonl" \
    --html "$out/features_$page.html"
}
