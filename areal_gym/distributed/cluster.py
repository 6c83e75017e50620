"""The Ray cluster of a run, and the run's places on it.

A run asks for all of its places at once, as one placement group: it has them all, or it does not
start. The group's bundles are made by `placement`; an actor that dies starts again in its place.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from areal_gym.config import RunConfig
from areal_gym.distributed.placement import (
    Bundle,
    Node,
    Role,
    arrange,
    by_node,
    describe_bundles,
    describe_nodes,
    num_ranks_of,
)
from areal_gym.errors import ConfigError, InfrastructureError
from areal_gym.utils.child_python import import_path

_PLACE_S = 600.0  # autoscaling clusters take minutes to grow
_PATIENCE_S = 5.0  # after that, the run says what it waits for
_NUM_STARTS = 3
_OBJECT_STORE_BYTES = 256 * 2**20
"""The object store of a local Ray: it holds trajectories and one set of weights in transit."""


@dataclass(slots=True)
class Cluster:
    """A run's places on a Ray cluster, by role and number."""

    device: str
    """The device of the ranks: "cpu", or an accelerator."""
    host: str
    """The address of this machine, as others see it."""
    _group: Any
    _bundles: list[Bundle]
    _environment: dict[str, str] = field(default_factory=dict)

    def options(self, role: Role, index: int, **environment: str) -> dict[str, Any]:
        """Return the actor options that place it, with environment variables for its process."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ((number, each),) = (
            (i, bundle.each)
            for i, bundle in enumerate(self._bundles)
            if bundle.role == role and index in bundle.members
        )
        variables = self._environment | environment
        return {
            "num_cpus": each["CPU"],
            "num_gpus": each.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=number
            ),
            **({"runtime_env": {"env_vars": variables}} if variables else {}),
        }


@asynccontextmanager
async def open_cluster(
    config: RunConfig,
    *,
    timeout_s: float = _PLACE_S,
    say: Callable[[str], object] = lambda line: None,
) -> AsyncIterator[Cluster | None]:
    """Open the settings' Ray cluster and reserve places on it; None without an address.

    `say` is told where ranks and servers are, and what is waited for.

    Raises:
        ConfigError: Ray is not installed.
        InfrastructureError: Ray does not answer, or has no free places.
    """
    address = config.cluster.address
    if address is None:
        yield None
        return
    try:
        import ray
    except ImportError:
        raise ConfigError(
            f"cluster.address = {address!r} needs Ray, which is not installed",
            hints=["pip install 'areal-gym[ray]'", "cluster.address=null does without"],
        ) from None
    was_there = ray.is_initialized()  # a caller's own Ray is kept
    is_local = address == "local"
    if not was_there:
        _connect(config)
    try:
        device = config.trainer.device
        if device == "auto":
            num_servers, gpus_each = config.cluster.servers, config.cluster.gpus_per_server
            num_gpus = config.trainer.num_ranks + num_servers * gpus_each
            device = "accelerator" if ray.cluster_resources().get("GPU", 0) >= num_gpus else "cpu"
        bundles = arrange(config, device, _nodes())
        group = await _reserve(bundles, timeout_s, say)
        try:
            bundles = by_node(bundles, _node_of_each(group))
            _tell_places(bundles, _node_of_each(group), say)
            yield Cluster(
                device=device,
                host="127.0.0.1" if is_local else ray.util.get_node_ip_address(),
                _group=group,
                _bundles=bundles,
                # The processes of our own Ray import what this one imports.
                _environment=import_path() if is_local else {},
            )
        finally:
            ray.util.remove_placement_group(group)
    finally:
        if not was_there:
            await asyncio.to_thread(ray.shutdown)


def _connect(config: RunConfig) -> None:
    import ray

    address = config.cluster.address
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's workers yield to every other process by default, but they are the run itself.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # One machine must do, for any number of processes.
        num_processes = num_ranks_of(config) + config.cluster.servers
        num_processes += config.cluster.rollout_workers
        options["num_cpus"] = max(os.cpu_count() or 1, num_processes)
        options |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    ours = signal.getsignal(signal.SIGTERM)
    try:
        for num_left in reversed(range(_NUM_STARTS)):
            try:
                ray.init(address=address, logging_level=logging.ERROR, **options)
                return
            except Exception as error:
                # A bare one says that a node of our own, on a busy machine, timed out.
                if type(error) is not Exception:
                    raise
                ray.shutdown()
                if not num_left:
                    raise RuntimeError(str(error)) from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InfrastructureError(
            f"no Ray at cluster.address = {address!r}: {error}",
            hints=["start one: ray start --head", "or cluster.address=local"],
        ) from error
    finally:
        if ours is not None and threading.current_thread() is threading.main_thread():
            # Ray's own handler ends the process on the spot; a run saves first.
            signal.signal(signal.SIGTERM, ours)


async def _reserve(
    bundles: Sequence[Bundle], timeout_s: float, say: Callable[[str], object]
) -> Any:
    import ray

    # Ranks talk to each other most, and come first: on few machines as long as there is room.
    group = ray.util.placement_group([bundle.resources for bundle in bundles], strategy="PACK")
    ready = asyncio.ensure_future(group.ready())
    try:
        async with asyncio.timeout(timeout_s):
            done, _ = await asyncio.wait([ready], timeout=_PATIENCE_S)
            if not done:
                say(f"waiting up to {timeout_s:g} s for places on Ray: {describe_bundles(bundles)}")
            await ready
    except TimeoutError:
        ready.cancel()
        ray.util.remove_placement_group(group)
        raise _no_room(bundles, timeout_s) from None
    return group


def _no_room(bundles: Sequence[Bundle], timeout_s: float) -> InfrastructureError:
    nodes = _nodes()
    there, free, wanted = Counter[str](), Counter[str](), Counter[str]()
    for node in nodes:
        there.update(node.total)
        free.update(node.free)
    for bundle in bundles:
        wanted.update(bundle.resources)
    sums = ", ".join(
        f"{number:g} {kind}s ({there[kind]:g} there are, {free[kind]:g} free)"
        for kind, number in wanted.items()
    )
    return InfrastructureError(
        f"Ray had no room within {timeout_s:g} s for: {sums}; that is "
        f"{describe_bundles(bundles)}; nodes: {describe_nodes(nodes)}",
        hints=[
            "lower cluster.rollout_workers, cluster.servers, cluster.gpus_per_server or "
            "trainer.num_ranks",
            "or add machines: ray start --address=HEAD:6379",
        ],
    )


def _nodes() -> list[Node]:
    """Return the machines that are alive; `ray.cluster_resources` has nothing for moments."""
    import ray

    free = ray._private.state.available_resources_per_node()
    return [
        Node(
            name=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _node_of_each(group: Any) -> list[str]:
    """Return the id of the node of each bundle of a group that is ready."""
    import ray

    table = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [table[number] for number in sorted(table)]


def _tell_places(
    bundles: Sequence[Bundle], node_of: Sequence[str], say: Callable[[str], object]
) -> None:
    """Tell where ranks and servers are, if they are on several machines."""
    import ray

    names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    places: dict[str, list[str]] = {}
    for bundle, node in zip(bundles, node_of, strict=True):
        if bundle.role != "worker":
            first, last = bundle.members[0], bundle.members[-1]
            which = f"{first}" if first == last else f"{first}-{last}"
            places.setdefault(node, []).append(f"{bundle.role} {which}")
    if len(set(node_of)) > 1:
        shown = (f"{names[node]}: {', '.join(what)}" for node, what in places.items())
        say(f"placed on {len(set(node_of))} machines: {'; '.join(shown)}")
