"""Finds and loads plugins. A broken plugin is kept with the reason; it never raises.

entry points --> candidates, sorted --> [blocked?] --> [imports?] --> [hooks fit?] --> specs
                                             \\____________\\______________\\--> problems
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from types import ModuleType
from typing import NamedTuple

import pluggy

from areal_gym.errors import did_you_mean
from areal_gym.plugins.hookspecs import GROUP, HookSpecs
from areal_gym.plugins.specs import KINDS, Spec
from areal_gym.version import __version__

DISTRIBUTION = "areal-gym"

BUILT_IN: Mapping[str, str] = {
    "agents": "areal_gym.agents.plugin",
    "engines": "areal_gym.engines.plugin",
    "envs": "areal_gym.envs.plugin",
    "loggers": "areal_gym.loggers.plugin",
    "rollout": "areal_gym.rollout.plugin",
    "sandboxes": "areal_gym.sandbox.plugin",
    "trainer": "areal_gym.trainer.plugin",
}
"""The entry points of areal-gym itself, for a source tree that is not installed."""

# Namespaces end in "/"; ":" is left to adapters ("textarena:wordle").
_ID = re.compile(r"[a-z0-9][\w.+-]*(?:[/:][\w.+-]+)*", re.ASCII | re.IGNORECASE)
_ENTRY_POINT = re.compile(r"[\w.]+:[\w.]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plugin that could be loaded. Tests make candidates with a module as the target."""

    name: str
    """The entry point's name: what `-p no:NAME` and AREAL_GYM_PLUGINS name."""
    target: str | ModuleType
    """The plugin module, or where to import it from."""
    distribution: str = "(not installed)"
    """The distribution that ships it."""
    version: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """A candidate after the attempt to load it."""

    name: str
    distribution: str
    version: str
    module: str
    is_blocked: bool = False
    hooks: tuple[str, ...] = ()
    """The hooks that it implements."""
    problems: tuple[str, ...] = ()
    """What is wrong with it, one sentence each; its other hooks are used nevertheless."""

    @property
    def source(self) -> str:
        """`"areal-gym-countdown 0.1.0"`; for a module without a distribution, its name."""
        if self.distribution.startswith("("):
            return f"{self.name} {self.distribution}"
        return f"{self.distribution} {self.version}".strip()

    @property
    def status(self) -> str:
        """One of "loaded", "partly loaded", "failed" and "blocked"."""
        if self.is_blocked:
            return "blocked"
        if not self.problems:
            return "loaded"
        return "partly loaded" if self.hooks else "failed"

    def __str__(self) -> str:
        if self.distribution.startswith("("):
            return self.source
        return f"{self.name} ({self.source})"


class Registration(NamedTuple):
    """A spec, and the plugin that yielded it."""

    spec: Spec
    plugin: Plugin


def discover() -> list[Candidate]:
    """Return the installed plugins, sorted by (distribution, name).

    Built-in plugins are entry points like all others. Only when areal-gym is not installed
    (`PYTHONPATH=. python -m areal_gym`) are they taken from `BUILT_IN`.
    """
    candidates = [
        Candidate(
            name=entry_point.name,
            target=entry_point.value,
            distribution=entry_point.dist.name if entry_point.dist else "(unknown)",
            version=entry_point.dist.version if entry_point.dist else "",
        )
        for entry_point in metadata.entry_points(group=GROUP)
    ]
    if not any(candidate.distribution == DISTRIBUTION for candidate in candidates):
        candidates += [
            Candidate(name=name, target=module, distribution=DISTRIBUTION, version=__version__)
            for name, module in BUILT_IN.items()
        ]
    return sorted(candidates, key=lambda candidate: (candidate.distribution, candidate.name))


class PluginManager:
    """Loads candidates and calls their hooks.

    Example: `PluginManager([Candidate(name="mine", target=my_plugin_module)])`.

    Args:
        candidates: what to load, in this order.
        only: names of the plugins to load; None loads all.
        blocked: names of plugins not to load.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate],
        *,
        only: Collection[str] | None = None,
        blocked: Collection[str] = (),
    ) -> None:
        self._pluggy = pluggy.PluginManager(GROUP)
        self._pluggy.add_hookspecs(HookSpecs)
        self.plugins: list[Plugin] = []
        """All candidates, loaded or not, in order."""
        self.registrations: list[Registration] = []
        """The specs that the loaded plugins yielded, in order."""
        self.notices: list[str] = []
        """Remarks about the installation, which the command line prints first."""
        known = []
        for candidate in candidates:
            known.append(candidate.name)
            if candidate.name in blocked or (only is not None and candidate.name not in only):
                self.plugins.append(_plugin(candidate, is_blocked=True))
            else:
                self._load(candidate)
        for name in (*(only or ()), *blocked):
            if name not in known:
                near = did_you_mean(name, known) or f"available: {', '.join(known) or 'none'}"
                self.notices.append(f"no plugin is named {name!r}; {near}")

    @classmethod
    def installed(
        cls, *, blocked: Collection[str] = (), modules: Sequence[str] = ()
    ) -> PluginManager:
        """Load all installed plugins, or those that AREAL_GYM_PLUGINS=a,b names.

        Args:
            blocked: names of plugins not to load.
            modules: further plugin modules that no distribution declares.
        """
        chosen = os.environ.get("AREAL_GYM_PLUGINS")
        only = None
        if chosen is not None:
            only = [*filter(None, (name.strip() for name in chosen.split(","))), *modules]
        candidates = discover() + [Candidate(name=module, target=module) for module in modules]
        manager = cls(candidates, only=only, blocked=blocked)
        if not _is_installed():
            manager.notices.append(
                f"{DISTRIBUTION} is not installed; built-in plugins are loaded from the source tree"
            )
        return manager

    @property
    def failed(self) -> list[Plugin]:
        """Plugins with problems."""
        return [plugin for plugin in self.plugins if plugin.problems]

    def _load(self, candidate: Candidate) -> None:
        target = candidate.target
        try:
            module = import_module(target) if isinstance(target, str) else target
            self._pluggy.register(module, name=f"{candidate.distribution}:{candidate.name}")
        # SystemExit: a module that calls sys.exit() on import must not end the process.
        except (Exception, SystemExit) as error:
            self.plugins.append(_plugin(candidate, problems=(_reason(error),)))
            return
        hooks: list[str] = []
        specs: list[Spec] = []
        problems = list(_misnamed_hooks(module))
        for caller in self._pluggy.get_hookcallers(module) or ():
            if not caller.has_spec():
                near = did_you_mean(caller.name, _hook_names())
                problems.append(f"no hook is named {caller.name!r}" + (f"; {near}" if near else ""))
                continue
            (impl,) = (impl for impl in caller.get_hookimpls() if impl.plugin is module)
            try:
                specs += list(_checked(caller.name, impl.function()))
                hooks.append(caller.name)
            except (Exception, SystemExit) as error:
                problems.append(f"{caller.name}: {_reason(error)}")
        if not hooks and not problems:
            problems.append("it implements no hook; is @hookimpl missing?")
        plugin = _plugin(candidate, hooks=tuple(hooks), problems=tuple(problems))
        self.plugins.append(plugin)
        self.registrations += [Registration(spec, plugin) for spec in specs]


def _plugin(
    candidate: Candidate,
    *,
    is_blocked: bool = False,
    hooks: tuple[str, ...] = (),
    problems: tuple[str, ...] = (),
) -> Plugin:
    target = candidate.target
    return Plugin(
        name=candidate.name,
        distribution=candidate.distribution,
        version=candidate.version,
        module=target if isinstance(target, str) else target.__name__,
        is_blocked=is_blocked,
        hooks=hooks,
        problems=problems,
    )


def _is_installed() -> bool:
    try:
        metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return False
    return True


def _hook_names() -> list[str]:
    return [spec.hook for spec in KINDS.values()]


def _misnamed_hooks(module: ModuleType) -> Iterator[str]:
    for name in _hook_names():
        function = getattr(module, name, None)
        if callable(function) and not hasattr(function, f"{GROUP}_impl"):
            yield f"{name} is not marked with @hookimpl"


def _checked(hook: str, specs: object) -> Iterator[Spec]:
    if not isinstance(specs, Iterable):
        raise TypeError(f"it returned {specs!r}; yield specs, or return a list of them")
    for spec in specs:
        if not isinstance(spec, Spec) or spec.hook != hook:
            raise TypeError(f"it yielded a {type(spec).__name__}, which this hook does not accept")
        if not _ID.fullmatch(spec.id):
            raise ValueError(f"{spec.id!r} is not a valid id; write name or namespace/name")
        if not _ENTRY_POINT.fullmatch(spec.entry_point):
            raise ValueError(f"{spec.id}: {spec.entry_point!r} is not an entry point 'module:Name'")
        yield spec


def _reason(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
