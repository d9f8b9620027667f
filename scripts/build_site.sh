#!/usr/bin/env bash
# Collects the book, rustdoc, the web page and the notebooks in one folder that works offline from files, with
# search.
# usage: scripts/build_site.sh [--book] [FOLDER]     (default: target/site; its contents are replaced)
# Needs mdbook and Python. Builds the page with scripts/build_web.sh, unless GPT2_SITE_PAGE names an existing
# gpt2.html. --book builds only the book, with the engine of its figures.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v mdbook >/dev/null || { echo "mdbook is missing: cargo install --locked mdbook" >&2; exit 1; }
command -v python3 >/dev/null || { echo "python3 is missing: apt-get install python3" >&2; exit 1; }
page=${GPT2_SITE_PAGE:-}
book_only=
[ "${1:-}" != --book ] || { book_only=1; shift; }
if [ -z "$page" ]; then
  scripts/build_web.sh --tools
  page=web/dist/gpt2.html
  scripts/build_web.sh
fi
# From the same build as the page.
engine=$(dirname "$page")/book/engine.js
[ -f "$page" ] || { echo "GPT2_SITE_PAGE=$page is not a file; scripts/build_web.sh creates web/dist/gpt2.html" >&2; exit 1; }
[ -f "$engine" ] || { echo "$engine is missing; rebuild the page with scripts/build_web.sh" >&2; exit 1; }

site=${1:-target/site}
[ ! -e "$site" ] || [ -z "$(ls -A "$site")" ] || [ -f "$site/.site" ] || { echo "$site contains other files; choose another folder" >&2; exit 1; }
rm -rf "$site"
mkdir -p "$site/page"
touch "$site/.site"
site=$(cd "$site" && pwd)

# At the same depth as the sources, so that relative links from the book into the code reach the copies.
mdbook build docs --dest-dir "$site/docs/book"
rm -f "$site/docs/book/404.html" # useful only on a server
cp "$engine" "$site/docs/book/engine.js"
python3 scripts/site.py --book "$site/docs/book"
[ -z "$book_only" ] || { echo "$site/docs/book/index.html"; exit; }
cargo doc --workspace --no-deps --locked
cp -r "${CARGO_TARGET_DIR:-target}/doc" "$site/rust"
rm -f "$site"/rust/*.json # from scripts/check_examples.py
cp "$page" "$site/page/gpt2.html"
python3 scripts/site.py "$site"
echo "$site/index.html"
