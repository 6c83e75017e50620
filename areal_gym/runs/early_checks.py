"""Checks of settings against this machine, made before anything is waited for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from areal_gym.config import EngineConfig, RunConfig
from areal_gym.envs.base import TextEnv
from areal_gym.errors import ConfigError
from areal_gym.plugins import registry


def require_startable(config: RunConfig) -> None:
    """Check what would fail after a warm start of minutes, or be ignored without a word.

    Raises:
        ConfigError: a server's URL for an engine that has no server, or a device that is not here.
    """
    require_server_engine(config.engine)
    # On a cluster, the ranks have their devices elsewhere.
    if config.cluster.address is None and find_spec("torch") is not None:
        from areal_gym.models.device import pick_device

        pick_device(config.trainer.device, "trainer.device")
        pick_device(config.engine.device, "engine.device")


def obstacle_to_warm_start(env_id: str, arguments: Mapping[str, Any]) -> str:
    """Return why no small policy can be made for an environment; "" if it can."""
    from areal_gym.warm_start.demonstrations import obstacle_to_imitation

    env: TextEnv = registry().make("envs", env_id, **arguments)
    try:
        return obstacle_to_imitation(env)
    finally:
        env.close()


def require_server_engine(settings: EngineConfig) -> None:
    """Raise ConfigError for a URL that the engine would not ask."""
    if settings.url and not getattr(registry().load("engines", settings.id), "takes_urls", True):
        raise ConfigError(
            f"engine.url = {', '.join(settings.url)}, but the engine {settings.id!r} samples in "
            "this process and asks no server",
            hints=[
                "name the engine of the server: --engine sglang",
                "or leave the URL out, and the policy is sampled here",
            ],
        )
