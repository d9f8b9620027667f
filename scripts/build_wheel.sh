#!/usr/bin/env bash
# Builds the wheel of the Python package for this machine's processor, and checks it. usage: scripts/build_wheel.sh [FOLDER]
# The wheel goes to FOLDER, by default target/wheels. It needs maturin (pip install 'maturin>=1.9.4,<2').
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-target/wheels}
most_megabytes=15

command -v maturin >/dev/null || { echo "maturin is missing: pip install 'maturin>=1.9.4,<2'" >&2; exit 1; }
rm -f "$folder"/candle_gpt2-*.whl
maturin build --profile dist --strip --locked --out "$folder"

wheels=("$folder"/candle_gpt2-*.whl)
[ ${#wheels[@]} -eq 1 ] || { echo "expected one wheel, found: ${wheels[*]}" >&2; exit 1; }
wheel=${wheels[0]}
fail() { echo "$wheel: $*" >&2; exit 1; }

# On Linux the tag promises on which systems it runs; maturin gives the oldest that the libraries it needs allow.
if [ "$(uname -s)" = Linux ]; then
  case $wheel in
    *-cp311-abi3-manylinux_2_*.whl) ;;
    *) fail "expected one module for all interpreters from 3.11 on, and a manylinux tag" ;;
  esac
fi
bytes=$(wc -c <"$wheel")
[ "$bytes" -lt $((most_megabytes * 1000000)) ] || fail "$bytes bytes, which is not below $most_megabytes MB"

python3 - "$wheel" <<'PYTHON'
import sys
import zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
wanted = {f"candle_gpt2/{name}" for name in ("__init__.py", "_native.abi3.so", "_native.pyi", "py.typed")}
if sys.platform == "linux" and (missing := wanted - set(names)):
    sys.exit(f"{sys.argv[1]}: without {', '.join(sorted(missing))}")
if surplus := [name for name in names if "/tests/" in name or name.endswith(".pyc")]:
    sys.exit(f"{sys.argv[1]}: with {', '.join(surplus)}")
PYTHON
echo "$wheel: $bytes bytes"
