#!/usr/bin/env bash
# Everything CI checks, cheapest first. usage: scripts/check.sh
# GPT2_CHECKPOINTS=FOLDER adds the tests on third-party checkpoints. What needs a toolchain or a target that is not installed is
# left out, and named where it stands and at the end.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s\n' "$*"; "$@"; }

left_out=()
# leave_out WHAT MISSING HOW: says what is not checked here, what it needs, and how to get that.
leave_out() {
  left_out+=("left out: $1 needs $2 ($3)")
  printf '\n== %s\n' "${left_out[-1]}"
}
# Each asks for what is installed, so that nothing is downloaded here. (grep reads to the end: a pipe that breaks is a failure.)
has_target() { rustup target list --installed 2>/dev/null | grep -x "$1" >/dev/null; }
has_toolchain() { rustup toolchain list 2>/dev/null | grep "^$1[.-]" >/dev/null; }
has() { command -v "$1" >/dev/null; }
has_miri() { rustup component list --toolchain nightly --installed 2>/dev/null | grep '^miri' >/dev/null; }

step cargo fmt --all --check
step cargo clippy --workspace --all-targets --locked -- -D warnings
step cargo clippy --package candle-gpt2-cli --no-default-features --locked -- -D warnings
step cargo clippy --package candle-gpt2-engine --no-default-features --all-targets --locked -- -D warnings
step env RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked

# The plain program stays light, and what `serve` and `grammar` add is counted.
crates_of() { cargo tree --package candle-gpt2-cli --edges normal --prefix none --locked "$@" | awk '{print $1}' | sort -u; }
light_program() {
  local plain served
  plain=$(crates_of --no-default-features)
  served=$(crates_of --no-default-features --features serve)
  if grep -xE 'tokio|hyper|llguidance' <<<"$plain"; then
    echo "the plain program needs what only the server does"
    return 1
  fi
  local more
  more=$(comm -13 <(echo "$plain") <(echo "$served") | grep -cv '^candle-gpt2')
  echo "the server adds $more crates"
  [ "$more" -le 30 ]
}
step light_program

# From the kernels to the engine: what other machines and browsers build from. The program itself is not for them.
portable=(candle-gpt2-arithmetic candle-gpt2-kernels candle-gpt2-attention candle-gpt2 candle-gpt2-weights candle-gpt2-generation candle-gpt2-interpret candle-gpt2-pictures candle-gpt2-engine candle-gpt2-look candle-gpt2-browser)
if has_target aarch64-unknown-linux-gnu; then
  # Without the hub, whose encryption is C and would want a compiler for that machine.
  step cargo check --target aarch64-unknown-linux-gnu --locked --no-default-features \
    --features candle-gpt2-engine/built-in,candle-gpt2-weights/mmap,candle-gpt2-weights/pytorch "${portable[@]/#/--package=}"
else
  leave_out "the check for NEON" "a target" "rustup target add aarch64-unknown-linux-gnu"
fi
if has_target wasm32-unknown-unknown; then
  step cargo check --target wasm32-unknown-unknown --no-default-features --locked "${portable[@]/#/--package=}"
else
  leave_out "the check for browsers" "a target" "rustup target add wasm32-unknown-unknown"
fi

oldest=$(sed -n 's/^rust-version = "\([0-9.]*\)".*/\1/p' Cargo.toml)
if has_toolchain "$oldest"; then
  step rustup run "$oldest" cargo check --workspace --locked --target-dir "target/rust-$oldest"
else
  leave_out "the check with the oldest Rust" "a toolchain" "rustup toolchain install $oldest --profile minimal"
fi

if has g++; then
  step scripts/check_cuda_kernels.sh
  # The fuzzer is C++. Its crate is a workspace of its own.
  step cargo check --manifest-path crates/fuzz/Cargo.toml --locked --target-dir target/fuzz
else
  leave_out "the checks of the CUDA kernels and of the fuzz targets" "g++" "apt-get install g++"
fi

if has_miri; then
  # What shares memory between threads, and packing. Without the tests of thousands of regions: Miri interprets. The pool's threads
  # live as long as the program, which Miri would call a leak.
  step env MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-ignore-leaks" cargo +nightly miri test --package candle-gpt2-arithmetic --lib --locked \
    --target-dir target/miri -- pool:: parts:: packed::tests::packing_reads \
    attention::tests::copies attention::heads:: \
    --skip regions_of_several_callers --skip sleeping_threads
else
  leave_out "the check of the pool's memory" "Miri" "rustup +nightly component add miri rust-src"
fi

if [ -z "${GPT2_CHECKPOINTS:-}" ]; then
  leave_out "the tests on third-party checkpoints" "GPT2_CHECKPOINTS" "a folder with them"
fi
step cargo test --workspace --locked
step cargo test --package candle-gpt2-evaluation --features parquet --locked --test suite data::
step cargo run --locked -- generate "ROMEO:" --max-new-tokens 20

# The kernels and the loader as WebAssembly, under Node.
if has_target wasm32-wasip1 && has node; then
  in_wasm=(env CARGO_TARGET_WASM32_WASIP1_RUNNER="node $PWD/scripts/wasi.mjs" CARGO_TARGET_WASM32_WASIP1_RUSTFLAGS="-C target-feature=+simd128"
    cargo test --target wasm32-wasip1 --locked)
  step "${in_wasm[@]}" --package candle-gpt2-arithmetic --lib
  step "${in_wasm[@]}" --package candle-gpt2-weights --no-default-features --features pytorch --test suite -- formats:: given::
else
  leave_out "the tests of kernels and loader as WebAssembly" "a target, and node from 20 on" "rustup target add wasm32-wasip1, apt-get install nodejs"
fi

# The page in the browser. Its own script says which tool it lacks.
if tools=$(scripts/build_web.sh --tools 2>&1); then
  step scripts/build_web.sh
  step node --test web/package/test.mjs
  step env GPT2_WEB="$PWD/web/dist" cargo test --package candle-gpt2-browser --locked
else
  leave_out "the page in the browser" "its tools" "$tools"
fi

# The Python package, in a virtual environment of its own, whose packages come from the registry once.
environment=$PWD/target/python
# environment_of FOLDER PYTHON PACKAGE…: makes the environment, unless it is there.
environment_of() {
  [ -x "$1/bin/pytest" ] && return
  "$2" -m venv "$1" && "$1/bin/python" -m pip install --quiet --disable-pip-version-check numpy pytest pytest-timeout "${@:3}"
}
version_of() { "$1" -c 'import sys; assert sys.version_info >= (3, 11); print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
# Another Python than that of the environment, the newest.
second_python() {
  local python version
  for python in python3.1{4,3,2,1} "$HOME"/.pyenv/versions/3.1{4,3,2,1}.*/bin/python; do
    version=$(version_of "$python") && [ "$version" != "$(version_of "$environment/bin/python")" ] && echo "$python" && return
  done
  return 1
}
if version_of python3 >/dev/null && environment_of "$environment" python3 'maturin>=1.9.4,<2' mypy; then
  step env VIRTUAL_ENV="$environment" "$environment/bin/maturin" develop --profile dev --locked
  if ! "$environment/bin/python" -c 'import ray.data' 2>/dev/null; then
    leave_out "the tests on Ray" "Ray" "$environment/bin/python -m pip install 'ray[data]>=2.60'"
  fi
  step env GPT2_PROGRAM="$PWD/target/debug/gpt2" "$environment/bin/python" -m pytest python/tests
  # The same module, which is for every Python from 3.11 on.
  if other=$(second_python) && environment_of "$environment-$(version_of "$other")" "$other"; then
    step env PYTHONPATH="$PWD/python" "$environment-$(version_of "$other")/bin/python" -m pytest python/tests -m "not slow"
  else
    leave_out "the tests on another Python" "a second one, from 3.11 on" "apt-get install python3.13 python3.13-venv, or pyenv install 3.13"
  fi
else
  leave_out "the tests of the Python package" "Python from 3.11 on, and maturin, numpy, mypy, pytest and pytest-timeout from its registry" \
    "apt-get install python3 python3-venv"
fi

printf '\nall checks passed\n'
[ ${#left_out[@]} -eq 0 ] || printf '%s\n' "${left_out[@]}"
