"""Gradients of `HookedTransformer` equal those of TransformerLens and SAELens with the same hooks.

Needs requirements-circuits.txt, the program, and this repository's Python package (scripts/build_wheel.sh). The
checkpoints are the built-in model and two small random ones. SAEs are filled with random numbers and saved by SAELens.
"""

from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformer_lens.HookedTransformer", reason="needs TransformerLens 2 or 3")
sae_lens = pytest.importorskip("sae_lens", reason="needs SAELens")
candle_gpt2 = pytest.importorskip("candle_gpt2", reason="needs the Python package")

import lens  # noqa: E402
from sae_lens.registry import get_sae_class  # noqa: E402
from sae_lens.saes.sae import SAEMetadata  # noqa: E402

# Relative to the largest value; covers f32 sums in a different order.
TOLERANCE = 1e-4
CHECKPOINTS = {"built-in": None, "plain": dict(), "relu": dict(seed=7, n_embd=40, n_layer=2, n_head=5, activation_function="relu")}
SAES = ("standard", "topk", "jumprelu", "gated")
TRANSCODERS = ("transcoder", "jumprelu_transcoder")
IDS = torch.tensor([[5, 9, 200, 31, 7, 7, 90, 2], [1, 44, 8, 16, 3, 7, 5, 6]])


@pytest.fixture(scope="module", params=CHECKPOINTS)
def models(request, built_in, tmp_path_factory):
    """Returns the model in TransformerLens and in this package, both with unprocessed weights."""
    sizes = CHECKPOINTS[request.param]
    folder = built_in if sizes is None else lens.seeded(tmp_path_factory.mktemp(request.param), built_in, **sizes)
    theirs = lens.hooked(folder, sae_lens.HookedSAETransformer)
    return theirs, candle_gpt2.HookedTransformer.from_pretrained_no_processing(folder)


def assert_near(found, expected, label):
    difference = ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
    print(f"{label}: differs by {difference:.1e} of the largest")
    assert difference < TOLERANCE, label


def random(*shape, seed=1, scale=0.1):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).requires_grad_()


def add_vector(value, hook, vector):
    value[:, 2:] += vector
    return value


def scale_heads(value, hook, factors):
    return value * (1 + factors[:, None])


def transform(value, hook, down, up):
    return value + (value @ down) @ up


def project_out(value, hook, direction):
    unit = direction / direction.norm()
    return value - (value @ unit)[..., None] * unit


def mix_patterns(value, hook, weights):
    fractions = weights.softmax(0)
    return fractions[0] * value + fractions[1] * value.flip(1)


def bias_scores(value, hook, bias):
    value[:, 0, :, 1] = value[:, 0, :, 1] + bias
    return value


EDITS = {
    "vector": ("blocks.1.hook_resid_pre", add_vector, lambda cfg: dict(vector=random(cfg.d_model))),
    "heads": ("blocks.1.attn.hook_z", scale_heads, lambda cfg: dict(factors=random(cfg.n_heads))),
    "values": ("blocks.0.attn.hook_v", scale_heads, lambda cfg: dict(factors=random(cfg.n_heads))),
    "low rank": ("blocks.0.hook_mlp_out", transform, lambda cfg: dict(down=random(cfg.d_model, 3), up=random(3, cfg.d_model, seed=2))),
    "projection": ("blocks.1.hook_resid_mid", project_out, lambda cfg: dict(direction=random(cfg.d_model))),
    "pattern": ("blocks.1.attn.hook_pattern", mix_patterns, lambda cfg: dict(weights=random(2))),
    "scores": ("blocks.1.attn.hook_attn_scores", bias_scores, lambda cfg: dict(bias=random(1))),
    "keys": ("blocks.1.attn.hook_k", add_vector, lambda cfg: dict(vector=random(cfg.d_head))),
    "neurons": ("blocks.0.mlp.hook_pre", add_vector, lambda cfg: dict(vector=random(cfg.d_mlp))),
    "normalized": ("blocks.1.ln2.hook_normalized", add_vector, lambda cfg: dict(vector=random(cfg.d_model))),
    "scale": ("blocks.1.ln2.hook_scale", transform, lambda cfg: dict(down=random(1, 1), up=random(1, 1))),
    "position": ("hook_pos_embed", add_vector, lambda cfg: dict(vector=random(cfg.d_model))),
}


@pytest.mark.parametrize("name", EDITS)
def test_gradients_through_edits_match(models, name):
    point, edit, parameters_of = EDITS[name]
    parameters = parameters_of(models[0].cfg)
    found = []
    for model in models:
        loss = model.run_with_hooks(IDS, return_type="loss", fwd_hooks=[(point, partial(edit, **parameters))])
        found.append([loss, *torch.autograd.grad(loss, list(parameters.values()))])
    for theirs, ours in zip(*found, strict=True):
        assert_near(ours, theirs, name)


def test_integrated_gradients_from_a_custom_hook_match(models):
    def integrated_gradients(model):
        with torch.no_grad():
            x = model.run_with_cache(IDS, names_filter="hook_embed")[1]["hook_embed"]
        baseline = x.mean((0, 1), keepdim=True).expand_as(x)
        total = torch.zeros_like(x)
        for step in range(8):
            point = (baseline + (step + 0.5) / 8 * (x - baseline)).detach().requires_grad_()
            logits = model.run_with_hooks(IDS, fwd_hooks=[("hook_embed", lambda value, hook, point=point: point)])
            total += torch.autograd.grad((logits[:, -1, 3] - logits[:, -1, 5]).sum(), point)[0]
        return (x - baseline) * total / 8

    theirs, ours = map(integrated_gradients, models)
    assert_near(ours, theirs, "integrated gradients")


def test_gradient_of_the_initial_residual_matches(models):
    found = []
    for model in models:
        with torch.no_grad():
            residual = model(IDS, stop_at_layer=1)
        residual.requires_grad_()
        loss = model(residual, start_at_layer=1, tokens=IDS, return_type="loss")
        loss.backward()
        found.append(residual.grad)
    assert_near(found[1], found[0], "start_at_layer=1")


def test_gradients_of_every_activation_match(models):
    """If weights require gradients, autograd records the run from its beginning."""
    models[1].requires_grad_()
    found = []
    for model in models:
        seen = {}

        def keep(value, hook, seen=seen):
            seen[hook.name] = value
            return value

        # TransformerLens runs ln1 three times per block. SAELens adds mlp.hook_in.
        loss = model.run_with_hooks(IDS, return_type="loss", fwd_hooks=[(lambda name: ".ln1." not in name and "mlp.hook_in" not in name, keep)])
        found.append(dict(zip(seen, torch.autograd.grad(loss, list(seen.values())), strict=True)))
    models[1].requires_grad_(False)
    assert len(found[1]) > 30 and set(found[1]) <= set(found[0])
    for name, gradient in found[1].items():
        if name.endswith("attn_scores"):  # masked scores have no gradient
            gradient, found[0][name] = gradient.tril(), found[0][name].tril()
        assert_near(gradient, found[0][name], name)


def test_weight_gradients_match(models):
    found = []
    for model in models:
        model.zero_grad()
        model(IDS, return_type="loss").backward()
        found.append({name: weight.grad for name, weight in model.named_parameters()})
        assert model.blocks[1].attn.W_Q.grad is found[-1]["blocks.1.attn.W_Q"]
        model.zero_grad()
    models[1].requires_grad_(False)
    for name, gradient in found[0].items():
        if name.endswith("b_K"):  # a constant added to all scores of a query changes nothing
            assert gradient.abs().max() < 1e-6 and found[1][name].abs().max() < 1e-6
        else:
            assert_near(found[1][name], gradient, name)


def test_backward_hooks_through_an_edit_match(models):
    vector = random(models[0].cfg.d_model)
    points = ["blocks.0.hook_resid_pre", "blocks.0.attn.hook_z", "blocks.1.hook_resid_post"]
    found = []
    for model in models:
        gradients = {}
        hooks = [(name, lambda gradient, hook, gradients=gradients: gradients.update({hook.name: gradient})) for name in points]
        with model.hooks([("blocks.1.hook_resid_pre", partial(add_vector, vector=vector))], hooks):
            model(IDS, return_type="loss").backward()
        found.append(gradients)
    vector.grad = None
    models[0].zero_grad()
    for name in points:
        assert_near(found[1][name], found[0][name], name)


def test_training_a_steering_vector_gives_the_same_losses(models):
    losses = []
    for model in models:
        vector = torch.zeros(model.cfg.d_model, requires_grad=True)
        optimizer = torch.optim.Adam([vector], lr=0.05)
        hooks = [("blocks.1.hook_resid_pre", partial(add_vector, vector=vector))]
        history = []
        for _ in range(20):
            logits = model.run_with_hooks(IDS, fwd_hooks=hooks)
            loss = -logits[:, -1].log_softmax(-1)[:, 11].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.detach())
        losses.append(torch.stack(history))
    print(f"loss from {losses[1][0]:.4f} to {losses[1][-1]:.4f}")
    assert losses[1][-1] < 0.9 * losses[1][0]
    assert_near(losses[1], losses[0], "losses")


def random_sae(architecture, cfg, folder):
    """Saves a random dictionary with SAELens, and returns it as SAELens' object and as ours."""
    kind, config = get_sae_class(architecture)
    is_transcoder = architecture.endswith("transcoder")
    metadata = SAEMetadata(hook_name="blocks.1.hook_resid_mid" if is_transcoder else "blocks.1.hook_resid_pre", prepend_bos=True)
    sizes = {"d_in": cfg.d_model, "d_sae": 96, "metadata": metadata}
    if is_transcoder:
        metadata.hook_name_out = "blocks.1.hook_mlp_out"
        sizes |= {"d_out": cfg.d_model, "apply_b_dec_to_input": False}
    sizes |= {"k": 8} if architecture == "topk" else {}
    sae = kind(config(**sizes))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in sae.named_parameters():
            scale = cfg.d_model**-0.5 if name.startswith("W_") else 0.3
            values = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(values.abs() if name == "threshold" else values)
    sae.save_model(folder)
    return sae_lens.SAE.load_from_disk(folder, device="cpu"), candle_gpt2.SAE.load(folder)


@pytest.mark.parametrize("use_error_term", [False, True])
@pytest.mark.parametrize("architecture", [*SAES, *TRANSCODERS])
def test_latent_and_error_gradients_match(models, architecture, use_error_term, tmp_path):
    pair = random_sae(architecture, models[0].cfg, tmp_path)
    prefix = "blocks.1.hook_mlp_out" if architecture in TRANSCODERS else "blocks.1.hook_resid_pre"
    found = []
    for model, sae in zip(models, pair, strict=True):
        seen = {}

        def keep(value, hook, seen=seen):
            # SAELens treats the error as a constant.
            if hook.name.endswith("error"):
                value = value.detach().requires_grad_()
            elif not value.requires_grad:
                value.requires_grad_()
            seen[hook.name] = value
            return value

        ends = ["acts_pre", "acts_post", "recons", "output", *(["error"] if use_error_term else [])]
        names = ["blocks.0.hook_resid_pre", *(f"{prefix}.hook_sae_{end}" for end in ends)]
        with model.saes(saes=[sae], use_error_term=use_error_term), model.hooks([(name, keep) for name in names]), torch.enable_grad():
            loss = model(IDS, return_type="loss")
        found.append(dict(zip(seen, torch.autograd.grad(loss, list(seen.values())), strict=True)))
    assert set(found[0]) == set(found[1]) == set(names)
    for name in names:
        assert_near(found[1][name], found[0][name], f"{architecture}: {name}")


@pytest.mark.parametrize("architecture", [*SAES, *TRANSCODERS])
def test_dictionary_weight_gradients_match(models, architecture, tmp_path):
    pair = random_sae(architecture, models[0].cfg, tmp_path)
    found = []
    for model, sae in zip(models, pair, strict=True):
        sae.requires_grad_()
        with model.saes(saes=[sae]), torch.enable_grad():
            model(IDS, return_type="loss").backward()
        found.append({name: weight.grad for name, weight in sae.named_parameters()})
    models[0].zero_grad()
    assert set(found[0]) == set(found[1])
    for name, gradient in found[0].items():
        if gradient is None:  # only in comparisons
            assert found[1][name] is None and name in ("threshold", "b_gate")
        else:
            assert_near(found[1][name], gradient, f"{architecture}: {name}")


@pytest.mark.parametrize("name", ["W_E", "W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "W_U"])
def test_gradients_of_a_loss_on_stacked_weights_match(models, name):
    found = []
    for model in models:
        model.zero_grad()
        (model(IDS, return_type="loss") * getattr(model, name).square().mean()).backward()
        found.append({weight: value.grad for weight, value in model.named_parameters() if weight.endswith(name)})
        model.zero_grad()
    models[1].requires_grad_(False)
    for weight, gradient in found[0].items():
        assert_near(found[1][weight], gradient, weight)
