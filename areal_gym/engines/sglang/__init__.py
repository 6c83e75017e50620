"""SGLang: an engine over its servers, their launcher, and a fake server.

Nothing here imports aiohttp before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_gym.engines.sglang.fake import FakeSGLangServer
    from areal_gym.engines.sglang.sglang_engine import SGLangEngine

__all__ = ["FakeSGLangServer", "SGLangEngine"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "fake" if name == "FakeSGLangServer" else "sglang_engine"
    return getattr(import_module(f"{__name__}.{module}"), name)
