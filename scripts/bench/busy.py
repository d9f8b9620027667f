"""Speed under load: training, prefill and decode next to busy loops, compared with PyTorch.

usage: python -m bench busy [--program FILE] [--rounds N] [--threads N] [--isa avx2] [--only TEXT] [--model FOLDER]
           [--data FILE] [--markdown] [--json]

Compares three states of the machine: idle, one busy loop at nice 19 on each core, and one busy loop of equal
priority. Engines alternate, each in a separate process. Each figure is tokens per second over the total time
of all rounds. The percentages are fractions of the same engine's speed without the loops.

Training: `gpt2 train` with 8 blocks, hidden size 256 and 4 windows of 128 tokens, against transformers'
GPT2LMHeadModel with torch's AdamW. Prefill of 512 tokens and decode of 128: `gpt2 bench` against transformers
with a KV cache, on the freshly trained model or on MODEL, a checkpoint folder. The last line is the CPU time of
an idle `gpt2 serve` within one second after its first request. PyTorch is skipped if it is not installed.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

from bench import common

SIZES = {"vocab_size": 2048, "n_positions": 1024, "n_embd": 256, "n_layer": 8, "n_head": 8}
BATCH, CONTEXT = 4, 128
WARM_UP_STEPS, STEPS = 4, 24
PREFILL_TOKENS, PREFILL_RUNS = 512, 8
DECODE = (8, 128)
TASKS = ("training", "prefill", "decode")
STATES = ("idle", "nice 19", "equal")
PORT = 19100
IDLE_S = 3.0


@contextlib.contextmanager
def busy_loops(state):
    """Runs busy loops during the measurement: one at nice 19 on each core, or one of equal priority."""
    loop = [sys.executable, "-c", "while True: pass"]
    commands = {"idle": [], "nice 19": [["nice", "-n", "19", *loop]] * len(os.sched_getaffinity(0)), "equal": [loop]}[state]
    running = [subprocess.Popen(command) for command in commands]
    try:
        time.sleep(0.3 if running else 0.0)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def train(program, threads, data, folder, tokenizer=None):
    """Returns the seconds that `STEPS` steps of `gpt2 train` take."""
    config = folder.with_suffix(".json")
    config.write_text(json.dumps(SIZES))
    command = [program, "train", "--data", data, "--config", config, "--out", folder, "--threads", threads]
    command += ["--steps", WARM_UP_STEPS + STEPS, "--batch-size", BATCH, "--context", CONTEXT, "--held-out", "0.001"]
    command += ["--eval-every", 10 * STEPS, "--save-every", 10 * STEPS]
    common.output_of(command + (["--tokenizer", tokenizer] if tokenizer else []))
    steps = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    elapsed_s = {entry["step"]: entry["elapsed_s"] for entry in steps if "loss" in entry}
    return elapsed_s[WARM_UP_STEPS + STEPS] - elapsed_s[WARM_UP_STEPS]


def ours(program, threads, task, model, data):
    """Returns the seconds that a task takes, and its number of tokens."""
    if task == "training":
        with tempfile.TemporaryDirectory() as folder:
            return train(program, threads, data, pathlib.Path(folder, "model"), model / "tokenizer.json"), STEPS * BATCH * CONTEXT
    report = common.json_of([program, "bench", "--model", model, "--threads", threads, "--json"])
    if task == "prefill":
        return PREFILL_TOKENS / report["prefill"][str(PREFILL_TOKENS)], PREFILL_TOKENS
    return DECODE[1] / report["decode"], DECODE[1]


def pytorch(threads, task, model):
    """Measures PyTorch on the same task in this process."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    if task == "training":
        dropout = {f"{name}_pdrop": 0.0 for name in ("embd", "attn", "resid")}
        trained = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **dropout, use_cache=False)).train()
        optimizer = torch.optim.AdamW(trained.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)

        def step():
            ids = torch.randint(0, SIZES["vocab_size"], (BATCH, CONTEXT + 1))
            optimizer.zero_grad(set_to_none=True)
            logits = trained(ids[:, :-1]).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()

        return seconds_of(step, WARM_UP_STEPS, STEPS), STEPS * BATCH * CONTEXT
    evaluated = transformers.GPT2LMHeadModel.from_pretrained(model, dtype=torch.float32).eval()
    vocab_size = evaluated.config.vocab_size

    def ids_of(tokens):
        return torch.tensor([[id % vocab_size for id in common.prompt(tokens)]])

    with torch.inference_mode():
        if task == "prefill":
            prompt_ids = ids_of(PREFILL_TOKENS)
            return seconds_of(lambda: evaluated(prompt_ids, logits_to_keep=1), 1, PREFILL_RUNS), PREFILL_RUNS * PREFILL_TOKENS
        cache = transformers.DynamicCache(config=evaluated.config)
        ids = ids_of(DECODE[0])

        def decode():
            nonlocal ids
            ids = evaluated(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)

        # The first pass is the prefill.
        return seconds_of(decode, 1, DECODE[1]), DECODE[1]


def seconds_of(run, warm_ups, runs):
    for _ in range(warm_ups):
        run()
    start = time.perf_counter()
    for _ in range(runs):
        run()
    return time.perf_counter() - start


def idle_cpu_s(program, threads, model):
    """Returns the CPU time of an idle server within one second after its first request."""
    ticks = os.sysconf("SC_CLK_TCK")
    command = [str(program), "serve", "--model", str(model), "--threads", str(threads), "--port", str(PORT)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        body = json.dumps({"prompt": "One day", "max_tokens": 64}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/completions", body, {"Content-Type": "application/json"})
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", PORT)):
                break
            time.sleep(0.1)
        urllib.request.urlopen(request, timeout=60).read()

        def used():
            fields = pathlib.Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / ticks

        before = used()
        time.sleep(IDLE_S)
        return (used() - before) / IDLE_S
    finally:
        server.kill()
        server.wait()


def main():
    parser = common.parser(__doc__, "rounds", "threads", "isa", "only", "program", "model", "json", "markdown")
    parser.add_argument("--data", type=pathlib.Path, help="text to train on [default: the pages of docs/src]")
    parser.add_argument("--states", default=",".join(STATES), help="some of them, separated by commas")
    parser.add_argument("--worker", nargs=2, metavar=("TASK", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        seconds, tokens = pytorch(arguments.threads, *arguments.worker)
        print(json.dumps([seconds, tokens]))
        return
    common.restrict_to(arguments.isa)
    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data or pathlib.Path(folder, "pages.txt")
        if not arguments.data:
            pages = sorted((common.ROOT / "docs/src").rglob("*.md"))
            data.write_text("\n\n".join(page.read_text() for page in pages))
        trained = pathlib.Path(folder, "model")
        train(arguments.program, arguments.threads, data, trained)
        compare(arguments, arguments.model or trained, trained, data)


def compare(arguments, model, trained, data):
    program, threads = arguments.program, arguments.threads
    has_pytorch = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
    tasks = [task for task in TASKS if arguments.only in task]
    states = arguments.states.split(",")
    engines = {"ours": lambda task, folder: ours(program, threads, task, folder, data)}
    if has_pytorch:
        engines["PyTorch"] = lambda task, folder: common.json_of(common.worker("busy", "--worker", task, folder, "--threads", threads))
    sums = {}
    for _ in range(arguments.rounds):
        for state in states:
            for task in tasks:
                for engine, measure in engines.items():
                    with busy_loops(state):
                        seconds, tokens = measure(task, trained if task == "training" else model)
                    sums.setdefault((task, engine, state), []).append((seconds, tokens))
    if arguments.markdown:
        print(f"| tokens per second | {' | '.join(states)} |\n|---|{'---|' * len(states)}")
    for task in tasks:
        for engine in engines:
            speeds = {}
            for state in states:
                seconds, tokens = map(sum, zip(*sums[task, engine, state]))
                speeds[state] = tokens / seconds
            idle_speed = speeds.get("idle", float("nan"))
            if arguments.json:
                print(json.dumps({"task": task, "engine": engine, "tokens_per_s": speeds}))
                continue
            cells = [f"{speed:,.0f}" + (f" ({speed / idle_speed:.0%})" if state != "idle" else "") for state, speed in speeds.items()]
            print(f"| {task}, {engine} | {' | '.join(cells)} |" if arguments.markdown else f"{task:9} {engine:8} {'  '.join(cells)}")
    print(f"CPU time of an idle server: {idle_cpu_s(program, threads, trained):.1%} of a core")
