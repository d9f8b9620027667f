"""lm-evaluation-harness prints the same figures for `gpt2 serve` as for its own `hf` model of the same checkpoint, --model.

The server is started here, or is the one of --base-url, which serves that checkpoint in float32. Without --tasks the tasks are four of
texts that the checkpoint itself writes under a fixed seed: a choice of endings, rolling log-likelihoods of texts within and beyond the
context, and greedy generation. The harness asks in eight ways (with --all-ways in all sixteen): ids or text, batches of 1 and 8, one
request or four at a time, tokens by the server's own routes or by transformers. Every figure of its table must be the same string, and
each log-likelihood the same to 1e-4; where `hf` itself rounds sums in float32 so that they are not, they must be so with its
softmax_dtype=float64.
"""

import functools
import itertools
import json
import math
import os

import pytest

pytest.importorskip("lm_eval")

from reference import harness  # noqa: E402, F401 - keeps lm_eval and its libraries from the network
import lm_eval  # noqa: E402
import lm_eval.utils  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

TOLERANCE = 1e-4
GENERATED = 16
# Tokens of a text that the checkpoint writes: transformers takes long over more.
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
# As `rolling`, of texts that fill several windows. As text they are no test of the server: a window that begins within a word reads
# back as other tokens.
TASKS["windows"] = TASKS["rolling"]


class Writer:
    """Texts that the checkpoint writes: of its own domain, and the same at every run."""

    def __init__(self, checkpoint):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.context = self.model.config.n_positions
        torch.manual_seed(1234)

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False).input_ids

    @torch.no_grad()
    def continued(self, text, tokens, count):
        """So many texts that go on from this one; a single one is the greedy one."""
        ids = torch.tensor([self.ids(text)])
        # Cool enough that the texts are probable: a perplexity of thousands has more digits than f32 holds.
        sampling = {"do_sample": True, "top_k": 20, "temperature": 0.7, "num_return_sequences": count}
        options = sampling if count > 1 else {"do_sample": False}
        end = self.tokenizer.eos_token_id
        output = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                                     pad_token_id=end, suppress_tokens=[end], **options)
        return self.tokenizer.batch_decode(output[:, ids.shape[1] :])

    def passages(self, count, tokens):
        """Texts of about so many tokens, never more when they are read back."""
        made = []
        for start in STARTS:
            for text in self.continued(start, max(8, tokens - len(self.ids(start))), -(-count // len(STARTS)) + 1):
                # The last characters may be halves.
                ids = self.ids((start + text).rstrip("\ufffd "))[: tokens - 2]
                made.append(self.tokenizer.decode(ids).rstrip("\ufffd "))
        return made[:count]

    def items(self, count):
        short = max(12, min(40, self.context // 4))
        passages = self.passages(count, short + short // 2)
        # Whole words, so that the context's tokens are a beginning of the whole text's.
        split = [text.split(" ") for text in passages]
        contexts = [" ".join(words[: len(words) // 2]) or "It" for words in split]
        endings = [" " + " ".join(words[len(words) // 2 :]) for words in split]
        greedy = [self.continued(context, GENERATED, 1)[0].split("\n")[0] for context in contexts]
        for number in range(count):
            label = number % 4
            choices = [endings[(number + step) % count] for step in (1, 2, 3)]
            choices.insert(label, endings[number])
            yield "choice", {"context": contexts[number], "label": label, "endings": choices}
            # Half the targets are right, so that the figure is neither 0 nor 1.
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
    """Every cell of the table that the harness prints, by task, filter and metric."""
    table = [line.split("|")[1:-1] for line in lm_eval.utils.make_table(results).splitlines() if line.startswith("|")]
    rows, task = {}, ""
    for cells in table[2:]:
        cells = [cell.strip() for cell in cells]
        task = cells[0] or task
        rows[task, cells[2], cells[4]] = (cells[6], cells[8])
    return rows


def samples(results):
    """The answer to each request: a log-likelihood and whether it is the greedy text, a log-likelihood, or a text."""
    told = {}
    for task, of_task in results["samples"].items():
        for sample in of_task:
            for place, answer in enumerate(sample["resps"]):
                told[task, sample["doc_id"], place] = answer[0] if isinstance(answer, list) else answer
    return told


def numbers_of(answer):
    values = answer if isinstance(answer, (list, tuple)) else [answer]
    return [float(value) for value in values if not isinstance(value, (bool, str))], [v for v in values if isinstance(v, (bool, str))]


def differences(expected, found):
    """What is not the same, as sentences."""
    told, largest = [], 0.0

    def asked(answers):
        return {key: answer for key, answer in answers.items() if key[0] in found["results"]}

    ours, theirs = figures(found), asked(figures(expected))
    for key in theirs:
        if ours.get(key) != theirs[key]:
            told.append(f"{' '.join(filter(None, key))}: hf {theirs[key]}, server {ours.get(key)}")
    ours, theirs = samples(found), asked(samples(expected))
    if ours.keys() != theirs.keys():
        told.append("the requests themselves differ")
    for key in theirs.keys() & ours.keys():
        (value, other), (value_ours, other_ours) = numbers_of(theirs[key]), numbers_of(ours[key])
        largest = max([largest, *(abs(a - b) for a, b in zip(value, value_ours, strict=True))])
        if other != other_ours:
            told.append(f"{key}: hf {theirs[key]!r}, server {ours[key]!r}")
    if largest > TOLERANCE:
        told.append(f"a log-likelihood is {largest:.2e} off")
    return told


def pytest_generate_tests(metafunc):
    every = itertools.product((True, False), (1, 8), (1, 4), ("remote", "huggingface"))
    # Half of them: each pair of settings still meets.
    is_all = metafunc.config.getoption("all_ways")
    ways = [way for way in every if is_all or (way[3] == "remote") == (way[0] + (way[1] == 8) + (way[2] == 4)) % 2]
    names = [f"{'ids' if way[0] else 'text'}, batch {way[1]}, {way[2]} at a time, {way[3]} tokenizer" for way in ways]
    metafunc.parametrize("tokenized, batch_size, concurrent, backend", ways, ids=names)


@pytest.fixture(scope="module")
def root(request, option):
    if option("base-url"):
        yield option("base-url").rstrip("/").removesuffix("/v1")
        return
    with request.getfixturevalue("program").serving("--model", option("model"), "--dtype", "f32") as address:
        yield address


class Expected:
    """The tasks, and what `hf` says to them."""

    def __init__(self, option, folder):
        self.checkpoint, self.folder = str(option("model")), folder
        writer = Writer(self.checkpoint)
        self.context = writer.context
        self.paths = option("tasks").split(",") if option("tasks") else write_tasks(folder, writer.items(option("items")))

    @functools.cache  # noqa: B019 - one for the module
    def results(self, **options):
        # The harness keeps one place for the token that the route generates and one for the context of a window: so `hf` gets two
        # tokens less, that both cut long texts into the same windows.
        arguments = {"pretrained": self.checkpoint, "dtype": "float32", "max_length": self.context - 2} | options
        return evaluate("hf", arguments, self.paths, 1)


@pytest.fixture(scope="module")
def expected(option, tmp_path_factory):
    return Expected(option, tmp_path_factory.mktemp("tasks"))


def test_figures_are_those_of_its_own_model(option, root, expected, tokenized, batch_size, concurrent, backend):
    key = os.environ["OPENAI_API_KEY"] = option("key") or ""
    import requests

    listed = requests.get(f"{root}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=60).json()
    local = {"model": listed["data"][0]["id"], "base_url": f"{root}/v1/completions", "tokenizer_backend": backend, "max_retries": 1,
             "tokenized_requests": tokenized, "max_length": expected.context, "num_concurrent": concurrent}
    local |= {"tokenizer": expected.checkpoint} if backend == "huggingface" else {"auth_token": key}
    asked = [path for path in expected.paths if tokenized or path != str(expected.folder / "windows.yaml")]
    found = evaluate("local-completions", local, asked, batch_size)
    told = differences(expected.results(), found)
    if told:
        # `hf` sums up hundreds of logarithms in float32, whose steps are 1e-4 at a thousand.
        told = differences(expected.results(softmax_dtype="float64"), found)
    assert not told, "\n".join(told[:10])
