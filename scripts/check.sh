#!/usr/bin/env bash
# The gate: all checks that must pass before every commit, cheapest first. usage: scripts/check.sh
# GPT2_CHECKPOINTS=FOLDER adds the tests on third-party checkpoints, GPT2_JSON_SCHEMA_TESTS=FOLDER the JSON
# Schema test suite. scripts/ci.sh defines the jobs. Jobs that compile the workspace again run only in the
# workflows: `fuzz-build` and `packages`.
exec "$(dirname "$0")/ci.sh" check portable wasm32 oldest-rust cuda-check miri test workshop examples book browser python
