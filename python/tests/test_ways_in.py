"""Ways into a HookedTransformer: models of transformers, state dicts, configurations, and what runs take besides texts."""

import candle_gpt2
import numpy as np
import pytest
from candle_gpt2 import HookedTransformer, HookedTransformerConfig, TransformerBridge, patching, utils

from support import FIXTURES

TEXT = "One day, Mia was"
SMALL = {"n_layers": 2, "d_model": 12, "n_ctx": 16, "d_head": 4, "d_vocab": 30, "act_fn": "gelu_new"}


@pytest.fixture(scope="module")
def model():
    """The model inside the package."""
    return HookedTransformer.from_pretrained(tensors="numpy")


def test_a_configuration_makes_an_untrained_model():
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
        (lambda: model(TEXT), "tokenizer: this model has none"),
        (lambda: model.generate(np.array([[1, 2]])), "eos_token_id: this model has no tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(RuntimeError, match="made from a configuration"):
        model.native
    words = HookedTransformer({**SMALL, "d_vocab": 2048}, tokenizer=candle_gpt2.Model.from_pretrained(), tensors="numpy")
    assert words(TEXT).shape[-1] == 2048


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positional_embedding_type": "rotary"}, "positional_embedding_type='rotary': not a GPT-2"),
        ({"attn_only": True}, "attn_only=True"),
        ({"gated_mlp": True}, "gated_mlp=True"),
        ({"n_key_value_heads": 1}, "n_key_value_heads=1"),
        ({"normalization_type": None}, "normalization_type=None"),
        ({"normalization_type": "RMS"}, "normalization_type='RMS'"),
        ({"parallel_attn_mlp": True}, "parallel_attn_mlp=True: not a setting of a GPT-2"),
        ({"n_layerz": 3}, "n_layerz=3: .*did you mean 'n_layers'"),
        ({"device": "cuda"}, "device='cuda'"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"act_fn": None}, "act_fn: give the activation function"),
        ({"act_fn": "solu_ln"}, "act_fn: expected one of gelu_new"),
        ({"d_vocab": -1}, "d_vocab: give the size"),
    ],
)
def test_a_configuration_of_another_architecture_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        HookedTransformer({**SMALL, **change})


def test_settings_of_other_architectures_that_are_off_are_taken():
    given = {**SMALL, "rotary_dim": None, "parallel_attn_mlp": False, "attn_scores_soft_cap": -1.0, "rotary_base": 10000, "n_params": 5}
    assert HookedTransformer(given).cfg.d_mlp == 48


def test_a_state_dict_is_loaded_by_name(model):
    raw = HookedTransformer.from_pretrained_no_processing(tensors="numpy")
    expected = raw(TEXT)
    fresh = HookedTransformer(raw.cfg, tokenizer=raw.native, tensors="numpy")
    state = {**raw.state_dict(), "blocks.0.attn.mask": np.ones(3), "blocks.0.attn.IGNORE": np.float32(0)}
    assert fresh.load_state_dict(state) == ([], [])
    np.testing.assert_array_equal(fresh(TEXT), expected)
    # In TransformerLens a folded model has no weights of norms.
    folded = {name: value for name, value in model.state_dict().items() if ".ln" not in name and "ln_final" not in name}
    processed = HookedTransformer.from_pretrained(tensors="numpy")
    processed.blocks[0].mlp.W_in[:] = 0
    assert processed.load_state_dict(folded) == ([], [])
    np.testing.assert_array_equal(processed(TEXT), model(TEXT))
    with pytest.warns(UserWarning, match="native: the engine's Model has the weights from before load_state_dict"):
        processed.native
    fresh.load_and_process_state_dict(raw.state_dict())
    np.testing.assert_allclose(fresh(TEXT), model(TEXT), atol=1e-4)
    with pytest.raises(ValueError, match=r"ln1\.w: the norms of this model are folded"):
        model.load_state_dict(raw.state_dict())
    with pytest.raises(RuntimeError, match=r"missing keys \['unembed.W_U'\], unexpected keys \['head'\]"):
        raw.load_state_dict({("head" if name == "unembed.W_U" else name): value for name, value in raw.state_dict().items()})
    missing = raw.load_state_dict({"head": 1}, strict=False)
    assert missing.unexpected_keys == ["head"] and "unembed.W_U" in missing.missing_keys
    with pytest.raises(RuntimeError, match=r"embed\.W_E: expected shape \(2048, 192\), found \(3,\)"):
        raw.load_state_dict({"embed.W_E": np.zeros(3)}, strict=False)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.b_O: expected shape \(192,\), found \(1,\)"):
        raw.blocks[0].attn.b_O = np.zeros(1)
    np.testing.assert_array_equal(raw(TEXT), expected)


def test_a_model_of_transformers_is_taken_from_memory():
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
    with pytest.raises(ValueError, match="expected a GPT-2.*found LlamaForCausalLM of model_type 'llama'"):
        HookedTransformer.from_pretrained(transformers.LlamaForCausalLM(other))


def test_steering_is_a_forward_hook(model):
    raw = HookedTransformer.from_pretrained_no_processing(default_prepend_bos=False, tensors="numpy")
    native = raw.native
    for options in ({}, {"everywhere": True}):
        steering = native.steering('" happy"-" sad"', layer=2, scale=4, **options)
        steered = raw.run_with_hooks(TEXT, fwd_hooks=[steering])
        expected, _ = native.run_with_cache(TEXT, [], [steering])
        np.testing.assert_allclose(steered, expected, atol=1e-3)
        assert not np.allclose(steered, raw(TEXT), atol=1e-2)
        # Only at a text's first tokens, also where the next ones come from a cache.
        with raw.hooks(fwd_hooks=[steering]):
            ids = raw.generate(raw.to_tokens(TEXT), max_new_tokens=8, do_sample=False, verbose=False)[0]
        own = native.generate(TEXT, max_new_tokens=8, do_sample=False, hooks=[steering], details=True)["ids"]
        assert ids[-len(own) :].tolist() == own
        padded = raw.run_with_hooks([TEXT, "One"], fwd_hooks=[steering], padding_side="left")
        np.testing.assert_allclose(padded[1, -1], raw.run_with_hooks("One", fwd_hooks=[steering])[0, -1], atol=1e-3)
    vector = native.control_vector({1: np.ones(192, np.float32)})
    by_hand = raw.run_with_hooks(TEXT, fwd_hooks=[("blocks.1.hook_resid_post", lambda value, hook: value + 1)])
    np.testing.assert_allclose(raw.run_with_hooks(TEXT, fwd_hooks=[vector]), by_hand, atol=1e-5)


def test_generation_is_streamed_as_tokens_or_texts(model):
    options = {"max_new_tokens": 12, "do_sample": False, "verbose": False, "stop_at_eos": False}
    whole = model.generate(TEXT, return_type="tokens", **options)
    pieces = list(model.generate_stream(TEXT, max_tokens_per_yield=5, **options))
    assert [piece.shape[1] for piece in pieces] == [whole.shape[1] - 12 + 1, 5, 5, 1]
    np.testing.assert_array_equal(np.concatenate(pieces, 1), whole)
    texts = model.generate_stream(TEXT, max_tokens_per_yield=5, return_type="str", **options)
    assert "".join(texts) == model.generate(TEXT, **options)
    with pytest.raises(ValueError, match="return_type: expected"):
        next(model.generate_stream(TEXT, return_type="list"))


def test_texts_become_rows_of_tokens(model):
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


def test_weights_of_the_whole_model_cannot_be_written_to(model):
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


def test_tensors_that_arrive_later_are_taken(model):
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    clean, corrupted = model.to_tokens("Mia had a red ball"), model.to_tokens("Tom had a red ball")
    _, cache = model.run_with_cache(clean)

    def metric(logits):
        return logits[0, -1, 3]

    expected = patching.get_act_patch_resid_pre(model, corrupted, cache, metric)
    found = patching.get_act_patch_resid_pre(model, torch.tensor(corrupted), cache, metric)
    assert isinstance(expected, np.ndarray) and isinstance(found, torch.Tensor)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_products_with_numbers_keep_their_type(model):
    for product in (model.OV[0, 0] * 2, 2.5 * model.OV[0, 0], model.OV[0, 0] * np.float64(3)):
        assert product.AB.dtype == np.float32


def test_indices_of_patches_are_a_table(model):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed: pip install pandas")
    tokens = model.to_tokens("Mia had")
    _, cache = model.run_with_cache(tokens)
    found, table = patching.get_act_patch_resid_pre(model, tokens, cache, lambda logits: logits[0, -1, 3], return_index_df=True)
    assert isinstance(table, pandas.DataFrame) and list(table.columns) == ["layer", "pos"] and len(table) == found.size
    again = patching.get_act_patch_resid_pre(model, tokens, cache, lambda logits: logits[0, -1, 3], index_df=table)
    np.testing.assert_allclose(again, found.ravel(), atol=1e-5)
