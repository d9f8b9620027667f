"""A server under mixed load: responses equal those of single requests, and memory and latency do not grow.

Starts a server with the built-in model. --clients threads send completions (streamed and not), chats,
grammars, analyses, tokenization and embedding requests for --seconds.
"""

import json
import math
import pathlib
import random
import statistics
import threading
import time
import urllib.parse
from http.client import HTTPConnection, RemoteDisconnected

from bench.clients import run_concurrently

# Number of time slices. Only the best slice in each half counts, which hides other load but not growth.
PARTS = 12
# Limits for the growth from the first half to the second: peak memory, and median latency of each request
# kind.
MEMORY_GROWTH, LATENCY_GROWTH = 0.10, 1.5
# Allowance for the blocks that allocators keep for each thread.
MEMORY_SLACK = 16 << 20
# Minimum number of requests of a kind in a slice for a meaningful median.
FEW = 5
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def requests():
    """Returns seeded requests, each a path and a body, keyed by kind."""
    kinds = {}
    for number in range(6):
        prompt = f"One day {number} Mia"
        seeded = {"prompt": prompt, "max_tokens": 12, "seed": number, "ignore_eos": True}
        message = {"messages": [{"role": "user", "content": f"Hello {number}!"}], "max_tokens": 8, "seed": number}
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
        for kind, path, body in [
            ("whole", "/v1/completions", seeded),
            ("stream", "/v1/completions", seeded | {"stream": True, "n": 2}),
            ("logprobs", "/v1/completions", seeded | {"echo": True, "logprobs": 5, "prompt": prompt * 8}),
            ("batch", "/v1/completions", seeded | {"prompt": [prompt, prompt * 3, "O"]}),
            ("grammar", "/v1/completions", seeded | {"guided_json": schema, "max_tokens": 24}),
            ("chat", "/v1/chat/completions", message),
            ("chat stream", "/v1/chat/completions", message | {"stream": True}),
            ("tokenize", "/tokenize", {"prompt": prompt * 200}),
            ("embeddings", "/v1/embeddings", {"input": prompt}),
            ("look", "/look/lens" if number % 2 else "/look/attention", {"prompt": prompt}),
            ("wrong", "/v1/completions", seeded | {"prompt": [10**9]}),
        ]:
            kinds.setdefault(kind, []).append((path, body))
    return kinds


def plain(value):
    """Returns a response without its id and creation time."""
    value.pop("id", None)
    value.pop("created", None)
    return value


class Client:
    """A persistent connection."""

    def __init__(self, address):
        url = urllib.parse.urlsplit(address)
        self.connection = HTTPConnection(url.hostname, url.port, timeout=300)

    def request(self, path, body):
        """Returns the status and the body; retries if the server is overloaded."""
        while True:
            response, text = self.send("POST", path, json.dumps(body))
            if response.status in (429, 503):
                time.sleep(float(response.headers["Retry-After"]) * random.random())
                continue
            if not body.get("stream"):
                return response.status, plain(json.loads(text))
            events = text.split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""], text[-300:]
            if '"type":"unavailable_error"' in text:
                # The request timed out in the queue after the response head was sent.
                continue
            chunks = [plain(json.loads(event.removeprefix("data: "))) for event in events[:-2] if not event.startswith(":")]
            return response.status, sorted(chunks, key=lambda chunk: chunk["choices"][0]["index"] if "choices" in chunk else -1)

    def send(self, method, path, body=None):
        for is_last in (False, True):
            try:
                self.connection.request(method, path, body, {"Content-Type": "application/json"})
                response = self.connection.getresponse()
                return response, response.read().decode()
            except (RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                # A server may close an idle connection.
                if is_last:
                    raise
                self.connection.close()


def resident(process):
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


def test_mixed_load(program, option, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    kinds = requests()
    with program.serving("--chat-template", template) as address:
        alone = Client(address)
        expected = {kind: [alone.request(path, body) for path, body in bodies] for kind, bodies in kinds.items()}
        for kind, answers in expected.items():
            assert all(status == (400 if kind == "wrong" else 200) for status, _ in answers), (kind, answers)
        seconds, begun = option("seconds"), time.monotonic()
        latencies = [{kind: [] for kind in kinds} for _ in range(PARTS)]
        memory, is_over, failures = [[] for _ in range(PARTS)], threading.Event(), []

        def part():
            return min(PARTS - 1, int(PARTS * (time.monotonic() - begun) / seconds))

        def watch():
            prober = Client(address)
            while not is_over.wait(0.5):
                start = time.monotonic()
                response, _ = prober.send("GET", "/health")
                if response.status != 200 or time.monotonic() - start > 1:
                    failures.append(f"/health: {response.status} after {time.monotonic() - start:.2f} s")
                memory[part()].append(resident(program.server))

        def load(number):
            client, chance = Client(address), random.Random(number)
            while time.monotonic() < begun + seconds and not failures:
                kind = chance.choice(list(kinds))
                index = chance.randrange(len(kinds[kind]))
                path, body = kinds[kind][index]
                start, times = time.monotonic(), latencies[part()][kind]
                answer = client.request(path, body)
                times.append(time.monotonic() - start)
                if answer != expected[kind][index]:
                    failures.append(f"{kind}: {body}\nexpected {expected[kind][index]}\nfound    {answer}")

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            run_concurrently(option("clients"), load)
        finally:
            is_over.set()
            watcher.join()
    assert not failures, failures[0][:4000]
    peaks = [max(part, default=0) for part in memory]
    total = sum(len(times) for part in latencies for times in part.values())
    print(f"\n{total} answers in {seconds:.0f} s; resident memory by part in MB: {[peak >> 20 for peak in peaks]}")
    half, grown = PARTS // 2, []
    for kind in kinds:
        medians = [statistics.median(part[kind]) if len(part[kind]) >= FEW else math.inf for part in latencies]
        first, second = min(medians[:half]), min(medians[half:])
        print(f"{kind:12} median latency in ms: {first * 1e3:.0f}, then {second * 1e3:.0f}")
        grown += [kind] if first < math.inf and second > LATENCY_GROWTH * first else []
    # The first slice is a warm-up.
    assert max(peaks[half:]) <= max(peaks[1:half]) * (1 + MEMORY_GROWTH) + MEMORY_SLACK, peaks
    assert not grown, grown
