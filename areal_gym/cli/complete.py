"""Completes ids, runs, settings and their values for TAB.

The functions are for click's `shell_complete`. They import what they need on use and print nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from areal_gym.plugins import Kind

Items = list[CompletionItem[str]]
Pairs = Iterable[tuple[str, str]]
"""Values with their meanings."""
Completer = Callable[[click.Context, click.Parameter, str], Items]


def _completer(pairs: Callable[[], Pairs]) -> Completer:
    return lambda ctx, param, incomplete: matching(pairs(), incomplete)


def ids(kind: Kind, *others: str) -> Completer:
    """Complete ids of one kind, adapters' ids up to the colon, and other words."""
    return _completer(lambda: [*_ids(kind), *((word, "") for word in others)])


def one_of(*words: str) -> Completer:
    """Complete one of a few words."""
    return _completer(lambda: ((word, "") for word in words))


def setting_values(key: str) -> Completer:
    """Complete the values of one setting."""
    return _completer(lambda: _choices(key))


def any_id(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Complete runs and ids of every kind."""
    from areal_gym.plugins import KINDS

    pairs = (pair for kind in KINDS for pair in _ids(kind))
    return _runs(incomplete) + matching(pairs, incomplete)


def runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Complete run directories, or any directories if no run matches."""
    return _runs(incomplete) or [CompletionItem(incomplete, type="dir")]


def settings(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Complete `key=` of all settings, and the values of settings with fixed choices."""
    key, separator, value = _pieces(ctx, param, incomplete)
    if not separator:
        return matching(_setting_keys(), key)
    prefix = f"{key}=" if "=" in incomplete else ""
    pairs = ((prefix + choice, meaning) for choice, meaning in _choices(key))
    return matching(pairs, prefix + value)


def env_arguments(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Complete `key=` of the arguments of the environment named before."""
    from areal_gym.plugins import registry

    env = ctx.params.get("env") or ctx.params.get("target")
    names = inspect.signature(registry().load("envs", str(env))).parameters if env else ()
    return matching(((f"{name}=", "") for name in names), incomplete)


def _pieces(ctx: click.Context, param: click.Parameter, incomplete: str) -> tuple[str, str, str]:
    """Split an override into key, "=" and value; bash passes them as three words."""
    from areal_gym.config import field_names

    before: Sequence[str] = ctx.params.get(param.name or "") or ()
    if before and before[-1] in field_names() and not incomplete:
        return before[-1], "=", ""
    if len(before) > 1 and before[-1] == "=":
        return before[-2], "=", incomplete
    key, separator, value = incomplete.partition("=")
    return key, separator, value


def matching(pairs: Pairs, incomplete: str) -> Items:
    """Return the values that begin with the typed text."""
    meanings = {value: meaning for value, meaning in pairs if value.startswith(incomplete)}
    return [CompletionItem(value, help=meaning or None) for value, meaning in meanings.items()]


def _ids(kind: Kind) -> Iterator[tuple[str, str]]:
    from areal_gym.plugins import registry

    for entry in registry().entries(kind):
        is_adapter = entry.spec.shown_id != entry.id
        yield entry.id + ":" * is_adapter, entry.spec.summary


def _runs(incomplete: str) -> Items:
    from areal_gym.run_dir.run_list import run_paths

    typed = Path(incomplete)
    folders = [Path("runs")]
    if incomplete:
        folders.append(typed if incomplete.endswith("/") else typed.parent)
    paths = (str(path) for folder in dict.fromkeys(folders) for path in run_paths(folder))
    return matching(((path, "") for path in paths), incomplete)


def _setting_keys() -> Iterator[tuple[str, str]]:
    from areal_gym.config import RunConfig
    from areal_gym.config.settings_model import setting_fields

    for name, info in setting_fields(RunConfig):
        yield f"{name}=", " ".join((info.description or "").split())


def _choices(key: str) -> Iterator[tuple[str, str]]:
    from areal_gym.config import RunConfig
    from areal_gym.config.algorithm_settings import PRESETS
    from areal_gym.config.objective_settings import OBJECTIVES
    from areal_gym.config.settings_model import setting_fields
    from areal_gym.plugins import KINDS

    for kind, spec in KINDS.items():
        if spec.setting == key:
            yield from _ids(kind)
    if key == "trainer.algorithm":
        yield from ((name, preset.summary) for name, preset in PRESETS.items())
    elif key == "objective":
        yield from OBJECTIVES.items()
    info = dict(setting_fields(RunConfig)).get(key)
    annotation = None if info is None else info.annotation
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is Literal:
            yield from ((str(value), "") for value in get_args(part))
        elif part is bool:
            yield from (("true", ""), ("false", ""))
