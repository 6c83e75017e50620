"""The official client talks to the gateway, and SGLang samples behind it."""

import asyncio

import pytest
from suite import engine_over

from areal_gym.gateway.server import Gateway
from areal_gym.rendering import Renderer

openai = pytest.importorskip("openai", reason="pip install 'areal-gym[agents]'")


def test_a_client_before_the_gateway_before_the_server(server, policies):
    async def play():
        async with engine_over(policies[0], server, take_over=True) as engine:
            gateway = Gateway()
            await gateway.start()
            try:
                session = gateway.serve_policy(engine, Renderer.from_checkpoint(policies[0]))
                async with openai.AsyncOpenAI(
                    base_url=session.base_url, api_key=session.api_key, max_retries=0
                ) as client:
                    asked = {
                        "model": "policy",
                        "messages": [{"role": "user", "content": "Make 17 from 3, 4 and 5."}],
                        "max_completion_tokens": 40,
                        "temperature": 0.0,
                    }
                    whole = await client.chat.completions.create(**asked)
                    stream = await client.chat.completions.create(**asked, stream=True)
                    parts = [chunk async for chunk in stream]
            finally:
                await gateway.aclose()
        assert whole.usage.completion_tokens > 0
        told = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert told == (whole.choices[0].message.content or "")

    asyncio.run(play())
