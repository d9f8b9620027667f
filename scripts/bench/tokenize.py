"""Speed and memory of `gpt2 tokenize` compared with Python's `tokenizers`; verifies equal tokens.

usage: python -m bench tokenize TEXT... --tokenizer FILE [--bytes N] [--rounds N] [--threads N] [--program PROGRAM] [--work DIR]

Documents are shuffled lines of the texts with one word changed in every second line, so that new words keep
appearing. JSONL files hold one document per line. `tokenizers` encodes them in batches on all threads
(encode_batch_fast, which skips offsets) and writes the ids as nanoGPT's prepare.py does. Rounds alternate
between both, each in separate processes. Prints megabytes of JSONL per second of the whole process, and its
peak resident memory (VmHWM). Then reads our files as nanoGPT's train.py and llm.c's dataloader.h do, and
compares them token by token. Needs numpy and tokenizers (scripts/requirements.txt).
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from bench import common
from bench.common import END_OF_TEXT

BATCH = 1000
# llm.c's header: 256 32-bit integers, of which three are used.
HEADER_BYTES = 1024
HEADER_OF_GPT2 = (20240520, 1)


def documents(texts, size):
    """Yields `size` bytes of documents, all different."""
    rng = random.Random(1)
    lines = [line for text in texts for line in text.read_text().splitlines(keepends=True)]
    letters = "abcdefghijklmnopqrstuvwxyz"
    while size > 0:
        document = []
        for line in rng.choices(lines, k=rng.randrange(5, 60)):
            if rng.random() < 0.5:
                words = line.split(" ")
                word = rng.randrange(len(words))
                words[word] = "".join(rng.choices(letters, k=2)) + words[word]
                line = " ".join(words)
            document.append(line)
        document = "".join(document)
        size -= len(document.encode())
        yield document


def library(tokenizer, data, out):
    """Tokenizes with Python's `tokenizers` in this process."""
    import tokenizers

    encoder = tokenizers.Tokenizer.from_file(tokenizer)
    end = encoder.token_to_id(END_OF_TEXT)
    with open(data) as lines, open(out, "wb") as file:
        batch = []

        def write():
            for encoding in encoder.encode_batch_fast(batch, add_special_tokens=False):
                np.array([*encoding.ids, end], dtype=np.uint16).tofile(file)
            batch.clear()

        for line in lines:
            batch.append(json.loads(line)["text"])
            if len(batch) == BATCH:
                write()
        write()
    print(common.peak_mib())


def run(command, environment):
    """Returns the seconds that a command takes, its peak resident memory in MiB, and its output."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    peak = 0
    while process.poll() is None:
        try:
            peak = max(peak, common.peak_mib(process.pid))
        except (OSError, StopIteration):
            pass  # the process has already ended
        time.sleep(0.005)
    elapsed = time.monotonic() - start
    if process.returncode:
        sys.exit(f"{command[0]} failed")
    return elapsed, peak, process.stdout.read()


def read_llm_c(path):
    """Checks a shard and returns its tokens, as dataloader.h does."""
    header = np.fromfile(path, dtype=np.int32, count=HEADER_BYTES // 4)
    assert (header[0], header[1]) == HEADER_OF_GPT2, f"{path}: magic or version"
    assert not header[3:].any(), f"{path}: the rest of the header"
    assert os.path.getsize(path) == HEADER_BYTES + 2 * header[2], f"{path}: size"
    return np.fromfile(path, dtype=np.uint16, offset=HEADER_BYTES)


def main():
    parser = common.parser(__doc__, "program")
    parser.add_argument("texts", nargs="*", type=pathlib.Path)
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=pathlib.Path)
    parser.add_argument("--library", nargs=2, metavar=("DATA", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.library:
        library(arguments.tokenizer, *arguments.library)
        return
    work = pathlib.Path(tempfile.mkdtemp(dir=arguments.work))
    data, tokens = work / "documents.jsonl", work / "library.bin"
    with open(data, "w") as file:
        for document in documents(arguments.texts, arguments.bytes):
            file.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")
    size = data.stat().st_size
    environment = os.environ | {"RAYON_NUM_THREADS": str(arguments.threads), "TOKENIZERS_PARALLELISM": "true"}
    shared = ["--tokenizer", arguments.tokenizer, "--held-out", "0", "--threads", str(arguments.threads), "--json"]
    ours = [str(arguments.program), "tokenize", str(data), *shared]
    theirs = common.worker("tokenize", "--tokenizer", arguments.tokenizer, "--library", str(data), str(tokens))
    results = {"ours": [], "tokenizers": []}
    for _ in range(arguments.rounds):
        shutil.rmtree(work / "ours", ignore_errors=True)
        results["ours"].append(run([*ours, "--out", str(work / "ours")], environment)[:2])
        elapsed, _, printed = run(theirs, environment)
        results["tokenizers"].append((elapsed, int(printed)))
    for name, measured in results.items():
        elapsed, peak = (statistics.median(values) for values in zip(*measured))
        print(f"{name}: {size / elapsed / 1e6:.1f} MB/s ({elapsed:.1f} s), peak {peak:.0f} MiB")
    ratio = statistics.median(times[0] for times in results["tokenizers"]) / statistics.median(times[0] for times in results["ours"])
    print(f"{size / 1e6:.0f} MB, {arguments.threads} threads: {ratio:.1f} times as fast")

    run([*ours, "--out", str(work / "llm.c"), "--format", "llm.c", "--shard-tokens", "30000001"], environment)
    expected = np.memmap(tokens, dtype=np.uint16, mode="r")
    found = np.memmap(work / "ours" / "train.bin", dtype=np.uint16, mode="r")
    shards = np.concatenate([read_llm_c(path) for path in sorted((work / "llm.c").glob("*train_*.bin"))])
    for name, found in [("nanoGPT's", found), ("llm.c's", shards)]:
        assert np.array_equal(expected, found), f"{name} format: other tokens than the library's"
    print(f"{len(expected)} tokens are the library's, in both formats")
    shutil.rmtree(work)
