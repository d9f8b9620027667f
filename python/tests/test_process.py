"""Process-level behavior of models: threads, forks, pickles, Ctrl-C and memory."""

import concurrent.futures
import json
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time

import candle_gpt2
import pytest

from support import FIXTURES

PROMPT = "ROMEO:\nWhat light"


def test_repr_describes_the_model_in_one_line(model):
    text = repr(model)
    assert text.startswith('Model("built-in", 6708480 parameters, q8 weights in 7.') and "\n" not in text
    assert f"{candle_gpt2.thread_count()} threads" in text
    assert model.config["n_embd"] == 256 and model.device == "cpu"


def test_public_api_has_docstrings():
    for name in ("from_pretrained", "generate", "stream", "score", "logits", "run_with_cache", "logit_lens"):
        assert len(getattr(candle_gpt2.Model, name).__doc__) > 60, name
    for name in candle_gpt2.__all__:
        assert name == "__version__" or getattr(candle_gpt2, name).__doc__, name


# Pickles.


def test_model_pickles_its_arguments_without_weights(tmp_path):
    model = candle_gpt2.Model.from_pretrained(dtype="q8", kv_dtype="f16", offline=True)
    data = pickle.dumps(model)
    assert len(data) < 500, "no weights"
    again = pickle.loads(data)
    assert (repr(again), again.generate(PROMPT, seed=1)) == (repr(model), model.generate(PROMPT, seed=1))


def test_streams_caches_and_pictures_are_not_picklable(model):
    for one, advice in [
        (model.stream(PROMPT), "pickle the model, the prompt and the options"),
        (model.stream_batch([PROMPT]), "pickle the model, the prompt and the options"),
        (model.cache(), "the cache's `ids`"),
        (model.logit_lens(PROMPT), "to_dict"),
    ]:
        with pytest.raises(TypeError, match=advice):
            pickle.dumps(one)


def test_relative_model_path_survives_a_directory_change(tmp_path, monkeypatch):
    shutil.copytree(FIXTURES / "tiny-checkpoint", tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    model = candle_gpt2.Model.from_pretrained("mine", tokenizer="mine")
    data = pickle.dumps(model)
    monkeypatch.chdir("/")
    assert pickle.loads(data).config == model.config and model.verify()["sound"]
    assert model.name == "mine" and repr(model).startswith('Model("mine"')


def test_errors_are_picklable():
    error = pickle.loads(pickle.dumps(candle_gpt2.Gpt2Error("what is wrong")))
    assert type(error) is candle_gpt2.Gpt2Error and str(error) == "what is wrong"


def generate_short(model, prompt):
    return model.generate(prompt, seed=1, max_new_tokens=8)


def test_spawned_process_receives_a_model(model):
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(_generate_in_child, model, PROMPT).result() == generate_short(model, PROMPT)


def _generate_in_child(model, prompt):
    return generate_short(model, prompt)


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")  # Python warns about forks in processes with threads
import candle_gpt2
def child(work):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            answer = repr(work())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        print(pipe.read())
    os.wait()
def fresh():
    return candle_gpt2.Model.from_pretrained().generate("One day", seed=1, max_new_tokens=5)
child(fresh)
model = candle_gpt2.Model.from_pretrained()
stream = model.stream("One day", seed=1)
next(stream)
print(repr(model.generate("One day", seed=1, max_new_tokens=5)))
child(lambda: model.generate("One day"))
child(lambda: next(stream))
child(fresh)
child(lambda: model.run_with_cache("One day", "embed"))
child(lambda: model.encode("One day"))
print("".join(stream) != "")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_fork_works_only_before_a_model_is_opened(python):
    done = python(FORK)
    assert done.returncode == 0, done.stderr
    in_child, in_parent, *after, encoded, streamed = done.stdout.splitlines()
    assert in_child == in_parent
    assert len(after) == 4
    for line in after:
        assert line.startswith("Gpt2Error: this process was forked from process"), line
        assert "`spawn` or `forkserver`" in line
    assert encoded == str(candle_gpt2.Model.from_pretrained().encode("One day")) and streamed == "True"


# Threads.


@pytest.mark.parametrize(
    ("value", "threads"), [("1", 1), ("3", 3), ("2,4", 2), ("", None), ("0", None), ("many", None)]
)
def test_omp_num_threads_sets_the_thread_count(python, value, threads):
    script = "import candle_gpt2; m = candle_gpt2.Model.from_pretrained(); m.logits('a'); print(candle_gpt2.thread_count(), m)"
    environment = {"OMP_NUM_THREADS": value}
    words = python(script, **environment).stdout.split()
    expected = threads or len(os.sched_getaffinity(0))
    assert (words[0], words[-2:]) == (str(expected), [str(expected), "threads)"])


def test_set_threads_must_precede_the_first_model(python):
    script = """
import candle_gpt2
candle_gpt2.set_threads(3)
candle_gpt2.set_threads(2)
for wrong in (0, 5000):
    try: candle_gpt2.set_threads(wrong)
    except ValueError as error: print(error)
candle_gpt2.Model.from_pretrained()
try: candle_gpt2.set_threads(3)
except candle_gpt2.Gpt2Error as error: print(error)
print(candle_gpt2.thread_count())
"""
    assert python(script, OMP_NUM_THREADS="7").stdout.splitlines() == [
        "threads: expected 1 to 1024, found 0",
        "threads: expected 1 to 1024, found 5000",
        "2 compute threads are already running; call set_threads before opening the first model",
        "2",
    ]


ENVIRONMENT = """
import ctypes, json, os, sys

def c_environment():
    names = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found = []
    while (entry := names[len(found)]) is not None:
        found.append(entry.decode())
    return sorted(found)

before = dict(os.environ), c_environment()
import candle_gpt2
imported = dict(os.environ), c_environment()
candle_gpt2.set_threads(int(sys.argv[1]))
model = candle_gpt2.Model.from_pretrained()
model.logits([1] * 200, last_only=False)
used = dict(os.environ), c_environment()
pools = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
print(json.dumps([imported == before, used == before, sum(name.startswith("candle-bp-") for name in pools)]))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="this system does not list a process's threads")
@pytest.mark.parametrize("set_already", [{}, {"CANDLE_NUM_THREADS": "7", "CANDLE_BARRIER_POOL_SPIN_LIMIT": "5"}])
def test_process_environment_is_not_modified(set_already):
    command = [sys.executable, "-c", ENVIRONMENT, "3"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("CANDLE_", "RAYON_"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**clean, **set_already})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, True, 2], "candle's pool has two threads besides the caller"


def test_completions_do_not_depend_on_the_thread_count(python, model):
    script = f"import candle_gpt2; print(repr(candle_gpt2.Model.from_pretrained().generate({PROMPT!r}, seed=1)))"
    texts = {python(script, OMP_NUM_THREADS=str(threads)).stdout.strip() for threads in (1, 2, 3)}
    assert texts == {repr(model.generate(PROMPT, seed=1))}


def test_threads_share_a_model(model):
    expected = [model.generate(PROMPT, seed=seed, max_new_tokens=30) for seed in range(8)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda seed: model.generate(PROMPT, seed=seed, max_new_tokens=30), range(8))
        assert list(results) == expected


def test_callbacks_may_use_the_model_from_any_thread(model):
    """Runs a hook and a logits processor that use the model on their own thread and on another one.

    Also works on a GPU.
    """
    expected = model.generate(PROMPT, seed=1, max_new_tokens=3)

    def on_both(*_):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            elsewhere = pool.submit(model.generate, PROMPT, seed=1, max_new_tokens=3)
            results.append((model.generate(PROMPT, seed=1, max_new_tokens=3), elsewhere.result(timeout=60)))

    results = []
    model.run_with_cache(PROMPT, "embed", hooks=[("blocks.1.hook_resid_post", on_both)])
    model.generate(PROMPT, seed=2, max_new_tokens=2, logits_processor=on_both)
    assert results == [(expected, expected)] * 3


def test_threads_share_a_stream(model):
    expected = sorted(model.stream(PROMPT, seed=1, max_new_tokens=60))
    stream = model.stream(PROMPT, seed=1, max_new_tokens=60)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda _: list(stream), range(4)))
    assert sorted(piece for part in parts for piece in part) == expected


def test_other_threads_run_during_generation(model):
    counted = 0
    is_done = threading.Event()

    def count():
        nonlocal counted
        while not is_done.wait(0.001):
            counted += 1

    thread = threading.Thread(target=count)
    thread.start()
    start = time.monotonic()
    model.generate([PROMPT] * 8, seed=list(range(8)), max_new_tokens=200)
    elapsed = time.monotonic() - start
    is_done.set()
    thread.join()
    assert counted > elapsed * 20, (counted, elapsed)


# Ctrl-C.

INTERRUPTED = """
import sys, time, candle_gpt2
model = candle_gpt2.Model.from_pretrained()
model.generate("a", max_new_tokens=1)
print("ready", flush=True)
try:
    {work}
    print("finished")
except KeyboardInterrupt as error:
    print("interrupted", repr(getattr(error, "partial", None)))
print(len(model.generate("a", seed=1, max_new_tokens=3)) > 0)
"""
WORKS = {
    "generate": 'model.generate("One day", max_new_tokens=10**8, slide=True, eos_token_id=180)',
    "batch": 'model.generate(["One day"] * 50, max_new_tokens=10**8, slide=True, eos_token_id=180)',
    "seeds": 'model.generate(["One day"] * 4, seed=[1, 2, 3, 4], max_new_tokens=10**8, slide=True, eos_token_id=180)',
    "beams": 'model.generate(["One day"] * 10**4, num_beams=8, max_new_tokens=200)',
    "contrastive": 'model.generate(["One day"] * 10**4, penalty_alpha=0.6, top_k=4, max_new_tokens=200)',
    "invalid prompt": 'model.generate([[5000], "One day"], return_exceptions=True, max_new_tokens=10**8, slide=True, eos_token_id=180)',
    "tokens": 'model.generate(["To be, or not to be. " * 200] * 100000, keep_last=10, max_new_tokens=1)',
    "stream": 'sum(len(piece) for piece in model.stream("One day", max_new_tokens=10**8, slide=True, eos_token_id=180))',
    "scores": 'model.score(["ROMEO: I am here"] * 10**6)',
    "complete": 'model.complete(["One day"] * 2000, max_tokens=200)',
}
# The documented limit is 0.1 s; the rest allows for busy machines. Uninterrupted calls take far longer.
MAX_SECONDS = 3


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_interrupt_stops_every_call(work):
    command = [sys.executable, "-c", INTERRUPTED.format(work=work)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        printed = process.stdout.readline()
        elapsed = time.monotonic() - start
        rest = process.stdout.read()
    assert printed.startswith("interrupted"), printed
    assert elapsed < MAX_SECONDS
    assert rest == "True\n"


def test_interrupt_keeps_the_partial_completion():
    work = 'model.generate("One day", max_new_tokens=10**8, slide=True, eos_token_id=180, details=True)'
    command = [sys.executable, "-c", INTERRUPTED.format(work=work)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        printed = process.stdout.readline()
    assert "'stop_reason': 'interrupted'" in printed and "'ids': [" in printed


ONE_PASS = """
import signal, sys, threading, time, candle_gpt2
model = candle_gpt2.Model.from_pretrained({folder!r}, tokenizer={tokenizer!r})
ids = [1] * 1000
cache = model.cache()
model.logits(ids[:3], cache=cache)
before = time.monotonic()
model.logits(ids)
whole = time.monotonic() - before
late = 0
for work in (
    lambda: model.logits(ids),
    lambda: model.logits(ids, last_only=False, cache=cache),
    lambda: model.score(ids),
    lambda: model.score_continuations("a" * 900, ["b"]),
    lambda: model.generate(ids, max_new_tokens=2),
    lambda: list(model.stream(ids, max_new_tokens=2)),
    lambda: model.generate(ids, max_new_tokens=2, num_beams=2),
    lambda: model.run_with_cache(ids, "blocks.0.hook_resid_pre"),
    lambda: model.complete([ids], max_tokens=2),
):
    sent = []
    timer = threading.Timer(whole / 4, lambda: (sent.append(time.monotonic()), signal.raise_signal(signal.SIGINT)))
    timer.start()
    try:
        work()
        print("finished")
    except KeyboardInterrupt:
        late = max(late, time.monotonic() - sent[0])
    timer.join()
print(whole, late, len(cache), model.logits(ids[:2], cache=cache).shape)
"""


def write_zero_checkpoint(folder, n_layer):
    """Creates a checkpoint as wide as the smallest GPT-2, with a sparse weights file."""
    width, rows, positions = 768, 400, 1024
    config = {"model_type": "gpt2", "n_embd": width, "n_head": 12, "n_positions": positions}
    (folder / "config.json").write_text(json.dumps({**config, "n_layer": n_layer, "vocab_size": rows}))
    shapes = {"wte.weight": [rows, width], "wpe.weight": [positions, width]}
    shapes |= {"ln_f.weight": [width], "ln_f.bias": [width]}
    layers = {
        **{f"{norm}.{part}": [width] for norm in ("ln_1", "ln_2") for part in ("weight", "bias")},
        **{"attn.c_attn.weight": [width, 3 * width], "attn.c_attn.bias": [3 * width]},
        **{"attn.c_proj.weight": [width, width], "attn.c_proj.bias": [width]},
        **{"mlp.c_fc.weight": [width, 4 * width], "mlp.c_fc.bias": [4 * width]},
        **{"mlp.c_proj.weight": [4 * width, width], "mlp.c_proj.bias": [width]},
    }
    shapes |= {f"h.{layer}.{name}": shape for layer in range(n_layer) for name, shape in layers.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.slow
def test_interrupt_stops_within_a_forward_pass(tmp_path, python):
    write_zero_checkpoint(tmp_path, n_layer=12)
    tokenizer = str(FIXTURES / "tiny-checkpoint")
    done = python(ONE_PASS.format(folder=str(tmp_path), tokenizer=tokenizer))
    words = done.stdout.split()
    assert words[2:] == ["3", "(400,)"], (done.stdout, done.stderr)
    whole, late = float(words[0]), float(words[1])
    assert late < max(MAX_SECONDS, whole / 4), (whole, late)


# Memory.


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="this system does not report the memory of a process")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hundreds_of_models_do_not_leak_memory():
    def open_and_use(times):
        for seed in range(times):
            model = candle_gpt2.Model.from_pretrained()
            model.generate("a", seed=seed, max_new_tokens=2)
            stream = model.stream("One day", seed=seed)
            next(stream)
            cache = model.cache(16)
            model.logits([1, 2], cache=cache.fork())

    open_and_use(50)
    before = resident_bytes()
    open_and_use(200)
    grown = resident_bytes() - before
    # The weights of one model take 8 MB.
    assert grown < 20e6, f"{grown / 1e6:.1f} MB more"


# Missing files and invalid options.


def test_missing_files_and_invalid_options_are_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        candle_gpt2.Model.from_pretrained(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="no model.safetensors"):
        candle_gpt2.Model.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="dtype: expected one of f32"):
        candle_gpt2.Model.from_pretrained(dtype="f64")
    with pytest.raises(ValueError, match="kv_dtype"):
        candle_gpt2.Model.from_pretrained(kv_dtype="q3")
    with pytest.raises(ValueError, match="device: expected auto"):
        candle_gpt2.Model.from_pretrained(device="tpu")
    with pytest.raises(ValueError, match="revision applies only to models on the Hub"):
        candle_gpt2.Model.from_pretrained(tmp_path, revision="main")
    with pytest.raises(ValueError, match="bf16"):
        candle_gpt2.Model.from_pretrained(dtype="bf16", device="cpu")


def test_offline_mode_requires_a_cached_model(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(candle_gpt2.Gpt2Error, match="gpt2@v7 is not in the cache, and network access is disabled"):
        candle_gpt2.Model.from_pretrained("gpt2", revision="v7", offline=True)


def test_invalid_config_file_is_reported(tmp_path):
    shutil.copy(FIXTURES / "tiny-checkpoint" / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(candle_gpt2.Gpt2Error, match="config.json: not valid JSON"):
        candle_gpt2.Model.from_pretrained(tmp_path)
