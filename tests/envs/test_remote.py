"""A remote environment behaves like a local instance."""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest

import areal_gym
from areal_gym.envs.checker import check_env, play
from areal_gym.envs.server import remote_env as client
from areal_gym.envs.server.env_sessions import FullError, GoneError, Sessions
from areal_gym.envs.server.http_server import EnvServer, made_up_token
from areal_gym.envs.server.remote_env import TOKEN_VARIABLE, RemoteEnv
from areal_gym.errors import EnvError, InfrastructureError, RewardError, SandboxError, UsageError
from areal_gym.utils.http_servers.addresses import is_loopback


@contextmanager
def serving(make, env_id="served", *, max_sessions=4096, idle_s=600.0, **settings):
    """Run the server on its own thread and event loop."""
    sessions = Sessions(make, max_sessions=max_sessions, idle_s=idle_s)
    ready, failures, box = threading.Event(), [], {}

    async def serve():
        box["stop"] = asyncio.Event()
        box["loop"] = asyncio.get_running_loop()
        async with sessions, EnvServer(sessions, env_id, **settings) as server:
            box["server"] = server
            ready.set()
            await box["stop"].wait()

    def run():
        try:
            asyncio.run(serve())
        except BaseException as error:
            failures.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    if failures:
        thread.join()
        raise failures[0]
    try:
        yield box["server"]
    finally:
        box["loop"].call_soon_threadsafe(box["stop"].set)
        thread.join()


@pytest.fixture(autouse=True)
def clear_card_cache():
    client._cards.clear()


@pytest.fixture(scope="module")
def tir():
    with serving(lambda: areal_gym.make("tir"), "tir") as server:
        yield server


def gold(env):
    return env.gold_action()


def noop(env):
    return env.noop_action()


# ---- the same episodes --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [gold, noop], ids=["gold", "noop"])
def test_remote_episodes_equal_local_ones(tir, policy):
    remote, local = areal_gym.make(f"remote:{tir.url}"), areal_gym.make("tir")
    for seed in range(4):
        assert play(remote, policy, seed=seed) == play(local, policy, seed=seed)
        assert remote.messages == local.messages
        assert remote.task == local.task
    for options in ({"split": "test", "index": np.int64(3)}, {"task": local.task}):
        episodes = [play(env, policy, options=options) for env in (remote, local)]
        assert episodes[0] == episodes[1]
    assert [t.schema() for t in remote.tools] == [t.schema() for t in local.tools]
    assert (remote.max_turns, remote.num_tasks("test")) == (local.max_turns, None)
    remote.close()


def test_remote_environment_passes_the_checker(tir):
    results = check_env(lambda: RemoteEnv(tir.url), num_tasks=4, num_concurrent=64)
    assert [result for result in results if not result.is_ok] == []
    assert len(tir.sessions) < 16, "sessions are ended with their episodes"


def test_remote_environment_inside_a_mix(tir):
    mixed = areal_gym.make("mix", envs=[{"id": f"remote:{tir.url}", "name": "far"}, {"id": "math"}])

    async def episodes():
        rewards, names = [], set()
        for seed in range(12):
            _, info = await mixed.areset(seed=seed)
            again = (await mixed.areset(seed=seed, options={"task": info["task"]}))[1]
            assert again["task_id"] == info["task_id"]
            assert again["messages"] == info["messages"]
            names.add(mixed.played_id)
            result = None
            while result is None or not (result.terminated or result.truncated):
                result = await mixed.astep(mixed.gold_action())
            rewards.append(result.reward)
        await mixed.aclose()
        return rewards, names

    rewards, names = asyncio.run(episodes())
    assert rewards == [1.0] * 12
    assert names == {"far", "math"}


def test_remote_file_environment_has_its_number_of_tasks(tmp_path):
    rows = [{"question": f"{i} + 1 = ?", "answer": str(i + 1)} for i in range(30)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make():
        return areal_gym.make("math", tasks=str(path))

    with serving(make) as server:
        remote, local = RemoteEnv(server.url), make()
        assert remote.num_tasks("train") == local.num_tasks("train") < 30
        with pytest.raises(UsageError, match=r"has \d+ such tasks"):
            remote.reset(options={"index": 30})
        with pytest.raises(UsageError, match="no split 'dev'"):
            remote.num_tasks("dev")


def test_each_event_loop_has_its_own_connections(tir):
    local = play(areal_gym.make("tir"), gold, seed=5)

    async def episode():
        env = RemoteEnv(tir.url)
        await env.areset(seed=5)
        steps = [await env.astep(env.gold_action()), await env.astep(env.gold_action())]
        await env.aclose()
        return steps

    async def several():
        return await asyncio.gather(*(episode() for _ in range(8)))

    for _ in range(2):
        assert all(steps == local for steps in asyncio.run(several()))


# ---- failures -----------------------------------------------------------------------------------


class Failing(areal_gym.TextEnv):
    """Fails in the way that the message names."""

    max_turns = 4

    def sample_task(self, rng, options):
        return areal_gym.Task(id="x", data={})

    def first_messages(self, task):
        return [{"role": "user", "content": "How?"}]

    async def respond(self, message):
        match message["content"]:
            case "sandbox":
                raise SandboxError("no walls", hints=["build some"])
            case "bug":
                return 1 / 0
            case "bad reward":
                return areal_gym.Response(reward=float("nan"))
            case "bad part":
                return areal_gym.Response(reward_parts={"format": float("nan")})
            case "bad key":
                return areal_gym.Response(state_key=["room", 1])
            case "limit":
                return areal_gym.Response(is_truncated=True, reward=0.25)
            case _:
                return areal_gym.Response(messages=[{"role": "user", "content": "How?"}])


def test_remote_failures_keep_their_kind():
    with serving(Failing) as server:
        env = RemoteEnv(server.url)
        for action, error, text in (
            ("sandbox", SandboxError, "no walls"),
            ("bug", EnvError, "ZeroDivisionError"),
            ("bad reward", RewardError, "a finite number is needed"),
            ("bad part", RewardError, "Failing.respond gave the part of the reward 'format' = nan"),
            ("bad key", EnvError, "Failing.respond gave the state_key"),
        ):
            env.reset(seed=0)
            with pytest.raises(error, match=text) as caught:
                env.step(action)
            assert caught.value.boundary == error.boundary
        env.reset(seed=0)
        step = env.step("limit")
        assert (step.reward, step.terminated, step.truncated) == (0.25, False, True)
        assert step.info["truncated_by"] == "env"
        with pytest.raises(UsageError, match="the episode is over"):
            env.step("again")
        env.reset(seed=0)
        steps = [env.step("on") for _ in range(4)]
        assert [step.truncated for step in steps] == [False, False, False, True]
        assert steps[-1].info["truncated_by"] == "max_turns"
        with pytest.raises(EnvError, match="NotImplementedError"):
            env.gold_action()
        env.close()


def test_lost_env_server_is_an_env_error():
    with serving(Failing) as server:
        env = RemoteEnv(server.url)
        env.reset(seed=0)
    with pytest.raises(EnvError, match="cannot reach the environment") as caught:
        env.step("on")
    assert "areal-gym serve-env" in caught.value.hints[0]
    with pytest.raises(EnvError, match="cannot reach"):
        env.reset(seed=0)
    env.close()


def test_restarted_env_server_has_no_old_sessions():
    with serving(Failing) as server:
        env = RemoteEnv(server.url)
        env.reset(seed=0)
        port = server._port
    with serving(Failing, port=port):
        with pytest.raises(EnvError, match="no such session"):
            env.step("on")
        env.close()
        env.reset(seed=0)
        env.close()
    with serving(lambda: areal_gym.make("countdown"), port=port):
        with pytest.raises(EnvError, match="serves another environment"):
            env.reset(seed=0)
        env.close()


def test_invalid_remote_address_is_refused():
    with pytest.raises(UsageError, match="not the address"):
        RemoteEnv("localhost:80")
    with pytest.raises(UsageError) as caught:
        areal_gym.make("remote")
    assert caught.value.hints[0] == "name it after a colon: remote:<url>"


def test_repeated_turn_is_not_played_twice():
    async def ask_twice():
        async with Sessions(Failing) as sessions:
            session = sessions.open()
            await session.reset(0, {})
            first = await session.step("on", turn=1)
            assert await session.step("on", turn=1) is first
            with pytest.raises(UsageError, match="turn 3 cannot be played; 1 were"):
                await session.step("on", turn=3)
            assert session.env.num_turns == 1

    asyncio.run(ask_twice())


# ---- limits and secrets -------------------------------------------------------------------------


def test_sessions_are_limited_and_expire():
    async def use():
        async with Sessions(Failing, max_sessions=2, idle_s=0.2) as sessions:
            first = sessions.open()
            sessions.open()
            with pytest.raises(FullError, match="all 2 sessions are in use"):
                sessions.open()
            async with asyncio.timeout(10):
                while len(sessions):
                    await asyncio.sleep(0.05)
            assert sessions.num_expired == 2
            with pytest.raises(GoneError, match=r"was not used for 0\.2 s"):
                sessions.get(first.id)
            sessions.open()

    asyncio.run(use())


def test_full_env_server_fails_the_episode():
    with serving(Failing, max_sessions=1) as server:
        first, second = RemoteEnv(server.url), RemoteEnv(server.url)
        first.reset(seed=0)
        with pytest.raises(EnvError, match="all 1 sessions are in use"):
            second.reset(seed=0)
        first.close()
        second.reset(seed=0)
        second.close()


def test_env_server_checks_the_token(monkeypatch):
    with serving(Failing, token="sesame") as server:
        for token in (None, "open"):
            with pytest.raises(UsageError, match="the token is missing or wrong"):
                RemoteEnv(server.url, token=token)
        RemoteEnv(server.url, token="sesame")
        monkeypatch.setenv(TOKEN_VARIABLE, "sesame")
        env = RemoteEnv(server.url)
        env.reset(seed=0)
        env.close()


def test_listening_beyond_loopback_needs_a_token():
    sessions = Sessions(Failing)
    with pytest.raises(UsageError, match="a token is needed to listen at"):
        EnvServer(sessions, "x", host="0.0.0.0")
    assert made_up_token("127.0.0.1") is None
    assert len(made_up_token("0.0.0.0")) >= 32
    hosts = ("localhost", "::1", "127.1.2.3", "evil.example", "10.0.0.1")
    assert [host for host in hosts if is_loopback(host)] == ["localhost", "::1", "127.1.2.3"]


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "message"),
    [
        ("/v1/env", None, {"Origin": "http://evil.example"}, 401, "browsers"),
        ("/v1/env", None, {"Host": "evil.example"}, 401, "browsers"),
        ("/v1/nothing", None, {}, 404, "Not Found"),
        ("/v1/sessions", b"{", {}, 400, "no JSON"),
        ("/v1/sessions", b"[]", {}, 400, "not an object"),
        ("/v1/sessions", b"[" * 200_000, {}, 400, "no JSON"),
        ("/v1/sessions", b'{"seed": -1}', {}, 400, "a seed is a whole number"),
        ("/v1/sessions", b'{"options": 5}', {}, 400, "options are an object"),
        ("/v1/sessions", b'{"options": {"task": 5}}', {}, 400, "is not a task"),
        ("/v1/sessions/x/step", b'{"turn": 1}', {}, 404, "no such session"),
        ("/v1/sessions/x/gold", None, {}, 404, "no such session"),
    ],
)  # fmt: skip
def test_malformed_requests_are_answered_with_errors(tir, path, body, headers, status, message):
    request = urllib.request.Request(tir.url + path, data=body, headers=headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    with caught.value as response:
        assert response.status == status
        assert message in json.loads(response.read())["error"]["message"]


def test_malformed_message_is_refused_and_session_continues(tir):
    def post(path, body):
        request = urllib.request.Request(tir.url + path, data=json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read())

    session = post("/v1/sessions", {"seed": 1})["session"]
    for message in (None, 5, {"role": "assistant"}, {"content": None}):
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(f"/v1/sessions/{session}/step", {"turn": 1, "message": message})
        with caught.value as response:
            assert response.status == 400
    answer = post(f"/v1/sessions/{session}/step", {"turn": 1, "message": "I do not know."})
    assert answer["terminated"]


def test_taken_port_is_an_error(tir):
    taken = serving(Failing, port=tir._port)
    with pytest.raises(InfrastructureError, match="cannot listen"), taken:
        pass


@pytest.mark.parametrize(
    "content", [None, 3, ["text"], [{"text": "no type"}], [{"type": "image", "sha256": "../x"}]]
)
def test_messages_that_a_server_must_not_send_are_errors_of_the_environment(content):
    class Odd(areal_gym.TextEnv):
        def sample_task(self, rng, options):
            return areal_gym.Task(id="odd", data={})

        def first_messages(self, task):
            return [{"role": "user", "content": "How?"}]

        async def respond(self, message):
            return areal_gym.Response(reward=1.0, is_terminated=True)

    with serving(Odd) as server:
        remote = RemoteEnv(server.url)
        remote.reset(seed=0)
        play_on = remote._ask

        async def odd_answer(path, *arguments, **settings):
            answer = await play_on(path, *arguments, **settings)
            if path.endswith("/step"):
                message = {"role": "user", "content": content}
                answer |= {"messages": [message], "terminated": False}
            return answer

        remote._ask = odd_answer
        with pytest.raises(EnvError):
            remote.step("So.")
        remote.close()
