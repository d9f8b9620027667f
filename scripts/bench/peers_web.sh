#!/usr/bin/env bash
# Installs the peers of `python -m bench web`: transformers.js (onnxruntime-web) and wllama (llama.cpp) from
# npm, and converts the checkpoint of scripts/bench/peers.sh, GPT-2 124M with random weights, to their
# formats.
# usage: scripts/bench/peers_web.sh [DIR]   (default: target/peers; about 3 GB more; safe to run twice)
# Needs the output of `WITHOUT_LLAMA_CPP=1 scripts/bench/peers.sh`, the release build of `gpt2`, and npm.
set -euo pipefail
cd "$(dirname "$0")/../.."
scripts=$PWD/scripts
gpt2=$PWD/target/release/gpt2
cd "${1:-target/peers}"
checkpoint=$PWD/gpt2-124m
peers=$PWD
mkdir -p web
cd web

# Skips install scripts: one of them downloads a native program that browsers cannot use.
[ -d node_modules ] || npm install --silent --no-audit --no-fund --ignore-scripts --prefix . \
  @huggingface/transformers@4.3.1 @wllama/wllama@3.8.1

# Uses the exporter behind transformers.js's files on the Hub. It needs an older transformers than the other
# peers, and shares their PyTorch.
if [ ! -d onnx ]; then
  [ -x venv/bin/python ] || python3 -m venv venv
  "$peers/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$(echo venv/lib/python*/site-packages)/zz-peers.pth"
  venv/bin/python -m pip install --quiet --disable-pip-version-check \
    optimum-onnx==0.1.0 transformers==4.57.6 accelerate==1.15.0 onnx==1.23.2 onnxruntime==1.32.0
  rm -rf unfinished
  venv/bin/python "$scripts/bench/browser/export_onnx.py" "$checkpoint" unfinished
  mv unfinished onnx
fi

# GGUF files from our own converter.
for type in f32 f16 q8_0 q4_0; do
  file=gpt2-$type.gguf
  [ -e "$file" ] || "$gpt2" convert "$checkpoint" "$file" --dtype "$type"
done
