"""The sections of a run's settings, one pydantic model each; docs/settings.md lists them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from areal_gym.config.algorithm_settings import (
    PRESETS,
    CorrectionConfig,
    CriticConfig,
    KlConfig,
    RewardConfig,
)
from areal_gym.config.defaults import fill_in_trainer
from areal_gym.config.optimizer_settings import LrScheduleConfig
from areal_gym.config.parallel_settings import Layout, ParallelConfig
from areal_gym.config.profile_settings import ProfileConfig
from areal_gym.config.settings_model import Settings, Urls


class EnvConfig(Settings):
    """The environment and its keyword arguments."""

    id: str = "tir"
    """The environment's id (`areal-gym list envs`), or FILE.py:CLASS."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's class (see `areal-gym show ENV`)."""
    fixed_roles: dict[str, str] = Field(default_factory=dict)
    """The roles that are not trained, and who plays them: "gold" or "noop" of the environment, the
    URL of a chat server, or the directory of a checkpoint (docs/roles.md)."""

    @property
    def label(self) -> str:
        """The id in names of directories; for FILE.py:CLASS, it is the class."""
        file, _, name = self.id.rpartition(":")
        return name if file.endswith(".py") else self.id


class AgentConfig(Settings):
    """The agent: how an episode turns into calls of the policy."""

    id: str = "chat"
    """The agent's id (`areal-gym list agents`)."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the agent's class (see `areal-gym show AGENT`)."""


class PluginConfig(Settings):
    """A plugin and its keyword arguments; the id alone, as a text, is enough."""

    id: str
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """The plugin's keyword arguments."""

    @model_validator(mode="before")
    @classmethod
    def _accept_id(cls, value: Any) -> Any:
        return {"id": value} if isinstance(value, str) else value


class WeightSyncConfig(PluginConfig):
    """The method that brings new weights to the engine."""

    id: str = "auto"
    """The weight sync's id (`areal-gym list weight-syncs`); "auto" is "in-process" for an engine in
    this process and "disk" for servers."""


SERVED_ENGINES = ("sglang", "vllm")
"""The engines over servers, which areal-gym starts if no URL is given."""


class EngineConfig(Settings):
    """The engine that samples from the policy."""

    id: str = "embedded"
    """The engine's id (`areal-gym list engines`)."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the engine's class (see `areal-gym show ENGINE`)."""
    url: Urls = ()
    """URL of a server, for the engines "sglang" and "vllm"; without any, areal-gym starts one."""
    model: str = "starter"
    """The policy: a checkpoint directory, OWNER/NAME on the Hugging Face hub, or "starter", a small
    policy that is built once. `areal-gym eval` also accepts the URL of a server with OpenAI's
    API."""
    max_context: int = Field(512, ge=16)
    """Maximum tokens of one sequence, prompt included."""
    num_slots: int = Field(128, ge=1)
    """Sequences that are sampled concurrently."""
    max_logprob_gap: float = Field(0.05, gt=0)
    """At the start, engine and trainer score the same sampled tokens. If their log-probabilities
    differ by more than this on average, they are not the same model, and the run is refused.
    Servers are compared again after each publication, with 4 times this limit, or a fiftieth of it
    if everything is float32."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of the engine."""
    device: str = "auto"
    """"auto" takes the accelerator that torch sees, otherwise the CPU; "accelerator" fails without
    one; "cpu", or torch's name of an accelerator, which `areal-gym doctor` shows."""
    num_threads: int = Field(1, ge=1)
    """CPU threads of the engine; one is fastest for small models."""


class ModelConfig(Settings):
    """The code that runs the policy in the trainer (docs/models.md)."""

    backend: Literal["auto", "tiny", "transformers"] = "auto"
    """"tiny" is the decoder for CPUs, "transformers" runs any architecture and is sharded over
    ranks; "auto" takes "tiny" for models of up to 256 MB whose architecture it supports."""
    trust_remote_code: bool = False
    """Run code from the checkpoint for an architecture that transformers does not have."""


class RolloutConfig(Settings):
    """Episodes: their number, groups, sampling and failures."""

    group_size: int = Field(8, ge=1)
    """Trajectories per task (siblings)."""
    batch_groups: int = Field(16, ge=1)
    """Groups per training step."""
    max_in_flight: int = Field(128, ge=1)
    """Episodes played concurrently."""
    max_staleness: int = Field(0, ge=0)
    """Policy versions that a trained token may lag behind; 0 is synchronous training."""
    max_new_tokens: int = Field(96, ge=1)
    """Maximum tokens that the policy generates per turn."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature, in training and in sampled evaluations."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens with this total probability; for `eval` only."""
    top_k: int = Field(0, ge=0)
    """Sample from this many of the likeliest tokens; 0 is all; for `eval` only."""
    thinking: Literal["keep", "strip"] = "keep"
    """"keep" leaves the thinking of earlier turns in the prompt, so that a dialogue only grows;
    "strip" lets the chat template decide, and a dialogue forks where the template drops text."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, such as enable_thinking."""
    filters: tuple[PluginConfig, ...] = ()
    """Group filters; a finished group that one of them rejects is replaced
    (`areal-gym list filters`)."""
    curriculum: PluginConfig | None = None
    """The curriculum that chooses the next task (`areal-gym list curricula`); null lets the
    environment draw tasks."""
    min_group_size: int = Field(2, ge=1)
    """Groups with fewer trajectories than this, after failures, are dropped and counted."""
    episode_timeout_s: float = Field(120.0, gt=0)
    """An episode that takes longer counts as an infrastructure failure, not as a low reward."""
    max_retries: int = Field(1, ge=0)
    """How often a failed episode is replayed before its group goes on without it."""
    max_failure_rate: float = Field(0.5, ge=0, le=1)
    """The run stops if more than this share of the last 64 or more episodes failed."""
    outage_patience_s: float = Field(600.0, gt=0)
    """How long a run waits for lost servers, workers or sandboxes to come back. Episodes lost in
    an outage are replayed and do not count as retries."""


class LoraConfig(Settings):
    """A low-rank adapter (LoRA) that is trained instead of the weights."""

    rank: int = Field(16, ge=1)
    """The rank of the adapter: two matrices, [rank, in] and [out, rank], for each weight."""
    alpha: float = Field(32.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""
    targets: Literal["all"] | tuple[str, ...] = "all"
    """Names of the matrices in each layer that get an adapter, such as [q_proj, v_proj]; "all" are
    its linear layers and its experts' matrices, without the router."""


class TrainerConfig(Settings):
    """The trainer: algorithm, optimizer and resources."""

    id: str = "single"
    """The trainer's id (`areal-gym list trainers`)."""
    algorithm: str = "grpo"
    """The algorithm (`areal-gym list algorithms`): a preset that fills in the settings from
    `advantage` to `critic` that are not given."""
    advantage: str = "grpo"
    """The advantage estimator (`areal-gym list advantages`)."""
    advantage_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the estimator, such as `discount` and `lam` of "gae"."""
    loss: str = "ppo_clip"
    """The policy loss (`areal-gym list losses`)."""
    aggregation: Literal["token_mean", "seq_mean", "constant_length"] = "token_mean"
    """How token losses are averaged: over all tokens, over each sequence first, or by a constant
    length (`areal_gym.trainer.algorithms.losses`)."""
    clip_low: float | Literal["default"] | None = "default"
    """Ratios below 1 - clip_low are clipped; null is off, "default" is the loss's own value."""
    clip_high: float | Literal["default"] | None = "default"
    """Ratios above 1 + clip_high are clipped; null is off, "default" is the loss's own value."""
    loss_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the loss."""
    correction: CorrectionConfig = CorrectionConfig()
    kl: KlConfig = KlConfig()
    reward: RewardConfig = RewardConfig()
    entropy_bonus: float = Field(0.0, ge=0)
    """Coefficient of the policy's entropy per token in the loss."""
    critic: CriticConfig = CriticConfig()
    lora: LoraConfig | None = None
    """Train a LoRA adapter (peft) and freeze the weights; null trains all weights."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """"muon" orthogonalises the updates of the layers' matrices, the rest stays with AdamW;
    "adamw_8bit" keeps AdamW's moments in 2 bytes a weight instead of 8 (torchao)."""
    lr: float = Field(3e-4, gt=0)
    """Learning rate after the warm-up."""
    lr_groups: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Learning rates of parameters by pattern, such as {"*embed_tokens*": 1e-5}: `*` stands for any
    characters, the first pattern that fits a name counts, and 0 keeps weights as they are."""
    muon_lr: float = Field(3e-3, gt=0)
    """Learning rate of the matrices, with optimizer "muon"."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate grows to `lr`."""
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's betas."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of either optimizer."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    minibatches: int = Field(1, ge=1)
    """Optimizer updates per step; the step's batch is split among them by group."""
    max_drift: float | Literal["default"] | None = "default"
    """The drift of the policy since a batch was sampled, above which stale batches are trained at a
    lower learning rate (docs/asynchrony.md). With Muon it is how far the policy went against the
    advantages (`train/drift`), by default at most 0.006; with AdamW how far in any way
    (`train/approx_kl`, nats per token), 0.01; its rate for stale batches is at most
    1 / sqrt(1 + staleness) in any case. null trains stale batches like fresh ones."""
    vision: Literal["frozen", "projector", "full"] = "frozen"
    """The trained part of a vision-language model's vision tower: nothing, the projector that maps
    features to tokens, or everything."""
    patches_per_microbatch: int = Field(65536, ge=1)
    """Maximum patches of distinct images in one forward and backward pass."""
    tokens_per_microbatch: int = Field(4096, ge=64)
    """Maximum tokens of one forward and backward pass: trades memory for speed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; master weights and optimizer states are always float32."""
    device: str = "auto"
    """The device to train on, as in engine.device: "auto", "accelerator", "cpu" or a torch name."""
    num_ranks: int = Field(1, ge=1)
    """Processes that train together, one per GPU; `parallel` says how they share the model."""
    parallel: ParallelConfig = ParallelConfig()
    connect_timeout_s: float = Field(300.0, gt=0)
    """How long the ranks may take to find each other and connect, from the start of each."""
    max_restarts: int = Field(3, ge=0)
    """How often in a row, without a new checkpoint in between, a run continues from its newest
    checkpoint after a process of the trainer has died; 0 ends the run at once."""
    routing_replay: bool = False
    """Train a mixture of experts with the experts that the engine has used for each token, instead
    of those that the trainer's router chooses (rollout routing replay, R3; docs/models.md)."""
    recompute_layers: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    compile: bool = False
    """Let torch.compile fuse the layers' MLPs: slow to start, faster on GPUs. On CPUs it needs a
    C++ compiler."""
    cpu_offload: bool = False
    """With several ranks on GPUs: keep weights and optimizer states in host memory."""
    colocate: bool = False
    """Servers and trainer use the same GPUs in turns: servers release their memory while the
    trainer works; its weights and optimizer states are in host memory while they sample."""
    runs_in: Literal["auto", "thread", "process"] = "auto"
    """"process" trains in a child process, apart from the rollouts; "auto" does so when the two
    overlap (rollout.max_staleness above 0) and the trainer is on a CPU."""
    num_threads: int = Field(1, ge=1)
    """CPU threads of each rank."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    profile: ProfileConfig = ProfileConfig()
    save_every: int = Field(20, ge=0)
    """Steps between checkpoints; 0 saves only at the end and when interrupted."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints to keep, besides the best one measured (eval.every)."""

    @property
    def layout(self) -> Layout:
        """The arrangement of `num_ranks` ranks."""
        return self.parallel.layout(self.num_ranks)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        return fill_in_trainer(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.advantage in PRESETS[self.algorithm].refuses:
            other = "lite_ppo" if self.advantage == "lite_ppo" else "grpo"
            raise ValueError(
                f"trainer.algorithm = {self.algorithm!r} does not divide by the standard "
                f"deviation, and trainer.advantage = {self.advantage!r} does; use "
                f"trainer.algorithm={other}, or leave trainer.advantage out"
            )
        if isinstance(self.max_drift, float) and not 0 < self.max_drift <= 1:
            raise ValueError(f"trainer.max_drift = {self.max_drift}: from above 0 to 1, or null")
        if self.lora is not None and self.optimizer == "muon":
            raise ValueError(
                "lora with optimizer = 'muon': Muon orthogonalises whole matrices, and an adapter "
                "is two thin ones; use optimizer = 'adamw'"
            )
        layout = self.layout  # refuses sizes that do not make up the ranks
        if self.lora is not None and layout.tensor > 1:
            raise ValueError(
                f"lora with trainer.parallel.tensor = {layout.tensor}: an adapter's matrices "
                "are whole on every rank, and cannot be multiplied with divided ones; use "
                "trainer.parallel.tensor=1, and more shards instead"
            )
        if self.lora is not None and self.lora.targets == "all" and layout.expert > 1:
            raise ValueError(
                f"lora with trainer.parallel.expert = {layout.expert} would adapt experts that are "
                "divided among ranks; use lora.targets=[q_proj,k_proj,v_proj,o_proj], or "
                "trainer.parallel.expert=1"
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
    """The guard that warns about a diverging run and stops it (docs/trainer.md)."""

    action: Literal["stop", "warn", "ignore"] = "stop"
    """"stop" ends the run and names its last good checkpoint, "warn" only prints a warning,
    "ignore" turns the guard off."""
    window: int = Field(5, ge=1)
    """Steps in the window of each signal."""
    patience: int = Field(3, ge=0)
    """Steps for which a signal must stay beyond its limit, after the warning, before the run
    stops."""
    save_every: int = Field(10, ge=0)
    """While all signals are far from their limits, write a checkpoint after this many steps unless
    trainer.save_every has, so that there is a good one to resume from; 0 leaves it to
    trainer.save_every and to the first warning."""
    kl: float | None = Field(0.75, gt=0)
    """Limit of `train/approx_kl`, in nats per token: median over the window; null is off."""
    ratio: float | None = Field(2.0, gt=1)
    """Limit of the factor between 1 and the mean ratio, `train/ratio` or `train/stale_ratio`:
    median over the window; null is off."""
    entropy: float | None = Field(3.0, gt=1)
    """Limit of `train/entropy`, relative to its value at the beginning (and at least 1 nat more):
    median over the window, while rewards have not risen; null is off. Ignored in distillation."""
    reward: float | None = Field(0.5, gt=0, le=1)
    """Share of the distance between the lowest reward and the best windowed mean that
    `reward/newest` may lose (over 32 groups or more, and beyond chance); null is off. Ignored with
    a curriculum, in online runs and in distillation."""


class EvalConfig(Settings):
    """Evaluations of the policy on held-out tasks."""

    num_tasks: int = Field(512, ge=0)
    """Number of held-out tasks; all of them if there are fewer. 0 is no evaluation."""
    num_samples: int = Field(1, ge=1)
    """Sampled episodes per task."""
    every: int = Field(0, ge=0)
    """Training steps between evaluations; 0 evaluates only before and after training."""
    at_start: bool = True
    """Whether the policy is evaluated before the first step."""
    split: str = "test"
    """The split of the held-out tasks (`areal-gym show ENV` lists the splits)."""
    fixed_roles: dict[str, str] | None = None
    """The fixed roles of evaluations; null takes those of `env.fixed_roles`."""

    def is_scheduled(self, step: int) -> bool:
        """Return whether `every` asks for an evaluation after this step."""
        return self.every > 0 and step > 0 and step % self.every == 0


class ClusterConfig(Settings):
    """Several processes and machines, with Ray; `trainer.num_ranks` is the number of ranks."""

    address: str | None = None
    """null uses no Ray; "local" starts Ray on this machine; "auto" or "host:port" joins a running
    cluster."""
    rollout_workers: int = Field(0, ge=0)
    """Processes that play episodes; 0 plays them in the main process."""
    servers: int = Field(0, ge=0)
    """Servers that Ray places and areal-gym starts; 0 leaves servers to `engine`."""
    gpus_per_server: int = Field(1, ge=0)
    """GPUs per server."""
