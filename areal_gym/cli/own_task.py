"""`--data`, `--reward` and `--tools` define a user's own task: they set arguments of `prompts`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from areal_gym.cli import complete
from areal_gym.errors import DataError, UsageError
from areal_gym.utils.code_references import absolute_reference
from areal_gym.utils.files import read_yaml

if TYPE_CHECKING:
    from areal_gym.config import RunConfig

F = TypeVar("F", bound=Callable[..., Any])

_DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".gz")
_FLAGS = {"tasks": "--data", "reward": "--reward", "tools": "--tools"}


def own_task_options(command: F) -> F:
    """Take `--data`, `--reward` and `--tools`, as `data`, `reward` and `tools`."""
    data = click.option(
        "--data",
        metavar="DATA",
        help="Rows with a prompt each: a file, a folder, or a data set of the hub (docs/data.md).",
    )
    reward = click.option(
        "--reward",
        multiple=True,
        metavar="REWARD",
        shell_complete=complete.ids("rewards"),
        help="The reward: FILE.py:NAME, or an id (areal-gym list rewards), with =WEIGHT if there "
        "are several. Repeat it for several.",
    )
    tools = click.option(
        "--tools",
        multiple=True,
        metavar="FILE.py:NAME",
        help="A function that the policy may call, or a class of tools. Repeat it for several.",
    )
    return data(reward(tools(command)))


def env_with_arguments(name: str = "env", metavar: str = "ENV") -> Callable[[F], F]:
    """Take the id of an environment, and its arguments as the dictionary `settings`.

    With `--data`, the environment is `prompts` unless another one is named.
    """

    def parse(ctx: click.Context, parameter: click.Parameter, texts: Any) -> dict[str, Any]:
        from areal_gym.config import parse_override

        return dict(map(parse_override, texts))

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def with_own_task(*args: Any, **parameters: Any) -> Any:
            options = ("data", "reward", "tools")
            own = own_arguments(*(parameters.pop(option) for option in options))
            if parameters[name] is None:
                if not own:
                    raise UsageError(
                        f"which {metavar}?",
                        hints=["see all: areal-gym list envs", "or rows of yours: --data FILE"],
                    )
                parameters[name] = "prompts"
            parameters["settings"] = {**own, **parameters["settings"]}
            return command(*args, **parameters)

        attributes: dict[str, Any] = {"nargs": -1, "metavar": "[key=value]...", "callback": parse}
        ids = complete.ids("envs")
        env = click.argument(name, metavar=metavar, required=False, shell_complete=ids)
        settings = click.argument("settings", shell_complete=complete.env_arguments, **attributes)
        return env(settings(own_task_options(with_own_task)))  # type: ignore[return-value]

    return decorate


def own_arguments(data: str | None, reward: Sequence[str], tools: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of an environment that the options stand for.

    Paths are made absolute, because a run may be continued from another directory.
    """
    arguments: dict[str, Any] = {}
    if data is not None:
        arguments["tasks"] = _absolute_data(data)
    for name, references in (("reward", reward), ("tools", tools)):
        if references:
            absolute = [absolute_reference(reference) for reference in references]
            arguments[name] = absolute[0] if len(absolute) == 1 else absolute
    return arguments


def own_flags(
    arguments: Mapping[str, Any], flags: Mapping[str, Any], recipe: Path | None, *, has_env: bool
) -> dict[str, Any]:
    """Return settings by dotted key: the arguments of `--env`, or else of `prompts`.

    `flags` are the settings of other options, and `recipe` the file of those that they override.

    Raises:
        UsageError: the objective has no use for the options.
    """
    from areal_gym.config.objective_settings import SUPERVISED
    from areal_gym.config.prompts_settings import PROMPTS

    if not arguments:
        return {}
    if flags.get("objective") in SUPERVISED:
        if wrong := [_FLAGS[name] for name in arguments if name != "tasks"]:
            raise UsageError(f"--objective {flags['objective']} has no use for {wrong[0]}")
        return {"data.file": arguments["tasks"]}
    has_env = has_env or bool(_in_recipe(recipe, "env", "id"))
    settings = {f"env.kwargs.{name}": value for name, value in arguments.items()}
    return settings if has_env else {"env.id": PROMPTS, **settings}


def _absolute_data(data: str) -> str:
    path = Path(data).expanduser()
    is_path = path.exists() or path.suffix.lower() in _DATA_SUFFIXES
    return str(path.absolute()) if is_path else data


def require_named_model(
    config: RunConfig, flags: Mapping[str, Any], overrides: Sequence[str], recipe: Path | None
) -> None:
    """Raise UsageError if the prompts are the user's own, and no flag, override or recipe names a
    model to answer them."""
    from areal_gym.config.prompts_settings import require_model

    is_named = "engine.model" in flags or any(o.startswith("engine.model=") for o in overrides)
    is_named = is_named or bool(_in_recipe(recipe, "engine", "model"))
    require_model(config.env.id, config.engine.model, is_named=is_named)


def _in_recipe(recipe: Path | None, section: str, key: str) -> Any:
    """Return a setting of the recipe; None if it does not have it or cannot be read."""
    if recipe is None:
        return None
    with contextlib.suppress(OSError, DataError, AttributeError):  # load_config reports the error
        return (read_yaml(recipe).get(section) or {}).get(key)
    return None
