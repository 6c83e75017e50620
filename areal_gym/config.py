"""Settings: small pydantic models, one YAML file per run, `key=value` on the command line.

A run's resolved settings are written to its directory and run again as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from areal_gym.algorithms import (
    PRESETS,
    CorrectionConfig,
    CriticConfig,
    KlConfig,
    RewardConfig,
    check_estimator,
    compares_siblings,
    fill_in,
    left_open,
)
from areal_gym.errors import ConfigError, did_you_mean
from areal_gym.objectives import (
    SUPERVISED,
    DataConfig,
    DpoConfig,
    TeacherConfig,
    check_objective,
    with_objective,
)
from areal_gym.settings import Settings, merge

__all__ = [
    "STARTER_DEFAULTS",
    "AgentConfig",
    "ClusterConfig",
    "EngineConfig",
    "EnvConfig",
    "EvalConfig",
    "PluginConfig",
    "RolloutConfig",
    "RunConfig",
    "TrainerConfig",
    "WeightSyncConfig",
    "field_names",
    "load_config",
    "parse_override",
]


class EnvConfig(Settings):
    """Which environment, and its keyword arguments."""

    id: str = "tir"
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's class (see `areal-gym show ENV`)."""


class AgentConfig(Settings):
    """How the policy is asked."""

    id: str = "chat"
    kwargs: dict[str, Any] = Field(default_factory=dict)


class PluginConfig(Settings):
    """A plugin and its keyword arguments; its id alone (a text) will do."""

    id: str
    kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _accept_id(cls, value: Any) -> Any:
        return {"id": value} if isinstance(value, str) else value


class WeightSyncConfig(PluginConfig):
    """How new weights reach the engine."""

    id: str = "auto"
    """"auto" is "in-process" for an engine in this process, "disk" for servers; see
    `areal-gym list weight-syncs`."""


class EngineConfig(Settings):
    """Who samples the policy."""

    id: str = "embedded"
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the engine's own (see `areal-gym show ENGINE`)."""
    url: tuple[str, ...] = ()
    """Servers of engine "sglang", one or several; without any, areal-gym starts one itself."""
    model: str = "starter"
    """"starter" builds (or takes from the cache) the small policy; else a checkpoint directory."""
    max_context: int = Field(512, ge=16)
    """Tokens of one sequence, prompt included."""
    num_slots: int = Field(128, ge=1)
    """Sequences that are sampled at once."""
    max_logprob_gap: float = Field(0.05, gt=0)
    """Engine and trainer score the same sampled tokens at the start; when their log-probabilities
    differ by more than this in the mean, they are not the same model, and the run is refused."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    """"auto" takes CUDA when there is one."""
    num_threads: int = Field(1, ge=1)
    """CPU threads of the engine; one is fastest for small models."""

    @field_validator("url", mode="before")
    @classmethod
    def _accept_one_url(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class RolloutConfig(Settings):
    """How episodes are played."""

    group_size: int = Field(8, ge=1)
    """Siblings per task."""
    batch_groups: int = Field(16, ge=1)
    """Groups per training step."""
    max_in_flight: int = Field(128, ge=1)
    """Episodes played at once."""
    max_staleness: int = Field(0, ge=0)
    """Policy versions that a trained token may lag behind; 0 is the synchronous algorithm."""
    max_new_tokens: int = Field(96, ge=1)
    """Per turn."""
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens that make up this much; for `eval` only."""
    top_k: int = Field(0, ge=0)
    """Sample from this many of the likeliest tokens, 0 is all; for `eval` only."""
    thinking: Literal["keep", "strip"] = "keep"
    """What was thought in earlier turns stays in the prompt, so that dialogues only grow; "strip"
    leaves to the chat template what stays, and dialogues fork where it drops something."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, such as enable_thinking."""
    filters: tuple[PluginConfig, ...] = ()
    """Which finished groups are not trained on but replaced (`areal-gym list filters`)."""
    curriculum: PluginConfig | None = None
    """Who chooses the next task (`areal-gym list curricula`); null takes them as they come."""
    min_group_size: int = Field(2, ge=1)
    """A group that failures leave smaller than this is dropped and counted."""
    episode_timeout_s: float = Field(120.0, gt=0)
    max_retries: int = Field(1, ge=0)
    """How often a failed episode is played again before its group goes on without it."""
    max_failure_rate: float = Field(0.5, ge=0, le=1)
    """Above this share of failed episodes, over the last 64 or more, the run stops."""


class LoraConfig(Settings):
    """A low-rank adapter that is trained in place of the weights."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    """The adapter's product counts alpha / rank times."""
    targets: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Which matrices of each layer."""


class TrainerConfig(Settings):
    """How the policy is improved."""

    id: str = "single"
    algorithm: str = "grpo"
    """A name for the settings below, from `advantage` to `critic` (`areal_gym.algorithms`): what
    is not given is the algorithm's."""
    advantage: str = "grpo"
    advantage_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the estimator, such as `discount` and `lam` of "gae"."""
    loss: str = "ppo_clip"
    aggregation: Literal["token_mean", "seq_mean", "constant_length"] = "token_mean"
    clip_low: float | Literal["default"] | None = "default"
    """Ratio below 1 - clip_low is clipped; null is off, "default" is the loss's own."""
    clip_high: float | Literal["default"] | None = "default"
    """Ratio above 1 + clip_high is clipped; null is off, "default" is the loss's own."""
    loss_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the loss."""
    correction: CorrectionConfig = CorrectionConfig()
    kl: KlConfig = KlConfig()
    reward: RewardConfig = RewardConfig()
    entropy_bonus: float = Field(0.0, ge=0)
    """What the policy's entropy, per token, is worth in the loss."""
    critic: CriticConfig = CriticConfig()
    lora: LoraConfig | None = None
    """Train an adapter (peft) and leave the weights as they are; null trains all weights."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """"muon" orthogonalises the updates of the layers' matrices; the rest stays with AdamW."""
    lr: float = Field(3e-4, gt=0)
    muon_lr: float = Field(3e-3, gt=0)
    """Learning rate of the matrices, with optimizer "muon"."""
    warmup_steps: int = Field(0, ge=0)
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    minibatches: int = Field(1, ge=1)
    """Optimizer updates per step; the step's batch is split among them by group."""
    tokens_per_microbatch: int = Field(4096, ge=64)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; master weights and optimizer states are always float32."""
    device: str = "auto"
    num_ranks: int = Field(1, ge=1)
    """Processes that share the model's weights, gradients and states (FSDP2): one per GPU."""
    recompute_layers: bool = False
    """Compute a layer's inner values again in the backward pass instead of keeping them."""
    compile: bool = False
    """Let torch.compile fuse the layers' MLPs: slow to start, faster on GPUs."""
    cpu_offload: bool = False
    """With several ranks on GPUs: weights and states wait in host memory."""
    runs_in: Literal["auto", "thread", "process"] = "auto"
    """"process" keeps training and rollouts from sharing one interpreter; "auto" does so where
    they overlap (rollout.max_staleness above 0) and the trainer is on a CPU."""
    num_threads: int = Field(1, ge=1)
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    save_every: int = Field(20, ge=0)
    """Steps between checkpoints; 0 saves at the end, and when interrupted, only."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many of the newest checkpoints stay, besides the best that was measured (eval.every)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        return fill_in(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_estimator(self.algorithm, self.advantage)
        if self.lora is not None and self.optimizer == "muon":
            raise ValueError(
                "lora with optimizer = 'muon': Muon orthogonalises whole matrices, and an adapter "
                "is two thin ones; use optimizer = 'adamw'"
            )
        if self.cpu_offload and self.num_ranks == 1:
            raise ValueError(
                "cpu_offload = true is FSDP2's: with num_ranks = 1 nothing would be offloaded; use "
                "num_ranks=2 or more, or recompute_layers=true to save memory"
            )
        if self.num_ranks > 1 and self.runs_in == "thread":
            raise ValueError(
                f"num_ranks = {self.num_ranks} are processes of their own; runs_in = 'thread' has "
                "one rank only: leave runs_in at 'auto'"
            )
        clips = {"clip_low": self.clip_low, "clip_high": self.clip_high, **self.loss_kwargs}
        for name in ("clip_low", "clip_high"):
            if clips[name] == 0.0:
                raise ValueError(
                    f"{name} = 0.0 is the hardest clip, not 'off'; use null to switch it off"
                )
        return self


class EvalConfig(Settings):
    """How the policy is measured on held-out tasks."""

    num_tasks: int = Field(512, ge=1)
    num_samples: int = Field(1, ge=1)
    """Sampled episodes per task."""
    every: int = Field(0, ge=0)
    """Training steps between evaluations; 0 evaluates before and after only."""
    split: str = "test"


class ClusterConfig(Settings):
    """Several processes and machines, by Ray; `trainer.num_ranks` says how many ranks train."""

    address: str | None = None
    """null: no Ray. "local" starts one on this machine, "auto" or "host:port" joins a running
    one."""
    rollout_workers: int = Field(0, ge=0)
    """Processes that play episodes; 0 plays them in the process that was started."""
    servers: int = Field(0, ge=0)
    """SGLang servers that Ray places and areal-gym starts there; 0 leaves it to `engine`."""
    gpus_per_server: int = Field(1, ge=0)


class RunConfig(Settings):
    """A whole run. `areal-gym train --dry-run` prints it resolved."""

    objective: str = "rl"
    """What is learned: "rl" (a reward), "sft", "dpo", "rm" or "distill" (docs/objectives.md)."""
    env: EnvConfig = EnvConfig()
    agent: AgentConfig = AgentConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()
    data: DataConfig = DataConfig()
    dpo: DpoConfig = DpoConfig()
    teacher: TeacherConfig = TeacherConfig()
    steps: int = Field(30, ge=0)
    """Training steps."""
    seed: int = Field(0, ge=0)
    deterministic: bool = False
    """The same seed gives the same weights, bit for bit, also when the run was killed and resumed;
    slower. CPU, synchronous, embedded engine."""
    loggers: tuple[PluginConfig, ...] = ()
    """Destinations of metrics besides `metrics.jsonl` (`areal-gym list loggers`)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        """What objective and algorithm bring, where the settings say nothing else."""
        if not isinstance(value, dict):
            return value
        value = with_objective(value)
        trainer, rollout = value.get("trainer", {}), value.get("rollout", {})
        if isinstance(trainer, TrainerConfig):
            trainer = {"algorithm": trainer.algorithm}
        name = str(trainer.get("algorithm")) if isinstance(trainer, dict) else ""
        if isinstance(rollout, RolloutConfig):
            rollout = rollout.model_dump(exclude_unset=True)
        if name not in PRESETS or not isinstance(rollout, dict):
            return value
        return {**value, "rollout": {"filters": PRESETS[name].filters, **rollout}}

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        rollout, trainer = self.rollout, self.trainer
        check_objective(
            self.objective, trainer.advantage, self.data, self.teacher, rollout.temperature
        )
        filters = [group_filter.id for group_filter in rollout.filters]
        loggers = [logger.id for logger in self.loggers]
        for key, kind, ids in (
            ("rollout.filters", "filter", filters),
            ("loggers", "logger", loggers),
        ):
            if len(set(ids)) < len(ids):
                raise ValueError(f"{key} names a {kind} twice: {', '.join(ids)}")
        if rollout.group_size == 1:
            for name in ("success-rate", "zero-variance"):
                if name in filters:
                    raise ValueError(
                        f"rollout.filters has {name!r}, which drops every group of one "
                        "(rollout.group_size = 1): nothing would be left to train on; use "
                        "rollout.group_size=2 or more, or rollout.filters=[]"
                    )
        is_relative = compares_siblings(trainer.advantage, trainer.advantage_kwargs)
        if rollout.group_size == 1 and is_relative:
            raise ValueError(
                "rollout.group_size = 1 with trainer.advantage = "
                f"{trainer.advantage!r}: it compares siblings, so a group of one always has "
                "advantage 0; use rollout.group_size=2 or more, or trainer.algorithm=reinforce"
            )
        if rollout.min_group_size == 1 and is_relative:
            raise ValueError(
                f"rollout.min_group_size = 1 with trainer.advantage = {trainer.advantage!r}: a "
                "member whose siblings failed would have nobody to be compared with; use 2 or more"
            )
        if rollout.min_group_size > rollout.group_size:
            raise ValueError(
                f"rollout.min_group_size = {rollout.min_group_size} is more than "
                f"rollout.group_size = {rollout.group_size}: every group would be dropped"
            )
        if self.deterministic:
            wrong = [
                f"{name} = {value!r}"
                for name, value, needed in (
                    ("rollout.max_staleness", rollout.max_staleness, (0,)),
                    ("engine.id", self.engine.id, ("embedded",)),
                    ("engine.device", self.engine.device, ("auto", "cpu")),
                    ("trainer.device", trainer.device, ("auto", "cpu")),
                )
                if value not in needed
            ]
            if wrong:
                raise ValueError(
                    "deterministic = true needs a synchronous run with the embedded engine on a "
                    f"CPU, not {', '.join(wrong)}"
                )
        self._check_cluster()
        if rollout.max_new_tokens >= self.engine.max_context:
            raise ValueError(
                f"rollout.max_new_tokens = {rollout.max_new_tokens} leaves no room for a prompt in "
                f"engine.max_context = {self.engine.max_context}"
            )
        if trainer.minibatches > rollout.batch_groups:
            raise ValueError(
                f"trainer.minibatches = {trainer.minibatches} splits rollout.batch_groups = "
                f"{rollout.batch_groups} groups: at least one group each is needed"
            )
        return self

    @property
    def _starts_servers(self) -> bool:
        return self.engine.id == "sglang" and not self.engine.url and not self.cluster.servers

    def _check_cluster(self) -> None:
        cluster = self.cluster
        if cluster.address is None:
            for name in ("rollout_workers", "servers"):
                if number := getattr(cluster, name):
                    raise ValueError(
                        f"cluster.{name} = {number} needs a Ray to place them: "
                        "cluster.address=local starts one here, cluster.address=auto joins one"
                    )
        elif self.objective in SUPERVISED:
            raise ValueError(
                f"objective = {self.objective!r} does not use Ray: leave cluster.address at null"
            )
        elif self.deterministic:
            raise ValueError(
                f"deterministic = true with cluster.address = {cluster.address!r}: which processes "
                "share a batch depends on the network; leave cluster.address at null"
            )
        elif cluster.rollout_workers and cluster.address != "local" and self._starts_servers:
            raise ValueError(
                "engine.id = 'sglang' without engine.url starts a server that only this machine "
                f"reaches, and cluster.address = {cluster.address!r} has others: "
                "cluster.servers=1 lets Ray place it"
            )
        if cluster.servers and (self.engine.id != "sglang" or self.engine.url):
            raise ValueError(
                f"cluster.servers = {cluster.servers} starts SGLang servers: use engine.id=sglang, "
                "and no engine.url"
            )
        if cluster.rollout_workers and self.trainer.weight_sync.id == "lora":
            raise ValueError(
                "cluster.rollout_workers with trainer.weight_sync=lora: workers do not learn the "
                "names of new adapters; use another weight sync, or rollout_workers=0"
            )


STARTER_DEFAULTS: Mapping[str, Any] = {
    "engine": {"max_context": 256},
    "trainer": {"optimizer": "muon", "lr": 3e-4, "muon_lr": 3e-3},
    "steps": 60,
}
"""What fits the small policy that `engine.model=starter` builds, and no pretrained model."""


def load_config(
    file: Path | None = None,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Settings from defaults < `base` < the YAML `file` < `overrides` (each `key=value`).

    The defaults depend on the policy: `engine.model=starter` brings `STARTER_DEFAULTS`.

    Raises:
        ConfigError: unreadable file, unknown key (with a suggestion), wrong value, or a conflict.
    """
    tree: dict[str, Any] = {}
    if base is not None:
        merge(tree, base)
    source = "the settings"
    if file is not None:
        merge(tree, _read_yaml(file))
        source = str(file)
    if overrides:
        _leave_open(tree)
    for text in overrides:
        key, value = parse_override(text)
        node = tree
        *parents, leaf = key.split(".")
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise ConfigError(f"{text}: {parent!r} holds a value, not settings")
            node = child
        node[leaf] = value
    engine = tree.get("engine")
    if not isinstance(engine, dict) or engine.get("model", "starter") == "starter":
        given, tree = tree, {}
        merge(tree, STARTER_DEFAULTS)
        merge(tree, given)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, source) from None


def parse_override(text: str) -> tuple[str, Any]:
    """`"trainer.lr=1e-5"` -> `("trainer.lr", 1e-05)`; values are YAML."""
    key, separator, raw = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(
            f"{text!r} is no override", hints=["write it as key=value, like trainer.lr=1e-5"]
        )
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r}: the value is no YAML: {error}") from None
    # YAML 1.1 reads 1e-5 (no dot) as text.
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        value = float(value)
    return key.strip(), value


def field_names(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """All dotted keys, in order."""
    names: list[str] = []
    for name, info in model.model_fields.items():
        inner = _model_of(info)
        if inner is None:
            names.append(prefix + name)
        else:
            names.extend(field_names(inner, f"{prefix}{name}."))
    return names


def _model_of(info: FieldInfo) -> type[BaseModel] | None:
    annotation = info.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _leave_open(tree: dict[str, Any]) -> None:
    """Drop what the tree's algorithm would fill in anyway.

    A run's recorded settings are complete. An override that names another algorithm (estimator,
    loss) then brings that one's settings, and what was chosen by hand stays.
    """
    trainer, rollout = tree.get("trainer"), tree.get("rollout")
    if not isinstance(trainer, dict):
        return
    named = {key: trainer[key] for key in ("algorithm", "advantage", "loss") if key in trainer}
    try:
        usual = TrainerConfig.model_validate(named)
        filters = RolloutConfig(filters=PRESETS[usual.algorithm].filters).filters
        if (
            isinstance(rollout, dict)
            and "filters" in rollout
            and RolloutConfig(filters=rollout["filters"]).filters == filters
        ):
            tree["rollout"] = {key: value for key, value in rollout.items() if key != "filters"}
    except ValidationError:
        return  # what is wrong with it is said later
    tree["trainer"] = left_open(trainer, usual.model_dump(mode="json"))


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is no YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds a {type(tree).__name__}; settings are a mapping")
    return tree


def _explain(error: ValidationError, source: str) -> ConfigError:
    known = field_names()
    lines: list[str] = []
    hints: list[str] = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown key {key!r} in {source}")
            leaf = key.rpartition(".")[2]
            near = did_you_mean(key, known) or did_you_mean(
                leaf, [name.rpartition(".")[2] for name in known]
            )
            if near:
                hints.append(near)
        else:
            reason = problem["msg"].removeprefix("Value error, ")
            lines.append(
                f"{key} = {problem['input']!r}: {reason}"
                if key and problem["type"] != "value_error"
                else reason
            )
    hints.append("all settings: areal-gym train --dry-run")
    return ConfigError("; ".join(lines), hints=hints)
