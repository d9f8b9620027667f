#!/usr/bin/env bash
# Everything CI checks, cheapest first. usage: scripts/check.sh
# GPT2_CHECKPOINTS=FOLDER adds the tests on third-party checkpoints.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s\n' "$*"; "$@"; }

step cargo fmt --all --check
step cargo clippy --workspace --all-targets --locked -- -D warnings
step cargo clippy --package gpt2-cli --no-default-features --locked -- -D warnings
step cargo clippy --package gpt2-engine --no-default-features --all-targets --locked -- -D warnings
step env RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked
if [ -z "${GPT2_CHECKPOINTS:-}" ]; then
  printf '\nGPT2_CHECKPOINTS is not set: tests on third-party checkpoints are skipped\n'
fi
step cargo test --workspace --locked
step cargo run --release --locked -- generate "ROMEO:" --max-new-tokens 20
printf '\nall checks passed\n'
