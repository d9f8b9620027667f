"""Oracle for `gpt2 eval`: benchmarks with the arithmetic of scripts outside lm-evaluation-harness.

Protocols are wikitext:hf-N, wikitext:megatron[-N], wikitext:llama.cpp, lambada:last-token,
lambada:megatron-strict, lambada:stop-words, hellaswag:llm.c, hellaswag:llama.cpp, text:bits[-N] and kl.
Computes in float32, sums in float64.
"""

import functools
import json
import math
import pathlib
import re
import statistics

import tokenizers
import torch
import transformers
from transformers.models.bert.tokenization_bert_legacy import BasicTokenizer

# NLTK's list of English stop words, unchanged for years.
STOP_WORDS = frozenset(
    "i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself it its itself "
    "they them their theirs themselves what which who whom this that these those am is are was were be been being have has had "
    "having do does did doing a an the and but if or because as until while of at by for with about against between into through "
    "during before after above below to from up down in out on off over under again further then once here there when where why "
    "how all any both each few more most other some such no nor not only own same so than too very s t can will just don should "
    "now".split()
)
WRITTEN_TOKENS = 6
PERCENTILES = {"99.9": 0.999, "99": 0.99, "95": 0.95, "90": 0.9, "75": 0.75, "25": 0.25, "10": 0.1, "5": 0.05, "1": 0.01, "0.1": 0.001}


class Model:
    def __init__(self, folder):
        folder = pathlib.Path(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.context = self.model.config.n_positions
        ends = self.model.config.bos_token_id, self.model.config.eos_token_id
        self.start = next(end for end in ends if end is not None)
        [path] = list(folder.glob("*tokenizer.json"))
        self.tokenizer = tokenizers.Tokenizer.from_file(str(path))

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    @torch.no_grad()
    def rows(self, ids):
        """Returns the log-probabilities of all tokens after each id."""
        assert 0 < len(ids) <= self.context, f"{len(ids)} tokens do not fit"
        return self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    def score(self, ids, first):
        """Returns log-probabilities of the tokens from `first` on, and whether each is the most probable token."""
        rows = self.rows(ids[:-1])[first - 1 :]
        targets = torch.tensor(ids[first:])
        return rows.gather(1, targets[:, None])[:, 0].tolist(), (rows.argmax(-1) == targets).tolist()


def choice(scores):
    logprobs, greedy = scores
    return {"logprob": math.fsum(logprobs), "tokens": len(logprobs), "is_greedy": all(greedy)}


def share(values):
    return statistics.fmean(map(float, values))


def records(path, limit):
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    return [json.loads(line) for line in lines[:limit]]


# WikiText


def rows_of_the_hub(text):
    """Returns the lines with their line ends; the Hub stores blank lines as empty strings."""
    lines = text.split("\n")
    rows = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    return ["" if not row.strip() else row for row in rows]


def hf_windows(model, text, stride):
    """Computes perplexity like "Perplexity of fixed-length models" in transformers' documentation."""
    ids = model.encode("\n\n".join(rows_of_the_hub(text)))
    assert stride <= model.context
    weighted, weights, items, end_before = 0.0, 0, [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + model.context, len(ids))
        # The first token of a window has no context.
        first = max(end_before - begin, 1)
        logprobs, _ = model.score(ids[begin:end], first) if first < end - begin else ([], [])
        if logprobs:
            # The script removes one label from every window, whether or not its first label is scored.
            labels = end - end_before - 1
            weighted -= statistics.fmean(logprobs) * labels
            weights += labels
            items.append({"logprob": math.fsum(logprobs), "tokens": len(logprobs)})
        end_before = end
        if end == len(ids):
            break
    tokens = sum(item["tokens"] for item in items)
    plain = -math.fsum(item["logprob"] for item in items) / tokens
    return {"perplexity": math.exp(weighted / weights), "token_perplexity": math.exp(plain)}, items


def detokenized(text):
    """Undoes WikiText's tokenization like Megatron's evaluation, with the same order and omissions."""
    text = text.replace("s '", "s'")
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for opening, closing in ("()", "[]", "{}", '""', "''"):
        begin, end = re.escape(opening), re.escape(closing)
        text = re.sub(rf"{begin}\s*([^{end}]*?)\s*{end}", lambda found, o=opening, c=closing: o + found[1] + c, text)
    for count in (4, 3, 2):
        text = text.replace(" ".join("=" * count), "=" * count)
    for before, after in ((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")):
        text = text.replace(before, after)
    return text


def megatron(model, text, step):
    ids = model.encode(detokenized(text))
    words = len(text.strip().split(" "))
    items, scored = [], 1
    for begin in range(0, len(ids), step):
        window = ids[begin : begin + model.context + 1]
        if scored >= len(ids):
            break
        items.append(choice(model.score(window, scored - begin)))
        scored = begin + len(window)
    assert sum(item["tokens"] for item in items) == len(ids) - 1
    loss = -math.fsum(item["logprob"] for item in items) / (len(ids) - 1)
    adjusted = loss * (len(ids) - 1) / (words - 1)
    return {"perplexity": math.exp(min(20, loss)), "adjusted_perplexity": math.exp(min(20, adjusted))}, items


def chunks(model, text, context):
    """Splits a text into chunks like llama.cpp's tool, which drops one newline at the end of a file."""
    ids = model.encode(text.removesuffix("\n"))
    return [ids[begin : begin + context] for begin in range(0, len(ids) - context + 1, context)]


def llama_cpp_perplexity(model, text, context):
    context = context or min(512, model.context)
    logprobs, items = [], []
    for chunk in chunks(model, text, context):
        scores = model.score(chunk, context // 2 + 1)
        items.append(choice(scores))
        logprobs += scores[0]
    mean = -statistics.fmean(logprobs)
    spread = statistics.fmean(value * value for value in logprobs) - mean * mean
    stderr = math.exp(mean) * math.sqrt(spread / (len(logprobs) - 1))
    return {"perplexity": math.exp(mean), "perplexity_stderr": stderr}, items


# LAMBADA


def lambada_texts(path, limit):
    for record in records(path, limit):
        yield record["text"] if "text" in record else f"{record['context']} {record['continuation']}"


def last_token(model, texts):
    items = []
    for text in texts:
        ids = model.encode(text.strip())[-model.context - 1 :]
        items.append(choice(model.score(ids, len(ids) - 1)))
    return {"acc": share(item["is_greedy"] for item in items)}, items


def megatron_strict(model, texts):
    items = []
    for text in texts:
        word = text.split()[-1]
        context, target = model.encode(text[: text.rfind(word)].strip()), model.encode(" " + word)
        ids = (context + target)[-model.context - 1 :]
        items.append(choice(model.score(ids, len(ids) - len(target))))
    return {"acc": share(item["is_greedy"] for item in items)}, items


def stop_words(model, texts):
    words_of = BasicTokenizer(do_lower_case=True).tokenize
    left_out = [id for id in range(model.tokenizer.get_vocab_size()) if model.tokenizer.decode([id]).strip() in STOP_WORDS]
    items = []
    for text in texts:
        text = text.strip()
        word = words_of(text)[-1]
        ids = model.encode(text[: -len(word)].strip())
        written = []
        for _ in range(WRITTEN_TOKENS):
            row = model.rows((ids + written)[-model.context :])[-1]
            row[left_out] = -math.inf
            written.append(int(row.argmax()))
        found = next(iter(words_of(model.tokenizer.decode(written))), "")
        items.append({"words": [word, found], "acc": word == found})
    return {"acc": share(item["acc"] for item in items)}, items


# HellaSwag


def prepared(record):
    """Returns the query, the endings and the gold index as lm-evaluation-harness builds them from HellaSwag's fields."""
    if "query" in record:
        return record["query"], record["choices"], int(record.get("gold", record.get("label")))

    def cleaned(text):
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    query = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    return cleaned(query), [cleaned(ending) for ending in record["endings"]], int(record["label"])


def best(values):
    return max(range(len(values)), key=lambda place: (values[place], -place))


def judged(choices, gold):
    by_sum = best([choice["logprob"] for choice in choices])
    by_mean = best([choice["logprob"] / choice["tokens"] for choice in choices])
    return {"choices": choices, "gold": gold, "sum": by_sum, "per_token": by_mean}


def shares(items):
    right = {name: share(item[measure] == item["gold"] for item in items) for name, measure in (("acc", "sum"), ("acc_norm", "per_token"))}
    return right, items


def llm_c(model, path, limit):
    items = []
    for record in records(path, limit):
        context = model.encode(record["ctx"])
        choices = []
        for ending in record["endings"]:
            ids = context + model.encode(" " + ending)
            choices.append(choice(model.score(ids, len(context))))
        items.append(judged(choices, int(record["label"])))
    return shares(items)


def llama_cpp_hellaswag(model, path, limit):
    if path.suffix == ".jsonl":
        entries = [prepared(record) for record in records(path, limit)]
    else:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        entries = [(lines[i], lines[i + 2 : i + 6], int(lines[i + 1])) for i in range(0, len(lines), 6)][:limit]
    items = []
    for query, endings, gold in entries:
        wholes = [model.encode(f"{query} {ending}") for ending in endings]
        common = next(place for place, ids in enumerate(zip(*wholes, strict=False)) if len(set(ids)) > 1)
        items.append(judged([choice(model.score(ids, common)) for ids in wholes], gold))
    # llama.cpp prints only this mean.
    metrics, items = shares(items)
    return {"acc_norm": metrics["acc_norm"]}, items


# Any text


def text_bits(model, text, step):
    ids = model.encode(text)
    items, counted = [], 0
    for begin in range(0, len(ids), step):
        end = min(begin + model.context, len(ids))
        if end > counted:
            items.append(choice(model.score([model.start] + ids[begin:end], counted - begin + 1)))
            counted = end
    nats = -math.fsum(item["logprob"] for item in items)
    counts = {"byte": len(text.encode()), "token": len(ids), "character": len(text)}
    metrics = {f"bits_per_{unit}": nats / count / math.log(2) for unit, count in counts.items()}
    counts["word"] = len(re.split(r"\s+", text))
    return metrics | {f"{unit}_perplexity": math.exp(nats / counts[unit]) for unit in ("byte", "token", "word")}, items


def spread_of_mean(values):
    mean = statistics.fmean(values)
    variance = statistics.fmean(value * value for value in values) - mean * mean
    return mean, math.sqrt(max(variance, 0) / (len(values) - 1))


def covariance_of_means(first, second):
    product = statistics.fmean(a * b for a, b in zip(first, second, strict=True))
    return (product - statistics.fmean(first) * statistics.fmean(second)) / (len(first) - 1)


def quantile(ordered, fraction):
    place = fraction * (len(ordered) - 1)
    low = int(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def distribution(name, values):
    ordered = sorted(values)
    told = {f"{name}_{label}": quantile(ordered, fraction) for label, fraction in PERCENTILES.items()}
    return told | {f"{name}_max": ordered[-1], f"{name}_min": ordered[0], f"{name}_median": statistics.median(ordered)}


def divergence(base, other, text, context):
    """Returns the divergence of `other` from `base`, with the statistics of llama.cpp's tool."""
    context = context or min(512, base.context)
    nll_base, nll, kl, dp, same = [], [], [], [], []
    for chunk in chunks(base, text, context):
        targets = torch.tensor(chunk[context // 2 + 1 :])[:, None]
        p, q = (model.rows(chunk[:-1])[context // 2 :] for model in (base, other))
        of_p, of_q = p.gather(1, targets)[:, 0], q.gather(1, targets)[:, 0]
        nll_base += (-of_p).tolist()
        nll += (-of_q).tolist()
        kl += (p.exp() * (p - q)).sum(-1).tolist()
        dp += (of_q.exp() - of_p.exp()).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
    (mean, spread), (mean_base, spread_base) = spread_of_mean(nll), spread_of_mean(nll_base)
    covariance = covariance_of_means(nll, nll_base)
    perplexity, perplexity_base = math.exp(mean), math.exp(mean_base)
    ratio_spread = math.sqrt(max(spread**2 + spread_base**2 - 2 * covariance, 0))
    difference = (perplexity * spread) ** 2 + (perplexity_base * spread_base) ** 2 - 2 * perplexity * perplexity_base * covariance
    (kl_mean, kl_spread), (dp_mean, dp_spread) = spread_of_mean(kl), spread_of_mean(dp)
    square, square_spread = spread_of_mean([value**2 for value in dp])
    top = share(same)
    metrics = {
        "perplexity": (perplexity, perplexity * spread),
        "base_perplexity": (perplexity_base, perplexity_base * spread_base),
        "ln_perplexity_ratio": (mean - mean_base, ratio_spread),
        "perplexity_ratio": (math.exp(mean - mean_base), math.exp(mean - mean_base) * ratio_spread),
        "perplexity_difference": (perplexity - perplexity_base, math.sqrt(max(difference, 0))),
        "kl": (kl_mean, kl_spread),
        "dp": (dp_mean, dp_spread),
        "dp_rms": (math.sqrt(square), square_spread / 2 / math.sqrt(square) if square else 0.0),
        "same_top": (top, math.sqrt(top * (1 - top) / (len(same) - 1))),
    }
    told = {name: value for name, (value, _) in metrics.items()} | {f"{name}_stderr": stderr for name, (_, stderr) in metrics.items()}
    if spread and spread_base:
        told["perplexity_correlation"] = covariance / (spread * spread_base)
    kl_told = distribution("kl", kl)
    for label in ("75", "25"):
        del kl_told[f"kl_{label}"]
    return told | kl_told | distribution("dp", dp), []


def evaluate(protocol, model, path, context=None, limit=None, base=None):
    """Returns the figures for a protocol, and the model's output for each item."""
    name, number = re.fullmatch(r"(.*?)(?:-(\d+))?", protocol).groups()
    number = int(number) if number else None
    texts = functools.partial(lambada_texts, path, limit)

    def whole():
        return path.read_bytes().decode()

    known = {
        "wikitext:hf": lambda: hf_windows(model, whole(), number),
        "wikitext:megatron": lambda: megatron(model, whole(), number or 32),
        "wikitext:llama.cpp": lambda: llama_cpp_perplexity(model, whole(), context),
        "lambada:last-token": lambda: last_token(model, texts()),
        "lambada:megatron-strict": lambda: megatron_strict(model, texts()),
        "lambada:stop-words": lambda: stop_words(model, texts()),
        "hellaswag:llm.c": lambda: llm_c(model, path, limit),
        "hellaswag:llama.cpp": lambda: llama_cpp_hellaswag(model, path, limit),
        "text:bits": lambda: text_bits(model, whole(), number or model.context // 2),
        "kl": lambda: divergence(base or model, model, whole(), context),
    }
    if name not in known:
        raise SystemExit(f"unknown protocol {protocol}; expected one of {', '.join(known)}")
    metrics, items = known[name]()
    # An item with one text has the format of a single choice.
    items = [item if "choices" in item or "words" in item else {"choices": [item]} for item in items]
    return {"protocol": protocol, "metrics": metrics, "items": items}
