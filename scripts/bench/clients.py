"""Servers and clients for `serving`: `gpt2 serve`, `llama-server` and measuring connections.

Uses only the standard library.
"""

import collections
import dataclasses
import http.client
import itertools
import json
import os
import pathlib
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time

NEW_TOKENS = 64


@dataclasses.dataclass
class Answer:
    status: int
    sent: float
    done: float
    # Arrival times of the events that carry text.
    events: list
    tokens: int = 0
    retry_after: str = ""
    error: str = ""

    @property
    def gaps(self):
        return [after - before for before, after in itertools.pairwise(self.events)]


class Client:
    """A persistent connection."""

    def __init__(self, address):
        self.connection = http.client.HTTPConnection(*address, timeout=600)

    def get(self, path):
        self.connection.request("GET", path)
        response = self.connection.getresponse()
        return response.status, response.read()

    def post(self, path, **body):
        self.connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        return response.status, json.loads(response.read())

    def complete(self, on_event=lambda: None, **body):
        sent = time.perf_counter()
        try:
            response = self._post(body)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            # llama-server closes connections after streaming, and any server may close an idle one.
            self.connection.close()
            response = self._post(body)
        answer = Answer(response.status, sent, 0.0, [], retry_after=response.getheader("Retry-After") or "")
        if body.get("stream") and answer.status == 200:
            self._stream(response, answer, on_event)
        else:
            content = json.loads(response.read())
            answer.error = content.get("error", {}).get("message", "")
            answer.tokens = content.get("usage", {}).get("completion_tokens", 0)
        answer.done = time.perf_counter()
        return answer

    def disconnect(self, **body):
        """Sends a request and closes the connection as soon as the response begins."""
        self.connection.close()
        self.connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        self.connection.sock.recv(200)
        self.connection.close()

    def _post(self, body):
        self.connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return self.connection.getresponse()

    @staticmethod
    def _stream(response, answer, on_event):
        rest = b""
        # A call returns the data received so far, at most one chunk of the transfer encoding.
        while piece := response.read1(1 << 16):
            now = time.perf_counter()
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data: ")
                if not event.startswith(b"data: ") or data == b"[DONE]":
                    continue
                content = json.loads(data)
                if any(choice["text"] for choice in content.get("choices", ())):
                    answer.events.append(now)
                    on_event()
                if usage := content.get("usage"):
                    answer.tokens = usage["completion_tokens"]
                answer.error = content.get("error", {}).get("message", "") or answer.error


class Server:
    """A server process listening at `address`."""

    def __init__(self, command, environment, name):
        self.name = name
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.stdout.close()

    def fail(self, what):
        self.process.kill()
        self.log.seek(0)
        sys.exit(f"{self.name}: {what}; {self.log.read().decode(errors='replace')[-2000:]}")

    def await_health(self):
        for _ in range(1200):
            if self.process.poll() is not None:
                self.fail(f"exited with code {self.process.returncode}")
            try:
                if Client(self.address).get("/health")[0] == 200:
                    break
            except OSError:
                pass
            time.sleep(0.1)
        else:
            self.fail("was not healthy within two minutes")
        model = json.loads(Client(self.address).get("/v1/models")[1])["data"][0]
        meta = model.get("meta", {})
        self.model, self.vocabulary, self.context = model["id"], meta.get("n_vocab", 50257), meta.get("n_ctx_train", 1024)
        self.letter = Client(self.address).post("/tokenize", content="a", prompt="a")[1]["tokens"][-1]

    def memory(self):
        """Returns the resident bytes, threads and open files of the process."""
        folder = pathlib.Path("/proc", str(self.process.pid))
        fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        return int(fields["VmRSS"].split()[0]) * 1024, int(fields["Threads"]), len(os.listdir(folder / "fd"))


def start_ours(arguments, *options):
    command = [arguments.program, "serve", "--model", arguments.model, "--dtype", arguments.dtype, "--port", "0"]
    command += ["--parallel", str(arguments.parallel), *options, *shlex.split(arguments.options)]
    environment = os.environ | ({"GPT2_INSTRUCTION_SET": arguments.isa} if arguments.isa else {})
    server = Server(command, environment, "ours")
    line = server.process.stdout.readline().strip()
    if not line.startswith("http://"):
        server.fail(f"expected the server's address in the first line, found {line!r}")
    host, port = line.removeprefix("http://").rsplit(":", 1)
    server.address = (host, int(port))
    # Drains the remaining output, so that the pipe never fills.
    threading.Thread(target=collections.deque, args=(server.process.stdout, 0), daemon=True).start()
    server.await_health()
    return server


def start_llama_server(arguments):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    threads = os.cpu_count()
    command = [arguments.llama_server, "-m", arguments.gguf, "-np", str(arguments.parallel), "-c", str(1024 * arguments.parallel),
               "-t", str(threads), "--host", address[0], "--port", str(address[1]), "--no-webui", "--log-disable"]
    server = Server(command, os.environ, "llama-server")
    threading.Thread(target=collections.deque, args=(server.process.stdout, 0), daemon=True).start()
    server.address = address
    server.await_health()
    return server


request_numbers = itertools.count(1)


def request(server, tokens, new_tokens=NEW_TOKENS, **extra):
    """Returns a request with `tokens` tokens and a unique beginning, so that no prefix is reused."""
    number = next(request_numbers)
    # The last ids of a vocabulary may be special tokens.
    ids = [1 + (number * 7919 + index * (37 + number)) % (server.vocabulary - 300) for index in range(tokens)]
    return {"model": server.model, "prompt": ids, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, "cache_prompt": False, "logit_bias": {str(server.letter): 100}} | extra


def run_concurrently(count, work):
    """Runs `work(number)` in `count` threads that start together; returns all results."""
    gate, results, failures = threading.Barrier(count), [None] * count, []

    def run(number):
        try:
            gate.wait()
            results[number] = work(number)
        except Exception as failure:  # noqa: BLE001 - reported below, in the calling thread
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def quantile(values, fraction):
    values = sorted(values)
    return values[min(int(fraction * len(values)), len(values) - 1)] if values else float("nan")


def milliseconds(values):
    named = {name: quantile(values, fraction) for name, fraction in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("worst", 1.0))}
    return {name: round(value * 1e3, 2) for name, value in named.items()}
