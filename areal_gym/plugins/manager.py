"""Finds and loads plugins. A broken plugin is kept with the reason; it never raises.

entry points --> candidates, sorted --> [blocked?] --> [imports?] --> [hooks fit?] --> specs
                                             \\____________\\______________\\--> problems
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pluggy

from areal_gym.errors import ConfigError, PluginError, did_you_mean
from areal_gym.plugins.specs import GROUP, KINDS, HookSpecs, Spec
from areal_gym.utils.code_references import load_module, load_reference
from areal_gym.utils.session_objects import with_objects
from areal_gym.version import __version__

DISTRIBUTION = "areal-gym"

_BUILT_IN_PARTS = ("agents", "engines", "envs", "loggers", "rollout", "trainer")
BUILT_IN: Mapping[str, str] = {
    **{name: f"areal_gym.{name}.plugin" for name in _BUILT_IN_PARTS},
    "sandboxes": "areal_gym.sandbox.plugin",
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
class Plugin(Candidate):
    """A candidate after the attempt to load it."""

    is_blocked: bool = False
    is_reference: bool = False
    """Whether it is no plugin: an id that says itself what it stands for, `FILE.py:Class`."""
    hooks: tuple[str, ...] = ()
    """The hooks that it implements."""
    problems: tuple[str, ...] = ()
    """What is wrong with it, one sentence each; its other hooks are used nevertheless."""

    @classmethod
    def of(cls, candidate: Candidate, **outcome: Any) -> Plugin:
        """Return the plugin that a candidate has become."""
        given = {field.name: getattr(candidate, field.name) for field in fields(candidate)}
        return cls(**given, **outcome)

    @property
    def module(self) -> str:
        """The full name of the plugin module."""
        return self.target if isinstance(self.target, str) else self.target.__name__

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


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered spec and the plugin that registered it."""

    spec: Spec
    plugin: Plugin

    @property
    def id(self) -> str:
        """The id that people type."""
        return self.spec.id

    @property
    def missing(self) -> tuple[str, ...]:
        """Import names that the entry requires and that are not installed."""
        return tuple(name for name in self.spec.requires if not _is_importable(name))

    @property
    def install_command(self) -> str:
        """The command that installs what is missing; empty when nothing is."""
        if not self.missing:
            return ""
        has_extras = not self.plugin.distribution.startswith("(")  # "(not installed)" has none
        if self.spec.extra and has_extras:
            return f"pip install '{self.plugin.distribution}[{self.spec.extra}]'"
        return f"pip install {' '.join(self.missing)}"

    def require_installed(self) -> None:
        """Raise ConfigError if a required package is missing, without importing anything."""
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
        if self.plugin.is_reference:
            return _loaded_class(self.spec)
        module_name, _, path = self.spec.entry_point.partition(":")
        try:
            target: Any = import_module(module_name)
            for name in path.split("."):
                target = getattr(target, name)
        except Exception as error:
            raise PluginError(
                f"{self.spec.kind} {self.id!r} of plugin {self.plugin} cannot be imported from "
                f"{self.spec.entry_point}: {type(error).__name__}: {error}"
            ) from error
        return target

    def to_dict(self) -> dict[str, Any]:
        """Return what `areal-gym list --json` prints and a run directory records, JSON-ready."""
        spec, plugin = self.spec, self.plugin
        return {
            **{name: getattr(spec, name) for name in ("id", "kind", "summary", "entry_point")},
            "plugin": plugin.name,
            "distribution": plugin.distribution,
            "version": plugin.version,
            "missing": list(self.missing),
            "install_command": self.install_command,
        }


def referenced(kind: type[Spec], reference: str) -> Entry:
    """Return the entry of an id that says itself what it stands for: `FILE.py:Class`."""
    file, _, name = reference.rpartition(":")
    spec = kind(id=reference, entry_point=reference, summary=f"{name} of {file}")
    target = Candidate(name=file, target=file, distribution="(of a file)")
    return Entry(spec, Plugin.of(target, is_reference=True))


def _loaded_class(spec: Spec) -> Any:
    """Import what a reference names: the class of an environment, or a function that makes one."""
    loaded = with_objects(spec.id)
    if loaded == spec.id:
        loaded = load_reference(spec.id, spec.kind)
    if inspect.isclass(loaded) and not hasattr(loaded, "astep"):
        is_gymnasium = hasattr(loaded, "step") and hasattr(loaded, "reset")
        raise ConfigError(
            f"{spec.id} is no {spec.kind}: the class has no method `respond`",
            hints=[
                "an environment is a subclass of areal_gym.TextEnv (docs/environments-guide.md)",
                "register it with gymnasium, and write --env gymnasium:NAME"
                if is_gymnasium
                else None,
            ],
        )
    return loaded


def discover() -> list[Candidate]:
    """Return the installed plugins, sorted by (distribution, name).

    Built-in plugins are entry points like all others. Only when areal-gym is not installed
    (`PYTHONPATH=. python -m areal_gym`) are they taken from `BUILT_IN`.
    """

    @cache  # reading the metadata takes as long as importing a plugin
    def named(distribution: metadata.Distribution | None) -> tuple[str, str]:
        return (distribution.name, distribution.version) if distribution else ("(unknown)", "")

    candidates = [
        Candidate(
            name=entry_point.name,
            target=entry_point.value,
            distribution=name,
            version=version,
        )
        for entry_point in metadata.entry_points(group=GROUP)
        for name, version in [named(entry_point.dist)]
    ]
    if not any(candidate.distribution == DISTRIBUTION for candidate in candidates):
        candidates += [
            Candidate(name=name, target=module, distribution=DISTRIBUTION, version=__version__)
            for name, module in BUILT_IN.items()
        ]
    return sorted(candidates, key=lambda candidate: (candidate.distribution, candidate.name))


class PluginManager:
    """Loads candidates, in this order, and calls their hooks.

    Example: `PluginManager([Candidate(name="mine", target=my_plugin_module)])`. `only` has the
    names of the plugins to load (None loads all), `blocked` those of plugins not to load.
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
        self.registrations: list[Entry] = []
        """The specs that the loaded plugins yielded, in order."""
        self.notices: list[str] = []
        """Remarks about the installation, which the command line prints first."""
        known = []
        for candidate in candidates:
            known.append(candidate.name)
            if candidate.name in blocked or (only is not None and candidate.name not in only):
                self.plugins.append(Plugin.of(candidate, is_blocked=True))
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

        `modules` are further plugin modules, which no distribution declares.
        """
        chosen = os.environ.get("AREAL_GYM_PLUGINS")
        only = None
        if chosen is not None:
            only = [*filter(None, (name.strip() for name in chosen.split(","))), *modules]
        candidates = discover() + [Candidate(name=module, target=module) for module in modules]
        manager = cls(candidates, only=only, blocked=blocked)
        try:
            metadata.distribution(DISTRIBUTION)
        except metadata.PackageNotFoundError:
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
            is_file = isinstance(target, str) and target.endswith(".py")
            load = load_module if is_file else import_module
            module = load(target) if isinstance(target, str) else target
            self._pluggy.register(module, name=f"{candidate.distribution}:{candidate.name}")
        # SystemExit: a module that calls sys.exit() on import must not end the process.
        except (Exception, SystemExit) as error:
            self.plugins.append(Plugin.of(candidate, problems=(_reason(error),)))
            return
        hooks: list[str] = []
        specs: list[Spec] = []
        functions = {kind.hook: getattr(module, kind.hook, None) for kind in KINDS.values()}
        problems = [
            f"{hook} is not marked with @hookimpl"
            for hook, function in functions.items()
            if callable(function) and not hasattr(function, f"{GROUP}_impl")
        ]
        for caller in self._pluggy.get_hookcallers(module) or ():
            if not caller.has_spec():
                near = did_you_mean(caller.name, functions)
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
        plugin = Plugin.of(candidate, hooks=tuple(hooks), problems=tuple(problems))
        self.plugins.append(plugin)
        self.registrations += [Entry(spec, plugin) for spec in specs]


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


def _is_importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
