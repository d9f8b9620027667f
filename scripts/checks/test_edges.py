"""Scores of edges: those of `gpt2 look circuit` are those of the authors of EAP-IG.

Needs requirements-circuits.txt and https://github.com/hannamw/EAP-IG, which is installed from its source (`pip install` of the
folder). Each method scores 20 pairs of prompts of `gpt2 look data`, of the model in --model and of one with random weights. The authors
write scores to CUDA; here they are written to the CPU. They take the mean of a batch and divide by the number of pairs once more,
so batches are of one pair.
"""

import json

import pytest
from paths import BUILT_IN

torch = pytest.importorskip("torch")
pytest.importorskip("transformer_lens.HookedTransformer", reason="needs TransformerLens 2")
attribution = pytest.importorskip("eap.attribute", reason="needs EAP-IG")

from eap.graph import Graph  # noqa: E402

import lens  # noqa: E402

PAIRS, STEPS = 20, 5
# Of the largest score; sums of products in f32, in another order.
TOLERANCE = 1e-4
METHODS = {"eap": "EAP", "eap-ig": "EAP-IG-inputs", "clean-corrupted": "clean-corrupted"}


class ToCpu:
    """PyTorch for a module that asks for CUDA."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros(self, *sizes, device=None, **options):
        return torch.zeros(*sizes, device="cpu", **options)


@pytest.fixture(scope="module", params=["given", "seeded"])
def folder(request, option, tmp_path_factory):
    given = option("model") or BUILT_IN
    return given if request.param == "given" else lens.seeded(tmp_path_factory.mktemp("seeded"), option("tokenizer") or given)


@pytest.fixture(scope="module")
def pairs(folder, program, tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "ioi.jsonl"
    program("look", "data", "ioi", "--count", PAIRS, "--model", folder, "--out", path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return lens.hooked(folder, use_attn_result=True, use_split_qkv_input=True, use_hook_mlp_in=True)


def logit_difference(logits, _, lengths, labels):
    last = logits[torch.arange(len(logits)), lengths - 1]
    picked = last.gather(-1, labels)
    return (picked[:, 0] - picked[:, 1]).mean()


def batches(model, path):
    for line in path.read_text().splitlines():
        pair = json.loads(line)
        labels = [model.to_single_token(pair[side][0]) for side in ("answer", "against")]
        yield [pair["clean"]], [pair["corrupt"]], torch.tensor([labels])


@pytest.mark.parametrize("method", METHODS)
def test_scores_of_edges(method, model, pairs, folder, program, monkeypatch):
    monkeypatch.setattr(attribution, "torch", ToCpu())
    graph = Graph.from_model(model)
    attribution.attribute(
        model, graph, list(batches(model, pairs)), logit_difference, method=METHODS[method], ig_steps=STEPS, quiet=True
    )
    found = json.loads(
        program("look", "circuit", "--data", pairs, "--method", method, "--steps", STEPS, "--bos", "--model", folder, "--json")
    )["edges"]
    assert found.keys() == graph.edges.keys()
    largest = max(abs(edge.score.item()) for edge in graph.edges.values())
    differences = {name: abs(edge.score.item() - found[name]["score"]) / largest for name, edge in graph.edges.items()}
    worst = max(differences, key=differences.get)
    print(f"{method}: {len(found)} edges, largest {largest:.4f}, farthest {worst} by {differences[worst]:.1e} of it")
    assert differences[worst] < TOLERANCE
