"""The built-in environments."""

from __future__ import annotations

from collections.abc import Iterable

from areal_gym.plugins import EnvSpec, RetrieverSpec, hookimpl


@hookimpl
def register_envs() -> Iterable[EnvSpec]:
    """Offer the environments that come with areal-gym."""
    yield EnvSpec(
        id="code",
        entry_point="areal_gym.envs.code.code_env:CodeEnv",
        summary="write a function that hidden tests call in a sandbox",
        tags=("code", "single-turn", "generated", "jsonl"),
    )
    yield EnvSpec(
        id="countdown",
        entry_point="areal_gym.envs.countdown:CountdownEnv",
        summary="reach a target with given numbers",
        tags=("math", "single-turn", "generated"),
    )
    yield EnvSpec(
        id="mix",
        entry_point="areal_gym.envs.mix:MixedEnv",
        summary="several environments in one run, by weight",
        kwargs={"envs": ({"id": "tir", "weight": 0.5}, {"id": "math", "weight": 0.5})},
        tags=("multi-turn", "generated"),
    )
    yield EnvSpec(
        id="online",
        entry_point="areal_gym.envs.online_env:OnlineEnv",
        summary="no environment: outside programs call the policy and post rewards",
        tags=("gateway",),
    )
    yield EnvSpec(
        id="search",
        entry_point="areal_gym.envs.search.search_env:SearchEnv",
        summary="multi-hop questions with a search engine",
        tags=("tools", "multi-turn", "generated", "jsonl"),
    )
    yield EnvSpec(
        id="tir",
        entry_point="areal_gym.envs.tir:TirEnv",
        summary="arithmetic with a Python sandbox",
        tags=("math", "tools", "multi-turn", "generated"),
    )
    yield from _math()
    yield from _tau2()
    yield from _adapters()


@hookimpl
def register_retrievers() -> Iterable[RetrieverSpec]:
    """Offer the retrievers that come with areal-gym."""
    yield RetrieverSpec(
        id="bm25",
        entry_point="areal_gym.envs.search.retrievers:Bm25Retriever",
        summary="BM25 over a local index",
    )
    yield RetrieverSpec(
        id="http",
        entry_point="areal_gym.envs.search.retrievers:HttpRetriever",
        summary="a server with the HTTP API of Search-R1",
    )


def _math() -> Iterable[EnvSpec]:
    yield EnvSpec(
        id="math",
        entry_point="areal_gym.envs.math:MathEnv",
        summary="arithmetic and word problems, or a file of questions",
        tags=("math", "single-turn", "generated", "jsonl"),
    )
    yield EnvSpec(
        id="math/multi-turn",
        entry_point="areal_gym.envs.math:MathEnv",
        summary="as math, with feedback and more tries",
        kwargs={"max_turns": 3},
        tags=("math", "multi-turn", "generated", "jsonl"),
    )
    yield EnvSpec(
        id="math/gsm8k",
        entry_point="areal_gym.envs.math:MathEnv",
        summary="grade-school word problems (GSM8K)",
        kwargs={"dataset": "gsm8k"},
        tags=("math", "single-turn", "data"),
    )
    yield EnvSpec(
        id="math/math500",
        entry_point="areal_gym.envs.math:MathEnv",
        summary="competition problems (MATH, held out: MATH-500)",
        kwargs={"dataset": "math500"},
        tags=("math", "single-turn", "data"),
    )


def _tau2() -> Iterable[EnvSpec]:
    for id, domain, summary in (
        ("tau2", "mock", "customer service in a library of tools: the built-in domain of tau2"),
        ("tau2/mock", "mock", "the built-in domain of tau2 by its full name"),
        ("tau2/retail", "retail", "customer service in a shop, verdicts as in tau2-bench"),
        ("tau2/airline", "airline", "customer service of an airline, verdicts as in tau2-bench"),
        ("tau2/telecom", "telecom", "customer service of a carrier, verdicts as in tau2-bench"),
    ):
        yield EnvSpec(
            id=id,
            entry_point="areal_gym.envs.tau2.tau2_env:Tau2Env",
            summary=summary,
            kwargs={"domain": domain},
            tags=("tools", "multi-turn", "user", "generated" if domain == "mock" else "benchmark"),
        )


def _adapters() -> Iterable[EnvSpec]:
    """Yield adapters to other libraries: the text after a colon names one environment."""
    for id, place, argument, summary, requires in (
        (
            "gymnasium",
            "gymnasium:GymnasiumEnv",
            "name",
            "an environment of Gymnasium, in words",
            (),
        ),
        (
            "reasoning_gym",
            "reasoning_gym:ReasoningGymEnv",
            "dataset",
            "generated problems: leg_counting and a hundred more kinds",
            ("reasoning_gym",),
        ),
        (
            "textarena",
            "textarena:TextArenaEnv",
            "game",
            "a game of TextArena for one player",
            ("textarena",),
        ),
        (
            "openenv",
            "openenv:OpenEnvEnv",
            "url",
            "an environment behind an OpenEnv server",
            ("openenv",),
        ),
    ):
        yield EnvSpec(
            id=id,
            entry_point=f"areal_gym.envs.adapters.{place}",
            summary=summary,
            tags=("adapter",),
            argument=argument,
            requires=requires,
            extra=id.replace("_", "-") if requires else "",
        )
    yield EnvSpec(
        id="remote",
        entry_point="areal_gym.envs.server.remote_env:RemoteEnv",
        summary="an environment served by areal-gym serve-env",
        tags=("adapter",),
        argument="url",
    )
