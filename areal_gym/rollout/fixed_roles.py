"""Plays the roles of an episode that are not trained, between the turns of the policy."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from areal_gym.envs.base import StepResult, TextEnv
from areal_gym.recording import Recorder, derive_seed
from areal_gym.types import Message


async def play_fixed_roles(
    env: TextEnv,
    recorder: Recorder,
    result: StepResult,
    call_env: Callable[[Callable[[], Awaitable[Any]], str], Awaitable[Any]],
) -> StepResult:
    """Play fixed roles until it is the policy's turn or the episode is over; return the last step.

    `result` is the latest step, and `call_env` calls the environment and attributes its failures. A
    server or engine that plays a fixed role fails as engines do: the group is played again.
    """
    while not recorder.is_over and (role := env.role) is not None and role in env.fixed_roles:
        seed, start_s = derive_seed(recorder.seed, len(recorder.turns), 2), time.perf_counter()
        answer = await call_env(
            partial(env.fixed_roles[role].answer, env, seed), f"the role {role}"
        )
        message: Message = {"role": "assistant", "content": answer}
        engine_s = time.perf_counter() - start_s
        turn = recorder.add_fixed_turn(role, result.info["messages"], message, engine_s)
        recorder.unread = ()
        start_s = time.perf_counter()
        result = await call_env(partial(env.astep, answer), "step")
        turn.env_s += time.perf_counter() - start_s
        result = recorder.add_step(turn, result)
    return result
