"""vLLM: an engine over its servers, and a fake server.

Nothing here imports aiohttp before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_gym.engines.vllm.fake_vllm import FakeVLLMServer
    from areal_gym.engines.vllm.vllm_engine import VLLMEngine

__all__ = ["FakeVLLMServer", "VLLMEngine"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "fake_vllm" if name == "FakeVLLMServer" else "vllm_engine"
    return getattr(import_module(f"{__name__}.{module}"), name)
