"""Converts `data=`, `reward=`, `tools=`, `model=` and `env=` of `areal_gym.train` to settings.

Settings are text. A function or class from a file is named by the file, one from a notebook by a
name that this session knows. Rows in memory are written to a file in the cache, with which a run
can be resumed. `save_inputs` copies the files into the run's directory.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_gym.config.objective_settings import SUPERVISED, DataConfig
from areal_gym.config.prompts_settings import PROMPTS, require_model
from areal_gym.config.sections import EnvConfig
from areal_gym.config.settings_model import merged
from areal_gym.envs.base import TextEnv
from areal_gym.envs.prompt_rows import plain_value
from areal_gym.errors import ConfigError, DataError, UsageError
from areal_gym.images.row_images import portable_row
from areal_gym.tasks import open_splits
from areal_gym.tasks.given_tasks import SETTINGS, is_source
from areal_gym.utils.cache import cache_directory, readable_cache_errors
from areal_gym.utils.code_references import absolute_reference
from areal_gym.utils.session_objects import name_of


def own_settings(
    *, data: Any, reward: Any, tools: Any, model: Any, env: Any, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings for the arguments, merged into other `settings`.

    `data`, `model` and `env` may also be sections of settings: mappings with their keys.

    Raises:
        UsageError: the objective does not use one of them.
        DataError: the rows cannot be read, or not be written as JSON.
    """
    tree = dict(settings)
    if isinstance(model, Mapping):
        tree["model"] = model
    elif model is not None:
        tree = merged(tree, {"engine": {"model": str(model)}})
    if isinstance(env, Mapping) and set(env) <= set(EnvConfig.model_fields):
        tree["env"] = env
    elif env is not None:
        tree["env"] = {"id": env_id(env)}
    if isinstance(data, Mapping) and set(data) <= set(DataConfig.model_fields):
        tree["data"], data = data, None
    if data is not None and tree.get("objective") in SUPERVISED:
        tree = merged(tree, {"data": {"file": _place_of(data)}})
        data = None
    env_kwargs = {
        "tasks": None if data is None else _named_data(data),
        "reward": None if reward is None else named(reward),
        "tools": None if tools is None else named(tools),
    }
    given = {key: value for key, value in env_kwargs.items() if value is not None}
    if given and tree.get("objective") in SUPERVISED:
        raise UsageError(f"objective={tree['objective']!r} has no use for {' and '.join(given)}")
    if given:
        tree = merged({"env": {"id": PROMPTS}}, tree, {"env": {"kwargs": given}})
    return tree


def require_task(config: Any, settings: Mapping[str, Any]) -> None:
    """Raise UsageError if neither the configuration nor the settings say what to train on."""
    has_file = config is not None and not isinstance(config, Mapping)
    trees = [settings, config if isinstance(config, Mapping) else {}]
    if not has_file and not any(tree.get("env") or tree.get("data") for tree in trees):
        raise UsageError(
            "train on what?",
            hints=[
                'your prompts: data="prompts.jsonl", reward=my_function, model="Qwen/Qwen3-0.6B"',
                'an environment: env="tir", a class, or "FILE.py:CLASS"',
                "see all: areal-gym list envs",
            ],
        )


def require_named_model(config: Any, settings: Mapping[str, Any], env: str, model: str) -> None:
    """Raise UsageError if your own prompts come without a model."""
    trees = [settings, config if isinstance(config, Mapping) else {}]
    engines = [tree.get("engine") for tree in trees]
    is_named = any(isinstance(engine, Mapping) and "model" in engine for engine in engines)
    has_file = config is not None and not isinstance(config, Mapping)
    require_model(env, model, is_named=is_named or has_file)


def refuse_nested_training() -> None:
    """Raise ConfigError while a file is loaded for its functions, which would train once more."""
    frame = sys._getframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "<module>" and name.startswith("areal_gym_file_"):
            raise ConfigError(
                f"{frame.f_code.co_filename} trains when it is loaded, and it is loaded for its "
                "functions",
                hints=["put the training below: if __name__ == '__main__':"],
            )
        frame = frame.f_back  # type: ignore[assignment]


def env_id(env: Any) -> str:
    """Return the id of an environment, given as an id, a class, a function or an instance."""
    if isinstance(env, str):
        return absolute_reference(env)
    if isinstance(env, TextEnv):
        if env.made_by is None:
            raise UsageError(
                f"a run needs many instances of {type(env).__name__}, and this is a single one",
                hints=["give its id, its class, or a function that makes one"],
            )
        return name_of(env.made_by)
    if callable(env):
        return name_of(env)
    raise UsageError(
        f"env is a {type(env).__name__}",
        hints=["give an id, a class, a function that makes one, or FILE.py:CLASS"],
    )


def named(value: Any) -> Any:
    """Return rewards or tools with names in place of functions; mappings become lists."""
    if isinstance(value, str):
        return absolute_reference(value)
    if isinstance(value, Mapping):
        if "reward" in value:
            return [{**value, "reward": named(value["reward"])}]
        return [{"reward": named(reward), "weight": weight} for reward, weight in value.items()]
    if isinstance(value, Sequence):
        lists = [_as_list(named(item)) for item in value]
        return [item for items in lists for item in items]
    settings = getattr(value, "settings", None)  # a RewardSet
    return named(list(settings)) if isinstance(settings, tuple) else name_of(value)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# ---- rows ----------------------------------------------------------------------------------------


def _named_data(data: Any) -> Any:
    if is_source(data):
        return name_of(data)
    if isinstance(data, Mapping) and "data" in data and set(data) <= set(SETTINGS):
        places = {
            key: _place_of(data[key]) for key in ("data", "test") if data.get(key) is not None
        }
        return {**data, **places}
    if isinstance(data, str | Path):
        return _place_of(data)
    splits = open_splits(data)
    files = {name: _spooled(rows) for name, rows in splits.items()}
    if len(files) == 1:
        return next(iter(files.values()))
    train = files.get("train", next(iter(files.values())))
    test = next((files[name] for name in ("test", "validation") if name in files), None)
    return {"data": train, "test": test} if test is not None else train


def _place_of(data: Any) -> str:
    """Return the path of data, or its id on the hub; write rows in memory to a file first."""
    if isinstance(data, str | Path):
        path = Path(data).expanduser()
        return str(path.absolute()) if path.exists() or isinstance(data, Path) else str(data)
    (rows,) = open_splits(data).values()
    return _spooled(rows)


def _spooled(rows: Any) -> str:
    """Write rows as JSON lines into the cache, under the hash of their content; return the path."""
    folder = cache_directory() / "data"
    digest = hashlib.sha256()
    with readable_cache_errors():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".draft", delete=False) as file:
            draft = Path(file.name)
            try:
                for row in rows:
                    try:
                        shown = portable_row(row.data, Path.cwd())
                        data = {name: plain_value(value) for name, value in shown.items()}
                    except ValueError as error:
                        raise DataError(f"{row.where}: {error}") from None
                    line = (json.dumps(data, ensure_ascii=False) + "\n").encode()
                    digest.update(line)
                    file.write(line)
            except BaseException:
                draft.unlink()
                raise
        place = folder / digest.hexdigest()[:16] / f"{rows.name.partition(',')[0] or 'rows'}.jsonl"
        place.parent.mkdir(exist_ok=True)
        draft.replace(place)
    return str(place)
