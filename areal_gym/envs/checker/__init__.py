"""Checks an environment's contract: `areal-gym check ENV`, and the test of every built-in.

    results = check_env("tir")                  # or a TextEnv class, or a function that makes one
    assert all(result.is_ok for result in results), results

A gold policy must earn the full reward, 1; a policy that does nothing must not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areal_gym.envs.base import TextEnv
from areal_gym.envs.checker import behaviour, blindness, isolation
from areal_gym.envs.checker.adversarial import HOSTILE_ACTIONS
from areal_gym.envs.checker.env_under_test import (
    Rule,
    RuleResult,
    RuleViolation,
    Skipped,
    describe_error,
    play,
    subject_of,
)
from areal_gym.envs.checker.given_servers import check_mcp_servers

__all__ = ["HOSTILE_ACTIONS", "RuleResult", "check_env", "play"]

_RULES: tuple[Rule, ...] = (
    *(behaviour.check_gymnasium, behaviour.check_documented, behaviour.check_tools),
    *(isolation.check_deterministic, isolation.check_processes, isolation.check_reset),
    *(isolation.check_globals, behaviour.check_gold, behaviour.check_noop),
    *(behaviour.check_hostile, behaviour.check_ends, behaviour.check_options),
    *(behaviour.check_splits, behaviour.check_tasks, isolation.check_concurrent),
    check_mcp_servers,
    blindness.check_blind,
)
"""The rules in the order in which they are checked; each is named after its function."""


def check_env(
    env: str | type[TextEnv] | Callable[[], TextEnv],
    *,
    num_tasks: int = 16,
    num_concurrent: int = 1024,
    kwargs: Mapping[str, Any] | None = None,
    started: Callable[[str], None] | None = None,
) -> list[RuleResult]:
    """Check every rule; one that breaks does not keep the others from being checked.

    `env` is a registered id (else UnknownIdError), a class whose arguments are `kwargs`, or a
    function that makes one. Each rule plays `num_tasks` tasks, and one `num_concurrent` episodes at
    once; `started` is told each rule's name before it is checked.
    """
    subject = subject_of(env, kwargs or {}, num_tasks=num_tasks, num_concurrent=num_concurrent)
    subject.make().close()
    results = []
    for rule in _RULES:
        name = rule.__name__.removeprefix("check_")
        if started is not None:
            started(name)
        summary = (rule.__doc__ or "").strip().removesuffix(".")
        is_ok, reason, measured = True, "", ""
        try:
            measured = rule(subject) or ""
        except Skipped as skipped:
            reason = f"skipped: {skipped}"
        except RuleViolation as broken:
            is_ok, reason = False, str(broken)
        except Exception as error:  # whatever it raises, it is the environment's
            is_ok, reason = False, describe_error(error)
        results.append(
            RuleResult(rule=name, summary=summary, is_ok=is_ok, reason=reason, measured=measured)
        )
    return results
