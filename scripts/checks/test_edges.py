"""Edge scores: `gpt2 look circuit` agrees with the authors' EAP-IG.

Needs requirements-circuits.txt and https://github.com/hannamw/EAP-IG, installed from source (`pip install` of
the folder). Each method scores 20 prompt pairs from `gpt2 look data`, on the model in --model and on one with
random weights. The authors' code puts scores on CUDA; here they are redirected to the CPU. It averages over a
batch and divides by the number of pairs again, so each batch holds one pair.
"""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformer_lens.HookedTransformer", reason="needs TransformerLens 2")
attribution = pytest.importorskip("eap.attribute", reason="needs EAP-IG")

from eap.graph import Graph  # noqa: E402

import lens  # noqa: E402

PAIRS, STEPS = 20, 5
# Relative to the largest score; covers f32 sums of products in a different order.
TOLERANCE = 1e-4
METHODS = {"eap": "EAP", "eap-ig": "EAP-IG-inputs", "clean-corrupted": "clean-corrupted"}


class ToCpu:
    """Makes PyTorch use the CPU in a module that requests CUDA."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros(self, *sizes, device=None, **options):
        return torch.zeros(*sizes, device="cpu", **options)


@pytest.fixture(scope="module", params=["supplied", "seeded"])
def folder(request, option, checkpoint, tmp_path_factory):
    return checkpoint if request.param == "supplied" else lens.seeded(tmp_path_factory.mktemp("seeded"), option("tokenizer") or checkpoint)


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
def test_edge_scores_match_eap_ig(method, model, pairs, folder, program, monkeypatch):
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
