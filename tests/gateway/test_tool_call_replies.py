"""A call in each model's format is `tool_calls` for a client, whole and streamed."""

import asyncio
import json

import openai
import pytest

from areal_gym.chat.tool_call_formats import write_call
from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.gateway.gateway_server import Gateway
from tests._support.chat_families import CONTROL, renderer_of
from tests._support.scripted_gateway import ADD

FAMILIES = [family for family in CONTROL if family not in ("thinking", "starter", "gemma3")]
QUESTION = {"role": "user", "content": "Add 3 and 4."}


def spoken(family, renderer, *, has_call):
    """Return a turn as the family's models write it, after the header."""
    text = write_call("add", {"a": 3, "b": 4}, renderer.tool_dialect) if has_call else "Seven."
    if family == "gpt-oss":
        thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        return thought + (text if has_call else f"<|channel|>final<|message|>{text}")
    return f"Hm.\n</think>\n\n{text}" if renderer.opens_thinking else text


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_call_in_the_models_format_is_a_tool_call(family, is_stream):
    renderer = renderer_of(family)

    def reply(question):
        is_after_question = question.text.endswith(renderer.opening) or family == "gpt-oss"
        has_call = question.turn == 0
        text = spoken(family, renderer, has_call=has_call) if is_after_question else "Seven."
        end = renderer.turn_ends.call if has_call else renderer.turn_ends.answer
        return [*renderer.tokenizer.encode(text), *renderer.tokenizer.encode(end)]

    async def ask(client, messages):
        if not is_stream:
            return await client.chat.completions.create(model="x", messages=messages, tools=[ADD])
        async with client.chat.completions.stream(
            model="x", messages=messages, tools=[ADD]
        ) as stream:
            return await stream.get_final_completion()

    async def play():
        gateway = Gateway()
        await gateway.start()
        try:
            engine = ScriptedEngine(reply, tokenizer=renderer.tokenizer)
            session = gateway.serve_policy(engine, renderer)
            async with openai.AsyncOpenAI(
                api_key=session.api_key, base_url=session.base_url, max_retries=0
            ) as client:
                (called,) = (await ask(client, [QUESTION])).choices
                assert called.finish_reason == "tool_calls"
                (call,) = called.message.tool_calls
                assert (call.function.name, json.loads(call.function.arguments)) == (
                    "add",
                    {"a": 3, "b": 4},
                )
                assert not called.message.content
                result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
                written = {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"id": call.id, "type": "function", "function": dict(call.function)}
                    ],
                }
                (answered,) = (await ask(client, [QUESTION, written, result])).choices
                assert answered.message.content == "Seven."
        finally:
            await gateway.aclose()

    asyncio.run(play())
