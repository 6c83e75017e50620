"""Roles that other policies play: a chat server's and a checkpoint's."""

from __future__ import annotations

import asyncio
import contextlib
import shutil

import pytest
from aiohttp import web

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import load_config
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.nim import NimEnv
from areal_gym.episode_roles import rewards_by_role, roles_of
from areal_gym.errors import ConfigError
from areal_gym.rollout.episode import play_episode
from areal_gym.rollout.failures import is_infrastructure_failure
from areal_gym.runs.role_policies import make_fixed_roles
from areal_gym.types import StopReason, Task
from tests._support.scripted_gateway import running_gateway
from tests._support.web_app import served

RENDERER = byte_renderer()
DEAD = "http://127.0.0.1:9/v1"


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr("areal_gym.chat.chat_client.FIRST_WAIT_S", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def with_fixed(given, role="second"):
    """The environment of a run in which `given` plays a role."""
    env = NimEnv()
    config = load_config(overrides=["env.id=nim", "rollout.max_new_tokens=9"])
    env.fixed_roles = make_fixed_roles({role: given}, env, config, "env.fixed_roles")
    return env


async def play(env, *moves, stones=7, **settings):
    """Play a game; the moves of the policy's role are scripted."""
    texts = iter([env.move(move) for move in moves])
    engine = ScriptedEngine(lambda *_: next(texts))
    task = Task(id=f"pile/{stones}", data={"stones": stones})
    return await play_episode(
        env, ChatAgent(), engine, RENDERER, options={"task": task}, seed=3, **settings
    )


def test_a_gateway_plays_a_role(monkeypatch):
    questions = []

    def take_one(question):
        questions.append(question)
        return "1 stone"

    async def main():
        engine = ScriptedEngine(take_one)
        async with running_gateway(engine) as (_, session):
            monkeypatch.setenv("OPENAI_API_KEY", session.api_key)
            return await play(with_fixed(session.base_url), 2, 3, stones=7)

    trajectory = asyncio.run(main())  # 7 - 2 - 1 - 3 - 1
    assert trajectory.error is None
    assert [(turn.role, turn.is_fixed) for turn in trajectory.turns] == [
        ("first", False),
        ("second", True),
    ] * 2
    assert rewards_by_role(trajectory) == {"first": 0.0, "second": 1.0}
    assert trajectory.reward == 0.0
    # Nothing that the server wrote has tokens, and it read its own dialogue only.
    policy = [span for span in trajectory.spans if span.origin == "policy"]
    assert [RENDERER.decode(span.token_ids) for span in policy] == ["2 stones", "3 stones"]
    assert roles_of(trajectory) == ("first",)
    assert len(trajectory.branches) == 1
    read = [RENDERER.decode(question.prompt_ids) for question in questions]
    assert ["5 stones are left" in text for text in read] == [True, True]
    assert ["1 stones are left" in text for text in read] == [False, True]
    assert not any("7 stones" in text or "2 stones are" in text for text in read)
    assert {question.params.max_new_tokens for question in questions} == {9}


class ChatServer:
    """A chat server with some models; `reply` makes a text or a status of a request."""

    def __init__(self, *models, reply="1 stone"):
        self.models, self.reply, self.requests = models, reply, []

    async def _list(self, request):
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _answer(self, request):
        self.requests.append(body := await request.json())
        if body["model"] not in self.models:  # as vLLM does
            return web.json_response({"error": "no such model"}, status=404)
        if isinstance(self.reply, int):
            return web.Response(status=self.reply)
        message = {"role": "assistant", "content": self.reply}
        return web.json_response({"choices": [{"message": message}]})

    @contextlib.asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/chat/completions", self._answer)
        async with served(app) as url:
            yield url


def play_with(server, *moves, query="", **settings):
    async def main():
        async with server.running() as url:
            return await play(with_fixed(url + query), *moves, **settings)

    return asyncio.run(main())


def test_the_only_model_of_a_server_is_asked():
    server = ChatServer("Qwen/Qwen3-0.6B")
    trajectory = play_with(server, 3, 3)
    assert trajectory.error is None
    assert rewards_by_role(trajectory)["first"] == 1.0
    assert [body["model"] for body in server.requests] == ["Qwen/Qwen3-0.6B"]
    assert [list(body["messages"][0]) for body in server.requests] == [["role", "content"]]


def test_the_url_names_one_of_several_models():
    server = ChatServer("base", "adapter/1")
    assert play_with(server, 3, 3, query="/v1?model=adapter/1").error is None
    assert {body["model"] for body in server.requests} == {"adapter/1"}
    trajectory = play_with(server, 3)
    assert trajectory.stop_reason is StopReason.ENGINE_ERROR
    assert "has 2 models" in trajectory.error


@pytest.mark.parametrize("status", [400, 401, 500])
def test_a_server_that_refuses_is_no_lost_game(status):
    trajectory = play_with(ChatServer("m", reply=status), 3)
    assert trajectory.stop_reason is StopReason.ENGINE_ERROR
    assert is_infrastructure_failure(trajectory)
    assert f"HTTP {status}" in trajectory.error


def test_a_server_that_writes_nonsense_loses_the_game():
    trajectory = play_with(ChatServer("m", reply="I take all"), 3)
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert rewards_by_role(trajectory) == {"first": 1.0, "second": 0.0}


@pytest.mark.parametrize("role", ["first", "second"])
def test_a_server_that_is_down_is_an_outage(role):
    trajectory = asyncio.run(play(with_fixed(DEAD, role), 3))
    assert trajectory.stop_reason is StopReason.ENGINE_ERROR
    assert trajectory.is_lost
    assert f"the role {role} is played by a server: {DEAD}" in trajectory.error


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"third": "gold"}, "no role 'third'"),
        ({"first": "gold", "second": "gold"}, "none is left"),
        ({"second": "golden"}, "is not a policy"),
        ({"second": "ftp://host/v1"}, "is not the address of a chat server"),
    ],
)
def test_wrong_settings_are_refused(fixed, words):
    config = load_config(overrides=["env.id=nim"])
    with pytest.raises(ConfigError, match=words):
        make_fixed_roles(fixed, NimEnv(), config, "env.fixed_roles")


def test_a_run_plays_by_its_best_checkpoint_or_else_by_its_newest(tiny_policy, tmp_path):
    for name in ("step-000002", "step-000010"):
        shutil.copytree(tiny_policy, tmp_path / "checkpoints" / name)
    given = with_fixed(str(tmp_path)).fixed_roles["second"]
    assert given.directory == tmp_path / "checkpoints" / "step-000010"
    shutil.copytree(tiny_policy, tmp_path / "checkpoints" / "best")
    given = with_fixed(str(tmp_path)).fixed_roles["second"]
    assert given.directory == tmp_path / "checkpoints" / "best"
    with pytest.raises(ConfigError, match="is not a policy"):
        with_fixed(str(tmp_path / "nothing"))
