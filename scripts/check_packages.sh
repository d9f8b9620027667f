#!/usr/bin/env bash
# Packs every crate that is published, builds the program in an empty folder from the packed files alone, and compares its text
# with that of the repository's program. Only our own crates are compiled, where the others are in the target folder already.
# usage: scripts/check_packages.sh [--allow-dirty]   (which packs files that are not committed, too)
set -euo pipefail
cd "$(dirname "$0")/.."
largest=10000000 # bytes that crates.io takes of one crate
target=${CARGO_TARGET_DIR:-$PWD/target}
folder=$target/packed
prompt=(generate "One day" --max-new-tokens 5)

packages=()
for manifest in crates/*/Cargo.toml models/*/Cargo.toml web/Cargo.toml; do
  grep -q '^publish = false' "$manifest" || packages+=("$(awk -F'"' '/^name = / { print $2; exit }' "$manifest")")
done
version=$(awk -F'"' '/^version = / { print $2; exit }' Cargo.toml)
# Cargo says of each crate which tests it leaves out; that is asked for by `include`.
cargo package --no-verify --locked --quiet "$@" "${packages[@]/#/--package=}" 2> >(grep -vE 'warning: ignoring (test|benchmark) ' >&2)

rm -rf "$folder"
mkdir -p "$folder"
{
  printf '[workspace]\nresolver = "3"\nmembers = ["*"]\n\n[patch.crates-io]\n'
  for package in "${packages[@]}"; do
    echo "$package = { path = \"$package-$version\" }"
  done
  printf '\n'
  # The same profile, so that the compiled dependencies are those of the repository. Our own crates are not optimised: they compile
  # sooner, and a few tokens do not need it.
  awk '/^\[/ { is_profile = /^\[profile[.]dev/ && !/candle-gpt2/ } is_profile' Cargo.toml | sed 's/^opt-level = 1$/opt-level = 0/'
} >"$folder/Cargo.toml"
cp Cargo.lock "$folder"

for package in "${packages[@]}"; do
  archive=$target/package/$package-$version.crate
  bytes=$(wc -c <"$archive")
  printf '%9d bytes  %s\n' "$bytes" "$package"
  [ "$bytes" -lt "$largest" ] || { echo "$package is larger than crates.io takes" >&2; exit 1; }
  # The archives' times are all the same, and cargo compiles what is newer than it was.
  tar --extract --gzip --touch --file "$archive" --directory "$folder"
  for file in README.md LICENSE-MIT LICENSE-APACHE; do
    [ -s "$folder/$package-$version/$file" ] || { echo "$package is packed without $file" >&2; exit 1; }
  done
done
strays=$(find "$folder" -type l -o -name tests -o -name fixtures)
[ -z "$strays" ] || { echo "packed, and should not be: $strays" >&2; exit 1; }

# Compiled dependencies are shared with the repository; the program is not put where the repository's stands.
(cd "$folder" && CARGO_BUILD_BUILD_DIR=$target cargo build --offline --package candle-gpt2-cli --target-dir "$folder/target")
empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
packed=$(cd "$empty" && "$folder/target/debug/gpt2" "${prompt[@]}" 2>/dev/null)
# With the features that it has beside the tests, which built it so.
cargo build --workspace --bins --examples --locked --quiet
ours=$("$target/debug/gpt2" "${prompt[@]}" 2>/dev/null)
if [ -z "$packed" ] || [ "$packed" != "$ours" ]; then
  printf 'packed:\n%s\nours:\n%s\n' "$packed" "$ours" >&2
  exit 1
fi
echo "${#packages[@]} crates are packed; the program that is built from them alone writes what ours does"
