"""Shows that openai-python and langchain-openai, unmodified, work with `gpt2 serve`: every check asserts values.

usage: python scripts/check_clients.py --base-url http://127.0.0.1:PORT [--model NAME] [--key KEY] [--queue N]

KEY is one that the server takes; N the prompts that its queue holds, which a check then overfills. Needs openai and langchain-openai
(scripts/requirements.txt). Prints a line for each check; exit code 1 if one fails.
"""

import argparse
import concurrent.futures
import importlib.metadata
import math
import sys
import traceback

import langchain_openai
import openai

PROMPT = "First, the good news: é, 日本 and 😀 are here.\n"
PLAIN = "The king and"
NEW_TOKENS = 12


def text_of(chunks):
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def check_logprobs(choice, alternatives, echo):
    """The shape of `logprobs`: four lists side by side, and each token's value among its alternatives to the last bit."""
    told = choice.logprobs
    length = len(told.tokens)
    assert length == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset), told
    for place, (token, logprob, top) in enumerate(zip(told.tokens, told.token_logprobs, told.top_logprobs)):
        if echo and place == 0:
            assert logprob is None and top is None, (place, logprob, top)
            continue
        assert math.isfinite(logprob) and logprob <= 0.0, (place, logprob)
        assert top[token] == logprob, (place, token, logprob, top)
        assert alternatives <= len(top) <= alternatives + 1, (place, len(top))
        assert sum(map(math.exp, top.values())) <= 1 + 1e-9, (place, top)
        values = sorted(top.values(), reverse=True)
        assert logprob in values[: alternatives + 1] and logprob >= values[-1], (place, logprob, top)
    assert told.text_offset == sorted(told.text_offset), told.text_offset
    return told


def raises(kind, status, call, *, param=None, code=None, words=()):
    """The client raises exactly this class, made of an error object with all four keys."""
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


class OpenAI:
    """Checks with openai-python."""

    def __init__(self, base_url, model, key, queue):
        self.base_url, self.model, self.key, self.queue = base_url, model, key, queue
        self.client = openai.OpenAI(base_url=base_url, api_key=key or "none", max_retries=0, timeout=120)

    def create(self, prompt=PLAIN, **options):
        options = {"model": self.model, "max_tokens": NEW_TOKENS} | options
        return self.client.completions.create(prompt=prompt, **options)

    def greedy(self, prompt=PLAIN, **options):
        return self.create(prompt, temperature=0, **options)

    def check_models(self):
        listed = self.client.models.list().data
        assert self.model in [model.id for model in listed], listed
        one = self.client.models.retrieve(self.model)
        assert one.id == self.model and one.object == "model" and isinstance(one.created, int), one
        raises(openai.NotFoundError, 404, lambda: self.client.models.retrieve("no-such-model"))

    def check_completion(self):
        answer = self.greedy()
        choice, usage = answer.choices[0], answer.usage
        assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == self.model, answer
        assert choice.index == 0 and choice.logprobs is None, choice
        assert choice.finish_reason in ("stop", "length"), choice
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
        assert usage.completion_tokens == NEW_TOKENS or choice.finish_reason == "stop", usage
        assert text_of([answer]) == text_of([self.greedy()]), "greedy text differs between two calls"

    def check_stream(self):
        for options in ({"temperature": 0}, {"seed": 7}, {"seed": 7, "n": 2}, {"temperature": 0, "logprobs": 2}):
            whole = self.create(**options)
            chunks = list(self.create(stream=True, stream_options={"include_usage": True}, **options))
            assert chunks[-1].choices == [] and chunks[-1].usage.model_dump() == whole.usage.model_dump(), chunks[-1]
            assert all(chunk.usage is None for chunk in chunks[:-1]), "usage before the end"
            assert {chunk.id for chunk in chunks} == {chunks[0].id}, "one answer, several ids"
            for choice in whole.choices:
                parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
                assert "".join(part.text for part in parts) == choice.text, (parts, choice)
                reasons = [part.finish_reason for part in parts]
                assert reasons == [None] * (len(parts) - 1) + [choice.finish_reason], reasons
                if choice.logprobs:
                    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                        lists = [getattr(part.logprobs, field) for part in parts if part.logprobs]
                        assert sum(lists, []) == getattr(choice.logprobs, field), (field, lists)
        without = list(self.create(stream=True, temperature=0))
        assert all(chunk.usage is None and chunk.choices for chunk in without), without

    def check_stream_of_split_characters(self):
        whole = self.greedy(PROMPT, echo=True)
        chunks = list(self.greedy(PROMPT, echo=True, stream=True))
        assert text_of(chunks) == whole.choices[0].text and whole.choices[0].text.startswith(PROMPT), chunks
        assert chunks[0].choices[0].text.startswith(PROMPT), "the first chunk must be the prompt"

    def check_n_and_best_of(self):
        several = self.create(n=3, seed=5)
        assert [choice.index for choice in several.choices] == [0, 1, 2], several
        assert len({choice.text for choice in several.choices}) > 1, "three draws, one text"
        single = self.create(seed=5)
        assert several.choices[0].text == single.choices[0].text, "choice 0 of three must be the text of one"
        assert several.usage.prompt_tokens == single.usage.prompt_tokens, (several.usage, single.usage)
        of_all = self.create(n=4, seed=5, logprobs=0)
        best = self.create(n=2, best_of=4, seed=5, logprobs=0)

        def mean(choice):
            return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

        expected = sorted(map(mean, of_all.choices), reverse=True)[:2]
        found = [mean(choice) for choice in best.choices]
        assert all(abs(a - b) < 1e-9 for a, b in zip(sorted(found, reverse=True), expected)), (found, expected)
        assert best.usage.completion_tokens == of_all.usage.completion_tokens, "best_of counts what it drops"
        assert len(self.create(n=2, best_of=2).choices) == 2
        raises(openai.BadRequestError, 400, lambda: self.create(n=3, best_of=2), param="best_of")
        raises(openai.BadRequestError, 400, lambda: self.create(best_of=2, stream=True), param="best_of")

    def check_echo_with_logprobs(self):
        answer = self.greedy(PROMPT, echo=True, logprobs=5)
        choice = answer.choices[0]
        told = check_logprobs(choice, 5, echo=True)
        assert len(told.tokens) == answer.usage.prompt_tokens + answer.usage.completion_tokens, answer.usage
        assert told.text_offset[0] == 0, told.text_offset
        for token, offset in zip(told.tokens, told.text_offset):
            if not token.startswith("bytes:"):
                assert choice.text[offset : offset + len(token)] == token, (token, offset)
        scored = self.greedy(PROMPT, echo=True, logprobs=5, max_tokens=0)
        prompt_tokens = scored.usage.prompt_tokens
        assert scored.choices[0].text == PROMPT and scored.usage.completion_tokens == 0, scored
        before = check_logprobs(scored.choices[0], 5, echo=True)
        assert before.token_logprobs == told.token_logprobs[:prompt_tokens], "scores of the prompt depend on what follows"
        assert before.top_logprobs == told.top_logprobs[:prompt_tokens]
        # What was generated scores the same when it comes as a prompt; pieces of characters only with ids.
        ids = self.greedy(PROMPT, extra_body={"return_token_ids": True}).choices[0].model_extra.get("token_ids")
        if ids:
            prompt_ids = self.greedy(PROMPT, extra_body={"return_token_ids": True}).choices[0].model_extra["prompt_token_ids"]
            again = self.greedy(prompt_ids + ids, echo=True, logprobs=5, max_tokens=0).choices[0].logprobs
            assert sum(again.token_logprobs[1:]) == sum(told.token_logprobs[1 : len(again.token_logprobs)]), "sums of scores differ"

    def check_logprobs_without_echo(self):
        answer = self.greedy(PROMPT, logprobs=3)
        told = check_logprobs(answer.choices[0], 3, echo=False)
        assert len(told.tokens) == answer.usage.completion_tokens, (len(told.tokens), answer.usage)
        assert told.text_offset[0] == len(PROMPT), "offsets begin behind the prompt"
        assert told.token_logprobs == [max(top.values()) for top in told.top_logprobs], "a greedy token is the most probable"
        # Neither temperature nor filters change what is told.
        drawn = self.create(PROMPT, logprobs=3, max_tokens=1, temperature=0.3, top_p=0.5, seed=1)
        assert drawn.choices[0].logprobs.top_logprobs[0].items() >= told.top_logprobs[0].items(), "not those of the raw model"
        only = self.greedy(PROMPT, logprobs=0).choices[0].logprobs
        assert only.token_logprobs == told.token_logprobs and all(len(top) == 1 for top in only.top_logprobs), only

    def check_stop(self):
        text = self.greedy(max_tokens=24).choices[0].text
        stop = text[len(text) // 2 :][:3]
        cut = text[: text.index(stop)]
        for stops in (stop, [stop], ["\x00never", stop]):
            answer = self.greedy(max_tokens=24, stop=stops)
            assert answer.choices[0].text == cut and answer.choices[0].finish_reason == "stop", (stops, answer.choices[0], cut)
        streamed = list(self.greedy(max_tokens=24, stop=stop, stream=True))
        assert text_of(streamed) == cut and streamed[-1].choices[0].finish_reason == "stop", streamed
        assert self.greedy(max_tokens=24, stop="<|endoftext|>").choices[0].text == text
        raises(openai.BadRequestError, 400, lambda: self.greedy(stop=""), param="stop")

    def check_logit_bias(self):
        first = self.greedy(max_tokens=1, logprobs=2, extra_body={"return_token_ids": True})
        token = first.choices[0].model_extra["token_ids"][0]
        forbidden = self.greedy(max_tokens=1, logit_bias={str(token): -100}, extra_body={"return_token_ids": True})
        assert forbidden.choices[0].model_extra["token_ids"][0] != token, forbidden
        other = 65 if token != 65 else 66
        forced = self.greedy(max_tokens=4, logit_bias={str(other): 100}, extra_body={"return_token_ids": True})
        assert forced.choices[0].model_extra["token_ids"] == [other] * 4, forced
        assert self.greedy(logit_bias={}).choices[0].text == self.greedy().choices[0].text
        raises(openai.BadRequestError, 400, lambda: self.greedy(logit_bias={"99999999": 1}), words=["99999999"])
        raises(openai.BadRequestError, 400, lambda: self.greedy(logit_bias={"1": 101}))

    def check_seed(self):
        texts = [self.create(seed=11).choices[0].text for _ in range(2)]
        assert texts[0] == texts[1], texts
        assert len({self.create(seed=seed).choices[0].text for seed in (11, 12, -3, 2**62 + 1)}) > 1, "the seed changes nothing"
        unseeded = self.create()
        seed = unseeded.model_extra.get("seed", unseeded.choices[0].model_extra.get("seed"))
        assert seed is not None, "an unseeded answer tells its seed"
        assert self.create(seed=seed).choices[0].text == unseeded.choices[0].text, "the told seed gives another text"

    def check_id_prompts(self):
        ids = self.greedy(extra_body={"return_token_ids": True}).choices[0].model_extra["prompt_token_ids"]
        assert self.greedy(ids).choices[0].text == self.greedy().choices[0].text
        assert self.greedy(ids, echo=True, max_tokens=0).choices[0].text == PLAIN
        raises(openai.BadRequestError, 400, lambda: self.greedy([1, 99999999]), words=["99999999"])
        raises(openai.BadRequestError, 400, lambda: self.greedy([]), param="prompt")
        raises(openai.BadRequestError, 400, lambda: self.greedy([[]]))

    def check_batches(self):
        prompts = [PLAIN, "O", PROMPT, "What is"]
        alone = [self.greedy(prompt).choices[0].text for prompt in prompts]
        answer = self.greedy(prompts)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3], answer
        assert [choice.text for choice in answer.choices] == alone, "a text in a batch differs from the text alone"
        told = self.greedy(prompts, extra_body={"return_token_ids": True}).choices
        lists = [choice.model_extra["prompt_token_ids"] for choice in told]
        assert [choice.text for choice in self.greedy(lists).choices] == alone
        assert answer.usage.prompt_tokens == sum(map(len, lists)), answer.usage
        drawn = self.create(prompts, n=2, seed=3)
        assert [choice.index for choice in drawn.choices] == list(range(8)), drawn
        chunks = list(self.create(prompts, n=2, seed=3, stream=True))
        for choice in drawn.choices:
            streamed = "".join(part.text for chunk in chunks for part in chunk.choices if part.index == choice.index)
            assert streamed == choice.text, (choice, streamed)

    def check_errors(self):
        raises(openai.NotFoundError, 404, lambda: self.create(model="no-such-model"), code="model_not_found")
        raises(openai.BadRequestError, 400, lambda: self.create(max_tokens=-1), param="max_tokens")
        too_long = {"max_tokens": 5000}
        raises(openai.BadRequestError, 400, lambda: self.create(**too_long), code="context_length_exceeded", words=["5000"])
        raises(openai.BadRequestError, 400, lambda: self.create(temperature=2.5), param="temperature")
        raises(openai.BadRequestError, 400, lambda: self.create(top_p=1.5), param="top_p")
        raises(openai.BadRequestError, 400, lambda: self.create(n=0), param="n")
        raises(openai.BadRequestError, 400, lambda: self.create(logprobs=1000), param="logprobs")
        raises(openai.BadRequestError, 400, lambda: self.create(suffix="end"), param="suffix")
        raises(openai.BadRequestError, 400, lambda: self.create(stream_options={"include_usage": True}), param="stream_options")
        raises(openai.BadRequestError, 400, lambda: self.create(stream=True, max_tokens="many"), param="max_tokens")
        raises(openai.NotFoundError, 404, lambda: self.client.embeddings.create(model=self.model, input="no such route"))

    def check_chat_says_what_to_do(self):
        message = [{"role": "user", "content": "Hello"}]
        try:
            answer = self.client.chat.completions.create(model=self.model, messages=message, max_tokens=4, temperature=0)
            assert answer.choices[0].message.role == "assistant" and isinstance(answer.choices[0].message.content, str), answer
        except openai.BadRequestError as error:
            assert "/v1/completions" in error.body["message"] and "chat-template" in error.body["message"], error.body

    def check_nulls_and_unknown_fields(self):
        names = "best_of echo frequency_penalty logit_bias logprobs n presence_penalty seed stop stream suffix top_p user".split()
        answer = self.greedy(extra_body=dict.fromkeys(names) | {"no_such_field": {"deep": [1]}, "metadata": None})
        assert answer.choices[0].text == self.greedy().choices[0].text

    def check_async_client(self):
        import asyncio

        async def streamed():
            options = {"base_url": self.base_url, "api_key": self.key or "none", "max_retries": 0}
            async with openai.AsyncOpenAI(**options) as client:
                body = {"model": self.model, "prompt": PLAIN, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}
                streams = await asyncio.gather(*(client.completions.create(**body) for _ in range(4)))
                return [text_of([chunk async for chunk in stream]) for stream in streams]

        assert set(asyncio.run(streamed())) == {self.greedy().choices[0].text}

    def check_keys(self):
        if not self.key:
            other = openai.OpenAI(base_url=self.base_url, api_key="any", max_retries=0)
            assert other.models.list().data, "without keys every key is taken"
            return
        other = openai.OpenAI(base_url=self.base_url, api_key=self.key + "x", max_retries=0)
        create = other.completions.create
        raises(openai.AuthenticationError, 401, lambda: create(model=self.model, prompt="x"), code="invalid_api_key")
        raises(openai.AuthenticationError, 401, lambda: other.models.list(), code="invalid_api_key")

    def check_rate_limit(self):
        if not self.queue:
            return "not provoked: --queue is not given"

        def ask(_):
            try:
                return self.create(max_tokens=40, extra_body={"ignore_eos": True}).usage.completion_tokens
            except openai.RateLimitError as error:
                assert error.code == "server_overloaded" and error.response.headers["retry-after"].isdigit(), error.body
                return "refused"

        clients = 2 * self.queue + 64
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            answers = list(pool.map(ask, range(clients)))
        assert answers.count("refused") and answers.count(40) == clients - answers.count("refused"), answers
        assert answers.count(40) >= self.queue, f"the queue holds {self.queue}, but {answers.count(40)} were served"
        self.check_completion()


class LangChain(OpenAI):
    """Checks with langchain-openai."""

    def llm(self, **options):
        options = {"temperature": 0, "max_tokens": NEW_TOKENS} | options
        options |= {"base_url": self.base_url, "api_key": self.key or "none", "model": self.model, "max_retries": 0}
        return langchain_openai.OpenAI(**options)

    def check_invoke(self):
        expected = self.greedy().choices[0].text
        assert self.llm().invoke(PLAIN) == expected
        assert isinstance(self.llm(temperature=0.7, seed=4).invoke(PLAIN), str)
        text = self.llm().invoke(PLAIN, stop=[expected[3:6]])
        assert text == expected[: expected.index(expected[3:6])], (text, expected)

    def check_stream(self):
        expected = self.greedy(PROMPT).choices[0].text
        assert "".join(self.llm().stream(PROMPT)) == expected
        assert self.llm(streaming=True).invoke(PROMPT) == expected

    def check_batch(self):
        prompts = [f"{PLAIN} {number}" for number in range(25)]
        expected = [self.greedy(prompt).choices[0].text for prompt in prompts]
        assert self.llm().batch(prompts) == expected

    def check_generate(self):
        prompts = [f"{PLAIN} {number}" for number in range(25)]
        result = self.llm(temperature=1, n=2, best_of=2, seed=9, logprobs=2).generate(prompts)
        assert [len(texts) for texts in result.generations] == [2] * len(prompts), result
        assert result.llm_output["token_usage"]["completion_tokens"] > 0, result.llm_output
        told = result.generations[0][0].generation_info
        assert told["finish_reason"] in ("stop", "length") and told["logprobs"]["token_logprobs"][0] <= 0.0, told

    def check_chain(self):
        from langchain_core.prompts import PromptTemplate

        chain = PromptTemplate.from_template("The {who} and") | self.llm()
        assert chain.invoke({"who": "king"}) == self.greedy().choices[0].text


def checks_of(checker, inherited=()):
    return [name for name in vars(type(checker)) if name.startswith("check_") and name not in inherited]


def main():
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--base-url", required=True, help="http://HOST:PORT, with or without /v1")
    words.add_argument("--model", help="(default: the first of /v1/models)")
    words.add_argument("--key", help="a key that the server takes, where it asks for one")
    words.add_argument("--queue", type=int, help="prompts that the server's queue holds")
    arguments = words.parse_args()
    base_url = arguments.base_url.rstrip("/").removesuffix("/v1") + "/v1"
    model = arguments.model or openai.OpenAI(base_url=base_url, api_key=arguments.key or "none").models.list().data[0].id
    failed = False
    print(", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("openai", "langchain-openai")))
    for kind in (OpenAI, LangChain):
        checker = kind(base_url, model, arguments.key, arguments.queue)
        for name in checks_of(checker):
            what = f"{kind.__name__}: {name.removeprefix('check_').replace('_', ' ')}"
            try:
                print(f"{what}: {getattr(checker, name)() or 'ok'}", flush=True)
            except Exception as error:  # noqa: BLE001 - every kind of failure is one line, and the other checks go on
                failed = True
                line = traceback.extract_tb(error.__traceback__)[-1].lineno
                place = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.name == name][-1:] or [line]
                print(f"{what}: FAILED, line {place[0]}: {type(error).__name__}: {str(error)[:1000]}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
