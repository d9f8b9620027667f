# Shared functions of the check and release scripts: timed steps, a list of skipped ones, and builds without
# local paths. Must be sourced.
# shellcheck shell=bash

took=()
step() {
  printf '\n== %s\n' "$*"
  local begin=$SECONDS
  "$@"
  took+=("$((SECONDS - begin)) s: $*")
}

left_out=()
# leave_out WHAT MISSING HOW: reports a skipped step, its requirement, and how to install that.
leave_out() {
  left_out+=("left out: $1 needs $2 ($3)")
  printf '\n== %s\n' "${left_out[-1]}"
}
# Prints the slow steps and the skipped ones. A run that skips everything fails.
steps_done() {
  [ ${#took[@]} -gt 0 ] || { echo "all steps were skipped" >&2; return 1; }
  printf '\n'
  printf '%s\n' "${took[@]}" | grep -vE '^[0-4] s' | sort -n || true
  printf '\n%s\n' "$1"
  [ ${#left_out[@]} -eq 0 ] || printf '%s\n' "${left_out[@]}"
}

# These query the installed targets and programs and never download. (grep without -q reads to the end, since
# a broken pipe would be a failure.)
has_target() { rustup target list --installed 2>/dev/null | grep -x "$1" >/dev/null; }
has() { command -v "$1" >/dev/null; }

# Linux and bash on Windows have sha256sum, macOS has shasum.
checksum() { if has sha256sum; then sha256sum "$@"; else shasum -a 256 "$@"; fi; }

# The build folder of cargo.
build=${CARGO_TARGET_DIR:-$PWD/target}

# set_flags TARGET FLAG…: passes flags to rustc and removes local paths from the output: sources, dependencies
# and the standard library get fixed names.
set_flags() {
  local target=$1 sysroot registry maps=("$build=/target" "$PWD=/gpt2")
  sysroot=$(rustc --print sysroot)
  maps+=("$sysroot/lib/rustlib/src/rust=/rustc/$(rustc -vV | sed -n 's/^commit-hash: //p')")
  for registry in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*; do
    maps+=("$registry=/registry")
  done
  local flags=("${maps[@]/#/--remap-path-prefix=}" "${@:2}")
  case $target in
    *-windows-gnu) flags+=(-C "link-arg=-Wl,--no-insert-timestamp") ;; # no timestamp in the program's header
  esac
  CARGO_ENCODED_RUSTFLAGS=$(IFS=$'\x1f'; echo "${flags[*]}")
  CFLAGS="${maps[*]/#/-ffile-prefix-map=}"
  export CARGO_ENCODED_RUSTFLAGS CFLAGS CARGO_INCREMENTAL=0
}

# holds_no_path FILE…: fails if a file contains a local path.
holds_no_path() {
  local path
  for path in "$PWD" "$build" "$HOME/" "${CARGO_HOME:-$HOME/.cargo}"; do
    if grep -aF "$path" "$@" >/dev/null; then
      echo "$*: contains a local path: $path" >&2
      return 1
    fi
  done
}
