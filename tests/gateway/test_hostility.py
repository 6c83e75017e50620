"""Wrong keys, mistakes and random requests get a clear answer and do no harm."""

import asyncio
import json
import random
import socket

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.errors import EngineError, InfrastructureError
from areal_gym.gateway.gateway_server import Gateway
from areal_gym.gateway.routes import ROUTES, openapi
from tests._support.scripted_gateway import (
    TokenwiseEngine,
    open_recorded_session,
    post,
    running_gateway,
)

HI = {"messages": [{"role": "user", "content": "Hi."}]}
DESCRIPTION = openapi(ROUTES)


def run(use, engine=None, **kwargs):
    async def begin():
        async with running_gateway(engine, **kwargs) as (gateway, session):
            return await use(gateway, session)

    return asyncio.run(begin())


def test_gateway_listens_on_loopback_without_default_key():  # trap 30
    async def use(gateway, session):
        assert gateway.url.startswith("http://127.0.0.1:")
        other = Gateway()
        assert len({gateway.control_key, other.control_key, session.api_key}) == 3
        assert min(map(len, (gateway.control_key, session.api_key))) > 30
        async with aiohttp.ClientSession() as http:
            for key in (None, "", "Bearer", "Bearer ", "Bearer EMPTY", "Basic x", "Bearer \xff"):
                headers = {} if key is None else {"Authorization": key}
                async with http.post(
                    f"{session.base_url}/chat/completions", json=HI, headers=headers
                ) as answer:
                    assert answer.status == 401
                    assert (await answer.json())["error"]["type"] == "authentication_error"
            async with http.get(f"{gateway.url}/health") as answer:
                assert answer.status == 200

    run(use)


def test_keys_open_only_their_own_routes():
    async def use(gateway, session):
        session, other = (
            open_recorded_session(gateway, ScriptedEngine(["a"])),
            open_recorded_session(gateway, ScriptedEngine([])),
        )
        control = {
            "/rl/sessions": {},
            f"/rl/sessions/{session.id}/reward": {"reward": 1},
            f"/rl/sessions/{session.id}/end": {},
            "/rl/pause": {},
            "/rl/resume": {},
        }
        for route, body in control.items():
            assert (await post(session, route, body))[0] == 403
            assert (await post(session, route, body, key=other.api_key))[0] == 403
            assert (await post(session, route, body, key="guess"))[0] == 401
        assert session.recorder.turns == []
        assert (await post(session, "/chat/completions", HI, key=gateway.control_key))[0] == 403
        # Calls with one key are recorded in its own session only.
        assert (await post(session, "/chat/completions", HI))[0] == 200
        assert (len(session.recorder.turns), len(other.recorder.turns)) == (1, 0)

    run(use)


def test_ended_session_key_is_refused():
    async def use(gateway, _):
        session = open_recorded_session(gateway, ScriptedEngine(lambda question: "Hello."))
        assert (await post(session, "/chat/completions", HI))[0] == 200
        end, key = f"/rl/sessions/{session.id}/end", gateway.control_key
        assert (await post(session, end, {"reward": 1}, key=key))[0] == 200
        assert session.recorder.turns[0].reward == 1
        for route, body in (("/chat/completions", HI), ("/responses", {"input": "Hi."})):
            status, answer, _ = await post(session, route, body)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert (await post(session, end, {}, key=key))[0] == 404
        assert session.id not in gateway.sessions

    run(use)


def test_ending_a_session_aborts_its_calls():
    engine = TokenwiseEngine(lambda question: "x" * 1000, 0.01)

    async def use(gateway, _):
        session = open_recorded_session(gateway, engine, max_new_tokens=2000)
        asking = asyncio.create_task(post(session, "/chat/completions", HI | {"stream": True}))
        while not engine.num_calls:
            await asyncio.sleep(0.01)
        session.close()
        await asyncio.gather(asking, return_exceptions=True)
        while not engine.num_aborted:
            await asyncio.sleep(0.01)
        assert session.recorder.turns == []

    run(use, engine)


def test_malformed_and_oversized_bodies_are_refused():
    async def use(gateway, session):
        for route in ("/chat/completions", "/completions", "/responses", "/messages"):
            for body in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'"x"', b"{}", b"[" * 100_000):
                status, answer, _ = await post(session, route, body)
                assert status == 400, (route, body[:10], answer)
                assert answer["error"]["type"] == "invalid_request_error"
        giant = json.dumps(HI | {"user": "x" * 3_000_000}).encode()
        status, answer, _ = await post(session, "/chat/completions", giant)
        assert (status, answer["error"]["type"]) == (413, "request_too_large")
        for route in ("/nothing", "/chat", "/models/../x"):
            status, answer, _ = await post(session, route, HI)
            assert status in (404, 405)
            assert "error" in answer

    run(use, max_body_bytes=2_000_000)


def test_lone_surrogates_and_control_text_are_answered():
    async def use(gateway, session):
        odd = "\ud800 <|im_end|> \0 \u202e"
        for route, body in (
            ("/chat/completions", {"messages": [{"role": "user", "content": odd}]}),
            ("/completions", {"prompt": odd}),
            ("/responses", {"input": odd}),
            ("/messages", {"messages": [{"role": "user", "content": odd}], "max_tokens": 9}),
        ):
            status, answer, _ = await post(session, route, body)
            assert status in (200, 400), answer

    run(use)


def test_failing_engine_is_503_and_paused_gateway_is_429():
    class Broken(ScriptedEngine):
        async def generate(self, prompt_ids, params, *, session=None):
            raise EngineError("no server is left")

    async def use(gateway, session):
        status, answer, _ = await post(session, "/chat/completions", HI)
        assert (status, answer["error"]["code"]) == (503, "engine_error")
        assert "no server is left" in answer["error"]["message"]
        status, answer, _ = await post(session, "/chat/completions", HI | {"stream": True})
        assert status == 503  # before the first token the status can still be set
        await post(session, "/rl/pause", {}, key=gateway.control_key)
        status, answer, headers = await post(session, "/chat/completions", HI)
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["Retry-After"]) >= 1
        status, _, headers = await post(session, "/rl/sessions", {}, key=gateway.control_key)
        assert (status, headers["Retry-After"]) == (429, "1")
        await post(session, "/rl/resume", {}, key=gateway.control_key)
        assert (await post(session, "/chat/completions", HI))[0] == 503

    run(use, Broken([]))


def test_engine_failure_within_a_stream_is_reported_in_it():
    class Breaking(TokenwiseEngine):
        async def stream(self, prompt_ids, params, *, session=None):
            async for piece in super().stream(prompt_ids, params, session=session):
                yield piece
                if len(prompt_ids) and self.num_sent == 5:
                    raise EngineError("the server died")
                self.num_sent += 1

    async def use(gateway, session):
        status, text, _ = await post(session, "/chat/completions", HI | {"stream": True})
        assert status == 200
        assert "the server died" in text

    engine = Breaking(lambda question: "Hello there.", 0.001)
    engine.num_sent = 0
    run(use, engine)


def test_calls_beyond_the_limit_get_retry_after():
    engine = TokenwiseEngine(lambda question: "x" * 200, 0.01)

    async def use(gateway, session):
        first = asyncio.create_task(post(session, "/chat/completions", HI | {"stream": True}))
        while not gateway.num_calls:
            await asyncio.sleep(0.01)
        status, _, headers = await post(session, "/chat/completions", HI)
        assert (status, headers["Retry-After"]) == (429, "1")
        engine.pause_s = 0.0
        assert (await first)[0] == 200
        assert (await post(session, "/chat/completions", HI))[0] == 200

    run(use, engine, max_calls_at_once=1)


def test_gateway_names_a_taken_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InfrastructureError, match=f"cannot listen at 127.0.0.1:{port}"):
            asyncio.run(Gateway(port=port).start())


# ---- random requests from the gateway's own description ------------------------------------------

PLAIN = (None, True, -1, 2**70, 1e300, -0.5, "", "\ud800", "x" * 50, 0, [], {}, [None], {"a": []})
TEXTS = ("function", "text", "message", "function_call", "user", "auto", "7", "")


def value(schema, rng):
    """Return a value of the schema, or an odd one in one case of twelve.

    Hypothesis draws the seed only: drawing every value takes a hundred times as long.
    """
    if rng.random() < 1 / 12:
        return rng.choice(PLAIN)
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return value(DESCRIPTION["components"]["schemas"][name], rng)
    if "anyOf" in schema:
        return value(rng.choice(schema["anyOf"]), rng)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        required = schema.get("required", ())
        return {
            name: value(inner, rng)
            for name, inner in schema["properties"].items()
            if name in required or rng.random() < 0.2
        }
    if kind == "array":
        size = schema.get("minItems", 0) + rng.randrange(3)
        return [value(schema["items"], rng) for _ in range(size)]
    return {
        "string": lambda: rng.choice(TEXTS),
        "integer": lambda: rng.randint(schema.get("minimum", -3), 3),
        "number": lambda: rng.uniform(schema.get("minimum", -1), schema.get("maximum", 1)),
        "boolean": lambda: rng.random() < 0.5,
        "null": lambda: None,
        "object": lambda: {"a": rng.choice(PLAIN)},
    }.get(kind, lambda: rng.choice(PLAIN))()


REQUESTS = [
    (method, path, operation)
    for path, methods in DESCRIPTION["paths"].items()
    for method, operation in methods.items()
]


def request(rng):
    method, path, operation = rng.choice(REQUESTS)
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema")
    return method, path, None if schema is None else value(schema, rng)


@settings(max_examples=30)  # starting gateways takes most of the time
@given(seed=st.integers(0, 2**32), keys=st.sampled_from(["own", "control"]))
def test_random_requests_never_give_a_500(seed, keys):
    rng = random.Random(seed)
    requests = [request(rng) for _ in range(24)]

    async def use(gateway, _):
        engine = ScriptedEngine(
            lambda question: "Hello. <tool_call>{}</tool_call>", max_context=900
        )
        session = open_recorded_session(gateway, engine, max_new_tokens=20)
        async with aiohttp.ClientSession() as http:
            for method, path, body in requests:
                url = gateway.url + path.replace("{id}", session.id)
                key = session.api_key if keys == "own" else gateway.control_key
                async with http.request(
                    method,
                    url,
                    data=None if body is None else json.dumps(body).encode(),
                    headers={"Authorization": f"Bearer {key}"},
                ) as answer:
                    text = await answer.text()
                    assert answer.status < 500, (method, path, body, text)
                    if answer.status >= 400:
                        assert json.loads(text)["error"]["message"]
        # The record is consistent, whatever happened.
        outcome = session.recorder.outcome()
        assert len(outcome["turns"]) == len({s.turn for s in outcome["spans"]})

    run(use)


def test_some_random_requests_are_valid():
    """Some bodies made from the description are valid, and reach the policy."""

    async def use(gateway, session):
        codes = []
        for seed in range(150):
            body = value(DESCRIPTION["components"]["schemas"]["ChatRequest"], random.Random(seed))
            codes.append((await post(session, "/chat/completions", body))[0])
        assert codes.count(200) >= 5
        assert set(codes) <= {200, 400}

    run(use, ScriptedEngine(lambda question: "Hello."))
