"""Starts and closes the engine of the settings, and makes the renderer of its policy."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from areal_gym.chat import Renderer
from areal_gym.config import EngineConfig, RunConfig
from areal_gym.distributed.cluster import Cluster
from areal_gym.engines.base import Engine
from areal_gym.engines.checkpoint_config import vocab_size_of
from areal_gym.engines.servers.server_engine import ServerEngine
from areal_gym.errors import ConfigError, GymError, PluginError, UsageError
from areal_gym.plugins import registry
from areal_gym.runs.components import check_types
from areal_gym.runs.early_checks import require_server_engine
from areal_gym.runs.run_display import Display
from areal_gym.utils.command_words import command_words

_REPORT_EVERY_S = 10


def open_renderer(config: RunConfig, policy: Path) -> Renderer:
    """Return the renderer of `policy` with the settings' options.

    Raises:
        ConfigError: the tokenizer has tokens outside of the model's vocabulary.
    """
    renderer = Renderer.from_checkpoint(
        policy,
        template_kwargs=config.rollout.template_kwargs,
        keeps_thinking=config.rollout.thinking == "keep",
    )
    # Control tokens beyond the vocabulary are accepted unless turns end with them: some models are
    # published with tokens for images that their text part does not know.
    size = vocab_size_of(policy)
    num_tokens = getattr(renderer.tokenizer, "num_plain_tokens", 0)
    needed = max([num_tokens, *(id + 1 for id in renderer.stop_token_ids)])
    if size is not None and needed > size:
        raise ConfigError(
            f"the tokenizer of {policy} has tokens up to {needed - 1:,}, and its model has a "
            f"vocabulary of {size:,}: it knows 0 to {size - 1:,}",
            hints=[
                "they are of different models: save both from the same one",
                "or resize the model: model.resize_token_embeddings(len(tokenizer))",
            ],
        )
    return renderer


def _engine_settings(config: RunConfig) -> EngineConfig:
    settings, extra_kwargs = config.engine, dict[str, Any]()
    engine_class = registry().load("engines", settings.id)
    if settings.id == "embedded" and config.model.trust_remote_code:
        extra_kwargs["trusts_code"] = True
    elif isinstance(engine_class, type) and issubclass(engine_class, ServerEngine):
        if config.cluster.rollout_workers:
            # Servers that several processes call must pause requests themselves.
            extra_kwargs["interrupt"] = engine_class.in_place
        if not settings.url:
            arguments = command_words(settings.kwargs.get("server_args"))
            if config.trainer.routing_replay:
                arguments += engine_class.experts_flags
            if config.trainer.colocate and not _is_for_cpus(arguments):
                arguments += engine_class.memory_flags
            extra_kwargs["server_args"] = arguments
    return settings.model_copy(update={"kwargs": {**settings.kwargs, **extra_kwargs}})


def _is_for_cpus(server_args: Sequence[str]) -> bool:
    joined = " ".join(server_args)
    return "--device cpu" in joined or "--device=cpu" in joined


def _make_engine(engine_class: Any, policy: Path, settings: EngineConfig) -> Engine:
    require_server_engine(settings)
    check_types(engine_class, settings.kwargs, key="engine.kwargs", id=settings.id)
    try:
        engine: Engine = engine_class.from_settings(policy, settings)
    except Exception as error:
        if isinstance(error, TypeError) and re.search(r"\bargument", str(error)):
            raise ConfigError(
                f"engine.kwargs do not fit: {error}",
                hints=[f"its arguments: areal-gym show {settings.id}"],
            ) from error
        raise plugin_error(settings.id, "be made", error) from error
    return engine


def plugin_error(id: str, verb: str, error: Exception) -> GymError:
    """Return the error to raise: a GymError unchanged, others wrapped with engine and cause."""
    if isinstance(error, GymError):
        return error
    entry = registry().get("engines", id)
    return PluginError(
        f"the engine {id!r} of plugin {entry.plugin} cannot {verb}: "
        f"{type(error).__name__}: {error}",
        hints=[f"its arguments: areal-gym show {id}"],
    )


async def _with_placed_servers(
    engine_class: Any, settings: EngineConfig, policy: Path, cluster: Cluster, num_servers: int
) -> EngineConfig:
    from areal_gym.distributed.ray_servers import place_servers

    kwargs = dict(settings.kwargs)
    names = kwargs.keys() & {"command", "server_args", "start_timeout_s"}
    launch_arguments = {name: kwargs.pop(name) for name in names}
    kwargs["processes"] = await place_servers(
        cluster, policy.absolute(), num_servers, recipe=engine_class.recipe, **launch_arguments
    )
    return settings.model_copy(update={"kwargs": kwargs})


async def _report_start(engine_id: str, display: Display) -> None:
    for number in itertools.count(1):
        await asyncio.sleep(_REPORT_EVERY_S)
        display.say(f"engine {engine_id}: starting, {number * _REPORT_EVERY_S} s so far")


@asynccontextmanager
async def open_engine(
    config: RunConfig, policy: Path, cluster: Cluster | None = None, display: Display | None = None
) -> AsyncIterator[tuple[Engine, Renderer]]:
    """Start the engine of the settings; yield it with `policy`'s renderer, and close it at the end.

    `display` shows how long the start takes, because servers take a minute or more.
    """
    renderer = open_renderer(config, policy)
    settings = _engine_settings(config)
    engine_class = registry().load("engines", config.engine.id)
    if cluster is not None and config.cluster.servers:
        settings = await _with_placed_servers(
            engine_class, settings, policy, cluster, config.cluster.servers
        )
    if not hasattr(engine_class, "from_settings"):
        raise UsageError(
            f"the engine {config.engine.id!r} cannot serve a checkpoint",
            hints=["use engine.id=embedded, engine.id=sglang or engine.id=vllm"],
        )
    engine = _make_engine(engine_class, policy, settings)
    reporter = asyncio.create_task(_report_start(config.engine.id, display or Display()))
    try:
        try:
            await engine.start()
        except Exception as error:
            raise plugin_error(settings.id, "start", error) from error
        finally:
            reporter.cancel()
        yield engine, renderer
    finally:
        await engine.aclose()
