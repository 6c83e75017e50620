"""Servers that give back the memory of their GPUs while a trainer uses these (colocation).

    serving -> requests set aside -> "asleep" -> memory released      the trainer takes a step
            <- requests go on     <- new weights <- memory resumed    the trainer is offloaded

SGLang ends when it is asked to release what it has released, or while it samples. So a server that
sleeps says so by the name of its weights, which a later run reads when this one is killed.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_gym.engines.sglang.server_client import ServerClient

_MEMORY_S = 120.0
"""Long enough to unmap, or to map again, the memory of the largest GPUs."""
_ASLEEP = "asleep:"
WEIGHTS, CACHE = "weights", "kv_cache"


async def fall_asleep(client: ServerClient, tags: Sequence[str]) -> None:
    """Set requests aside, and release the memory of `tags`.

    Raises:
        EngineError: the server does not answer, or refuses.
    """
    await client.post("/pause_generation", {"mode": "retract"})
    await client.set_version(_ASLEEP + ",".join(tags))
    await client.post("/release_memory_occupation", {"tags": list(tags)}, timeout_s=_MEMORY_S)


async def resume_memory(client: ServerClient, tags: Sequence[str]) -> None:
    """Take the memory of `tags` again, whose content is lost.

    Raises:
        EngineError: the server does not answer, or refuses.
    """
    if tags:
        await client.post("/resume_memory_occupation", {"tags": list(tags)}, timeout_s=_MEMORY_S)


async def wake_forgotten(client: ServerClient, weight_version: str, model_path: str) -> bool:
    """Wake a server that a killed run has left asleep; return whether it was.

    It has the weights that it was started with afterwards.

    Raises:
        EngineError: the server does not answer, or refuses.
    """
    if not weight_version.startswith(_ASLEEP):
        return False
    tags = weight_version.removeprefix(_ASLEEP).split(",")
    await resume_memory(client, tags)
    await client.post("/continue_generation", {})
    if WEIGHTS in tags:
        await client.reload(model_path)
    return True
