"""Attribution graphs: `gpt2 look graph` yields circuit-tracer's edges, and JSON that its data models accept.

Needs requirements-circuits.txt. Uses random transcoders in circuit-tracer's file format, for the model in
--model and for one with random weights. circuit-tracer has no node for the position embedding and zeroes the
errors of the first position, so those edges are skipped. Its scores ignore both, so they are not compared.
"""

import json

import pytest
from paths import FIXTURES

torch = pytest.importorskip("torch")
pytest.importorskip("transformer_lens.HookedTransformer", reason="needs TransformerLens 2")
tracer = pytest.importorskip("circuit_tracer", reason="needs circuit-tracer")

import yaml  # noqa: E402
from circuit_tracer.frontend.graph_models import Model as Frontend  # noqa: E402
from circuit_tracer.replacement_model.replacement_model_transformerlens import TransformerLensReplacementModel  # noqa: E402
from circuit_tracer.transcoder.cross_layer_transcoder import load_clt  # noqa: E402
from circuit_tracer.transcoder.single_layer_transcoder import load_transcoder_set  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import lens  # noqa: E402

TEXT = "When Mia and Tom went to the park, Tom gave a ball to"
LATENTS = 60
OUTPUT = "hook_mlp_out"
# Relative to the largest edge; covers f32 sums of hundreds of products in a different order.
TOLERANCE = 1e-5
# Kind of transcoder files, input hook point, and whether there is a threshold and a skip connection.
KINDS = {
    "relu": ("transcoder_set", "hook_resid_mid", False, False),
    "jump-relu": ("transcoder_set", "ln2.hook_normalized", True, False),
    "skip": ("transcoder_set", "mlp.hook_in", True, True),
    "cross-layer": ("cross_layer_transcoder", "hook_resid_mid", True, False),
}


@pytest.fixture(scope="module", params=["supplied", "seeded"])
def folder(request, option, checkpoint, tmp_path_factory):
    return checkpoint if request.param == "supplied" else lens.seeded(tmp_path_factory.mktemp("seeded"), option("tokenizer") or checkpoint)


def write_transcoders(folder, layers, width, kind):
    """Writes random transcoders with few active latents to a folder that both programs read."""
    model_kind, input_hook, has_threshold, has_skip = KINDS[kind]
    generator = torch.Generator().manual_seed(11)

    def random(*shape, scale):
        return torch.randn(*shape, generator=generator) * scale

    for layer in range(layers):
        encoder = {"W_enc": random(LATENTS, width, scale=width**-0.5), "b_enc": random(LATENTS, scale=0.1) - 0.5}
        encoder["b_dec"] = random(width, scale=0.1)
        threshold = random(LATENTS, scale=0.2).abs()
        if model_kind == "cross_layer_transcoder":
            encoder = {f"{name}_{layer}": value for name, value in encoder.items()} | {f"threshold_{layer}": threshold}
            save_file(encoder, folder / f"W_enc_{layer}.safetensors")
            decoder = {f"W_dec_{layer}": random(LATENTS, layers - layer, width, scale=width**-0.5)}
            save_file(decoder, folder / f"W_dec_{layer}.safetensors")
            continue
        encoder["W_dec"] = random(LATENTS, width, scale=width**-0.5)
        if has_threshold:
            encoder["activation_function.threshold"] = threshold
        if has_skip:
            encoder["W_skip"] = random(width, width, scale=0.3 * width**-0.5)
        save_file(encoder, folder / f"layer_{layer}.safetensors")
    config = {"model_kind": model_kind, "feature_input_hook": input_hook, "feature_output_hook": OUTPUT, "scan": "check", "activation": "relu"}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def load_transcoders(folder, layers, kind):
    """Loads the transcoders with circuit-tracer."""
    model_kind, input_hook, *_ = KINDS[kind]
    common = dict(feature_input_hook=input_hook, feature_output_hook=OUTPUT, scan="check", device=torch.device("cpu"), dtype=torch.float32)
    if model_kind == "cross_layer_transcoder":
        return load_clt(str(folder), **common)
    return load_transcoder_set({layer: str(folder / f"layer_{layer}.safetensors") for layer in range(layers)}, **common)


def edges_of(graph, layers):
    """Returns circuit-tracer's edges, keyed by our node ids."""
    ids = graph.input_tokens.tolist()
    nodes = [f"{layer}_{feature}_{position}" for layer, position, feature in graph.active_features.tolist()]
    nodes += [f"err_{layer}_{position}" for layer in range(layers) for position in range(len(ids))]
    nodes += [f"E_{token}_{position}" for position, token in enumerate(ids)]
    nodes += [f"{layers + 1}_{target.vocab_idx}_{len(ids) - 1}" for target in graph.logit_targets]
    return {target: dict(zip(nodes, row)) for target, row in zip(nodes, graph.adjacency_matrix.tolist())}


def assert_same(program, folder, transcoders, tracer_transcoders):
    """Compares `gpt2 look graph` with circuit-tracer on the same transcoders."""
    layers = json.loads((folder / "config.json").read_text())["n_layer"]
    model = lens.hooked(folder, TransformerLensReplacementModel)
    # circuit-tracer's `from_pretrained` calls this after loading.
    model._configure_replacement_model(tracer_transcoders)
    ids = model.to_tokens(TEXT, prepend_bos=True)[0]
    theirs = edges_of(tracer.attribute(ids, model, batch_size=64), layers)
    found = json.loads(
        program("look", "graph", TEXT, "--bos", "--model", folder, "--transcoders", transcoders, "--node-threshold", 1, "--edge-threshold", 1,
                "--max-feature-nodes", 100_000, "--json")
    )
    Frontend.model_validate(found)
    # Our graph omits nodes without influence on the logits.
    nodes = [node["node_id"] for node in found["nodes"]]
    ours = [node for node in nodes if node in theirs]
    assert len(nodes) - len(ours) == len(ids), "only the position nodes are extra"
    weights = {(link["target"], link["source"]): link["weight"] for link in found["links"]}
    largest = max(abs(weight) for row in theirs.values() for weight in row.values())
    differences = {
        (target, source): abs(theirs[target][source] - weights.get((target, source), 0.0)) / largest
        for target in ours for source in ours if not (source.startswith("err_") and source.endswith("_0"))
    }
    worst = max(differences, key=differences.get)
    features = sum(node["feature_type"] == "cross layer transcoder" for node in found["nodes"])
    print(f"{features} features, {len(differences)} pairs of nodes, farthest {worst} by {differences[worst]:.1e} of the largest, {largest:.3f}")
    assert features > 50
    assert differences[worst] < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_graph_edges_match_circuit_tracer(kind, folder, program, tmp_path):
    sizes = json.loads((folder / "config.json").read_text())
    write_transcoders(tmp_path, sizes["n_layer"], sizes["n_embd"], kind)
    assert_same(program, folder, tmp_path, load_transcoders(tmp_path, sizes["n_layer"], kind))


def test_graph_of_trained_transcoders_matches_circuit_tracer(program, built_in, tmp_path):
    """Checks transcoders saved in SAELens's format.

    circuit-tracer reads them after one matrix is transposed and one name is changed, as the guide describes.
    """
    layers = json.loads((built_in / "config.json").read_text())["n_layer"]
    text = FIXTURES / "evaluation" / "text.txt"
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    theirs.mkdir()
    for layer in range(layers):
        program("train", "--task", "dictionary", "--kind", "skip-transcoder", "--data", text, "--init", built_in, "--site",
                f"blocks.{layer}.hook_resid_mid", "--latents", LATENTS, "--k", 12, "--steps", 3, "--batch-size", 2, "--context", 64,
                "--out", ours / str(layer))
        tensors = load_file(ours / str(layer) / "sae_weights.safetensors")
        tensors["W_enc"] = tensors["W_enc"].T.contiguous()
        tensors["activation_function.threshold"] = tensors.pop("threshold")
        save_file(tensors, theirs / f"layer_{layer}.safetensors")
    paths = {layer: str(theirs / f"layer_{layer}.safetensors") for layer in range(layers)}
    tracer_transcoders = load_transcoder_set(
        paths, feature_input_hook="hook_resid_mid", feature_output_hook=OUTPUT, scan="check", device=torch.device("cpu"),
    )
    assert_same(program, built_in, ours, tracer_transcoders)
