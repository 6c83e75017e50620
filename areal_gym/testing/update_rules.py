"""Rules for new weights: they are used, named by their version, or refused whole."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from areal_gym.engines.base import Engine, Generation, SleepingEngine, SnapshotEngine
from areal_gym.testing.engine_case import EngineCase, must_refuse, require
from areal_gym.testing.engine_policies import FIRST_PROMPT, ReferencePolicy, log_distributions

if TYPE_CHECKING:
    from torch import Tensor

_ADAPTER_RANK = 4


async def check_publication(case: EngineCase) -> None:
    """Check that the new weights are used after each publication, by each weight sync."""
    for id in case.abilities.full_syncs:
        async with case.engine() as engine, case.weight_sync(engine, id) as sync:
            version = engine.policy_version
            await _check_weights(case, engine, case.policies.first, version, f"before {id}")
            for policy in (case.policies.second, case.policies.first):
                version += 1
                await case.wait(sync.publish(case.weights(policy), version), f"publishing by {id}")
                rule = f"its version is {engine.policy_version} after {version} was published"
                require(engine.policy_version == version, rule)
                await _check_weights(case, engine, policy, version, f"after a publication by {id}")


async def _check_weights(
    case: EngineCase, engine: Engine, policy: Path, version: int, where: str
) -> None:
    """Check answers to a prompt that older weights have read, in a session that they know."""
    for session in ("kept", None):
        turn = await case.ask(engine, FIRST_PROMPT, session=session)
        versions = set(turn.versions)
        require(versions == {version}, f"{where}: versions {versions}, not {version}")
        if case.abilities.has_model:
            case.check_logprobs(case.reference(policy), FIRST_PROMPT, turn, where=where)


async def check_updates_in_flight(case: EngineCase) -> None:
    """Check that each token of a turn during publications carries the version that sampled it."""
    for id in case.abilities.full_syncs[:1]:
        async with case.engine() as engine, case.weight_sync(engine, id) as sync:
            first = engine.policy_version
            async with _turns_in_flight(case, engine) as turns:
                for version in range(first + 1, first + 5):
                    policies = (case.policies.first, case.policies.second)
                    weights = case.weights(policies[(version - first) % 2])
                    await case.wait(sync.publish(weights, version), f"publishing by {id}")
                    await case.ask(engine, case.prompt(version), 2)
            for prompt, turn in turns:
                _check_each_version(case, prompt, turn, first)
            if case.abilities.updates_in_flight:
                spans = [len(set(turn.versions)) for _, turn in turns]
                require(max(spans) > 1, "no turn goes on with new weights during a publication")


@asynccontextmanager
async def _turns_in_flight(
    case: EngineCase, engine: Engine
) -> AsyncIterator[list[tuple[list[int], Generation]]]:
    """Keep four turns in flight, of different lengths; yield those that have ended."""
    ended: list[tuple[list[int], Generation]] = []
    most = engine.max_context - 24
    lengths = itertools.cycle([most // 2, most // 3, most, most // 4])
    numbers = itertools.count()
    is_over = False

    async def play() -> None:
        while not is_over:
            prompt = case.prompt(next(numbers))
            ended.append((prompt, await case.ask(engine, prompt, next(lengths))))

    players = [asyncio.create_task(play()) for _ in range(4)]
    try:
        await asyncio.sleep(0)
        await case.ask(engine, FIRST_PROMPT, 1)
        yield ended
        is_over = True
        await asyncio.gather(*players)
    finally:
        for player in players:
            player.cancel()
        await asyncio.gather(*players, return_exceptions=True)


def _check_each_version(
    case: EngineCase, prompt: list[int], turn: Generation, first_version: int
) -> None:
    if not case.abilities.has_model:
        return
    policies = (case.policies.first, case.policies.second)
    versions = list(turn.versions)
    for version in sorted(set(versions)):
        start = versions.index(version)
        places = range(start, start + versions.count(version))
        policy = case.reference(policies[(version - first_version) % 2])
        if start == 0 or case.abilities.recomputes_caches:
            where = f"tokens {start} to {places[-1]}, of version {version},"
            case.check_logprobs(policy, prompt, turn, where=where, places=places)
        else:  # new weights on what the old ones have read: not the old ones' distribution
            before = case.reference(policies[(versions[start - 1] - first_version) % 2])
            logprobs_TV = log_distributions(before.logits(prompt, turn.token_ids))
            gap, _ = case.worst_gap(logprobs_TV, turn, places)
            rule = f"tokens {start} to {places[-1]} carry version {version}, and older weights'"
            limit = case.abilities.max_logprob_gap
            require(gap > limit or len(places) < 4, f"{rule} log-probabilities")


async def check_refused_weights(case: EngineCase) -> None:
    """Check that weights of another shape are refused, and change nothing."""
    able = case.abilities
    if not (able.refuses_weights and able.has_model):
        return
    for id in able.full_syncs[:1]:
        async with case.engine() as engine, case.weight_sync(engine, id) as sync:
            version, first = engine.policy_version, case.policies.first
            whole = case.weights(case.policies.second)
            name, tensor = whole[-1]
            for what, weights in (
                ("a tensor of another shape", [*whole[:-1], (name, tensor[:-1].clone())]),
                (
                    "a tensor that the model does not have",
                    [*whole, ("surplus.weight", tensor.clone())],
                ),
            ):
                with must_refuse(f"{what}, published by {id},"):
                    await case.wait(sync.publish(weights, version + 1), f"publishing by {id}")
                rule = f"its version is {engine.policy_version} after a refused {version + 1}"
                require(engine.policy_version == version, rule)
                await _check_weights(case, engine, first, version, f"after refusing {what}")
            await case.wait(sync.publish(whole, version + 1), f"publishing by {id}")
            where = "after a refused publication and a good one"
            await _check_weights(case, engine, case.policies.second, version + 1, where)


async def check_adapters(case: EngineCase) -> None:
    """Check a LoRA adapter: its answers are those of the merged weights."""
    if "lora" not in case.abilities.weight_syncs:
        return
    weights = case.weights(case.policies.first)
    matrices = ["q_proj", "down_proj"]
    async with case.engine() as engine, case.weight_sync(engine, "lora") as sync:
        version = engine.policy_version + 1
        if not case.abilities.partial_adapters:
            adapter, _ = _make_adapter(weights, matrices)
            with must_refuse("an adapter of q_proj without v_proj, which is not declared,"):
                await case.wait(sync.publish(adapter, version), "publishing an adapter")
            await _check_weights(case, engine, case.policies.first, version - 1, "after a refusal")
            matrices += ["k_proj", "v_proj"]
        adapter, changes = _make_adapter(weights, matrices)
        merged = ReferencePolicy(case.policies.first)
        merged.add_to_weights(changes)
        await case.wait(sync.publish(adapter, version), "publishing an adapter")
        turn = await case.ask(engine, FIRST_PROMPT)
        require(set(turn.versions) == {version}, f"an adapter's versions: {set(turn.versions)}")
        case.check_logprobs(merged, FIRST_PROMPT, turn, where="with an adapter")


def _make_adapter(
    weights: list[tuple[str, Tensor]], matrices: list[str]
) -> tuple[list[tuple[str, Tensor]], dict[str, Tensor]]:
    """Return an adapter under peft's names, and what it adds to each weight."""
    import torch

    from areal_gym.config import LoraConfig

    generator = torch.Generator().manual_seed(3)
    adapter, changes = [], {}
    for name, tensor in weights:
        stem = name.removesuffix(".weight")
        if stem.endswith(tuple(matrices)):
            down = torch.randn(_ADAPTER_RANK, tensor.shape[1], generator=generator) * 0.05
            up = torch.randn(tensor.shape[0], _ADAPTER_RANK, generator=generator) * 0.05
            stem = f"base_model.model.{stem}"
            adapter += [(f"{stem}.lora_A.weight", down), (f"{stem}.lora_B.weight", up)]
            changes[name] = LoraConfig().alpha / _ADAPTER_RANK * up @ down
    return adapter, changes


async def check_snapshots(case: EngineCase) -> None:
    """Check that a snapshot keeps its weights and version when new ones are published."""
    if not case.abilities.snapshots:
        return
    for id in case.abilities.full_syncs[:1]:
        async with case.engine() as engine, case.weight_sync(engine, id) as sync:
            assert isinstance(engine, SnapshotEngine)
            version = engine.policy_version
            copy = await case.wait(engine.snapshot(), "snapshot")
            weights = case.weights(case.policies.second)
            await case.wait(sync.publish(weights, version + 1), f"publishing by {id}")
            await copy.start()
            try:
                await _check_weights(case, copy, case.policies.first, version, "in a snapshot")
            finally:
                await copy.aclose()
            second = case.policies.second
            await _check_weights(case, engine, second, version + 1, "beside a snapshot")


async def check_sleep(case: EngineCase) -> None:
    """Check that calls wait while the engine sleeps and takes weights, and go on afterwards."""
    if not case.abilities.sleeps:
        return
    for id in case.abilities.full_syncs[:1]:
        async with case.engine() as engine, case.weight_sync(engine, id) as sync:
            assert isinstance(engine, SleepingEngine)
            engine.require_sleep()
            version = engine.policy_version + 1
            begun = asyncio.create_task(case.ask(engine, case.prompt(0), 200))
            await case.ask(engine, FIRST_PROMPT, 1)
            await case.wait(engine.sleep(), "sleep")
            require(engine.is_asleep, "is_asleep is false after sleep")
            waiting = asyncio.create_task(case.ask(engine, FIRST_PROMPT))
            weights = case.weights(case.policies.second)
            await case.wait(sync.publish(weights, version), f"publishing by {id}")
            await asyncio.sleep(0.1)
            require(not waiting.done(), "a call is answered while the engine sleeps")
            for _ in range(2):
                await case.wait(engine.wake_up(), "wake_up")
            require(not engine.is_asleep, "is_asleep is true after wake_up")
            await waiting
            _check_each_version(case, case.prompt(0), await begun, version - 1)
            await _check_weights(case, engine, case.policies.second, version, "after a sleep")
            await case.wait(engine.sleep(keeps_weights=True), "sleep")
            await case.wait(engine.wake_up(), "wake_up")
            place = "after a sleep without a publication"
            await _check_weights(case, engine, case.policies.second, version, place)
