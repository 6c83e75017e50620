"""The checker finds what is wrong with environments that are wrong in one way each."""

from __future__ import annotations

import itertools
import random

import pytest

from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.checker import check_env
from areal_gym.errors import UnknownIdError
from areal_gym.types import Task


class Good(TextEnv):
    """Say the number."""

    max_turns = 2

    def sample_task(self, rng, options):
        split = options.get("split", "train")
        number = options.get("index", int(rng.integers(10**6)))
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
    """Cannot stand NUL."""

    async def respond(self, message):
        assert "\0" not in message["content"]
        return await super().respond(message)


class Leaking(Good):
    """Has no splits."""

    def sample_task(self, rng, options):
        number = options.get("index", int(rng.integers(10**6)))
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


def broken_rules(cls):
    return {result.rule for result in check_env(cls, num_tasks=4) if not result.is_ok}


def test_a_good_environment_passes_every_rule():
    results = check_env(Good, num_tasks=4)
    assert all(result.is_ok and not result.reason for result in results), results
    assert all(result.summary for result in results)
    assert len({result.rule for result in results}) == len(results) >= 10


@pytest.mark.parametrize(
    ("cls", "rules"),
    [
        (Generous, {"noop", "hostile"}),
        (Miser, {"gold"}),
        (Crashing, {"hostile"}),
        (Leaking, {"splits"}),
        (Hashing, {"processes"}),
        (Undocumented, {"documented"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_rule_that_is_broken_is_named(cls, rules):
    assert broken_rules(cls) == rules


def test_hidden_state_is_found():
    assert {"deterministic", "processes"} <= broken_rules(Random)
    assert {"deterministic", "concurrent"} <= broken_rules(Sharing)


def test_an_endless_episode_is_found():
    results = {result.rule: result for result in check_env(Endless, num_tasks=1)}
    assert "does not end" in results["gold"].reason


def test_a_local_class_skips_what_needs_another_process():
    class Local(Good):
        """Here only."""

    (processes,) = (r for r in check_env(Local, num_tasks=2) if r.rule == "processes")
    assert processes.is_ok
    assert processes.reason == "skipped: no other process can import it"


def test_an_unknown_id_raises():
    with pytest.raises(UnknownIdError, match="no environment 'tri'"):
        check_env("tri")
