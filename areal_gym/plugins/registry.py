"""Looking things up by kind and id: `registry().load("losses", "ppo_clip")`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, get_args

from areal_gym.errors import (
    ConfigError,
    DuplicateIdError,
    PluginError,
    UnknownIdError,
    UsageError,
    did_you_mean,
)
from areal_gym.plugins.manager import Plugin, PluginManager
from areal_gym.plugins.specs import (
    AdvantageSpec,
    AgentSpec,
    CommandSpec,
    CurriculumSpec,
    EngineSpec,
    EnvSpec,
    FilterSpec,
    LoggerSpec,
    PolicyLossSpec,
    RetrieverSpec,
    SandboxSpec,
    Spec,
    ToolSpec,
    TrainerSpec,
    WeightSyncSpec,
)

Kind = Literal[
    "envs",
    "agents",
    "tools",
    "retrievers",
    "sandboxes",
    "engines",
    "trainers",
    "advantages",
    "losses",
    "weight-syncs",
    "filters",
    "curricula",
    "loggers",
    "commands",
]

KINDS: dict[Kind, type[Spec]] = dict(
    zip(
        get_args(Kind),
        (
            EnvSpec,
            AgentSpec,
            ToolSpec,
            RetrieverSpec,
            SandboxSpec,
            EngineSpec,
            TrainerSpec,
            AdvantageSpec,
            PolicyLossSpec,
            WeightSyncSpec,
            FilterSpec,
            CurriculumSpec,
            LoggerSpec,
            CommandSpec,
        ),
        strict=True,
    )
)
"""The words that people type (`areal-gym list WORD`), and the specs they mean."""


def as_kind(word: str) -> Kind:
    """The kind that the word names.

    Raises:
        UsageError: none; with a suggestion.
    """
    for kind in KINDS:
        if word == kind:
            return kind
    near = did_you_mean(word, KINDS)
    raise UsageError(
        f"no kind of things is called {word!r}",
        hints=[*([near] if near else []), f"there are: {', '.join(KINDS)}"],
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered thing, and whose it is."""

    spec: Spec
    plugin: Plugin

    @property
    def id(self) -> str:
        """What people type."""
        return self.spec.id

    @property
    def missing(self) -> tuple[str, ...]:
        """Import names that the thing requires and that are not installed."""
        return tuple(name for name in self.spec.requires if not _is_importable(name))

    @property
    def install_command(self) -> str:
        """What to type to get what is missing; empty when nothing is."""
        if not self.missing:
            return ""
        has_extras = not self.plugin.distribution.startswith("(")  # "(not installed)" has none
        if self.spec.extra and has_extras:
            return f"pip install '{self.plugin.distribution}[{self.spec.extra}]'"
        return f"pip install {' '.join(self.missing)}"

    def require_installed(self) -> None:
        """Refuse a thing whose packages are not there, without importing it.

        Raises:
            ConfigError: a required package is not installed.
        """
        if self.missing:
            raise ConfigError(
                f"{self.spec.kind} {self.id!r} needs {', '.join(self.missing)}",
                hints=[f"install it: {self.install_command}"],
            )

    def load(self) -> Any:
        """Import what the spec names: a class, a function or an object.

        Raises:
            ConfigError: a required package is not installed.
            PluginError: it cannot be imported, or the module does not have it.
        """
        self.require_installed()
        module_name, _, path = self.spec.entry_point.partition(":")
        try:
            found: Any = import_module(module_name)
            for name in path.split("."):
                found = getattr(found, name)
        except Exception as error:
            raise PluginError(
                f"{self.spec.kind} {self.id!r} of plugin {self.plugin} cannot be imported from "
                f"{self.spec.entry_point}: {type(error).__name__}: {error}"
            ) from error
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: what `areal-gym list --json` prints and a run directory records."""
        return {
            "id": self.id,
            "kind": self.spec.kind,
            "summary": self.spec.summary,
            "entry_point": self.spec.entry_point,
            "plugin": self.plugin.name,
            "distribution": self.plugin.distribution,
            "version": self.plugin.version,
            "missing": list(self.missing),
            "install_command": self.install_command,
        }


class Registry:
    """Everything that the plugins of one manager offer."""

    def __init__(self, manager: PluginManager) -> None:
        self.manager = manager

    def entries(self, kind: Kind) -> list[Entry]:
        """All things of a kind, by id. An id that two plugins claim is in here twice."""
        spec_type = KINDS[kind]
        found = [Entry(*r) for r in self.manager.registrations if isinstance(r.spec, spec_type)]
        return sorted(found, key=lambda entry: entry.id)

    def get(self, kind: Kind, id: str) -> Entry:
        """The one thing of that kind and id; `adapter:NAME` is the adapter with that argument.

        Raises:
            UnknownIdError: nobody registered it.
            DuplicateIdError: several plugins did.
        """
        entries = self.entries(kind)
        claims = [entry for entry in entries if entry.id == id]
        if not claims:
            claims = list(_adapted(entries, id))
        if not claims:
            raise self._unknown(kind, id, [entry.id for entry in entries])
        if len(claims) > 1:
            raise _duplicate(claims)
        return claims[0]

    def load(self, kind: Kind, id: str) -> Any:
        """Import and return the thing itself; raises what `get` and `Entry.load` raise."""
        return self.get(kind, id).load()

    def make(self, kind: Kind, id: str, **kwargs: Any) -> Any:
        """Load a class and construct it: the spec's own arguments, then `kwargs` on top.

        Raises:
            UsageError: it does not take such arguments; besides what `load` raises.
        """
        entry = self.get(kind, id)
        cls = entry.load()
        arguments = {**getattr(entry.spec, "kwargs", {}), **kwargs}
        signature = inspect.signature(cls)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            known = list(signature.parameters)
            wrong = [name for name in arguments if name not in known]
            of_adapter = entry.spec.shown_id != entry.id
            raise UsageError(
                f"{entry.spec.kind} {id!r}: {error}",
                hints=[
                    *([f"say which, after a colon: {entry.spec.shown_id}"] if of_adapter else []),
                    *filter(None, (did_you_mean(name, known) for name in wrong)),
                    f"it takes: {', '.join(known) or 'no arguments'}",
                ],
            ) from None
        return cls(**arguments)

    def check_duplicates(self, kind: Kind) -> None:
        """Raise DuplicateIdError for the first id of the kind that is claimed twice."""
        by_id: dict[str, list[Entry]] = {}
        for entry in self.entries(kind):
            by_id.setdefault(entry.id, []).append(entry)
        for claims in by_id.values():
            if len(claims) > 1:
                raise _duplicate(claims)

    def absences(self) -> list[str]:
        """Why something may be missing: plugins that failed or are blocked, a sentence each."""
        return [
            f"plugin {plugin} failed to load, and it may be its: {problem}"
            for plugin in self.manager.plugins
            for problem in plugin.problems
        ] + [
            f"plugin {plugin} is blocked, and with it what it offers"
            for plugin in self.manager.plugins
            if plugin.is_blocked
        ]

    def _unknown(self, kind: Kind, id: str, known: list[str]) -> UnknownIdError:
        near = did_you_mean(id.partition(":")[0], known)
        hints = [near] if near else []
        hints.append(f"all of them: areal-gym list {kind}")
        hints += self.absences()
        return UnknownIdError(f"no {KINDS[kind].kind} {id!r}", hints=hints)


def _adapted(entries: list[Entry], id: str) -> Iterator[Entry]:
    adapter, _, text = id.partition(":")
    for entry in entries:
        spec = entry.spec
        if isinstance(spec, EnvSpec) and spec.argument and spec.id == adapter and text:
            yield Entry(spec.named(text), entry.plugin)


def _duplicate(claims: list[Entry]) -> DuplicateIdError:
    spec = claims[0].spec
    return DuplicateIdError(
        f"{spec.kind} id {spec.id!r} is registered twice, by plugin "
        + " and by plugin ".join(str(claim.plugin) for claim in claims),
        hints=[f"leave one out: areal-gym -p no:{claims[-1].plugin.name} ..."],
    )


def _is_importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@cache
def _installed() -> Registry:
    return Registry(PluginManager.installed())


_chosen: Registry | None = None


def registry() -> Registry:
    """The registry of this process: all installed plugins, found once."""
    return _chosen or _installed()


def set_registry(chosen: Registry | None) -> None:
    """Let `registry()` answer with `chosen`, or with the installed plugins again (None)."""
    global _chosen
    _chosen = chosen
