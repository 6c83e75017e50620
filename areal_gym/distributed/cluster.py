"""The Ray cluster of a run, and the run's places on it.

A run asks for all of its places at once, as one placement group: it has them all, or it does not
start. Each place is a bundle of the group; an actor that dies starts again in its place.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from areal_gym.config import RunConfig
from areal_gym.errors import ConfigError, InfrastructureError

Role = Literal["rank", "server", "worker"]

_PLACE_S = 600.0  # autoscaling clusters take minutes to grow
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
    _bundles: list[tuple[Role, Mapping[str, float]]]
    _environment: dict[str, str] = field(default_factory=dict)

    def options(self, role: Role, index: int, **environment: str) -> dict[str, Any]:
        """Return the actor options that place it, with environment variables for its process."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        numbers = [i for i, (name, _) in enumerate(self._bundles) if name == role]
        bundle = self._bundles[numbers[index]][1]
        variables = self._environment | environment
        return {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=numbers[index]
            ),
            **({"runtime_env": {"env_vars": variables}} if variables else {}),
        }


@asynccontextmanager
async def open_cluster(
    config: RunConfig, *, timeout_s: float = _PLACE_S
) -> AsyncIterator[Cluster | None]:
    """Open the settings' Ray cluster and reserve places on it; None without an address.

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
        bundles = _bundles_of(config, device)
        group = await _reserve([bundle for _, bundle in bundles], timeout_s)
        try:
            yield Cluster(
                device=device,
                host="127.0.0.1" if is_local else ray.util.get_node_ip_address(),
                _group=group,
                _bundles=bundles,
                # The processes of our own Ray import what this one imports.
                _environment={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
                if is_local
                else {},
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
        # One machine must do, for any number of processes.
        options["num_cpus"] = max(os.cpu_count() or 1, len(_bundles_of(config, "cpu")))
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


def _bundles_of(config: RunConfig, device: str) -> list[tuple[Role, Mapping[str, float]]]:
    cluster, trainer = config.cluster, config.trainer
    num_ranks = 0 if trainer.runs_in == "thread" else trainer.num_ranks
    wanted: tuple[tuple[Role, int, int], ...] = (
        ("rank", num_ranks, int(device != "cpu")),
        ("server", cluster.servers, cluster.gpus_per_server),
        ("worker", cluster.rollout_workers, 0),
    )
    return [
        (role, {"CPU": 1.0} | ({"GPU": float(num_gpus)} if num_gpus else {}))
        for role, number, num_gpus in wanted
        for _ in range(number)
    ]


async def _reserve(bundles: list[Mapping[str, float]], timeout_s: float) -> Any:
    import ray

    # Ranks talk to each other most, and come first: on one machine as long as there is room.
    group = ray.util.placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    try:
        async with asyncio.timeout(timeout_s):
            await group.ready()
    except TimeoutError:
        ray.util.remove_placement_group(group)
        # `ray.cluster_resources` has nothing for moments while groups come and go.
        there: Counter[str] = Counter()
        for node in ray.nodes():
            there.update(node["Resources"] if node["Alive"] else {})
        free = ray.available_resources()
        wanted: Counter[str] = Counter()
        for bundle in bundles:
            wanted.update(bundle)
        shown = ", ".join(
            f"{number:g} {kind}s ({there.get(kind, 0):g} there are, {free.get(kind, 0):g} free)"
            for kind, number in wanted.items()
        )
        raise InfrastructureError(
            f"Ray had no room within {timeout_s:g} s for: {shown}",
            hints=[
                "lower cluster.rollout_workers, cluster.servers or trainer.num_ranks",
                "or add machines: ray start --address=HEAD:6379",
            ],
        ) from None
    return group
