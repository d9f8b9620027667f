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
    --tokens "${CORPUS_TOKENS:-50000000}" --out "$out/corpus.part"
  mv "$out/corpus.part" "$out/corpus"
}

# A training makes the tokenizer of its data; one step of the smallest model is enough.
[ -f "$out/tokenizer/tokenizer.json" ] || {
  rm -rf "$out/tokenizer"
  echo '{"vocab_size": 2048, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 1}' > "$out/smallest.json"
  gpt2 train --data "$out/corpus/tokenizer.jsonl" --config "$out/smallest.json" --out "$out/tokenizer" \
    --steps 1 --batch-size 1 --held-out 0
}

for lesson in rows rows-and-stories practice train last; do
  [ -d "$out/tokens-$lesson" ] ||
    gpt2 tokenize "$out/corpus/$lesson.jsonl" --tokenizer "$out/tokenizer/tokenizer.json" --out "$out/tokens-$lesson" --held-out 0.002
done

# A narrow model's matrices must be drawn wider than GPT-2's 0.02 for signals to pass: about one over the root of 192.
cat > "$out/config.json" <<'JSON'
{"vocab_size": 2048, "n_positions": 512, "n_embd": 192, "n_layer": 6, "n_head": 3, "initializer_range": 0.06,
 "embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0}
JSON

# A lesson: its name, its tokens, and options. It goes on where it was interrupted.
lesson() {
  local resume=()
  [ ! -f "$out/$1/training-state.safetensors" ] || resume=(--resume)
  gpt2 train --out "$out/$1" --data "$out/tokens-$2" --seed "$seed" --dtype f16 --beta-2-half-life 100000 \
    --eval-every 250 --save-every 250 --warmup-steps 50 "${@:3}" "${resume[@]}"
}
# In the first lessons the learning rate stays.
first_lesson() { lesson "$@" --lr 1e-3 --schedule constant --weight-decay 0; }
rows() { first_lesson "$@" --batch-size 32 --context 32 --document-starts 1; }

# Heads that look at the token before, and heads that find what followed it, form within a minute where few tokens come again and again, in
# short windows of one row each; in as many steps they do not in longer rows, at drawn positions, or in the mixture. What they do is then
# taught to all positions, and beside stories.
rows rows rows --config "$out/config.json" --initialization mimetic --tokenizer "$out/tokenizer/tokenizer.json" \
  --steps "${ROWS_STEPS:-1500}" --keep-steps 0,100,200,300,400,500,600,700,800,900,1000,1200,1500
rows positions rows --init "$out/rows" --random-positions --steps "${POSITIONS_STEPS:-800}" --keep-steps 100,200,400,800
first_lesson rows-and-stories rows-and-stories --init "$out/positions" --random-positions --batch-size 8 --context 128 \
  --document-starts 0.5 --steps "${ROWS_AND_STORIES_STEPS:-1200}" --keep-steps 100,300,600,1200

# Then short texts that need names of the same scene: who gets what. In the mixture alone this is not learned in 22 million tokens.
lesson practice practice --init "$out/rows-and-stories" --steps "${PRACTICE_STEPS:-10000}" --batch-size 8 --context 128 \
  --random-positions --document-starts 0.5 --lr 2e-3 --schedule constant --weight-decay 0.1 \
  --keep-steps 250,500,1000,2000,3000,4000,5000,6000,8000,10000

# Then everything, in windows of 128, 256 and 512. No text comes twice.
lesson train train --init "$out/practice" --steps "${STEPS:-9500}" --batch-size 8 \
  --context-ramp "${CONTEXT_RAMP:-0:128,3000:256,8000:512}" --random-positions --document-starts 0.5 --lr 2e-3 \
  --schedule linear --final-share 0 --weight-decay 0.1 --keep-steps 500,1000,2000,3000,4000,5000,6000,7000,8000,9000,9500

# Then half stories, and half what was still weak: a gift in a sentence of its own, invented names and words, brackets, numbers.
lesson last last --init "$out/train" --steps "${LAST_STEPS:-7000}" --batch-size 8 --context-ramp "${LAST_RAMP:-0:256,5500:512}" \
  --random-positions --document-starts 0.5 --lr 1.5e-3 --schedule linear --final-share 0 --weight-decay 0.1 \
  --keep-steps 500,1000,2000,3000,4000,5000,6000,7000

[ -f "$out/model.gguf" ] || gpt2 convert "$out/last" "$out/model.gguf" --dtype q8_0
probes history "$out"/{rows,positions,rows-and-stories,practice,train,last} > "$out/history.json"
cargo run --quiet --release --locked -p story-probes -- page "$out/history.json" > "$out/learned.html"
probes report "$out/last" --save "$out/report.json"
probes report "$out/model.gguf" --against "$out/report.json" --save "$out/report-q8.json"
