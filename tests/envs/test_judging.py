"""Policies cannot void episodes: exceptions while judging their output are wrong answers."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

import areal_gym
from areal_gym import Response, Task, TextEnv, tool
from areal_gym.envs.grading import agrees, equality, is_equal
from areal_gym.envs.judging import JudgingBoundary
from areal_gym.errors import EnvError, SandboxError
from areal_gym.sandbox import ProcessSandbox, SandboxStatus


class PanicError(BaseException):
    """Derives from BaseException, as panics of extension modules do."""


@tool
def shout(text: str) -> str:
    """Raise an exception of that name."""
    raise {"ValueError": ValueError, "PanicError": PanicError, "OSError": OSError}[text](text)


class Raising(TextEnv):
    """Raises `error` on every message."""

    tools = (shout,)
    error: BaseException = ValueError("judged")

    def sample_task(self, rng, options):
        return Task(id="one", data={})

    def first_messages(self, task):
        return [{"role": "user", "content": "?"}]

    async def respond(self, message):
        if message.get("tool_calls"):
            results = await self.call_tools(message)
            return Response(messages=results.messages)
        raise self.error


class Judged(Raising):
    """The same, and declares that all exceptions are caused by the policy's output."""

    judges_all_output = True


class Block(Raising):
    """Parses the policy's text inside a judging block."""

    async def respond(self, message):
        is_right = False
        with self.judging():
            is_right = int(message["content"]) == 3
        return Response(reward=float(is_right), is_terminated=True, metrics={"own": 1})


CAUSED = [
    ValueError("x"), TypeError("x"), OverflowError("x"), RecursionError("x"), MemoryError("x"),
    KeyError("x"), UnicodeDecodeError("utf-8", b"", 0, 1, "x"), SystemExit(0), PanicError("x"),
    AssertionError("x"), StopIteration("x"), ZeroDivisionError("x"),
]  # fmt: skip
PASSING = [SandboxError("x"), EnvError("x"), OSError("x"), ImportError("x")]


@pytest.mark.parametrize("error", CAUSED, ids=lambda e: type(e).__name__)
def test_exceptions_in_judging_are_wrong_answers_and_counted(error):
    env = Judged()
    env.error = error
    env.reset(seed=0)
    step = env.step("hm")
    assert (step.reward, step.terminated) == (0.0, True)
    assert step.info["metrics"] == {"judge_errors": 1}


@pytest.mark.parametrize("error", PASSING, ids=lambda e: type(e).__name__)
def test_infrastructure_failures_pass_through_judging(error):
    env = Judged()
    env.error = error
    env.reset(seed=0)
    with pytest.raises(type(error) if isinstance(error, SandboxError) else EnvError):
        env.step("hm")
    with pytest.raises(type(error)), JudgingBoundary():
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError()])
def test_interrupts_pass_through_judging(error):
    env = Judged()
    env.error = error
    env.reset(seed=0)
    with pytest.raises(type(error)):
        env.step("hm")


def test_exception_without_judges_all_output_is_an_env_error():
    env = Raising()
    env.reset(seed=0)
    with pytest.raises(EnvError, match="judged"):
        env.step("hm")


@pytest.mark.parametrize("name", ["ValueError", "PanicError"])
def test_tool_exceptions_are_sent_to_the_policy(name):
    call = {"name": "shout", "arguments": {"text": name}}
    env = Judged()
    env.reset(seed=0)
    step = env.step(f"<tool_call>{json.dumps(call)}</tool_call>")
    assert (step.observation, step.terminated) == (f"error: {name}", False)
    assert step.info["metrics"] == {"judge_errors": 1}
    env.reset(seed=0)
    broken = {"name": "shout", "arguments": {"text": "OSError"}}
    with pytest.raises(EnvError):
        env.step(f"<tool_call>{json.dumps(broken)}</tool_call>")


@pytest.mark.parametrize(("text", "reward", "num"), [("3", 1.0, 0), ("4", 0.0, 0), ("x", 0.0, 1)])
def test_judging_block_counts_swallowed_exceptions(text, reward, num):
    env = Block()
    env.reset(seed=0)
    step = env.step(text)
    assert step.reward == reward
    assert step.info["metrics"] == {"own": 1, **({"judge_errors": num} if num else {})}


FORGED = [
    "[]: 1}", "{[]: 1}", "{{}: 1}", "{[1], 2}", "9" * 290, "1e999", "-" * 250 + "1", "(" * 200,
    "b'\\xff'", "'\\ud800'", "{1: {2: {[]: 3}}}", "1 + 2j", "...", "10**9", "f''", "True", "nan",
]  # fmt: skip


@pytest.mark.parametrize("wanted", [2, 2.5, "x", [1, 2], {"a": 1}, None])
def test_results_forged_to_break_the_comparison_are_wrong(tmp_path, wanted):
    path = tmp_path / "rows.jsonl"
    tests = [{"args": [n], "result": wanted} for n in range(len(FORGED))]
    path.write_text(json.dumps({"question": "?", "entry_point": "f", "tests": tests}))
    env = areal_gym.make("code", tasks={"data": path, "test": path})
    env.reset(options={"split": "test", "index": 0})
    code = (
        f"TEXTS = {FORGED!r}\nclass E:\n    def __init__(self, n): self.n = n\n"
        "    def __repr__(self): return TEXTS[self.n]\ndef f(n): return E(n)"
    )
    step = env.step(f"```python\n{code}\n```")
    assert (step.reward, step.terminated) == (0.0, True)
    assert step.info["metrics"]["judge_errors"] >= 3


@pytest.mark.parametrize("value", ["{[]: 1}", "[" * 300, "{{}: 1}", "[1, 2]", "8"])
def test_forged_result_list_is_wrong(tmp_path, value):
    path = tmp_path / "rows.jsonl"
    tests = [{"args": [1], "result": 1}]
    path.write_text(json.dumps({"question": "?", "entry_point": "f", "tests": tests}))
    env = areal_gym.make("code", tasks={"data": path, "test": path})
    env.reset(options={"split": "test", "index": 0})
    code = (
        f"import builtins\nclass R(list):\n    def __repr__(self): return {value!r}\n"
        "import json\njson.loads = lambda text: R()\n"
        "def f(n): return 1\nrepr = lambda x: x\nlist = R"
    )
    assert env.step(f"```python\n{code}\n```").reward == 0.0


NASTY = [
    "9" * 5_000, "1e999999999",
    "(" * 1_000 + "1" + ")" * 1_000, "{" * 900, "\\frac{" * 200, "\\sqrt{" * 250 + "2" + "}" * 250,
    "1/0", "\\ud800", "\x00", "nan", "-inf",
    "x" * 1_999, "a=" * 900, "[" * 600, "1," * 900, "\\begin{pmatrix}" * 30, "\\pm" * 300,
    "\\lim_{x\\to 0} \\frac{1}{x}", "1..." * 100, "0." + "1" * 500 + "...", "\\cup" * 200,
]  # fmt: skip


def test_adversarial_answers_do_not_fail_a_math_episode(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "?", "answer": "\\sqrt{2}"}))
    env = areal_gym.make("math", tasks={"data": path, "test": path})
    for answer in NASTY:
        env.reset(options={"split": "test", "index": 0})
        step = env.step(f"\\boxed{{{answer}}}")
        assert (step.reward, step.terminated) == (0.0, True), answer[:40]


def test_exception_in_the_grading_worker_is_a_wrong_answer(monkeypatch):
    monkeypatch.setattr(equality, "_are_equal", lambda *a: json.loads("{"))
    assert equality.is_equal_here("x", "y") is None
    assert is_equal("x", "y") is False
    assert asyncio.run(agrees("x", "y")) is False


PEAKS = ["10**400", "-5", "True", "1e999", "'x'", "[]", "{}", "None", "2**70", "float('nan')"]


@pytest.mark.parametrize("peak", PEAKS)
def test_forged_session_statistics_are_bounded(peak):
    forge = (
        "import json, sys\nsys.set_int_max_str_digits(0)\nreal = json.dumps\n"
        "def forged(message, *a, **k):\n    if 'peak_kb' in message:\n"
        f"        message['peak_kb'] = {peak}\n    return real(message, *a, **k)\n"
        "json.dumps = forged"
    )

    async def run():
        async with ProcessSandbox(num_workers=1) as sandbox:
            session = await sandbox.session()
            try:
                return [await session.run(code) for code in (forge, "1 + 1")]
            finally:
                await session.aclose()

    for result in asyncio.run(run()):
        assert result.status in SandboxStatus
        assert 0 <= result.peak_memory_mb < 1e9


def test_every_signal_is_reported_as_killed():
    async def run():
        # Without a pid namespace, in which a snippet is deaf to its own signals.
        async with ProcessSandbox(
            num_workers=1, without=["namespaces"], min_level="none"
        ) as sandbox:
            return [
                await sandbox.run(f"import os, time\nos.kill(os.getpid(), {n})\ntime.sleep(60)")
                for n in (35, 40, 50, 63)
            ]

    with suppress(SandboxError):  # where nothing but namespaces can be had
        for result in asyncio.run(run()):
            assert result.status is SandboxStatus.KILLED
            assert "signal" in result.stderr
