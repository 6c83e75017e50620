"""Tries the user's reward functions on a few real rows before anything slow begins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from areal_gym.envs.prompts import PromptsEnv
from areal_gym.errors import EpisodeError
from areal_gym.runs.components import Components

_NUM_ROWS = 3
_TIME_LIMIT_S = 10.0


async def try_rewards(components: Components, split: str, say: Callable[[str], None]) -> None:
    """Score plausible answers to the first rows of a split with the user's own functions.

    A function is called until it has scored one answer. Built-in rewards are not called: their
    arguments have been checked, and a judge costs money. In an environment with tools, a failure is
    only a warning, because no tool has been called.

    Raises:
        EnvError: no answer could be scored; the message has the first reason.
    """
    env = components.make_env()
    try:
        if not isinstance(env, PromptsEnv):
            return
        rows = min(_NUM_ROWS, env.num_tasks(split) or _NUM_ROWS)
        failures: list[EpisodeError] = []
        for index in range(rows):
            task = env.tasks.at(index, split)
            try:
                async with asyncio.timeout(_TIME_LIMIT_S):
                    await env.try_rewards(task)
                break
            except EpisodeError as error:
                failures.append(error)
            except TimeoutError:
                slow = [reward for reward in env.rewards if not reward.never_blocks]
                limit_s = max(reward.timeout_s for reward in slow)
                say(
                    f"warning: {' and '.join(map(str, slow))} took more than {_TIME_LIMIT_S:g} s "
                    f"for an answer to {env.place_of(task)}; after {limit_s:g} s (timeout_s) a "
                    "call is given up, and its episode is in no batch"
                )
                return
    finally:
        await env.aclose()
    if not failures:
        return
    first = failures[0]
    if len(failures) < rows or env.tools:
        say(f"warning: {first.message}: episodes like this are in no batch")
        return
    raise type(first)(
        f"{first.message} (tried before the start, on {rows} of the rows)",
        hints=[*first.hints, "try it on rows: areal-gym check --data DATA --reward REWARD"],
    )
