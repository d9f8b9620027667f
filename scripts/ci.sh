#!/usr/bin/env bash
# All checks, as jobs. scripts/check.sh runs the jobs of the gate; the workflows in .github run each job on
# its own machine.
# usage: scripts/ci.sh JOB…     scripts/ci.sh --list
# Checks whose tool, toolchain or target is not installed are skipped and listed at the end. The script
# installs nothing. A run that skips everything fails.
set -euo pipefail
cd "$(dirname "$0")/.."

. scripts/steps.sh

has_miri() { rustup component list --toolchain nightly --installed 2>/dev/null | grep '^miri' >/dev/null; }

program=${CARGO_TARGET_DIR:-$PWD/target}/debug/gpt2
# Program and examples with the same features as for the tests, so that nothing is compiled again after them.
built=(cargo build --workspace --bins --examples --locked)

# The crates from the kernels to the engine, which also build for other machines and browsers. Excludes the
# program itself.
portable=(candle-gpt2-arithmetic candle-gpt2-kernels candle-gpt2-attention candle-gpt2 candle-gpt2-weights candle-gpt2-generation candle-gpt2-interpret candle-gpt2-web candle-gpt2-pictures candle-gpt2-engine candle-gpt2-look candle-gpt2-browser)

# The program without the Hub.
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
    step shellcheck --external-sources --exclude=SC1091 scripts/*.sh scripts/bench/*.sh models/*/*.sh
  else
    leave_out "the check of shell scripts" "shellcheck" "apt-get install shellcheck"
  fi
  step workflows_are_sound
  step commit_subjects_are_sound
  if has cargo-deny; then
    # Advisories need the network and have their own job.
    step cargo deny --locked check licenses bans sources
  else
    leave_out "the check of licenses and sources" "cargo-deny" "cargo install --locked cargo-deny"
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

# Checks that every workflow parses and that workflows and jobs match.
workflows_are_sound() {
  local called known
  known=$(list)
  called=$(sed -nE 's/.*(scripts\/ci\.sh |[{ -]job: )([a-z][a-z0-9-]*).*/\2/p' .github/workflows/*.yml | sort -u)
  diff <(echo "$known") <(echo "$called") || { echo "the jobs in scripts/ci.sh (<) differ from the jobs in the workflows (>)"; return 1; }
  if has actionlint; then
    actionlint
  elif python3 -c 'import yaml' 2>/dev/null; then
    python3 -c 'import sys, yaml; [yaml.safe_load(open(path))["jobs"] for path in sys.argv[1:]]' .github/workflows/*.yml
  else
    leave_out "the syntax of workflows" "actionlint, or PyYAML" "pip install pyyaml"
  fi
}

# Checks the commit subjects since this commit: `area: change`, at most 72 characters. Merges are exempt.
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

# Checks that the minimal program stays light, and limits the crates that `serve` adds.
crates_of() { cargo tree --package candle-gpt2-cli --edges normal --prefix none --locked "$@" | awk '{print $1}' | sort -u; }
light_program() {
  local plain served
  plain=$(crates_of --no-default-features)
  served=$(crates_of --no-default-features --features serve)
  if grep -xE 'tokio|hyper|llguidance' <<<"$plain"; then
    echo "the minimal program depends on crates that only the server should need"
    return 1
  fi
  local more
  more=$(comm -13 <(echo "$plain") <(echo "$served") | grep -cv '^candle-gpt2')
  echo "the server adds $more crates"
  [ "$more" -le 32 ] # including 7 for the log: tracing, and its text and JSON formats
}

# Checks for known vulnerabilities in dependencies; uses the network.
job-advisories() {
  if has cargo-deny; then
    step cargo deny --locked check advisories
  else
    leave_out "the check of advisories" "cargo-deny" "cargo install --locked cargo-deny"
  fi
}

# Checks that the libraries compile for ARM and for browsers.
job-portable() {
  # Without the Hub, because its TLS library is in C and would need a cross compiler.
  compiles_for aarch64-unknown-linux-gnu "${portable[@]/#/--package=}" --features candle-gpt2-engine/built-in,candle-gpt2-weights/mmap,candle-gpt2-weights/pytorch
  compiles_for wasm32-unknown-unknown "${portable[@]/#/--package=}"
}

# compiles_for TARGET OPTION…: checks without building a program.
compiles_for() {
  if has_target "$1"; then
    step cargo check --target "$1" --no-default-features --locked "${@:2}"
  else
    leave_out "the check for $1" "a target" "rustup target add $1"
  fi
}

# Tests the whole workspace on 64-bit ARM, in an emulator on other machines. Excludes the Python module, which
# needs an ARM interpreter. In an emulator, also excludes the program's tests, because they start the program
# and only the tests are emulated.
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
    # The emulator does not support fork in a process with threads. Tests of thousands of shapes or of long
    # compressed files would take minutes each.
    skipped=(--skip forked_process_starts --skip fork_during_another --skip attention_equals_the_reference --skip packed::tests::row_bits --skip packed::tests::products_equal_the_reference
      --skip round_trips::file_size_is_close_to_the_cross_entropy --skip round_trips::long_inputs_round_trip_in_several_streams)
  fi
  step "${run[@]}" cargo test --target $target --workspace "${excluded[@]}" --locked --no-fail-fast --lib --bins --tests -- "${skipped[@]}"
}

# Crates with files, threads and processes, which behave differently on other systems; their tests run there
# too.
systems=(candle-gpt2-weights candle-gpt2-jobs candle-gpt2-engine candle-gpt2-server candle-gpt2-cli)
# tests_on TARGET COMMAND…: tests the kernels and the crates in `systems`, except for `skipped`.
tests_on() {
  local target=$1 run=("${@:2}")
  step "${run[@]}" cargo test --target "$target" --package candle-gpt2-arithmetic --lib --locked
  step "${run[@]}" cargo test --target "$target" "${systems[@]/#/--package=}" --locked --no-fail-fast --lib --tests -- "${skipped[@]}"
}

# Tests the static program for Linux.
job-musl() {
  local target=x86_64-unknown-linux-musl skipped=()
  if has_target $target && has musl-gcc; then
    tests_on $target env
  else
    leave_out "the tests of the static program" "a target, and a C compiler" "rustup target add $target, apt-get install musl-tools"
  fi
}

# Tests on Windows: compiled with mingw and run in Wine. The MSVC target is only checked, without the Hub,
# because its C code needs Microsoft's compiler.
job-windows() {
  # Skips the Hub's tests: Wine 8 reports success for symbolic links without creating them.
  local target=x86_64-pc-windows-gnu skipped=(--skip hub::)
  compiles_for x86_64-pc-windows-msvc "${program_alone[@]}"
  if has_target $target && has x86_64-w64-mingw32-gcc && has wine; then
    tests_on $target env CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER="$PWD/scripts/wine.sh"
  else
    leave_out "the tests on Windows" "a target, mingw and Wine" "rustup target add $target, apt-get install gcc-mingw-w64-x86-64 wine"
  fi
}

# Only checks, because Apple's linker exists only on Macs.
job-apple() { compiles_for aarch64-apple-darwin "${program_alone[@]}"; }

# Tests WebAssembly under Node.
job-wasm32() {
  # The kernels, the engine's arithmetic and the loader, with memory that need not grow, because Node crashes
  # when it grows.
  if has_target wasm32-wasip1 && has node; then
    local in_wasm=(env CARGO_TARGET_WASM32_WASIP1_RUNNER="node $PWD/scripts/wasi.mjs"
      CARGO_TARGET_WASM32_WASIP1_RUSTFLAGS="-C target-feature=+simd128 -C link-arg=--initial-memory=$((1 << 30))"
      cargo test --target wasm32-wasip1 --locked)
    step "${in_wasm[@]}" --package candle-gpt2-arithmetic --lib
    step "${in_wasm[@]}" --package candle-gpt2-engine --no-default-features --features built-in --test fingerprints
    step "${in_wasm[@]}" --package candle-gpt2-weights --no-default-features --features pytorch --test suite -- formats:: supplied_files::
  else
    leave_out "the tests of kernels and loader as WebAssembly" "a target, and node from 20 on" "rustup target add wasm32-wasip1, apt-get install nodejs"
  fi
}

# Checks the minimum Rust versions in the manifests: one for the workspace, an older one for the crate without
# candle.
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

# Runs the CUDA kernels on the CPU, and compiles them if a toolkit is installed. Tests gpu_run.py with stub programs.
job-cuda-check() {
  if has g++; then
    step scripts/check_cuda_kernels.sh
  else
    leave_out "the check of the CUDA kernels" "g++" "apt-get install g++"
  fi
  if has python3; then
    step python3 scripts/checks/test_gpu_run.py
  else
    leave_out "the check of the GPU script" "Python" "apt-get install python3"
  fi
  if has nvcc; then
    step cargo check --package candle-gpt2-cli --features cuda --locked
  else
    leave_out "the build for NVIDIA GPUs" "nvcc" "scripts/cuda_toolchain.sh, then . target/cuda-toolchain/env"
  fi
}

# Checks the fuzz targets, a separate workspace; the fuzzer itself is C++.
job-fuzz-build() {
  if has g++; then
    step cargo check --manifest-path crates/fuzz/Cargo.toml --locked --target-dir target/fuzz
  else
    leave_out "the check of the fuzz targets" "g++" "apt-get install g++"
  fi
}

# Checks the tools that train the built-in model, a separate workspace.
job-workshop() {
  local workshop=(--manifest-path models/stories/workshop/Cargo.toml)
  local workspace=("${workshop[@]}" --workspace --locked --target-dir "${CARGO_TARGET_DIR:-target}")
  step cargo fmt "${workshop[@]}" --all --check
  step cargo clippy "${workspace[@]}" --all-targets -- -D warnings
  step env RUSTDOCFLAGS="-D warnings" cargo doc "${workspace[@]}" --no-deps
  step cargo test "${workspace[@]}"
}

# Takes half an hour: compresses 10,000 inputs and restores them with other threads and instructions.
job-round-trips() {
  step cargo build --release --locked
  step python3 scripts/round_trips.py
}

# Takes some minutes: runs every fuzz target for this number of seconds.
job-fuzz() {
  if has g++; then
    step scripts/fuzz.sh 20
  else
    leave_out "fuzzing" "g++" "apt-get install g++"
  fi
}

# Checks code that shares memory between threads, and packing. Skips tests of thousands of regions, because
# Miri interprets. The pool's threads live as long as the program, which Miri would report as a leak.
job-miri() {
  if has_miri; then
    step env MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-ignore-leaks" cargo +nightly miri test --package candle-gpt2-arithmetic --lib --locked \
      --target-dir target/miri -- pool:: parts:: packed::tests::packing_reads \
      attention::tests::copies attention::heads:: \
      --skip threads_do_not_leak_into_the_next_region --skip sleeping_threads
  else
    leave_out "the check of the pool's memory" "Miri" "rustup +nightly component add miri rust-src"
  fi
}

# GPT2_CHECKPOINTS=FOLDER adds the tests on third-party checkpoints, GPT2_JSON_SCHEMA_TESTS=FOLDER the JSON
# Schema test suite.
job-test() {
  if [ -z "${GPT2_CHECKPOINTS:-}" ]; then
    leave_out "the tests on third-party checkpoints" "GPT2_CHECKPOINTS" "a folder with them"
  fi
  if [ -z "${GPT2_JSON_SCHEMA_TESTS:-}" ]; then
    leave_out "the JSON Schema test suite" "GPT2_JSON_SCHEMA_TESTS" "git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite"
  fi
  step cargo test --workspace --locked
  step cargo test --package candle-gpt2-evaluation --features parquet --locked --test suite data::
  # The tests have built the program; `cargo run` would recompile everything with the program's features
  # alone.
  step "$program" generate "One day" --max-new-tokens 20
}

# Runs every crate's examples, and checks that they cover the exported items.
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

# Builds the book's pages. The tests run its code blocks.
job-book() {
  if has mdbook; then
    step mdbook build docs --dest-dir "$PWD/target/book"
  else
    leave_out "the book's pages" "mdbook" "cargo install --locked mdbook"
  fi
}

# Builds book, page, notebooks and rustdoc in one folder and checks every link. Reuses the page of job-browser
# if it exists.
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

# Uses the working tree, committed or not, like all other checks.
job-packages() { step scripts/check_packages.sh --allow-dirty; }

# Tests the page in the browser. Its build script reports missing tools.
job-browser() {
  local tools projects=(--project=server) live=$PWD/target/live-book
  if tools=$(scripts/build_web.sh --tools 2>&1); then
    step scripts/build_web.sh
    step node --test web/package/test.mjs
    projects+=(--project=file)
    if has mdbook; then
      step env GPT2_SITE_PAGE="$PWD/web/dist/gpt2.html" scripts/build_site.sh --book "$live"
      projects+=(--project=book)
    else
      leave_out "the figures of the book" "mdbook" "cargo install --locked mdbook"
    fi
    if has firefox-esr || has firefox; then
      projects+=(--project=firefox)
    else
      leave_out "the tasks of the page in Firefox" "Firefox" "apt-get install firefox-esr"
    fi
  else
    leave_out "the engine in the browser" "its tools" "$tools"
  fi
  # The same tests cover both pages; the server's page needs no separate build.
  if ! has node || ! (has chromium || has chromium-browser || has google-chrome); then
    leave_out "the pages in a browser" "chromium, and node from 20 on" "apt-get install chromium nodejs"
  elif [ -d web/tests/node_modules ] || npm install --prefix web/tests --no-package-lock --ignore-scripts --silent; then
    step "${built[@]}"
    step npm run types --prefix web/tests
    step env GPT2_PROGRAM="$program" GPT2_BOOK="$live/docs/book" npm test --prefix web/tests -- "${projects[@]}"
  else
    leave_out "the pages in a browser" "Playwright from its registry" "npm install --prefix web/tests --no-package-lock"
  fi
}

# Tests the Python package in a virtual environment, whose packages are downloaded once.
environment=$PWD/target/python
# environment_of FOLDER PYTHON PACKAGE…: creates the environment if it is missing.
environment_of() {
  [ -x "$1/bin/pytest" ] && return
  "$2" -m venv "$1" && "$1/bin/python" -m pip install --quiet --disable-pip-version-check numpy pytest pytest-timeout "${@:3}"
}
version_of() { "$1" -c 'import sys; assert sys.version_info >= (3, 11); print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
# Prints the newest Python that differs from the environment's.
second_python() {
  local python version
  for python in python3.1{4,3,2,1} "$HOME"/.pyenv/versions/3.1{4,3,2,1}.*/bin/python; do
    version=$(version_of "$python") && [ "$version" != "$(version_of "$environment/bin/python")" ] && echo "$python" && return
  done
  return 1
}
# python_tests OTHER: runs all tests, and concurrently the fast tests on another Python, if given.
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
    # The same module works with every Python from 3.11 on, so a second one tests it concurrently.
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

# Builds the program as released, for all targets that this machine can link, installs it from its archive and
# runs it.
job-release() { step scripts/release.sh --rehearse; }

# Builds wheels for all systems that this machine can link. Installs its own wheel in a fresh environment and
# uses it, without a compiler on the PATH.
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
  declare -F "job-$job" >/dev/null || { echo "unknown job $job; available jobs: $(list | xargs)" >&2; exit 2; }
done
for job in "$@"; do
  "job-$job"
done
steps_done "all checks passed"
