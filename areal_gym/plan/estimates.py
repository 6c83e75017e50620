"""Estimates seconds of a step from published peaks: a roofline, never a measurement.

Operations, bytes in memory and bytes between GPUs, over what the data sheets promise, times the
efficiencies below, which are assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal_gym.models.gpus import Gpu
from areal_gym.plan.operation_costs import Costs, Link
from areal_gym.plan.server_memory import ServerMemory

COMPUTE_EFFICIENCY = 0.4
"""Share of the peak operations that training reaches."""
MEMORY_EFFICIENCY = 0.6
"""Share of the memory bandwidth that generation and updates reach."""
LINK_EFFICIENCY = 0.7
"""Share of the bandwidth between GPUs that collectives reach."""
NETWORK_BANDWIDTH = 50e9
"""Bytes per second of each GPU to other nodes: InfiniBand or RoCE of 400 Gbit/s for each GPU."""
HOST_BANDWIDTH = 25e9
"""Bytes per second between a GPU and its host: PCIe 4.0."""
DISK_BANDWIDTH = 2e9
"""Bytes per second of files that trainer and servers share."""
GPUS_PER_NODE = 8
ATTENTION_PASSES = 3.5
"""Operations of attention in training over those of its forward pass: its backward pass computes
the scores again (FlashAttention-2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The work of one rank in a step."""

    costs: Costs
    attention_flops: float
    """Operations of attention in the forward pass."""
    num_looks: float
    """The number of passes without a gradient: of a reference, a proximal policy, a critic."""
    recomputes: bool
    updated_bytes: int
    """Weights, gradients and states, which every update reads and writes."""
    num_updates: int

    @property
    def computed_flops(self) -> float:
        """All operations of one rank."""
        passes = ATTENTION_PASSES + self.recomputes + self.num_looks
        return self.costs.flops + passes * self.attention_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Seconds of the parts of a step, and what limits each."""

    seconds: Mapping[str, float]
    limits: Mapping[str, str]
    """"compute", "memory bandwidth", "host bandwidth", "network" or "disk", by part."""

    @property
    def slowest(self) -> str:
        """The part that takes longest."""
        return max(self.limits, key=lambda part: self.seconds[part])


def transfer_seconds(link: Link, whole_bytes: float, gpu: Gpu) -> float:
    """Return the seconds of a collective.

    Rings over several nodes leave a node by the network cards of all its GPUs that take part; what
    goes from each rank to each other one uses the card of its own GPU.
    """
    if link.collective == "all-to-all":
        here = sum(rank < GPUS_PER_NODE for rank in link.ranks)
        share = whole_bytes / len(link.ranks)
        inside = share * (here - 1) / gpu.link_bandwidth
        outside = share * (len(link.ranks) - here) / NETWORK_BANDWIDTH
        return max(inside, outside) / LINK_EFFICIENCY
    nodes = {rank // GPUS_PER_NODE for rank in link.ranks}
    bandwidth = gpu.link_bandwidth
    if len(nodes) > 1:
        here = sum(rank < GPUS_PER_NODE for rank in link.ranks)
        bandwidth = min(bandwidth, here * NETWORK_BANDWIDTH)
    return link.sent_bytes(whole_bytes) / (LINK_EFFICIENCY * bandwidth)


def training_seconds(training: Training, gpu: Gpu, dtype: str) -> dict[str, float]:
    """Return seconds of products, updates and collectives of a rank's step."""
    peak = gpu.bfloat16_flops if dtype == "bfloat16" else gpu.float32_flops
    links = training.costs.bytes_by_link.items()
    moved = 2 * training.updated_bytes * training.num_updates
    return {
        "train": training.computed_flops / (COMPUTE_EFFICIENCY * peak),
        "update": moved / (MEMORY_EFFICIENCY * gpu.memory_bandwidth),
        "communicate": sum(transfer_seconds(link, size, gpu) for link, size in links),
    }


def generation_seconds(
    servers: ServerMemory,
    gpu: Gpu,
    *,
    step_tokens: float,
    tokens: float,
    max_in_flight: int,
    flops_per_token: float,
) -> tuple[float, str]:
    """Return seconds of sampling a step's tokens, and what limits it.

    For one token of each episode in flight a server reads its weights, and all their keys and
    values; prompts are not counted apart.
    """
    num_gpus = servers.num_servers * servers.gpus_per_server
    in_flight = max(1.0, min(max_in_flight / servers.num_servers, servers.cache_tokens / tokens))
    read = servers.weight_bytes + in_flight * tokens / 2 * servers.cache_bytes_per_token
    bandwidth = MEMORY_EFFICIENCY * gpu.memory_bandwidth * servers.gpus_per_server
    reading = step_tokens / servers.num_servers / in_flight * read / bandwidth
    flops = flops_per_token * step_tokens
    computing = flops / num_gpus / (COMPUTE_EFFICIENCY * gpu.bfloat16_flops)
    if computing > reading:
        return computing, "compute"
    return reading, "memory bandwidth"


def publication_seconds(num_bytes: float, weight_sync: str) -> tuple[float, str]:
    """Return seconds of a publication of so many bytes, and what limits it."""
    if weight_sync == "in-process":
        return 0.0, "memory bandwidth"
    if weight_sync == "disk":
        return 2 * num_bytes / DISK_BANDWIDTH, "disk"  # written, and read by servers
    return num_bytes / (LINK_EFFICIENCY * NETWORK_BANDWIDTH), "network"
