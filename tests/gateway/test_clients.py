"""The unmodified official clients of OpenAI and Anthropic work with the gateway.

Anthropic's is imported by the tests that use it: every process collects all tests, and it takes
4 s of CPU time.
"""

import asyncio
import json

import openai
import pytest

from areal_gym.engines.scripted import ScriptedEngine
from tests._support.scripted_gateway import ADD, CALL, TokenwiseEngine, running_gateway

THOUGHT = "<think>Two words.</think>Hello, wörld 🙂."
FLAT = {"type": "function", **ADD["function"]}
ANTHROPIC_ADD = {
    "name": "add",
    "description": "Add.",
    "input_schema": ADD["function"]["parameters"],
}
HI = [{"role": "user", "content": "Hi."}]


def talk(replies, use, *, pause_s=None, **kwargs):
    """Run `use(session)` against a gateway with a scripted policy."""

    async def run():
        engine = ScriptedEngine(replies) if pause_s is None else TokenwiseEngine(replies, pause_s)
        async with running_gateway(engine, **kwargs) as (_, session):
            return await use(session)

    return asyncio.run(run())


def with_openai(use):
    async def run(session):
        async with openai.AsyncOpenAI(
            api_key=session.api_key, base_url=session.base_url, max_retries=0
        ) as client:
            return await use(client)

    return run


def with_anthropic(use):
    import anthropic

    async def run(session):
        async with anthropic.AsyncAnthropic(
            api_key=session.api_key, base_url=session.base_url.removesuffix("/v1"), max_retries=0
        ) as client:
            return await use(client)

    return run


def test_openai_chat_completion():
    async def use(client):
        answer = await client.chat.completions.create(
            model="gpt-anything", messages=HI, logprobs=True
        )
        assert answer.model == "gpt-anything"
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        assert choice.message.content == "Hello, wörld 🙂."
        assert choice.message.reasoning_content == "Two words."
        assert answer.usage.completion_tokens == len(THOUGHT.encode()) + 1
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(THOUGHT.encode()) + 1
        tokens = choice.logprobs.content
        assert len(tokens) == answer.usage.completion_tokens
        assert {token.logprob for token in tokens} == {-1.0}
        more = [*HI, {"role": "assistant", "content": choice.message.content}, *HI]
        second = await client.chat.completions.create(model="x", messages=more)
        first = answer.usage
        assert second.usage.prompt_tokens_details.cached_tokens == first.total_tokens

    talk(lambda question: THOUGHT, with_openai(use))


def test_blocking_openai_client():
    async def use(session):
        client = openai.OpenAI(api_key=session.api_key, base_url=session.base_url)

        def ask():
            with client:
                return client.chat.completions.create(model="x", messages=HI)

        answer = await asyncio.to_thread(ask)
        assert answer.choices[0].message.content == "Hello."

    talk(lambda question: "Hello.", use)


def test_openai_chat_stream():
    async def use(client):
        content, thought, num_chunks = "", "", 0
        async for chunk in await client.chat.completions.create(
            model="x", messages=HI, stream=True, stream_options={"include_usage": True}
        ):
            if not chunk.choices:
                assert chunk.usage.completion_tokens == len(THOUGHT.encode()) + 1
                continue
            num_chunks += 1
            delta = chunk.choices[0].delta
            content += delta.content or ""
            thought += getattr(delta, "reasoning_content", None) or ""
        assert (content, thought) == ("Hello, wörld 🙂.", "Two words.")
        assert chunk.usage is not None
        assert num_chunks > 10

    talk(lambda question: THOUGHT, with_openai(use), pause_s=0.001)


def test_parallel_tool_calls_and_their_results():
    def replies(question):
        return f"Both. {CALL}{CALL}" if question.turn == 0 else "It is 7."

    async def use(client):
        first = await client.chat.completions.create(model="x", messages=HI, tools=[ADD])
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Both."
        ids = [call.id for call in choice.message.tool_calls]
        assert len(set(ids)) == 2
        assert [json.loads(c.function.arguments) for c in choice.message.tool_calls] == [
            {"a": 3, "b": 4}
        ] * 2
        results = [{"role": "tool", "tool_call_id": id, "content": "7"} for id in ids]
        messages = [*HI, choice.message, *results]
        second = await client.chat.completions.create(model="x", messages=messages, tools=[ADD])
        assert second.choices[0].message.content == "It is 7."
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert cached == first.usage.total_tokens  # continued by ids
        plain = await client.chat.completions.create(model="x", messages=HI)
        assert plain.choices[0].message.content == f"Both. {CALL}{CALL}"  # no tools, no calls
        forbidden = await client.chat.completions.create(
            model="x", messages=HI, tools=[ADD], tool_choice="none"
        )
        assert forbidden.choices[0].message.tool_calls is None

    talk(replies, with_openai(use))


def test_openai_stream_with_tool_calls():
    async def use(client):
        async with client.chat.completions.stream(
            model="x", messages=HI, tools=[ADD], n=2
        ) as stream:
            kinds = [event.type async for event in stream]
            answer = await stream.get_final_completion()
        assert kinds.count("content.delta") > 4
        for choice in answer.choices:
            assert choice.message.content == "Let me add."
            assert choice.message.tool_calls[0].function.name == "add"
            assert choice.finish_reason == "tool_calls"

    talk(lambda question: f"Let me add. {CALL}", with_openai(use), pause_s=0.0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_stop_strings_end_an_answer_and_are_not_shown(is_stream):
    async def use(session):
        async def ask(client):
            answer = await client.chat.completions.create(
                model="x", messages=HI, stop=["END", "zzz"], stream=is_stream
            )
            if is_stream:
                chunks = [c.choices[0].delta.content async for c in answer]
                assert not any("E" in (c or "") for c in chunks)  # never sent, not even in part
                return "".join(filter(None, chunks))
            assert answer.choices[0].finish_reason == "stop"
            assert answer.usage.completion_tokens == len("One two END")
            return answer.choices[0].message.content

        assert await with_openai(ask)(session) == "One two "

    talk(lambda question: "One two ENDless three", use, pause_s=0.0)


def test_max_tokens_and_context_limits():
    async def use(client):
        cut = await client.chat.completions.create(model="x", messages=HI, max_tokens=3)
        assert cut.choices[0].finish_reason == "length"
        assert cut.choices[0].message.content == "aaa"
        # No hidden limit (trap 15): the answer may fill the context.
        free = await client.chat.completions.create(model="x", messages=HI)
        assert free.usage.total_tokens == 32768
        assert free.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError) as caught:  # trap 16
            await client.chat.completions.create(
                model="x", messages=[{"role": "user", "content": "x" * 40_000}]
            )
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.type == "invalid_request_error"

    talk(lambda question: "a" * 40_000, with_openai(use))


def test_unsupported_parameters_are_refused_by_name():
    async def use(client):
        for wrong in (
            {"logit_bias": {"5": 1.0}},
            {"frequency_penalty": 0.5},
            {"response_format": {"type": "json_object"}},
            {"tool_choice": "required", "tools": [ADD]},
            {"logprobs": True, "top_logprobs": 3},
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="x", messages=HI, **wrong)
            assert next(reversed(wrong)) in caught.value.message or "tool_choice" in wrong
            assert "not supported" in caught.value.message
        image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        with pytest.raises(
            openai.BadRequestError, match="has a picture, and this policy cannot see"
        ):
            await client.chat.completions.create(
                model="x", messages=[{"role": "user", "content": image}]
            )
        models = await client.models.list()
        assert [model.id for model in models.data] == ["policy"]
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt")

    talk(lambda question: "Hello.", with_openai(use))


def test_openai_text_completions():
    async def use(client):
        first = await client.completions.create(model="x", prompt="Once", logprobs=0)
        assert first.choices[0].text == " upon a time"
        assert len(first.choices[0].logprobs.token_logprobs) == first.usage.completion_tokens
        second = await client.completions.create(model="x", prompt="Once upon a time there was")
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert cached == first.usage.total_tokens
        stream = await client.completions.create(model="x", prompt="Once", stream=True, n=2)
        texts = {0: "", 1: ""}
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == {0: " upon a time", 1: " upon a time"}

    talk(lambda question: " upon a time", with_openai(use))


def test_openai_responses():
    async def use(client):
        first = await client.responses.create(model="x", input="Hi.", instructions="Be brief.")
        assert first.status == "completed"
        assert first.output_text == "Hello, wörld 🙂."
        assert [item.type for item in first.output] == ["reasoning", "message"]
        more = await client.responses.create(
            model="x", input="And?", instructions="Be brief.", previous_response_id=first.id
        )
        cached = more.usage.input_tokens_details.cached_tokens
        assert cached == first.usage.total_tokens
        whole = await client.responses.create(
            model="x",
            instructions="Be brief.",
            input=[
                {"role": "user", "content": "Hi."},
                *[item.model_dump() for item in first.output],
                {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
            ],
        )
        assert whole.usage.input_tokens_details.cached_tokens == 0  # a fork: trained on once
        assert whole.usage.input_tokens == more.usage.input_tokens
        with pytest.raises(openai.BadRequestError, match="has given no answer"):
            await client.responses.create(model="x", input="x", previous_response_id="resp_no")
        cut = await client.responses.create(model="x", input="Hi.", max_output_tokens=2)
        assert cut.status == "incomplete"
        assert cut.incomplete_details.reason == "max_output_tokens"

    talk(lambda question: THOUGHT, with_openai(use))


def test_openai_responses_with_tools():
    async def use(client):
        called = await client.responses.create(model="x", input="[add]", tools=[FLAT])
        assert [item.type for item in called.output] == ["message", "function_call"]
        answer = {
            "type": "function_call_output",
            "call_id": called.output[1].call_id,
            "output": "7",
        }
        history = [{"role": "user", "content": "[add]"}, *called.output, answer]
        last = await client.responses.create(model="x", input=history, tools=[FLAT])
        assert last.usage.input_tokens_details.cached_tokens == called.usage.total_tokens

    talk(lambda question: f"Both. {CALL}", with_openai(use))


def test_openai_responses_stream():
    def replies(question):
        return f"{THOUGHT}{CALL}"

    async def use(client):
        async with client.responses.stream(model="x", input="Hi.", tools=[FLAT]) as stream:
            events = [event async for event in stream]
            answer = await stream.get_final_response()
        assert [event.sequence_number for event in events] == sorted(
            {event.sequence_number for event in events}
        )
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        assert answer.output_text == "Hello, wörld 🙂."
        streamed = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert streamed == answer.output_text
        assert answer.output[2].arguments == '{"a": 3, "b": 4}'

    talk(replies, with_openai(use), pause_s=0.0)


def test_anthropic_messages_with_tools():
    import anthropic

    def replies(question):
        return f"Both. {CALL}" if question.turn == 0 else "It is 7."

    async def use(client):
        first = await client.messages.create(
            model="claude", max_tokens=500, system="Be brief.", messages=HI, tools=[ANTHROPIC_ADD]
        )
        assert first.stop_reason == "tool_use"
        text, call = first.content
        assert (text.text, call.name, call.input) == ("Both.", "add", {"a": 3, "b": 4})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "7"}
        messages = [
            *HI,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        second = await client.messages.create(
            model="claude",
            max_tokens=500,
            system="Be brief.",
            messages=messages,
            tools=[ANTHROPIC_ADD],
        )
        assert second.content[0].text == "It is 7."
        used = first.usage.input_tokens + first.usage.output_tokens
        assert second.usage.cache_read_input_tokens == used
        long = [{"role": "user", "content": "x" * 40_000}]
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(model="claude", max_tokens=9, messages=long)
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        stopped = await client.messages.create(
            model="claude", max_tokens=500, messages=HI, stop_sequences=["th."]
        )
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "th.")
        assert stopped.content[0].text == "Bo"

    talk(replies, with_anthropic(use))


def test_anthropic_messages_stream():
    async def use(client):
        async with client.messages.stream(
            model="claude", max_tokens=500, messages=HI, tools=[ANTHROPIC_ADD]
        ) as stream:
            streamed = "".join([text async for text in stream.text_stream])
            message = await stream.get_final_message()
        assert streamed == "Hello, wörld 🙂."
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[2].input == {"a": 3, "b": 4}
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens == len(f"{THOUGHT}{CALL}".encode()) + 1

    talk(lambda question: f"{THOUGHT}{CALL}", with_anthropic(use), pause_s=0.0)


def test_wrong_key_raises_the_clients_authentication_error():
    import anthropic

    async def use(session):
        async with openai.AsyncOpenAI(api_key="wrong", base_url=session.base_url) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.chat.completions.create(model="x", messages=HI)
            assert caught.value.code == "invalid_api_key"
        url = session.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(api_key="wrong", base_url=url) as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="x", messages=HI, max_tokens=5)

    talk(lambda question: "Hello.", use)
