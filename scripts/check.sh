#!/usr/bin/env bash
# The gate: what holds before every commit, cheapest first. usage: scripts/check.sh
# GPT2_CHECKPOINTS=FOLDER adds the tests on third-party checkpoints. The jobs are in scripts/ci.sh.
exec "$(dirname "$0")/ci.sh" check portable wasm32 oldest-rust cuda-check fuzz-build miri test examples book packages browser python
