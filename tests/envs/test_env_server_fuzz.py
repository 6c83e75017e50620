"""Fuzz every route of a served environment from its schema: no turn or session is lost."""

import asyncio
import json
import random

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import areal_gym
from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.checker import play
from areal_gym.envs.server.env_sessions import Sessions
from areal_gym.envs.server.http_server import EnvServer
from areal_gym.envs.server.wire_format import OWNER_HEADER, OpenEpisode, PlayTurn, owner_keys
from areal_gym.envs.tools import tool
from areal_gym.types import Task
from areal_gym.utils.http_servers.connections import ConnectionLimits
from tests._support.raw_http import exchange, odd_request, request, statuses
from tests._support.schema_noise import ODD, body_bytes, mutated, nested, value

CALL = {
    "id": "call-0",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
}
VALID_TURN = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Hm.",
    "tool_calls": [CALL, CALL],
}
BODIES = {
    ("POST", "/v1/sessions"): (OpenEpisode, {"seed": 3, "options": {"split": "test", "index": 1}}),
    ("POST", "/v1/sessions/{session}/reset"): (
        OpenEpisode,
        {"seed": 3, "options": {"task": {"id": "x", "data": {"a": 1, "b": 2}}}},
    ),
    ("POST", "/v1/sessions/{session}/step"): (PlayTurn, {"turn": 1, "message": VALID_TURN}),
}
WITHOUT_BODY = {
    ("GET", "/v1/env"),
    ("GET", "/v1/images/{sha256}"),
    ("GET", "/v1/sessions/{session}/gold"),
    ("GET", "/v1/sessions/{session}/noop"),
    ("DELETE", "/v1/sessions/{session}"),
}


class Sums(TextEnv):
    """Adds two numbers with a tool, then says the sum."""

    max_turns = 50

    @staticmethod
    def _add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tools = (tool(Sums._add),)

    def sample_task(self, rng, options):
        a, b = (int(rng.integers(100)) for _ in range(2))
        return Task(id=f"{a}+{b}", data={"a": a, "b": b})

    def first_messages(self, task):
        return [{"role": "user", "content": f"{task.data['a']} + {task.data['b']}?"}]

    async def respond(self, message):
        if message.get("tool_calls"):
            return Response(messages=(await self.call_tools(message)).messages)
        data = self.task.data
        return Response(
            reward=float(message["content"] == str(data["a"] + data["b"])), is_terminated=True
        )

    def gold_action(self):
        return str(self.task.data["a"] + self.task.data["b"])


MAKERS = {
    "sums": Sums,
    "math": lambda: areal_gym.make("math"),
    "countdown": lambda: areal_gym.make("countdown"),
}


class Serving:
    """An environment server with an HTTP client."""

    def __init__(self, make, **settings):
        self.sessions = Sessions(make)
        self.server = EnvServer(self.sessions, "served", **settings)

    async def __aenter__(self):
        await self.sessions.__aenter__()
        await self.server.__aenter__()
        self.http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *exc_info):
        await self.http.close()
        await self.server.__aexit__(*exc_info)
        await self.sessions.__aexit__(*exc_info)

    async def ask(self, method, path, body=None, headers=None):
        """Return status and content of an answer."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        url = self.server.url + path
        async with self.http.request(method, url, data=data, headers=headers) as answer:
            return answer.status, json.loads(await answer.text())

    async def open(self, seed):
        status, content = await self.ask("POST", "/v1/sessions", {"seed": seed})
        assert status == 200
        return content["session"]


def test_fuzz_covers_every_route_of_the_env_server():
    async def use():
        async with Serving(Sums) as served:
            routes = served.server._site.runner.app.router.routes()
            return {(route.method, route.resource.canonical) for route in routes}

    routes = {(method, path) for method, path in asyncio.run(use()) if method != "HEAD"}
    assert routes == set(BODIES) | WITHOUT_BODY


@pytest.mark.parametrize("name", ["0" * 64, "..%2f..%2fetc%2fpasswd", "%00", "A" * 64, "0" * 200])
def test_pictures_that_the_store_has_not_are_refused(name):
    async def use():
        async with Serving(Sums) as served:
            return await served.ask("GET", f"/v1/images/{name}")

    status, content = asyncio.run(use())
    assert 400 <= status < 500, (status, content)


def malformed_body(rng, model, valid):
    schema = model.model_json_schema()
    if rng.random() < 0.6:
        return body_bytes(mutated(valid, rng), rng)
    return body_bytes(value(schema, schema.get("$defs", {}), rng), rng)


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_env_server_refuses_malformed_bodies_and_keeps_the_episode(name, seed):
    rng = random.Random(seed)
    local = MAKERS[name]()
    local.reset(seed=7)

    async def use():
        async with Serving(MAKERS[name]) as served:
            session = await served.open(7)
            for _ in range(10):
                method, path = rng.choice([*BODIES, ("GET", "/v1/sessions/{session}/noop")])
                model, valid = BODIES.get((method, path), (OpenEpisode, {"seed": 1}))
                body = None if method == "GET" else malformed_body(rng, model, valid)
                # Bodies that happen to be valid are played in another session.
                place = path.replace("{session}", await served.open(7))
                status, content = await served.ask(method, place, body)
                assert status < 500, (path, body, content)
                if status >= 400:
                    assert content["error"]["message"]
                    place = path.replace("{session}", session)
                    assert (await served.ask(method, place, body))[0] in (400, 404, 413, 422)
                    assert served.sessions.get(session).env.num_turns == 0
                    assert served.sessions.get(session).env.messages == local.messages
            gold = {"turn": 1, "message": local.gold_action()}
            status, content = await served.ask("POST", f"/v1/sessions/{session}/step", gold)
            assert (status, content["reward"]) == (200, 1.0)

    asyncio.run(use())


def test_refused_reset_keeps_the_episode():
    async def use():
        async with Serving(lambda: areal_gym.make("countdown")) as served:
            session = await served.open(7)
            env = served.sessions.get(session).env
            before = env.task, list(env.messages), env.np_random.bit_generator.state
            for options in ({"split": "dev"}, {"task": 5}, {"task": {"id": 1}}, {"task": {}}):
                body = {"seed": 1, "options": options}
                status, _ = await served.ask("POST", f"/v1/sessions/{session}/reset", body)
                assert status == 400, options
            after = env.task, list(env.messages), env.np_random.bit_generator.state
            assert before == after

    asyncio.run(use())


def test_repeated_turn_after_a_refused_one_is_answered_again():
    async def use():
        async with Serving(Sums) as served:
            path = f"/v1/sessions/{await served.open(1)}/step"
            last = {"turn": 1, "message": "no number"}
            first = await served.ask("POST", path, last)
            assert first[1]["terminated"]
            assert (await served.ask("POST", path, {"turn": 2, "message": "more"}))[0] == 400
            assert await served.ask("POST", path, last) == first

    asyncio.run(use())


def test_gold_action_needs_the_owner_key():
    async def use():
        async with Serving(Sums, owner_key="owner") as served:
            session = await served.open(1)
            for headers in ({}, {OWNER_HEADER: "player"}, {OWNER_HEADER: session}):
                status, content = await served.ask(
                    "GET", f"/v1/sessions/{session}/gold", headers=headers
                )
                assert (status, "action" in content) == (403, False)
                assert (await served.ask("GET", "/v1/env", headers=headers))[1]["has_gold"] is False
            owner = {OWNER_HEADER: "owner"}
            assert (await served.ask("GET", "/v1/env", headers=owner))[1]["has_gold"] is True
            status, content = await served.ask("GET", f"/v1/sessions/{session}/gold", headers=owner)
            assert (status, content["action"]) == (
                200,
                served.sessions.get(session).env.gold_action(),
            )

    asyncio.run(use())


def test_player_without_owner_key_can_play():
    local = Sums()

    async def use():
        async with Serving(Sums) as served:
            # As in another process, which does not have the key.
            owner_keys.clear()
            return await asyncio.to_thread(play_remote, f"remote:{served.server.url}")

    def play_remote(id):
        remote = areal_gym.make(id)
        assert remote.has_gold is False
        remote.reset(seed=3)
        with pytest.raises(areal_gym.UsageError, match="gold is for"):
            remote.gold_action()
        local.reset(seed=3)
        try:
            return play(remote, lambda env: local.gold_action(), seed=3)
        finally:
            remote.close()

    assert asyncio.run(use()) == play(Sums(), Sums.gold_action, seed=3)


def test_env_server_survives_malformed_http():
    rng = random.Random(23)
    limits = ConnectionLimits(header_s=2.0, body_s=2.0, idle_s=2.0)

    async def use():
        async with Serving(Sums, limits=limits) as served:
            port, session = served.server._port, await served.open(1)
            paths = [path.replace("{session}", session) for _, path in [*BODIES, *WITHOUT_BODY]]
            paths = [path for path in paths if not path.endswith(session)]
            bodies = [b"", b"x", *(json.dumps(valid).encode() for _, valid in BODIES.values())]
            odd = [odd_request(rng, paths, bodies) for _ in range(200)]
            answers = await asyncio.gather(*(exchange(port, raw, ends=False) for raw in odd))
            for raw, answer in zip(odd, answers, strict=True):
                assert all(status < 500 for status in statuses(answer)), (raw, answer)
            for host in ("[", "[::1", "a b", "\u00b2", "evil.example", ""):
                raw = request("GET", "/v1/env", b"", [("Host", host)])
                raw = raw.replace(b"Host: 127.0.0.1\r\n", b"")
                assert statuses(await exchange(port, raw, ends=False)) in ([400], [401]), host
            assert await served.open(2)

    asyncio.run(use())


def test_odd_json_values_reach_the_environment():
    async def use():
        async with Serving(Sums) as served:
            path = f"/v1/sessions/{await served.open(1)}/step"
            values = [*ODD, json.loads(nested(200)), json.loads(nested(200, "{"))]
            for turn, item in enumerate(values, start=1):
                call = {"name": "_add", "arguments": {"a": item, "b": 1}}
                message = {"content": "", "tool_calls": [{"function": call}]}
                body = {"turn": turn, "message": message}
                status, content = await served.ask("POST", path, body)
                assert status == 200, (item, content)
                if content["truncated"]:
                    break

    asyncio.run(use())
