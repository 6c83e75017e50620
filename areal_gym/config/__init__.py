"""Settings: small pydantic models, one YAML file per run, `key=value` on the command line.

A run's resolved settings are written to its directory, and the same file starts the run again.
"""

from areal_gym.config.defaults import STARTER_DEFAULTS
from areal_gym.config.loading import field_names, load_config, parse_override
from areal_gym.config.parallel_settings import Layout, ParallelConfig
from areal_gym.config.run_config import RunConfig, require_plain_sampling
from areal_gym.config.sections import (
    SERVED_ENGINES,
    AgentConfig,
    ClusterConfig,
    EngineConfig,
    EnvConfig,
    EvalConfig,
    LoraConfig,
    PluginConfig,
    RolloutConfig,
    TrainerConfig,
    WeightSyncConfig,
)

__all__ = [
    "SERVED_ENGINES",
    "STARTER_DEFAULTS",
    "AgentConfig",
    "ClusterConfig",
    "EngineConfig",
    "EnvConfig",
    "EvalConfig",
    "Layout",
    "LoraConfig",
    "ParallelConfig",
    "PluginConfig",
    "RolloutConfig",
    "RunConfig",
    "TrainerConfig",
    "WeightSyncConfig",
    "field_names",
    "load_config",
    "parse_override",
    "require_plain_sampling",
]
