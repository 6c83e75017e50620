"""The official client talks to the gateway, and SGLang samples behind it."""

import asyncio
import json

import pytest

from areal_gym.chat import Renderer
from areal_gym.engines.base import SamplingParams
from areal_gym.errors import GrammarError
from areal_gym.gateway.gateway_server import Gateway
from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from tests._support.sglang_suite import PROMPT, engine_over, logprob_gap

openai = pytest.importorskip("openai", reason="pip install 'areal-gym[agents]'")


def test_openai_client_talks_to_sglang_through_the_gateway(server, policies):
    async def play():
        async with engine_over(policies[0], server, take_over=True) as engine:
            gateway = Gateway()
            await gateway.start()
            try:
                session = gateway.serve_policy(engine, Renderer.from_checkpoint(policies[0]))
                async with openai.AsyncOpenAI(
                    base_url=session.base_url, api_key=session.api_key, max_retries=0
                ) as client:
                    request = {
                        "model": "policy",
                        "messages": [{"role": "user", "content": "Make 17 from 3, 4 and 5."}],
                        "max_completion_tokens": 40,
                        "temperature": 0.0,
                    }
                    whole = await client.chat.completions.create(**request)
                    stream = await client.chat.completions.create(**request, stream=True)
                    parts = [chunk async for chunk in stream]
            finally:
                await gateway.aclose()
        assert whole.usage.completion_tokens > 0
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert text == (whole.choices[0].message.content or "")

    asyncio.run(play())


SUM = {
    "type": "object",
    "properties": {"sum": {"enum": [5, 7]}},
    "required": ["sum"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "parameters": SUM}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM}}


def test_response_formats_and_forced_tools_use_the_servers_grammar(server, kind, policies):
    """A policy with random weights writes JSON and calls a tool when the server masks the rest."""

    async def play():
        async with engine_over(policies[0], server, take_over=True) as engine:
            gateway = Gateway()
            await gateway.start()
            try:
                session = gateway.serve_policy(engine, Renderer.from_checkpoint(policies[0]))
                async with openai.AsyncOpenAI(
                    base_url=session.base_url, api_key=session.api_key, max_retries=0
                ) as client:
                    request = {
                        "model": "policy",
                        "messages": [{"role": "user", "content": "Make 17."}],
                        "max_completion_tokens": 300,
                        "temperature": 1.0,  # greedy, it would write spaces for ever
                    }
                    create = client.chat.completions.create
                    if kind == "fake":
                        for form in ({"response_format": FORMAT}, {"tools": [ADD]}):
                            choice = "required" if "tools" in form else openai.NOT_GIVEN
                            with pytest.raises(openai.BadRequestError, match="grammar-backend"):
                                await create(**request, **form, tool_choice=choice)
                        return
                    whole = await create(**request, response_format=FORMAT)
                    assert json.loads(whole.choices[0].message.content)["sum"] in (5, 7)
                    stream = await create(**request, response_format=FORMAT, stream=True)
                    parts = [chunk async for chunk in stream]
                    text = "".join(part.choices[0].delta.content or "" for part in parts)
                    assert json.loads(text)["sum"] in (5, 7)
                    forced = await create(**request, tools=[ADD], tool_choice="required")
                    (call,) = forced.choices[0].message.tool_calls
                    assert call.function.name == "add"
                    assert json.loads(call.function.arguments)["sum"] in (5, 7)
            finally:
                await gateway.aclose()

    asyncio.run(play())


def test_logprobs_under_a_grammar_differ_from_the_policys(server, kind, policies):
    """This is why such answers are not trained on; the fake server refuses them."""

    async def play():
        async with engine_over(policies[0], server, take_over=True) as engine:
            grammar = ("json_schema", json.dumps(SUM))
            params = SamplingParams(max_new_tokens=64, stop_token_ids=(2,), grammar=grammar)
            if kind == "fake":
                with pytest.raises(GrammarError, match="grammar-backend"):
                    await engine.generate(PROMPT, params)
                return
            generation = await engine.generate(PROMPT, params)
            assert generation.logprobs[0] == 0.0  # "{" is all that is allowed
            assert logprob_gap(load_checkpoint(policies[0]), generation) > 1.0

    asyncio.run(play())
