#!/usr/bin/env bash
# Measures this program against llama.cpp, CTranslate2 and PyTorch on this machine, and writes the tables into the book's page on
# speed, docs/src/reference/speed.md.
# usage: scripts/bench.sh [ROUNDS [PEERS]]
# PEERS is the folder of the engines and of the checkpoint they all run (default: target/peers), which scripts/peers.sh fills
# first. Takes about three minutes a round, and where the processor has AVX-512 as long again with every engine held to AVX2, as
# most machines have it; nothing else should run meanwhile.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-3}
peers=${2:-target/peers}

cargo build --release --locked
scripts/peers.sh "$peers"
ours="$PWD/target/release/gpt2 bench --model {model} --dtype {dtype} --threads {threads} --json"
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
processor=$(sed -n 's/^model name\t*: //p' /proc/cpuinfo | head -n 1)
measure() { # NAME WORDS OPTIONS…
  "$peers/venv/bin/python" scripts/bench_peers.py compare "$peers" --ours "$ours" --rounds "$rounds" "${@:3}" | tee "$results/$1.json"
  echo "$processor ($(nproc) cores, $2), $(date +%F), commit $(git rev-parse --short HEAD), median of $rounds rounds" >"$results/$1.heading"
}
if grep -q avx512f /proc/cpuinfo; then
  measure 1 "every engine held to AVX2" --isa avx2
  measure 2 "AVX-512"
else
  measure 1 "AVX2"
fi
python3 - "$results" <<'PYTHON'
import json
import pathlib
import statistics
import sys

lines = []
for file in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    heading = file.with_suffix(".heading").read_text().strip()
    ratios = []
    lines += [heading + ":", "", "| | | ours | best peer | ours / best |", "|---|---|---|---|---|"]
    for row in map(json.loads, file.open()):
        ours, peer = row["tokens_per_s"]["ours"], row.get("best_peer")
        place = row["row"].replace("decode_at_896", "decode after 896")
        best = row["tokens_per_s"][peer] if peer else None
        ratios += [ours / best] if peer else []
        compared = f"{best:.0f} {peer} | **{ours / best:.2f}**" if peer else "none | "
        lines.append(f"| {row['dtype']} | {place} | {ours:.0f} | {compared} |")
    if ratios:
        mean = statistics.geometric_mean(ratios)
        lines += ["", f"Geometric mean of the {len(ratios)} ratios: {mean:.2f}, from {min(ratios):.2f} to {max(ratios):.2f}."]
    lines.append("")
page = pathlib.Path("docs/src/reference/speed.md")
before, marker, rest = page.read_text().partition("<!-- speed: written by scripts/bench.sh -->\n")
_, end, after = rest.partition("<!-- end of speed -->\n")
if not end:
    sys.exit(f"{page}: the two marks of the speed tables are missing")
page.write_text(before + marker + "\n".join(lines) + end + after)
PYTHON
