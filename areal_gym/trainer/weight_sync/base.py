"""The contract of weight syncs, and the choice of one.

A weight sync brings named tensors (Hugging Face's names) to an engine under a version. It returns
when the engine samples with them; the engine itself checks the version of each of its servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from areal_gym.config import LoraConfig, PluginConfig
from areal_gym.engines.base import Engine, LocalEngine, RemoteEngine, WeightServer
from areal_gym.errors import ConfigError, EngineError
from areal_gym.plugins import registry
from areal_gym.trainer.base import AdapterWeightSync, GroupTrainer, Weights, WeightSync
from areal_gym.trainer.weight_sync.rank_tasks import TrainerWeights


def weights_for(weight_sync: WeightSync, trainer: GroupTrainer) -> Weights:
    """Return the weights that this weight sync publishes: the trainer's, or its adapter."""
    return _adapter_of(trainer) if takes_adapter(weight_sync) else TrainerWeights(trainer)


def takes_adapter(weight_sync: WeightSync) -> bool:
    """Return whether this weight sync publishes adapters."""
    return isinstance(weight_sync, AdapterWeightSync) and weight_sync.takes_adapter


def _adapter_of(trainer: GroupTrainer) -> Weights:
    # Gathered from the ranks when the first tensor is requested, in the weight sync's thread.
    yield from trainer.adapter().items()


def make_weight_sync(
    engine: Engine, settings: PluginConfig, *, directory: Path, lora: LoraConfig | None = None
) -> WeightSync:
    """Make the weight sync of the setting `trainer.weight_sync`; "auto" chooses by the engine.

    Args:
        engine: the engine that gets the weights.
        settings: the weight sync's id and arguments.
        directory: the weight sync may write into it.
        lora: the settings of the trained adapter, if there is one.

    Raises:
        UnknownIdError: the id is not registered.
        ConfigError: the weight sync does not fit the engine, or the arguments do not fit it.
    """
    id, kwargs = settings.id, dict(settings.kwargs)
    if id == "auto":
        id = "in-process" if isinstance(engine, LocalEngine) else "disk"
    sync_class = registry().load("weight-syncs", id)
    if isinstance(sync_class, AdapterWeightSync) and sync_class.takes_adapter:
        if lora is None:
            raise ConfigError(
                f"trainer.weight_sync={id} publishes an adapter, and all weights are trained",
                hints=["trainer.lora={} trains an adapter", "trainer.weight_sync=disk"],
            )
        kwargs = {"alpha": lora.alpha, **kwargs}
    try:
        sync: WeightSync = sync_class(engine, directory=directory, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"trainer.weight_sync.kwargs do not fit {id!r}: {error}",
            hints=[f"its arguments: areal-gym show {id}"],
        ) from error
    return sync


def require_remote(engine: Engine, id: str) -> RemoteEngine:
    """Return the engine, which must have servers.

    Raises:
        ConfigError: the engine runs in this process.
    """
    if not isinstance(engine, RemoteEngine):
        raise ConfigError(
            f"trainer.weight_sync={id} brings weights to servers, and this engine has none",
            hints=["an engine in this process needs trainer.weight_sync=in-process"],
        )
    return engine


async def on_all(
    servers: Sequence[WeightServer], act: Callable[[WeightServer], Awaitable[object]]
) -> list[WeightServer]:
    """Run `act` for all servers at once, and return those for which it succeeded.

    Raises:
        EngineError: it failed for all; this is the first server's error.
    """
    results = await asyncio.gather(*(act(server) for server in servers), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        if not isinstance(error, EngineError) or len(errors) == len(servers):
            raise error
    return [s for s, r in zip(servers, results, strict=True) if not isinstance(r, BaseException)]


@asynccontextmanager
async def update_session(
    servers: Sequence[WeightServer], version: int
) -> AsyncIterator[list[WeightServer]]:
    """Begin and end an update to `version` on every server.

    Yields the servers on which it began. Servers that fail are left out; the engine notices that
    they do not report the new version.

    Raises:
        EngineError: no server is left.
    """

    alive = await on_all(servers, lambda server: server.begin_update())
    try:
        yield alive
    except BaseException:
        await asyncio.gather(
            *(server.abandon_update() for server in alive),
            return_exceptions=True,  # the first error is the one to report
        )
        raise
    await on_all(alive, lambda server: server.end_update(version))


def sent_type(name: str | None) -> torch.dtype | None:
    """Return the type that weights are sent in; None keeps their own.

    Raises:
        ConfigError: torch has no floating-point type of that name.
    """
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(
            f"trainer.weight_sync.kwargs.dtype = {name!r} is not a floating-point type of torch",
            hints=["available: bfloat16, float16, float32"],
        )
    return dtype
