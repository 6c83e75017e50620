"""Make command-line flags from settings, and resolve the settings that a command runs with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_origin

import click
from pydantic.fields import FieldInfo

from areal_gym.cli import complete
from areal_gym.cli.output import warn
from areal_gym.cli.own_task import own_flags
from areal_gym.config import RunConfig, load_config
from areal_gym.config.settings_model import bounds, setting_fields
from areal_gym.config.trust import require_chosen
from areal_gym.errors import NothingToDoError, UnknownIdError, UsageError
from areal_gym.run_dir.provenance import entries_used, known_from
from areal_gym.run_dir.run_list import no_run_hints
from areal_gym.utils.code_references import absolute_reference
from areal_gym.utils.command_words import quoted

F = TypeVar("F", bound=Callable[..., Any])


def setting_flags(flags: Mapping[str, str]) -> Callable[[F], F]:
    """Add one option for each setting; the command gets the given ones as `flags`, by dotted key.

    Type, bounds, help text and completion are those of the setting. `flags` has the dotted keys of
    settings by the option that sets them, like {"--seed": "seed"}.
    """
    fields = dict(setting_fields(RunConfig))

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def with_flags(*args: Any, **options: Any) -> Any:
            given = {key: options.pop(_parameter(key)) for key in flags.values()}
            values = {key: value for key, value in given.items() if value not in (None, ())}
            return command(*args, flags=values, **options)

        for flag, key in reversed(list(flags.items())):
            info = fields[key]
            is_multiple = get_origin(info.annotation) is tuple
            help_text = " ".join((info.description or "").split())
            with_flags = click.option(
                *(flag, _parameter(key)),
                type=_option_type(info),
                multiple=is_multiple,
                help=f"{help_text} Repeat it for several." if is_multiple else help_text,
                shell_complete=complete.setting_values(key),
            )(with_flags)
        return with_flags  # type: ignore[return-value]

    return decorate


def _parameter(key: str) -> str:
    return key.replace(".", "__")


def _option_type(info: FieldInfo) -> click.ParamType[Any]:
    """Return the type of an option: numbers within the setting's bounds, or text."""
    if info.annotation not in (int, float):
        return click.STRING
    limits = dict(bounds(info))
    number_range = click.IntRange if info.annotation is int else click.FloatRange
    low, high = limits.get("ge", limits.get("gt")), limits.get("le", limits.get("lt"))
    return number_range(low, high, min_open="gt" in limits, max_open="lt" in limits)


def resolve(
    *,
    file: Path | None,
    overrides: Sequence[str],
    flags: Mapping[str, Any] | None = None,
    is_chosen: bool = True,
    plays: bool = True,
) -> RunConfig:
    """Return the settings of a recipe, overridden by flags, overridden by `key=value`.

    `is_chosen` says whether the user has named the file as a recipe; otherwise it comes from a run
    directory, whose settings may not start programs (`areal_gym.config.trust`). Without `plays`,
    the environment, the agent and the engine need not be installed.

    Raises:
        UsageError: a setting or an id is unknown or wrong, or a run's settings would start a
            program that the user has not chosen.
    """
    config = load_config(file, overrides, flags=flags)
    if file is not None and file.name == "config.yaml":  # the settings of a run directory
        from areal_gym.runs.run_inputs import with_copies

        config, remarks = with_copies(config, file.parent)
        for remark in remarks:
            warn(remark)
    if file is not None and not is_chosen:
        keys = [text.partition("=")[0] for text in overrides]
        require_chosen(config, file, [*(flags or {}), *keys])
    try:
        entries_used(config, plays=plays)
    except UnknownIdError as error:
        raise error if file is None else known_from(file.parent, error) from None
    return config


def env_flags(env: Sequence[str]) -> dict[str, Any]:
    """Return the settings of `--env`: one id, several with weights (`tir:0.7`), or UsageError."""
    envs = [_with_weight(absolute_reference(text)) for text in env]
    if len(envs) > 1:
        return {"env.id": "mix", "env.kwargs": {"envs": envs}}
    if envs and "weight" in envs[0]:
        raise UsageError(
            f"--env {env[0]} gives a weight to a single environment",
            hints=["name another one: --env tir:0.7 --env math:0.3"],
        )
    return {"env.id": envs[0]["id"]} if envs else {}


def _with_weight(text: str) -> dict[str, Any]:
    """Split `ID:WEIGHT`; a colon may also be part of an id or of a URL."""
    id, _, weight = text.rpartition(":")
    if "://" in id and ":" not in id.partition("://")[2]:  # a port: remote:http://HOST:PORT
        return {"id": text}
    try:
        return {"id": absolute_reference(id), "weight": float(weight)} if id else {"id": text}
    except ValueError:  # an adapter: reasoning_gym:leg_counting
        return {"id": text}


def require_env(env: Sequence[str], file: Path | None, overrides: Sequence[str]) -> None:
    """Raise UsageError if neither flag, recipe nor override names an environment."""
    if not env and file is None and not any(o.startswith("env.id=") for o in overrides):
        raise UsageError(
            "which environment?",
            hints=[
                "name one: --env tir",
                "or give your own prompts: --data prompts.jsonl --reward rewards.py:NAME",
                "see all: areal-gym list envs",
            ],
        )


def task_flags(
    env: Sequence[str],
    own: Mapping[str, Any],
    flags: Mapping[str, Any],
    file: Path | None,
    overrides: Sequence[str],
    *,
    needs_env: bool = True,
) -> dict[str, Any]:
    """Return the settings of `--env`, of `--data`, `--reward` and `--tools`, and of other flags.

    `own` are the arguments that `own_arguments` makes of the three.

    Raises:
        UsageError: nothing names an environment, or the options contradict each other.
    """
    if len(env) > 1 and own:
        raise UsageError("--data, --reward and --tools are for one environment, not for a mix")
    has_env = bool(env) or any(text.startswith("env.id=") for text in overrides)
    settings = {**env_flags(env), **own_flags(own, flags, file, has_env=has_env), **flags}
    if needs_env and "env.id" not in settings and "data.file" not in settings:
        require_env(env, file, overrides)
    return settings


def run_recipe(run: Path) -> Path:
    """Return the settings file of a run; raise UsageError if the directory is not a run."""
    recipe = run / "config.yaml"
    if not recipe.is_file():
        raise UsageError(f"{run} is not a run directory", hints=no_run_hints(run))
    return recipe


def policy_files(run: Path | None, checkpoint: Path | None) -> tuple[Path | None, Path | None]:
    """Return the settings file and the checkpoint that `--run` or `--checkpoint` stands for.

    Raises:
        UsageError: the directory is not a run or not a checkpoint.
        NothingToDoError: the run has no checkpoint yet.
    """
    if run is not None:
        recipe = run_recipe(run)
        steps = sorted((run / "checkpoints").glob("step-*/config.json"))
        if not steps:
            raise NothingToDoError(
                f"{run} has no checkpoint yet",
                hints=[f"continue it: areal-gym train --resume --out {quoted(run)}"],
            )
        return recipe, steps[-1].parent
    if checkpoint is not None and not (checkpoint / "config.json").is_file():
        raise UsageError(
            f"{checkpoint} is not a checkpoint: it has no config.json",
            hints=no_run_hints(checkpoint),
        )
    return None, checkpoint
