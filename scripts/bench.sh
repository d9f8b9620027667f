#!/usr/bin/env bash
# Measures this program against llama.cpp, CTranslate2 and PyTorch on this machine, and writes the table into the README.
# usage: scripts/bench.sh COMPARE.PY PEERS [ROUNDS]
# COMPARE.PY runs every engine in turn and prints a JSON object for each precision and row; PEERS is the folder with the engines
# and the checkpoint they all run (`setup.sh`, beside COMPARE.PY, makes it). Takes about four minutes a round; nothing else
# should run meanwhile.
set -euo pipefail
compare=$(realpath "$1")
peers=$(realpath "$2")
rounds=${3:-3}
cd "$(dirname "$0")/.."

cargo build --release --locked
ours="$PWD/target/release/gpt2 bench --model {model} --dtype {dtype} --threads 2 --json"
results=$(mktemp)
trap 'rm -f "$results"' EXIT
python3 "$compare" --peers "$peers" --ours "$ours" --rounds "$rounds" --json | tee "$results"

processor=$(sed -n 's/^model name\t*: //p' /proc/cpuinfo | head -n 1)
flags=$({ grep -m 1 -o -w -E 'avx2|avx512f|avx512_vnni' /proc/cpuinfo || true; } | sort -u | tr '\n' ' ')
heading="$processor ($(nproc) cores; ${flags% }), $(date +%F), commit $(git rev-parse --short HEAD), median of $rounds rounds"
python3 - "$results" "$heading" <<'PYTHON'
import json
import pathlib
import sys

rows = [json.loads(line) for line in open(sys.argv[1])]
lines = [sys.argv[2] + ":", "", "| | | ours | best peer | ours / best |", "|---|---|---|---|---|"]
for row in rows:
    ours, best = row["tokens_per_s"]["ours"], row["tokens_per_s"][row["best_peer"]]
    place = row["row"].replace("decode_at_896", "decode behind 896")
    lines.append(f"| {row['dtype']} | {place} | {ours:.0f} | {best:.0f} {row['best_peer']} | **{row['ratio']:.2f}** |")
readme = pathlib.Path("README.md")
before, marker, rest = readme.read_text().partition("<!-- speed: written by scripts/bench.sh -->\n")
_, end, after = rest.partition("<!-- end of speed -->\n")
if not end:
    sys.exit("README.md: the two marks of the speed table are missing")
readme.write_text(before + marker + "\n".join(lines) + "\n" + end + after)
PYTHON
