#!/usr/bin/env bash
# Builds the engine for browsers and assembles the page and the npm package.
# usage: scripts/build_web.sh [--install] [--tools]
# Writes the page to web/dist/gpt2.html (one file) and web/dist/ (for a static host), the package to
# web/dist/npm/, and the engine of the book's figures to web/dist/book/. Needs cargo with the target
# wasm32-unknown-unknown, node, wasm-bindgen and wasm-opt, on the PATH or in target/web-tools. --install
# installs missing tools there (except node). --tools stops before building. GPT2_WEB_PROFILE=release builds
# faster, without the final optimizations.
set -euo pipefail
cd "$(dirname "$0")/.."
profile=${GPT2_WEB_PROFILE:-web}
export PATH="$PWD/target/web-tools/bin:$PWD/target/web-tools/node_modules/.bin:$PATH"

asked=" $* "
# missing NAME COMMAND…: with --install runs the command that installs a tool; otherwise prints it and fails.
missing() {
  if [[ $asked == *" --install "* ]]; then
    "${@:2}"
  else
    echo "$1 is missing: ${*:2}, or scripts/build_web.sh --install" >&2
    exit 1
  fi
}
command -v node >/dev/null || { echo "node is missing; install version 20 or later from https://nodejs.org" >&2; exit 1; }
version=$(sed -n '/^name = "wasm-bindgen"$/{n;s/version = "\(.*\)"/\1/p}' Cargo.lock)
# wasm-bindgen's program and library must have the same version.
[ "$(wasm-bindgen --version 2>/dev/null)" = "wasm-bindgen $version" ] ||
  missing "wasm-bindgen $version" cargo install wasm-bindgen-cli --version "$version" --root target/web-tools
# Old versions (108 in Debian 12) corrupt the table of JavaScript objects.
oldest=120
has_wasm_opt() { [ "$(wasm-opt --version 2>/dev/null | sed -n 's/^wasm-opt version \([0-9]*\).*/\1/p')" -ge $oldest ] 2>/dev/null; }
[ "$profile" != web ] || has_wasm_opt || missing "wasm-opt from $oldest on" npm install --prefix target/web-tools binaryen
rustup target list --installed 2>/dev/null | grep -x wasm32-unknown-unknown >/dev/null ||
  missing "the target wasm32-unknown-unknown" rustup target add wasm32-unknown-unknown
[[ $asked != *" --tools "* ]] || exit 0

# Every browser supports simd128 since 2023. Relaxed instructions would make completions differ from the
# program's.
export CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUSTFLAGS="-C target-feature=+simd128 -C strip=none"
cargo build --package candle-gpt2-browser --lib --target wasm32-unknown-unknown --profile "$profile" --locked
built=target/wasm32-unknown-unknown/$profile/candle_gpt2_browser.wasm

# The page uses classic scripts, because pages from files cannot load modules; the package is a module. Each
# consists of gpt2.js, gpt2.d.ts and gpt2_bg.wasm, which is identical in both.
rm -rf target/browser
for kind in no-modules:page web:module; do
  wasm-bindgen --target "${kind%:*}" --out-name gpt2 --out-dir "target/browser/${kind#*:}" "$built"
done
cmp target/browser/page/gpt2_bg.wasm target/browser/module/gpt2_bg.wasm
if [ "$profile" = web ]; then
  wasm-opt -O3 --enable-simd --enable-bulk-memory --enable-nontrapping-float-to-int --enable-sign-ext --enable-mutable-globals \
    --enable-reference-types --enable-multivalue target/browser/page/gpt2_bg.wasm -o target/browser/optimised.wasm
  cp target/browser/optimised.wasm target/browser/module/gpt2_bg.wasm
  mv target/browser/optimised.wasm target/browser/page/gpt2_bg.wasm
fi

node web/assemble.mjs
