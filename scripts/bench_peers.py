"""Speed of inference beside llama.cpp, CTranslate2 and PyTorch: GPT-2 124M on one machine, every engine in turn.

usage: python scripts/bench_peers.py checkpoint FOLDER                  a random checkpoint of GPT-2 124M's shape
       python scripts/bench_peers.py measure torch|ctranslate2 FOLDER   one engine in this process, as a JSON line
       python scripts/bench_peers.py compare PEERS [--ours COMMAND] [--rounds N] [--threads N] [--only f32,f16,q8,q4] [--isa avx2]

`compare` prints a JSON line for each precision and row: tokens per second of every engine, their medians over the rounds. PEERS
is the folder that scripts/peers.sh makes; what it has no engine for is left out. COMMAND is ours, with {model}, {dtype} and
{threads} in it, and prints what `gpt2 bench --json` does. Speed does not depend on the values of the weights.

Rows: reading prompts of 128, 512 and 1,024 tokens with the logits of the last; greedy decoding of 128 tokens after 8, and of 64
after 896; and of 32 tokens after 8 in batches of 8 and 32 texts. `--isa avx2` holds every engine to AVX2 where the processor has
AVX-512. Needs the packages that scripts/peers.sh installs.
"""

import argparse
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import time

PREFILL_TOKENS = (128, 512, 1024)
DECODE = {"decode": (8, 128), "decode_at_896": (896, 64)}
BATCH_TOKENS, BATCHES = (8, 32), (8, 32)
ROWS = [f"prefill {tokens}" for tokens in PREFILL_TOKENS] + list(DECODE) + [f"{texts} texts" for texts in BATCHES]
# The peers' precisions that are nearest to each of ours.
GGUF_TYPES = {"f32": ["F32"], "f16": ["F16"], "q8": ["Q8_0"], "q4": ["Q4_0", "Q4_K_M"]}
CTRANSLATE2_TYPES = {"f32": "float32", "q8": "int8"}
# Holds ours, oneDNN, MKL, PyTorch and CTranslate2 to AVX2; llama.cpp is compiled for it.
ONLY_AVX2 = {
    "GPT2_INSTRUCTION_SET": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "CT2_FORCE_CPU_ISA": "AVX2",
}
VOCAB_SIZE, END_OF_TEXT = 50257, "<|endoftext|>"


def write_checkpoint(folder):
    """GPT-2 124M as transformers makes it anew, under a fixed seed, with a tokenizer of as many tokens."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config()).save_pretrained(folder)
    # A byte-level BPE: every byte, then pairs of bytes.
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [(first, second) for first in alphabet for second in alphabet][: VOCAB_SIZE - 1 - len(alphabet)]
    tokens = alphabet + [first + second for first, second in merges] + [END_OF_TEXT]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    special = {name: END_OF_TEXT for name in ("bos_token", "eos_token", "unk_token")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def prompt(tokens):
    return [place * 37 % 50000 for place in range(tokens)]


def measure_torch(folder, threads):
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()

    def read(tokens):
        model(torch.tensor([prompt(tokens)]), logits_to_keep=1)
        return tokens

    def decode(tokens, new_tokens):
        cache = transformers.DynamicCache(config=model.config)
        ids = torch.tensor([prompt(tokens)])
        seconds = []
        for _ in range(new_tokens + 1):
            start = time.perf_counter()
            logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)
            seconds.append(time.perf_counter() - start)
        return sum(seconds[1:])  # The first reads the prompt.

    with torch.inference_mode():
        return speeds(read, decode)


def measure_ctranslate2(folder, threads):
    import ctranslate2

    generator = ctranslate2.Generator(folder, device="cpu", compute_type="default", inter_threads=1, intra_threads=threads)
    vocabulary = json.loads(pathlib.Path(folder, "vocabulary.json").read_text())

    def generate(tokens, new_tokens, texts=1):
        words = [vocabulary[id] for id in prompt(tokens)]
        start = time.perf_counter()
        generator.generate_batch([words] * texts, max_length=new_tokens, min_length=new_tokens, include_prompt_in_result=False)
        return time.perf_counter() - start

    def read(tokens):
        # It generates at least one token, for which the context must have room.
        tokens = min(tokens, 1023)
        generate(tokens, 1)
        return tokens

    def decode(tokens, new_tokens):
        alone = min(generate(tokens, 1) for _ in range(2))
        return generate(tokens, new_tokens + 1) - alone

    rows = speeds(read, decode)
    tokens, new_tokens = BATCH_TOKENS
    for texts in BATCHES:
        generate(tokens, 2, texts)
        alone = min(generate(tokens, 1, texts) for _ in range(2))
        seconds = min(generate(tokens, new_tokens + 1, texts) for _ in range(2)) - alone
        rows[f"{texts} texts"] = texts * new_tokens / seconds
    return rows


def speeds(read, decode):
    """Tokens per second of every row: `read` says how many tokens it has read, `decode` how long it took; each once before."""
    rows = {}
    for tokens in PREFILL_TOKENS:
        read(tokens)
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            count = read(tokens)
            seconds.append(time.perf_counter() - start)
        rows[f"prefill {tokens}"] = count / min(seconds)
    decode(8, 8)
    for row, (tokens, new_tokens) in DECODE.items():
        rows[row] = new_tokens / decode(tokens, new_tokens)
    return rows


def output_of(command):
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{shlex.join(map(str, command))}: {run.stderr[-2000:]}")
    return run.stdout


def json_of(command):
    return json.loads(output_of(command))


def measure_ours(command):
    report = json_of(command)
    rows = {f"prefill {tokens}": report["prefill"][str(tokens)] for tokens in PREFILL_TOKENS}
    rows |= {row: report[row] for row in DECODE}
    return rows | {f"{texts} texts": report["decode_batch"][str(texts)] for texts in BATCHES}


def measure_llama_cpp(programs, model, threads):
    program = programs / "llama-bench"
    rows = {}
    lengths = ",".join(map(str, PREFILL_TOKENS))
    runs = [["-p", lengths, "-n", str(DECODE["decode"][1])]]
    depth, new_tokens = DECODE["decode_at_896"]
    runs.append(["-p", "0", "-n", str(new_tokens), "-d", str(depth)])
    for arguments in runs:
        for test in json_of([program, "-m", model, "-t", str(threads), "-r", "2", "-o", "json", *arguments]):
            row = "decode_at_896" if test["n_depth"] else "decode"
            rows[f"prefill {test['n_prompt']}" if test["n_prompt"] else row] = test["avg_ts"]
    tokens, new_tokens = BATCH_TOKENS
    sizes = ["-c", str(max(BATCHES) * sum(BATCH_TOKENS)), "-npp", str(tokens), "-ntg", str(new_tokens)]
    counts = ["-npl", ",".join(map(str, BATCHES)), "-t", str(threads), "--output-format", "jsonl"]
    batches = [programs / "llama-batched-bench", "-m", model, *sizes, *counts]
    for line in output_of(batches).splitlines():
        if line.startswith("{"):
            test = json.loads(line)
            rows[f"{test['pl']} texts"] = test["speed_tg"]
    return rows


def engines(peers, dtype, ours, threads, isa):
    """The engines that are there for a precision: their names, and functions that measure them."""
    python, model = peers / "venv/bin/python", peers / "gpt2-124m"
    if ours:
        command = shlex.split(ours.format(model=model, dtype=dtype, threads=threads))
        yield "ours", lambda: measure_ours(command)
    for type in GGUF_TYPES[dtype]:
        file = peers / f"gpt2-{type}.gguf"
        own, avx2 = (peers / folder / "bin" for folder in ("llama.cpp", "llama.cpp-avx2"))
        # Where the processor has AVX2 alone, there is no second one.
        programs = avx2 if isa and avx2.exists() else own
        if programs.exists() and file.exists():
            yield f"llama.cpp {type}", lambda programs=programs, file=file: measure_llama_cpp(programs, file, threads)
    folders = [("torch", model)] if dtype == "f32" else []
    if dtype in CTRANSLATE2_TYPES:
        folders.append(("ctranslate2", peers / f"ctranslate2-{CTRANSLATE2_TYPES[dtype]}"))
    for engine, folder in folders:
        if folder.exists():
            command = [python, __file__, "measure", engine, folder, "--threads", str(threads)]
            yield engine, lambda command=command: json_of(command)


def compare(arguments):
    peers = pathlib.Path(arguments.peers).resolve()
    if arguments.isa:
        os.environ.update(ONLY_AVX2)
    samples = {}
    for _ in range(arguments.rounds):
        for dtype in arguments.only.split(","):
            for engine, measure in engines(peers, dtype, arguments.ours, arguments.threads, arguments.isa):
                for row, speed in measure().items():
                    samples.setdefault((dtype, row), {}).setdefault(engine, []).append(speed)
    for dtype in arguments.only.split(","):
        for row in ROWS:
            medians = {engine: statistics.median(speeds) for engine, speeds in samples.get((dtype, row), {}).items()}
            others = [engine for engine in medians if engine != "ours"]
            line = {"dtype": dtype, "row": row, "tokens_per_s": medians}
            if others:
                line["best_peer"] = max(others, key=medians.get)
            print(json.dumps(line), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("checkpoint").add_argument("folder")
    measure = commands.add_parser("measure")
    measure.add_argument("engine", choices=["torch", "ctranslate2"])
    measure.add_argument("folder")
    measure.add_argument("--threads", type=int, default=2)
    comparison = commands.add_parser("compare")
    comparison.add_argument("peers")
    comparison.add_argument("--ours")
    comparison.add_argument("--rounds", type=int, default=3)
    comparison.add_argument("--threads", type=int, default=2)
    comparison.add_argument("--only", default="f32,f16,q8,q4")
    comparison.add_argument("--isa", choices=["avx2"])
    arguments = parser.parse_args()
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    if arguments.command == "checkpoint":
        write_checkpoint(arguments.folder)
    elif arguments.command == "measure":
        function = {"torch": measure_torch, "ctranslate2": measure_ctranslate2}[arguments.engine]
        print(json.dumps(function(arguments.folder, arguments.threads)))
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
