"""Fuzz every route of the gateway from its schema: clear refusals, and no turn lost."""

import asyncio
import json
import random

import aiohttp
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.gateway.routes import ROUTES, openapi
from areal_gym.utils.http_servers.connections import ConnectionLimits
from tests._support.raw_http import exchange, odd_request, request, statuses
from tests._support.schema_noise import body_bytes, mutated, value
from tests._support.scripted_gateway import CALL, open_recorded_session, running_gateway

HI = [{"role": "user", "content": "Hi."}]
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALLED = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
VALID = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi."}]},
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "content": "2", "tool_call_id": "c"},
        ],
        "tools": [{"type": "function", "function": ADD}],
        "tool_choice": "auto",
        "max_tokens": 9,
        "stop": ["x"],
        "seed": 3,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"prompt": "Once", "max_tokens": 9, "logprobs": 1, "stop": "x"},
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "2"},
        ],
        "tools": [{"type": "function", **ADD}],
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi."}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "2"}],
            },
        ],
        "tools": [{"name": "add", "input_schema": ADD["parameters"]}],
        "tool_choice": {"type": "auto"},
        "max_tokens": 9,
    },
    "/v1/rl/tool": {"call_id": "call00000"},
    "/v1/rl/answer": {"content": "7"},
    "/v1/rl/sessions": {"task": "one"},
    "/v1/rl/sessions/{id}/reward": {"reward": 0.5, "answer_id": "x"},
    "/v1/rl/sessions/{id}/end": {"reward": 0.5, "error": "x"},
    "/v1/rl/pause": {"a": 1},
    "/v1/rl/resume": {"a": 1},
}
"""A request with most fields for each route that takes a body; a new route needs one."""
TABLE = ROUTES
SCHEMAS = openapi(TABLE)["components"]["schemas"]
POLICY = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def engine():
    return ScriptedEngine(lambda question: f"Hello. {CALL}", max_context=2000)


def test_fuzz_covers_every_route_of_the_gateway():
    async def use():
        async with running_gateway() as (gateway, _):
            routes = gateway._site.runner.app.router.routes()
            return {(route.method, route.resource.canonical) for route in routes}

    served = {(method, path) for method, path in asyncio.run(use()) if method != "HEAD"}
    # Below /role/ROLE are the same routes again, for episodes that several roles play.
    roles = {(method, path) for method, path in served if path.startswith("/role/{role}/")}
    assert {path.removeprefix("/role/{role}") for _, path in roles} <= {r.path for r in TABLE}
    assert served - roles == {(r.method, r.path) for r in TABLE} | {("GET", "/openapi.json")}
    assert {r.path for r in TABLE if r.body is not None} == set(VALID)
    assert all(r.body is not None for r in TABLE if r.method == "POST")


def malformed_body(route, rng):
    """Return a body for the route: malformed, or valid by chance."""
    if route.body is None:
        return rng.choice((b"", b"{}", b"x"))
    if rng.random() < 0.5:
        return body_bytes(mutated(VALID[route.path], rng), rng)
    return body_bytes(value(SCHEMAS[route.body.__name__], SCHEMAS, rng), rng)


def check_refusal(path, status, text):
    """Check that a refusal has the form that the API's clients read."""
    error = json.loads(text)
    if path.startswith("/v1/messages"):
        assert error["type"] == "error"
    assert error["error"]["message"], (path, text)
    assert error["error"]["type"] != "api_error", (path, text)
    assert status in (400, 401, 403, 404, 405, 408, 413, 429), (path, status, text)


async def ask(http, method, url, key, body):
    headers = {"Authorization": f"Bearer {key}"}
    async with http.request(method, url, data=body, headers=headers) as answer:
        return answer.status, await answer.text()


async def check_normal_turn(gateway, http, session):
    """Check that a normal turn of the session still works."""
    turns = len(session.recorder.turns)
    url = f"{gateway.url}/v1/chat/completions"
    status, text = await ask(
        http, "POST", url, session.api_key, json.dumps({"messages": HI}).encode()
    )
    assert status == 200, text
    assert json.loads(text)["choices"][0]["message"]["content"] == f"Hello. {CALL}"
    assert len(session.recorder.turns) == turns + 1


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_gateway_refuses_malformed_bodies_and_keeps_turns(seed):
    rng = random.Random(seed)

    async def use():
        async with running_gateway(engine()) as (gateway, _), aiohttp.ClientSession() as http:
            session = open_recorded_session(gateway, engine(), max_new_tokens=200)
            other = open_recorded_session(gateway, engine())
            num_answers = 0
            for route in rng.choices(TABLE, k=10):
                key = gateway.control_key if route.key == "control" else session.api_key
                # The control key may end a session, hence the other one.
                path = route.path.replace("{id}", other.id)
                body = malformed_body(route, rng)
                turns = len(session.recorder.turns)
                status, text = await ask(http, route.method, gateway.url + path, key, body)
                if status >= 400:
                    check_refusal(path, status, text)
                    assert len(session.recorder.turns) == turns, (path, body)
                elif route.path in POLICY:
                    num_answers += 1
                    assert len(session.recorder.turns) > turns, (path, body)
                gateway.is_paused = False
            assert len(session.recorder.turns) >= num_answers
            await check_normal_turn(gateway, http, session)
            outcome = session.recorder.outcome()
            assert len(outcome["turns"]) == len({span.turn for span in outcome["spans"]})

    asyncio.run(use())


def test_gateway_accepts_the_valid_fuzz_requests():
    """The bodies that the fuzz mutates are valid, so that mutations reach the policy."""

    async def use():
        async with running_gateway(engine()) as (gateway, session), aiohttp.ClientSession() as http:
            for path in POLICY:
                body = json.dumps(VALID[path]).encode()
                url = gateway.url + path
                status, text = await ask(http, "POST", url, session.api_key, body)
                assert status == 200, (path, text)

    asyncio.run(use())


def test_gateway_survives_malformed_http():
    rng = random.Random(17)
    limits = ConnectionLimits(header_s=2.0, body_s=2.0, idle_s=2.0)

    async def use():
        async with running_gateway(engine(), limits=limits) as (gateway, _):
            session = open_recorded_session(gateway, engine())
            key = b"Authorization: Bearer " + session.api_key.encode() + b"\r\n"
            paths = [route.path for route in TABLE]
            bodies = [b"", b"x", *(json.dumps(body).encode() for body in VALID.values())]
            odd = [odd_request(rng, paths, bodies) for _ in range(250)]
            # Half of them with a key: without one, only authentication would be tested.
            odd = [
                raw.replace(b"\r\n", b"\r\n" + key, 1) if place % 2 else raw
                for place, raw in enumerate(odd)
            ]
            answers = await asyncio.gather(
                *(exchange(gateway._port, raw, ends=False) for raw in odd)
            )
            for raw, answer in zip(odd, answers, strict=True):
                assert all(status < 500 for status in statuses(answer)), (raw, answer)
            async with aiohttp.ClientSession() as http:
                await check_normal_turn(gateway, http, session)

    asyncio.run(use())


def test_gateway_answers_unknown_encodings_and_hosts():
    async def use():
        async with running_gateway(engine()) as (gateway, session):
            body = json.dumps({"messages": HI}).encode()
            for encoding in ("gzip", "deflate", "br", "zstd", "gzip, deflate", "no-such"):
                raw = request(
                    "POST",
                    "/v1/chat/completions",
                    body,
                    [("Content-Encoding", encoding), ("x-api-key", session.api_key)],
                )
                (status,) = statuses(await exchange(gateway._port, raw, ends=False))
                # Unknown encodings are ignored.
                assert status in (200, 400, 415), encoding
            for host in ("[", "]", "[::1", "a b", "\u00b2", "127.0.0.1:99999"):
                raw = request("GET", "/health", b"", [("Host", host)])
                raw = raw.replace(b"Host: 127.0.0.1\r\n", b"")
                (status,) = statuses(await exchange(gateway._port, raw, ends=False))
                assert status in (200, 400), host

    asyncio.run(use())
