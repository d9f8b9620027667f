"""`HookedTransformer`: TransformerLens' values (4.3.0, compatibility mode) with the API of 2.x."""

import importlib
import json
import os
import pickle
import shutil
import warnings
from functools import partial
from pathlib import Path

import candle_gpt2
import numpy as np
import pytest
from candle_gpt2 import SAE, FactoredMatrix, HookedTransformer, TransformerBridge, components, head_detector, patching, utils

from support import FIXTURES, read_safetensors, write_safetensors

INSIDE = FIXTURES / "inside"
CASES = sorted(path.name for path in INSIDE.iterdir())
HOOKED = sorted(path.stem for path in (FIXTURES / "hooked").glob("*.safetensors"))
# Tolerance for float32 sums compared with TransformerLens' float64 sums, for values up to about 20.
CLOSE = partial(np.testing.assert_allclose, rtol=2e-5, atol=5e-5)
STEPS = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
TEXT = "One, my dog, big"

_opened: dict[str, HookedTransformer] = {}


def open_processed(name):
    """Opens a fixture checkpoint without hooks. Its reference has no beginning-of-text token."""
    if name not in _opened:
        _opened[name] = HookedTransformer.from_pretrained(INSIDE / name, default_prepend_bos=False)
    model = _opened[name]
    model.reset_hooks(including_permanent=True)
    for switch in ("attn_result", "split_qkv_input", "attn_in", "hook_mlp_in"):
        getattr(model, f"set_use_{switch}")(False)
    return model


def write_model(folder, **sizes):
    """Writes a checkpoint with random weights."""
    config = {"bos_token_id": 0, "eos_token_id": 0, **sizes}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **config}))
    width, inner = config["n_embd"], config["n_inner"]
    block = {"ln_1.weight": (width,), "ln_1.bias": (width,), "ln_2.weight": (width,), "ln_2.bias": (width,)}
    for name, shape in (("attn.c_attn", (width, 3 * width)), ("attn.c_proj", (width, width)), ("mlp.c_fc", (width, inner)), ("mlp.c_proj", (inner, width))):
        block |= {f"{name}.weight": shape, f"{name}.bias": shape[1:]}
    shapes = {"wte.weight": (config["vocab_size"], width), "wpe.weight": (config["n_positions"], width)}
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    shapes |= {f"h.{layer}.{name}": shape for layer in range(config["n_layer"]) for name, shape in block.items()}
    random = np.random.default_rng(0)
    write_safetensors(folder / "model.safetensors", {name: random.normal(size=shape) for name, shape in shapes.items()})


@pytest.fixture(scope="module")
def model():
    """Built-in model."""
    return HookedTransformer.from_pretrained()


@pytest.fixture
def plain():
    return open_processed("plain")


@pytest.fixture(params=CASES)
def analyses(request):
    """Model, results from TransformerLens, and the input ids."""
    folder = INSIDE / request.param
    values = json.loads((folder / "analyses.json").read_text())
    return open_processed(request.param), read_safetensors(folder / "analyses.safetensors")[1], values


@pytest.fixture(params=HOOKED)
def hooked(request):
    """Model, activations from TransformerLens, and ids (3, 7)."""
    expected = read_safetensors(FIXTURES / "hooked" / f"{request.param}.safetensors")[1]
    return open_processed(request.param), expected, expected["ids"].astype(int)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["raw", "compat"])
def test_every_hook_point_matches_the_reference(name, kind):
    model = open_processed(name)
    if kind == "raw":
        model = HookedTransformer.from_pretrained_no_processing(INSIDE / name)
    metadata, expected = read_safetensors(INSIDE / name / f"{kind}.safetensors")
    ids = np.array(json.loads(metadata["reference"])["ids"])
    model.set_use_attn_result(True)
    logits, cache = model.run_with_cache(ids)
    kept = dict(cache.items()) | {"logits": logits, "W_U": model.W_U, "b_U": model.b_U}
    expected.pop("unembed.hook_in")  # exists only in version 4
    assert set(expected) - set(kept) == set()
    for key, value in expected.items():
        CLOSE(kept[key], value, err_msg=key)
    layers = model.cfg.n_layers
    assert len(cache) == 18 * layers + 4, "as in TransformerLens, 17 in a block without hook_result"


def test_weights_match_transformer_lens(hooked):
    model, expected, _ = hooked
    for name in "W_Q W_K W_V W_O b_Q b_K b_V b_O W_in b_in W_out b_out W_E W_pos b_U".split():
        CLOSE(getattr(model, name), expected[name], err_msg=name)
    cfg = model.cfg
    assert model.W_E_pos.shape == (cfg.d_vocab + cfg.n_ctx, cfg.d_model)
    for part in ("W_Q", "W_O", "b_K"):
        np.testing.assert_array_equal(getattr(model.blocks[1].attn, part), getattr(model, part)[1])
    np.testing.assert_array_equal(model.state_dict()["blocks.1.mlp.W_in"], model.W_in[1])
    CLOSE(model.accumulated_bias(1, mlp_input=True), expected["accumulated_bias"])
    CLOSE(model.accumulated_bias(cfg.n_layers, include_mlp_biases=False), expected["accumulated_bias.attn"])
    assert model.all_head_labels()[: cfg.n_heads + 1][-2:] == [f"L0H{cfg.n_heads - 1}", "L1H0"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", HOOKED)
def test_each_processing_step_matches_transformer_lens(name, step):
    expected = read_safetensors(FIXTURES / "hooked" / f"{name}.safetensors")[1]
    model = HookedTransformer.from_pretrained(INSIDE / name, **{other: other == step for other in STEPS})
    logits, cache = model.run_with_cache(expected["ids"].astype(int)[:1])
    CLOSE(logits, expected[f"step.{step}.logits"])
    for site in ("resid_post", "z", "q"):
        CLOSE(cache[site, -1], expected[f"step.{step}.{site}"], err_msg=site)


def test_bridge_processes_weights_only_in_compatibility_mode():
    name, ids = HOOKED[0], [[1, 2, 3, 4]]
    bridge = TransformerBridge.boot_transformers(INSIDE / name, device="cpu")
    raw = HookedTransformer.from_pretrained_no_processing(INSIDE / name)
    bridge.enable_compatibility_mode(no_processing=True)
    np.testing.assert_array_equal(bridge(ids), raw(ids))
    bridge.enable_compatibility_mode(center_unembed=False)
    np.testing.assert_array_equal(bridge(ids), HookedTransformer.from_pretrained(INSIDE / name, center_unembed=False)(ids))
    # Repeated processing has no effect.
    for _ in range(2):
        bridge.enable_compatibility_mode()
        CLOSE(bridge(ids), HookedTransformer.from_pretrained(INSIDE / name)(ids))
    assert dict(bridge.tl_named_parameters()).keys() == bridge.tl_parameters().keys() == raw.state_dict().keys()


@pytest.mark.parametrize("name", CASES)
def test_processing_preserves_predictions(name):
    ids = [[1, 2, 3, 4, 5]]
    raw, model = HookedTransformer.from_pretrained_no_processing(INSIDE / name), open_processed(name)
    CLOSE(utils.log_softmax(raw(ids)), utils.log_softmax(model(ids)))
    CLOSE(raw(ids)[0], raw.native.logits(ids[0], last_only=False), err_msg="the engine's logits")
    even = HookedTransformer.from_pretrained(INSIDE / name, refactor_factored_attn_matrices=True)
    CLOSE(even(ids), model(ids))
    for now, before in ((even.OV, model.OV), (even.QK, model.QK)):
        CLOSE(now.AB, before.AB)
    CLOSE(even.W_O @ even.W_O.swapaxes(-1, -2), np.broadcast_to(np.eye(model.cfg.d_head), even.W_O.shape[:2] + (model.cfg.d_head,) * 2))
    CLOSE(np.linalg.norm(even.W_Q, axis=2), np.linalg.norm(even.W_K, axis=2), rtol=0.5, atol=1)
    assert not even.b_V.any()


def test_composition_scores_match_transformer_lens(hooked):
    model, expected, _ = hooked
    for mode in "QKV":
        scores = model.all_composition_scores(mode)
        CLOSE(scores, expected[f"composition.{mode}"], err_msg=mode)
        cfg = model.cfg
        assert scores.shape == (cfg.n_layers, cfg.n_heads) * 2
        for early, late in np.ndindex(cfg.n_layers, cfg.n_layers):
            assert scores[early, :, late].any() == (early < late)
    one = utils.composition_scores(model.OV[0, 1], model.QK.T[1, 2], broadcast_dims=False)
    assert abs(one - model.all_composition_scores("K")[0, 1, 1, 2]) < 1e-6
    with pytest.raises(ValueError, match="mode: expected 'Q', 'K' or 'V', found 'X'"):
        model.all_composition_scores("X")


def test_composition_scores_match_dense_products(model):
    random, norm = np.random.default_rng(0), np.linalg.norm
    ov, qk = model.OV.AB.astype(float), model.QK.AB.astype(float)
    scores = {mode: model.all_composition_scores(mode) for mode in "QKV"}
    for _ in range(10):
        late = random.integers(1, model.cfg.n_layers)
        pair = (random.integers(late), random.integers(model.cfg.n_heads), late, random.integers(model.cfg.n_heads))
        written = ov[pair[:2]]
        for mode, read in (("Q", qk[pair[2:]]), ("K", qk[pair[2:]].T), ("V", ov[pair[2:]])):
            dense = norm(written @ read) / norm(written) / norm(read)
            assert abs(scores[mode][pair] - dense) < 1e-5, (mode, pair)
    layers = np.arange(model.cfg.n_layers)
    for by_pair in scores.values():
        assert not by_pair.swapaxes(1, 2)[layers[:, None] >= layers].any(), "0 unless the first head is in an earlier layer"


@pytest.mark.parametrize("name", HOOKED)
@pytest.mark.parametrize("is_processed", [True, False])
def test_singular_vectors_match_an_eigendecomposition(name, is_processed):
    open_model = HookedTransformer.from_pretrained if is_processed else HookedTransformer.from_pretrained_no_processing
    model = open_model(INSIDE / name)
    interpreter, block = candle_gpt2.SVDInterpreter(model), model.blocks[1]
    reads = block.ln2.w[:, None] * block.mlp.W_in
    assert np.allclose(block.ln2.w, 1) == is_processed
    for kind, matrix, options in (
        ("OV", model.OV[1, 2].AB, {"head_index": 2}),
        ("w_in", reads.T, {}),
        ("w_out", block.mlp.W_out, {}),
    ):
        found = interpreter.get_singular_vectors(kind, 1, num_vectors=3, **options)
        assert found.shape == (model.cfg.d_vocab, 1, 3)
        # The right singular vectors of M are the eigenvectors of MᵀM, up to sign.
        vectors = np.linalg.eigh(matrix.T.astype(float) @ matrix)[1][:, ::-1][:, :3]
        CLOSE(abs(found[:, 0]), abs(model.W_U.T @ vectors), atol=1e-3, err_msg=kind)
    for kind, options, message in (
        ("OV", {}, "head_index: required for vector_type='OV'"),
        ("OV", {"head_index": model.cfg.n_heads}, f"head_index: expected 0 to {model.cfg.n_heads - 1}, found"),
    ):
        with pytest.raises(AssertionError, match=message):
            interpreter.get_singular_vectors(kind, 1, **options)
    with pytest.raises(ValueError, match="vector_type: expected one of .*, found 'QK'"):
        interpreter.get_singular_vectors("QK", 1)


def test_optional_hook_points_work_once_enabled(hooked):
    model, expected, ids = hooked
    for name, head in (
        ("blocks.1.hook_q_input", 1),
        ("blocks.1.hook_k_input", 0),
        ("blocks.0.hook_v_input", 2),
        ("blocks.1.hook_attn_in", 1),
        ("blocks.1.attn.hook_result", 2),
        ("blocks.0.hook_mlp_in", None),
    ):
        switch = model.switch(name)
        with pytest.raises(KeyError, match=rf"computed only after model\.{switch}\(True\)"):
            model.run_with_cache(ids[:1], names_filter=name)
        with pytest.raises(AssertionError, match=rf"{name} is computed only after model\.{switch}\(True\)"):
            model.add_hook(name, print)

        def edit(value, hook, head=head):
            assert value.shape[2] == (model.cfg.d_model if head is None else model.cfg.n_heads)
            (value if head is None else value[:, :, head])[..., 0] += 1
            return value

        getattr(model, switch)(True)
        CLOSE(model.run_with_hooks(ids[:1], fwd_hooks=[(name, edit)]), expected[f"edit.{name}"], err_msg=name)
        CLOSE(model(ids[:1]), expected["left.logits"][:1], err_msg="unedited")
        getattr(model, switch)(False)


def test_padded_batches_match_transformer_lens(hooked):
    model, expected, ids = hooked
    left, mask, right = np.zeros_like(ids), np.zeros_like(ids), ids.copy()
    for row, length in enumerate((7, 4, 2)):
        left[row, 7 - length :], mask[row, 7 - length :] = ids[row, :length], 1
        right[row, length:] = 0
    is_token = mask == 1
    logits, cache = model.run_with_cache(left, attention_mask=mask)
    CLOSE(logits[is_token], expected["left.logits"][is_token])
    CLOSE(cache["z", 1][is_token], expected["left.z"][is_token])
    CLOSE(cache["pos_embed"][is_token], expected["left.pos_embed"][is_token])
    assert not cache["pos_embed"][~is_token].any(), "padding has no position"
    assert not cache["pattern", 1][1, :, 3:, :3].any(), "no position attends to padding"
    CLOSE(model(left, attention_mask=mask, return_type="loss"), expected["left.loss"])
    per_token = model(left, attention_mask=mask, return_type="loss", loss_per_token=True)
    CLOSE(per_token, expected["left.loss_per_token"])
    # Id 0 is the padding and occurs in no text, so the mask is unambiguous.
    np.testing.assert_array_equal(model(left, padding_side="left", prepend_bos=False), logits)
    for row, length in enumerate((7, 4, 2)):
        CLOSE(logits[row, 7 - length :], model(ids[row, :length])[0], err_msg="alone")
        CLOSE(model(right)[row, :length], model(ids[row, :length])[0], err_msg="alone")
    CLOSE(model(right), expected["right.logits"])
    CLOSE(model(right, return_type="loss"), expected["right.loss"])


def test_partial_runs_match_transformer_lens(hooked):
    model, expected, ids = hooked
    CLOSE(model(ids, stop_at_layer=1), expected["stop_at_layer"])
    CLOSE(model(ids, stop_at_layer=-1), expected["stop_at_layer.-1"])
    CLOSE(model(model(ids, stop_at_layer=1), start_at_layer=1), expected["start_at_layer"])
    seen = []
    model.run_with_hooks(ids, stop_at_layer=1, fwd_hooks=[(lambda name: True, lambda value, hook: seen.append(hook.name))])
    assert seen[-1] == "blocks.0.hook_resid_post", "later hook points are not computed"
    residual, cache = model.run_with_cache(ids, names_filter=["blocks.0.attn.hook_z"], stop_at_layer=1, pos_slice=(1, 3))
    assert list(cache) == ["blocks.0.attn.hook_z"]
    np.testing.assert_array_equal(cache["z", 0], model.run_with_cache(ids)[1]["z", 0][:, 1:3])
    np.testing.assert_array_equal(residual, model(ids, stop_at_layer=1))


def test_greedy_generation_matches_transformer_lens(hooked):
    model, expected, ids = hooked
    for past in (True, False):
        found = model.generate(ids[:1], max_new_tokens=8, do_sample=False, stop_at_eos=False, use_past_kv_cache=past)
        np.testing.assert_array_equal(found, expected["generated"])


def test_residual_stacks_of_a_batch_match_transformer_lens(hooked):
    model, expected, ids = hooked
    _, cache = model.run_with_cache(ids)
    direction = model.W_U[:, 3] - model.W_U[:, 5]
    stack = cache.decompose_resid()
    found = {
        "full.mlp_input": cache.get_full_resid_decomposition(1, mlp_input=True, expand_neurons=False, apply_ln=True, pos_slice=-1),
        "full.onto": cache.get_full_resid_decomposition(apply_ln=True, pos_slice=-1, project_output_onto=direction),
        "neurons.onto": cache.stack_neuron_results(
            1, neuron_slice=(0, 5), incl_remainder=True, apply_ln=True, project_output_onto=direction
        ),
        "neurons.onto_plain": cache.stack_neuron_results(-1, pos_slice=2, neuron_slice=[1, 4], project_output_onto=direction),
        "heads.remainder.ln": cache.stack_head_results(1, incl_remainder=True, apply_ln=True, pos_slice=(2, 5)),
        "decompose.attn": cache.decompose_resid(mode="attn", incl_embeds=False, pos_slice=[0, 3]),
        "attrs.batch": cache.logit_attrs(stack, np.array([1, 2, 4]), np.array([2, 1, 0])),
        "attrs.positions": cache.logit_attrs(stack, ids, np.roll(ids, 1, 0)),
        "attrs.last": cache.logit_attrs(cache.decompose_resid(pos_slice=-1), 3, 4, pos_slice=-1),
        "attrs.row": cache.logit_attrs(stack, 3, batch_slice=1),
        "directions": model.tokens_to_residual_directions(ids),
        "stack_activation": cache.stack_activation("z")[:, 1],
    }
    for name, value in found.items():
        CLOSE(value, expected[name], err_msg=name)
    # The sum of all components is the residual stream.
    CLOSE(cache.get_full_resid_decomposition(expand_neurons=False).sum(0), cache["resid_post", -1])


def test_patching_every_activation_matches_transformer_lens(hooked):
    model, expected, ids = hooked
    clean, corrupted = ids[:1, :4], ids[1:2, :4]
    _, cache = model.run_with_cache(clean)
    for part in ("attn_head_all_pos_every", "attn_head_by_pos_every", "block_every", "attn_head_pattern_dest_src_pos"):
        patch = getattr(patching, f"get_act_patch_{part}")
        found = patch(model, corrupted, cache, lambda logits: logits[0, -1, 3] - logits[0, -1, 5])
        CLOSE(found, expected[f"patch.{part}"], err_msg=part)


def test_residual_stream_analyses_match_transformer_lens(analyses):
    model, expected, values = analyses
    model.set_use_attn_result(True)
    _, cache = model.run_with_cache(np.array(values["clean_ids"]))
    answer, wrong, last = values["answer"], values["wrong"], dict(pos_slice=-1)
    accumulated, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
    assert labels == values["labels.accumulated_resid"]
    CLOSE(accumulated, expected["accumulated_resid"])
    CLOSE(cache.accumulated_resid(incl_mid=True, apply_ln=True), expected["accumulated_resid.ln"])
    CLOSE(cache.apply_ln_to_stack(accumulated, layer=-1), expected["accumulated_resid.cached"])
    CLOSE(cache.accumulated_resid(1, incl_mid=True, apply_ln=True), expected["accumulated_resid.layer1.ln"])
    lens = cache.accumulated_resid(apply_ln=True) @ model.W_U + model.b_U
    CLOSE(lens, expected["lens.logits"])
    components, labels = cache.decompose_resid(return_labels=True)
    assert labels == values["labels.decompose_resid"]
    CLOSE(components, expected["decompose_resid"])
    CLOSE(cache.decompose_resid(apply_ln=True), expected["decompose_resid.ln"])
    found, labels = cache.decompose_resid(1, mlp_input=True, apply_ln=True, return_labels=True)
    assert labels == values["labels.decompose_resid.layer1_mlp_input"]
    CLOSE(found, expected["decompose_resid.layer1_mlp_input.ln"])
    heads, labels = cache.stack_head_results(incl_remainder=True, return_labels=True)
    assert labels == values["labels.stack_head_results"]
    CLOSE(heads, expected["stack_head_results"])
    neurons = cache.stack_neuron_results(-1, incl_remainder=True, **last)
    CLOSE(neurons, expected["stack_neuron_results.last"])
    full = cache.get_full_resid_decomposition(**last)
    CLOSE(full, expected["full_resid_decomposition.last"])
    for name, stack, options in (
        ("accumulated_resid", accumulated, {}),
        ("decompose_resid", components, {}),
        ("stack_head_results", heads, {}),
        ("stack_neuron_results.last", neurons, last),
        ("full_resid_decomposition.last", full, last),
    ):
        CLOSE(cache.logit_attrs(stack, answer, **options), expected[f"logit_attrs.{name}.answer"])
        CLOSE(cache.logit_attrs(stack, answer, wrong, **options), expected[f"logit_attrs.{name}.difference"])


def test_patching_and_head_detection_match_transformer_lens(analyses):
    model, expected, values = analyses
    clean, corrupted = (np.array([values[f"{kind}_ids"]]) for kind in ("clean", "corrupted"))
    (_, clean_cache), (_, corrupted_cache) = model.run_with_cache(clean), model.run_with_cache(corrupted)
    difference = values["logit_difference"]

    def metric(logits):
        logits = logits[0, -1, values["answer"]] - logits[0, -1, values["wrong"]]
        return (logits - difference["corrupted"]) / (difference["clean"] - difference["corrupted"])

    names = [key.removeprefix("patch.") for key in expected if key.startswith("patch.")]
    assert len(names) == 11
    for name in names:
        found = getattr(patching, f"get_act_patch_{name}")(model, corrupted, clean_cache, metric)
        CLOSE(found, expected[f"patch.{name}"], err_msg=name)
    for number, path in enumerate(values["paths"]):
        for part in "qkv":
            found = patching.get_act_patch_direct_path(
                model, corrupted, clean_cache, corrupted_cache, metric, *path["sender"], component=part
            )
            CLOSE(found, expected[f"direct_path.{number}.{part}"], err_msg=part)
    # Scores from the head detector for a text with these ids.
    ids = np.array([values["detect_head"]["ids"]])
    _, cache = model.run_with_cache(ids, remove_batch_dim=True)
    exclusions = {"none": {}, "exclude_bos": {"exclude_bos": True}, "exclude_current_token": {"exclude_current_token": True}}
    exclusions["both"] = exclusions["exclude_bos"] | exclusions["exclude_current_token"]
    for kind in head_detector.HEAD_NAMES:
        pattern = getattr(head_detector, f"get_{kind}_detection_pattern")(ids)
        for measure, close in (("mul", CLOSE), ("abs", partial(np.testing.assert_allclose, atol=1.01e-3))):
            for row, name in enumerate(values["detect_head"]["exclusions"]):
                for head in np.ndindex(model.cfg.n_layers, model.cfg.n_heads):
                    found = head_detector.compute_head_attention_similarity_score(
                        cache["pattern", head[0]][head[1]], pattern, error_measure=measure, **exclusions[name]
                    )
                    close(found, expected[f"detect_head.{kind}.{measure}"][row][head])


def test_ablation_and_losses_match_transformer_lens(analyses):
    model, expected, values = analyses
    ids = np.array([values["clean_ids"]])
    for layer, head in np.ndindex(*expected["ablate.tl_zero"].shape):

        def zero_head(z, hook, head=head):
            assert hook.layer() == layer and hook.name == f"blocks.{layer}.attn.hook_z"
            z[:, :, head] = 0
            return z

        logits = model.run_with_hooks(ids, fwd_hooks=[(utils.get_act_name("z", layer), zero_head)])
        CLOSE(logits[0, -1, values["answer"]] - logits[0, -1, values["wrong"]], expected["ablate.tl_zero"][layer, head])
    for kind in ("clean", "corrupted"):
        loss = model(values[f"{kind}_ids"], return_type="loss")
        CLOSE(loss, values[f"loss.{kind}"]["mean"])
        CLOSE(model(values[f"{kind}_ids"], return_type="loss", loss_per_token=True)[0], values[f"loss.{kind}"]["per_token"])
    both = model(ids, return_type="both")
    np.testing.assert_array_equal(both.logits, model(ids))
    assert both.loss == model(ids, return_type="loss") and model(ids, return_type=None) is None


# Hooks.


def test_hooks_run_in_order_and_are_removed_on_time(plain):
    ids, calls = [1, 2, 3], []

    def record(label):
        return lambda value, hook: calls.append((label, hook.name))

    name = "blocks.1.hook_resid_mid"
    plain.add_hook(name, record("first"))
    plain.add_hook(name, record("permanent"), is_permanent=True)
    plain.add_hook(name, record("zeroth"), prepend=True)
    with plain.hooks([(name, record("inside"))]):
        plain(ids)
        # Leaving the context removes only its own hooks.
        plain.run_with_hooks(ids, fwd_hooks=[(lambda known: known == name, record("innermost"))])
    plain(ids)
    once = [(label, name) for label in ("zeroth", "first", "permanent")]
    inside = [*once, ("inside", name)]
    assert calls == [*inside, *inside, ("innermost", name), *once]
    calls.clear()
    plain.reset_hooks()
    plain(ids)
    assert calls == [("permanent", name)]
    plain.reset_hooks(including_permanent=True)
    assert not plain.hook_dict[name].fwd_hooks


def test_hooks_are_chained_and_share_a_context(plain):
    name = "blocks.0.hook_mlp_out"

    def count(value, hook, step):
        hook.ctx["calls"] = hook.ctx.get("calls", 0) + step
        return value + hook.ctx["calls"]

    hooks = [(name, partial(count, step=1)), (name, partial(count, step=10)), (name, lambda value, hook: None)]
    _, before = plain.run_with_cache([1, 2])
    with plain.hooks(hooks):
        _, after = plain.run_with_cache([1, 2])
    CLOSE(after[name], before[name] + 1 + 11)
    assert plain.hook_dict[name].ctx == {"calls": 11}
    plain.run_with_hooks([1, 2], fwd_hooks=hooks, clear_contexts=True)
    assert plain.hook_dict[name].ctx == {}
    plain.hook_dict[name].ctx["kept"] = 1
    plain.reset_hooks(clear_contexts=False)
    assert plain.hook_dict[name].ctx == {"kept": 1}
    plain.reset_hooks()
    assert plain.hook_dict[name].ctx == {}


def test_edits_at_every_hook_point_take_effect(plain):
    """Checks that later computation uses the result of a hook, at every hook point."""
    for switch in ("attn_result", "split_qkv_input", "hook_mlp_in"):
        getattr(plain, f"set_use_{switch}")(True)
    ids, unedited = [1, 2, 3, 4], plain([1, 2, 3, 4])

    def edited(value, hook):
        # An edit that norms and softmax do not cancel.
        return value * np.linspace(0.5, 1.5, value.shape[-1]) + 0.1 if value.shape[-1] > 1 else value * 2

    for name in plain.hook_dict:
        if not name.endswith("hook_attn_in"):  # unused with split inputs
            assert not np.array_equal(plain.run_with_hooks(ids, fwd_hooks=[(name, edited)]), unedited), name
    np.testing.assert_array_equal(plain(ids), unedited)


def test_hook_exceptions_propagate_and_remove_the_hook(plain):
    def fail(value, hook):
        raise RuntimeError(hook.name)

    with pytest.raises(RuntimeError, match="hook_embed"):
        plain.run_with_hooks([1], fwd_hooks=[("hook_embed", fail)])
    assert plain([1]).shape == (1, 1, plain.cfg.d_vocab)


def test_hook_point_names_are_validated(plain):
    for name in ("blocks.1.attn.hok_z", "blocks.7.attn.hook_z"):
        for run in (
            lambda: plain.run_with_hooks([1], fwd_hooks=[(name, print)]),
            lambda: plain.add_hook(name, print),
            lambda: plain.run_with_cache([1], names_filter=name),
            lambda: plain.run_with_cache([1], names_filter=["hook_embed", name]),
        ):
            with pytest.raises(KeyError, match=r"unknown hook point '.*'(: the model has layers 0 to 1)?; did you mean 'blocks\.1\.attn\.hook_z'"):
                run()
    for name in ("resid_pre", "hook_resid_pre"):
        with pytest.raises(KeyError, match=r"short names need a layer; use utils\.get_act_name\('resid_pre', layer\)"):
            plain.run_with_cache([1], names_filter=name)
    assert len(plain.run_with_cache([1], names_filter=lambda name: False)[1]) == 0
    assert list(plain.run_with_cache([1], names_filter=lambda name: "pattern" in name)[1]) == [
        f"blocks.{layer}.attn.hook_pattern" for layer in range(2)
    ]
    kept = plain.add_caching_hooks("hook_embed")
    plain([1, 2])
    assert list(kept) == ["hook_embed"] and plain.is_caching
    plain.reset_hooks()


OFF = {
    "attn.hook_result": "attn_result",
    "hook_q_input": "split_qkv_input",
    "hook_v_input": "split_qkv_input",
    "hook_mlp_in": "hook_mlp_in",
    "hook_attn_in": "attn_in",
}


@pytest.mark.parametrize(("end", "switch"), OFF.items())
def test_disabled_hook_points_are_reported(plain, end, switch):
    name, message = f"blocks.1.{end}", rf"blocks\.1\.{end} is computed only after model\.set_use_{switch}\(True\)"
    for direction in ("fwd", "bwd"):
        with pytest.raises(AssertionError, match=message), plain.hooks(**{f"{direction}_hooks": [("hook_embed", print), (name, print)]}):
            pass
        with pytest.raises(AssertionError, match=message):
            plain.add_hook(name, print, direction)
    assert not any(point.fwd_hooks or point.bwd_hooks for point in plain.hook_points())
    matches, warned = (lambda known: known == name), rf"only disabled hook points, such as blocks\.1\.{end}; .*{switch}\(True\)"
    with pytest.warns(UserWarning, match=warned) as warnings:
        plain.run_with_hooks([1], fwd_hooks=[(matches, print)])
        plain.run_with_cache([1], names_filter=matches)
        plain.add_hook(matches, print)
        plain.reset_hooks()
    assert [Path(warning.filename).name for warning in warnings] == ["test_hooked.py"] * 3, "warnings point to the caller"
    # A filter that also selects enabled hook points causes no warning. Once the disabled hook point is enabled, hooks observe it.
    seen = []
    plain.run_with_hooks([1], fwd_hooks=[(lambda known: "blocks.1." in known, lambda value, hook: seen.append(hook.name))])
    assert seen and name not in seen
    kept = plain.add_caching_hooks()
    getattr(plain, f"set_use_{switch}")(True)
    plain([1])
    assert name in kept and name in plain.run_with_cache([1])[1]


@pytest.mark.parametrize(
    ("name", "own"),
    [
        (utils.get_act_name("in", 1), "blocks.1.hook_resid_pre"),
        ("blocks.0.hook_out", "blocks.0.hook_resid_post"),
        ("blocks.1.attn.q.hook_out", "blocks.1.attn.hook_q"),
        ("blocks.1.attn.o.hook_in", "blocks.1.attn.hook_z"),
        ("blocks.0.mlp.out.hook_in", "blocks.0.mlp.hook_post"),
        ("embed.hook_out", "hook_embed"),
    ],
)
def test_version_4_names_are_aliases(plain, name, own):
    _, cache = plain.run_with_cache([1, 2], names_filter=name)
    assert list(cache) == [own] and cache[name] is cache[own]
    seen = []
    plain.run_with_hooks([1, 2], fwd_hooks=[(name, lambda value, hook: seen.append(hook.name))])
    assert seen == [own]


# Gradients.

SWITCHES = [(), ("split_qkv_input",), ("attn_in",), ("attn_result", "hook_mlp_in")]


@pytest.mark.parametrize("switches", SWITCHES, ids="-".join)
@pytest.mark.parametrize("is_processed", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_gradients_match_finite_differences(name, is_processed, switches):
    """Checks gradients of a weighted sum of logits along a random direction at every hook point."""
    open_model = HookedTransformer.from_pretrained if is_processed else HookedTransformer.from_pretrained_no_processing
    model = open_model(INSIDE / name, default_prepend_bos=False)
    for switch in switches:
        getattr(model, f"set_use_{switch}")(True)
    random = np.random.default_rng(0)
    ids, weights = [[1, 2, 3, 4, 5], [3, 9, 8, 7, 2]], random.normal(size=(2, 5, model.cfg.d_vocab))
    found: dict[str, np.ndarray] = {}

    def add(gradient, hook):
        # With split inputs, ln1 runs three times in each block.
        found[hook.name] = found.get(hook.name, 0) + gradient

    with model.hooks(bwd_hooks=[(lambda known: True, add)]):
        model(ids)
        model.backward(weights)
    assert set(found) == {known for known in model.hook_dict if model.switch(known) is None} - (
        {f"blocks.{layer}.hook_attn_in" for layer in range(model.cfg.n_layers)} if "split_qkv_input" in switches else set()
    )
    step, compared = 1e-3, 0
    for known, gradient in found.items():
        direction = random.normal(size=gradient.shape).astype(np.float32)
        if known.endswith("attn_scores"):
            direction *= np.tri(5, dtype=np.float32)  # masked scores have no slope

        def moved(by, known=known, direction=direction):
            with model.hooks([(known, lambda value, hook: value + by * direction)]):
                logits, cache = model.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_pre"))
            return (logits.astype(float) * weights).sum(), np.concatenate([pre.ravel() > 0 for pre in cache.values()])

        (above, signs), (below, others) = moved(step), moved(-step)
        # Finite differences fail across ReLU's kink.
        if model.cfg.act_fn != "relu" or np.array_equal(signs, others):
            compared += 1
            # Tolerance for the rounding of float32 sums of about 1e2, divided by the step, and for curvature.
            np.testing.assert_allclose((gradient * direction).sum(), (above - below) / (2 * step), rtol=0.02, atol=0.2, err_msg=known)
    assert compared > 0.5 * len(found)


def test_attribution_patching_matches_the_engine(plain):
    clean, corrupted, answer, wrong = [1, 2, 3, 4, 5], [1, 2, 8, 4, 5], 3, 7
    weights = np.zeros((1, 5, plain.cfg.d_vocab))
    weights[0, -1, [answer, wrong]] = 1, -1
    (clean_logits, before), (corrupted_logits, after) = plain.run_with_cache(clean), plain.run_with_cache(corrupted)
    difference = (weights * (clean_logits - corrupted_logits)).sum()
    gradients: dict[str, np.ndarray] = {}
    with plain.hooks(bwd_hooks=[(lambda name: name.endswith("hook_z"), lambda value, hook: gradients.update({hook.name: value}))]):
        plain(corrupted)
        plain.backward(weights)
    expected = plain.native.estimate(clean, corrupted, answer=answer, against=wrong, site="z").values
    found = [((before[name] - after[name]) * gradients[name]).sum((0, 1, 3)) for name in sorted(gradients)]
    CLOSE(np.array(found) / difference, expected, atol=1e-4)


@pytest.mark.parametrize("per_token", [False, True])
def test_loss_gradients_match_finite_differences(plain, per_token):
    ids, seen = [[0, 0, 3, 4, 5], [3, 9, 8, 7, 2]], []
    options = dict(return_type="loss", loss_per_token=per_token, attention_mask=[[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    loss, cache = (None, None)
    if not per_token:
        loss, cache = plain.run_with_cache(ids, incl_bwd=True, names_filter="blocks.1.hook_resid_post", **options)
        seen = [cache["blocks.1.hook_resid_post_grad"]]
    weights = np.random.default_rng(1).normal(size=(2, 4)) if per_token else np.array(1.0)
    with plain.hooks(bwd_hooks=[("blocks.1.hook_resid_post", lambda gradient, hook: seen.append(gradient))]):
        found = plain(ids, **options)
        plain.backward(weights)
    if not per_token:
        assert found == loss
        np.testing.assert_array_equal(seen[0], seen[1])
    direction, step = np.random.default_rng(2).normal(size=seen[0].shape).astype(np.float32), 2e-3

    def moved(by):
        hooks = [("blocks.1.hook_resid_post", lambda value, hook: value + by * direction)]
        return (plain.run_with_hooks(ids, fwd_hooks=hooks, **options).astype(float) * weights).sum()

    np.testing.assert_allclose((seen[-1] * direction).sum(), (moved(step) - moved(-step)) / (2 * step), rtol=0.02, atol=0.005)


@pytest.mark.parametrize("act_fn", sorted(components.ACTIVATIONS))
def test_activation_derivatives_match_finite_differences(act_fn):
    function, slope = components.ACTIVATIONS[act_fn]
    x = np.linspace(-4, 4, 33).astype(np.float32) + np.float32(0.01)
    step = np.float32(2**-7)
    np.testing.assert_allclose(slope(x), (function(x + step) - function(x - step)) / (2 * step), atol=5e-4)


def test_backward_hooks_replace_gradients_and_reject_misuse():
    plain = HookedTransformer.from_pretrained(INSIDE / "plain", default_prepend_bos=False, tensors="numpy")
    name, seen, weights = "blocks.1.hook_resid_mid", {}, np.ones((1, 3, plain.cfg.d_vocab))
    hooks = [
        (name, lambda gradient, hook: gradient * 0),
        (lambda known: True, lambda gradient, hook: seen.update({hook.name: gradient})),
    ]
    with plain.hooks(bwd_hooks=hooks):
        plain([1, 2, 3])
        plain.backward(weights)
    assert seen["blocks.1.hook_mlp_out"].any() and not seen[name].any() and not seen["hook_embed"].any()
    embeddings = []
    for returned in (lambda gradient: gradient * 2, lambda gradient: (gradient * 2,)):
        hooks = [
            (name, lambda gradient, hook, returned=returned: returned(gradient)),
            ("hook_embed", lambda gradient, hook: embeddings.append(gradient)),
        ]
        with plain.hooks(bwd_hooks=hooks):
            plain([1, 2, 3])
            plain.backward(weights)
    np.testing.assert_array_equal(*embeddings)
    with plain.hooks(bwd_hooks=[(name, lambda gradient, hook: (gradient, gradient))]):
        plain([1, 2, 3])
        with pytest.raises(ValueError, match="expected an array of shape"):
            plain.backward(weights)
    assert not any(point.bwd_hooks for point in plain.hook_points())
    with pytest.raises(RuntimeError, match="expected a previous run with backward hooks"):
        plain.backward(weights)
    with pytest.raises(ValueError, match="reset_hooks_end=False"):
        plain.run_with_hooks([1], bwd_hooks=[(name, print)])
    plain.add_hook(name, lambda gradient, hook: None, "bwd")
    for options in ({"stop_at_layer": 1}, {"return_type": None}):
        with pytest.raises(ValueError, match="backward hooks need a complete run"):
            plain([1, 2, 3], **options)
    plain([1, 2, 3])
    with pytest.raises(ValueError, match=r"gradient: expected the shape of the output, \(1, 3, 61\), found \(2,\)"):
        plain.backward([1.0, 2.0])
    with pytest.raises(NotImplementedError, match=r"blocks\.0\.hook_mlp_out: a forward hook edits this value, .*tensors='torch'"):
        plain.run_with_hooks([1, 2, 3], fwd_hooks=[("blocks.0.hook_mlp_out", lambda value, hook: value.__setitem__(0, 0))])
    plain.reset_hooks()
    with pytest.raises(ValueError, match="dir: expected 'fwd' or 'bwd', found 'up'"):
        plain.add_hook(name, print, "up")


@pytest.mark.parametrize(
    ("name", "full"),
    [
        (("k", 6), "blocks.6.attn.hook_k"),
        (("pre", 2), "blocks.2.mlp.hook_pre"),
        (("scale", 4, "ln1"), "blocks.4.ln1.hook_scale"),
        (("pre5",), "blocks.5.mlp.hook_pre"),
        (("scale4ln1",), "blocks.4.ln1.hook_scale"),
        (("attn", 3), "blocks.3.attn.hook_pattern"),
        (("mlp_out", 1), "blocks.1.hook_mlp_out"),
        (("embed",), "hook_embed"),
        (("normalized",), "ln_final.hook_normalized"),
        (("blocks.0.hook_q_input",), "blocks.0.hook_q_input"),
    ],
)
def test_shorthand_names_expand(name, full):
    assert utils.get_act_name(*name) == full


def test_cache_accepts_every_key_form(plain):
    _, cache = plain.run_with_cache([1, 2, 3])
    for key in ("pattern1", ("pattern", 1), ("pattern", -1), ("attn", 1), ("pattern", 1, "attn")):
        assert cache[key] is cache["blocks.1.attn.hook_pattern"]
    assert cache["scale", 0, "ln2"] is cache["blocks.0.ln2.hook_scale"] and cache["scale"] is cache["ln_final.hook_scale"]
    with pytest.raises(KeyError, match=r"'blocks\.0\.attn\.hook_result' is not in this cache; names_filter excluded it, or the hook point is disabled"):
        cache["result", 0]
    with pytest.raises(KeyError, match="unknown hook point 'blocks.2.attn.hook_pattern': the model has layers 0 to 1; did you mean"):
        cache["pattern", 2]
    with pytest.raises(KeyError, match="unknown hook point 'blocks.0.hook_resid_psot'; did you mean 'blocks.0.hook_resid_post'"):
        cache["resid_psot", 0]
    one = plain.run_with_cache([1, 2, 3], remove_batch_dim=True)[1]
    np.testing.assert_array_equal(one["resid_mid", 0], cache["resid_mid", 0][0])
    CLOSE(one.accumulated_resid(apply_ln=True), cache.accumulated_resid(apply_ln=True)[:, 0])
    CLOSE(one.stack_head_results(apply_ln=True), cache.stack_head_results(apply_ln=True)[:, 0])
    assert not one.has_batch_dim and cache.remove_batch_dim()["embed"].shape == (3, 21)
    _, several = plain.run_with_cache([[1, 2], [3, 4]])
    assert several.apply_slice_to_batch_dim(1)["embed"].shape == (2, 21)
    assert several.apply_slice_to_batch_dim((0, 1))["embed"].shape == (1, 2, 21)
    with pytest.raises(AssertionError, match="has a batch of 2"):
        several.remove_batch_dim()
    kept = plain.run_with_cache([1], return_cache_object=False)[1]
    assert type(kept) is dict and len(kept) == 17 * 2 + 4


def test_modules_are_callable(plain):
    _, cache = plain.run_with_cache([1, 2, 3])
    block = plain.blocks[1]
    CLOSE(plain.embed(np.array([[1, 2, 3]])), cache["embed"])
    CLOSE(plain.pos_embed(np.array([[1, 2, 3]])), cache["pos_embed"])
    normalized = block.ln1(cache["resid_pre", 1])
    CLOSE(block.attn(normalized, normalized, normalized), cache["attn_out", 1])
    CLOSE(block.attn(normalized, normalized.copy(), normalized), cache["attn_out", 1])
    CLOSE(block.mlp(block.ln2(cache["resid_mid", 1])), cache["mlp_out", 1])
    CLOSE(block(cache["resid_pre", 1]), cache["resid_post", 1])
    CLOSE(plain.unembed(plain.ln_final(cache["resid_post", 1])), plain([1, 2, 3]))


def test_assigned_weights_are_used():
    model = HookedTransformer.from_pretrained(INSIDE / "plain")
    before = model([1, 2, 3])
    model.blocks[0].attn.W_V[1] = 0
    zeroed = model.run_with_hooks([1, 2, 3], fwd_hooks=[("blocks.0.attn.hook_v", lambda v, hook: v * 1)])
    assert not np.allclose(before, zeroed) and not model.W_V[0, 1].any()
    model.blocks[0].attn.W_V = np.ones((3, 21, 7))
    assert (model.W_V[0] == 1).all()


# Texts.


def test_texts_and_tokens_convert_both_ways(model):
    bos = model.tokenizer.bos_token_id
    ids = model.tokenizer.encode(TEXT)
    np.testing.assert_array_equal(model.to_tokens(TEXT), [[bos, *ids]])
    np.testing.assert_array_equal(model.to_tokens(TEXT, prepend_bos=False), [ids])
    assert model.to_str_tokens(TEXT) == ["<|endoftext|>", "One", ",", " my", " dog", ",", " big"]
    assert model.to_str_tokens(np.array([ids])) == model.to_str_tokens(TEXT, prepend_bos=False)
    assert model.to_str_tokens([TEXT, "One"])[1] == ["<|endoftext|>", "One"]
    assert model.to_string(ids) == TEXT and model.to_string([ids, ids]) == [TEXT, TEXT]
    assert model.to_single_str_token(model.to_single_token(" dog")) == " dog"
    with pytest.raises(AssertionError, match="'my dog' is 3 tokens, not one|'my dog' is 2 tokens, not one"):
        model.to_single_token("my dog")
    assert model.get_token_position(",", TEXT) == 2 and model.get_token_position(",", TEXT, mode="last") == 5
    assert model.get_token_position(",", np.array(ids)) == 1
    with pytest.raises(AssertionError, match="' one' is not in the text"):
        model.get_token_position(" one", TEXT)
    left = model.to_tokens([TEXT, "One"], padding_side="left")
    np.testing.assert_array_equal(left[1], [bos] * 6 + [model.to_single_token("One")])
    right = model.to_tokens([TEXT, "One"])
    np.testing.assert_array_equal(right[1], [bos, model.to_single_token("One")] + [bos] * 5)
    np.testing.assert_array_equal(utils.get_attention_mask(model.tokenizer, right, True)[1], [1, 1] + [0] * 5)
    model.tokenizer.padding_side = "left"
    np.testing.assert_array_equal(model.to_tokens([TEXT, "One"]), left)
    np.testing.assert_array_equal(utils.get_attention_mask(model.tokenizer, left, True)[1], [0] * 5 + [1, 1])
    np.testing.assert_array_equal(utils.get_attention_mask(model.tokenizer, left, False)[1], [0] * 6 + [1])
    model.tokenizer.padding_side = "right"
    assert model.to_tokens("my " * 900).shape == (1, model.cfg.n_ctx)
    with pytest.raises(ValueError, match="exceed the context of 512"):
        model(model.to_tokens("my " * 900, truncate=False))


def test_tokenizer_follows_the_transformers_api(model):
    tokenizer, ids = model.tokenizer, model.tokenizer.encode(TEXT)
    assert tokenizer(TEXT).input_ids == tokenizer(TEXT)["input_ids"] == ids
    both = tokenizer([TEXT, "One"], padding=True)
    assert both.input_ids == [ids, [ids[0]] + [tokenizer.pad_token_id] * 5] and both.attention_mask[1] == [1, 0, 0, 0, 0, 0]
    left = tokenizer([TEXT, "One"], padding=True, padding_side="left", return_tensors="np")
    np.testing.assert_array_equal(left.attention_mask, [[1] * 6, [0] * 5 + [1]])
    np.testing.assert_array_equal(left.input_ids, model.to_tokens([TEXT, "One"], prepend_bos=False, padding_side="left"))
    assert tokenizer(TEXT, truncation=True, max_length=2).input_ids == ids[:2]
    assert tokenizer.decode(ids) == TEXT and len(tokenizer) == model.cfg.d_vocab
    assert not hasattr(tokenizer(TEXT), "token_type_ids")
    assert tokenizer.vocab["Ġdog"] == model.to_single_token(" dog") and sorted(tokenizer.vocab.values()) == list(range(len(tokenizer)))


def test_unsupported_models_and_options_are_rejected():
    config = candle_gpt2.HookedTransformerConfig(n_layers=2, d_model=8, n_ctx=16, d_head=4, d_vocab=10, attn_only=True, normalization_type=None)
    assert (config.n_heads, config.d_mlp, config.d_vocab_out) == (2, None, 10) and config.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="attn_only=True: not supported by GPT-2"):
        HookedTransformer(config)
    for options, message in (
        ({"device": "cuda"}, "runs only on the CPU, found 'cuda'"),
        ({"dtype": "float16"}, "computes in float32, found 'float16'"),
        ({"tensors": "jax"}, "expected 'numpy', or 'torch' after `import torch`, found 'jax'"),
        ({"default_padding_side": "top"}, "padding_side: expected 'left' or 'right', found 'top'"),
    ):
        with pytest.raises(ValueError, match=message):
            HookedTransformer.from_pretrained(INSIDE / "plain", **options)
    for option, nearest in (("fold_layer_norm", "fold_ln"), ("n_devices", "device")):
        message = f"HookedTransformer.from_pretrained: unknown option '{option}'; did you mean '{nearest}'"
        with pytest.raises(TypeError, match=message):
            HookedTransformer.from_pretrained(INSIDE / "plain", **{option: True})
    with pytest.raises(FileNotFoundError, match="pythia-70m: .* HookedTransformer supports only GPT-2 models: gpt2, gpt2-medium, .*, a folder, or no name"):
        HookedTransformer.from_pretrained("pythia-70m", offline=True)
    with pytest.raises((candle_gpt2.Gpt2Error, FileNotFoundError), match="gpt2"):
        HookedTransformer.from_pretrained("gpt2-small", offline=True, cache_dir="/no/such/cache")
    with pytest.raises(ValueError, match="cross-attention"):
        HookedTransformer.from_pretrained(FIXTURES / "cross-attention")


@pytest.mark.parametrize(
    ("input", "options", "message"),
    [
        ([[1, 61]], {}, "token ids: expected 0 to 60, found 1 to 61"),
        ([[1, -1]], {}, "token ids: expected 0 to 60, found -1 to 1"),
        ([[0.5]], {}, r"expected a string, a list of strings, or token ids of shape \(p\) or \(b, p\), found shape \(1, 1\) of float64"),
        ([[[1]]], {}, r"found shape \(1, 1, 1\)"),
        ([1] * 20, {}, "20 tokens exceed the context of 19"),
        (np.zeros((1, 0), int), {}, "no tokens"),
        ([1], {"padding_side": "top"}, "padding_side: expected 'left' or 'right', found 'top'"),
        ([1], {"return_type": "probs"}, "return_type: expected 'logits', 'loss', 'both' or None, found 'probs'"),
        ([[1, 2]], {"attention_mask": [[1]]}, r"attention_mask: expected the shape of the tokens, \(1, 2\), found shape \(1, 1\)"),
        (np.zeros((1, 2, 21), np.float32), {"start_at_layer": 1, "return_type": "loss"}, "tokens: the loss needs the ids"),
        (
            np.zeros((2, 21), np.float32),
            {"start_at_layer": 1},
            r"start_at_layer=1: expected the residual stream before that block, floats \(batch, positions, 21\), found shape \(2, 21\) of",
        ),
        (np.zeros((1, 2, 20), np.float32), {"start_at_layer": 0}, r"start_at_layer=0: .*, found shape \(1, 2, 20\) of float32"),
        ([[[1] * 21]], {"start_at_layer": 1}, r"start_at_layer=1: .*, found shape \(1, 1, 21\) of int64"),
        (
            np.zeros((1, 2, 21), np.float32),
            {"start_at_layer": 1, "tokens": [[1]]},
            r"tokens: expected one id for each position of the residual stream, shape \(1, 2\), found shape \(1, 1\)",
        ),
    ],
)
def test_invalid_inputs_are_rejected(plain, input, options, message):
    with pytest.raises(ValueError, match=message):
        plain(input, **options)


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda value: value[0], r"an array of shape \(2, 21\)"),
        (lambda value: value[..., :1], r"an array of shape \(1, 2, 1\)"),
        (lambda value: "x", "a value of type str"),
        (lambda value: [[1.0], [2.0, 3.0]], "a value of type list"),
        (lambda value: 0.0, r"an array of shape \(\)"),
    ],
)
def test_hook_results_must_keep_the_shape(plain, returned, found):
    def own(value, hook, extra=None):
        return returned(value)

    message = rf"hook own at blocks\.0\.hook_attn_out: expected an array of shape \(1, 2, 21\) or None, returned {found}"
    for hook in (own, partial(own, extra=1)):
        with pytest.raises(ValueError, match=message):
            plain.run_with_hooks([[1, 2]], fwd_hooks=[("blocks.0.hook_attn_out", hook)])


def test_hook_may_expand_the_batch(plain):
    def twice(value, hook):
        return np.concatenate([value, value * 2])

    name = "blocks.1.hook_resid_pre"
    both = plain.run_with_hooks([[1, 2]], fwd_hooks=[(name, twice)])
    for row, factor in enumerate((1, 2)):
        CLOSE(both[row : row + 1], plain.run_with_hooks([[1, 2]], fwd_hooks=[(name, lambda value, hook, by=factor: value * by)]))


def test_test_prompt_prints_ranks(model, capsys):
    utils.test_prompt("One, my dog,", " big", model, prepend_bos=False, top_k=3)
    printed = capsys.readouterr().out
    logits = model("One, my dog,", prepend_bos=False)[0, -1]
    art = model.to_single_token(" big")
    rank = int((logits > logits[art]).sum())
    assert f"Ranks of the answer tokens: [(' big', {rank})]" in printed and "Top 2th token" in printed and "Top 3th" not in printed
    best = model.to_single_str_token(int(logits.argmax()))
    assert f"Top 0th token. Logit: {logits.max():5.2f}" in printed and f"Token: |{best}|" in printed
    utils.test_prompt("One, my dog,", ["big", "are"], model, prepend_bos=False, print_details=False)
    are = model.to_single_token(" are")
    assert capsys.readouterr().out == f"Ranks of the answer tokens: [[(' big', {rank}), (' are', {int((logits > logits[are]).sum())})]]\n"
    assert utils.test_prompt.__test__ is False


def test_batched_texts_match_single_runs(model):
    texts = [TEXT, "One", "My lord, I"]
    left = model(texts, padding_side="left")
    right = model(texts)
    for row, text in enumerate(texts):
        alone = model(text)[0]
        CLOSE(left[row, -len(alone) :], alone)
        CLOSE(right[row, : len(alone)], alone)
    both = model.generate(texts, max_new_tokens=5, do_sample=False)
    assert both == [model.generate(text, max_new_tokens=5, do_sample=False) for text in texts]


def test_generation_samples_and_stops(model):
    np.random.seed(1)
    text = model.generate("One day", max_new_tokens=8, temperature=0.7, top_k=5)
    np.random.seed(1)
    assert text == model.generate("One day", max_new_tokens=8, temperature=0.7, top_k=5) and text.startswith("One day")
    assert model.generate("One day", max_new_tokens=3, top_k=1) == model.generate("One day", max_new_tokens=3, do_sample=False)
    ids = model.to_tokens("One day")
    greedy = model.generate(ids, max_new_tokens=5, do_sample=False)
    stop = int(greedy[0, ids.shape[1] + 1])
    stopped = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=stop)
    np.testing.assert_array_equal(stopped[0], greedy[0, : list(greedy[0]).index(stop, ids.shape[1]) + 1])

    def zero(logits, hook):
        return logits * 0

    assert model.generate("One day", max_new_tokens=2, return_type="tokens").shape == (1, ids.shape[1] + 2)
    with model.hooks([("ln_final.hook_normalized", zero)]):
        # With zeroed activations, only the unembedding bias determines the next token.
        found = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert set(found[0, ids.shape[1] :]) == {int(model.b_U.argmax())}


def test_samples_follow_the_distribution():
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]]))
    np.random.seed(0)
    samples = utils.sample_logits(np.repeat(logits, 20_000, 0))
    # Four standard deviations of a fraction estimated from 20,000 samples are below 0.0142.
    np.testing.assert_allclose(np.bincount(samples, minlength=4) / 20_000, [0.5, 0.3, 0.15, 0.05], atol=0.015)
    assert set(utils.sample_logits(np.repeat(logits, 500, 0), top_k=2)) == {0, 1}
    assert set(utils.sample_logits(np.repeat(logits, 500, 0), top_p=0.79)) == {0, 1}
    assert set(utils.sample_logits(np.repeat(logits, 500, 0), top_p=0.81)) == {0, 1, 2}
    tokens = np.repeat([[0] * 9], 500, 0)
    penalized = utils.sample_logits(np.repeat(logits, 500, 0), freq_penalty=2.0, tokens=tokens)
    assert 0 not in set(penalized) and list(utils.sample_logits(logits, temperature=0.0)) == [0]


@pytest.fixture
def gpt2_tokens(tmp_path):
    """Model of width 2 with GPT-2's tokenizer."""
    folder = Path(os.environ.get("GPT2_CHECKPOINTS", "")).parent / "tokenizer"
    if not (folder / "vocab.json").is_file():
        pytest.skip("GPT2_CHECKPOINTS is not set to a folder with GPT-2's ../tokenizer/vocab.json")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(folder / name, tmp_path)
    write_model(tmp_path, vocab_size=50257, n_positions=64, n_embd=2, n_layer=1, n_head=1, n_inner=2, bos_token_id=50256, eos_token_id=50256)
    return HookedTransformer.from_pretrained(tmp_path)


def test_tokens_match_gpt2(gpt2_tokens):
    model = gpt2_tokens
    tokens = model.to_tokens("When Mary and John went")
    assert tokens.shape == (1, 6) and tokens[0, 0] == 50256
    assert model.to_single_token(" Mary") == 5335
    assert model.to_str_tokens("When Mary") == ["<|endoftext|>", "When", " Mary"]
    assert model.tokenizer.pad_token_id == model.tokenizer.eos_token_id == 50256


# Factored matrices.


@pytest.mark.parametrize("leading", [(), (4,), (2, 3)])
def test_factored_matrices_match_dense_products(leading):
    random = np.random.default_rng(len(leading))
    a, b = random.normal(size=(*leading, 9, 3)), random.normal(size=(*leading, 3, 9))
    factored, dense = FactoredMatrix(a, b), a @ b
    assert factored.shape == dense.shape and (factored.ldim, factored.mdim, factored.rdim, factored.ndim) == (9, 3, 9, dense.ndim)
    np.testing.assert_allclose(factored.AB, dense)
    np.testing.assert_allclose(factored.T.AB, dense.swapaxes(-1, -2))
    u, s, v = factored.svd()
    np.testing.assert_allclose(u * s[..., None, :] @ v.swapaxes(-1, -2), dense, atol=1e-12)
    np.testing.assert_allclose(s, np.linalg.svd(dense, compute_uv=False)[..., :3])
    np.testing.assert_allclose(factored.norm(), np.linalg.norm(dense, axis=(-2, -1)))
    np.testing.assert_allclose(factored.eigenvalues.sum(-1).real, np.trace(dense, axis1=-2, axis2=-1))
    np.testing.assert_allclose(factored.make_even().AB, dense, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(factored.make_even().A, axis=-2), np.linalg.norm(factored.make_even().B, axis=-1))
    np.testing.assert_allclose(factored.collapse_l().swapaxes(-1, -2) @ factored.collapse_l(), dense.swapaxes(-1, -2) @ dense, atol=1e-12)
    np.testing.assert_allclose(factored.collapse_r() @ factored.collapse_r().swapaxes(-1, -2), dense @ dense.swapaxes(-1, -2), atol=1e-12)
    vector, matrix = random.normal(size=9), random.normal(size=(9, 5))
    for small in (2, 12):
        wide = random.normal(size=(9, small))
        np.testing.assert_allclose((factored @ wide).AB, dense @ wide, atol=1e-12)
        np.testing.assert_allclose((wide.T @ factored).AB, wide.T @ dense, atol=1e-12)
    np.testing.assert_allclose(factored @ vector, dense @ vector)
    np.testing.assert_allclose(vector @ factored, vector @ dense)
    np.testing.assert_allclose((factored @ FactoredMatrix(matrix, matrix.T)).AB, dense @ matrix @ matrix.T, atol=1e-11)
    np.testing.assert_allclose((2 * factored).AB, (factored * np.array(2.0)).AB)
    np.testing.assert_allclose(utils.get_corner(factored), dense[..., :3, :3])
    np.testing.assert_allclose(factored.unsqueeze(0).AB, dense[None])
    with pytest.raises(AssertionError, match="inner dimensions differ"):
        factored @ np.ones((4, 4))
    with pytest.raises(AssertionError, match=r"found shapes \(9, 3\) and \(9, 3\)"):
        FactoredMatrix(np.ones((9, 3)), np.ones((9, 3)))


def test_factored_matrices_are_indexed_like_arrays():
    random = np.random.default_rng(5)
    factored = FactoredMatrix(random.normal(size=(2, 4, 7, 3)), random.normal(size=(2, 4, 3, 6)))
    dense = factored.AB
    for index in (1, (1, 2), (slice(None), 2), ..., (..., slice(2), slice(3)), (0, 1, slice(1, 3)), (None, 1), (1, None, 0, slice(2)), [1, 0]):
        np.testing.assert_allclose(factored[index].AB, dense[index], err_msg=str(index))
    # Indexing a single row or column still returns a matrix.
    np.testing.assert_allclose(factored[1, 2, 3].AB, dense[1, 2, 3:4])
    np.testing.assert_allclose(factored[1, 2, -1, 4].AB, dense[1, 2, -1:, 4:5])
    with pytest.raises(ValueError, match="5 indices are too many"):
        factored[0, 0, 0, 0, 0]


# Sparse autoencoders.

SAES = ["plain", "topk", "jumprelu", "rescaled"]


@pytest.fixture(params=SAES)
def spliced(request, tmp_path):
    """Model of width 6, processed as a fixture autoencoder expects, and that autoencoder."""
    write_model(tmp_path, vocab_size=20, n_positions=16, n_embd=6, n_layer=2, n_head=2, n_inner=9)
    opened = candle_gpt2.Model.from_pretrained(tmp_path)
    dictionary = opened.dictionary(FIXTURES / "dictionaries" / f"saelens-{request.param}")
    is_processed = dictionary.trained_on_processed
    open_model = HookedTransformer.from_pretrained if is_processed else HookedTransformer.from_pretrained_no_processing
    model = open_model(opened)
    return model, candle_gpt2.SAE.load(FIXTURES / "dictionaries" / f"saelens-{request.param}", model)


@pytest.mark.parametrize("name", SAES)
def test_autoencoders_match_the_reference(spliced, name):
    model, _ = spliced
    expected = read_safetensors(FIXTURES / "dictionaries" / "expected.safetensors")[1]
    sae = candle_gpt2.SAE.load(FIXTURES / "dictionaries" / f"saelens-{name}", model)
    x = expected[f"{name}.input"]
    CLOSE(sae.encode(x), expected[f"{name}.latents"])
    CLOSE(sae.decode(sae.encode(x), x), expected[f"{name}.output"])
    assert sae.W_dec.shape == (sae.dictionary.d_sae, sae.dictionary.d_in) == (10, 6)
    CLOSE(sae.dictionary.encode(x), sae.encode(x))


def test_autoencoder_with_error_term_changes_nothing_unless_edited(spliced):
    model, sae = spliced
    ids, name = [[1, 2, 3, 4], [5, 6, 7, 8]], sae.hook_name
    logits, plain_cache = model.run_with_cache(ids)
    with_error, cache = model.run_with_cache_with_saes(ids, saes=[sae], use_error_term=True)
    CLOSE(with_error, logits)
    ends = ["input", "acts_pre", "acts_post", "recons", "error", "output"]
    assert [key for key in cache if key.startswith(name)] == [f"{name}.hook_sae_{end}" for end in ends]
    assert set(cache) - set(plain_cache) == {f"{name}.hook_sae_{end}" for end in ends}
    values = {end: cache[f"{name}.hook_sae_{end}"] for end in ends}
    CLOSE(values["input"], plain_cache[name].reshape(2, 4, 6))
    is_normalized = sae.cfg.normalize_activations == "layer_norm"
    mean = values["input"].mean(-1, keepdims=True) if is_normalized else 0
    deviation = values["input"].std(-1, ddof=1, keepdims=True) if is_normalized else 1
    CLOSE(values["recons"] * deviation + mean + values["error"], values["input"])
    CLOSE(values["output"], values["input"])
    CLOSE(values["acts_post"], sae.encode(values["input"]))
    # Without the error term, the reconstruction replaces the activation.
    without = model.run_with_saes(ids, saes=sae)
    output = values["recons"] * deviation + mean
    by_hand = model.run_with_hooks(ids, fwd_hooks=[(name, lambda value, hook: output.reshape(value.shape))])
    CLOSE(without, by_hand)
    assert not np.allclose(without, logits)
    # Editing a latent adds the latent's direction.
    latent = int(values["acts_post"][0, 1].argmax())

    def raise_one(latents, hook):
        latents[..., latent] += 2
        return latents

    hooks = [(f"{name}.hook_sae_acts_post", raise_one)]
    edited = model.run_with_hooks_with_saes(ids, saes=[sae], use_error_term=True, fwd_hooks=hooks)
    length = np.linalg.norm(sae.W_dec[latent]) if sae.dictionary.settings.get("rescale_acts_by_decoder_norm") else 1
    moved = values["input"] + 2 * sae.W_dec[latent] / length * deviation
    CLOSE(edited, model.run_with_hooks(ids, fwd_hooks=[(name, lambda value, hook: moved.reshape(value.shape))]))
    # After the run, the model is unchanged.
    assert not model.acts_to_saes and not sae.use_error_term
    # An unknown name only causes a warning, and removing an SAE restores its use_error_term.
    with pytest.warns(UserWarning, match=r"blocks\.0\.attn: no SAE is spliced in at this hook point"):
        model.reset_saes("blocks.0.attn")
    model.add_sae(sae, use_error_term=True)
    model.reset_saes()
    assert not sae.use_error_term
    np.testing.assert_array_equal(model(ids), logits)
    model.add_sae(sae, use_error_term=True)
    assert list(model.acts_to_saes) == [name] and f"{name}.hook_sae_input" in model.hook_dict
    assert sae.cfg.hook_name == sae.cfg.metadata.hook_name == name and (sae.cfg.d_in, sae.cfg.d_sae) == (6, 10)
    CLOSE(model.run_with_saes(ids, saes=[sae], use_error_term=False), without)
    CLOSE(model(ids), logits)
    model.reset_saes()
    np.testing.assert_array_equal(model(ids), logits)
    with model.saes([sae], use_error_term=False):
        CLOSE(model(ids), without)
    np.testing.assert_array_equal(model(ids), logits)
    CLOSE(model.run_with_saes(ids, saes=[sae], reset_saes_end=False, use_error_term=False), without)
    assert list(model.acts_to_saes) == [name]
    CLOSE(model(ids), without)
    if not model.kind.is_torch:
        with model.hooks(bwd_hooks=[("hook_embed", print)]), pytest.raises(NotImplementedError, match=rf"{name}: .* no gradients through SAEs"):
            model(ids)
    model.reset_saes()


def test_mismatched_autoencoders_are_reported(spliced):
    model, sae = spliced
    other = HookedTransformer.from_pretrained if not sae.dictionary.trained_on_processed else HookedTransformer.from_pretrained_no_processing
    for add in (lambda: other(model.native).add_sae(sae), lambda: other(model.native).run_with_saes([1], saes=[sae])):
        with pytest.warns(UserWarning, match="this SAE was trained on activations of a model opened with from_pretrained") as warnings:
            add()
        assert [Path(warning.filename).name for warning in warnings] == ["test_hooked.py"], "the warning points to the caller"
    with pytest.raises(ValueError, match="width"):
        candle_gpt2.SAE.load(FIXTURES / "dictionaries" / "saelens-plain", open_processed("plain"))
    with pytest.raises(FileNotFoundError, match="no/such"):
        candle_gpt2.SAE.load("no/such", model)
    alone = candle_gpt2.SAE.load(FIXTURES / "dictionaries" / "saelens-plain")
    with pytest.raises(ValueError, match="width"):
        open_processed("plain").add_sae(alone)
    with pytest.raises(FileNotFoundError, match=r"no/such.*not downloaded automatically.*SAE\.load\(folder, model\)"):
        candle_gpt2.SAE.from_pretrained("no", "such")


@pytest.mark.parametrize(("name", "architecture"), [("plain", "standard"), ("topk", "topk"), ("jumprelu", "jumprelu"), ("gated", "gated")])
def test_autoencoder_loads_without_a_model(name, architecture):
    folder = FIXTURES / "dictionaries" / f"saelens-{name}"
    sae = candle_gpt2.SAE.load_from_disk(folder)
    assert sae.cfg.architecture == architecture
    stored = read_safetensors(folder / "sae_weights.safetensors")[1]
    assert set(sae.state_dict()) == set(stored)
    for weight, value in stored.items():
        np.testing.assert_array_equal(getattr(sae, weight), value)
    x = read_safetensors(FIXTURES / "dictionaries" / "expected.safetensors")[1][f"{name}.input"]
    assert hasattr(sae, "threshold") == (architecture == "jumprelu")
    for other in (candle_gpt2.SAE.from_pretrained(folder.parent, folder.name), candle_gpt2.SAE.load(folder)):
        np.testing.assert_array_equal(other.encode(x), sae.encode(x))
    CLOSE(sae.encode(x), sae.dictionary.encode(x))


# Torch tensors.


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="torch is not installed: pip install torch")


def test_model_returns_tensors_if_torch_is_imported(torch):
    model = HookedTransformer.from_pretrained(INSIDE / "plain", default_prepend_bos=False)
    arrays = HookedTransformer.from_pretrained(INSIDE / "plain", default_prepend_bos=False, tensors="numpy")
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    logits, cache = model.run_with_cache(ids)
    expected, expected_cache = arrays.run_with_cache(ids.numpy())
    assert isinstance(logits, torch.Tensor) and isinstance(expected, np.ndarray)
    np.testing.assert_array_equal(logits.numpy(), expected)
    for name, value in cache.items():
        assert isinstance(value, torch.Tensor), name
        np.testing.assert_array_equal(value.numpy(), expected_cache[name])
    assert logits.log_softmax(-1).shape == (2, 3, 61) and model(ids, return_type="loss").item() > 0
    stack = cache.decompose_resid()
    assert isinstance(stack, torch.Tensor) and isinstance(cache.logit_attrs(stack, ids), torch.Tensor)
    assert isinstance(model.W_Q[0, 1] @ model.W_K[0, 1].T, torch.Tensor) and isinstance(model.blocks[0].mlp.W_in, torch.Tensor)
    for value in (model.QK.eigenvalues, model.OV.norm(), model.OV[0, 1].U, model.all_composition_scores("Q"), model.OV @ torch.eye(21)):
        assert isinstance(value.AB if isinstance(value, FactoredMatrix) else value, torch.Tensor)
    assert isinstance(torch.eye(21) @ model.OV, FactoredMatrix)

    def edit(z, hook):
        assert isinstance(z, torch.Tensor)
        z[:, :, 1] = 0

    # In-place edits take effect, as in torch.
    edited = model.run_with_hooks(ids, fwd_hooks=[("blocks.0.attn.hook_z", edit)])
    by_array = arrays.run_with_hooks(ids.numpy(), fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: z * np.array([1, 0, 1])[:, None])])
    np.testing.assert_allclose(edited.numpy(), by_array, atol=1e-6)
    patched = patching.get_act_patch_block_every(model, ids[1:], model.run_with_cache(ids[:1])[1], lambda logits: logits[0, -1, 3])
    assert isinstance(patched, torch.Tensor) and patched.shape == (3, 2, 3)
    assert isinstance(model.blocks[0].mlp(cache["normalized", 0, "ln2"]), torch.Tensor)
    model.blocks[0].mlp.W_in = torch.zeros(21, 84)
    assert not model.W_in[0].any()


def test_tensor_backward_runs_backward_hooks(torch):
    model = HookedTransformer.from_pretrained(INSIDE / "plain", default_prepend_bos=False)
    seen = []
    model.add_hook("blocks.1.attn.hook_z", lambda gradient, hook: seen.append(gradient), "bwd")
    logits = model([[1, 2, 3]])
    (logits[0, -1, 3] - logits[0, -1, 5]).backward()
    weights = torch.zeros(1, 3, 61)
    weights[0, -1, 3], weights[0, -1, 5] = 1, -1
    model([[1, 2, 3]])
    model.backward(weights)
    assert all(isinstance(one, torch.Tensor) for one in seen) and torch.equal(*seen) and seen[0].any()
    model.reset_hooks()
    assert not model([[1, 2, 3]]).requires_grad


# Hook points and parameterized edits in the fixtures.
EDITS = {
    "vector": ("blocks.1.hook_resid_pre", lambda value, a: value + a),
    "heads": ("blocks.1.attn.hook_z", lambda value, a: value * a[:, None]),
    "keys": ("blocks.0.attn.hook_k", lambda value, a: value * a),
    "pattern": ("blocks.1.attn.hook_pattern", lambda value, a: value * a[:, None, None]),
    "neurons": ("blocks.0.mlp.hook_pre", lambda value, a: value + a),
    "mlp": ("blocks.0.hook_mlp_out", lambda value, a: value * (value @ a)[..., None]),
}


def assert_gradient(found, expected, label=""):
    """Checks that gradients are equal within 1e-4 of the largest value."""
    found, expected = np.asarray(found), np.asarray(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max(), err_msg=label)


@pytest.mark.parametrize("name", HOOKED)
def test_gradients_through_edits_match_transformer_lens(torch, name):
    model = HookedTransformer.from_pretrained(INSIDE / name, default_prepend_bos=False)
    expected = {key: torch.from_numpy(value.copy()) for key, value in read_safetensors(FIXTURES / "hooked" / "gradients" / f"{name}.safetensors")[1].items()}
    ids, weights = expected["ids"].long(), expected["weights"]
    for edit, (point, change) in EDITS.items():
        parameter = expected[f"{edit}.parameter"].requires_grad_()
        logits = model.run_with_hooks(ids, fwd_hooks=[(point, lambda value, hook, change=change, parameter=parameter: change(value, parameter))])
        (weights * logits).sum().backward()
        assert_gradient(parameter.grad, expected[f"{edit}.gradient"], edit)
    residual = expected["start.residual"].requires_grad_()
    (weights * model(residual, start_at_layer=1)).sum().backward()
    assert_gradient(residual.grad, expected["start.gradient"], "start_at_layer")
    assert not model(ids).requires_grad


def test_autograd_tracks_in_place_edits_and_requires_grad(torch):
    model = HookedTransformer.from_pretrained(INSIDE / "plain", default_prepend_bos=False)
    ids, name = torch.tensor([[1, 2, 3], [4, 5, 6]]), "blocks.0.attn.hook_z"
    vector, seen = torch.full((7,), 0.5, requires_grad=True), []

    def in_place(z, hook):
        z[:, 1] += vector

    def returned(z, hook):
        return torch.cat([z[:, :1], z[:, 1:2] + vector, z[:, 2:]], 1)

    def mark(z, hook):
        seen.append(z.requires_grad_())

    def double(value):
        return value.double()

    gradients = []
    for hooks in ([in_place], [returned], [mark, in_place]):
        loss = model.run_with_hooks(ids, return_type="loss", fwd_hooks=[(name, hook) for hook in hooks])
        gradients += torch.autograd.grad(loss, vector, retain_graph=True)
    assert_gradient(gradients[1], gradients[0])
    assert_gradient(gradients[2], gradients[0])
    assert_gradient(torch.autograd.grad(loss, seen[0])[0][:, 1].sum((0, 1)), gradients[0])
    # Values of other dtypes are converted. Without gradients, or for a detached value, there is no graph.
    assert model.run_with_hooks(ids, fwd_hooks=[(name, lambda z, hook: double(returned(z, hook)))]).dtype == torch.float32
    with torch.no_grad():
        assert not model.run_with_hooks(ids, fwd_hooks=[(name, returned)]).requires_grad
    assert not model.run_with_hooks(ids, fwd_hooks=[(name, returned), (name, lambda z, hook: z.detach())]).requires_grad
    assert isinstance(model.generate(ids, max_new_tokens=2, do_sample=False), torch.Tensor)
    with pytest.raises(ValueError, match=rf"hook <lambda> at {name}: expected an array of shape"):
        model.run_with_hooks(ids, fwd_hooks=[(name, lambda z, hook: returned(z, hook)[:, :2])])
    # Cached keys and values keep their gradients.
    past = [components.KeyValues() for _ in model.blocks]
    with model.hooks([(name, returned)]):
        model(ids, past_kv_cache=past)
    model(ids[:, :1], past_kv_cache=past).sum().backward()
    assert vector.grad.any()


def test_weight_gradients_match_finite_differences(torch):
    model = HookedTransformer.from_pretrained_no_processing(INSIDE / "untied", default_prepend_bos=False)
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 2]])
    expected = model(ids, return_type="loss")
    model.zero_grad()
    kept = []
    with model.hooks([("blocks.1.attn.hook_z", lambda z, hook: kept.append(z))]):
        loss, cache = model.run_with_cache(ids, return_type="loss")
    CLOSE(loss.detach(), expected)
    kept[0].retain_grad()
    loss.backward()
    assert kept[0].grad.any() and not cache["z", 1].requires_grad
    assert model.blocks[1].attn.W_Q.grad is model.blocks[1].attn.W_Q.grad
    step, random = 1e-2, torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        direction = torch.randn(weight.shape, generator=random)
        direction *= weight.grad.norm() / weight.grad.norm().clamp_min(1e-9) / direction.norm()
        losses = []
        with torch.no_grad():
            for by in (step, -2 * step):
                weight += by * direction
                losses.append(model(ids, return_type="loss").item())
            weight += step * direction
        slope = (losses[0] - losses[1]) / (2 * step)
        np.testing.assert_allclose((weight.grad * direction).sum().item(), slope, rtol=0.05, atol=3e-4, err_msg=name)
    model.zero_grad(set_to_none=False)
    assert not model.blocks[0].mlp.W_in.grad.any()
    with torch.no_grad():
        assert not model(ids).requires_grad
    # Analyses of a cache do not track gradients.
    assert cache.decompose_resid(apply_ln=True).shape == (8, 2, 4, 18)
    model.requires_grad_(False)
    assert not model(ids).requires_grad
    # A single weight may require gradients.
    model.blocks[2].mlp.W_out.requires_grad_()
    assert model(ids).requires_grad and not model(ids, stop_at_layer=2).requires_grad
    arrays = HookedTransformer.from_pretrained(INSIDE / "untied", tensors="numpy")
    assert arrays.requires_grad_(False) is arrays
    with pytest.raises(TypeError, match=r"embed\.W_E: arrays have no gradients; import torch"):
        arrays.zero_grad()


@pytest.mark.parametrize("switches", [(), ("attn_result", "hook_mlp_in", "split_qkv_input"), ("attn_in",)])
@pytest.mark.parametrize("name", ["relu_inner", "gelu"])
def test_backward_hooks_agree_between_numpy_and_torch(torch, name, switches):
    ids, found = [[1, 2, 3, 4, 5], [3, 9, 8, 7, 2]], []
    for tensors in ("numpy", "torch"):
        model = HookedTransformer.from_pretrained_no_processing(INSIDE / name, default_prepend_bos=False, tensors=tensors)
        for switch in switches:
            getattr(model, f"set_use_{switch}")(True)
        gradients: dict[str, np.ndarray] = {}

        def add(gradient, hook, gradients=gradients):
            gradients[hook.name] = gradients.get(hook.name, 0) + np.asarray(gradient)

        weights = np.random.default_rng(0).normal(size=(2, 5, model.cfg.d_vocab)).astype(np.float32)
        with model.hooks(bwd_hooks=[(lambda known: True, add)]):
            model(ids)
            model.backward(weights)
        found.append(gradients)
    assert set(found[0]) == set(found[1])
    for known, gradient in found[0].items():
        assert_gradient(found[1][known], gradient, known)


def test_backward_hooks_work_with_edits_partial_runs_and_padding(torch):
    model = HookedTransformer.from_pretrained(INSIDE / "plain", default_prepend_bos=False)
    ids, seen = torch.tensor([[0, 0, 3, 4], [5, 6, 7, 8]]), {}

    def keep(gradient, hook):
        seen[hook.name] = gradient

    edit = ("blocks.0.hook_mlp_out", lambda value, hook: torch.zeros_like(value))
    with model.hooks([edit], [(lambda name: name.endswith(("hook_mlp_out", "mlp.hook_post", "hook_resid_pre")), keep)]):
        model(ids, attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), return_type="loss").backward()
    # The edit makes the first MLP's output constant.
    assert set(seen) == {"blocks.0.hook_mlp_out", "blocks.1.mlp.hook_post", "blocks.1.hook_mlp_out", "blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre"}
    assert all(gradient.isfinite().all() and gradient.any() for gradient in seen.values())
    with model.hooks(bwd_hooks=[("blocks.1.hook_resid_pre", keep)]):
        model(model(ids, stop_at_layer=1), start_at_layer=1).sum().backward()
        _, cache = model.run_with_cache(ids, return_type="loss", incl_bwd=True, names_filter="blocks.1.attn.hook_z")
    assert cache["blocks.1.attn.hook_z_grad"].any()


@pytest.mark.parametrize("act_fn", sorted(components.ACTIVATIONS))
def test_torch_activations_match_numpy(torch, act_fn):
    function, slope = components.ACTIVATIONS[act_fn]
    x = torch.linspace(-4, 4, 33, requires_grad=True)
    y = components.LIVE_ACTIVATIONS[act_fn](x)
    np.testing.assert_allclose(y.detach(), function(x.detach().numpy()), atol=1e-6)
    np.testing.assert_allclose(torch.autograd.grad(y.sum(), x)[0], slope(x.detach().numpy()), atol=1e-6)


@pytest.mark.parametrize("use_error_term", [False, True])
def test_autoencoder_gradients_match_finite_differences(torch, spliced, use_error_term):
    model, sae = spliced
    ids, name = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), sae.hook_name
    ends = ["acts_post", "recons", "output", *(["error"] if use_error_term else [])]
    kept, random = {}, torch.Generator().manual_seed(0)

    def mark(value, hook):
        kept[hook.name] = value.requires_grad_()

    points = [(f"{name}.hook_sae_{end}", mark) for end in ends]
    with model.saes([sae], use_error_term=use_error_term), model.hooks([("hook_embed", mark), *points]):
        weights = torch.randn((2, 4, 20), generator=random)
        gradients = dict(zip(kept, torch.autograd.grad((model(ids) * weights).sum(), list(kept.values())), strict=True))
        model.reset_hooks()
        step = 1e-3
        for point, gradient in gradients.items():
            if point == "hook_embed" and use_error_term:
                continue  # the error term is constant, as in SAELens
            direction = torch.randn(gradient.shape, generator=random)
            if point.endswith("acts_post"):
                direction *= kept[point].detach() > 0

            def moved(by, point=point, direction=direction):
                return (model.run_with_hooks(ids, fwd_hooks=[(point, lambda value, hook: value + by * direction)]) * weights).sum().item()

            slope = (moved(step) - moved(-step)) / (2 * step)
            np.testing.assert_allclose((gradient * direction).sum().item(), slope, rtol=0.03, atol=0.05, err_msg=point)
    # An SAE also has gradients outside a model.
    x = torch.randn((3, 6), generator=random).requires_grad_()
    latents = sae.encode(x)
    (latents.sum() + sae.decode(latents, x).sum()).backward()
    assert x.grad.any()


def test_weights_outside_the_blocks_are_the_parameters_and_stacks_are_copies(torch):
    model = HookedTransformer.from_pretrained(INSIDE / "plain", tensors="torch")
    ids = torch.tensor([[1, 2, 3]])
    for name in ("W_E", "W_pos", "W_U", "b_U"):
        logits, weight = model(ids), getattr(model, name)
        weight += torch.arange(weight.numel()).reshape(weight.shape) % 7
        assert not torch.allclose(model(ids), logits), name
    logits = model(ids)
    model.W_Q[:] = 0
    assert torch.equal(model(ids), logits)
    model.W_U.requires_grad_()
    assert model(ids).requires_grad


def test_components_take_keywords(torch):
    model = HookedTransformer.from_pretrained(INSIDE / "plain", tensors="torch")
    block, ids = model.blocks[0], torch.tensor([[1, 2, 3]])
    x = torch.randn(1, 3, model.cfg.d_model)
    assert torch.equal(block.attn(query_input=x, key_input=x, value_input=x), block.attn(x, x, x))
    assert torch.equal(block.ln1(x=x), block.ln1(x)) and torch.equal(block.mlp(x=x), block.mlp(x))
    assert torch.equal(model.embed(tokens=ids), model.embed(ids)) and torch.equal(model.unembed(residual=x), model.unembed(x))


def test_models_are_pickled():
    model = HookedTransformer.from_pretrained(INSIDE / "plain", tensors="numpy")
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model))([1, 2, 3]), model([1, 2, 3]))


def test_native_model_is_as_precise_as_the_hooked_model():
    model = HookedTransformer.from_pretrained(default_prepend_bos=False, tensors="numpy")
    assert model.native.dtype == "f32"
    difference = model.native.logits("One day", last_only=True) - model("One day")[0, -1]
    # Processing centers the logits.
    assert np.ptp(difference) < 1e-3


def test_hook_points_of_spliced_autoencoders_are_suggested():
    model = HookedTransformer.from_pretrained_no_processing(tensors="numpy")
    sae = SAE.load("built-in", model, site="blocks.3.hook_resid_mid")
    with model.saes([sae]), pytest.raises(KeyError, match=r"an SAE is spliced in here; its hook points are .*hook_sae_acts_post"):
        model.run_with_hooks([1, 2], fwd_hooks=[("blocks.3.hook_mlp_out", lambda value, hook: value)])


def test_gradients_pass_through_factored_matrices(torch):
    random = np.random.default_rng(3)
    factors = [random.normal(size=shape).astype(np.float32) for shape in ((2, 7, 3), (2, 3, 6))]
    left, right = (torch.tensor(random.normal(size=shape).astype(np.float32)) for shape in ((4, 7), (6, 5)))
    gradients = []
    for build in (FactoredMatrix, lambda a, b: a @ b):
        a, b = (torch.tensor(one, requires_grad=True) for one in factors)
        product = build(a, b)
        if isinstance(product, FactoredMatrix):
            values = [(left @ product @ right * 2).AB, product.T[1].AB, product.norm(), product.S[..., 0], product.make_even().AB]
        else:
            values = [left @ product @ right * 2, product[1].T, product.norm(dim=(-2, -1)), torch.linalg.svdvals(product)[..., 0], product]
        sum((value**3).sum() for value in values).backward()
        gradients.append([a.grad.numpy(), b.grad.numpy()])
    for found, expected in zip(*gradients, strict=True):
        # Singular vectors of f32 matrices.
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-2)


def test_tensor_inputs_give_tensor_outputs(torch):
    model = HookedTransformer.from_pretrained(INSIDE / "plain", default_prepend_bos=False, tensors="numpy")
    ids, seen = torch.tensor([1, 2, 3]), []
    logits, cache = model.run_with_cache(ids)
    assert isinstance(logits, torch.Tensor) and isinstance(cache["z", 0], torch.Tensor)
    model.run_with_hooks(ids, fwd_hooks=[("hook_embed", lambda value, hook: seen.append(type(value)))])
    model.run_with_hooks([1, 2], fwd_hooks=[("hook_embed", lambda value, hook: seen.append(type(value)))])
    assert seen == [torch.Tensor, np.ndarray]
    assert isinstance(model([1, 2, 3]), np.ndarray) and isinstance(model.W_E, np.ndarray)
    assert isinstance(model.generate(ids[None], max_new_tokens=2, do_sample=False), torch.Tensor)
    assert isinstance(model.tokens_to_residual_directions(ids), torch.Tensor)
    assert isinstance(FactoredMatrix(torch.ones(3, 2), np.ones((2, 3))).AB, torch.Tensor)


def test_torch_is_never_imported(python):
    script = (
        "import sys, candle_gpt2; model = candle_gpt2.HookedTransformer.from_pretrained(); model.run_with_cache('One day');"
        "print('torch' in sys.modules)"
    )
    assert python(script).stdout.strip() == "False"


def test_aliases_and_old_imports_refer_to_the_same_classes():
    assert candle_gpt2.HookedTransformer is candle_gpt2.HookedSAETransformer
    import candle_gpt2.hooked as transformer_lens

    # Old imports work with the new package name. Attributes with the same names as modules are still the classes.
    from candle_gpt2.hook_points import HookPoint
    from candle_gpt2.hooked.ActivationCache import ActivationCache
    from candle_gpt2.hooked.FactoredMatrix import FactoredMatrix as SameMatrix
    from candle_gpt2.hooked.model_bridge import TransformerBridge as SameBridge
    from candle_gpt2.utils import get_act_name

    for package in ("candle_gpt2", "candle_gpt2.hooked"):
        for module in ("utils", "utilities", "patching", "head_detector", "hook_points", "components"):
            assert importlib.import_module(f"{package}.{module}") is getattr(candle_gpt2, module)
    assert get_act_name is utils.get_act_name and HookPoint is candle_gpt2.HookPoint and SameMatrix is FactoredMatrix
    assert ActivationCache is candle_gpt2.ActivationCache and SameBridge is TransformerBridge
    assert transformer_lens.utils is utils and transformer_lens.hook_points.HookPoint is candle_gpt2.HookPoint
    for name in transformer_lens.__all__:
        assert getattr(candle_gpt2, name) is getattr(transformer_lens, name)


def test_progress_is_shown_only_on_a_terminal(monkeypatch, capsys):
    from candle_gpt2.hooked import progress

    clock = iter(range(0, 100, 2))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    assert list(progress.progress("abc", 3, "patching z")) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    assert list(progress.progress("abc", 3, "patching z")) == ["a", "b", "c"]
    captured = capsys.readouterr()
    assert captured.out == "" and "\rpatching z: 2 of 3" in captured.err and captured.err.endswith("\r\x1b[K")
    assert list(progress.progress("ab", 2, "x", is_shown=False)) == ["a", "b"] and capsys.readouterr() == ("", "")


def test_generate_warns_of_right_padding(model):
    texts, options = ["One day, Mia", "One"], {"max_new_tokens": 1, "verbose": False}
    with pytest.warns(UserWarning, match="use 'left'"):
        model.generate(texts, padding_side="right", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(texts, **options)
        model.generate(["One", "One"], padding_side="right", **options)


def test_first_of_several_end_tokens_is_eos(tmp_path):
    folder = shutil.copytree(FIXTURES / "tiny-checkpoint", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": None, "eos_token_id": [5, 0]}))
    tokenizer = HookedTransformer.from_pretrained(folder).tokenizer
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.eos_token) == (5, 5, tokenizer.decode([5]))
