#!/usr/bin/env bash
# Packages every published crate, builds the program in an empty folder from the packages alone, and compares
# its output with the repository's program. Also runs every block of the guide for candle developers, and of the
# front page of candle-gpt2, in a crate that depends only on the packed candle-gpt2 and on candle. Compiles only our own crates if the dependencies are already in
# the target folder.
# usage: scripts/check_packages.sh [--allow-dirty]   (also packages uncommitted files)
set -euo pipefail
cd "$(dirname "$0")/.."
largest=10000000 # size limit of crates.io for one crate
target=${CARGO_TARGET_DIR:-$PWD/target}
folder=$target/packed
prompt=(generate "One day" --max-new-tokens 5)

packages=()
for manifest in crates/*/Cargo.toml models/*/Cargo.toml web/Cargo.toml; do
  grep -q '^publish = false' "$manifest" || packages+=("$(awk -F'"' '/^name = / { print $2; exit }' "$manifest")")
done
version=$(awk -F'"' '/^version = / { print $2; exit }' Cargo.toml)
# Hides cargo's warnings about excluded tests and benchmarks; `include` excludes them on purpose.
cargo package --no-verify --locked --quiet "$@" "${packages[@]/#/--package=}" 2> >(grep -vE 'warning: ignoring (test|benchmark) ' >&2)

rm -rf "$folder"
mkdir -p "$folder"
{
  printf '[workspace]\nresolver = "3"\nmembers = ["*"]\n\n[patch.crates-io]\n'
  for package in "${packages[@]}"; do
    echo "$package = { path = \"$package-$version\" }"
  done
  printf '\n'
  # Same profile as the repository, so that compiled dependencies are shared. Our own crates are not
  # optimized: they compile faster, and a few tokens need no speed.
  awk '/^\[/ { is_profile = /^\[profile[.]dev/ && !/candle-gpt2/ } is_profile' Cargo.toml | sed 's/^opt-level = 1$/opt-level = 0/'
} >"$folder/Cargo.toml"
cp Cargo.lock "$folder"

for package in "${packages[@]}"; do
  archive=$target/package/$package-$version.crate
  bytes=$(wc -c <"$archive")
  printf '%9d bytes  %s\n' "$bytes" "$package"
  [ "$bytes" -lt "$largest" ] || { echo "$package is larger than crates.io accepts" >&2; exit 1; }
  # All files in an archive have the same time, and cargo recompiles by modification time.
  tar --extract --gzip --touch --file "$archive" --directory "$folder"
  for file in README.md LICENSE-MIT LICENSE-APACHE; do
    [ -s "$folder/$package-$version/$file" ] || { echo "the package $package lacks $file" >&2; exit 1; }
  done
done
strays=$(find "$folder" -type l -o -name tests -o -name fixtures)
[ -z "$strays" ] || { echo "unexpected files in packages: $strays" >&2; exit 1; }

mkdir -p "$folder/stranger/src"
dependencies=$(awk '/^...toml$/ { is_on = 1; next } /^...$/ { is_on = 0 } is_on && /=/' docs/src/guides/candle.md |
  sed "s/^\(candle-gpt2 = \).*/\1\"$version\"/")
printf '[package]\nname = "stranger"\nversion = "0.0.0"\nedition = "2024"\n\n[dependencies]\n%s\n' "$dependencies" >"$folder/stranger/Cargo.toml"
sed "s|\.\./crates|$PWD/crates|" docs/src/guides/candle.md >"$folder/stranger/guide.md"
sed -n 's|^//! \{0,1\}||p' crates/gpt2/src/lib.rs | sed "s|\.\./testing|$PWD/crates/testing|" >"$folder/stranger/front-page.md"
cat crates/gpt2/README.md >>"$folder/stranger/front-page.md"
printf '#[doc = include_str!("../%s.md")]\nmod %s {}\n' guide guide front-page front_page >"$folder/stranger/src/lib.rs"
(cd "$folder" && CARGO_BUILD_BUILD_DIR=$target cargo test --offline --package stranger --doc --target-dir "$target/stranger")

# Shares compiled dependencies with the repository, but puts the program elsewhere.
(cd "$folder" && CARGO_BUILD_BUILD_DIR=$target cargo build --offline --package candle-gpt2-cli --target-dir "$folder/target")
empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
packed=$(cd "$empty" && "$folder/target/debug/gpt2" "${prompt[@]}" 2>/dev/null)
# Built with the same features as for the tests, which have already compiled it.
cargo build --workspace --bins --examples --locked --quiet
ours=$("$target/debug/gpt2" "${prompt[@]}" 2>/dev/null)
if [ -z "$packed" ] || [ "$packed" != "$ours" ]; then
  printf 'packed:\n%s\nours:\n%s\n' "$packed" "$ours" >&2
  exit 1
fi
echo "packaged ${#packages[@]} crates; the guide's blocks run in a crate of their own; the program built from them alone prints the same output as the repository's"
