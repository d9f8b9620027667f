"""GPT-2 on Ray Serve, with one replica on each of two nodes, and dynamic batching.

Run it in this folder with `serve run ray_serve:app`, then:

curl http://127.0.0.1:8000/ -d '{"prompt": "One day", "max_new_tokens": 20, "temperature": 0.7}'
"""

import asyncio
import json
import os
from collections import defaultdict

import candle_gpt2
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse


@serve.deployment(num_replicas=2, max_replicas_per_node=1, max_ongoing_requests=64, ray_actor_options={"num_cpus": 2})
class Gpt2:
    def __init__(self):
        # A folder on every node, or a name on the Hub; by default the built-in model.
        self.model = candle_gpt2.Model.from_pretrained(os.environ.get("GPT2_MODEL"))

    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.01)
    async def generate(self, requests):
        groups = defaultdict(dict)
        for index, (prompt, options) in enumerate(requests):
            groups[json.dumps(options, sort_keys=True)][index] = prompt
        answers = {}
        for options, prompts in groups.items():  # one batch for all prompts with the same options
            try:
                call = (self.model.generate, list(prompts.values()))
                texts = await asyncio.to_thread(*call, return_exceptions=True, **json.loads(options))
            except Exception as error:  # invalid options affect only this group
                texts = [error] * len(prompts)
            answers.update(zip(prompts, texts))
        return [answers[index] for index in range(len(requests))]

    async def __call__(self, request: Request):
        try:
            options = await request.json()
            answer = await self.generate((options.pop("prompt"), options))
        except (AttributeError, KeyError, TypeError, ValueError):
            answer = ValueError('expected {"prompt": TEXT, …} with options of generate')
        if isinstance(answer, Exception):
            return JSONResponse({"error": str(answer)}, 400)
        return JSONResponse({"text": answer})


app = Gpt2.bind()
