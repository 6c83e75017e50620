"""The sections of a run's settings: one small pydantic model each."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from areal_gym.config.algorithm_settings import (
    CorrectionConfig,
    CriticConfig,
    KlConfig,
    RewardConfig,
    check_estimator,
)
from areal_gym.config.defaults import fill_in_trainer
from areal_gym.config.settings_model import Settings


class EnvConfig(Settings):
    """Which environment, and its keyword arguments."""

    id: str = "tir"
    """`areal-gym list envs`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's class (see `areal-gym show ENV`)."""


class AgentConfig(Settings):
    """How the policy is asked."""

    id: str = "chat"
    """`areal-gym list agents`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the agent's class (see `areal-gym show AGENT`)."""


class PluginConfig(Settings):
    """A plugin and its keyword arguments; its id alone (a text) will do."""

    id: str
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""

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
    """`areal-gym list engines`."""
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
    """What the engine computes in."""
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
    """Of sampling, in training and in sampled evaluations."""
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
    """An episode that takes longer has failed: its infrastructure, not its policy."""
    max_retries: int = Field(1, ge=0)
    """How often a failed episode is played again before its group goes on without it."""
    max_failure_rate: float = Field(0.5, ge=0, le=1)
    """Above this share of failed episodes, over the last 64 or more, the run stops."""
    outage_patience_s: float = Field(600.0, gt=0)
    """How long a run waits when servers, workers or sandboxes are gone; what they lost is played
    again when they are back, and costs no retry."""


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
    """`areal-gym list trainers`."""
    algorithm: str = "grpo"
    """A preset for the settings below, from `advantage` to `critic`
    (`areal_gym.config.algorithm_settings`): it fills in what is not given."""
    advantage: str = "grpo"
    """What an action was worth: `areal-gym list advantages`."""
    advantage_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the estimator, such as `discount` and `lam` of "gae"."""
    loss: str = "ppo_clip"
    """How that moves the policy: `areal-gym list losses`."""
    aggregation: Literal["token_mean", "seq_mean", "constant_length"] = "token_mean"
    """What tokens' losses are averaged over: all tokens, each sequence first, or a constant length
    (`areal_gym.trainer.algorithms.losses`)."""
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
    """Learning rate after the warm-up."""
    muon_lr: float = Field(3e-3, gt=0)
    """Learning rate of the matrices, with optimizer "muon"."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate grows to `lr`."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's."""
    weight_decay: float = Field(0.0, ge=0)
    """Of either optimizer."""
    max_grad_norm: float = Field(1.0, gt=0)
    """A gradient that is longer is shortened to this."""
    minibatches: int = Field(1, ge=1)
    """Optimizer updates per step; the step's batch is split among them by group."""
    tokens_per_microbatch: int = Field(4096, ge=64)
    """What one forward and backward pass takes at most: memory against speed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; master weights and optimizer states are always float32."""
    device: str = "auto"
    """"auto" takes CUDA when there is one."""
    num_ranks: int = Field(1, ge=1)
    """Processes that share the model's weights, gradients and states (FSDP2): one per GPU."""
    recompute_layers: bool = False
    """Compute a layer's inner values again in the backward pass instead of keeping them."""
    compile: bool = False
    """Let torch.compile fuse the layers' MLPs: slow to start, faster on GPUs. On CPUs it takes a
    C++ compiler."""
    cpu_offload: bool = False
    """With several ranks on GPUs: weights and states wait in host memory."""
    runs_in: Literal["auto", "thread", "process"] = "auto"
    """"process" keeps training and rollouts from sharing one interpreter; "auto" does so where
    they overlap (rollout.max_staleness above 0) and the trainer is on a CPU."""
    num_threads: int = Field(1, ge=1)
    """CPU threads of each rank."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    save_every: int = Field(20, ge=0)
    """Steps between checkpoints; 0 saves at the end, and when interrupted, only."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many of the newest checkpoints stay, besides the best that was measured (eval.every)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        return fill_in_trainer(value) if isinstance(value, dict) else value

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


class GuardConfig(Settings):
    """When a run whose policy diverges is warned of and stopped (docs/trainer.md)."""

    action: Literal["stop", "warn", "ignore"] = "stop"
    """"stop" ends the run and names its last good checkpoint, "warn" only says so, "ignore" looks
    at nothing."""
    window: int = Field(5, ge=1)
    """Steps that each signal is taken over."""
    patience: int = Field(3, ge=0)
    """More steps that a signal must stay beyond its limit, after the warning, before the run
    stops."""
    save_every: int = Field(10, ge=0)
    """While all signals are far from their limits, steps after which a checkpoint is written where
    trainer.save_every has written none, so that there is a good one to go on from; 0 leaves it to
    that, and to the first sign of trouble."""
    kl: float | None = Field(0.75, gt=0)
    """Limit of `train/approx_kl`, nats a token: median over the window; null is off."""
    ratio: float | None = Field(2.0, gt=1)
    """Limit of the factor between 1 and the mean ratio, `train/ratio` or `train/stale_ratio`:
    median over the window; null is off."""
    entropy: float | None = Field(3.0, gt=1)
    """Limit of `train/entropy`, in units of what it was at the beginning (and at least 1 nat more):
    median over the window; null is off."""
    reward: float | None = Field(0.5, gt=0, le=1)
    """Share of the way from the lowest reward to the best mean of a window that `reward/newest` may
    lose (over 32 groups or more, and where chance does not explain it); null is off. With a
    curriculum, in online runs and in distillation it is not looked at."""


class EvalConfig(Settings):
    """How the policy is measured on held-out tasks."""

    num_tasks: int = Field(512, ge=1)
    """How many held-out tasks."""
    num_samples: int = Field(1, ge=1)
    """Sampled episodes per task."""
    every: int = Field(0, ge=0)
    """Training steps between evaluations; 0 evaluates before and after only."""
    split: str = "test"
    """Which tasks are held out."""


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
    """GPUs that each of these servers sees."""
