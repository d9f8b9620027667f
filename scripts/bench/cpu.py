"""Inference speed of GPT-2 124M compared with llama.cpp, CTranslate2 and PyTorch, interleaved.

usage: python -m bench cpu [--peers DIR] [--program FILE] [--rounds N] [--threads N] [--only f32,f16,q8,q4] [--isa avx2]

Prints a JSON line for each precision and row: tokens per second of every engine, the medians over the rounds,
and the median of the limit set by memory and arithmetic, which `gpt2 doctor` measures before each precision
of each round. peers.sh creates the folder of the peers; missing engines are skipped. Speed does not depend on
the values of the weights.

Rows: prefill of 128, 512 and 1,024 tokens with the last token's logits; greedy decoding of 128 tokens after
8, of 64 after 896, and of 32 tokens after 8 in batches of 8 and 32 sequences. `--isa avx2` restricts every
engine to AVX2 on processors with AVX-512. Needs the packages that peers.sh installs.
"""

import argparse
import json
import pathlib
import statistics
import time

from bench.common import json_of, output_of, parser, prompt, restrict_to, worker, write_tokenizer

PREFILL_TOKENS = (128, 512, 1024)
DECODE = {"decode": (8, 128), "decode_at_896": (896, 64)}
BATCH_TOKENS, BATCHES = (8, 32), (8, 32)
ROWS = [f"prefill {tokens}" for tokens in PREFILL_TOKENS] + list(DECODE) + [f"{texts} texts" for texts in BATCHES]
# The peers' precisions closest to each of ours.
GGUF_TYPES = {"f32": ["F32"], "f16": ["F16"], "q8": ["Q8_0"], "q4": ["Q4_0", "Q4_K_M"]}
CTRANSLATE2_TYPES = {"f32": "float32", "q8": "int8"}
VOCAB_SIZE = 50257
# KV cache bytes per token: keys and values, 12 layers, hidden size 768.
KV_BYTES = {"f32": 2 * 12 * 768 * 4, "f16": 2 * 12 * 768 * 2, "q8": 2 * 12 * 768 * 2, "q4": 2 * 12 * 768 * 2}


def write_checkpoint(folder):
    """Saves a randomly initialized GPT-2 124M with a fixed seed, and a tokenizer of the same size."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config()).save_pretrained(folder)
    write_tokenizer(folder, VOCAB_SIZE)


def measure_torch(folder, threads):
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()

    def prefill(tokens):
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
        return sum(seconds[1:])  # the first step is the prefill

    with torch.inference_mode():
        return speeds(prefill, decode)


def measure_ctranslate2(folder, threads):
    import ctranslate2

    generator = ctranslate2.Generator(folder, device="cpu", compute_type="default", inter_threads=1, intra_threads=threads)
    vocabulary = json.loads(pathlib.Path(folder, "vocabulary.json").read_text())

    def generate(tokens, new_tokens, texts=1):
        words = [vocabulary[id] for id in prompt(tokens)]
        start = time.perf_counter()
        generator.generate_batch([words] * texts, max_length=new_tokens, min_length=new_tokens, include_prompt_in_result=False)
        return time.perf_counter() - start

    def prefill(tokens):
        # The call generates at least one token, which needs a free position in the context.
        tokens = min(tokens, 1023)
        generate(tokens, 1)
        return tokens

    def decode(tokens, new_tokens):
        alone = min(generate(tokens, 1) for _ in range(2))
        return generate(tokens, new_tokens + 1) - alone

    rows = speeds(prefill, decode)
    tokens, new_tokens = BATCH_TOKENS
    for texts in BATCHES:
        generate(tokens, 2, texts)
        alone = min(generate(tokens, 1, texts) for _ in range(2))
        seconds = min(generate(tokens, new_tokens + 1, texts) for _ in range(2)) - alone
        rows[f"{texts} texts"] = texts * new_tokens / seconds
    return rows


def speeds(prefill, decode):
    """Returns the tokens per second for every row, after one warm-up each.

    `prefill` returns the number of tokens it processed, `decode` the seconds it took.
    """
    rows = {}
    for tokens in PREFILL_TOKENS:
        prefill(tokens)
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            count = prefill(tokens)
            seconds.append(time.perf_counter() - start)
        rows[f"prefill {tokens}"] = count / min(seconds)
    decode(8, 8)
    for row, (tokens, new_tokens) in DECODE.items():
        rows[row] = new_tokens / decode(tokens, new_tokens)
    return rows


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
        for test in json.loads(output_of([program, "-m", model, "-t", str(threads), "-r", "2", "-o", "json", *arguments])):
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
    """Yields the name and the measuring function of each engine available for a precision."""
    python, model = peers / "venv/bin/python", peers / "gpt2-124m"
    if ours:
        command = [ours, "bench", "--model", model, "--dtype", dtype, "--threads", threads, "--json"]
        yield "ours", lambda: measure_ours(command)
    for type in GGUF_TYPES[dtype]:
        file = peers / f"gpt2-{type}.gguf"
        own, avx2 = (peers / folder / "bin" for folder in ("llama.cpp", "llama.cpp-avx2"))
        # On processors limited to AVX2, peers.sh does not create a second build.
        programs = avx2 if isa and avx2.exists() else own
        if programs.exists() and file.exists():
            yield f"llama.cpp {type}", lambda programs=programs, file=file: measure_llama_cpp(programs, file, threads)
    folders = [("torch", model)] if dtype == "f32" else []
    if dtype in CTRANSLATE2_TYPES:
        folders.append(("ctranslate2", peers / f"ctranslate2-{CTRANSLATE2_TYPES[dtype]}"))
    for engine, folder in folders:
        if folder.exists():
            command = worker("cpu", "--worker", engine, folder, "--threads", threads, python=python)
            yield engine, lambda command=command: json_of(command)


def limits(program, dtype, threads):
    """Returns the machine's limit in tokens per second for each row; a batch reads the weights once per step."""
    estimates = json_of([program, "doctor", "--threads", threads, "--json"])["estimates"]
    estimate = next(estimate for estimate in estimates if estimate["dtype"] == dtype)
    read, step, prompt = (estimate[key] for key in ("read_bytes", "new_tokens_per_s", "prompt_tokens_per_s"))
    rows = {f"prefill {tokens}": prompt for tokens in PREFILL_TOKENS} | {"decode": step}
    depth, new_tokens = DECODE["decode_at_896"]
    rows["decode_at_896"] = step * read / (read + KV_BYTES[dtype] * (depth + new_tokens / 2))
    return rows | {f"{texts} texts": min(texts * step, prompt) for texts in BATCHES}


def compare(arguments):
    peers = arguments.peers.resolve()
    restrict_to(arguments.isa)
    samples, measured_limits = {}, {}
    for _ in range(arguments.rounds):
        for dtype in arguments.only.split(","):
            if arguments.program.exists():
                for row, limit in limits(arguments.program, dtype, arguments.threads).items():
                    measured_limits.setdefault((dtype, row), []).append(limit)
            for engine, measure in engines(peers, dtype, arguments.program.exists() and arguments.program, arguments.threads, arguments.isa):
                for row, speed in measure().items():
                    samples.setdefault((dtype, row), {}).setdefault(engine, []).append(speed)
    for dtype in arguments.only.split(","):
        for row in ROWS:
            medians = {engine: statistics.median(speeds) for engine, speeds in samples.get((dtype, row), {}).items()}
            others = [engine for engine in medians if engine != "ours"]
            limit = statistics.median(measured_limits[dtype, row]) if (dtype, row) in measured_limits else None
            line = {"dtype": dtype, "row": row, "tokens_per_s": medians, "limit": limit}
            if others:
                line["best_peer"] = max(others, key=medians.get)
            print(json.dumps(line), flush=True)


def main():
    argument_parser = parser(__doc__, "rounds", "threads", "isa", "program", "peers")
    argument_parser.add_argument("--only", default="f32,f16,q8,q4", help="precisions")
    argument_parser.add_argument("--checkpoint", metavar="FOLDER", help="write a random checkpoint of GPT-2 124M's shape, and nothing else")
    argument_parser.add_argument("--worker", nargs=2, metavar=("ENGINE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = argument_parser.parse_args()
    if arguments.checkpoint:
        write_checkpoint(arguments.checkpoint)
    elif arguments.worker:
        engine, folder = arguments.worker
        measure = {"torch": measure_torch, "ctranslate2": measure_ctranslate2}[engine]
        print(json.dumps(measure(folder, arguments.threads)))
    else:
        compare(arguments)
