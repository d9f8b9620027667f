"""Load tests for `gpt2 serve` and llama.cpp's `llama-server`: closed-loop clients, engines interleaved.

usage: python -m bench serving --program target/release/gpt2 --model DIR [--dtype f16] [--isa avx2]
         [--llama-server PROGRAM --gguf FILE] [--clients 1,2,4,8,16,32] [--prompts 32,512] [--rounds N] [--json]
       python -m bench serving … --health          latency of GET /health during prefills of 1,000 tokens
       python -m bench serving … --gap             worst gap of a running completion during prefills of 1,000 tokens
       python -m bench serving … --overload        twice as many clients as the queue holds (ours only)
       python -m bench serving … --soak 100000     memory of the server process over this number of requests (ours only)
       python -m bench serving … --activations     plain requests to servers with and without --activations (ours only)

Every request of the first table is a streamed greedy completion of 64 tokens that ignores end of text, for a
prompt of token ids whose beginning is unique. A bias makes every token the letter a, because the checkpoint's
weights are random and a server holds back incomplete characters. TTFT is the time to the first event with
text; a gap is the time between two such events. --json prints a line for each cell. --health, --gap,
--overload and --soak exit with code 1 if a limit is exceeded. --activations loads two running servers
alternately and prints tokens per second of both and their ratio. Uses only the standard library; peers.sh
builds llama-server and creates the checkpoint (target/peers/gpt2-124m and its .gguf files).
"""

import collections
import itertools
import json
import math
import random
import statistics
import threading
import time

from bench.clients import NEW_TOKENS, Client, milliseconds, quantile, request, run_concurrently, start_llama_server, start_ours
from bench.common import parser

LONG_PROMPT = 1000
# Limits that `--health` and `--soak` enforce.
HEALTH_SECONDS, MEMORY_GROWTH = 0.010, 0.05


def measure(server, clients, tokens, requests, **extra):
    """Measures one cell: `clients` clients send `requests` requests each, one after another.

    `extra` contains further fields for the requests. A response that is not streamed has no TTFT and no gaps.
    """

    def loop(_):
        client = Client(server.address)
        return [client.complete(**request(server, tokens, **extra)) for _ in range(requests)]

    answers = list(itertools.chain.from_iterable(run_concurrently(clients, loop)))
    served = [answer for answer in answers if answer.status == 200]
    for answer in served:
        if answer.error or answer.tokens != NEW_TOKENS:
            server.fail(f"expected {NEW_TOKENS} new tokens, found {answer.tokens}; {answer.error}")
    seconds = max(answer.done for answer in answers) - min(answer.sent for answer in answers)
    gaps = [gap for answer in served for gap in answer.gaps]
    return {
        "tokens_per_s": round(sum(answer.tokens for answer in served) / seconds, 2),
        "ttft_ms": milliseconds([answer.events[0] - answer.sent for answer in served if answer.events]),
        "gap_ms": milliseconds(gaps),
        "events_per_token": round(sum(len(answer.events) for answer in served) / max(1, sum(answer.tokens for answer in served)), 3),
        "refusals": len(answers) - len(served),
    }


def median_cell(cells):
    """Merges the rounds: the maximum of `worst`, the sum of `refusals` and the median of all else."""

    def merge(name, values):
        if isinstance(values[0], dict):
            return {key: merge(key, [value[key] for value in values]) for key in values[0]}
        return {"worst": max, "refusals": sum}.get(name, statistics.median)(values)

    return merge("", cells)


def load(arguments, engines):
    cells = collections.defaultdict(lambda: collections.defaultdict(list))
    for _ in range(arguments.rounds):
        for name, start in engines.items():
            with start() as server:
                measure(server, 1, min(arguments.prompts), 1)
                for tokens, clients in itertools.product(arguments.prompts, arguments.clients):
                    cells[tokens, clients][name].append(measure(server, clients, tokens, arguments.requests))
    if not arguments.json:
        print(f"{arguments.dtype}, {arguments.requests} requests a client, {arguments.rounds} rounds; times in ms\n")
        columns = "prompt, clients, engine, tokens/s, TTFT p50, p90, p99, gap p50, p90, p99, worst, refused, ours / theirs".split(", ")
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for (tokens, clients), measured in cells.items():
        row = {name: median_cell(values) for name, values in measured.items()}
        ratio = row["ours"]["tokens_per_s"] / row["llama-server"]["tokens_per_s"] if len(row) == 2 else None
        if arguments.json:
            print(json.dumps({"dtype": arguments.dtype, "prompt": tokens, "clients": clients, "ratio": ratio} | row), flush=True)
            continue
        for name, cell in row.items():
            ttft, gap = cell["ttft_ms"], cell["gap_ms"]
            numbers = [cell["tokens_per_s"], ttft["p50"], ttft["p90"], ttft["p99"], gap["p50"], gap["p90"], gap["p99"], gap["worst"]]
            compared = f"**{ratio:.2f}**" if ratio and name == "ours" else ""
            shown = " | ".join(f"{number:.1f}" for number in numbers)
            print(f"| {tokens} | {clients} | {name} | {shown} | {cell['refusals']} | {compared} |", flush=True)


class Background:
    """Clients that send long prompts, one after another, until the `with` block ends."""

    def __init__(self, server, clients, tokens):
        self.server, self.clients, self.tokens, self.answers = server, clients, tokens, []

    def _loop(self):
        client = Client(self.server.address)
        while not self.over:
            self.answers.append(client.complete(**request(self.server, self.tokens, 1)))

    def __enter__(self):
        self.over = False
        self.threads = [threading.Thread(target=self._loop) for _ in range(self.clients)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.over = True
        for thread in self.threads:
            thread.join()


def long_prompt(server):
    return min(LONG_PROMPT, server.context - 8)


def health(arguments, engines):
    failed = False
    for name, start in engines.items():
        with start() as server, Background(server, 4, long_prompt(server)) as background:
            prober, seconds = Client(server.address), []
            end = time.perf_counter() + arguments.seconds
            while time.perf_counter() < end:
                sent = time.perf_counter()
                status, _ = prober.get("/health")
                seconds.append(time.perf_counter() - sent)
                assert status == 200, f"{name}: /health answered {status}"
                time.sleep(0.005)
        report = {"engine": name, "asked": len(seconds), "prompts": len(background.answers), "health_ms": milliseconds(seconds)}
        print(json.dumps(report), flush=True)
        failed |= name == "ours" and quantile(seconds, 0.99) >= HEALTH_SECONDS
    return failed


def gap(arguments, engines):
    failed = False
    for name, start in engines.items():
        with start() as server:
            client, tokens, chunk = Client(server.address), long_prompt(server), arguments.prefill_chunk
            new_tokens = min(2 * NEW_TOKENS, server.context - 8)

            def first(tokens, client=client, server=server):
                answers = [client.complete(**request(server, tokens, 1)) for _ in range(6)]
                return statistics.median(answer.events[0] - answer.sent for answer in answers[1:])

            # The last chunk of a prompt costs the most, because it attends to all earlier tokens.
            # On a busy machine the difference between the two times is unreliable.
            last_chunk = max(first(tokens) - first(tokens - chunk), first(tokens) / math.ceil(tokens / chunk))
            alone = client.complete(**request(server, 8, new_tokens)).gaps
            has_begun = threading.Event()
            running = []
            body = request(server, 8, new_tokens)
            reader = threading.Thread(target=lambda: running.append(Client(server.address).complete(has_begun.set, **body)))
            reader.start()
            has_begun.wait()
            with Background(server, 2, tokens) as background:
                reader.join()
        loaded, step = running[0].gaps, quantile(alone, 0.99)
        report = {"engine": name, "tokens": running[0].tokens, "prompts_meanwhile": len(background.answers),
                  "alone_ms": milliseconds(alone), "loaded_ms": milliseconds(loaded), "last_chunk_ms": round(last_chunk * 1e3, 2),
                  "worst_over_chunk_and_step": round(max(loaded) / (last_chunk + step), 2)}
        print(json.dumps(report), flush=True)
        # Allows 50% for noise from the machine.
        failed |= name == "ours" and max(loaded) > 1.5 * (last_chunk + step)
    return failed


def overload(arguments, _):
    failed = False
    with start_ours(arguments, "--queue", str(arguments.queue)) as server:
        before = server.memory()
        for wave in range(arguments.rounds):
            def one(_):
                return Client(server.address).complete(**request(server, 16, stream=False, stream_options=None))

            answers = run_concurrently(2 * arguments.queue + arguments.parallel, one)
            counts = collections.Counter(answer.status for answer in answers)
            refused = [answer for answer in answers if answer.status == 429]
            seconds = [answer.done - answer.sent for answer in refused]
            alive = Client(server.address).complete(**request(server, 16)).tokens == NEW_TOKENS
            report = {"wave": wave, "clients": len(answers), "queue": arguments.queue, "parallel": arguments.parallel,
                      "answers": dict(sorted(counts.items())), "refusal_ms": milliseconds(seconds), "alive": alive,
                      "retry_after": sorted({answer.retry_after for answer in refused})}
            print(json.dumps(report), flush=True)
            failed |= not alive or set(counts) != {200, 429} or counts[200] < arguments.queue
            failed |= not all(answer.retry_after.isdigit() for answer in refused)
        print(json.dumps({"before": before, "after": server.memory()}))
        failed |= server.process.poll() is not None
    return failed


def random_request(server, rng):
    """Returns a short request of a random kind, and whether the client disconnects early."""
    kind = rng.randrange(10)
    body = request(server, rng.randrange(1, 24), rng.randrange(1, 8))
    if kind < 3:
        body |= {"stream": False, "stream_options": None}
    elif kind == 3:
        body |= {"echo": True, "logprobs": 5}
    elif kind == 4:
        body |= {"n": 3, "temperature": 1, "seed": rng.randrange(1000)}
    elif kind == 5:
        body |= {"prompt": [server.vocabulary + 7]}
    elif kind == 6:
        body |= {"stop": ["e", "\n"], "prompt": "The"}
    elif kind == 7:
        body |= {"max_tokens": 100}
    return body, kind == 7


def soak(arguments, _):
    with start_ours(arguments) as server:
        counter, statuses, samples = itertools.count(), collections.Counter(), {}
        interval = max(1, arguments.soak // 10)
        print(json.dumps({"requests": 0, "resident": server.memory()[0]}), flush=True)

        def loop(number):
            client, rng = Client(server.address), random.Random(number)
            while (index := next(counter)) < arguments.soak:
                body, disconnects = random_request(server, rng)
                if disconnects:
                    # Disconnects in the middle of the completion.
                    client.disconnect(**body)
                    statuses["left"] += 1
                else:
                    statuses[client.complete(**body).status] += 1
                if (index + 1) % interval == 0:
                    samples[(index + 1) // interval] = server.memory()
                    print(json.dumps({"requests": index + 1, "resident": samples[(index + 1) // interval][0]}), flush=True)

        start = time.perf_counter()
        run_concurrently(16, loop)
        seconds = time.perf_counter() - start
        before, after = samples[min(2, max(samples))], server.memory()
    growth = after[0] / before[0] - 1
    # Resident bytes, threads and open files.
    print(json.dumps({"requests": arguments.soak, "per_s": round(arguments.soak / seconds), "answers": dict(statuses),
                      "after_a_fifth": before, "at_the_end": after, "growth": round(growth, 4)}))
    return growth > MEMORY_GROWTH or after[2] > before[2] + 8 or not set(statuses) <= {200, 400, "left"}


def activations(arguments, _):
    cells = collections.defaultdict(lambda: collections.defaultdict(list))
    with start_ours(arguments) as without, start_ours(arguments, "--activations") as allowed:
        servers = [("without", without), ("with", allowed)]
        for _, server in servers:
            measure(server, 1, min(arguments.prompts), 1)
        for round_number in range(arguments.rounds):
            for tokens, clients in itertools.product(arguments.prompts, arguments.clients):
                # The order alternates between rounds.
                for name, server in servers if round_number % 2 else servers[::-1]:
                    speed = measure(server, clients, tokens, arguments.requests)["tokens_per_s"]
                    cells[tokens, clients][name].append(speed)
    for (tokens, clients), measured in cells.items():
        speeds = {name: round(statistics.median(measured[name]), 2) for name, _ in servers}
        ratio = round(speeds["with"] / speeds["without"], 3)
        print(json.dumps({"dtype": arguments.dtype, "prompt": tokens, "clients": clients, "ratio": ratio} | speeds), flush=True)


def main():
    argument_parser = parser(__doc__, "program", "json")
    numbers_of = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    argument_parser.add_argument("--model", required=True, help="what its --model takes")
    argument_parser.add_argument("--dtype", default="f16")
    argument_parser.add_argument("--isa", help="holds ours to an instruction set, as GPT2_INSTRUCTION_SET does")
    argument_parser.add_argument("--options", default="", help="further words for `gpt2 serve`")
    argument_parser.add_argument("--llama-server", help="the program of llama.cpp to compare with")
    argument_parser.add_argument("--gguf", help="its model")
    argument_parser.add_argument("--parallel", type=int, default=16, help="texts at a time, of both servers")
    argument_parser.add_argument("--clients", type=numbers_of, default=[1, 2, 4, 8, 16, 32])
    argument_parser.add_argument("--prompts", type=numbers_of, default=[32, 512])
    argument_parser.add_argument("--requests", type=int, default=3, help="of each client, one after another")
    argument_parser.add_argument("--rounds", type=int, default=1)
    argument_parser.add_argument("--seconds", type=float, default=20, help="of --health")
    argument_parser.add_argument("--queue", type=int, default=64, help="of --overload")
    argument_parser.add_argument("--prefill-chunk", type=int, default=128, help="of --gap: the server's")
    argument_parser.add_argument("--health", action="store_true")
    argument_parser.add_argument("--gap", action="store_true")
    argument_parser.add_argument("--overload", action="store_true")
    argument_parser.add_argument("--soak", type=int)
    argument_parser.add_argument("--activations", action="store_true")
    arguments = argument_parser.parse_args()
    engines = {"ours": lambda: start_ours(arguments)}
    if arguments.llama_server:
        if not arguments.gguf:
            argument_parser.error("--llama-server needs --gguf")
        engines["llama-server"] = lambda: start_llama_server(arguments)
    modes = [(arguments.health, health), (arguments.gap, gap), (arguments.overload, overload), (arguments.soak, soak),
             (arguments.activations, activations), (True, load)]
    mode = next(mode for is_requested, mode in modes if is_requested)
    return 1 if mode(arguments, engines) else 0
