"""Plugins: what a `plugin.py` imports, and the registry of what plugins offer."""

from areal_gym.plugins.hookspecs import HookSpecs, hookimpl
from areal_gym.plugins.manager import Candidate, Plugin, PluginManager
from areal_gym.plugins.registry import Entry, Kind, Registry, registry, set_registry
from areal_gym.plugins.specs import (
    KINDS,
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

__all__ = [
    "KINDS",
    "AdvantageSpec",
    "AgentSpec",
    "Candidate",
    "CommandSpec",
    "CurriculumSpec",
    "EngineSpec",
    "Entry",
    "EnvSpec",
    "FilterSpec",
    "HookSpecs",
    "Kind",
    "LoggerSpec",
    "Plugin",
    "PluginManager",
    "PolicyLossSpec",
    "Registry",
    "RetrieverSpec",
    "SandboxSpec",
    "Spec",
    "ToolSpec",
    "TrainerSpec",
    "WeightSyncSpec",
    "hookimpl",
    "registry",
    "set_registry",
]
