"""Unmodified openai-python and langchain-openai work with `gpt2 serve`; every check asserts values.

Starts a server with a key and one without, or uses the one at --base-url.
"""

import asyncio
import concurrent.futures
import math

import pytest

openai = pytest.importorskip("openai")

PROMPT = "First, the good news: é, 日本 and 😀 are here.\n"
PLAIN = "The king and"
NEW_TOKENS = 12
# Queue length: larger than one langchain request, but small enough to fill quickly.
QUEUE = 64


def text_of(chunks):
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def check_logprobs(choice, alternatives, echo):
    """Checks `logprobs`: four parallel lists; each token has exactly the same value among its alternatives."""
    logprobs = choice.logprobs
    length = len(logprobs.tokens)
    assert length == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset), logprobs
    for index, (token, logprob, top) in enumerate(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs)):
        if echo and index == 0:
            assert logprob is None and top is None, (index, logprob, top)
            continue
        assert math.isfinite(logprob) and logprob <= 0.0, (index, logprob)
        assert top[token] == logprob, (index, token, logprob, top)
        assert alternatives <= len(top) <= alternatives + 1, (index, len(top))
        assert sum(map(math.exp, top.values())) <= 1 + 1e-9, (index, top)
        values = sorted(top.values(), reverse=True)
        assert logprob in values[: alternatives + 1] and logprob >= values[-1], (index, logprob, top)
    assert logprobs.text_offset == sorted(logprobs.text_offset), logprobs.text_offset
    return logprobs


def raises(kind, status, call, *, param=None, code=None, words=()):
    """Checks that the client raises exactly this class, with an error object that has all four keys."""
    try:
        call()
    except openai.APIStatusError as error:
        assert type(error) is kind and error.status_code == status, (type(error), error.status_code, error.message)
        assert isinstance(error.body, dict) and {"message", "type", "param", "code"} <= set(error.body), error.body
        assert param is None or error.param == param, (error.param, error.body)
        assert code is None or error.code == code, (error.code, error.body)
        for word in words:
            assert word in error.body["message"], (word, error.body["message"])
        return error
    raise AssertionError(f"expected {kind.__name__}, found no error")


class Api:
    """A server accessed through openai-python."""

    def __init__(self, base_url, key, queue):
        self.key, self.queue = key, queue
        self.address = {"base_url": f"{base_url.rstrip('/').removesuffix('/v1')}/v1", "api_key": key or "none", "max_retries": 0}
        self.client = openai.OpenAI(**self.address, timeout=120)
        self.model = self.client.models.list().data[0].id

    def create(self, prompt=PLAIN, **options):
        options = {"model": self.model, "max_tokens": NEW_TOKENS} | options
        return self.client.completions.create(prompt=prompt, **options)

    def greedy(self, prompt=PLAIN, **options):
        return self.create(prompt, temperature=0, **options)


@pytest.fixture(scope="module", params=["open", "with a key"])
def api(request, option, tmp_path_factory):
    if option("base-url"):
        if request.param != "open":
            pytest.skip("--base-url supplies a single server")
        yield Api(option("base-url"), option("key"), option("queue"))
        return
    program, keys = request.getfixturevalue("program"), tmp_path_factory.mktemp("clients") / "keys"
    keys.write_text("a-key\n")
    with program.serving("--queue", str(QUEUE), *(["--api-key-file", keys] if request.param != "open" else [])) as address:
        yield Api(address, "a-key" if request.param != "open" else None, QUEUE)


def test_models(api):
    listed = api.client.models.list().data
    assert api.model in [model.id for model in listed], listed
    one = api.client.models.retrieve(api.model)
    assert one.id == api.model and one.object == "model" and isinstance(one.created, int), one
    raises(openai.NotFoundError, 404, lambda: api.client.models.retrieve("no-such-model"))


def test_completion(api):
    answer = api.greedy()
    choice, usage = answer.choices[0], answer.usage
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == api.model, answer
    assert choice.index == 0 and choice.logprobs is None, choice
    assert choice.finish_reason in ("stop", "length"), choice
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
    assert usage.completion_tokens == NEW_TOKENS or choice.finish_reason == "stop", usage
    assert text_of([answer]) == text_of([api.greedy()]), "greedy completions differ between two calls"


def test_stream(api):
    for options in ({"temperature": 0}, {"seed": 7}, {"seed": 7, "n": 2}, {"temperature": 0, "logprobs": 2}):
        whole = api.create(**options)
        chunks = list(api.create(stream=True, stream_options={"include_usage": True}, **options))
        assert chunks[-1].choices == [] and chunks[-1].usage.model_dump() == whole.usage.model_dump(), chunks[-1]
        assert all(chunk.usage is None for chunk in chunks[:-1]), "usage before the end"
        assert {chunk.id for chunk in chunks} == {chunks[0].id}, "one response has several ids"
        for choice in whole.choices:
            parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
            assert "".join(part.text for part in parts) == choice.text, (parts, choice)
            reasons = [part.finish_reason for part in parts]
            assert reasons == [None] * (len(parts) - 1) + [choice.finish_reason], reasons
            if choice.logprobs:
                for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                    lists = [getattr(part.logprobs, field) for part in parts if part.logprobs]
                    assert sum(lists, []) == getattr(choice.logprobs, field), (field, lists)
    without = list(api.create(stream=True, temperature=0))
    assert all(chunk.usage is None and chunk.choices for chunk in without), without


def test_stream_of_split_characters(api):
    whole = api.greedy(PROMPT, echo=True)
    chunks = list(api.greedy(PROMPT, echo=True, stream=True))
    assert text_of(chunks) == whole.choices[0].text and whole.choices[0].text.startswith(PROMPT), chunks
    assert chunks[0].choices[0].text.startswith(PROMPT), "the first chunk must be the prompt"


def test_n_and_best_of(api):
    several = api.create(n=3, seed=5)
    assert [choice.index for choice in several.choices] == [0, 1, 2], several
    assert len({choice.text for choice in several.choices}) > 1, "all three samples are equal"
    single = api.create(seed=5)
    assert several.choices[0].text == single.choices[0].text, "choice 0 of three must equal a single completion"
    assert several.usage.prompt_tokens == single.usage.prompt_tokens, (several.usage, single.usage)
    of_all = api.create(n=4, seed=5, logprobs=0)
    best = api.create(n=2, best_of=4, seed=5, logprobs=0)

    def mean(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    expected = sorted(map(mean, of_all.choices), reverse=True)[:2]
    found = [mean(choice) for choice in best.choices]
    assert all(abs(a - b) < 1e-9 for a, b in zip(sorted(found, reverse=True), expected)), (found, expected)
    assert best.usage.completion_tokens == of_all.usage.completion_tokens, "usage must include the dropped candidates"
    assert len(api.create(n=2, best_of=2).choices) == 2
    raises(openai.BadRequestError, 400, lambda: api.create(n=3, best_of=2), param="best_of")
    raises(openai.BadRequestError, 400, lambda: api.create(best_of=2, stream=True), param="best_of")


def test_echo_with_logprobs(api):
    answer = api.greedy(PROMPT, echo=True, logprobs=5)
    choice = answer.choices[0]
    logprobs = check_logprobs(choice, 5, echo=True)
    assert len(logprobs.tokens) == answer.usage.prompt_tokens + answer.usage.completion_tokens, answer.usage
    assert logprobs.text_offset[0] == 0, logprobs.text_offset
    for token, offset in zip(logprobs.tokens, logprobs.text_offset):
        if not token.startswith("bytes:"):
            assert choice.text[offset : offset + len(token)] == token, (token, offset)
    scored = api.greedy(PROMPT, echo=True, logprobs=5, max_tokens=0)
    prompt_tokens = scored.usage.prompt_tokens
    assert scored.choices[0].text == PROMPT and scored.usage.completion_tokens == 0, scored
    prompt_logprobs = check_logprobs(scored.choices[0], 5, echo=True)
    assert prompt_logprobs.token_logprobs == logprobs.token_logprobs[:prompt_tokens], "prompt scores depend on the completion"
    assert prompt_logprobs.top_logprobs == logprobs.top_logprobs[:prompt_tokens]
    # Generated tokens get the same scores when they are part of a prompt. Only ids round-trip, because a token may
    # be part of a character.
    ids = api.greedy(PROMPT, extra_body={"return_token_ids": True}).choices[0].model_extra.get("token_ids")
    if ids:
        prompt_ids = api.greedy(PROMPT, extra_body={"return_token_ids": True}).choices[0].model_extra["prompt_token_ids"]
        again = api.greedy(prompt_ids + ids, echo=True, logprobs=5, max_tokens=0).choices[0].logprobs
        assert sum(again.token_logprobs[1:]) == sum(logprobs.token_logprobs[1 : len(again.token_logprobs)]), "the sums of the scores differ"


def test_logprobs_without_echo(api):
    answer = api.greedy(PROMPT, logprobs=3)
    logprobs = check_logprobs(answer.choices[0], 3, echo=False)
    assert len(logprobs.tokens) == answer.usage.completion_tokens, (len(logprobs.tokens), answer.usage)
    assert logprobs.text_offset[0] == len(PROMPT), "offsets must start after the prompt"
    assert logprobs.token_logprobs == [max(top.values()) for top in logprobs.top_logprobs], "a greedy token is the most probable"
    # Temperature and filters do not change the reported log-probabilities.
    sampled = api.create(PROMPT, logprobs=3, max_tokens=1, temperature=0.3, top_p=0.5, seed=1)
    assert sampled.choices[0].logprobs.top_logprobs[0].items() >= logprobs.top_logprobs[0].items(), "log-probabilities must be those before temperature and filters"
    chosen = api.greedy(PROMPT, logprobs=0).choices[0].logprobs
    assert chosen.token_logprobs == logprobs.token_logprobs and all(len(top) == 1 for top in chosen.top_logprobs), chosen


def test_stop(api):
    text = api.greedy(max_tokens=24).choices[0].text
    stop = text[len(text) // 2 :][:3]
    cut = text[: text.index(stop)]
    for stops in (stop, [stop], ["\x00never", stop]):
        answer = api.greedy(max_tokens=24, stop=stops)
        assert answer.choices[0].text == cut and answer.choices[0].finish_reason == "stop", (stops, answer.choices[0], cut)
    streamed = list(api.greedy(max_tokens=24, stop=stop, stream=True))
    assert text_of(streamed) == cut and streamed[-1].choices[0].finish_reason == "stop", streamed
    assert api.greedy(max_tokens=24, stop="<|endoftext|>").choices[0].text == text
    raises(openai.BadRequestError, 400, lambda: api.greedy(stop=""), param="stop")


def test_logit_bias(api):
    first = api.greedy(max_tokens=1, logprobs=2, extra_body={"return_token_ids": True})
    token = first.choices[0].model_extra["token_ids"][0]
    forbidden = api.greedy(max_tokens=1, logit_bias={str(token): -100}, extra_body={"return_token_ids": True})
    assert forbidden.choices[0].model_extra["token_ids"][0] != token, forbidden
    other = 65 if token != 65 else 66
    forced = api.greedy(max_tokens=4, logit_bias={str(other): 100}, extra_body={"return_token_ids": True})
    assert forced.choices[0].model_extra["token_ids"] == [other] * 4, forced
    assert api.greedy(logit_bias={}).choices[0].text == api.greedy().choices[0].text
    raises(openai.BadRequestError, 400, lambda: api.greedy(logit_bias={"99999999": 1}), words=["99999999"])
    raises(openai.BadRequestError, 400, lambda: api.greedy(logit_bias={"1": 101}))


def test_seed(api):
    texts = [api.create(seed=11).choices[0].text for _ in range(2)]
    assert texts[0] == texts[1], texts
    assert len({api.create(seed=seed).choices[0].text for seed in (11, 12, -3, 2**62 + 1)}) > 1, "the seed changes nothing"
    unseeded = api.create()
    seed = unseeded.model_extra.get("seed", unseeded.choices[0].model_extra.get("seed"))
    assert seed is not None, "an unseeded response must report its seed"
    assert api.create(seed=seed).choices[0].text == unseeded.choices[0].text, "the reported seed gives a different completion"


def test_id_prompts(api):
    ids = api.greedy(extra_body={"return_token_ids": True}).choices[0].model_extra["prompt_token_ids"]
    assert api.greedy(ids).choices[0].text == api.greedy().choices[0].text
    assert api.greedy(ids, echo=True, max_tokens=0).choices[0].text == PLAIN
    raises(openai.BadRequestError, 400, lambda: api.greedy([1, 99999999]), words=["99999999"])
    raises(openai.BadRequestError, 400, lambda: api.greedy([]), param="prompt")
    raises(openai.BadRequestError, 400, lambda: api.greedy([[]]))


def test_batches(api):
    prompts = [PLAIN, "O", PROMPT, "What is"]
    alone = [api.greedy(prompt).choices[0].text for prompt in prompts]
    answer = api.greedy(prompts)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3], answer
    assert [choice.text for choice in answer.choices] == alone, "a completion depends on its batch"
    choices = api.greedy(prompts, extra_body={"return_token_ids": True}).choices
    lists = [choice.model_extra["prompt_token_ids"] for choice in choices]
    assert [choice.text for choice in api.greedy(lists).choices] == alone
    assert answer.usage.prompt_tokens == sum(map(len, lists)), answer.usage
    sampled = api.create(prompts, n=2, seed=3)
    assert [choice.index for choice in sampled.choices] == list(range(8)), sampled
    chunks = list(api.create(prompts, n=2, seed=3, stream=True))
    for choice in sampled.choices:
        streamed = "".join(part.text for chunk in chunks for part in chunk.choices if part.index == choice.index)
        assert streamed == choice.text, (choice, streamed)


def test_errors(api):
    raises(openai.NotFoundError, 404, lambda: api.create(model="no-such-model"), code="model_not_found")
    raises(openai.BadRequestError, 400, lambda: api.create(max_tokens=-1), param="max_tokens")
    too_long = {"max_tokens": 5000}
    raises(openai.BadRequestError, 400, lambda: api.create(**too_long), code="context_length_exceeded", words=["5000"])
    raises(openai.BadRequestError, 400, lambda: api.create(temperature=2.5), param="temperature")
    raises(openai.BadRequestError, 400, lambda: api.create(top_p=1.5), param="top_p")
    raises(openai.BadRequestError, 400, lambda: api.create(n=0), param="n")
    raises(openai.BadRequestError, 400, lambda: api.create(logprobs=1000), param="logprobs")
    raises(openai.BadRequestError, 400, lambda: api.create(suffix="end"), param="suffix")
    raises(openai.BadRequestError, 400, lambda: api.create(stream_options={"include_usage": True}), param="stream_options")
    raises(openai.BadRequestError, 400, lambda: api.create(stream=True, max_tokens="many"), param="max_tokens")
    raises(openai.NotFoundError, 404, lambda: api.client.moderations.create(input="no such route"))


def test_chat_answers_or_explains_the_template(api):
    message = [{"role": "user", "content": "Hello"}]
    try:
        answer = api.client.chat.completions.create(model=api.model, messages=message, max_tokens=4, temperature=0)
        assert answer.choices[0].message.role == "assistant" and isinstance(answer.choices[0].message.content, str), answer
    except openai.BadRequestError as error:
        assert "/v1/completions" in error.body["message"] and "chat-template" in error.body["message"], error.body


def test_nulls_and_unknown_fields(api):
    names = "best_of echo frequency_penalty logit_bias logprobs n presence_penalty seed stop stream suffix top_p user".split()
    answer = api.greedy(extra_body=dict.fromkeys(names) | {"no_such_field": {"deep": [1]}, "metadata": None})
    assert answer.choices[0].text == api.greedy().choices[0].text


def test_async_client(api):
    async def streamed():
        async with openai.AsyncOpenAI(**api.address) as client:
            body = {"model": api.model, "prompt": PLAIN, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}
            streams = await asyncio.gather(*(client.completions.create(**body) for _ in range(4)))
            return [text_of([chunk async for chunk in stream]) for stream in streams]

    assert set(asyncio.run(streamed())) == {api.greedy().choices[0].text}


def test_keys(api):
    if not api.key:
        other = openai.OpenAI(**api.address | {"api_key": "any"})
        assert other.models.list().data, "a server without keys must accept any key"
        return
    other = openai.OpenAI(**api.address | {"api_key": api.key + "x"})
    create = other.completions.create
    raises(openai.AuthenticationError, 401, lambda: create(model=api.model, prompt="x"), code="invalid_api_key")
    raises(openai.AuthenticationError, 401, lambda: other.models.list(), code="invalid_api_key")


def test_rate_limit(api):
    if not api.queue:
        pytest.skip("not provoked: --queue is not given")

    def send(_):
        try:
            return api.create(max_tokens=40, extra_body={"ignore_eos": True}).usage.completion_tokens
        except openai.RateLimitError as error:
            assert error.code == "server_overloaded" and error.response.headers["retry-after"].isdigit(), error.body
            return "refused"

    clients = 2 * api.queue + 64
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(send, range(clients)))
    assert answers.count("refused") and answers.count(40) == clients - answers.count("refused"), answers
    assert answers.count(40) >= api.queue, f"the queue holds {api.queue}, but {answers.count(40)} were served"
    test_completion(api)


@pytest.fixture
def llm(api):
    langchain_openai = pytest.importorskip("langchain_openai")
    common = {"temperature": 0, "max_tokens": NEW_TOKENS, "model": api.model} | api.address
    return lambda **options: langchain_openai.OpenAI(**common | options)


def test_langchain_invoke(api, llm):
    expected = api.greedy().choices[0].text
    assert llm().invoke(PLAIN) == expected
    assert isinstance(llm(temperature=0.7, seed=4).invoke(PLAIN), str)
    text = llm().invoke(PLAIN, stop=[expected[3:6]])
    assert text == expected[: expected.index(expected[3:6])], (text, expected)


def test_langchain_stream(api, llm):
    expected = api.greedy(PROMPT).choices[0].text
    assert "".join(llm().stream(PROMPT)) == expected
    assert llm(streaming=True).invoke(PROMPT) == expected


def test_langchain_batch(api, llm):
    prompts = [f"{PLAIN} {number}" for number in range(25)]
    expected = [api.greedy(prompt).choices[0].text for prompt in prompts]
    assert llm().batch(prompts) == expected


def test_langchain_generate(api, llm):
    prompts = [f"{PLAIN} {number}" for number in range(25)]
    result = llm(temperature=1, n=2, best_of=2, seed=9, logprobs=2).generate(prompts)
    assert [len(texts) for texts in result.generations] == [2] * len(prompts), result
    assert result.llm_output["token_usage"]["completion_tokens"] > 0, result.llm_output
    info = result.generations[0][0].generation_info
    assert info["finish_reason"] in ("stop", "length") and info["logprobs"]["token_logprobs"][0] <= 0.0, info


def test_langchain_chain(api, llm):
    from langchain_core.prompts import PromptTemplate

    chain = PromptTemplate.from_template("The {who} and") | llm()
    assert chain.invoke({"who": "king"}) == api.greedy().choices[0].text
