"""SAEs and transcoders as objects: made of arrays, saved, and spliced in where they read and write."""

import json
from functools import partial

import candle_gpt2
import numpy as np
import pytest
from candle_gpt2 import SAE, HookedTransformer

from support import FIXTURES, read_safetensors

TEXT = "One day, Mia was playing with her red ball."
READ, WRITTEN = "blocks.5.hook_resid_mid", "blocks.5.hook_mlp_out"
# Sums in float32.
CLOSE = partial(np.testing.assert_allclose, rtol=2e-5, atol=5e-5)


@pytest.fixture(scope="module")
def model():
    """The built-in model as it is stored, on which its transcoders were trained."""
    return HookedTransformer.from_pretrained_no_processing(default_prepend_bos=False, tensors="numpy")


def test_a_transcoder_reads_and_writes_at_its_own_hook_points(model):
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
    # What it reads is the value after the hooks there.
    edited = model.run_with_hooks_with_saes(TEXT, saes=[sae], fwd_hooks=[(READ, lambda value, hook: value * 2)])
    twice = model.run_with_hooks(
        TEXT, fwd_hooks=[(READ, lambda value, hook: value * 2), (WRITTEN, lambda value, hook: sae(read * 2))]
    )
    CLOSE(edited, twice)


def test_transcoders_come_and_go_like_autoencoders(model):
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
    # An SAE where a transcoder reads: what it reconstructs is read.
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


def test_an_sae_is_made_of_arrays_and_saved(model, tmp_path):
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
    model.run_with_saes(TEXT, saes=[sae])  # no warning: which weights it was trained on is not said
    sae.save(tmp_path / "mine")
    again = SAE.load(tmp_path / "mine", model)
    assert json.loads((tmp_path / "mine" / "cfg.json").read_text())["metadata"]["note"] == "mine"
    assert again.cfg == sae.cfg
    for weight, value in weights.items():
        np.testing.assert_array_equal(getattr(again, weight), value)
    for change, message in (
        ({"architecture": "cubist"}, 'architecture.*expected "standard"'),
        ({"d_sae": 8}, r"W_enc.*\(192, 8\)"),
        ({"k": 0}, "k.*whole number from 1"),
    ):
        with pytest.raises(ValueError, match=message):
            SAE({**cfg, **change}, weights)
    with pytest.raises(ValueError, match="b_enc"):
        SAE(cfg, {key: value for key, value in weights.items() if key != "b_enc"})
    with pytest.raises(TypeError, match=r"expected a dict of weights; SAE\.load\(folder\) reads files"):
        SAE(cfg)


@pytest.mark.parametrize("name", ["gated", "jumprelu", "rescaled", "transcoder", "jumprelu-skip-transcoder"])
def test_a_saved_dictionary_is_the_one_that_was_read(name, tmp_path):
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


def test_a_file_of_openai_is_saved_in_the_layout_of_saelens(tmp_path):
    read = partial(SAE.load, FIXTURES / "dictionaries" / "openai-topk.pt", site="blocks.0.hook_mlp_out")
    sae = read()
    sae.save(tmp_path)
    again = SAE.load(tmp_path)
    assert again.cfg.architecture == "topk" and again.cfg.normalize_activations == "layer_norm"
    x = np.random.default_rng(0).normal(size=(5, sae.cfg.d_in)).astype(np.float32)
    CLOSE(again.decode(again.encode(x), x), sae.decode(sae.encode(x), x))


def test_the_transcoders_inside_the_package_have_a_name():
    native = candle_gpt2.Model.from_pretrained()
    assert native.dictionary("built-in").hook_name_out == "blocks.3.hook_mlp_out"
    assert SAE.from_pretrained("built-in", READ).hook_name == READ
    assert "gpt2 0.1.0" in SAE.load("built-in").cfg.trained_with
    with pytest.raises(ValueError, match="no transcoder there; expected one of blocks.0.hook_resid_mid"):
        native.dictionary("built-in", "blocks.0.hook_resid_pre")
