#!/usr/bin/env bash
# Measures this program against llama.cpp, CTranslate2 and PyTorch on this machine, and writes the table into the README.
# usage: scripts/bench.sh [ROUNDS [PEERS]]
# PEERS is the folder of the engines and of the checkpoint they all run (default: target/peers), which scripts/peers.sh fills
# first. Takes about four minutes a round; nothing else should run meanwhile.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-3}
peers=${2:-target/peers}

cargo build --release --locked
scripts/peers.sh "$peers"
ours="$PWD/target/release/gpt2 bench --model {model} --dtype {dtype} --threads {threads} --json"
results=$(mktemp)
trap 'rm -f "$results"' EXIT
"$peers/venv/bin/python" scripts/bench_peers.py compare "$peers" --ours "$ours" --rounds "$rounds" | tee "$results"

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
    ours, peer = row["tokens_per_s"]["ours"], row.get("best_peer")
    place = row["row"].replace("decode_at_896", "decode after 896")
    best = row["tokens_per_s"][peer] if peer else None
    compared = f"{best:.0f} {peer} | **{ours / best:.2f}**" if peer else "none | "
    lines.append(f"| {row['dtype']} | {place} | {ours:.0f} | {compared} |")
readme = pathlib.Path("README.md")
before, marker, rest = readme.read_text().partition("<!-- speed: written by scripts/bench.sh -->\n")
_, end, after = rest.partition("<!-- end of speed -->\n")
if not end:
    sys.exit("README.md: the two marks of the speed table are missing")
readme.write_text(before + marker + "\n".join(lines) + "\n" + end + after)
PYTHON
