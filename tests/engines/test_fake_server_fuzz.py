"""The fake SGLang server refuses wrong types in every field, and keeps serving."""

import asyncio
import json
import random

import aiohttp

from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.engines.sglang import FakeSGLangServer
from tests._support.schema_noise import body_bytes, mutated

VALID = {
    "/generate": {
        "input_ids": [[72, 105], [72]],
        "sampling_params": {"max_new_tokens": 4, "temperature": 1.0, "top_p": 0.9, "top_k": 5},
        "rid": ["a", "b"],
        "return_logprob": True,
    },
    "/abort_request": {"rid": "a", "abort_all": False},
    "/update_weights_from_disk": {"model_path": "/no/such/place", "weight_version": "1"},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["gASVAA=="], "load_format": "x"},
    "/update_weights_from_distributed": {
        "names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "g",
    },
    "/destroy_weights_update_group": {"group_name": "g"},
    "/update_weight_version": {"new_version": "7"},
    "/load_lora_adapter": {"lora_name": "a", "lora_path": "/no/such/place"},
    "/unload_lora_adapter": {"lora_name": "a"},
}  # fmt: skip


def test_fake_server_refuses_malformed_bodies_and_keeps_serving():
    rng = random.Random(3)

    async def use():
        engine = ScriptedEngine(lambda question: "Hello.")
        async with FakeSGLangServer(engine) as server, aiohttp.ClientSession() as http:
            for path, valid in VALID.items():
                for _ in range(30):
                    body = body_bytes(mutated(valid, rng), rng)
                    async with http.post(server.url + path, data=body) as answer:
                        assert answer.status < 500, (path, body, await answer.text())
            body = json.dumps(VALID["/generate"])
            async with http.post(server.url + "/generate", data=body) as answer:
                assert (answer.status, len(await answer.json())) == (200, 2)

    asyncio.run(use())
