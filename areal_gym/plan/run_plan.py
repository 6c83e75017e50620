"""Plans a run: the memory of ranks, servers and hosts, and an estimate of a step's seconds.

Memory of ranks is that of a simulated step (`simulated_step`); seconds are estimates
(`estimates`).
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from areal_gym.config import RunConfig
from areal_gym.config.objective_settings import SUPERVISED
from areal_gym.errors import UsageError
from areal_gym.models.flops import training_flops
from areal_gym.models.gpus import Gpu, gpu_named
from areal_gym.models.policy_model import ModelShape
from areal_gym.plan.estimates import (
    GPUS_PER_NODE,
    HOST_BANDWIDTH,
    Estimate,
    Training,
    generation_seconds,
    publication_seconds,
    training_seconds,
)
from areal_gym.plan.model_to_plan import PlannedModel, heads_of, model_to_plan
from areal_gym.plan.operation_costs import Costs
from areal_gym.plan.server_memory import ServerMemory, server_memory, servers_of
from areal_gym.plan.simulated_step import SimulatedStep, simulate_step
from areal_gym.plugins import registry

USABLE_MEMORY = 0.92
"""Share of a GPU's memory for tensors; drivers, allocators and libraries take the rest."""
PROCESS_BYTES = 2e9
"""Host memory of a process with torch and a GPU: libraries, the driver's own, pinned buffers."""
TOKEN_BYTES = 64
"""Host memory of a token of a batch in the driver: ids, log-probabilities, masks, text."""
_TOWER_PASSES = {"frozen": 1, "projector": 1, "full": 3}
"""Operations of a tower in training over those of its forward pass, by `trainer.vision`; the
projector's own backward pass is small, and counted with the texts."""
_BUCKET_COPIES = {"distributed": 2, "tensor": 4}
"""How many copies of a bucket rank 0 holds, by weight sync."""
_TRAINED = ("weights", "gradients", "states")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The plan of a run, in bytes, seconds and numbers of GPUs."""

    gpu: str
    gpu_bytes: int
    num_parameters: int
    num_active_parameters: int
    num_ranks: int
    rank_bytes: Mapping[str, int]
    """Bytes of one rank at the peak of a step, by what they are for."""
    logits_bytes: int
    """The most bytes of logits, which may be gone at the peak."""
    publishing_bytes: Mapping[str, int]
    """Bytes of rank 0 while it publishes: what stays between steps, and buckets."""
    num_servers: int
    gpus_per_server: int
    takes_turns: bool
    """Servers and ranks use the same GPUs in turns (`trainer.colocate`)."""
    server_stays_bytes: int
    """What a server keeps on a GPU during the ranks' turn: its weights beside an adapter."""
    server_weight_bytes: int
    """Weights on each GPU of a server, in bfloat16."""
    server_cache_bytes: int
    """Keys and values on each GPU of a server."""
    cache_bytes_per_token: int
    """Keys and values of one token, on all GPUs of a server together."""
    cache_tokens: int
    """Tokens for which one server has room."""
    publication_bytes: int
    host_bytes: Mapping[str, int]
    """Memory of a node with as many ranks as it has room for, and the driver, by what it is for."""
    node_bytes: int | None
    """The memory that a node has; None if it was not said."""
    step_tokens: int
    step_flops: float
    """What the model needs, of all ranks ("model FLOPs")."""
    computed_flops: float
    """What the ranks compute: layers that are computed twice, and passes without a gradient."""
    traffic_bytes: Mapping[str, int]
    """Bytes that one rank sends in a step, by collective."""
    seconds: Mapping[str, float]
    """Estimates: generate, train, update, communicate, publish, offload, step."""
    limit: str
    """The part that takes longest."""
    limited_by: str
    """What that part waits for: compute, memory or host bandwidth, network or disk."""

    @property
    def num_gpus(self) -> int:
        """The GPUs of ranks and servers."""
        return _num_gpus(self.num_ranks, self.num_servers, self.gpus_per_server, self.takes_turns)

    @property
    def room(self) -> float:
        """Bytes of a GPU for tensors."""
        return USABLE_MEMORY * self.gpu_bytes

    @property
    def rank_total(self) -> int:
        """The bytes of a rank when they are most, and of a server on the same GPU then."""
        training, publishing = sum(self.rank_bytes.values()), sum(self.publishing_bytes.values())
        servers = self.server_weight_bytes if self.takes_turns else 0
        return max(training + self.server_stays_bytes, publishing + servers)

    @property
    def host_bytes_per_node(self) -> int:
        """The memory of a node."""
        return sum(self.host_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether ranks and servers find room on their GPUs, and processes on their nodes."""
        has_room = self.num_servers == 0 or self.cache_tokens > 0
        fits_node = self.node_bytes is None or self.host_bytes_per_node <= self.node_bytes
        return self.rank_total <= self.room and has_room and fits_node

    def to_json(self) -> dict[str, Any]:
        """Return all fields, with totals."""
        names = ("num_gpus", "fits", "rank_total", "host_bytes_per_node")
        return asdict(self) | {name: getattr(self, name) for name in names}


def gpus_of(config: RunConfig) -> int:
    """Return the number of GPUs that ranks and servers take, one for each rank."""
    num_servers, size, _ = servers_of(config)
    return _num_gpus(config.trainer.num_ranks, num_servers, size, config.trainer.colocate)


def _num_gpus(num_ranks: int, num_servers: int, gpus_per_server: int, takes_turns: bool) -> int:
    served = num_servers * gpus_per_server
    return max(num_ranks, served) if takes_turns else num_ranks + served


def plan_run(
    config: RunConfig,
    *,
    gpu: str,
    tokens_per_episode: int | None = None,
    patches_per_task: int | None = None,
    node_bytes: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> RunPlan:
    """Return the plan of a run on GPUs of one kind.

    `tokens_per_episode` is the mean; by default half of `engine.max_context`. So is
    `patches_per_task`, of the distinct pictures of an episode's task, or of a fixed example: by
    default one picture of 640 x 480, if the model sees; 0 plans for texts only. Of a model on the
    hub only the config is downloaded, after a line to `say`.

    Raises:
        ConfigError: `engine.model` has no config that can be trained, or the settings do not fit.
        UsageError: there is no such GPU, or the model is the built-in starter.
    """
    figures, trainer = gpu_named(gpu), config.trainer
    if config.engine.model == "starter":
        raise UsageError(
            "the built-in starter fits anywhere: a plan is for a checkpoint",
            hints=["engine.model=DIR; config.json in it is enough"],
        )
    model = model_to_plan(config, say)
    servers = _servers(config, model, figures)  # what cannot be served is said at once
    step = simulate_step(config, model, has_pictures=patches_per_task != 0)
    tokens = tokens_per_episode or config.engine.max_context // 2
    step_tokens = _sequences(config) * tokens
    servers = _servers(config, model, figures, step.shape)
    patches = (patches_per_task or step.patches_per_picture) if step.num_patches else 0
    step_patches = _num_examples(config) * patches
    training = _training(config, step, step_tokens, step_patches, tokens)
    estimate, traffic = _estimate(config, step, servers, training, figures, tokens)
    rank_bytes, host_bytes = _offloaded(config, step)
    buckets = _bucket_bytes(config, step)
    return RunPlan(
        gpu=gpu,
        gpu_bytes=int(figures.memory),
        num_parameters=step.shape.num_parameters,
        num_active_parameters=step.shape.num_active_parameters,
        num_ranks=config.trainer.num_ranks,
        rank_bytes=rank_bytes,
        logits_bytes=step.logits,
        publishing_bytes={
            kind: size for kind, size in step.kept.items() if kind in rank_bytes and size
        }
        | ({"buckets": buckets} if buckets else {}),
        num_servers=servers.num_servers,
        gpus_per_server=servers.gpus_per_server,
        takes_turns=trainer.colocate,
        server_stays_bytes=(
            servers.weight_bytes_per_gpu
            if trainer.colocate and trainer.weight_sync.id == "lora"
            else 0
        ),
        server_weight_bytes=servers.weight_bytes_per_gpu,
        server_cache_bytes=servers.cache_bytes_per_gpu,
        cache_bytes_per_token=servers.cache_bytes_per_token,
        cache_tokens=servers.cache_tokens,
        publication_bytes=publication_bytes(config, step),
        host_bytes=_host_bytes(config, step, host_bytes, step_tokens),
        node_bytes=node_bytes,
        step_tokens=step_tokens,
        step_flops=_model_flops(config, step, step_tokens, step_patches, tokens),
        computed_flops=training.computed_flops * config.trainer.num_ranks,
        traffic_bytes=traffic,
        seconds=estimate.seconds,
        limit=estimate.slowest,
        limited_by=estimate.limits[estimate.slowest],
    )


def _servers(
    config: RunConfig, model: PlannedModel, gpu: Gpu, shape: ModelShape | None = None
) -> ServerMemory:
    num_heads, num_cached = heads_of(model)
    return server_memory(
        config,
        gpu_bytes=gpu.memory,
        num_parameters=shape.num_parameters if shape else 1,
        cache_bytes_per_token=shape.cache_bytes_per_token if shape else 1,
        num_heads=num_heads,
        num_key_value_heads=num_cached,
    )


def _training(
    config: RunConfig, step: SimulatedStep, step_tokens: int, step_patches: int, length: int
) -> Training:
    """Return what a rank computes and sends in a step."""
    trainer = config.trainer
    num_groups = trainer.layout.num_data_ranks
    share = step_tokens / num_groups / step.num_tokens
    tower_share = step_patches / num_groups / step.num_patches if step.num_patches else 0.0
    num_microbatches = max(1, math.ceil(max(share, tower_share)))
    num_updates = 1 if config.objective in SUPERVISED else trainer.minibatches
    costs = step.costs(num_microbatches, num_updates)
    tower_flops = _tower_flops(config, step)
    look_flops = step.looks.flops - step.looks.tower_flops
    pass_flops = step.microbatch.flops - tower_flops
    flops = (look_flops + pass_flops) * share
    flops += (step.looks.tower_flops + tower_flops) * tower_share
    pairs = _pairs(step.shape, step_tokens, length) / trainer.num_ranks
    passes = 3 + trainer.recompute_layers
    return Training(
        costs=Costs(round(flops), costs.bytes_by_link),
        attention_flops=4 * step.shape.attention_width * pairs,
        num_looks=passes * look_flops / max(1, pass_flops),
        recomputes=trainer.recompute_layers,
        updated_bytes=sum(step.peak.get(kind, 0) for kind in _TRAINED),
        num_updates=num_updates,
    )


def _model_flops(
    config: RunConfig, step: SimulatedStep, step_tokens: int, step_patches: int, length: int
) -> float:
    """Return what the model needs in a step, of all ranks."""
    of_texts = training_flops(
        step.shape,
        num_tokens=step_tokens,
        num_pairs=_pairs(step.shape, step_tokens, length),
        num_logits=step_tokens,
    )
    return of_texts + _tower_flops(config, step) * step_patches / max(1, step.num_patches)


def _tower_flops(config: RunConfig, step: SimulatedStep) -> int:
    """Return the operations of a tower in the passes of one micro-batch that trains."""
    return _TOWER_PASSES[config.trainer.vision] * step.microbatch.tower_flops


def _estimate(
    config: RunConfig,
    step: SimulatedStep,
    servers: ServerMemory,
    training: Training,
    gpu: Gpu,
    tokens: int,
) -> tuple[Estimate, dict[str, int]]:
    """Return seconds of a step, and the bytes that a rank sends."""
    seconds = training_seconds(training, gpu, config.trainer.dtype)
    limits = {"train": "compute", "update": "memory bandwidth", "communicate": "network"}
    weight_sync = config.trainer.weight_sync.id
    if weight_sync == "auto":
        weight_sync = "disk" if servers.num_servers else "in-process"
    num_bytes = publication_bytes(config, step)
    if config.trainer.colocate:
        seconds["offload"] = 2 * _kept_bytes(step) / HOST_BANDWIDTH  # there, and back
        limits["offload"] = "host bandwidth"
    seconds["publish"], limits["publish"] = publication_seconds(num_bytes, weight_sync)
    if servers.cache_tokens and config.objective not in SUPERVISED:
        seconds["generate"], limits["generate"] = generation_seconds(
            servers,
            gpu,
            step_tokens=_sequences(config) * tokens,
            tokens=tokens,
            max_in_flight=config.rollout.max_in_flight,
            flops_per_token=2.0 * step.shape.num_active_parameters,
        )
    trained = max(seconds["train"], seconds["communicate"]) + seconds["update"]
    trained += seconds["publish"] + seconds.get("offload", 0.0)
    generated = seconds.get("generate", 0.0)
    is_async = config.rollout.max_staleness > 0 and not config.trainer.colocate
    seconds["step"] = max(trained, generated) if is_async else trained + generated
    traffic: Counter[str] = Counter()
    for link, size in training.costs.bytes_by_link.items():
        traffic[link.collective] += round(link.sent_bytes(size))
    if weight_sync == "distributed" and servers.num_servers:
        traffic["broadcast"] += num_bytes
    return Estimate(seconds=seconds, limits=limits), dict(traffic)


def _sequences(config: RunConfig) -> int:
    """Return the episodes, or the rows of examples, that a step trains on."""
    if config.objective not in SUPERVISED:
        return _num_examples(config) * config.rollout.group_size
    return _num_examples(config) * (1 if config.objective == "sft" else 2)


def _num_examples(config: RunConfig) -> int:
    """Return the groups of episodes, or the fixed examples, that a step trains on."""
    return config.data.batch_size if config.objective in SUPERVISED else config.rollout.batch_groups


def _pairs(shape: ModelShape, num_tokens: float, length: int) -> float:
    """Return the pairs of queries and keys of so many tokens in episodes of that length."""
    pairs = 0.0
    for layer_window in shape.windows:
        window = min(layer_window or length, length)
        pairs += window * (window + 1) / 2 + (length - window) * window
    return pairs * num_tokens / length


# ---- what is not a step's own ------------------------------------------------------------------


def publication_bytes(config: RunConfig, step: SimulatedStep) -> int:
    """Return the bytes of a publication, in the type that is sent."""
    if config.trainer.weight_sync.id == "lora":
        return step.kept.get("weights", 0)
    return _sent_size(config) * step.shape.num_parameters


def _sent_size(config: RunConfig) -> int:
    """Return the bytes of a number that is published."""
    return 2 if config.trainer.weight_sync.kwargs.get("dtype") == "bfloat16" else 4


def _bucket_bytes(config: RunConfig, step: SimulatedStep) -> int:
    """Return what rank 0 gathers and holds to publish it."""
    weight_sync = config.trainer.weight_sync
    largest = _sent_size(config) * step.largest_weight
    if num_copies := _BUCKET_COPIES.get(weight_sync.id):
        sync_class = registry().load("weight-syncs", weight_sync.id)
        usual = inspect.signature(sync_class).parameters["bucket_mb"].default
        size = int(float(weight_sync.kwargs.get("bucket_mb", usual)) * 1e6)
        return num_copies * max(min(size, publication_bytes(config, step)), largest)
    return largest if config.trainer.num_ranks > 1 else 0


def _offloaded(config: RunConfig, step: SimulatedStep) -> tuple[dict[str, int], int]:
    """Return the bytes of a rank's GPU by kind, and those that lie on its host instead."""
    on_gpu = dict(step.peak)
    if not config.trainer.cpu_offload:
        return on_gpu, 0
    return on_gpu, sum(on_gpu.pop(kind, 0) for kind in _TRAINED)


def _kept_bytes(step: SimulatedStep) -> int:
    """Return what a rank keeps from step to step, which it offloads for servers' turns."""
    return sum(step.kept.get(kind, 0) for kind in ("weights", "frozen", "states"))


def _host_bytes(
    config: RunConfig, step: SimulatedStep, offloaded: int, step_tokens: int
) -> dict[str, int]:
    """Return the memory of a node with ranks and the driver."""
    num_ranks = min(config.trainer.num_ranks, GPUS_PER_NODE)
    copied = step.kept.get("weights", 0) + step.kept.get("states", 0)
    num_batches = config.rollout.max_staleness + 2  # in flight, in training, and being written
    parts = {
        "processes": int(PROCESS_BYTES) * (num_ranks + 1),
        "checkpoint copies": copied * num_ranks,
        "offloaded": (_kept_bytes(step) if config.trainer.colocate else offloaded) * num_ranks,
        "batches": TOKEN_BYTES * step_tokens * num_batches,
    }
    return {name: size for name, size in parts.items() if size}
