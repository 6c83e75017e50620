"""The contract of engines, for the tests of those who write one.

    ABILITIES = EngineAbilities(weight_syncs=("in-process",))

    @asynccontextmanager
    async def opened(policy):
        engine = MyEngine(policy)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.aclose()

    @pytest.fixture(scope="session")
    def policies(tmp_path_factory):
        return tiny_policies(tmp_path_factory.mktemp("policies"))

    @pytest.mark.parametrize("rule", ENGINE_RULES)
    def test_engine_keeps_the_contract(rule, policies):
        check_engine(rule, opened, policies, ABILITIES)

Every engine is asked for every rule. What a rule demands depends on nothing but the abilities that
the engine declares: those it checks, and all others must be refused.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from areal_gym.errors import UsageError, choices
from areal_gym.testing import ability_rules, picture_rules, sampling_rules, update_rules
from areal_gym.testing.engine_case import EngineAbilities, EngineCase, OpenEngine, require
from areal_gym.testing.engine_policies import EnginePolicies, tiny_policies

__all__ = [
    "ENGINE_RULES",
    "EngineAbilities",
    "EnginePolicies",
    "OpenEngine",
    "check_engine",
    "tiny_policies",
]

_RULES: dict[str, Callable[[EngineCase], Awaitable[None]]] = {
    "protocols": ability_rules.check_protocols,
    "greedy": sampling_rules.check_greedy,
    "logprobs": sampling_rules.check_logprobs,
    "truncation": sampling_rules.check_truncation,
    "stops": sampling_rules.check_stops,
    "limits": sampling_rules.check_limits,
    "sessions": sampling_rules.check_sessions,
    "concurrency": sampling_rules.check_concurrency,
    "seeds": sampling_rules.check_seeds,
    "streams": ability_rules.check_streams,
    "grammars": ability_rules.check_grammars,
    "scores": ability_rules.check_scores,
    "experts": ability_rules.check_experts,
    "pictures": picture_rules.check_pictures,
    "picture-updates": picture_rules.check_picture_updates,
    "cancelling": sampling_rules.check_cancelling,
    "publication": update_rules.check_publication,
    "updates-in-flight": update_rules.check_updates_in_flight,
    "refused-weights": update_rules.check_refused_weights,
    "adapters": update_rules.check_adapters,
    "snapshots": update_rules.check_snapshots,
    "sleep": update_rules.check_sleep,
    "closing": sampling_rules.check_closing,
}
ENGINE_RULES: tuple[str, ...] = tuple(_RULES)
"""The names of the rules; `docs/engines.md` says what each checks."""


def check_engine(
    rule: str,
    open_engine: OpenEngine,
    policies: EnginePolicies,
    abilities: EngineAbilities,
    *,
    patience_s: float = 60.0,
) -> None:
    """Check one rule of the contract of engines; needs `areal-gym[train]`.

    Args:
        rule: one of `ENGINE_RULES`.
        open_engine: makes an asynchronous context manager that starts the engine with the weights
            of a checkpoint, yields it, and closes it. It is called anew for each rule; servers may
            stay, if they are given the checkpoint's weights each time.
        policies: the two checkpoints, those of `tiny_policies` or others.
        abilities: what the engine declares.
        patience_s: a call without an answer for so long is a failure.

    Raises:
        AssertionError: the rule is broken; the text says what was seen.
        UsageError: there is no such rule.
    """
    if rule not in _RULES:
        raise UsageError(f"no rule of engines is named {rule!r}", hints=choices(rule, _RULES))
    threads = set(threading.enumerate())
    with tempfile.TemporaryDirectory(prefix="areal-gym-contract-") as directory:
        case = EngineCase(
            open_engine, policies, abilities, directory=Path(directory), patience_s=patience_s
        )
        asyncio.run(_check(rule, case))
    if rule == "closing":
        left = sorted(thread.name for thread in set(threading.enumerate()) - threads)
        require(not left, f"{rule}: aclose leaves threads: {', '.join(left)}")


async def _check(rule: str, case: EngineCase) -> None:
    try:
        await _RULES[rule](case)
    except AssertionError as error:
        raise AssertionError(f"{rule}: {error}") from error.__cause__
