#!/usr/bin/env bash
# Trains the built-in model from published stories. Writes the lessons, a tokenizer, the model, its GGUF in
# q8_0, a folder for transformers, a report of its abilities, sample completions, and its learning history.
# usage: models/stories/make.sh --stories DIR OUT
# The output depends only on the commit and the stories. Existing files are kept, and an interrupted training
# is resumed. SEED=N trains another model. ANY_STORIES=1 allows other stories: core-train-*.txt, and
# core-valid.txt, which is held out, in TinyStories' format (each story ends with a line <|endoftext|>).
# Tools: sha256sum, xz.
set -euo pipefail
# shellcheck source=models/stories/common.sh
source "$(dirname "$0")/common.sh"
[ $# -eq 3 ] || usage
mkdir -p "$out"
seed=${SEED:-1}
sources=$PWD/models/stories/sources.sha256

# Checks that the folder contains exactly the files in sources.sha256.
are_the_stories() {
  cd "$stories"
  diff <(awk '{ print $2 }' "$sources" | sort) <(printf '%s\n' *-train-*.txt *-valid.txt | sort) &&
    sha256sum --check --quiet --strict "$sources"
}
[ -n "${ANY_STORIES:-}" ] || (are_the_stories) || {
  echo "$stories: the files named above are not those that the model learned from (models/stories/README.md, Sources). To make another
model from stories of your own, set ANY_STORIES=1; https://huggingface.co/datasets/roneneldan/TinyStories has texts in this format" >&2
  exit 1
}

data=(--corpus "$out/corpus" --stories "$stories")

corpus "$seed"

# Training creates the tokenizer from its data; one step of a tiny model suffices.
[ -f "$out/tokenizer/tokenizer.json" ] || {
  rm -rf "$out/tokenizer"
  echo '{"vocab_size": 4096, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 1}' > "$out/smallest.json"
  gpt2 train --data "$out/corpus/tokenizer.jsonl" --config "$out/smallest.json" --out "$out/tokenizer" \
    --steps 1 --batch-size 1 --held-out 0
}

lessons=(rows rows-and-stories early middle people practice people-again late last last-again last-again-2)
for lesson in "${lessons[@]%%-again*}"; do
  [ -d "$out/tokens-$lesson" ] ||
    gpt2 tokenize "$out/corpus/$lesson.jsonl" --tokenizer "$out/tokenizer/tokenizer.json" --out "$out/tokens-$lesson" --held-out 0.002
done

cat > "$out/config.json" <<'JSON'
{"vocab_size": 4096, "n_positions": 512, "n_embd": 256, "n_layer": 7, "n_head": 4, "initializer_range": 0.05,
 "embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0}
JSON

# lesson NAME OPTION…: runs one training, or resumes it. Each has its own random choices.
number=0
lesson() {
  local resume=()
  number=$((number + 1))
  [ ! -f "$out/$1/training-state.safetensors" ] || resume=(--resume)
  gpt2 train --out "$out/$1" --data "$out/tokens-${1%%-again*}" --seed "$((100 * seed + number))" --optimizer muon --random-positions --eval-every 250 --save-every 50 \
    --warmup-steps 50 "${@:2}" "${resume[@]}"
}

# Previous-token heads and induction heads form within minutes if few tokens repeat often, in short windows of
# one row each. Later lessons on stories preserve them.
lesson rows --config "$out/config.json" --initialization mimetic --tokenizer "$out/tokenizer/tokenizer.json" --steps 600 --batch-size 32 \
  --context 32 --document-starts 1 --lr 1e-3 --schedule constant --weight-decay 0 --keep-steps 0,100,200,300,400,500,600
lesson rows-and-stories --init "$out/rows" --steps 1000 --batch-size 8 --context 128 --document-starts 0.5 --lr 1e-3 --schedule constant \
  --weight-decay 0 --keep-steps 100,300,600,1000

# Stories with 20% and 10% exercises. Dropout and weight decay are for stories that come again.
lesson early --init "$out/rows-and-stories" --steps 1400 --batch-size 16 --context-ramp 0:128,700:256 --document-starts 0.5 --lr 2e-3 \
  --schedule constant --weight-decay 0.1 --keep-steps 100,250,500,1000,1400
lesson middle --init "$out/early" --steps 1000 --batch-size 16 --context 256 --document-starts 0.5 --lr 1.5e-3 --schedule constant \
  --weight-decay 0.1 --dropout 0.05 --keep-steps 500,1000

# A second and a third copying phase, for which of two people gets something. Then stories with few exercises.
lesson people --init "$out/middle" --steps 600 --batch-size 16 --context 256 --document-starts 0.5 --lr 1.5e-3 --schedule constant \
  --weight-decay 0.1 --keep-steps 100,200,300,400,600
lesson practice --init "$out/people" --steps 750 --batch-size 16 --context 256 --document-starts 0.5 --lr 1.5e-3 --schedule constant \
  --weight-decay 0.1 --keep-steps 150,300,450,600,750
lesson people-again --init "$out/practice" --steps 600 --batch-size 16 --context 256 --document-starts 0.5 --lr 1.5e-3 --schedule constant \
  --weight-decay 0.1 --keep-steps 150,300,450,600
lesson late --init "$out/people-again" --steps 750 --batch-size 16 --context-ramp 0:256,600:512 --document-starts 0.5 --lr 1.5e-3 \
  --schedule linear --final-share 0 --weight-decay 0.1 --dropout 0.05 --keep-steps 200,400,600,750

# Stories, and exercises only on pages of their own, so that no opening of a text leads to an exercise. More than
# half of the steps have full windows, because windows of 256 spoil what the model knows beyond 256 tokens.
lesson last --init "$out/late" --steps 2900 --batch-size 16 --context 256 --document-starts 0.5 --lr 1.5e-3 --schedule constant \
  --weight-decay 0.1 --keep-steps 500,1000,1500,2000,2500,2900
lesson last-again --init "$out/last" --steps 4350 --batch-size 8 --context 512 --document-starts 0.5 --lr 1.2e-3 --schedule linear \
  --final-share 0 --weight-decay 0.1 --dropout 0.05 --keep-steps 400,900,1500,2200,3000,4350
lesson last-again-2 --init "$out/last-again" --steps 4300 --batch-size 8 --context 512 --document-starts 0.5 --lr 1.2e-3 --schedule linear \
  --final-share 0 --weight-decay 0.1 --dropout 0.05 --keep-steps 400,900,1500,2200,3000,3700,4300

[ ! -f models/stories/generation_config.json ] || cp models/stories/generation_config.json "$out/last-again-2/"
[ -f "$out/model.gguf" ] || gpt2 convert "$out/last-again-2" "$out/model.gguf" --dtype q8_0
[ -d "$out/transformers" ] || gpt2 convert "$out/model.gguf" "$out/transformers" --dtype f16
trainings=("${lessons[@]/#/$out/}")
workshop story-probes -- history "${trainings[@]}" "${data[@]}" > "$out/history.json"
workshop story-probes -- page "$out/history.json" > "$out/learned.html"
workshop story-probes -- report "$out/last-again-2" "${data[@]}" --save "$out/report.json" | tee "$out/report.txt"
workshop story-probes -- report "$out/model.gguf" "${data[@]}" --against "$out/report.json" --save "$out/report-q8.json" |
  tee "$out/report-q8.txt"
workshop story-probes -- samples "$out/model.gguf" > "$out/samples.md"
