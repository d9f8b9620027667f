"""Seeded GPT-2s with a classification head, saved by transformers, and transformers' results, in `heads`.

Each model has its own folder. `heads/expected.json` contains the logits of each text alone and of padded
batches, and the output of transformers' pipelines.
"""

import json
import shutil

import torch
import transformers

from reference import common
from reference.common import TINY, save_json, seeded

SIZES = dict(
    vocab_size=300, n_positions=40, n_embd=24, n_inner=44, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0,
    tie_word_embeddings=True,
)
TEXTS = [
    "The first citizen", "naïve café 🤗", "Attention asks of every word which of the words before it matter", "日本",
    "we are accounted poor citizens, the patricians good.",
]
CHOICES = [[5, 299, 17, 130], [5, 299, 42], [5, 299, 17, 130, 8, 201, 77]]


def save_checkpoint(name, model):
    folder = common.place(f"heads/{name}")
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    shutil.copy(TINY / "tokenizer.json", folder)
    print(f"heads/{name}: {sum(file.stat().st_size for file in folder.iterdir())} bytes")


def labeled(labels, **options):
    numbers = {label: number for number, label in enumerate(labels)}
    return transformers.GPT2Config(**SIZES, id2label=dict(enumerate(labels)), label2id=numbers, **options)


@torch.no_grad()
def alone(model, ids):
    return model(torch.tensor([ids])).logits[0].tolist()


@torch.no_grad()
def export_sequence(name, tokenizer, seed, labels, **options):
    """Writes a sequence classifier and its results, with padded rows if it has a padding token."""
    config = labeled(labels, **options)
    model = seeded(transformers.GPT2ForSequenceClassification(config), seed)
    save_checkpoint(name, model)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    pipeline = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None, device="cpu")
    row = {"ids": ids, "logits": [alone(model, row) for row in ids], "pipeline": [pipeline([text])[0] for text in TEXTS]}
    if config.pad_token_id is not None:
        # Rows that end with padding, and one that is only padding.
        row["padded_ids"] = [[9, 30, 4, 0, 0], [0, 0], [0, 12, 0], [8, 0, 200]]
        row["padded_logits"] = [alone(model, row) for row in row["padded_ids"]]
    return row


def export_pytorch_shards():
    """Writes an f16 sequence classifier like old versions of transformers: two shards, with masks."""
    model = transformers.GPT2ForSequenceClassification.from_pretrained(common.place("heads/sequence")).half()
    state = dict(model.state_dict())
    for layer in range(SIZES["n_layer"]):
        mask = torch.tril(torch.ones(40, 40, dtype=torch.uint8)).view(1, 1, 40, 40)
        state |= {f"transformer.h.{layer}.attn.bias": mask, f"transformer.h.{layer}.attn.masked_bias": torch.tensor(-1e4)}
    folder = common.place("heads/pytorch-shards")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    names, places = sorted(state), {}
    for shard, part in enumerate((names[:21], names[21:])):
        file = f"pytorch_model-0000{shard + 1}-of-00002.bin"
        torch.save({name: state[name].clone() for name in part}, folder / file)
        places |= {name: file for name in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": places}))
    model.config.save_pretrained(folder)


@torch.no_grad()
def export_token(tokenizer, seed, labels):
    config = labeled(labels, classifier_dropout=0.2)
    model = seeded(transformers.GPT2ForTokenClassification(config), seed)
    save_checkpoint("token", model)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    pipeline = transformers.pipeline("token-classification", model=model, tokenizer=tokenizer, device="cpu")
    spans = [[{"index": found["index"], "entity": found["entity"], "score": float(found["score"]), "start": found["start"],
               "end": found["end"]} for found in pipeline(text)] for text in TEXTS]
    return {"ids": ids, "logits": [alone(model, row) for row in ids], "pipeline": spans}


@torch.no_grad()
def export_double(seed):
    model = seeded(transformers.GPT2DoubleHeadsModel(transformers.GPT2Config(**SIZES)), seed)
    save_checkpoint("double", model)
    # Padding at the end is invisible to causal attention; the summary token is the last token of each choice.
    longest = max(map(len, CHOICES))
    ids = torch.tensor([[choice + [0] * (longest - len(choice)) for choice in CHOICES]])

    def choose(places):
        return model(ids, mc_token_ids=torch.tensor([places])).mc_logits[0].tolist()

    lm_logits = model(ids).logits[0, 1, : len(CHOICES[1])].tolist()
    last = [len(choice) - 1 for choice in CHOICES]
    return {"ids": CHOICES, "logits": choose(last), "places": [2, 0, 3], "logits_at_places": choose([2, 0, 3]),
            "lm_logits_of_second": lm_logits}


def export(_):
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(TINY / "tokenizer.json"), pad_token="<|endoftext|>")
    colours = ["red", "green", "naïve café", "blue", "LABEL_4"]
    kinds = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-MISC", "I-MISC"]
    expected = {
        "texts": TEXTS,
        "sequence": export_sequence("sequence", tokenizer, 41, colours, pad_token_id=0),
        "multi_label": export_sequence("multi_label", tokenizer, 42, ["toxic", "spam", "rude"],
                                       problem_type="multi_label_classification"),
        "token": export_token(tokenizer, 43, kinds),
        "double": export_double(44),
    }
    export_pytorch_shards()
    for file in common.place("heads").glob("*/*.safetensors"):
        file.chmod(0o644)
    save_json("heads/expected", json.loads(json.dumps(expected)))
