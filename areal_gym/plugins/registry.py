"""Looks plugins up by kind and id: `registry().load("losses", "ppo_clip")`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

from areal_gym.errors import (
    ConfigError,
    DuplicateIdError,
    UnknownIdError,
    UsageError,
    choices,
    did_you_mean,
)
from areal_gym.plugins.manager import Entry, PluginManager, referenced
from areal_gym.plugins.specs import KINDS, EnvSpec
from areal_gym.plugins.wrappers import split_wrapper_arguments
from areal_gym.utils.code_references import is_code_reference
from areal_gym.utils.session_objects import is_session_name

Kind = str
"""A word of `KINDS`, like "losses"."""


def is_reference(id: str) -> bool:
    """Return whether an id says itself what it stands for: a class of a file or of a package."""
    module = id.rpartition(":")[0]
    # Without a dot it is the adapter of a plugin: `textarena:chess`.
    return ("." in module and is_code_reference(id)) or is_session_name(id)


def as_kind(word: str) -> Kind:
    """Return the kind that the word names, or raise UsageError with a suggestion."""
    if word in KINDS:
        return word
    raise UsageError(f"unknown kind of plugin {word!r}", hints=choices(word, KINDS))


class Registry:
    """Looks up what the plugins of one manager offer."""

    def __init__(self, manager: PluginManager) -> None:
        self.manager = manager

    def entries(self, kind: Kind) -> list[Entry]:
        """Return all entries of a kind, by id. An id claimed by two plugins occurs twice."""
        spec_type = KINDS[as_kind(kind)]
        entries = (e for e in self.manager.registrations if isinstance(e.spec, spec_type))
        return sorted(entries, key=lambda entry: entry.id)

    def get(self, kind: Kind, id: str) -> Entry:
        """Return the entry of that kind and id; `adapter:NAME` is the adapter with that argument.

        An environment may also be `FILE.py:CLASS` or `module:CLASS`.

        Raises:
            UnknownIdError: no plugin registered it.
            DuplicateIdError: several plugins did.
        """
        entries = self.entries(kind)
        adapter, _, text = id.partition(":")
        claims = [entry for entry in entries if entry.id == id]
        if not claims and text:
            claims = [
                Entry(entry.spec.named(text), entry.plugin)
                for entry in entries
                if entry.id == adapter and isinstance(entry.spec, EnvSpec) and entry.spec.argument
            ]
        if not claims and KINDS[kind] is EnvSpec and is_reference(id):
            return referenced(EnvSpec, id)
        if not claims:
            near = did_you_mean(adapter, [entry.id for entry in entries])
            of_file = f"name the class in the file: {id}:CLASS" if id.endswith(".py") else None
            hints = [near, of_file, f"see all: areal-gym list {kind}", *self.absences()]
            raise UnknownIdError(f"no {KINDS[kind].kind} {id!r}", hints=hints)
        if len(claims) > 1:
            raise _duplicate(claims)
        return claims[0]

    def load(self, kind: Kind, id: str) -> Any:
        """Import and return what the entry names; raises what `get` and `Entry.load` raise."""
        return self.get(kind, id).load()

    def make(self, kind: Kind, id: str, **kwargs: Any) -> Any:
        """Make an object with the spec's arguments, overridden by `kwargs`, or raise UsageError."""
        entry = self.get(kind, id)
        cls = entry.load()
        arguments = {**getattr(entry.spec, "kwargs", {}), **kwargs}
        # A class may still take arguments that are not in its signature any more.
        arguments = getattr(cls, "current_arguments", dict)(arguments)
        wrap: Callable[[Any], Any] | None = None
        if KINDS[kind] is EnvSpec:
            arguments, wrap = split_wrapper_arguments(cls, arguments)
        signature = inspect.signature(cls)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            known = list(signature.parameters)
            wrong = [name for name in arguments if name not in known]
            is_adapter = entry.spec.shown_id != entry.id
            raise UsageError(
                f"{entry.spec.kind} {id!r}: {error}",
                hints=[
                    f"name it after a colon: {entry.spec.shown_id}" if is_adapter else None,
                    *(did_you_mean(name, known) for name in wrong),
                    f"it takes: {', '.join(known) or 'no arguments'}",
                ],
            ) from None
        made = cls(**arguments)
        if entry.plugin.is_reference and not hasattr(made, "astep"):
            raise ConfigError(
                f"{id} makes a {type(made).__name__}, which is no environment",
                hints=["an environment is a subclass of areal_gym.TextEnv"],
            )
        return made if wrap is None else wrap(made)

    def check_duplicates(self, kind: Kind) -> None:
        """Raise DuplicateIdError for the first id of the kind that is claimed twice."""
        for _, entries in itertools.groupby(self.entries(kind), key=lambda entry: entry.id):
            if len(claims := list(entries)) > 1:
                raise _duplicate(claims)

    def absences(self) -> list[str]:
        """Return reasons why an id may be missing: plugins that failed or are blocked."""
        return [
            f"plugin {plugin} failed to load and may be the one that offers it: {problem}"
            for plugin in self.manager.plugins
            for problem in plugin.problems
        ] + [
            f"plugin {plugin} is blocked, with everything it offers"
            for plugin in self.manager.plugins
            if plugin.is_blocked
        ]


def _duplicate(claims: list[Entry]) -> DuplicateIdError:
    spec = claims[0].spec
    return DuplicateIdError(
        f"{spec.kind} id {spec.id!r} is registered twice, by plugin "
        + " and by plugin ".join(str(claim.plugin) for claim in claims),
        hints=[f"block one: areal-gym -p no:{claims[-1].plugin.name} ..."],
    )


@cache
def _installed() -> Registry:
    return Registry(PluginManager.installed())


_chosen: Registry | None = None


def registry() -> Registry:
    """Return the registry of this process: all installed plugins, loaded once."""
    return _chosen or _installed()


def set_registry(chosen: Registry | None) -> None:
    """Make `registry()` return `chosen`, or the installed plugins again (None)."""
    global _chosen
    _chosen = chosen
