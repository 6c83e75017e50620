"""Response formats and forced tool calls: grammars for engines that support them."""

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel

from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.errors import GrammarError
from tests._support.scripted_gateway import ADD, CALL, open_recorded_session, post, running_gateway

HI = [{"role": "user", "content": "Hi."}]
FLAT = {"type": "function", **ADD["function"]}
ANTHROPIC_ADD = {
    "name": "add",
    "description": "Add.",
    "input_schema": ADD["function"]["parameters"],
}
SUM = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}


class Sum(BaseModel):
    sum: int


class GrammarEngine(ScriptedEngine):
    """Records the grammars that it gets."""

    takes_grammars = True

    def __init__(self, replies, is_able=True):
        super().__init__(replies)
        self.is_able = is_able
        self.grammars = []

    async def generate(self, prompt_ids, params, *, session=None):
        self.grammars.append(params.grammar)
        if not self.is_able:
            raise GrammarError("no backend for grammars")
        return await super().generate(prompt_ids, params, session=session)


def run(use, engine):
    async def play():
        async with running_gateway(engine) as (gateway, session):
            return await use(gateway, session)

    return asyncio.run(play())


def client_of(session):
    return openai.AsyncOpenAI(api_key=session.api_key, base_url=session.base_url, max_retries=0)


def test_response_formats_become_grammars():
    engine = GrammarEngine(lambda question: '{"sum": 7}')

    async def use(_, session):
        async with client_of(session) as client:
            chat = client.chat.completions
            await chat.create(model="x", messages=HI, response_format={"type": "text"})
            await chat.create(model="x", messages=HI, response_format={"type": "json_object"})
            parsed = await chat.parse(model="x", messages=HI, response_format=Sum)
            assert parsed.choices[0].message.parsed == Sum(sum=7)
            shape = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM}}
            stream = await chat.create(model="x", messages=HI, response_format=shape, stream=True)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(parts) == '{"sum": 7}'
            newer = await client.responses.parse(model="x", input="Hi.", text_format=Sum)
            assert newer.output_parsed == Sum(sum=7)

    run(use, engine)
    free, plain, *schemas = engine.grammars
    assert free is None
    assert plain == ("json_schema", '{"type": "object"}')
    assert {kind for kind, _ in schemas} == {"json_schema"}
    assert json.loads(schemas[1][1]) == SUM
    assert [json.loads(text)["required"] for _, text in schemas] == [["sum"]] * 3


SUB = {"type": "function", "function": {"name": "sub"}}


async def force_call_in_chat(session):
    async with client_of(session) as client:
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            answer = await client.chat.completions.create(
                model="x", messages=HI, tools=[ADD, SUB], tool_choice=choice
            )
            assert answer.choices[0].message.tool_calls[0].function.name == "add"


async def force_call_in_responses(session):
    options = {"tools": [FLAT], "parallel_tool_calls": False}
    async with client_of(session) as client:
        for choice in ("required", {"type": "function", "name": "add"}):
            await client.responses.create(model="x", input="Hi.", tool_choice=choice, **options)


async def force_call_in_anthropic_messages(session):
    import anthropic  # not by every process that collects tests

    async with anthropic.AsyncAnthropic(
        api_key=session.api_key, base_url=session.base_url.removesuffix("/v1"), max_retries=0
    ) as client:
        for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
            answer = await client.messages.create(
                model="x", max_tokens=99, messages=HI, tools=[ANTHROPIC_ADD], tool_choice=choice
            )
            assert answer.stop_reason == "tool_use"


def test_forced_tool_calls_become_structural_tags():
    engine = GrammarEngine(lambda question: CALL)

    async def use(_, session):
        await force_call_in_chat(session)
        await force_call_in_responses(session)
        await force_call_in_anthropic_messages(session)

    run(use, engine)
    shapes = []
    for kind, text in engine.grammars:
        assert kind == "structural_tag"
        tag = json.loads(text)
        assert tag["type"] == "structural_tag"
        shapes.append(tag["format"]["elements"])
    assert [len(elements) for elements in shapes] == [2, 1, 1, 1, 1, 1]
    add, subtract = shapes[0]
    assert add["begin"] == '<tool_call>\n{"name": "add", "arguments": '
    assert add["end"] == "}\n</tool_call>"
    assert add["content"]["json_schema"] == ADD["function"]["parameters"]
    assert subtract["content"]["json_schema"] == {"type": "object"}


JSON = {"response_format": {"type": "json_object"}}
FORCED = {"tools": [ADD], "tool_choice": "required"}


@pytest.mark.parametrize("form", [JSON, FORCED], ids=["json", "call"])
def test_grammars_are_refused_where_unsupported(form):
    async def use(gateway, session):
        return (await post(session, "/chat/completions", {"messages": HI, **form}))[:2]

    status, body = run(use, ScriptedEngine(["{}"]))
    assert status == 400
    assert "ScriptedEngine samples freely" in body["error"]["message"]
    assert body["error"]["param"] in form
    status, body = run(use, GrammarEngine(["{}"], is_able=False))
    assert status == 400
    assert "no backend for grammars" in body["error"]["message"]

    async def learn(gateway, session):
        training = open_recorded_session(gateway, GrammarEngine(["{}"]))
        refusal = await use(gateway, training)
        assert not training.recorder.turns
        return refusal

    status, body = run(learn, GrammarEngine(["{}"]))
    assert status == 400
    assert "learns from its answers" in body["error"]["message"]
    assert body["error"]["code"] == "unsupported_value"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"response_format": {"type": "yaml"}}, "json_schema are"),
        ({"response_format": {}}, None),
        ({"response_format": {"type": "json_schema"}}, "needs the schema"),
        ({"response_format": {"type": "json_schema", "json_schema": 5}}, "needs the schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "needs the"),
        ({"tool_choice": "required"}, "available: none"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [ADD]}, "add"),
        ({"tool_choice": {"type": "function", "function": 5}, "tools": [ADD]}, "not supported"),
        ({"tool_choice": "sometimes", "tools": [ADD]}, "auto, none, required"),
    ],
)
def test_malformed_response_formats_and_tool_choices_are_refused(form, message):
    async def use(gateway, session):
        return (await post(session, "/chat/completions", {"messages": HI, **form}))[:2]

    status, body = run(use, GrammarEngine(lambda question: "{}"))
    assert status == (200 if message is None else 400), body
    assert message is None or message in body["error"]["message"]
