"""What a run is made of: the entries that its settings name."""

from __future__ import annotations

from areal_gym.config import PluginConfig, RunConfig
from areal_gym.config.objective_settings import SUPERVISED
from areal_gym.plugins import Entry, Kind, registry


def entries_used(config: RunConfig) -> list[Entry]:
    """Everything that the settings name by an id, in the order of the settings.

    Raises:
        UnknownIdError: the settings name what nobody registered.
        DuplicateIdError: they name what two plugins claim.
    """
    found = registry()
    loggers = [found.get("loggers", logger.id) for logger in config.loggers]
    if config.objective in SUPERVISED:
        has_env = config.data.file is None or config.engine.model == "starter"
        return [*(_environments(config) if has_env else []), *loggers]
    sync = config.trainer.weight_sync
    return [
        *_environments(config),
        found.get("agents", config.agent.id),
        found.get("engines", config.engine.id),
        found.get("trainers", config.trainer.id),
        found.get("advantages", config.trainer.advantage),
        found.get("losses", config.trainer.loss),
        *(found.get("filters", f.id) for f in config.rollout.filters),
        *_named("curricula", config.rollout.curriculum),
        *_named("weight-syncs", None if sync.id == "auto" else sync),
        *loggers,
    ]


def require_installed(config: RunConfig) -> None:
    """Refuse to train with what is not here, before anything has been written or waited for.

    Raises:
        ConfigError: a package is missing that the trainer needs, or anything that settings name.
    """
    for entry in [*entries_used(config), registry().get("trainers", config.trainer.id)]:
        entry.require_installed()


def _environments(config: RunConfig) -> list[Entry]:
    """The environment, and of a mix those that it mixes."""
    mixed = config.env.kwargs.get("envs", ()) if config.env.id == "mix" else ()
    ids = [config.env.id, *(given["id"] for given in mixed if "id" in given)]
    return [registry().get("envs", id) for id in dict.fromkeys(ids)]


def _named(kind: Kind, settings: PluginConfig | None) -> list[Entry]:
    return [] if settings is None else [registry().get(kind, settings.id)]
