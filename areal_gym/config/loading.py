"""From files and the command line to settings, or to an error that says what to type."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from areal_gym.config.algorithm_settings import (
    PRESETS,
    left_open,
)
from areal_gym.config.run_config import STARTER_DEFAULTS, RunConfig
from areal_gym.config.sections import RolloutConfig, TrainerConfig
from areal_gym.config.settings_model import merge
from areal_gym.errors import ConfigError, DataError, did_you_mean
from areal_gym.utils.files import path_hints, read_yaml


def load_config(
    file: Path | None = None,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Settings from defaults < `base` < the YAML `file` < `overrides` (each `key=value`).

    The defaults depend on the policy: `engine.model=starter` brings `STARTER_DEFAULTS`.

    Raises:
        ConfigError: unreadable file, unknown key (with a suggestion), wrong value, or a conflict.
    """
    tree: dict[str, Any] = {}
    if base is not None:
        merge(tree, base)
    source = "the settings"
    if file is not None:
        merge(tree, _read_yaml(file))
        source = str(file)
    if overrides:
        _leave_open(tree)
    for text in overrides:
        key, value = parse_override(text)
        node = tree
        *parents, leaf = key.split(".")
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise ConfigError(f"{text}: {parent!r} holds a value, not settings")
            node = child
        node[leaf] = value
    engine = tree.get("engine")
    if not isinstance(engine, dict) or engine.get("model", "starter") == "starter":
        given, tree = tree, {}
        merge(tree, STARTER_DEFAULTS)
        merge(tree, given)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, source) from None


def parse_override(text: str) -> tuple[str, Any]:
    """`"trainer.lr=1e-5"` -> `("trainer.lr", 1e-05)`; values are YAML."""
    key, separator, raw = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(
            f"{text!r} is no override", hints=["write it as key=value, like trainer.lr=1e-5"]
        )
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r}: the value is no YAML: {error}") from None
    # YAML 1.1 reads 1e-5 (no dot) as text.
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        value = float(value)
    return key.strip(), value


def field_names() -> list[str]:
    """All dotted keys, in order."""
    return [name for name, _ in setting_fields()]


def setting_fields(
    model: type[BaseModel] = RunConfig, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """All settings by dotted key, in order."""
    for name, info in model.model_fields.items():
        inner = _model_of(info)
        if inner is None:
            yield prefix + name, info
        else:
            yield from setting_fields(inner, f"{prefix}{name}.")


def _model_of(info: FieldInfo) -> type[BaseModel] | None:
    annotation = info.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _leave_open(tree: dict[str, Any]) -> None:
    """Drop what the tree's algorithm would fill in anyway.

    A run's recorded settings are complete. An override that names another algorithm (estimator,
    loss) then brings that one's settings, and what was chosen by hand stays.
    """
    trainer, rollout = tree.get("trainer"), tree.get("rollout")
    if not isinstance(trainer, dict):
        return
    named = {key: trainer[key] for key in ("algorithm", "advantage", "loss") if key in trainer}
    try:
        usual = TrainerConfig.model_validate(named)
        filters = RolloutConfig(filters=PRESETS[usual.algorithm].filters).filters
        if (
            isinstance(rollout, dict)
            and "filters" in rollout
            and RolloutConfig(filters=rollout["filters"]).filters == filters
        ):
            tree["rollout"] = {key: value for key, value in rollout.items() if key != "filters"}
    except ValidationError:
        return  # what is wrong with it is said later
    tree["trainer"] = left_open(trainer, usual.model_dump(mode="json"))


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
    # A section whose lines are all commented out says nothing.
    sections = {name for name, info in RunConfig.model_fields.items() if _model_of(info)}
    return {key: v for key, v in tree.items() if not (v is None and key in sections)}


def _nearest(key: str, known: Sequence[str]) -> list[str]:
    """A hint: settings whose last word is nearly the key's, in whatever section they stand."""
    section, _, word = key.rpartition(".")
    words = {name: name.rpartition(".")[2] for name in known}
    close = difflib.get_close_matches(word, sorted(set(words.values())))
    names = [name for name in known if words[name] in close]
    names.sort(key=lambda name: (close.index(words[name]), not name.startswith(f"{section}.")))
    near = f"did you mean {' or '.join(map(repr, names[:3]))}?" if names else None
    near = near or did_you_mean(key, known)
    return [] if near is None else [near]


def _explain(error: ValidationError, source: str) -> ConfigError:
    known = field_names()
    lines: list[str] = []
    hints: list[str] = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown key {key!r} in {source}")
            hints += _nearest(key, known)
        else:
            reason = problem["msg"].removeprefix("Value error, ")
            lines.append(
                f"{key} = {problem['input']!r}: {reason}"
                if key and problem["type"] != "value_error"
                else reason
            )
    hints.append("all settings: areal-gym train --dry-run")
    return ConfigError("; ".join(lines), hints=hints)
