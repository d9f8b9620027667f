"""Checks and benchmarks the gpt2 build next to this file and writes a report; `gpu_run.sh` starts it.

usage: ./gpu_run.sh [--device cuda:0|cpu] [--out DIR] [--limit SECONDS] [--only STEP,…]

Steps, each with a share of the time; a step that fails or hangs does not affect the others:
  environment  the driver, PyTorch, and whether the program finds its libraries and the GPU
  parity       tests of layers, models, caches and greedy text on the device, in f32, f16 and bf16
  texts        greedy text and log-probabilities compared with transformers, on random weights of every preset up to XL,
               initialized here by transformers with seed 0, and on the trained model of the repository
  commands     sampling, beams, grammars, drafts, scoring, interpretability and a server of the built-in model, in f32,
               compared with the CPU
  sanitizer    a few kernel tests under compute-sanitizer's memcheck and racecheck, if it is installed
  quiet        ends whatever still runs in the background before the measurements
  batches      tokens per second of the server with 1 to 256 clients compared with batched PyTorch (bench/batches.py)
  training     losses of whole training runs compared with the CPU and PyTorch; the speed of a step compared with PyTorch,
               in f32, and in bf16 with f32 weights (bench/training.py)
  speed        tokens per second compared with PyTorch, eager and compiled (bench/cuda.py), also of the largest preset

All steps together take at most SECONDS (default: 450). A step may also use the time that earlier steps left. It
never uses the time of later steps. The measurements have two rounds and report medians and extremes. For a card
in bench/cards.py they also report the percentage of its memory bandwidth or of its 16-bit arithmetic.

A text may differ from transformers' only if transformers' own two best logits are within the tolerance
of the dtype. While the tests run, transformers creates the references and PyTorch's compiler fills its cache;
nothing else runs during the measurements. `--device cpu` runs the same steps at a tiny scale, to test the
script. DIR (default: report) receives report.txt, report.json and the complete output of failures. Exits with
code 1 if a step failed.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
# Makes `bench`, next to this file, importable in child processes.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
sys.path.insert(0, str(HERE))

from bench import cards, cuda  # noqa: E402
from bench import training as bench_training  # noqa: E402

LIMIT = 450
# Steps in order, with the seconds that each may take if no earlier step left time. They sum to at most LIMIT; another
# --limit or a selection of steps scales them.
SECONDS = {
    "environment": 30,
    "parity f32": 30,
    "parity f16": 25,
    "parity bf16": 25,
    "commands": 30,
    "training losses": 20,
    "texts gpt2": 20,
    "texts gpt2-medium": 9,
    "texts gpt2-large": 10,
    "texts gpt2-xl": 15,
    "texts stories": 6,
    "sanitizer": 25,
    "quiet": 10,
    "batches": 40,
    "training f32": 30,
    "training bf16": 25,
    "speed gpt2": 60,
    "speed gpt2-xl": 20,
    "speed compiled": 20,
}
# Number of rounds per measurement.
ROUNDS = 2
DTYPES = ("f32", "f16", "bf16")
# Crates and test modules, with their dtypes; greedy texts are compared in f32 only.
TESTS = {
    ("kernels", "devices"): DTYPES,
    ("gpt2", "parity"): DTYPES,
    ("gpt2", "laws"): DTYPES,
    ("generation", "parity"): ("f32",),
}
# These tests choose their dtypes themselves.
TRAINING_TESTS = {("training", "devices"): ("f32",), ("training", "pytorch"): ("f32",)}
# Tolerances for logits and log-probabilities, multiplied by the largest logit if that exceeds 1; the same as in
# the tests.
TOLERANCES = {"f32": 1e-3, "f16": 2e-2, "bf16": 4e-2}
# Hidden size, blocks, heads.
PRESETS = {"gpt2": (768, 12, 12), "gpt2-medium": (1024, 24, 16), "gpt2-large": (1280, 36, 20), "gpt2-xl": (1600, 48, 25)}
# Commands for the built-in model on both devices. PAIRS is a file of prompt pairs, GRAMMAR a file with one
# rule.
TWO_TEXTS = "--clean 'Mia and Tom went to the park, Tom gave a ball to' --corrupt 'Mia and Tom went to the park, Mia gave a ball to' " \
    "--answer ' Mia' --against ' Tom' --json"
COMMANDS = (
    "generate 'One day' --seed 7 --top-p 0.9 --temperature 0.8",
    "generate 'One day' --seed 3 --num-return-sequences 3",
    "generate 'One day' --num-beams 4",
    "generate 'One day' --penalty-alpha 0.6 --top-k 4",
    "generate 'One day' --greedy --slide --max-new-tokens 300",
    "generate 'One day' --greedy --assistant-model built-in",
    "generate 'One day' --seed 1 --grammar GRAMMAR",
    "score 'One day, Mia had a red ball.' --json",
    *(f"look {what} 'One day, Mia had a red ball.' --json" for what in ("attention", "lens", "attribute", "ablate", "saliency", "graph")),
    "look heads --json",
    f"look patch {TWO_TEXTS}",
    f"look estimate {TWO_TEXTS}",
    f"look path --to final {TWO_TEXTS}",
    "look circuit --data PAIRS --json",
)
# Tolerance for the printed numbers, multiplied by the number if that exceeds 1; ids and words must be equal.
PRINTED_TOLERANCE = 1e-4
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
REQUESTS, PORT = 16, 18077
TRAINED = "stories"
SCORED_TOKENS = 200
# Tests to run under compute-sanitizer, which makes them many times slower: one for each kind of kernel.
SANITIZED = ("devices::layer_norms", "devices::steps_at_positions_in_device_memory", "devices::keys_with_infinite_scores_have_zero_weight")
SANITIZERS = ("memcheck", "racecheck")
# Exit code of compute-sanitizer if it finds an error.
SANITIZER_CODE = 99


class Scale:
    """Amount of work: everything on a GPU; on a CPU, the minimum that reaches every line."""

    def __init__(self, device):
        is_full = device.startswith("cuda")
        self.presets = PRESETS if is_full else {name: (16 * heads, 2, heads) for name, (_, _, heads) in PRESETS.items()}
        self.prompts = (5, 200, 900) if is_full else (5, 70)
        self.new_tokens = 32 if is_full else 6
        # Our CPU backend has no bf16.
        self.dtypes = DTYPES if is_full else ("f32",)
        self.trained = "gpt2-1024" if is_full else "small"
        self.compute_dtypes = ("f32", "bf16") if is_full else ("f32",)
        self.tokens_scale = 1.0 if is_full else 0.02
        self.clients = (1, 16, 64, 256) if is_full else (1, 4)
        self.served_dtype = "f16" if is_full else "f32"

    def has(self, step):
        """Whether a step exists at this scale, depending on the dtype in its name."""
        kind, _, part = step.partition(" ")
        return part not in DTYPES or part in {"parity": self.dtypes, "training": self.compute_dtypes}[kind]


# Code that runs with PyTorch in separate processes.


def make_references(folder, device):
    """Creates the checkpoints and prints transformers' results for each dtype as JSON lines."""
    import torch
    import transformers
    from bench import common

    transformers.logging.set_verbosity_error()
    torch.backends.cuda.matmul.allow_tf32 = False
    scale = Scale(device)
    common.write_tokenizer(folder / "tokenizer.part", transformers.GPT2Config().vocab_size)
    (folder / "tokenizer.part").rename(folder / "tokenizer")
    for name in [*scale.presets, TRAINED]:
        start = time.monotonic()
        path = folder / name
        if name == TRAINED:
            path = HERE / "models" / f"{TRAINED}-f16"
            model = transformers.GPT2LMHeadModel.from_pretrained(path, dtype=torch.float32).to(device)
        else:
            width, blocks, heads = scale.presets[name]
            torch.manual_seed(0)
            with torch.device(device):
                config = transformers.GPT2Config(n_embd=width, n_layer=blocks, n_head=heads)
                # Rounded to f16, which halves the data to write and read.
                model = transformers.GPT2LMHeadModel(config).half()
            model.save_pretrained(path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
        model.eval()
        for dtype in scale.dtypes:
            # The weights are f16 values, exact in f32 and f16; the lossy bf16 comes last.
            model.to({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype])
            reference = reference_of(model, scale)
            made = {"model": name, "path": str(path), "dtype": dtype, "seconds": time.monotonic() - start}
            print(json.dumps(made | reference), flush=True)


def reference_of(model, scale):
    import torch

    room = model.config.n_positions - scale.new_tokens
    prompts = [pattern(min(length, room), model.config.vocab_size) for length in scale.prompts]
    scored = pattern(min(SCORED_TOKENS, model.config.n_positions), model.config.vocab_size)
    texts = []
    with torch.inference_mode():
        for prompt in prompts:
            ids, cache, text = torch.tensor([prompt], device=model.device), None, []
            for _ in range(scale.new_tokens):
                output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, best = output.past_key_values, output.logits[0, -1].float().topk(5)
                text.append({"ids": best.indices.tolist(), "logits": best.values.tolist()})
                ids = best.indices[None, :1]
            texts.append(text)
        ids = torch.tensor([scored], device=model.device)
        logprobs = model(ids).logits[0].float().log_softmax(-1)
        logprobs = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    return {"prompts": prompts, "texts": texts, "scored": scored, "logprobs": logprobs}


def pattern(length, vocab_size):
    return [(index * 7919 + 3) % vocab_size for index in range(length)]


# The report.


class Failed(Exception):
    """A step failed."""


class Skipped(Exception):
    """A step was skipped."""


class Run:
    def __init__(self, arguments):
        self.device, self.out, self.only = arguments.device, arguments.out, arguments.only
        self.scale = Scale(self.device)
        self.limit, self.start_time = arguments.limit, time.monotonic()
        self.end = self.start_time + self.limit
        self.steps, self.lines, self.background = [], [], []
        self.step_end = self.end
        # Latest end of each selected step, in seconds after the start.
        self.deadlines = self.plan()
        self.date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.command = shlex.join(["gpu_run.py", *sys.argv[1:]])
        self.card = cards.card_name(cards.index_of(self.device)) if self.device.startswith("cuda") else ""
        self.out.mkdir(parents=True, exist_ok=True)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gpt2-gpu-"))
        # The measured processes reuse the compiler's cache.
        self.environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(self.folder / "inductor"))
        self.environment |= {"TRITON_CACHE_DIR": str(self.folder / "triton"), "HF_HUB_OFFLINE": "1"}

    def wants(self, step):
        """Whether a step is selected; measurements also select the pause before them."""
        kind = step.split()[0]
        is_selected = not self.only or kind in self.only or (kind == "quiet" and {"batches", "speed"} & set(self.only))
        return bool(is_selected) and self.scale.has(step)

    def plan(self):
        """Divides the time among the selected steps in proportion to their seconds."""
        selected = {step: seconds for step, seconds in SECONDS.items() if self.wants(step)}
        factor, elapsed, deadlines = self.limit / max(1, sum(selected.values())), 0.0, {}
        for step, seconds in selected.items():
            elapsed += seconds * factor
            deadlines[step] = elapsed
        return deadlines

    def say(self, line):
        self.lines.append(line)
        print(line, flush=True)

    def left(self):
        return min(self.step_end, self.end) - time.monotonic()

    def step(self, name, work, *arguments):
        """Runs one step, at most until its deadline, and reports the result."""
        if name not in self.deadlines:
            return
        start = time.monotonic()
        self.step_end = self.start_time + self.deadlines[name]
        result, details = {"name": name}, {}
        try:
            if self.left() < 1:
                raise Skipped("no time was left")
            details = work(*arguments) or {}
            result["status"] = "passed"
        except Skipped as reason:
            result |= {"status": "skipped", "reason": str(reason)}
        except Failed as reason:
            result |= {"status": "failed", "reason": str(reason)}
        except subprocess.TimeoutExpired as error:
            result |= {"status": "failed", "reason": f"stopped after {error.timeout:.0f} s: {command_line(error.cmd)}"}
        except Exception as error:  # the other steps must still run
            result |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        result |= {"seconds": round(time.monotonic() - start, 1)} | details
        self.steps.append(result)
        said = result.get("reason") or result.get("summary", "")
        self.say(f"{result['status'].upper():<8} {name:<22} {result['seconds']:>6.1f} s  {said}")
        self.write()

    def counts(self):
        return {status: sum(step["status"] == status for step in self.steps) for status in ("passed", "failed", "skipped")}

    def write(self):
        """Writes the report so far, so that it exists even if the script is killed."""
        report = {"date": self.date, "command": self.command, "card": self.card, "device": self.device, "limit_s": self.limit}
        report |= {"seconds": round(time.monotonic() - self.start_time, 1), "counts": self.counts(), "steps": self.steps}
        (self.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (self.out / "report.txt").write_text("\n".join(self.lines) + "\n")

    def outcome(self, command, limit=None, **environment):
        """Returns the exit code and the output of a process.

        The process and its children are killed at the step's time limit.
        """
        limit = min(limit or self.left(), self.left())
        if limit <= 0:
            raise Skipped("no time was left")
        process = subprocess.Popen([str(part) for part in command], text=True, start_new_session=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   env=self.environment | environment)
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired as error:
            kill_session(process.pid)
            output, errors = process.communicate()
            self.keep(command, output + errors)
            error.output = output
            raise
        return process.returncode, output, errors

    def call(self, command, limit=None):
        """Returns the output of a process, which must succeed."""
        code, output, errors = self.outcome(command, limit)
        if code:
            self.keep(command, output + errors)
            last = (errors.strip() or output.strip()).splitlines()[-1:]
            raise Failed(f"exit code {code}: {command_line(command)}: {' '.join(last)}")
        return output

    def keep(self, command, output):
        """Saves the output of a failure next to the report."""
        with (self.out / "failures.txt").open("a") as file:
            file.write(f"$ {command_line(command)}\n{output}\n")

    def start(self, command, output):
        process = subprocess.Popen([str(part) for part in command], start_new_session=True, stdin=subprocess.DEVNULL,
                                   stdout=output.open("w"), stderr=output.with_suffix(".errors").open("w"),
                                   env=self.environment)
        self.background.append(process)
        return process

    def stop_background(self):
        for process in self.background:
            if process.poll() is None:
                kill_session(process.pid)
                process.wait()
        self.background.clear()


def kill_session(leader):
    """Kills a process that leads a session, and all processes in it, in any process group."""
    for _ in range(5):  # a process may start another one meanwhile
        is_alive = False
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                # The fields after the name in parentheses: state, parent, process group, session.
                state, _, _, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(session) == leader and state != "Z":
                    is_alive = True
                    os.kill(int(folder.name), signal.SIGKILL)
            except (OSError, ValueError):
                continue  # it has just ended
        if not is_alive:
            return
        time.sleep(0.02)


def command_line(command):
    line = shlex.join(map(str, command))
    return line if len(line) < 160 else line[:157] + "…"


# The steps.


def environment(run):
    details = {"build": (HERE / "build.txt").read_text().strip()}
    if run.device.startswith("cuda"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        try:
            details["gpu"] = run.call(query, 10).strip()
        except (FileNotFoundError, Failed, subprocess.TimeoutExpired) as error:
            details["gpu"] = f"nvidia-smi failed: {error}"
    code = "import sys, torch, transformers; print(sys.version.split()[0], torch.__version__, transformers.__version__)"
    try:
        # Leaves time for the program itself.
        status, output, errors = run.outcome([sys.executable, "-c", code], run.left() * 0.7)
    except subprocess.TimeoutExpired as error:
        status, output, errors = None, "", f"its import was stopped after {error.timeout:.0f} s"
    run.has_torch = status == 0
    last = " ".join((output if run.has_torch else errors).strip().splitlines()[-1:])
    details["python"] = ("Python, PyTorch, transformers: " if run.has_torch else "no PyTorch: ") + last
    for line in details.values():
        run.say(f"         {line}")
    missing = [line.split()[0] for line in run.call(["ldd", HERE / "bin" / "gpt2"]).splitlines() if "not found" in line]
    if missing:
        has = run.environment.get("LD_LIBRARY_PATH", "")
        raise Failed(f"the program's libraries are missing: {', '.join(missing)}; searched in {has}")
    # The built-in model.
    run.call([HERE / "bin" / "gpt2", "generate", "One day", "--device", run.device, "--greedy", "--max-new-tokens", "8"])
    return details


def parity(run, dtype, tests):
    passed, failures, skipped = 0, [], []
    for (crate, module), dtypes in tests.items():
        if dtype not in dtypes:
            continue
        test = f"{crate}, {module}"
        command = [HERE / "bin" / f"test-{crate}", f"{module}::", "--test-threads", "1", "--nocapture"]
        try:
            # The limit leaves time for the other programs if one hangs.
            limit = run.left() * 0.6
            code, output, errors = run.outcome(command, limit, GPT2_TEST_DEVICE=run.device, GPT2_TEST_DTYPE=dtype)
        except subprocess.TimeoutExpired as error:
            failures.append(f"{test}: stopped after {error.timeout:.0f} s")
            continue
        except (Skipped, OSError) as error:
            failures.append(f"{test}: {error}")
            continue
        results = [line for line in output.splitlines() if line.startswith("test result: ")]
        passed += sum(int(line.split(" passed")[0].split()[-1]) for line in results)
        skipped += [line for line in errors.splitlines() if line.startswith("skipped: ")]
        if code:
            run.keep(["GPT2_TEST_DEVICE=" + run.device, "GPT2_TEST_DTYPE=" + dtype, *command], output + errors)
            lines = [line for line in errors.splitlines() if "panicked at" in line or "largest difference" in line]
            names = [line.strip() for line in output.split("\nfailures:\n")[-1].splitlines() if line.startswith("    ")]
            failures.append(f"{test} (exit code {code}): {', '.join(names)} {' | '.join(lines)[:400]}".rstrip())
    if failures:
        raise Failed("; ".join(failures) + "; see failures.txt")
    if not passed:
        raise Failed("no test ran")
    return {"passed": passed, "summary": f"{passed} tests" + "".join(f"; {line}" for line in sorted(set(skipped)))}


def reference(run, name, dtype):
    """Returns transformers' results, waiting for the process that computes them."""
    if not run.has_torch:
        raise Skipped("PyTorch is not installed")
    while run.left() > 1:
        ended = run.maker.poll() is not None
        for line in run.references.read_text().splitlines(keepends=True):
            found = json.loads(line) if line.endswith("\n") else {}
            if (found.get("model"), found.get("dtype")) == (name, dtype):
                return found
        if ended:
            errors = run.references.with_suffix(".errors").read_text().strip()
            run.keep(["references"], errors)
            raise Failed(f"transformers produced no reference: {' '.join(errors.splitlines()[-1:])}")
        time.sleep(0.2)
    raise Failed("transformers' reference took too long")


def texts(run, name):
    details = {}
    for dtype in run.scale.dtypes:
        expected = reference(run, name, dtype)
        flags = ["--model", expected["path"], "--device", run.device, "--dtype", dtype]
        prompts = run.folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"ids": prompt}) + "\n" for prompt in expected["prompts"]))
        flags_of_text = ["--greedy", "--max-new-tokens", run.scale.new_tokens, "--prompts-file", prompts]
        equal, ties, differing = 0, 0, []
        # One sequence at a time, then all in one batch.
        for batch_size in (1, len(expected["prompts"])):
            output = run.call([HERE / "bin" / "gpt2", "generate", *flags, *flags_of_text, "--batch-size", batch_size])
            found = [json.loads(line)["ids"] for line in output.splitlines()]
            if len(found) != len(expected["texts"]):
                raise Failed(f"{dtype}: {len(found)} texts instead of {len(expected['texts'])}")
            for prompt, ours, theirs in zip(expected["prompts"], found, expected["texts"]):
                verdict = compared(ours, theirs, TOLERANCES[dtype])
                equal += verdict == "equal"
                ties += verdict == "tie"
                if verdict not in ("equal", "tie"):
                    differing.append(f"after {len(prompt)} ids, {batch_size} at once: {verdict}")
        ids = ",".join(map(str, expected["scored"]))
        scored = json.loads(run.call([HERE / "bin" / "gpt2", "score", *flags, "--ids", ids, "--json"]))
        distance = max(abs(a - b) for a, b in zip(scored["logprobs"][1:], expected["logprobs"], strict=True))
        largest = max(1.0, max(abs(step["logits"][0]) for text in expected["texts"] for step in text))
        details[dtype] = {"equal": equal, "ties": ties, "logprob_distance": distance, "largest_logit": largest,
                          "reference_s": expected["seconds"]}
        if not distance <= TOLERANCES[dtype] * largest:
            differing.append(f"log-probabilities differ by {distance:.1e}, logits are up to {largest:.1f}")
        if differing:
            raise Failed(f"{dtype}: {'; '.join(differing)}")
    told = [f"{dtype} {found['equal']} equal{', %d at a tie' % found['ties'] if found['ties'] else ''}, "
            f"log-probabilities within {found['logprob_distance']:.0e}" for dtype, found in details.items()]
    return {"types": details, "summary": "; ".join(told)}


def compared(ours, theirs, tolerance):
    """Compares ids with `theirs`, which holds the best ids and their logits for each step."""
    for place, (id, step) in enumerate(zip(ours, theirs)):
        logits = dict(zip(step["ids"], step["logits"]))
        best = step["logits"][0]
        if id != step["ids"][0]:
            distance = best - logits.get(id, float("-inf"))
            return "tie" if distance <= tolerance * max(1.0, abs(best)) else f"id {place} is {id}, {distance:.2e} below the best"
    # An end token ends a completion.
    return "equal" if ours else "no ids"


def commands(run):
    program = HERE / "bin" / "gpt2"
    files = {"GRAMMAR": run.folder / "grammar.lark", "PAIRS": run.folder / "pairs.jsonl"}
    files["GRAMMAR"].write_text("start: /[a-z ]+/\n")
    run.call([program, "look", "data", "ioi", "--count", "20", "--out", files["PAIRS"]])
    differing, largest = [], 0.0
    for line in COMMANDS:
        command = [program, *(str(files.get(word, word)) for word in shlex.split(line)), "--dtype", "f32", "--device"]
        on_cpu, on_device = (run.call([*command, device]) for device in ("cpu", run.device))
        if NUMBER.split(on_cpu) != NUMBER.split(on_device):
            differing.append(f"{line}: different words")
            continue
        numbers = (map(float, NUMBER.findall(output)) for output in (on_cpu, on_device))
        distance = max((abs(a - b) / max(1.0, abs(a)) for a, b in zip(*numbers)), default=0.0)
        largest = max(largest, distance)
        if distance > PRINTED_TOLERANCE:
            differing.append(f"{line}: numbers differ by {distance:.1e}")
    if served(run, program, "cpu") != served(run, program, run.device):
        differing.append("serve: different texts")
    if differing:
        raise Failed("; ".join(differing))
    summary = f"{len(COMMANDS)} commands and {REQUESTS} requests at once are equal, numbers within {largest:.0e}"
    return {"largest_difference": largest, "summary": summary}


def served(run, program, device):
    """Returns a server's completions for concurrent requests, each with its own seed."""

    def ask(seed):
        body = {"prompt": ("One day", "Tom saw")[seed % 2], "max_tokens": 48, "seed": seed, "temperature": 0.8}
        request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request, timeout=max(1, run.left())))["choices"][0]["text"]

    server = run.start([program, "serve", "--device", device, "--dtype", "f32", "--port", PORT], run.folder / f"serve-{device}.txt")
    try:
        while run.left() > 0 and run.outcome([program, "serve", "--check", "--port", PORT])[0]:
            time.sleep(0.2)
        with concurrent.futures.ThreadPoolExecutor(REQUESTS) as threads:
            return list(threads.map(ask, range(REQUESTS)))
    finally:
        server.terminate()
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            kill_session(server.pid)


def sanitizer(run):
    """Runs a few kernel tests under compute-sanitizer."""
    if not run.device.startswith("cuda"):
        raise Skipped("compute-sanitizer needs an NVIDIA GPU")
    found = shutil.which("compute-sanitizer")
    installed = sorted(pathlib.Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
    if not found and not installed:
        raise Skipped("compute-sanitizer is not installed; the CUDA toolkit contains it")
    program, test = found or installed[-1], HERE / "bin" / "test-kernels"
    failures, results = [], {}
    for tool in SANITIZERS:
        command = [program, "--tool", tool, "--error-exitcode", SANITIZER_CODE, test, "--exact", "--test-threads", "1", *SANITIZED]
        limit = run.left() * (0.5 if tool == SANITIZERS[0] else 1)
        try:
            code, output, errors = run.outcome(command, limit, GPT2_TEST_DEVICE=run.device, GPT2_TEST_DTYPE="f32")
        except subprocess.TimeoutExpired as error:
            failures.append(f"{tool}: stopped after {error.timeout:.0f} s")
            continue
        lines = (output + errors).splitlines()
        results[tool] = " ".join(line.strip("= ") for line in lines if "SUMMARY" in line) or "no summary"
        if code or results[tool] == "no summary" or f"{len(SANITIZED)} passed" not in output:
            run.keep(command, output + errors)
            failures.append(f"{tool} (exit code {code}): {results[tool]}")
    if failures:
        raise Failed("; ".join(failures) + "; see failures.txt")
    return {"sanitizer": results, "summary": "; ".join(f"{tool}: {result}" for tool, result in results.items())}


def quiet(run):
    """Waits for background processes, which would disturb the measurements, and ends those that take too long."""
    while run.left() > 1 and any(process.poll() is None for process in run.background):
        time.sleep(0.2)
    running = sum(process.poll() is None for process in run.background)
    run.stop_background()
    return {"summary": f"{running} background processes were stopped" if running else "no background process was left"}


def checkpoint(run, name):
    """Returns the folder of a checkpoint or a tokenizer, which another process creates."""
    if not run.has_torch:
        raise Skipped("PyTorch is not installed")
    if not (run.folder / name).exists():
        raise Skipped(f"{name} is missing: transformers did not create it in time")
    return run.folder / name


def figures_of(run, table, *options):
    """Runs a `bench` table, reports its lines, and returns its figures."""
    command = [sys.executable, "-m", "bench", table, *options, "--device", run.device, "--rounds", ROUNDS, "--lines"]
    try:
        code, output, errors = run.outcome(command)
    except subprocess.TimeoutExpired as error:
        # Complete figures from earlier rounds count.
        code, errors = 1, ""
        output = f"{error.output.rpartition(chr(10))[0]}\nmissing: stopped after {error.timeout:.0f} s"
    figures = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    lines = [line for line in output.splitlines() if line and not line.startswith("{")]
    for line in lines:
        run.say("         " + line)
    # The table names figures cut off by the time limit; other missing figures are failures.
    missing = [line for line in lines if line.startswith("missing")]
    broken = [line for line in missing if "exit code" in line]
    if missing and not figures and all(line.startswith("missing, compiled") for line in missing) and not broken:
        raise Skipped("PyTorch's compiler took too long")
    if broken or not figures or (code and not missing):
        run.keep(command, output + errors)
        last = " ".join((broken or missing or errors.strip().splitlines() or lines or ["no output"])[-1:])
        raise Failed(f"{len(figures)} figures, exit code {code}: {last}")
    return figures


def rows_of(figures, value, *keys):
    """Groups the figures of all rounds and returns a row with their median and extremes for each group."""
    groups = {}
    for figure in figures:
        groups.setdefault(tuple(figure[key] for key in keys), []).append(figure[value])
    return [dict(zip(keys, group)) | cards.spread(values) for group, values in groups.items()]


def summary(rows, name, unit):
    """Describes our rows: the median, the extremes and the percentage of a limit, if it is known."""
    parts = []
    for row in rows:
        if row["engine"] == "ours":
            percent = f", {row['percent']:.0f}% {row['limit']}" if "percent" in row else ""
            parts.append(f"{name(row)} {row['median']:.4g} {unit} ({row['min']:.4g}-{row['max']:.4g}{percent})")
    return "; ".join(parts)


def speed(run, name, *options):
    found = checkpoint(run, name)
    ours = shlex.join([str(HERE / "bin" / "gpt2"), "bench", "--device", run.device, "--json"])
    figures = figures_of(run, "cuda", "--model", found, "--ours", ours, "--tokens-scale", run.scale.tokens_scale,
                         "--limit", max(1, run.left() - 3), "--engine-limit", max(1, run.left() / 3), *options)
    rows, shape = rows_of(figures, "tokens_per_s", "dtype", "row", "engine"), cards.Shape.of(found)
    for row in rows:
        limit = cuda.limit_percent(run.card, shape, row["dtype"], row["row"], row["median"])
        if row["engine"] == "ours" and limit:
            row["percent"], row["limit"] = limit
    shown = [row for row in rows if row["row"] in ("decode", f"prefill {cuda.PREFILLS[-1]}")]
    text = summary(shown, lambda row: f"{row['dtype']} {row['row']}", "tokens/s")
    return {"figures": figures, "rows": rows, "summary": text or f"{len(figures)} figures"}


def batches(run):
    found, tokenizer = checkpoint(run, "gpt2"), checkpoint(run, "tokenizer")
    figures = figures_of(run, "batches", "--model", found, "--tokenizer", tokenizer, "--program", HERE / "bin" / "gpt2",
                         "--dtype", run.scale.served_dtype, "--clients", ",".join(map(str, run.scale.clients)),
                         "--limit", max(1, run.left() - 3))
    rows = rows_of(figures, "tokens_per_s", "clients", "engine")
    return {"figures": figures, "rows": rows, "summary": summary(rows, lambda row: f"{row['clients']} clients", "tokens/s")}


def training(run, dtype):
    if not run.has_torch:
        raise Skipped("PyTorch is not installed")
    figures = figures_of(run, "training", "--case", run.scale.trained, "--compute-dtype", dtype, "--ours", HERE / "bin" / "bench-step")
    rows = rows_of(figures, "seconds_per_step", "engine")
    seconds = {row["engine"]: row["median"] for row in rows}
    if set(seconds) != {"ours", "PyTorch"}:
        raise Failed(f"measured {', '.join(seconds) or 'nothing'}")
    case = bench_training.CASES[run.scale.trained]
    shape = cards.Shape(case["n_embd"], case["n_layer"], case["vocab_size"])
    for row in rows:
        speed = case["batch"] * case["context"] / row["median"]
        percent = cards.arithmetic_percent(run.card, dtype, shape.training_operations(case["context"]), speed)
        if row["engine"] == "ours" and percent is not None:
            row["percent"], row["limit"] = percent, cards.ARITHMETIC
    ratio = seconds["PyTorch"] / seconds["ours"]
    text = summary(rows, lambda row: "a step takes", "s")
    return {"figures": figures, "rows": rows, "summary": f"{text}; PyTorch's time over ours: {ratio:.2f}"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("report"))
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for everything [default: %(default)s]")
    kinds = list(dict.fromkeys(step.split()[0] for step in SECONDS))
    parser.add_argument("--only", type=lambda names: names.split(","), help=", ".join(kinds))
    parser.add_argument("--references", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.references:
        make_references(arguments.references, arguments.device)
        return
    run = Run(arguments)
    (run.out / "failures.txt").unlink(missing_ok=True)
    run.has_torch = True  # until the environment step finds otherwise
    run.say(f"{run.date}  {run.command}")
    run.say(f"card: {run.card or 'none or unknown'}; device: {run.device}; at most {run.limit:.0f} s")
    try:
        steps(run)
    finally:
        run.stop_background()
        shutil.rmtree(run.folder, ignore_errors=True)
        counts = run.counts()
        total = ", ".join(f"{count} {status}" for status, count in counts.items())
        run.say(f"{total}, in {time.monotonic() - run.start_time:.0f} s; the report is in {run.out.resolve()}")
        run.write()
    sys.exit(1 if counts["failed"] or not counts["passed"] else 0)


def steps(run):
    run.step("environment", environment, run)
    if run.has_torch and any(map(run.wants, ("texts", "batches", "speed"))):
        run.references = run.folder / "references.jsonl"
        me = [sys.executable, __file__]
        run.maker = run.start([*me, "--references", run.folder, "--device", run.device], run.references)
    if run.has_torch and run.wants("speed"):
        warm_compiler(run)
    for dtype in run.scale.dtypes:
        run.step(f"parity {dtype}", parity, run, dtype, TESTS)
    run.step("commands", commands, run)
    run.step("training losses", parity, run, "f32", TRAINING_TESTS)
    # The trained model comes last, because transformers computes its reference last and the model is small.
    for name in [*run.scale.presets, TRAINED]:
        run.step(f"texts {name}", texts, run, name)
    run.step("sanitizer", sanitizer, run)
    run.step("quiet", quiet, run)
    run.stop_background()
    run.step("batches", batches, run)
    for dtype in run.scale.compute_dtypes:
        run.step(f"training {dtype}", training, run, dtype)
    dtypes = ["--dtype", ",".join(run.scale.dtypes)]
    run.step("speed gpt2", speed, run, "gpt2", "--engines", "ours,eager", *dtypes)
    largest = "bf16" if len(run.scale.dtypes) > 1 else "f32"
    run.step("speed gpt2-xl", speed, run, "gpt2-xl", "--engines", "ours,eager", "--dtype", largest)
    # Compiled PyTorch comes last and gets the remaining time, because compilation often takes too long.
    run.step("speed compiled", speed, run, "gpt2", "--engines", "compiled", *dtypes)


def warm_compiler(run):
    """Lets PyTorch compile the measured functions, all dtypes concurrently, once a checkpoint exists."""
    checkpoint = run.folder / "gpt2"
    command = f"while [ ! -e {shlex.quote(str(checkpoint))} ]; do sleep 0.2; done; exec "
    for dtype in run.scale.dtypes:
        engine = [sys.executable, "-m", "bench", "cuda", "--model", str(checkpoint), "--dtype", dtype, "--device", run.device]
        engine += ["--engine", "compiled", "--tokens-scale", str(run.scale.tokens_scale)]
        run.start(["bash", "-c", command + shlex.join(engine)], run.folder / f"compiler-{dtype}.txt")


if __name__ == "__main__":
    main()
