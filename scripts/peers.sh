#!/usr/bin/env bash
# Installs the engines that scripts/bench.sh compares with, and makes the checkpoint that all of them run: GPT-2 124M with
# random weights.
# usage: scripts/peers.sh [DIR]   (default: target/peers; about 8 GB; safe to run twice; WITHOUT_LLAMA_CPP=1 saves its compilation)
# Needs Python, the `gpt2` program's release build, and for llama.cpp a C++ compiler and about half an hour of two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts=$PWD/scripts
gpt2=$PWD/target/release/gpt2
mkdir -p "${1:-target/peers}"
cd "${1:-target/peers}"

[ -x venv/bin/python ] || python3 -m venv venv
python=$PWD/venv/bin/python
install() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }
install torch==2.15.0 transformers==5.23.0 tokenizers==0.23.3 safetensors==0.8.0 numpy==2.4.6 ctranslate2==4.8.5

# finished TARGET COMMAND…: makes a file or folder that appears whole or not at all; COMMAND gets its temporary name at the end.
finished() {
  [ ! -e "$1" ] || return 0
  rm -rf "unfinished-$1"
  "${@:2}" "unfinished-$1"
  mv "unfinished-$1" "$1"
}

finished gpt2-124m "$python" "$scripts/bench_peers.py" checkpoint
for type in float32 int8; do
  finished "ctranslate2-$type" venv/bin/ct2-transformers-converter --model gpt2-124m --quantization "$type" --output_dir
done

[ -z "${WITHOUT_LLAMA_CPP:-}" ] || exit 0
# llama.cpp, as the source distribution of its Python package holds it.
package=llama_cpp_python-0.3.36
if [ ! -e llama-bench ]; then
  install cmake ninja
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
  tar xzf "$package.tar.gz"
  PATH=$PWD/venv/bin:$PATH
  cmake -S "$package/vendor/llama.cpp" -B llama.cpp -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
    -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF >/dev/null
  ninja -C llama.cpp llama-bench llama-quantize >/dev/null
  ln -sf llama.cpp/bin/llama-quantize llama.cpp/bin/llama-bench .
fi
# Our own converter writes what llama.cpp reads; its tool makes the other types from that. Names end in .gguf for both.
[ -e gpt2-F32.gguf ] || "$gpt2" convert gpt2-124m gpt2-F32.gguf --dtype f32
[ -e gpt2-F16.gguf ] || "$gpt2" convert gpt2-124m gpt2-F16.gguf --dtype f16
for type in Q8_0 Q4_0 Q4_K_M; do
  [ -e "gpt2-$type.gguf" ] || ./llama-quantize gpt2-F32.gguf "gpt2-$type.gguf" "$type" >/dev/null
done
