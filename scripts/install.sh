#!/bin/sh
# Installs the program gpt2 for this machine: downloads the archive of a release, verifies its checksum and installs the program.
# usage: install.sh [--version VERSION] [--to FOLDER] [--from FOLDER|URL]
#   --version   a release (default: the newest)
#   --to        the installation folder (default: ~/.local/bin)
#   --from      the source of the archives and SHA256SUMS (default: the project's releases)
set -eu

releases=https://github.com/candle-gpt2/candle-gpt2/releases
version='' from='' to=${HOME:+$HOME/.local/bin}

fail() {
  echo "install.sh: $*" >&2
  exit 1
}
usage() {
  sed -n '2,6s/^# //p' "$0" >&2
  exit 2
}
has() { command -v "$1" >/dev/null 2>&1; }

while [ $# -gt 0 ]; do
  case $1 in
    --version | --to | --from)
      [ $# -gt 1 ] || usage
      case $1 in
        --version) version=${2#v} ;;
        --to) to=$2 ;;
        --from) from=$2 ;;
      esac
      shift 2
      ;;
    *) usage ;;
  esac
done
[ -n "$to" ] || fail "HOME is not set: say where the program goes with --to FOLDER"
if [ -z "$from" ]; then
  if [ -n "$version" ]; then from=$releases/download/v$version; else from=$releases/latest/download; fi
fi

system=$(uname -s)
case $system in
  Linux) system=unknown-linux-musl ;;
  Darwin) system=apple-darwin ;;
  MINGW* | MSYS* | CYGWIN*) fail "on Windows use install.ps1" ;;
  *) fail "there is no archive for $system: build gpt2 with cargo, see README.md" ;;
esac
processor=$(uname -m)
case $processor in
  x86_64 | amd64) processor=x86_64 ;;
  aarch64 | arm64) processor=aarch64 ;;
  *) fail "there is no archive for the processor $processor: build gpt2 with cargo, see README.md" ;;
esac
# A shell under Rosetta reports Apple's processor as Intel.
if [ "$system" = apple-darwin ] && [ "$(sysctl -n sysctl.proc_translated 2>/dev/null)" = 1 ]; then processor=aarch64; fi
target=$processor-$system

# get NAME: downloads or copies the file of this name to the folder $work.
get() {
  case $from in
    https://* | http://*)
      if has curl; then
        curl --fail --location --silent --show-error --output "$work/$1" "$from/$1" || fail "cannot get $from/$1"
      elif has wget; then
        wget -q -O "$work/$1" "$from/$1" || fail "cannot get $from/$1"
      else
        fail "curl or wget is needed to get $from/$1"
      fi
      ;;
    *) cp "$from/$1" "$work/$1" || fail "cannot read $from/$1" ;;
  esac
}
checksum() {
  if has sha256sum; then
    sha256sum "$1"
  elif has shasum; then
    shasum -a 256 "$1"
  else
    fail "sha256sum or shasum is needed to check the archive"
  fi
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

get SHA256SUMS
# Two spaces, or a space and the star of a binary file, precede the name.
line=$(grep -E "^[0-9a-f]{64} [ *]gpt2-${version:-[^ ]*}-$target\.tar\.gz$" "$work/SHA256SUMS") ||
  fail "$from/SHA256SUMS lists no archive gpt2-${version:-VERSION}-$target.tar.gz"
[ "$(echo "$line" | wc -l)" -eq 1 ] || fail "$from/SHA256SUMS lists several versions: choose one with --version"
archive=${line##*[ *]}
get "$archive"
found=$(checksum "$work/$archive")
[ "${found%% *}" = "${line%% *}" ] ||
  fail "$archive is damaged: expected the SHA-256 ${line%% *}, found ${found%% *}; nothing was installed"

name=${archive%.tar.gz}
tar -xzf "$work/$archive" -C "$work" "$name/gpt2" || fail "cannot unpack $archive"
mkdir -p "$to" || fail "cannot make the folder $to"
# Renames the new file into place, so that a running program is replaced atomically.
new=$to/.gpt2.$$
trap 'rm -rf "$work" "$new"' EXIT
{ cp "$work/$name/gpt2" "$new" && chmod 755 "$new"; } || fail "cannot write to $to: choose another folder with --to"
starts=$("$new" --version) || fail "the program does not start here; nothing was installed"
mv "$new" "$to/gpt2" || fail "cannot replace $to/gpt2"
echo "$starts: installed as $to/gpt2"
case :$PATH: in
  *":$to:"*) ;;
  *) echo "$to is not in PATH: add it, or call the program by this path" ;;
esac
