"""Completions for TAB: ids, runs, settings and their values.

Functions for click's `shell_complete`. They import what they need on use and print nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from areal_gym.plugins import KINDS, Kind, registry

_Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem[str]]]


def ids(kind: Kind) -> _Completer:
    """Complete ids of one kind; those of adapters up to the colon."""

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        return _matching(_ids(kind), incomplete)

    return complete


def any_id(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete runs and ids of every kind."""
    pairs = [pair for kind in KINDS for pair in _ids(kind)]
    return _runs(incomplete) + _matching(pairs, incomplete)


def one_of(*words: str) -> _Completer:
    """Complete one of a few words."""

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        return _matching(((word, "") for word in words), incomplete)

    return complete


def runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete run directories; if none matches, directories."""
    return _runs(incomplete) or [CompletionItem(incomplete, type="dir")]


def settings(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete `key=` of all settings, and the values of those with a fixed choice."""
    key, separator, value = _pieces(ctx, param, incomplete)
    if not separator:
        return _matching(_setting_keys(), key)
    shown = f"{key}=" if "=" in incomplete else ""
    return _matching(((shown + choice, about) for choice, about in _choices(key)), shown + value)


def setting_values(key: str) -> _Completer:
    """Complete the values of one setting."""

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        return _matching(_choices(key), incomplete)

    return complete


def env_arguments(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete `key=` of the arguments of the environment named before."""
    env = ctx.params.get("env") or ctx.params.get("what")
    if not env:
        return []
    entry = registry().get("envs", str(env))
    names = inspect.signature(entry.load()).parameters
    return _matching(((f"{name}=", "") for name in names), incomplete)


def _pieces(ctx: click.Context, param: click.Parameter, incomplete: str) -> tuple[str, str, str]:
    """Split an override into key, "=" and value, which bash passes as three words."""
    from areal_gym.config import field_names

    before: Sequence[str] = ctx.params.get(param.name or "") or ()
    if before and before[-1] in field_names() and not incomplete:
        return before[-1], "=", ""
    if len(before) > 1 and before[-1] == "=":
        return before[-2], "=", incomplete
    key, separator, value = incomplete.partition("=")
    return key, separator, value


def _matching(pairs: Iterable[tuple[str, str]], incomplete: str) -> list[CompletionItem[str]]:
    matching = {value: about for value, about in pairs if value.startswith(incomplete)}
    return [CompletionItem(value, help=about or None) for value, about in matching.items()]


def _ids(kind: Kind) -> Iterator[tuple[str, str]]:
    for entry in registry().entries(kind):
        is_adapter = entry.spec.shown_id != entry.id
        yield entry.id + ":" * is_adapter, entry.spec.summary


def _runs(incomplete: str) -> list[CompletionItem[str]]:
    from areal_gym.run_dir.run_list import run_paths

    typed = Path(incomplete)
    folders = [Path("runs")]
    if incomplete.endswith("/"):
        folders.append(typed)
    elif incomplete:
        folders.append(typed.parent)
    return [
        CompletionItem(str(path))
        for folder in dict.fromkeys(folders)
        for path in run_paths(folder)
        if str(path).startswith(incomplete)
    ]


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

    for kind, spec in KINDS.items():
        if spec.setting == key:
            yield from _ids(kind)
    if key == "trainer.algorithm":
        yield from ((name, preset.summary) for name, preset in PRESETS.items())
    elif key == "objective":
        yield from OBJECTIVES.items()
    for name, info in setting_fields(RunConfig):
        if name == key:
            for part in (info.annotation, *get_args(info.annotation)):
                if get_origin(part) is Literal:
                    yield from ((str(value), "") for value in get_args(part))
                elif part is bool:
                    yield from (("true", ""), ("false", ""))
