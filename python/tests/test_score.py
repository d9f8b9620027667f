"""Logits, scores and caches: logits equal to transformers, scores equal to the program."""

import json

import candle_gpt2
import numpy as np
import pytest

from support import FIXTURES, read_safetensors, write_safetensors

TEXT = "ROMEO:\nBut, soft! what light through yonder window breaks?"
# The project's tolerance for logits compared with transformers.
TOLERANCE = 1e-4


def write_checkpoint(variant, folder):
    """Writes a fixture checkpoint to a folder. Returns ids, and logits from transformers."""
    metadata, arrays = read_safetensors(FIXTURES / "gpt2" / f"{variant}.safetensors")
    config = json.loads(metadata["reference"])["config"]
    (folder / "config.json").write_text(json.dumps(config))
    is_weight = lambda name: name.startswith(("transformer.", "lm_head."))  # noqa: E731
    write_safetensors(folder / "model.safetensors", {name: array for name, array in arrays.items() if is_weight(name)})
    return arrays["input_ids"], arrays["expected.logits"]


def test_logits_match_transformers(tmp_path):
    rows, expected = write_checkpoint("gelu_new", tmp_path)
    model = candle_gpt2.Model.from_pretrained(tmp_path, dtype="f32")
    for ids, logits in zip(rows, expected, strict=True):
        every = model.logits(ids, last_only=False)
        assert every.dtype == np.float32 and every.shape == logits.shape
        np.testing.assert_allclose(every, logits, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(model.logits(ids), logits[-1], rtol=0, atol=TOLERANCE)


def test_logits_match_the_installed_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rows, _ = write_checkpoint("gelu_new", tmp_path)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    ours = candle_gpt2.Model.from_pretrained(tmp_path, dtype="f32")
    with torch.no_grad():
        expected = theirs(torch.tensor(rows[:1])).logits[0].numpy()
    np.testing.assert_allclose(ours.logits(rows[0], last_only=False), expected, rtol=0, atol=TOLERANCE)


def test_cached_logits_match_a_single_pass(exact):
    ids = exact.encode(TEXT)
    whole = exact.logits(ids, last_only=False)
    cache = exact.cache()
    parts = [exact.logits(ids[start : start + 5], last_only=False, cache=cache) for start in range(0, len(ids), 5)]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=TOLERANCE * abs(whole).max())
    assert len(cache) == len(ids) and cache.ids == ids


def test_cache_forks_are_independent(model):
    ids = model.encode(TEXT)
    cache = model.cache(len(ids) + 4)
    model.logits(ids, cache=cache)
    fork = cache.fork()
    other = model.logits([5, 6], cache=fork)
    assert (len(cache), len(fork)) == (len(ids), len(ids) + 2)
    assert "4 more" in repr(cache)
    after = model.logits([7], cache=cache)
    assert cache.truncate(-1) is cache
    assert len(cache) == len(ids)
    np.testing.assert_array_equal(model.logits([7], cache=cache), after)
    fork.truncate(len(ids))
    np.testing.assert_array_equal(model.logits([5, 6], cache=fork), other)
    fork.truncate(0)
    assert (len(fork), fork.ids) == (0, [])


def test_invalid_cache_operations_are_rejected(model, tiny):
    cache = model.cache(4)
    with pytest.raises(ValueError, match="5 tokens do not fit after 0 cached tokens; the remaining capacity is 4"):
        model.logits([1, 2, 3, 4, 5], cache=cache)
    model.logits([1, 2], cache=cache)
    with pytest.raises(ValueError, match="holds 2 tokens"):
        cache.truncate(3)
    with pytest.raises(ValueError, match="holds 2 tokens"):
        cache.truncate(-3)
    with pytest.raises(ValueError, match="created by another model"):
        tiny.logits([1], cache=cache)
    with pytest.raises(ValueError, match="capacity: expected at most 512, the model's context"):
        model.cache(513)
    assert cache.ids == [1, 2]


def test_invalid_tokens_are_rejected(model):
    with pytest.raises(ValueError, match="token 4096 is outside"):
        model.logits([4096])
    with pytest.raises(ValueError, match="at least one"):
        model.logits([])
    with pytest.raises(TypeError, match="integer token ids"):
        model.logits([1, "a"])
    with pytest.raises(ValueError, match="do not fit"):
        model.logits([1] * 513)


def test_prepend_bos_means_the_same_in_both_interfaces(exact):
    hooked = candle_gpt2.HookedTransformer.from_pretrained_no_processing(exact, tensors="numpy")
    for prepend_bos in (False, True):
        ids = exact.encode(TEXT, prepend_bos=prepend_bos)
        assert ids == hooked.to_tokens(TEXT, prepend_bos=prepend_bos)[0].tolist()
        assert exact.str_tokens(TEXT, prepend_bos=prepend_bos) == hooked.to_str_tokens(TEXT, prepend_bos=prepend_bos)
        logits = exact.logits(TEXT, last_only=False, prepend_bos=prepend_bos)
        np.testing.assert_allclose(logits, hooked(TEXT, prepend_bos=prepend_bos)[0], rtol=0, atol=1e-3)
        [scored] = exact.score([TEXT], prepend_bos=prepend_bos)
        assert scored["ids"] == ids
        assert scored["loss"] == pytest.approx(hooked(TEXT, return_type="loss", prepend_bos=prepend_bos), abs=1e-4)
    # prepend_bos applies only to texts.
    assert ids[0] == exact.config["bos_token_id"] and len(ids) == 1 + len(exact.encode(TEXT))
    np.testing.assert_array_equal(exact.logits(ids, prepend_bos=True), exact.logits(TEXT, prepend_bos=True))
    assert exact.score(ids, prepend_bos=True)["ids"] == ids


def test_argmax_of_logits_is_the_greedy_token(model):
    ids = model.encode(TEXT)
    [token] = model.generate(TEXT, do_sample=False, max_new_tokens=1, details=True)["ids"]
    assert model.logits(ids).argmax() == model.logits(TEXT).argmax() == token


def test_scores_match_the_cli(model, program):
    for arguments, options in [([], {}), (["--stride", "7"], {"stride": 7}), (["--top", "3"], {"top": 3})]:
        expected = json.loads(program("score", TEXT, "--json", *arguments))
        scored = model.score(TEXT, **options)
        assert scored["ids"] == expected["ids"]
        assert [None if np.isnan(x) else x for x in scored["logprobs"]] == expected["logprobs"]
        assert (scored["loss"], scored["perplexity"]) == (expected["loss"], expected["perplexity"])
        assert np.isclose(scored["sum"], -scored["loss"] * (len(scored["ids"]) - 1))
        theirs = [[(token["id"], token["logprob"]) for token in position] for position in expected.get("alternatives", [])]
        assert scored.get("alternatives", []) == theirs


def test_list_scores_match_single_scores(model):
    one, two = model.score([TEXT, model.encode("The king")])
    np.testing.assert_array_equal(one["logprobs"], model.score(TEXT)["logprobs"])
    np.testing.assert_array_equal(two["logprobs"], model.score("The king")["logprobs"])
    with pytest.raises(ValueError, match="at least 2") as raised:
        model.score([TEXT, [1]])
    assert raised.value.__notes__ == ["text 1"]
    both = model.score([TEXT, [1]], return_exceptions=True)
    assert both[0]["loss"] == one["loss"] and isinstance(both[1], ValueError)
    with pytest.raises(ValueError, match="`stride`: expected from 1"):
        model.score(TEXT, stride=0)


def test_continuation_scores_match_the_cli(model, program):
    choices = [" is the", " are", "!", "ish"]
    arguments = [part for choice in choices for part in ("--choice", choice)]
    expected = json.loads(program("score", "The king", "--json", *arguments))["choices"]
    scored = model.score_continuations("The king", choices)
    for ours, theirs in zip(scored, expected, strict=True):
        assert list(ours.pop("logprobs")) == theirs.pop("logprobs")
        assert ours == theirs
    with pytest.raises(ValueError, match="continuation 1 is empty"):
        model.score_continuations("The king", [""])


def test_hook_cannot_use_its_own_cache(model):
    cache = model.cache()
    accesses = [len, repr, lambda cache: cache.ids, lambda cache: cache.fork(), lambda cache: model.logits([1], cache=cache)]
    errors = []

    def hook(array, name):
        for access in accesses:
            with pytest.raises(candle_gpt2.Gpt2Error, match="the cache is in use") as raised:
                access(cache)
            errors.append(raised.value)
        assert len(model.cache()) == 0 and model.logits([1]).shape == (4096,)

    model.logits([1, 2], cache=cache, hooks=[("embed", hook)])
    assert len(errors) == len(accesses) and cache.ids == [1, 2]


def test_array_with_one_row_is_a_single_prompt(model):
    row = np.array([[1, 2, 3]])
    np.testing.assert_array_equal(model.logits(row), model.logits([1, 2, 3]))
    with pytest.raises(TypeError, match="found several"):
        model.logits(np.array([[1, 2], [3, 4]]))


def test_negative_numbers_are_rejected(model):
    for run in (
        lambda: model.score("a b", stride=-1),
        lambda: model.score("a b", top=-1),
        lambda: model.cache(-1),
        lambda: model.steering(("a", "b"), layer=-1),
        lambda: model.logit_lens("a b", top=-1),
        lambda: candle_gpt2.set_threads(-1),
    ):
        with pytest.raises(ValueError, match="expected a non-negative number, found -1"):
            run()
    with pytest.raises(ValueError, match="columns: expected 1 or 2, found 300"):
        model.attention("a b").svg(300)
