"""Programs that play inside a task's place: what they reach, what is graded, what fails."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket

import pytest

from areal_gym.agents.harnesses import HARNESSES
from areal_gym.agents.program import ProgramAgent
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.harbor.harbor_env import HarborEnv
from areal_gym.errors import EngineError, UnknownIdError, UsageError
from areal_gym.gateway.shared_gateway import shared_gateway
from areal_gym.rollout.episode import play_episode
from areal_gym.types import StopReason
from tests._support.harbor_play import backend
from tests._support.harbor_tasks import TEST, write_task
from tests._support.sums_env import Sums

ASK = """
import json, os, socket, sys, time, urllib.error, urllib.request

def ask(text, key=None, path="/chat/completions", body=None):
    body = body or {"model": "any", "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + (key or os.environ["OPENAI_API_KEY"]),
         "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return json.load(reply)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return error.code

def write(text):
    open("/app/answer.txt", "w").write(str(text))
"""


@pytest.fixture(scope="module")
def local():
    return backend("local")


def play(folder, program, local, *, replies=("42",), engine=None, before=None, **options):
    """Play the task in `folder` by a Python program, with a scripted policy."""

    async def main():
        more = {} if before is None else await before()
        command = ["python3", "-c", ASK + program]
        agent = ProgramAgent(command, where="task", env=more, **options)
        return await play_episode(
            HarborEnv(str(folder), heldout=0, **local),
            agent,
            engine or ScriptedEngine(list(replies)),
            byte_renderer(),
            options={"split": "train", "index": 0},
            params=SamplingParams(max_new_tokens=500),
            timeout_s=90,
        )

    return asyncio.run(main())


def test_what_a_program_leaves_in_the_place_is_graded(local, tmp_path):
    trajectory = play(
        write_task(tmp_path / "task"),
        'write(ask(os.environ["AREAL_GYM_PROMPT"])); print(open("/app/answer.txt").read())',
        local,
    )
    assert trajectory.error is None
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.COMPLETED)
    assert trajectory.metrics["forks"] == 0
    (sampled,) = [span for span in trajectory.spans if span.logprobs is not None]
    assert bytes(token for token in sampled.token_ids if token < 256) == b"42"
    assert len(sampled.logprobs) == len(sampled.token_ids)


def test_a_program_is_started_for_each_step_and_reaches_the_gateway_in_each(local, tmp_path):
    task = write_task(
        tmp_path / "task",
        {
            "instruction.md": None,
            "tests/test.sh": None,
            "solution/solve.sh": None,
            **{f"steps/{name}/instruction.md": "Write 42.\n" for name in ("one", "two")},
            **{f"steps/{name}/tests/test.sh": TEST for name in ("one", "two")},
        },
        more='\n[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n',
    )
    trajectory = play(task, 'write(ask(os.environ["AREAL_GYM_PROMPT"]))', local, replies=["42"] * 2)
    assert trajectory.error is None
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.COMPLETED)
    assert len(trajectory.turns) == 2


def test_a_program_in_a_container_reaches_the_gateway_and_nothing_else(tmp_path):
    program = """
try:
    socket.create_connection(("1.1.1.1", 80), timeout=2)
except OSError:
    write(ask("x"))
"""
    trajectory = play(write_task(tmp_path / "task"), program, backend("docker"))
    assert trajectory.error is None
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.COMPLETED)


def test_a_program_reaches_its_own_session_and_nothing_else(local, tmp_path):
    listener = socket.create_server(("127.0.0.1", 0))

    async def sibling():
        gateway = await shared_gateway()
        session = gateway.serve_policy(ScriptedEngine(["stolen"] * 9), byte_renderer())
        return {
            "SIBLING": session.api_key,
            "CONTROL": gateway.control_key,
            "PORT": str(listener.getsockname()[1]),
        }

    program = """
seen = {"own": ask("x"), "sibling": ask("x", os.environ["SIBLING"])}
seen["control"] = ask("x", os.environ["CONTROL"], "/rl/sessions", {"task": "x"})
port = int(os.environ["PORT"])
for name, address in {"host": ("127.0.0.1", port), "net": ("1.1.1.1", 80)}.items():
    try:
        socket.create_connection(address, timeout=2)
        seen[name] = "connected"
    except OSError:
        seen[name] = "refused"
ask(json.dumps(seen))
"""
    with listener:
        task = write_task(tmp_path / "task")
        trajectory = play(task, program, local, before=sibling, replies=["42", "42"])
    assert trajectory.error is None
    (answer,) = [m for m in trajectory.messages if m["content"].startswith('{"own"')]
    assert json.loads(answer["content"]) == {
        **{"own": "42", "sibling": 401, "control": 401},
        **{"host": "refused", "net": "refused"},
    }


def test_a_failing_program_is_graded_if_it_has_called(local, tmp_path):
    task = write_task(tmp_path / "task")
    trajectory = play(task, "write(ask('x')); sys.exit(7)", local)
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.COMPLETED)
    trajectory = play(task, "print('no key', file=sys.stderr); write(42); sys.exit(7)", local)
    assert trajectory.stop_reason is StopReason.AGENT_ERROR
    assert "never called the policy" in trajectory.error
    assert "no key" in trajectory.error


def test_a_deadline_ends_the_program_and_its_children_and_is_graded(local, tmp_path):
    # A machine under load takes seconds until the program has asked.
    program = """
write(ask("x"))
if os.fork() == 0:
    time.sleep(8.5)
    write("changed by a child")
    os._exit(0)
time.sleep(60)
"""
    task = write_task(tmp_path / "task", more="[agent]\ntimeout_sec = 8\n")
    trajectory = play(task, program, local)
    assert trajectory.error is None
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.MAX_TURNS)


def test_forks_of_history_are_counted(local, tmp_path):
    program = "[ask(text) for text in ('one', 'two', 'three')]; write(42)"
    trajectory = play(write_task(tmp_path / "task"), program, local, replies=["a", "b", "c"])
    assert trajectory.metrics["forks"] == 2
    assert len({span.branch for span in trajectory.spans}) == 3


def test_a_policy_that_fails_is_the_engines_failure(local, tmp_path):
    class Failing(ScriptedEngine):
        async def generate(self, *arguments, **options):
            raise EngineError("no server")

    task = write_task(tmp_path / "task")
    trajectory = play(task, "sys.exit(ask('x') == 503)", local, engine=Failing(["x"]))
    assert trajectory.stop_reason is StopReason.ENGINE_ERROR


def test_harness_that_is_not_installed_is_named_with_its_layer(local, tmp_path):
    async def main():
        return await play_episode(
            HarborEnv(str(write_task(tmp_path / "task")), heldout=0, **local),
            ProgramAgent(harness="codex", where="task"),
            ScriptedEngine(["x"]),
            byte_renderer(),
            options={"split": "train", "index": 0},
        )

    trajectory = asyncio.run(main())
    assert trajectory.stop_reason is StopReason.AGENT_ERROR
    assert "codex is not installed" in trajectory.error


def test_settings_of_programs_are_checked():
    with pytest.raises(UsageError, match="a command or a harness"):
        ProgramAgent()
    with pytest.raises(UnknownIdError, match="no harness 'codec'"):
        ProgramAgent(harness="codec")
    with pytest.raises(UsageError, match="host or task"):
        ProgramAgent("true", where="cloud")

    async def main():
        agent = ProgramAgent("true", where="task")
        return await play_episode(
            Sums(),
            agent,
            ScriptedEngine(["x"]),
            byte_renderer(),
            options={"split": "train", "index": 3},
        )

    with pytest.raises(UsageError, match="have no place"):
        asyncio.run(main())


def installed(harness):
    """Return a PATH with the harness's program, or skip the test."""
    folders = os.environ.get("AREAL_GYM_HARNESSES", "")
    path = f"{folders}{os.pathsep}{os.environ['PATH']}"
    if shutil.which(HARNESSES[harness].program, path=path) is None:
        pytest.skip(f"{harness} is not installed (AREAL_GYM_HARNESSES names folders of programs)")
    return path


def bash_call(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SCRIPTS = {
    "mini-swe-agent": [
        bash_call("bash", {"command": "echo 42 > answer.txt"}),
        bash_call("bash", {"command": SUBMIT}),
    ],
    "claude-code": [
        bash_call("Bash", {"command": "echo 42 > answer.txt", "description": "write"}),
        "Done.",
    ],
    "codex": ["Done."],
    "opencode": [
        bash_call("bash", {"command": "echo 42 > answer.txt", "description": "write"}),
        "Done.",
    ],
    "openclaw": [bash_call("exec", {"command": "echo 42 > answer.txt"}), "Done."],
    "hermes": [bash_call("terminal", {"command": "echo 42 > answer.txt"}), "Done."],
}


@pytest.mark.long
@pytest.mark.parametrize("harness", SCRIPTS)
def test_real_harness_plays_with_a_scripted_policy(harness, tmp_path):
    path = installed(harness)
    replies = SCRIPTS[harness]

    def reply(question):
        asked = question.num_turn if hasattr(question, "num_turn") else len(seen)
        seen.append(asked)
        return replies[min(len(seen), len(replies)) - 1]

    seen: list[int] = []

    async def main():
        return await play_episode(
            Sums(),
            ProgramAgent(harness=harness, cwd=str(tmp_path), env={"PATH": path}),
            ScriptedEngine(reply, max_context=200_000),
            byte_renderer(),
            options={"split": "train", "index": 3},
            params=SamplingParams(max_new_tokens=500),
            timeout_s=240,
        )

    trajectory = asyncio.run(main())
    assert trajectory.error is None
    assert len(seen) >= len(replies)
    if len(replies) > 1:
        assert (tmp_path / "answer.txt").read_text() == "42\n"
