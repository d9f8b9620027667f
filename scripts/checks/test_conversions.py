"""transformers and llama.cpp compute the same results from the output of `gpt2 convert`.

Checks the greedy text, and the logits of a head over labels or choices. If the conversion rounds weights,
transformers computes in f32 with the rounded weights. --checkpoint names your own checkpoint; by default the
checks cover the fixtures in every format and with every head, and seeded models of other sizes.
"""

import json

import pytest
from paths import FIXTURES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from reference.common import random_gpt2, seeded  # noqa: E402

FORMATS = ["pytorch-legacy", "tensorflow", "llmc/gpt2.bin", "gguf/q4_0.gguf", "safetensors-shards"]
HEADS = ["double", "multi_label", "pytorch-shards", "sequence", "token"]
SIZES = dict(vocab_size=311, n_positions=37, n_embd=36, n_layer=2, n_head=3, n_inner=52, bos_token_id=0, eos_token_id=0)
# Models with a head: other sizes, activations and summary types.
SEEDED = {
    "one label": ("GPT2ForSequenceClassification", dict(num_labels=1, pad_token_id=0)),
    "eleven labels": ("GPT2ForSequenceClassification", dict(num_labels=11, activation_function="gelu")),
    "tokens": ("GPT2ForTokenClassification", dict(num_labels=4, scale_attn_by_inverse_layer_idx=True)),
    "choices": ("GPT2DoubleHeadsModel", dict(summary_activation="tanh", tie_word_embeddings=False)),
    "choices by mean": ("GPT2DoubleHeadsModel", dict(summary_type="mean")),
}
TOKENIZER = FIXTURES / "tiny-checkpoint" / "tokenizer.json"
TOLERANCE = 1e-4
ROWS = [[5, 299, 1, 17, 130], [42], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]]
IDS = ROWS[0]
NEW_TOKENS = 12


def pytest_generate_tests(metafunc):
    if "source" in metafunc.fixturenames:
        checkpoints = metafunc.config.getoption("checkpoint")
        readable = ["wide", "safetensors-shards", *HEADS, *SEEDED]
        names = list(map(str, checkpoints)) if checkpoints else ["wide", *FORMATS, *HEADS, *SEEDED]
        cases = [(name, dtype) for name in names for dtype in ("original", "f32", "f16", "bf16") if dtype != "original" or name in readable]
        metafunc.parametrize("source, dtype", cases, indirect=["source"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("conversions")


@pytest.fixture(scope="module")
def wide(folder):
    """Returns a model wide enough for llama.cpp's kernels.

    Its embeddings are large, so that the most probable token stands out as in a trained model and llama.cpp's
    rounding of activations to 8 bits does not change it.
    """
    model = random_gpt2(77, vocab_size=300, n_positions=32, n_embd=128, n_layer=2, n_head=2)
    model.transformer.wte.weight.data *= 4
    model.save_pretrained(folder / "wide")
    return folder / "wide"


@pytest.fixture
def source(request, folder, wide):
    name = request.param
    if name in SEEDED:
        kind, options = SEEDED[name]
        config = transformers.GPT2Config(**{"tie_word_embeddings": True, **SIZES, **options})
        seeded(getattr(transformers, kind)(config), list(SEEDED).index(name)).save_pretrained(folder / name)
        return folder / name
    known = {"wide": wide} | {head: FIXTURES / "heads" / head for head in HEADS} | {kind: FIXTURES / "formats" / kind for kind in FORMATS}
    return known.get(name) or request.config.rootpath / name


def config_of(path):
    return json.loads((path / "config.json").read_text())


def has_head(path):
    return config_of(path).get("architectures", ["GPT2LMHeadModel"]) not in (["GPT2LMHeadModel"], ["GPT2Model"])


def greedy(program, path):
    flags = ("--greedy", "--max-new-tokens", NEW_TOKENS, "--json", "--ids", ",".join(map(str, IDS)), "--model", path)
    return json.loads(program("generate", *flags))["ids"]


def logits(program, path, rows_file):
    """Returns the logits for the rows, in the order of labels, tokens and choices."""
    config = config_of(path)
    names = [config["id2label"][str(number)] for number in range(len(config["id2label"]))] if "id2label" in config else []
    is_double = config["architectures"] == ["GPT2DoubleHeadsModel"]
    rows_file.write_text("".join(json.dumps({"ids": row}) + "\n" for row in ([ROWS] if is_double else ROWS)))
    lines = [json.loads(line) for line in program("classify", "--model", path, "--prompts-file", rows_file).splitlines()]
    if is_double:
        return [choice["logit"] for choice in sorted(lines[0]["choices"], key=lambda choice: choice["index"])]
    labeled = [token["labels"] for line in lines for token in line["tokens"]] if "tokens" in lines[0] else [line["labels"] for line in lines]
    return [{label["label"]: label["logit"] for label in labels}[name] for labels in labeled for name in names]


@torch.no_grad()
def their_greedy(path):
    model = transformers.GPT2LMHeadModel.from_pretrained(path, dtype=torch.float32).eval()
    output = model.generate(torch.tensor([IDS]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
                            attention_mask=torch.ones(1, len(IDS)).long())
    return output[0, len(IDS):].tolist()


@torch.no_grad()
def their_logits(path):
    architecture = config_of(path)["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(path, dtype=torch.float32).eval()
    if architecture == "GPT2DoubleHeadsModel":
        # One row at a time, because summary types other than `cls_index` do not support a choice axis.
        return [model(torch.tensor([row])).mc_logits.item() for row in ROWS]
    return [logit for row in ROWS for logit in model(torch.tensor([row])).logits.flatten().tolist()]


def test_transformers_computes_the_same_from_the_output(program, folder, source, dtype):
    target = source
    if dtype != "original":
        target = folder / f"{source.name}-{dtype}"
        program("convert", source, target, "--dtype", dtype, "--tokenizer", TOKENIZER)
    if has_head(target):
        assert logits(program, target, folder / "rows.jsonl") == pytest.approx(their_logits(target), rel=0, abs=TOLERANCE)
        return
    assert greedy(program, target) == their_greedy(target)
    if dtype == "f32":
        assert greedy(program, source) == greedy(program, target)


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0", "q4_0"])
def test_llama_cpp_generates_the_same_tokens(program, folder, wide, option, dtype):
    llama_cpp = pytest.importorskip("llama_cpp")
    [source] = option("checkpoint") or [wide]
    target = folder / f"{dtype}.gguf"
    program("convert", source, target, "--dtype", dtype, "--tokenizer", TOKENIZER)
    # One token at a time: batches of such small quantized models crash llama.cpp, even with its own files.
    model = llama_cpp.Llama(model_path=str(target), n_ctx=32, n_batch=1, verbose=False, n_threads=1)
    new = []
    for token in model.generate(list(IDS), top_k=1, temp=0.0, repeat_penalty=1.0):
        new.append(token)
        if len(new) == NEW_TOKENS or token == model.token_eos():
            break
    assert greedy(program, target) == new
