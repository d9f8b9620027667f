#!/usr/bin/env bash
# The gate: what holds before every commit, cheapest first. usage: scripts/check.sh
# GPT2_CHECKPOINTS=FOLDER adds the tests on third-party checkpoints, GPT2_JSON_SCHEMA_TESTS=FOLDER the JSON Schema test suite. The jobs are in scripts/ci.sh.
# What compiles the workspace once more runs in the workflows only: `fuzz-build` and `packages`.
exec "$(dirname "$0")/ci.sh" check portable wasm32 oldest-rust cuda-check miri test workshop examples book browser python
