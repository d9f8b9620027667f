"""Code shared by the tables: options with common names, instruction sets, worker processes."""

import argparse
import json
import os
import pathlib
import shlex
import subprocess
import sys

SCRIPTS = pathlib.Path(__file__).resolve().parents[1]
ROOT = SCRIPTS.parent
END_OF_TEXT = "<|endoftext|>"
# Restricts ours, oneDNN, MKL, PyTorch and CTranslate2 to AVX2; llama.cpp has a separate build.
ONLY_AVX2 = {
    "GPT2_INSTRUCTION_SET": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "CT2_FORCE_CPU_ISA": "AVX2",
}
OPTIONS = {
    "rounds": dict(type=int, default=3),
    "threads": dict(type=int, default=2),
    "isa": dict(choices=["avx2"], help="restrict every engine to this instruction set"),
    "only": dict(default="", help="measure only the cases whose names contain this text"),
    "program": dict(type=pathlib.Path, default=ROOT / "target/release/gpt2", help="the built gpt2"),
    "peers": dict(type=pathlib.Path, default=ROOT / "target/peers", help="folder that peers.sh has filled"),
    "model": dict(type=pathlib.Path, help="checkpoint folder"),
    "json": dict(action="store_true", help="print each figure as a JSON line"),
    "markdown": dict(action="store_true", help="print a table for a page"),
}


def parser(text, *names):
    """Returns a parser with the named common options."""
    result = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in names:
        result.add_argument(f"--{name}", **OPTIONS[name])
    return result


def restrict_to(isa):
    """Restricts every engine started from now on to the instruction set `isa`, if set."""
    os.environ.update(ONLY_AVX2 if isa else {})


def worker(table, *arguments, python=sys.executable):
    """Returns the command for a worker process that measures part of a table."""
    return [python, "-m", "bench", table, *arguments]


def cargo_bench(package, name, isa):
    """Returns the command for a crate's benchmark; callers append the benchmark's arguments."""
    instructions = ["--instructions", isa] if isa else []
    return ["cargo", "bench", "--quiet", "-p", package, "--bench", name, "--", *instructions]


def output_of(command):
    command = list(map(str, command))
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{shlex.join(command)}: {run.stderr[-2000:]}")
    return run.stdout


def json_of(command):
    """Returns the last line of a process's output, parsed as JSON; libraries may print earlier lines."""
    return json.loads(output_of(command).splitlines()[-1])


def write_tokenizer(folder, vocab_size):
    """Saves a byte-level BPE tokenizer of this size: all bytes, then pairs of bytes, then the end token."""
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [(first, second) for first in alphabet for second in alphabet][: vocab_size - 1 - len(alphabet)]
    tokens = alphabet + [first + second for first, second in merges] + [END_OF_TEXT]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    assert tokenizer.get_vocab_size() == vocab_size
    special = {name: END_OF_TEXT for name in ("bos_token", "eos_token", "unk_token")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def prompt(tokens):
    return [index * 37 % 50000 for index in range(tokens)]


def peak_mib(process="self"):
    """Returns the peak resident memory of a process in MiB."""
    status = pathlib.Path(f"/proc/{process}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) >> 10
