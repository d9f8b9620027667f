#!/usr/bin/env bash
# Installs the engines that scripts/bench compares with, and creates their common checkpoint: GPT-2 124M with
# random weights. Also builds llama.cpp's tool for the check `llama_perplexity`.
# usage: scripts/bench/peers.sh [DIR]   (default: target/peers; about 8 GB; safe to run twice; WITHOUT_LLAMA_CPP=1 skips its compilation)
# Needs Python and the release build of `gpt2`. llama.cpp needs a C++ compiler and about half an hour on two
# cores (an hour on processors with AVX-512).
set -euo pipefail
cd "$(dirname "$0")/../.."
scripts=$PWD/scripts
gpt2=$PWD/target/release/gpt2
mkdir -p "${1:-target/peers}"
cd "${1:-target/peers}"

[ -x venv/bin/python ] || python3 -m venv venv
python=$PWD/venv/bin/python
install() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }
install torch==2.15.0 transformers==5.23.0 tokenizers==0.23.3 safetensors==0.8.0 numpy==2.4.6 ctranslate2==4.8.5

# finished TARGET COMMAND…: creates a file or folder atomically; COMMAND receives its temporary name as the
# last argument.
finished() {
  [ ! -e "$1" ] || return 0
  rm -rf "unfinished-$1"
  "${@:2}" "unfinished-$1"
  mv "unfinished-$1" "$1"
}

finished gpt2-124m env PYTHONPATH="$scripts" "$python" -m bench cpu --checkpoint
for type in float32 int8; do
  finished "ctranslate2-$type" venv/bin/ct2-transformers-converter --model gpt2-124m --quantization "$type" --output_dir
done

[ -z "${WITHOUT_LLAMA_CPP:-}" ] || exit 0
# llama.cpp from the source distribution of its Python package: a native build, and on processors with AVX-512
# also one restricted to AVX2.
package=llama_cpp_python-0.3.36
programs="llama-bench llama-batched-bench llama-server"
install cmake ninja
if [ ! -d "$package" ]; then
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
  tar xzf "$package.tar.gz"
fi
build() { # FOLDER PROGRAMS CMAKE_OPTIONS…
  PATH=$PWD/venv/bin:$PATH cmake -S "$package/vendor/llama.cpp" -B "$1" -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF \
    -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF \
    -DLLAMA_USE_PREBUILT_UI=OFF "${@:3}" >/dev/null
  # shellcheck disable=SC2086  # word splitting separates the programs
  PATH=$PWD/venv/bin:$PATH ninja -C "$1" $2 >/dev/null
}
is_built() { # FOLDER PROGRAMS
  for program in $2; do
    [ -e "$1/bin/$program" ] || return 1
  done
}
native="$programs llama-quantize llama-perplexity"
is_built llama.cpp "$native" || build llama.cpp "$native" -DGGML_NATIVE=ON
if grep -q avx512f /proc/cpuinfo && ! is_built llama.cpp-avx2 "$programs"; then
  build llama.cpp-avx2 "$programs" -DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON
fi
# Our converter writes F32 and F16; llama.cpp's tool quantizes from F32. All names end in .gguf.
[ -e gpt2-F32.gguf ] || "$gpt2" convert gpt2-124m gpt2-F32.gguf --dtype f32
[ -e gpt2-F16.gguf ] || "$gpt2" convert gpt2-124m gpt2-F16.gguf --dtype f16
for type in Q8_0 Q4_0 Q4_K_M; do
  [ -e "gpt2-$type.gguf" ] || llama.cpp/bin/llama-quantize gpt2-F32.gguf "gpt2-$type.gguf" "$type" >/dev/null
done
