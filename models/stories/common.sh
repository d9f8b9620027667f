# shellcheck shell=bash disable=SC2034
# Sourced by the scripts in this folder, whose arguments begin with --stories DIR OUT: reads them, enters the
# repository and defines commands.
usage() { sed -n 's/^# usage: /usage: /p' "$0" >&2; exit 2; }
if [ $# -lt 3 ] || [ "$1" != --stories ] || [ ! -d "$2" ]; then usage; fi
stories=$(realpath "$2")
out=$(realpath --canonicalize-missing "$3")
cd "$(dirname "$0")/../.." || exit

gpt2() { cargo run --quiet --release --locked -p candle-gpt2-cli -- "$@"; }
workshop() {
  cargo run --quiet --release --locked --manifest-path models/stories/workshop/Cargo.toml --target-dir "${CARGO_TARGET_DIR:-target}" -p "$@"
}

# corpus SEED OPTION…: writes OUT/corpus with the lessons, unless it exists.
corpus() {
  [ ! -d "$out/corpus" ] || return 0
  rm -rf "$out/corpus.part"
  workshop story-generator -- corpus --stories "$stories" --seed "$1" --out "$out/corpus.part" "${@:2}"
  mv "$out/corpus.part" "$out/corpus"
}
