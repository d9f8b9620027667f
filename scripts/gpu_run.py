"""Checks and benchmarks the gpt2 build next to this file and writes a report; `gpu_run.sh` starts it.

usage: ./gpu_run.sh [--device cuda:0|cpu] [--out DIR] [--limit SECONDS] [--only STEP,…]

Steps, each with its own time limit; a step that fails or hangs does not affect the others:
  environment  the driver, PyTorch, and whether the program finds its libraries and the GPU
  parity       tests of layers, models, caches and greedy text on the device, in f32, f16 and bf16
  texts        greedy text and log-probabilities compared with transformers, on random weights of every preset up to XL,
               initialized here by transformers with seed 0, and on the trained model of the repository
  commands     sampling, beams, grammars, drafts, scoring, interpretability and a server of the built-in model, in f32,
               compared with the CPU
  training     losses of whole training runs compared with the CPU and PyTorch; the speed of a step compared with PyTorch,
               in f32, and in bf16 with f32 weights (bench/training.py)
  speed        tokens per second compared with PyTorch, eager and compiled (bench/cuda.py), and of the largest preset if
               time is left

A text may differ from that of transformers only if transformers' own two best logits are within the tolerance
of the dtype. While the tests run, transformers creates the references and PyTorch's compiler fills its cache;
nothing else runs during the measurements. `--device cpu` runs the same steps at a tiny scale, to test the
script. DIR (default: report) receives report.txt, report.json and the complete output of failures. Exits with
code 1 if a step failed.
"""

import argparse
import concurrent.futures
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
DTYPES = ("f32", "f16", "bf16")
# Test modules of crates and their dtypes; greedy texts are compared in f32 only.
TESTS = {
    ("kernels", "devices"): DTYPES,
    ("gpt2", "parity"): DTYPES,
    ("gpt2", "laws"): DTYPES,
    ("generation", "parity"): ("f32",),
}
# These tests choose their dtypes themselves.
TRAINING_TESTS = {("training", "devices"): ("f32",), ("training", "pytorch"): ("f32",)}
# Tolerances of logits and log-probabilities, times the largest logit if that exceeds 1; the same as in the
# tests.
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
# Tolerance of the printed numbers, times the number if that exceeds 1; ids and words must be equal.
PRINTED_TOLERANCE = 1e-4
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
REQUESTS, PORT = 16, 18077
TRAINED = "stories"
SCORED_TOKENS = 200


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


# Code that runs with PyTorch in separate processes.


def make_references(folder, device):
    """Creates the checkpoints and prints transformers' results for each dtype as JSON lines."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.backends.cuda.matmul.allow_tf32 = False
    scale = Scale(device)
    for name in [*scale.presets, TRAINED]:
        start = time.monotonic()
        path = folder / name
        if name == TRAINED:
            path = HERE / "models" / TRAINED
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
            # The weights are f16 numbers, exact in f32 and f16; the lossy bf16 comes last.
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
        self.end = time.monotonic() + arguments.limit
        self.steps, self.lines, self.background = [], [], []
        self.step_end = self.end
        self.out.mkdir(parents=True, exist_ok=True)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gpt2-gpu-"))
        # The measured processes reuse the compiler's cache.
        self.environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(self.folder / "inductor"))
        self.environment |= {"TRITON_CACHE_DIR": str(self.folder / "triton"), "HF_HUB_OFFLINE": "1"}

    def say(self, line):
        self.lines.append(line)
        print(line, flush=True)

    def left(self):
        return min(self.step_end, self.end) - time.monotonic()

    def step(self, name, limit, work, *arguments):
        """Runs one step for at most `limit` seconds, within the total limit, and reports the result."""
        if self.only and name.split()[0] not in self.only:
            return
        start = time.monotonic()
        self.step_end = start + limit
        result, details = {"name": name}, {}
        try:
            if self.left() < 5:
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
        report = {"device": self.device, "counts": self.counts(), "steps": self.steps}
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
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            self.keep(command, output + errors)
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
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.background.clear()


def command_line(command):
    line = shlex.join(map(str, command))
    return line if len(line) < 160 else line[:157] + "…"


# The steps.


def environment(run):
    details = {"build": (HERE / "build.txt").read_text().strip()}
    if run.device.startswith("cuda"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        try:
            details["gpu"] = run.call(query, 30).strip()
        except (FileNotFoundError, Failed) as error:
            details["gpu"] = f"nvidia-smi says nothing: {error}"
    code = "import sys, torch, transformers; print(sys.version.split()[0], torch.__version__, transformers.__version__)"
    try:
        status, output, errors = run.outcome([sys.executable, "-c", code], 90)
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
    run.call([HERE / "bin" / "gpt2", "generate", "One day", "--device", run.device, "--greedy", "--max-new-tokens", "8"], 60)
    return details


def parity(run, dtype, tests, limit):
    passed, failures, skipped = 0, [], []
    for (crate, module), dtypes in tests.items():
        if dtype not in dtypes:
            continue
        test = f"{crate}, {module}"
        command = [HERE / "bin" / f"test-{crate}", f"{module}::", "--test-threads", "1", "--nocapture"]
        try:
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
            differing.append(f"{line}: other words")
            continue
        numbers = (map(float, NUMBER.findall(output)) for output in (on_cpu, on_device))
        distance = max((abs(a - b) / max(1.0, abs(a)) for a, b in zip(*numbers)), default=0.0)
        largest = max(largest, distance)
        if distance > PRINTED_TOLERANCE:
            differing.append(f"{line}: numbers differ by {distance:.1e}")
    if served(run, program, "cpu") != served(run, program, run.device):
        differing.append("serve: other texts")
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
        return json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["text"]

    server = run.start([program, "serve", "--device", device, "--dtype", "f32", "--port", PORT], run.folder / f"serve-{device}.txt")
    try:
        while run.left() > 0 and run.outcome([program, "serve", "--check", "--port", PORT])[0]:
            time.sleep(0.2)
        with concurrent.futures.ThreadPoolExecutor(REQUESTS) as threads:
            return list(threads.map(ask, range(REQUESTS)))
    finally:
        server.terminate()
        server.wait(20)


def speed(run, name, options):
    if not run.has_torch:
        raise Skipped("PyTorch is not installed")
    found = run.folder / name
    if not found.exists():
        raise Skipped(f"checkpoint {name} is missing")
    ours = shlex.join([str(HERE / "bin" / "gpt2"), "bench", "--device", run.device, "--json"])
    command = [sys.executable, "-m", "bench", "cuda", "--model", found, "--ours", ours, "--device", run.device, "--lines",
               "--rounds", "1", "--tokens-scale", run.scale.tokens_scale, "--limit", max(1, run.left() - 3), *options]
    code, output, errors = run.outcome(command)
    figures = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    table = [line for line in output.splitlines() if line and not line.startswith("{")]
    for line in table:
        run.say("         " + line)
    details = {"figures": figures, "summary": f"{len(figures)} figures"}
    if not figures:
        raise Failed(f"nothing was measured: {' '.join(table[-1:])}")
    # The table names figures cut off by the time limit; other missing figures are failures.
    broken = [line for line in table if line.startswith("missing") and "exit code" in line]
    if broken or code not in (0, 1):
        run.keep(command, output + errors)
        raise Failed(f"{len(figures)} figures; {' | '.join(broken) or f'exit code {code}'}")
    return details


def training(run, dtype):
    if not run.has_torch:
        raise Skipped("PyTorch is not installed")
    command = [sys.executable, "-m", "bench", "training", "--case", run.scale.trained, "--rounds", "1", "--device", run.device,
               "--compute-dtype", dtype, "--ours", HERE / "bin" / "bench-step", "--lines"]
    output = run.call(command)
    figures = {found["engine"]: found for found in map(json.loads, (line for line in output.splitlines() if line[0] == "{"))}
    for line in output.splitlines():
        if line[0] != "{":
            run.say("         " + line)
    if set(figures) != {"ours", "PyTorch"}:
        raise Failed(f"measured {', '.join(figures) or 'nothing'}")
    ratio = figures["PyTorch"]["seconds_per_step"] / figures["ours"]["seconds_per_step"]
    return {"figures": figures, "summary": f"PyTorch's seconds a step over ours: {ratio:.2f}"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("report"))
    parser.add_argument("--limit", type=float, default=530, help="seconds for everything")
    parser.add_argument("--only", type=lambda names: names.split(","), help="environment, parity, commands, texts, training, speed")
    parser.add_argument("--references", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.references:
        make_references(arguments.references, arguments.device)
        return
    run = Run(arguments)
    (run.out / "failures.txt").unlink(missing_ok=True)
    run.has_torch = True  # until the environment step finds otherwise
    began = time.monotonic()
    try:
        steps(run)
    finally:
        run.stop_background()
        shutil.rmtree(run.folder, ignore_errors=True)
        counts = run.counts()
        total = ", ".join(f"{count} {status}" for status, count in counts.items())
        run.say(f"{total}, in {time.monotonic() - began:.0f} s; the report is in {run.out.resolve()}")
        run.write()
    sys.exit(1 if counts["failed"] or not counts["passed"] else 0)


def steps(run):
    run.step("environment", 120, environment, run)
    wants = lambda name: not run.only or name in run.only  # noqa: E731
    if run.has_torch and (wants("texts") or wants("speed")):
        run.references = run.folder / "references.jsonl"
        me = [sys.executable, __file__]
        run.maker = run.start([*me, "--references", run.folder, "--device", run.device], run.references)
    if run.has_torch and wants("speed"):
        warm_compiler(run)
    for dtype in DTYPES if run.device.startswith("cuda") else ("f32",):
        run.step(f"parity {dtype}", 75, parity, run, dtype, TESTS, 45)
    run.step("commands", 90, commands, run)
    run.step("training losses", 90, parity, run, "f32", TRAINING_TESTS, 75)
    # transformers handles the trained model last, and it is small.
    for name in [*run.scale.presets, TRAINED]:
        run.step(f"texts {name}", 75, texts, run, name)
    if wants("speed") and run.background:
        # Anything still compiling would disturb the measurements.
        waited = time.monotonic() + (60 if wants("texts") else 200)
        while time.monotonic() < min(waited, run.end) and any(process.poll() is None for process in run.background):
            time.sleep(0.2)
    run.stop_background()
    for dtype in run.scale.compute_dtypes:
        run.step(f"training {dtype}", 60 if run.device.startswith("cuda") else 180, training, run, dtype)
    # Measures ours and eager first; compiled gets the remaining time.
    dtypes = ["--dtype", ",".join(run.scale.dtypes)]
    run.step("speed gpt2", max(30, run.end - time.monotonic() - 45), speed, run, "gpt2", ["--engine-limit", "75", *dtypes])
    largest = ["--engine-limit", "30", "--engines", "ours,eager", "--dtype", "bf16" if len(run.scale.dtypes) > 1 else "f32"]
    run.step("speed gpt2-xl", 60, speed, run, "gpt2-xl", largest)


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
