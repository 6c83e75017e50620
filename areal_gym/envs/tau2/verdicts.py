"""Verdicts: the value of an episode, exactly as the benchmark computes it.

The reward is the product of the parts that the task's `reward_basis` names; the other parts are
computed as well, for diagnosis. An episode that was not ended by a party's own stop is worth 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from areal_gym.envs.tau2.benchmark_data import Action, Case, Domain
from areal_gym.envs.tau2.domain_state import Arguments, Requestor, World
from areal_gym.envs.tau2.judge import Judge

STOPS = ("agent_stop", "user_stop")
"""Terminations after which an episode is judged."""


class Call(NamedTuple):
    """A tool call that was made, by either party."""

    requestor: Requestor
    name: str
    arguments: Arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The value of an episode, and the reasons."""

    reward: float
    breakdown: Mapping[str, float] | None = None
    """Each part of the basis and its share; None when nothing was judged."""
    db_match: bool | None = None
    env_assertions: Sequence[bool] = ()
    action_checks: Sequence[bool] = ()
    communicate_checks: Sequence[bool] = ()
    nl_checks: Sequence[bool] = ()
    is_nl_judged: bool = True
    """False if assertions in natural language were not judged."""


async def evaluate(
    domain: Domain,
    case: Case,
    *,
    world: World,
    calls: Sequence[Call],
    says: Sequence[str],
    transcript: Sequence[Mapping[str, Any]],
    termination: str,
    judge: Judge,
) -> Verdict:
    """Judge an episode.

    Args:
        domain: of the task.
        case: the task.
        world: as the episode left it; assertions are checked on it.
        calls: all tool calls of both parties, in order.
        says: all texts of the assistant, greeting included.
        transcript: role and content of every message, for the judge.
        termination: how the episode ended.
        judge: of assertions in natural language.

    Raises:
        EnvError: the judge could not be asked.
    """
    if termination not in STOPS:
        return Verdict(reward=0.0)
    if not case.has_criteria:
        return Verdict(reward=1.0)
    is_db_equal = world.state() == domain.gold_state(case)
    assertions = [_holds(world, row) for row in case.env_assertions]
    actions = [any(_matches(action, call) for call in calls) for action in case.gold_actions]
    spoken = [text.lower().replace(",", "") for text in says]
    communicated = [any(info.lower() in text for text in spoken) for info in case.communicate_info]
    needs_judge = bool(case.nl_assertions) and "NL_ASSERTION" in case.reward_basis
    judged = await judge.judge(transcript, case.nl_assertions) if needs_judge else []
    parts = {
        "DB": is_db_equal,
        "ENV_ASSERTION": all(assertions),
        "ACTION": all(actions),
        "COMMUNICATE": all(communicated),
        # The stand-in where there is no judge: `is_nl_judged` says so.
        "NL_ASSERTION": all(judged) if judged is not None else all(communicated),
    }
    breakdown = {name: float(parts[name]) for name in case.reward_basis}
    return Verdict(
        reward=math.prod(breakdown.values()),
        breakdown=breakdown,
        db_match=is_db_equal,
        env_assertions=assertions,
        action_checks=actions,
        communicate_checks=communicated,
        nl_checks=judged or (),
        is_nl_judged=judged is not None,
    )


def is_solved_by_inaction(domain: Domain, case: Case) -> bool:
    """Return whether an assistant that does nothing would get the full reward.

    Assertions in natural language are taken as met: they mostly say what must not be done.
    """
    world = domain.initial_world(case)
    is_met = {
        "DB": world.state() == domain.gold_state(case),
        "COMMUNICATE": not case.communicate_info,
        "ACTION": not case.gold_actions,
        "ENV_ASSERTION": all([_holds(world, row) for row in case.env_assertions]),
    }
    return all(is_met.get(name, True) for name in case.reward_basis)


def _holds(world: World, row: Mapping[str, Any]) -> bool:
    is_so = world.holds(row["env_type"], row["func_name"], row["arguments"])
    world.sync()
    return is_so is bool(row.get("assert_value", True))


def _matches(gold: Action, call: Call) -> bool:
    # None means the arguments of the call itself: one with fewer arguments matches, too.
    names = call.arguments if gold.compare_args is None else gold.compare_args
    gold_arguments, arguments = (
        {name: value for name, value in action.arguments.items() if name in names}
        for action in (gold, call)
    )
    return gold.name == call.name and gold_arguments == arguments
