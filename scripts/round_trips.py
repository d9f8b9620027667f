"""Compresses random inputs and restores them with another instruction set and number of threads.

usage: python scripts/round_trips.py [--count 10000] [--seed 1] [--program target/release/gpt2] [--model DIR] [--dtype q8] [--sets NAME,NAME]

Inputs are bytes, words, markup and mixtures, cycling through every length from 0 to 5,000. Separate processes
compress and restore each input; they differ in instruction set and number of threads (1 to 7). The default
model is the small one in the tests. Stops at the first input that is not restored, and keeps it in the folder that it
prints.
"""

import argparse
import os
import pathlib
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[1]
LONGEST = 5000
WORDS = "the citizen and word of eve lord itself thou art\n,.;: naïve 世界 🙂 don't".split(" ")
MARKUP = ["<p>", "</p>\r\n", "<|endoftext|>", ' class="a"', "&amp;", '{"key": [1, 2.5, null]}', "\t", "](http://x)", "<!--", "-->"]


def made(chosen, length):
    """Returns an input of this length."""
    kind, data = chosen.randrange(4), bytearray()
    while len(data) < length:
        match kind if kind < 3 else chosen.randrange(3):
            case 0:
                data += chosen.randbytes(chosen.randrange(1, 40))
            case 1:
                data += (chosen.choice(WORDS) + " ").encode()
            case _:
                data += chosen.choice(MARKUP).encode()
    return bytes(data[:length])


def sets_of(program):
    """Returns the instruction sets that this processor supports."""
    run = subprocess.run([program, "score", "a"], env=os.environ | {"GPT2_INSTRUCTION_SET": "none"}, capture_output=True, text=True)
    return run.stderr.split("processor (")[1].split("), found")[0].split(", ")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--program", default=str(ROOT / "target/release/gpt2"))
    parser.add_argument("--model", default=str(ROOT / "crates/testing/fixtures/tiny-checkpoint"))
    parser.add_argument("--dtype", default="q8")
    parser.add_argument("--sets", type=lambda names: names.split(","))
    arguments = parser.parse_args()
    sets = arguments.sets or sets_of(arguments.program)

    def run(command, data, number, *options):
        threads, name = str(1 + number % 7), sets[number % len(sets)]
        command = [arguments.program, command, "--model", arguments.model, "--threads", threads, *options]
        done = subprocess.run(command, input=data, capture_output=True, env=os.environ | {"GPT2_INSTRUCTION_SET": name})
        return done.stdout if done.returncode == 0 else done.stderr

    def comes_back(number):
        chosen = random.Random(f"{arguments.seed} {number}")
        data = made(chosen, number % (LONGEST + 1))
        compressed = run("compress", data, number, "--dtype", arguments.dtype)
        return number, data, compressed, run("decompress", compressed, number + 1 + number // 7) == data

    smaller = 0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for number, data, compressed, is_same in pool.map(comes_back, range(arguments.count)):
            if not is_same:
                folder = pathlib.Path(tempfile.mkdtemp(prefix="round-trip-"))
                (folder / "data").write_bytes(data)
                (folder / "compressed").write_bytes(compressed)
                sys.exit(f"input {number} with seed {arguments.seed} was not restored; see {folder}")
            smaller += len(compressed) < len(data)
            if number % 500 == 499:
                print(f"{number + 1} of {arguments.count}", file=sys.stderr)
    print(f"{arguments.count} inputs were restored, {smaller} of them smaller when compressed; instruction sets: {', '.join(sets)}")


if __name__ == "__main__":
    main()
