#!/usr/bin/env bash
# What is checked, as jobs. scripts/check.sh runs those of the gate; the workflows in .github run each on a machine of its own.
# usage: scripts/ci.sh JOB…     scripts/ci.sh --list
# What needs a tool, a toolchain or a target that is not installed is left out, and named where it stands and at the end. Nothing
# is installed here. A run in which everything is left out fails.
set -euo pipefail
cd "$(dirname "$0")/.."

. scripts/steps.sh

has_miri() { rustup component list --toolchain nightly --installed 2>/dev/null | grep '^miri' >/dev/null; }

program=${CARGO_TARGET_DIR:-$PWD/target}/debug/gpt2
# Program and examples with the features that they have beside the tests: where the tests ran, nothing is compiled.
built=(cargo build --workspace --bins --examples --locked)

# From the kernels to the engine: what other machines and browsers build from. The program itself is not for them.
portable=(candle-gpt2-arithmetic candle-gpt2-kernels candle-gpt2-attention candle-gpt2 candle-gpt2-weights candle-gpt2-generation candle-gpt2-interpret candle-gpt2-web candle-gpt2-pictures candle-gpt2-engine candle-gpt2-look candle-gpt2-browser)

# The program, without the Hub.
program_alone=(--package candle-gpt2-cli --features serve)

# Format, lints, documentation, dependencies, spelling, scripts.
job-check() {
  step cargo fmt --all --check
  if has typos; then
    step typos
  else
    leave_out "the check of spelling" "typos" "cargo install --locked typos-cli"
  fi
  if has shellcheck; then
    step shellcheck --exclude=SC1091 scripts/*.sh scripts/bench/*.sh models/*/*.sh
  else
    leave_out "the check of shell scripts" "shellcheck" "apt-get install shellcheck"
  fi
  step workflows_are_sound
  step commit_subjects_are_sound
  if has cargo-deny; then
    # Without advisories, which come by the network: they are a job of their own.
    step cargo deny --locked check licenses bans sources
  else
    leave_out "the check of licences and sources" "cargo-deny" "cargo install --locked cargo-deny"
  fi
  step cargo clippy --workspace --all-targets --locked -- -D warnings
  step cargo clippy --package candle-gpt2-cli --no-default-features --locked -- -D warnings
  step cargo clippy --package candle-gpt2-engine --no-default-features --all-targets --locked -- -D warnings
  step env RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked
  step light_program
  local release
  release=$(git tag --list 'v*' --sort=-version:refname 2>/dev/null | head -n 1)
  if [ -z "$release" ]; then
    leave_out "the check that interfaces keep their version's promise" "a published version" "the first release, see CONTRIBUTING.md"
  elif has cargo-semver-checks; then
    step cargo semver-checks --workspace --baseline-rev "$release"
  else
    leave_out "the check that interfaces keep their version's promise" "cargo-semver-checks" "cargo install --locked cargo-semver-checks"
  fi
}

# Every workflow parses, and calls jobs that exist; every job is called.
workflows_are_sound() {
  local called known
  known=$(list)
  called=$(sed -nE 's/.*(scripts\/ci\.sh |[{ -]job: )([a-z][a-z0-9-]*).*/\2/p' .github/workflows/*.yml | sort -u)
  diff <(echo "$known") <(echo "$called") || { echo "the jobs of scripts/ci.sh (<) are not those of the workflows (>)"; return 1; }
  if has actionlint; then
    actionlint
  elif python3 -c 'import yaml' 2>/dev/null; then
    python3 -c 'import sys, yaml; [yaml.safe_load(open(path))["jobs"] for path in sys.argv[1:]]' .github/workflows/*.yml
  else
    leave_out "the syntax of workflows" "actionlint, or PyYAML" "pip install pyyaml"
  fi
}

# Subjects of the commits since this one: `area: change`, at most 72 characters. Merges are exempt.
subjects_are_checked_since=1f696f5fd55bbba5888a138f6fd6300202c0aec1
commit_subjects_are_sound() {
  local commits commit subject count=0 failed=0
  if ! commits=$(git log --no-merges --format='%h %s' "$subjects_are_checked_since..HEAD" 2>/dev/null); then
    leave_out "the check of commit subjects" "the history since ${subjects_are_checked_since::8}" "git fetch --unshallow"
    return
  fi
  while read -r commit subject; do
    [ -n "$commit" ] || continue
    count=$((count + 1))
    [[ $subject =~ ^[a-z0-9][a-z0-9_./,-]*:\ [^\ ] && ${#subject} -le 72 ]] && continue
    echo "commit $commit: \"$subject\" needs an area in front and at most 72 characters, as in \"kv-cache: reject empty rows\"" >&2
    failed=1
  done <<<"$commits"
  echo "$count commit subjects checked"
  return $failed
}

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
  [ "$more" -le 32 ] # of which 7 are the log's: tracing, and its lines of text and JSON
}

# Known vulnerabilities of what we depend on; asks the network.
job-advisories() {
  if has cargo-deny; then
    step cargo deny --locked check advisories
  else
    leave_out "the check of advisories" "cargo-deny" "cargo install --locked cargo-deny"
  fi
}

# The libraries compile for ARM and for browsers.
job-portable() {
  # Without the Hub, whose encryption is C and would want a compiler for that machine.
  compiles_for aarch64-unknown-linux-gnu "${portable[@]/#/--package=}" --features candle-gpt2-engine/built-in,candle-gpt2-weights/mmap,candle-gpt2-weights/pytorch
  compiles_for wasm32-unknown-unknown "${portable[@]/#/--package=}"
}

# compiles_for TARGET OPTION…: it is checked, without building a program.
compiles_for() {
  if has_target "$1"; then
    step cargo check --target "$1" --no-default-features --locked "${@:2}"
  else
    leave_out "the check for $1" "a target" "rustup target add $1"
  fi
}

# 64-bit ARM, in an emulator where the machine is another one: the tests of the whole workspace, but for the Python module, which needs an
# interpreter for that machine, and in an emulator the program's, which start it: the system itself does not emulate.
job-aarch64() {
  local target=aarch64-unknown-linux-gnu run=() skipped=() excluded=(--exclude candle-gpt2-python)
  if ! has_target $target; then
    leave_out "the tests on ARM" "a target" "rustup target add $target"
    return
  fi
  if [ "$(uname -m)" != aarch64 ]; then
    if ! has qemu-aarch64 || ! has aarch64-linux-gnu-gcc; then
      leave_out "the tests on ARM" "an emulator and a linker" "apt-get install qemu-user gcc-aarch64-linux-gnu"
      return
    fi
    run=(env CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
      CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu")
    excluded+=(--exclude candle-gpt2-cli)
    # An emulator has no forks of a process with threads, and takes minutes for each test that tries thousands of shapes, and many for those
    # that compress long files.
    skipped=(--skip a_fork --skip attention_equals_the_reference --skip packed::tests::a_row_has_the_same_bits --skip packed::tests::products_equal_the_reference
      --skip round_trips::a_file_is_as_large_as_the_models_entropy --skip round_trips::long_inputs_come_back_in_several_streams)
  fi
  step "${run[@]}" cargo test --target $target --workspace "${excluded[@]}" --locked --no-fail-fast --lib --bins --tests -- "${skipped[@]}"
}

# What files, threads and processes do differently elsewhere: the crates whose tests run on other systems too.
systems=(candle-gpt2-weights candle-gpt2-jobs candle-gpt2-engine candle-gpt2-server candle-gpt2-cli)
# tests_on TARGET COMMAND…: the kernels' tests, those of the bits, and those of files, jobs, server and program, but for those in `skipped`.
tests_on() {
  local target=$1 run=("${@:2}")
  step "${run[@]}" cargo test --target "$target" --package candle-gpt2-arithmetic --lib --locked
  step "${run[@]}" cargo test --target "$target" "${systems[@]/#/--package=}" --locked --no-fail-fast --lib --tests -- "${skipped[@]}"
}

# Static programs for every Linux.
job-musl() {
  local target=x86_64-unknown-linux-musl skipped=()
  if has_target $target && has musl-gcc; then
    tests_on $target env
  else
    leave_out "the tests of the static program" "a target, and a C compiler" "rustup target add $target, apt-get install musl-tools"
  fi
}

# Windows: compiled by mingw and run in Wine; for Microsoft's tools it is checked only, without the Hub, whose C they compile.
job-windows() {
  # In Wine without the Hub's: version 8 says that it has made a link, and makes none.
  local target=x86_64-pc-windows-gnu skipped=(--skip hub::)
  compiles_for x86_64-pc-windows-msvc "${program_alone[@]}"
  if has_target $target && has x86_64-w64-mingw32-gcc && has wine; then
    tests_on $target env CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER="$PWD/scripts/wine.sh"
  else
    leave_out "the tests on Windows" "a target, mingw and Wine" "rustup target add $target, apt-get install gcc-mingw-w64-x86-64 wine"
  fi
}

# Apple's linker is not to be had elsewhere.
job-apple() { compiles_for aarch64-apple-darwin "${program_alone[@]}"; }

# WebAssembly under Node.
job-wasm32() {
  # The kernels, the engine's arithmetic and the loader, in memory that need not grow: that is where Node crashes.
  if has_target wasm32-wasip1 && has node; then
    local in_wasm=(env CARGO_TARGET_WASM32_WASIP1_RUNNER="node $PWD/scripts/wasi.mjs"
      CARGO_TARGET_WASM32_WASIP1_RUSTFLAGS="-C target-feature=+simd128 -C link-arg=--initial-memory=$((1 << 30))"
      cargo test --target wasm32-wasip1 --locked)
    step "${in_wasm[@]}" --package candle-gpt2-arithmetic --lib
    step "${in_wasm[@]}" --package candle-gpt2-engine --no-default-features --features built-in --test fingerprints
    step "${in_wasm[@]}" --package candle-gpt2-weights --no-default-features --features pytorch --test suite -- formats:: given::
  else
    leave_out "the tests of kernels and loader as WebAssembly" "a target, and node from 20 on" "rustup target add wasm32-wasip1, apt-get install nodejs"
  fi
}

# The oldest Rust that the manifests promise: one for the workspace, an older one for the crate that needs no candle.
job-oldest-rust() {
  builds_with_oldest Cargo.toml --workspace
  builds_with_oldest crates/arithmetic/Cargo.toml --package candle-gpt2-arithmetic
}
builds_with_oldest() {
  local oldest toolchain
  oldest=$(sed -n 's/^rust-version = "\([0-9.]*\)".*/\1/p' "$1")
  toolchain=$(rustup toolchain list 2>/dev/null | grep "^${oldest}[.-]" | cut -d ' ' -f 1 | tail -n 1) || true
  if [ -n "$toolchain" ]; then
    step rustup run "$toolchain" cargo check "${@:2}" --locked --target-dir "target/rust-$oldest"
  else
    leave_out "the check with the oldest Rust of $1" "a toolchain" "rustup toolchain install $oldest --profile minimal"
  fi
}

# CUDA kernels on the CPU, and compiled where there is a toolkit.
job-cuda-check() {
  if has g++; then
    step scripts/check_cuda_kernels.sh
  else
    leave_out "the check of the CUDA kernels" "g++" "apt-get install g++"
  fi
  if has nvcc; then
    step cargo check --package candle-gpt2-cli --features cuda --locked
  else
    leave_out "the build for NVIDIA GPUs" "nvcc" "scripts/cuda_toolchain.sh, then . target/cuda-toolchain/env"
  fi
}

# The fuzzer is C++. Its crate is a workspace of its own.
job-fuzz-build() {
  if has g++; then
    step cargo check --manifest-path crates/fuzz/Cargo.toml --locked --target-dir target/fuzz
  else
    leave_out "the check of the fuzz targets" "g++" "apt-get install g++"
  fi
}

# What makes the built-in model: a workspace of its own.
job-workshop() {
  local workshop=(--manifest-path models/stories/workshop/Cargo.toml)
  local workspace=("${workshop[@]}" --workspace --locked --target-dir "${CARGO_TARGET_DIR:-target}")
  step cargo fmt "${workshop[@]}" --all --check
  step cargo clippy "${workspace[@]}" --all-targets -- -D warnings
  step env RUSTDOCFLAGS="-D warnings" cargo doc "${workspace[@]}" --no-deps
  step cargo test "${workspace[@]}"
}

# Half an hour: 10,000 inputs are compressed, and restored with other threads and instructions.
job-round-trips() {
  step cargo build --release --locked
  step python3 scripts/round_trips.py
}

# Some minutes: every target for this many seconds.
job-fuzz() {
  if has g++; then
    step scripts/fuzz.sh 20
  else
    leave_out "fuzzing" "g++" "apt-get install g++"
  fi
}

# What shares memory between threads, and packing. Without the tests of thousands of regions: Miri interprets. The pool's threads
# live as long as the program, which Miri would call a leak.
job-miri() {
  if has_miri; then
    step env MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-ignore-leaks" cargo +nightly miri test --package candle-gpt2-arithmetic --lib --locked \
      --target-dir target/miri -- pool:: parts:: packed::tests::packing_reads \
      attention::tests::copies attention::heads:: \
      --skip regions_of_several_callers --skip sleeping_threads
  else
    leave_out "the check of the pool's memory" "Miri" "rustup +nightly component add miri rust-src"
  fi
}

# GPT2_CHECKPOINTS=FOLDER adds the tests on third-party checkpoints, GPT2_JSON_SCHEMA_TESTS=FOLDER the JSON Schema test suite.
job-test() {
  if [ -z "${GPT2_CHECKPOINTS:-}" ]; then
    leave_out "the tests on third-party checkpoints" "GPT2_CHECKPOINTS" "a folder with them"
  fi
  if [ -z "${GPT2_JSON_SCHEMA_TESTS:-}" ]; then
    leave_out "the JSON Schema test suite" "GPT2_JSON_SCHEMA_TESTS" "git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite"
  fi
  step cargo test --workspace --locked
  step cargo test --package candle-gpt2-evaluation --features parquet --locked --test suite data::
  # The tests built it; `cargo run` would compile everything again with the features of the program alone.
  step "$program" generate "One day" --max-new-tokens 20
}

# Every crate's examples run by themselves, and show what the crate exports.
job-examples() {
  step "${built[@]}"
  local example empty
  empty=$(mktemp -d)
  for example in crates/*/examples/*.rs; do
    [ -e "$example" ] || continue
    step run_in "$empty" "$(dirname "$program")/examples/$(basename "$example" .rs)"
  done
  rm -r "$empty"
  if has python3; then
    step python3 scripts/check_examples.py
  else
    leave_out "the check that everything exported has an example" "Python" "apt-get install python3"
  fi
}
run_in() { (cd "$1" && "${@:2}" >/dev/null); }

# The book as pages. Its blocks are run by the tests.
job-book() {
  if has mdbook; then
    step mdbook build docs --dest-dir "$PWD/target/book"
  else
    leave_out "the book's pages" "mdbook" "cargo install --locked mdbook"
  fi
}

# Book, page, notebooks and rustdoc as one folder, in which every link leads somewhere. The page is that of job-browser where it ran.
job-site() {
  local tools page=$PWD/web/dist/gpt2.html
  if ! has mdbook; then
    leave_out "the site" "mdbook" "cargo install --locked mdbook"
  elif [ -f "$page" ]; then
    step env GPT2_SITE_PAGE="$page" scripts/build_site.sh
  elif tools=$(scripts/build_web.sh --tools 2>&1); then
    step scripts/build_site.sh
  else
    leave_out "the site" "the tools of the page" "$tools"
  fi
}

# Of the files as they are, committed or not, as everything else is checked.
job-packages() { step scripts/check_packages.sh --allow-dirty; }

# The page in the browser. Its own script says which tool it lacks.
job-browser() {
  local tools projects=(--project=server)
  if tools=$(scripts/build_web.sh --tools 2>&1); then
    step scripts/build_web.sh
    step node --test web/package/test.mjs
    projects+=(--project=file)
    if has firefox-esr || has firefox; then
      projects+=(--project=firefox)
    else
      leave_out "the tasks of the page in Firefox" "Firefox" "apt-get install firefox-esr"
    fi
  else
    leave_out "the engine in the browser" "its tools" "$tools"
  fi
  # The same tests on both pages: the server's needs no build of its own.
  if ! has node || ! (has chromium || has chromium-browser || has google-chrome); then
    leave_out "the pages in a browser" "chromium, and node from 20 on" "apt-get install chromium nodejs"
  elif [ -d web/tests/node_modules ] || npm install --prefix web/tests --no-package-lock --ignore-scripts --silent; then
    step "${built[@]}"
    step npm run types --prefix web/tests
    step env GPT2_PROGRAM="$program" npm test --prefix web/tests -- "${projects[@]}"
  else
    leave_out "the pages in a browser" "Playwright from its registry" "npm install --prefix web/tests --no-package-lock"
  fi
}

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
# python_tests OTHER: all tests, and at the same time those that take no more than seconds on another Python, if there is one.
python_tests() {
  local log failed=0
  if [ -n "$1" ]; then
    log=$(mktemp)
    env PYTHONPATH="$PWD/python" "$1" -m pytest python/tests -m "not slow" -p no:cacheprovider >"$log" 2>&1 &
  fi
  env GPT2_PROGRAM="$program" "$environment/bin/python" -m pytest python/tests || failed=1
  if [ -n "$1" ]; then
    printf '\n== the same with %s\n' "$("$1" --version)"
    wait $! || failed=1
    cat "$log"
    rm "$log"
  fi
  return $failed
}
job-python() {
  local other
  if version_of python3 >/dev/null && environment_of "$environment" python3 'maturin>=1.9.4,<2' mypy; then
    step env VIRTUAL_ENV="$environment" "$environment/bin/maturin" develop --profile dev --locked
    if ! "$environment/bin/python" -c 'import ray.data' 2>/dev/null; then
      leave_out "the tests on Ray" "Ray" "$environment/bin/python -m pip install 'ray[data]>=2.60'"
    fi
    step "${built[@]}"
    # The same module, which is for every Python from 3.11 on, so a second one runs beside the first.
    if other=$(second_python) && environment_of "$environment-$(version_of "$other")" "$other"; then
      other=$environment-$(version_of "$other")/bin/python
    else
      other=
      leave_out "the tests on another Python" "a second one, from 3.11 on" "apt-get install python3.13 python3.13-venv, or pyenv install 3.13"
    fi
    step python_tests "$other"
  else
    leave_out "the tests of the Python package" "Python from 3.11 on, and maturin, numpy, mypy, pytest and pytest-timeout from its registry" \
      "apt-get install python3 python3-venv"
  fi
}

# The program as it is handed out, for the targets that this machine can link, installed from its archive and run.
job-release() { step scripts/release.sh --rehearse; }

# Wheels for all systems that can be linked here. This machine's is installed in a fresh environment and used, with no compiler in reach.
job-wheels() {
  if ! has maturin; then
    leave_out "the wheels" "maturin" "pip install 'maturin>=1.9.4,<2'"
    return
  fi
  local target targets=()
  for target in {x86_64,aarch64}-unknown-linux-{gnu,musl} x86_64-pc-windows-gnu aarch64-apple-darwin; do
    targets+=(--target "$target")
  done
  step scripts/build_wheel.sh "${targets[@]}" dist/wheels
  step try_wheel
}
try_wheel() {
  local place wheel
  place=$(mktemp -d)
  python3 -m venv "$place"
  for wheel in dist/wheels/*"$(uname -m)".whl; do
    if "$place/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel"; then break; fi
  done
  (cd "$place" && env -i HOME="$place" PATH=/nowhere bin/python -c '
import candle_gpt2

model = candle_gpt2.Model.from_pretrained()
print(model.generate("One day", max_new_tokens=8, seed=1))
print(model.logits([1, 2, 3]).shape)')
  rm -r "$place"
}

list() { declare -F | sed -n 's/^declare -f job-//p' | sort; }

if [ "${1:-}" = --list ]; then
  list
  exit
fi
[ $# -gt 0 ] || { echo "which job? $(list | xargs)" >&2; exit 2; }
for job in "$@"; do
  declare -F "job-$job" >/dev/null || { echo "there is no job $job; there are: $(list | xargs)" >&2; exit 2; }
done
for job in "$@"; do
  "job-$job"
done
steps_done "all checks passed"
