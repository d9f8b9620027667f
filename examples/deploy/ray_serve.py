"""GPT-2 on Ray Serve: a replica on each of two nodes, and batches in each. Run it in this folder: serve run ray_serve:app

curl http://127.0.0.1:8000/ -d '{"prompt": "One day", "max_new_tokens": 20, "temperature": 0.7}'
"""

import asyncio
import os
from itertools import groupby

import candle_gpt2
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse


@serve.deployment(num_replicas=2, max_replicas_per_node=1, max_ongoing_requests=64, ray_actor_options={"num_cpus": 2})
class Gpt2:
    def __init__(self):
        # A folder that every node has, a name on the Hub, or nothing: the built-in model.
        self.model = candle_gpt2.Model.from_pretrained(os.environ.get("GPT2_MODEL"))

    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.01)
    async def generate(self, requests):
        results = {}
        # Prompts with the same options go through the model together.
        options = lambda index: sorted(requests[index].items() - {("prompt", requests[index]["prompt"])})
        for chosen, indices in groupby(sorted(range(len(requests)), key=lambda index: repr(options(index))), options):
            indices = list(indices)
            prompts = [requests[index]["prompt"] for index in indices]
            texts = await asyncio.to_thread(self.model.generate, prompts, return_exceptions=True, **dict(chosen))
            results.update(zip(indices, texts))
        return [results[index] for index in range(len(requests))]

    async def __call__(self, request: Request):
        text = await self.generate(await request.json())
        refused = isinstance(text, Exception)
        return JSONResponse({"error": str(text)} if refused else {"text": text}, 400 if refused else 200)


app = Gpt2.bind()
