# What the scripts of checks and releases share: steps that are timed, what is left out by name, and builds without a path of this machine.
# To be sourced.
# shellcheck shell=bash

took=()
step() {
  printf '\n== %s\n' "$*"
  local begin=$SECONDS
  "$@"
  took+=("$((SECONDS - begin)) s: $*")
}

left_out=()
# leave_out WHAT MISSING HOW: says what is not done here, what it needs, and how to get that.
leave_out() {
  left_out+=("left out: $1 needs $2 ($3)")
  printf '\n== %s\n' "${left_out[-1]}"
}
# What took its time, and what was left out. A run in which everything is left out fails.
steps_done() {
  [ ${#took[@]} -gt 0 ] || { echo "everything was left out" >&2; return 1; }
  printf '\n'
  printf '%s\n' "${took[@]}" | grep -vE '^[0-4] s' | sort -n || true
  printf '\n%s\n' "$1"
  [ ${#left_out[@]} -eq 0 ] || printf '%s\n' "${left_out[@]}"
}

# Each asks for what is installed, so that nothing is downloaded here. (grep reads to the end: a pipe that breaks is a failure.)
has_target() { rustup target list --installed 2>/dev/null | grep -x "$1" >/dev/null; }
has() { command -v "$1" >/dev/null; }

# Linux and Windows' bash have the one, macOS has the other.
checksum() { if has sha256sum; then sha256sum "$@"; else shasum -a 256 "$@"; fi; }

# Where cargo builds.
build=${CARGO_TARGET_DIR:-$PWD/target}

# set_flags TARGET FLAG…: rustc gets these flags, and no folder of this machine goes into what is built: sources, dependencies and the
# standard library have names of their own.
set_flags() {
  local target=$1 sysroot registry maps=("$build=/target" "$PWD=/gpt2")
  sysroot=$(rustc --print sysroot)
  maps+=("$sysroot/lib/rustlib/src/rust=/rustc/$(rustc -vV | sed -n 's/^commit-hash: //p')")
  for registry in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*; do
    maps+=("$registry=/registry")
  done
  local flags=("${maps[@]/#/--remap-path-prefix=}" "${@:2}")
  case $target in
    *-windows-gnu) flags+=(-C "link-arg=-Wl,--no-insert-timestamp") ;; # a date in the program's head
  esac
  CARGO_ENCODED_RUSTFLAGS=$(IFS=$'\x1f'; echo "${flags[*]}")
  CFLAGS="${maps[*]/#/-ffile-prefix-map=}"
  export CARGO_ENCODED_RUSTFLAGS CFLAGS CARGO_INCREMENTAL=0
}

# holds_no_path FILE…: fails if there is a path of this machine in one of them.
holds_no_path() {
  local path
  for path in "$PWD" "$build" "$HOME/" "${CARGO_HOME:-$HOME/.cargo}"; do
    if grep -aF "$path" "$@" >/dev/null; then
      echo "$*: holds a path of this machine: $path" >&2
      return 1
    fi
  done
}
