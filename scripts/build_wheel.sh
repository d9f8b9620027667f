#!/usr/bin/env bash
# Builds wheels of the Python package and checks each: tag, files, size, no paths of this machine inside.
# usage: scripts/build_wheel.sh [--target TARGET]… [FOLDER]
#   --target   a system: {x86_64,aarch64}-unknown-linux-{gnu,musl}, x86_64-pc-windows-gnu, aarch64-apple-darwin (default: this machine)
# A wheel works with all interpreters from 3.11 on. FOLDER defaults to target/wheels. Needs maturin
# (pip install 'maturin>=1.9.4,<2'), and for other or older Linux systems zig (pip install ziglang).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/steps.sh
most_megabytes=20

targets=() folder=target/wheels
host=$(rustc -vV | sed -n 's/^host: //p')
while [ $# -gt 0 ]; do
  case $1 in
    --target) targets+=("${2:?--target needs one}"); shift ;;
    -*) sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    *) folder=$1 ;;
  esac
  shift
done
[ ${#targets[@]} -gt 0 ] || targets=("$host")
has maturin || { echo "maturin is missing: pip install 'maturin>=1.9.4,<2'" >&2; exit 1; }
has_zig() { has zig || python3 -c 'import ziglang' 2>/dev/null; }

# Sets maturin's options, the module's file name and the wheel's tag; empty options if this target cannot be
# built here.
plan() {
  local target=$1 what="the wheel for $1" processor=${1%%-*}
  options=() module=_native.abi3.so
  if ! has_target "$target"; then
    leave_out "$what" "a target" "rustup target add $target"
    return
  fi
  case $target in
    # manylinux2014: no older system has an interpreter from 3.11 on. Maturin adds the alias manylinux2014
    # before or after the tag.
    *-linux-gnu) tag="*manylinux_2_17_$processor*" options=(--zig --compatibility manylinux2014) ;;
    *-linux-musl) tag=musllinux_1_2_$processor options=(--zig --compatibility musllinux_1_2) ;;
    *-windows-*) tag=win_amd64 module=_native.pyd options=(--compatibility pypi) ;;
    *-apple-darwin) tag='macosx_*' options=(--compatibility pypi) ;;
    *) leave_out "$what" "a rule in scripts/build_wheel.sh" "add it to plan"; return ;;
  esac
  if [[ $target = *-linux-* ]] && ! has_zig; then
    if [ "$target" = "$host" ]; then
      # Compatible with this system's glibc.
      tag="*linux_*_$processor" options=(--compatibility pypi)
    else
      leave_out "$what" "zig" "pip install ziglang"
      options=()
    fi
  elif [[ $target = *-windows-gnu ]] && ! has x86_64-w64-mingw32-gcc; then
    leave_out "$what" "a C compiler" "apt-get install gcc-mingw-w64-x86-64"
    options=()
  elif [[ $target = *-apple-darwin ]] && [ "$(uname -s)" != Darwin ]; then
    leave_out "$what" "Apple's linker" "a Mac"
    options=()
  fi
}

build_wheel() {
  local target=$1 fresh wheels
  fresh=$(mktemp -d)
  local flags=()
  [[ $target != *-linux-musl ]] || flags+=(-C target-feature=-crt-static) # the interpreter loads the library
  (set_flags "$target" "${flags[@]}" && maturin build --profile dist --strip --locked --target "$target" "${options[@]}" --out "$fresh")
  wheels=("$fresh"/candle_gpt2-*.whl)
  # shellcheck disable=SC2053 # the tag is a pattern
  [[ ${#wheels[@]} -eq 1 && ${wheels[0]} = *-cp311-abi3-$tag.whl ]] || {
    echo "$target: expected one wheel that ends with -cp311-abi3-$tag.whl, found: ${wheels[*]}" >&2
    return 1
  }
  mkdir -p "$folder"
  cp "${wheels[0]}" "$folder"
  rm -r "$fresh"
  wheel=$folder/$(basename "${wheels[0]}")
}

check_wheel() {
  local bytes inside needed
  bytes=$(wc -c <"$wheel")
  [ "$bytes" -lt $((most_megabytes * 1000000)) ] || { echo "$wheel: $bytes bytes; expected less than $most_megabytes MB" >&2; return 1; }
  inside=$(mktemp -d)
  python3 - "$wheel" "$module" "$inside" <<'PYTHON'
import sys
import zipfile

path, module, folder = sys.argv[1:]
with zipfile.ZipFile(path) as wheel:
    names = wheel.namelist()
    wheel.extractall(folder)
wanted = {f"candle_gpt2/{name}" for name in ("__init__.py", module, "_native.pyi", "py.typed")}
if missing := wanted - set(names):
    sys.exit(f"{path}: without {', '.join(sorted(missing))}")
if surplus := [name for name in names if "/tests/" in name or name.endswith(".pyc")]:
    sys.exit(f"{path}: with {', '.join(surplus)}")
PYTHON
  holds_no_path "$inside/candle_gpt2/$module"
  if [[ $wheel = *musllinux* ]]; then
    # auditwheel recognizes only Alpine's name of musl and fails on glibc's file of this name; musl's loader
    # accepts each of its names.
    needed=$(LC_ALL=C readelf -d "$inside/candle_gpt2/$module" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
    [ "$needed" = libc.so ] || { echo "$wheel: asks for ${needed:-no library}, expected libc.so alone" >&2; return 1; }
  fi
  rm -r "$inside"
  # Verifies the promises of the tag against the module.
  if has abi3audit; then abi3audit --strict --assume-minimum-abi3 3.11 "$wheel"; else
    leave_out "the check that only the stable interface is used" "abi3audit" "pip install abi3audit"
  fi
  if [[ $wheel = *linux* && $wheel != *musllinux* ]]; then
    if has auditwheel; then auditwheel show "$wheel"; else
      leave_out "the check of the libraries that the module asks for" "auditwheel" "pip install auditwheel"
    fi
  fi
  echo "$wheel: $bytes bytes"
}

made=()
for target in "${targets[@]}"; do
  plan "$target"
  [ ${#options[@]} -gt 0 ] || continue
  step build_wheel "$target"
  step check_wheel
  made+=("$wheel")
done
[ ${#made[@]} -gt 0 ] || { echo "no wheel can be built on this machine" >&2; exit 1; }
steps_done "made: ${made[*]}"
