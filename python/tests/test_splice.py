"""SAEs and transcoders as objects: creation from arrays, saving, and splicing."""

import json
from functools import partial

import candle_gpt2
import numpy as np
import pytest
from candle_gpt2 import SAE, HookedTransformer

from support import FIXTURES, read_safetensors

TEXT = "One day, Mia was playing with her red ball."
READ, WRITTEN = "blocks.5.hook_resid_mid", "blocks.5.hook_mlp_out"
# Tolerance for sums in float32.
CLOSE = partial(np.testing.assert_allclose, rtol=2e-5, atol=5e-5)


@pytest.fixture(scope="module")
def model():
    """Built-in model with unprocessed weights, on which its transcoders were trained."""
    return HookedTransformer.from_pretrained_no_processing(default_prepend_bos=False, tensors="numpy")


def test_transcoder_has_separate_input_and_output_hook_points(model):
    sae = SAE.load("built-in", model, site=READ)
    assert (sae.hook_name, sae.hook_name_out) == (READ, WRITTEN) == (sae.cfg.hook_name, sae.cfg.hook_name_out)
    plain, cache = model.run_with_cache(TEXT)
    spliced, seen = model.run_with_cache_with_saes(TEXT, saes=[sae])
    read = cache[READ]
    CLOSE(seen[f"{WRITTEN}.hook_sae_input"], read)
    CLOSE(seen[f"{WRITTEN}.hook_sae_output"], sae.decode(sae.encode(read), read))
    np.testing.assert_array_equal(seen[READ], read)
    by_hand = model.run_with_hooks(TEXT, fwd_hooks=[(WRITTEN, lambda value, hook: sae.decode(sae.encode(read), read))])
    CLOSE(spliced, by_hand)
    assert not np.allclose(spliced, plain, atol=1e-2)
    CLOSE(model.run_with_saes(TEXT, saes=[sae], use_error_term=True), plain)
    CLOSE(sae(read), seen[f"{WRITTEN}.hook_sae_output"])
    # A transcoder reads the value after the hooks.
    edited = model.run_with_hooks_with_saes(TEXT, saes=[sae], fwd_hooks=[(READ, lambda value, hook: value * 2)])
    twice = model.run_with_hooks(
        TEXT, fwd_hooks=[(READ, lambda value, hook: value * 2), (WRITTEN, lambda value, hook: sae(read * 2))]
    )
    CLOSE(edited, twice)


def test_transcoders_are_added_and_removed_like_autoencoders(model):
    sae, other = SAE.load("built-in", model, site=READ), SAE.load("built-in", model, site="blocks.2.hook_resid_mid")
    plain = model(TEXT)
    model.add_sae(sae)
    assert list(model.acts_to_saes) == [READ]
    with model.saes([sae, other], use_error_term=True):
        assert set(model.acts_to_saes) == {READ, other.hook_name}
        CLOSE(model(TEXT), plain)
    assert model.acts_to_saes == {READ: sae} and not sae.use_error_term
    assert not np.allclose(model(TEXT), plain, atol=1e-2)
    residual = model(TEXT, stop_at_layer=5)
    CLOSE(model(residual, start_at_layer=5), model(TEXT))
    model.reset_saes(READ)
    np.testing.assert_array_equal(model(TEXT), plain)
    # A transcoder reads the reconstruction of an SAE at the same hook point.
    width = model.cfg.d_model
    weights = {"W_enc": np.zeros((width, 3)), "b_enc": np.zeros(3), "W_dec": np.zeros((3, width)), "b_dec": np.ones(width)}
    constant = SAE({"architecture": "standard", "d_in": width, "d_sae": 3, "hook_name": READ}, weights)
    for both in ([sae, constant], [constant, sae]):
        with model.saes(both):
            assert model.acts_to_saes == {READ: constant, WRITTEN: sae}
            _, seen = model.run_with_cache(TEXT)
            np.testing.assert_array_equal(seen[f"{WRITTEN}.hook_sae_input"], np.ones_like(seen[f"{READ}.hook_sae_input"]))
    _, seen = model.run_with_cache_with_saes(TEXT, saes=[other])
    assert f"{other.hook_name_out}.hook_sae_input" in seen
    np.testing.assert_array_equal(model(TEXT), plain)


def test_sae_from_arrays_can_be_saved(model, tmp_path):
    random = np.random.default_rng(0)
    width, latents, name = model.cfg.d_model, 7, "blocks.3.hook_resid_post"
    weights = {
        "W_enc": random.normal(size=(width, latents)).astype(np.float32),
        "W_dec": random.normal(size=(latents, width)).astype(np.float32),
        "b_enc": random.normal(size=latents).astype(np.float32),
        "b_dec": random.normal(size=width).astype(np.float32),
    }
    cfg = {"architecture": "topk", "k": 3, "d_in": width, "d_sae": latents, "hook_name": name, "prepend_bos": False, "note": "mine"}
    sae = SAE(cfg, weights)
    assert repr(sae) == f"SAE({name}, topk, d_in={width}, d_sae={latents})"
    assert (sae.cfg.k, sae.cfg.prepend_bos, sae.cfg.metadata.note, sae.cfg.metadata.hook_name) == (3, False, "mine", name)
    x = model.run_with_cache(TEXT, names_filter=name)[1][name]
    before = (x - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]
    largest = np.sort(before, -1)[..., -3, None]
    CLOSE(sae.encode(x), np.where(before >= largest, before.clip(0), 0), atol=1e-4)
    model.run_with_saes(TEXT, saes=[sae])  # no warning, because the training weights are unknown
    sae.save(tmp_path / "mine")
    again = SAE.load(tmp_path / "mine", model)
    assert json.loads((tmp_path / "mine" / "cfg.json").read_text())["metadata"]["note"] == "mine"
    assert again.cfg == sae.cfg
    for weight, value in weights.items():
        np.testing.assert_array_equal(getattr(again, weight), value)
    for change, message in (
        ({"architecture": "cubist"}, 'architecture.*expected "standard"'),
        ({"d_sae": 8}, r"W_enc.*\(256, 8\)"),
        ({"k": 0}, "k.*positive integer"),
    ):
        with pytest.raises(ValueError, match=message):
            SAE({**cfg, **change}, weights)
    with pytest.raises(ValueError, match="b_enc"):
        SAE(cfg, {key: value for key, value in weights.items() if key != "b_enc"})
    with pytest.raises(TypeError, match=r"pass a dict of weights, or use SAE\.load\(folder\) to read files"):
        SAE(cfg)


@pytest.mark.parametrize("name", ["gated", "jumprelu", "rescaled", "transcoder", "jumprelu-skip-transcoder"])
def test_saved_dictionary_equals_the_original(name, tmp_path):
    folder = FIXTURES / "dictionaries" / f"saelens-{name}"
    sae = SAE.load(folder)
    sae.save(tmp_path)
    stored, written = (read_safetensors(one / "sae_weights.safetensors")[1] for one in (folder, tmp_path))
    assert stored.keys() == written.keys()
    for key, value in stored.items():
        np.testing.assert_array_equal(written[key], value)
    again = SAE.load(tmp_path)
    assert again.cfg == sae.cfg and again.dictionary.trained_on_processed == sae.dictionary.trained_on_processed
    x = np.random.default_rng(0).normal(size=(5, sae.cfg.d_in)).astype(np.float32)
    np.testing.assert_array_equal(again.encode(x), sae.encode(x))


def test_openai_dictionary_is_saved_in_saelens_format(tmp_path):
    read = partial(SAE.load, FIXTURES / "dictionaries" / "openai-topk.pt", site="blocks.0.hook_mlp_out")
    sae = read()
    sae.save(tmp_path)
    again = SAE.load(tmp_path)
    assert again.cfg.architecture == "topk" and again.cfg.normalize_activations == "layer_norm"
    x = np.random.default_rng(0).normal(size=(5, sae.cfg.d_in)).astype(np.float32)
    CLOSE(again.decode(again.encode(x), x), sae.decode(sae.encode(x), x))


def test_built_in_transcoders_are_loaded_by_name():
    native = candle_gpt2.Model.from_pretrained()
    assert native.dictionary("built-in").hook_name_out == "blocks.3.hook_mlp_out"
    assert SAE.from_pretrained("built-in", READ).hook_name == READ
    assert "gpt2 0.1.0" in SAE.load("built-in").cfg.trained_with
    with pytest.raises(ValueError, match="no transcoder there; expected one of blocks.0.hook_resid_mid"):
        native.dictionary("built-in", "blocks.0.hook_resid_pre")


# Gradients of weights, compared with the same formulas in plain torch.

# Options of `reconstruct` for each fixture.
OPTIONS = {
    "plain": {},
    "topk": {"k": 3, "is_normalized": True, "subtracts_bias": False},
    "rescaled": {"k": 3, "is_rescaled": True},
    "jumprelu": {},
    "gated": {},
    "transcoder": {"subtracts_bias": False},
    "jumprelu-skip-transcoder": {"subtracts_bias": False},
}


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="torch is not installed: pip install torch")


def reconstruct(w, x, k=None, is_normalized=False, is_rescaled=False, subtracts_bias=True):
    """Reconstructs x (…, C) with weights keyed by their SAELens names."""
    mean, deviation = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    inner = (x - mean) / (deviation + 1e-5) if is_normalized else x
    inner = inner - w["b_dec"] if subtracts_bias else inner
    before = inner @ w["W_enc"] + w["b_gate" if "b_gate" in w else "b_enc"]
    lengths = w["W_dec"].norm(dim=-1) if is_rescaled else 1
    if "b_gate" in w:
        latents = (inner @ (w["W_enc"] * w["r_mag"].exp()) + w["b_mag"]).relu() * (before > 0)
    elif "threshold" in w:
        latents = before.relu() * (before > w["threshold"])
    elif k is not None:
        largest, indices = (before * lengths).topk(k)
        latents = (before * 0).scatter(-1, indices, largest.relu())
    else:
        latents = before.relu()
    output = latents / lengths @ w["W_dec"] + w["b_dec"]
    output = output * deviation + mean if is_normalized else output
    return output + x @ w["W_skip"].T if "W_skip" in w else output


def parameters_of(torch, stored):
    return {name: torch.from_numpy(np.asarray(value).copy()).requires_grad_() for name, value in stored.items()}


def assert_gradients(torch, sae, expected):
    assert set(sae.state_dict()) == set(expected)
    for name, weight in expected.items():
        found = getattr(sae, name).grad
        if name in ("threshold", "b_gate"):  # only in comparisons
            assert found is None and weight.grad is None
        else:
            torch.testing.assert_close(found, weight.grad, rtol=1e-4, atol=1e-4 * weight.grad.abs().max().item(), msg=name)


@pytest.mark.parametrize("name", OPTIONS)
def test_weight_gradients_match_plain_torch(torch, name):
    folder = FIXTURES / "dictionaries" / f"saelens-{name}"
    sae = SAE.load(folder)
    weights = parameters_of(torch, read_safetensors(folder / "sae_weights.safetensors")[1])
    x = torch.tensor(read_safetensors(FIXTURES / "dictionaries" / "expected.safetensors")[1][f"{name}.input"])
    expected = reconstruct(weights, x, **OPTIONS[name])
    factors = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    sae.requires_grad_()
    output = sae(x)
    torch.testing.assert_close(output, expected)
    for one in (output, expected):
        (one * factors).sum().backward()
    assert_gradients(torch, sae, weights)
    # Second derivatives with respect to the input.
    x.requires_grad_()
    seconds = []
    for one in (sae(x), reconstruct(weights, x, **OPTIONS[name])):
        (first,) = torch.autograd.grad((one**3).sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad((first * factors[..., :1]).sum(), x)[0])
    torch.testing.assert_close(seconds[0], seconds[1], rtol=1e-3, atol=1e-4 * seconds[1].abs().max().item())


@pytest.mark.parametrize("use_error_term", [False, True])
@pytest.mark.parametrize("hook_name", [READ, WRITTEN])
def test_spliced_weight_gradients_match_plain_torch(torch, hook_name, use_error_term):
    model = HookedTransformer.from_pretrained_no_processing(default_prepend_bos=False, tensors="torch")
    width, options = model.cfg.d_model, {}
    if hook_name == READ:
        sae, options = SAE.load("built-in", model, site=READ), {"subtracts_bias": False}  # a transcoder
    else:
        random = np.random.default_rng(0)
        shapes = {"W_enc": (width, 64), "W_dec": (64, width), "b_enc": 64, "b_dec": width}
        weights = {name: torch.from_numpy(random.normal(scale=0.3, size=shape).astype(np.float32)) for name, shape in shapes.items()}
        sae = SAE({"architecture": "standard", "d_in": width, "d_sae": 64, "hook_name": hook_name}, weights)
    weights = parameters_of(torch, sae.state_dict())
    read = {}

    def replace(value, hook):
        x = read["x"] if hook_name == READ else value
        output = reconstruct(weights, x, **options)
        return output + (value - output).detach() if use_error_term else output

    hooks = [(hook_name, lambda value, hook: read.update(x=value)), (WRITTEN, replace)]
    expected = model.run_with_hooks(TEXT, return_type="loss", fwd_hooks=hooks)
    expected.backward()
    sae.requires_grad_()
    loss = model.run_with_saes(TEXT, return_type="loss", saes=[sae], use_error_term=use_error_term)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    loss.backward()
    assert_gradients(torch, sae, weights)
    assert not model(TEXT).requires_grad


def test_trained_weights_reach_files_and_the_engine(torch, tmp_path):
    model = HookedTransformer.from_pretrained_no_processing(default_prepend_bos=False, tensors="torch")
    sae = SAE.load("built-in", model, site=READ)
    before = sae.dictionary
    sae.requires_grad_()
    assert sae.dictionary is before
    optimizer = torch.optim.Adam(sae.parameters(), lr=1e-3)
    losses = []
    for _ in range(5):
        loss = model.run_with_saes(TEXT, return_type="loss", saes=[sae])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    sae.W_dec.data = sae.W_dec.data * 2
    x = model.run_with_cache(TEXT, names_filter=READ)[1][READ]
    expected = sae(x).detach()
    sae.save(tmp_path)
    CLOSE(SAE.load(tmp_path)(x), expected)
    engine = sae.dictionary
    assert engine is not before and sae.dictionary is engine
    CLOSE(engine.decode(engine.encode(x), x), expected)
    assert engine.trained_on_processed == before.trained_on_processed
