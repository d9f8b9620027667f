"""Generation: the same bytes as the program for single prompts, batches and streams."""

import json
import shutil
import time
import types

import candle_gpt2
import numpy as np
import pytest

from support import FIXTURES

# The end tokens in one case cause this warning.
pytestmark = pytest.mark.filterwarnings("ignore:eos_token_id 199 is the ordinary token:UserWarning")

PROMPT = "ROMEO:\nWhat light"
PROMPTS = ["One day", "JULIET:\nO", "The", "My lord, I will not go to the", "", "KING HENRY:\nWhat"]
LENGTH = 24
GRAMMAR = 'start: "yes" | "no" " sir"'
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}

# Arguments for the program, and the equivalent keywords.
TOKEN_BY_TOKEN = {
    "defaults": ([], {}),
    "greedy": (["--greedy"], {"do_sample": False}),
    "seed": (["--seed", "7"], {"seed": 7}),
    "temperature": (["--temperature", "0.6", "--seed", "3"], {"temperature": 0.6, "seed": 3}),
    "top_k": (["--top-k", "5"], {"top_k": 5}),
    "top_p": (["--top-p", "0.7"], {"top_p": 0.7}),
    "min_p": (["--min-p", "0.1"], {"min_p": 0.1}),
    "typical_p": (["--typical-p", "0.5"], {"typical_p": 0.5}),
    "cutoffs": (
        ["--epsilon-cutoff", "0.01", "--eta-cutoff", "0.02"],
        {"epsilon_cutoff": 0.01, "eta_cutoff": 0.02},
    ),
    "temperature 0": (["--temperature", "0"], {"temperature": 0}),
    "sampling options combined": (
        ["--temperature", "1.3", "--top-k", "40", "--top-p", "0.9", "--seed", "11"],
        {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "seed": 11},
    ),
    "repetition": (["--greedy", "--repetition-penalty", "1.4"], {"do_sample": False, "repetition_penalty": 1.4}),
    "presence and frequency": (
        ["--presence-penalty", "0.7", "--frequency-penalty", "0.3"],
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    ),
    "n-grams": (["--greedy", "--no-repeat-ngram-size", "2"], {"do_sample": False, "no_repeat_ngram_size": 2}),
    "stop": (["--stop", ","], {"stop": ","}),
    "several stops": (["--stop", "ow", "--stop", "\n\n"], {"stop_strings": ["ow", "\n\n"]}),
    "bad words": (["--bad-word", "the", "--bad-word", "my"], {"bad_words": ["the", "my"]}),
    "biases": (["--logit-bias", "26=-inf", "--logit-bias", "35=2.5"], {"logit_bias": {26: float("-inf"), 35: 2.5}}),
    "end token": (["--eos-token-id", "199", "--min-new-tokens", "3"], {"eos_token_id": 199, "min_new_tokens": 3}),
    "first token": (["--forced-bos-token-id", "35"], {"forced_bos_token_id": 35}),
    "lookup": (["--greedy", "--prompt-lookup", "4"], {"do_sample": False, "prompt_lookup_num_tokens": 4}),
    "regex": (["--regex", "[a-z ]{5,20}\\."], {"regex": "[a-z ]{5,20}\\."}),
    "json": (["--json-object"], {"json_object": True}),
    "time": (["--max-time", "60"], {"max_time": 60}),
}
SEARCHES = {
    "beams": (["--num-beams", "4"], {"num_beams": 4}),
    "several beams": (
        ["--num-beams", "4", "--num-return-sequences", "3", "--length-penalty", "0.5", "--early-stopping", "never"],
        {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5, "early_stopping": "never"},
    ),
    "groups of beams": (
        ["--num-beams", "4", "--num-beam-groups", "2", "--diversity-penalty", "0.8"],
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.8},
    ),
    "contrastive": (["--penalty-alpha", "0.6", "--top-k", "4"], {"penalty_alpha": 0.6, "top_k": 4}),
}
SEVERAL = {"several": (["--num-return-sequences", "3", "--seed", "5"], {"num_return_sequences": 3, "seed": 5})}
ALL = TOKEN_BY_TOKEN | SEARCHES | SEVERAL


def cases(table):
    return pytest.mark.parametrize(("arguments", "options"), table.values(), ids=table)


def details_of(report):
    """Converts the program's report to the result that `details=True` returns."""
    if "sequences" in report:
        return report["sequences"]
    known = ("ids", "text", "stop_reason", "score", "drafted", "accepted")
    return {name: report[name] for name in known if name in report}


@cases(ALL)
def test_completions_match_the_cli(model, program, arguments, options):
    printed = program("generate", PROMPT, "--json", "--max-new-tokens", str(LENGTH), *arguments)
    assert model.generate(PROMPT, max_new_tokens=LENGTH, details=True, **options) == details_of(json.loads(printed))


@cases(ALL)
def test_batches_match_the_cli(model, program, tmp_path, arguments, options):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    flags = ["--prompts-file", str(file), "--batch-size", "3", "--max-new-tokens", str(LENGTH)]
    printed = program("generate", *flags, *arguments)
    expected = [details_of(json.loads(line)) for line in printed.splitlines()]
    assert model.generate(PROMPTS, max_new_tokens=LENGTH, details=True, batch_size=3, **options) == expected


@cases(TOKEN_BY_TOKEN)
def test_streamed_pieces_form_the_completion(model, arguments, options):
    whole = model.generate(PROMPT, max_new_tokens=LENGTH, details=True, **options)
    stream = model.stream(PROMPT, max_new_tokens=LENGTH, **options)
    pieces = list(stream)
    assert "".join(pieces) == whole["text"]
    assert (stream.ids, stream.stop_reason) == (whole["ids"], whole["stop_reason"])
    assert all(pieces) and (len(pieces) > 1 or len(whole["ids"]) < 3)


def test_stream_matches_the_cli_output(model, program):
    printed = program("generate", PROMPT, "--seed", "9", "--max-new-tokens", "40").decode()
    assert printed == "".join(model.stream(PROMPT, seed=9, max_new_tokens=40)) + "\n"


def test_each_prompt_can_have_its_own_seed(model):
    seeds = [3, 1, 4, 1, 5, 9]
    alone = [model.generate(p, seed=s, max_new_tokens=LENGTH) for p, s in zip(PROMPTS, seeds, strict=True)]
    assert model.generate(PROMPTS, seed=seeds, max_new_tokens=LENGTH, batch_size=2) == alone
    assert model.generate(PROMPTS, seed=np.array(seeds), max_new_tokens=LENGTH) == alone
    details = model.generate(PROMPTS, seed=seeds, max_new_tokens=LENGTH, num_return_sequences=2, details=True)
    expected = [
        model.generate(p, seed=s, max_new_tokens=LENGTH, num_return_sequences=2, details=True)
        for p, s in zip(PROMPTS, seeds, strict=True)
    ]
    assert details == expected
    with pytest.raises(ValueError, match="one for each of the 6 prompts"):
        model.generate(PROMPTS, seed=[1, 2])


def test_batch_stream_interleaves_prompts(model):
    texts = [""] * len(PROMPTS)
    stream = model.stream_batch(PROMPTS, seed=2, max_new_tokens=LENGTH, batch_size=3)
    indices = []
    for prompt, piece in stream:
        texts[prompt] += piece
        indices.append(prompt)
    assert texts == model.generate(PROMPTS, seed=2, max_new_tokens=LENGTH)
    assert stream.stop_reasons == ["max_new_tokens"] * len(PROMPTS)
    assert [model.decode(ids) for ids in stream.ids] == texts
    assert indices != sorted(indices), "completions are not interleaved"


def test_failed_prompt_does_not_stop_the_batch_stream(model):
    # [5000] is rejected before the first step; [7] fails during it.
    processor = lambda ids, logits: np.full_like(logits, np.nan) if ids[0] == 7 else None
    prompts = ["One day", [5000], None, "Once there was", [7]]
    with pytest.raises(ValueError, match="token id 5000"):
        model.stream_batch(["One day", [5000]])
    texts, errors = {}, {}
    stream = model.stream_batch(prompts, return_exceptions=True, seed=1, max_new_tokens=5, logits_processor=processor)
    for prompt, piece in stream:
        if isinstance(piece, Exception):
            errors[prompt] = piece
        else:
            texts[prompt] = texts.get(prompt, "") + piece
    assert {prompt: type(error) for prompt, error in errors.items()} == {1: ValueError, 2: TypeError, 4: candle_gpt2.Gpt2Error}
    assert "token id 5000" in str(errors[1])
    assert list(texts.values()) == model.generate(["One day", "Once there was"], seed=1, max_new_tokens=5)
    assert stream.stop_reasons == ["max_new_tokens", None, None, "max_new_tokens", None]


def test_json_schemas_and_grammars_match_the_cli(model, program, tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text(GRAMMAR)
    for argument, file, options in [
        ("--json-schema", schema, {"json_schema": SCHEMA}),
        ("--grammar", grammar, {"grammar": GRAMMAR}),
    ]:
        printed = json.loads(program("generate", PROMPT, "--json", "--max-new-tokens", "50", argument, str(file)))
        assert model.generate(PROMPT, max_new_tokens=50, **options) == printed["text"]
    answer = json.loads(model.generate(PROMPT, max_new_tokens=100, json_schema=json.dumps(SCHEMA), logit_bias={90: 5}))
    assert isinstance(answer["age"], int)


def test_dtypes_match_the_cli(program):
    for dtype, kv_dtype in [("q8", "f16"), ("f32", "q8"), ("float16", None), ("q4", None)]:
        model = candle_gpt2.Model.from_pretrained(dtype=dtype, kv_dtype=kv_dtype)
        arguments = ["--dtype", dtype.replace("float", "f"), *(["--kv-dtype", kv_dtype] if kv_dtype else [])]
        printed = json.loads(program("generate", PROMPT, "--json", "--greedy", *arguments))
        assert model.generate(PROMPT, do_sample=False) == printed["text"], dtype
        assert model.dtype == dtype.replace("float", "f")
    for dtype, name in [(np.float32, "f32"), (np.dtype("float16"), "f16"), ("torch.float32", "f32"), ("auto", "q8")]:
        assert candle_gpt2.Model.from_pretrained(dtype=dtype).dtype == name


def test_assistant_model_does_not_change_the_completion(model, program):
    assisted = candle_gpt2.Model.from_pretrained(assistant_model="built-in")
    arguments = ["--assistant-model", "built-in", "--num-assistant-tokens", "3", "--seed", "2", "--json"]
    printed = json.loads(program("generate", PROMPT, "--max-new-tokens", str(LENGTH), *arguments))
    result = assisted.generate(PROMPT, seed=2, max_new_tokens=LENGTH, num_assistant_tokens=3, details=True)
    assert result["text"] == printed["text"] == model.generate(PROMPT, seed=2, max_new_tokens=LENGTH)
    assert result["accepted"] == result["drafted"] > 0


def test_truncated_and_sliding_contexts_match_the_cli(model, program):
    ids = model.encode("To be, or not to be: that is the question. " * 60)
    listed = ",".join(map(str, ids))
    with pytest.raises(ValueError, match="context has 512; shorten the prompt"):
        model.generate(ids)
    for arguments, options in [
        (["--keep-last", "100", "--keep-head", "10"], {"keep_last": 100, "keep_head": 10}),
        (["--keep-last", "250", "--slide"], {"keep_last": 250, "slide": True}),
    ]:
        printed = program("generate", "--ids", listed, "--json", "--max-new-tokens", "20", *arguments)
        assert model.generate(ids, max_new_tokens=20, **options) == json.loads(printed)["text"]


def test_prompts_accept_token_ids_in_any_sequence_type(model):
    ids = model.encode(PROMPT)
    text = model.generate(PROMPT, seed=1, max_new_tokens=8)
    for same in (ids, tuple(ids), np.array(ids), np.array(ids, np.uint16), [np.int64(one) for one in ids]):
        assert model.generate(same, seed=1, max_new_tokens=8) == text
    assert model.generate([ids], seed=1, max_new_tokens=8) == [text]
    assert model.generate(np.array([ids, ids]), seed=1, max_new_tokens=8) == [text, text]
    assert model.generate([], seed=1) == []
    assert model.generate(range(5), seed=1) == model.generate([0, 1, 2, 3, 4], seed=1)
    assert model.generate(iter(ids), seed=1, max_new_tokens=8) == text
    assert model.generate((one for one in ["a", "b"]), max_new_tokens=0) == ["", ""]


def test_options_accept_mappings_ranges_and_arrays(model):
    def assert_equivalent(one, other):
        options = {"do_sample": False, "max_new_tokens": 5}
        assert model.generate(PROMPT, **one, **options) == model.generate(PROMPT, **other, **options), one

    biases = {"logit_bias": {35: 2.5}}
    assert_equivalent({"logit_bias": types.MappingProxyType({35: 2.5})}, biases)
    assert_equivalent({"sequence_bias": [[[35], 2.5]]}, biases)
    assert_equivalent({"sequence_bias": [(np.array([35]), np.float32(2.5))]}, biases)
    assert_equivalent({"suppress_tokens": range(10)}, {"suppress_tokens": list(range(10))})
    assert_equivalent({"logits_processor": []}, {})
    assert_equivalent({"json_schema": types.MappingProxyType({"type": "integer"})}, {"json_schema": {"type": "integer"}})
    seeds = {"max_new_tokens": 5, "seed": range(2)}
    assert model.generate(["a", "b"], **seeds) == model.generate(["a", "b"], **seeds | {"seed": [0, 1]})


def test_self_referencing_values_are_rejected(model):
    numbers, schema = [], {}
    numbers.append(numbers)
    schema["not"] = schema
    with pytest.raises(TypeError, match="integer token ids"):
        model.generate([numbers])
    for run in (
        lambda: model.generate(PROMPT, json_schema=schema),
        lambda: model.generate(PROMPT, stop=numbers),
        lambda: model.complete(numbers),
    ):
        with pytest.raises(ValueError, match="does one contain itself"):
            run()


def test_several_completions_are_returned_as_a_list(model):
    options = {"num_return_sequences": 3, "temperature": 1.0, "seed": 1, "max_new_tokens": 5}
    one = model.generate(PROMPT, **options)
    assert len(set(one)) == 3
    assert model.generate([PROMPT], **options) == [one]


def test_zero_max_new_tokens_generates_nothing(model):
    assert model.generate(PROMPT, max_new_tokens=0) == ""
    stream = model.stream(PROMPT, max_new_tokens=0)
    assert (list(stream), stream.ids, stream.stop_reason) == ([], [], "max_new_tokens")
    assert model.generate(PROMPTS, max_new_tokens=0, seed=list(range(6))) == [""] * 6


def test_generation_config_sets_the_defaults(tiny, program):
    folder = tiny.name
    printed = json.loads(program("generate", "The first citizen", "--model", folder, "--json"))
    assert tiny.generate("The first citizen") == printed["text"]
    assert tiny.generation_config["max_new_tokens"] == 100


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"temprature": 1}, TypeError, "unknown option `temprature`; did you mean `temperature`"),
        ({"max_tokens": 1}, TypeError, "unknown option `max_tokens`; did you mean `max_new_tokens`"),
        ({"temperature": -1}, ValueError, "`temperature`: expected at least 0 \\(0 selects greedy decoding\\)"),
        ({"temperature": "hot"}, ValueError, "`temperature`: invalid type"),
        ({"top_p": 1.5}, ValueError, "`top_p`: expected"),
        ({"num_beams": 3, "top_p": 0.5}, ValueError, "`top_p` is for sampling"),
        ({"num_beams": 3, "do_sample": True}, ValueError, "beam search does not sample"),
        ({"length_penalty": 2.0}, ValueError, "`length_penalty` needs beam search; set `num_beams`"),
        ({"stop": "a", "stop_strings": "b"}, ValueError, "stop and stop_strings"),
        ({"bad_words": [""]}, ValueError, "`bad_words`: expected non-empty strings"),
        ({"bad_words": [3]}, TypeError, "bad_words: expected a string or a list"),
        ({"logit_bias": [1]}, TypeError, "logit_bias: expected a dict"),
        ({"logit_bias": {5000: 1.0}}, ValueError, "5000"),
        ({"keep_head": 3}, ValueError, "without `keep_last` or `slide`"),
        ({"regex": "("}, ValueError, "regex"),
        ({"regex": "a", "json_object": True}, ValueError, "cannot be used together"),
        ({"seed": -1}, ValueError, "`seed`"),
        ({"seed": 2**70}, ValueError, "too large"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": -1}, ValueError, "expected a non-negative number, found -1"),
        ({"batchsize": 1}, TypeError, "did you mean `batch_size`"),
        ({"detail": 1}, TypeError, "did you mean `details`"),
        ({"seed": object()}, TypeError, "expected a number, a string"),
    ],
)
def test_invalid_option_is_named_in_the_error(model, options, kind, message):
    with pytest.raises(kind, match=message):
        model.generate(PROMPT, **options)


def test_temperature_zero_warns_of_ignored_options(model):
    with pytest.warns(UserWarning, match="`temperature` 0 selects greedy decoding, so `do_sample`, `top_k` have no effect"):
        text = model.generate(PROMPT, max_new_tokens=8, temperature=0.0, do_sample=True, top_k=3)
    assert text == model.generate(PROMPT, max_new_tokens=8, do_sample=False)


def test_invalid_prompt_is_reported_with_its_index(model):
    prompts = ["One day", [5000], "Once there was"]
    with pytest.raises(ValueError, match="token id 5000") as raised:
        model.generate([[1, 2], [5000]])
    assert raised.value.__notes__ == ["prompt 1"]
    start = time.monotonic()
    with pytest.raises(ValueError, match="token id 5000"):
        model.generate(["One day"] * 1000 + [[5000]], max_new_tokens=200)
    assert time.monotonic() - start < 5, "generation started before the prompts were checked"
    kinds = [type(one) for one in model.generate(["a", None, [-1], 3], return_exceptions=True, max_new_tokens=1)]
    assert kinds == [str, TypeError, ValueError, TypeError]
    first, second, third = model.generate(prompts, return_exceptions=True, seed=1, max_new_tokens=5)
    assert (first, third) == tuple(model.generate(["One day", "Once there was"], seed=1, max_new_tokens=5))
    assert isinstance(second, ValueError) and "token id 5000" in str(second)
    for wrong in (3, None, {"a": 1}, [None]):
        with pytest.raises(TypeError, match="expected a string"):
            model.generate(wrong)
    with pytest.raises(ValueError, match="-1 is not a token id"):
        model.generate([-1])


def test_searches_cannot_be_streamed(model):
    with pytest.raises(ValueError, match="beam"):
        model.stream(PROMPT, num_beams=3)
    with pytest.raises(ValueError, match="num_return_sequences"):
        model.stream(PROMPT, num_return_sequences=2)


def test_ordinary_eos_token_warns(model):
    with pytest.warns(UserWarning, match="eos_token_id 200 is the ordinary token"):
        model.generate(PROMPT, eos_token_id=200, max_new_tokens=1)


def test_none_options_are_ignored(model):
    assert model.generate(PROMPT, seed=1, top_p=None, stop=None) == model.generate(PROMPT, seed=1)


def test_complete_follows_the_openai_api(model):
    answer = model.complete(PROMPT, max_tokens=6, temperature=0, stop=["qqq"], logprobs=2)
    assert answer["object"] == "text_completion" and answer["model"] == "built-in"
    [choice] = answer["choices"]
    assert choice["text"] == model.generate(PROMPT, do_sample=False, max_new_tokens=6)
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["token_logprobs"]) == 6
    tokens = len(model.encode(PROMPT))
    assert answer["usage"] == {"prompt_tokens": tokens, "completion_tokens": 6, "total_tokens": tokens + 6}
    assert len(model.complete(["a", "b"], max_tokens=2, n=2, seed=1)["choices"]) == 4
    with pytest.raises(TypeError, match="did you mean `max_tokens`"):
        model.complete(PROMPT, max_token=3)
    with pytest.raises(ValueError, match="stream"):
        model.complete(PROMPT, stream=True)
    with pytest.raises(ValueError, match="temperature"):
        model.complete(PROMPT, temperature=-1)


def test_logits_processors_change_the_logits(model):
    def without(token):
        def processor(ids, logits):
            assert ids.dtype == np.uint32 and logits.dtype == np.float32 and logits.shape == (4096,)
            assert list(ids[: len(prompt)]) == prompt
            logits = logits.copy()
            logits[token] = -np.inf
            return logits

        return processor

    prompt = model.encode(PROMPT)
    [best, *_] = model.generate(PROMPT, do_sample=False, max_new_tokens=1, details=True)["ids"]
    expected = model.generate(PROMPT, do_sample=False, max_new_tokens=LENGTH, logit_bias={best: -np.inf, 35: -np.inf})
    options = {"do_sample": False, "max_new_tokens": LENGTH, "logits_processor": [without(best), without(35)]}
    assert model.generate(PROMPT, **options) == expected != model.generate(PROMPT, do_sample=False, max_new_tokens=LENGTH)
    assert model.generate([PROMPT] * 5, **options) == [expected] * 5
    assert model.generate([PROMPT] * 2, seed=[1, 2], **options) == [expected] * 2
    assert "".join(model.stream(PROMPT, **options)) == expected
    beams = {"num_beams": 3, "max_new_tokens": 6}
    assert model.generate(PROMPT, logits_processor=without(best), **beams) == model.generate(
        PROMPT, logit_bias={best: -np.inf}, **beams
    )


def test_logits_processor_returning_none_changes_nothing(exact):
    seen = []
    options = {"repetition_penalty": 1.0, "seed": 4, "max_new_tokens": 5}
    observed = exact.generate(PROMPT, logits_processor=lambda ids, logits: seen.append((ids, logits)), **options)
    assert observed == exact.generate(PROMPT, **options)
    ids = seen[-1][0]
    assert [len(ids) for ids, _ in seen] == [len(exact.encode(PROMPT)) + i for i in range(5)]
    np.testing.assert_allclose(seen[-1][1], exact.logits(ids), rtol=0, atol=1e-3)


def test_logits_processor_exceptions_propagate(model):
    def fail(ids, logits):
        raise ZeroDivisionError("mine")

    for run in (
        lambda: model.generate(PROMPT, logits_processor=fail),
        lambda: model.generate([PROMPT] * 4, logits_processor=fail, num_beams=2),
        lambda: list(model.stream(PROMPT, logits_processor=fail)),
        lambda: model.generate([PROMPT] * 4, logits_processor=fail, seed=[1, 2, 3, 4]),
    ):
        with pytest.raises(ZeroDivisionError, match="mine"):
            run()
    for wrong, kind, message in [
        (lambda ids, logits: logits[1:], ValueError, r"returned an array of shape \[4095\]"),
        (3, TypeError, "expected a function"),
        ([3], TypeError, "expected a function"),
    ]:
        with pytest.raises(kind, match=message):
            model.generate(PROMPT, logits_processor=wrong)


def test_logits_processor_exception_stops_the_whole_call(model):
    calls = []

    def fail(ids, logits):
        calls.append(1)
        if len(calls) == 100:
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt) as raised:
        model.generate(["a"] * 1000, max_new_tokens=50, logits_processor=fail)
    assert len(calls) < 150 and len(raised.value.partial) == 1000
    assert raised.value.partial[0] and raised.value.partial[-1] is None
    calls.clear()
    stream = model.stream("a", max_new_tokens=200, min_new_tokens=150, logits_processor=fail)
    pieces = []
    with pytest.raises(KeyboardInterrupt):
        pieces.extend(stream)
    pieces.extend(stream)
    assert stream.stop_reason == "interrupted" and 90 <= len(stream.ids) < 100


def test_logits_processor_cannot_use_its_own_stream(model):
    for access in (lambda stream: stream.ids, lambda stream: stream.stop_reason, next):
        seen = []

        def processor(ids, logits, access=access, seen=seen):
            with pytest.raises(candle_gpt2.Gpt2Error, match="the stream is in use by the call that is running this function"):
                access(stream)
            seen.append(len(ids))

        stream = model.stream(PROMPT, max_new_tokens=3, logits_processor=processor)
        list(stream)
        assert len(seen) == 3 and len(stream.ids) == 3


def test_encode_and_decode_round_trip(model):
    text = "Wherefore art thou? é 🤗"
    ids = model.encode(text)
    assert model.decode(ids) == model.decode(np.array(ids)) == text
    assert "".join(model.str_tokens("Wherefore art thou?")) == "Wherefore art thou?"
    assert model.decode([0]) == "" and model.decode([0], skip_special_tokens=False) == model.str_tokens([0])[0]


@pytest.mark.parametrize("token", ["für", "kuća", "ĠĠ", "中文"])
def test_added_token_decodes_to_its_content(token, tmp_path):
    """huggingface/tokenizers#1996: every decoding method preserves an added token."""
    folder = tmp_path / "added"
    shutil.copytree(FIXTURES / "tiny-checkpoint", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = tokenizer["model"]["vocab"].pop("fi")
    tokenizer["model"]["merges"].pop()
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": added, "content": token, "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = candle_gpt2.Model.from_pretrained(folder)
    assert model.decode(model.encode(f"a{token}b")) == f"a{token}b"
    options = {"logit_bias": {added: 1000.0}, "max_new_tokens": 2}
    assert model.generate("a", **options) == token * 2
    assert "".join(model.stream("a", **options)) == token * 2
    with pytest.raises(candle_gpt2.Gpt2Error, match="excluded by `bad_words` or the regular expression"):
        model.generate("a", regex="b", bad_words=["b"])
