"""The engines that keep the contract: how each is opened, and which abilities it declares."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
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
from tests._support.paths import ROOT
from tests._support.sglang_servers import count
from tests._support.tiny_architectures import tiny_config

CONTEXT = 512
START_S = 400


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
    for seed in (0, 1):
        policy = build_policy(tiny_config(architecture, initializer_range=0.15), seed=seed)
        policy.network.save_pretrained(directory / f"policy-{seed}")
    return EnginePolicies(first=directory / "policy-0", second=directory / "policy-1")


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


EMBEDDED = EngineAbilities(
    streams=True, snapshots=True, weight_syncs=("in-process",), recomputes_caches=False
)
SERVED = EngineAbilities(streams=True, scores_prompts=True, sleeps=True)
# Broadcasts need servers in processes of their own (tests/sglang, tests/vllm), and seeds SGLang's
# deterministic inference, which CPUs lack.
SGLANG = replace(SERVED, has_seeds=False, weight_syncs=("disk", "tensor", "lora"))
VLLM = replace(SERVED, weight_syncs=("disk", "lora"))

ENGINES: dict[str, EngineKind] = {
    "embedded": EngineKind(opened=embedded(), abilities=EMBEDDED),
    "transformers": EngineKind(opened=embedded("transformers"), abilities=EMBEDDED),
    "transformers-moe": EngineKind(
        opened=embedded(max_context=96),
        abilities=replace(EMBEDDED, routes_experts=True),
        architecture="qwen3_moe",
    ),
    "scripted": EngineKind(
        opened=_scripted, abilities=EngineAbilities(has_model=False, weight_syncs=("in-process",))
    ),
    **{
        f"fake-sglang-{interrupt}": EngineKind(
            opened=faked(FakeSGLangServer, SGLangEngine, interrupt), abilities=SGLANG
        )
        for interrupt in ("abort", "retract")
    },
    **{
        f"fake-vllm-{interrupt}": EngineKind(
            opened=faked(FakeVLLMServer, VLLMEngine, interrupt), abilities=VLLM
        )
        for interrupt in ("abort", "keep")
    },
}

# ---- real servers -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RealEngine:
    """An engine over a real server."""

    engine_class: type[ServerEngine]
    abilities: EngineAbilities
    variable: str
    """Names the environment in which the server is installed."""
    script: Path
    flags: tuple[str, ...]

    @property
    def venv(self) -> str | None:
        """The environment of the server; None where it is not installed."""
        return os.environ.get(self.variable)

    @property
    def reason(self) -> str:
        """Why its tests are skipped."""
        return f"the server is not installed here: {self.variable} is not set"

    @contextlib.contextmanager
    def running(self, policy: Path, log: Path) -> Iterator[str]:
        """Run the server; yield its URL."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        recipe = self.engine_class.recipe
        model = [recipe.model_flag, str(policy)] if recipe.model_flag else [str(policy)]
        command = [f"{self.venv}/bin/python", str(self.script), *model]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", port, *recipe.arguments, *self.flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**recipe.variables(), "OMP_NUM_THREADS": "1"},
            )
        try:
            deadline_s = time.monotonic() + START_S
            while not _is_up(url := f"http://127.0.0.1:{port}"):
                assert process.poll() is None, log.read_text(errors="replace")[-4000:]
                assert time.monotonic() < deadline_s, log.read_text(errors="replace")[-4000:]
                time.sleep(0.5)
            yield url
        finally:
            # The whole session: servers have workers.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def over(self, url: str) -> OpenEngine:
        """Open engines over the server; each begins with the weights of its policy."""

        @asynccontextmanager
        async def opened(policy: Path) -> AsyncIterator[Engine]:
            engine = self.engine_class(policy, urls=[url], max_context=CONTEXT)
            async with started(engine):
                async with engine.updating(1) as servers:
                    await servers[0].load_from_disk(policy, 1)
                yield engine

        return opened


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


ADAPTED = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
REAL_ENGINES: dict[str, RealEngine] = {
    "sglang": RealEngine(
        engine_class=SGLangEngine,
        # Weights of another shape end the server.
        abilities=replace(SGLANG, refuses_weights=False, truncation="unscaled"),
        variable="AREAL_GYM_SGLANG_VENV",
        script=ROOT / "tests/sglang/serve_cpu.py",
        flags=(
            *("--dtype", "float32", "--context-length", str(CONTEXT)),
            *("--max-total-tokens", "16384", "--max-running-requests", "32"),
            *("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", *ADAPTED),
        ),
    ),
    "vllm": RealEngine(
        engine_class=VLLMEngine,
        abilities=replace(VLLM, takes_grammars=True, weight_syncs=("disk", "distributed", "lora")),
        variable="AREAL_GYM_VLLM_VENV",
        script=ROOT / "tests/vllm/serve_cpu.py",
        flags=(
            *("--max-model-len", str(CONTEXT), "--max-num-seqs", "32"),
            *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"),
        ),
    ),
}
