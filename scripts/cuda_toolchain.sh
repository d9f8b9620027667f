#!/usr/bin/env bash
# Installs a CUDA 13.0 compiler and the libraries for linking from the Python registry, for machines without a
# toolkit or a GPU.
# usage: scripts/cuda_toolchain.sh [DIR]   (default: target/cuda-toolchain; safe to run twice)
# then:  . DIR/env && cargo build --release --features cuda
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "${1:-target/cuda-toolchain}"
dir=$(cd "${1:-target/cuda-toolchain}" && pwd)
root=$dir/nvidia/cu13

# The packages of CUDA 13.0 update 2.
packages=(
  nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 # the compiler
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85                  # headers
  nvidia-cublas==13.1.0.3 nvidia-curand==10.4.0.35 nvidia-cuda-nvrtc==13.0.88
)
if [ "$(cat "$dir/installed" 2>/dev/null)" != "${packages[*]}" ]; then
  rm -rf "$dir/nvidia" "$dir/installed"
  python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --upgrade --target "$dir" "${packages[@]}"
  printf '%s\n' "${packages[*]}" >"$dir/installed"
fi

# Linkers look for libNAME.so, build scripts for lib64.
for library in "$root"/lib/lib*.so.*; do
  name=$(basename "$library")
  ln -sfn "$name" "$root/lib/${name%%.so.*}.so"
done
ln -sfn lib "$root/lib64"

# The registry lacks the driver's library, and a program linked with it would not start without a driver. Here
# libcuda is a static archive instead: every function of the headers jumps to the one in libcuda.so.1, which
# is loaded at startup. Without a driver, all functions return CUDA_ERROR_STUB_LIBRARY.
mkdir -p "$dir/driver"
{
  grep -oE '\bcu[A-Z][A-Za-z0-9]+(_v[0-9]+)?(_pt[ds][sz])?\b' "$root/include/cuda.h"
  printf '%s\n' cuProfilerInitialize cuProfilerStart cuProfilerStop # no package contains their header
} | sort -u >"$dir/driver/functions"
{
  cat <<'C'
#include <dlfcn.h>
#include <stddef.h>
static int missing(void) { return 34; /* CUDA_ERROR_STUB_LIBRARY */ }
#if defined(__x86_64__)
#define JUMP(slot) "jmp *" slot "(%rip)\n"
#elif defined(__aarch64__)
#define JUMP(slot) "adrp x16, " slot "\nldr x16, [x16, :lo12:" slot "]\nbr x16\n"
#else
#error "expected x86-64 or aarch64"
#endif
#define FUNCTION(name)                                                                                   \
  __attribute__((visibility("hidden"))) int (*driver_##name)(void) = missing;                            \
  __asm__(".text\n.globl " #name "\n.type " #name ", %function\n" #name ":\n" JUMP("driver_" #name));
C
  sed 's/.*/FUNCTION(&)/' "$dir/driver/functions"
  cat <<'C'
__attribute__((constructor)) static void open_driver(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  void *function;
  if (library == NULL) return;
#define FIND(name) \
  if ((function = dlsym(library, #name)) != NULL) driver_##name = (int (*)(void))function;
C
  sed 's/.*/  FIND(&)/' "$dir/driver/functions"
  echo '}'
} >"$dir/driver/driver.c"
cc -O1 -fPIC -c "$dir/driver/driver.c" -o "$dir/driver/driver.o"
rm -f "$dir/driver/libcuda.a"
ar rcs "$dir/driver/libcuda.a" "$dir/driver/driver.o"

cat >"$dir/env" <<ENV
# Source this before cargo, and before the program unless its machine has the libraries of CUDA 13 itself.
export CUDA_HOME="$root" CUDA_PATH="$root" NVCC="$root/bin/nvcc" CUDARC_CUDA_VERSION=13000
# Intermediate code for Ampere, which the driver compiles for every later GPU; that of 90 runs on Hopper alone.
export CUDA_COMPUTE_CAP="\${CUDA_COMPUTE_CAP:-80}"
export PATH="$root/bin:\$PATH"
export LIBRARY_PATH="$dir/driver:$root/lib\${LIBRARY_PATH:+:\$LIBRARY_PATH}"
export LD_LIBRARY_PATH="$root/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
ENV
printf 'installed %s\n' "$("$root/bin/nvcc" --version | grep release)"
printf 'now: . %q && cargo build --release --features cuda\n' "$dir/env"
