"""Writes the table from `cpu` into docs/dev/speed.md, and its summary into the book's page docs/src/reference/speed.md.

usage: python -m bench page [--rounds N] [--peers DIR]

First builds the program and lets peers.sh fill the peers' folder. A round takes about three minutes,
and on processors with AVX-512 twice as long, because every engine runs again restricted to AVX2. Nothing else
should run meanwhile.
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

SUMMARY, DETAILS = ROOT / "docs/src/reference/speed.md", ROOT / "docs/dev/speed.md"
BEGIN, END = "<!-- speed: written by python -m bench page -->\n", "<!-- end of speed -->\n"


def compared(row):
    """Returns the workload, our speed and, if a peer ran it, the fastest peer with its speed and the ratio."""
    ours, peer = row["tokens_per_s"]["ours"], row.get("best_peer")
    name = re.sub(r"^(\d+) texts$", r"batch of \1", row["row"].replace("decode_at_896", "decode after 896"))
    best = row["tokens_per_s"][peer] if peer else None
    return name, ours, peer, best, ours / best if peer else None


def mean_of(ratios):
    mean = statistics.geometric_mean(ratios)
    return f"Geometric mean of the {len(ratios)} ratios: {mean:.2f}, from {min(ratios):.2f} to {max(ratios):.2f}."


def details(heading, rows):
    """Returns a table with a line for each precision and workload."""
    lines = [heading + ":", "", "| | | ours | of the limit | best peer | ours / best |", "|---|---|---|---|---|---|"]
    for row in rows:
        name, ours, peer, best, ratio = compared(row)
        against = f"{best:.0f} {peer} | **{ratio:.2f}**" if peer else "none | "
        of_limit = f"{ours / row['limit']:.0%}" if row.get("limit") else "unknown"
        lines.append(f"| {row['dtype']} | {name} | {ours:.0f} | {of_limit} | {against} |")
    return lines + [""]


def summary(heading, rows):
    """Returns a table with a line for each workload, and a column for each precision."""
    dtypes, cells, ratios = list(dict.fromkeys(row["dtype"] for row in rows)), {}, []
    for row in rows:
        name, ours, peer, _, ratio = compared(row)
        ratios += [ratio] if peer else []
        cells.setdefault(name, {})[row["dtype"]] = f"{ours:.0f} **{ratio:.2f}**" if peer else f"{ours:.0f}"
    lines = [heading + ":", "", "| | " + " | ".join(dtypes) + " |", "|---" * (len(dtypes) + 1) + "|"]
    for name, of_dtype in cells.items():
        lines.append(f"| {name} | " + " | ".join(of_dtype.get(dtype, "") for dtype in dtypes) + " |")
    return lines + [""] + ([mean_of(ratios), ""] if ratios else [])


def parts(page):
    """Returns the text of a page through its first mark, and from its last mark onward."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        sys.exit(f"{page}: the two marks around the speed table are missing")
    return before + begin, end + after


def main():
    arguments = parser(__doc__, "rounds", "peers").parse_args()
    pages = {page: (parts(page), write) for page, write in ((SUMMARY, summary), (DETAILS, details))}
    subprocess.run(["cargo", "build", "--release", "--locked"], cwd=ROOT, check=True)
    subprocess.run([pathlib.Path(__file__).with_name("peers.sh"), arguments.peers], check=True)
    processor = pathlib.Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\t*: (.*)$", processor, re.MULTILINE)
    commit = output_of(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]).strip()
    measured = [("AVX2", [])]
    if "avx512f" in processor:
        measured = [("every engine restricted to AVX2", ["--isa", "avx2"]), ("AVX-512", [])]
    measurements = []
    for label, options in measured:
        heading = (f"{name[1] if name else 'unknown'} ({os.cpu_count()} cores, {label}), {datetime.date.today()}, commit {commit}, "
                   f"median of {arguments.rounds} rounds")
        printed = output_of(worker("cpu", "--peers", arguments.peers, "--rounds", arguments.rounds, *options))
        print(printed, end="")
        measurements.append((heading, [json.loads(line) for line in printed.splitlines()]))
    for page, ((before, after), write) in pages.items():
        lines = [line for heading, rows in measurements for line in write(heading, rows)]
        page.write_text(before + "\n".join(lines) + after)
