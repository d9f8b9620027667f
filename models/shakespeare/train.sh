#!/usr/bin/env bash
# Trains a small model of Shakespeare from the text of tiny-shakespeare.
# usage: models/shakespeare/train.sh TINYSHAKESPEARE.TXT OUT [--resume]
# The same text and the same machine give the same weights. STEPS=N takes more steps than the 3500 of the README.
set -euo pipefail
text=$(realpath "$1")
out=$(realpath --canonicalize-missing "$2")
cd "$(dirname "$0")/../.."

config=$(mktemp)
trap 'rm -f "$config"' EXIT
cat > "$config" <<'JSON'
{"vocab_size": 1024, "n_positions": 256, "n_embd": 256, "n_layer": 4, "n_head": 8,
 "embd_pdrop": 0.2, "attn_pdrop": 0.2, "resid_pdrop": 0.2}
JSON

cargo run --release --locked -- train --data "$text" --config "$config" --out "$out" \
  --steps "${STEPS:-3500}" --batch-size 8 --lr 2e-3 --warmup-steps 100 --weight-decay 0.1 \
  --eval-every 100 --save-every 100 --patience 8 --seed 1337 --dtype f16 "${@:3}"
