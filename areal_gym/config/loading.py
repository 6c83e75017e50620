"""Load settings from files, flags and `key=value`; errors suggest the right spelling."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from areal_gym.config.absolute_paths import beside_recipe
from areal_gym.config.algorithm_settings import PRESETS
from areal_gym.config.defaults import RENAMED, on_starter_defaults, without_defaults
from areal_gym.config.prompts_settings import PROMPTS, on_prompts_defaults
from areal_gym.config.run_config import RunConfig
from areal_gym.config.sections import RolloutConfig, TrainerConfig
from areal_gym.config.setting_errors import settings_error
from areal_gym.config.settings_model import merged, section_of, setting_fields
from areal_gym.errors import ConfigError, DataError
from areal_gym.utils.files import path_hints, read_yaml

_RENAMED = {f"trainer.{old}": f"trainer.{new}" for old, new in RENAMED.items()}
"""Former names that overrides may use; `defaults.with_new_names` handles them in files."""


def load_config(
    file: Path | None = None,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Return validated settings; precedence: defaults < `base` < `file` < `flags` < `overrides`.

    Args:
        file: a YAML file.
        overrides: texts such as "trainer.lr=1e-5".
        base: a tree of settings.
        flags: values by dotted key.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, a value is wrong, or settings
            contradict each other.
    """
    recipe = {} if file is None else beside_recipe(_read_yaml(file), file.parent)
    tree = merged(base or {}, recipe)
    settings = [*(flags or {}).items(), *map(parse_override, overrides)]
    settings = [(_RENAMED.get(key, key), value) for key, value in settings]
    if settings:
        tree = _without_defaults(tree)
    for key, value in settings:
        _set(tree, key, value)
    engine, env = tree.get("engine"), tree.get("env")
    if not isinstance(engine, dict) or engine.get("model", "starter") == "starter":
        tree = on_starter_defaults(tree)
    elif isinstance(env, dict) and env.get("id") == PROMPTS:
        tree = on_prompts_defaults(tree)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        source = "the settings" if file is None else str(file)
        raise settings_error(error, source, field_names()) from None


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    section = tree
    *parents, leaf = key.split(".")
    for parent in parents:
        if section.get(parent) is None:  # the recorded value of a section that is not set
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            raise ConfigError(f"{key}={value}: {parent!r} holds a value, not settings")
    section[leaf] = value


def parse_override(text: str) -> tuple[str, Any]:
    """Parse `"trainer.lr=1e-5"` into `("trainer.lr", 1e-05)`; values are YAML."""
    key, separator, raw = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(
            f"{text!r} is not a valid override",
            hints=["write it as key=value, like trainer.lr=1e-5"],
        )
    try:
        value = yaml.safe_load(raw)
        json.dumps(value, default=str, skipkeys=True)  # an alias can contain itself
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date of month 13
        raise ConfigError(f"{text!r}: the value is not valid YAML: {error}") from None
    # YAML 1.1 reads 1e-5 (no dot) as text.
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        value = float(value)
    return key.strip(), value


def field_names() -> list[str]:
    """Return the dotted keys of all settings, in order."""
    return [name for name, _ in setting_fields(RunConfig)]


def _without_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree without the values that its algorithm fills in.

    A run's recorded settings are complete. Without these values, an override of the algorithm,
    the estimator or the loss gets the new one's defaults, and the values set by the user stay.
    """
    trainer, rollout = tree.get("trainer"), tree.get("rollout")
    if not isinstance(trainer, dict):
        return tree
    named = {key: trainer[key] for key in ("algorithm", "advantage", "loss") if key in trainer}
    rest = dict(tree)
    try:
        usual = TrainerConfig.model_validate(named)
        if isinstance(rollout, dict) and "filters" in rollout:
            filters = RolloutConfig(filters=rollout["filters"]).filters
            if filters == RolloutConfig(filters=PRESETS[usual.algorithm].filters).filters:
                rest["rollout"] = {key: v for key, v in rollout.items() if key != "filters"}
    except ValidationError:
        return tree  # the validation of the whole tree reports it
    rest["trainer"] = without_defaults(trainer, usual.model_dump(mode="json"))
    return rest


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        tree = read_yaml(file)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", hints=path_hints(file)) from None
    except DataError as error:
        raise ConfigError(error.message) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds a {type(tree).__name__}; settings are a mapping")
    # All lines of a section may be commented out.
    sections = {name for name, info in RunConfig.model_fields.items() if section_of(info)}
    return {key: v for key, v in tree.items() if not (v is None and key in sections)}
