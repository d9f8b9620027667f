"""Speed in a browser compared with transformers.js, wllama and our own program: GPT-2 124M, 1 thread.

usage: python -m bench web [--peers DIR] [--dist web/dist] [--program target/release/gpt2] [--rounds 3] [--only f32,f16,q8,q4]
         [--engines ours,transformers,wllama,program] [--prefill 128] [--decode 128] [--markdown]
       python -m bench web --first-word [--dist web/dist] [--rounds 5]      from opening the page to its first words

scripts/bench/peers_web.sh extends the folder that peers.sh creates; `scripts/build_web.sh` creates web/dist.
transformers.js runs onnxruntime-web, wllama runs llama.cpp. Runs are interleaved on one machine.

Each measurement starts a headless Chromium, opens a page from a local server (cross-origin isolated, as
threads would require), and runs the engine in a worker: a warm-up, then a greedy completion of the prompt.
The program runs the same prompt with `--threads 1`. Prints medians over the rounds: prefill and decode speed
in tokens per second, seconds until the model is ready with local files, peak memory of the tab's process, and
download size of code (gzip) and model. Compares the texts that the engines generate from the same f32
weights. Skips precisions for which an engine has no file. Uses only the standard library; needs chromium and
chromedriver.
"""

import functools
import gzip
import http.server
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request

from bench import common

HERE = pathlib.Path(__file__).resolve().parent
ENGINES = {
    "ours": ("f32", "f16", "q8", "q4"),
    "transformers": ("f32", "q8"),
    "wllama": ("f32", "f16", "q8", "q4"),
    "program": ("f32", "f16", "q8", "q4"),
}
NAMES = {"ours": "ours", "transformers": "transformers.js", "wllama": "wllama", "program": "the program"}
ROWS = ("prefill", "decode")
MODEL_FILES = (".safetensors", ".gguf", ".onnx")
TIMEOUT_S = 600
# The prompt repeats this letter, as in browser/worker.js.
LETTER = "k"


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves several folders by the first part of the path, and records the requested files."""

    protocol_version = "HTTP/1.1"
    extensions_map = http.server.SimpleHTTPRequestHandler.extensions_map | {".wasm": "application/wasm", ".mjs": "text/javascript"}

    def translate_path(self, path):
        first, _, rest = urllib.parse.unquote(urllib.parse.urlparse(path).path).lstrip("/").partition("/")
        folder = self.server.folders.get(first)
        file = pathlib.Path(folder, rest) if folder else HERE / "browser" / first
        self.server.requested.add(file)
        return str(file)

    def end_headers(self):
        for name in ("Cross-Origin-Opener-Policy: same-origin", "Cross-Origin-Embedder-Policy: require-corp", "Cache-Control: no-store"):
            self.send_header(*name.split(": "))
        super().end_headers()

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folders):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folders, self.requested = folders, set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Chromium:
    """A headless browser with one tab, controlled through chromedriver."""

    def __init__(self, *arguments):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for line in self.driver.stdout:
            if "successfully on port" in line:
                self.address = f"http://127.0.0.1:{line.split()[-1].rstrip('.')}"
                break
        threading.Thread(target=self.driver.stdout.read, daemon=True).start()
        switches = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={self.profile.name}"]
        options = {"goog:chromeOptions": {"args": switches + list(arguments)}, "pageLoadStrategy": "none"}
        self.session = ""
        self.session = "/session/" + self.post("/session", capabilities={"alwaysMatch": options})["sessionId"]

    def post(self, path, **body):
        request = urllib.request.Request(
            self.address + self.session + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return json.load(reply)["value"]

    def script(self, script):
        return self.post("/execute/sync", script=script, args=[])

    def wait_for(self, script):
        deadline = time.monotonic() + TIMEOUT_S
        while (value := self.script(script)) is None:
            if time.monotonic() > deadline:
                sys.exit(f"timed out waiting for: {script}")
            time.sleep(0.1)
        return value

    def peak_memory(self):
        """Returns the peak resident memory of a renderer process so far, in bytes."""
        parents, peaks = {}, {}
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            parents[int(folder.name)] = int(status["PPid"])
            if b"--type=renderer" in command:
                peaks[int(folder.name)] = int(status["VmHWM"].split()[0]) * 1024

        def is_ours(process):
            while process in parents:
                if process == self.driver.pid:
                    return True
                process = parents[process]
            return False

        return max(peak for process, peak in peaks.items() if is_ours(process))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        urllib.request.urlopen(urllib.request.Request(self.address + self.session, method="DELETE"), timeout=TIMEOUT_S).close()
        self.driver.terminate()
        self.driver.wait()
        self.profile.cleanup()


@functools.cache
def gzip_size(file):
    return len(gzip.compress(file.read_bytes()))


def measure_in_browser(engine, dtype, server, arguments):
    server.requested.clear()
    with Chromium() as browser:
        browser.post("/url", url=f"{server.url}/page.html?engine={engine}&dtype={dtype}&prefill={arguments.prefill}&decode={arguments.decode}")
        result = browser.wait_for("return document.title === 'done' ? window.result : null;")
        if "error" in result:
            sys.exit(f"{engine} {dtype}: {result['error']}")
        result["memory"] = browser.peak_memory()
    # The page itself and the checkpoint's small files are the same for all engines.
    files = [file for file in server.requested if file.is_file() and HERE not in file.parents]
    result["model"] = sum(file.stat().st_size for file in files if file.suffix in MODEL_FILES)
    result["code"] = sum(gzip_size(file) for file in files if file.suffix in (".js", ".mjs", ".wasm"))
    return result


def measure_program(dtype, checkpoint, arguments):
    def report(new_tokens):
        numbers = ["--max-new-tokens", str(new_tokens), "--min-new-tokens", str(new_tokens), "--threads", "1"]
        prompt = f" {LETTER}" * (arguments.prefill // 2)
        command = [arguments.program, "generate", prompt, "--model", checkpoint, "--dtype", dtype, *numbers, "--greedy", "--json"]
        run = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if run.returncode:
            sys.exit(run.stderr[-2000:])
        return json.loads(run.stdout)

    measured = report(arguments.decode + 1)
    first = measured["time_to_first_token_s"]
    seconds = (arguments.decode + 1) / measured["tokens_per_s"] - first
    return {"prefill": arguments.prefill / first, "decode": arguments.decode / seconds, "text": measured["text"]}


def compare(arguments):
    peers = arguments.peers.resolve()
    checkpoint = peers / "gpt2-124m"
    server = Server({"ours": pathlib.Path(arguments.dist, "npm").resolve(), "peers": peers / "web", "checkpoint": checkpoint})
    samples = {}
    for round in range(arguments.rounds):
        for dtype in arguments.only.split(","):
            for engine in arguments.engines.split(","):
                if dtype not in ENGINES[engine]:
                    continue
                if engine == "program":
                    sample = measure_program(dtype, checkpoint, arguments)
                else:
                    sample = measure_in_browser(engine, dtype, server, arguments)
                samples.setdefault((dtype, engine), []).append(sample)
                fields = {name: round_off(value) for name, value in sample.items() if name != "text"}
                print(json.dumps({"round": round + 1, "dtype": dtype, "engine": engine, **fields}), file=sys.stderr, flush=True)
    check_texts(samples)
    medians = {
        cell: {name: statistics.median(sample[name] for sample in rows) for name in rows[0] if name != "text"}
        for cell, rows in samples.items()
    }
    (print_markdown if arguments.markdown else print_lines)(medians)


def round_off(value):
    return round(value, 2) if isinstance(value, float) else value


def check_texts(samples):
    """Compares the texts of all engines in f32; with quantized weights, each engine rounds differently."""
    texts = {engine: {sample["text"] for sample in rows} for (dtype, engine), rows in samples.items() if dtype == "f32"}
    if len(set.union(set(), *texts.values())) > 1:
        shown = {engine: [text[:60] for text in found] for engine, found in texts.items()}
        print(f"the f32 texts differ: {json.dumps(shown)}", file=sys.stderr)


def ratios(medians, dtype, row):
    ours = medians.get((dtype, "ours"), {}).get(row)
    others = {engine: cell[row] for (of, engine), cell in medians.items() if of == dtype and engine != "ours"}
    return ours, {engine: (ours / speed if ours else None) for engine, speed in others.items()}


def print_lines(medians):
    for (dtype, engine), cell in medians.items():
        over = {row: round_off(ratios(medians, dtype, row)[1].get(engine)) for row in ROWS if engine != "ours"}
        fields = {name: round_off(value) for name, value in cell.items()}
        print(json.dumps({"dtype": dtype, "engine": engine, **fields, "ours over it": over}))


def print_markdown(medians):
    dtypes = list(dict.fromkeys(dtype for dtype, _ in medians))
    others = [engine for engine in ENGINES if engine != "ours" and any(of == engine for _, of in medians)]
    print("| | | ours | " + " | ".join(f"/ {NAMES[engine]}" for engine in others) + " |\n|" + "---|" * (3 + len(others)))
    for dtype in dtypes:
        for row in ROWS:
            ours, over = ratios(medians, dtype, row)
            cells = [f"{over[engine]:.2f}" if over.get(engine) else "" for engine in others]
            print(f"| {dtype} | {row} | {ours:.1f} | " + " | ".join(cells) + " |")
    print("\n| | | ready after | memory of the tab | code, gzip | model |\n|---|---|---|---|---|---|")
    for (dtype, engine), cell in medians.items():
        if engine != "program":
            sizes = [f"{cell[name] / 1e6:,.{digits}f} MB" for name, digits in (("memory", 0), ("code", 2), ("model", 0))]
            print(f"| {dtype} | {NAMES[engine]} | {cell['load']:.1f} s | " + " | ".join(sizes) + " |")


def first_word(arguments):
    """Prints the size of the page, and the seconds from opening it to its first text."""
    page = pathlib.Path(arguments.dist, "gpt2.html").resolve()
    watch = """new MutationObserver(() => {
        const text = document.querySelector('[data-testid=text]')?.textContent;
        if (text && window.firstWord === undefined) window.firstWord = performance.now() / 1000;
    }).observe(document, { subtree: true, childList: true, characterData: true });"""
    seconds = []
    for _ in range(arguments.rounds):
        with Chromium("--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9", "--proxy-bypass-list=<-loopback>") as browser:
            browser.post("/goog/cdp/execute", cmd="Page.addScriptToEvaluateOnNewDocument", params={"source": watch})
            browser.post("/url", url=page.as_uri())
            seconds.append(browser.wait_for("return window.firstWord ?? null;"))
    print(json.dumps({"bytes": page.stat().st_size, "first word after, s": [round(second, 2) for second in seconds]}))


def main():
    parser = common.parser(__doc__, "rounds", "peers", "program", "markdown")
    parser.add_argument("--dist", default="web/dist")
    parser.add_argument("--only", default="f32,f16,q8,q4")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--prefill", type=int, default=128)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--first-word", action="store_true")
    arguments = parser.parse_args()
    os.chdir(common.ROOT)
    (first_word if arguments.first_word else compare)(arguments)
