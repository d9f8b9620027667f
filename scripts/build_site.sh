#!/usr/bin/env bash
# Puts the book, rustdoc, the page in the browser and the notebooks into one folder that opens from a file, offline, with search.
# usage: scripts/build_site.sh [FOLDER]     target/site by default; what is in it is replaced
# It needs mdbook and Python. For the page it calls scripts/build_web.sh, unless GPT2_SITE_PAGE names a gpt2.html that is built already.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v mdbook >/dev/null || { echo "mdbook is missing: cargo install --locked mdbook" >&2; exit 1; }
command -v python3 >/dev/null || { echo "python3 is missing: apt-get install python3" >&2; exit 1; }
page=${GPT2_SITE_PAGE:-}
if [ -z "$page" ]; then
  scripts/build_web.sh --tools
  page=web/dist/gpt2.html
  scripts/build_web.sh
fi
[ -f "$page" ] || { echo "GPT2_SITE_PAGE=$page is no file: scripts/build_web.sh makes web/dist/gpt2.html" >&2; exit 1; }

site=${1:-target/site}
[ ! -e "$site" ] || [ -z "$(ls -A "$site")" ] || [ -f "$site/.site" ] || { echo "$site has other files in it; choose another folder" >&2; exit 1; }
rm -rf "$site"
mkdir -p "$site/page"
touch "$site/.site"
site=$(cd "$site" && pwd)

# As deep as the sources, so that links from its pages into the code lead to the copies of these files.
mdbook build docs --dest-dir "$site/docs/book"
rm -f "$site/docs/book/404.html" # for a server
cargo doc --workspace --no-deps --locked
cp -r "${CARGO_TARGET_DIR:-target}/doc" "$site/rust"
rm -f "$site"/rust/*.json # of scripts/check_examples.py
cp "$page" "$site/page/gpt2.html"
python3 scripts/site.py "$site"
echo "$site/index.html"
