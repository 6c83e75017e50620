"""The plugin entries that a run's settings name."""

from __future__ import annotations

from pathlib import Path

from areal_gym.config import PluginConfig, RunConfig
from areal_gym.config.objective_settings import SUPERVISED
from areal_gym.errors import UnknownIdError
from areal_gym.plugins import Entry, Kind, registry
from areal_gym.run_dir.run_dir import RunDir


def entries_used(config: RunConfig, *, plays: bool = True) -> list[Entry]:
    """Return every plugin entry that the settings name, in the order of the settings.

    Without `plays`, entries that play episodes or publish weights are left out.

    Raises:
        UnknownIdError: no plugin registers an id that the settings name.
        DuplicateIdError: two plugins register an id that the settings name.
    """
    plugins = registry()
    loggers = [plugins.get("loggers", logger.id) for logger in config.loggers]
    if config.objective in SUPERVISED:
        has_env = config.data.file is None or config.engine.model == "starter"
        return [*(_environments(config) if has_env else []), *loggers]
    sync = config.trainer.weight_sync
    if not plays:
        return [*_training(config), *loggers]
    return [
        *_environments(config),
        plugins.get("agents", config.agent.id),
        plugins.get("engines", config.engine.id),
        *_training(config),
        *(plugins.get("filters", f.id) for f in config.rollout.filters),
        *_named("curricula", config.rollout.curriculum),
        *_named("weight-syncs", None if sync.id == "auto" else sync),
        *loggers,
    ]


def known_from(run: Path, error: UnknownIdError) -> UnknownIdError:
    """Return the error with a hint about the plugin that had the id when the run was made."""
    used = RunDir(run).read_provenance().get("used", [])
    for entry in used:
        if repr(entry["id"]) not in error.message:
            continue
        distribution, version = entry.get("distribution"), entry.get("version")
        install = f": pip install '{distribution}=={version}'" if distribution and version else ""
        hint = f"this run had it from plugin {entry['plugin']}{install}"
        return UnknownIdError(error.message, hints=[hint, *error.hints])
    return error


def require_installed(config: RunConfig) -> None:
    """Raise ConfigError if a package that the trainer or another plugin needs is missing."""
    for entry in [*entries_used(config), registry().get("trainers", config.trainer.id)]:
        entry.require_installed()


def _environments(config: RunConfig) -> list[Entry]:
    """Return the environment; for a mix, also the environments in it."""
    mixed = config.env.kwargs.get("envs", ()) if config.env.id == "mix" else ()
    ids = [config.env.id, *(env["id"] for env in mixed if "id" in env)]
    return [registry().get("envs", id) for id in dict.fromkeys(ids)]


def _training(config: RunConfig) -> list[Entry]:
    plugins, trainer = registry(), config.trainer
    named = (("trainers", trainer.id), ("advantages", trainer.advantage), ("losses", trainer.loss))
    return [plugins.get(kind, id) for kind, id in named]


def _named(kind: Kind, settings: PluginConfig | None) -> list[Entry]:
    return [] if settings is None else [registry().get(kind, settings.id)]
