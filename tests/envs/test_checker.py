"""The checker names the rule that each of these environments breaks."""

from __future__ import annotations

import itertools
import os
import random
import re

import numpy as np
import pytest

from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.checker import check_env
from areal_gym.envs.tools import Tool, tool
from areal_gym.errors import UnknownIdError, UsageError
from areal_gym.types import Task


class Good(TextEnv):
    """Say the number."""

    max_turns = 2

    def sample_task(self, rng, options):
        split = options.get("split", "train")
        number = options.get("index", int(rng.integers(10**6)))
        if split not in ("train", "test") or type(number) is not int or number < 0:
            raise UsageError("no such task")
        number = 2 * number + (split == "test")
        return Task(id=f"{split}/{number}", split=split, data={"number": number})

    def first_messages(self, task):
        return [{"role": "user", "content": f"Say {task.data['number']}."}]

    async def respond(self, message):
        is_right = message["content"] == str(self.task.data["number"])
        return Response(reward=float(is_right), is_terminated=True)

    def gold_action(self):
        return str(self.task.data["number"])


class Generous(Good):
    """Rewards everything."""

    async def respond(self, message):
        return Response(reward=1.0, is_terminated=True)


class Miser(Good):
    """Rewards nothing."""

    async def respond(self, message):
        return Response(is_terminated=True)


class Crashing(Good):
    """Crashes on NUL."""

    async def respond(self, message):
        assert "\0" not in message["content"]
        return await super().respond(message)


class Leaking(Good):
    """Has no splits."""

    def sample_task(self, rng, options):
        number = super().sample_task(rng, options).data["number"] // 2
        return Task(id=str(number), split=options.get("split", "train"), data={"number": number})


class Random(Good):
    """Draws from the global generator."""

    def first_messages(self, task):
        return [{"role": "user", "content": f"Say {task.data['number']}.{random.random()}"}]


class Hashing(Good):
    """Depends on PYTHONHASHSEED."""

    def first_messages(self, task):
        return [{"role": "user", "content": f"Say {task.data['number']}.{hash('a')}"}]


class Sharing(Good):
    """Counts in the class."""

    count = itertools.count()

    async def respond(self, message):
        response = await super().respond(message)
        return Response(
            reward=response.reward, is_terminated=True, metrics={"count": next(self.count)}
        )


class Endless(Good):
    """Never ends."""

    max_turns = 10**9

    async def respond(self, message):
        return Response()


class Undocumented(Good):
    __doc__ = None


class Remembering(Good):
    """Keeps a counter of episodes across resets."""

    num_episodes = 0

    def first_messages(self, task):
        self.num_episodes += 1
        return super().first_messages(task)

    async def respond(self, message):
        response = await super().respond(message)
        return Response(
            reward=response.reward, is_terminated=True, metrics={"n": self.num_episodes}
        )


class Seeding(Good):
    """Seeds numpy's global generator."""

    async def respond(self, message):
        np.random.seed(3)
        return await super().respond(message)


class Exporting(Good):
    """Writes into the process's environment."""

    async def respond(self, message):
        os.environ["AREAL_GYM_TEST_CHECKER"] = str(self.np_random.integers(10**9))
        return await super().respond(message)


class Lenient(Good):
    """Accepts unknown options."""

    def sample_task(self, rng, options):
        known = {k: v for k, v in options.items() if k == "split" and v in ("train", "test")}
        return super().sample_task(rng, {**options, **known, "index": 0} if not known else options)


class Secretive(Good):
    """Its info is not JSON."""

    async def respond(self, message):
        response = await super().respond(message)
        told = {"role": "user", "content": "Thanks.", "seen": 1 + 2j}
        return Response(messages=[told], reward=response.reward, is_terminated=True)


@tool
def shout(word: str) -> str:
    """Say it loudly."""
    return word.encode().decode().upper()


class Fragile(Good):
    """Its tool crashes on a lone surrogate."""

    tools = (shout,)

    async def respond(self, message):
        if message.get("tool_calls"):
            return Response(messages=(await self.call_tools(message)).messages)
        return await super().respond(message)


class Misdescribed(Good):
    """Its tool requires an argument that has no schema."""

    tools = (
        Tool(
            name="go",
            description="Go.",
            parameters={"type": "object", "properties": {}, "required": ["where"]},
        ),
    )


class Guess(Good):
    """All tasks start alike, and no perfect policy exists."""

    has_gold = False

    def first_messages(self, task):
        return [{"role": "user", "content": "Guess the number."}]


def results_of(cls, **settings):
    return {r.rule: r for r in check_env(cls, num_tasks=4, num_concurrent=64, **settings)}


def broken_rules(cls):
    return {rule for rule, result in results_of(cls).items() if not result.is_ok}


def test_good_environment_passes_every_rule():
    started = []
    results = results_of(Good, started=started.append)
    assert all(result.is_ok and not result.reason for result in results.values()), results
    assert all(result.summary for result in results.values())
    assert started == list(results)
    assert len(results) == 17
    assert results["concurrent"].measured.startswith("64 episodes in ")


def test_environment_without_gold_skips_the_gold_rule():
    results = results_of(Guess)
    assert all(result.is_ok for result in results.values()), results
    assert [r.rule for r in results.values() if r.reason.startswith("skipped")] == ["gold"]


@pytest.mark.parametrize(
    ("cls", "rules"),
    [
        (Generous, {"noop", "hostile"}),
        (Miser, {"gold"}),
        (Crashing, {"hostile"}),
        (Leaking, {"splits"}),
        (Hashing, {"processes"}),
        (Undocumented, {"documented"}),
        (Remembering, {"reset", "gymnasium", "concurrent"}),
        (Seeding, {"globals"}),
        (Lenient, {"options"}),
        (Secretive, {"tasks"}),
        (Fragile, {"hostile"}),
        (Misdescribed, {"tools"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_rule_is_named(cls, rules):
    assert broken_rules(cls) == rules


def test_hidden_state_breaks_determinism_rules():
    assert {"deterministic", "processes"} <= broken_rules(Random)
    assert {"deterministic", "concurrent"} <= broken_rules(Sharing)


def test_process_wide_change_is_named(monkeypatch):
    monkeypatch.setenv("AREAL_GYM_TEST_CHECKER", "")
    assert results_of(Exporting)["globals"].reason == "it changes os.environ"


def test_crash_reason_names_the_action():
    reason = results_of(Fragile)["hostile"].reason
    assert reason.startswith("shout of a lone surrogate: EnvError: ")


def test_crash_reason_names_file_and_line():
    class Crashing(Good):
        """Raises."""

        def gold_action(self):
            raise NameError("strr")

    reason = next(r.reason for r in check_env(Crashing, num_tasks=1) if r.rule == "gold")
    assert re.fullmatch(r"NameError: strr \(test_checker\.py, line \d+\)", reason)


def test_endless_episode_breaks_the_gold_rule():
    results = results_of(Endless)
    assert "does not end" in results["gold"].reason


def test_local_class_skips_the_processes_rule():
    class Local(Good):
        """Here only."""

    processes = results_of(Local)["processes"]
    assert processes.is_ok
    assert processes.reason == "skipped: no other process can import it"


def test_check_of_unknown_id_raises():
    with pytest.raises(UnknownIdError, match="no environment 'tri'"):
        check_env("tri")
