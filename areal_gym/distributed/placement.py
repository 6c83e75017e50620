"""Divide the processes of a run into bundles; Ray places each bundle on one node.

    ranks    a replica of the model (trainer.parallel: shard x context x tensor) is one bundle if a
             node has room for it, or else several bundles that fill nodes, so that mostly replicas
             exchange gradients between nodes, once per update
    servers  one bundle each, so that the GPUs of a server are on one node
    workers  one bundle each

Ranks are numbered in the order of the bundles, so neighbours, which exchange most, share a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from areal_gym.config import Layout, RunConfig
from areal_gym.utils.markup import counted

Role = Literal["rank", "server", "worker"]
Resources = Mapping[str, float]

_SHOWN_NODES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """Processes of one role that are placed on the same node."""

    role: Role
    members: tuple[int, ...]
    """The numbers of the processes: ranks, or indexes of servers or workers."""
    each: Resources
    """The resources of one process."""

    @property
    def resources(self) -> dict[str, float]:
        """The resources of all processes of the bundle."""
        return {kind: number * len(self.members) for kind, number in self.each.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """The resources of one machine of the cluster."""

    name: str
    total: Resources
    free: Resources


def arrange(config: RunConfig, device: str, nodes: Sequence[Node]) -> list[Bundle]:
    """Return the bundles of a run, ranks first.

    Replicas stay within nodes if they fit into the resources that are free now, or into all
    resources of the nodes. If only single ranks fit, each rank is a bundle.

    Args:
        config: the settings of the run.
        device: the device of the ranks: "cpu", or the name of an accelerator.
        nodes: the nodes of the cluster.
    """
    num_ranks = num_ranks_of(config)
    pieces = rank_pieces(config.trainer.layout, device, nodes) if num_ranks else []
    together = _bundles(config, device, pieces)
    apart = _bundles(config, device, [1] * num_ranks)
    free, total = ([dict(getattr(node, name)) for node in nodes] for name in ("free", "total"))
    options = ((together, free), (apart, free), (together, total), (apart, total))
    for bundles, resources in options:
        if fits(bundles, resources):
            return bundles
    return together  # the cluster may grow


def num_ranks_of(config: RunConfig) -> int:
    """Return the number of ranks that Ray places."""
    return 0 if config.trainer.runs_in == "thread" else config.trainer.num_ranks


def fits(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Return whether all bundles fit, placing the largest first, each on the first free node."""
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=_size, reverse=True):
        required = bundle.resources
        for node in free:
            if all(node.get(kind, 0.0) >= number for kind, number in required.items()):
                for kind, number in required.items():
                    node[kind] -= number
                break
        else:
            return False
    return True


def by_node(bundles: Sequence[Bundle], node_of: Sequence[str]) -> list[Bundle]:
    """Return the bundles with ranks renumbered, so that the ranks of a node are neighbours.

    Bundles of different sizes keep their ranks, because new ones would divide a replica.
    """
    places = [i for i, bundle in enumerate(bundles) if bundle.role == "rank"]
    if len({len(bundles[i].members) for i in places}) != 1:
        return list(bundles)
    nodes = list(dict.fromkeys(node_of))
    ordered = sorted(places, key=lambda i: (nodes.index(node_of[i]), i))
    numbered = list(bundles)
    for place, source in zip(ordered, places, strict=True):
        numbered[place] = bundles[source]
    return numbered


def describe_bundles(bundles: Sequence[Bundle]) -> str:
    """Return a description of the requested bundles; equal bundles are counted."""
    kinds = Counter(
        (bundle.role, len(bundle.members), tuple(sorted(bundle.resources.items())))
        for bundle in bundles
    )
    return ", ".join(
        f"{number} x {counted(size, role)} ({_shown(dict(wanted))} on one node)"
        for (role, size, wanted), number in kinds.items()
    )


def describe_nodes(nodes: Sequence[Node]) -> str:
    """Return a description of each node's total and free resources."""
    shown = [
        f"{node.name}: {_shown(node.total)}, free {_shown(node.free)}"
        for node in nodes[:_SHOWN_NODES]
    ]
    more = len(nodes) - _SHOWN_NODES
    return "; ".join([*shown, *([f"{more} more"] if more > 0 else [])]) or "none"


def _shown(resources: Resources) -> str:
    kinds = ("CPU", "GPU")
    words = [f"{resources.get(kind, 0):g} {kind}" for kind in kinds if resources.get(kind)]
    return " + ".join(words) or "nothing"


def _size(bundle: Bundle) -> tuple[float, float]:
    return bundle.resources.get("GPU", 0.0), bundle.resources["CPU"]


def _bundles(config: RunConfig, device: str, pieces: Sequence[int]) -> list[Bundle]:
    cluster = config.cluster
    bundles, begin = [], 0
    for size in pieces:
        members = tuple(range(begin, begin + size))
        bundles.append(Bundle(role="rank", members=members, each=_needs(int(device != "cpu"))))
        begin += size
    return [
        *bundles,
        *_alone("server", cluster.servers, cluster.gpus_per_server),
        *_alone("worker", cluster.rollout_workers, 0),
    ]


def _alone(role: Role, number: int, num_gpus: int) -> Iterator[Bundle]:
    for i in range(number):
        yield Bundle(role=role, members=(i,), each=_needs(num_gpus))


def _needs(num_gpus: int) -> dict[str, float]:
    return {"CPU": 1.0} | ({"GPU": float(num_gpus)} if num_gpus else {})


def rank_pieces(layout: Layout, device: str, nodes: Sequence[Node]) -> list[int]:
    """Return the number of ranks of each bundle, in the order of the ranks."""
    needs = _needs(int(device != "cpu"))
    rooms = [min(int(node.total.get(kind, 0) / n) for kind, n in needs.items()) for node in nodes]
    capacity = max(rooms, default=0)
    if not capacity:
        return [1] * layout.num_ranks  # no node can have a rank yet, so sizes are not known
    replica = layout.num_ranks // layout.replicate
    inner = layout.context * layout.tensor  # the ranks that compute the same rows
    piece = min(replica, capacity)
    if replica > capacity >= inner:
        piece -= piece % inner
    rest = replica % piece
    return [*[piece] * (replica // piece), *([rest] if rest else [])] * layout.replicate
