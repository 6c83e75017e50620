"""The engines that keep the contract: how each is opened, and which abilities it declares."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from areal_gym.engines.base import Engine
from areal_gym.engines.embedded import EmbeddedEngine
from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.engines.servers.server_engine import ServerEngine
from areal_gym.engines.sglang import FakeSGLangServer, SGLangEngine
from areal_gym.engines.vllm import FakeVLLMServer, VLLMEngine
from areal_gym.models.backend import Backend
from areal_gym.models.hf.hf_loading import build_policy
from areal_gym.testing.engine_contract import (
    EngineAbilities,
    EnginePolicies,
    OpenEngine,
    tiny_policies,
)
from tests._support import tiny_vision
from tests._support.sglang_servers import count
from tests._support.tiny_architectures import tiny_config

CONTEXT = 512


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """An engine in this process, or over a stand-in for a server."""

    opened: OpenEngine
    abilities: EngineAbilities
    architecture: str = "qwen3"


def policies_of(architecture: str, directory: Path) -> EnginePolicies:
    """Make two checkpoints of an architecture."""
    if architecture == "qwen3":
        return tiny_policies(directory, max_context=CONTEXT)
    if architecture in tiny_vision.FAMILIES:
        return seeing_policies(architecture, directory)
    for seed in (0, 1):
        policy = build_policy(tiny_config(architecture, initializer_range=0.15), seed=seed)
        policy.network.save_pretrained(directory / f"policy-{seed}")
    return EnginePolicies(first=directory / "policy-0", second=directory / "policy-1")


def seeing_policies(family: str, directory: Path) -> EnginePolicies:
    """Make two vision-language models; vLLM's kernels for CPUs want heads of 32."""
    policies = [directory / f"policy-{seed}" for seed in (0, 1)]
    for seed, policy in enumerate(policies):
        config = tiny_vision.save_files(family, policy, width=128, heads=4)
        tiny_vision.model(family, config, seed=seed).save_pretrained(policy)
    return EnginePolicies(first=policies[0], second=policies[1])


@asynccontextmanager
async def started(engine: Engine) -> AsyncIterator[Engine]:
    try:
        await engine.start()
        yield engine
    finally:
        await engine.aclose()


def embedded(backend: Backend = "auto", max_context: int = 256) -> OpenEngine:
    """The embedded engine, with fewer rows than the contract has requests."""

    def opened(policy: Path) -> AbstractAsyncContextManager[Engine]:
        engine = EmbeddedEngine.from_checkpoint(
            policy, max_context=max_context, num_slots=24, backend=backend
        )
        return started(engine)

    return opened


def _scripted(policy: Path) -> AbstractAsyncContextManager[Engine]:
    return started(ScriptedEngine(count, max_context=256))


def faked(
    make_server: Callable[..., FakeSGLangServer | FakeVLLMServer],
    engine_class: type[ServerEngine],
    interrupt: str,
) -> OpenEngine:
    """An engine over a stand-in, which has the embedded engine behind it."""

    @asynccontextmanager
    async def opened(policy: Path) -> AsyncIterator[Engine]:
        behind = EmbeddedEngine.from_checkpoint(policy, max_context=256, num_slots=24)
        async with make_server(behind, model_path=str(policy)) as server:
            engine = engine_class(policy, urls=[server.url], interrupt=interrupt)
            async with started(engine):
                yield engine

    return opened


def served(engine_class: type[ServerEngine], url: str, interrupt: str = "abort") -> OpenEngine:
    """An engine over a running server, which is given the policy's weights."""

    @asynccontextmanager
    async def opened(policy: Path) -> AsyncIterator[Engine]:
        engine = engine_class(policy, urls=[url], max_context=CONTEXT, interrupt=interrupt)
        async with started(engine):
            async with engine.updating(1) as servers:
                await servers[0].load_from_disk(policy, 1)
            yield engine

    return opened


SCORING = EngineAbilities(streams=True, scores_prompts=True, lists_top_tokens=True)
EMBEDDED = replace(SCORING, snapshots=True, weight_syncs=("in-process",), recomputes_caches=False)
SERVED = replace(SCORING, sleeps=True)
# Seeds need SGLang's deterministic inference, which CPUs lack.
SGLANG = replace(
    SERVED, has_seeds=False, partial_adapters=False, weight_syncs=("disk", "tensor", "lora")
)
VLLM = replace(SERVED, weight_syncs=("disk", "lora"))
# Broadcasts need a server in a process of its own.
SERVED_SGLANG = {
    "fake": replace(SGLANG, weight_syncs=("disk", "tensor", "distributed", "lora")),
    "real": replace(
        SGLANG,
        weight_syncs=("disk", "tensor", "distributed", "lora"),
        takes_grammars=True,
        truncation="unscaled",
        refuses_weights=False,  # weights of another shape end the server
    ),
}
SERVED_VLLM = {
    "fake": replace(VLLM, weight_syncs=("disk", "distributed", "lora")),
    "real": replace(
        VLLM,
        weight_syncs=("disk", "distributed", "lora"),
        takes_grammars=True,
    ),
}
RULES_OF_UPDATES = ("publication", "updates-in-flight", "sleep")
"""The rules that depend on how a publication interrupts generation."""
RULES_OF_PICTURES = ("protocols", "pictures", "picture-updates")
"""The rules that are different for policies that see."""
RULES_OF_WORKERS = ("logprobs", *RULES_OF_UPDATES)
"""The rules that depend on how many workers share a server's model."""
SEEING = replace(EMBEDDED, takes_images=True)
SEEING_ENGINES: dict[str, EngineKind] = {
    **{
        f"embedded-{family}": EngineKind(opened=embedded(), abilities=SEEING, architecture=family)
        for family in ("qwen3_vl", "gemma3")
    },
    "fake-sglang": EngineKind(
        opened=faked(FakeSGLangServer, SGLangEngine, "abort"),
        abilities=replace(SGLANG, takes_images=True, weight_syncs=("disk", "tensor")),
        architecture="qwen3_vl",
    ),
    "fake-vllm": EngineKind(
        opened=faked(FakeVLLMServer, VLLMEngine, "abort"),
        abilities=replace(VLLM, takes_images=True, weight_syncs=("disk",)),
        architecture="qwen3_vl",
    ),
}
"""Engines of policies that see."""

ENGINES: dict[str, EngineKind] = {
    "embedded": EngineKind(opened=embedded(), abilities=EMBEDDED),
    "transformers": EngineKind(opened=embedded("transformers"), abilities=EMBEDDED),
    "transformers-moe": EngineKind(
        opened=embedded(max_context=96),
        abilities=replace(EMBEDDED, routes_experts=True),
        architecture="qwen3_moe",
    ),
    "scripted": EngineKind(
        opened=_scripted,
        abilities=EngineAbilities(has_model=False, takes_images=True, weight_syncs=("in-process",)),
    ),
    # The way that aborts requests: tests/sglang and tests/vllm.
    "fake-sglang-retract": EngineKind(
        opened=faked(FakeSGLangServer, SGLangEngine, "retract"), abilities=SGLANG
    ),
    "fake-vllm-keep": EngineKind(opened=faked(FakeVLLMServer, VLLMEngine, "keep"), abilities=VLLM),
}
