"""The built-in engines."""

from __future__ import annotations

from collections.abc import Iterable

from areal_gym.plugins import EngineSpec, hookimpl


@hookimpl
def register_engines() -> Iterable[EngineSpec]:
    """Yield the built-in engines."""
    yield EngineSpec(
        id="embedded",
        entry_point="areal_gym.engines.embedded:EmbeddedEngine",
        summary="torch in this process, no server; Qwen, Llama, Mistral and Gemma shapes",
        requires=("torch", "safetensors"),
        extra="train",
    )
    yield EngineSpec(
        id="sglang",
        entry_point="areal_gym.engines.sglang:SGLangEngine",
        summary="SGLang servers: those in engine.url, or one that the run starts and stops",
    )
    yield EngineSpec(
        id="vllm",
        entry_point="areal_gym.engines.vllm:VLLMEngine",
        summary="vLLM servers: those in engine.url, or one that the run starts and stops",
    )
    yield EngineSpec(
        id="scripted",
        entry_point="areal_gym.engines.scripted:ScriptedEngine",
        summary="replies from a script: for tests and for trying environments",
    )
