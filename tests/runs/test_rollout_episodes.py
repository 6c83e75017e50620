"""`areal_gym.rollout`: episodes outside of training."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import threading
from collections import Counter

import pytest
from aiohttp import web

import areal_gym
import areal_gym.rollout.runner
from areal_gym.chat.tool_call_formats import write_call
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.math import MathEnv
from areal_gym.envs.tir import TirEnv
from areal_gym.errors import (
    ConfigError,
    EnvError,
    FailureBudgetError,
    NothingToDoError,
    UsageError,
)
from areal_gym.runs.episodes import Rollouts
from tests._support.web_app import served

WRONG = r"\boxed{-77777}"


def solver(messages):
    """Right for `math` in its first level: reads the numbers and tries."""
    return WRONG if "Ada" in messages[-1]["content"] else "The answer is 3."


def test_function_policy_plays_and_result_has_a_repr():
    played = areal_gym.rollout(solver, "math", n=30, concurrency=7)
    assert isinstance(played, Rollouts)
    assert len(played) == len(played.scored) == 30
    assert [t.id for t in played] == [f"t{n:06d}" for n in range(30)]
    assert len({t.task.id for t in played}) == 30
    assert {t.task.split for t in played} == {"test"}
    first, second, third = repr(played).splitlines()
    assert first.startswith("30 episodes in ")
    assert second.strip().startswith("answer 0.000, format ")
    assert third == "  1.0 turns; stopped by completed 30"
    assert played[:3][0] is played[0]


def test_rows_are_flat():
    row = areal_gym.rollout(solver, "math", n=2).rows()[0]
    assert row["env"] == "math"
    assert (row["reward"], row["stop_reason"], row["num_turns"]) == (0.0, "completed", 1)
    assert row["reward/format"] in (0.0, 1.0)
    assert json.loads(row["task"])["answer"]
    assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("package", "method"), [("pandas", "to_pandas"), ("datasets", "to_dataset")]
)
def test_results_convert_to_tables(package, method):
    played = areal_gym.rollout(solver, "math", n=3)
    try:
        __import__(package)
    except ImportError:
        with pytest.raises(ConfigError, match=f"takes the package {package}") as caught:
            getattr(played, method)()
        assert f"pip install {package}" in caught.value.hints[0]
    else:
        table = getattr(played, method)()
        assert len(table) == 3
        assert list(table["reward"]) == [0.0] * 3


def test_rollout_inside_a_running_loop():
    async def notebook():
        return areal_gym.rollout(solver, "math", n=2)

    assert len(asyncio.run(notebook())) == 2

    def nosy(messages):
        inner = TirEnv()
        inner.reset(seed=0)
        inner.step(inner.gold_action())
        return WRONG

    assert len(areal_gym.rollout(nosy, "math", n=2)) == 2


def test_function_policies_run_concurrently_up_to_the_limit():
    barrier = threading.Barrier(4, timeout=20)

    def waits(messages):
        barrier.wait()
        return WRONG

    assert areal_gym.rollout(waits, "math", n=4, concurrency=4).mean_reward == 0.0


def test_async_function_policy_with_tool_calls():
    async def policy(messages):
        if messages[-1]["role"] == "tool":
            return f"\\boxed{{{messages[-1]['content']}}}"
        question = messages[-1]["content"]
        expression = "".join(c for c in question if c in "0123456789+-*/()")
        call = {"name": "python", "arguments": {"code": f"print({expression})"}}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00000", "type": "function", "function": call}],
        }

    played = areal_gym.rollout(policy, areal_gym.make("tir", level=1), n=5)
    assert played.mean_reward == 1.0
    assert played[0].metrics == {"tool_calls": 1, "tool_errors": 0}
    assert played.rows()[0]["metrics/tool_calls"] == 1


def test_engine_policy_records_tokens():
    engine = ScriptedEngine([write_call("python", {"code": "1+1"}), WRONG])
    played = areal_gym.rollout(engine, TirEnv, n=3, concurrency=1, renderer=byte_renderer())
    assert all(t.num_policy_tokens > 0 for t in played)
    with pytest.raises(UsageError, match="an engine takes token ids"):
        areal_gym.rollout(ScriptedEngine([WRONG]), "math")


def test_checkpoint_policy(tiny_policy):
    played = areal_gym.rollout(str(tiny_policy), "math", n=3, max_new_tokens=4, max_context=256)
    assert len(played) == 3
    assert all(0 < t.num_policy_tokens <= 4 for t in played)


def test_server_policy():
    bodies = []

    async def answer(request):
        body = await request.json()
        bodies.append(body)
        last = body["messages"][-1]
        message = {"role": "assistant", "content": r"\boxed{2}"}
        if last["role"] == "user":
            call = {"name": "python", "arguments": json.dumps({"code": "print(2)"})}
            calls = [{"id": "abc", "type": "function", "function": call}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        return web.json_response({"choices": [{"message": message}]})

    async def play():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        async with served(app) as url:
            return await asyncio.to_thread(
                areal_gym.rollout,
                f"{url}/v1",
                "tir",
                4,
                model="mine",
                temperature=0.5,
                max_new_tokens=9,
            )

    played = asyncio.run(play())
    assert [len(t.turns) for t in played] == [2] * 4
    assert played[0].metrics["tool_calls"] == 1
    first, *_, last = sorted(bodies, key=lambda body: len(body["messages"]))
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("mine", 0.5, 9)
    assert first["tools"][0]["function"]["name"] == "python"
    called, told = last["messages"][-2:]
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"code": "print(2)"}
    assert (told["role"], told["tool_call_id"], told["content"]) == ("tool", "abc", "2")


def test_policy_error_is_a_failure_without_reward():
    def flaky(messages):
        if "Ada" in messages[-1]["content"]:
            raise RuntimeError("no more money")
        return WRONG

    played = areal_gym.rollout(flaky, "math", n=60)
    failed = [t for t in played if t.stop_reason.is_failure]
    assert failed
    assert {t.stop_reason for t in failed} == {areal_gym.StopReason.AGENT_ERROR}
    assert {row["reward"] for row in played.rows()} == {0.0, None}
    assert f"{len(failed)} x the policy failed: RuntimeError('no more money')" in repr(played)

    class Broken(MathEnv):
        async def respond(self, message):
            raise EnvError("gone")

    everything = areal_gym.rollout(solver, Broken, n=2)
    assert {t.error for t in everything} == {"gone"}
    assert math.isnan(everything.mean_reward)
    assert "2 x gone" in repr(everything)


def test_hanging_policy_is_cancelled():
    async def hangs(messages):
        await asyncio.sleep(60)

    played = areal_gym.rollout(hangs, "math", n=2, timeout_s=0.1)
    assert {str(t.stop_reason) for t in played} == {"timeout"}


def test_small_splits_are_repeated(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "1?", "answer": "1"}\n{"question": "2?", "answer": "2"}')
    kwargs = {"tasks": {"data": str(path), "test": str(path)}}
    played = areal_gym.rollout(solver, "math", n=5, env_kwargs=kwargs)
    assert [t.group_id for t in played] == [f"g{n % 2:06d}" for n in range(5)]
    with pytest.raises(NothingToDoError, match="has no tasks"):
        areal_gym.rollout(solver, "math", n=1, env_kwargs=kwargs, split="train")


def test_evaluate_returns_scores_and_episodes():
    def lucky(messages):  # wrong, right, wrong, right, ... for each task
        with lock:
            question = messages[-1]["content"]
            asked[question] += 1
            return f"\\boxed{{{answers[question]}}}" if asked[question] % 2 == 0 else WRONG

    answers, asked, lock = {}, Counter(), threading.Lock()
    for trajectory in areal_gym.rollout(lambda messages: WRONG, "math", n=10):
        answers[trajectory.messages[1]["content"]] = trajectory.task.data["answer"]
    report = areal_gym.evaluate(lucky, "math", n=10, k=2, concurrency=1)
    assert isinstance(report, areal_gym.EvalReport)
    assert (report.num_tasks, report.num_samples, report.num_episodes) == (10, 2, 20)
    assert report.pass_at_k[2].mean == 1.0
    assert report.pass_at_1.mean == 0.5
    assert report.pass_at_1.low < 0.5 < report.pass_at_1.high
    assert len(report.trajectories) == 20
    assert report.failures == []
    assert "trajectories" not in report.to_dict()
    assert "pass@2" in str(report)


def test_evaluate_excludes_failures_and_stops_at_too_many():
    def flaky(messages):
        if "Ada" in messages[-1]["content"]:
            raise RuntimeError("no more money")
        return WRONG

    report = areal_gym.evaluate(flaky, "math", n=60, max_failure_rate=0.9)
    assert report.num_failed == len(report.failures) > 0
    assert report.num_episodes + report.num_failed == 60
    assert report.reward == 0.0

    def broken(messages):
        raise RuntimeError("no money at all")

    with pytest.raises(FailureBudgetError, match="no money at all"):
        areal_gym.evaluate(broken, "math", n=30)


def test_interrupt_cancels_running_episodes():
    """In a process of its own: the signal has to come while the main thread waits."""
    code = """
import areal_gym, asyncio, os, signal, threading
ended = threading.Event()
async def hangs(messages):
    os.kill(os.getpid(), signal.SIGINT)
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.1)
        ended.set()
try:
    areal_gym.rollout(hangs, "math", n=1)
except KeyboardInterrupt:
    print("interrupted", ended.is_set())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("interrupted True\n", "")


def test_progress_bar_is_optional_and_on_stderr(capsys):
    areal_gym.rollout(solver, "math", n=3)
    areal_gym.evaluate(solver, "math", n=3, progress=False)
    assert capsys.readouterr() == ("", "")
    areal_gym.evaluate(solver, "math", n=3, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "evaluate in math" in shown.err
    assert "3/3" in shown.err


def test_invalid_policies_and_environments_are_refused():
    with pytest.raises(ConfigError, match="not a checkpoint directory"):
        areal_gym.rollout("no/such/place", "math")
    with pytest.raises(UsageError, match="int is not a policy"):
        areal_gym.rollout(3, "math")
    with pytest.raises(UsageError, match="many instances of MathEnv"):
        areal_gym.rollout(solver, MathEnv())
    with pytest.raises(UsageError, match="at least one"):
        areal_gym.rollout(solver, "math", n=0)
    with pytest.raises(UsageError, match="env_kwargs are for"):
        areal_gym.rollout(solver, MathEnv, env_kwargs={"level": 2})
