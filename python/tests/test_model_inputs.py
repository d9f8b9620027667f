"""Inputs for HookedTransformer: transformers models, state dicts, configurations, and non-text inputs."""

import gc
from pathlib import Path

import candle_gpt2
import numpy as np
import pytest
from candle_gpt2 import HookedTransformer, HookedTransformerConfig, TransformerBridge, patching, utils

from support import FIXTURES

TEXT = "One day, Mia was"
SMALL = {"n_layers": 2, "d_model": 12, "n_ctx": 16, "d_head": 4, "d_vocab": 30, "act_fn": "gelu_new"}


@pytest.fixture(scope="module")
def model():
    """Built-in model."""
    return HookedTransformer.from_pretrained(tensors="numpy")


def test_config_creates_an_untrained_model():
    model = HookedTransformer(HookedTransformerConfig(**SMALL, seed=3), tensors="numpy")
    assert model.cfg.n_heads == 3 and model.cfg.d_mlp == 48 and model.cfg.attn_scale == 2.0
    assert model.cfg.n_params == 2 * (4 * 12 * 12 + 2 * 12 * 48)
    assert abs(model.W_in.std() - 0.8 / 12**0.5) < 0.02 and not model.b_in.any()
    logits = model([[1, 2, 3]])
    assert logits.shape == (1, 3, 30) and np.isfinite(logits).all()
    np.testing.assert_array_equal(HookedTransformer({**SMALL, "seed": 3}, tensors="numpy")([[1, 2, 3]]), logits)
    assert not np.array_equal(HookedTransformer({**SMALL, "seed": 4}, tensors="numpy")([[1, 2, 3]]), logits)
    generated = model.generate(np.array([[1, 2]]), max_new_tokens=3, stop_at_eos=False, verbose=False)
    assert generated.shape == (1, 5)
    for call, message in (
        (lambda: model(TEXT), "tokenizer: this model has no tokenizer"),
        (lambda: model.generate(np.array([[1, 2]])), "eos_token_id: this model has no tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(RuntimeError, match="created from a configuration"):
        model.native
    with_tokenizer = HookedTransformer({**SMALL, "d_vocab": 4096}, tokenizer=candle_gpt2.Model.from_pretrained(), tensors="numpy")
    assert with_tokenizer(TEXT).shape[-1] == 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positional_embedding_type": "rotary"}, "positional_embedding_type='rotary': not supported by GPT-2"),
        ({"attn_only": True}, "attn_only=True"),
        ({"gated_mlp": True}, "gated_mlp=True"),
        ({"n_key_value_heads": 1}, "n_key_value_heads=1"),
        ({"normalization_type": None}, "normalization_type=None"),
        ({"normalization_type": "RMS"}, "normalization_type='RMS'"),
        ({"parallel_attn_mlp": True}, "parallel_attn_mlp=True: not a GPT-2 setting"),
        ({"n_layerz": 3}, "n_layerz=3: .*did you mean 'n_layers'"),
        ({"device": "cuda"}, "device='cuda'"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"act_fn": None}, "act_fn: missing; pass the MLPs' activation function"),
        ({"act_fn": "solu_ln"}, "act_fn: expected one of gelu_new"),
        ({"d_vocab": -1}, "d_vocab: missing; pass the vocabulary size"),
    ],
)
def test_unsupported_setting_is_named_in_the_error(change, message):
    with pytest.raises(ValueError, match=message):
        HookedTransformer({**SMALL, **change})


def test_disabled_settings_of_other_architectures_are_accepted():
    settings = {**SMALL, "rotary_dim": None, "parallel_attn_mlp": False, "attn_scores_soft_cap": -1.0, "rotary_base": 10000, "n_params": 5}
    assert HookedTransformer(settings).cfg.d_mlp == 48


def test_state_dict_loads_by_name(model):
    raw = HookedTransformer.from_pretrained_no_processing(tensors="numpy")
    expected = raw(TEXT)
    fresh = HookedTransformer(raw.cfg, tokenizer=raw.native, tensors="numpy")
    state = {**raw.state_dict(), "blocks.0.attn.mask": np.ones(3), "blocks.0.attn.IGNORE": np.float32(0)}
    assert fresh.load_state_dict(state) == ([], [])
    np.testing.assert_array_equal(fresh(TEXT), expected)
    # In TransformerLens, a folded model has no norm weights.
    folded = {name: value for name, value in model.state_dict().items() if ".ln" not in name and "ln_final" not in name}
    processed = HookedTransformer.from_pretrained(tensors="numpy")
    processed.blocks[0].mlp.W_in[:] = 0
    assert processed.load_state_dict(folded) == ([], [])
    np.testing.assert_array_equal(processed(TEXT), model(TEXT))
    fresh.load_and_process_state_dict(raw.state_dict())
    np.testing.assert_allclose(fresh(TEXT), model(TEXT), atol=1e-4)
    with pytest.raises(ValueError, match=r"ln1\.w: the norms of this model are folded"):
        model.load_state_dict(raw.state_dict())
    with pytest.raises(RuntimeError, match=r"missing keys \['unembed.W_U'\], unexpected keys \['head'\]"):
        raw.load_state_dict({("head" if name == "unembed.W_U" else name): value for name, value in raw.state_dict().items()})
    missing = raw.load_state_dict({"head": 1}, strict=False)
    assert missing.unexpected_keys == ["head"] and "unembed.W_U" in missing.missing_keys
    with pytest.raises(RuntimeError, match=r"embed\.W_E: expected shape \(4096, 256\), found \(3,\)"):
        raw.load_state_dict({"embed.W_E": np.zeros(3)}, strict=False)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.b_O: expected shape \(256,\), found \(1,\)"):
        raw.blocks[0].attn.b_O = np.zeros(1)
    np.testing.assert_array_equal(raw(TEXT), expected)


def assert_native_follows(model):
    """Checks that the engine's Model returns the logits of `model`, up to a constant added to all of them."""
    ids = [1, 2, 3, 4]
    expected = utils.log_softmax(np.asarray(model(np.array([ids]))))[0]
    np.testing.assert_allclose(utils.log_softmax(model.native.logits(ids, last_only=False)), expected, atol=1e-3)


@pytest.mark.parametrize("open_model", [HookedTransformer.from_pretrained, HookedTransformer.from_pretrained_no_processing])
def test_native_follows_changed_weights(open_model):
    model = open_model(tensors="numpy")
    first = model.native
    # Reading and processing weights changes no prediction.
    model.state_dict()
    model.process_weights_()
    assert model.native is first
    model.blocks[1].mlp.W_out[:] *= 0.5
    second = model.native
    assert second is not first and model.native is second
    assert second.encode(TEXT) == first.encode(TEXT)
    assert_native_follows(model)
    assert not np.allclose(second.logits(TEXT), first.logits(TEXT), atol=1e-2)
    # A change before processing is not lost.
    model.blocks[0].attn.W_O[2] = 0
    model.process_weights_()
    assert_native_follows(model)
    # GPT-2 has no output bias, so the engine's Model needs the bias in its other weights.
    model.unembed.b_U[3] += 1
    assert_native_follows(model)
    folder = Path(model.native.name)
    assert folder.exists() and not Path(second.name).exists()
    del model
    gc.collect()
    assert not folder.exists()


def test_native_follows_a_state_dict_and_training():
    model = HookedTransformer.from_pretrained_no_processing(tensors="numpy")
    first = model.native
    model.load_state_dict(model.state_dict())
    assert model.native is first
    model.load_state_dict(HookedTransformer(model.cfg, tokenizer=first, tensors="numpy").state_dict())
    assert model.native is not first
    assert_native_follows(model)
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    model = HookedTransformer.from_pretrained_no_processing(tensors="torch")
    optimizer = torch.optim.SGD(model.requires_grad_().parameters(), lr=0.1)
    model(TEXT, return_type="loss").backward()
    optimizer.step()
    model.requires_grad_(False)
    assert_native_follows(model)
    # A new tensor replaces a weight.
    model.blocks[2].attn.W_Q.data = model.blocks[2].attn.W_Q.data * 2
    assert_native_follows(model)
    np.testing.assert_array_equal(model.W_Q[2].numpy(), model.blocks[2].attn.W_Q.numpy())
    assert_native_follows(model)


def test_transformers_model_is_converted_in_memory():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=61, n_positions=16, n_embd=12, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0)
    hf_model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.tensor([[1, 2, 3]])
    expected = hf_model(ids).logits.detach()
    for opened in (
        HookedTransformer.from_pretrained_no_processing(hf_model),
        HookedTransformer.from_pretrained_no_processing(hf_model=hf_model),
        TransformerBridge.boot_transformers(None, hf_model=hf_model),
    ):
        torch.testing.assert_close(opened(ids), expected, atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(opened.native.logits([1, 2, 3]), expected[0, -1], atol=1e-5)
    tokenizer = FIXTURES / "tiny-checkpoint"
    named = HookedTransformer.from_pretrained_no_processing(str(tokenizer), hf_model=transformers.GPT2LMHeadModel.from_pretrained(tokenizer))
    assert named.cfg.model_name == str(tokenizer)
    torch.testing.assert_close(named("One"), HookedTransformer.from_pretrained_no_processing(str(tokenizer))("One"))
    other = transformers.LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    with pytest.raises(ValueError, match="expected a GPT-2.*found LlamaForCausalLM .model_type 'llama'"):
        HookedTransformer.from_pretrained(transformers.LlamaForCausalLM(other))


def test_steering_works_as_a_forward_hook(exact):
    raw = HookedTransformer.from_pretrained_no_processing(exact, default_prepend_bos=False, tensors="numpy")
    native = raw.native
    for options in ({}, {"everywhere": True}):
        steering = native.steering('" happy"-" sad"', layer=2, scale=4, **options)
        steered = raw.run_with_hooks(TEXT, fwd_hooks=[steering])
        expected, _ = native.run_with_cache(TEXT, [], [steering])
        np.testing.assert_allclose(steered, expected, atol=1e-3)
        assert not np.allclose(steered, raw(TEXT), atol=1e-2)
        # Steering applies only to the first tokens of a text, even if later tokens use a cache.
        with raw.hooks(fwd_hooks=[steering]):
            ids = raw.generate(raw.to_tokens(TEXT), max_new_tokens=8, do_sample=False, verbose=False)[0]
        own = native.generate(TEXT, max_new_tokens=8, do_sample=False, hooks=[steering], details=True)["ids"]
        assert ids[-len(own) :].tolist() == own
        padded = raw.run_with_hooks([TEXT, "One"], fwd_hooks=[steering], padding_side="left")
        np.testing.assert_allclose(padded[1, -1], raw.run_with_hooks("One", fwd_hooks=[steering])[0, -1], atol=1e-3)
    vector = native.control_vector({1: np.ones(256, np.float32)})
    by_hand = raw.run_with_hooks(TEXT, fwd_hooks=[("blocks.1.hook_resid_post", lambda value, hook: value + 1)])
    np.testing.assert_allclose(raw.run_with_hooks(TEXT, fwd_hooks=[vector]), by_hand, atol=1e-5)


def test_generate_stream_yields_tokens_or_text(model):
    options = {"max_new_tokens": 12, "do_sample": False, "verbose": False, "stop_at_eos": False}
    whole = model.generate(TEXT, return_type="tokens", **options)
    pieces = list(model.generate_stream(TEXT, max_tokens_per_yield=5, **options))
    assert [piece.shape[1] for piece in pieces] == [whole.shape[1] - 12 + 1, 5, 5, 1]
    np.testing.assert_array_equal(np.concatenate(pieces, 1), whole)
    texts = model.generate_stream(TEXT, max_tokens_per_yield=5, return_type="str", **options)
    assert "".join(texts) == model.generate(TEXT, **options)
    with pytest.raises(ValueError, match="return_type: expected"):
        next(model.generate_stream(TEXT, return_type="list"))


def test_tokenize_and_concatenate_packs_texts_into_rows(model):
    texts = ["One day", "Mia was sad.", "Tom had a red ball."]
    tokens = []
    for text in texts:
        tokens += [*model.tokenizer.encode(text), model.tokenizer.eos_token_id]
    tokens.pop()
    rows = utils.tokenize_and_concatenate([{"text": text} for text in texts], model.tokenizer, max_length=5, set_format=False)
    assert len(rows) == len(tokens) // 4 and (rows["tokens"][:, 0] == model.tokenizer.bos_token_id).all()
    assert rows["tokens"][:, 1:].ravel().tolist() == tokens[: len(rows) * 4]
    np.testing.assert_array_equal(rows[:2]["tokens"], rows["tokens"][:2])
    assert [row["tokens"].tolist() for row in rows] == rows["tokens"].tolist()
    without = utils.tokenize_and_concatenate(texts, model.tokenizer, max_length=4, add_bos_token=False, set_format=False)
    np.testing.assert_array_equal(without["tokens"], rows["tokens"][:, 1:])


def test_stacked_weights_cannot_modify_the_model(model):
    before = model(TEXT)
    for name in ("W_E", "W_pos", "W_U", "b_U", "W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "b_Q", "b_O", "b_in", "b_out"):
        weight = getattr(model, name)
        with pytest.raises(ValueError, match="read-only"):
            weight *= 0
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    tensors = HookedTransformer.from_pretrained(tensors="torch")
    for name in ("W_E", "W_Q", "W_U", "b_in"):
        weight = getattr(tensors, name)
        assert isinstance(weight, torch.Tensor)
        weight *= 0
    np.testing.assert_array_equal(tensors(TEXT).numpy(), before)
    tensors.blocks[0].attn.W_Q[:] = 0
    assert not np.array_equal(tensors(TEXT).numpy(), before)


def test_stacked_weights_carry_gradients():
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    model = HookedTransformer.from_pretrained_no_processing(tensors="torch")
    before = model(TEXT)
    model.requires_grad_()
    stacks = {"attn": ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"), "mlp": ("W_in", "W_out", "b_in", "b_out")}
    for module, names in stacks.items():
        for name in names:
            stack = getattr(model, name)
            factors = torch.randn(stack.shape, generator=torch.Generator().manual_seed(1))
            (stack * factors).sum().backward()
            found = torch.stack([getattr(getattr(block, module), name).grad for block in model.blocks])
            torch.testing.assert_close(found, factors, msg=name)
    for module, name in ((model.embed, "W_E"), (model.pos_embed, "W_pos"), (model.unembed, "W_U"), (model.unembed, "b_U")):
        (getattr(model, name) ** 2).sum().backward()
        torch.testing.assert_close(getattr(model, name).grad, 2 * getattr(module, name).detach())
    # Gradients of a penalty on a circuit, compared with plain torch.
    model.zero_grad()
    (model.W_V @ model.W_O).square().sum().backward()
    plain = [torch.stack([getattr(block.attn, name).detach() for block in model.blocks]).requires_grad_() for name in ("W_V", "W_O")]
    (plain[0] @ plain[1]).square().sum().backward()
    for name, weight in zip(("W_V", "W_O"), plain, strict=True):
        found = torch.stack([getattr(block.attn, name).grad for block in model.blocks])
        torch.testing.assert_close(found, weight.grad, rtol=1e-4, atol=1e-4 * weight.grad.abs().max().item())
    model.zero_grad()
    model.tokens_to_residual_directions(" red").sum().backward()
    assert (model.unembed.W_U.grad.sum(0) != 0).nonzero().item() == model.to_single_token(" red")
    # Stacked weights still cannot be used to modify the model.
    stack = model.W_Q
    with torch.no_grad():
        stack *= 0
        copy = model.W_E
        copy *= 0
    with pytest.raises(RuntimeError, match="leaf Variable"):
        weight = model.W_E
        weight *= 0
    torch.testing.assert_close(model(TEXT).detach(), before, rtol=0, atol=1e-3)


def test_patching_accepts_tensors_for_a_numpy_model(model):
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    clean, corrupted = model.to_tokens("Mia had a red ball"), model.to_tokens("Tom had a red ball")
    _, cache = model.run_with_cache(clean)

    def metric(logits):
        return logits[0, -1, 3]

    expected = patching.get_act_patch_resid_pre(model, corrupted, cache, metric)
    found = patching.get_act_patch_resid_pre(model, torch.tensor(corrupted), cache, metric)
    assert isinstance(expected, np.ndarray) and isinstance(found, torch.Tensor)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_scalar_products_keep_the_dtype(model):
    for product in (model.OV[0, 0] * 2, 2.5 * model.OV[0, 0], model.OV[0, 0] * np.float64(3)):
        assert product.AB.dtype == np.float32


def test_patching_returns_and_accepts_an_index_table(model):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed: pip install pandas")
    tokens = model.to_tokens("Mia had")
    _, cache = model.run_with_cache(tokens)
    found, table = patching.get_act_patch_resid_pre(model, tokens, cache, lambda logits: logits[0, -1, 3], return_index_df=True)
    assert isinstance(table, pandas.DataFrame) and list(table.columns) == ["layer", "pos"] and len(table) == found.size
    again = patching.get_act_patch_resid_pre(model, tokens, cache, lambda logits: logits[0, -1, 3], index_df=table)
    np.testing.assert_allclose(again, found.ravel(), atol=1e-5)
