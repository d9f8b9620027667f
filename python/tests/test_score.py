"""Logits are transformers'; scores are the program's; a cache goes on where it stands."""

import json

import candle_gpt2
import numpy as np
import pytest

from support import FIXTURES, read_safetensors, write_safetensors

TEXT = "ROMEO:\nBut, soft! what light through yonder window breaks?"
# The law of the project for logits of transformers.
TOLERANCE = 1e-4


def checkpoint(variant, folder):
    """A folder with the checkpoint of a fixture; ids and logits by transformers."""
    metadata, arrays = read_safetensors(FIXTURES / "gpt2" / f"{variant}.safetensors")
    config = json.loads(metadata["reference"])["config"]
    (folder / "config.json").write_text(json.dumps(config))
    is_weight = lambda name: name.startswith(("transformer.", "lm_head."))  # noqa: E731
    write_safetensors(folder / "model.safetensors", {name: array for name, array in arrays.items() if is_weight(name)})
    return arrays["input_ids"], arrays["expected.logits"]


def test_logits_are_those_of_transformers(tmp_path):
    rows, expected = checkpoint("gelu_new", tmp_path)
    model = candle_gpt2.Model.from_pretrained(tmp_path, dtype="f32")
    for ids, logits in zip(rows, expected, strict=True):
        every = model.logits(ids, last_only=False)
        assert every.dtype == np.float32 and every.shape == logits.shape
        np.testing.assert_allclose(every, logits, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(model.logits(ids), logits[-1], rtol=0, atol=TOLERANCE)


def test_logits_are_those_of_transformers_as_it_is_installed(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rows, _ = checkpoint("gelu_new", tmp_path)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    ours = candle_gpt2.Model.from_pretrained(tmp_path, dtype="f32")
    with torch.no_grad():
        expected = theirs(torch.tensor(rows[:1])).logits[0].numpy()
    np.testing.assert_allclose(ours.logits(rows[0], last_only=False), expected, rtol=0, atol=TOLERANCE)


def test_a_cache_goes_on_where_it_stands(model):
    ids = model.encode(TEXT)
    whole = model.logits(ids, last_only=False)
    cache = model.cache()
    parts = [model.logits(ids[start : start + 5], last_only=False, cache=cache) for start in range(0, len(ids), 5)]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=TOLERANCE * abs(whole).max())
    assert len(cache) == len(ids) and cache.ids == ids


def test_forks_are_independent(model):
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


def test_what_a_cache_cannot_hold_is_refused(model, tiny):
    cache = model.cache(4)
    with pytest.raises(ValueError, match="5 tokens do not fit after 0; there is room for 4"):
        model.logits([1, 2, 3, 4, 5], cache=cache)
    model.logits([1, 2], cache=cache)
    with pytest.raises(ValueError, match="holds 2 tokens"):
        cache.truncate(3)
    with pytest.raises(ValueError, match="holds 2 tokens"):
        cache.truncate(-3)
    with pytest.raises(ValueError, match="another model's"):
        tiny.logits([1], cache=cache)
    with pytest.raises(ValueError, match="at most the context of 512"):
        model.cache(513)
    assert cache.ids == [1, 2]


def test_wrong_tokens_have_no_logits(model):
    with pytest.raises(ValueError, match="token 2048 is outside"):
        model.logits([2048])
    with pytest.raises(ValueError, match="at least one"):
        model.logits([])
    with pytest.raises(TypeError, match="token ids, which are integers"):
        model.logits([1, "a"])
    with pytest.raises(ValueError, match="do not fit"):
        model.logits([1] * 513)


def test_logits_are_those_of_greedy_texts(model):
    ids = model.encode(TEXT)
    [written] = model.generate(TEXT, do_sample=False, max_new_tokens=1, details=True)["ids"]
    assert model.logits(ids).argmax() == model.logits(TEXT).argmax() == written


def test_scores_are_those_of_the_program(model, program):
    for arguments, options in [([], {}), (["--stride", "7"], {"stride": 7}), (["--top", "3"], {"top": 3})]:
        expected = json.loads(program("score", TEXT, "--json", *arguments))
        scored = model.score(TEXT, **options)
        assert scored["ids"] == expected["ids"]
        assert [None if np.isnan(x) else x for x in scored["logprobs"]] == expected["logprobs"]
        assert (scored["loss"], scored["perplexity"]) == (expected["loss"], expected["perplexity"])
        assert np.isclose(scored["sum"], -scored["loss"] * (len(scored["ids"]) - 1))
        theirs = [[(one["id"], one["logprob"]) for one in place] for place in expected.get("alternatives", [])]
        assert scored.get("alternatives", []) == theirs


def test_a_list_is_scored_one_by_one(model):
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


def test_continuations_are_those_of_the_program(model, program):
    choices = [" is the", " are", "!", "ish"]
    arguments = [part for choice in choices for part in ("--choice", choice)]
    expected = json.loads(program("score", "The king", "--json", *arguments))["choices"]
    scored = model.score_continuations("The king", choices)
    for ours, theirs in zip(scored, expected, strict=True):
        assert list(ours.pop("logprobs")) == theirs.pop("logprobs")
        assert ours == theirs
    with pytest.raises(ValueError, match="continuation 1 is empty"):
        model.score_continuations("The king", [""])


def test_a_hook_is_told_that_its_cache_is_in_use(model):
    cache = model.cache()
    looks = [len, repr, lambda cache: cache.ids, lambda cache: cache.fork(), lambda cache: model.logits([1], cache=cache)]
    told = []

    def hook(array, name):
        for look in looks:
            with pytest.raises(candle_gpt2.Gpt2Error, match="the cache is in use") as raised:
                look(cache)
            told.append(raised.value)
        assert len(model.cache()) == 0 and model.logits([1]).shape == (2048,)

    model.logits([1, 2], cache=cache, hooks=[("embed", hook)])
    assert len(told) == len(looks) and cache.ids == [1, 2]


def test_one_row_of_ids_is_that_row(model):
    row = np.array([[1, 2, 3]])
    np.testing.assert_array_equal(model.logits(row), model.logits([1, 2, 3]))
    with pytest.raises(TypeError, match="found several"):
        model.logits(np.array([[1, 2], [3, 4]]))


def test_numbers_that_are_not_negative_are_told(model):
    for run in (
        lambda: model.score("a b", stride=-1),
        lambda: model.score("a b", top=-1),
        lambda: model.cache(-1),
        lambda: model.steering(("a", "b"), layer=-1),
        lambda: model.logit_lens("a b", top=-1),
        lambda: candle_gpt2.set_threads(-1),
    ):
        with pytest.raises(ValueError, match="expected a number from 0 on, found -1"):
            run()
    with pytest.raises(ValueError, match="columns: expected 1 or 2, found 300"):
        model.attention("a b").svg(300)
