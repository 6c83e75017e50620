"""Says what to change where a run does not fit, as settings to type."""

from __future__ import annotations

from collections.abc import Iterator

from areal_gym.config import RunConfig, TrainerConfig
from areal_gym.plan.estimates import GPUS_PER_NODE
from areal_gym.plan.run_plan import RunPlan
from areal_gym.utils.markup import gigabytes


def advice(plan: RunPlan, config: RunConfig) -> Iterator[str]:
    """Yield what to change where ranks, servers or hosts find no room; nothing where they do."""
    if plan.rank_total > plan.room:
        yield from _for_ranks(plan, config)
    if plan.num_servers and not plan.cache_tokens:
        size = 2 * plan.gpus_per_server
        setting = f'engine.kwargs.server_args=["--tp-size","{size}"]'
        if config.cluster.servers:
            setting += f" cluster.gpus_per_server={size}"
        yield (
            f"a server's weights take {gigabytes(plan.server_weight_bytes)} GB of each of its "
            f"{plan.gpus_per_server} GPUs; more GPUs for each: {setting}"
        )
    if plan.node_bytes is not None and plan.host_bytes_per_node > plan.node_bytes:
        yield (
            f"a node's processes take {gigabytes(plan.host_bytes_per_node)} of its "
            f"{gigabytes(plan.node_bytes)} GB"
        )
        yield from _for_hosts(plan, config.trainer)


def _for_hosts(plan: RunPlan, trainer: TrainerConfig) -> Iterator[str]:
    if trainer.cpu_offload:
        yield "weights and states on the GPUs: trainer.cpu_offload=false"
    if 2 * plan.num_ranks > GPUS_PER_NODE:  # fewer would be processes of the same node
        num_ranks = 2 * plan.num_ranks
        yield f"more ranks, on more nodes, share the states: trainer.num_ranks={num_ranks}"
    if trainer.lora is None:
        if trainer.optimizer == "adamw":
            yield "optimizer states of a quarter of the size: trainer.optimizer=adamw_8bit"
        yield "an adapter needs hardly any states: trainer.lora={}"


def _for_ranks(plan: RunPlan, config: RunConfig) -> Iterator[str]:
    trainer, total = config.trainer, plan.rank_total
    room = gigabytes(plan.room)
    yield f"a rank takes {gigabytes(total)} GB of the {room} GB for tensors of a GPU"
    kept = sum(plan.rank_bytes.get(kind, 0) for kind in ("weights", "gradients", "states"))
    computed = sum(plan.rank_bytes.get(kind, 0) for kind in ("activations", "logits"))
    if kept > total / 3:
        yield f"more ranks divide weights and states: trainer.num_ranks={2 * plan.num_ranks}"
    if not trainer.recompute_layers:
        yield "computing layers twice keeps less: trainer.recompute_layers=true"
    smaller = trainer.tokens_per_microbatch // 2
    if computed > total / 10 and smaller >= config.engine.max_context:
        yield f"smaller micro-batches: trainer.tokens_per_microbatch={smaller}"
    if trainer.dtype == "float32":
        yield "activations of half the size: trainer.dtype=bfloat16"
    if not trainer.cpu_offload and kept > total / 3:
        yield "weights and states in the host's memory: trainer.cpu_offload=true"
    if trainer.lora is None:
        yield "an adapter needs hardly any gradients and states: trainer.lora={}"
