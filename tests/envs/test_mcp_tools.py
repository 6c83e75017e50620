"""MCP servers as tools of any environment: real servers, the real client."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import areal_gym
from areal_gym import Response, Task, TextEnv
from areal_gym.config import load_config
from areal_gym.envs.checker import check_env
from areal_gym.envs.checker.env_under_test import RuleViolation, subject_of
from areal_gym.envs.checker.given_servers import check_mcp_servers
from areal_gym.envs.mcp_tools.env_with_servers import EnvWithServers
from areal_gym.envs.server.env_sessions import Sessions
from areal_gym.errors import ConfigError, EnvError, EnvUnreachableError, UsageError
from areal_gym.images import image_store, use_image_store
from areal_gym.message_types import text_of
from tests import _support

pytest.importorskip("mcp", reason="needs the extra mcp")

from areal_gym.envs.server.mcp_server import make_mcp_server, serve_http

SUPPORT = Path(_support.__file__).parent


def server(name="tools", *, file="small_mcp_server.py", **settings):
    args = [str(SUPPORT / file), *settings.pop("args", ())]
    return {"name": name, "command": sys.executable, "args": args, **settings}


def calling(*calls):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"call-{n}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for n, (name, arguments) in enumerate(calls)
        ],
    }


@pytest.fixture(scope="module")
def countdown():
    env = areal_gym.make("countdown", mcp_servers=[server(file="mcp_tools_server.py", shared=True)])
    env.reset(seed=0)
    yield env
    env.close()


def say(env, tool, **arguments):
    step = env.step(calling((tool, arguments)))
    assert (step.terminated, step.truncated, step.reward) == (False, False, 0)
    return step.observation


def test_environment_without_tools_is_played_with_those_of_a_server(countdown):
    names = [tool.name for tool in countdown.tools]
    assert names == ["add", "draw", "fail", "photograph", "write"]
    (add,) = [tool for tool in countdown.tools if tool.name == "add"]
    assert add.description == "Add two whole numbers."
    assert add.parameters["required"] == ["a", "b"]
    countdown.reset(seed=1)
    step = countdown.step(calling(("add", {"a": 2, "b": 3}), ("add", {"a": 4, "b": 5})))
    assert [message["content"] for message in step.info["messages"]] == ["5", "9"]
    assert step.info["metrics"] == {"tool_calls": 2, "tool_errors": 0}
    last = countdown.step(countdown.gold_action())
    assert (last.reward, last.terminated) == (1, True)


def test_mistakes_of_a_call_are_told_to_the_policy(countdown):
    countdown.reset(seed=2)
    assert say(countdown, "add", a="two", b=3).startswith("error: add takes (a, b)")
    assert say(countdown, "fail", text="no").startswith("error: Error executing tool fail")
    assert "not JSON" in say(countdown, "fail", text="\ud800")
    assert "no tool 'other'" in say(countdown, "other")
    text = '<tool_call>{"name": "add", "arguments": </tool_call>'
    assert countdown.step(text).observation.startswith("error:")
    assert countdown.step(countdown.gold_action()).reward == 1


def test_output_is_cut_at_8_kb_of_text(countdown):
    countdown.reset(seed=3)
    text = say(countdown, "write", letter="é", count=10_000)
    kept, _, rest = text.partition("...")
    assert (len(kept.encode()), rest) == (8192, f" ({20_000 - 8192} more bytes)")
    assert say(countdown, "draw") == "[image: not shown]\nbeside it"


def test_images_of_results_are_shown_where_the_settings_say_so(tmp_path):
    tools = server(file="mcp_tools_server.py", shared=True, images=True)
    env = areal_gym.make("countdown", mcp_servers=[tools])
    with use_image_store(tmp_path):
        env.reset(seed=3)
        say(env, "photograph", width=40)
        picture, *texts = env.messages[-1]["content"]
        assert (picture["type"], picture["width"]) == ("image", 40)
        assert picture["sha256"] in image_store()
        assert text_of(texts) == "\nbeside it"
        assert say(env, "draw").startswith("[image: a picture cannot be read (")
        assert "at most 4,194,304 pixels" in say(env, "photograph", width=5_000_000)
        called = say(env, "photograph", width=4, format="webp")
        assert "called image/webp, but its bytes are image/png" in called
    env.close()


def test_each_episode_has_a_server_of_its_own_unless_it_is_shared():
    both = {"own": server(), "all": server() | {"shared": True}}
    for name, settings in both.items():
        settings["name"] = name
    env = areal_gym.make("countdown", mcp_servers=both)
    counts = []
    for seed in (0, 1):
        env.reset(seed=seed)
        counts.append((say(env, "own__count"), say(env, "all__count")))
    assert counts == [("1", "1"), ("1", "2")]
    assert "count" not in [tool.name for tool in env.tools]  # two servers have it
    env.close()


def test_calls_of_both_sides_are_answered_in_order():
    env = areal_gym.make("tir", mcp_servers=[server()])
    env.reset(seed=0)
    step = env.step(
        calling(("add", {"a": 1, "b": 1}), ("python", {"code": "print(40 + 2)"}), ("count", {}))
    )
    assert [message["content"].strip() for message in step.info["messages"]] == ["2", "42", "1"]
    assert step.info["metrics"]["tool_calls"] == 3
    env.close()


class Named(TextEnv):
    """Names the state of each message."""

    def sample_task(self, rng, options):
        return Task(id="named", data={})

    def first_messages(self, task):
        return [{"role": "user", "content": "Go on."}]

    async def respond(self, message):
        return Response(messages=self.first_messages(self.task), state_key=f"at {self.num_turns}")


def test_states_of_the_environment_keep_their_names():
    env = EnvWithServers(Named(), [server()])
    env.reset(seed=0)
    assert "state_key" not in env.step(calling(("add", {"a": 1, "b": 1}))).info
    assert env.step("on").info["state_key"].startswith("at ")
    env.close()


def test_roles_are_refused_beside_servers():
    with pytest.raises(UsageError, match="roles first, second"):
        areal_gym.make("nim", mcp_servers=[server()])


def test_rewards_of_own_prompts_see_what_servers_answered():
    seen = []

    def score(completion, tool_results):
        seen.append(list(tool_results))
        return float(completion == "5")

    env = areal_gym.make(
        "prompts", tasks=[{"prompt": "What is 2 + 3?"}], reward=score, mcp_servers=[server()]
    )
    env.reset(seed=0)
    assert say(env, "add", a=2, b=3) == "5"
    assert env.step("5").reward == 1
    assert seen == [["5"]]
    env.close()


def test_call_that_takes_too_long_is_told_to_the_policy():
    env = areal_gym.make("countdown", mcp_servers=[server(timeout_s=0.5)])
    env.reset(seed=0)
    assert say(env, "wait") == "error: wait has not answered within 0.5 s"
    env.close()


def test_server_that_ends_is_an_error_of_the_environment():
    env = areal_gym.make("countdown", mcp_servers=[server()])
    env.reset(seed=0)
    with pytest.raises(EnvError, match="MCP server 'tools' is lost"):
        env.step(calling(("stop", {})))
    env.reset(seed=0)
    assert say(env, "add", a=1, b=1) == "2"
    env.close()


def test_server_that_changes_its_tools_is_an_error_of_the_environment():
    env = areal_gym.make("countdown", mcp_servers=[server()])
    env.reset(seed=0)
    with pytest.raises(EnvError, match="changed its tools"):
        env.step(calling(("learn", {}), ("add", {"a": 1, "b": 1})))
    env.close()
    env = areal_gym.make("countdown", mcp_servers=[server(args=["changing"])])
    env.reset(seed=0)
    with pytest.raises(EnvError, match="lists other tools"):
        env.reset(seed=1)
    env.close()


def test_command_runs_behind_walls_unless_the_host_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, path = listener.getsockname()[1], str(tmp_path / "file")
        results = {}
        for where in ("walls", "host"):
            env = areal_gym.make("countdown", mcp_servers=[server(where=where)])
            env.reset(seed=0)
            results[where] = say(env, "reach", path=path, port=str(port))
            env.close()
    if "namespaces" in results["walls"]:
        pytest.skip("this kernel allows no namespaces")
    assert results == {"walls": "OSError, not connected", "host": "wrote, connected"}


def test_commands_get_named_variables_only(monkeypatch):
    monkeypatch.setenv("OWN_SECRET", "s3cret")
    env = areal_gym.make("countdown", mcp_servers=[server(env={"GIVEN": "<${OWN_SECRET}>"})])
    env.reset(seed=0)
    assert say(env, "variable", name="GIVEN") == "<s3cret>"
    assert say(env, "variable", name="OWN_SECRET") == "not set"
    env.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "a"}, "needs a command"),
        ({"name": "a", "url": "ftp://x"}, "needs a url"),
        ({"name": "a b", "command": "x"}, "a name has"),
        ({"name": "a", "url": "http://x", "command": "y"}, "go with transport 'stdio'"),
        ({"name": "a", "url": "http://x", "headers": {"Authorization": "Bearer x"}}, "VARIABLE"),
        ({"name": "a", "command": "x", "retries": 3}, "retries"),
        ("time", "not a list"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(UsageError, match=message):
        areal_gym.make("countdown", mcp_servers=settings)


def test_missing_commands_variables_and_servers_are_named():
    env = areal_gym.make("countdown", mcp_servers=[{"name": "a", "command": "no-such-server"}])
    with pytest.raises(UsageError, match="no command 'no-such-server'"):
        env.reset(seed=0)
    headers = {"Authorization": "Bearer ${AREAL_GYM_NO_SUCH_TOKEN}"}
    wanted = {"name": "a", "url": "http://127.0.0.1:9/mcp", "headers": headers}
    env = areal_gym.make("countdown", mcp_servers=[wanted])
    with pytest.raises(ConfigError, match="AREAL_GYM_NO_SUCH_TOKEN"):
        env.reset(seed=0)
    env = areal_gym.make("countdown", mcp_servers=[{"name": "a", "url": "http://127.0.0.1:9/mcp"}])
    with pytest.raises(EnvUnreachableError, match="was not opened"):
        env.reset(seed=0)
    broken = {"name": "a", "command": sys.executable, "args": ["-c", "raise SystemExit('no disk')"]}
    env = areal_gym.make("countdown", mcp_servers=[broken])
    with pytest.raises(EnvError, match="no disk"):
        env.reset(seed=0)


@asynccontextmanager
async def served(env, token):
    """Serve an environment of ours over streamable HTTP; yield its address."""
    ready = asyncio.get_running_loop().create_future()
    sessions = Sessions(lambda: areal_gym.make(env))
    async with sessions:
        serving = asyncio.create_task(
            serve_http(
                make_mcp_server(sessions, env),
                host="127.0.0.1",
                port=0,
                token=token,
                on_ready=ready.set_result,
            )
        )
        try:
            yield await ready
        finally:
            serving.cancel()
            await asyncio.wait({serving})


def test_our_own_server_over_http_with_a_token(monkeypatch):
    monkeypatch.setenv("AREAL_GYM_TEST_TOKEN", "t0ken")

    async def main():
        async with served("tir", "t0ken") as url:
            headers = {"Authorization": "Bearer ${AREAL_GYM_TEST_TOKEN}"}
            settings = [{"name": "tir", "url": url, "headers": headers, "open_timeout_s": 20}]
            env = areal_gym.make("countdown", mcp_servers=settings)
            await env.areset(seed=0)
            assert [tool.name for tool in env.tools] == ["answer", "python", "start_episode"]
            step = await env.astep(calling(("start_episode", {"seed": 1})))
            assert step.observation.startswith("episode: ")
            episode = step.observation.split()[1]
            code = {"episode": episode, "code": "print(6 * 7)"}
            assert (await env.astep(calling(("python", code)))).observation.strip() == "42"
            await env.aclose()
            monkeypatch.setenv("AREAL_GYM_TEST_TOKEN", "wrong")
            with pytest.raises(EnvError, match="was not opened"):
                await env.areset(seed=0)
            monkeypatch.setenv("AREAL_GYM_TEST_TOKEN", "t0ken")
            await env.areset(seed=0)
        with pytest.raises(EnvError, match="is lost"):
            await env.astep(calling(("start_episode", {"seed": 1})))
        await env.aclose()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_settings_of_a_run_have_servers():
    from areal_gym.runs.components import Components

    text = f"[{{name: tools, command: {sys.executable}}}]"
    config = load_config(overrides=["env.id=countdown", f"env.kwargs.mcp_servers={text}"])
    env = Components.of(config).make_env()
    assert (env.played_id, env.max_turns) == ("CountdownEnv", 17)


def test_checker_holds_servers_to_their_rule():
    kwargs = {"mcp_servers": [server(args=["calm"])]}
    results = check_env("countdown", num_tasks=1, num_concurrent=4, kwargs=kwargs)
    assert [result for result in results if not result.is_ok] == []
    (servers,) = [result for result in results if result.rule == "mcp_servers"]
    assert servers.measured.startswith("2 tools, ")

    def subject(**kwargs):
        return subject_of("countdown", kwargs, num_tasks=1, num_concurrent=1)

    with pytest.raises(EnvError, match="lists other tools"):
        check_mcp_servers(subject(mcp_servers=[server(args=["changing"])]))
    with pytest.raises(RuleViolation, match="is lost"):
        check_mcp_servers(subject(mcp_servers=[server(args=["few"])]))
    assert check_mcp_servers(subject()) == ""


REAL_SERVERS = {
    "mcp-server-time": (["--local-timezone", "UTC"], "convert_time", {
        "source_timezone": "Europe/Berlin", "time": "12:00", "target_timezone": "Asia/Tokyo",
    }, "Asia/Tokyo"),
    "mcp-server-sqlite": (
        ["--db-path", "shop.db"], "create_table", {"query": "CREATE TABLE prices (price INTEGER)"},
        "created successfully",
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", REAL_SERVERS)
def test_servers_of_the_package_index(command):
    path = os.environ.get("AREAL_GYM_MCP_SERVERS", "")
    executable = shutil.which(command, path=f"{path}{os.pathsep}{os.environ['PATH']}")
    if executable is None:
        pytest.skip(f"{command} is not installed (AREAL_GYM_MCP_SERVERS names a folder of it)")
    args, tool, arguments, expected = REAL_SERVERS[command]
    settings = {"name": "real", "command": executable, "args": args}
    env = areal_gym.make("countdown", mcp_servers=[settings])
    env.reset(seed=0)
    assert expected in say(env, tool, **arguments)
    assert say(env, tool).startswith("error:")
    env.close()
