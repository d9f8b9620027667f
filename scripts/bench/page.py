"""Writes the table of `cpu` into the book's page on speed, docs/src/reference/speed.md.

usage: python -m bench page [--rounds N] [--peers DIR]

Builds the program, and lets peers.sh fill the folder of the peers first. Takes about three minutes a round, and where the processor has
AVX-512 as long again with every engine restricted to AVX2, as most machines have it; nothing else should run meanwhile.
"""

import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

from bench.common import ROOT, output_of, parser, worker

PAGE = ROOT / "docs/src/reference/speed.md"
BEGIN, END = "<!-- speed: written by python -m bench page -->\n", "<!-- end of speed -->\n"


def table(heading, rows):
    lines, ratios = [heading + ":", "", "| | | ours | of the limit | best peer | ours / best |", "|---|---|---|---|---|---|"], []
    for row in rows:
        ours, peer = row["tokens_per_s"]["ours"], row.get("best_peer")
        place = row["row"].replace("decode_at_896", "decode after 896")
        best = row["tokens_per_s"][peer] if peer else None
        ratios += [ours / best] if peer else []
        compared = f"{best:.0f} {peer} | **{ours / best:.2f}**" if peer else "none | "
        share = f"{ours / row['limit']:.0%}" if row.get("limit") else "unknown"
        lines.append(f"| {row['dtype']} | {place} | {ours:.0f} | {share} | {compared} |")
    if ratios:
        mean = statistics.geometric_mean(ratios)
        lines += ["", f"Geometric mean of the {len(ratios)} ratios: {mean:.2f}, from {min(ratios):.2f} to {max(ratios):.2f}."]
    return lines + [""]


def main():
    arguments = parser(__doc__, "rounds", "peers").parse_args()
    before, marker, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        sys.exit(f"{PAGE}: the two marks of the speed tables are missing")
    subprocess.run(["cargo", "build", "--release", "--locked"], cwd=ROOT, check=True)
    subprocess.run([pathlib.Path(__file__).with_name("peers.sh"), arguments.peers], check=True)
    processor = pathlib.Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\t*: (.*)$", processor, re.MULTILINE)
    commit = output_of(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]).strip()
    measured = [("AVX2", [])]
    if "avx512f" in processor:
        measured = [("every engine restricted to AVX2", ["--isa", "avx2"]), ("AVX-512", [])]
    lines = []
    for words, options in measured:
        heading = (f"{name[1] if name else 'unknown'} ({os.cpu_count()} cores, {words}), {datetime.date.today()}, commit {commit}, "
                   f"median of {arguments.rounds} rounds")
        printed = output_of(worker("cpu", "--peers", arguments.peers, "--rounds", arguments.rounds, *options))
        print(printed, end="")
        lines += table(heading, map(json.loads, printed.splitlines()))
    PAGE.write_text(before + marker + "\n".join(lines) + end + after)
