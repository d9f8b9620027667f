# What scripts/ci.sh and scripts/release.sh share: steps that are timed, and what is left out by name. To be sourced.
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
