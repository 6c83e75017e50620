"""Checks settings against this machine before anything slow begins."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from areal_gym.config import EngineConfig, RunConfig
from areal_gym.envs.base import TextEnv
from areal_gym.errors import ConfigError
from areal_gym.plugins import registry


def require_startable(config: RunConfig) -> None:
    """Check for mistakes that would show only after a warm start of minutes, or never.

    Raises:
        ConfigError: an engine without servers has a server's URL, or a device does not exist.
    """
    require_server_engine(config.engine)
    # On a cluster, the ranks have their devices elsewhere.
    if config.cluster.address is None and find_spec("torch") is not None:
        from areal_gym.models.device import pick_device

        pick_device(config.trainer.device, "trainer.device")
        pick_device(config.engine.device, "engine.device")


def obstacle_to_warm_start(env_id: str, arguments: Mapping[str, Any]) -> str:
    """Return why a small policy cannot be made for an environment; "" if it can."""
    from areal_gym.warm_start.demonstrations import obstacle_to_imitation

    env: TextEnv = registry().make("envs", env_id, **arguments)
    try:
        return obstacle_to_imitation(env)
    finally:
        env.close()


def require_server_engine(settings: EngineConfig) -> None:
    """Raise ConfigError if the engine would ignore the given URL."""
    if settings.url and not getattr(registry().load("engines", settings.id), "takes_urls", True):
        raise ConfigError(
            f"engine.url = {', '.join(settings.url)}, but the engine {settings.id!r} samples in "
            "this process and calls no server",
            hints=[
                "name the engine of the server: --engine sglang",
                "or leave the URL out, and the policy is sampled here",
            ],
        )
