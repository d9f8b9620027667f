"""lm-evaluation-harness reports the same figures for `gpt2 serve` as for its own `hf` model.

Starts a server for the checkpoint in --model, or uses the one at --base-url, which must serve it in float32.
Without --tasks, uses four tasks made from texts that the checkpoint generates with a fixed seed: multiple
choice, rolling log-likelihoods of texts shorter and longer than the context, and greedy generation. The
harness runs in eight configurations (sixteen with --all-ways): ids or text, batches of 1 and 8, one or four
concurrent requests, the server's tokenizer or transformers'.

Every figure in the harness's table must be the same string, and each log-likelihood must agree to 1e-4. If
`hf` misses this through float32 rounding of its sums, the figures must agree with softmax_dtype=float64.
"""

import functools
import itertools
import json
import math
import os

import pytest

pytest.importorskip("lm_eval")

from reference import harness  # noqa: E402, F401 - disables network access of lm_eval and its libraries
import lm_eval  # noqa: E402
import lm_eval.utils  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

TOLERANCE = 1e-4
GENERATED = 16
# Length limit of generated texts in tokens; transformers is slow on longer ones.
LONGEST = 192
STARTS = ("The", "What is", "First Citizen:\n", "O, ", "“Ünïcode” – 日本 😀 ", "And in the", "It was")

TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{endings}}"
doc_to_target: "{{label}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "generate": """
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{target}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: %d}
metric_list: [{metric: exact_match}]
""" % GENERATED,
}
# Like `rolling`, with texts that span several windows. Needs ids: a window that starts inside a word would be
# tokenized differently as text.
TASKS["windows"] = TASKS["rolling"]


class Writer:
    """Generates texts with the checkpoint, so that they fit its domain and are the same in every run."""

    def __init__(self, checkpoint):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.context = self.model.config.n_positions
        torch.manual_seed(1234)

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False).input_ids

    @torch.no_grad()
    def continuations(self, text, tokens, count):
        """Returns `count` continuations of the text; a single one is greedy."""
        ids = torch.tensor([self.ids(text)])
        # A low temperature yields probable texts with low perplexities: f32 cannot hold all digits of a perplexity in
        # the thousands.
        sampling = {"do_sample": True, "top_k": 20, "temperature": 0.7, "num_return_sequences": count}
        options = sampling if count > 1 else {"do_sample": False}
        end = self.tokenizer.eos_token_id
        output = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                                     pad_token_id=end, suppress_tokens=[end], **options)
        return self.tokenizer.batch_decode(output[:, ids.shape[1] :])

    def passages(self, count, tokens):
        """Returns texts of about `tokens` tokens, and never more when they are tokenized again."""
        passages = []
        for start in STARTS:
            for text in self.continuations(start, max(8, tokens - len(self.ids(start))), -(-count // len(STARTS)) + 1):
                # The last characters may be incomplete.
                ids = self.ids((start + text).rstrip("\ufffd "))[: tokens - 2]
                passages.append(self.tokenizer.decode(ids).rstrip("\ufffd "))
        return passages[:count]

    def items(self, count):
        short = max(12, min(40, self.context // 4))
        passages = self.passages(count, short + short // 2)
        # Splits at spaces, so that the context's tokens are a prefix of the whole text's tokens.
        split = [text.split(" ") for text in passages]
        contexts = [" ".join(words[: len(words) // 2]) or "It" for words in split]
        endings = [" " + " ".join(words[len(words) // 2 :]) for words in split]
        greedy = [self.continuations(context, GENERATED, 1)[0].split("\n")[0] for context in contexts]
        for number in range(count):
            label = number % 4
            choices = [endings[(number + step) % count] for step in (1, 2, 3)]
            choices.insert(label, endings[number])
            yield "choice", {"context": contexts[number], "label": label, "endings": choices}
            # Half of the targets are correct, so that the score is neither 0 nor 1.
            yield "generate", {"context": contexts[number], "target": greedy[number] if number % 2 else greedy[number] + "!"}
        long = min(self.context * 3 // 4, LONGEST)
        texts = self.passages(count, long)
        for text in texts:
            yield "rolling", {"text": text}
        for number in range(max(2, count // 10)):
            some = itertools.islice(itertools.cycle(texts), number, number + math.ceil(2.5 * self.context / long))
            yield "windows", {"text": "\n".join(some)}


def write_tasks(folder, items):
    for name, item in items:
        with open(folder / f"{name}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(item) + "\n")
    paths = []
    for name, text in TASKS.items():
        path = folder / f"{name}.yaml"
        data = json.dumps({"data_files": {"test": str(folder / f"{name}.jsonl")}})
        path.write_text(f"task: {name}\ndataset_path: json\ndataset_kwargs: {data}\ntest_split: test\n{text}")
        paths.append(str(path))
    return paths


def evaluate(model, model_args, tasks, batch_size):
    options = {"batch_size": batch_size, "device": "cpu", "log_samples": True, "bootstrap_iters": 0}
    return lm_eval.simple_evaluate(model=model, model_args=model_args, tasks=tasks, **options)


def figures(results):
    """Returns every cell of the harness's table, keyed by task, filter and metric."""
    table = [line.split("|")[1:-1] for line in lm_eval.utils.make_table(results).splitlines() if line.startswith("|")]
    rows, task = {}, ""
    for cells in table[2:]:
        cells = [cell.strip() for cell in cells]
        task = cells[0] or task
        rows[task, cells[2], cells[4]] = (cells[6], cells[8])
    return rows


def samples(results):
    """Returns the response to each request: a log-likelihood with or without an is-greedy flag, or a text."""
    responses = {}
    for task, of_task in results["samples"].items():
        for sample in of_task:
            for index, response in enumerate(sample["resps"]):
                responses[task, sample["doc_id"], index] = response[0] if isinstance(response, list) else response
    return responses


def split_numbers(answer):
    values = answer if isinstance(answer, (list, tuple)) else [answer]
    return [float(value) for value in values if not isinstance(value, (bool, str))], [v for v in values if isinstance(v, (bool, str))]


def differences(expected, found):
    """Returns the differences as sentences."""
    sentences, largest = [], 0.0

    def evaluated(answers):
        return {key: answer for key, answer in answers.items() if key[0] in found["results"]}

    ours, theirs = figures(found), evaluated(figures(expected))
    for key in theirs:
        if ours.get(key) != theirs[key]:
            sentences.append(f"{' '.join(filter(None, key))}: hf {theirs[key]}, server {ours.get(key)}")
    ours, theirs = samples(found), evaluated(samples(expected))
    if ours.keys() != theirs.keys():
        sentences.append("the requests themselves differ")
    for key in theirs.keys() & ours.keys():
        (value, other), (value_ours, other_ours) = split_numbers(theirs[key]), split_numbers(ours[key])
        largest = max([largest, *(abs(a - b) for a, b in zip(value, value_ours, strict=True))])
        if other != other_ours:
            sentences.append(f"{key}: hf {theirs[key]!r}, server {ours[key]!r}")
    if largest > TOLERANCE:
        sentences.append(f"a log-likelihood is {largest:.2e} off")
    return sentences


def pytest_generate_tests(metafunc):
    every = itertools.product((True, False), (1, 8), (1, 4), ("remote", "huggingface"))
    # Half of the combinations: every pair of settings still occurs.
    is_all = metafunc.config.getoption("all_ways")
    configs = [config for config in every if is_all or (config[3] == "remote") == (config[0] + (config[1] == 8) + (config[2] == 4)) % 2]
    names = [f"{'ids' if config[0] else 'text'}, batch {config[1]}, {config[2]} at a time, {config[3]} tokenizer" for config in configs]
    metafunc.parametrize("tokenized, batch_size, concurrent, backend", configs, ids=names)


@pytest.fixture(scope="module")
def root(request, option, checkpoint):
    if option("base-url"):
        yield option("base-url").rstrip("/").removesuffix("/v1")
        return
    with request.getfixturevalue("program").serving("--model", checkpoint, "--dtype", "f32") as address:
        yield address


class Expected:
    """The tasks, and the results of the `hf` model on them."""

    def __init__(self, option, checkpoint, folder):
        self.checkpoint, self.folder = str(checkpoint), folder
        writer = Writer(self.checkpoint)
        self.context = writer.context
        self.paths = option("tasks").split(",") if option("tasks") else write_tasks(folder, writer.items(option("items")))

    @functools.cache  # noqa: B019 - one per module
    def results(self, **options):
        # The harness reserves a position for the token that the route generates, and one for a window's context.
        # `hf` gets a context two tokens shorter, so that both split long texts into the same windows.
        arguments = {"pretrained": self.checkpoint, "dtype": "float32", "max_length": self.context - 2} | options
        return evaluate("hf", arguments, self.paths, 1)


@pytest.fixture(scope="module")
def expected(option, checkpoint, tmp_path_factory):
    return Expected(option, checkpoint, tmp_path_factory.mktemp("tasks"))


def test_figures_match_the_hf_model(option, root, expected, tokenized, batch_size, concurrent, backend):
    key = os.environ["OPENAI_API_KEY"] = option("key") or ""
    import requests

    listed = requests.get(f"{root}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=60).json()
    local = {"model": listed["data"][0]["id"], "base_url": f"{root}/v1/completions", "tokenizer_backend": backend, "max_retries": 1,
             "tokenized_requests": tokenized, "max_length": expected.context, "num_concurrent": concurrent}
    local |= {"tokenizer": expected.checkpoint} if backend == "huggingface" else {"auth_token": key}
    paths = [path for path in expected.paths if tokenized or path != str(expected.folder / "windows.yaml")]
    found = evaluate("local-completions", local, paths, batch_size)
    different = differences(expected.results(), found)
    if different:
        # `hf` adds up hundreds of logarithms in float32, whose resolution is 1e-4 near a thousand.
        different = differences(expected.results(softmax_dtype="float64"), found)
    assert not different, "\n".join(different[:10])
