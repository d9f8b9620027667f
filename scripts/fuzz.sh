#!/usr/bin/env bash
# Fuzzes the parsers of untrusted files, one target after another, with the fixtures as seeds. Needs a C++
# compiler.
# usage: scripts/fuzz.sh [SECONDS [TARGET…]]   (default: 60 seconds for every target of crates/fuzz)
# Corpora and failing inputs stay in target/fuzz.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
fixtures=$PWD/crates/testing/fixtures
manifest=crates/fuzz/Cargo.toml
host=$(rustc -vV | sed -n 's/^host: //p')

# Coverage instrumentation for libFuzzer. An explicit --target keeps it out of build scripts.
RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table" \
  cargo build --release --locked --manifest-path "$manifest" --target "$host" --target-dir target/fuzz

# seeds TARGET FILE…: copies files into the target's corpus, numbered, because many share a name.
seeds() {
  local corpus=target/fuzz/corpus/$1 number=0 file
  mkdir -p "$corpus"
  for file in "${@:2}"; do
    number=$((number + 1))
    cp "$file" "$corpus/seed-$number"
  done
}
seeds safetensors "$fixtures"/tiny-checkpoint/model.safetensors
seeds shard_index "$fixtures"/formats/safetensors-shards/*.index.json "$fixtures"/formats/pytorch-shards/*.index.json
seeds gguf "$fixtures"/formats/gguf/f32.gguf "$fixtures"/formats/gguf/q4_k.gguf
seeds llm_c "$fixtures"/formats/llmc/*.bin
seeds config "$fixtures"/tiny-checkpoint/config.json models/stories/config.json
seeds pytorch_zip "$fixtures"/formats/pytorch-zip/pytorch_model.bin "$fixtures"/formats/pytorch-views/weights.ckpt \
  "$fixtures"/formats/nanogpt/ckpt.pt "$fixtures"/formats/book/model_and_optimizer.pth
seeds tokenizer_json "$fixtures"/tiny-checkpoint/tokenizer.json
seeds generation_config "$fixtures"/tiny-checkpoint/generation_config.json
seeds completion_request crates/api/tests/bodies/*.json
# These targets add a prefix or suffix to the input themselves.
seeds pickle
tail -c +138 "$fixtures"/formats/pytorch-legacy/pytorch_model.bin >target/fuzz/corpus/pickle/seed-1
seeds tensorflow_index
head -c -8 "$fixtures"/formats/tensorflow/model.ckpt.index >target/fuzz/corpus/tensorflow_index/seed-1
seeds sentence_piece "$fixtures"/tokenizers/*.model
seeds vocabulary
{ cat "$fixtures"/tiny-checkpoint/vocab.json; printf '\0'; cat "$fixtures"/tiny-checkpoint/merges.txt; } \
  >target/fuzz/corpus/vocabulary/seed-1

# The first byte selects the kind of grammar.
mkdir -p target/fuzz/corpus/grammar
# shellcheck disable=SC2059
grammar_seed() { printf "\\$2%s" "$3" >"target/fuzz/corpus/grammar/seed-$1"; }
grammar_seed 1 0 '[0-3][0-9] (May|June) \w{1,9}[^x]*(a{2,5}b?)+'
grammar_seed 2 0 "$(printf '*%.0s' {1..300})"
grammar_seed 3 1 $'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/ & ~/0+/\n%ignore / +/'
grammar_seed 4 1 $'start: s\ns: s s | "a" | B{2,4}\nB[lazy]: /b(.|\\n){3}/'
# shellcheck disable=SC2016
grammar_seed 5 2 '{"type":"object","properties":{"a":{"type":"string","pattern":"^a+$","maxLength":9},"b":{"$ref":"#/$defs/c"}},"required":["a"],"$defs":{"c":{"type":"number","minimum":-3,"multipleOf":0.5}}}'
grammar_seed 6 2 '{"anyOf":[{"type":"array","items":{"enum":["a",1,null]},"maxItems":4},{"type":"string","format":"date"}],"allOf":[{"minLength":2}]}'

mkdir -p target/fuzz/corpus/chat_template
template_seed() { printf '%s' "$2" >"target/fuzz/corpus/chat_template/seed-$1"; }
template_seed 1 "{% for message in messages %}{% if message['role'] == 'user' %}Q: {{ message.content.strip() | upper }}{% else %}A: {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
template_seed 2 '{% set ns=namespace(s=[]) %}{% for i in range(99000) %}{% set ns.s=[ns.s] %}{% endfor %}{{ ns.s }}'
template_seed 3 '{% set ns=namespace() %}{% set ns.a=ns %}{{ ns }}{{ ns == ns }}{{ ns|tojson }}'
template_seed 4 '{% set s="x"*10000000 %}{% for i in range(99999) %}{% set x=s[-1] %}{% endfor %}{{ [[1],[2]]|tojson(indent=10**9) }}'
template_seed 5 '{% macro m(a, b=1) %}{{ a ~ b }}{{ m(a) }}{% endmacro %}{{ m(messages|map(attribute="role")|list) }}{{ "%s"|format(1) }}{{ not - -1 ** 2 is defined }}'

seeds evaluation_data
for file in "$fixtures"/evaluation/*.jsonl "$fixtures"/evaluation/blimp/*.jsonl "$fixtures"/evaluation/*.csv \
  "$fixtures"/evaluation/*.txt; do
  case $file in *.jsonl) kind=0 ;; *.csv) kind=1 ;; *) kind=2 ;; esac
  # shellcheck disable=SC2059
  { printf "\\$kind"; cat "$file"; } >"target/fuzz/corpus/evaluation_data/$(basename "$file")"
done

seeds task_file "$fixtures"/evaluation/tasks/*.yaml
printf 'a: &x [1, {b: "c\\n"}]\n? - |2-\n    d\n: >+\n  e\n\n--- # f\n- *x\n' >target/fuzz/corpus/task_file/seed-syntax

# The first byte selects the kind of input: a whole file, a header, a group.
mkdir -p target/fuzz/corpus/compressed
printf '\0\217g2z\1\1\2q8\3f16\60\30abcdefgh\0\0\0\0\4tiny\0\0\0\0\0' >target/fuzz/corpus/compressed/seed-1
printf '\1\217g2z\1\1\2q8\3f16\60\30abcdefgh\0\0\0\0\4tiny\0' >target/fuzz/corpus/compressed/seed-2
printf '\2\50\40\0\0\0\0abcdefghijklmnop' >target/fuzz/corpus/compressed/seed-3
printf '\2\4\11\21\315\202\355abcd' >target/fuzz/corpus/compressed/seed-4

# Responses of the Hub, separated by the byte 0xFF: the list of files, and each file with its headers.
mkdir -p target/fuzz/corpus/hub_response
hub_list='200\n\n{"sha":"0123abcd","siblings":[{"rfilename":"config.json"},{"rfilename":"model.safetensors"}]}'
hub_file='200\nx-repo-commit: 0123abcd\netag: "e1"\ncontent-length: 2\n\n{}'
hub_large='302\nx-repo-commit: 0123abcd\nx-linked-etag: "def"\nx-linked-size: 4\nlocation: https://elsewhere/a'
hub_rest='206\ncontent-range: bytes 0-3/4\ncontent-length: 4\n\nabcd'
# shellcheck disable=SC2059
printf "$hub_list\\377$hub_file\\377$hub_large\\377$hub_rest" >target/fuzz/corpus/hub_response/seed-1
# shellcheck disable=SC2059
printf "${hub_list/0123abcd/..}\\377$hub_file" >target/fuzz/corpus/hub_response/seed-2
# shellcheck disable=SC2059
printf "$hub_list\\377${hub_file/e1/../../a}\\377$hub_file" >target/fuzz/corpus/hub_response/seed-3

mapfile -t targets < <(sed -n 's/^name = "\(.*\)"$/\1/p' "$manifest" | tail -n +2)
for target in "${@:2}"; do
  [[ " ${targets[*]} " == *" $target "* ]] || { echo "unknown target $target; available targets: ${targets[*]}" >&2; exit 2; }
done
[ $# -lt 2 ] || targets=("${@:2}")
for target in "${targets[@]}"; do
  printf '\n== %s\n' "$target"
  # A large allocation, a slow input and a panic each end the run.
  "target/fuzz/$host/release/$target" "target/fuzz/corpus/$target" -artifact_prefix="target/fuzz/$target-" \
    -max_total_time="$seconds" -rss_limit_mb=2048 -timeout=10 -verbosity=0 -print_final_stats=1
done
