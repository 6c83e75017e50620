"""The settings of a run, and the checks across sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from areal_gym.config.algorithm_settings import compares_siblings
from areal_gym.config.defaults import fill_in
from areal_gym.config.image_settings import ImagesConfig
from areal_gym.config.objective_settings import (
    SUPERVISED,
    DataConfig,
    DpoConfig,
    KtoConfig,
    OrpoConfig,
    TeacherConfig,
    check_objective,
)
from areal_gym.config.online_settings import check_online, split_address
from areal_gym.config.sections import (
    SERVED_ENGINES,
    AgentConfig,
    ClusterConfig,
    EngineConfig,
    EnvConfig,
    EvalConfig,
    GuardConfig,
    ModelConfig,
    PluginConfig,
    RolloutConfig,
    TrainerConfig,
)
from areal_gym.config.settings_model import Settings, flat
from areal_gym.errors import ConfigError
from areal_gym.utils.markup import block, pairs, short

_NAMED = ("env.id", "trainer.algorithm", "engine.model", "steps", "seed")


class RunConfig(Settings):
    """All settings of a run. `areal-gym train --dry-run` prints them resolved."""

    objective: str = "rl"
    """The training objective: "rl", "sft", "dpo", "kto", "orpo", "rm" or "distill"
    (docs/objectives.md)."""
    env: EnvConfig = EnvConfig()
    agent: AgentConfig = AgentConfig()
    engine: EngineConfig = EngineConfig()
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    gateway: str = "127.0.0.1:0"
    """Address of the gateway, the policy's OpenAI and Anthropic API (docs/agents.md): host:port;
    port 0 is any free one. Other machines cannot reach a loopback address."""
    trainer: TrainerConfig = TrainerConfig()
    guard: GuardConfig = GuardConfig()
    eval: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()
    images: ImagesConfig = ImagesConfig()
    data: DataConfig = DataConfig()
    dpo: DpoConfig = DpoConfig()
    kto: KtoConfig = KtoConfig()
    orpo: OrpoConfig = OrpoConfig()
    teacher: TeacherConfig = TeacherConfig()
    steps: int = Field(30, ge=0)
    """Training steps."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of tasks, sampling, and of a model that is built from scratch."""
    deterministic: bool = False
    """The same seed gives the same weights, bit for bit, even if the run is killed and resumed.
    Slower; needs a CPU, synchronous training and the embedded engine."""
    loggers: tuple[PluginConfig, ...] = ()
    """Destinations of metrics besides `metrics.jsonl` (`areal-gym list loggers`)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        return fill_in(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        rollout, trainer = self.rollout, self.trainer
        check_objective(
            self.objective,
            algorithm=trainer.algorithm,
            advantage=trainer.advantage,
            data=self.data,
            teacher=self.teacher,
            temperature=rollout.temperature,
        )
        split_address(self.gateway)
        is_elsewhere = self.deterministic or bool(self.cluster.rollout_workers)
        check_online(self.env.id, self.agent.id, self.engine.model, is_elsewhere=is_elsewhere)
        self._check_groups()
        self._check_schedule()
        self._check_deterministic()
        self._check_cluster()
        self._check_weight_sync()
        self._check_colocation()
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

    def _check_groups(self) -> None:
        rollout, trainer = self.rollout, self.trainer
        filters = [group_filter.id for group_filter in rollout.filters]
        loggers = [logger.id for logger in self.loggers]
        for key, ids in (("rollout.filters", filters), ("loggers", loggers)):
            if len(set(ids)) < len(ids):
                kind = key.rpartition(".")[2].removesuffix("s")
                raise ValueError(f"{key} names a {kind} twice: {', '.join(ids)}")
        for name in {"success-rate", "zero-variance"}.intersection(filters):
            if rollout.group_size == 1:
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
                "trajectory whose siblings failed has none to be compared with; use 2 or more"
            )
        if rollout.min_group_size > rollout.group_size:
            raise ValueError(
                f"rollout.min_group_size = {rollout.min_group_size} is more than "
                f"rollout.group_size = {rollout.group_size}: every group would be dropped"
            )

    def _check_deterministic(self) -> None:
        if not self.deterministic:
            return
        needed = (
            ("rollout.max_staleness", self.rollout.max_staleness, (0,)),
            ("engine.id", self.engine.id, ("embedded",)),
            ("engine.device", self.engine.device, ("auto", "cpu")),
            ("trainer.device", self.trainer.device, ("auto", "cpu")),
        )
        wrong = [f"{key} = {value!r}" for key, value, possible in needed if value not in possible]
        if wrong:
            raise ValueError(
                "deterministic = true needs a synchronous run with the embedded engine on a "
                f"CPU, not {', '.join(wrong)}"
            )

    def _check_schedule(self) -> None:
        trainer, schedule = self.trainer, self.trainer.lr_schedule
        end = schedule.steps or self.steps
        if schedule.id != "constant" and end and trainer.warmup_steps >= end:
            raise ValueError(
                f"trainer.warmup_steps = {trainer.warmup_steps} leaves trainer.lr_schedule = "
                f"{schedule.id!r} none of {end} steps to fall in: use fewer, or more steps"
            )

    def trainer_of_run(self, profiles: Path | None = None) -> TrainerConfig:
        """Return the trainer's settings with the run's last step and its directory of profiles.

        `profiles` is the run's directory of profiles; without one, nothing is profiled.
        """
        schedule, profile = self.trainer.lr_schedule, self.trainer.profile
        end = {"steps": schedule.steps or max(1, self.steps)}
        output = {"directory": profile.directory or str(profiles)} if profiles else {"steps": ()}
        update = {
            "lr_schedule": schedule.model_copy(update=end),
            "profile": profile.model_copy(update=output),
        }
        return self.trainer.model_copy(update=update)

    def changed(self) -> dict[str, Any]:
        """Return, by dotted key, the settings that differ from the defaults of the objective and
        the algorithm, and a few that identify a run."""
        chosen = {"objective": self.objective, "trainer": {"algorithm": self.trainer.algorithm}}
        defaults = dict(flat(RunConfig.model_validate(chosen).model_dump(mode="json")))
        return {
            name: value
            for name, value in flat(self.model_dump(mode="json"))
            if name in _NAMED or defaults.get(name) != value
        }

    def __repr__(self) -> str:
        shown = [f"{name}={short(value, 40)}" for name, value in self.changed().items()]
        more = f", and {len(shown) - 12} more" if len(shown) > 12 else ""
        return f"<RunConfig {', '.join(shown[:12])}{more}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        shown = {name: short(value, 200) for name, value in self.changed().items()}
        return block("RunConfig: not the defaults", pairs(dict(list(shown.items())[:60])))

    @property
    def label(self) -> str:
        """The first part of the run directory's default name, before the date."""
        env = self.env.label
        return env if self.objective == "rl" else f"{self.objective}-{env}"

    def _check_colocation(self) -> None:
        if not self.trainer.colocate:
            return
        if self.engine.id == "embedded" or self.objective in SUPERVISED:
            raise ValueError(
                "trainer.colocate = true: servers and trainer take turns on the same GPUs, and "
                "this run has no servers; leave trainer.colocate at false, or use engine.id=sglang "
                "or engine.id=vllm"
            )
        if self.trainer.weight_sync.id == "distributed":
            raise ValueError(
                "trainer.colocate = true with trainer.weight_sync = 'distributed': NCCL joins no "
                "two processes on one GPU; use trainer.weight_sync=disk or tensor (or lora)"
            )

    def _check_weight_sync(self) -> None:
        if self.engine.id == "vllm" and self.trainer.weight_sync.id == "tensor":
            raise ValueError(
                "trainer.weight_sync = 'tensor' sends tensors to SGLang's servers; those of vLLM "
                "take trainer.weight_sync=disk, distributed, delta or lora"
            )

    def _check_cluster(self) -> None:
        cluster = self.cluster
        is_served = self.engine.id in SERVED_ENGINES
        has_own_server = is_served and not (self.engine.url or cluster.servers)
        if cluster.address is None:
            for name in ("rollout_workers", "servers"):
                if number := getattr(cluster, name):
                    raise ValueError(
                        f"cluster.{name} = {number} needs a Ray to place them: "
                        "cluster.address=local starts one here, cluster.address=auto joins one"
                    )
        elif self.objective in SUPERVISED and (cluster.rollout_workers or cluster.servers):
            raise ValueError(
                f"objective = {self.objective!r} plays no episodes: leave cluster.rollout_workers "
                "and cluster.servers at 0; trainer.num_ranks says how many ranks Ray places"
            )
        elif self.deterministic:
            raise ValueError(
                f"deterministic = true with cluster.address = {cluster.address!r}: which processes "
                "share a batch depends on the network; leave cluster.address at null"
            )
        elif cluster.rollout_workers and cluster.address != "local" and has_own_server:
            raise ValueError(
                f"engine.id = {self.engine.id!r} without engine.url starts a server that only this "
                f"machine reaches, and cluster.address = {cluster.address!r} has others: "
                "cluster.servers=1 lets Ray place it"
            )
        if cluster.servers and (not is_served or self.engine.url):
            raise ValueError(
                f"cluster.servers = {cluster.servers} starts servers: use engine.id=sglang or "
                "engine.id=vllm, and no engine.url"
            )


def require_plain_sampling(config: RunConfig) -> None:
    """Raise ConfigError for truncated sampling (top_p, top_k); evaluations may use it."""
    if config.objective in SUPERVISED:  # does not train on samples
        return
    # Engines report log-probabilities over the whole vocabulary, which understate how often a token
    # is sampled from a truncated distribution.
    rollout = config.rollout
    for name, value, plain in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0)):
        if value != plain:
            raise ConfigError(
                f"rollout.{name} = {value:g} cannot be trained with: the recorded "
                "log-probabilities are not those of the truncated distribution that is sampled, "
                "and every importance ratio would be wrong",
                hints=[
                    f"train with rollout.{name}={plain:g}; rollout.temperature may be lowered",
                    f"measure with it: areal-gym eval ... rollout.{name}={value:g}",
                ],
            )
