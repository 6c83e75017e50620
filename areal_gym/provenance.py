"""What a run is made of: the entries that its settings name."""

from __future__ import annotations

from areal_gym.config import RunConfig
from areal_gym.plugins import Entry, registry

__all__ = ["entries_used"]


def entries_used(config: RunConfig) -> list[Entry]:
    """Environment, agent, engine, trainer, advantage, loss and loggers of the settings, in order.

    Raises:
        UnknownIdError: the settings name what nobody registered.
        DuplicateIdError: they name what two plugins claim.
    """
    found = registry()
    return [
        found.get("envs", config.env.id),
        found.get("agents", config.agent.id),
        found.get("engines", config.engine.id),
        found.get("trainers", config.trainer.id),
        found.get("advantages", config.trainer.advantage),
        found.get("losses", config.trainer.loss),
        *(found.get("loggers", id) for id in config.loggers),
    ]
