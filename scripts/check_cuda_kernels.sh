#!/usr/bin/env bash
# Runs the CUDA kernels on the CPU, thread by thread, and compares them with plain loops. Needs g++ and no
# GPU. usage: scripts/check_cuda_kernels.sh With nvcc on the PATH (scripts/cuda_toolchain.sh), also compiles
# them for the oldest and for a current architecture.
set -euo pipefail
cd "$(dirname "$0")/../crates/kernels"
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

g++ -std=c++20 -O1 -U_FORTIFY_SOURCE -Wall -Wno-unknown-pragmas -I tests/cuda_on_cpu tests/cuda_on_cpu/main.cpp -o "$build/check"
"$build/check"
if command -v nvcc >/dev/null; then
  for architecture in sm_75 sm_90; do
    nvcc -cubin -O3 -std=c++17 -arch=$architecture -Werror all-warnings src/cuda/kernels.cu -o "$build/kernels.cubin"
    echo "compiled for $architecture"
  done
fi
